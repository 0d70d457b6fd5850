"""New files and directories of other formats, under a temporary name until they are complete.

The temporary name is locked. A kill leaves it, and the next export beside it deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator

from pmstore._errors import StoreExistsError
from pmstore._store import held
from pmstore._store.naming import rename, sync_directory

__all__ = ["new_target", "scratch"]

_TEMPORARY = ".pmstore-exporting-"


@contextlib.contextmanager
def new_target(target: str, *, directory: bool) -> Iterator[str]:
    """A temporary file or directory beside the target. It gets the target's name, durable, at the end of the block."""
    parent = os.path.dirname(target)
    temporary, fd = _begun(parent, directory)
    try:
        yield temporary
        _sync(temporary)
        try:
            if directory:
                if os.path.lexists(target):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                os.rename(temporary, target)
            else:
                rename(temporary, target, replace=False)
        except FileExistsError:
            raise StoreExistsError(errno.EEXIST, f"{target!r} exists: an export is a new file", target) from None
        sync_directory(parent)
    except BaseException:
        _delete(temporary)
        raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def scratch(parent: str) -> Iterator[str]:
    """A temporary directory in another one, for the time of the block."""
    temporary, fd = _begun(parent, directory=True)
    try:
        yield temporary
    finally:
        _delete(temporary)
        os.close(fd)


def _begun(parent: str, directory: bool) -> tuple[str, int]:
    """A new temporary file or directory, and the descriptor that locks it."""
    sweep(parent)
    while True:
        temporary = os.path.join(parent, _TEMPORARY + secrets.token_hex(8))
        fd = _made(temporary, directory)
        if fd is not None:
            return temporary, fd


def _made(temporary: str, directory: bool) -> int | None:
    """Makes it, and returns a descriptor that locks it. None: another export has deleted it before it was locked."""
    if directory:
        os.mkdir(temporary)
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECTORY if directory else os.O_CREAT | os.O_EXCL)
    try:
        fd = os.open(temporary, flags, 0o666)
    except FileNotFoundError:
        if not directory or not os.path.isdir(os.path.dirname(temporary)):
            raise
        return None
    try:
        held.flock_now(fd)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(fd)
            _delete(temporary)
            if isinstance(error, BlockingIOError):
                return None
            raise
    if not os.path.lexists(temporary):  # no other export has the name
        os.close(fd)
        return None
    return fd


def sweep(parent: str) -> None:
    """Delete what exports left that were killed."""
    held.sweep(parent, _TEMPORARY, os.O_RDONLY, held.flock_now, _delete)


def _delete(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _sync(path: str) -> None:
    """Sync a file, or all of a directory."""
    for folder, _, files in os.walk(path):
        for name in files:
            _sync_file(os.path.join(folder, name))
        sync_directory(folder)
    if not os.path.isdir(path):
        _sync_file(path)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
