"""The views of watch and top in a terminal, drawn with rich."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pmstore._display import name_text, size_text
from pmstore._watch.follow import Follower, View, views
from pmstore._watch.state import Fit, count_text, duration_text, rate_text, sparkline
from pmstore._watch.top import Summary

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

__all__ = ["console_for", "drawn", "live", "looked", "summaries"]

CURVE = 12  # characters of a curve

WIDE = ("fit", "fits", "iteration", "name", "state", "store", "value", "writer")  # columns that may have two lines
# A narrow terminal lacks the first of these.
SPARE = ("curve", "starts", "rate", "left", "age", "commits", "size", "last commit")
WORD = 16  # characters; a longer word may be broken
GAP = 2  # characters between two columns

STYLES = {
    "starting": "cyan",
    "running": "green",
    "stalled": "yellow",
    "writer died": "bold red",
    "closed": "yellow",
    "finished": "blue",
    "unreadable": "bold red",
    "alive": "green",
    "died": "bold red",
    "missing": "yellow",
}
WRITERS = {"alive": "being written", "closed": "no writer", "died": "writer died", "missing": "no file"}


def console_for(once: bool) -> Console:
    """A console on standard output.

    Raises ModuleNotFoundError if rich is missing, and ValueError if standard output is no terminal that pictures can be
    drawn on, unless it gets one picture only.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a terminal is drawn with rich, which is missing: pip install 'pmstore[watch]', or use --json", name="rich"
        ) from error
    console = Console(highlight=False)
    if not console.width:  # COLUMNS is 0 where a program does not know the width
        console.width = 80
    if not once and not console.is_terminal:
        raise ValueError("standard output is no terminal: use --json for lines, or --once for one picture")
    if not once and console.is_dumb_terminal:
        raise ValueError("this terminal (TERM=dumb) only prints: use --json for lines, or --once for one picture")
    return console


def live(console: Console, pictures: Iterable[RenderableType]) -> None:
    """Draw pictures in one place, until there are no more."""
    from rich.live import Live

    with _exiting(), Live(console=console, auto_refresh=False) as drawing:
        for picture in pictures:
            drawing.update(picture, refresh=True)


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """Let signals that end the process give the terminal its cursor back."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def looked(follower: Follower) -> Iterable[RenderableType]:
    """Pictures of a store, one for each view."""
    return map(drawn, views(follower, threading.Event()))


def drawn(view: View) -> RenderableType:
    """A picture of a store."""
    from rich.console import Group
    from rich.text import Text

    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(name_text(view.path), style="bold")
    title.append(f"  commit {view.sequence:,}, {duration_text(view.age)} ago, ")
    title.append(WRITERS[view.writer], style=STYLES[view.writer])
    parts: list[RenderableType] = [title]
    if view.fits:
        columns = ("fit", "iteration", "objective", "curve", ">rate", ">left", ">age", ">starts", "state")
        parts.append(_table(columns, map(_fit_cells, view.fits)))
    if view.values:
        cells = ([value.name, value.text, _curve(value.curve and value.curve.y)] for value in view.values)
        parts.append(_table(("name", "value", "curve"), cells))
    if view.more:
        parts.append(Text(f"… and {view.more:,} more: name those to look at"))
    if not view.fits and not view.values:
        parts.append(Text("no fits, and no values: name the arrays to look at"))
    return Group(*parts)


def summaries(found: list[Summary]) -> RenderableType:
    """A picture of the stores in a directory."""
    cells = (
        [
            one.name,
            "" if one.size is None else size_text(one.size),
            duration_text(one.age),
            "" if one.sequence is None else f"{one.sequence:,}",
            one.problem or ("" if one.writer is None else (WRITERS[one.writer], STYLES[one.writer])),
            ", ".join(f"{fit.name} {count_text(fit)} {fit.state}" for fit in one.fits)
            + (f", and {one.more:,} more" if one.more else ""),
        ]
        for one in found
    )
    return _table(("store", ">size", ">last commit", ">commits", "writer", "fits"), cells)


def _fit_cells(fit: Fit) -> list[Any]:
    left = duration_text(fit.left)
    return [
        fit.name,
        count_text(fit),
        "–" if fit.objective is None else f"{fit.objective:,.7g}",
        _curve(fit.curve.y),
        rate_text(fit.rate),
        f"≤ {left}" if fit.at_most else left,
        duration_text(fit.age),
        str(fit.starts),
        (fit.state + _asked_again(fit), STYLES[fit.state]),
    ]


def _asked_again(fit: Fit) -> str:
    """The rest of the state, if shards were asked for again."""
    return f", {fit.late:,} late, {fit.lost:,} lost" if fit.late or fit.lost else ""


def _curve(values: list[float | None] | None) -> str:
    return sparkline(values or [], CURVE)


def _table(columns: Iterable[str], rows: Iterable[list[Any]]) -> RenderableType:
    """A table of texts, or of texts with a style. ">" in front of a column's name puts it to the right."""
    from rich.text import Text

    pairs = ([cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows)
    # As Text: a name is no markup.
    return _Table(list(columns), [[Text(name_text(text), style=style) for text, style in row] for row in pairs])


class _Table:
    """A table as wide as the terminal, or less. No number is cut as long as it has room without the SPARE columns."""

    def __init__(self, columns: list[str], rows: list[list[Text]]) -> None:
        self._names = [column.lstrip(">") for column in columns]
        self._right = [column.startswith(">") for column in columns]
        self._rows = rows
        self._least = [self._width(i, WORD if name in WIDE else None) for i, name in enumerate(self._names)]

    def _width(self, column: int, word: int | None) -> int:
        """Characters that a column needs: for all of its texts, or only for their words, of at most so many."""
        texts = [row[column] for row in self._rows]
        if word is None:
            widths = [text.cell_len for text in texts]
        else:
            widths = [min(part.cell_len, word) for text in texts for part in text.split(" ")]
        return max([len(self._names[column]), *widths])

    def _widths(self, width: int) -> dict[int, int]:
        """The columns that have room, and the width of each."""
        shown = dict(enumerate(self._least))
        for spare in SPARE:
            if sum(shown.values()) + GAP * (len(shown) - 1) <= width:
                break
            if spare in self._names:
                del shown[self._names.index(spare)]
        left = max(0, width - sum(shown.values()) - GAP * (len(shown) - 1))
        for column, least in shown.items():
            more = min(left, self._width(column, None) - least)
            shown[column] = least + more
            left -= more
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="dim")
        widths = self._widths(options.max_width)
        for column, width in widths.items():
            wide = self._names[column] in WIDE
            table.add_column(
                self._names[column],
                justify="right" if self._right[column] else "left",
                overflow="fold" if wide else "ellipsis",
                no_wrap=not wide,
                width=width,
            )
        for row in self._rows:
            table.add_row(*(row[column] for column in widths))
        yield table
