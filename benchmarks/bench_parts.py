"""What a commit's time goes to, when all of an array changed: finding, hash and copy, fence, home, Python.

The parts are timed from outside, in the same run and in turn, without touching the core:

    Python         an empty transaction of a store of 8 B by `with`, less the bare call of pm_commit: it is the same at any size
    find           pm_commit with the array alive and nothing changed. An array that the core takes whole, unseen, isn't searched:
                   its commits write to a slot (bytes_direct), and what an empty commit of 8 B takes stands for it
    hash and copy  floor.c: page by page through a block in the cache; memory: streamed into a mapped file; disk: hash alone
    write          disk: the pwrite of the floor, of as many bytes as the commit writes before it is durable
    fence          memory: the sfence after that copy; disk: the fdatasync after that pwrite
    home           a copy of as many bytes as the store's statistics say that it wrote home; disk: a pwrite of them

They needn't add up to the whole, which is measured too: what overlaps or isn't among them is the difference.
"""

from __future__ import annotations

import ctypes
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from _common import (
    MEDIA,
    SIZES,
    Array,
    DiskFloor,
    MemoryFloor,
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
STREAMED_HOME = 4 << 20  # the core streams home what is larger, and stores it through the cache what is smaller


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


def memory_parts(directory: Path, size: int, written: int, home: int) -> Any:
    """A function that gives one measurement of each part."""
    here = library()
    log, place = MemoryFloor(directory, written), MemoryFloor(directory, home or 64)
    source, again = padded(written // 8 + 1), padded(home // 8 + 1)

    def once() -> dict[str, float]:
        found = {}
        to, into = log.map.ctypes.data, place.map.ctypes.data
        source.__iadd__(1.0)
        found["hash and copy"] = here.part_hash_copy(to, source.ctypes.data, written)
        source.__iadd__(1.0)
        found["fence"] = here.part_fence(to, source.ctypes.data, written)
        source.__iadd__(1.0)
        found["floor"] = here.floor_memory(to, source.ctypes.data, size)
        again.__iadd__(1.0)
        found["home"] = here.part_home(into, again.ctypes.data, home, home >= STREAMED_HOME) if home else 0.0
        return found

    return once


def disk_parts(directory: Path, size: int, written: int, home: int) -> Any:
    """The same for a disk."""
    here = library()
    floor, place = DiskFloor(directory, written), directory / "home"
    source, again = padded(written // 8 + 1), padded(home // 8 + 1)
    place.write_bytes(bytes(home))
    file = place.open("r+b", buffering=0)

    def once() -> dict[str, float]:
        found = {}
        writing = ctypes.c_double()
        source.__iadd__(1.0)
        found["hash and copy"] = here.part_hash_copy(None, source.ctypes.data, written)
        both = floor(source, writing)
        found["write"], found["fence"] = writing.value, both - writing.value
        source.__iadd__(1.0)
        found["floor"] = floor(source[: size // 8])
        again.__iadd__(1.0)
        start = perf_counter()
        file.seek(0)
        file.write(again[: home // 8].data)
        found["home"] = perf_counter() - start if home else 0.0
        return found

    return once


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
        first, home = max(8, first // 8 * 8), int(bytes_of["bytes_home"]) // 8 * 8
        once = (memory_parts if medium == "memory" else disk_parts)(directory, size, first, home)
        found: dict[str, list[float]] = {"call": []}
        with no_collection():
            end = perf_counter() + budget
            while len(found["call"]) < 5 or (perf_counter() < end and len(found["call"]) < 1000):
                found["call"].append(call())
                for name, taken in once().items():
                    found.setdefault(name, []).append(taken)
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
    """Medians: the parts, the whole commit, and the floor."""
    middle = {name: statistics.median(values) for name, values in cell["measured"].items()}
    python = max(0.0, middle.pop("with") - middle.pop("bare"))
    return {"Python": python, **middle}


def main() -> None:
    """Measure, print, and keep what was measured."""
    options = parser(__doc__ or "").parse_args()
    priority = real_time()
    print(f"{machine()}; {priority}\n")
    names = ("floor", "call", "find", "hash and copy", "write", "fence", "home", "Python")
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
