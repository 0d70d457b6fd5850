"""A fork of a process that may have threads, and how a child ended."""

from __future__ import annotations

import os
import signal
import warnings

__all__ = ["fork", "signal_name"]


def fork() -> int:
    """``os.fork``, without the warning of Python 3.12 that other threads may hold locks which the child needs.

    The children here run the explorer, the tracer, or functions that :class:`CrashFiles` documents to run in a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def signal_name(number: int) -> str:
    """``SIGKILL``, or ``signal 35``: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
