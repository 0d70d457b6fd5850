"""What takes back the half of an operation that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from pmstore._errors import Error

__all__ = ["Undo"]

T = TypeVar("T")


class Undo(Generic[T]):
    """A context that gives a value to the with block, and takes it back if the block raises.

    It is no generator. An interrupt in the code of contextlib leaves a generator suspended, and when the garbage
    collector finds it, at any later time and in any thread, it takes back what was committed meanwhile. An interrupt in
    this one loses the undo. A new extent then stays until the next commit or rollback; parts of an object stay until a
    rollback, and `check` tells of them.
    """

    __slots__ = ("_take_back", "_value")

    def __init__(self, value: T, take_back: Callable[[T], object]) -> None:
        self._value = value
        self._take_back = take_back

    def __enter__(self) -> T:
        return self._value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(Error):
                self._take_back(self._value)
