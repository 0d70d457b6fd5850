"""The deletion of local states that nobody needs any more.

The local states of a fit are in a folder with the hash of its fingerprint. A coordinator commits the fingerprint before
it asks for the first epoch, and has the lock of its store as long as it works::

    commit the fingerprint ──▶ workers make the folder ──▶ … ──▶ the fit is forgotten, in a commit
                                                                     │
                                        in a transaction of the store: no fit has the hash ──▶ rename the folder
                                                                                                 │
                                                                             delete what has the new name

In a transaction of the store that holds its lock, no coordinator begins a fit. So a folder whose hash is that of no fit
then is needed by none, and a coordinator that begins the same fit later makes a new folder. What a crash leaves has
the new name, or is still a folder of no fit: the next call deletes it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from pmstore._errors import ReadOnlyStoreError
from pmstore._resume.fingerprint import digest
from pmstore._resume.fit_group import FitGroup, StoreOrPath, opened, path_of
from pmstore._resume.state import PROGRESS
from pmstore._store.store import Store
from pmstore.scale._copies import Copies

_FOLDER = re.compile(r"[0-9a-f]{16}")
_DELETED = re.compile(r"[0-9a-f]{16}\.deleted-[0-9]+")
_STATE = re.compile(r"shard-[0-9]+\.pm")


def prune_local(
    store: StoreOrPath, *, local: str | os.PathLike[str] | None = None, finished: bool = False
) -> list[str]:
    """Delete the local states of fits that a store does not have any more.

    The local states of shards stay when a fit ends, is forgotten, or is begun again with other parameters. This call
    frees their space on this machine. States that a fit in the store may continue with are kept. A crash at any moment
    costs nothing: the next call deletes the rest.

    Parameters
    ----------
    store : Store or path
        The store of the fits. A path must name an existing store. If another process has it open, this waits.
    local : path, optional
        The directory of local states, as it was given to `MapReduce.run`. Only fits of this store may have states in
        it, as those of other stores look like states of no fit. By default the store's path with ``.local`` behind it.
    finished : bool, default=False
        Delete the states of finished fits, too. `MapReduce.local_parts` then computes each part again from the log of
        broadcasts. States of a fit whose log was cut off, because there were copies in an archive, are kept.

    Returns
    -------
    list of str
        The names of the folders that were deleted. Files that are no local states are left there, and folders with
        nothing else.

    Raises
    ------
    FileNotFoundError
        There is no store.
    ReadOnlyStoreError
        The open store is a reader: another process may be fitting.
    TransactionError
        A transaction of the open store is open in this thread.
    OSError
        A folder can't be deleted.
    """
    if not isinstance(finished, bool):
        raise TypeError(f"finished is True or False, not {finished!r:.200}")
    path = local_directory(store) if local is None else os.path.abspath(os.fspath(local))
    with opened(store, "prune_local() commits", "r+") as own:
        if own.mode == "r":
            raise ReadOnlyStoreError(f"{own.path} is open for reading: open it for writing, so that no fit is at work")
        own.commit()  # what is pending: a rollback would bring back a fit whose folder was renamed
        with own.transaction():
            needed = set(_needed(own, finished))
            names = [name for name in _folders(path) if _FOLDER.fullmatch(name) and name not in needed]
            found = [name for name in names if _has_states(os.path.join(path, name))]
            for name in found:
                os.rename(os.path.join(path, name), os.path.join(path, _unused(path, name)))
    for name in _folders(path):
        if _DELETED.fullmatch(name):
            _delete(os.path.join(path, name))
    return found


def local_directory(store: StoreOrPath) -> str:
    """The directory that the workers of this machine use by default."""
    return f"{path_of(store)}.local"


def forget_copies(store: Store, name: str, copies: Copies) -> None:
    """Delete the copies of the local states of a fit, unless another group of the store has the same fit. The fit is
    forgotten after that: what a crash leaves of the copies can still be found."""
    fit_group = FitGroup(store, name)
    store.commit()  # what is pending: an error of the archive would roll it back
    with fit_group.worked_on(), store.transaction():  # no thread begins the same fit in another group
        fingerprint = fit_group.fingerprint
        if fingerprint is not None and list(_needed(store, False)).count(run := digest(fingerprint)) == 1:
            copies.forget(run)


def _needed(store: Store, finished: bool) -> Iterator[str]:
    """The names of the folders that fits in a store need."""
    for name in store:
        group, _, last = name.rpartition("/")
        fit_group = FitGroup(store, group) if group and last == "fingerprint" else None
        fingerprint = fit_group.fingerprint if fit_group is not None else None
        if fit_group is None or fingerprint is None:
            continue
        if finished and fit_group.finished and _has_whole_log(fit_group):
            continue
        yield digest(fingerprint)


def _has_whole_log(fit_group: FitGroup) -> bool:
    """Whether the local states can be computed again from the log alone."""
    progress = fit_group.group[PROGRESS]
    names = progress.dtype.names
    return "log_from" in names and progress["log_from"] == (progress["began"] if "began" in names else 0)


def _folders(path: str) -> list[str]:
    """The names of the folders in a directory, which may not be there, or be something else."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _has_states(folder: str) -> bool:
    """Whether there are local states in a folder, or nothing: a worker died before it made one."""
    return not os.listdir(folder) or bool(_states(folder))


def _states(folder: str) -> list[str]:
    """The names of the local states in a folder, which are files."""
    with os.scandir(folder) as entries:
        return [e.name for e in entries if _STATE.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)]


def _unused(path: str, name: str) -> str:
    """A name for a folder that is to be deleted."""
    number = 0
    while os.path.lexists(os.path.join(path, found := f"{name}.deleted-{number}")):
        number += 1
    return found


def _delete(folder: str) -> None:
    """Delete the local states in a folder, and the folder if nothing else is in it. Another call may do so, too."""
    with contextlib.suppress(FileNotFoundError):
        for name in _states(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        if not os.listdir(folder):
            os.rmdir(folder)
