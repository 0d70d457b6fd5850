"""Warnings about lost work: a transaction that was never left, or a store that was never closed."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import TYPE_CHECKING

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.kinds import DERIVED, LIST, OBJECT
from pmstore._catalog.names import ATTRIBUTES_PREFIX, LIST_PREFIX, NAME_PREFIX, split_element, split_part
from pmstore._catalog.objects import head_of
from pmstore._errors import AbandonedTransactionWarning, Error, OutOfSpaceError, UncommittedChangesWarning
from pmstore._store.callers import outside

if TYPE_CHECKING:
    from pmstore._store.store import Store

__all__ = ["Undo", "warn_of_drop"]


class Undo:
    """The actions of the lock of a store's operations on an abandoned transaction; see csrc/python/lock.c.

    It refers to the catalog weakly: the catalog owns the lock, and the garbage collector doesn't look into the lock.
    """

    __slots__ = ("_catalog", "_failed", "_store", "closing")

    def __init__(self, catalog: Catalog, store: str) -> None:
        """store: the store's name in a warning."""
        self._catalog = weakref.ref(catalog)
        self.closing = False  # pending changes are dropped
        self._failed = False
        self._store = store

    def roll_back(self) -> None:
        """Take everything back to the last commit. The calling thread holds the lock."""
        catalog = self._catalog()
        if catalog is None or self.closing:
            return
        try:
            catalog.rollback()
        except OutOfSpaceError:
            raise  # the rollback is still to be done
        except Error:  # a closed or failed store can't commit anything
            self._failed = True

    def warn(self) -> None:
        """Warn the caller of the operation that found the transaction. If the store has failed, that caller gets an
        exception."""
        if self._failed:
            return
        _warn(
            f"{self._store}: a transaction was abandoned, and everything since the last commit was rolled back. It was "
            "left by the garbage collector, by another thread or by a signal handler, for example with a suspended "
            "generator or coroutine inside it, or it was never left",
            AbandonedTransactionWarning,
            outside()[1],
        )


def _warn(text: str, kind: type[Warning], place: str) -> None:
    """Show every warning, because each reports other work. place: "file:line"."""
    file, _, line = place.rpartition(":")
    warnings.warn_explicit(text, kind, file, int(line))


def count_names(catalog: Catalog) -> int:
    """Count the names with changes that a commit would contain. Derived arrays don't count: they are declared anew by
    their readers and can be computed again, and merely reading one changes its stored state.
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
            elif entry.kind == OBJECT:
                told.add(head_of(entry).id)
        elif key.startswith(ATTRIBUTES_PREFIX):
            names.add(NAME_PREFIX + key[1:-1])
        elif key.startswith(LIST_PREFIX) and (place := split_element(key)) is not None:
            lists.add(place[0])
        elif (part := split_part(key)) is not None:
            lists.add(part[0])
    return len(names) + len(lists - told) + len(arrays - extents)


def warn_of_drop(store: Store, name: str, opened: str) -> None:
    """Warn about a store that is about to be closed without a commit, by the garbage collector or at exit. opened:
    "file:line"."""
    doomed = store._commits.lock.doomed  # its transaction would be rolled back in any case, and its caller got an error
    lost = ""
    if not doomed and os.fstat(store._file_lock.fd).st_nlink:  # nothing keeps those of a file without a name
        try:
            count = count_names(store._catalog)
            if count:
                lost = (
                    f": the changes of {count:,} name{'s' * (count > 1)} since its last commit are lost. "
                    "commit(), close() or a with statement keeps them"
                )
        except OutOfSpaceError:  # the committed image must be brought up to date before the comparison
            lost = ", and its disk is full: changes since its last commit, if there were any, are lost"
        except (Error, MemoryError):  # a failed store has already raised its exception
            pass
    if not lost:
        warnings.warn(f"{name}, was not closed", ResourceWarning, stacklevel=4, source=store)
        return
    _warn(f"{name}, was not closed{lost}", UncommittedChangesWarning, opened)
