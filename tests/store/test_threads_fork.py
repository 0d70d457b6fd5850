"""Threads on one store, and processes that were forked while it was open."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._store.commits import Commits
from tests.conftest import LONGER


def run_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]


def test_names_from_many_threads(open_store):
    store = open_store()
    shared = store.create_list("shared")

    def work(k):
        rng = random.Random(k)
        mine = store.group(f"t{k}")
        for i in range(150):
            mine[f"v{i % 10}"] = i
            mine[f"a{i % 3}"] = np.full(rng.randrange(1, 3000), i)
            mine[f"text{i % 2}"] = "x" * rng.randrange(3000)
            assert mine[f"v{i % 10}"] == i and (mine[f"a{i % 3}"] == i).all()
            shared.append((k, i))
            if i % 20 == 0:
                store.commit()
                mine.pop(f"a{i % 3}")
            list(mine), len(store)

    run_threads(*(lambda k=k: work(k) for k in range(4)))
    assert sorted(shared) == [(k, i) for k in range(4) for i in range(150)]
    store.close()
    store = open_store(mode="r", verify=True)
    assert len(store["shared"]) == 600 and store["t3/v9"] == 149


def test_transactions_of_many_threads_are_whole(open_store):
    store = open_store()
    w = store.create_array("w", 4)
    store["n"] = 0
    store.commit()

    def work(k):
        for i in range(100):
            try:
                with store.transaction():
                    w[k] += 1
                    store["n"] += 1
                    if i % 5 == 4:
                        raise KeyError
            except KeyError:
                pass

    run_threads(*(lambda k=k: work(k) for k in range(4)))
    assert store["n"] == 320 and (w == 80).all() and store.sequence == 321


def test_a_live_array_is_one_object_in_all_threads(store):
    store.create_array("w", 100)
    for _ in range(30):
        found = []
        barrier = threading.Barrier(4)

        def work(found=found, barrier=barrier):
            barrier.wait()
            found.append(store["w"])

        run_threads(*[work] * 4)
        assert len({id(array) for array in found}) == 1
        del found


def test_closing_beside_working_threads(open_store):
    for _ in range(5):
        store = open_store("s", "w")
        store["a"] = np.zeros(100)
        barrier = threading.Barrier(4)

        def work(store=store, barrier=barrier):
            barrier.wait()
            try:
                while True:
                    store["a"] += 1
                    store["b"] = "x" * 2000
                    list(store), store.get("b")
                    store.commit()
            except (pmstore.ClosedStoreError, ValueError):  # the array went read-only between the two
                pass

        def close(store=store, barrier=barrier):
            barrier.wait()
            store.close()

        run_threads(work, work, work, close)
        assert store.closed


def in_fork(function):
    """What the function returned, as text, in a forked child."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of fork beside threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            try:
                out = str(function())
            except BaseException:
                out = traceback.format_exc()
            os.write(writing, out.encode()[:60_000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        out = pipe.read()
    os.waitpid(pid, 0)
    return out


def signals_blocked():
    """What each thread of this process blocks, by its number: bit 0 is signal 1."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        masks[int(task.name)] = int(lines["SigBlk"], 16)
    return masks


def test_a_forked_child_reads_the_store(open_store):
    store = open_store()
    w = store.create_array("w", 3, fill_value=1)
    store["v"] = 1
    items = store.create_list("items")
    items.append(4)
    group = store.group("model")
    group["k"] = 5
    store.commit()
    w[:] = 2
    store["v"] = 3

    def child():
        assert store.mode == "r" and not store.closed
        for use in (
            lambda: store.commit(),
            lambda: store.rollback(),
            lambda: store.transaction().__enter__(),
            lambda: store.__setitem__("v", 2),
            lambda: store.create_array("x", 3),
            lambda: items.append(1),
            lambda: group.clear(),
        ):
            try:
                use()
            except pmstore.ForkedStoreError as error:
                assert isinstance(error, pmstore.ReadOnlyStoreError) and "only reads it" in str(error)
            else:
                return "no error"
        assert store["v"] == 1 and list(items) == [4] and dict(group) == {"k": 5} and store.sequence == 1
        assert store["w"].tolist() == [1, 1, 1] and not store["w"].flags.writeable and w.tolist() == [2, 2, 2]
        w[:] = 9  # its own memory
        try:
            pmstore.open(store.path)
        except pmstore.StoreLockedError as error:
            assert str(os.getppid()) in str(error), error
        else:
            return "no lock"
        store.close()
        with pytest.raises(pmstore.ClosedStoreError):
            store["v"]
        return w.tolist() if store.closed else "open"

    assert in_fork(child) == "[9.0, 9.0, 9.0]"
    assert (w == 2).all() and store["v"] == 3
    store.commit()
    store.close()
    assert (open_store(mode="r")["w"] == 2).all()


def test_a_forked_child_drops_the_store_in_silence(medium):
    path = medium.directory / "s"
    store = pmstore.open(path)
    w = store.create_array("w", 3)
    store.commit()
    w[:] = 1

    def child():
        nonlocal store, w
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hook = []
            sys.unraisablehook = hook.append
            del store, w
            gc.collect()
            return hook

    assert in_fork(child) == "[]"
    store.close()
    with pmstore.open(path, "r") as store:
        assert (store["w"] == 1).all()


def test_a_fork_while_another_thread_is_inside_a_transaction(store):
    """The transaction never ends in the child. Objects made before the fork do not wait for its lock."""
    transaction = store.transaction()
    inside, forked = threading.Event(), threading.Event()

    def other():
        with store.transaction():
            inside.set()
            forked.wait()

    def child():
        with pytest.raises(pmstore.ForkedStoreError), transaction:
            return "entered"
        return "refused"

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    try:
        assert in_fork(child) == "refused"
    finally:
        forked.set()
        thread.join()
    with transaction:
        store["a"] = 1
    assert store.sequence == 1


def test_a_fork_inside_a_transaction(store):
    w = store.create_array("w", 3)
    store.commit()

    def child():
        with pytest.raises(pmstore.ForkedStoreError):
            store.commit()
        return "fine"

    with store.transaction():
        w[:] = 1
        assert in_fork(child) == "fine"

    def leaves():
        try:
            with store.transaction():
                return "entered"
        except pmstore.ForkedStoreError:
            return "refused"

    assert in_fork(leaves) == "refused"

    def through(error):
        try:
            with store.transaction():
                pid = os.fork()
                if pid == 0:
                    w[:] = 9
                    if error:
                        raise KeyError
        except pmstore.ForkedStoreError:
            os._exit(7)
        except KeyError:
            os._exit(8)
        except BaseException:
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert through(False) == 7
        assert through(True) == 8
    assert (w == 1).all()


def test_a_fork_beside_a_thread_that_holds_the_locks(store):
    w = store.create_array("w", 100_000)
    store.commit()
    stop = threading.Event()

    def work():
        i = 0
        while not stop.is_set():
            i += 1
            with store.transaction():
                w[:] = i
                store["i"] = i

    def child():
        try:
            store.commit()
        except pmstore.ForkedStoreError:
            pass
        with pmstore.open(f"{store.path}.{os.getpid()}") as other:
            other["a"] = 1
        return "fine"

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            assert in_fork(child) == "fine"
    finally:
        stop.set()
        thread.join()
    assert (w == store["i"]).all() and store.check().ok


def test_a_fork_does_not_keep_the_lock(open_store, medium):
    path = medium.directory / "store.pm"
    store = open_store()
    store["a"] = 1
    go_reading, go_writing = os.pipe()

    def child():
        os.write(said_writing, b"up ")
        os.close(go_writing)
        os.read(go_reading, 1)
        with pmstore.open(path, "r") as mine:
            os.write(said_writing, str(mine["a"]).encode())

    said_reading, said_writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    os.close(said_writing)
    assert os.read(said_reading, 3) == b"up "
    store.close()
    pmstore.open(path).close()
    os.close(go_writing)  # both ends are closed now: the child goes on
    os.close(go_reading)
    with os.fdopen(said_reading) as pipe:
        assert pipe.read() == "1"
    os.waitpid(pid, 0)


def spin(turns: int) -> None:
    while turns:
        turns -= 1


@pytest.fixture
def quick_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_write_that_races_with_a_commit_is_in_the_next(open_store, medium, quick_switches):
    """A thread writes to an array while a commit gathers, and lets go of it before that ends (I10)."""
    store = open_store()
    store["a"] = np.zeros(1000)  # gathered before the large one
    large = store.create_array("large", 1_000_000)
    store.commit()
    for i in range(1, 31):
        box = [store["a"]]
        commits = []

        def race(i=i, box=box, commits=commits):
            while not commits:
                pass
            spin(int(20 * 1.38**i))
            box[0][0] = i
            box.clear()  # the last reference

        thread = threading.Thread(target=race)
        thread.start()
        large += 1
        commits.append(i)
        store.commit()
        thread.join()
        store.commit()  # begins after the write
        a = store["a"]
        store.rollback()
        assert a[0] == i, "the write is in no commit"
        del a


@pytest.mark.long_on("file")
@pytest.mark.longer
def test_a_fork_while_another_thread_commits(open_store):
    store = open_store()
    a = store.create_array("a", 60_000)
    store.commit()
    stop = threading.Event()
    errors = []

    def commits():
        try:
            while not stop.is_set():
                a[:] += 1
                store.create_array("b", 1000)
                store.commit()
                del store["b"]
                store.commit()
        except BaseException:
            errors.append(traceback.format_exc())

    def in_the_child():
        signal.alarm(120)  # instead of waiting for ever
        a.sum()
        a[0] = 5
        for refused in (store.commit, store.rollback):
            with contextlib.suppress(pmstore.ForkedStoreError):
                refused()
                return 1
        if store.read("a").shape != (60_000,):
            return 3
        store.close()
        return 0

    thread = threading.Thread(target=commits)
    thread.start()
    try:
        for i in range(12 * LONGER):
            spin(i * 600)
            pid = os.fork()
            if not pid:
                code = 2
                try:
                    code = in_the_child()
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    store.close()
    with open_store(verify=True) as store:
        assert len(set(store["a"])) == 1


def test_a_fork_by_a_handler_in_a_commit(store, monkeypatch):
    """Another thread holds the transaction lock, and is not in the child, which goes on with the commit."""
    inside, go, refuse, child = threading.Event(), threading.Event(), Commits.refuse_inside, []

    def other():
        with store.transaction():
            inside.set()
            go.wait()

    def refuse_and_fork(commits, what):
        refuse(commits, what)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child.append(os.fork())
        if child == [0]:
            signal.alarm(10 * LONGER)
        go.set()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    monkeypatch.setattr(Commits, "refuse_inside", refuse_and_fork)
    try:
        store.commit()
    except pmstore.ReadOnlyStoreError:
        if child == [0]:
            os._exit(23)
        raise
    finally:
        if child == [0]:
            os._exit(1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]) == 23
