"""Interrupts at each moment of a call, also inside the locks and threads of Python's own modules."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pmstore

_PLACES = (pmstore.__path__[0], threading.__file__, concurrent.futures.__path__[0])


def interrupted_at(moment: int, function: Callable[[], object]) -> bool:
    """Call the function with a Ctrl-C at the n-th moment when Python would run the handler of one: a Python function
    begins, or a C function returns to one. Returns False if there are fewer moments. The function may raise nothing but
    KeyboardInterrupt, and has to raise that."""
    seen = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_PLACES):
            seen += 1
            if seen == moment:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # a finalizer is no moment of this function
    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
        signal.signal(signal.SIGINT, before)
    assert seen < moment, "the interrupt was lost"
    return False
