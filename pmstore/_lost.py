"""Telling of work that is lost: by a transaction that nobody left, or a store that nobody closed."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from pmstore._catalog import Catalog
from pmstore._errors import AbandonedTransactionWarning, Error, OutOfSpaceError, UncommittedChangesWarning
from pmstore._kinds import DERIVED, LIST
from pmstore._names import LIST_PREFIX, NAME_PREFIX, split_element
from pmstore._opening import outside

if TYPE_CHECKING:
    from pmstore._store import Store

__all__ = ["Undo", "warn_of_drop"]


class Undo:
    """What the lock of a store's operations does about a transaction that was abandoned; see csrc/python/lock.c.

    It refers to the catalog weakly, for the lock is the catalog's, and the garbage collector doesn't look into it.
    """

    __slots__ = ("_catalog", "_failed", "_store", "closing")

    def __init__(self, catalog: Catalog, store: str) -> None:
        """store: what it is called in a warning."""
        self._catalog = weakref.ref(catalog)
        self.closing = False  # what is pending is dropped
        self._failed = False
        self._store = store

    def roll_back(self) -> None:
        """Take everything back to the last commit. The lock is the calling thread's."""
        catalog = self._catalog()
        if catalog is None or self.closing:
            return
        try:
            catalog.rollback()
        except OutOfSpaceError:
            raise  # it is still to be done
        except Error:  # of a store that is closed, or has failed, nothing can be committed
            self._failed = True

    def warn(self) -> None:
        """Say so to the caller of the operation that found it; one of a store that has failed gets an exception."""
        if self._failed:
            return
        _warn(
            f"{self._store}: a transaction was abandoned, and everything since the last commit was rolled back. The "
            "garbage collector, another thread or a signal handler ended what was suspended inside it, such as a "
            "generator or a coroutine, or nobody left it",
            AbandonedTransactionWarning,
            outside()[1],
        )


def _warn(text: str, kind: type[Warning], place: str) -> None:
    """Every time, for each one tells of other work. place: "file:line"."""
    file, _, line = place.rpartition(":")
    warnings.warn_explicit(text, kind, file, int(line))


def count_names(catalog: Catalog) -> int:
    """Names of which a commit would carry something. Derived arrays don't count: who reads them declares them anew, and
    they are computed again. To read one changes what the store keeps of it.
    """
    with catalog.lock:
        rows = catalog.core.pending()
    names, lists, told, extents, arrays = set(), set(), set(), set(), set()
    for key, entry in rows:
        if not key:
            arrays.add(entry.offset)
            continue
        extents.add(entry.offset)
        if key.startswith(NAME_PREFIX) and entry.kind != DERIVED:
            names.add(key)
            if entry.kind == LIST:
                told.add(catalog.list_id(entry))
        elif key.startswith(LIST_PREFIX) and (place := split_element(key)) is not None:
            lists.add(place[0])
    return len(names) + len(lists - told) + len(arrays - extents)


def warn_of_drop(store: Store, name: str, opened: str) -> None:
    """For a store that is about to be closed without a commit, as nobody closed it. opened: "file:line"."""
    doomed = store._turn.doomed  # its transaction would be rolled back in any case, and somebody was told
    lost = ""
    if not doomed:
        try:
            count = count_names(store._catalog)
            if count:
                lost = (
                    f": the changes of {count:,} name{'s' * (count > 1)} since its last commit are lost. "
                    "commit(), close() or a with statement keeps them"
                )
        except OutOfSpaceError:  # home has to be brought up to date before it can be compared
            lost = ", and its disk is full: changes since its last commit, if there were any, are lost"
        except (Error, MemoryError):  # one that has failed told so by an exception
            pass
    if not lost:
        warnings.warn(f"{name}, was not closed", ResourceWarning, stacklevel=4, source=store)
        return
    _warn(f"{name}, was not closed{lost}", UncommittedChangesWarning, opened)
