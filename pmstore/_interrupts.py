"""Parts of opening and closing in which no signal handler runs: an interrupt there would leave a lock without a store.

Python runs signal handlers in the main thread, between any two instructions. In a `with later():` statement they are
only noted, and they run when it ends, or at a call of `deliver` where nothing is half done.

Setting a handler takes back `signal.siginterrupt(number, False)`, which can't be read by Python: docs/guarantees.md
names that limit.
"""

from __future__ import annotations

# The module signal converts numbers to enums and back, which for all signals takes longer than to open a store.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["deliver", "later"]

_SIGNALS = sorted(_signal.valid_signals())

_depth = 0
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the program's own
_noted: list[tuple[int, FrameType | None]] = []


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append((number, frame))


def deliver() -> None:
    """Run the handlers of the signals that came since `later` was entered. They may raise."""
    while _noted and threading.current_thread() is threading.main_thread():
        number, frame = _noted.pop(0)
        _handlers[number](number, frame)


def _restore() -> None:
    """Give the program its handlers back. Those that are back may run in between, and raise."""
    try:
        for number, handler in _handlers.items():
            if _signal.getsignal(number) is _note:
                _signal.signal(number, handler)
    except BaseException:
        _restore()
        raise


class later:
    """A context in which handlers do not run. Contexts may be nested; in threads other than the main one they do
    nothing."""

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        global _depth
        self._entered = threading.current_thread() is threading.main_thread()
        if not self._entered:
            return
        _depth += 1
        if _depth > 1:
            return
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _note:
                    _handlers[number] = handler
                    _signal.signal(number, _note)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _depth
        if not self._entered:
            return
        _depth -= 1
        if _depth:
            return
        try:
            _restore()
        finally:
            deliver()
