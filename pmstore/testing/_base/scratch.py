"""Temporary directories that are removed even if their process was killed: the next user of this module removes
them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

__all__ = ["Scratch", "sweep"]

PREFIX = "pmstore-crash-"
NAME = re.compile(rf"{PREFIX}(\d+)-\w+")

_swept: set[str] = set()


class Scratch:
    """A temporary directory below `base`. It is held until `close`, or until this object or its process is gone."""

    def __init__(self, base: str | os.PathLike[str] | None = None) -> None:
        parent = tempfile.gettempdir() if base is None else os.fspath(base)
        if parent not in _swept:
            _swept.add(parent)
            sweep(parent)
        self.path = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)
        held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_SH)
        self.close = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()


def _remove(path: str, held: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the object too
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(held)


def sweep(parent: str) -> None:
    """Remove the directories whose processes are gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            match = NAME.fullmatch(name)
            if match and not Path("/proc", match[1]).exists():
                _remove_unheld(os.path.join(parent, name))


def _remove_unheld(path: str) -> None:
    """Test the lock. A process of another container may hold a directory too: its process id is unknown here."""
    with contextlib.suppress(OSError):
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(found)
