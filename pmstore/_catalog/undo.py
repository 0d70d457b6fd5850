"""The undoing of an operation that fails halfway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from pmstore._errors import Error
from pmstore._interrupts import later

__all__ = ["Undo"]

T = TypeVar("T")


class Undo(Generic[T]):
    """A context that makes a value for the with block, and takes it back if the block raises. No signal handler runs in
    it: one that commits would commit the half.

    It is no generator. An interrupt in the code of contextlib leaves a generator suspended, and when the garbage
    collector finds it, at any later time and in any thread, it takes back what was committed meanwhile.
    """

    __slots__ = ("_later", "_make", "_take_back", "_value")

    def __init__(self, make: Callable[[], T], take_back: Callable[[T], object]) -> None:
        self._make = make
        self._take_back = take_back
        self._later = later()

    def __enter__(self) -> T:
        self._later.__enter__()
        try:
            self._value = self._make()
        except BaseException:
            self._later.__exit__(None, None, None)
            raise
        return self._value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                with contextlib.suppress(Error):
                    self._take_back(self._value)
        finally:
            self._later.__exit__(kind, error, traceback)
