"""The state of a fit, as a function of its history, of the time and of the process that writes it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pmstore._resume.history import History

__all__ = [
    "POINTS",
    "STALLED_AFTER",
    "Curve",
    "Fit",
    "count_text",
    "duration_text",
    "fit_of",
    "rate_text",
    "sampled",
    "sparkline",
    "unreadable",
]

POINTS = 500  # of a curve
RECENT = 50  # rows that the rate is taken from
STALLED_AFTER = 30.0  # seconds, or this many of the slowest recent iterations:
SLOWEST = 10

_BARS = "▁▂▃▄▅▆▇█"

Array = npt.NDArray[Any]


class Curve(NamedTuple):
    """Points of a curve: at most POINTS, the last one included. y is None where it is not finite."""

    x: list[float]
    y: list[float | None]


class Fit(NamedTuple):
    """A fit at some time.

    state: "starting", it has no iteration yet; "running"; "stalled", no iteration for long; "writer died"; "closed",
    its writer has closed the store before the end; "finished"; "unreadable". run is from 0, iteration the number of
    those done in the run. rate: iterations a second. left: seconds to the end, at most if at_most is true. age: seconds
    since the last iteration. starts: how often it was started or resumed. late, lost: how often a fit over shards asked
    again, because a reply was late, or because a worker was lost; None for other fits. ends: the objectives at the ends
    of runs. None: not known.
    """

    name: str
    state: str
    run: int
    runs: int
    iteration: int
    max_iter: int | None
    rows: int
    objective: float | None
    rate: float | None
    left: float | None
    at_most: bool
    age: float | None
    starts: int
    late: int | None
    lost: int | None
    curve: Curve
    ends: Curve


def fit_of(name: str, history: History, now: float, writer: str, quiet: float = 0.0, since: float | None = None) -> Fit:
    """The fit at a time.

    Parameters
    ----------
    name : str
    history : History
    now : float
        The Unix time.
    writer : {"alive", "closed", "died"}
        The process that writes the store.
    quiet : float
        Seconds that this fit was seen to be quiet without being stalled: one that commits once a minute is.
    since : float, optional
        The Unix time at which its last iteration was seen first. It counts if that iteration has a later time, because
        a clock was set back.
    """
    run, iteration, objective = history["run"], history["iteration"], history["objective"]
    rows, max_iter, runs = len(run), _count(history.max_iter), _count(history.runs) or 1
    rate, slowest = _pace(history)
    last = _finite(history["time"][-1]) if rows else None
    if last and last > now:
        last = now if since is None else since
    age = max(0.0, now - last) if last else None  # a fit that a crash test records has no clock
    state = _state(history.finished, rows, writer)
    if state == "running" and age is not None and age > max(STALLED_AFTER, SLOWEST * slowest, 2 * quiet):
        state = "stalled"
    left, at_most = _left(history, rate, max_iter, runs) if state == "running" else (None, False)
    current = int(run[-1]) if rows else 0
    late, lost = _asked_again(history)
    begin = int(np.searchsorted(run, current))
    ends = np.flatnonzero(np.diff(run))
    return Fit(
        name=name,
        state=state,
        run=current,
        runs=runs,
        iteration=int(iteration[-1]) if rows else 0,
        max_iter=max_iter,
        rows=rows,
        objective=_finite(objective[-1]) if rows else None,
        rate=rate,
        left=left if left is None else _finite(left),
        at_most=at_most,
        age=age,
        starts=int(history["attempt"][-1]) if rows else 0,
        late=late,
        lost=lost,
        curve=sampled(iteration[begin:], objective[begin:]),
        ends=sampled(run[ends] + 1, objective[ends]),
    )


def unreadable(name: str) -> Fit:
    """A fit whose history is damaged, or was changed by other code."""
    nothing = Curve([], [])
    return Fit(name, "unreadable", 0, 1, 0, None, 0, None, None, None, False, None, 0, None, None, nothing, nothing)


def _asked_again(history: History) -> tuple[int | None, int | None]:
    """How often shards were asked for again, late and lost ones. A user's own figure may have one of the names."""
    late, lost = _total(history, "late"), _total(history, "lost")
    return (None, None) if late is None or lost is None else (late, lost)


def _total(history: History, column: str) -> int | None:
    """The sum of a column of counts; None if there is none."""
    if column not in history:
        return None
    counts = history[column]
    total = float(counts[np.isfinite(counts)].sum())
    return int(total) if math.isfinite(total) else None


def _state(finished: bool, rows: int, writer: str) -> str:
    if finished:
        return "finished"
    if writer != "alive":
        return "writer died" if writer == "died" else "closed"
    return "running" if rows else "starting"


def _pace(history: History) -> tuple[float | None, float]:
    """Recent iterations a second, and the seconds of the slowest one. The time between two processes does not count."""
    attempt = history["attempt"]
    if not len(attempt):
        return None, 0.0
    recent = slice(max(len(attempt) - RECENT, int(np.searchsorted(attempt, attempt[-1]))), None)
    times, seconds = history["time"][recent], history["seconds"][recent]
    with np.errstate(all="ignore"):
        slowest = float(max(np.diff(times).max(initial=0.0), seconds.max(initial=0.0)))
        passed = times[-1] - times[0]
        rate = (len(times) - 1) / passed if passed > 0 else 1 / seconds[-1]
    return (_finite(rate) if rate > 0 else None), slowest


def _left(history: History, rate: float | None, max_iter: int | None, runs: int) -> tuple[float | None, bool]:
    """Seconds to the end: as many iterations for each run as those that have ended took, or at most max_iter."""
    run, iteration = int(history["run"][-1]), int(history["iteration"][-1])
    if rate is None:
        return None, False
    if run > 0:
        each = (len(history["run"]) - iteration) / run
        return (max(each - iteration, 0.0) + each * max(runs - run - 1, 0)) / rate, False
    if max_iter is None:
        return None, False
    return max(max_iter * runs - iteration, 0) / rate, True


def _count(limit: int | None) -> int | None:
    """A limit of the fit; None for one that is no such thing, in a file that someone made."""
    return limit if limit is not None and 0 < limit < 1 << 63 else None


def sampled(x: Array, y: Array) -> Curve:
    """A curve with no more points than POINTS, evenly chosen."""
    if len(x) > POINTS:
        chosen = np.linspace(0, len(x) - 1, POINTS).round().astype(int)
        x, y = x[chosen], y[chosen]
    return Curve(x.astype(float).tolist(), [_finite(value) for value in y])


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


# ---- as text


def sparkline(values: list[float | None], width: int) -> str:
    """A curve in one line of text; a point that is missing is a blank."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low = min(known) / 2  # halves, as the whole difference may overflow
    span = max(known) / 2 - low or 1.0
    most = len(_BARS) - 1
    return "".join(" " if value is None else _BARS[round((value / 2 - low) / span * most)] for value in values)


def duration_text(seconds: float | None) -> str:
    """A duration: ``'0.2 s'``, ``'42 s'``, ``'4:05'``, ``'1:02:03'``, ``'3 d 4 h'``; ``'–'`` for None."""
    if seconds is None:
        return "–"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(min(seconds, 1e15)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24:,} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate_text(rate: float | None) -> str:
    """Iterations a second: ``'267/s'``; if that is less than one, a minute or an hour: ``'3.5/min'``."""
    if rate is None:
        return "–"
    for unit, seconds in (("s", 1), ("min", 60)):
        if rate * seconds >= 1:
            return f"{rate * seconds:,.3g}/{unit}" if rate < 999.5 else f"{rate:,.0f}/{unit}"
    return f"{rate * 3600:.3g}/h"


def count_text(fit: Fit) -> str:
    """The iteration, of how many: ``'12/300'``; with the run if there are several: ``'3/10 · 12/300'``."""
    text = f"{fit.iteration:,}" if fit.max_iter is None else f"{fit.iteration:,}/{fit.max_iter:,}"
    return text if fit.runs == 1 else f"{min(fit.run + 1, fit.runs):,}/{fit.runs:,} · {text}"
