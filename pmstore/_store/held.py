"""The stores that this process has open, their locks, and how often each store was opened.

An open-file-description lock guards a store's file: exclusive for a writer, shared for readers. It is on a byte that
data never reach. It ends with the process. It has a descriptor of its own: the mappings of the core would keep the lock
in forks, whose mappings outlive their descriptors. A POSIX lock on the next byte only tells others the holder's process
id, which the kernel doesn't report for the first kind of lock.

A process has one `Store` for a file that it writes. The life of its lock in the process, with the number of openings:

          lock_file                  opened                     leave, the last one              unlock
    absent ───────▶ busy, no store ──────────▶ open, n openings ─────────────────▶ busy, closing ──────▶ absent
                                                 ▲  join: n + 1      ▲                  │
                                                 └─ leave: n - 1     └──────────────────┘ stay: it could not be closed

Another thread that opens the file waits while the lock is busy, and then joins, or opens the file anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from pmstore import _core
from pmstore._errors import StoreIOError, StoreLockedError, refused
from pmstore._interrupts import deliver, later
from pmstore._trace import Trace

__all__ = [
    "LOCK_BYTE",
    "FileLock",
    "Held",
    "OpenedHere",
    "Options",
    "SourceFile",
    "flock",
    "flock_now",
    "inode_of",
    "is_leased",
    "lock",
    "off_streams",
    "open_file",
    "refuse_if_noted",
    "registry_lock",
    "sweep",
    "tell_pid",
]

T = TypeVar("T")

LOCK_BYTE = 1 << 62
_PID_BYTE = _core.PID_BYTE  # leases are behind it; forks from 2**32 behind the lock on (csrc/space/region_fork.c)
_LEASE_BYTE = LOCK_BYTE + 2
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid

_POLL = 0.05  # seconds between two looks for signals
_FIRST_FD = 3  # the first number behind the standard streams

# A garbage collection may close a store while the lock is held. It is entered as itself, which is C code: a condition
# is left by Python code, which an interrupt may end before the lock is released.
registry_lock = threading.RLock()
_changed = threading.Condition(registry_lock)  # notified when a lock is not busy any more


class Options(NamedTuple):
    """The options of `open` in which a second opening in the process has to agree. max_size 0: no limit."""

    media: str = "auto"
    durability: str = "sync"
    sync_interval: float = 0.1
    max_size: int = 0

    def difference(self, asked: Options) -> str:
        """The first option in which those of an open store differ from those that are asked for, as text; or ""."""
        if asked.media not in ("auto", self.media):
            return f"media {self.media!r}, not {asked.media!r}"
        if asked.durability != self.durability:
            return f"durability {self.durability!r}, not {asked.durability!r}"
        if asked.durability == "async" and asked.sync_interval != self.sync_interval:
            return f"sync_interval {self.sync_interval}, not {asked.sync_interval}"
        if asked.max_size not in (0, self.max_size):
            return f"max_size {self.max_size or None}, not {asked.max_size}"
        return ""


class Held(ABC):
    """The file of a store that this process has open: the descriptor `fd`, device and inode, and the openings.

    where: "file:line" where the store was opened first.
    """

    __slots__ = ("fd", "inode", "openings", "where")

    def __init__(self, fd: int, where: str) -> None:
        self.fd = fd
        self.inode = inode_of(os.fstat(fd))
        self.openings = 1
        self.where = where

    @abstractmethod
    def unlock(self) -> None:
        """Let the file go, after the core has closed it."""

    @abstractmethod
    def again(self, path: str) -> int:
        """Another descriptor of the file, for a reader in this process, to be closed by the caller. Raises
        StoreIOError."""

    def leave(self) -> bool:
        """Give one opening back. True: it is the last one, and the caller closes the store."""
        with registry_lock:
            if self.openings > 1:
                self.openings -= 1
                return False
            self.closing()
            return True

    @abstractmethod
    def closing(self) -> None:
        """The calling thread is about to close the store."""

    @abstractmethod
    def stay(self) -> None:
        """The calling thread does not open or close the store any more."""


class FileLock(Held):
    """A locked file of a store. The core takes `fd` over."""

    __slots__ = ("_busy", "_leases", "_lock_fd", "_options", "_store", "_trace", "writing")

    def __init__(self, fd: int, where: str, lock_fd: int, writing: bool, opens: bool) -> None:
        """opens: `opened` will tell which store it is."""
        super().__init__(fd, where)
        self.writing = writing
        self._lock_fd = lock_fd
        self._busy = threading.get_ident() if opens else 0  # the thread that opens or closes the store
        self._leases = 0
        self._store: weakref.ref[Any] | None = None
        _registry.setdefault(self.inode, []).append(self)

    def opened(self, store: Any, options: Options, trace: Trace | None) -> None:
        """Let another opening in this process join this one from now on."""
        with registry_lock:
            self._store, self._options, self._trace = weakref.ref(store), options, trace
            self.stay()

    def may_be_joined(self) -> bool:
        """Whether there is a store to join, now or when another thread has opened or closed it."""
        if self._busy:
            return self._busy != threading.get_ident()
        return self._store is not None and self._store() is not None

    def join(self, path: str, asked: Options | None, trace: Trace | None) -> Any:
        """The store, which is now open once more; None if it is not open any more, or never was.

        asked: what has to agree; None: nothing. Raises StoreLockedError if an option differs.
        """
        with registry_lock:
            while self._busy and self._is_noted():
                _changed.wait(_POLL)
                deliver()
            store = self._store() if self._store is not None and self._is_noted() else None
            if store is None:
                return None
            different = "" if asked is None else self._options.difference(asked)
            if trace is not None and trace is not self._trace:
                different = "another trace"
            if different:
                raise _locked(path, True, True, os.getpid(), self.where, f" with {different}")
            self.openings += 1
            return store

    def again(self, path: str) -> int:
        """An open file of its own: a lock does not show on the open file that holds it."""
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            return open_file(f"/proc/self/fd/{self.fd}", flags)
        except OSError:  # there is no /proc, or this process may not read the file any more
            try:
                again = open_file(path, flags)
            except OSError as error:
                raise refused(error, path) from error
        if inode_of(os.fstat(again)) != self.inode:
            os.close(again)
            raise StoreIOError(errno.ESTALE, f"{path!r} names another file now, and /proc is missing", path)
        return again

    def closing(self) -> None:
        with registry_lock:
            self._busy = threading.get_ident()

    def stay(self) -> None:
        with registry_lock:
            if self._busy == threading.get_ident():
                self._busy = 0
                _changed.notify_all()

    def unlock(self) -> None:
        """Give the file lock back, after the core has closed the file. In a forked process, and when it was given back
        before, this does nothing."""
        with later(), registry_lock:
            if not self._is_noted():
                return
            _registry[self.inode].remove(self)
            if not _registry[self.inode]:
                del _registry[self.inode]
            # Unlock as well as close: a process that is being spawned may have the descriptor for another moment.
            for byte in (LOCK_BYTE, _LEASE_BYTE):
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, flock(fcntl.F_UNLCK, byte))
            try:
                _close(self._lock_fd)
            finally:
                if self.inode in _registry:  # another one that reads alone
                    tell_pid()
                _changed.notify_all()

    def abandon(self) -> None:
        """Close the file, which the core didn't take, and give the file lock back."""
        os.close(self.fd)
        self.unlock()

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """A context in which `is_leased` tells other processes that this process will close the store itself."""
        self._lease(1)
        try:
            yield
        finally:
            self._lease(-1)

    def _lease(self, more: int) -> None:
        # By the lock's descriptor: closing another one would drop the POSIX lock that carries the process id.
        with registry_lock, contextlib.suppress(OSError):
            self._leases += more
            if self._is_noted():
                kind = fcntl.F_RDLCK if self._leases else fcntl.F_UNLCK
                fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, flock(kind, _LEASE_BYTE))

    def label(self) -> None:
        """Tell others the process id again, unless the lock was given back."""
        if self._is_noted():
            _label(self._lock_fd, self.writing)

    def forget(self) -> None:
        """A forked process calls this: the lock is the parent's."""
        with contextlib.suppress(OSError):  # the program has closed it
            os.close(self._lock_fd)

    def _is_noted(self) -> bool:
        return self in _registry.get(self.inode, ())


_registry: dict[tuple[int, int], list[FileLock]] = {}  # by device and inode


def _noted() -> list[FileLock]:
    """All locks of this process. A garbage collection may close a store while they are looked through."""
    return [held for locks in tuple(_registry.values()) for held in tuple(locks)]


class OpenedHere(Exception):
    """This process has the store open for writing, so that another opening joins that one."""

    def __init__(self, held: FileLock) -> None:
        self.held = held


class SourceFile(Held):
    """The file of a store, open for snapshots: for reading, and without a lock."""

    __slots__ = ("_open",)

    def __init__(self, fd: int, where: str) -> None:
        super().__init__(fd, where)
        self._open = True

    def unlock(self) -> None:
        """Close the file."""
        if self._open:
            self._open = False
            try:
                _close(self.fd)
            finally:
                tell_pid()

    def __del__(self) -> None:
        if getattr(self, "_open", False):  # an interrupt ended the opening
            self.unlock()

    def again(self, path: str) -> int:
        try:
            return fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
        except OSError as error:
            raise refused(error, path) from error

    def closing(self) -> None:
        """Nobody joins a snapshot."""

    def stay(self) -> None:
        """Nobody joins a snapshot."""

    def written(self) -> bool:
        """Whether a process has the store open for writing."""
        answer = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, flock(fcntl.F_RDLCK, LOCK_BYTE)))
        return bool(answer[0] != fcntl.F_UNLCK)

    def replaced(self, path: str) -> bool:
        """Whether the path names another file now."""
        try:
            return inode_of(os.stat(path)) != self.inode
        except OSError:
            return False


def open_file(path: str, flags: int, mode: int = 0o777) -> int:
    """A descriptor of a file, with no number of a standard stream."""
    fd = off_streams(lambda: os.open(path, flags | os.O_CLOEXEC, mode))
    if fd >= _FIRST_FD:
        return fd
    try:  # the stream was closed in between
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    finally:
        os.close(fd)
        tell_pid()


def off_streams(make: Callable[[], T]) -> T:
    """What a function makes, whose descriptors do not get the numbers of standard streams that are closed. A program
    that has closed its standard output and still prints, perhaps in another thread, would otherwise print into a
    store."""
    with later(), registry_lock:  # nobody takes a filler for an open stream
        closed = [number for number in range(_FIRST_FD) if not _is_open(number)]
        if closed:
            return _filled(len(closed), make)
    return make()


def _filled(count: int, make: Callable[[], T]) -> T:
    """What a function makes, behind so many descriptors that nobody can write to."""
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(count):
                fillers.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
        return make()
    finally:
        for filler in fillers:
            with contextlib.suppress(OSError):  # the program has closed it, or put its own stream in its place
                if os.path.samestat(os.fstat(filler), os.stat("/")):
                    os.close(filler)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _close(fd: int) -> None:
    """Closes a descriptor of a store. Raises StoreIOError if the program has closed it before."""
    try:
        os.close(fd)
    except OSError as error:
        why = "the program has closed it" if error.errno == errno.EBADF else error.strerror
        raise StoreIOError(error.errno, f"the store's descriptor {fd} can't be closed: {why}") from None


def tell_pid() -> None:
    """Take the POSIX locks of this process again: closing any descriptor of a file drops those on it."""
    with registry_lock:
        for held in _noted():
            held.label()


def inode_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def flock(kind: int, start: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0)


def lock(fd: int, path: str, writing: bool) -> None:
    """Lock the file of a store, for writing or for reading. Raises StoreLockedError."""
    kind = fcntl.F_WRLCK if writing else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock(kind, LOCK_BYTE))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise _locked(path, writing, *_holder(fd)) from None
    _label(fd, writing)


def _label(fd: int, writing: bool) -> None:
    # The POSIX lock is only a label: without it an error names no process id.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETLK, flock(fcntl.F_WRLCK if writing else fcntl.F_RDLCK, _PID_BYTE))


def _holder(fd: int) -> tuple[bool, int | None]:
    """Whether the holder has the file open for writing, and its process id if the system reports it."""
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, flock(fcntl.F_WRLCK, _PID_BYTE)))
    kind, pid = answer[0], answer[4]
    if kind == fcntl.F_UNLCK or pid <= 0:
        return True, None
    return kind == fcntl.F_WRLCK, pid


def _locked(
    path: str, writing: bool, held_for_writing: bool, pid: int | None, where: str = "", how: str = ""
) -> StoreLockedError:
    holder = "another process, or a fork of one," if pid is None else f"process {pid}"
    if where:
        holder = f"this process ({pid}), at {where},"
    text = f"{path!r} is in use: {holder} has it open for {'writing' if held_for_writing else 'reading'}{how}"
    if not writing:
        text += '; mode "r" without exclusive reads a snapshot beside it'
    elif where:
        text += ". Close it there first"
    else:
        text += '. Wait until it is closed (timeout=seconds does), or read it meanwhile, with mode "r"'
    error = StoreLockedError(errno.EAGAIN, text)
    error.pid = pid
    return error


def is_leased(path: str) -> bool:
    """Whether any process holds a lease of the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock(fcntl.F_WRLCK, _LEASE_BYTE))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def refuse_if_noted(inode: tuple[int, int], path: str, writing: bool, joins: bool) -> None:
    for held in tuple(_registry.get(inode, ())):
        if joins and held.writing and held.may_be_joined():
            raise OpenedHere(held)
        if writing or held.writing:
            raise _locked(path, writing, held.writing, os.getpid(), held.where)


def _after_fork() -> None:
    global _changed
    _changed = threading.Condition(registry_lock)  # threads of the parent may wait for the old one
    for held in _noted():
        held.forget()
    _registry.clear()
    registry_lock.release()


# The lock is held across a fork, so that the child knows of every locked descriptor that it has.
os.register_at_fork(before=registry_lock.acquire, after_in_parent=registry_lock.release, after_in_child=_after_fork)


def flock_now(fd: int) -> None:
    """Locks a file or a directory that other processes only sweep. Raises OSError unless its lock is free."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sweep(
    directory: str, prefix: str, access: int, lock: Callable[[int], object], delete: Callable[[str], object]
) -> None:
    """Delete the temporary files, those with the prefix, of processes that died: their locks are free.

    access: how to open one; lock: raises OSError unless the lock of a descriptor is free.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if not name.startswith(prefix):
                continue
            leftover = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                fd = os.open(leftover, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    lock(fd)
                    # another sweep may have deleted it meanwhile, and a living process have made one of its name
                    if os.path.samestat(os.stat(leftover, follow_symlinks=False), os.fstat(fd)):
                        delete(leftover)
                finally:
                    os.close(fd)
