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
holds on to is a callable that nobody else refers to, and the transaction watches it through a weak reference: when it
dies and the transaction has not been left, that leaves it. Leaving drops the weak reference, so that otherwise no code
of Python's runs when it dies: an interrupt there would only be reported, and be lost.

Transactions are left in the reverse of the order in which they were entered, unless a generator or a coroutine was
suspended inside one. Then nobody can say which changes are whose, so everything is rolled back, and each of those
concerned is told.
"""

from __future__ import annotations

import threading
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import ref

from pmstore._errors import TransactionError

if TYPE_CHECKING:
    from pmstore._store import Store

__all__ = ["Transaction", "Turn"]

_INNER_FAILED = "everything since the last commit was rolled back: an exception had left an inner transaction"
_OUT_OF_ORDER = (
    "transactions were left out of order: an await or a yield inside a transaction let another one begin; "
    "everything since the last commit is rolled back"
)


class Turn:
    """Which thread may commit: the one that holds `lock`, which C code alone takes and releases.

    owner, depth and doomed are the open transaction's: the thread's id, how many with statements it is in, and why it
    can't be committed, or "".
    """

    __slots__ = ("depth", "doomed", "lock", "owner")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: int | None = None
        self.depth = 0
        self.doomed = ""

    def mine(self) -> bool:
        """Whether the calling thread is inside a transaction."""
        return self.owner == get_ident()


class Transaction:
    """What `Store.transaction` gives to a with statement, once."""

    __slots__ = ("_depth", "_store", "_watched")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._depth = 0  # how many with statements there were when this one was entered, with it; 0: not inside
        self._watched: object = None

    def __enter__(self) -> Store:
        store = self._store
        turn = store._turn
        me = get_ident()
        if self._depth:
            raise TransactionError("this transaction has begun already: each with statement needs its own")
        if turn.owner == me:
            store._writable()
            if turn.doomed is _OUT_OF_ORDER:
                raise TransactionError(_OUT_OF_ORDER)
            turn.depth = self._depth = turn.depth + 1
            return store
        try:
            turn.lock.acquire()
        except BaseException:
            # Interrupted; perhaps just after the lock was taken. From there to the return no handler runs.
            if turn.lock._is_owned():  # type: ignore[attr-defined]
                turn.lock.release()
            raise
        turn.owner = me
        turn.depth = self._depth = 1
        if not store._usable:
            turn.owner = None
            turn.depth = self._depth = 0
            turn.lock.release()
            store._writable()  # raises: read-only, or closed, perhaps while this thread waited
        return store

    def _abandoned(self, watched: object) -> None:
        """What the with statement held has died."""
        if self._depth:
            _leave(self, KeyboardInterrupt)
        self._watched = None

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:

        class _Exit:
            """A descriptor, as with statements look ``__exit__`` up before they call ``__enter__``."""

            __slots__ = ()

            def __get__(self, transaction, owner=None):
                if transaction is None:
                    return _leave
                leave = partial(_leave, transaction)
                if not transaction._depth:  # otherwise entering will raise, and what was entered goes on
                    transaction._watched = ref(leave, transaction._abandoned)
                return leave

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
        if not transaction._depth or not store._usable:  # left already, forked or closed
            finished = True
            if kind is None:
                store._writable()  # raises
        elif transaction._depth != turn.depth:
            turn.doomed = _OUT_OF_ORDER
            if turn.depth == 1:
                store._rollback_now()
            finished = True
            if kind is None:
                raise TransactionError(_OUT_OF_ORDER)
        elif turn.depth > 1:
            if kind is not None and not turn.doomed:
                turn.doomed = _INNER_FAILED
            finished = True
        elif kind is not None:
            store._rollback_now()
            finished = True
        elif turn.doomed:
            store._rollback_now()
            finished = True
            raise TransactionError(turn.doomed)
        else:
            try:
                store._commit_now()
            except Exception:  # what is pending stays pending
                finished = True
                raise
            finished = True
    finally:
        # If this is interrupted too, the transaction is still inside, and is left when the with statement lets go of
        # it. No function of Python's is called, and so no handler, from where it isn't.
        if store._forked:
            transaction._depth = 0
        elif transaction._depth and turn.depth > 1:
            if not finished and not turn.doomed:
                turn.doomed = _INNER_FAILED
            turn.depth -= 1
            transaction._depth = 0
        elif transaction._depth:
            try:
                if not finished:
                    store._rollback_now()
            finally:
                turn.owner = None
                turn.depth = 0
                turn.doomed = ""
                transaction._depth = 0
                try:
                    turn.lock.release()
                except RuntimeError:  # a generator, suspended inside a transaction, was closed by another thread
                    turn.lock._release_save()  # type: ignore[attr-defined]
        transaction._watched = None
