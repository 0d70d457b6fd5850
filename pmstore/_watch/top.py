"""The stores in a directory, one after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pmstore._watch.follow import Follower
from pmstore._watch.state import Fit

__all__ = ["Summary", "stores_in"]

MAGIC = b"PMSTORE"
COPIES = (0, 4096)  # the places of the header in a file


class Summary(NamedTuple):
    """One store. problem: why it can't be read; then all but name and size is missing. more: fits that are left out."""

    name: str
    size: int | None
    age: float | None
    sequence: int | None
    writer: str | None
    fits: list[Fit]
    problem: str
    more: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields in types of JSON."""
        fits = [
            {"name": fit.name, "state": fit.state, "run": fit.run, "runs": fit.runs}
            | {"iteration": fit.iteration, "max_iter": fit.max_iter, "objective": fit.objective, "starts": fit.starts}
            for fit in self.fits
        ]
        return self._asdict() | {"fits": fits}


def stores_in(directory: str, now: Callable[[], float] = time.time) -> list[Summary]:
    """The stores in a directory, sorted by name. Raises OSError if it can't be listed."""
    with os.scandir(directory) as entries:
        paths = sorted(entry.path for entry in entries if not entry.name.startswith(".") and _is_file(entry))
    return [_summary(path, now) for path in paths if _is_store(path)]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself, or into a folder that others may not enter
        return False


def _is_store(path: str) -> bool:
    """Whether one of the two copies of the header begins like one of a store; of a file that can't be read, whether it
    has the usual name of one."""
    try:
        with open(path, "rb") as file:
            head = file.read(COPIES[-1] + len(MAGIC))
    except FileNotFoundError:  # it was deleted meanwhile
        return False
    except OSError:
        return path.endswith(".pm")
    return any(head.startswith(MAGIC, place) for place in COPIES)


def _summary(path: str, now: Callable[[], float]) -> Summary:
    name = os.path.basename(path)
    size = None
    try:
        size = os.stat(path).st_size
        with Follower(path) as follower:
            view = follower.view(now)
    except Exception as error:  # whatever is wrong with one store, the others are shown
        return Summary(name, size, None, None, None, [], str(error) or type(error).__name__)
    return Summary(name, size, view.age, view.sequence, view.writer, view.fits, "", view.more_fits)
