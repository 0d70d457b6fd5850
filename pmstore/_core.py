"""The one adapter to the C core: no other module imports the extension. csrc/pmstore.h explains the calls."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pmstore import _errors
from pmstore._interrupts import later
from pmstore._locks import Lock
from pmstore._pmcore import ffi, lib

__all__ = [
    "BLOCK",
    "FIXED",
    "META_MAX",
    "PID_BYTE",
    "Core",
    "Entry",
    "Row",
    "error",
    "ffi",
    "format_file",
    "hash64",
    "lib",
    "owner",
    "require_ok",
]

BLOCK: int = lib.PM_BLOCK
GAP = (1 << 64) - 1  # the "block" of two problems that follow one another: keys between theirs may be missing
META_MAX: int = lib.PM_META_MAX
PID_BYTE: int = lib.pm_pid_byte
FIXED: int = lib.PM_ENTRY_FIXED
"""Of the flags of an entry: its contents never change as long as it owns them."""
MEDIA: dict[str, int] = {
    "auto": lib.PM_MEDIA_AUTO,
    "memory": lib.PM_MEDIA_MEMORY,
    "file": lib.PM_MEDIA_FILE,
    "dax": lib.PM_MEDIA_DAX,
}

_NOT_FOUND: int = lib.PM_NOT_FOUND
_ROW = struct.Struct("<QQBBHHH")
_ROWS_CAPACITY = 1 << 16

_commit = lib.pm_commit
_commit_only = lib.pm_commit_only
_holds = lib.pm_holds
_rollback = lib.pm_rollback
_release = lib.pm_buffer_release  # bound by a partial and called by the garbage collector: no bytecode, no interrupt


class Entry(NamedTuple):
    """The catalog's entry under a key: an extent (offset 0: none), the caller's kind and flags, and meta bytes."""

    offset: int
    length: int
    kind: int
    flags: int
    meta: bytes


class Row(NamedTuple):
    """A key and its entry."""

    key: bytes
    entry: Entry


def _text(message: Any) -> str:
    return str(ffi.string(message).decode("utf-8", "replace"))


def error(status: int, extension: Any = lib) -> Exception:
    """The exception for a pm_status that isn't PM_OK, with the message of the extension that returned it."""
    text = _text(extension.pm_message())
    if system := _SYSTEM.get(status):
        code = system.code if system is _errors.OutOfSpaceError else extension.pm_errno() or system.code
        return system(code, text)
    return _KINDS.get(status, _errors.InternalError)(text)


def _require_opened(status: int) -> None:
    """The same as `require_ok`, but PM_INVALID is a ValueError: the caller or PMSTORE_TRACKER asks for
    something that does not go with this file."""
    if status == lib.PM_INVALID:
        raise ValueError(_text(lib.pm_message()))
    require_ok(status)


def require_ok(status: int) -> None:
    if status:
        raise error(status)


_SYSTEM: dict[int, type[_errors._SystemError]] = {
    lib.PM_IO: _errors.StoreIOError,
    lib.PM_UNREADABLE: _errors.StoreIOError,
    lib.PM_FAILED: _errors.FailedStoreError,
    lib.PM_NO_SPACE: _errors.OutOfSpaceError,
}
_KINDS: dict[int, type[_errors.Error]] = {
    lib.PM_NO_MEMORY: _errors.OutOfMemoryError,
    lib.PM_CORRUPT: _errors.CorruptStoreError,
    lib.PM_NOT_A_STORE: _errors.NotAStoreError,
    lib.PM_VERSION: _errors.FormatVersionError,
    lib.PM_READ_ONLY: _errors.ReadOnlyStoreError,
    lib.PM_STALE: _errors.StaleSnapshotError,
    lib.PM_CLOSED: _errors.ClosedStoreError,
    lib.PM_FORKED: _errors.ForkedStoreError,
    lib.PM_TOO_LONG: _errors.TooLargeError,
    lib.PM_INVALID: _errors.InternalError,
}


def owner(kind: str, free: Callable[[Any], object]) -> Any:
    """A cell for a pointer that a C function gives. The cell owns what the pointer points to, as a signal handler may
    raise an exception as soon as the function returns."""

    def end(cell: Any) -> None:
        if cell[0]:
            free(cell[0])

    return ffi.gc(ffi.new(kind), end)


def hash64(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """XXH3, 64 bits, of the bytes of data."""
    contents = ffi.from_buffer(data)
    return int(lib.pm_hash64(contents, len(contents), seed))


MARK_NONE, MARK_CONSTANT = 0, 1
"""What `Core.mark_dirty` returns if no live array has the bytes, or only one that can't change."""

# Pointers of declared arrays come from functions in C, since they are part of every such commit.
no_ranges: Callable[[int], Any] = functools.partial(ffi.new, ffi.typeof("pm_range[]"))
"""So many ranges of memory for `Core.holds` to fill in; those that it doesn't mean nothing."""
pointer_to: Callable[[Any], Any] = ffi.from_buffer
"""A pointer to C-contiguous bytes, for `Core.holds`; ValueError, TypeError or BufferError if they are not that."""


def all_ranges(one: Any, other: Any) -> Any:
    """Those of both."""
    both = no_ranges(len(one) + len(other))
    ffi.memmove(both, one, ffi.sizeof(one))
    ffi.memmove(both + len(one), other, ffi.sizeof(other))
    return both


def pointer_at(address: int) -> Any:
    return ffi.cast("char *", address)


def _pointer(trace: Any) -> Any:
    return ffi.NULL if trace is None else trace.pointer


def format_file(fd: int, media: str, trace: Any = None) -> None:
    """Writes an empty store into the empty file fd."""
    _require_opened(lib.pm_format(fd, MEDIA[media], _pointer(trace)))


def _row(buffer: Any, at: int) -> tuple[Row, int]:
    offset, length, kind, flags, meta_length, key_length, row_length = _ROW.unpack_from(buffer, at)
    start = at + _ROW.size
    end = start + key_length
    entry = Entry(offset, length, kind, flags, buffer[end : end + meta_length])
    return Row(buffer[start:end], entry), at + row_length


def _renamings(keys: Sequence[tuple[bytes, bytes]]) -> tuple[Any, Any]:
    """Keys and new ones for a function of the core, and what has to stay alive until it returns."""
    kept = [[ffi.from_buffer("uint8_t[]", key) for key in pair] for pair in keys]
    return ffi.new("pm_renaming[]", [(old, new, len(old), len(new)) for old, new in kept]), kept


class Core:
    """An open pm_store. Methods raise the exceptions of `error`.

    lock: to be held around calls that belong together; the core locks itself, but not against being closed while
    a call is on its way, so that callers hold it around every call (`scan` does so itself).
    holds(place, length, ranges, i): whether a live array has all of a range, which becomes number i of ranges. place: a
    pointer. trace: the `Trace` (pmstore/_trace.py) that records it, or None. snapshot: the `Snapshot`
    (pmstore/_snapshot.py) that it shows, or None.
    """

    __slots__ = ("_store", "_successor", "gone", "holds", "lock", "snapshot", "trace")

    def __init__(
        self,
        fd: int,
        media: str,
        *,
        read_only: bool,
        trace: Any,
        max_size: int,
        snapshot: Any = None,
        salvage: bool = False,
    ) -> None:
        """Takes fd over in every case, also when it raises. salvage: damaged metadata hide nothing that can be found
        without them."""
        self.lock = Lock()
        flags = lib.PM_OPEN_READ_ONLY if read_only else 0
        self._open(fd, media, flags | (lib.PM_OPEN_SALVAGE if salvage else 0), trace, max_size, snapshot)

    def _open(self, fd: int, media: str, flags: int, trace: Any, max_size: int, snapshot: Any) -> None:
        flags |= lib.PM_OPEN_SNAPSHOT if snapshot is not None else 0
        out = ffi.new("pm_store **")
        _require_opened(lib.pm_open(fd, MEDIA[media], flags, max_size, _pointer(trace), out))
        self.trace = trace
        self.snapshot = snapshot
        self._attach(out[0])

    @classmethod
    def of_snapshot(cls, snapshot: Any) -> Core:
        """A core that shows a snapshot. If nobody takes it, it closes itself."""
        with later():
            return cls(snapshot.file(), "auto", read_only=True, trace=None, max_size=0, snapshot=snapshot)
        raise AssertionError

    def _attach(self, store: Any) -> None:
        self._store = store
        self.holds: Callable[[Any, int, Any, int], int] = functools.partial(_holds, store)
        self.gone = False
        self.__class__ = Core

    def close(self, *, discard: bool = False, exiting: bool = False) -> None:
        """discard: leave the file as a crash would. exiting: the process ends, arrays need no memory of their own.

        OutOfMemoryError: there is none for the arrays that are alive, and the store is still open.
        """
        store = self._store
        # Before it is true: an interrupt between leaves a store open, and not one in use that is gone.
        self._forget()
        exiting = exiting or self.snapshot is not None  # its memory changes no more, and stays with the arrays
        self.snapshot = None
        flags = (lib.PM_CLOSE_DISCARD if discard else 0) | (lib.PM_CLOSE_EXITING if exiting else 0)
        status = lib.pm_close(store, flags)
        if status == lib.PM_NO_MEMORY:
            self._attach(store)
        if status:
            raise error(status)

    def __del__(self) -> None:
        # A store closes its core; the core of a snapshot that was replaced is closed with its last user.
        if getattr(self, "snapshot", None) is not None and getattr(self, "_store", None) is not None:
            self.close()

    def leave(self, successor: Callable[[], Any]) -> None:
        """A forked process calls this: the store is the parent's, and from now on only living arrays refer to it.

        The next use of this core calls `successor`, and shows the snapshot that it returns.
        """
        if self.gone or isinstance(self, _Inherited):
            return
        store = self._store
        if self.snapshot is not None:
            self.snapshot.leave()
        self._successor = successor
        self.__class__ = _Inherited
        del self._store, self.holds, self.snapshot
        lib.pm_close(store, 0)

    def require_open(self) -> None:
        """Raises ClosedStoreError, as every other method would."""
        self._store  # noqa: B018

    def _forget(self) -> None:
        """Make every later call raise ClosedStoreError."""
        self.gone = True
        self.__class__ = _Gone
        del self._store, self.holds

    @property
    def media(self) -> str:
        return str(ffi.string(lib.pm_media_name(self._store)).decode())

    @property
    def domain(self) -> str:
        return str(ffi.string(lib.pm_domain_in_use(self._store)).decode())

    @property
    def tracker(self) -> str:
        return str(ffi.string(lib.pm_tracker_in_use(self._store)).decode())

    # ---- transactions

    def commit(self) -> None:
        status = _commit(self._store)
        if status:
            raise error(status)

    def commit_async(self, interval: float) -> None:
        """Make later commits durable by a sync that begins `interval` seconds after them."""
        require_ok(lib.pm_commit_async(self._store, int(min(interval, 1e9) * 1e9)))

    def sync(self) -> None:
        require_ok(lib.pm_sync(self._store))

    def commit_only(self, ranges: Any) -> None:
        """Commit. Only these ranges of arrays were changed. ranges: made by `no_ranges`."""
        status = _commit_only(self._store, ranges, len(ranges))
        if status:
            raise error(status)

    def undeclared(self, ranges: Any) -> tuple[int, int, int] | None:
        """The first change of an array elsewhere: offset of the extent, where in it, how many bytes."""
        out = ffi.new("pm_broken *")
        require_ok(lib.pm_violation(self._store, ranges, len(ranges), out))
        return (out.extent, out.at, out.length) if out.length else None

    def mark(self, offset: int, length: int) -> None:
        """Note that the store itself has changed an extent. The next commit contains it, even if `only` does not."""
        require_ok(lib.pm_mark(self._store, offset, length))

    def mark_dirty(self, address: int, length: int) -> int:
        """These bytes may have changed unseen. The result may be MARK_NONE or MARK_CONSTANT."""
        out = ffi.new("int *")
        require_ok(lib.pm_mark_dirty(self._store, pointer_at(address), length, out))
        return int(out[0])

    def rollback(self) -> None:
        require_ok(_rollback(self._store))

    def checkpoint(self) -> None:
        require_ok(lib.pm_checkpoint(self._store))

    def renumber(self, sequence: int) -> None:
        """Give the last commit this number, and empty the log. For a new store that no other process has seen."""
        require_ok(lib.pm_renumber(self._store, sequence))

    @property
    def sequence(self) -> int:
        return int(lib.pm_sequence(self._store))

    @property
    def store_id(self) -> int:
        return int(lib.pm_store_id(self._store))

    # ---- catalog

    def get(self, key: bytes) -> Entry | None:
        entry = ffi.new("pm_entry *")
        meta = ffi.new("uint8_t[]", META_MAX)
        status = lib.pm_get(self._store, key, len(key), entry, meta)
        if status:
            if status == _NOT_FOUND:
                return None
            raise error(status)
        return Entry(entry.offset, entry.length, entry.kind, entry.flags, ffi.buffer(meta, entry.meta_length)[:])

    def put(self, key: bytes, entry: Entry, gone: bytes = b"", moved: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """gone: all keys that start with it are deleted in the same call, which no signal can interrupt. moved: entries
        that get other keys before, as by `rename`."""
        offset, length, kind, flags, meta = entry
        row = ffi.new("pm_entry *", (offset, length, kind, flags, len(meta)))
        rows, kept = _renamings(moved) if moved else (ffi.NULL, ())
        require_ok(lib.pm_put(self._store, key, len(key), row, meta, rows, len(kept), gone, len(gone)))

    def delete(self, key: bytes, gone: bytes = b"") -> bool:
        """False if there is no such key. gone: as for put."""
        status = lib.pm_delete(self._store, key, len(key), gone, len(gone))
        if status:
            if status == _NOT_FOUND:
                return False
            raise error(status)
        return True

    def rename(self, keys: Sequence[tuple[bytes, bytes]]) -> None:
        """Give entries other keys, in one call, which no signal can interrupt: all of them, or none. Buffers stay."""
        rows, kept = _renamings(keys)
        require_ok(lib.pm_rename(self._store, rows, len(kept)))

    def splice(self, prefix: bytes, at: int, removed: int, members: Sequence[Entry | int]) -> None:
        """Replace `removed` members of a sequence, from number `at` on, by new entries and by members that are removed
        and move there, in one call, which no signal can interrupt: all of it, or nothing. See pm_splice (pmstore.h)."""
        rows = ffi.new("pm_member[]", len(members))
        kept = []
        for row, one in zip(rows, members):
            if isinstance(one, int):
                row.number, row.moves = one, 1
            else:
                kept.append(meta := ffi.from_buffer("uint8_t[]", one.meta))
                row.meta, row.entry = meta, (*one[:4], len(meta))
        require_ok(lib.pm_splice(self._store, prefix, len(prefix), at, removed, rows, len(rows)))

    def scan(self, prefix: bytes, after: bytes | None = None, start: bytes = b"") -> Iterator[Row]:
        """Rows of the keys with a prefix (after a key, or from `start` on), in order. Changes made meanwhile may or may
        not show. The rows before a damaged place come before the error.
        """
        start = after or start or prefix
        while True:
            with self.lock:
                chunk, failed = self._rows(prefix, start, after is not None, _ROWS_CAPACITY)
            at = 0
            while at < len(chunk):
                row, at = _row(chunk, at)
                yield row
            if failed is not None:
                raise failed
            if not chunk:
                return
            start = after = row.key

    def first(self, prefix: bytes, after: bytes | None = None) -> Row | None:
        """The first row with a prefix (after a key)."""
        chunk, failed = self._rows(prefix, after or prefix, after is not None, 4096)  # room for any row, as for `last`
        if failed is not None and not chunk:
            raise failed
        return _row(chunk, 0)[0] if chunk else None

    def _rows(self, prefix: bytes, start: bytes, after: bool, capacity: int) -> tuple[bytes, Exception | None]:
        """The rows that fit into `capacity` bytes, and the error that ended them."""
        rows = ffi.new("uint8_t[]", capacity)
        used = ffi.new("size_t *")
        status = lib.pm_scan(self._store, start, len(start), after, prefix, len(prefix), rows, capacity, used)
        return ffi.buffer(rows, used[0])[:], error(status) if status else None

    def last(self, prefix: bytes) -> Row | None:
        """The last row with a prefix."""
        rows = ffi.new("uint8_t[]", 4096)
        status = lib.pm_last(self._store, prefix, len(prefix), rows)
        if status:
            if status == _NOT_FOUND:
                return None
            raise error(status)
        return _row(ffi.buffer(rows)[:], 0)[0]

    # ---- extents and buffers

    def alloc(self, length: int) -> int:
        offset = ffi.new("uint64_t *")
        require_ok(lib.pm_alloc(self._store, length, offset))
        return int(offset[0])

    def free(self, offset: int, length: int) -> None:
        require_ok(lib.pm_free(self._store, offset, length))

    def write(self, offset: int, at: int, source: Any, length: int) -> None:
        """source: bytes, or the address of the first byte."""
        if isinstance(source, int):
            source = ffi.cast("void *", source)
        require_ok(lib.pm_write(self._store, offset, at, source, length))

    def fill(self, offset: int, length: int, pattern: bytes) -> None:
        require_ok(lib.pm_fill(self._store, offset, length, pattern, len(pattern)))

    def read(self, offset: int, length: int) -> bytes:
        """The contents, checked against their hashes."""
        return bytes(self.contents(offset, length))

    def contents(self, offset: int, length: int) -> bytearray:
        """The same in memory that can be written."""
        self._read(offset, length, ffi.NULL)  # before memory of any length is asked for
        out = bytearray(length)
        self._read(offset, length, ffi.from_buffer(out))
        return out

    def verify(self, offset: int, length: int, count: int) -> None:
        """Checks the blocks of the first `count` committed bytes against their hashes. CorruptStoreError,
        StoreIOError."""
        require_ok(lib.pm_check_contents(self._store, offset, length, count))

    def read_into(self, offset: int, length: int, out: Any) -> None:
        """The same into a buffer of that length."""
        self._read(offset, length, ffi.from_buffer(out))

    def _read(self, offset: int, length: int, destination: Any) -> None:
        if self.snapshot is not None:
            self.buffer(offset, length, False)
        require_ok(lib.pm_read(self._store, offset, length, destination))

    def buffer(self, offset: int, length: int, writable: bool, fixed: bool = False) -> Any:
        """The live bytes as an object with the buffer protocol, of its own, which keeps the extent's space.

        fixed: nothing ever changes them, so that a forked child needs no copy.
        """
        out = ffi.new("pm_buffer **")
        how = (lib.PM_BUFFER_WRITABLE if writable else 0) | (lib.PM_BUFFER_FIXED if fixed else 0)
        require_ok(lib.pm_buffer_open(self._store, offset, length, how, out))
        handle = out[0]
        address = ffi.gc(ffi.cast("char *", lib.pm_buffer_address(handle)), functools.partial(_release, handle))
        if self.snapshot is not None:
            self.snapshot.bring(offset, length, address, fixed)
        return ffi.buffer(address, length)

    def require_readable(self, offset: int, length: int, at: int, count: int) -> None:
        """StoreIOError if the disk can't read these bytes of an extent, which are then read from its memory."""
        if self.snapshot is not None:
            return  # a buffer copies them
        require_ok(lib.pm_readable(self._store, offset, length, at, count))

    def release(self, offset: int, length: int) -> None:
        require_ok(lib.pm_release(self._store, offset, length))

    # ---- inspection

    def stats(self) -> dict[str, int]:
        out = ffi.new("pm_statistics *")
        require_ok(lib.pm_stats(self._store, out))
        if self.snapshot is not None:
            self.snapshot.describe(out)
        return {name: int(getattr(out, name)) for name, _ in ffi.typeof("pm_statistics").fields}

    def count_keys(self) -> int:
        out = ffi.new("uint64_t *")
        require_ok(lib.pm_count_keys(self._store, out))
        return int(out[0])

    def pending(self) -> list[Row]:
        """The changes that a commit would contain: rows that differ from the last commit (old ones of deleted keys),
        then, with the key b"", extents that a program has changed in place.
        """
        rows, length = ffi.new("uint8_t **"), ffi.new("size_t *")
        require_ok(lib.pm_pending(self._store, rows, length))
        kept = ffi.gc(rows[0], lib.pm_pending_free)
        buffer = ffi.buffer(kept, length[0])[:] if length[0] else b""
        found, at = [], 0
        while at < len(buffer):
            row, at = _row(buffer, at)
            found.append(row)
        return found

    def check(self) -> list[tuple[int, int, int, bytes, str]]:
        """Problems as (offset, length, block, key, text); key is b"" if no key owns the damage. block may be GAP."""
        if self.snapshot is not None:
            self._bring_all()
        out = owner("pm_report **", lib.pm_report_free)
        require_ok(lib.pm_check(self._store, out))
        report = out[0]
        problems = (lib.pm_report_get(report, i) for i in range(lib.pm_report_count(report)))
        return [(p.offset, p.length, p.block, ffi.buffer(p.key, p.key_length)[:], _text(p.text)) for p in problems]

    def _bring_all(self) -> None:
        """Has all contents of a snapshot in memory. Damaged ones are there as they were read."""
        rows: list[Row] = []
        with contextlib.suppress(*_errors.UNSOUND):
            rows += self.scan(b"")
        for row in rows:
            if row.entry.offset:
                with contextlib.suppress(*_errors.UNSOUND):
                    self.buffer(row.entry.offset, row.entry.length, False)

    def state_hash(self) -> int:
        """The hash of all keys, entries and contents, as the program sees them."""
        if self.snapshot is not None:
            self._bring_all()
        out = ffi.new("uint64_t *")
        require_ok(lib.pm_state_hash(self._store, out))
        return int(out[0])


class _Gone(Core):
    """One that was closed: `_store` and `holds` are unset, so that no call gets past it. A class of its own, as a
    ``__getattr__`` makes every attribute slow, also those that are there.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in ("_store", "holds"):
            raise _errors.ClosedStoreError("the store is closed")
        raise AttributeError(name)


class _Inherited(Core):
    """One of the parent process, in a fork: `_store`, `holds` and `snapshot` are unset until the first use of one."""

    __slots__ = ()

    def close(self, *, discard: bool = False, exiting: bool = False) -> None:
        self.snapshot = None
        self.gone = True
        self.__class__ = _Gone  # type: ignore[assignment]

    def __del__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in ("_store", "holds", "snapshot"):
            raise AttributeError(name)
        with self.lock:
            if type(self) is _Inherited:  # another thread may have been quicker
                snapshot = self._successor()
                self._open(snapshot.file(), "auto", lib.PM_OPEN_READ_ONLY, None, 0, snapshot)
        return getattr(self, name)
