"""The parts of the time of a commit in which all of an array changed: find, hash and copy, fence, image, Python.

The parts are timed from outside, in the same run and in turn. The core is not changed for that.

    Python         an empty transaction of a store of 8 B by `with`, minus the call of pm_commit. It has no size
    find           pm_commit while the array is alive and nothing changed. The core does not search an array that it
                   writes as a whole (bytes_direct); an empty commit of 8 B stands for that
    hash and copy  baseline.c, page by page through a block in the cache. Memory: streamed to a mapped file; disk: no
                   copy
    write          disk: the pwrite of the baseline, of as many bytes as the commit writes before it is durable
    fence          memory: the sfence after that copy; disk: the fdatasync after that pwrite
    image          a copy of as many bytes as the store counted for the committed image; disk: a pwrite of them

The parts need not add up to the commit, which is measured too. The table shows the difference.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from _common import (
    MEDIA,
    SIZES,
    Array,
    DiskBaseline,
    MemoryBaseline,
    file_system,
    library,
    machine,
    no_collection,
    padded,
    parent,
    parser,
    real_time,
    save,
    scratch,
    seconds,
)

import pmstore
from pmstore._core import lib

WARM_UP = 12
STREAMED_IMAGE = 4 << 20  # from here on, the core streams to the committed image; less goes through the cache


def bare(store: pmstore.Store) -> float:
    """The C call alone."""
    core = store._catalog.core._store
    commit = lib.pm_commit
    start = perf_counter()
    status = commit(core)
    taken = perf_counter() - start
    if status:
        raise SystemExit(f"pm_commit gave {status}")
    return taken


Part = Callable[[], float]


def memory_parts(directory: Path, size: int, written: int, image: int) -> dict[str, Part]:
    """A function for each part, which measures it once."""
    here = library()
    log, place = MemoryBaseline(directory, written), MemoryBaseline(directory, image or 64)
    source, again = padded(written // 8 + 1), padded(image // 8 + 1)

    def part(function: Callable[..., float], data: Array, target: MemoryBaseline, *arguments: int) -> Part:
        def once() -> float:
            data.__iadd__(1.0)
            return function(target.map.ctypes.data, data.ctypes.data, *arguments)

        return once

    return {
        "hash and copy": part(here.part_hash_copy, source, log, written),
        "fence": part(here.part_fence, source, log, written),
        "baseline": part(here.baseline_memory, source, log, size),
        "image": part(here.part_image, again, place, image, int(image >= STREAMED_IMAGE)) if image else lambda: 0.0,
    }


def disk_parts(directory: Path, size: int, written: int, image: int) -> dict[str, Part]:
    """The same for a disk. One function writes and syncs; each of the two has a clock of its own."""
    here = library()
    baseline, place = DiskBaseline(directory, written), directory / "image"
    source, again = padded(written // 8 + 1), padded(image // 8 + 1)
    place.write_bytes(bytes(image))
    file = place.open("r+b", buffering=0)
    writing = ctypes.c_double()

    def hash_only() -> float:
        source.__iadd__(1.0)
        return here.part_hash_copy(None, source.ctypes.data, written)

    def write() -> float:
        source.__iadd__(1.0)
        baseline(source[: written // 8], writing)
        return writing.value

    def fence() -> float:
        source.__iadd__(1.0)
        both = baseline(source[: written // 8], writing)
        return both - writing.value

    def plain() -> float:
        source.__iadd__(1.0)
        return baseline(source[: size // 8])

    def to_image() -> float:
        again.__iadd__(1.0)
        start = perf_counter()
        file.seek(0)
        file.write(again[: image // 8].data)
        return perf_counter() - start if image else 0.0

    return {"hash and copy": hash_only, "write": write, "fence": fence, "baseline": plain, "image": to_image}


def split(directory: Path, medium: str, size: int, budget: float) -> dict[str, Any]:
    """All measurements of one size: lists of seconds, and what the store wrote."""
    with pmstore.open(directory / "store.pm", "w", media=MEDIA[medium]) as store:
        array: Array = store.create_array("array", size // 8, "f8")
        store.commit()

        def change() -> None:
            array.__iadd__(1.0)

        def call() -> float:
            change()
            return bare(store)

        for _ in range(WARM_UP):
            call()
        before = store.stats()
        for _ in range(WARM_UP):
            call()
        after = store.stats()
        bytes_of = {
            name: (getattr(after, name) - getattr(before, name)) / WARM_UP
            for name in ("bytes_logged", "bytes_direct", "bytes_home")
        }
        first = int(bytes_of["bytes_logged"] + bytes_of["bytes_direct"])
        first, image = max(8, first // 8 * 8), int(bytes_of["bytes_home"]) // 8 * 8
        timed = (memory_parts if medium == "memory" else disk_parts)(directory, size, first, image)
        found: dict[str, list[float]] = {name: [] for name in ("call", *timed)}
        # Blocks: right after one another, parts would find the caches and the memory as the others left them.
        block = max(1, min(20, (4 << 20) // size))
        with no_collection():
            end = perf_counter() + budget
            while len(found["call"]) < 5 or (perf_counter() < end and len(found["call"]) < 1000):
                for name, once in {"call": call, **timed}.items():
                    found[name] += [once() for _ in range(block)]
            # Last, as commits of nothing could teach the core something about the array.
            empty = [bare(store) for _ in range(min(200, max(5, len(found["call"]))))]
        taken_whole = bytes_of["bytes_direct"] > size / 2
    through_with, called = small_commits(directory, medium)
    measured = {**found, "find": called if taken_whole else empty, "with": through_with, "bare": called}
    return {"measured": measured, "taken whole": taken_whole, **bytes_of}


def small_commits(directory: Path, medium: str) -> tuple[list[float], list[float]]:
    """Commits of an array of 8 B that didn't change: through a with statement, and the C call."""
    both = []
    with pmstore.open(directory / "small.pm", "w", media=MEDIA[medium]) as store:
        array = store.create_array("array", 1, "f8")
        store.commit()
        with no_collection():
            for _ in range(300):
                start = perf_counter()
                with store.transaction():
                    pass
                both.append((perf_counter() - start, bare(store)))
        del array
    return [w for w, _ in both], [b for _, b in both]


def parts(cell: dict[str, Any]) -> dict[str, float]:
    """Medians: the parts, the whole commit, and the baseline."""
    middle = {name: statistics.median(values) for name, values in cell["measured"].items()}
    python = max(0.0, middle.pop("with") - middle.pop("bare"))
    return {"Python": python, **middle}


def main() -> None:
    """Measure, print, and keep what was measured."""
    options = parser(__doc__ or "").parse_args()
    priority = real_time()
    print(f"{machine()}; {priority}\n")
    names = ("baseline", "call", "find", "hash and copy", "write", "fence", "image", "Python")
    cells = []
    for medium in options.media:
        print(f"{medium}: {parent(options, medium)}, {file_system(parent(options, medium))}")
        print(f"  {'':10}" + "".join(f"{name:>14}" for name in names), flush=True)
        for workload, size in SIZES.items():
            with scratch(parent(options, medium)) as directory:
                cell = split(directory, medium, size, options.scale * (0.2 if options.quick else 3.0))
            cells.append({"medium": medium, "workload": workload, **cell})
            known = parts(cells[-1])
            print(f"  {workload:10}" + "".join(f"{seconds(known.get(name, 0)):>14}" for name in names), flush=True)
    save(options.raw, "parts", {"priority": priority, "quick": options.quick, "cells": cells})


if __name__ == "__main__":
    main()
