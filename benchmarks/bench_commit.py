"""The cost of making a change durable: pmstore, the baseline and the competitors side by side, on memory and on disk.

Each repetition changes the data, times the baseline with the same number of bytes, and times the change being made
durable. Every cell is read back from its files at the end, and compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import (
    CHANGED,
    COLUMNS,
    ROW_BYTES,
    ROWS,
    SIZES,
    Array,
    baseline_of,
    file_system,
    machine,
    padded,
    paired,
    parent,
    parser,
    ratio,
    real_time,
    save,
    scratch,
    seconds,
)
from _competitors import COMPETITORS, Competitor
from _subjects import (
    NO_FLUSH,
    PMEMOBJ_GUARANTEES,
    PMEMOBJ_WAYS,
    PMSTORES,
    Missing,
    Pmstore,
    pmemobj_cell,
    pmemobj_program,
)

SUBJECTS: list[type[Competitor]] = [*PMSTORES, *COMPETITORS]
WARM_UP = 12  # pmstore learns within a few commits how an array changes


class Different(Exception):
    """The files do not hold what was written."""


def whole(kind: type[Competitor], directory: Path, medium: str, size: int, limits: dict[str, Any]) -> dict[str, Any]:
    """All of an array changes."""
    baseline, source, changes = baseline_of(medium, directory, size), padded(size // 8), 0
    subject = kind(directory, medium, np.zeros(size // 8))

    def measured_baseline() -> float:
        source.__iadd__(1.0)
        return baseline(source)

    def change() -> None:
        nonlocal changes
        changes += 1
        subject.array.__iadd__(1.0)

    def put() -> float:
        if subject.back_to_back:
            change()
            subject.put()
        change()
        start = perf_counter()
        subject.put()
        taken = perf_counter() - start
        subject.drain()
        return taken

    times, baselines = paired(put, measured_baseline, **limits)
    subject.close()
    if not (subject.read() == changes).all():
        raise Different(f"after {changes} changes")
    return {"times": times, "baselines": baselines, "verified": True}


def some_rows(
    kind: type[Competitor], directory: Path, medium: str, changed: int, limits: dict[str, Any]
) -> dict[str, Any]:
    """Random rows of an array change, other rows each time."""
    random = np.random.default_rng(1)
    size = ROWS * ROW_BYTES if medium == "memory" else changed * ROW_BYTES
    baseline, expected = baseline_of(medium, directory, size), np.zeros((ROWS, COLUMNS))
    values, baseline_values = np.zeros((changed, COLUMNS)), np.zeros((changed, COLUMNS))
    subject = kind(directory, medium, np.zeros((ROWS, COLUMNS)))
    rows: Array = np.zeros(changed, np.int64)

    def choose() -> Array:
        return np.sort(random.choice(ROWS, changed, replace=False))

    def measured_baseline() -> float:
        nonlocal rows
        rows = choose()
        baseline_values.__iadd__(1.0)
        return baseline.rows(rows, baseline_values)

    def put() -> float:
        values.__iadd__(1.0)
        if subject.back_to_back:
            before = choose()
            expected[before] = values
            subject.put_rows(before, values)
        start = perf_counter()
        subject.put_rows(rows, values)
        taken = perf_counter() - start
        subject.drain()
        expected[rows] = values
        return taken

    times, baselines = paired(put, measured_baseline, **limits)
    subject.close()
    if not np.array_equal(subject.read(), expected):
        raise Different("some rows")
    return {"times": times, "baselines": baselines, "verified": True}


def workloads(kind: type[Competitor], medium: str, quick: bool) -> Iterator[tuple[str, int]]:
    """Names and sizes (bytes, or rows) of the workloads that are measured with this subject."""
    if medium not in kind.media:
        return
    if kind.whole:
        yield from SIZES.items()
    if kind.rows:
        for name, changed in CHANGED.items():
            if kind.partial or changed == 1 or not quick:  # a subject that writes all of it takes as long for one row
                yield name, changed


def report(who: str, workload: str, cell: dict[str, Any]) -> None:
    times = cell["times"]
    print(
        f"  {workload:12}{who:34}{seconds(statistics.median(times)):>10} {ratio(times, cell['baselines']):12,.2f}"
        " × baseline"
        f"{len(times):6}",
        flush=True,
    )


def subjects(only: list[str] | None) -> Iterator[type[Competitor]]:
    yield from (kind for kind in SUBJECTS if not only or any(word in kind.name for word in only))


def measure(options: argparse.Namespace, cells: list[dict[str, Any]], skipped: list[dict[str, str]]) -> None:
    """All cells of all media."""
    limits: dict[str, Any] = dict(seconds=0.1 if options.quick else 2.0, least=5)
    limits["seconds"] *= options.scale

    def skip(who: str, why: str, where: str = "everywhere") -> None:
        print(f"  skipped: {who} ({where}): {why}", flush=True)
        skipped.append({"who": who, "where": where, "why": why})

    @contextlib.contextmanager
    def cell(who: str, medium: str, workload: str, guarantee: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
        result: dict[str, Any] = {"medium": medium, "workload": workload, "who": who, "safe": guarantee.safe}
        try:
            with scratch(parent(options, medium)) as directory:
                yield directory, result
        except Missing as why:  # what this version lacks, no other medium or size has
            skip(who, str(why))
            missing.add(who)
        except Exception as error:  # of a competitor: the others are to be measured all the same
            if who.startswith("pmstore"):
                raise
            skip(who, f"{type(error).__name__}: {error}", f"{medium}, {workload}")
        else:
            cells.append(result)
            report(who, workload, result)

    missing: set[str] = set()
    present = []
    for kind in subjects(options.only):
        try:
            importlib.import_module(kind.module or "numpy")
            present.append(kind)
        except ImportError as error:
            skip(kind.name, f"{error}. Install it: pip install 'pmstore[bench]'")
    pmemobj = [who for who in PMEMOBJ_WAYS if not options.only or any(word in who for word in options.only)]
    try:
        if pmemobj:
            pmemobj_program()
    except Missing as why:
        for who in pmemobj:
            skip(who, str(why))
        pmemobj = []

    for medium in options.media:
        print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}", flush=True)
        for kind in present:
            warm_up = WARM_UP if issubclass(kind, Pmstore) else 3
            for workload, size in workloads(kind, medium, options.quick):
                if kind.name in missing or workload not in options.workloads:
                    continue
                with cell(kind.name, medium, workload, kind.guarantee) as (directory, result):
                    one = whole if workload in SIZES else some_rows
                    result.update(one(kind, directory, medium, size, {**limits, "warm_up": warm_up}))
        for who in pmemobj:
            if who == NO_FLUSH and medium != "memory":
                continue
            shapes = {name: (size, 0, 0) for name, size in SIZES.items()}
            shapes |= {name: (ROW_BYTES, ROWS, changed) for name, changed in CHANGED.items()}
            for workload, (size, rows, changed) in shapes.items():
                if workload not in options.workloads:
                    continue
                with cell(who, medium, workload, PMEMOBJ_GUARANTEES[who]) as (directory, result):
                    found = pmemobj_cell(directory, medium, who, size, rows, changed, most=1000, **limits)
                    if not found["verified"]:
                        raise Different("the pool")
                    result.update(found)


def guarantees() -> dict[str, dict[str, Any]]:
    known = {kind.name: kind.guarantee for kind in SUBJECTS} | PMEMOBJ_GUARANTEES
    return {name: dataclasses.asdict(guarantee) for name, guarantee in known.items()}


def main() -> None:
    """Measure, print, and keep what was measured."""
    command = parser(__doc__ or "")
    command.add_argument("--only", nargs="+", metavar="WORD", help="only those whose name has one of these words in it")
    known = [*SIZES, *CHANGED]
    sizes = ", ".join(known).replace("%", "%%")
    command.add_argument("--workloads", nargs="+", choices=known, default=known, metavar="SIZE", help=sizes)
    options = command.parse_args()
    priority = real_time()
    print(f"{machine()}; {priority}\n", flush=True)
    cells: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    measure(options, cells, skipped)
    systems = {medium: file_system(parent(options, medium)) for medium in options.media}
    raw = {"priority": priority, "quick": options.quick, "file systems": systems, "guarantees": guarantees()}
    save(options.raw, "commit", {**raw, "cells": cells, "skipped": skipped})


if __name__ == "__main__":
    main()
