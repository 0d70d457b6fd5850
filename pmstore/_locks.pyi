"""The types of csrc/python/."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import TypeVarTuple, Unpack

A = TypeVarTuple("A")
S = TypeVar("S")
T = TypeVar("T")

class Lock:
    undo: Any
    dropping: bool

    def __new__(cls, below: Lock | None = None) -> Lock: ...
    def acquire(self, wait: bool = True, /) -> bool: ...
    def release(self) -> None: ...
    def release_of_any_thread(self) -> None: ...
    def owned(self) -> bool: ...
    def call(self, function: Callable[[Unpack[A]], T], /, *arguments: Unpack[A]) -> T: ...
    def __enter__(self) -> Lock: ...
    def __exit__(self, *error: object) -> None: ...

class Committer(Protocol):
    """What a transaction calls, in the thread that holds the transaction lock."""

    def put_note(self, note: Any) -> None:
        """Take the note of the next commit."""

    def commit_now(self, only: Any) -> None:
        """Commit. only: the ranges of arrays that may have changed, or None."""

    def roll_back_now(self) -> None: ...
    def require_writable(self) -> None:
        """Raise the error that says why the store can't change."""

    def declared_in_both(self, outer: Any, inner: Any) -> Any:
        """The ranges that a transaction and one inside it declare together."""

class TransactionLock:
    inner: Lock
    usable: bool

    def __new__(cls, usable: bool, below: Lock) -> TransactionLock: ...
    @property
    def idle(self) -> bool: ...
    @property
    def doomed(self) -> bool: ...
    def mine(self) -> bool: ...
    def transaction(self, store: S, committer: Committer, only: Any, note: Any = None, /) -> Transaction[S]: ...

class RowPage:
    def __new__(
        cls,
        page: Any,
        address: int,
        place: int,
        end: int,
        row: int,
        names: tuple[str, ...],
        attempt: int,
        clock: Callable[[], float],
        /,
    ) -> RowPage: ...
    @property
    def place(self) -> int: ...
    def add(self, run: int, iteration: int, seconds: float, figures: Any, /) -> bool: ...

class Transaction(Generic[S]):
    def __enter__(self) -> S: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
