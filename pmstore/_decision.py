"""Whether a derived array is stored or recomputed, decided by what both cost.

In either case the program computes the value once for each change of its inputs. Storing it adds the time to write it
to every commit; not storing it adds the time to compute it to every recovery. Commits are many and recoveries few, so
a value is stored only if recomputing takes longer than writing it LIFE times, and longer than anyone notices.

A decision is kept unless the measurements say the opposite by a factor of two, so that it does not flap.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from pmstore._display import size_text

__all__ = ["Decision", "decide", "seconds_per_byte"]

LIFE = 100  # commits that carry the array, for one recovery
_UNNOTICED = 1e-3  # seconds
_PROBE = 4 << 20  # bytes
_REPEATS = 3


@dataclass(frozen=True)
class Decision:
    """How a derived array is kept, and why.

    policy is "store" or "recompute"; reason a sentence; recompute_seconds how long the function takes (the median of
    the last calls) and write_seconds how long a commit takes to write the value; each None if it wasn't measured.
    """

    policy: str
    reason: str
    recompute_seconds: float | None = None
    write_seconds: float | None = None


def decide(before: str | None, recompute: float, nbytes: int, per_byte: Callable[[], float]) -> Decision:
    """before: the policy until now. recompute: seconds. per_byte: gives seconds to write one; called if need be."""
    slack = {None: 1.0, "recompute": 2.0, "store": 0.5}[before]
    if recompute <= slack * _UNNOTICED:
        return Decision("recompute", f"recomputing takes {_time(recompute)} after a recovery", recompute)
    write = nbytes * per_byte()
    store = recompute > slack * LIFE * write
    reason = (
        f"recomputing takes {_time(recompute)} after a recovery, "
        f"writing {size_text(nbytes)} {_time(write)} in every commit"
    )
    return Decision("store" if store else "recompute", reason, recompute, write)


def seconds_per_byte(directory: str, medium: str) -> float:
    """What writing to a medium takes: of 4 MiB, to a file that has no name and is gone afterwards. OSError."""
    contents = b"\x5a" * _PROBE
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        took = []
        for _ in range(1 + _REPEATS):  # the first one takes the space
            start = time.perf_counter()
            os.pwrite(file.fileno(), contents, 0)
            if medium == "file":
                os.fdatasync(file.fileno())
            took.append(time.perf_counter() - start)
    return min(took[1:]) / _PROBE


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
