"""Values of registered types that have arrays: every part has a catalog key of its own, so that arrays are live.

The entry of the name is an OBJECT. Its meta is msgpack of ``[id, number of parts, name of the type]``; the parts have
the keys ``o``, id, number, name of the part. (A value of a registered type without arrays is a plain value.)

I37: an object and its parts change together. All parts are encoded before one is written; they are written under an id
that no object has had; then one call gives the name its new entry and deletes what belonged to the old one. So each
part belongs to exactly one object, and an exception at any moment leaves the old value. A part that is a live array of
the old value is not written again: that call gives its entry the new id.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from pmstore._catalog.kinds import ARRAY, BLOB, INLINE, OBJECT
from pmstore._catalog.lost_updates import LARGEST, Form
from pmstore._catalog.names import OBJECT_PREFIX, object_prefix, part_key, split_part
from pmstore._catalog.undo import Undo
from pmstore._core import META_MAX, Entry, Row, hash64
from pmstore._display import name_text, size_text
from pmstore._errors import MALFORMED, UNSOUND, CorruptStoreError, DecodeError, in_part, of
from pmstore._values.array import Array, Layout, address_of, layout, order_of, read_layout
from pmstore._values.registry import NAME_MAX, Parts, made, named, part_title, parts_of, registered
from pmstore._values.types import is_text
from pmstore._values.values import decode, encode, type_name

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog

__all__ = [
    "Head",
    "Prepared",
    "check_parts",
    "get",
    "head_of",
    "id_of",
    "part",
    "parts",
    "prepared",
    "parts_under",
    "put",
    "read",
    "release",
    "rows",
]

Read = Callable[[bytes, str, Entry], Any]

_SHOWN = 6  # parts in a listing
_SLOW = 1 << 11  # bytes that take as long to encode as asking pandas


class Head(NamedTuple):
    """The meta of an object's entry."""

    id: int
    parts: int
    type_name: str

    def meta(self) -> bytes:
        return bytes(msgpack.packb(list(self)))


Prepared = tuple[str, list[tuple[str, Any]]]  # the type's name; by part's name, (Layout, Array) or (encoding, its type)


def head_of(entry: Entry) -> Head:
    """The decoded entry of an object. Raises CorruptStoreError."""
    try:
        head = Head(*msgpack.unpackb(entry.meta))
        sound = 0 < head.id < 1 << 64 and 0 <= head.parts < 1 << 32 and 0 < len(head.type_name.encode()) <= NAME_MAX
    except MALFORMED as error:
        raise CorruptStoreError(f"a damaged object: {error}") from error
    if not sound or not all(type(part) is kind for part, kind in zip(head, (int, int, str))):
        raise CorruptStoreError("a damaged object")
    return head


def id_of(entry: Entry) -> int | None:
    """The id of an object whose head may be damaged, so that it can be deleted; None if there is none."""
    with contextlib.suppress(Exception):
        number, _, _ = msgpack.unpackb(entry.meta)
        if type(number) is int and 0 < number < 1 << 64:
            return number
    return None


# ---- writing


def prepared(value: Any) -> Prepared | None:
    """All parts of a value, encoded; None if it is not of a registered type with arrays. Raises what `encode` of the
    type raises, and TypeError for a part that can't be stored."""
    found = parts_of(value)
    if found is None or not any(map(_is_live, found[1].values())):
        return None
    name, items = found
    out: list[tuple[str, Any]] = []
    for label, content in items.items():
        try:
            if _is_live(content):
                out.append((label, (layout(content.shape, content.dtype, order_of(content), True), content)))
            else:
                out.append((label, (encode(content), type_name(content))))
        except (TypeError, ValueError) as error:
            raise in_part(part_title(name, label), error) from error
    return name, out


def _is_live(part: Any) -> bool:
    return (type(part) is np.ndarray or type(part) is np.memmap) and not is_text(part.dtype)


def put(catalog: Catalog, key: bytes, contents: Prepared, gone: bytes) -> bytes:
    """Stores an object under a catalog key. gone: prefix of the keys that are deleted with the old value. A part that
    is a live array of the old value is moved, and stays live. Returns the meta of the object's entry."""
    name, items = contents
    live = _live_parts(catalog, key)
    moved: list[tuple[bytes, bytes]] = []
    with new_parts(catalog, key) as number:
        for i, (label, (one, other)) in enumerate(items):
            to = part_key(number, i, label)
            if not isinstance(one, Layout):
                catalog.put_encoded(to, one, other)
            elif (old := live.pop(_place(other), None)) is not None:
                moved.append((old.key, to))
                catalog.core.mark(old.entry.offset, old.entry.length)
            else:
                catalog.put_array(to, one, other)
        meta = Head(number, len(items), name).meta()
        catalog.core.put(key, Entry(0, 0, OBJECT, 0, meta), gone, moved)
    return meta


def _live_parts(catalog: Catalog, key: bytes) -> dict[Any, Row]:
    """The parts of an object whose arrays are alive, by their place in memory."""
    entry = catalog.core.get(key)
    found: dict[Any, Row] = {}
    if entry is not None and entry.kind == OBJECT:
        with contextlib.suppress(*UNSOUND):
            for _, row in rows(catalog, entry):
                array = catalog.live(row.entry)
                if array is not None and array.nbytes:
                    found[_place(array)] = row
    return found


def _place(array: Array) -> Any:
    return address_of(array), array.shape, array.strides, array.dtype


def new_parts(catalog: Catalog, key: bytes) -> Undo[int]:
    """A new id, under which the with block puts parts and, last, the object under a key. If that fails, the parts are
    deleted."""

    def take_back(number: int) -> None:
        entry = catalog.core.get(key)
        if entry is None or entry.kind != OBJECT or head_of(entry).id != number:  # an exception may come later
            for row in list(catalog.core.scan(object_prefix(number))):
                catalog.core.delete(row.key)

    return Undo(catalog.new_id, take_back)


# ---- reading


def rows(catalog: Catalog, entry: Entry) -> list[tuple[str, Row]]:
    """The name and the row of each part, in order. Raises CorruptStoreError unless all are there."""
    head = head_of(entry)
    found: list[tuple[str, Row]] = []
    for row in catalog.core.scan(object_prefix(head.id)):
        place = split_part(row.key)
        if place is None or place[:2] != (head.id, len(found)) or row.entry.kind not in (ARRAY, INLINE, BLOB):
            raise CorruptStoreError("an object has a part that is out of its place")
        found.append((place[2], row))
        if len(found) > head.parts:
            break
    if len(found) != head.parts or len({name for name, _ in found}) != head.parts:
        raise CorruptStoreError("an object lacks a part, or has one too many")
    return found


def parts(catalog: Catalog, what: str, entry: Entry, read: Read | None = None, *, raw: bool = True) -> Parts:
    """The parts of an object. read: gives a part instead of the catalog. raw: see `values.decode`."""

    try:
        found = rows(catalog, entry)
        head = head_of(entry)
    except UNSOUND as error:
        raise of(what, error) from error
    read = read or (lambda key, name, one: _value(catalog, key, name, one, raw))
    return Parts(head.type_name, {name: read(row.key, f"{what}[{name}]", row.entry) for name, row in found})


def part(catalog: Catalog, what: str, entry: Entry, name: str, number: int) -> Any:
    """One part of an object, without the others; None if it has none of this name and number."""
    try:
        key = part_key(head_of(entry).id, number, name)
    except UNSOUND as error:
        raise of(what, error) from error
    one = catalog.core.get(key)
    return None if one is None else _value(catalog, key, f"{what}[{name}]", one, True)


def _value(catalog: Catalog, key: bytes, name: str, one: Entry, raw: bool) -> Any:
    if one.kind == ARRAY:
        return catalog.value(key, name, one)
    try:
        return decode(catalog.encoded(one), raw=raw)
    except DecodeError:
        raise
    except UNSOUND as error:
        raise of(name, error) from error


def parts_under(catalog: Catalog, name: str, entry: Entry) -> Any:
    """The Parts of a value of a registered type; None of a list, an array or a derived array; another plain value."""
    if entry.kind == OBJECT:
        return parts(catalog, name, entry)
    if entry.kind not in (INLINE, BLOB):
        return None
    try:
        return decode(catalog.encoded(entry), raw=True)
    except UNSOUND as error:
        raise of(name, error) from error


def read(catalog: Catalog, what: str, entry: Entry, read: Read | None = None) -> Any:
    """The value of an object, made by its type's `decode`; a Parts if the type is not registered."""
    found = parts(catalog, what, entry, read, raw=False)
    return made(found.type_name, dict(found))


def get(catalog: Catalog, key: bytes, what: str, entry: Entry) -> Any:
    """The value of an object, for a user who may change it."""
    try:
        kept = None if catalog.read_only else named(head_of(entry).type_name)
    except UNSOUND as error:
        raise of(what, error) from error
    if kept is None or not kept.watched:
        return read(catalog, what, entry)
    outlines: dict[str, Any] = {}
    others: dict[str, bytes] = {}
    places: dict[str, Any] = {}

    def outlined(place: bytes, name: str, one: Entry) -> Any:
        found = _value(catalog, place, name, one, False)
        part = name[len(what) + 1 : -1]
        if one.kind == ARRAY:
            outlines[part], places[part] = _outline(found, None), _place(found)
        else:
            others[part] = catalog.encoded(one)
        return found

    value = read(catalog, what, entry, outlined if kept.made_of is None else None)
    kept = registered(type(value))
    if kept is not None and kept.watched:
        outline = functools.partial(compared, live=places if kept.made_of is None else None)

        def again(key: bytes) -> bytes:
            one = catalog.core.get(key)
            return b"" if one is None or one.kind != OBJECT else outline(read(catalog, what, one))

        if kept.made_of is not None:
            form = _form_by_objects(value, kept.made_of, outline, again)
        else:  # `encode` may take long, so it is called only when the value is checked
            form = Form(outline, _packed(kept.name, outlines, others), again)
        if kept.guarded is not None:
            kept.guarded(value, catalog.lost_updates.guards)
        catalog.lost_updates.handed_out(key, what, value, entry.meta, form)
    return value


def _form_by_objects(
    value: Any, made_of: Callable[[Any], list[Any]], whole: Callable[[Any], bytes], again: Callable[[bytes], bytes]
) -> Form:
    """Nothing, as long as a value is made of the same objects; otherwise its contents."""
    made = made_of(value)
    first = list(map(_brief, made))
    cost = _SLOW + sum(len(one) if isinstance(one, bytes) else 16 for one in made)

    def of(now: Any) -> bytes:
        objects = list(map(_brief, made_of(now)))
        same = len(objects) == len(first) and all(map(_same, objects, first))
        return b"" if same else whole(now)

    return Form(of, b"", again, cost)


def _brief(one: Any) -> Any:
    return hash64(one).to_bytes(8, "little") if isinstance(one, bytes) else one


def _same(now: Any, before: Any) -> bool:
    if now is before or (isinstance(now, bytes | tuple) and now == before):
        return True
    return isinstance(now, np.ndarray) and isinstance(before, np.ndarray) and _place(now) == _place(before)


def release(catalog: Catalog, entry: Entry) -> None:
    """See Store.release."""
    for _, row in rows(catalog, entry):
        if row.entry.kind == ARRAY and row.entry.offset:
            catalog.core.release(row.entry.offset, row.entry.length)


def compared(value: Any, live: Mapping[str, Any] | None = MappingProxyType({})) -> bytes:
    """The parts of an object that are compared to notice a lost update: all but the elements of its arrays that are
    live. Raises the errors of `encode`.

    live: the places of its arrays when it was read; None: none is live. Of an array in another place, the elements
    count, too.
    """
    name, items = parts_of(value) or ("", {})
    places = dict.fromkeys(items, ()) if live is None else live
    outlines = {part: _outline(one, places.get(part)) for part, one in items.items() if _is_live(one)}
    return _packed(name, outlines, {part: encode(one) for part, one in items.items() if part not in outlines})


def _packed(name: str, outlines: dict[str, Any], others: dict[str, bytes]) -> bytes:
    return bytes(msgpack.packb([name, outlines, others]))  # not nested deeper than a part may be


def _outline(array: Array, live: Any) -> Any:
    about = [list(array.shape), array.dtype.str]
    if live is None or not array.nbytes or _place(array) == live:
        return about
    return [*about, hash64(array.tobytes()) if array.nbytes <= LARGEST else None]


def about(catalog: Catalog, entry: Entry) -> tuple[int, str, str]:
    """The bytes of an object's parts, its type, and the parts as text, for a listing."""
    total, shown = 0, []
    for name, row in rows(catalog, entry):
        nbytes, text = row.entry.length or len(row.entry.meta), ""
        if row.entry.kind == ARRAY:
            described = read_layout(catalog.core, row.entry)
            nbytes, text = described.nbytes, f" {described.shape} {described.dtype}"
        total += nbytes
        shown.append(f"{name}{text} {size_text(nbytes)}")
    more = f", … {len(shown)} parts" if len(shown) > _SHOWN else ""
    return total, name_text(head_of(entry).type_name), name_text(", ".join(shown[:_SHOWN]) + more)


def check_parts(catalog: Catalog, owners: dict[int, tuple[str, Head]]) -> Iterator[tuple[str | None, Row, str]]:
    """Problems of parts: the name of the object if it is known, the row and a text. owners: the objects by id."""
    seen: dict[int, int] = {}
    for row in catalog.core.scan(OBJECT_PREFIX):
        place = split_part(row.key)
        owner = None if place is None else owners.get(place[0])
        name = None if owner is None or place is None else f"{owner[0]}[{place[2]}]"
        try:
            if place is None or owner is None or place[1] != seen.get(place[0], 0) or place[1] >= owner[1].parts:
                raise CorruptStoreError("a part of an object is out of its place (I37)")
            seen[place[0]] = place[1] + 1
            if row.entry.kind == ARRAY:
                read_layout(catalog.core, row.entry)
            else:
                decode(catalog.encoded(row.entry), raw=True)
        except UNSOUND as error:
            yield name, row, str(error)


assert META_MAX > NAME_MAX + 32
