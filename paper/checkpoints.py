"""What a checkpoint after every iteration costs, by every strategy, beside the iterations of the same fit.

All strategies keep the state of one and the same loop: after each iteration they take their turns, in another order
each time. A fit has few iterations and a disk has moods, so each strategy saves this state, the one before, and so on,
`repeats` times; the time that counts is the median. There is a warm-up before the first iteration.

An iteration streams the data through the processor's caches, so that a checkpoint begins with cold ones: what takes
3 µs again and again takes ten times as long there. After the last iteration, at the largest k, each strategy is timed
back to back too, as in other benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from _common import MEDIA, file_system, machine, no_collection, parent, parser, real_time, save, scratch

from . import data
from .loops import DERIVED, LOOPS, Loop, State
from .strategies import CHECKPOINTS, WITH_DERIVED, Baseline, Strategy

WARM_UP = 12  # checkpoints of each strategy in whose memory the arrays live; two of the others
LEAST, SLOW = 5, 0.3  # back to back: so many at least, unless one takes so many seconds
Kept = dict[str, Any]


@contextlib.contextmanager
def urgent() -> Iterator[str]:
    """Real-time priority, if the system allows it, for the checkpoints only: the loop's threads don't get it."""
    try:
        yield real_time()
    finally:
        with contextlib.suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Subject:
    """One strategy on one medium, with the seconds that it took."""

    def __init__(self, kind: type[Strategy], medium: str, directory: Path, state: State) -> None:
        self.kept: Kept = {"who": kind.name, "medium": medium, "placing": [], "times": [], "back to back": []}
        self.strategy = kind(directory, medium, state)
        self.strategy.settle()
        self.kept["bytes"] = sum(array.nbytes for array in self.strategy.of(state).values())

    def checkpoint(self, state: State) -> tuple[float, float]:
        """Seconds of placing and of saving."""
        kept = self.strategy.of(state)
        started = perf_counter()
        self.strategy.place(kept)
        placed = perf_counter()
        self.strategy.save(kept)
        done = perf_counter()
        self.strategy.settle()
        return placed - started, done - placed

    def warm_up(self, states: list[State], budget: float) -> None:
        """Not counted."""
        end = perf_counter() + budget
        for turn in range(WARM_UP if self.strategy.in_place else 2):
            self.checkpoint(states[turn % 2])
            if perf_counter() > end:
                break

    def back_to_back(self, states: list[State], budget: float) -> None:
        """Counted apart: again and again, without anything in between but another state."""
        if self.kept["times"][0] < SLOW:
            end = perf_counter() + budget
            while len(self.kept["back to back"]) < LEAST or perf_counter() < end:
                self.kept["back to back"].append([*self.checkpoint(states[len(self.kept["back to back"]) % 2])])

    def measure(self, state: State, budget: float) -> None:
        """Counted, until so many seconds have been spent."""
        if sum(self.kept["times"]) < budget:
            placing, saving = self.checkpoint(state)
            self.kept["placing"].append(placing)
            self.kept["times"].append(saving)


def fit(
    loop: Loop,
    X: Any,
    clusters: int,
    iterations: int,
    directories: dict[str, Path],
    repeats: int,
    budget: float,
    back_to_back: float = 0.0,
) -> Kept:
    """One fit, with a checkpoint by every strategy after each iteration.

    directories: by medium. budget, back_to_back: seconds that one strategy may spend, in the fit and after it.
    """
    dice = random.Random(0)
    steps = loop(X, clusters, iterations)
    _, previous = next(steps)
    older = {name: array + 1 for name, array in previous.items()}
    kinds = [Baseline, *CHECKPOINTS, *(WITH_DERIVED if any(name in previous for name in DERIVED) else ())]
    subjects = []
    for medium, directory in directories.items():
        for kind in kinds:
            made = Path(tempfile.mkdtemp(dir=directory))
            subjects.append(Subject(kind, medium, made, previous))
    for subject in subjects:
        subject.warm_up([older, previous], budget)
    seconds = []
    for taken, state in steps:
        seconds.append(taken)
        with no_collection(), urgent():
            for repeat in range(repeats):
                for subject in dice.sample(subjects, len(subjects)):
                    subject.measure(previous if repeat % 2 else state, budget)
        older, previous = previous, {name: array.copy() for name, array in state.items()}
    if back_to_back:
        with no_collection(), urgent():
            for subject in subjects:
                subject.back_to_back([older, previous], back_to_back)
    for subject in subjects:
        subject.strategy.close()
    return {
        "clusters": clusters,
        "iterations": seconds,
        "checkpoints": [subject.kept for subject in subjects],
    }


def sizes(quick: bool) -> Kept:
    """How much of everything."""
    return {
        "rows": (2_000, 2_000) if quick else (70_000, 20_000),  # of MNIST or its stand-in, of music
        "clusters": [2, 5, 10] if quick else list(range(2, 11)),
        "iterations": {"KMeans": 5 if quick else 20, "GaussianMixture": 2},
        "repeats": {"KMeans": 1, "GaussianMixture": 2 if quick else 4},
        "budget": 0.2 if quick else 2.0,
        "back to back": 0.05 if quick else 0.3,
    }


def main() -> None:
    """Measure all of them."""
    command = parser(__doc__)
    data.add_options(command)
    options = command.parse_args()
    known = sizes(options.quick)
    kept: list[Kept] = []
    try:
        sets = data.load(options, *known["rows"])
    except data.NoImages as problem:
        raise SystemExit(f"paper: {problem}") from None
    described = [{"name": one.name, "what": one.what, "shape": list(one.X.shape)} for one in sets]
    with urgent() as priority:
        pass
    for one in sets:
        for model, loop in LOOPS.items():
            for clusters in known["clusters"]:
                with contextlib.ExitStack() as until_done:
                    directories = {
                        medium: until_done.enter_context(scratch(parent(options, medium))) for medium in options.media
                    }
                    print(f"{one.name}, {model}, k = {clusters}", flush=True)
                    measured = fit(
                        loop,
                        one.X,
                        clusters,
                        known["iterations"][model],
                        directories,
                        known["repeats"][model],
                        known["budget"],
                        known["back to back"] if clusters == known["clusters"][-1] else 0.0,
                    )
                kept.append({"data": one.name, "model": model, **measured})
    raw = {
        "quick": options.quick,
        "file systems": {medium: file_system(parent(options, medium)) for medium in MEDIA},
        "priority": f"checkpoints at {priority}",
        "data": described,
        "fits": kept,
    }
    save(options.raw, "paper-checkpoints", raw)
    print(machine())


if __name__ == "__main__":
    main()
