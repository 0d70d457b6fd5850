"""The place where the program calls pmstore: for warnings, and for errors that name the place of an opening."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["outside"]


def outside() -> tuple[int, str]:
    """The stacklevel for a warning to the caller, and "file:line": of the nearest frame outside of pmstore and
    contextlib."""
    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((package, contextlib.__file__)):
        frame = frame.f_back
        level += 1
    return level, f"{frame.f_code.co_filename}:{frame.f_lineno}"
