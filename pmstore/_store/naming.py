"""The names of new files: each gets its name in one step, in the way that its file system has for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import warnings

from pmstore._core import lib
from pmstore._errors import ReadOnlyStoreError
from pmstore._store.callers import outside

__all__ = ["rename", "sync_directory", "unlink"]

_NFS = 0x6969
_SMB = (0x517B, 0xFE534D42, 0xFF534D42)
_TURNS, _TURN = 500, 0.01  # seconds


def unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def rename(temporary: str, real: str, replace: bool) -> None:
    """Give a file its own name. A directory may let files be created and none removed (chattr +a): a warning names the
    temporary file that stays there."""
    if replace:
        if lib.pm_file_system_type(os.fsencode(real)) in _SMB:
            text = (
                f"{real!r} can't be replaced: on SMB the system deletes a file that is replaced while it is open, and "
                "keeps no other. Make the new store under another name, or delete the old one first"
            )
            raise ReadOnlyStoreError(errno.EBUSY, text, real)
        try:
            os.replace(temporary, real)
        except PermissionError as error:
            unlink(temporary)
            left = f", and {temporary!r} stays there" if os.path.lexists(temporary) else ""
            text = f"{real!r} can't be replaced: its directory refuses it ({error.strerror}){left}"
            raise ReadOnlyStoreError(error.errno, text, real) from error
        return
    number = lib.pm_rename_file(os.fsencode(temporary), os.fsencode(real))
    if number == errno.EEXIST:
        raise FileExistsError(number, os.strerror(number), real)
    if number and not (_takes_links(number, temporary) and _link(temporary, real)):  # what else is wrong, these tell
        _rename_in_turn(temporary, real)


def _takes_links(number: int, temporary: str) -> bool:
    """True of NFS, which knows no renaming without replacement, and of directories in which files may be linked and not
    removed. Elsewhere an open file may be lost with the first of its names: on 9p, and with servers of FUSE, where its
    locks would not be those of the second name."""
    return number in (errno.EPERM, errno.EACCES) or lib.pm_file_system_type(os.fsencode(temporary)) == _NFS


def _link(temporary: str, real: str) -> bool:
    """Rename a file by a hard link. False where there are none."""
    try:
        os.link(temporary, real)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        return False
    try:
        os.unlink(temporary)
    except OSError as error:
        text = f"{real!r} is complete, but its temporary name {temporary!r} can't be removed: {error.strerror}"
        warnings.warn(text, UserWarning, stacklevel=outside()[0])
    return True


def _rename_in_turn(temporary: str, real: str) -> None:
    """Rename a file where the system does not look for another one in the same step. Creators of this machine take
    turns, by a lock on the directory. If other programs hold it for long, the file is renamed without."""
    directory = os.open(os.path.dirname(real), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_TURNS):
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_TURN)
            except OSError:  # not every file system has such locks
                break
        if os.path.lexists(real):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), real)
        os.rename(temporary, real)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # also for a child that a fork has made meanwhile
        os.close(directory)


def sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not every file system supports it
            raise
    finally:
        os.close(fd)
