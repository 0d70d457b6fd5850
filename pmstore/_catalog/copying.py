"""Copies of entries: within a store (copy of names), and into another store (compact, salvage); and renamed entries.

A new extent gets new hashes. Contents are therefore verified against their hashes at rest before they are copied:
otherwise the copy of a damaged array would count as sound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

from pmstore._catalog import attributes, objects
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.declaration import Declaration
from pmstore._catalog.growing import counted, trimmed, write_spare
from pmstore._catalog.kinds import ARRAY, BLOB, DERIVED, INLINE, LIST, OBJECT
from pmstore._catalog.names import (
    attributes_key,
    element_key,
    element_prefix,
    key_of,
    part_key,
    split_element,
    stamp_key,
    value_key,
)
from pmstore._core import Core, Entry, pointer_to
from pmstore._errors import UNSOUND, CorruptStoreError, Error, NameConflictError, of
from pmstore._interrupts import later

__all__ = ["Contents", "checked", "copy", "copy_object", "put_copy", "rename", "verified"]

_PIECE = 16 << 20  # bytes; more are not copied through memory at once

Contents = Generator[Any, None, None]  # of an extent, in pieces: buffers
Check = Callable[[str, Declaration], None]
Names = dict[str, str]  # the new name of each old one


def verified(core: Core, entry: Entry) -> Contents:
    """The contents of an entry's extent, in memory of their own, verified against their hashes at rest. Spare rows are
    left out: damage to them costs nothing."""
    count = counted(entry)
    if count == entry.length:
        yield core.contents(entry.offset, entry.length)
    else:
        core.verify(entry.offset, entry.length, count)
        yield bytearray(memoryview(core.buffer(entry.offset, entry.length, False))[:count])


def checked(core: Core, entry: Entry) -> Contents:
    """The same, for an entry in which `Core.check` has found no damage: large contents come in pieces, from the file's
    own pages.
    """
    end = counted(entry)
    if end <= _PIECE:
        yield from verified(core, entry)
        return
    live = memoryview(core.buffer(entry.offset, entry.length, False))
    for at in range(0, end, _PIECE):
        count = min(_PIECE, end - at)
        core.require_readable(entry.offset, entry.length, at, count)
        yield live[at : at + count]


def put_copy(catalog: Catalog, key: bytes, entry: Entry, contents: Contents) -> None:
    """Store an entry under a key, with a new extent if it has one. Spare rows of an array that grows are left out."""
    if not entry.offset:
        catalog.core.put(key, entry)
        return
    piece: Any = b""
    entry = trimmed(entry)
    with catalog.new_extent(entry.length) as offset, contextlib.closing(contents):
        at = 0
        try:
            for piece in contents:
                count = min(len(piece), entry.length - at)
                catalog.core.write(offset, at, pointer_to(piece), count)
                at += count
        finally:
            piece = b""  # an error's traceback would keep it, and closing its store would copy all of the array
        if at == counted(entry) < entry.length:
            write_spare(catalog.core, offset, at, entry.length)
        catalog.core.put(key, entry._replace(offset=offset))


def rename(catalog: Catalog, old: str, new: str, check: Check, group: str) -> list[str]:
    """See `Store.rename`. The names are full. check: called with the full name and the declaration of each derived
    array under its new name. group: that the caller's names are relative to, with its "/". Returns the full names that
    are gone.

    Entries move as they are, in one call. Declarations of derived arrays may change, so they are put before, and those
    under the old names are deleted after it.
    """
    with catalog.lock, later():
        pairs = _pairs(catalog, old, new, group)
        moved, declared = _moved(catalog, pairs)
        described = attributes.below(catalog, old)
        moved += [(attributes_key(name), attributes_key(new + name[len(old) :])) for name in described]
        ending = False
        try:
            for before in declared:
                _declare_under(catalog, pairs, before)
            _check_declarations(catalog, declared.values(), check)
            catalog.core.rename(moved)
            ending = True
            _end_rename(catalog, declared, moved)
            if attributes.any_in(catalog.core):
                attributes.sweep(catalog, old)
            return list(pairs)
        except BaseException:
            if ending or (moved and catalog.core.get(moved[0][0]) is None):  # it came after the call
                _end_rename(catalog, declared, moved)
                attributes.sweep(catalog, old)
            else:
                _delete_declarations(catalog, declared.values())
            raise


def copy(catalog: Catalog, old: str, new: str, check: Check, group: str) -> None:
    """See `Store.copy`. The parameters are those of `rename`."""
    with catalog.lock, later():
        pairs = _pairs(catalog, old, new, group)
        begun: list[str] = []
        try:
            for before, after in pairs.items():
                begun.append(after)
                try:
                    _copy_under(catalog, pairs, before, after)
                except UNSOUND as error:
                    raise of(before, error) from error
            _check_declarations(catalog, pairs.values(), check)
            for before in list(attributes.below(catalog, old)):
                entry = catalog.core.get(attributes_key(before))
                if entry is not None:
                    put_copy(catalog, attributes_key(new + before[len(old) :]), entry, verified(catalog.core, entry))
        except BaseException:
            for name in begun:
                with contextlib.suppress(Error):
                    catalog.delete(name)
            raise


def _pairs(catalog: Catalog, old: str, new: str, group: str) -> Names:
    """The names that get another one, which is free."""
    taken = key_of(new)
    catalog.writable()
    found = [old]
    if catalog.core.get(key_of(old)) is None:
        found = [f"{old}/{name}" for name in catalog.names(f"{old}/")]
    if not found:
        raise catalog.unknown(old[len(group) :], group)
    if f"{new}/".startswith(f"{old}/"):
        raise NameConflictError(f"{new!r} is {old!r} itself, or below it")
    if catalog.core.get(taken) is not None:
        raise NameConflictError(f"the name {new!r} is taken: delete it first")
    catalog.refuse_conflict(new, taken)
    pairs = {name: new + name[len(old) :] for name in found}
    for name in pairs.values():
        key_of(name)  # a name may become too long
    return pairs


def _moved(catalog: Catalog, pairs: Names) -> tuple[list[tuple[bytes, bytes]], Names]:
    """The old and new keys of the entries that move, and the old and new names of derived arrays."""
    core, moved, declared = catalog.core, [], {}
    for before, after in pairs.items():
        old, new = key_of(before), key_of(after)
        entry = core.get(old)
        if entry is None:
            raise catalog.unknown(before)
        if entry.kind == DERIVED:
            declared[before] = after
            moved += [(part(old), part(new)) for part in (value_key, stamp_key) if core.get(part(old)) is not None]
            continue
        if entry.kind == LIST:
            catalog.list_names.setdefault(catalog.list_id(entry), {}).update({before: None, after: None})
        moved.append((old, new))
    return moved, declared


def _declare_under(catalog: Catalog, pairs: Names, before: str) -> None:
    """Put the declaration of a derived array under its new name, too."""
    entry = catalog.core.get(key_of(before))
    if entry is None:
        raise catalog.unknown(before)
    declared = catalog.declaration(before, entry)
    # Of inputs that get new names by the same call, the new ones.
    inputs = tuple(None if name is None else pairs.get(name, name) for name in declared.inputs)
    catalog.put_declaration(key_of(pairs[before]), declared._replace(inputs=inputs))


def _check_declarations(catalog: Catalog, names: Iterable[str], check: Check) -> None:
    for name in names:
        entry = catalog.core.get(key_of(name))
        if entry is not None and entry.kind == DERIVED:
            check(name, catalog.declaration(name, entry))


def _end_rename(catalog: Catalog, declared: Names, moved: list[tuple[bytes, bytes]]) -> None:
    try:
        _delete_declarations(catalog, declared)
    finally:
        catalog.lost_updates.renamed(moved)


def _delete_declarations(catalog: Catalog, declared: Iterable[str]) -> None:
    for name in declared:
        catalog.core.delete(key_of(name))


def _copy_under(catalog: Catalog, pairs: Names, before: str, after: str) -> None:
    """Put the entry of a name, and all that belongs to it, under another name."""
    core, old, new = catalog.core, key_of(before), key_of(after)
    entry = core.get(old)
    if entry is None:
        raise catalog.unknown(before)
    if entry.kind == DERIVED:
        _declare_under(catalog, pairs, before)
        for part in (value_key, stamp_key):  # I16: the stamp after the value
            kept = core.get(part(old))
            if kept is not None:
                put_copy(catalog, part(new), kept, verified(core, kept))
    elif entry.kind == LIST:
        made = catalog.create_list(after)._id
        for i, row in enumerate(core.scan(element_prefix(catalog.list_id(entry)))):
            if split_element(row.key) != (catalog.list_id(entry), i):
                raise CorruptStoreError(f"the list lacks element {i}")
            put_copy(catalog, element_key(made, i), row.entry, verified(core, row.entry))
    elif entry.kind == OBJECT:
        copy_object(catalog, new, catalog, entry, verified)
    elif entry.kind not in (ARRAY, INLINE, BLOB):
        raise CorruptStoreError(f"an entry of the unknown kind {entry.kind}")  # other keys may belong to it
    else:
        put_copy(catalog, new, entry, verified(core, entry))


def copy_object(
    catalog: Catalog, key: bytes, source: Catalog, entry: Entry, contents: Callable[[Core, Entry], Contents]
) -> None:
    """Put a copy of an object under a key. source: the catalog that has the object."""
    found, head = objects.rows(source, entry), objects.head_of(entry)
    with objects.new_parts(catalog, key) as number:
        for i, (name, row) in enumerate(found):
            put_copy(catalog, part_key(number, i, name), row.entry, contents(source.core, row.entry))
        put_copy(catalog, key, entry._replace(meta=head._replace(id=number).meta()), verified(source.core, entry))
