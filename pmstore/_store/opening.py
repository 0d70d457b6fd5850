"""Opening the file: paths, modes, waiting for the lock, atomic creation."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from pmstore import _core
from pmstore._errors import (
    Error,
    NotAStoreError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    StoreExistsError,
    StoreIOError,
    StoreIsADirectoryError,
    StoreLockedError,
    StoreNotFoundError,
    class_of_write,
    of,
    refused,
)
from pmstore._interrupts import deliver, later
from pmstore._store.callers import outside
from pmstore._store.held import (
    LOCK_BYTE,
    FileLock,
    SourceFile,
    flock,
    inode_of,
    lock,
    open_file,
    refuse_if_noted,
    registry_lock,
    sweep,
)
from pmstore._store.naming import rename, sync_directory, unlink
from pmstore._trace import Trace

__all__ = ["MODES", "is_memory", "lock_file", "locked", "open_source", "path_of", "seconds"]

T = TypeVar("T")
MODES = ("r", "r+", "a", "w", "x")

_TEMPORARY = ".pmstore-creating-"
_POLL_FIRST, _POLL_MOST = 0.001, 0.05  # seconds


def open_source(path: str, where: str) -> SourceFile:
    """Open the file of a store for snapshots.

    Raises StoreNotFoundError, NotAStoreError, StoreIOError.
    """
    with later():
        try:
            fd = open_file(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise _not_found(path) from None
        except OSError as error:
            raise refused(error, path) from error
        try:
            _require_file(os.fstat(fd), path)
            return SourceFile(fd, where)
        except BaseException:
            os.close(fd)
            raise
    raise AssertionError


def _not_found(path: str) -> StoreNotFoundError:
    return StoreNotFoundError(errno.ENOENT, f"there is no store at {path!r}", path)


def _require_file(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise StoreIsADirectoryError(errno.EISDIR, f"a store is a file, and {path!r} is a directory", path)
    if not stat.S_ISREG(status.st_mode):
        raise NotAStoreError(f"{path!r} is not a regular file")


_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL, errno.ENODATA)


def keep_attributes(fd: int, real: str, status: os.stat_result, path: str) -> None:
    """Give a new file the permissions of the one that it replaces, and its extended attributes, an access control list
    among them, but for those that the system lets nobody, or only root, give.

    Raises OSError if it can't have the permissions; OutOfSpaceError or StoreIOError if an attribute can't be kept.
    """
    os.fchmod(fd, stat.S_IMODE(status.st_mode))  # first: they are a part of the list
    try:
        names = os.listxattr(real)
    except OSError:  # the file system has none
        return
    for name in names:
        try:
            os.setxattr(fd, name, os.getxattr(real, name))
        except OSError as error:
            if error.errno in _REFUSED:
                continue
            number = error.errno or errno.EIO
            text = f"{path!r} can't be replaced: its extended attribute {name!r} can't be kept: {error.strerror}"
            raise class_of_write(number)(number, text, path) from error


def is_memory(path: Any) -> bool:
    """Whether a path of any type is ":memory:". A file of that name is "./:memory:"."""
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path) == ":memory:"


def path_of(path: Any) -> str:
    """The absolute path as str, with the home directory for ~, also of a file:// URL.

    Raises TypeError if it is no path, ValueError if it is empty, contains a NUL, is another URL or ":memory:",
    IsADirectoryError if it can only be the path of a directory.
    """
    if is_memory(path):
        raise ValueError('":memory:" is a new store without a file: give the path of a file; "./:memory:" can be one')
    text = local_path(
        path,
        "a store is a file: keep its versions there, with store.drain({0!r}), and restore one with "
        "pmstore.archive.restore",
    )
    if os.path.basename(text) in ("", os.curdir):
        raise StoreIsADirectoryError(errno.EISDIR, f"a store is a file, and {text!r} is a directory's path", text)
    text = _joined(text)
    if os.pardir in text.split(os.sep):  # behind a symbolic link it is the parent of the link's target
        text = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
    return os.path.normpath(text)


def absolute(path: str) -> str:
    """The absolute path. Raises StoreNotFoundError if it is relative, and the working directory was deleted."""
    return os.path.normpath(_joined(path))


def _joined(path: str) -> str:
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        text = f"the working directory was deleted, so {path!r} is not found: give an absolute path"
        raise StoreNotFoundError(errno.ENOENT, text, path) from error


def local_path(path: Any, elsewhere: str) -> str:
    """A path as str, with the home directory for ~, also of a file:// URL.

    elsewhere: advice for the error of another URL, which is formatted with it. Raises TypeError if it is no path,
    ValueError if it is empty, contains a NUL or what no name of a file can, or is another URL.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"path is a str, bytes or os.PathLike, not {type(path).__name__}") from None
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"not a path: {text!r} can't be encoded") from None
    if not text:
        raise ValueError(f"not a path: {text!r}")
    text = _without_scheme(text, elsewhere)
    if "\0" in text:
        raise ValueError(f"not a path: {text!r}")
    return os.path.expanduser(text)


def _without_scheme(text: str, elsewhere: str) -> str:
    """The path of a file:// URL; any other path as it is."""
    scheme, found, rest = text.partition("://")
    if not found or not scheme.isalnum():
        return text
    if scheme != "file":
        raise ValueError(f"{text!r} is not on this machine, and {elsewhere.format(text)}")
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost"):
        raise ValueError(f"{text!r} is the file of another host, {host!r}")
    return slash + os.fsdecode(unquote_to_bytes(os.fsencode(path)))


def seconds(timeout: Any, name: str = "timeout") -> float:
    """A timeout in seconds as float: 0 or more, inf included."""
    try:
        value = float(timeout) if hasattr(timeout, "__float__") else None
    except (TypeError, ValueError):
        value = None
    except OverflowError:
        raise ValueError(f"{name} is 0 or more seconds that fit into a float; inf is without a limit") from None
    if value is None:
        raise TypeError(f"{name} is a number of seconds")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} is 0 or more seconds, not {timeout}")
    return value


def lock_file(
    path: str,
    mode: str,
    media: str,
    timeout: float,
    where: str,
    trace: Trace | None = None,
    *,
    opens: bool = False,
    joins: bool = False,
) -> FileLock:
    """Open, or create, the file of a store, and lock it.

    Waits up to timeout seconds for other holders of the lock. trace: for the ids of a store that is created. opens: a
    store will be opened. joins: raises OpenedHere if this process has it open for writing. Raises StoreLockedError,
    StoreNotFoundError, StoreExistsError, NotAStoreError, ReadOnlyStoreError, OutOfSpaceError, StoreIOError.
    """
    deadline = time.monotonic() + timeout
    pause = _POLL_FIRST
    real = os.path.realpath(path)  # a renamed file must replace the file, not a link to it
    if real.endswith(" (deleted)") and os.path.exists(path):  # perhaps /proc/self/fd/N of a file that was deleted
        real = real if os.path.exists(real) and os.path.samefile(path, real) else path
    while True:
        try:
            return _try(real, path, mode, media, where, trace, opens, joins)
        except StoreLockedError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(pause, left))
            deliver()
            pause = min(2 * pause, _POLL_MOST)
        except Error:
            raise
        except OSError as error:
            raise refused(error, path) from error


def locked(path: str, work: Callable[[FileLock], T]) -> T:
    """What a function returns that gets the locked file of a store that exists, and closes it. Errors as of
    `lock_file`.

    No context of a generator: the traceback of an interrupt would keep the generator, and the generator the lock.
    """
    held = None
    try:
        with later():
            held = lock_file(path, "r+", "auto", 0.0, outside()[1])
        result = work(held)
        held.unlock()
        return result
    except BaseException:
        if held is not None:
            held.unlock()  # perhaps once more: an interrupt may have come at its beginning
        raise


class _Changed(Exception):
    """The path began to name another file while the file was being locked."""


def _try(
    real: str, path: str, mode: str, media: str, where: str, trace: Trace | None, opens: bool, joins: bool
) -> FileLock:
    while True:
        try:
            status = os.stat(real)
        except FileNotFoundError:
            if mode in ("r", "r+"):
                raise _not_found(path) from None
            with contextlib.suppress(_Changed):
                return _create(real, path, mode, media, where, trace, opens, None)
            continue
        _require_file(status, path)
        if mode == "x":
            text = f'{path!r} exists, and modes "x" and "w-" create a new store only'
            raise StoreExistsError(errno.EEXIST, text, path)
        with contextlib.suppress(_Changed):
            held = _open_existing(real, path, mode != "r", where, opens, joins)
            if mode != "w":
                return held
            try:
                return _create(real, path, mode, media, where, trace, opens, status)
            finally:
                held.abandon()


def _open_existing(real: str, path: str, writing: bool, where: str, opens: bool, joins: bool) -> FileLock:
    flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_NONBLOCK
    with registry_lock, contextlib.ExitStack() as undo:
        try:
            inode = inode_of(os.stat(real))
            # Check before opening: closing any descriptor of a file drops all POSIX locks that the process has on it.
            refuse_if_noted(inode, path, writing, joins)
            lock_fd = open_file(real, flags)
            undo.callback(os.close, lock_fd)
            fd = open_file(real, flags)
            undo.callback(os.close, fd)
            lock(lock_fd, path, writing)
            if not inode == inode_of(os.fstat(lock_fd)) == inode_of(os.fstat(fd)) == inode_of(os.stat(real)):
                raise _Changed
        except FileNotFoundError:
            raise _Changed from None
        except OSError as error:
            if writing and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and os.access(real, os.R_OK):
                raise ReadOnlyStoreError(
                    error.errno, f'{path!r} can\'t be written ({error.strerror}); mode="r" opens it for reading', path
                ) from error
            raise
        held = FileLock(fd, where, lock_fd, writing, opens)
        undo.pop_all()
        return held


def _create(
    real: str,
    path: str,
    mode: str,
    media: str,
    where: str,
    trace: Trace | None,
    opens: bool,
    replaced: os.stat_result | None,
) -> FileLock:
    """Write an empty store under a temporary name, then link it to its own name: the path never holds half a store."""
    directory = os.path.dirname(real)
    if not os.path.isdir(directory):
        raise StoreNotFoundError(errno.ENOENT, f"the directory {directory!r} does not exist", path)
    sweep(directory, _TEMPORARY, os.O_RDWR, _lock_now, os.unlink)
    temporary = os.path.join(directory, _TEMPORARY + os.urandom(8).hex())
    with registry_lock, contextlib.ExitStack() as undo:
        try:
            fd = open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise ReadOnlyStoreError(error.errno, f"{path!r} can't be created: {error.strerror}", path) from error
            raise
        undo.callback(os.close, fd)
        undo.callback(unlink, temporary)
        try:
            lock_fd = open_file(temporary, os.O_RDWR)
            undo.callback(os.close, lock_fd)
            lock(lock_fd, path, True)
            if replaced is not None:
                keep_attributes(fd, real, replaced, path)
            _format(fd, path, media, trace)
            os.fsync(fd)
            rename(temporary, real, replace=replaced is not None)
        except FileExistsError:
            if mode == "x":
                raise StoreExistsError(errno.EEXIST, f"{path!r} exists already", path) from None
            raise _Changed from None
        except OutOfSpaceError as error:
            raise OutOfSpaceError(error.errno, f"{path!r} can't be created: {error}") from None
        except (FileNotFoundError, StoreLockedError):  # a sweep took the file before it was locked
            raise _Changed from None
        sync_directory(directory)
        held = FileLock(fd, where, lock_fd, True, opens)
        undo.pop_all()
        return held


def _format(fd: int, path: str, media: str, trace: Trace | None) -> None:
    try:
        _core.format_file(fd, media, trace)
    except StoreIOError as error:
        raise of(path, error) from None


def _lock_now(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock(fcntl.F_WRLCK, LOCK_BYTE))
