"""The progress of an exploration, and the time left, if the exploration takes long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Counted", "Progress", "in_command", "terminal"]

PATIENCE = 1.0  # seconds before anything is shown
EVERY = 0.1
LINES_EVERY = 10.0

_command: list[bool] = []  # of the command that runs: whether it is quiet


@contextlib.contextmanager
def in_command(quiet: bool) -> Iterator[None]:
    """Progress is shown for a command: also without a terminal, as lines; not at all if the command is quiet."""
    _command.append(quiet)
    try:
        yield
    finally:
        _command.pop()


def terminal(title: str) -> Progress | None:
    """Shows progress if standard error is a terminal, or if a command runs; otherwise returns None."""
    if sys.stderr is None or _command[-1:] == [True]:
        return None
    if sys.stderr.isatty():
        return Progress(title)
    return Progress(title, lines=True) if _command else None


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
    """Called with the amount of work done and the total, which may be more than there is to do. Uses rich if that is
    installed.

    lines: write a line of its own from time to time, because standard error is no terminal.
    """

    def __init__(self, title: str, *, lines: bool = False) -> None:
        self._title = title
        self._lines = lines
        self._begun = time.monotonic()
        self._next = self._begun + (LINES_EVERY if lines else PATIENCE)
        self._show: Callable[[int, int], None] | None = None
        self._bar: Any = None
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (LINES_EVERY if self._lines else EVERY)
        if self._show is None:
            self._show = self._print_line if self._lines else self._start(total)
        self._show(done, total)

    def _start(self, total: int) -> Callable[[int, int], None]:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return self._rewrite
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task(self._title, total=total, text="")
        return lambda done, total: self._bar.update(task, completed=done, total=total, text=self._text(done, total))

    def _text(self, done: int, total: int) -> str:
        rate = done / max(time.monotonic() - self._begun, 1e-9)
        left = (total - done) / rate if rate else 0
        time_text = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
        return f"{done:,} of {total:,}, {rate:,.0f} a second, {time_text} left"

    def _rewrite(self, done: int, total: int) -> None:
        self._shown = True
        sys.stderr.write(f"\r{self._title}: {self._text(done, total)}\033[K")
        sys.stderr.flush()

    def _print_line(self, done: int, total: int) -> None:
        print(f"pmstore: {self._title}: {self._text(done, total)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the progress from the terminal."""
        if self._bar is not None:
            self._bar.stop()
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
