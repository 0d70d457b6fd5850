"""Parts of the program in which no signal handler runs: the middle of opening and closing, where an interrupt would
leave a lock without a store, and of a change in several steps, where a handler that commits would commit half of it.

Python runs signal handlers in the main thread, between any two instructions. In a `with later():` statement they are
only noted, and they run when it ends, or at a call of `deliver` where nothing is half done.

Setting a handler takes back `signal.siginterrupt(number, False)`, which can't be read by Python: docs/guarantees.md
names that limit.
"""

from __future__ import annotations

# The module signal converts numbers to enums and back, which for all signals takes longer than to open a store.
import _signal  # type: ignore[import-not-found]
import os
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["deliver", "later"]

_SIGNALS = sorted(_signal.valid_signals())

_depth = 0
_thread = 0  # that has entered `later`: the main thread, when it did
_found: list[Any] = []  # the handler of each signal, when they were last looked at
_own: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []  # those of the program among them
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the program's own
_noted: list[tuple[int, FrameType | None]] = []


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append((number, frame))


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _look() -> None:
    """Find the handlers of the program. There are 64 signals, and nearly always the same handlers as before."""
    global _found, _own
    found = [*map(_signal.getsignal, _SIGNALS)]
    if found != _found:
        _own = [(number, one) for number, one in zip(_SIGNALS, found) if callable(one) and one is not _note]
        _found = found


def deliver() -> None:
    """Run the handlers of the signals that came since `later` was entered. They may raise."""
    while _noted and _in_main_thread():
        number, frame = _noted.pop(0)
        _handlers[number](number, frame)


def _restore() -> None:
    """Give the program its handlers back. Those that are back may run in between, and raise."""
    try:
        for number, handler in list(_handlers.items()):  # a handler may add to them
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
        global _depth, _thread
        self._entered = _in_main_thread()
        if not self._entered:
            return
        _depth += 1
        if _depth > 1:
            return
        try:  # no handler runs between the line above and this one, as nothing is called
            _thread = threading.get_ident()
            _look()
            for number, handler in _own:
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


def _after_fork() -> None:
    """Nobody is going to leave `later` in a child that another thread has forked."""
    global _depth
    if _depth and threading.get_ident() != _thread:
        _depth = 0
        _noted.clear()
        _restore()


os.register_at_fork(after_in_child=_after_fork)
