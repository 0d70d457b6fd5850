"""New stores that are written as a whole: under a temporary name, and then under their own.

The temporary file is one of those that are swept when their writer is dead (`opening.py`), and it is locked until it
has its own name. A kill or a crash at any moment therefore leaves the file that was there before, or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.copying import Contents, put_copy
from pmstore._core import BLOCK, Entry
from pmstore._errors import Error, ReadOnlyStoreError, StoreExistsError, StoreIOError, _SystemError
from pmstore._interrupts import later
from pmstore._store import opening
from pmstore._store.callers import outside
from pmstore._store.cores import opened_core
from pmstore._store.held import FileLock
from pmstore._store.naming import rename, sync_directory, unlink
from pmstore._store.opening import lock_file

__all__ = ["SLABS", "NewStore", "Progress", "new_file", "refuse_taken", "written_anew"]

Progress = Callable[[int, int], object]

SLABS = (64, 128, 192, 256, 384, 512, 768, 1344, 2016)  # bytes of a block; larger contents take whole pages

_BATCH = 1 << 17  # bytes of names and small contents in a commit, so that the log of a new store holds its record
_FIRST = 192 << 10  # bytes for contents in the region of a new store, at least


class NewStore:
    """A new store that is being filled. room: bytes of the region that its contents take at most; None: not known."""

    __slots__ = ("_batch", "catalog")

    def __init__(self, catalog: Catalog, room: int | None) -> None:
        self.catalog = catalog
        self._batch = 0
        if room is not None and room > _FIRST:  # the file grows once
            core = catalog.core
            core.free(core.alloc(room - _FIRST), room - _FIRST)

    def put(self, key: bytes, entry: Entry, contents: Contents | None = None) -> None:
        """Store an entry under a key. contents: of its extent, if it has one."""
        if contents is None:
            self.catalog.core.put(key, entry)
        else:
            put_copy(self.catalog, key, entry, contents)
        self._batch += 64 + len(key) + len(entry.meta) + (entry.length if entry.length <= SLABS[-1] else 0)
        if self._batch > _BATCH:
            self._batch = 0
            self.catalog.core.commit()
            self.catalog.core.checkpoint()  # an empty log does not grow


def refuse_taken(target: str, source: str | int, named: str, why: str) -> None:
    """Raise StoreExistsError if there is a file at the target. source: a path or a descriptor of the store that is
    copied; named: the words for that store in the error, if it is the file there."""
    if not os.path.lexists(target):
        return
    itself = False
    with contextlib.suppress(OSError):
        itself = os.path.samestat(os.stat(target), os.stat(source))
    raise StoreExistsError(errno.EEXIST, f"{target!r} {f'is {named} itself' if itself else 'exists'}: {why}", target)


@contextlib.contextmanager
def new_file(path: str, replaced: tuple[str, os.stat_result] | None = None) -> Iterator[FileLock]:
    """An empty store under a temporary name. It gets its name, durable, when the with block ends; by then its
    descriptor is closed. An exception deletes it. The parameters are those of `written_anew`.
    """
    real = os.path.realpath(path) if replaced is None else replaced[0]
    temporary = os.path.join(os.path.dirname(real), opening._TEMPORARY + os.urandom(8).hex())
    held = None
    try:
        with later():
            held = lock_file(temporary, "x", "auto", 0.0, outside()[1])
    except _SystemError as error:
        raise type(error)(error.errno, str(error).replace(repr(temporary), repr(path)), path) from error
    except BaseException:
        if held is not None:
            unlink(temporary)
            held.abandon()
        raise
    try:
        yield held
        _give_name(temporary, real, path, replaced)
        held.unlock()
    except BaseException:
        try:
            _give_up(temporary, held)
        except BaseException:  # an interrupt, perhaps before `later`
            _give_up(temporary, held)
            raise
        raise


@contextlib.contextmanager
def written_anew(
    path: str,
    replaced: tuple[str, os.stat_result] | None = None,
    room: int | None = None,
    sequence: int | None = None,
) -> Iterator[NewStore]:
    """A new store, which gets its name, durable, when the with block ends. An exception deletes it.

    Parameters
    ----------
    path : str
        The name; it does not exist.
    replaced : (str, os.stat_result), optional
        The file to replace instead, without symbolic links, and its status. The new one gets its owner, permissions
        and extended attributes.
    room : int, optional
        Bytes of the region that the contents take at most. Then the file does not grow larger.
    sequence : int, optional
        The sequence number that the store has when it gets its name. By default, the number of commits that filled it.
    """
    with new_file(path, replaced) as held:
        limit = 0
        if room is not None:
            limit = os.fstat(held.fd).st_size + max(0, room - _FIRST) * 129 // 128 + 8 * BLOCK
        core = opened_core(path, held, "auto", read_only=False, max_size=limit)
        catalog = Catalog(core, read_only=False)
        try:
            if replaced is not None:
                _take_over(held.fd, path, *replaced)  # first: the contents may be nobody else's
            yield NewStore(catalog, room)
            core.commit()
            if sequence is not None:
                core.renumber(sequence)
            catalog.close()
        finally:
            if not core.gone:
                with contextlib.suppress(Error):
                    catalog.close(discard=True)


def _give_up(temporary: str, held: FileLock) -> None:
    with later():
        unlink(temporary)
        held.unlock()


def _take_over(fd: int, path: str, real: str, status: os.stat_result) -> None:
    """Owner, permissions and extended attributes of the replaced file."""
    try:
        if (status.st_uid, status.st_gid) != (os.fstat(fd).st_uid, os.fstat(fd).st_gid):
            os.fchown(fd, status.st_uid, status.st_gid)
        opening.keep_attributes(fd, real, status, path)
    except PermissionError as error:
        raise ReadOnlyStoreError(
            error.errno, f"{path!r} can't be replaced: only its owner may keep its owner and permissions", path
        ) from error


def _give_name(temporary: str, real: str, path: str, replaced: tuple[str, os.stat_result] | None) -> None:
    try:
        if replaced is not None and not os.path.samestat(os.stat(real), replaced[1]):
            raise StoreIOError(errno.ESTALE, f"{path!r} was replaced by another file meanwhile", path)
        _sync(temporary)
        rename(temporary, real, replace=replaced is not None)
        sync_directory(os.path.dirname(real))
    except FileExistsError:
        raise StoreExistsError(errno.EEXIST, f"{path!r} exists already", path) from None
    except Error:
        raise
    except OSError as error:
        raise StoreIOError(error.errno, f"{path!r} can't be written: {error.strerror}", path) from error


def _sync(path: str) -> None:
    """Owner and permissions, too, are durable before the file has its name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
