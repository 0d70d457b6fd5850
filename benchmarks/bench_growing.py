"""Arrays that grow: the time to append rows of 784 float64 durably, beside others and the baseline.

Each subject begins with an empty array and appends one row, or 1,000 rows, again and again. The baseline takes turns
with it: one write and one sync of the same bytes into an allocated file (disk), or a streamed copy and a fence
(memory). The mean of the ratios' time contains the moves of rows, the median does not.

    build/bench/venv/bin/python benchmarks/bench_growing.py
"""

from __future__ import annotations

import os
import sqlite3
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import (
    COLUMNS,
    MEDIA,
    ROW_BYTES,
    Array,
    baseline_of,
    machine,
    no_collection,
    parent,
    parser,
    real_time,
    save,
    scratch,
    seconds,
    versions,
)

import pmstore

Append = Callable[[Array], None]


def with_pmstore(directory: Path, medium: str, most: int | None = None) -> tuple[Append, Callable[[], Array]]:
    store = pmstore.open(directory / "store.pm", media=MEDIA[medium])  # type: ignore[arg-type]
    store.create_array("x", (0, COLUMNS), maxshape=(most, COLUMNS))
    store.commit()

    def append(rows: Array) -> None:
        store.append("x", rows)
        store.commit()

    return append, lambda: store["x"]


def with_h5py(directory: Path, medium: str) -> tuple[Append, Callable[[], Array]]:
    import h5py

    file = h5py.File(directory / "file.h5", "w")
    data = file.create_dataset("x", (0, COLUMNS), "f8", maxshape=(None, COLUMNS), chunks=(128, COLUMNS))

    def append(rows: Array) -> None:
        data.resize(len(data) + len(rows), axis=0)
        data[-len(rows) :] = rows
        file.flush()
        if medium == "disk":
            os.fsync(file.id.get_vfd_handle())

    return append, lambda: data[:]


def with_zarr(directory: Path, medium: str) -> tuple[Append, Callable[[], Array]]:
    import zarr

    data = zarr.create_array(
        directory / "x.zarr", shape=(0, COLUMNS), dtype="f8", chunks=(128, COLUMNS), compressors=None
    )
    return (lambda rows: data.append(rows) and None), lambda: data[:]


def with_sqlite(directory: Path, medium: str) -> tuple[Append, Callable[[], Array]]:
    connection = sqlite3.connect(directory / "file.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={'FULL' if medium == 'disk' else 'OFF'}")
    connection.execute("CREATE TABLE x (row BLOB)")

    def append(rows: Array) -> None:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO x VALUES (?)", ((row.tobytes(),) for row in rows))
        connection.execute("COMMIT")

    def found() -> Array:
        rows = connection.execute("SELECT row FROM x ORDER BY rowid")
        return np.array([np.frombuffer(row, "f8") for (row,) in rows])

    return append, found


def bounded(directory: Path, medium: str) -> tuple[Append, Callable[[], Array]]:
    return with_pmstore(directory, medium, 10_000)


SUBJECTS: dict[str, Callable[[Path, str], tuple[Append, Callable[[], Array]]]] = {
    "pmstore": with_pmstore,
    "pmstore, maxshape=(10_000, 784)": bounded,
    "sqlite3, WAL": with_sqlite,
    "h5py, flush": with_h5py,
    "zarr, not synced": with_zarr,
}


def measured(name: str, medium: str, directory: Path, rows: int, times: int) -> tuple[list[float], list[float]]:
    """Seconds of each append, and of the baseline before it."""
    append, found = SUBJECTS[name](directory, medium)
    baseline = baseline_of(medium, directory, rows * ROW_BYTES)
    taken, baselines = [], []
    values = np.random.default_rng(0).random((rows, COLUMNS))
    with no_collection():
        for i in range(times):
            values[:, 0] = i
            baselines.append(baseline(values))
            start = perf_counter()
            append(values)
            taken.append(perf_counter() - start)
    contents = found()
    if contents.shape != (rows * times, COLUMNS) or not (contents[-rows:, 0] == times - 1).all():
        raise SystemExit(f"{name}: the rows are not there")
    return taken, baselines


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    about = f"{machine()}, {real_time()}; " + ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{about}\n")
    print("| | rows | | median | × baseline | mean × baseline | longest |\n| --- | --- | --- | --- | --- | --- | --- |")
    raw: dict[str, Any] = {}
    for medium in options.media:
        for rows, times in ((1, 3000), (1000, 40)):
            times = max(20, int(times * options.scale / (20 if options.quick else 1)))
            for name in SUBJECTS:
                if "maxshape" in name and rows * times > 10_000:
                    times = min(times, 10_000 // rows)
                with scratch(parent(options, medium)) as directory:
                    taken, baselines = measured(name, medium, directory, rows, times)
                ratio = statistics.median(one / baseline for one, baseline in zip(taken, baselines))
                median, mean = statistics.median(taken), sum(taken) / sum(baselines)
                print(
                    f"| {medium} | {rows:,} | {name} | {seconds(median)} | {ratio:.2f} | {mean:.2f} "
                    f"| {seconds(max(taken))} |",
                    flush=True,
                )
                raw[f"{medium}, {rows}, {name}"] = {"append": taken, "baseline": baselines}
    save(options.raw, "growing", raw)


if __name__ == "__main__":
    main()
