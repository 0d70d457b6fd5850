"""Names and their values, on top of the core. This package knows no files, no locks between processes, no
transactions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._catalog import attributes, growing, listing, objects
from pmstore._catalog import names as _names
from pmstore._catalog.declaration import Declaration
from pmstore._catalog.kinds import ARRAY, BLOB, DERIVED, INLINE, LIST, OBJECT
from pmstore._catalog.lists import PersistentList, count_elements
from pmstore._catalog.live import LiveArrays
from pmstore._catalog.lost_updates import LostUpdates
from pmstore._catalog.names import ATTRIBUTES_PREFIX, DERIVED_PREFIX, NAME_PREFIX, OBJECT_PREFIX, key_of, name_of
from pmstore._catalog.rows import filling
from pmstore._catalog.undo import Undo
from pmstore._core import FIXED, META_MAX, Core, Entry
from pmstore._errors import (
    UNSOUND,
    CorruptStoreError,
    DecodeError,
    ForkedStoreError,
    NameConflictError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    StaleSnapshotError,
    TransactionError,
    UnknownNameError,
    of,
)
from pmstore._interrupts import later
from pmstore._values.array import Array, Layout, address_of, chunks, live_array, read_layout
from pmstore._values.dtypes import descriptor_of, require_lengths
from pmstore._values.tensors import array_of_tensor, is_tensor
from pmstore._values.types import is_text
from pmstore._values.values import PLAIN, decode, encode, has_containers, type_name

if TYPE_CHECKING:
    from pmstore._locks import Lock

__all__ = ["COMPUTED", "MISSING", "Catalog"]

MISSING = object()
COMPUTED = object()

_DIRECT_FROM = 1 << 18  # bytes; for a smaller array, the saving is not worth a second place in the file


class Catalog:
    """The names of one open store. Thread-safe: every method holds the core's lock."""

    __slots__ = (
        "__weakref__",
        "_live",
        "_next_list",
        "_shadowed",
        "core",
        "grown",
        "importing",
        "inherited",
        "keeper",
        "list_names",
        "lock",
        "lost_updates",
        "read_only",
        "rollbacks",
    )

    def __init__(self, core: Core, read_only: bool) -> None:
        self.core = core
        self.lock = core.lock
        self.read_only = read_only
        self.importing = False  # in a thread that holds the lock
        self.inherited = False  # in a fork of the process that wrote the store
        stored = weakref.WeakMethod(self._stored)  # no cycle: a snapshot's memory goes with its last catalog
        self.lost_updates = LostUpdates(lambda key: found(key) if (found := stored()) else None)
        self.keeper: Callable[[], object] = lambda: None  # the store; lists and attributes keep it open
        # By offset of the extent. A detached array whose place has a new owner has a key below 0, see new_extent.
        self._live = LiveArrays()
        self._shadowed: set[int] = set()  # offsets of arrays that may be alive although `_live` doesn't know them
        self.list_names: dict[int, dict[str, None]] = {}  # by id of a list that was renamed, the names that it had
        self.grown = growing.Grown()
        self.rollbacks = 0  # the number of rollbacks
        self._next_list = 0  # the next id; ids whose creation was rolled back are not used again

    # ---- reading

    def get(self, name: str) -> Any:
        """The value, or MISSING. COMPUTED for a derived array: `DerivedArrays` has its value."""
        key = key_of(name)
        with self.lock:
            entry = self.core.get(key)
            if entry is None:
                return MISSING
            return COMPUTED if entry.kind == DERIVED else self.value(key, name, entry)

    def parts(self, name: str) -> Any:
        """See `objects.parts_under`; MISSING if there is no such name."""
        with self.lock:
            entry = self.core.get(key_of(name))
            return MISSING if entry is None else objects.parts_under(self, name, entry)

    def part(self, name: str, part: str, number: int) -> Any:
        """One part of an object; None if it has none of this name and number."""
        with self.lock:
            entry = self.core.get(key_of(name))
            return None if entry is None or entry.kind != OBJECT else objects.part(self, name, entry, part, number)

    def layout_of(self, name: str) -> Layout:
        """The layout of an array."""
        with self.lock:
            entry = self.core.get(key_of(name))
            if entry is None:
                raise self.unknown(name)
            try:
                return read_layout(self.core, entry)
            except UNSOUND as error:
                raise of(name, error) from error

    def declaration(self, name: str, entry: Entry) -> Declaration:
        """The declaration in the entry of a derived array."""
        try:
            return Declaration.decode(self.encoded(entry))
        except UNSOUND as error:
            raise of(name, error) from error

    def value(self, key: bytes, what: str, entry: Entry) -> Any:
        """The value of an entry; `what` names it in messages."""
        try:
            if entry.kind == ARRAY:
                return self._array(entry, read_layout(self.core, entry))
            if entry.kind == LIST:
                return PersistentList(self, what, self.list_id(entry))
            if entry.kind == OBJECT:
                return objects.get(self, key, what, entry)
            encoded = self.encoded(entry)
            value = decode(encoded)
        except UNSOUND as error:
            raise of(what, error) from error
        except DecodeError as error:
            raise DecodeError(f"{what!r}: {error}") from error
        except StaleSnapshotError as error:
            raise StaleSnapshotError(
                f"{what!r}: {error}; refresh() goes to the newest commit, and read() copies several arrays of one"
            ) from None
        if not self.read_only and has_containers(value):
            self.lost_updates.handed_out(key, what, value, encoded)
        return value

    def encoded(self, entry: Entry) -> bytes:
        """The encoding of an inline value, a blob or a declaration, verified."""
        if entry.kind == INLINE or (entry.kind == DERIVED and not entry.offset):
            return entry.meta
        if entry.kind == DERIVED:
            return self.core.read(entry.offset, entry.length)
        if entry.kind == BLOB:
            return self.core.read(entry.offset, entry.length) if entry.offset else b""  # no value is b""
        raise CorruptStoreError(f"an entry of the unknown kind {entry.kind}")

    def list_id(self, entry: Entry) -> int:
        if len(entry.meta) != 8:
            raise CorruptStoreError("a damaged list")
        return int.from_bytes(entry.meta, "little")

    def names(self, prefix: str = "") -> Iterator[str]:
        """Names that start with prefix, in order, without the prefix. Names changed during the iteration may appear
        or not. The iteration keeps the store open."""
        return self._names(prefix, self.keeper())

    def _names(self, prefix: str, keeper: object) -> Iterator[str]:
        for row in self.core.scan(NAME_PREFIX + prefix.encode()):
            yield name_of(row.key)[len(prefix) :]

    def count(self, prefix: str = "") -> int:
        """The number of names that start with prefix."""
        if not prefix:
            with contextlib.suppress(*UNSOUND), self.lock:
                keys = self.core.count_keys()
                keys -= sum(self.core.get(key) is not None for key in _names.HIDDEN_KEYS)
                for hidden in (ATTRIBUTES_PREFIX, DERIVED_PREFIX, OBJECT_PREFIX):
                    if self.core.first(hidden) is not None:
                        keys -= sum(1 for _ in self.core.scan(hidden))
                if (elements := count_elements(self, keys // 8)) is not None:
                    return max(0, keys - elements)
        return sum(1 for _ in self.core.scan(NAME_PREFIX + prefix.encode()))

    def _array(self, entry: Entry, described: Layout) -> Array:
        writeable = described.writeable and not self.read_only
        if not entry.offset:
            return live_array(bytearray(), described, writeable)
        array = self._live.get(entry.offset)
        if array is None or not described.fits(array):
            if array is not None:
                self._shadowed.add(entry.offset)
                self._live[-id(array)] = array  # close() still has to find it
            array = self._fresh(entry, described)
            self._live[entry.offset] = array
        return array

    def live(self, entry: Entry) -> Array | None:
        """The live array over an entry's extent, if there is one."""
        return self._live.get(entry.offset) if entry.kind == ARRAY and entry.offset else None

    def _fresh(self, entry: Entry, described: Layout) -> Array:
        writeable = described.writeable and not self.read_only
        fixed = not described.writeable and bool(entry.flags & FIXED)
        buffer = self.core.buffer(entry.offset, entry.length, writeable, fixed)
        return live_array(buffer, described, writeable)

    def _stored(self, key: bytes) -> bytes | None:
        if key[:1] == ATTRIBUTES_PREFIX:
            return attributes.stored(self, key)
        entry = self.core.get(key)
        if entry is not None and entry.kind == OBJECT:
            return entry.meta
        return None if entry is None or entry.kind not in (INLINE, BLOB) else self.encoded(entry)

    # ---- writing

    def set(self, name: str, value: Any) -> None:
        """Copies the value into the store: into the existing array if shape, dtype and order are the same."""
        key = key_of(name)
        if (type(value) is np.ndarray or type(value) is np.memmap) and not is_text(value.dtype):
            with self.lock, later():
                self._set_array(key, name, value)
            return
        if isinstance(value, PersistentList):
            with self.lock:
                self.writable()
                entry = self.core.get(key)
                if entry is not None and entry.kind == LIST and value.is_stored_as(self, self.list_id(entry)):
                    return  # the statement store["l"] += [...]
            raise TypeError("a persistent list can't be assigned: create another and extend it, or store list(it)")
        if type(value) not in PLAIN and is_tensor(value):
            array = array_of_tensor(value)
            with self.lock, later():
                self._set_array(key, name, array)
            return
        if type(value) not in PLAIN and (contents := objects.prepared(value)) is not None:
            with self.lock, later():
                stored = objects.put(self, key, contents, self._belongings(key, self._existing(key, name)))
                self.lost_updates.assigned(value, stored, objects.compared)
            return
        encoded = encode(value)
        with self.lock, later():
            existing = self._existing(key, name)
            self.put_encoded(key, encoded, type_name(value), self._belongings(key, existing))
            if self.lost_updates:
                self.lost_updates.assigned(value, encoded)

    def put_encoded(self, key: bytes, encoded: bytes, kind: str, gone: bytes = b"") -> None:
        """Stores an encoded value under a catalog key. gone: prefix of the keys that are deleted with the old value."""
        if len(encoded) <= META_MAX:
            self.core.put(key, Entry(0, 0, INLINE, 0, encoded), gone)
        else:
            self._put_long(key, encoded, BLOB, kind.encode(), gone)

    def put_declaration(self, key: bytes, declared: Declaration, gone: bytes = b"") -> None:
        """Stores a derived array's declaration. gone: as for put_encoded."""
        encoded = declared.encode()
        if len(encoded) <= META_MAX:
            self.core.put(key, Entry(0, 0, DERIVED, 0, encoded), gone)
        else:
            self._put_long(key, encoded, DERIVED, b"", gone)

    def put_note(self, note: bytes) -> None:
        """Stores the note of the next commit."""
        with self.lock:
            self.put_encoded(_names.NOTE_KEY, (self.core.sequence + 1).to_bytes(8, "little") + note, "")

    def note(self) -> bytes | None:
        """The note of the last commit; None if it has none."""
        with self.lock:
            entry = self.core.get(_names.NOTE_KEY)
            found = b"" if entry is None else self.encoded(entry)
            if entry is not None and len(found) < 8:
                raise CorruptStoreError("a damaged note of a commit")
            return found[8:] if found[:8] == self.core.sequence.to_bytes(8, "little") else None

    def _put_long(self, key: bytes, encoded: bytes, kind: int, meta: bytes, gone: bytes) -> None:
        with self.new_extent(len(encoded)) as offset:
            self.core.write(offset, 0, encoded, len(encoded))
            self.core.put(key, Entry(offset, len(encoded), kind, 0, meta), gone)

    def create_array(
        self, name: str, shape: Any, dtype: Any, order: str, fill_value: Any, writeable: bool, maxshape: Any = None
    ) -> Array:
        """See Store.create_array."""
        key = key_of(name)
        described = growing.planned(shape, dtype, order, writeable, maxshape)
        require_lengths(described.dtype)
        source = filling(fill_value, described)
        with self.lock, later():
            self.writable()
            if self.core.get(key) is not None:
                raise NameConflictError(f"the name {name!r} is taken; require_array gives the existing array")
            self.refuse_conflict(name, key)
            entry = self.put_array(key, described, source)
            return self._array(entry, described)

    def require_array(
        self, name: str, shape: Any, dtype: Any, order: str, fill_value: Any, writeable: bool, maxshape: Any = None
    ) -> Array:
        """See Store.require_array."""
        key = key_of(name)
        with self.lock, later():
            entry = self.core.get(key)
            if entry is None:
                return self.create_array(name, shape, dtype, order, fill_value, writeable, maxshape)
            wanted = growing.planned(shape, dtype, order, writeable, maxshape)
            text = f"an array of {growing.shape_text(wanted)} and dtype {wanted.dtype} is asked for, and {name!r} is "
            if entry.kind != ARRAY:
                raise NameConflictError(f"{text}{self._what(key, entry)}")
            described = read_layout(self.core, entry)
            if not growing.matches(described, wanted):
                raise NameConflictError(f"{text}one of {growing.shape_text(described)} and dtype {described.dtype}")
            if described.writeable and not wanted.writeable:
                raise NameConflictError(f"an array with writeable=False is asked for, and {name!r} can be written")
            return self._array(entry, described)

    def create_list(self, name: str) -> PersistentList:
        """See Store.create_list."""
        key = key_of(name)
        with self.lock, later():
            self.writable()
            if self.core.get(key) is not None:
                raise NameConflictError(f"the name {name!r} is taken; store[{name!r}] gives what it has")
            self.refuse_conflict(name, key)
            list_id = self.new_id()
            self.core.put(key, Entry(0, 0, LIST, 0, list_id.to_bytes(8, "little")))
            return PersistentList(self, name, list_id)

    def new_id(self) -> int:
        """An id for a list or an object, which none has had."""
        counter = self.core.get(_names.LIST_ID_KEY)
        made = max(self._next_list, 1 if counter is None else int.from_bytes(counter.meta, "little"))
        self._next_list = made + 1
        self.core.put(_names.LIST_ID_KEY, Entry(0, 0, INLINE, 0, self._next_list.to_bytes(8, "little")))
        return made

    def delete(self, name: str) -> bool:
        """Deletes a name, with its attributes, a list's elements or a derived array's value. Returns False if there is
        no such name."""
        key = key_of(name)
        with self.lock, later():
            self.writable()
            entry = self.core.get(key)
            if entry is None:
                return False
            if not attributes.any_in(self.core):
                return self.core.delete(key, self._belongings(key, entry))
            try:
                return self.core.delete(key, self._belongings(key, entry))
            finally:
                attributes.sweep(self, name)

    def release(self, names: tuple[str, ...]) -> None:
        """See Store.release."""
        for name in names or list(self.names()):
            with self.lock:
                entry = self.core.get(key_of(name))
                if entry is None:
                    if names:
                        raise self.unknown(name)
                elif entry.kind == OBJECT:
                    objects.release(self, entry)
                elif entry.kind != ARRAY:
                    if names:
                        raise TypeError(f"{name!r} is not an array but {self._what(key_of(name), entry)}")
                elif entry.offset:
                    self.core.release(entry.offset, entry.length)

    def list_length(self, list_id: int) -> int:
        """The number of elements of a list."""
        last = self.core.last(_names.element_prefix(list_id))
        if last is None:
            return 0
        place = _names.split_element(last.key)
        # A valid list has a key for each element. A damaged length must not make callers allocate memory for more
        # elements.
        if place is None or (place[1] >= 1 << 16 and place[1] >= self.core.count_keys()):
            raise CorruptStoreError("a damaged list")
        return place[1] + 1

    def refuse_in_import(self) -> None:
        """Raise TransactionError in the thread that runs an import; others wait for its end."""
        if self.importing:
            with self.lock:
                if self.importing:
                    raise TransactionError("progress() of load_into() can't commit, roll back or close the store")

    def rollback(self) -> None:
        """Take arrays and names back to the last commit."""
        with self.lock, later():
            self.rollbacks += 1
            self.core.rollback()
            self.lost_updates.clear()
            growing.thaw(self)

    def show(self, core: Core) -> None:
        """Show another snapshot. Arrays of the old one keep its bytes."""
        with self.lock:
            core.lock = self.lock
            self.core = core  # the old one is closed when no iteration uses it any more
            self._live.clear()
            self._shadowed.clear()

    def leave(self, lock: Lock, successor: Callable[[], Any]) -> None:
        """A forked process calls this. Arrays that were handed out stay as they are. The catalog becomes that of the
        snapshot which `successor` returns when the catalog is first used. lock: a new lock, because another thread of
        the parent may hold the old one.
        """
        self.core.leave(successor)
        self.core.lock = self.lock = lock
        self.inherited |= not self.read_only
        self.importing = False
        self.read_only = True
        self.lost_updates.clear()
        self._live = LiveArrays()
        self._shadowed = set()

    def close(self, *, discard: bool = False, exiting: bool = False) -> None:
        """Close the core. Live arrays become read-only, and keep their bytes. After OutOfMemoryError the core is
        open."""
        with self.lock:
            arrays = self._live.all()
            try:
                self.core.close(discard=discard, exiting=exiting)
            finally:
                if self.core.gone:
                    self.lost_updates.clear()
                    for array in arrays:
                        array.flags.writeable = False

    # ---- errors

    def writable(self) -> None:
        """Raises ClosedStoreError, ForkedStoreError or ReadOnlyStoreError unless the store can be changed."""
        if self.inherited and not self.core.gone:
            raise ForkedStoreError(
                "this process is a fork of the one that opened the store, and only reads it. When no other process "
                "has it open for writing, pmstore.open(path) opens it anew here"
            )
        self.core.require_open()
        if self.read_only:
            raise ReadOnlyStoreError('the store is open for reading only; mode="r+" or "a" opens it for writing')

    def unknown(self, name: str, group: str = "") -> UnknownNameError:
        """The error for a name that does not exist."""
        return UnknownNameError(name, lambda: self._near(group, name), group[:-1])

    def _near(self, group: str, name: str) -> str:
        import difflib
        import itertools

        full = group + name
        with self.lock:
            if next(self.names(full + "/"), None) is not None:
                return f": it is a group, group({name!r}) gives it, and group({name!r}).clear() deletes its names"
        near = difflib.get_close_matches(name, itertools.islice(self.names(group), 5000), 3)
        return f"; near it: {', '.join(map(repr, near))}" if near else ""

    def _existing(self, key: bytes, name: str) -> Entry | None:
        """The entry that is about to be replaced, if there is one. Otherwise checks that the name is free."""
        self.writable()
        entry = self.core.get(key)
        if entry is None:
            self.refuse_conflict(name, key)
        elif entry.kind == DERIVED:
            raise NameConflictError(
                f"{name!r} is {self._what(key, entry)}: its handle's set() gives it a value, del makes the name free"
            )
        return entry

    def refuse_conflict(self, name: str, key: bytes) -> None:
        for group in _names.parents(name):
            if self.core.get(key_of(group)) is not None:
                raise NameConflictError(f"{name!r} can't be stored: {group!r} is a value, and so no group")
        if self._is_group(key):
            raise NameConflictError(f"{name!r} can't be stored: it is a group; there are names below it")

    def exists(self, key: bytes) -> bool:
        """Whether there is a value of the name of this key, or a group."""
        return self.core.get(key) is not None or self._is_group(key)

    def _is_group(self, key: bytes) -> bool:
        """Whether there are names below the name of this key."""
        return len(key) < 1 + _names.NAME_MAX and self.core.last(key + b"/") is not None

    # ---- helpers

    def _set_array(self, key: bytes, name: str, value: Array) -> None:
        existing = self._existing(key, name)
        writeable, described = True, None
        if (
            existing is not None
            and existing.kind == ARRAY
            and (described := self._layout_if_valid(existing)) is not None
        ):
            writeable = described.writeable
            either = not (value.flags.c_contiguous or value.flags.f_contiguous)
            if (
                writeable
                and (value.shape, value.dtype) == (described.shape, described.dtype)
                and (value.dtype.names is None or descriptor_of(value.dtype) == descriptor_of(described.dtype))
                and (either or described.fits(value))
            ):
                spare = described.length - described.nbytes  # of an array that grows: it would be written, too
                if described.nbytes >= max(_DIRECT_FROM, spare) and not self._may_live(existing):
                    # No live array shows the difference. Writing once, to another place, is faster and needs no memory.
                    with contextlib.suppress(OutOfSpaceError):
                        self.put_array(key, described, value)
                        return
                if (target := self._array_if_valid(existing, described)) is not None:
                    if target is not value:
                        np.copyto(target, value)
                    self.core.mark(existing.offset, existing.length)
                    return
        self.put_array(key, growing.successor(described, value, writeable), value, self._belongings(key, existing))

    # A value that is damaged, or that the disk can't read, can be replaced.

    def _layout_if_valid(self, entry: Entry) -> Layout | None:
        with contextlib.suppress(*UNSOUND):
            return read_layout(self.core, entry)
        return None

    def _array_if_valid(self, entry: Entry, described: Layout) -> Array | None:
        """The array under an entry, to be written to; None if it is damaged."""
        with contextlib.suppress(*UNSOUND):
            array = self._array(entry, described)
            return array if array.flags.writeable else self._fresh(entry, described)  # any caller can set that flag
        return None

    def _may_live(self, entry: Entry) -> bool:
        """Whether an array, or a view of one, may be alive over the entry's extent."""
        return entry.offset in self._shadowed or self._live.get(entry.offset) is not None

    def put_array(self, key: bytes, described: Layout, source: Array | bytes, gone: bytes = b"") -> Entry:
        """Writes an array into a new extent of the key's. source: the elements, or the bytes that all elements have.
        gone: as for put_encoded.
        """
        if not described.length:
            entry = Entry(0, 0, ARRAY, 0, described.meta)
            self.core.put(key, entry, gone)
            return entry
        with self.new_extent(described.length) as offset:
            if isinstance(source, bytes):
                self.core.fill(offset, described.nbytes, source)
            else:
                at = 0
                for piece in chunks(source, described.order):
                    self.core.write(offset, at, address_of(piece), piece.nbytes)
                    at += piece.nbytes
            if described.growth is not None:
                growing.write_spare(self.core, offset, described.nbytes, described.length)
            if described.tail:
                behind = bytes(described.length - described.nbytes - len(described.tail)) + described.tail
                self.core.write(offset, described.nbytes, behind, len(behind))
            entry = Entry(offset, described.length, ARRAY, 0 if described.writeable else FIXED, described.meta)
            self.core.put(key, entry, gone)
        return entry

    def new_extent(self, length: int) -> Undo[int]:
        """A new extent, to which the with block gives an owner. If that fails, the extent is freed."""
        # The core frees none that has an owner.
        return Undo(lambda: self._alloc(length), lambda offset: self.core.free(offset, length))

    def _alloc(self, length: int) -> int:
        offset = self.core.alloc(length)
        # The memory of a live buffer is not reused (I9), but that of an array with two slots may lie over its other
        # slot.
        detached = self._live.pop(offset)
        if detached is not None:
            self._live[-id(detached)] = detached  # close() still has to find it
        return offset

    def _belongings(self, key: bytes, entry: Entry | None) -> bytes:
        """The prefix of the keys that belong to an entry: a list's elements, an object's parts, a derived array's
        value; b"" for others, and for a damaged object whose id is lost."""
        if entry is not None and entry.kind == LIST:
            return _names.element_prefix(self.list_id(entry))
        if entry is not None and entry.kind == OBJECT:
            owner = objects.id_of(entry)
            return b"" if owner is None else _names.object_prefix(owner)
        return _names.derived_prefix(key) if entry is not None and entry.kind == DERIVED else b""

    def _what(self, key: bytes, entry: Entry) -> str:
        kind, *_, text, _ = listing.about(self, key, entry)
        return text if kind == "derived" else f"a {text}"
