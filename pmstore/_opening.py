"""Getting at the file: modes, locks between processes and within one, atomic creation.

A store's file is locked by an open-file-description lock (exclusive for a writer, shared for readers) on a byte that no
data reach, so that it goes with the process, and two openings in one process exclude each other too. It is on a
descriptor of its own: what the core maps would keep the lock in forks, whose maps outlive their descriptors. A POSIX
lock on the next byte does no more than tell others the holder's pid, which the kernel doesn't say of the first kind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import stat
import struct
import sys
import threading
import time
from typing import Any, NamedTuple

from pmstore import _core
from pmstore._errors import (
    Error,
    NotAStoreError,
    ReadOnlyStoreError,
    StoreExistsError,
    StoreIsADirectoryError,
    StoreLockedError,
    StoreNotFoundError,
    refused,
)

__all__ = ["MODES", "Claim", "claim", "outside", "path_of", "seconds"]

MODES = ("r", "r+", "a", "w", "x")

_LOCK_BYTE = 1 << 62
_PID_BYTE = _core.PID_BYTE  # behind it: leases; from 2**32 behind the lock on: forks (csrc/region_fork.c)
_LEASE_BYTE = _LOCK_BYTE + 2
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_TEMPORARY = ".pmstore-creating-"
_POLL_FIRST, _POLL_MOST = 0.001, 0.05  # seconds

_registry_lock = threading.RLock()  # collecting garbage while it is held may close a store


class _Note(NamedTuple):
    lock_fd: int
    writing: bool
    where: str  # the store was opened


_registry: dict[tuple[int, int], list[_Note]] = {}  # by device and inode


class Claim:
    """A locked file of a store: a descriptor `fd` to hand to the core, and the process's own note of the lock."""

    __slots__ = ("_inode", "_note", "fd")

    def __init__(self, fd: int, inode: tuple[int, int], note: _Note) -> None:
        self.fd = fd
        self._inode = inode
        self._note = note

    @property
    def where(self) -> str:
        """ "file:line" where the store was opened."""
        return self._note.where

    def unlock(self) -> None:
        """Let go of the file. For when the core has closed it; of no effect in a forked process."""
        with _registry_lock:
            notes = _registry.get(self._inode, [])
            if self._note not in notes:
                return
            notes.remove(self._note)
            if not notes:
                del _registry[self._inode]
            # Not only closed: a process that is being spawned may have the descriptor for another moment.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._note.lock_fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _LOCK_BYTE))
            os.close(self._note.lock_fd)

    def abandon(self) -> None:
        """Close the file, which the core didn't take, and let go of it."""
        os.close(self.fd)
        self.unlock()


def path_of(path: Any) -> str:
    """The absolute path as str; TypeError if it is none, ValueError if it is empty or holds a NUL, IsADirectoryError if
    it can only be a directory's.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"path is a str, bytes or os.PathLike, not {type(path).__name__}") from None
    if not text or "\0" in text:
        raise ValueError(f"not a path: {text!r}")
    if os.path.basename(text) in ("", os.curdir):
        raise StoreIsADirectoryError(errno.EISDIR, f"a store is a file, and {text!r} is a directory's path", text)
    return os.path.abspath(text)


def seconds(timeout: Any, name: str = "timeout") -> float:
    """A timeout in seconds as float: 0 or more, inf included."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        try:
            timeout = float(timeout) if hasattr(timeout, "__float__") else None
        except (TypeError, ValueError):
            timeout = None
    if timeout is None:
        raise TypeError(f"{name} is a number of seconds")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"{name} is 0 or more seconds, not {timeout}")
    return float(timeout)


def outside() -> tuple[int, str]:
    """The nearest frame outside of pmstore and contextlib: the stacklevel for a warning by the caller, "file:line"."""
    package = os.path.dirname(__file__) + os.sep
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((package, contextlib.__file__)):
        frame = frame.f_back
        level += 1
    return level, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def claim(path: str, mode: str, media: str, timeout: float, where: str, trace: _core.Trace | None = None) -> Claim:
    """Open, or create, the file of a store, and lock it.

    Waits up to timeout seconds for others to let go. trace: for the ids of a store that is created.
    Raises StoreLockedError, StoreNotFoundError, StoreExistsError,
    NotAStoreError, ReadOnlyStoreError, OutOfSpaceError, StoreIOError.
    """
    deadline = time.monotonic() + timeout
    pause = _POLL_FIRST
    real = os.path.realpath(path)  # what is renamed must take the place of the file, not of a link to it
    while True:
        try:
            return _try(real, path, mode, media, where, trace)
        except StoreLockedError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL_MOST)
        except Error:
            raise
        except OSError as error:
            raise refused(error, path) from error


class _Changed(Exception):
    """The file at the path became another one while it was being locked."""


def _try(real: str, path: str, mode: str, media: str, where: str, trace: _core.Trace | None) -> Claim:
    while True:
        try:
            status = os.stat(real)
        except FileNotFoundError:
            if mode in ("r", "r+"):
                raise StoreNotFoundError(
                    errno.ENOENT, f'there is no store at {path!r}; mode "a" creates one', path
                ) from None
            with contextlib.suppress(_Changed):
                return _create(real, path, mode, media, where, trace, None)
            continue
        if stat.S_ISDIR(status.st_mode):
            raise StoreIsADirectoryError(errno.EISDIR, f"a store is a file, and {path!r} is a directory", path)
        if not stat.S_ISREG(status.st_mode):
            raise NotAStoreError(f"{path!r} is not a regular file")
        if mode == "x":
            raise StoreExistsError(errno.EEXIST, f'{path!r} exists, and mode "x" creates a new store only', path)
        with contextlib.suppress(_Changed):
            held = _open_existing(real, path, mode != "r", where)
            if mode != "w":
                return held
            try:
                return _create(real, path, mode, media, where, trace, status)
            finally:
                held.abandon()


def _open_existing(real: str, path: str, writing: bool, where: str) -> Claim:
    flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    with _registry_lock, contextlib.ExitStack() as undo:
        try:
            inode = _inode(os.stat(real))
            # Before opening it: closing any descriptor of a file drops all POSIX locks that the process has on it.
            _refuse_if_noted(inode, path, writing)
            lock_fd = os.open(real, flags)
            undo.callback(os.close, lock_fd)
            _lock(lock_fd, path, writing)
            fd = os.open(real, flags)
            undo.callback(os.close, fd)
            if not inode == _inode(os.fstat(lock_fd)) == _inode(os.fstat(fd)) == _inode(os.stat(real)):
                raise _Changed
        except FileNotFoundError:
            raise _Changed from None
        except OSError as error:
            if writing and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ReadOnlyStoreError(
                    error.errno, f'{path!r} can\'t be written ({error.strerror}); mode="r" opens it for reading', path
                ) from error
            raise
        undo.pop_all()
        return _noted(fd, lock_fd, inode, writing, where)


def _create(
    real: str,
    path: str,
    mode: str,
    media: str,
    where: str,
    trace: _core.Trace | None,
    replaced: os.stat_result | None,
) -> Claim:
    """Write an empty store under a temporary name and give it its own: never is there half a store at the path."""
    directory = os.path.dirname(real)
    if not os.path.isdir(directory):
        raise StoreNotFoundError(errno.ENOENT, f"the directory {directory!r} does not exist", path)
    _sweep(directory)
    temporary = os.path.join(directory, _TEMPORARY + secrets.token_hex(8))
    with _registry_lock, contextlib.ExitStack() as undo:
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ReadOnlyStoreError(error.errno, f"{path!r} can't be created: {error.strerror}", path) from error
            raise
        undo.callback(os.close, fd)
        undo.callback(_unlink, temporary)
        try:
            lock_fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, lock_fd)
            _lock(lock_fd, path, True)
            if replaced is not None:
                os.fchmod(fd, stat.S_IMODE(replaced.st_mode))
            _core.format_file(fd, media, trace)
            os.fsync(fd)
            _rename(temporary, real, replace=replaced is not None)
        except FileExistsError:
            if mode == "x":
                raise StoreExistsError(errno.EEXIST, f"{path!r} exists already", path) from None
            raise _Changed from None
        except (FileNotFoundError, StoreLockedError):  # a sweep got in before the lock
            raise _Changed from None
        _sync_directory(directory)
        undo.pop_all()
        return _noted(fd, lock_fd, _inode(os.fstat(fd)), True, where)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _rename(temporary: str, real: str, replace: bool) -> None:
    if replace:
        os.replace(temporary, real)
        return
    try:
        os.link(temporary, real)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links: two creators at once may both win here, and the loser notices by the inode.
        if os.path.lexists(real):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), real) from None
        os.rename(temporary, real)
    else:
        os.unlink(temporary)


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not every file system can
            raise
    finally:
        os.close(fd)


def _sweep(directory: str) -> None:
    """Delete what creators left that died: their locks are free."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if not name.startswith(_TEMPORARY):
                continue
            leftover = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                fd = os.open(leftover, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, _LOCK_BYTE))
                    os.unlink(leftover)
                finally:
                    os.close(fd)


# ---- locks


def _flock(kind: int, start: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0)


def _lock(fd: int, path: str, writing: bool) -> None:
    kind = fcntl.F_WRLCK if writing else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, _LOCK_BYTE))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise _locked(path, writing, *_holder(fd)) from None
    # Only a label: without it an error names no pid.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETLK, _flock(kind, _PID_BYTE))


def _holder(fd: int) -> tuple[bool, int | None]:
    """Whether it has the file open for writing, and its process id if the system tells."""
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _flock(fcntl.F_WRLCK, _PID_BYTE)))
    kind, pid = answer[0], answer[4]
    if kind == fcntl.F_UNLCK or pid <= 0:
        return True, None
    return kind == fcntl.F_WRLCK, pid


def _locked(path: str, writing: bool, held_for_writing: bool, pid: int | None, where: str = "") -> StoreLockedError:
    holder = "another process, or a fork of one," if pid is None else f"process {pid}"
    if where:
        holder = f"this process ({pid}), at {where},"
    text = f"{path!r} is in use: {holder} has it open for {'writing' if held_for_writing else 'reading'}"
    if not writing:
        text += "; reading beside a writer is not offered by this version"
    error = StoreLockedError(errno.EAGAIN, text)
    error.pid = pid
    return error


# ---- leases: who has the store open promises to let go of it by itself


def take_lease(path: str) -> int:
    """A descriptor that holds a lease of the file until `drop_lease`; -1 if there can't be one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _LEASE_BYTE))
    except OSError:
        return -1
    return fd


def drop_lease(fd: int) -> None:
    """To be called before the store is closed: closing any descriptor of a file drops the POSIX lock that tells the
    process's id."""
    with contextlib.suppress(OSError):
        # Not only closed: a fork may have the descriptor for another moment.
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _LEASE_BYTE))
        os.close(fd)


def is_leased(path: str) -> bool:
    """Whether anyone holds a lease of the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _LEASE_BYTE))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


# ---- what this process has open (under _registry_lock)


def _refuse_if_noted(inode: tuple[int, int], path: str, writing: bool) -> None:
    for note in _registry.get(inode, ()):
        if writing or note.writing:
            raise _locked(path, writing, note.writing, os.getpid(), note.where)


def _noted(fd: int, lock_fd: int, inode: tuple[int, int], writing: bool, where: str) -> Claim:
    note = _Note(lock_fd, writing, where)
    _registry.setdefault(inode, []).append(note)
    return Claim(fd, inode, note)


def _after_fork() -> None:
    for notes in _registry.values():
        for note in notes:
            os.close(note.lock_fd)
    _registry.clear()
    _registry_lock.release()


# Held across a fork, so that the child knows of every locked descriptor that it has.
os.register_at_fork(before=_registry_lock.acquire, after_in_parent=_registry_lock.release, after_in_child=_after_fork)
