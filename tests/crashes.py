"""Workloads to crash, and their exploration: see pmstore/testing and docs/crash-model.md."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore.testing._engine import Found, Options, Schedule, Tally, explore, image
from pmstore.testing._recording import Recorder, Recording

BUDGET = int(os.environ.get("PMSTORE_CRASH_BUDGET", "1500"))
SEED = int(os.environ.get("PMSTORE_CRASH_SEED", "1"))

Workload = Callable[[pmstore.Store], None]


def record(path: Path, medium: str, *lives: Workload, **options: Any) -> Recording:
    """Record lives of the store at a path; each ends as by a kill, if it doesn't close the store."""
    with Recorder(path, medium, seed=SEED) as recorder:
        for life in lives:
            store = pmstore.open(path, **options)
            try:
                life(store)
            finally:
                if not store.closed:
                    store._drop(discard=True)
    recording = recorder.recording
    assert image(recording, Schedule(len(recording), "all"), Options()) == path.read_bytes(), (
        "the file holds what no event wrote"
    )
    return recording


def explored(recording: Recording, **options: Any) -> tuple[Tally, Found | None]:
    """Explore within PMSTORE_CRASH_BUDGET, or with other options."""
    return explore(recording, Options(**{"budget": BUDGET, "seed": SEED, **options}))


# ---- workloads


def arrays(store: pmstore.Store) -> None:
    """In-place changes, dense and sparse, small and over several pages, and rollbacks between them."""
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
    """Names come, go and change their type; space is freed and used again by direct writes and by the log (I8, I9)."""
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


def reuse(store: pmstore.Store) -> None:
    """The counterexample of I8: x through the log, x deleted, y straight into its place."""
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
    """A list grows, shrinks and goes."""
    history = store.create_list("history")
    for i in range(8):
        history.append({"loss": i / 7})
        history.append("text" * i)
        if i == 5:
            del history[2]
        store.commit()
    del store["history"]
    store.commit()


def growth(store: pmstore.Store) -> None:
    """The region and the log grow, and a commit is larger than the log."""
    base = store.create_array("base", 40_000, "f8")
    store.commit()
    base += 1  # with what follows, more than the first log takes
    for i in range(3):
        store[f"more{i}"] = np.full(30_000, float(i))
        base[:: i + 1] += 1
        store.commit()


def spill(store: pmstore.Store) -> None:
    """Commits that fit no log, for the file may not grow: they go to free space and are declared (D3)."""
    store["filler"] = np.ones(110_000)
    base = store.create_array("base", 80_000, "f8")
    store.commit()
    del store["filler"]
    store.commit()
    for i in range(2):
        before = store.stats()
        base += i + 1
        store["also"] = np.full(600, float(i))
        store.commit()
        after = store.stats()
        assert after.bytes_logged - before.bytes_logged > after.log_size == before.log_size


WORKLOADS = [arrays, names, reuse, lists, growth, spill]
