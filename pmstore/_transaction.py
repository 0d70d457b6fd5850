"""Transactions: whose turn it is, and the object of the with statement.

::

              enter                     enter (same thread: joins)
    IDLE ───────────────► OPEN depth 1 ◄──────────────► OPEN depth n
      ▲                    │   │                           │
      │ leave: commit      │   │ leave: roll back          │ leave by an exception
      ├────────────────────┘   │ (an exception)            ▼
      ├────────────────────────┘                        DOOMED
      └──── leave the outermost: roll back, and TransactionError if no exception is passing ──┘

Leaving has to happen whatever a signal handler raises, and when. Python runs handlers when a function is entered,
so that a KeyboardInterrupt may be raised in the very first instruction of an ``__exit__``, before any ``try``: the
most likely place of all, if the last statement of the block is one long call into numpy. So what the with statement
holds on to is a callable, `_Guard`, that nobody else refers to: when it dies and its transaction has not been left,
it leaves it.
"""

from __future__ import annotations

import functools
import threading
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pmstore._errors import TransactionError

if TYPE_CHECKING:
    from pmstore._store import Store

__all__ = ["Transaction", "Turn"]


class Turn:
    """Which thread may commit: the one that holds `lock`, which C code alone takes and releases.

    owner, depth and doomed are the open transaction's: the thread's id, how many with statements it is in, and
    whether an exception left an inner one.
    """

    __slots__ = ("depth", "doomed", "lock", "owner")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: int | None = None
        self.depth = 0
        self.doomed = False

    def mine(self) -> bool:
        """Whether the calling thread is inside a transaction."""
        return self.owner == get_ident()


class Transaction:
    """What `Store.transaction` gives to a with statement, once."""

    __slots__ = ("_inside", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._inside = False

    def __enter__(self) -> Store:
        store = self._store
        turn = store._turn
        me = get_ident()
        if self._inside:
            raise TransactionError("this transaction has begun already: each with statement needs its own")
        if turn.owner == me:
            store._writable()
            turn.depth += 1
            self._inside = True
            return store
        try:
            turn.lock.acquire()
        except BaseException:
            # Interrupted; perhaps just after the lock was taken. From there to the return no handler runs.
            if turn.lock._is_owned():  # type: ignore[attr-defined]
                turn.lock.release()
            raise
        turn.owner = me
        turn.depth = 1
        self._inside = True
        if not store._usable:
            turn.owner = None
            turn.depth = 0
            self._inside = False
            turn.lock.release()
            store._writable()  # raises: read-only, or closed, perhaps while this thread waited
        return store

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:

        class _Exit:
            """A descriptor, as with statements look ``__exit__`` up before they call ``__enter__``."""

            __slots__ = ()

            def __get__(self, transaction, owner=None):
                return _leave if transaction is None else _Guard(_leave, transaction)

        __exit__ = _Exit()


def _leave(
    transaction: Transaction,
    kind: type[BaseException] | None,
    error: BaseException | None = None,
    traceback: TracebackType | None = None,
) -> None:
    store = transaction._store
    turn = store._turn
    finished = False
    try:
        if not transaction._inside or not store._usable:  # left already, forked or closed
            finished = True
            if kind is None:
                store._writable()  # raises
        elif turn.depth > 1:
            if kind is not None:
                turn.doomed = True
            finished = True
        elif kind is not None:
            store._rollback_now()
            finished = True
        elif turn.doomed:
            store._rollback_now()
            finished = True
            raise TransactionError(
                "everything since the last commit was rolled back: an exception had left an inner transaction"
            )
        else:
            try:
                store._commit_now()
            except Exception:  # what is pending stays pending
                finished = True
                raise
            finished = True
    finally:
        # If this is interrupted too, the transaction is still inside, and _Guard leaves it. No function of Python's is
        # called, and so no handler, from where it isn't.
        if store._forked:
            transaction._inside = False
        elif transaction._inside and turn.depth > 1:
            if not finished:
                turn.doomed = True
            turn.depth -= 1
            transaction._inside = False
        elif transaction._inside:
            try:
                if not finished:
                    store._rollback_now()
            finally:
                turn.owner = None
                turn.depth = 0
                turn.doomed = False
                transaction._inside = False
                try:
                    turn.lock.release()
                except RuntimeError:  # a generator, suspended inside a transaction, was closed by another thread
                    turn.lock._release_save()  # type: ignore[attr-defined]


class _Guard(functools.partial):  # type: ignore[type-arg]
    """`_leave` of one transaction. Only the with statement refers to it, so that it dies with the statement."""

    __slots__ = ()

    def __del__(self) -> None:
        transaction: Any = self.args[0]
        if transaction._inside:
            _leave(transaction, KeyboardInterrupt)
