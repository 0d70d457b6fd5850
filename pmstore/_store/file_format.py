"""The version of a file's format: what a file has, and `upgrade`."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

from pmstore._errors import FormatVersionError
from pmstore._store.cores import opened_core
from pmstore._store.header import NEWEST, PLACES, SIZE, newest_header
from pmstore._store.held import FileLock
from pmstore._store.opening import locked, path_of

__all__ = ["FileFormat", "file_format", "refuse_unknown_features", "upgrade"]


class FileFormat(NamedTuple):
    """The format of a store's file. write_features: bits that a writer must know."""

    version: int
    write_features: int


def file_format(fd: int) -> FileFormat:
    """The format of an open file that the core has opened, by the newer one of its header's valid copies that can be
    read."""
    copies = []
    for place in PLACES:
        with contextlib.suppress(OSError):
            copies.append(os.pread(fd, SIZE, place))
    header = newest_header(copies)
    return FileFormat(header.version, header.write_features) if header else FileFormat(NEWEST, 0)


def refuse_unknown_features(fd: int, name: str) -> None:
    """Raise FormatVersionError if a pmstore that writes the file must know what this one does not."""
    features = file_format(fd).write_features
    if features:
        text = f"{name!r} uses features ({features:#x}) that this pmstore can't write: use a newer one"
        raise FormatVersionError(text)


def upgrade(path: str | bytes | os.PathLike[Any]) -> int:
    """Give a store's file the newest version of the format: 1.

    A store of format 0 opens as any other, and its first commit upgrades the file. This does it without a commit. Only
    the header is written, first one of its two copies: at any moment, also after a kill or a crash, the file is a whole
    store with all its commits, in the old format or the new one. Nothing happens to a file that has the newest version.
    `Store.sequence` stays.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file. A symbolic link is followed.

    Returns
    -------
    int
        The version that the file had.

    Raises
    ------
    StoreLockedError
        Any process has the store open for writing, or keeps writers out.
    FormatVersionError
        A newer pmstore wrote the store. It is not changed.
    StoreNotFoundError, ReadOnlyStoreError, StoreIOError, OutOfSpaceError, NotAStoreError, CorruptStoreError
    """
    name = path_of(path)
    return locked(name, lambda held: _upgraded(name, held))


def _upgraded(name: str, held: FileLock) -> int:
    before = file_format(held.fd).version
    core = opened_core(name, held, "auto", read_only=False)  # it recovers the store, which may write the header
    try:
        if file_format(held.fd).version < NEWEST:
            core.checkpoint()
    finally:
        core.close()
    return before
