"""Workloads to crash, and their exploration: see pmstore/testing and docs/crash-model.md."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import key_of
from pmstore._core import Entry, lib
from pmstore._values.array import layout
from pmstore.testing._store.engine import KINDS, Found, Options, Schedule, Tally, explore, image
from pmstore.testing._store.recording import PACE, Recorder, Recording
from tests.support.crashes_async import ASYNC, flipped_late, freed_late, lazily
from tests.support.crashes_slots import cooled, slots, slots_again, slots_shut
from tests.support.snapshots import snapshot

BUDGET = int(os.environ.get("PMSTORE_CRASH_BUDGET", "120"))
SEED = int(os.environ.get("PMSTORE_CRASH_SEED", "1"))

Workload = Callable[[pmstore.Store], None]


def record(
    path: Path,
    medium: str,
    *runs: Workload,
    readers: bool = True,
    ranges: bool = True,
    pace: int = PACE,
    seed: int = SEED,
    **options: Any,
) -> Recording:
    """Record runs of the store at a path. Each ends as by a kill, unless it closes the store.

    readers: also test that a reader of the remaining file sees the recovered state. ranges: files are synced as on ext4
    and xfs, on any file system. pace, seed: of background work.
    """
    with Recorder(path, medium, seed=seed, pace=pace) as recorder:
        recorder.trace.sync_ranges(ranges)
        for run in runs:
            store = pmstore.open(path, **options)
            try:
                run(store)
            finally:
                if not store.closed:
                    store._drop(discard=True)
    recording = recorder.recording
    assert image(recording, Schedule(len(recording), "all"), Options()) == path.read_bytes(), (
        "the file holds what no event wrote"
    )
    if readers:
        assert_readers_see_the_same(path, medium)
    return recording


def assert_readers_see_the_same(path: Path, medium: str) -> None:
    """A process that only reads the file after a kill sees the state that recovery restores."""
    copy = path.with_suffix(".copy")
    shutil.copyfile(path, copy)
    try:
        with pmstore.open(copy, "r", media=medium) as store:  # type: ignore[arg-type]
            read = snapshot(store)
        assert copy.read_bytes() == path.read_bytes(), "a reader changed the file"
        with pmstore.open(copy, "r+", media=medium) as store:  # type: ignore[arg-type]
            assert store.check().ok
            assert read == snapshot(store), "a reader sees something else"
    finally:
        copy.unlink()


def record_failed_sync(
    path: Path, workload: Workload, number: int, *, seed: int = 1, pace: int = PACE, **options: Any
) -> Recording | None:
    """A run in which sync `number` fails, and a second run in which none does; None if there are fewer syncs (M5)."""
    with Recorder(path, "file", seed, pace=pace) as recorder:
        recorder.trace.sync_ranges(True)
        store = pmstore.open(path, **options)
        recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
        with contextlib.suppress(pmstore.Error):
            workload(store)
        _, failed = recorder.trace.operations()
        recorder.trace.fail(0, 0, 0)
        store._drop(discard=True)
        with pmstore.open(path) as store:
            store["after"] = number
    return recorder.recording if failed else None


def count_syncs(path: Path, workload: Workload) -> int:
    """The number of syncs that `record_failed_sync` can let fail."""
    with Recorder(path, "file") as recorder:
        recorder.trace.sync_ranges(True)
        store = pmstore.open(path)
        recorder.trace.fail(lib.PM_OPERATION_SYNC, 0, 0)
        workload(store)
        syncs, _ = recorder.trace.operations()
        store.close()
    path.unlink()
    return syncs


def record_torn_header(path: Path, medium: str, place: int) -> Recording:
    """The opening of a store with a torn header copy at a place."""
    with pmstore.open(path, "x", media=medium) as store:  # type: ignore[arg-type]
        store["x"] = 1
    image = bytearray(path.read_bytes())
    image[place + 16] ^= 1
    path.write_bytes(image)
    return record(path, medium, lambda store: None)


def explored(recording: Recording, **options: Any) -> tuple[Tally, Found | None]:
    """Explore within PMSTORE_CRASH_BUDGET, or with other options."""
    return explore(recording, Options(**{"budget": BUDGET, "seed": SEED, **options}))


def assert_survives(recording: Recording, **options: Any) -> None:
    """Every crash leaves a whole commit."""
    tally, found = explored(recording, **options)
    assert found is None, f"{recording.medium}, seed {SEED}: {found}"
    assert tally.evaluated >= min(options.get("budget", BUDGET), 100) // 2


# ---- workloads


def arrays(store: pmstore.Store) -> None:
    """Changes in place, dense and sparse, small and over several pages, and rollbacks between them."""
    rng = np.random.default_rng(SEED)
    small = store.create_array("small", 5, "f8")
    large = store.create_array("large", (40, 100), "f8")
    store["epoch"] = 0
    store.commit()
    for i in range(1, 6):
        with store.transaction():
            small += i
            large[rng.integers(40)] += 1
            if i % 2:
                large *= 1.5
            store["epoch"] = i
        large[:] = -1
        store["never"] = i
        store.rollback()


def names(store: pmstore.Store) -> None:
    """Names are created, deleted, and change their type; space is freed and used again by direct writes and by the
    log (I8, I9)."""
    rng = random.Random(SEED)
    for i in range(14):
        for _ in range(6):
            name = f"group{rng.randrange(3)}/name{rng.randrange(6)}"
            kind = rng.randrange(6)
            if kind == 0:
                store.pop(name, None)
            elif kind == 1:
                store[name] = rng.randbytes(rng.choice((3, 700, 6000)))
            elif kind == 2:
                store[name] = {"i": i, "text": "x" * rng.randrange(900)}
            else:
                store[name] = np.full(rng.choice((1, 30, 600, 3000)), i + rng.random())
        if i % 5 == 4:
            store.rollback()
        else:
            store.commit()


def renames(store: pmstore.Store) -> None:
    """Names move, with contents that change in the same commit, and old names are taken again."""
    store["a/x"] = np.arange(700.0)
    store["a/text"] = "text" * 300
    store.create_array("a/fixed", 600, fill_value=1, writeable=False)
    store.create_list("a/list").append("first")
    store.commit()
    for i in range(4):
        here, there = "ab" if i % 2 == 0 else "ba"
        store[f"{here}/x"][i] = -1
        store.rename(here, there)
        store[f"{there}/x"][i + 9] = -2
        store[f"{there}/list"].append(i)
        store.commit()
        store.rename(f"{there}/x", f"{there}/moved")
        store[f"{there}/x"] = np.full(700, float(i))
        store.rollback() if i == 2 else store.commit()
        if i != 2:
            del store[f"{there}/x"]
            store.rename(f"{there}/moved", f"{there}/x")
            store.commit()


def reuse(store: pmstore.Store) -> None:
    """The counterexample of I8: x goes through the log, x is deleted, y goes directly to its place."""
    for i in range(4):
        x = store.create_array("x", 3000, "f8")
        store.commit()
        x += i + 1
        store.commit()
        del x, store["x"]
        store.commit()
        store["y"] = np.full(3000, 100.0 + i)
        store.commit()
        del store["y"]
        store.commit()


def lists(store: pmstore.Store) -> None:
    """A list grows, shrinks and is deleted."""
    history = store.create_list("history")
    for i in range(8):
        history.append({"loss": i / 7})
        history.append("text" * i)
        if i == 5:
            del history[2]
        store.commit()
    del store["history"]
    store.commit()


def alike(store: pmstore.Store) -> None:
    """Few distinct values, so that written bytes often equal the old ones, in free space too."""
    rng = random.Random(SEED)
    for _ in range(24):
        for _ in range(5):
            name, value = f"name{rng.randrange(8)}", rng.choice((3.0, 7.0))
            kind = rng.randrange(5)
            if kind == 0:
                store.pop(name, None)
            elif kind == 1 and name in store:
                store[name][:] = value
            else:
                store[name] = np.full(rng.choice((5, 120, 525, 1000)), value)
        if rng.random() < 0.35:
            store.rollback()
        else:
            store.commit()


def freed(store: pmstore.Store) -> None:
    """Free space is used again, with the contents of a rollback in it, and behind an extent's end. If a commit
    leaves out equal lines of a small array there, recovery must not replay an older array's record over them.
    """

    def log_and_delete() -> None:
        store["x"] = np.ones(1000)
        store.commit()
        store["x"][:] = 7
        store.commit()
        del store["x"]
        store.commit()

    def fill(name: str, value: float) -> None:
        for i in range(24):
            store[f"{name}{i}"] = np.full(120, value)
        store.commit()

    log_and_delete()
    store["y"] = np.full(1000, 3.0)
    store.rollback()
    fill("before", 3.0)
    log_and_delete()
    store["y"] = np.full(525, 3.0)
    store.commit()
    del store["y"]
    store.commit()
    fill("behind", 7.0)


def growth(store: pmstore.Store) -> None:
    """The region and the log grow, and a commit is larger than the log."""
    base = store.create_array("base", 40_000, "f8")
    store.commit()
    base += 1  # together with the next ones, more than the first log holds
    for i in range(3):
        store[f"more{i}"] = np.full(30_000, float(i))
        base[:: i + 1] += 1
        store.commit()


def scattered(store: pmstore.Store) -> None:
    """New arrays in so many places that a medium may lose count, and some that end inside a page. All of them must
    be durable with the record that declares them, and on disks only a list of their places tells which they are.
    """
    pages = store.create_array("pages", 10 * 512, "f8")
    for i in range(150):
        store[f"name{i:03}"] = np.full(500, 1.0)
    store.commit()
    for i in range(0, 150, 2):
        del store[f"name{i:03}"]
    store.commit()
    for several in (2, 70):
        pages[::512] += 1  # too many waiting pages of the committed image for a sync of the whole file
        store.commit()
        for i in range(several):
            store[f"new{several}/{i:02}"] = np.full(500, float(several))
        store["wide"] = np.full(1700, float(several))
        store.commit()


def overflow(store: pmstore.Store) -> None:
    """Commits that fit no log, because the file may not grow: they go to free space and are declared (D3)."""
    store["filler"] = np.ones(130_000)
    base = store.create_array("base", 100_000, "f8")
    store.commit()
    del store["filler"]
    store.commit()
    for i in range(2):
        before = store.stats()
        base[:68_000] += i + 1  # less than most of it, which would give it a second slot
        store["also"] = np.full(600, float(i))
        store.commit()
        after = store.stats()
        assert after.bytes_logged - before.bytes_logged > after.log_size == before.log_size
    store["last"] = np.full(60_000, 1.0)  # directly into the space of the earlier bodies
    store.commit()


def laps(store: pmstore.Store) -> None:
    """The log begins again many times, with records of the same length in the same places."""
    x = store.create_array("x", 200, "f8")
    y = store.create_array("y", 1500, "f8")
    store.commit()
    for lap in range(4):
        for i in range(3):
            x += 1
            y[i * 500 :] += lap + 1
            store.commit()
        store._catalog.core.checkpoint()


def full(store: pmstore.Store) -> None:
    """The log is full many times, because the file may not grow. The committed image is synced behind the commit
    after which no similar commit fits. A smaller one, which does fit, then writes to the committed image once more
    before the log is emptied (I3).
    """
    x = store.create_array("x", 7000, "f8")
    store["n"] = 0
    store.commit()
    for i in range(20):
        x += i + 1
        store.commit()
        if i % 3 != 1:
            store["n"] = i
            x[i::1000] = -i
            store.commit()


def many(store: pmstore.Store) -> None:
    """So many names that the catalog becomes a tree, which grows and shrinks again."""
    rng = random.Random(SEED)
    for _ in range(5):
        for j in range(90):
            store[f"name{rng.randrange(1000):03}"] = "v" * rng.randrange(100 if j % 10 else 900)
        store.commit()
    for i in range(5):
        for name in list(store)[i % 2 :: 2 + i]:
            del store[name]
        store.commit()


def undone(store: pmstore.Store) -> None:
    """Small values and arrays are deleted, others take their places in the same pages, and a rollback undoes all of
    it."""
    for i in range(8):
        store[f"kept{i}"] = np.full(3 + i % 4, float(i))
    store.commit()
    for i in range(6):
        held = store[f"kept{i + 1}"]
        for j in (i, i + 1):
            del store[f"kept{j}"]
        store[f"new{i}"] = np.full(4, -1.0)
        fleeting = store.create_array("fleeting", 3, "f8")
        fleeting += 7
        del fleeting, store["fleeting"]
        store[f"after{i}"] = np.full(5, -2.0)
        store["value"] = {"i": i, "text": "x" * 100}
        for length in (40, 9000):
            store._catalog.core.alloc(length)  # like a caller that was interrupted before it gave the extent a name
        if i % 3 == 2:
            held += 1
            store.commit()
        else:
            store.rollback()
            store[f"kept{i + 2}"] += 1
            held += 1
            store.commit()
        for j in range(8):
            if f"kept{j}" not in store:
                store[f"kept{j}"] = np.full(3 + j % 4, float(j))
    big = store.create_array("big", 3000, "f8")
    for j in range(70):
        store[f"one{j}"] = np.full(2, 1.0)
    store.commit()
    for j in range(70):
        store[f"one{j}"][0] += j  # no references are left until the commit
    big[::500] += 1
    store.release("big")
    assert big[500] == 1, "memory was given back that holds changes"
    store.commit()
    held = store["kept0"]
    before = held.copy()
    del store["kept0"]
    store.commit()
    for j in range(20):
        store[f"more{j}"] = np.full(len(held), -3.0)
    store.commit()
    assert np.array_equal(held, before), "an array without a name keeps its place (I9)"


def edges(store: pmstore.Store) -> None:
    """Extents that end on the edge of a page, and commits whose bodies end on one."""
    rng = random.Random(SEED)
    for i in range(3):
        for length in (511, 512, 1022, 251, 252):
            store[f"a{length}"] = np.full(length, float(i))
        store.commit()
        for name in ("a511", "a1022", "a252"):
            store[name] += 1
        store.commit()
        for name in ("a512", "a1022"):
            del store[name]
        store["small"] = rng.random()
        store.commit()
    lines = store.create_array("lines", (128, 8), "f8")
    store.commit()
    for runs in (3, 4):
        for changed in range(55, 64):
            lines[: changed - runs] += 1
            lines[100 : 100 + 2 * runs : 2] += 1
            store.commit()


def ends(store: pmstore.Store) -> None:
    """Arrays that end inside a page: on disks the log leaves out the rest of the page. Also a page that is such an
    end, then one of small arrays, then such an end again, all in one log.
    """
    x = store.create_array("x", 1300, "f8")
    store.commit()
    for i in range(1, 4):
        y = store.create_array("y", 300, "f8")
        store.commit()
        y += i
        x[1200:] += i
        store.commit()
        y[-1] = x[-1] = -i
        store.rollback()
        del y, store["y"]
        store.commit()
        store.sync()  # with durability="async", the space is free only after a sync
        for j in range(30):
            store[f"small{j}"] = np.full(15, 10.0 * i)  # to the end of their page
        store.commit()
        store["small29"] += i
        store.commit()
        for j in range(30):
            del store[f"small{j}"]
        store.commit()
        store.sync()


def bulky(store: pmstore.Store) -> None:
    """Contents that a snapshot leaves in the file: changed in parts, written whole into one of two slots, deleted, and
    the same contents again in the place of others."""
    parts, whole = store.create_array("parts", 100_000), store.create_array("whole", 40_000)
    for i in range(1, 25):
        with store.transaction():
            parts[i * 3000 : i * 3000 + 5] = i
            if i % 2:
                whole[:] = i
            if i % 3:
                store.pop("long", None)
                store["short"], store["other"] = np.full(35_000, 7.0), np.full(37_000, float(i))
            else:
                store.pop("short", None)
                store.pop("other", None)
                store["long"] = np.full(80_000, float(i))


WORKLOADS = [
    arrays,
    names,
    renames,
    reuse,
    lists,
    alike,
    freed,
    undone,
    laps,
    edges,
    ends,
    growth,
    scattered,
    full,
    overflow,
    many,
    slots,
    cooled,
]


# ---- large workloads, for few states


def bulk(store: pmstore.Store) -> None:
    """Commits of more than is gathered before the first write."""
    x = store.create_array("x", 900_000, "f8")
    store.commit()
    for i in range(3):
        x[:600_000] += i + 1  # less than most of it, which would give it a second slot
        store[f"small{i}"] = i
        store.commit()


def wide(store: pmstore.Store) -> None:
    """A region so large that several pages of the space map describe it.

    Most of it belongs to an array of zeros that were never written. Therefore the kind "stale", which puts other bytes
    there, is left out.
    """
    core = store._catalog.core
    described = layout(8_300_000, "f8", "C", True)
    offset = core.alloc(described.length)
    core.put(key_of("huge"), Entry(offset, described.length, ARRAY, 0, described.meta))
    store["before"] = np.full(600, 1.0)
    store.commit()
    for i in range(3):
        store[f"after{i}"] = np.full(20_000, float(i))
        store["huge"][i::1_000_000] += 1
        store.commit()
        store["before"] = np.full(700, 1.0 + i)
        store.pop("after0", None)
        store.rollback() if i == 1 else store.commit()
    del store["huge"]
    store.commit()


LARGE = [bulk, wide]
NOT_STALE = frozenset(KINDS) - {"stale"}
COSTLY = (growth, overflow, slots, cooled, flipped_late)
"""A state of these takes milliseconds."""


def limits(workload: Workload, budget: int, depth: int = 2) -> dict[str, int]:
    """The options of an exploration. One with a small budget, as in make test, has fewer states of workloads that cost
    much, and no crash in the recovery of their recoveries: .ci/run and `make torture` evaluate those.
    """
    if BUDGET > 1000 or workload not in COSTLY:
        return {"budget": budget, "depth": depth}
    return {"budget": budget // 4, "depth": min(depth, 1)}


# ---- runs


def closed(store: pmstore.Store) -> None:
    """A run that changes an array and closes the store."""
    reuse(store)
    store.close()


def again(store: pmstore.Store) -> None:
    """A run that changes the existing arrays."""
    for value in store.values():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value += 1
    store.commit()


OVERFLOW: dict[str, Any] = {"max_size": 2_800_000}
OPTIONS: dict[Workload, dict[str, Any]] = {overflow: OVERFLOW, full: {"max_size": 1_000_000}}

# The workloads that mutants must pass (tests/mutants/battery.py): runs, and options of pmstore.open.
PLANS: list[tuple[str, tuple[Workload, ...], dict[str, Any]]] = [
    *((workload.__name__, (workload,), OPTIONS.get(workload, {})) for workload in WORKLOADS),
    *((f"edges {seed}", (edges,), {"seed": seed}) for seed in range(SEED + 1, SEED + 5)),
    ("runs", (names, again, closed, again), {}),
    ("runs of slots", (slots, slots_again, slots_shut, slots_again), {}),
    *((f"async {workload.__name__}", (workload, again), ASYNC) for workload in (lazily, freed_late, flipped_late)),
    ("async full", (full,), {**ASYNC, **OPTIONS[full]}),
    ("async overflow", (overflow,), {**ASYNC, **OVERFLOW}),
    ("async runs", (names, again, closed, reuse), ASYNC),
]
