"""The commits and rollbacks of a store: what a transaction calls when it ends."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pmstore._catalog.catalog import Catalog
from pmstore._core import all_ranges
from pmstore._errors import CorruptStoreError, LostUpdateWarning, TransactionError
from pmstore._interrupts import later
from pmstore._locks import Lock, TransactionLock
from pmstore._store.callers import outside
from pmstore._store.only import violation

__all__ = ["Commits", "Companion"]

_COLLECTIONS = 2  # the first one may free what holds others from C code


class Companion(Protocol):
    """An object that a store calls at its commits and rollbacks: pmstore.torch keeps a module and its optimizer there.

    The store calls it in the thread that holds the transaction lock.
    """

    def before_commit(self) -> None:
        """Put the companion's changes into the store, so that the commit contains them. An error is one of the commit:
        nothing is committed, and all changes stay pending."""

    def keeps_alive(self) -> Iterable[object]:
        """The objects that have changes. The program may let them go before these are in the store, which keeps the
        companion and them until then. If there are none, it keeps nothing."""

    def farewell(self, failure: str) -> str:
        """A warning that the changes are not in the store, if this is garbage; or "" """

    def after_rollback(self) -> None:
        """Take the store's values over. A transaction that was abandoned is rolled back without this call: the
        catalog's `rollbacks` counts all of them."""

    def after_close(self) -> None:
        """The store is closed."""


_BEFORE_COMMIT, _AFTER_ROLLBACK = map(operator.methodcaller, ("before_commit", "after_rollback"))


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

    __slots__ = ("_catalog", "_collects_from", "_debug", "_kept", "_note", "_turn", "_untold", "companions", "lock")

    def __init__(self, catalog: Catalog, usable: bool, below: Lock) -> None:
        self._catalog = catalog
        self._debug = os.environ.get("PMSTORE_DEBUG", "0") not in ("", "0")  # violations of only= raise errors
        self._note: tuple[int, bytes | None] = -1, None  # the sequence before a commit with a note, and its own note
        self._untold: list[str] = []  # warnings of companions, for the next commit that succeeds
        self.companions: dict[int, weakref.ref[Companion]] = {}  # by id
        self._kept: dict[int, tuple[object, ...]] = {}  # the same, and what they keep alive, until it is in the store
        self._collects_from = 2  # companions
        self._turn = 0  # so often were they asked
        self.lock = TransactionLock(usable, below)

    def commit(self) -> None:
        """Commit, outside of any transaction."""
        catalog = self._catalog
        # This or another thread is in a transaction, or in an import; a call here would be slow.
        if not self.lock.idle or catalog.importing:
            self.refuse_inside("commit")
        if catalog.lost_updates.any or self.companions:
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
        """Call this companion at each commit and rollback, and keep it at least until the next one."""
        companions, number = self.companions, id(companion)
        companions[number] = weakref.ref(companion, lambda _: companions.pop(number, None))
        self._keep([number])

    def leave_alone(self, companion: Companion) -> None:
        """Call it no more."""
        self.companions.pop(id(companion), None)
        self._kept.pop(id(companion), None)

    def followed(self) -> list[Companion]:
        """All that are to be called."""
        return [companion for one in list(self.companions.values()) if (companion := one()) is not None]

    def settle(
        self,
        ask: Callable[[Companion], None] = _BEFORE_COMMIT,
        *,
        of: Callable[[Companion], bool] = lambda companion: True,
        strict: bool = True,
    ) -> None:
        """Let companions put their changes into the store, and let those go that nothing else holds.

        ask: what is called of each. of: for which companions. strict: raise the error of one that fails, unless it is
        garbage.
        """
        asked = [companion for companion in self.followed() if of(companion)]
        if not asked:
            return
        self._turn += 1
        numbers = list(map(id, asked))
        failed = [(weakref.ref(one), farewell) for one in asked if (farewell := self._farewell(one, ask)) is not None]
        asked.clear()
        self._let_go(numbers, bool(failed))
        for one, farewell in failed:
            companion = one()
            if companion is None and farewell and ask is _BEFORE_COMMIT:  # a rollback loses nothing
                self._untold.append(farewell)
            elif companion is not None and strict:
                ask(companion)  # which fails again

    def _farewell(self, companion: Companion, ask: Callable[[Companion], None]) -> str | None:
        """Ask a companion. If that fails: its farewell. The error, whose frames hold the companion, goes.

        An error that does not come again is that of a signal handler, or of a commit in one.
        """
        turn = self._turn
        try:
            ask(companion)
            return None
        except Exception as error:
            first = error.with_traceback(None)
        try:
            ask(companion)
        except Exception as error:
            return companion.farewell(f"{type(error).__name__}: {error}")
        if turn == self._turn:
            raise first
        return None

    def settle_before(self) -> None:
        """Settle before names are copied or renamed, as far as companions can, and no other thread is in a transaction,
        which may wait for this one."""
        if not self.companions or not self.lock.usable:
            return
        with later():  # so that no handler runs between lock and block
            if self.lock.inner.acquire(False):
                try:
                    self.settle(strict=False)
                finally:
                    self.lock.inner.release()

    def _let_go(self, numbers: list[int], failed: bool) -> None:
        """Keep what the program still holds of some companions. All their changes are in the store.

        What holds itself, as an optimizer and its companion do, needs a collection of garbage. There is one after a
        failure, or if there are twice as many companions as after the last one.
        """
        self._keep(numbers)
        if not failed and len(self.companions) < self._collects_from:
            return
        try:
            for number in numbers:
                self._kept.pop(number, None)
            for _ in range(_COLLECTIONS if failed else 1):
                gc.collect()
        finally:  # also if a handler raises an exception
            self._keep(numbers)
        self._collects_from = 2 * max(1, len(self.companions))

    def _keep(self, numbers: list[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)
        for number in numbers:
            companion = self.companions.get(number, _nothing)()
            kept = () if companion is None else tuple(companion.keeps_alive())
            if kept:
                self._kept[number] = companion, *kept

    def close(self) -> None:
        """The store is closed."""
        for companion in self.followed():
            companion.after_close()
        self.companions.clear()
        self._kept.clear()

    def leave(self, below: Lock) -> None:
        """Refuse changes from now on, in a forked process. Another thread of the parent may hold the lock forever."""
        self.lock.usable = False  # for open transactions
        self.lock = TransactionLock(False, below)
        self._kept.clear()

    # ---- what a transaction calls; see Committer

    def require_writable(self) -> None:
        self._catalog.writable()

    declared_in_both = staticmethod(all_ranges)

    def put_note(self, note: bytes) -> None:
        catalog = self._catalog
        if self._note[0] != catalog.core.sequence:
            before = None
            with contextlib.suppress(CorruptStoreError):
                before = catalog.note()
            self._note = catalog.core.sequence, before
        catalog.lock.call(catalog.put_note, note)

    def note(self) -> bytes | None:
        """The note of the last commit. The store may have that of one that failed."""
        sequence, note = self._note
        return note if sequence == self._catalog.core.sequence else self._catalog.note()

    def commit_now(self, only: Any = None, *, closing: bool = False) -> None:
        catalog = self._catalog
        if catalog.importing:  # a transaction in it
            catalog.refuse_in_import()
        if self.companions:
            self.settle()
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
        if self.companions:
            self.settle(_AFTER_ROLLBACK)


def _nothing() -> None:
    """A reference to what is gone."""
