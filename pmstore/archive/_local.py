"""A folder of this machine as a place of objects."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from pmstore._errors import ArchiveError
from pmstore._store.held import flock_now, open_file, sweep
from pmstore._store.naming import rename, sync_directory, unlink
from pmstore._store.opening import absolute
from pmstore.archive._place import (
    NAME,
    TEMPORARY,
    BadSectorError,
    Buffer,
    MissingObjectError,
    ObjectExistsError,
    Place,
    ShortObjectError,
    check_range,
    checked,
    too_large,
    unavailable,
)
from pmstore.archive._shared import SharedFile, read_all, write_all

T = TypeVar("T")


class LocalPlace(Place):
    """A folder of this machine. It is created with the first object.

    An object is written under a temporary name, synced, and then renamed; the folder is synced behind it. If a
    file system has neither rename without replacement nor hard links, two machines that create one object at once may
    both succeed. The files of writers that died are deleted before the first object that goes into their folder: their
    locks are free.

    A folder that goes away, or is exchanged, while the place writes makes its calls fail: on a disk that was unmounted
    objects are not missing, and writes must not land on the disk below. A disk may come back under another device
    number: it has the object that the place wrote last.
    """

    near = True

    def __init__(self, path: str) -> None:
        self.url = self._root = absolute(path)
        self._identity: tuple[int, int] | None = None
        self._last: tuple[str, tuple[int, ...]] | None = None  # the newest object: its path, and what it is
        self._ready: set[str] = set()

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self._write(name, data, new=False)

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._refusals(name, "created"):
            if os.path.lexists(path):
                sync_directory(os.path.dirname(path))  # its creator may not have come that far
                raise ObjectExistsError(name, self.url)
        self._write(name, data, new=True)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        check_range(at, count)
        try:
            fd, size = self._open(name)
            try:
                end = size if count is None else at + count
                if max(at, end) > size:
                    raise ShortObjectError(name, self.url)
                pieces = []
                while at < end:
                    pieces.append(os.pread(fd, end - at, at))
                    if not pieces[-1]:
                        raise ShortObjectError(name, self.url)
                    at += len(pieces[-1])
            finally:
                os.close(fd)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except OSError as error:
            raise self._refusal(name, "read", error) from error
        except MemoryError:
            raise too_large(self.url, name) from None

    def read_into(self, name: str, at: int, buffers: Sequence[memoryview]) -> None:
        check_range(at, None)
        with self._refusals(name, "read"):
            fd, _ = self._open(name)
            try:
                if not read_all(fd, at, buffers):
                    raise ShortObjectError(name, self.url)
            finally:
                os.close(fd)

    def size(self, name: str) -> int:
        path = self._path(name)
        with self._refusals(name, "read"):
            try:
                status = self._there(lambda: os.stat(path, follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                raise MissingObjectError(name, self.url) from None
            if not stat.S_ISREG(status.st_mode):
                raise MissingObjectError(name, self.url)
            return status.st_size

    def list(self, folder: str) -> list[str]:
        path = self._path(folder) if folder else self._root
        with self._refusals(folder, "listed"):
            try:
                with self._there(lambda: os.scandir(path)) as entries:
                    return sorted(
                        entry.name
                        for entry in entries
                        if entry.is_file(follow_symlinks=False) and NAME.fullmatch(entry.name)
                    )
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with self._refusals(name, "deleted"):
                try:
                    self._there(functools.partial(os.unlink, path))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                folders.add(os.path.dirname(path))
        for folder in folders:
            with self._refusals("", "synced"):
                sync_directory(folder)

    def prepare(self, folder: str) -> None:
        """Make a folder for shared files, durably, and sweep it. One of the processes does that, before the others."""
        with self._refusals(folder, "made"):
            self._prepare(self._path(folder))

    def open_shared(self, name: str, token: str) -> SharedFile:
        """An object that several processes write at offsets of their own, until `publish`.

        token: the same in all of them, and in no others. The file stays while one of them has it open.
        """
        with self._refusals(name, "written"):
            return SharedFile(_shared_path(self._path(name), token))

    def write_shared(self, file: SharedFile, name: str, at: int, data: Sequence[Buffer]) -> None:
        """Write buffers, one after the other, from an offset on."""
        with self._refusals(name, "written"):
            file.write(at, data)

    def publish(self, names: Iterable[str], token: str) -> None:
        """Make objects of shared files, to which all has been written. Raises ObjectExistsError."""
        paths = [(name, self._path(name)) for name in names]
        with contextlib.ExitStack() as opened:
            for name, path in paths:
                with self._refusals(name, "written"):
                    fd = os.open(_shared_path(path, token), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    opened.callback(os.close, fd)
                    os.fsync(fd)
            # durable: the bytes of all → then: their names
            for name, path in paths:
                with self._refusals(name, "created"):
                    try:
                        rename(_shared_path(path, token), path, replace=False)
                    except FileExistsError:
                        raise ObjectExistsError(name, self.url) from None
            for folder in {os.path.dirname(path) for _, path in paths}:
                with self._refusals("", "synced"):
                    sync_directory(folder)

    def discard(self, folder: str, token: str) -> None:
        """Delete the shared files of a folder that will not be published."""
        path = self._path(folder)
        with self._refusals(folder, "swept"):
            for name in os.listdir(path):
                if name.startswith(f"{TEMPORARY}{token}-"):
                    unlink(os.path.join(path, name))

    def _path(self, name: str) -> str:
        return os.path.join(self._root, checked(name))

    @contextlib.contextmanager
    def _refusals(self, name: str, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(name, doing, error) from error

    def _refusal(self, name: str, doing: str, error: OSError) -> ArchiveError:
        made = unavailable(self.url, name, doing, error)
        return BadSectorError(str(made)) if doing == "read" and error.errno == errno.EIO else made

    def _open(self, name: str) -> tuple[int, int]:
        """A descriptor to read an object, and its bytes."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = self._there(lambda: os.open(self._path(name), flags))
        except (FileNotFoundError, NotADirectoryError):
            raise MissingObjectError(name, self.url) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise MissingObjectError(name, self.url)
        except BaseException:
            os.close(fd)
            raise
        return fd, status.st_size

    def _write(self, name: str, data: Sequence[Buffer], *, new: bool) -> None:
        path = self._path(name)
        folder = os.path.dirname(path)
        with self._refusals(name, "written"):
            self._prepare(folder)
            try:
                fd, temporary = _temporary(folder)
            except FileNotFoundError:
                self._ready.discard(folder)
                raise
            try:
                write_all(fd, data)
                os.fsync(fd)
                # durable: the object's bytes → then: its name. Otherwise a power cut leaves a name without its bytes.
                if new:
                    rename(temporary, path, replace=False)
                else:
                    os.replace(temporary, path)
            except BaseException as error:
                unlink(temporary)
                if new and isinstance(error, FileExistsError):
                    sync_directory(folder)
                    raise ObjectExistsError(name, self.url) from None
                raise
            finally:
                os.close(fd)
            seen = _file(path)
            self._last = None if seen is None else (path, seen)
            sync_directory(folder)  # durable: the name → then: the caller relies on it

    def _prepare(self, folder: str) -> None:
        """Make the folder exist durably, without the leftovers of dead writers."""
        self._require_same()
        if folder in self._ready:
            return
        if self._identity is None:
            _make(self._root)
            self._identity = _identity(self._root)
        within = os.path.relpath(folder, self._root)
        path = self._root
        for part in () if within == os.curdir else within.split(os.sep):
            path = os.path.join(path, part)
            _make(path)
        sweep(folder, TEMPORARY, os.O_RDONLY, flock_now, os.unlink)
        self._ready.add(folder)

    def _require_same(self) -> None:
        """Raise OSError if the folder is no longer the one that was written to."""
        if self._identity is None or _identity(self._root) == self._identity:
            return
        if self._last is None or _file(self._last[0]) != self._last[1]:
            raise OSError(errno.ENODEV, "the folder has gone, or another one has taken its place")
        self._identity = _identity(self._root)
        self._ready.clear()

    def _there(self, call: Callable[[], T]) -> T:
        """The result of a call that reads. It raises FileNotFoundError only for what is missing in the folder that was
        written to."""
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError):
            if self._identity is None:
                raise
            self._require_same()
            return call()  # the folder may have come back in between


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _file(path: str) -> tuple[int, ...] | None:
    """What tells a file from others, whichever device it is on; None if there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _make(folder: str) -> None:
    """Make a folder, and those above it as far as they are missing. Its name is durable."""
    parent = os.path.dirname(folder)
    try:
        try:
            os.mkdir(folder)
        except FileNotFoundError:
            _make(parent)
            os.mkdir(folder)
    except FileExistsError:
        with contextlib.suppress(PermissionError):  # the process that made it may not have synced it yet
            sync_directory(parent)
    except OSError:
        if not os.path.isdir(folder):  # a folder that is there on a file system that can't be written
            raise
    else:
        sync_directory(parent)


def _temporary(folder: str) -> tuple[int, str]:
    """A new file with a lock, which tells other writers that this one lives."""
    while True:
        path = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.suppress(BlockingIOError):
                _lock(fd)
                if os.fstat(fd).st_nlink:
                    return fd, path
        except BaseException:
            unlink(path)
            os.close(fd)
            raise
        os.close(fd)  # a sweep came between the creation and the lock


def _shared_path(path: str, token: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{TEMPORARY}{token}-{name}")


def _lock(fd: int) -> None:
    try:
        flock_now(fd)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
            raise
