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
calls is a method of an object that nobody else refers to: when that dies and the transaction has not been left, it
leaves it. Having left, it becomes an object of a class without a ``__del__``, so that then no code of Python's runs
when it dies: an interrupt there would only be reported, and be lost.

All this is on the way of every commit, and an 8-byte commit takes 0.3 µs: what is done here in an odd way is done so
because it is the quickest. A lock's acquire and release take half as long as a with statement, whether a thread owns
the lock tells as much as the thread's id, and classes with slots and methods are quicker than partials and weak
references. `Store.commit` asks for its turn too: a signal handler that interrupts it may want a transaction, and would
wait for ever for another thread that had the turn and waited for the catalog's lock.

Transactions are left in the reverse of the order in which they were entered, unless a generator or a coroutine was
suspended inside one. Then nobody can say which changes are whose, so everything is rolled back, and each of those
concerned is told.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pmstore._core import all_ranges
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

    depth and doomed are the open transaction's, which is that of the lock's owner: how many with statements it is in
    (0: there is none), and why it can't be committed, or "". only: what it promises to change of arrays (see _only.py),
    or None: anything.
    """

    __slots__ = ("depth", "doomed", "lock", "only")

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.depth = 0
        self.doomed = ""
        self.only: Any = None

    def mine(self) -> bool:
        """Whether the calling thread is inside a transaction."""
        return self.depth > 0 and bool(self.lock._is_owned())


class Transaction:
    """What `Store.transaction` gives to a with statement, once.

    It has no ``__init__``, which would be half of what making it costs: the slots are set by who makes it.
    """

    __slots__ = ("_depth", "_only", "_store")

    _store: Store
    _only: Any  # as of Turn
    _depth: int  # how many with statements there were when this one was entered, with it; 0: not inside

    def __enter__(self) -> Store:
        store = self._store
        turn = store._turn
        if self._depth:
            raise TransactionError("this transaction has begun already: each with statement needs its own")
        if turn.depth and turn.lock._is_owned():
            store._writable()
            if turn.doomed is _OUT_OF_ORDER:
                raise TransactionError(_OUT_OF_ORDER)
            if turn.only is not None:
                turn.only = None if self._only is None else all_ranges(turn.only, self._only)
            turn.depth = self._depth = turn.depth + 1
            return store
        try:
            turn.lock.acquire()
        except BaseException:
            # Interrupted; perhaps just after the lock was taken. From there to the return no handler runs.
            if turn.lock._is_owned():
                turn.lock.release()
            raise
        turn.only = self._only
        turn.depth = self._depth = 1
        if not store._usable:
            turn.depth = self._depth = 0
            turn.lock.release()
            store._writable()  # raises: read-only, or closed, perhaps while this thread waited
        return store

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:

        class _Exit(property):
            """With statements look ``__exit__`` up before they call ``__enter__``; an ExitStack takes the class's."""

            def __call__(self, transaction, *what):
                return self.fget(transaction)(*what)

        @_Exit
        def __exit__(self):
            # If it is inside, entering will raise, and what was entered goes on.
            leaver = _Leaver() if self._depth else _Holder()
            leaver.transaction = self
            return leaver._leave


class _Leaver:
    """Leaves a transaction when it is told to."""

    __slots__ = ("transaction",)

    transaction: Transaction

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        transaction = self.transaction
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
                    store._commit_now(turn.only)
                except Exception:  # what is pending stays pending
                    finished = True
                    raise
                finished = True
        finally:
            # If this is interrupted too, the transaction is still inside, and is left when the with statement lets go
            # of it. No function of Python's is called, and so no handler, from where it isn't.
            if store._forked or not transaction._depth:
                transaction._depth = 0
                self.__class__ = _Leaver
            elif turn.depth > 1:
                if not finished and not turn.doomed:
                    turn.doomed = _INNER_FAILED
                turn.depth -= 1
                transaction._depth = 0
                self.__class__ = _Leaver
            else:
                try:
                    if not finished:
                        store._rollback_now()
                finally:
                    turn.depth = 0
                    turn.doomed = ""
                    transaction._depth = 0
                    self.__class__ = _Leaver
                    try:
                        turn.lock.release()
                    except RuntimeError:  # a generator, suspended inside a transaction, was closed by another thread
                        turn.lock._release_save()


class _Holder(_Leaver):
    """The same, and also when it dies."""

    __slots__ = ()

    def __del__(self) -> None:
        if self.transaction._depth:
            self._leave(KeyboardInterrupt)
