"""The commits and rollbacks of a store: what a transaction calls when it ends."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Collection
from typing import Any, Protocol

from pmstore._catalog.catalog import Catalog
from pmstore._core import all_ranges
from pmstore._errors import DetachedError, LostUpdateWarning, TransactionError
from pmstore._locks import Lock, TransactionLock
from pmstore._store.callers import outside
from pmstore._store.only import violation

__all__ = ["Commits", "Companion"]

_COLLECTIONS = 2  # the first one may free what holds others from C code


class Companion(Protocol):
    """An object that a store calls at its commits and rollbacks: pmstore.torch keeps a module and its optimizer there.

    The store calls it in the thread that holds the transaction lock, and keeps a weak reference only, until it leaves.
    """

    def before_commit(self) -> Collection[str]:
        """Put the companion's changes into the store, so that the commit contains them. Returns warnings of what can't
        be stored. An error is one of the commit: nothing is committed, and all changes stay pending."""

    def after_rollback(self) -> None:
        """Take the store's values over. A transaction that was abandoned is rolled back without this call: the
        catalog's `rollbacks` counts all of them."""

    def after_close(self) -> None:
        """The store is closed."""


class Commits:
    """A store's transaction lock, and its commits and rollbacks, made by the thread that holds that lock.

    It is the `Committer` of the store's transactions. The commit of 8 bytes takes as long as a few attributes of a
    class that has __getattr__, as a store has, so that this is a class of its own.

    Parameters
    ----------
    usable : bool
        Whether the store may change.
    below : Lock
        The lock that is taken after the transaction lock.
    """

    __slots__ = ("_catalog", "_debug", "_untold", "companions", "leaving", "lock")

    def __init__(self, catalog: Catalog, usable: bool, below: Lock) -> None:
        self._catalog = catalog
        self._debug = os.environ.get("PMSTORE_DEBUG", "0") not in ("", "0")  # violations of only= raise errors
        self._untold: list[str] = []  # warnings of companions, for the next commit that succeeds
        self.companions: dict[int, weakref.ref[Companion]] = {}  # by id
        self.leaving: list[Companion] = []  # that nothing else holds: their finalizers put them here
        self.lock = TransactionLock(usable, below)

    def commit(self) -> None:
        """Commit, outside of any transaction."""
        catalog = self._catalog
        # This or another thread is in a transaction, or in an import; a call here would be slow.
        if not self.lock.idle or catalog.importing:
            self.refuse_inside("commit")
        if catalog.lost_updates.any or self.companions or self.leaving:
            self.lock.inner.call(self.commit_now)
        else:
            self.lock.inner.call(catalog.lock.call, catalog.core.commit)

    def rollback(self) -> None:
        """Roll back, outside of any transaction."""
        self.refuse_inside("rollback")
        self.lock.inner.call(self.roll_back_now)

    def refuse_inside(self, what: str) -> None:
        """Raise the error of a call that can't be made inside a transaction or an import, or of this store."""
        self.require_writable()
        if self.lock.mine():
            how = "raise an exception that leaves" if what == "rollback" else "leave"
            raise TransactionError(f"{what}() inside a transaction: {how} the with statement instead")
        self._catalog.refuse_in_import()

    def accompany(self, companion: Companion) -> None:
        """Call this companion at each commit and rollback, as long as it exists, or is in `leaving`."""
        companions, number = self.companions, id(companion)
        companions[number] = weakref.ref(companion, lambda _: companions.pop(number, None))

    def followed(self) -> list[Companion]:
        """All that are to be called."""
        found = [companion for one in list(self.companions.values()) if (companion := one()) is not None]
        return list({id(companion): companion for companion in [*found, *self.leaving]}.values())

    def _ask_companions(self) -> None:
        """Let them put their changes into the store. One that can't, and is garbage, leaves: that is no error."""
        for companion in list(self.companions.values()):
            if (error := self._asked(companion)) is not None:
                for _ in range(_COLLECTIONS):
                    gc.collect()
                if companion() is not None:
                    raise error
        for leaving in list(self.leaving):
            self._untold += leaving.before_commit()

    def _asked(self, companion: weakref.ref[Companion]) -> DetachedError | None:
        """The error, without the frames that hold the companion."""
        found = companion()
        if found is None or found in self.leaving:
            return None
        try:
            self._untold += found.before_commit()
        except DetachedError as error:
            return error.with_traceback(None)
        return None

    def close(self) -> None:
        """The store is closed."""
        for companion in self.followed():
            companion.after_close()
        self.leaving.clear()

    def leave(self, below: Lock) -> None:
        """Refuse changes from now on, in a forked process. Another thread of the parent may hold the lock forever."""
        self.lock.usable = False  # for open transactions
        self.lock = TransactionLock(False, below)
        self.leaving.clear()

    # ---- what a transaction calls; see Committer

    def require_writable(self) -> None:
        self._catalog.writable()

    declared_in_both = staticmethod(all_ranges)

    def put_note(self, note: bytes) -> None:
        self._catalog.lock.call(self._catalog.put_note, note)

    def commit_now(self, only: Any = None, *, closing: bool = False) -> None:
        catalog = self._catalog
        if catalog.importing:  # a transaction in it
            catalog.refuse_in_import()
        if self.companions or self.leaving:
            self._ask_companions()
        if catalog.lost_updates.any or (only is not None and self._debug):
            for text in catalog.lock.call(self._commit_and_compare, only, closing):
                warnings.warn(text, LostUpdateWarning, stacklevel=outside()[0])
        elif only is None:
            catalog.lock.call(catalog.core.commit)
        else:
            catalog.lock.call(catalog.core.commit_only, only)
        while self._untold:
            warnings.warn(self._untold.pop(0), LostUpdateWarning, stacklevel=outside()[0])

    def _commit_and_compare(self, only: Any, closing: bool) -> list[str]:
        """Commit, and return warnings of changes that are not in the store."""
        catalog = self._catalog
        if only is not None and self._debug and (error := violation(catalog, only)) is not None:
            raise error
        lost = catalog.lost_updates.lost(all_of_them=closing)
        if only is None:
            catalog.core.commit()
        else:
            catalog.core.commit_only(only)
        catalog.lost_updates.committed()
        return lost

    def roll_back_now(self) -> None:
        self._catalog.rollback()
        if self.companions or self.leaving:
            for companion in self.followed():
                companion.after_rollback()
