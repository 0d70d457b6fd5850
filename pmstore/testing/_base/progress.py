"""The progress of an exploration, only on a terminal, and only if the exploration takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Counted", "Progress", "terminal"]

PATIENCE = 1.0  # seconds before anything is shown
EVERY = 0.1


def terminal(title: str) -> Progress | None:
    """Shows progress if standard error is a terminal; None if it isn't."""
    return Progress(title) if sys.stderr is not None and sys.stderr.isatty() else None


class Counted:
    """Progress that also reports its state when it is interrupted."""

    def __init__(self, show: Callable[[int, int], None] | None) -> None:
        self.done = 0
        self._show = show

    def __call__(self, done: int, total: int) -> None:
        self.done = done
        if self._show is not None:
            self._show(done, total)


class Progress:
    """Called with the amount of work done and the total. Uses rich if that is installed."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begun = time.monotonic()
        self._next = self._begun + PATIENCE
        self._show: Callable[[int, int], None] | None = None
        self._bar: Any = None
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        if self._show is None:
            self._show = self._start(total)
        self._show(done, total)

    def _start(self, total: int) -> Callable[[int, int], None]:
        try:
            from rich.console import Console
            from rich.progress import Progress as Bar
        except ImportError:
            return self._plainly
        self._bar = Bar(console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task(self._title, total=total)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def _plainly(self, done: int, total: int) -> None:
        self._shown = True
        rate = done / max(time.monotonic() - self._begun, 1e-9)
        sys.stderr.write(f"\r{self._title}: {done:,} of {total:,} states, {rate:,.0f} a second ")
        sys.stderr.flush()

    def close(self) -> None:
        """Remove the progress from the terminal."""
        if self._bar is not None:
            self._bar.stop()
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
