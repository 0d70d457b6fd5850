"""Calls to the system that fail, fall short or are interrupted, seen from outside: below the core's own recorder, and
below Python, which makes calls of its own.

pmstore.testing makes every call fail that the core makes (test_testing_faults.py). Here is what it can't do: writes
that do half of their work and then fail; all calls interrupted, or short; the calls of ext4 on any file system; the
creation of a store. After an error the state is one of acknowledged..begun, whole and sound.

The faults come from tests/support/faults.c, preloaded into a child process that tries many of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import LONGER, MEMORY
from tests.support import shim as shims
from tests.support.shim import (
    CALLS,
    FROM_THEN,
    HALF,
    INTERRUPT,
    ONCE,
    SHORT,
    STORM,
    Fault,
    direct_io,
    faults,
    hits,
    pretend_ext4,
)
from tests.support.snapshots import Snapshot, difference, snapshot

pytestmark = pytest.mark.no_sanitizer  # which is preloaded too

MOST = 400  # faults of one kind in one workload; far more than there are


# ---- in the child ----------------------------------------------------------------------------------------------------

# Of the calls that ext4 gets.
KINDS = [
    Fault(call, manner, code)
    for call, manners in (
        ("pwrite", (HALF,)),
        ("pwritev2", (ONCE, HALF, FROM_THEN)),
        ("fdatasync", (ONCE,)),
        ("sync_file_range", (ONCE, FROM_THEN)),
    )
    for manner in manners
    for code in (errno.EIO, errno.ENOSPC)
]


# ---- workloads

Commit = Callable[[], None]
Workload = Callable[[pmstore.Store, Commit], None]


def changes(store: pmstore.Store, commit: Commit) -> None:
    for i in range(3):
        store["small"][i] = -1
        store["large"][100 * i : 700 * i] = i
        store["value"] = {"k": [i]}
        store["list"].append("x" * 90)
        commit()


def creation(store: pmstore.Store, commit: Commit) -> None:
    store["new/large"] = np.arange(5000.0)
    filled = store.create_array("new/filled", (30, 70), "f4", fill_value=2)
    filled[3] = 5
    store["new/small"] = np.arange(9)
    commit()
    filled[:] = 7
    store["new/text"] = "y" * 20_000
    store.create_list("new/list").extend(range(30))
    commit()


def growth(store: pmstore.Store, commit: Commit) -> None:
    store["large"][:] = 4
    store["grown"] = np.arange(120_000.0)
    store["small"][:] = 4
    commit()
    store["more"] = np.arange(200_000.0)
    commit()


def larger_than_the_log(store: pmstore.Store, commit: Commit) -> None:
    huge = store["huge"]
    huge += 1
    store["fresh"] = np.arange(5000.0)
    commit()
    huge[::700] = -1
    store["small"][:] = 2
    commit()


WORKLOADS = [changes, creation, growth, larger_than_the_log]
STEPS = {growth: (3, 1), larger_than_the_log: (48, 12)}
"""From one failing call to the next, where states have megabytes: in make test, and in make torture."""


def prepare(path: Path, workload: str) -> None:
    """The store that a workload begins with; a clean one, or one with a log to replay."""
    with pmstore.open(path, "x", media="file") as store:
        store["small"] = np.arange(20.0)
        store["large"] = np.arange(3000.0)
        store["value"] = {"k": 1}
        store.create_list("list").extend(range(10))
        if workload == "larger_than_the_log":
            store["huge"] = np.zeros(600_000)
    if workload in ("changes", "larger_than_the_log"):
        return
    store = pmstore.open(path, "r+", media="file")
    store["large"][5] = -5
    store.commit()
    store._drop(discard=True)


class Run:
    """One run of the store: how many commits were begun, and how many acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = self.acknowledged = 0
        self.states: list[Snapshot] = []

    def commit(self) -> None:
        self.begun += 1
        self.store.commit()
        self.acknowledged = self.begun

    def learn(self, workload: Workload) -> None:
        """The states, from a run without faults."""

        def commit() -> None:
            self.store.commit()
            self.states.append(snapshot(self.store))

        with pmstore.open(self.path, "r+", media="file") as self.store:
            self.states = [snapshot(self.store)]
            workload(self.store, commit)

    def tries(self, workload: Workload, fault: Fault) -> bool:
        """False if the fault did not happen."""
        self.begun = self.acknowledged = 0
        self.store = pmstore.open(self.path, "r+", media="file")
        held = {name: value for name, value in self.store.items() if isinstance(value, np.ndarray)}
        error = None
        with faults(fault, self.path):
            try:
                workload(self.store, self.commit)
                self.store.stats()  # the last commit's the committed image may be behind, and fail behind its back
            except pmstore.Error as raised:
                error = raised
        if error is None:
            assert not hits() or fault.call == "pwrite", "a sync failed, and no error was raised"
            self.is_state(self.begun, snapshot(self.store))
        elif isinstance(error, pmstore.OutOfSpaceError):
            assert fault.errno == errno.ENOSPC, f"{error!r} for another reason"
            self.goes_on(workload, commit_again=fault.at % 2 == 1)
        else:
            assert isinstance(error, pmstore.StoreIOError | pmstore.FailedStoreError), repr(error)
            self.refuses(held, fault)
        self.store._drop(discard=fault.at % 3 == 0)
        self.opens_again()
        return hits() > 0

    def is_state(self, number: int, found: Snapshot) -> None:
        assert found == self.states[number], difference(found, self.states[number])

    def goes_on(self, workload: Workload, commit_again: bool) -> None:
        """There is space again."""
        if commit_again and self.begun > self.acknowledged:
            self.store.commit()
            self.acknowledged = self.begun
            self.is_state(self.begun, snapshot(self.store))
            return
        self.store.rollback()
        self.is_state(self.acknowledged, snapshot(self.store))
        if self.acknowledged == 0:
            self.begun = 0
            workload(self.store, self.commit)
            self.is_state(self.begun, snapshot(self.store))
            assert self.begun == len(self.states) - 1

    def refuses(self, held: dict[str, np.ndarray], fault: Fault) -> None:
        for refused in (self.store.commit, lambda: self.store.create_array("x", 3), lambda: self.store["small"]):
            with pytest.raises(pmstore.FailedStoreError):
                refused()
        try:
            self.store.rollback()
        except pmstore.FailedStoreError:
            # The committed image could not be written: that of the running commit, or of the last one.
            assert fault.call == "pwrite", "no write to the committed image failed"
            return
        possible = self.states[self.acknowledged : self.begun + 1]
        arrays = {
            name: array.tobytes()
            for name, array in held.items()
            if possible[0].get(name, ("",))[:2] == (array.dtype.str, array.shape)  # not replaced since
        }
        assert any(
            all(name in state and state[name][-1] == contents for name, contents in arrays.items())
            for state in possible
        ), "the arrays are not those of a commit"

    def opens_again(self) -> None:
        with pmstore.open(self.path, "r+", media="file", verify=True) as store:
            found = snapshot(store)
            possible = self.states[self.acknowledged : self.begun + 1]
            assert found in possible, f"commit {self.acknowledged}..{self.begun}: {difference(found, possible[-1])}"
            store["after"] = np.ones(2000)
            store.commit()
            assert store.check().ok


def every_fault(directory: str, workload_name: str) -> None:
    """All kinds of faults at all calls of a workload, on a file system that says it is ext4. Leaves the files of the
    last one of each kind, and says what they may hold."""
    pretend_ext4(True)
    workload = globals()[workload_name]
    base = Path(directory) / "base.pm"
    prepare(base, workload_name)
    image = base.read_bytes()
    run = Run(base)
    run.learn(workload)
    for kind in KINDS:
        happened = 0
        step = STEPS.get(workload, (1, 1))[LONGER > 1]
        for at in range(1, MOST, step):
            run.path = Path(directory) / f"{happened % 2}.pm"
            run.path.write_bytes(image)
            try:
                if not run.tries(workload, kind._replace(at=at)):
                    break
            except BaseException as error:  # also what pytest.raises raises
                raise AssertionError(f"{workload_name}: {kind._replace(at=at)}") from error
            happened += 1
        else:
            raise AssertionError("no end of faults")
        print(kind, happened, sep=": ")


@pytest.mark.longer
@pytest.mark.parametrize(
    "workload",
    [*WORKLOADS[:-1], pytest.param(larger_than_the_log, marks=pytest.mark.long)],
    ids=lambda f: f.__name__,
)
def test_every_fault_leaves_a_commit_whole_on_ext4(fault_library: Path, directory: Path, workload: Workload) -> None:
    said = shims.call(fault_library, every_fault, directory, workload.__name__)
    assert sum(int(line.rpartition(" ")[2]) for line in said.splitlines()) > 20
    for path in directory.glob("[01].pm"):
        with pmstore.open(path, "r", media="file") as store:  # without the shim
            assert store.check().ok and store["after"].sum() == 2000


# ---- creating


def creations(directory: str) -> None:
    """Either there is a store, which is complete, or nothing; and no temporary file."""
    path = Path(directory) / "new.pm"
    codes = (errno.EIO, errno.ENOSPC)
    kinds = [Fault(call, manner, code) for call in CALLS for manner in (ONCE, HALF) for code in codes]
    happened = 0
    for kind in kinds:
        for at in range(1, MOST):
            pretend_ext4(at % 2 == 0)
            with faults(kind._replace(at=at)), contextlib.suppress(OSError):
                pmstore.open(path, "x", media="file").close()
            if path.exists():  # it failed after the file was complete, or not at all
                with pmstore.open(path, "r+", media="file", verify=True) as store:
                    assert len(store) == 0
                path.unlink()
            assert not [p for p in path.parent.iterdir() if "creating" in p.name], kind._replace(at=at)
            if not hits() and at > 2:
                break
            happened += hits()
    print(happened)


def test_faults_while_a_store_is_created(fault_library: Path, directory: Path) -> None:
    assert int(shims.call(fault_library, creations, directory)) > 20


# ---- what nobody may notice


def unnoticed(directory: str, media: str) -> None:
    for ext4 in (True, False) if media == "file" else (False,):
        pretend_ext4(ext4)
        for call in CALLS:
            for manner in (INTERRUPT, SHORT):
                if manner == SHORT and call not in ("pwrite", "pwritev2"):
                    continue
                path = Path(directory) / f"{call}{manner}{ext4}.pm"
                with faults(Fault(call, manner, errno.EINTR)), pmstore.open(path, "x", media=media) as store:
                    store["small"], store["large"] = np.arange(20.0), np.arange(3000.0)
                    store["value"] = 1
                    store["huge"] = np.zeros(600_000)
                    store.create_list("list")
                    store.commit()
                    for workload in (changes, creation, growth, larger_than_the_log):
                        workload(store, store.commit)
                    found = snapshot(store)
                assert hits() or call != "fallocate", "it was not tested"
                with pmstore.open(path, "r", media=media, verify=True) as store:
                    assert snapshot(store) == found


@pytest.mark.parametrize("media", ["memory", pytest.param("file", marks=pytest.mark.long)])
def test_interrupted_and_short_calls_are_not_noticed(fault_library: Path, directory: Path, media: str) -> None:
    if media == "memory" and not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    shims.call(fault_library, unnoticed, directory, media)


def stormy(directory: str) -> None:
    """Calls are interrupted as long as the thread lets them; or whatever it does, and then that is an error."""
    pretend_ext4(True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for call in CALLS:
        for manner in (STORM, FROM_THEN):
            path = Path(directory) / f"{call}{manner}.pm"
            store = pmstore.open(path, "x", media="file")
            store["kept"] = np.ones(2000)
            store.commit()
            with faults(Fault(call, manner, errno.EINTR), path):
                try:
                    store["grown"] = np.arange(300_000.0)
                    store.commit()
                    store["kept"][:] = 2
                    store.close()
                except pmstore.StoreIOError as error:
                    assert manner == FROM_THEN and error.errno == errno.EINTR
            assert hits() > (100 if manner == FROM_THEN else 0) and store.closed == (manner == STORM)
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
            if manner == FROM_THEN:
                store._drop(discard=True)
            with pmstore.open(path, "r", media="file", verify=True) as store:
                assert store["kept"].sum() in ((4000,) if manner == STORM else (2000, 4000))


def test_a_storm_of_signals_neither_stops_nor_fails_a_store(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, stormy, directory)


def past_the_cache(directory: str) -> None:
    """Records of 500 KB, of which parts leave early, and of one page."""
    pretend_ext4(True)
    for number, (call, manner, code) in enumerate(
        [
            ("io_setup", ONCE, errno.EAGAIN),
            ("io_setup", ONCE, errno.ENOSYS),
            ("io_submit", ONCE, errno.EAGAIN),
            ("io_submit", FROM_THEN, errno.EINVAL),
            ("io_getevents", FROM_THEN, errno.EPERM),
            ("a write's end", ONCE, errno.EIO),
            ("a write's end", HALF, errno.ENOSPC),
            ("a write's end", FROM_THEN, errno.EINVAL),
            ("pwritev2", ONCE, errno.EINVAL),
        ]
    ):
        of_any_file = call in ("io_setup", "io_getevents")  # and made once, if the first fails
        # The last ones are of a record that is still in the log at the end.
        for at in (1,) if of_any_file else (1, 2, 3) if call == "pwritev2" else (1, 2, 3, 5):
            path = Path(directory) / f"{number}-{at}.pm"
            store = pmstore.open(path, "x", media="file")
            wide, small = store.create_array("wide", (125, 512)), store.create_array("small", 3)
            store.commit()
            with faults(Fault(call, manner, code, at), None if of_any_file else path):
                for i in range(1, 4):
                    if call != "pwritev2":
                        wide[:, i] = i
                        store.commit()
                    small[:] = i
                    store.commit()
            assert hits(), (call, at)
            sequence = store.sequence
            store._drop(discard=True)  # as by a kill: the log holds it all
            with pmstore.open(path, "r+", media="file", verify=True) as store:
                assert store.sequence == sequence, (call, manner, at)
                assert (store["small"] == 3).all() and store.check().ok
                assert call == "pwritev2" or (store["wide"][:, 1:4] == [1, 2, 3]).all()


def ways(directory: str) -> None:
    """Durable writes past the page cache, and asynchronous ones, of each commit."""
    pretend_ext4(True)

    def counted(change: Callable[[], object]) -> list[int]:
        before = [shims.variable(name, ctypes.c_long).value for name in ("fault_past_cache", "fault_begun")]
        change()
        store.commit()
        return [
            shims.variable(name, ctypes.c_long).value - was
            for name, was in zip(("fault_past_cache", "fault_begun"), before, strict=True)
        ]

    with pmstore.open(Path(directory) / "ways.pm", "x", media="file") as store:
        wide, small = store.create_array("wide", (250, 512)), store.create_array("small", 3)
        store.commit()
        assert counted(lambda: small.fill(1)) == [1, 0], "a page, by itself"
        # It vouches for what was streamed. A write that is forced to the medium by itself would not flush that.
        assert counted(lambda: store.create_array("new", 4096, fill_value=1)) == [0, 0], "with a new array"
        past_cache, begun = counted(lambda: wide[:, 3].fill(1))
        assert past_cache == 0 and begun >= 3, "a megabyte, in parts"
        with faults(Fault("a write's end", FROM_THEN, errno.EINVAL), None):
            counted(lambda: wide[:, 3].fill(2))
        assert counted(lambda: wide[:, 3].fill(3)) == [0, 0], "a file system that refused them is not asked again"
    with pmstore.open(Path(directory) / "ways.pm", "r+", media="file") as store:
        shims.begin(shims.IO_SUBMIT | shims.IO_RESULT, FROM_THEN, errno.EIO, 2)  # all but the first part, and its end
        counted(lambda: store["wide"][:, 3].fill(4))
        shims.end()
        assert hits() == 2, "the commit waits for that part"


def test_what_goes_past_the_cache(fault_library: Path, directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has none")
    shims.call(fault_library, ways, directory)


def test_what_cannot_go_past_the_cache_goes_through_it(fault_library: Path, directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has none")
    shims.call(fault_library, past_the_cache, directory)


def abandoned(directory: str) -> None:
    """Parts of a record have left for the disk when the log turns out to be too small for it. The attempt is given up,
    and then they fail, past the cache and through it.
    """
    pretend_ext4(True)
    path = Path(directory) / "abandoned.pm"
    store = pmstore.open(path, "x", media="file")
    wide = store.create_array("wide", (500, 512))
    store.commit()
    changes = 0
    while store.stats().log_size < 4 << 20 or not 300_000 < store.stats().log_size - store.stats().log_used < 1 << 20:
        changes += 1
        wide[:64] = changes
        store.commit()
    wide[64:] = 1
    begun = shims.variable("fault_begun", ctypes.c_long)
    before = begun.value
    with faults(Fault("a write's end, or pwrite", FROM_THEN, errno.EIO), path):
        with pytest.raises(pmstore.StoreIOError):
            store.commit()
        assert begun.value > before
    with pytest.raises(pmstore.FailedStoreError):
        store.commit()
    store._drop(discard=True)
    with pmstore.open(path, "r+", media="file", verify=True) as store:
        assert (store["wide"][:64] == changes).all() and not store["wide"][64:].any()


def test_an_abandoned_attempt_fails_the_store_if_its_parts_do(fault_library: Path, directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has none")
    shims.call(fault_library, abandoned, directory)


def neither_way(directory: str) -> None:
    """A part of a record can't be written past the cache, and then not through it."""
    pretend_ext4(True)
    for at in range(1, 15):  # more than there are parts
        path = Path(directory) / f"neither-{at}.pm"
        store = pmstore.open(path, "x", media="file")
        wide = store.create_array("wide", (500, 512))
        store.commit()
        wide[:, 0] = 1
        possible = [1.0]
        with faults(Fault("a write's end, or pwrite", HALF, errno.EIO, at), path):
            try:
                store.commit()
            except pmstore.StoreIOError:
                possible = [0.0, 1.0]
        store._drop(discard=True)
        with pmstore.open(path, "r+", media="file", verify=True) as store:
            (found,) = np.unique(store["wide"][:, 0])
            assert found in possible, at


def test_what_can_be_written_in_neither_way_is_an_error(fault_library: Path, directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has none")
    shims.call(fault_library, neither_way, directory)


def without_descriptors(directory: str) -> None:
    """The limit is reached when the first record that could go past the cache is committed."""
    pretend_ext4(True)
    path = Path(directory) / "few.pm"
    with pmstore.open(path, "x", media="file") as store:
        array = store.create_array("x", (125, 512))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        for i in range(3):
            array[:, i] = i + 1
            store.commit()
            store["n"] = i
            store.commit()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with pmstore.open(path, "r", media="file", verify=True) as store:
        assert store["n"] == 2 and (store["x"][:, :3] == [1, 2, 3]).all()


def test_no_descriptor_is_left_for_writes_past_the_cache(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, without_descriptors, directory)


# ---- particular ones


class Mine(Exception):
    pass


def full_disk(directory: str, ext4: bool) -> None:
    pretend_ext4(ext4)
    full = Fault("pwrite", FROM_THEN, errno.ENOSPC)
    for commit_again in (True, False):
        path = Path(directory) / f"{commit_again}.pm"
        store = pmstore.open(path, "x", media="file")
        kept = store.create_array("kept", 1000)
        store.commit()
        fresh = store.create_array("fresh", 5000)
        fresh[:] = 3  # through the buffer, so that the commit writes it
        kept[:] = -1
        for _ in range(2):
            with faults(full, path), pytest.raises(pmstore.OutOfSpaceError):
                store.commit()
            assert hits() == 1
        with faults(full, path), pytest.raises(pmstore.OutOfSpaceError):
            store["grown"] = np.ones(300_000)  # the log stands behind it, and is written once with zeros
        assert hits() and "grown" not in store
        if commit_again:
            store.commit()
        else:
            with pytest.raises(Mine), faults(full, path), store.transaction():
                kept[5] = 9
                raise Mine
        assert (kept == (-1 if commit_again else 0)).all()
        assert ("fresh" in store) == commit_again
        store["grown"] = np.ones(300_000)
        store.close()
        with pmstore.open(path, "r", media="file", verify=True) as store:
            assert store["kept"].sum() == (-1000 if commit_again else 0)
            assert ("fresh" in store) == commit_again and "grown" in store


@pytest.mark.parametrize("ext4", [True, False], ids=["ext4", "other"])
def test_a_full_disk_before_the_commit_point_is_no_failure(fault_library: Path, directory: Path, ext4: bool) -> None:
    shims.call(fault_library, full_disk, directory, ext4)


def no_larger_log(directory: str) -> None:
    path = Path(directory) / "log.pm"
    with pmstore.open(path, "x", media="file") as store:
        wide = store.create_array("wide", 15_000)
        store.commit()
        before = store.stats()
        for i in range(12):
            wide[:] = i
            with faults(Fault("fallocate", ONCE, errno.ENOSPC), path):
                store.commit()
        after = store.stats()
        assert after.log_size == before.log_size and after.checkpoints > before.checkpoints
    with pmstore.open(path, "r", media="file", verify=True) as store:
        assert (store["wide"] == 11).all()


def test_without_space_for_a_larger_log_the_small_one_does(fault_library: Path, directory: Path) -> None:
    shims.call(fault_library, no_larger_log, directory)
