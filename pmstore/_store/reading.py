"""Snapshots of a store that another process may be changing, for mode "r" and for `Store.read`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pmstore._catalog import objects
from pmstore._catalog.catalog import COMPUTED, MISSING, Catalog
from pmstore._catalog.growing import counted
from pmstore._catalog.kinds import ARRAY, OBJECT
from pmstore._catalog.lists import PersistentList
from pmstore._catalog.names import key_of
from pmstore._core import Core, Entry
from pmstore._errors import UNSOUND, DecodeError, DerivedArrayError, StaleSnapshotError, of
from pmstore._snapshot import Reader
from pmstore._values.array import Layout, address_of, read_layout

__all__ = ["Selection", "consistently", "copies", "copy_array", "read", "selections", "verify"]

_ATTEMPTS = 100

T = TypeVar("T")


class Selection(NamedTuple):
    """An argument of `Store.read`: the value of a name, or a part of an array."""

    name: str
    part: Any = None
    whole: bool = True


def selections(names: tuple[Any, ...], full: Callable[[Any], str]) -> list[Selection]:
    """The arguments of `Store.read`, checked. full: the full name of a name."""
    found = []
    for one in names:
        if isinstance(one, tuple):
            if len(one) != 2:
                raise TypeError("read() takes names, and pairs of a name and a part: ('w', np.s_[100:200])")
            found.append(Selection(full(one[0]), one[1], whole=False))
        else:
            found.append(Selection(full(one)))
    return found


def read(reader: Reader, asked: list[Selection], newest: Core | None) -> list[Any]:
    """Copies of values, all of the newest commit of the store that the reader follows. newest: a snapshot of it, if
    there is one.

    A commit that comes between the snapshot and a copy makes another snapshot necessary. That one copies the same
    arrays together with the log, so that later commits don't matter. Only of an array that each commit writes as a
    whole, into one of two places, a copy has to be done before the next commit but one.
    """
    wanted: list[tuple[int, int]] = []
    if newest is not None:
        with contextlib.suppress(StaleSnapshotError):
            return copies(newest, asked, wanted)

    def attempt() -> list[Any]:
        core = Core.of_snapshot(reader.take(wanted))
        try:
            return copies(core, asked, wanted)
        finally:
            core.close()

    return reader.patiently(attempt)


def consistently(look: Callable[[], T], refresh: Callable[[], object]) -> T:
    """The result of a function that reads one commit of a store. If a later commit has changed its data, the store goes
    to the newest commit, and the function is called again. Raises StaleSnapshotError after many times."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return look()
        except StaleSnapshotError:
            refresh()
    try:
        return look()
    except StaleSnapshotError as error:
        raise StaleSnapshotError("the store changes too quickly: try again when fewer commits come") from error


def verify(catalog: Catalog, name: str) -> None:
    """Verify the committed contents of an array that was read: those that are mapped, such as with writeable=False, are
    read unverified. Raises CorruptStoreError, StoreIOError."""
    with catalog.lock:
        entry = catalog.core.get(key_of(name))
        if entry is None or entry.kind != ARRAY or not entry.offset:
            return
        try:
            catalog.core.verify(entry.offset, entry.length, counted(entry))
        except UNSOUND as error:
            raise of(name, error) from error


def copies(core: Core, asked: list[Selection], wanted: list[tuple[int, int]]) -> list[Any]:
    """Copies of values in a snapshot. wanted: as for `copy_array`."""
    catalog = Catalog(core, read_only=True)
    last = None  # several parts of an array in Fortran order, one after the other, are parts of one copy
    found = []
    for one in asked:
        entry = core.get(key_of(one.name))
        if entry is not None and entry.kind == ARRAY and entry.offset:
            if last is None or last.entry != entry:
                last = _Copier(core, entry, wanted)
            found.append(last.part(one))
        else:
            found.append(_copy(catalog, one, entry, wanted))
    return found


def _copy(catalog: Catalog, one: Selection, entry: Entry | None, wanted: list[tuple[int, int]]) -> Any:
    if entry is not None and entry.kind == OBJECT:

        def part(key: bytes, name: str, kept: Entry) -> Any:
            if kept.kind != ARRAY or not kept.offset:
                return catalog.value(key, name, kept)
            return copy_array(catalog.core, kept, Selection(name), wanted)

        try:
            value = objects.read(catalog, one.name, entry, part)
        except DecodeError as error:
            raise DecodeError(f"{one.name!r}: {error}") from error
        return value if one.whole else value[one.part]
    value = catalog.get(one.name)
    if value is MISSING:
        raise catalog.unknown(one.name)
    if value is COMPUTED:
        raise DerivedArrayError(one.name, "is derived: declare it with store.derive, and read store[name]")
    if isinstance(value, PersistentList):
        value = list(value)
    if not one.whole:
        value = value[one.part]
    return np.array(value) if isinstance(value, np.ndarray) else value


def copy_array(core: Core, entry: Entry, one: Selection, wanted: list[tuple[int, int]]) -> Any:
    """A copy of an array with elements in a snapshot, or of a part of one. wanted: places and lengths of the contents
    that the caller's next snapshot copies; that of the array is added. Raises StaleSnapshotError, CorruptStoreError."""
    return _Copier(core, entry, wanted).part(one)


class _Copier:
    """Copies parts of an array with elements in a snapshot, whose rows it copies once if parts need the same ones."""

    def __init__(self, core: Core, entry: Entry, wanted: list[tuple[int, int]]) -> None:
        self.entry = entry
        self._core, self._described = core, read_layout(core, entry)
        if (entry.offset, entry.length) not in wanted:
            wanted.append((entry.offset, entry.length))
        self._rows: slice | None = None
        self._copied = np.empty(0)

    def part(self, one: Selection) -> Any:
        """What `copy_array` returns."""
        rows, rest = (slice(None), None) if one.whole else _rows(one.part, self._described)
        fresh = rows != self._rows
        if fresh:
            self._copied, self._rows = self._copy_of(rows), rows
        found = self._copied if rest is None else self._copied[rest]
        if isinstance(found, np.void):
            return found.copy()  # it is a view, too
        if not isinstance(found, np.ndarray) or not np.may_share_memory(found, self._copied):
            return found
        if fresh and found.nbytes == self._copied.nbytes:
            return found
        return np.array(found)  # a view keeps all of it alive

    def _copy_of(self, rows: slice) -> Any:
        described = self._described
        start, stop, _ = rows.indices(described.shape[0]) if described.shape else (0, 1, 1)
        axis = (max(stop - start, 0), *described.shape[1:]) if described.shape else ()
        dtype = described.dtype if described.dtype.names is None else np.dtype(described.dtype, copy=True)
        out = np.empty(axis, dtype, order="F" if described.order == "F" else "C")
        row = described.nbytes // described.shape[0] if described.shape and described.shape[0] else described.nbytes
        if out.nbytes:
            self._core.snapshot.copy(self.entry.offset, self.entry.length, start * row, address_of(out), out.nbytes)
        return out


def _rows(part: Any, described: Layout) -> tuple[slice, Any]:
    """The rows that a part of an array needs, and the index into them. All rows, unless a slice or a number of the
    first axis of an array in C order says less."""
    if isinstance(part, str) or (isinstance(part, list) and part and isinstance(part[0], str)):
        return slice(None), part  # fields
    parts = part if isinstance(part, tuple) else (part,)
    if not described.shape or described.order == "F" or not parts:
        return slice(None), parts
    first = parts[0]
    length = described.shape[0]
    if isinstance(first, slice) and first.step in (None, 1):
        start, stop, _ = first.indices(length)
        return slice(start, max(start, stop)), (slice(None), *parts[1:])
    if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
        number = operator.index(first)
        if -length <= number < length:
            return slice(number % length, number % length + 1), (0, *parts[1:])
    return slice(None), parts
