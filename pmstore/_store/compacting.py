"""`compact`: a store is written anew, and replaces its file."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.copying import checked
from pmstore._catalog.growing import trimmed
from pmstore._catalog.names import LINEAGE_KEY
from pmstore._core import BLOCK
from pmstore._display import size_text
from pmstore._errors import CorruptStoreError, OutOfSpaceError
from pmstore._store.cores import opened_core
from pmstore._store.file_format import refuse_unknown_features
from pmstore._store.held import FileLock
from pmstore._store.lineage import entry_of, lineage_of, parent_of
from pmstore._store.new_store import SLABS, Progress, written_anew
from pmstore._store.opening import locked, path_of
from pmstore._store.report import check

__all__ = ["compact"]

_NODE = 4032  # bytes of a page for cells or blocks


class _NothingGained(Exception):
    pass


def compact(path: str | bytes | os.PathLike[Any], *, progress: Progress | None = None) -> int:
    """Make a store's file as small as its contents, also after deletes.

    The contents are written to a new file beside it, which then replaces it. At any moment, also after a kill or a
    crash, the path names the old store or the new one, whole. All names and contents stay, with dtypes, orders and
    ``writeable=False``, and so do derived arrays and their stored values, and the states of fits. Owner and permissions
    of the file stay, other hard links keep the old file. `Store.sequence` stays, too.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file. A symbolic link is followed, and its target replaced.
    progress : callable, optional
        Called repeatedly with the number of copied bytes of contents and the total number. If it raises an exception,
        the store stays as it was.

    Returns
    -------
    int
        The number of bytes by which the file is smaller now; 0 if it could not become smaller, and was not replaced.

    Raises
    ------
    StoreLockedError
        Any process has the store open for writing, or with ``exclusive=True``. Other readers go on with the old file,
        and `Store.refresh`, `Store.read`, `Store.wait` and `Store.backup` tell them that another one has taken its
        place.
    CorruptStoreError
        The store is damaged, and not changed: `salvage` copies what is sound.
    OutOfSpaceError
        There is no space for the new file beside the old one. The store is not changed.
    StoreNotFoundError, ReadOnlyStoreError, StoreIOError, NotAStoreError, FormatVersionError
    """
    name = path_of(path)
    return locked(name, lambda held: _in_place(name, held, progress))


def _in_place(name: str, held: FileLock, progress: Progress | None) -> int:
    source = Catalog(opened_core(name, held, "auto", read_only=True), read_only=True)
    try:
        refuse_unknown_features(held.fd, name)  # the new file would lack what they mean
        report = check(source)
        if not report.ok:
            raise CorruptStoreError(f"{name!r} is damaged; pmstore.salvage copies what is sound: {report}")
        return _compacted(name, source, os.fstat(held.fd), progress)
    finally:
        source.close()


def _compacted(name: str, source: Catalog, status: os.stat_result, progress: Progress | None) -> int:
    contents, room = _sizes(source)
    with contextlib.suppress(OutOfSpaceError):
        return _copied(name, source, status, progress, contents, room)
    try:
        return _copied(name, source, status, progress, contents, None)  # the room was too little
    except OutOfSpaceError as error:
        text = f"{name!r} is as it was: there is no space for a compacted copy beside it, which takes up to "
        raise OutOfSpaceError(error.errno, f"{text}{size_text(room)} ({error})") from error


def _copied(
    name: str, source: Catalog, status: os.stat_result, progress: Progress | None, contents: int, room: int | None
) -> int:
    done = 0
    try:
        with written_anew(name, (os.path.realpath(name), status), room, source.core.sequence) as new:
            for row in source.core.scan(b""):
                if row.key != LINEAGE_KEY:
                    new.put(row.key, row.entry, checked(source.core, row.entry))
                done += trimmed(row.entry).length
                if progress is not None and row.entry.offset:
                    progress(done, contents)
            new.put(LINEAGE_KEY, entry_of(lineage_of(source.core), parent_of(source.core)))  # the file has another id
            new.catalog.core.commit()
            gained = status.st_size - new.catalog.core.stats()["file_size"]
            if gained <= 0:
                raise _NothingGained
    except _NothingGained:
        return 0
    return gained


def _sizes(source: Catalog) -> tuple[int, int]:
    """The bytes of all contents, and the bytes of a region that holds them, at most (docs/format.md)."""
    contents = pages = leaves = separators = room = 0
    slabs = dict.fromkeys(SLABS, 0)
    for row in source.core.scan(b""):
        length = trimmed(row.entry).length
        cell = 34 + len(row.key) + len(row.entry.meta)
        if cell > room:  # keys only grow: each leaf is full before the next one begins
            leaves, room = leaves + 1, _NODE
            separators += 34 + len(row.key)
        room -= cell
        if row.entry.offset:
            size = (length + 7) // 8 * 8 + 8 * -(-length // BLOCK)  # with the hashes of its blocks
            if size > SLABS[-1]:
                pages += -(-size // BLOCK)
            else:
                slabs[next(block for block in SLABS if block >= size)] += 1
        contents += length
    pages += sum(-(-count // (_NODE // block)) for block, count in slabs.items())
    pages += leaves + 2 * separators // _NODE  # inner nodes are half full, at least
    return contents, (pages + pages // 4096 + 8) * BLOCK
