"""Derived arrays and threads: a function runs while other threads, and forked processes, use the store."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from tests.store.test_transactions import in_thread
from tests.support.derivations import CALLS, doubled, table

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()
    return CALLS


GATES: list[threading.Event] = []


def waits(x):
    CALLS.append("waits")
    GATES[0].set()
    assert GATES[1].wait(30)
    return x * 2


@pytest.fixture
def gates(monkeypatch):
    monkeypatch.setattr(f"{__name__}.GATES", [threading.Event(), threading.Event()])
    return GATES


def test_threads(store, gates, calls):
    x = table(store)
    y = store.derive("y", waits, "x", policy="store")
    first, given = in_thread(lambda: y.value)
    assert gates[0].wait(30)
    store["other"] = 1  # the store isn't held up by a function that runs
    store.commit()
    second, also = in_thread(lambda: store["y"])
    gates[1].set()
    first.join(), second.join()
    assert given[0] is also[0] and calls == ["waits"]
    gates[0].clear(), gates[1].clear()
    x += 1
    third, failed = in_thread(lambda: y.value)
    assert gates[0].wait(30)
    x += 1
    gates[1].set()
    third.join()
    assert "an input changed while" in str(failed[0])
    assert y[0, 1] == 6


@pytest.mark.parametrize("policy", ["store", "auto"])
@pytest.mark.parametrize("how", ["replace", "rollback"])
def test_a_name_that_has_gone_while_its_function_ran(store, gates, policy, how):
    """The value is not stored, and the declaration does not come back."""
    table(store)
    store.commit()
    y = store.derive("y", waits, "x", policy=policy, verify="hash")
    thread, _ = in_thread(lambda: y.value)
    assert gates[0].wait(30)
    if how == "rollback":
        store.rollback()
    else:
        store.commit()
        del store["y"]
        store["y"] = np.full(3, 7.0)
        store.commit()
    gates[1].set()
    thread.join()
    store.commit()
    assert store["y"].tolist() == [7, 7, 7] if how == "replace" else "y" not in store
    assert store.check().ok, store.check()


def test_forks(store, gates):
    """The value in a child is that of the last commit."""
    x = table(store)
    y = store.derive("y", waits, "x")
    z = store.derive("z", doubled, "x")
    store.commit()
    x += 1
    thread, _ = in_thread(lambda: y.value)
    assert gates[0].wait(30)
    pid = os.fork()  # while another thread computes
    if not pid:
        signal.alarm(120)
        gates[1].set()
        try:
            assert y[0, 1] == z[0, 1] == 2 == x[0, 1]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    gates[1].set()
    thread.join()
    assert y[0, 1] == 4


def total(x, y):
    CALLS.append("total")
    if len(GATES) > 2:  # there is a thread that waits for this one
        GATES.pop().set()
        GATES[1].wait(0.5)
    return np.array([x.sum(), y.sum()])


def test_I15_a_refresh_in_another_thread_waits(store, open_store, gates):
    """Otherwise one input would be of the old commit, and the other one of the new one."""
    table(store), table(store, "y")
    store.derive("z", total, "x", "y")
    store.commit()
    with open_store(mode="r") as reader:
        z = reader.derive("z", total, "x", "y")
        store["x"][0] += 1
        store["y"][0] += 1
        store.commit()
        begins = threading.Event()
        gates.append(begins)

        def refresh():
            assert begins.wait(30)
            reader.refresh()
            gates[1].set()

        thread, failed = in_thread(refresh)
        assert z.value.tolist() == [66, 66]
        thread.join()
        assert failed == [None]
        assert z.value.tolist() == [70, 70]
