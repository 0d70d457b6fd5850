"""Opening a store that this process has open, as a cell of a notebook does that is run again."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recorder
from tests.conftest import Medium

Open = Callable[..., pmstore.Store]


@pytest.fixture
def path(medium: Medium) -> Path:
    return medium.directory / "store.pm"


def free(path: Path) -> bool:
    """Whether no store is open for writing."""
    try:
        pmstore.open(path, "r", exclusive=True).close()
    except pmstore.StoreLockedError:
        return False
    return True


@pytest.mark.parametrize("first", ["a", "w", "x"])
def test_a_store_is_closed_when_each_opening_was(path: Path, first: Any) -> None:
    store = pmstore.open(path, first)
    w = store.create_array("w", 3)
    for mode in ("a", "r+"):
        assert pmstore.open(path, mode) is store
    assert store.openings == 3 and store.mode == first
    for left in (2, 1):
        w += 1
        store.close()
        assert store.openings == left and not free(path) and w.flags.writeable
        assert pmstore.open(path, "r")["w"][0] == 3 - left  # closing commits
    w += 1
    store.close()
    assert store.closed and store.openings == 0 and free(path)
    store.close()
    again = pmstore.open(path)
    assert again is not store and again["w"].tolist() == [3, 3, 3]
    again.close()


def test_a_with_statement_closes_its_own_opening(path: Path) -> None:
    with pmstore.open(path) as store:
        store["a"] = 1
        with pmstore.open(path) as same:
            same["b"] = 2
        assert not store.closed and store.sequence == 1
        store["c"] = 3
        with pytest.raises(ZeroDivisionError), pmstore.open(path) as same:
            same["b"] = 1 // 0
        assert dict(store) == {"a": 1, "b": 2}  # everything since the last commit, as a transaction does
        store["d"] = 4
    assert free(path)
    with pmstore.open(path) as store:
        assert dict(store) == {"a": 1, "b": 2, "d": 4}


def test_inside_a_transaction_it_joins_the_transaction(path: Path) -> None:
    with pmstore.open(path) as store:
        with store.transaction():
            store["a"] = 1
            with pmstore.open(path) as same:
                same["b"] = 2
            pmstore.open(path).close()
            assert store.sequence == 0 and store.openings == 1
            with pytest.raises(pmstore.TransactionError, match="inside a transaction"):
                store.close()
        assert store.sequence == 1 and dict(store) == {"a": 1, "b": 2}
        with pytest.raises(pmstore.TransactionError, match="inner"), store.transaction():
            store["a"] = 3
            with pytest.raises(KeyError), pmstore.open(path) as same:
                same["b"] = 4
                raise KeyError
        assert dict(store) == {"a": 1, "b": 2} and store.openings == 1


def test_each_snapshot_is_one_of_its_own(path: Path) -> None:
    with pmstore.open(path) as store:
        store["a"] = 1
        store.commit()
        one = pmstore.open(path, "r")
        store["a"] = 2
        store.commit()
        two = pmstore.open(path, "r")
        assert one is not two and (one["a"], two["a"]) == (1, 2)
        one.close()
        assert two["a"] == 2 and not store.closed


def test_options_have_to_agree(path: Path, medium: Medium) -> None:
    other = "file" if medium.name == "memory" else "memory"
    store = pmstore.open(path, durability="async", max_size=1 << 24)
    options: dict[str, Any]
    for options, text in (
        ({}, "durability 'async', not 'sync'"),
        ({"durability": "async", "sync_interval": 0}, "sync_interval 0.1, not 0.0"),
        ({"durability": "async", "max_size": 1 << 25}, f"max_size {1 << 24}, not {1 << 25}"),
        ({"durability": "async", "media": other}, f"media '{medium.name}', not '{other}'"),
    ):
        with pytest.raises(
            pmstore.StoreLockedError, match=f"test_opened_again.*with {text}. Close it there first"
        ) as caught:
            pmstore.open(path, **options)
        assert caught.value.pid == os.getpid()
    for options in ({}, {"media": medium.name}, {"max_size": 1 << 24}, {"verify": True}, {"exclusive": True}):
        assert pmstore.open(path, durability="async", **options) is store
    assert store.openings == 6
    while store.openings:
        store.close()


def test_a_file_that_took_the_place_is_another_store(path: Path) -> None:
    with pmstore.open(path) as store:
        store["a"] = 1
        path.rename(path.with_name("moved"))
        with pmstore.open(path) as other:
            assert other is not store and len(other) == 0
        assert pmstore.open(path.with_name("moved")) is store
        store.close()


def test_the_last_reference_drops_all_openings(path: Path) -> None:
    store = pmstore.open(path)
    assert pmstore.open(path) is store
    gone = weakref.ref(store)
    with pytest.warns(ResourceWarning):
        del store
        gc.collect()
    assert gone() is None and free(path)


def test_a_store_that_failed_is_closed_and_opened(tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    store = pmstore.open(path, media="trace:file")
    assert pmstore.open(path) is store
    store["a"] = 1
    store._catalog.core.trace.fail(lib.PM_OPERATION_WRITE | lib.PM_OPERATION_SYNC, 1, errno.EIO, lasting=True)
    with pytest.raises(pmstore.StoreIOError):
        store.commit()
    for _ in range(2):
        with pytest.raises(pmstore.FailedStoreError, match="close it and open it again"):
            pmstore.open(path)
    with pytest.raises(pmstore.FailedStoreError):
        store.close()
    assert store.closed and free(path)
    with pmstore.open(path) as store:
        assert dict(store) == {}


def test_what_is_recorded_is_opened_again_as_without_a_recorder(path: Path, medium: Medium) -> None:
    with Recorder(path, medium.name) as recorder:
        store = pmstore.open(path)
        with pmstore.open(path) as same:
            same["a"] = 1
        assert same is store and store.recorded
        store.close()
    assert set(recorder.recording.states) == {0, 1}
    with pmstore.open(path), Recorder(path, medium.name):
        with pytest.raises(pmstore.StoreLockedError, match="another trace"):
            pmstore.open(path)


def test_threads_work_in_one_store(path: Path) -> None:
    """A thread that comes while another one opens or closes the store waits for that."""
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(20):
            with pmstore.open(path) as store, store.transaction():
                store["n"] = store.get("n", 0) + 1
                store.setdefault("w", np.zeros(5000))[:] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert free(path)
    with pmstore.open(path, verify=True) as store:
        assert store["n"] == 80 and (store["w"] == 80).all()


@pytest.mark.parametrize("mode", ["a", "r"])
def test_what_a_store_has_given_keeps_it_open(path: Path, mode: Any) -> None:
    with pmstore.open(path, "x") as store:
        store.update({"a": 1, "g/b": 2, "losses": [1.5]})
        store.create_list("log").append(1.5)
        store.attrs["units"] = store.attrs("a")["units"] = "m"
    assert [name for name in pmstore.open(path, mode)] == ["a", "g/b", "log", "losses"]  # noqa: C416
    assert [name for name in pmstore.open(path, mode).group("g")] == ["b"]  # noqa: C416
    assert pmstore.open(path, mode)["log"][-1] == 1.5
    assert pmstore.open(path, mode).attrs["units"] == pmstore.open(path, mode).attrs("a")["units"] == "m"
    log = pmstore.open(path, mode)["log"]
    assert list(log) == [1.5] and not (mode == "a" and free(path))
    del log
    gc.collect()
    assert free(path)
