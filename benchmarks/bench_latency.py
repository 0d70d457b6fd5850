"""How long the longest commits take, and how much a commit writes.

The percentiles are those of thousands of commits of one store, from its first one on, so that the growth of the log and
every checkpoint are among them; and of commits of 49 MB. Blocks of the baseline and blocks of commits take turns: a
baseline after each commit would give the disk time to finish what that commit left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
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
    baseline_of,
    file_system,
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
COUNTS = {"memory": 20_000, "disk": 10_000}  # ten and more commits are longer than p99.9: it is no single accident
WRITTEN = ("bytes_logged", "bytes_home", "bytes_direct", "checkpoints", "syncs", "fences")


def spent(before: pmstore.Stats, after: pmstore.Stats) -> dict[str, int]:
    """What the store did in between."""
    return {name: getattr(after, name) - getattr(before, name) for name in WRITTEN}


class Sent:
    """Bytes that reached the disk while a store committed, without those of the baselines in between.

    The kernel counts all writes to the disk, so no other program should write to it. `store.stats()` counts more: each
    byte for the committed image, although the kernel writes a page back once after several such writes.
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
        store.stats()  # waits until the committed image is up to date
        self.bytes += self.so_far() - before
        self.committed += committed

    def raw(self) -> dict[str, int]:
        return {"sent": self.bytes, "sent for": self.committed} if self.counts else {}


def in_turns(
    store: pmstore.Store,
    medium: str,
    size: int,
    count: int,
    baseline: Callable[[], float],
    commit: Callable[[], float],
) -> dict[str, Any]:
    """`count` commits of `size` bytes each, and as many baselines."""
    block = min(BLOCK, count)
    times: list[float] = []
    baselines: list[float] = []
    before = store.stats()
    with no_collection():
        while len(times) < count:
            baselines += [baseline() for _ in range(block)]
            if len(times) <= count // 2:
                sent = Sent(medium, Path(store.path).parent)  # what growth wrote once is not counted
            with sent.commits(store, size * block):
                times += [commit() for _ in range(block)]
    after = store.stats()
    return {
        "times": times,
        "baselines": baselines,
        "committed": size * len(times),
        **spent(before, after),
        **sent.raw(),
        "log before": before.log_size,
        "log after": after.log_size,
    }


def series(directory: Path, medium: str, size: int, count: int) -> dict[str, Any]:
    """An array that changes as a whole."""
    baseline, source = baseline_of(medium, directory, size), padded(size // 8)

    def one_baseline() -> float:
        source.__iadd__(1.0)
        return baseline(source)

    def one_commit() -> float:
        array.__iadd__(1.0)
        start = perf_counter()
        store.commit()
        return perf_counter() - start

    with pmstore.open(directory / "store.pm", "w", media=MEDIA[medium]) as store:
        array = store.create_array("array", size // 8, "f8")
        store.commit()
        for _ in range(3):
            one_baseline()
        cell = in_turns(store, medium, size, count, one_baseline, one_commit)
    with pmstore.open(directory / "store.pm", "r") as store:
        if not (store["array"] == len(cell["times"])).all():
            raise SystemExit(f"{medium}, {size} bytes: what was read back isn't what was committed")
    return cell


def row_series(directory: Path, medium: str, count: int) -> dict[str, Any]:
    """One random row each, of 51 MB, with only= if there is such a thing."""
    size = ROWS * ROW_BYTES if medium == "memory" else ROW_BYTES
    baseline, values = baseline_of(medium, directory, size), np.zeros((1, COLUMNS))
    expected = np.zeros((ROWS, COLUMNS))
    rows_of_baselines, rows_of_commits = (np.random.default_rng(1) for _ in range(2))  # the same rows

    def one_baseline() -> float:
        return baseline.rows(np.array([rows_of_baselines.integers(ROWS)]), values)

    def one_commit() -> float:
        row = int(rows_of_commits.integers(ROWS))
        values.__iadd__(1.0)
        start = perf_counter()
        view = array[row]
        with transaction(only=[view]):
            view[...] = values[0]
        taken = perf_counter() - start
        expected[row] = values[0]
        return taken

    with pmstore.open(directory / "store.pm", "w", media=MEDIA[medium]) as store:
        array = store.create_array("array", (ROWS, COLUMNS), "f8")
        store.commit()
        transaction: Any = store.transaction
        try:
            transaction(only=[array[:1]])
        except TypeError:
            return {}
        cell = in_turns(store, medium, ROW_BYTES, count, one_baseline, one_commit)
    with pmstore.open(directory / "store.pm", "r") as store:
        if not np.array_equal(store["array"], expected):
            raise SystemExit(f"{medium}, rows: what was read back isn't what was committed")
    return cell


def report(name: str, cell: dict[str, Any]) -> None:
    shares = (0.5, 0.99, 0.999, 1.0)
    for who, values in (("pmstore", cell["times"]), ("baseline", cell["baselines"])):
        figures = "".join(f"{seconds(percentile(values, share)):>11}" for share in shares)
        print(f"  {name:20}{who:10}{len(values):8,}{figures}", end="")
        if who == "pmstore":
            print(f"{written(cell):9.3f} written per byte, {cell['checkpoints']} checkpoints", end="")
        print(flush=True)


def main() -> None:
    """Measure, print, and keep what was measured."""
    options = parser(__doc__ or "").parse_args()
    priority = real_time()
    head = "".join(f"{name:>11}" for name in ("p50", "p99", "p99.9", "max"))
    print(f"{machine()}; {priority}\n\n  {'':30}{'commits':>8}{head}")
    cells, skipped = [], []
    for medium in options.media:
        print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}", flush=True)
        counts = {"memory": 3000, "disk": 300} if options.quick else COUNTS
        count = int(options.scale * counts[medium])
        for workload in ("8 B", "62,720 B", "1 MiB", "1 row"):
            with scratch(parent(options, medium)) as directory:
                cell = (
                    series(directory, medium, SIZES[workload], count)
                    if workload in SIZES
                    else row_series(directory, medium, count)
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
