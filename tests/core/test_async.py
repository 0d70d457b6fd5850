"""Commits that are durable later (D11): what a kill, a power cut, a failed sync, a fork and an exit leave of them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import PACE, Recorder, Recording
from tests.conftest import LONGER
from tests.store import test_model
from tests.store.test_threads_fork import signals_blocked
from tests.support import shim
from tests.support.crashes import (
    BUDGET,
    OPTIONS,
    PLANS,
    WORKLOADS,
    Workload,
    again,
    arrays,
    assert_survives,
    closed,
    explored,
    limits,
    names,
    record,
    record_failed_sync,
    reuse,
)
from tests.support.crashes_async import ASYNC, flipped_late, freed_late, lazily
from tests.support.crashes_async import WORKLOADS as LATE
from tests.support.crashes_slots import flips, slots, slots_again, slots_shut
from tests.support.images import PAGE
from tests.support.kills import CLASSES
from tests.support.places import offset_of
from tests.support.template import python

KILLS = int(os.environ.get("PMSTORE_KILLS", "64"))


def wait_until_durable(store: pmstore.Store) -> None:
    """Wait until the thread has made the commits durable."""
    while store.stats().durable_sequence < store.sequence:
        os.sched_yield()


def test_stats_count_the_bytes_of_the_committed_image_once_they_are_durable(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm", durability="async", media="file") as store:
        x = store.create_array("x", 20_000)
        store.sync()
        wait_until_durable(store)
        before = store.stats()
        x[[0, 5000, 9000]] = 1
        store.commit()
        store.sync()
        assert 3 * PAGE <= store.stats().bytes_home - before.bytes_home < 16 * PAGE


# ---- crashes


def paced(workloads: Sequence[Workload]) -> list[Any]:
    """Each workload at each pace: at the usual one and at one of the others in `make test`, at all in `make long`."""
    return [
        pytest.param(workload, pace, id=f"{workload.__name__}-{pace}", marks=[pytest.mark.long] if is_more else [])
        for number, workload in enumerate(workloads)
        for pace, is_more in ((0, number % 2 == 1), (PACE, False), (160, number % 2 == 0))
    ]


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A new directory on tmpfs, where both media can be used."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def declared_and_changed(store: pmstore.Store) -> None:
    """Each commit changes what one before it declares."""
    store.commit()
    store.sync()
    store["new"] = np.arange(3000.0)
    store.commit()
    for i in range(4):
        store["new"][i * 700] = -1
        store.commit()


@pytest.mark.parametrize("workload", [declared_and_changed, *LATE], ids=lambda workload: workload.__name__)
def test_I14_persistent_memory_recovers_what_a_disk_left(tmpfs: Path, workload: Workload) -> None:
    """The medium `file` left commits for which no durable bytes vouch, as it may on DAX. A cut in their recovery on
    memory takes none: the durable marker was not flushed, and five commits were lost.
    """
    path = tmpfs / "store.pm"
    record(path, "file", workload, pace=0, **ASYNC)
    with Recorder(path, "memory", seed=1) as recorder:
        store = pmstore.open(path)
        store["behind it"] = 1
        store.commit()
        store._drop(discard=True)
    tally, found = explored(recorder.recording, budget=4 * BUDGET, depth=2)
    assert found is None and tally.nested > 50, found


@pytest.mark.longer
@pytest.mark.parametrize("workload, pace", paced([*WORKLOADS, *LATE]))
def test_I14_every_crash_leaves_a_whole_commit(tmp_path: Path, workload: Workload, pace: int) -> None:
    """A crash that loses writes leaves the commit of the last sync or a later one; any other the last acknowledged."""
    options = OPTIONS.get(workload, {})
    recording = record(tmp_path / "s.pm", "file", workload, pace=pace, **ASYNC, **options)
    depth = 2 if LONGER > 1 else {0: 0, PACE: 2}.get(pace, 1)  # a crash in the recovery of a recovery is the dearest
    assert_survives(recording, **limits(workload, BUDGET // (2 if pace == PACE else 3), depth))


@pytest.mark.longer
@pytest.mark.parametrize("workload", [names, *LATE], ids=lambda workload: workload.__name__)
def test_I14_file_systems_that_sync_whole_files(tmp_path: Path, workload: Workload) -> None:
    assert_survives(record(tmp_path / "s.pm", "file", workload, ranges=False, **ASYNC), **limits(workload, BUDGET))


@pytest.mark.parametrize("workload", [names, lazily], ids=lambda workload: workload.__name__)
def test_I14_disks_with_sectors_of_4096_bytes(tmp_path: Path, workload: Workload) -> None:
    assert_survives(record(tmp_path / "s.pm", "file", workload, **ASYNC), depth=2, sector=4096)


@pytest.mark.longer
def test_I14_over_several_runs(tmp_path: Path) -> None:
    assert_survives(record(tmp_path / "a.pm", "file", names, again, closed, lazily, again, **ASYNC), depth=2)
    recording = record(tmp_path / "b.pm", "file", slots, slots_again, slots_shut, slots_again, **ASYNC)
    assert_survives(recording, **limits(slots, BUDGET))


@pytest.mark.longer
@pytest.mark.parametrize("workload", [arrays, reuse, flips, lazily], ids=lambda workload: workload.__name__)
def test_D7_syncs_that_fail(tmp_path: Path, workload: Workload) -> None:
    """Each of them once, or (make test) every second one; the next run makes durable all that it adopts."""
    for number in itertools.count(1, 1 if LONGER > 1 else 2):
        recording = record_failed_sync(tmp_path / f"{number}.pm", workload, number, **ASYNC)
        if recording is None:
            assert number > 5
            break
        assert_survives(recording, budget=150 if LONGER > 1 else 30, depth=int(LONGER > 1 and workload is not flips))


def test_the_explorer_notices_commits_that_were_said_to_be_durable(tmp_path: Path) -> None:
    """The bound of power cuts rises with PM_EVENT_DURABLE: here each is told before its sync."""
    recording = record(tmp_path / "s.pm", "file", arrays, pace=160, **ASYNC)
    events = list(np.frombuffer(recording.events, "u8").reshape(-1, 4))
    kinds = [int(event[2]) & 0xFFFFFFFF for event in events]
    early = [e for e, kind in zip(events, kinds) if kind not in (lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE)]
    assert kinds.count(lib.PM_EVENT_DURABLE) > 2  # the first says only that there will be others
    _, found = explored(
        Recording("file", recording.base, np.array(early).tobytes(), recording.data), depth=0, budget=4000
    )
    assert found is not None


# ---- the thread


def test_a_sync_follows_by_itself(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=0) as store:
        x = store.create_array("x", 5000, "f8")
        for i in range(20):
            x[i * 200 :] += 1
            store.commit()
            if i % 3 == 0:
                wait_until_durable(store)
            x[:] = -1
            store.rollback()
            assert x[-1] == i + 1 and x[0] == 1
        assert store.check().ok
    with pmstore.open(tmp_path / "s.pm", "r", verify=True) as store:
        assert store["x"][-1] == 20


def test_a_sync_follows_after_commits_that_the_log_was_too_small_for(tmp_path: Path) -> None:
    """They are durable when they return: the thread finds nothing to do, and is told again of what comes next."""
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=0, max_size=2_800_000) as store:
        store["filler"] = np.ones(130_000)
        x = store.create_array("x", 100_000, "f8")
        store.commit()
        del store["filler"]
        store.commit()
        for i in range(8):
            before = store.stats()
            x[:68_000] += 1
            store.commit()
            after = store.stats()
            assert after.bytes_logged - before.bytes_logged > after.log_size
            assert after.durable_sequence == after.sequence
            for _ in range(100):  # the thread may look
                os.sched_yield()
            store["epoch"] = i
            store.commit()
            wait_until_durable(store)


def test_a_closed_store_keeps_no_mapping_of_the_file(tmp_path: Path) -> None:
    """Otherwise a file that is deleted takes its space as long as an array lives."""

    def mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.split()[4] == str(os.stat(tmp_path / "s.pm").st_ino) for line in lines)

    store = pmstore.open(tmp_path / "s.pm", durability="async")
    x = store.create_array("x", 3000, "f8")
    store.commit()
    assert mapped()
    store.close()
    assert not mapped() and not x.any()


def test_a_sync_counts_once_and_twice_after_declared_contents(tmp_path: Path) -> None:
    """The contents of a new array are synced before the durable marker of the commit that declares them (I14)."""
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=float("inf")) as store:
        x = store.create_array("x", 3)
        store.commit()
        store.sync()
        counts = []
        for declares in (False, True, False):
            if declares:
                store["y"] = np.zeros(5000)
            x += 1
            store.commit()
            before = store.stats().syncs
            store.sync()
            counts.append(store.stats().syncs - before)
        assert counts == [1, 2, 1]


def test_sync_waits_until_all_is_durable(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=float("inf")) as store:
        for i in range(5):
            store["x"] = np.full(1000 * i + 1, i)
            store.commit()
        assert store.stats().durable_sequence < store.sequence == 5
        store.sync()
        assert store.stats().durable_sequence == store.sequence == 5
        before = store.stats()
        store.sync()
        assert store.stats() == before, "nothing was left to do"
        store["y"] = 1
        store.commit()
        copy = tmp_path / "copy.pm"
        copy.write_bytes((tmp_path / "s.pm").read_bytes())  # as a kill leaves it
        with pmstore.open(copy, "r") as reader:
            assert reader["y"] == 1
    with pmstore.open(tmp_path / "s.pm", "r") as store:
        assert store["y"] == 1 and store.stats().records_replayed == 0, "close syncs"


def test_I7_memory_that_is_given_back_waits_for_the_commit_that_wrote_it(tmp_path: Path) -> None:
    """That commit chose the other slot of the array. Until it is durable, the slot before has the durable contents.
    Memory waits for no later commit."""
    with pmstore.open(tmp_path / "s.pm", media="file", durability="async", sync_interval=float("inf")) as store:
        x = store.create_array("x", 140_000)
        waited = []
        for number in range(8):
            synced = number % 4 < 2
            x += 1
            store.commit()
            if synced:
                store.sync()
            store["n"] = number
            store.commit()
            before = store.stats().durable_sequence
            store.release("x")
            assert (x == number + 1).all()
            if store.stats().durable_sequence != before:
                waited.append(synced)
            store.sync()
        assert waited and not any(waited)


@pytest.mark.parametrize("logged", ["b", "ab"])
def test_I11_a_rollback_leaves_the_array_behind_it(tmp_path: Path, logged: str) -> None:
    """Its last commit is not durable, and it has no name any more."""
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=float("inf")) as store:
        for name in "ab":
            store[name] = np.zeros(511)
        store.sync()
        a, b = store["a"], store["b"]
        assert offset_of(store, "b") == offset_of(store, "a") + PAGE
        for name in logged:
            store[name][0] = 1
        store.commit()
        del store["b"]
        store.commit()
        a[0], b[0] = 2, 3
        store.rollback()
        assert a[0] == ("a" in logged) and b[0] == 3


def test_durability_sync_has_nothing_to_wait_for(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        store["x"] = 1
        store.commit()
        assert store.stats().durable_sequence == store.sequence == 1
        store.sync()
    with pytest.raises(pmstore.ClosedStoreError):
        store.sync()


def test_memory_is_always_durable(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"pmstore-test-{os.getpid()}.pm"
    if not path.parent.is_dir():
        pytest.skip("no /dev/shm")
    try:
        with pmstore.open(path, media="memory", durability="async") as store:
            store["x"] = 1
            store.commit()
            assert store.stats().durable_sequence == store.sequence == 1
    finally:
        path.unlink()


def test_threads_beside_the_background_sync(tmp_path: Path) -> None:
    """The log is emptied and the file grows while snapshots are being synced."""
    errors: list[BaseException] = []
    store = pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=0, max_size=24 << 20)
    double_buffered = store.create_array("double_buffered", 140_000, "f8")
    store.commit()

    def work(k: int) -> None:
        try:
            mine = store.group(f"t{k}")
            for i in range(60):
                with store.transaction():
                    mine["n"] = i
                    mine[f"a{i % 3}"] = np.full(400 * (1 + i % 7), float(i))
                    if k == 0 and i % 6 == 0:
                        double_buffered[:] += 1
                if i % 10 == k:
                    store.sync()
                if i % 10 == 7:
                    store._catalog.core.checkpoint()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert store.check().ok
    store._drop(discard=True)
    with pmstore.open(tmp_path / "s.pm", "r+", verify=True) as again_:
        assert [again_[f"t{k}/n"] for k in range(3)] == [59] * 3
        assert (again_["double_buffered"] == 10).all()
        assert all((again_[f"t{k}/a2"] == 59).all() for k in range(3))


class OnFileAsync(test_model.Model):
    media = "file"

    def open(self) -> pmstore.Store:
        return pmstore.open(self.directory / "s", media=self.media, durability="async", sync_interval=0.0002)


class OnFileLate(test_model.Model):
    media = "file"

    def open(self) -> pmstore.Store:
        return pmstore.open(self.directory / "s", media=self.media, durability="async", sync_interval=1000)


TestAsync = OnFileAsync.TestCase
TestLate = OnFileLate.TestCase
TestAsync.settings = TestLate.settings = test_model.LIMITS


# ---- failures


FAILS = """
import errno, sys
import numpy as np
import pmstore
from pathlib import Path
from tests.support import shim
path = Path(sys.argv[1])
store = pmstore.open(path, "x", media="file", durability="async", sync_interval=0)
x = store.create_array("x", 3000, "f8")
store.commit()
store.sync()
shim.begin(shim.CALLS["fdatasync"], shim.ONCE, errno.EIO, 1, path)
n = 0
try:
    while True:
        n += 1
        x[:] = n
        store.commit()
except (pmstore.FailedStoreError, pmstore.StoreIOError):  # the latter if it synced itself, for the log was full
    pass
assert shim.hits() == 1
shim.end()
for refused in (store.commit, store.sync, store.close):
    try:
        store["y"] = 1
        refused()
    except (pmstore.FailedStoreError, pmstore.ClosedStoreError):
        continue
    raise AssertionError(refused)
print(n)
"""


@pytest.mark.no_sanitizer  # which is preloaded too
def test_D7_a_background_sync_that_fails_is_told_by_the_next_call(tmp_path: Path, fault_library: Path) -> None:
    n = int(shim.run(fault_library, "-c", FAILS, str(tmp_path / "s.pm")))
    with pmstore.open(tmp_path / "s.pm", "r+", verify=True) as store:
        assert (store["x"] == n - 1).all(), "the process did not die: what it committed is in the page cache"


def test_D7_a_failed_sync_is_told_by_close_if_by_no_other_call(tmp_path: Path) -> None:
    for commits, number in itertools.product(range(1, 9), (1, 2, 3)):
        with Recorder(tmp_path / f"{commits}-{number}.pm", "file") as recorder:
            store = pmstore.open(recorder.path, durability="async")
            x = store.create_array("x", 3000, "f8")
            store.commit()
            recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
            told = False
            try:
                for i in range(commits):
                    x[i] = 1
                    store.commit()
                x[-1] = 1
                store.close()
            except OSError:
                told = True
            assert told == bool(recorder.trace.operations()[1]), (commits, number)
            recorder.trace.fail(0, 0, 0)
            if not store.closed:
                store._drop(discard=True)


@pytest.mark.parametrize("failing", [lib.PM_OPERATION_SYNC, lib.PM_OPERATION_WRITE], ids=["sync", "marker"])
def test_D7_a_failed_sync_leaves_what_a_rollback_needs(tmp_path: Path, failing: int) -> None:
    with Recorder(tmp_path / "s.pm", "file", pace=0) as recorder:
        store = pmstore.open(tmp_path / "s.pm", durability="async")
        x = store.create_array("x", 3000, "f8")
        store.commit()
        x[5] = 1
        store.commit()
        recorder.trace.fail(failing, 1, errno.EIO)
        x[:] = 7
        with pytest.raises(pmstore.StoreIOError, match=r"cannot sync the file: Input/output error"):
            store.sync()
        with pytest.raises(pmstore.FailedStoreError):
            store.commit()
        store.rollback()
        assert x[5] == 1 and x.sum() == 1
        recorder.trace.fail(0, 0, 0)
        store._drop(discard=True)
    with pmstore.open(tmp_path / "s.pm", "r+", verify=True) as store:
        assert store["x"][5] == 1


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.no_sanitizer  # which is preloaded too
@pytest.mark.parametrize("kind", CLASSES)
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, fault_library: Path, kind: str) -> None:
    kills = -(-KILLS // (2 * len(CLASSES)))
    said = shim.run(fault_library, "-m", "tests.support.kills", "worker", str(tmp_path), "async", kind, str(kills), "1")
    counted, runs = json.loads(said)[kind]
    assert counted == kills <= runs


# ---- processes


def test_a_fork_has_no_thread_and_the_parent_goes_on(tmp_path: Path) -> None:
    store = pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=0)
    store["x"] = np.ones(3000)
    for i in range(10):
        store["x"][i] = i
        store.commit()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                store.commit()
            except pmstore.ForkedStoreError:
                code = len(os.listdir("/proc/self/task")) - 1
                store.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.sync()
    store.close()
    with pmstore.open(tmp_path / "s.pm", "r", verify=True) as store:
        assert store["x"][:10].tolist() == list(range(10))


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "del store"]
)
def test_a_process_that_ends_without_closing(tmp_path: Path, end: str) -> None:
    code = f"""
import os, signal, sys, warnings
import pmstore
warnings.simplefilter("ignore")
store = pmstore.open(sys.argv[1], "x", durability="async", sync_interval=1000)
store["n"] = 1
store.commit()
store["n"] = 2
{end}
"""
    done = python("-c", code, tmp_path / "s.pm")
    assert done.returncode == (-signal.SIGKILL if "SIGKILL" in end else 0)
    with pmstore.open(tmp_path / "s.pm", "r", verify=True) as store:
        assert store["n"] == 1


def test_signals_reach_the_program(tmp_path: Path) -> None:
    """The thread takes none: otherwise one could fail to interrupt what the program waits for."""
    before = set(os.listdir("/proc/self/task"))
    with pmstore.open(tmp_path / "s.pm", durability="async"):
        (thread,) = set(os.listdir("/proc/self/task")) - before
        assert signals_blocked()[int(thread)] >> signal.SIGINT - 1 & 1
    assert thread not in os.listdir("/proc/self/task"), "it ended with the store"


LIMITED = """
import resource, sys
import numpy as np
import pmstore
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
store = pmstore.open(sys.argv[1], "x", durability="async", sync_interval=0)
store["a"] = np.arange(3_000_000.0)
store.commit()
store["a"][:] = 1
store["b"] = np.ones(100_000)
store.commit()
assert store.check().ok
store.close()
with pmstore.open(sys.argv[1], "r") as store:
    assert store["a"].sum() == 3_000_000
"""


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("gibibytes", [1, 4, 20, 70, 200])
def test_where_address_space_is_limited(tmp_path: Path, child: Any, gibibytes: int) -> None:
    child(LIMITED, tmp_path / "s.pm", gibibytes << 30).end()


def test_space_that_waits_for_a_sync_is_used_before_the_file_grows(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm", durability="async", sync_interval=1000) as store:
        for i in range(50):
            store["x"] = np.full(20_000 + i, float(i))
            store.commit()
        assert store.stats().region_size < 2 << 20


def test_the_last_pages_of_a_region_of_over_128_mebibytes(tmp_path: Path) -> None:
    """What is known of its pages takes more than a page of memory."""
    with pmstore.open(tmp_path / "s.pm", "x", durability="async", sync_interval=1000, max_size=256 << 20) as store:
        x = store.create_array("x", 17_200_000)
        store.commit()
        x[-1000:] = 1
        store.commit()
        size = store.stats().region_size
        assert 128 << 20 < size < 140 << 20
        store.sync()
        x[-1000:] = 2
        store["y"] = np.ones(5000)
        store.commit()
        x[-1000:] = 3
        store.rollback()
        assert (x[-1000:] == 2).all() and not x[:-1000].any()
        assert store.stats().region_size == size
    with pmstore.open(tmp_path / "s.pm", "r", verify=True) as store:
        assert store["x"].sum() == 2000 and (store["y"] == 1).all()


def test_the_plans_of_the_battery_have_all_of_these() -> None:
    planned = {workload for _, runs, options in PLANS if "durability" in options for workload in runs}
    assert {lazily, freed_late, flipped_late} <= planned
