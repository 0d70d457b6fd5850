"""Readers beside a process that writes: their cost for its commits, the cost of reading, the delay of a wake-up.

Commits are measured in blocks that take turns, without readers and with three reader processes, so that the drift of
the machine cancels. Readers use processors, which the writer lacks if there are too few. Therefore there is a control:
the process that writes has two such stores, and changes both in turn, in every block. The commits of one are timed. The
readers read this one, or, as the control, the other one, which is the same work.

All processes have normal priority, as a user's have.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from _common import (
    MEDIA,
    SIZES,
    Array,
    file_system,
    machine,
    no_collection,
    paired,
    parent,
    parser,
    percentile,
    ratio,
    save,
    scratch,
    seconds,
)
from _readers import (
    BESIDE,
    HERTZ,
    Beside,
    PmstoreBeside,
    Workers,
    committing,
    holding,
    made,
    reading,
    ticking,
    workers,
    writing,
)
from _targets import MEMORY, PREAD, RECENCY, beside, copied

import pmstore

READERS = 3
COMMITTED = ("8 B", "62,720 B", "1 MiB", "49 MB")
COPIED = {"1 MiB": 1 << 20, "24 MB": 24_000_000, "49 MB": 49_000_000}
REUSED_MOST = 32 << 20  # bytes: the C library returns the memory of larger arrays to the kernel
ENOUGH = 8  # seconds that a cell of commits takes, or three rounds
WARM_UP = 12
MIB = 1 << 20

# What the readers do in a block: whether they read all of the array or one element, and of which store.
NOBODY = ""
STATES: dict[str, tuple[bool, str] | None] = {
    NOBODY: None,
    "refresh": (False, "a"),
    "refresh elsewhere": (False, "b"),
    "read": (True, "a"),
    "read elsewhere": (True, "b"),
}
OF_COMPETITORS = (NOBODY, "read", "read elsewhere")


# ---- commits


def turns(one: Any, other: Any, seconds: float, least: int) -> dict[str, Any]:
    """A block: both stores change in turn, and the commits of the first are timed."""
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < least or perf_counter() < end:
        one.array.__iadd__(1.0)
        start = perf_counter()
        one.put()
        times.append(perf_counter() - start)
        one.drain()
        other.array.__iadd__(1.0)
        other.put()
        other.drain()
    return {
        "median": statistics.median(times),
        "mean": statistics.fmean(times),
        "longest": max(times),
        "count": len(times),
    }


def commits(
    processes: Workers, directory: Path, medium: str, kind: Beside, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Blocks of commits, by what the readers do; each round has one block of each."""
    rounds, length, least = (2, 0.02, 2) if options.quick else (7 if kind is PmstoreBeside else 5, 0.1, 4)
    rounds = max(1, round(rounds * options.scale))
    stores = {name: made(kind, directory / name, medium, size) for name in "ab"}
    one, other = stores["a"], stores["b"]
    changes = turns(one, other, 0, WARM_UP)["count"]
    states = list(STATES if kind is PmstoreBeside else OF_COMPETITORS)
    blocks: dict[str, list[dict[str, Any]]] = {state: [] for state in states}
    end = perf_counter() + ENOUGH * options.scale
    for number in range(rounds):
        if number >= 3 and perf_counter() > end:
            break
        for state in states[number % len(states) :] + states[: number % len(states)]:
            whole, target = STATES[state] or (False, "")
            calls = [
                (reading, kind, stores[target].path, whole, HERTZ, i / HERTZ / READERS)
                for i in range(READERS if target else 0)
            ]
            found: list[dict[str, Any]] = []
            with no_collection(), processes.running(calls, found):
                block = turns(one, other, length, least)
            changes += block["count"]
            blocks[state].append({**block, "readers": found})
    for store in stores.values():
        store.close()
        if not (store.read() == changes).all():
            raise SystemExit(f"{kind.name}, {medium}, {size} bytes: what was read back isn't what was committed")
    return {"blocks": blocks, "verified": True}


def report_commits(cell: dict[str, Any]) -> None:
    for state in cell["blocks"]:
        known = beside(cell, state)
        print(
            f"  {cell['workload']:12}{cell['who']:14}{state or 'no readers':16}{seconds(known['median']):>10}"
            f"{known['ratio']:8.2f} (mean {known['mean ratio']:.2f}) × none, {known['share']:.2f} processors"
            f"{known['rate']:6.0f} readings a second and reader"
            + (f", {known['mixed']:,} mixed" if known["mixed"] else "")
            + (f", {known['older']:,} older" if known["older"] else "")
            + (f", {known['failed']:,} failed: {known['error']}" if known["failed"] else ""),
            flush=True,
        )


# ---- copies


def reuse_memory(reused: bool) -> None:
    """Whether arrays of less than REUSED_MOST bytes get memory that other arrays have left, or pages from the kernel.

    By itself the C library takes the latter at first, and the former as soon as an array has been freed.
    """
    limit = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    limit(-3, REUSED_MOST if reused else 128 << 10)  # M_MMAP_THRESHOLD
    limit(-1, 1 << 30 if reused else 128 << 10)  # M_TRIM_THRESHOLD


def copies(
    processes: Workers, directory: Path, medium: str, kind: Beside, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Readings of an array by this process, paired with a copy of a mapped file: by memory and recency (_targets.py)
    the times and baselines. Beside pmstore also `pread` of the whole of that file, which a copy would need that is no
    signal if the file becomes shorter."""
    plain = directory / "plain"
    plain.write_bytes(np.ones(size // 8).tobytes())
    mapped: Array = np.memmap(plain, np.float64, "r")
    mapped.sum()
    opened = os.open(plain, os.O_RDONLY)
    limits: dict[str, Any] = dict(seconds=(0.02 if options.quick else 0.3) * options.scale, least=5, most=400)
    writer = processes.all[0]
    writer.start(committing, kind, directory / "store", medium, size)
    writer.receive()
    reader = kind.reader(directory / "store" / "file")
    changes = 0

    def plainly() -> float:
        start = perf_counter()
        np.array(mapped)
        return perf_counter() - start

    def pread() -> float:
        start = perf_counter()
        os.preadv(opened, [np.empty(size // 8)], 0)
        return perf_counter() - start

    def again() -> float:
        start = perf_counter()
        array = reader.read()
        taken = perf_counter() - start
        if not (array == changes).all():
            raise SystemExit(f"{kind.name}, {medium}, {size} bytes: what was read isn't what was committed")
        return taken

    def after_a_commit() -> float:
        nonlocal changes
        writer.ask(True)
        changes += 1
        return again()

    found: dict[str, Any] = {}
    ways = [*zip(RECENCY, (again, after_a_commit)), *([(PREAD, pread)] if kind is PmstoreBeside else [])]
    for memory in MEMORY if size < REUSED_MOST else MEMORY[:1]:
        reuse_memory(memory == "reused")
        for state, what in ways:
            times, baselines = paired(what, plainly, **limits)
            found[f"{memory}, {state}"] = {"times": times, "baselines": baselines}
    os.close(opened)
    reader.close()
    writer.ask(False)
    return found


# ---- opening


def openings(processes: Workers, directory: Path, medium: str, options: argparse.Namespace) -> dict[str, Any]:
    """Snapshots of stores that another process has open for writing, in turn; and refreshes after a value changed."""
    large = 64 if options.quick else 1024
    arrays = {"small": (1, 1), "large": (1, large), "many": (1000 * large // 1024, 1)}  # so many, of so many MiB
    paths = {name: directory / name for name in arrays}
    for name, (count, mib) in arrays.items():
        with pmstore.open(paths[name], "x", media=MEDIA[medium], max_size=3 * count * mib * MIB + (1 << 28)) as store:
            for i in range(count):
                store[f"array{i}"] = np.ones(mib * MIB // 8)
                if i % 64 == 63:
                    store.commit()
    writer = processes.all[0]
    writer.start(holding, paths)
    writer.receive()
    times: dict[str, list[float]] = {name: [] for name in arrays}
    refreshes: dict[str, list[float]] = {name: [] for name in arrays}
    for _ in range(max(1, int((5 if options.quick else 40) * options.scale)) + 2):
        for name, path in paths.items():
            start = perf_counter()
            store = pmstore.open(path, "r")
            times[name].append(perf_counter() - start)
            writer.ask(name)
            start = perf_counter()
            store.refresh()
            refreshes[name].append(perf_counter() - start)
            store.close()
    writer.ask("")
    kept = {
        kind: {name: all_of[2:] for name, all_of in found.items()}
        for kind, found in (("times", times), ("refreshes", refreshes))
    }
    return {"bytes": large * MIB, "arrays": arrays["many"][0], **kept}


# ---- readings beside commits back to back


def starving(
    processes: Workers, directory: Path, medium: str, kind: Beside, readers: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Readings without a pause, beside commits of 49 MB without a pause."""
    size = SIZES["49 MB"]
    writer = processes.all[-1]
    found: list[dict[str, Any]] = []
    processes.stop[0] = 0
    writer.start(writing, kind, directory / "store", medium, size)
    writer.receive()
    with processes.running([(reading, kind, directory / "store" / "file", True, 0, 0.0)] * readers, found):
        time.sleep((0.3 if options.quick else 2.0) * options.scale)
    return {"readers": found, "writer": writer.receive()}


# ---- waiting


def wakes(processes: Workers, directory: Path, medium: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the call of a commit, and from its return, until a process that waits for it goes on, which may be
    before that return; and the processor time of waiting."""
    count = max(10, int((50 if options.quick else 400) * options.scale))
    idle = 0.5 if options.quick else 3.0
    pauses = np.random.default_rng(1).uniform(0.002, 0.015, count).tolist()
    path, writer = directory / "store", processes.all[0]
    writer.start(ticking, path, medium, pauses)
    first = last = writer.receive()
    seen: list[tuple[int, int]] = []
    with pmstore.open(path, "r") as store:
        used, begun = process_time(), perf_counter()
        store.wait(after=first, timeout=idle)
        used, idle = process_time() - used, perf_counter() - begun
        writer.connection.send(True)
        while last < first + count:
            waited = store.wait(after=last, timeout=10)
            now = time.monotonic_ns()
            if waited.event not in ("commit", "closed"):
                raise SystemExit(f"{medium}: waiting for commit {last + 1} ended with {waited.event!r}")
            last = waited.sequence
            seen.append((last, now))
    called, returned, at = [], [], 0
    for number, (call, end) in enumerate(writer.receive()):
        while seen[at][0] < first + number + 1:
            at += 1
        called.append((seen[at][1] - call) / 1e9)
        returned.append((seen[at][1] - end) / 1e9)
    return {"called": called, "returned": returned, "wakes": len(seen), "idle": idle, "used": used}


# ---- all of it


class Session(NamedTuple):
    """The run on one medium. raw: gets lists of cells."""

    options: argparse.Namespace
    processes: Workers
    medium: str
    present: list[Beside]
    raw: dict[str, Any]

    def cell(self, part: str, what: Callable[..., dict[str, Any]], *arguments: Any, **known: Any) -> dict[str, Any]:
        """Measure what(processes, directory, medium, *arguments, options) and keep it. Empty: a competitor failed."""
        try:
            with scratch(parent(self.options, self.medium)) as directory:
                try:
                    found = what(self.processes, directory, self.medium, *arguments, self.options)
                except BaseException:
                    self.processes.end()  # before the directory goes: they may make files in it
                    raise
        except Exception as error:  # of a competitor: the others are to be measured all the same
            if known.get("who", "pmstore") == "pmstore":
                raise
            why = f"{type(error).__name__}: {error}"
            print(f"  skipped: {known['who']} ({part}): {why}", flush=True)
            self.raw["skipped"].append({"who": known["who"], "where": f"{self.medium}, {part} of readers", "why": why})
            self.processes.renew()
            return {}
        self.raw[part].append({"medium": self.medium, **known, **found})
        return dict(self.raw[part][-1])

    def commits(self) -> None:
        for kind in self.present:
            for workload in COMMITTED:
                cell = self.cell("commits", commits, kind, SIZES[workload], who=kind.name, workload=workload)
                if cell:
                    report_commits(cell)

    def copies(self) -> None:
        for kind in self.present:
            for workload, size in COPIED.items():
                cell = self.cell("copies", copies, kind, size, who=kind.name, workload=workload)
                for state, known in copied(cell, PREAD):
                    print(
                        f"  {workload:12}{kind.name:14}read, {state:24}{seconds(statistics.median(known['times'])):>10}"
                        f"{ratio(known['times'], known['baselines']):8.2f} × a copy",
                        flush=True,
                    )

    def openings(self) -> None:
        cell = self.cell("openings", openings)
        for what in ("times", "refreshes"):
            middle = ", ".join(f"{name} {seconds(statistics.median(kept))}" for name, kept in cell[what].items())
            print(f"  {'opening' if what == 'times' else 'refresh'}: {middle}", flush=True)

    def starving(self) -> None:
        for kind in self.present:
            for number in (1, READERS) if kind is PmstoreBeside else (READERS,):
                cell = self.cell("starving", starving, kind, number, who=kind.name, number=number)
                if not cell:
                    continue
                readers = cell["readers"]
                longest = seconds(max(reader["longest"] for reader in readers))
                sums = {what: sum(reader[what] for reader in readers) for what in ("count", "mixed", "failed")}
                print(
                    f"  {kind.name:14}{number} beside {cell['writer']['count']:,} commits of 49 MB: "
                    f"{sums['count']:,} readings, the longest {longest}, {sums['mixed']:,} mixed, "
                    f"{sums['failed']:,} failed",
                    flush=True,
                )

    def wakes(self) -> None:
        cell = self.cell("wakes", wakes)
        print(
            f"  woken {woken(cell['called'])} after the call of commit, {woken(cell['returned'])} after its return; "
            f"{seconds(cell['used'])} of processor time in {cell['idle']:.1f} s of waiting",
            flush=True,
        )


def woken(times: list[float]) -> str:
    return f"{seconds(max(0, percentile(times, 0.5)))} (p99 {seconds(max(0, percentile(times, 0.99)))})"


def installed(skipped: list[dict[str, str]]) -> list[Beside]:
    """The subjects whose libraries can be imported."""
    present = []
    for kind in BESIDE:
        try:
            importlib.import_module(kind.module or "numpy")
            present.append(kind)
        except ImportError as error:
            why = f"{error}. Install it: pip install 'pmstore[bench]'"
            print(f"  skipped: {kind.name}: {why}")
            skipped.append({"who": kind.name, "where": "readers", "why": why})
    return present


PARTS = ("commits", "copies", "openings", "starving", "wakes")


def main() -> None:
    """Measure, print, and keep what was measured."""
    command = parser(__doc__ or "")
    command.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options = command.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that directories are removed
    priority = "normal priority"
    print(f"{machine()}; {priority}\n", flush=True)
    raw: dict[str, Any] = {"skipped": [], **{part: [] for part in PARTS}}
    present = installed(raw["skipped"])
    with workers(READERS + 1) as processes:
        for medium in options.media:
            print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}", flush=True)
            session = Session(options, processes, medium, present, raw)
            for part in options.parts:
                getattr(session, part)()
    save(options.raw, "readers", {"priority": priority, "quick": options.quick, **raw})


if __name__ == "__main__":
    main()
