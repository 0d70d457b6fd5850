"""D13: the committed image is brought up to date after a large commit, by a thread or by the next call. No reader may
see it lag.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recorder
from tests.conftest import Medium
from tests.core.test_address_space import limit_addresses
from tests.store.test_threads_fork import in_fork, run_threads, signals_blocked
from tests.support import shim as shims
from tests.support.crashes import OVERFLOW
from tests.support.shim import ONCE, Fault, faults

# float64: 4 MiB in rows of a page. A commit of every third row logs 1.4 MB, which is more than what is applied at once,
# and too little for the whole array to be written.
ROWS, COLUMNS = 1024, 512

Array = np.ndarray[Any, Any]
Opener = Callable[..., pmstore.Store]


def sparse(store: pmstore.Store) -> Array:
    w: Array = store.create_array("w", (ROWS, COLUMNS), "f8")
    store.commit()
    return w


def change(w: Array, value: int) -> None:
    w[value % 3 :: 3] = value


def after(value: int) -> Array:
    w = np.zeros((ROWS, COLUMNS))
    for each in range(1, value + 1):
        change(w, each)
    return w


def test_I2_whatever_comes_next_finds_the_last_commit(open_store: Opener) -> None:
    store = open_store()
    w = sparse(store)
    nexts: list[Callable[[], Any]] = [
        store.rollback,
        lambda: store.release("w"),
        lambda: store.update(value=1),
        store._catalog.core.checkpoint,
        store.check,
        store.stats,
        lambda: None,
    ]
    for value in range(1, 22):
        change(w, value)
        store.commit()
        nexts[value % len(nexts)]()
        w[:] = -1
        store.rollback()
        np.testing.assert_array_equal(w, after(value))
    assert store.check().ok


@pytest.mark.long_on("memory")
def test_a_store_that_is_closed_at_once_has_it_all(open_store: Opener) -> None:
    for value in range(1, 25):
        store = open_store(mode="a", verify=True)
        w = store["w"] if "w" in store else sparse(store)
        change(w, value)
        if value % 2:
            store.commit()
        store.close()  # whose own commit leaves a job that the thread may never come to
        np.testing.assert_array_equal(w, after(value))
        with open_store(mode="r") as reader:
            np.testing.assert_array_equal(reader["w"], after(value))
    store = open_store(mode="r", verify=True)
    assert store.check().ok


def test_its_threads_take_no_signals_and_most_stores_have_none(open_store: Opener) -> None:
    before = set(os.listdir("/proc/self/task"))
    store = open_store()
    w = store.create_array("w", (ROWS - 1, COLUMNS), "f8")
    store.commit()
    w[:20] = 1
    store.commit()
    assert set(os.listdir("/proc/self/task")) <= before
    change(w, 1)
    store.commit()
    large = store.create_array("large", (ROWS, COLUMNS), "f8")
    store.commit()
    large[5] = 1
    store.commit()
    threads = set(os.listdir("/proc/self/task")) - before
    assert len(threads) == 1 + (len(os.sched_getaffinity(0)) > 1)  # one writes back, one compares
    blocked = signals_blocked()
    assert all(blocked[int(thread)] >> signal.SIGINT - 1 & 1 for thread in threads)
    store.close()
    assert set(os.listdir("/proc/self/task")) <= before


@pytest.mark.long_on("memory")
def test_I1_killed_before_the_write_back(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    with pmstore.open(path, "x", media=medium.name) as store:
        sparse(store)
    for value in range(1, 13):
        child = os.fork()
        if not child:
            store = pmstore.open(path, "r+", media=medium.name)
            change(store["w"], value)
            store.commit()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        with pmstore.open(path, "r", media=medium.name, verify=True) as store:
            np.testing.assert_array_equal(store["w"], after(value))


def test_a_fork_before_the_write_back(open_store: Opener) -> None:
    store = open_store()
    w = sparse(store)

    def in_the_child() -> str:
        assert np.array_equal(w, after(value))
        with pytest.raises(pmstore.Error):
            store.commit()
        store.close()
        return "refused"

    for value in range(1, 9):
        change(w, value)
        store.commit()
        assert in_fork(in_the_child) == "refused"
    assert store.check().ok


def test_threads_beside_it(open_store: Opener) -> None:
    store = open_store()
    w = sparse(store)

    def commits() -> None:
        for value in range(1, 40):
            change(w, value)
            store.commit()

    def others(name: str) -> None:
        for i in range(60):
            with store.transaction():
                store[name] = np.full(300, i)
            with store.transaction(only=[w[:2]]):
                pass
            assert store[name][-1] == i
            store.stats()

    run_threads(commits, lambda: others("a"), lambda: others("b"))
    store.commit()
    w[:] = -1
    store.rollback()
    np.testing.assert_array_equal(w, after(39))
    assert store.check().ok


def failing(directory: str, how: str) -> None:
    """Run in another process, under the shim: the committed image can't be written after a commit."""
    path = Path(directory) / "store.pm"
    store = pmstore.open(path, "x", media="file")
    w = sparse(store)
    for value in range(1, 4):  # the log grows
        change(w, value)
        store.commit()
    store.stats()
    change(w, 4)
    with faults(Fault("pwrite", ONCE, errno.EIO, 5), path):  # the first is the durable marker
        if how != "closing commit":
            store.commit()
        if how != "call":
            with pytest.raises(
                pmstore.Error, match="refuses to go on|cannot write"
            ):  # as the thread or close() was the first
                store.close()
        else:
            for refused in (store.stats, store.commit, store.rollback):
                with pytest.raises(pmstore.FailedStoreError):
                    refused()
            np.testing.assert_array_equal(w, after(4))
            store._drop()
    with pmstore.open(path, "r+", media="file", verify=True) as store:
        np.testing.assert_array_equal(store["w"], after(4))
        change(store["w"], 5)
        store.commit()
        assert store.check().ok
    print("told")


@pytest.mark.no_sanitizer  # which is preloaded too
@pytest.mark.parametrize("how", ["call", "close", "closing commit"])
def test_D7_a_failed_write_back_is_reported(tmp_path: Path, fault_library: Path, how: str) -> None:
    assert shims.call(fault_library, failing, tmp_path, how) == "told\n"


def few(w: Array, value: int) -> None:
    w[value::40] = value  # 26 pages, far apart


class Teller(NamedTuple):
    """The error that told of a failed sync of the committed image, None if it was another sync; and how many commits
    came before.
    """

    error: type[BaseException] | None
    acknowledged: int


def failed_sync_after(path: Path, commits: int, number: int, seed: int, expected: list[Array]) -> Teller | None:
    """The call that reports sync `number`, which fails; None: there are not so many."""
    error: pmstore.Error | None = None
    acknowledged = 0
    with Recorder(path, "file", seed) as recorder:
        recorder.trace.sync_ranges(True)
        store = pmstore.open(path)
        w = sparse(store)
        recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
        try:
            for value in range(1, commits + 1):
                few(w, value)
                store.commit()
                acknowledged = value
            store.close()
        except pmstore.Error as raised:
            error = raised
        failed = recorder.trace.operations()[1]
        assert bool(failed) == (error is not None), f"sync {number}"
        recorder.trace.fail(0, 0, 0)
        if not store.closed:
            for refused in (store.stats, store.commit):
                with pytest.raises(pmstore.FailedStoreError):
                    refused()
            store._drop(discard=True)
    events = map(recorder.recording.event, range(len(recorder.recording)))
    image = any(e.kind == lib.PM_EVENT_SYNC_FAILED and e.length > w.nbytes // 2 for e in events)
    with pmstore.open(path, "r+", verify=True) as store:
        found = next(k for k in range(commits + 1) if np.array_equal(store["w"], expected[k]))
        assert acknowledged <= found <= acknowledged + 1
        assert store.check().ok
    path.unlink()
    return None if error is None else Teller(type(error) if image else None, acknowledged)


def test_D7_a_sync_that_fails_after_a_small_commit_is_reported(tmp_path: Path) -> None:
    """The committed image is sent on its way to the disk now and then. That this failed, no later sync would say."""
    commits = 6
    expected = [np.zeros((ROWS, COLUMNS))]
    for value in range(1, commits + 1):
        expected.append(expected[-1].copy())
        few(expected[-1], value)
    errors: set[type[BaseException]] = set()
    last = False
    for seed in range(59, 159):  # which call tells of which sync is the schedule's choice; the first seed has all
        for number in itertools.count(1):
            teller = failed_sync_after(tmp_path / "s.pm", commits, number, seed, expected)
            if teller is None:
                break
            if teller.error is not None:
                errors.add(teller.error)
                last |= teller.acknowledged == commits
        # The commit after which it was, or the next call; of the last commit, itself or close().
        if errors == {pmstore.StoreIOError, pmstore.FailedStoreError} and last:
            return
    raise AssertionError(f"only {errors} told of it")


def test_D7_a_sync_that_fails_in_a_rollback_is_reported_when_the_store_is_closed(tmp_path: Path) -> None:
    """The rollback itself succeeds: the committed image has the last commit."""
    in_rollback = 0
    for seed in range(3, 18):  # which call makes the sync is the schedule's choice
        with Recorder(tmp_path / f"{seed}.pm", "file", seed) as recorder:
            trace = recorder.trace
            trace.sync_ranges(True)
            store = pmstore.open(tmp_path / f"{seed}.pm")
            w = sparse(store)
            for value in range(3):  # the third commit begins to send the committed image to the disk
                few(w, value)
                if value < 2:
                    store.commit()
            trace.fail(lib.PM_OPERATION_SYNC, 3, errno.EIO)
            with contextlib.suppress(pmstore.StoreIOError):
                store.commit()
            earlier = trace.operations()[1]
            store.rollback()
            later = trace.operations()[1]
            if earlier:
                store._drop(discard=True)
            else:
                with pytest.raises(pmstore.FailedStoreError):
                    store._drop()
            in_rollback += later - earlier
    assert in_rollback


def test_D7_a_store_that_has_failed_writes_nothing_more(tmp_path: Path) -> None:
    """Neither what a failed commit left to be done, such as the checkpoint after one that fits no log, nor a sync."""
    broken = 0
    for number in itertools.count(1):
        store = pmstore.open(tmp_path / f"{number}.pm", media="trace:file", **OVERFLOW)
        store["filler"] = np.ones(130_000)
        base = store.create_array("base", 100_000, "f8")
        store.commit()
        del store["filler"]
        store.commit()
        base[:68_000] += 1
        trace = store._catalog.core.trace
        trace.fail(lib.PM_OPERATION_WRITE | lib.PM_OPERATION_SYNC, number, errno.EIO)
        with contextlib.suppress(pmstore.Error):
            store.commit()
        done = trace.operations()
        try:
            store.stats()
        except pmstore.FailedStoreError:
            broken += 1
            assert trace.operations() == done
        store._drop(discard=True)
        if not done[1]:
            break
    assert broken > 1


@pytest.mark.no_sanitizer
def test_a_store_that_could_not_be_closed_ends_its_thread_once(tmp_path: Path) -> None:
    """The first close() lacks memory for an array that is still alive, and the second one goes on from there."""
    path = tmp_path / "s.pm"

    def child() -> str:
        with Recorder(path, "file"):
            store = pmstore.open(path)
            w, large = sparse(store), store.create_array("large", 4 << 20)  # more than the stack of a thread that ends
            for value in range(1, 7):
                change(w, value)
                store.commit()
            limit_addresses(1 << 20)
            with pytest.raises(pmstore.OutOfMemoryError):
                store.close()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            store.close()
        return "fine" if large.size else ""

    assert in_fork(child) == "fine"
    with pmstore.open(path, "r", verify=True) as store:
        np.testing.assert_array_equal(store["w"], after(6))
