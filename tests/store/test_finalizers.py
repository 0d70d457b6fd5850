"""Finalizers and signal handlers in the middle of an operation: they change nothing there, and no thread hangs."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.store.test_abandoned import in_the_middle

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def _collect_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def _ends() -> Iterator[None]:
    with ends():
        yield


@contextlib.contextmanager
def ends() -> Iterator[None]:
    """An error if what is inside waits for ever."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Finalizer:
    """An object in a cycle, so that only the collector finds it. errors: those of the action."""

    def __init__(self, action: Callable[[], Any], errors: list[str]) -> None:
        self.me, self.action, self.errors = self, action, errors

    def __del__(self) -> None:
        try:
            self.action()
        except pmstore.Error as error:
            self.errors.append(f"{type(error).__name__}: {error}")


def transact(store: pmstore.Store) -> None:
    with store.transaction():
        pass


ACTIONS = {
    "commit": lambda store: store.commit(),
    "rollback": lambda store: store.rollback(),
    "transaction": transact,
    "close": lambda store: store.close(),
    "assign": lambda store: store.__setitem__("other", 1),
    "delete": lambda store: store.__delitem__("kept"),
    "read": lambda store: store["kept"],
    "derived": lambda store: store["sum"],
}


@pytest.mark.parametrize("method", ["alloc", "write", "put", "get", "commit"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_finalizer_can_not_use_the_store_in_the_middle_of_an_operation(
    store: pmstore.Store, action: str, method: str
) -> None:
    in_the_middle_of_an_operation(store, action, method)


def in_the_middle_of_an_operation(store: pmstore.Store, action: str, method: str) -> None:
    store["kept"] = np.arange(9)
    store.derive("sum", sum, "kept")
    store.commit()
    errors: list[str] = []
    Finalizer(lambda: ACTIONS[action](store), errors)
    in_the_middle(method, gc.collect)
    store["new"] = np.arange(1000.0)
    store.commit()
    assert len(errors) == 1 and "TransactionError: the garbage collector runs a finalizer in the middle" in errors[0]
    assert set(store) == {"kept", "sum", "new"} and len(store["new"]) == 1000 and store.check().ok
    assert store.sequence == 2
    ACTIONS[action](store)  # the program can


def test_a_finalizer_between_operations_can_use_the_store(store: pmstore.Store) -> None:
    errors: list[str] = []
    Finalizer(lambda: (store.__setitem__("x", 1), store.append("rows", [2]), store.commit()), errors)
    store.create_array("rows", (0,), maxshape=(None,))
    gc.collect()
    assert not errors and store["x"] == 1 and list(store["rows"]) == [2] and store.sequence == 1


def test_a_finalizer_of_another_store(store: pmstore.Store) -> None:
    with pmstore.open(":memory:") as other:
        errors: list[str] = []
        Finalizer(lambda: (other.__setitem__("x", 1), other.commit()), errors)
        in_the_middle("put", gc.collect)
        store["n"] = 1
        assert not errors and other["x"] == 1 and other.sequence == 1


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("action", ["commit", "transaction", "close"])
def test_a_finalizer_does_not_wait_for_a_thread_that_waits_for_it(open_store: Any, action: str) -> None:
    """It runs in an operation, for whose end a transaction of another thread waits."""
    with open_store() as store, contextlib.ExitStack() as stack:
        if action == "close":
            stack.enter_context(pmstore.open(store.path))  # so that a close by another thread would only give this back
        began = threading.Event()

        def other() -> None:
            with store.transaction():
                began.set()
                store["m"] = 1

        thread = threading.Thread(target=other)
        errors: list[str] = []

        def finalize() -> None:
            thread.start()
            began.wait()
            ACTIONS[action](store)

        Finalizer(finalize, errors)
        in_the_middle("put", gc.collect)
        store["n"] = 1
        thread.join()
        assert len(errors) == 1 and "in the middle of an operation" in errors[0]
        assert store["n"] == store["m"] == 1
        assert store.openings == 1


def test_a_transaction_of_a_finalizer_does_not_end_that_of_the_program(store: pmstore.Store) -> None:
    """It is refused, and not taken for an inner one that fails."""
    errors: list[str] = []

    def finalize() -> None:
        with store.transaction():
            store["log"] = 1

    Finalizer(finalize, errors)
    with store.transaction():
        store["paid"] = 100
        in_the_middle("put", gc.collect)
        store["n"] = 1
    assert dict(store) == {"paid": 100, "n": 1} and store.sequence == 1
    assert len(errors) == 1 and "runs a finalizer in the middle" in errors[0]


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("method", ["get", "splice"])
def test_a_store_of_which_only_a_list_is_left_stays_open(tmp_path: Path, method: str) -> None:
    """It would be closed in the middle of an operation of the list."""
    path = tmp_path / "store.pm"

    def of_a_dropped_store() -> Any:
        store = pmstore.open(path)
        found = store.create_list("l")
        store.commit()
        store["paid"] = 100
        cycle = [store]
        cycle.append(cycle)  # type: ignore[arg-type]
        return found

    found = of_a_dropped_store()
    in_the_middle(method, gc.collect)
    found.append(5)
    assert list(found) == [5]
    with pytest.warns(pmstore.UncommittedChangesWarning, match="of 2 names since its last commit are lost"):
        del found
        gc.collect()
    with pmstore.open(path) as again:
        assert list(again["l"]) == [] and "paid" not in again


IN_DOUBLED: list[Callable[[], None]] = []  # what it does once


def doubled(x: Any) -> Any:
    if IN_DOUBLED:
        IN_DOUBLED.pop()()
    return x * 2.0


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("action", ["commit", "rollback", "close"])
def test_a_handler_in_the_function_of_a_derived_array(open_store: Any, action: str) -> None:
    """Another thread waits in a transaction for the array."""
    errors = []
    with open_store() as store:
        again = pmstore.open(store.path)  # so that close() gives this opening back
        waits = threading.Event()

        def other() -> None:
            with store.transaction():
                waits.set()
                store["sum"] = float(store["derived"].sum())

        thread = threading.Thread(target=other)

        def meanwhile() -> None:
            thread.start()
            waits.wait()
            signal.raise_signal(signal.SIGUSR1)

        def handler(*_: object) -> None:
            try:
                ACTIONS[action](store)
            except pmstore.TransactionError as error:
                errors.append(str(error))

        store["x"] = np.arange(4)
        derived = store.derive("derived", doubled, "x")
        store.commit()
        IN_DOUBLED.append(meanwhile)
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            assert derived[3] == 6
        finally:
            signal.signal(signal.SIGUSR1, before)
        thread.join()
        assert len(errors) == 1 and "can't wait there for another thread" in errors[0]
        assert store["sum"] == 12.0
        if action != "close":
            again.close()


def test_an_opening_that_a_finalizer_gives_back(open_store: Any) -> None:
    """It does not commit: the other openings go on with what is pending."""
    with open_store() as store:
        again = pmstore.open(store.path)
        errors: list[str] = []
        Finalizer(again.close, errors)
        in_the_middle("put", gc.collect)
        store["n"] = 1
        assert store.openings == 1 and store.sequence == 0 and len(errors) == 1


def test_a_signal_handler_in_the_middle_of_reading_does_not_wait_for_a_thread_that_waits(store: pmstore.Store) -> None:
    with ends():
        handled_in_the_middle(store)


def handled_in_the_middle(store: pmstore.Store) -> None:
    store["kept"] = [1, 2]
    store.commit()
    began = threading.Event()
    errors = []

    def other() -> None:
        with store.transaction():
            began.set()
            store["m"] = 1

    thread = threading.Thread(target=other)

    def handler(*_: object) -> None:
        if thread.ident is None:
            thread.start()
            began.wait()
        try:
            store.commit()
        except pmstore.TransactionError as error:
            errors.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        in_the_middle("get", lambda: signal.raise_signal(signal.SIGUSR1))
        assert store["kept"] == [1, 2]
        thread.join()
        assert len(errors) == 1 and "can't wait there for another thread" in errors[0]
        in_the_middle("get", lambda: signal.raise_signal(signal.SIGUSR1))
        store["pending"] = 1
        assert store["kept"] == [1, 2]
        assert len(errors) == 1 and not store._has_pending()  # no thread has a transaction
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_collection_may_close_a_store_while_others_are_told_of_the_process(
    store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pmstore._store import held

    others = [pmstore.open(tmp_path / f"{n}.pm") for n in range(3)]
    cycle: list[Any] = [others.pop(1)]
    cycle.append(cycle)
    del cycle
    real, told = held._label, []

    def label(*about: Any) -> None:
        told.append(about)
        gc.collect()
        real(*about)

    monkeypatch.setattr(held, "_label", label)
    held.tell_pid()  # as whatever closes a descriptor of a store's file does
    assert len({fd for fd, _ in told}) == 1 + len(others)
    for name in ("0.pm", "1.pm", "2.pm"):
        pmstore.open(tmp_path / name).close()
