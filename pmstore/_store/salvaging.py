"""`salvage`: all that is sound in a damaged store goes into a new store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from pmstore._catalog import attributes, objects
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.copying import Contents, checked, copy_object, verified
from pmstore._catalog.growing import growing
from pmstore._catalog.kinds import ARRAY, BLOB, DERIVED, INLINE, LIST, OBJECT
from pmstore._catalog.names import (
    ATTRIBUTES_PREFIX,
    NAME_PREFIX,
    element_key,
    element_prefix,
    key_of,
    name_of,
    owner_of_attributes,
    split_element,
    stamp_key,
    value_key,
)
from pmstore._core import BLOCK, Core, Entry, Row
from pmstore._errors import UNSOUND, CorruptStoreError, NameConflictError, StoreLockedError
from pmstore._store.entrance import open_to_read
from pmstore._store.new_store import NewStore, refuse_taken, written_anew
from pmstore._store.opening import path_of
from pmstore._store.report import CheckReport, Problem, check
from pmstore._values.array import read_layout
from pmstore._values.values import decode

__all__ = ["salvage"]

_REPORTED = 1000  # problems; the core's check keeps no more


def salvage(src: str | bytes | os.PathLike[Any], dst: str | bytes | os.PathLike[Any]) -> CheckReport:
    """Copy all that is sound in a damaged store to a new store.

    Every content is verified against its hashes before it is copied. Of a damaged list, the elements before the first
    damaged one are copied; of an array that grows, the rows before the first damaged block; of a derived array, the
    declaration without a damaged value; of a value of a registered type (`pmstore.register`) that has a damaged part,
    nothing. Hashes cover blocks of 4 KiB: rows that share a damaged block with others, or with spare rows, are not
    copied. The new store is complete when it gets its name. The damaged store is not changed.

    Parameters
    ----------
    src : str, bytes or os.PathLike
        The damaged store. It need not open in another way, but needs a sound header and a sound log.
    dst : str, bytes or os.PathLike
        The new store, which must not exist.

    Returns
    -------
    CheckReport
        The problems of the damaged store, with the names that were left out, wholly or in part; `ok` if it was sound,
        and everything was copied. A problem without a name says what structure is damaged, between which names others
        may be missing, or that something may be older than the last commit.

    Raises
    ------
    StoreExistsError
        There is a file at dst, perhaps the damaged store itself.
    CorruptStoreError, NotAStoreError, FormatVersionError, StoreIOError
        The damaged store can't be opened at all.
    StoreLockedError, StoreNotFoundError, OutOfSpaceError, ReadOnlyStoreError
    """
    source, target = path_of(src), path_of(dst)
    refuse_taken(target, source, "the damaged store", "salvage writes a new store")
    try:
        store = open_to_read(source, salvage=True)
    except StoreLockedError as error:
        writer = f" by process {error.pid}" if error.pid else ""
        text = f"{source!r} is being written{writer}: salvage is for one that nobody writes, Store.backup for this one"
        locked = StoreLockedError(error.errno, text, source)
        locked.pid = error.pid
        raise locked from error
    with store:
        most = os.stat(source).st_size
        with written_anew(target) as new:
            return CheckReport(_Salvage(store._catalog, new, most).run())


class _Salvage:
    """most: bytes of all names and contents; a manipulated file could list the same ones again and again."""

    def __init__(self, source: Catalog, new: NewStore, most: int) -> None:
        self.source, self.new, self.left = source, new, most
        ends: list[bytes] = []
        report = check(source, ends)
        self.gaps = list(zip(ends[::2], ends[1::2]))  # keys between these may be missing
        self.problems = list(report)
        self.damaged = {problem.name for problem in report if problem.name is not None}
        # If the check could not report everything, even large arrays are verified in memory.
        self.contents = checked if len(report) + len(ends) < _REPORTED else verified

    def run(self) -> list[Problem]:
        for row in self._rows(NAME_PREFIX):
            name = None
            try:
                name = name_of(row.key)
                self.new.catalog.refuse_conflict(name, row.key)
                self._copy(name, row.key, row.entry)
            except (*UNSOUND, NameConflictError) as error:
                self._left_out(name, str(error))
        for row in self._rows(ATTRIBUTES_PREFIX):
            try:
                self._copy_attributes(row)
            except UNSOUND as error:
                text = f"the attributes of {_shown(row.key)}: {error}"
                if not any(str(problem).startswith(text.partition(":")[0]) for problem in self.problems):
                    self.problems.append(Problem(text))
        return self.problems

    def _copy_attributes(self, row: Row) -> None:
        """Copies the attributes of the store, and of names and groups that were copied (I38)."""
        name, catalog = owner_of_attributes(row.key), self.new.catalog
        attributes.decoded(self.source, row.entry)
        if not name or catalog.exists(key_of(name)):
            self._put(row.key, row.entry, verified)

    def _left_out(self, name: str | None, text: str) -> None:
        if name not in self.damaged:  # otherwise the check has a better text
            self.problems.append(Problem(text, name))

    def _copy(self, name: str, key: bytes, entry: Entry) -> None:
        core = self.source.core
        if entry.kind == LIST:
            self._copy_list(name, self.source.list_id(entry))
        elif entry.kind == OBJECT:
            self._copy_object(name, key, entry)
        elif entry.kind == DERIVED:
            self.source.declaration(name, entry)
            self._put(key, entry, verified)
            if name not in self.damaged:
                for part in (value_key(key), stamp_key(key)):  # I16: the stamp after the value
                    kept = core.get(part)
                    if kept is not None:
                        self._put(part, kept, self.contents)
                    elif self._may_be_missing(part, part + b"\0"):
                        self.problems.append(Problem("its value may be missing", name))
                        break
        elif name in self.damaged:
            self._copy_sound_rows(name, key, entry)
        elif entry.kind == ARRAY:
            read_layout(core, entry)
            self._put(key, entry, self.contents)
        else:
            self._put_value(key, entry)

    def _copy_sound_rows(self, name: str, key: bytes, entry: Entry) -> None:
        """Copies the rows of an array that grows that end before its first damaged block."""
        described = growing(entry)
        blocks = [problem.block for problem in self.problems if problem.name == name]
        if described is None or None in blocks:
            return
        first = min(block for block in blocks if block is not None)
        rows = described.shape[0]
        sound = min(rows, first * BLOCK // described.row)
        if sound or not rows:
            self._put(key, entry._replace(meta=described.with_rows(sound).meta), verified)
            left_out = f"its rows from number {sound} on are left out"
            self.problems.append(Problem("all of its rows are copied" if sound == rows else left_out, name))

    def _copy_list(self, name: str, list_id: int) -> None:
        made = self.new.catalog.create_list(name)._id
        i = 0
        try:
            for row in self.source.core.scan(element_prefix(list_id)):
                if f"{name}[{i}]" in self.damaged:
                    raise CorruptStoreError("it is damaged")
                if split_element(row.key) != (list_id, i) or row.entry.kind not in (INLINE, BLOB):
                    raise CorruptStoreError("it is missing")
                self._put_value(element_key(made, i), row.entry)
                i += 1
            if self._may_be_missing(element_key(list_id, i), element_prefix(list_id) + b"\xff" * 8):
                self.problems.append(Problem(f"any elements from number {i} on may be missing", name))
        except UNSOUND as error:
            self.problems.append(Problem(f"its elements from number {i} on are left out: {error}", name))

    def _copy_object(self, name: str, key: bytes, entry: Entry) -> None:
        """All of an object, or nothing."""
        for part, row in objects.rows(self.source, entry):
            if f"{name}[{part}]" in self.damaged:
                raise CorruptStoreError(f"its part {part!r} is damaged")
            self._count(row.key, row.entry)
        copy_object(self.new.catalog, key, self.source, entry, self.contents)

    def _put_value(self, key: bytes, entry: Entry) -> None:
        decode(self.source.encoded(entry), raw=True)
        self._put(key, entry, verified)

    def _put(self, key: bytes, entry: Entry, contents: Callable[[Core, Entry], Contents]) -> None:
        self._count(key, entry)
        self.new.put(key, entry, contents(self.source.core, entry))

    def _count(self, key: bytes, entry: Entry) -> None:
        self.left -= len(key) + len(entry.meta) + entry.length
        if self.left < 0:
            raise CorruptStoreError("the names so far have more contents than the file")

    def _may_be_missing(self, first: bytes, end: bytes) -> bool:
        """Whether keys from the first one on, and before the end, may be missing."""
        return any(behind < end and first < before for behind, before in self.gaps)

    def _rows(self, prefix: bytes) -> Iterator[Row]:
        """The rows of all names, or of attributes, that can be found."""
        what = "any names" if prefix == NAME_PREFIX else "any attributes"
        for behind, before in self.gaps:
            if behind[:1] <= prefix < before:
                text = f"{what}{_where('behind', prefix, behind)}{_where('before', prefix, before)} may be missing"
                self.problems.append(Problem(text))
        at = b""
        try:
            for row in self.source.core.scan(prefix):
                yield row
                at = row.key
        except UNSOUND as error:
            self.problems.append(Problem(f"{what}{_where('behind', prefix, at)} are left out: {error}"))


def _where(side: str, prefix: bytes, key: bytes) -> str:
    return f" {side} {_shown(key)}" if key.startswith(prefix) else ""


def _shown(key: bytes) -> str:
    return repr(key[1:].decode("utf-8", "backslashreplace").rstrip("\0"))
