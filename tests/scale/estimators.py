"""What the tests of the estimators over shards share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pmstore.scale import Lost, Reply, Serial


class Stopped(Exception):
    """The end of a coordinator, as a test wants it."""


class Stopping(Serial):
    """Raises Stopped instead of the n-th reply."""

    def __init__(self, replies: int) -> None:
        super().__init__()
        self._left = replies

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        self._left -= 1
        if self._left < 0:
            raise Stopped
        return super().completed(timeout)


class Killing(Stopping):
    """Kills its process instead."""

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        try:
            return super().completed(timeout)
        except Stopped:
            os.kill(os.getpid(), signal.SIGKILL)
            raise


class Backwards(Serial):
    """Answers in another order, and each question twice."""

    def submit(self, i: int, *question: Any) -> None:
        super().submit(i, *question)
        super().submit(i, *question)
        self._asked.reverse()


def bits(fit: Any, names: Iterable[str]) -> list[tuple[Any, ...]]:
    """The attributes of a fit, bit for bit."""
    values = [np.asarray(getattr(fit, name)) for name in names]
    return [(name, a.dtype, a.shape, a.tobytes()) for name, a in zip(names, values, strict=True)]
