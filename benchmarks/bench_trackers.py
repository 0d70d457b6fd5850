"""How changes to arrays are found: the store's own choice beside each forced tracker, sparse rows beside the baseline,
and the cost of wrong guesses. On memory; every time includes the program's own writes and their page faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import MemoryBaseline, machine, parser, real_time, save, scratch, seconds

import pmstore

TRACKERS = ("uffd", "pagemap", "compare")
PAGE = 4096
SIZES = {"64 KiB": 16, "256 KiB": 64, "1 MiB": 256, "8 MiB": 2048, "50 MB": 12_250}
ROWS = (("one row, only", 1, True, 15), ("one row", 1, False, 80), ("1 %", 82, False, 14), ("10 %", 819, False, 10))
FRACTIONS = {"one": 0.0, "1 %": 0.01, "5 %": 0.05, "10 %": 0.1, "25 %": 0.25, "50 %": 0.5, "all": 1.0}

Step = Callable[[], float]


@contextlib.contextmanager
def stores(directory: Path, names: tuple[str, ...]) -> Iterator[dict[str, pmstore.Store]]:
    """A store for each tracker that works here; "learned" is the store's own choice."""
    opened: dict[str, pmstore.Store] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            os.environ["PMSTORE_TRACKER"] = "" if name == "learned" else name
            try:
                opened[name] = stack.enter_context(pmstore.open(directory / f"{name}.pm", "w", media="memory"))
            except pmstore.StoreIOError as error:
                print(f"{name}: {error}")
        del os.environ["PMSTORE_TRACKER"]
        yield opened


def in_turns(
    steps: dict[str, Step], opened: dict[str, pmstore.Store], repetitions: int, warm_up: int
) -> dict[str, list[float]]:
    """Seconds of each step. They take turns in a random order, because a step after one that reads 100 MB finds cold
    caches. The warm-up is not counted, nor is the time of a deferred write-back after a commit.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(1)
    for number in range(warm_up + repetitions):
        for name in order.sample(list(steps), len(steps)):
            time = steps[name]()
            if name in opened:
                opened[name].stats()
            if number >= warm_up:
                times[name].append(time)
    return times


# ---- sparse rows, beside the baseline


def row_baseline(directory: Path, rows: int) -> Step:
    """Non-temporal copies of so many rows to random places of a mapped file of the array's size, and a fence."""
    baseline = MemoryBaseline(directory, 8192 * 784 * 8)
    rng = np.random.default_rng(5)
    source = np.ones((rows, 784))
    return lambda: baseline.rows(np.sort(rng.choice(8192, rows, replace=False)), source)


def rows_step(store: pmstore.Store, rows: int, declared: bool, seed: int) -> Step:
    rng = np.random.default_rng(seed)
    w = store["w"] if "w" in store else store.create_array("w", (8192, 784), "f8", fill_value=1.0)
    store.commit()
    source = rng.random(784)

    def one() -> float:
        i = int(rng.integers(0, 8192))
        start = perf_counter()
        with store.transaction(only=[w[i]]):
            w[i] = source
        time = perf_counter() - start
        source[:] += 1
        return time

    def several() -> float:
        chosen = rng.choice(8192, rows, replace=False).tolist()
        start = perf_counter()
        with store.transaction():
            for i in chosen:
                w[i] = source
        time = perf_counter() - start
        source[:] += 1
        return time

    return one if declared else several


def sparse_rows(directory: Path, scale: float) -> dict[str, Any]:
    print("rows of a (8192, 784) f8 array, 50 MB; a new one, and the same after all pages were written once")
    print(f"{'':34}{'time':>11}{'baseline':>11}{'ratio':>8}{'p99':>11}{'wanted':>8}")
    raw: dict[str, Any] = {}
    for label, rows, declared, wanted in ROWS:
        for state in ("new", "written"):
            with scratch(directory) as inside, stores(inside, ("learned",)) as opened:
                store = opened["learned"]
                baseline = row_baseline(inside, rows)
                step = rows_step(store, rows, declared, 1)
                if state == "written":
                    store["w"][:] = 2.0
                    store.commit()
                repetitions = int(scale * (400 if rows == 1 else 120 if rows < 100 else 30))
                times = in_turns({"learned": step, "baseline": baseline}, opened, repetitions, 30)
            raw[f"{label}, {state}"] = times
            ratio = statistics.median(c / f for c, f in zip(times["learned"], times["baseline"], strict=True))
            c = sorted(times["learned"])
            print(
                f"{label:16}{state:18}{seconds(statistics.median(c)):>11}"
                f"{seconds(statistics.median(times['baseline'])):>11}{ratio:8.1f}"
                f"{seconds(c[int(len(c) * 0.99)]):>11}{wanted:8}"
            )
    print()
    return raw


# ---- which is chosen


def pages_step(store: pmstore.Store, pages: int, changed: int, seed: int) -> Step:
    rng = np.random.default_rng(seed)
    w = store["w"]
    values = np.full(512, float(seed))  # another seed, other values: writing what is there is no change

    def step() -> float:
        chosen = rng.choice(pages, changed, replace=False) if changed < pages else slice(None)
        values[:] += 1
        start = perf_counter()
        with store.transaction():
            w[chosen] = values
        return perf_counter() - start

    return step


def choices(directory: Path, scale: float) -> dict[str, Any]:
    print("whole random pages, every choice in turn: × the best fixed one; which that is, and its time")
    print(f"{'':10}" + "".join(f"{label:>22}" for label in FRACTIONS))
    raw: dict[str, Any] = {}
    for name, pages in SIZES.items():
        line = ""
        for label, fraction in FRACTIONS.items():
            changed = max(1, int(pages * fraction))
            with scratch(directory) as inside, stores(inside, ("learned", *TRACKERS)) as opened:
                for store in opened.values():
                    store.create_array("w", (pages, 512), "f8")
                    store.commit()
                    store["w"][:] = 0.5  # all pages private, as in the long run
                    store.commit()
                steps = {tracker: pages_step(store, pages, changed, 1) for tracker, store in opened.items()}
                repetitions = int(scale * max(10, min(200, 20_000 // (20 + changed + pages // 10))))
                times = in_turns(steps, opened, repetitions, 20)
            raw[f"{name}, {label}"] = times
            medians = {tracker: statistics.median(values) for tracker, values in times.items()}
            learned = medians.pop("learned")
            best = min(medians, key=medians.__getitem__)
            line += f"{learned / medians[best]:7.2f} {best:>7}{seconds(medians[best]):>7.5}"
        print(f"{name:10}{line}")
    print()
    return raw


# ---- wrong guesses


def wrong_guesses(directory: Path, scale: float) -> dict[str, Any]:
    print("changing patterns, 50 MB, whole runs: × the best fixed one (· all of them)")
    patterns = {
        "sparse, then dense": [1] * 20 + [12_250] * 10,
        "dense, then sparse": [12_250] * 10 + [1] * 20,
        "one dense in ten": ([1] * 9 + [12_250]) * 4,
        "by turns": [1, 12_250] * 15,
        "slowly more": [1, 2, 5, 12, 30, 80, 200, 500, 1200, 3000, 6000, 12_250] * 2,
        "a few at first": [3] * 6,
    }
    raw: dict[str, Any] = {}
    for label, pattern in patterns.items():
        totals: dict[str, list[float]] = {}
        for _ in range(max(1, int(3 * scale))):
            with scratch(directory) as inside, stores(inside, ("learned", *TRACKERS)) as opened:
                for tracker, store in opened.items():
                    store.create_array("w", (12_250, 512), "f8")
                    store.commit()
                    total = 0.0
                    for number, changed in enumerate(pattern):
                        total += pages_step(store, 12_250, changed, number)()
                    totals.setdefault(tracker, []).append(total)
        medians = {tracker: statistics.median(values) for tracker, values in totals.items()}
        best = min(value for tracker, value in medians.items() if tracker != "learned")
        told = ", ".join(f"{tracker} {seconds(value)}" for tracker, value in medians.items())
        print(f"{label:22}{medians['learned'] / best:6.2f} · {told}")
        raw[label] = totals
    print()
    return raw


def main() -> None:
    p = parser(__doc__ or "")
    p.add_argument("--part", choices=("rows", "choices", "guesses"), help="only this one")
    options = p.parse_args()
    print(f"{machine()}; {real_time()}\n")
    parts = {"rows": sparse_rows, "choices": choices, "guesses": wrong_guesses}
    raw = {name: part(options.memory, options.scale) for name, part in parts.items() if options.part in (None, name)}
    save(options.raw, "trackers", raw)


if __name__ == "__main__":
    main()
