"""Persistent lists: every element has a catalog key of its own, so that appending changes one leaf."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, overload

from pmstore._catalog.kinds import BLOB, INLINE, LIST
from pmstore._catalog.names import INDEX_MAX, LIST_PREFIX, element_key, element_prefix, key_of, split_element
from pmstore._catalog.undo import Undo
from pmstore._core import META_MAX, Entry
from pmstore._errors import CorruptStoreError, Error, UnknownNameError
from pmstore._interrupts import later
from pmstore._values.values import encode, type_name

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog

__all__ = ["PersistentList", "count_elements"]

_SHOWN = 8  # elements in a repr
_AHEAD = 64  # elements that iteration reads at once


class PersistentList(MutableSequence[Any]):
    """A list in a store. `append` and `pop` at the end take O(1), one element can be read alone, and changes are part
    of transactions.

    `Store.create_list` makes it, and ``store[name]`` returns it from then on. Elements can be all values that a store
    keeps; they are read back as plain copies, numpy arrays too. Inserting and deleting at other places than the end
    take O(n), and move no contents. A change happens as a whole or, if it raises, not at all.

    When its name is deleted or given another value, or its creation is rolled back, using it raises UnknownNameError (a
    KeyError). Reading raises CorruptStoreError if the file is damaged. Changing raises TypeError for an element that
    can't be stored, ReadOnlyStoreError, OutOfSpaceError.
    """

    __slots__ = ("_catalog", "_id", "_keeper", "_name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, catalog: Catalog, name: str, list_id: int) -> None:
        self._catalog, self._keeper = catalog, catalog.keeper()
        self._name = name
        self._id = list_id

    @property
    def name(self) -> str:
        """The full name in the store."""
        with contextlib.suppress(Error), self._catalog.lock:
            self._live()
        return self._name

    def is_stored_as(self, catalog: Catalog, list_id: int) -> bool:
        """Whether this is the list with that id in that store."""
        return self._catalog is catalog and self._id == list_id

    # ---- reading

    def __len__(self) -> int:
        with self._catalog.lock:
            self._live()
            return self._catalog.list_length(self._id)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """The element, or a plain list of the elements in a slice. Raises IndexError if there is none."""
        index = _plain(index)
        with self._catalog.lock:
            length = len(self)
            if isinstance(index, slice):
                first, last, step = index.indices(length)
                if step == 1:
                    return self._elements(first, last)
                return [self._element(i) for i in range(first, last, step)]
            return self._element(_place(index, length))

    def __iter__(self) -> Iterator[Any]:
        """The elements. Elements changed during the iteration may appear or not."""
        return self._from(0)

    def _from(self, start: int) -> Iterator[Any]:
        while ahead := self[start : start + _AHEAD]:
            yield from ahead
            start += len(ahead)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PersistentList) and self._catalog is other._catalog and self._id == other._id:
            return True
        if not isinstance(other, (PersistentList, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a PersistentList of an open store can't be pickled or copied; list(it) copies what it holds")

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The first index of the value. Raises ValueError if it isn't in the list."""
        first, last, _ = slice(start, stop).indices(len(self))
        for i, element in zip(range(first, last), self._from(first)):
            if element is value or element == value:
                return i
        raise ValueError(f"{value!r:.80} is not in the list {self._name!r}")

    def __repr__(self) -> str:
        try:
            length = len(self)
            shown = ", ".join(map(repr, self[:_SHOWN]))
        except Error as error:
            return f"<PersistentList {self._name!r}: {error}>"
        more = f", ... {length:,} in all" if length > _SHOWN else ""
        return f"<PersistentList {self._name!r}: [{shown}{more}]>"

    # ---- changing

    @overload
    def __setitem__(self, index: int, value: Any) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[Any]) -> None: ...
    def __setitem__(self, index: int | slice, value: Any) -> None:
        """Replaces an element, or those of a slice, like a list."""
        index = _plain(index)
        if not isinstance(index, slice):
            encoded = encode(value)
            with self._catalog.lock, later():
                self._catalog.writable()
                self._put(_place(index, len(self)), encoded, type_name(value))
                if self._catalog.lost_updates:
                    self._catalog.lost_updates.assigned(value, encoded)
            return
        values = [(encode(v), type_name(v)) for v in value]
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            first, last, step = index.indices(length)
            places = range(first, last, step)
            if step == 1:
                self._splice(length, first, len(places), values)
                return
            if len(places) != len(values):
                raise ValueError(
                    f"attempt to assign sequence of size {len(values)} to extended slice of size {len(places)}"
                )
            if places:
                given = dict(zip(places, values))
                between = range(min(places), max(places) + 1)
                self._splice(length, between.start, len(between), [given.get(i, i) for i in between])

    def __delitem__(self, index: int | slice) -> None:
        """Deletes an element, or those of a slice; the elements after it move up."""
        wanted = _plain(index)
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            gone = range(*wanted.indices(length)) if isinstance(wanted, slice) else [_place(wanted, length)]
            if gone:
                between = range(min(gone), max(gone) + 1)
                self._splice(length, between.start, len(between), [i for i in between if i not in gone])

    def insert(self, index: int, value: Any) -> None:
        """Inserts before an index, like list.insert: O(1) at the end, O(n) elsewhere."""
        number, part = _plain(index), (encode(value), type_name(value))
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            self._splice(length, max(0, number + length) if number < 0 else min(number, length), 0, [part])

    def append(self, value: Any) -> None:
        """Adds an element at the end, in O(1)."""
        part = encode(value), type_name(value)
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            self._splice(length, length, 0, [part])

    def extend(self, values: Iterable[Any]) -> None:
        """Adds elements at the end; none of them if one can't be stored."""
        parts = [(encode(value), type_name(value)) for value in values]
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            self._splice(length, length, 0, parts)

    def pop(self, index: int = -1) -> Any:
        """Removes an element and returns it, in O(1) at the end. Raises IndexError if there is none."""
        index = _plain(index)
        with self._catalog.lock, later():
            value = self[index]
            del self[index]
            self._catalog.lost_updates.taken(value)
            return value

    def clear(self) -> None:
        """Deletes all elements."""
        del self[:]

    def reverse(self) -> None:
        """Reverses the elements in place."""
        with self._catalog.lock, later():
            self._catalog.writable()
            length = len(self)
            self._splice(length, 0, length, range(length - 1, -1, -1))

    # ---- the elements

    def _live(self) -> None:
        for name in (self._name, *self._catalog.list_names.get(self._id, ())):
            entry = self._catalog.core.get(key_of(name))
            if entry is not None and entry.kind == LIST and self._catalog.list_id(entry) == self._id:
                self._name = name
                return
        raise UnknownNameError(self._name, lambda: ": this persistent list was deleted, replaced or rolled back")

    def _element(self, i: int) -> Any:
        key = element_key(self._id, i)
        what = f"{self._name}[{i}]"
        entry = self._catalog.core.get(key)
        if entry is None or entry.kind not in (INLINE, BLOB):
            raise CorruptStoreError(f"{what!r}: the list lacks an element")
        return self._catalog.value(key, what, entry)

    def _elements(self, first: int, last: int) -> list[Any]:
        """The elements from first to last - 1."""
        out: list[Any] = []
        after = element_key(self._id, first - 1) if first else None
        for i, row in zip(range(first, last), self._catalog.core.scan(element_prefix(self._id), after)):
            if split_element(row.key) != (self._id, i) or row.entry.kind not in (INLINE, BLOB):
                raise CorruptStoreError(f"'{self._name}[{i}]': the list lacks an element")
            out.append(self._catalog.value(row.key, f"{self._name}[{i}]", row.entry))
        if len(out) != max(0, last - first):
            raise CorruptStoreError(f"{self._name!r}: the list lacks elements")
        return out

    def _put(self, i: int, encoded: bytes, kind: str) -> None:
        self._catalog.put_encoded(element_key(self._id, i), encoded, kind)

    def _splice(self, length: int, start: int, removed: int, new: Sequence[tuple[bytes, str] | int]) -> None:
        """Replace elements from `start` on by new ones: encodings with their types, or numbers of elements that are
        removed and stay in the list elsewhere. All of it happens, or nothing (I41). length: of the list before."""
        if not removed and not new:
            return
        catalog = self._catalog
        large = max([0 if isinstance(part, int) else len(part[0]) for part in new], default=0) > META_MAX
        entries: list[Entry | int] = []
        with Undo(lambda: entries, self._discard) if large else contextlib.nullcontext():
            for part in new:
                entries.append(part if isinstance(part, int) else self._entry(*part))
            catalog.core.splice(element_prefix(self._id), start, removed, entries)
        if removed != len(new):
            if start < length and catalog.lost_updates.seen:
                catalog.lost_updates.shifted(self._id, range(start, length))
        elif moved := {part for to, part in enumerate(new, start) if isinstance(part, int) and part != to}:
            catalog.lost_updates.shifted(self._id, moved)

    def _entry(self, encoded: bytes, kind: str) -> Entry:
        """The entry of a new element, which may own a new extent, and has no key yet."""
        if len(encoded) <= META_MAX:
            return Entry(0, 0, INLINE, 0, encoded)
        with self._catalog.new_extent(len(encoded)) as offset:
            self._catalog.core.write(offset, 0, encoded, len(encoded))
        return Entry(offset, len(encoded), BLOB, 0, kind.encode())

    def _discard(self, entries: Sequence[Entry | int]) -> None:
        """Frees the extents of new elements that got no key."""
        for entry in entries:
            if isinstance(entry, Entry) and entry.offset:
                with contextlib.suppress(Error):
                    self._catalog.core.free(entry.offset, entry.length)


def count_elements(catalog: Catalog, most: int) -> int | None:
    """The number of elements of each list, from its first and last key; None if there are more lists than `most`."""
    elements = 0
    row = catalog.core.first(LIST_PREFIX)
    while row is not None:
        place = split_element(row.key)
        if place is None:
            raise CorruptStoreError("a damaged list")
        if not most:
            return None
        most -= 1
        elements += catalog.list_length(place[0])
        row = catalog.core.first(LIST_PREFIX, after=element_key(place[0], INDEX_MAX))
    return elements


def _place(number: int, length: int) -> int:
    i = number + length if number < 0 else number
    if not 0 <= i < length:
        raise IndexError(f"list index {number} is out of range: it has {length} elements")
    return i


def _plain(index: Any) -> Any:
    """An index or a slice with plain numbers. To convert them may run code of the program, which may change the
    list."""
    if isinstance(index, slice):
        return slice(
            *(None if part is None else operator.index(part) for part in (index.start, index.stop, index.step))
        )
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(f"list indices are int or slices, not {type(index).__name__}") from None
