"""A store inside a dataset travels to forked and spawned workers as a reader of the same path."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium, run_in_fork
from tests.support.rows import Rows

Open = Callable[..., pmstore.Store]

X = np.arange(40.0).reshape(10, 4)


def fill(store: pmstore.Store) -> Rows:
    store.create_array("data/X", X.shape, fill_value=X, writeable=False)
    store["data/y"] = np.arange(10) % 3
    store.commit()
    return Rows(store)


def worker(rows: Rows, numbers: list[int], out: Any) -> None:
    out.put([(x.tolist(), y) for x, y in (rows[i] for i in numbers)])


@pytest.mark.parametrize("mode", ["a", "r"])
def test_forked_workers_read_the_dataset(open_store: Open, mode: str) -> None:
    """torch's DataLoader starts its workers in this way."""
    writer = open_store()
    rows = fill(writer)
    if mode == "r":
        rows = Rows(open_store(mode="r"))
        assert len(rows) == 10
    fork = multiprocessing.get_context("fork")
    out = fork.SimpleQueue()
    workers = [fork.Process(target=worker, args=(rows, list(range(k, 10, 2)), out)) for k in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for one in workers:
            one.start()
    found = [row for _ in workers for row in out.get()]
    for one in workers:
        one.join()
    assert sorted(found) == [(x.tolist(), i % 3) for i, x in enumerate(X)]
    assert writer.mode == "a" and writer.check().ok
    writer["data/y"][:] = 7
    writer.commit()


def test_a_spawned_worker_reads_the_dataset(open_store: Open, child: Callable[..., Any], medium: Medium) -> None:
    """What reaches it is the path: never contents, and nothing that is not committed."""
    store = open_store()
    rows = fill(store)
    store["data/y"][:] = 9
    large = pickle.dumps(rows)
    assert len(large) < 500
    (medium.directory / "pickle").write_bytes(large)
    code = """
    import pickle, sys, numpy as np, pmstore
    rows = pickle.load(open(sys.argv[1], "rb"))
    assert rows.data.store is rows.store and rows.store.mode == "r" and rows.store.path == sys.argv[2]
    print([rows[i][1] for i in range(len(rows))], rows[3][0].tolist(), flush=True)
    try:
        rows.store["new"] = 1
    except pmstore.ReadOnlyStoreError:
        input()
    rows.store.refresh()
    print(rows[0][1])
    """
    other = child(code, medium.directory / "pickle", store.path)
    assert other.line() == f"{[i % 3 for i in range(10)]} {X[3].tolist()}"
    store.commit()
    other.go()
    assert other.end() == "9\n"


def test_a_copy_is_the_store_and_a_pickle_is_a_snapshot_of_its_own(open_store: Open) -> None:
    store = open_store()
    rows = fill(store)
    again = copy.deepcopy(rows)
    assert again.store is store and again.data == rows.data
    arrived = pickle.loads(pickle.dumps([rows, store, store.group("data/deep")]))
    assert arrived[0].store is arrived[1] is arrived[2].store is not store and arrived[2].name == "data/deep"
    with arrived[1] as snapshot:
        assert snapshot.mode == "r" and snapshot.openings == 1
        assert pickle.loads(pickle.dumps(snapshot))["data/y"].tolist() == [i % 3 for i in range(10)]
    store.close()
    with pytest.raises(pmstore.ClosedStoreError, match="before it is sent"):
        pickle.dumps(rows)


def test_what_a_forked_child_finds(open_store: Open, medium: Medium) -> None:
    store = open_store()
    rows = fill(store)
    y = rows.data["y"]
    y[:] = 5

    def looks() -> None:
        assert str(store).count("\n") == 3 and "mode r" in repr(store)
        assert y.tolist() == [5] * 10 and rows.data["y"].tolist() == [i % 3 for i in range(10)]
        assert store.read(("data/X", np.s_[2:3])).tolist() == X[2:3].tolist() and store.stats().sequence == 1
        assert store.written and store.refresh() == 1 and store.wait(timeout=0).event == "timeout"
        assert pickle.loads(pickle.dumps(store)).sequence == 1
        run_in_fork(looks_again)
        with pytest.raises(ZeroDivisionError), store:
            raise ZeroDivisionError
        assert store.closed
        y[:] = 6  # as it was before the fork

    def looks_again() -> None:
        assert dict(rows.data)["y"].tolist() == [i % 3 for i in range(10)]
        with store:
            pass
        assert store.closed

    def closes_at_once() -> None:
        store.close()
        assert store.closed
        with pytest.raises(pmstore.ClosedStoreError):
            store["data/y"]

    def outlives() -> None:
        os.read(reading, 1)
        assert rows.data["y"].tolist() == [5] * 10
        with pytest.raises(pmstore.ForkedStoreError, match=r"pmstore.open\(path\) opens it anew here"):
            store["new"] = 1
        with pmstore.open(store.path) as mine:
            mine["new"] = 1
        assert store.refresh() == 3 and store["new"] == 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run_in_fork(looks)
        run_in_fork(closes_at_once)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                outlives()
                status = 0
            finally:
                os._exit(status)
        store.close()
        os.write(writing, b"!")
        assert os.waitpid(pid, 0)[1] == 0
    with pmstore.open(store.path) as store:
        assert store["new"] == 1


def test_a_child_of_a_store_whose_path_names_something_else(open_store: Open, medium: Medium) -> None:
    store = open_store()
    fill(store)

    def refused(error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            store["data/y"]
        with pytest.raises(pmstore.ForkedStoreError):
            store.commit()

    (medium.directory / "store.pm").rename(medium.directory / "moved.pm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run_in_fork(refused, pmstore.StoreNotFoundError, "no other process can open")
        with pmstore.open(store.path):
            run_in_fork(refused, pmstore.StaleSnapshotError, "another store has taken the place")
