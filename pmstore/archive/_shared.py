"""Writing files: many buffers at once, large ones so that the disk begins early; files that several processes write."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from pmstore._store.held import open_file
from pmstore.archive._place import Buffer

__all__ = ["SharedFile", "read_all", "write_all"]

_BUFFERS = 1024  # of one writev: IOV_MAX of Linux
_SYNC_FILE_RANGE_WRITE = 2
_STEP = 2 << 20  # the disk begins to write after so many bytes


class SharedFile:
    """A file that other processes may have made, too, open for writing, with a lock that they share. While one of them
    has it open, a sweep leaves it."""

    def __init__(self, path: str, mode: int = 0o666) -> None:
        while True:
            self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode)
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(self._fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(self._fd)):
                        return
            except BaseException:
                self.close()
                raise
            self.close()  # a sweep came between the creation and the lock

    def close(self) -> None:
        """Close it, and give up the lock."""
        os.close(self._fd)

    def write(self, at: int, data: Sequence[Buffer]) -> None:
        """Write buffers, one after the other, from an offset on. No other process writes these bytes."""
        write_all(self._fd, data, at)


def write_all(fd: int, data: Sequence[Buffer], at: int = 0) -> None:
    """Write buffers, one after the other, from an offset on.

    After each 2 MiB, the kernel is asked to begin to write them, so that the disk works while the rest is copied, and
    the sync at the end waits for less.
    """
    for some, count in _batches(data):
        end = at + count
        start = at
        while at < end:
            written = os.pwritev(fd, some, at)
            at += written
            while some and written >= len(some[0]):
                written -= len(some.pop(0))
            if written:
                some[0] = some[0][written:]
        if count == _STEP:
            _begin_writing(fd, start, count)


def _begin_writing(fd: int, at: int, count: int) -> None:
    if (function := _sync_file_range()) is not None:
        function(fd, at, count, _SYNC_FILE_RANGE_WRITE)  # a hint: whether it works does not matter


@functools.cache
def _sync_file_range() -> Any:
    """The system's function, which Python does not offer; None where there is none."""
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    return function


def read_all(fd: int, at: int, buffers: Sequence[memoryview]) -> bool:
    """Fill buffers of bytes, one after the other, from an offset on. False: the file ends before."""
    views = [view for view in buffers if len(view)]
    first = 0
    while first < len(views):
        count = os.preadv(fd, views[first : first + _BUFFERS], at)
        if not count:
            return False
        at += count
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]
    return True


def _batches(data: Sequence[Buffer]) -> Iterator[tuple[list[memoryview], int]]:
    """Buffers in groups for one call each, of 2 MiB if there is as much, and their number of bytes."""
    some: list[memoryview] = []
    count = 0
    for buffer in data:
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while view:
            some.append(view[: _STEP - count])
            view = view[_STEP - count :]
            count += len(some[-1])
            if count == _STEP or len(some) == _BUFFERS:
                yield some, count
                some, count = [], 0
    if some:
        yield some, count
