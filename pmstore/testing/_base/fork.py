"""A fork of a process that may have threads."""

from __future__ import annotations

import os
import warnings

__all__ = ["fork"]


def fork() -> int:
    """``os.fork``, without the warning of Python 3.12 that other threads may hold locks which the child needs.

    The children here run the explorer, the tracer, or functions that :class:`CrashFiles` documents to run in a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
