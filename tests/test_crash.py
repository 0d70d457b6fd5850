"""Crashes, explored: at every event, with any of what was not ordered lost, inside recovery, and after it.

PMSTORE_CRASH_BUDGET sets how many crash states a test judges; PMSTORE_CRASH_SEED the random choices.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib

from .conftest import Medium
from .crashes import CrashError, Judge, Recording, record, snapshot

BUDGET = int(os.environ.get("PMSTORE_CRASH_BUDGET", "1500"))
SEED = int(os.environ.get("PMSTORE_CRASH_SEED", "1"))


def arrays(store: pmstore.Store, committed: Callable[[], None]) -> None:
    """In-place changes, dense and sparse, small and over several pages, and rollbacks between them."""
    rng = np.random.default_rng(SEED)
    small = store.create_array("small", 5, "f8")
    large = store.create_array("large", (40, 100), "f8")
    store["epoch"] = 0
    store.commit()
    committed()
    for i in range(1, 6):
        with store.transaction():
            small += i
            large[rng.integers(40)] += 1
            if i % 2:
                large *= 1.5
            store["epoch"] = i
        committed()
        large[:] = -1
        store["never"] = i
        store.rollback()


def names(store: pmstore.Store, committed: Callable[[], None]) -> None:
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
            committed()


def reuse(store: pmstore.Store, committed: Callable[[], None]) -> None:
    """The counterexample of I8: x through the log, x deleted, y straight into its place."""
    for i in range(4):
        x = store.create_array("x", 3000, "f8")
        store.commit()
        committed()
        x += i + 1
        store.commit()
        committed()
        del x, store["x"]
        store.commit()
        committed()
        store["y"] = np.full(3000, 100.0 + i)
        store.commit()
        committed()
        del store["y"]
        store.commit()
        committed()


def lists(store: pmstore.Store, committed: Callable[[], None]) -> None:
    """A list grows, shrinks and goes."""
    history = store.create_list("history")
    for i in range(8):
        history.append({"loss": i / 7})
        history.append("text" * i)
        if i == 5:
            del history[2]
        store.commit()
        committed()
    del store["history"]
    store.commit()
    committed()


def growth(store: pmstore.Store, committed: Callable[[], None]) -> None:
    """The region and the log grow, and a commit is larger than the log."""
    base = store.create_array("base", 40_000, "f8")
    store.commit()
    committed()
    base += 1  # with what follows, more than the first log takes
    for i in range(3):
        store[f"more{i}"] = np.full(30_000, float(i))
        base[:: i + 1] += 1
        store.commit()
        committed()


def spill(store: pmstore.Store, committed: Callable[[], None]) -> None:
    """Commits that fit no log, for the file may not grow: they go to free space and are declared (D3)."""
    store["filler"] = np.ones(110_000)
    base = store.create_array("base", 80_000, "f8")
    store.commit()
    committed()
    del store["filler"]
    store.commit()
    committed()
    for i in range(2):
        before = store.stats()
        base += i + 1
        store["also"] = np.full(600, float(i))
        store.commit()
        after = store.stats()
        assert after.bytes_logged - before.bytes_logged > after.log_size == before.log_size
        committed()


WORKLOADS = [arrays, names, reuse, lists, growth, spill]


def recorded(medium: Medium, workload: Any, **options: Any) -> Recording:
    path = medium.directory / "recorded.pm"
    pmstore.open(path, "x", media=medium.name).close()
    return record(path, medium.name, workload, **options)


@pytest.fixture
def judge() -> Any:
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="pmstore-crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield Judge(directory, SEED, BUDGET)
    shutil.rmtree(directory)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_I1_every_crash_leaves_a_whole_commit(medium: Medium, judge: Judge, workload: Any) -> None:
    recording = recorded(medium, workload, **({"max_size": 2_800_000} if workload is spill else {}))
    assert max(recording.states) >= 4
    if workload in (growth, spill):
        judge.left //= 6  # images of megabytes
    judge.explore(recording)
    assert judge.judged >= min(BUDGET // 20, 100) // (6 if workload in (growth, spill) else 1)


def test_I1_home_may_be_written_back_at_any_time(medium: Medium, judge: Judge) -> None:
    """The state after the last event, with all of it durable, is the last commit."""
    recording = recorded(medium, arrays)
    last = max(recording.states)
    store = pmstore.open(medium.directory / "recorded.pm", "r", media=medium.name)
    assert store.sequence == last
    assert snapshot(store) == recording.states[last]
    store.close()


# ---- the explorer itself: what it must notice


def explored(judge: Judge, recording: Recording) -> None:
    judge.left = 4000
    judge.explore(recording, depth=0)


@pytest.mark.parametrize("workload", [arrays, names], ids=lambda workload: workload.__name__)
def test_the_explorer_notices_a_missing_fence(medium: Medium, judge: Judge, workload: Any) -> None:
    recording = recorded(medium, workload)
    unordered = {lib.PM_EVENT_FENCE, lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE}
    broken = recording._replace(events=[event for event in recording.events if event.kind not in unordered])
    with pytest.raises(CrashError):
        explored(judge, broken)


def test_the_explorer_notices_home_written_before_the_record(medium: Medium, judge: Judge) -> None:
    """I3: each commit's record is moved behind its home writes."""
    recording = recorded(medium, arrays)
    events, held = [], []
    begun = False
    for event in recording.events:
        begun = begun or event.kind == lib.PM_EVENT_COMMIT_BEGIN
        in_log = event.kind in (lib.PM_EVENT_STREAM, lib.PM_EVENT_WRITE) and event.offset >= 8192 + (256 << 10)
        if event.kind == lib.PM_EVENT_COMMIT_END:
            events += held
            held = []
        if begun and in_log:
            held.append(event)
        else:
            events.append(event)
    with pytest.raises(CrashError):
        explored(judge, recording._replace(events=events))


def test_the_explorer_notices_a_lost_acknowledged_commit(medium: Medium, judge: Judge) -> None:
    recording = recorded(medium, arrays)
    events = [
        event._replace(offset=event.offset + 1) if event.kind == lib.PM_EVENT_COMMIT_END else event
        for event in recording.events
    ]
    with pytest.raises(CrashError):
        explored(judge, recording._replace(events=events))


@pytest.mark.parametrize("damaged", [0, 4096])
def test_I4_recovery_does_not_touch_the_only_sound_header_first(medium: Medium, damaged: int) -> None:
    """Found by the explorer: a crash tore copy B, and another one, inside recovery, then tore copy A."""
    path = medium.directory / "header.pm"
    with pmstore.open(path, "x", media=medium.name) as store:
        store["x"] = 1
    image = bytearray(path.read_bytes())
    image[damaged + 16] ^= 1
    path.write_bytes(image)
    recording = record(path, medium.name, lambda store, committed: None)
    written = [event.offset for event in recording.events if event.data and event.offset in (0, 4096)]
    assert written == [damaged, 4096 - damaged]
