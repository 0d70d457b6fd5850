"""How long the longest commits take, and how much a commit writes: percentiles over thousands of commits of one store,
from its first one on, so that the growth of the log and every checkpoint are among them; and of commits of 49 MB.

Blocks of the floor and blocks of commits take turns: a floor after each commit would give the disk time to do what
that one left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import (
    COLUMNS,
    MEDIA,
    ROW_BYTES,
    ROWS,
    SIZES,
    file_system,
    floor_of,
    machine,
    no_collection,
    padded,
    parent,
    parser,
    percentile,
    real_time,
    save,
    scratch,
    seconds,
)
from _targets import written

import pmstore

BLOCK = 50
WRITTEN = ("bytes_logged", "bytes_home", "bytes_direct", "checkpoints", "syncs", "fences")


def spent(before: pmstore.Stats, after: pmstore.Stats) -> dict[str, int]:
    """What the store did in between."""
    return {name: getattr(after, name) - getattr(before, name) for name in WRITTEN}


class Sent:
    """Bytes that reached the disk while a store committed, without those of the floors in between.

    By the kernel's count of the whole disk, so nothing else should write to it. `store.stats()` counts bytes that go
    home time and again before the kernel writes their page back once.
    """

    def __init__(self, medium: str, directory: Path) -> None:
        self.bytes = self.committed = 0
        number = os.stat(directory).st_dev
        counts = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        self.counts = counts if medium == "disk" and counts.exists() else None

    def so_far(self) -> int:
        return int(self.counts.read_text().split()[6]) * 512 if self.counts else 0

    @contextlib.contextmanager
    def commits(self, store: pmstore.Store, committed: int) -> Iterator[None]:
        """A block of commits of so many bytes."""
        before = self.so_far()
        yield
        store.stats()  # waits until home is up to date
        self.bytes += self.so_far() - before
        self.committed += committed

    def raw(self) -> dict[str, int]:
        return {"sent": self.bytes, "sent for": self.committed} if self.counts else {}


def series(directory: Path, medium: str, size: int, count: int, *, block: int = BLOCK) -> dict[str, Any]:
    """`count` commits of an array that changes as a whole, and as many floors."""
    floor, source = floor_of(medium, directory, size), padded(size // 8)
    block = min(block, count)
    times: list[float] = []
    floors: list[float] = []
    with pmstore.open(directory / "store.pm", "w", media=MEDIA[medium]) as store:
        array = store.create_array("array", size // 8, "f8")
        store.commit()
        before, log_before = store.stats(), store.stats().log_size
        with no_collection():
            for _ in range(3):
                floor(source)
            sent = Sent(medium, directory)
            while len(times) < count:
                for _ in range(block):
                    source += 1
                    floors.append(floor(source))
                if len(times) < count // 2:
                    sent = Sent(medium, directory)  # what growth wrote once is not counted
                with sent.commits(store, size * block):
                    for _ in range(block):
                        array += 1
                        start = perf_counter()
                        store.commit()
                        times.append(perf_counter() - start)
        after = store.stats()
    with pmstore.open(directory / "store.pm", "r") as store:
        if not (store["array"] == len(times)).all():
            raise SystemExit(f"{medium}, {size} bytes: what was read back isn't what was committed")
    log = {"log before": log_before, "log after": after.log_size}
    return {
        "times": times,
        "floors": floors,
        "committed": size * len(times),
        **spent(before, after),
        **sent.raw(),
        **log,
    }


def row_series(directory: Path, medium: str, count: int) -> dict[str, Any]:
    """`count` commits of one random row each, of 51 MB, with only= if there is such a thing."""
    size = ROWS * ROW_BYTES if medium == "memory" else ROW_BYTES
    floor, values, random = floor_of(medium, directory, size), np.zeros((1, COLUMNS)), np.random.default_rng(1)
    expected = np.zeros((ROWS, COLUMNS))
    times: list[float] = []
    floors: list[float] = []
    with pmstore.open(directory / "store.pm", "w", media=MEDIA[medium]) as store:
        array = store.create_array("array", (ROWS, COLUMNS), "f8")
        store.commit()
        transaction: Any = store.transaction
        try:
            transaction(only=[array[:1]])
        except TypeError:
            return {}
        before, log_before = store.stats(), store.stats().log_size
        with no_collection():
            sent = Sent(medium, directory)
            while len(times) < count:
                if len(times) < count // 2:
                    sent = Sent(medium, directory)
                rows = random.integers(ROWS, size=BLOCK)
                for row in rows:
                    floors.append(floor.rows(np.array([row]), values))
                with sent.commits(store, ROW_BYTES * BLOCK):
                    for row in rows.tolist():
                        values += 1
                        start = perf_counter()
                        view = array[row]
                        with transaction(only=[view]):
                            view[...] = values[0]
                        times.append(perf_counter() - start)
                        expected[row] = values[0]
        after = store.stats()
    with pmstore.open(directory / "store.pm", "r") as store:
        if not np.array_equal(store["array"], expected):
            raise SystemExit(f"{medium}, rows: what was read back isn't what was committed")
    log = {"log before": log_before, "log after": after.log_size}
    return {
        "times": times,
        "floors": floors,
        "committed": ROW_BYTES * len(times),
        **spent(before, after),
        **sent.raw(),
        **log,
    }


def report(name: str, cell: dict[str, Any]) -> None:
    shares = (0.5, 0.99, 0.999, 1.0)
    for who, values in (("pmstore", cell["times"]), ("floor", cell["floors"])):
        print(f"  {name:12}{who:10}" + "".join(f"{seconds(percentile(values, share)):>11}" for share in shares), end="")
        if who == "pmstore":
            print(f"{written(cell):9.3f} written per byte, {cell['checkpoints']} checkpoints", end="")
        print(flush=True)


def main() -> None:
    """Measure, print, and keep what was measured."""
    options = parser(__doc__ or "").parse_args()
    priority = real_time()
    print(f"{machine()}; {priority}\n\n  {'':22}" + "".join(f"{name:>11}" for name in ("p50", "p99", "p99.9", "max")))
    cells, skipped = [], []
    for medium in options.media:
        print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}", flush=True)
        counts = {"memory": 3000, "disk": 300} if options.quick else {"memory": 20_000, "disk": 2000}
        count = int(options.scale * counts[medium])
        for workload in ("8 B", "62,720 B", "1 MiB", "1 row"):
            with scratch(parent(options, medium)) as directory:
                wanted = count if workload != "1 MiB" else max(300, count // 4)
                cell = (
                    series(directory, medium, SIZES[workload], wanted)
                    if workload in SIZES
                    else row_series(directory, medium, wanted)
                )
            if not cell:
                skipped.append({"who": "pmstore, with only=", "where": medium, "why": "no transaction(only=…) here"})
                print(f"  {workload:12}skipped: this version of pmstore has no transaction(only=…)")
                continue
            cells.append({"medium": medium, "workload": workload, "kind": "latency", **cell})
            report(workload, cells[-1])
        with scratch(parent(options, medium)) as directory:
            cell = series(directory, medium, SIZES["49 MB"], 100 if options.scale >= 1 else 10)
            cells.append({"medium": medium, "workload": "49 MB", "kind": "sustained", **cell})
            report("49 MB, 50 in a row", cells[-1])
    raw = {"priority": priority, "quick": options.quick, "cells": cells, "skipped": skipped}
    save(options.raw, "latency", raw)


if __name__ == "__main__":
    main()
