"""Whether a derived array is stored or recomputed, decided by the costs of both.

In either case the program computes the value once for each change of its inputs. Storing it adds the time to write it
to every commit. Not storing it adds the time to compute it to every recovery. Commits are many and recoveries few.
Therefore a value is stored only if recomputing takes longer than writing it LIFE times, and longer than a user notices.

A decision changes only if the measurements favour the opposite by a factor of two, so that it does not flap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pmstore._display import size_text

__all__ = ["Decision", "decide", "seconds_per_byte"]

LIFE = 100  # commits that contain the array, for each recovery
_UNNOTICED = 1e-3  # seconds
_PROBE = 4 << 20  # bytes
_REPEATS = 3


@dataclass(frozen=True)
class Decision:
    """How a derived array is kept, and why.

    policy is "store" or "recompute". reason is a sentence. recompute_seconds is the time of the function (the median of
    the last calls), write_seconds the time that a commit takes to write the value. Each is None if it wasn't measured.
    """

    policy: str
    reason: str
    recompute_seconds: float | None = None
    write_seconds: float | None = None


def decide(before: str | None, recompute: float, nbytes: int, per_byte: Callable[[], float]) -> Decision:
    """before: the policy until now. recompute: seconds. per_byte: returns the seconds to write a byte; called only
    if needed."""
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
    """The time to write a byte to a medium, measured with 4 MiB in a file without a name. Raises OSError."""
    contents = b"\x5a" * _PROBE
    import tempfile  # it takes longer than most of pmstore

    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        took = []
        for _ in range(1 + _REPEATS):  # the first write allocates the space
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
