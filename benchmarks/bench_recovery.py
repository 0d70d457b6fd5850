"""Recovery against the size of the log and of the store, and opening after a clean close and after a crash.

A recovery is an open of a copy of a store that ended as by a kill, and is beside a plain copy of as many bytes as the
log held (memory), or a plain read, write and fdatasync of them (disk). On disks the store is read from the disk, as
after a reboot ("cold"), and from the page cache, as after a kill. What was recovered is compared with the last commit.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import (
    COLUMNS,
    MEDIA,
    ROW_BYTES,
    Array,
    MemoryBaseline,
    baseline_of,
    file_system,
    library,
    machine,
    padded,
    parent,
    parser,
    ratio,
    real_time,
    save,
    scratch,
    seconds,
)

import pmstore

MIB = 1 << 20


def crashed(path: Path, medium: str, store_bytes: int, log_bytes: int) -> tuple[int, Array]:
    """Makes a store of about that size, with about that many bytes in its log when it was killed.

    Gives the bytes that the log held, and the array as it was committed last.
    """
    rows = max(64, store_bytes // ROW_BYTES)
    random = np.random.default_rng(1)
    store = pmstore.open(path, "w", media=MEDIA[medium])
    array = store.create_array("array", (rows, COLUMNS), "f8")
    store.commit()
    # Random rows: all of it would go past the log. A small log grows with what is committed, and is emptied now and
    # then; the last commits are those that fill it again.
    some = max(1, min(rows // 16, log_bytes // 4 // ROW_BYTES))
    best = 0
    for attempt in range(400):
        array[random.choice(rows, some, replace=False)] += 1
        store.commit()
        used = store.stats().log_used
        best = max(best, used)
        if used >= 0.9 * log_bytes or (attempt >= 200 and used >= 0.9 * best):
            break
    held, expected = store.stats().log_used, np.array(array)
    store._drop(discard=True)
    return held, expected


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def opening(path: Path, *, keep: bool = False) -> tuple[float, Array | None]:
    start = perf_counter()
    store = pmstore.open(path, "r+")
    taken = perf_counter() - start
    array = np.array(store["array"]) if keep else None
    store.close()
    return taken, array


class Plain:
    """The same number of bytes, without a store: copied in memory, or read from one file and written to another."""

    def __init__(self, directory: Path, medium: str, size: int) -> None:
        self.size = size
        self.path = directory / "log"
        self.path.write_bytes(bytes(size + 64))
        self.baseline = baseline_of(medium, directory, size)

    def __call__(self, cold: bool) -> float:
        if isinstance(self.baseline, MemoryBaseline):
            source = padded(self.size // 8)
            source += 1
            return self.baseline(source)
        if cold:
            forget(self.path)
        start = perf_counter()
        data = np.fromfile(self.path, np.uint8)[: self.size]
        read = perf_counter() - start
        return read + self.baseline(data)

    def mapped_anew(self) -> float:
        """Memory: with the mapping of both files and its page faults, which an opening can't do without."""
        start = perf_counter()
        with open(self.path, "r+b") as log, open(self.path.parent / "baseline", "r+b") as image:
            source = np.frombuffer(mmap.mmap(log.fileno(), 0), np.uint8)
            target = np.frombuffer(mmap.mmap(image.fileno(), 0), np.uint8)
        library().baseline_memory(target.ctypes.data, source.ctypes.data, self.size)
        return perf_counter() - start


def recovery(directory: Path, medium: str, store_bytes: int, log_bytes: int, repetitions: int) -> dict[str, Any]:
    """Recoveries of one crashed store, each of its own copy, paired with plain ones."""
    original, copy = directory / "crashed.pm", directory / "copy.pm"
    held, expected = crashed(original, medium, store_bytes, log_bytes)
    plain = Plain(directory, medium, held // 8 * 8)
    found: dict[str, Any] = {"log bytes": held, "store bytes": original.stat().st_size}
    for state in ("cached",) if medium == "memory" else ("cached", "cold"):
        times, baselines, mapped = [], [], []
        for attempt in range(repetitions + 1):
            shutil.copy(original, copy)
            forget(copy)
            if state == "cached":
                copy.read_bytes()
            gc.collect()
            baselines.append(plain(state == "cold"))
            if medium == "memory":
                mapped.append(plain.mapped_anew())
            taken, array = opening(copy, keep=True)
            times.append(taken)
            if array is None or not np.array_equal(array, expected):
                raise SystemExit(f"{medium}: recovery {attempt} of {held} bytes gave another state")
        found[state] = {"times": times[1:], "baselines": baselines[1:], "mapped anew": mapped[1:]}
    return found


# ---- opening


def some_names(store: pmstore.Store, count: int) -> None:
    for i in range(count):
        store[f"name{i}"] = i
        if i % 20_000 == 19_999:
            store.commit()


def some_arrays(store: pmstore.Store, size: int) -> None:
    for i in range(max(1, size // (64 * MIB))):
        store[f"array{i}"] = np.ones(min(size, 64 * MIB) // 8)
        store.commit()


def openings(directory: Path, medium: str, names: int, size: int, repetitions: int) -> dict[str, Any]:
    """Opens after a clean close, in turn, so that all see the same machine; and after a crash just after a commit."""
    few, large = directory / "few", directory / "large"
    many, small = directory / "many", directory / "small"
    for path, fill, amount in (
        (few, some_names, 10),
        (many, some_names, names),
        (small, some_arrays, MIB),
        (large, some_arrays, size),
    ):
        with pmstore.open(path, "x", media=MEDIA[medium]) as store:
            fill(store, amount)
    times: dict[str, list[float]] = {path.name: [] for path in (few, many, small, large)}
    times["after a crash"] = []
    for _ in range(repetitions + 3):
        for path in (few, many, small, large):
            times[path.name].append(opening(path)[0])
        store = pmstore.open(few, "r+")
        store["name0"] = 0
        store.commit()
        store._drop(discard=True)
        times["after a crash"].append(opening(few)[0])
    return {"names": names, "bytes": size, "times": {name: kept[3:] for name, kept in times.items()}}


def main() -> None:
    """Measure, print, and keep what was measured."""
    options = parser(__doc__ or "").parse_args()
    priority = real_time()
    print(f"{machine()}; {priority}\n")
    logs = (1, 8, 32) if options.quick else (1, 4, 16, 32, 64)
    stores = (64, 256) if options.quick else (64, 256, 1024)
    repetitions = int(options.scale * (3 if options.quick else 9)) or 1
    recoveries, opened = [], []
    for medium in options.media:
        print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}", flush=True)
        cases = [("log", 64, log) for log in logs] + [("store", size, 8) for size in stores]
        for varied, store_mib, log_mib in cases:
            with scratch(parent(options, medium)) as directory:
                cell = recovery(directory, medium, store_mib * MIB, log_mib * MIB, repetitions)
            recoveries.append({"medium": medium, "varied": varied, **cell})
            for state in ("cached", "cold"):
                if state in cell:
                    times, baselines = cell[state]["times"], cell[state]["baselines"]
                    mapped = cell[state]["mapped anew"]
                    sizes = f"log {cell['log bytes'] / MIB:6.2f} MiB, store {cell['store bytes'] / MIB:7.1f} MiB"
                    print(
                        f"  {sizes}, {state:7}{seconds(statistics.median(times)):>10}"
                        f" {ratio(times, baselines):6.2f} × plain copy"
                        + (f", {ratio(times, mapped):.2f} × one that maps its files" if mapped else ""),
                        flush=True,
                    )
        names, size = (20_000, 64 * MIB) if options.quick else (1_000_000, 1024 * MIB)
        with scratch(parent(options, medium)) as directory:
            cell = openings(directory, medium, names, size, 20 if options.quick else 60)
        opened.append({"medium": medium, **cell})
        middle = {name: statistics.median(kept) for name, kept in cell["times"].items()}
        print("  " + ", ".join(f"{name} {seconds(value)}" for name, value in middle.items()))
        print(
            f"  {names:,} names / ten {middle['many'] / middle['few']:.2f}, "
            f"{size // MIB} MiB / 1 MiB {middle['large'] / middle['small']:.2f}",
            flush=True,
        )
    raw = {"priority": priority, "quick": options.quick, "recoveries": recoveries, "openings": opened}
    save(options.raw, "recovery", raw)


if __name__ == "__main__":
    main()
