"""What is told of a fit, as a function of its history, the time and its writer."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmstore
from pmstore._watch.state import (
    POINTS,
    count_text,
    duration_text,
    fit_of,
    rate_text,
    sampled,
    sparkline,
)

NOW = 1000.0


def history(
    times: list[float], *, run: Any = 0, attempt: Any = 1, iteration: Any = None, objective: Any = None, **limits: Any
) -> pmstore.History:
    """Iterations that ended at these times, and took half a second each."""
    count = len(times)
    made = pmstore.History()
    made["iteration"] = np.arange(1, count + 1) if iteration is None else np.array(iteration)
    made["run"], made["attempt"] = np.broadcast_to(run, count), np.broadcast_to(attempt, count)
    made["objective"] = np.arange(count, 0.0, -1) if objective is None else np.array(objective)
    made["seconds"], made["time"] = np.full(count, 0.5), np.array(times, float)
    made.max_iter, made.runs, made.finished = limits.get("max_iter", 100), limits.get("runs", 1), "finished" in limits
    return made


STEADY = [NOW - 4, NOW - 3, NOW - 2, NOW - 1]  # one iteration a second, the last one a second ago


@pytest.mark.parametrize(
    ("told", "writer", "quiet", "state"),
    [
        (history([]), "alive", 0, "starting"),
        (history([]), "died", 0, "writer died"),
        (history(STEADY), "alive", 0, "running"),
        (history(STEADY), "died", 0, "writer died"),
        (history(STEADY), "closed", 0, "closed"),
        (history(STEADY, finished=True), "closed", 0, "finished"),
        (history(STEADY, finished=True), "died", 0, "finished"),
        (history([NOW - 31.5, NOW - 31]), "alive", 0, "stalled"),
        (history([NOW - 31.5, NOW - 31]), "alive", 16, "running"),  # it was as quiet before: it commits that rarely
        (history([NOW - 131, NOW - 31]), "alive", 0, "running"),  # a slow one
        (history([NOW + 50]), "alive", 0, "running"),  # another clock
        (history([0.0]), "alive", 0, "running"),  # a fit without a clock, of a crash test
    ],
)
def test_the_state(told: pmstore.History, writer: str, quiet: float, state: str) -> None:
    assert fit_of("fit", told, NOW, writer, quiet).state == state


@pytest.mark.parametrize(
    ("told", "rate", "left", "at_most"),
    [
        (history([]), None, None, False),
        (history(STEADY), 1.0, 96.0, True),
        (history([NOW]), 2.0, 49.5, True),  # one row: by the time that it took
        (history(STEADY, max_iter=None), 1.0, None, False),
        (history(STEADY, runs=3), 1.0, 296.0, True),
        # The second of three runs; the first one took 3 iterations.
        (history(STEADY, run=[0, 0, 0, 1], iteration=[1, 2, 3, 1], runs=3), 1.0, 5.0, False),
        # Hours between two processes do not count.
        (history([NOW - 9e5, NOW - 8e5, NOW - 2, NOW], attempt=[1, 1, 2, 2]), 0.5, 192.0, True),
        (history([NOW - 9e5, NOW], attempt=[1, 2]), 2.0, 49.0, True),
        (history(STEADY, finished=True), 1.0, None, False),
    ],
)
def test_rate_and_time_left(told: pmstore.History, rate: float | None, left: float | None, at_most: bool) -> None:
    fit = fit_of("fit", told, NOW, "alive")
    assert (fit.rate, fit.left, fit.at_most) == (rate, left, at_most)


def test_a_clock_that_was_set_back_does_not_hide_a_fit_that_hangs() -> None:
    ahead = history([NOW + 7000, NOW + 7001])
    fit = fit_of("f", ahead, NOW + 100, "alive", since=NOW + 1)
    assert (fit.state, fit.age) == ("stalled", 99)


def test_the_figures() -> None:
    told = history(
        STEADY, run=[0, 0, 1, 1], iteration=[1, 2, 1, 2], attempt=[1, 1, 1, 2], objective=[9, 8, math.nan, 6]
    )
    fit = fit_of("a", told, NOW, "alive")
    assert (fit.run, fit.iteration, fit.rows, fit.objective, fit.starts, fit.age) == (1, 2, 4, 6.0, 2, 1.0)
    assert fit.curve == ([1.0, 2.0], [None, 6.0]) and fit.ends == ([1.0], [8.0])
    assert (fit.late, fit.lost) == (None, None)
    told["late"], told["lost"] = np.array([0.0, 1, 2, np.nan]), np.array([0.0, 0, 5, 1])
    assert fit_of("a", told, NOW, "alive")[-4:-2] == (3, 6)
    assert count_text(fit) == "2/100" and count_text(fit._replace(runs=3, max_iter=None)) == "2/3 · 2"


@given(
    st.lists(st.floats(), min_size=1, max_size=5),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers() | st.none(),
    st.floats(),
)
def test_a_hostile_history_gives_something(
    times: list[float], number: int, limit: int | None, objective: float
) -> None:
    count = len(times)
    told = history(times, run=number >> 32, iteration=[number] * count, attempt=[number, *range(count - 1)][:count])
    told.max_iter, told.runs = limit, limit or 1
    told["objective"] = np.full(count, objective)
    told["seconds"] = np.array(times)
    fit = fit_of("fit", told, NOW, "alive")
    json.dumps(fit._asdict() | {"left": duration_text(fit.left)}, allow_nan=False)
    assert rate_text(fit.rate) and duration_text(fit.age) and count_text(fit)


def test_a_long_curve_is_sampled() -> None:
    curve = sampled(np.arange(10_000), np.arange(10_000) / 2)
    assert len(curve.x) == POINTS and (curve.x[0], curve.x[-1], curve.y[-1]) == (0, 9999, 9999 / 2)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([None], ""),
        ([1.0], "▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, None, 0], "█ ▁"),
        ([2, 2], "▁▁"),
        ([-1.7e308, 1.7e308], "▁█"),
        ([0, 5e-324], "▁▁"),
        ([*range(1000), 5000], "▁▁▁▂▂▂▂█"),
    ],
)
def test_sparkline(values: list[float | None], text: str) -> None:
    assert sparkline(values, 8) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (3661, "1:01:01"),
        (360_000, "4 d 4 h"),
        (math.inf, "11,574,074,074 d 1 h"),
    ],
)
def test_duration_text(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "–"), (1234.5, "1,234/s"), (999.7, "1,000/s"), (12.34, "12.3/s"), (0.05, "3/min"), (0.001, "3.6/h")],
)
def test_rate_text(rate: float | None, text: str) -> None:
    assert rate_text(rate) == text
