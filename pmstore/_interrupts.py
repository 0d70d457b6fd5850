"""Parts of the program in which no signal handler runs: the middle of opening and closing, where an interrupt would
leave a lock without a store, and of each change of a store, which looks first and writes then. A handler that commits
there would commit half of a change; one that changes the store, or rolls back, would make what was looked at untrue.

Python runs signal handlers in the main thread, between any two instructions. In a `with later():` statement they are
only noted, and they run when it ends, or at a call of `deliver` where nothing is half done. Every small change enters
one, so entering costs little more than the look at all handlers.

Setting a handler takes back `signal.siginterrupt(number, False)`, which can't be read by Python: docs/guarantees.md
names that limit.
"""

from __future__ import annotations

# The module signal converts numbers to enums and back, which for all signals takes longer than to open a store.
import os
import threading
from _signal import getsignal, signal, valid_signals  # type: ignore[import-not-found]
from collections.abc import Callable
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

__all__ = ["deliver", "handlers", "later"]

_SIGNALS = sorted(valid_signals())


def handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """The handlers of the program, by the number of the signal."""
    return {number: one for number in _SIGNALS if callable(one := getsignal(number))}


class _Note:
    """The handler of a signal while the handler of the program does not run."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _noted.append((self, number, frame))
        if not _depth:  # a program that changed the handler in `later` has given this one back
            deliver()


_depth = 0  # of the contexts that the main thread is in
_main = threading.main_thread().ident
_found: list[Any] = []  # the handler of each signal, when they were last looked at
_own: list[tuple[int, int, _Note]] = []  # those of the program among them: place in `_found`, number, what notes it
_noted: list[tuple[_Note, int, FrameType | None]] = []


def _look(found: list[Any]) -> None:
    """Note the handlers of the program. One that was left or given back as what notes it counts as itself."""
    global _found, _own
    found = [one.handler if type(one) is _Note else one for one in found]
    own = [(at, _SIGNALS[at], _Note(one)) for at, one in enumerate(found) if callable(one)]
    _found, _own = found, own


def _differ(found: list[Any]) -> bool:
    """Whether a signal that had no handler of the program's has one now. A list compares identity first."""
    try:
        return found != _found
    except Exception:  # a handler has an `__eq__` of its own
        return True


def deliver() -> None:
    """Run the handlers of the signals that came since `later` was entered. They may raise; the others run all the
    same."""
    while _noted and get_ident() == _main:
        note, number, frame = _noted.pop(0)
        try:
            note.handler(number, frame)
        except BaseException:
            deliver()
            raise


def _restore(own: list[tuple[int, int, _Note]]) -> None:
    """Give the program its handlers back. Those that are back may run in between, and raise."""
    try:
        for _, number, _ in own:
            if type(note := getsignal(number)) is _Note:
                before = signal(number, note.handler)
                if before is not None and type(before) is not _Note:  # a handler that ran meanwhile has set it
                    signal(number, before)
    except BaseException:
        _restore(own)
        raise


class later:
    """A context in which handlers do not run. Contexts may be nested; in threads other than the main one they do
    nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth
        if get_ident() != _main:
            return
        if _depth:
            _depth += 1
            return
        # Too deep a recursion fails here, before anything is changed: what follows takes no more frames.
        # There are 62 signals, and nearly always the same handlers as before.
        found = [*map(getsignal, _SIGNALS)]
        for at, _, note in _own:
            if found[at] is not note.handler:  # though it may equal it
                _look(found)
                break
        else:
            if _differ(found):
                _look(found)
        _depth = 1
        try:  # no handler runs between the line above and this one, as nothing is called
            for _, number, note in _own:
                before = signal(number, note)
                if callable(before) and type(before) is not _Note:  # a handler may have set it after the look
                    note.handler = before
                elif before is not None and type(before) is not _Note:
                    signal(number, before)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _depth
        if get_ident() != _main:
            return
        if _depth > 1:
            _depth -= 1
        elif _depth:  # 0: another thread entered, and this is the main one of a fork
            _depth = 0
            try:
                _restore(_own)
            except BaseException:  # of a handler, which may run as soon as a function is called
                _restore(_own)
                raise
            finally:
                if _noted:
                    deliver()


def _after_fork() -> None:
    """Another thread may have forked, at any moment: nobody is going to leave `later` in the child."""
    global _depth, _main
    if get_ident() != _main:
        _main = get_ident()
        _depth = 0
        _noted.clear()
        _restore(_own)


os.register_at_fork(after_in_child=_after_fork)
