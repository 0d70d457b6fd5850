"""Reading a store beside the process that writes it: csrc/reader, as Python sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from pmstore._core import BLOCK, error, ffi, lib, owner
from pmstore._errors import StaleSnapshotError, StoreIOError

__all__ = ["Reader", "Snapshot", "Waiter", "newest"]

_TRIES_ALONE = 2  # to copy contents, before the process that writes is asked for a pause
_TRIES = 100
_PATIENCE = 5.0  # seconds

T = TypeVar("T")


def newest(fd: int) -> int:
    """The sequence number of the newest durable commit of the store in the file fd."""
    out = ffi.new("uint64_t *")
    status = lib.pm_source_newest(fd, out)
    if status:
        raise error(status)
    return int(out[0])


WAITED: dict[int, str] = {
    lib.PM_WAITED_COMMIT: "commit",
    lib.PM_WAITED_TIME: "timeout",
    lib.PM_WAITED_CLOSED: "closed",
    lib.PM_WAITED_DIED: "died",
    lib.PM_WAITED_SIGNAL: "signal",
}


def _owner(kind: str, free: Callable[[Any], None], closed: Callable[[], None]) -> Any:
    """See `owner`. closed: called when the store's file was closed."""

    def end(pointer: Any) -> None:
        free(pointer)
        closed()

    return owner(kind, end)


class Waiter:
    """Waits for commits of the store in the file fd. Several threads may wait at once."""

    __slots__ = ("_owner", "_waiter")

    def __init__(self, fd: int, closed: Callable[[], None]) -> None:
        """closed: called after a descriptor of the file was closed."""
        self._owner = _owner("pm_waiter **", lib.pm_source_waiter_free, closed)
        status = lib.pm_source_waiter(fd, self._owner)
        if status:
            raise error(status)
        self._waiter = self._owner[0]

    def leave(self) -> None:
        """A forked process calls this: the object stays as it is, because a thread of the parent may be using it."""
        ffi.gc(self._owner, None)

    def wait(self, after: int, timeout: float) -> tuple[int, str]:
        """The newest commit, and why the wait for one after `after` has ended."""
        why, sequence = ffi.new("pm_waited *"), ffi.new("uint64_t *")
        nanoseconds = int(min(timeout, 1e9) * 1e9)
        status = lib.pm_source_wait(self._waiter, min(max(after, 0), 2**63), nanoseconds, why, sequence)
        if status:
            raise error(status)
        return int(sequence[0]), WAITED[why[0]]


class Snapshot:
    """One commit of a store that another process may be changing: see csrc/reader/snapshot.h."""

    __slots__ = ("_asked", "_closed", "_here", "_mapped", "_owner", "_snapshot")

    def __init__(self, owner: Any, closed: Callable[[], None]) -> None:
        """owner: the cell with the pm_snapshot. closed: called after a descriptor of the store's file was closed."""
        self._owner, self._snapshot = owner, owner[0]
        self._closed = closed
        self._asked: set[tuple[int, int]] = set()  # extents that were to be copied: offset and length
        self._here: set[tuple[int, int]] = set()  # of these, those whose contents a buffer has
        self._mapped: set[tuple[int, int]] = set()

    @property
    def asked(self) -> list[tuple[int, int]]:
        """Offset and length of the extents that were asked for, also of those that had changed."""
        return list(self._asked)

    @property
    def media(self) -> str:
        """ "memory", "file" or "dax": what "auto" chooses for the store's file; its writer may use another medium."""
        return str(ffi.string(lib.pm_snapshot_media(self._snapshot)).decode())

    @property
    def domain(self) -> str:
        """The persistence domain of that medium."""
        return str(ffi.string(lib.pm_snapshot_domain(self._snapshot)).decode())

    def leave(self) -> None:
        """A forked process calls this: the object stays as it is, because a thread of the parent may be using it."""
        ffi.gc(self._owner, None)

    def describe(self, statistics: Any) -> None:
        """Sets the fields of pm_statistics that describe the file."""
        lib.pm_snapshot_describe(self._snapshot, statistics)

    def file(self) -> int:
        """A descriptor of the snapshot's own store."""
        fd = int(lib.pm_snapshot_file(self._snapshot))
        if fd < 0:
            number = ffi.errno
            raise StoreIOError(number, f"cannot open the snapshot once more: {os.strerror(number)}")
        return fd

    def bring(self, offset: int, length: int, address: Any, fixed: bool) -> None:
        """Brings an extent's contents to where a buffer has them: maps them, if they are fixed, or copies them."""
        extent = offset, length
        if extent in self._here or extent in self._mapped:
            return
        mapped = fixed and lib.pm_snapshot_map(self._snapshot, offset, length, address) == 0
        status = 0 if mapped else lib.pm_snapshot_load(self._snapshot, offset, length, address)
        self._closed()
        if mapped:
            self._mapped.add(extent)
            return
        self._asked.add(extent)
        if status:
            raise error(status)
        self._here.add(extent)

    def copy(self, offset: int, length: int, at: int, address: Any, count: int) -> None:
        """Copies `count` bytes of an extent, from `at` on, to an address: a number, or a pointer."""
        target = ffi.cast("void *", address)
        status = lib.pm_snapshot_copy(self._snapshot, offset, length, at, count, target)
        self._closed()
        if status:
            raise error(status)

    def block_hashes(self, offset: int, length: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """XXH3 of each block (BLOCK bytes, the last one fewer) of an extent, without reading the contents.

        They are the same wherever the contents are, in any store. A small extent has one block. StaleSnapshotError: a
        later commit has changed the extent.
        """
        out = np.empty(-(-length // BLOCK), np.uint64)
        status = lib.pm_snapshot_hashes(self._snapshot, offset, length, ffi.from_buffer("uint64_t[]", out))
        if status:
            raise error(status)
        return out

    def digest(self, offset: int, length: int) -> int:
        """A digest of the hashes of an extent and of the place of the contents, without reading the store's file.

        If two snapshots of a store have the same digest for an extent, its contents are the same. If the digests
        differ, they may be, too.
        """
        out = ffi.new("uint64_t *")
        status = lib.pm_snapshot_digest(self._snapshot, offset, length, out)
        if status:
            raise error(status)
        return int(out[0])

    def begin_copy(self, fd: int) -> None:
        """Begins or goes on with a backup in the file fd."""
        status = lib.pm_save_begin(self._snapshot, fd)
        if status:
            raise error(status)

    def copy_contents(self, fd: int, offset: int, length: int, at: int, count: int, there: Any) -> bool:
        """Copies bytes of an extent to a backup. there: see `hashes`. False if some have changed, or are damaged."""
        whole = ffi.new("bool *")
        status = lib.pm_save_contents(self._snapshot, fd, offset, length, at, count, there, whole)
        if status:
            raise error(status)
        return bool(whole[0])

    @staticmethod
    def hashes(length: int) -> Any:
        """Room for the hashes of an extent's blocks in a backup; empty at first."""
        return ffi.new("uint64_t[]", -(-length // BLOCK))

    def end_copy(self, fd: int) -> None:
        """Makes a backup that has all contents a store."""
        status = lib.pm_save_rest(self._snapshot, fd)
        if status:
            raise error(status)


class Reader:
    """Follows the commits of the store in the file fd, which another process may be writing."""

    __slots__ = ("_closed", "_owner", "_reader", "_taken")

    def __init__(self, fd: int, closed: Callable[[], None] = lambda: None, *, changing: bool = False) -> None:
        """closed: called after a descriptor of the file was closed, by the reader or by its snapshots. changing: for
        backups, see pm_reader_open."""
        self._owner = _owner("pm_reader **", lib.pm_reader_free, closed)
        status = lib.pm_reader_open(fd, changing, self._owner)
        if status:
            raise error(status)
        self._reader = self._owner[0]
        self._closed = closed
        self._taken = True  # the last snapshot: it was not given up after seconds

    def leave(self) -> None:
        """A forked process calls this: the object stays as it is, because a thread of the parent may be using it."""
        ffi.gc(self._owner, None)

    def take(self, wanted: Sequence[tuple[int, int]] = ()) -> Snapshot:
        """A snapshot of the newest commit. wanted: offset and length of extents whose contents are copied at once."""
        owner = _owner("pm_snapshot **", lib.pm_snapshot_free, self._closed)
        places = ffi.new("pm_extent_place[]", list(wanted))
        status = lib.pm_reader_take(self._reader, places, len(places), owner)
        self._taken = not status
        if status:
            raise error(status)
        return Snapshot(owner, self._closed)

    def release(self) -> None:
        """End a pause before `patiently` does: what the attempt does now needs the store's file no more."""
        lib.pm_reader_release(self._reader)

    def patiently(self, attempt: Callable[[], T]) -> T:
        """The result of a function that takes a snapshot and copies contents. It is called again when a later commit
        has changed them; then the process that writes is asked for pauses (I21).

        Raises StaleSnapshotError if they were too short for seconds.
        """
        begun = time.monotonic()
        tries = 0
        try:
            while True:
                tries += 1
                lib.pm_reader_hold(self._reader, tries > _TRIES_ALONE)
                try:
                    return attempt()
                except StaleSnapshotError:
                    enough = tries >= _TRIES or not self._taken  # `take` has had patience of its own
                    if enough and time.monotonic() - begun > _PATIENCE:
                        raise
        finally:
            self.release()
