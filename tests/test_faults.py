"""Calls to the system that fail, fall short or are interrupted, one after the other, at every place of a workload.

The oracle: after an error the state is one of acknowledged..begun, whole and sound, in this process (a rollback takes
the arrays back to it) and for whoever opens the file next. Out of space leaves everything pending; any other failure
makes the store refuse to go on.

The faults come from tests/faults.c, preloaded into a child process that tries many of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore

from .conftest import MEMORY
from .snapshots import Snapshot, difference, snapshot

pytestmark = pytest.mark.no_sanitizer  # which is preloaded too

SOURCE = Path(__file__).with_name("faults.c")
PWRITE, PWRITEV2, FDATASYNC, FSYNC, FALLOCATE = 1, 2, 4, 8, 16
ONCE, HALF, FROM_THEN, INTERRUPT, SHORT = range(5)  # as in faults.c
CALLS = {"pwrite": PWRITE, "pwritev2": PWRITEV2, "fdatasync": FDATASYNC, "fsync": FSYNC, "fallocate": FALLOCATE}
MOST = 400  # faults of one kind in one workload; far more than there are


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(path), "-ldl"], check=True)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """In memory if possible: the file medium syncs a lot here, and only its calls matter."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=MEMORY))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def in_child(shim: Path, function: Callable[..., None], *arguments: Any) -> str:
    """What the function, called under the shim in another process, prints."""
    call = f"{function.__name__}({', '.join(repr(str(a) if isinstance(a, Path) else a) for a in arguments)})"
    code = f"from tests.test_faults import {function.__name__}; {call}"
    root = Path(__file__).parent.parent
    environment = dict(os.environ, PYTHONPATH=f"{root}{os.pathsep}{Path(pmstore.__file__).parent.parent}")
    environment["LD_PRELOAD"] = str(shim)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- in the child ----------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    call: str
    manner: int
    errno: int
    at: int = 1

    def __str__(self) -> str:
        manner = ("once", "half", "from then on", "interrupted", "short")[self.manner]
        return f"{self.call} {self.at}, {errno.errorcode.get(self.errno, 0)}, {manner}"


KINDS = [
    Fault(call, manner, code)
    for call, manners, codes in (
        ("pwrite", (ONCE, HALF, FROM_THEN), (errno.EIO, errno.ENOSPC)),
        ("pwritev2", (ONCE, HALF), (errno.EIO, errno.ENOSPC)),
        ("fdatasync", (ONCE,), (errno.EIO, errno.ENOSPC)),
        ("fsync", (ONCE,), (errno.EIO, errno.ENOSPC)),
        ("fallocate", (ONCE, FROM_THEN), (errno.ENOSPC,)),
        ("fallocate", (ONCE,), (errno.EIO,)),
    )
    for manner in manners
    for code in codes
]


def variable(name: str, kind: Any = ctypes.c_int) -> Any:
    return kind.in_dll(ctypes.CDLL(None), name)


@contextlib.contextmanager
def faults(fault: Fault, path: Path | None = None) -> Iterator[Callable[[], int]]:
    """The fault happens to calls inside the block, on one file or any. Gives what counts the faults."""
    hits = variable("fault_hits", ctypes.c_long)
    variable("fault_manner").value, variable("fault_errno").value = fault.manner, fault.errno
    variable("fault_at", ctypes.c_long).value = fault.at
    variable("fault_inode", ctypes.c_ulong).value = path.stat().st_ino if path else 0
    variable("fault_count", ctypes.c_long).value = hits.value = 0
    variable("fault_calls").value = CALLS[fault.call]
    try:
        yield lambda: int(hits.value)
    finally:
        variable("fault_calls").value = 0


def pretend_ext4(is_so: bool) -> None:
    """Whether the file medium uses pwritev2 depends on the file system; both ways are tested on any."""
    variable("fault_ext4").value = int(is_so)


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


def replacing(store: pmstore.Store, commit: Commit) -> None:
    store["large"] = np.ones(700)
    store["small"] = "z" * 9000
    commit()
    del store["list"]
    store["list"] = np.arange(40)
    del store["value"]
    commit()


def growth(store: pmstore.Store, commit: Commit) -> None:
    store["large"][:] = 4
    store["grown"] = np.arange(120_000.0)
    store["small"][:] = 4
    commit()
    store["more"] = np.arange(200_000.0)
    commit()


def full_log(store: pmstore.Store, commit: Commit) -> None:
    for i in range(6):
        store["wide"][:] = i
        commit()


def larger_than_the_log(store: pmstore.Store, commit: Commit) -> None:
    huge = store["huge"]
    huge += 1
    store["fresh"] = np.arange(5000.0)
    commit()
    huge[::700] = -1
    store["small"][:] = 2
    commit()


def rollbacks(store: pmstore.Store, commit: Commit) -> None:
    store["large"][:] = 1
    commit()
    store["large"][:] = 2
    store["gone"] = np.ones(90_000)
    del store["list"]
    store.rollback()
    store["small"][:] = 3
    store["kept"] = np.ones(3000)
    commit()


def checkpoints(store: pmstore.Store, commit: Commit) -> None:
    for i in range(2):
        store["large"][:] = i
        commit()
        store._catalog.core.checkpoint()
        store["small"][:] = i
        commit()


WORKLOADS = [changes, creation, replacing, growth, full_log, larger_than_the_log, rollbacks, checkpoints]


def prepare(path: Path, workload: str) -> None:
    """The store that a workload begins with; a clean one, or one with a log to replay."""
    with pmstore.open(path, "x", media="file") as store:
        store["small"] = np.arange(20.0)
        store["large"] = np.arange(3000.0)
        store["value"] = {"k": 1}
        store.create_list("list").extend(range(10))
        if workload == "full_log":
            store["wide"] = np.zeros(15_000)
        if workload == "larger_than_the_log":
            store["huge"] = np.zeros(600_000)
    if workload in ("changes", "larger_than_the_log"):
        return
    store = pmstore.open(path, "r+", media="file")
    store["large"][5] = -5
    store.commit()
    store._drop(discard=True)


class Run:
    """One life of the store: how many commits were begun, and how many acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = self.acknowledged = 0
        self.states: list[Snapshot] = []

    def commit(self) -> None:
        self.begun += 1
        self.store.commit()
        self.acknowledged = self.begun

    def learn(self, workload: Workload) -> None:
        """The states, from a life without faults."""

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
        with faults(fault, self.path) as hits:
            try:
                workload(self.store, self.commit)
            except pmstore.Error as raised:
                error = raised
        if error is None:
            self.is_state(self.begun, snapshot(self.store))
        elif isinstance(error, pmstore.OutOfSpaceError):
            assert fault.errno == errno.ENOSPC, f"{error!r} for another reason"
            self.goes_on(workload, commit_again=fault.at % 2 == 1)
        else:
            assert isinstance(error, pmstore.StoreIOError | pmstore.FailedStoreError), repr(error)
            self.refuses(held)
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

    def refuses(self, held: dict[str, np.ndarray]) -> None:
        for refused in (self.store.commit, lambda: self.store.create_array("x", 3), lambda: self.store["small"]):
            with pytest.raises(pmstore.FailedStoreError):
                refused()
        try:
            self.store.rollback()
        except pmstore.FailedStoreError:
            assert self.begun > self.acknowledged, "home was not being written"
            self.acknowledged = self.begun  # it was durable, and could not be brought home
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


def every_fault(directory: str, workload_name: str, ext4: bool) -> None:
    """All kinds of faults at all calls of a workload. Leaves the files of the last one of each kind, and says what
    they may hold."""
    pretend_ext4(ext4)
    workload = globals()[workload_name]
    base = Path(directory) / "base.pm"
    prepare(base, workload_name)
    image = base.read_bytes()
    run = Run(base)
    run.learn(workload)
    for kind in KINDS:
        if kind.call == "pwritev2" and not ext4:
            continue
        happened = 0
        step = 5 if workload is larger_than_the_log else 1  # its states are of megabytes
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


@pytest.mark.parametrize("ext4", [True, False], ids=["ext4", "other"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda f: f.__name__)
def test_every_fault_leaves_a_commit_whole(shim: Path, directory: Path, workload: Workload, ext4: bool) -> None:
    said = in_child(shim, every_fault, directory, workload.__name__, ext4)
    happened = {line.partition(" ")[0]: int(line.rpartition(" ")[2]) for line in said.splitlines()}
    assert happened["pwrite"] and happened["fdatasync"]
    for path in directory.glob("[01].pm"):
        with pmstore.open(path, "r", media="file") as store:  # without the shim
            assert store.check().ok and store["after"].sum() == 2000


# ---- opening, closing, creating


def lives(directory: str) -> None:
    """Faults while a store with a log is opened, recovered, closed; and while one is created."""
    pretend_ext4(True)
    base = Path(directory) / "base.pm"
    prepare(base, "")
    image = base.read_bytes()
    with pmstore.open(base, "r", media="file") as store:
        before = snapshot(store)
    path = Path(directory) / "life.pm"
    for kind in KINDS:
        for at in range(1, MOST):
            path.write_bytes(image)
            acknowledged = False
            store = None
            with faults(kind._replace(at=at), path) as hits:
                with contextlib.suppress(pmstore.Error):
                    store = pmstore.open(path, "r+", media="file")
                    store["small"][:] = 8
                    store.commit()
                    acknowledged = True
                    store.close()
            if store is not None and not store.closed:
                store._drop(discard=True)
            with pmstore.open(path, "r+", media="file", verify=True) as store:
                found = snapshot(store)
                after = {**before, "small": (*before["small"][:-1], np.full(20, 8.0).tobytes())}
                assert found == after or (found == before and not acknowledged), kind._replace(at=at)
            if not hits():
                break
        path.unlink()
        for at in range(1, MOST):
            with faults(kind._replace(at=at)) as hits, contextlib.suppress(OSError):
                pmstore.open(path, "x", media="file").close()
            if path.exists():  # it failed after the file was complete, or not at all
                with pmstore.open(path, "r+", media="file", verify=True) as store:
                    assert len(store) == 0
                path.unlink()
            assert not [p for p in path.parent.iterdir() if "creating" in p.name], kind._replace(at=at)
            if not hits():
                break
        path.write_bytes(image)


def test_faults_while_a_store_is_opened_closed_or_created(shim: Path, directory: Path) -> None:
    in_child(shim, lives, directory)


# ---- what nobody may notice


def unnoticed(directory: str, media: str) -> None:
    for ext4 in (True, False) if media == "file" else (False,):
        pretend_ext4(ext4)
        for call in CALLS:
            for manner in (INTERRUPT, SHORT):
                if call in ("fdatasync", "fsync") or (manner == SHORT and call == "fallocate"):
                    continue  # a sync that is interrupted is not tried again: it is a failure
                path = Path(directory) / f"{call}{manner}{ext4}.pm"
                with faults(Fault(call, manner, errno.EINTR)) as hits, pmstore.open(path, "x", media=media) as store:
                    store["small"], store["large"] = np.arange(20.0), np.arange(3000.0)
                    store["value"] = 1
                    store["huge"] = np.zeros(600_000)
                    store.create_list("list")
                    store.commit()
                    for workload in (changes, creation, growth, larger_than_the_log):
                        workload(store, store.commit)
                    found = snapshot(store)
                assert hits() or call in ("pwrite", "pwritev2"), "it was not tested"
                with pmstore.open(path, "r", media=media, verify=True) as store:
                    assert snapshot(store) == found


@pytest.mark.parametrize("media", ["memory", "file"])
def test_interrupted_and_short_calls_are_not_noticed(shim: Path, directory: Path, media: str) -> None:
    if media == "memory" and not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    in_child(shim, unnoticed, directory, media)


# ---- particular ones


def failing_growth(directory: str, code: int) -> None:
    path = Path(directory) / "growth.pm"
    store = pmstore.open(path, "x", media="file")
    store["a"] = np.arange(1000.0)
    store.commit()
    held = store["a"]
    held[:] = -1
    store["direct"] = np.ones(5000)  # in the page cache only: what the failed fsync may have dropped
    with faults(Fault("fsync", ONCE, code), path) as hits, pytest.raises(pmstore.StoreIOError):
        store["larger"] = np.ones(1_000_000)
    assert hits() == 1
    for refused in (store.commit, lambda: store.create_array("x", 5), lambda: store["a"], store.commit):
        with pytest.raises(pmstore.FailedStoreError):
            refused()
    store.rollback()
    assert held.tolist() == list(range(1000))
    with pytest.raises(pmstore.FailedStoreError):
        store.commit()
    store._drop()
    with pmstore.open(path, "r+", media="file", verify=True) as store:
        assert list(store) == ["a"] and store["a"][-1] == 999


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_sync_that_fails_while_the_file_grows_is_final(shim: Path, directory: Path, code: int) -> None:
    """A sync reports an error once: the contents that were written before it would otherwise be acknowledged."""
    in_child(shim, failing_growth, directory, code)


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
            with faults(full, path) as hits, pytest.raises(pmstore.OutOfSpaceError):
                store.commit()
            assert hits() == 1
        with faults(full, path) as hits, pytest.raises(pmstore.OutOfSpaceError):
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
def test_a_full_disk_before_the_commit_point_is_no_failure(shim: Path, directory: Path, ext4: bool) -> None:
    in_child(shim, full_disk, directory, ext4)


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


def test_without_space_for_a_larger_log_the_small_one_does(shim: Path, directory: Path) -> None:
    in_child(shim, no_larger_log, directory)
