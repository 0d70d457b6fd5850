"""csrc/python/turn.c, as far as types go."""

from types import TracebackType
from typing import Any

from pmstore._store import Store

class Turn:
    lock: Any
    usable: bool

    def __new__(cls, usable: bool) -> Turn: ...
    @property
    def idle(self) -> bool: ...
    def mine(self) -> bool: ...
    def transaction(self, store: Store, only: Any, /) -> Transaction: ...

class Transaction:
    def __enter__(self) -> Store: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
