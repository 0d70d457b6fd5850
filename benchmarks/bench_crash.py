"""How many crash states are recovered and compared in a second, on a store of about 1 MiB: in C, and with a check in
Python. The store's own code runs for each state, as a program that opens the file would run it.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from _common import machine, parser, save, scratch

import pmstore
from pmstore.testing import CrashExplorer
from pmstore.testing._store.engine import Options, Tally, explore
from pmstore.testing._store.recording import Recorder, Recording


def workload(store: pmstore.Store) -> None:
    """The centres of a KMeans, and single rows of a larger array, in twenty commits."""
    rng = np.random.default_rng(1)
    table = store.create_array("table", (20, 1000), "f8")
    centres = store.create_array("centres", (10, 784), "f8")
    store.commit()
    for i in range(20):
        centres += rng.random(centres.shape)
        table[rng.integers(len(table))] += 1
        store["n"] = i
        store.commit()


def recorded(directory: Path, medium: str) -> tuple[Recording, int]:
    path = directory / f"{medium}.pm"
    with Recorder(path, medium) as recorder:
        store = pmstore.open(path)
        workload(store)
        store._drop(discard=True)
    return recorder.recording, path.stat().st_size


def rate(tally: Tally) -> float:
    """Distinct images, recovered and compared, in a second."""
    return tally.distinct / tally.seconds


def with_check(budget: int) -> float:
    """The same with a check in Python, through the public interface."""

    def check(store: pmstore.Store) -> None:
        assert "n" not in store or store["centres"].shape == (10, 784)

    with CrashExplorer("bench") as explorer:
        report = explorer.run(workload, check=check, budget=budget, media=("memory",), depth=0)
    return report.distinct / report.seconds


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    budget = int(20_000 * arguments.scale)
    raw: dict[str, Any] = {}
    print(machine())
    print("distinct crash states recovered and compared per second, five runs: median (least – most)")
    with scratch(arguments.memory) as directory:
        for medium in ("memory", "file"):
            recording, size = recorded(directory, medium)
            for workers in sorted({1, os.cpu_count() or 1}):
                for depth in (0, 1):
                    options = Options(budget=budget, workers=workers, depth=depth)
                    rates = [rate(explore(recording, options)[0]) for _ in range(5)]
                    name = f"{medium}, {size / 2**20:.2f} MiB, {workers} process{'es' * (workers > 1)}, depth {depth}"
                    raw[name] = rates
                    middle = statistics.median(rates)
                    print(f"  {name:45} {middle:7,.0f}  ({min(rates):,.0f} – {max(rates):,.0f})")
    rates = [with_check(max(100, budget // 20)) for _ in range(5)]
    raw["memory, with a check in Python, 1 process"] = rates
    middle = statistics.median(rates)
    print(f"  {'memory, with a check in Python, 1 process':45} {middle:7,.0f}  ({min(rates):,.0f} – {max(rates):,.0f})")
    save(arguments.raw, "bench_crash", raw)


if __name__ == "__main__":
    main()
