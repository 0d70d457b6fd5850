"""`export`: arrays, values and attributes in formats that other programs read.

names, dtypes and shapes ── refuse what the format can't hold ──▶ arrays, one after the other ── sync ──▶ the name
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pmstore._errors import Error, StoreExistsError, class_of_write
from pmstore._interchange.formats import format_of
from pmstore._interchange.source import Progress, Source
from pmstore._interchange.target import new_target
from pmstore._store.opening import absolute, local_path

__all__ = ["export"]


def export(
    mapping: Mapping[str, Any],
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write arrays, values and attributes in another format, array by array, so that little of them is in memory at
    once.

    Arrays keep shape, dtype and elements. Values that are no arrays, and attributes, get a form that other programs
    read, and `load_into` reads them back with their exact types: docs/interchange.md has the forms of each format.

    Parameters
    ----------
    mapping : mapping of str to arrays and values
        A store, a group, or a version of an archive. A store that is open for writing is written with its pending
        changes, and must not be changed meanwhile; one that was opened with mode "r" shows one commit.
    path : path-like
        The new file or, for zarr, the new directory. It gets its name when it is complete and synced.
    format : {"zarr", "npz", "safetensors", "hdf5"}, optional
        By default, what the path ends in; .h5 is HDF5. zarr is version 3, with the library's own codecs.
    names : iterable of str, optional
        Names and groups to be written; all by default. Raises UnknownNameError for others.
    progress : callable, optional
        Called repeatedly with the number of written bytes of arrays and the total number. An exception ends the
        export.

    Returns
    -------
    int
        The number of names.

    Raises
    ------
    ValueError
        No format, or a name that the format can't hold.
    TypeError
        The format has no type for the dtype of an array. Nothing stays at the path.
    ModuleNotFoundError
        The package zarr or h5py is not installed.
    StoreExistsError
        There is something at the path.
    OutOfSpaceError, StoreIOError
        The file can't be written.
    CorruptStoreError, StaleSnapshotError
        An array is damaged, or a later commit has changed it. Nothing stays at the path.
    """
    target = absolute(local_path(path, "an export is written here: copy it there afterwards"))
    write = format_of(target, format, reads=False)
    if os.path.lexists(target):
        raise StoreExistsError(errno.EEXIST, f"{target!r} exists: an export is a new file", target)
    write.prepare()
    source = Source(mapping, progress, names)
    for one in source.arrays:
        write.check(one)
    try:
        with new_target(target, directory=write.directory) as temporary:
            write.write(source, temporary)
    except Error:
        raise
    except OSError as error:
        number = error.errno or errno.EIO
        text = f"{target!r} can't be written: {error.strerror or error}"
        raise class_of_write(number)(number, text, target) from error
    return len(source.arrays) + len(source.values)
