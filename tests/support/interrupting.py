"""Interrupts at each moment of a call, also inside the locks, contexts and threads of Python's own modules."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pmstore

_PLACES = (pmstore.__path__[0], contextlib.__file__, threading.__file__, concurrent.futures.__path__[0])


def signalled_at(moment: int, function: Callable[[], object], number: int = signal.SIGINT) -> bool:
    """Call the function with a signal at the n-th moment when Python would run its handler: a Python function begins,
    or a C function returns to one. Returns False if there are fewer moments. The function may raise nothing but
    KeyboardInterrupt. The handler may be put off, and what it raises be lost in a finalizer."""
    return _called(moment, function, number)[0]


def interrupted_at(moment: int, function: Callable[[], object]) -> bool:
    """The same with a Ctrl-C, for which the function has to raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        reached, raised = _called(moment, function, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised or not reached, "the interrupt was lost"
    return raised


def _called(moment: int, function: Callable[[], object], number: int) -> tuple[bool, bool]:
    """Whether the moment came, and whether the function raised KeyboardInterrupt."""
    seen, raised = 0, False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_PLACES):
            seen += 1
            if seen == moment:
                sys.setprofile(None)
                signal.raise_signal(number)

    gc.disable()  # a finalizer is no moment of this function
    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen >= moment, raised
