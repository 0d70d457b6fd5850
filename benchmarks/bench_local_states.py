"""What local states of shards cost: an epoch with them beside one without.

The map of an epoch does nothing but its messages, and adds 1 to its local state. Each figure is a median over epochs,
the least of the repeats, which run in turns.

    python benchmarks/bench_local_states.py
    python benchmarks/bench_local_states.py --raw local-states.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _common import machine, scratch
from bench_scale import STATE, Empty, per_epoch

import pmstore
from pmstore.scale import Processes


class States(Empty):
    """The same with a local state of each shard."""

    def __init__(self, shards: Any, epochs: int, size: int) -> None:
        super().__init__(shards, epochs)
        self.size = size

    def local_fields(self, i: int) -> Any:
        return [pmstore.Field("state", self.size // 8)]

    def map(self, shard: Any, shared: dict[str, Any], rng: Any, local: Any) -> dict[str, Any]:
        local.state += 1
        return super().map(shard, shared, rng)


def seconds(algorithm: Any, store: Path, **options: Any) -> float:
    algorithm.run(store=store, name="states", engine=Processes(2), **options)
    return per_epoch(algorithm.history_, slice(5, None))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for stores and local states")
    options.add_argument("--raw", type=Path)
    options.add_argument("--epochs", type=int, default=150)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    found: dict[str, list[float]] = {}
    with scratch(given.dir) as directory:
        for turn in range(given.repeats):
            for count in (2, 16):
                shards = [np.zeros((1, 1)) + i for i in range(count)]
                name = f"{count} shards of 2 processes"
                plain = seconds(Empty(shards, given.epochs), directory / f"{turn}-{count}.pm")
                found.setdefault(f"{name}, no local state", []).append(plain)
                for size in (8_000, 1_000_000):
                    store = directory / f"{turn}-{count}-{size}.pm"
                    algorithm = States(shards, given.epochs, size)
                    found.setdefault(f"{name}, {size:,} B each", []).append(seconds(algorithm, store))
    print(f"{STATE:,} bytes are broadcast in each epoch; {machine()}")
    for name, times in found.items():
        print(f"{name:50} {1e3 * min(times):8.2f} ms   ({', '.join(f'{1e3 * one:.2f}' for one in times)})")
    if given.raw is not None:
        figures = {name: statistics.median(times) for name, times in found.items()}
        given.raw.write_text(json.dumps({"machine": machine(), "medians": figures, "raw": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
