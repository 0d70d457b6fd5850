"""D22: while a store is recorded, a seed decides when its background work is done (csrc/base/schedule.h)."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.engine import Options, Schedule, image
from pmstore.testing._store.marks import events_of
from pmstore.testing._store.recording import Recorder, Recording
from tests.conftest import MEMORY
from tests.support.crashes import record
from tests.support.crashes_async import ASYNC, lazily


def events(recording: Recording, *kinds: int) -> list[int]:
    """Kinds of the events, in order; only of those, if any."""
    found = [recording.event(number).kind for number in range(len(recording))]
    return [kind for kind in found if not kinds or kind in kinds]


def rows(store: pmstore.Store) -> None:
    """Records of some pages, of which parts leave for the disk while the rest is gathered."""
    x = store.create_array("x", (64, 512), "f8")
    store.commit()
    for i in range(6):
        x[i % 3 :: 3] += 1
        store.commit()


def recorded_run(path: Path, seed: int, pace: int = 64, **options: str) -> Recording:
    with Recorder(path, "file", seed=seed, pace=pace) as recorder:
        recorder.trace.sync_ranges(True)
        store = pmstore.open(path, **options)  # type: ignore[arg-type]
        rows(store)
        expected = store["x"].copy()
        store.close()
    with pmstore.open(path, "r", verify=True) as store:
        assert np.array_equal(store["x"], expected)
    path.unlink()
    return recorder.recording


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_seed_gives_one_order_and_others_give_others(tmp_path: Path, durability: str) -> None:
    orders = []
    for seed in range(1, 6):
        first, again = (recorded_run(tmp_path / "s.pm", seed, durability=durability) for _ in range(2))
        assert (first.events, first.data) == (again.events, again.data)
        orders.append(tuple(events(first)))
    assert len(set(orders)) > 2


def written_back(directory: Path) -> Iterator[np.ndarray[Any, Any]]:
    """The events of runs in which a thread writes back."""
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    for seed in range(1, 9):
        path = directory / f"{seed}.pm"
        with Recorder(path, "memory", seed, pace=128) as recorder, pmstore.open(path) as store:
            rows(store)
        yield events_of(recorder.recording)


def test_recordings_say_which_thread_fenced(directory: Path) -> None:
    """A fence orders what its thread streamed, and what was handed over (M3), as the thread that writes back does."""
    beside = 0
    for run in written_back(directory):
        streamed: set[int] = set()
        for event in run:
            if event["kind"] == lib.PM_EVENT_STREAM:
                streamed.add(int(event["thread"]))
            elif event["kind"] in (lib.PM_EVENT_FENCE, lib.PM_EVENT_HAND_OVER):
                beside += len(streamed - {0})
                assert streamed <= {event["thread"]}
                streamed.clear()
    assert beside


def test_the_thread_that_writes_back_is_woken_for_each_large_commit(directory: Path) -> None:
    """Not only for the one for which it was started (D13)."""
    most = 0
    for run in written_back(directory):
        commit, beside = 0, set()
        for event in run:
            commit += event["kind"] == lib.PM_EVENT_COMMIT_BEGIN
            if event["kind"] == lib.PM_EVENT_STREAM and event["thread"]:
                beside.add(commit)
        most = max(most, len(beside))
    assert most > 1


def test_bytes_that_are_written_one_by_one_are_recorded(tmp_path: Path) -> None:
    def halves(store: pmstore.Store) -> None:
        """Each write takes a half of what it is to write, which ends with single bytes."""
        store._catalog.core.trace.fail(lib.PM_OPERATION_WRITE, 1, 0, lasting=True)
        store["x"] = 1
        store.commit()
        store._catalog.core.trace.fail(0, 0, 0)

    recording = record(tmp_path / "s.pm", "file", halves)  # which compares the events with the file
    lengths = [event["length"] for event in events_of(recording) if event["kind"] == lib.PM_EVENT_WRITE]
    assert 1 in lengths


def test_commits_become_durable_in_the_background(tmp_path: Path) -> None:
    """pace 0: only what the program waits for, such as a sync before the log is emptied."""
    told = [
        events(record(tmp_path / f"{pace}.pm", "file", rows, pace=pace, **ASYNC), lib.PM_EVENT_DURABLE)
        for pace in (0, 64, 200)
    ]
    assert len(told[0]) < len(told[1]) and len(told[0]) < len(told[2])


def test_parts_of_a_record_are_written_in_any_order(tmp_path: Path) -> None:
    """And each before the record is durable."""
    descending = 0
    for seed in range(1, 8):
        recording = recorded_run(tmp_path / "s.pm", seed, pace=0)
        writes: list[int] = []
        for number in range(len(recording)):
            event = recording.event(number)
            if event.kind == lib.PM_EVENT_COMMIT_BEGIN:
                writes = []
            elif event.kind == lib.PM_EVENT_WRITE:
                descending += bool(writes) and event.offset < writes[-1]
                writes.append(event.offset)
    assert descending


def pages_written_after(recording: Recording, seed: int) -> list[tuple[int, int]]:
    """The store after the recording is killed, recovered, and changed and committed by the explorer: the first and
    last page of each change of the file, in order.
    """
    out: list[tuple[int, int]] = []
    before = b""
    for event in itertools.count():
        crash = Schedule(len(recording), "all", then=Schedule(event, "all"))
        try:
            now = image(recording, crash, Options(seed=seed))
        except CrashTestError:  # there are fewer events
            return out
        if len(now) == len(before):
            changed = np.flatnonzero(np.frombuffer(now, "u8") != np.frombuffer(before, "u8")) * 8 // 4096
            out += [(int(changed[0]), int(changed[-1]))] if len(changed) else []
        before = now
    raise AssertionError


@pytest.mark.long
def test_runs_after_a_crash_have_background_work_too(tmp_path: Path) -> None:
    """The seed of the exploration decides its order as well."""

    def sixteen(store: pmstore.Store) -> None:
        store["x"] = np.ones((16, 512))
        store.commit()

    recording = record(tmp_path / "s.pm", "file", sixteen)
    with pmstore.open(tmp_path / "s.pm", "r") as store:
        log = (store.stats().file_size - store.stats().log_size) // 4096
    for seed in range(1, 9):
        written = pages_written_after(recording, seed)
        parts = [first for first, last in written if first >= log and last == first + 1]
        if parts != sorted(parts):
            break
    assert parts != sorted(parts)
    assert pages_written_after(recording, seed) == written


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, 0], ids=["EIO", "ENOSPC", "short"])
def test_a_part_that_is_not_written_is_written_again(tmp_path: Path, error: int) -> None:
    """It is written through the page cache, as if its first write had not begun."""
    path = tmp_path / "s.pm"
    for number in range(1, 30):
        with Recorder(path, "file", seed=number, pace=0) as recorder:
            recorder.trace.sync_ranges(True)
            store = pmstore.open(path)
            x = store.create_array("x", (64, 512), "f8")
            store.commit()
            recorder.trace.fail(lib.PM_OPERATION_WRITE, number, error)
            x[::3] += 1
            try:
                store.commit()
            except pmstore.Error:  # it was another write
                assert error
            failed = recorder.trace.operations()[1]
            recorder.trace.fail(0, 0, 0)
            committed = store.sequence
            store._drop(discard=True)
        with pmstore.open(path, verify=True) as store:
            assert (store["x"][::3] == (committed > 1)).all() and store.check().ok
        path.unlink()
        if not failed:
            break
    assert number > 5


def test_a_program_s_own_threads_share_a_schedule(tmp_path: Path) -> None:
    from tests.store.test_threads_fork import run_threads

    path = tmp_path / "s.pm"
    with Recorder(path, "file") as recorder:
        store = pmstore.open(path, durability="async")

        def use(name: str) -> None:
            for i in range(20):
                with store.transaction():
                    store[name] = np.full(700, float(i))

        run_threads(lambda: use("a"), lambda: use("b"), store.sync, lambda: [store.stats() for _ in range(20)])
        store.close()
    with pmstore.open(path, verify=True) as store:
        assert store["a"][0] == store["b"][0] == 19
    assert len(recorder.recording) > 40


def test_every_order_of_a_workload_leaves_the_same_store(tmp_path: Path) -> None:
    states = {record(tmp_path / f"{seed}.pm", "file", lazily, pace=40 * seed, **ASYNC).states[30] for seed in range(5)}
    assert len(states) == 1
