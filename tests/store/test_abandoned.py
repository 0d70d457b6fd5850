"""Transactions that nobody leaves: they are rolled back before the next operation, and never in the middle of one."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import pytest

import pmstore
from pmstore import AbandonedTransactionWarning
from pmstore._core import Core
from tests.store.test_threads_fork import in_fork
from tests.store.test_transactions import in_thread

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def _collect_by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def suspended(store, **changes):
    with store.transaction():
        for name, value in changes.items():
            store[name] = value
        yield


def abandon(store, **changes):
    """A transaction that only the garbage collector will find."""
    generator = suspended(store, **changes)
    next(generator)
    cycle = [generator]
    cycle.append(cycle)


def in_the_middle(method, action):
    """Does something at the end of the next call of a method of the core, which is in the middle of an operation."""
    original = getattr(Core, method)

    def then(core, *arguments, **options):
        setattr(Core, method, original)
        out = original(core, *arguments, **options)
        action()
        return out

    setattr(Core, method, then)


def told(match="abandoned"):
    return pytest.warns(AbandonedTransactionWarning, match=match)


@pytest.mark.parametrize("method", ["alloc", "write", "put", "get", "last"])
def test_the_collector_in_the_middle_of_an_assignment(store, method):
    w = store.create_array("w", 3)
    store.commit()
    abandon(store, a=1)
    w[:] = 1
    in_the_middle(method, gc.collect)
    store["n"] = np.arange(1000.0)
    assert w.all()  # not yet
    with told(r"opened at .*conftest.py:\d+") as caught:
        assert list(store) == ["w"]
    assert [warning.filename for warning in caught] == [__file__]
    assert not w.any() and not store.in_transaction
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store["n"] = np.arange(1000.0)
        store.commit()
    assert len(store["n"]) == 1000 and store.sequence == 2 and store.check().ok


def test_a_reference_counted_to_zero_in_the_middle_of_an_assignment(store):
    kept = [suspended(store, a=1)]
    next(kept[0])
    in_the_middle("put", kept.clear)
    store["n"] = 1
    with told():
        assert len(store) == 0


USES = {
    "commit": lambda store: store.commit(),
    "rollback": lambda store: store.rollback(),
    "transaction": lambda store: store.transaction().__enter__().sequence,
    "close": lambda store: store.close(),
    "read": lambda store: store["v"],
    "assign": lambda store: store.__setitem__("b", 2),
    "append": lambda store: store["items"].append(1),
    "figures": lambda store: store.stats(),
    "declared": lambda store: store.transaction(only=[]),
}


@pytest.mark.parametrize("use", USES)
def test_whatever_comes_next_finds_the_last_commit(open_store, use):
    store = open_store()
    store["v"] = 0
    store.create_list("items")
    w = store.create_array("w", 3)
    store.commit()
    abandon(store, a=1, v=1)
    gc.collect()
    w[:] = 1
    with told():
        USES[use](store)
    gc.collect()
    if store.in_transaction:
        assert use == "transaction"
        return
    assert not w.any()
    store.close()
    again = open_store()
    assert sorted(again) == sorted(["items", "v", "w"] + ["b"] * (use == "assign")) and again["v"] == 0


def test_what_a_thread_did_before_and_after_goes_together(store):
    """The collector runs between two statements: a rollback there would leave the second one's half to be committed."""
    v, w = store.create_array("v", 3), store.create_array("w", 3)
    store.commit()
    abandon(store)
    v[:] = 1
    gc.collect()
    w[:] = 1
    with told():
        store.commit()
    assert not v.any() and not w.any() and store.sequence == 1


def test_a_transaction_that_its_own_thread_ends_is_rolled_back_at_once(store):
    w = store.create_array("w", 3)
    store.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for end in ("close", "del"):
            generator = suspended(store, a=1)
            next(generator)
            w[:] = 1
            if end == "close":
                generator.close()
            del generator
            assert not w.any() and "a" not in store


def test_a_new_thread_does_not_join_the_transaction_of_one_that_ended(store):
    """The system gives a new thread the id of an old one, soon after its end."""
    generator = suspended(store, a=1)
    thread, _ = in_thread(generator.__next__)
    thread.join()
    ended = thread.ident

    def change():
        if threading.get_ident() == ended:
            with store.transaction():
                store["b"] = 2

    for _ in range(10_000):
        thread, _ = in_thread(change)
        if thread.ident == ended:
            break
        thread.join()
    else:
        pytest.skip("no thread got the id of the one that ended")
    with told():
        del generator
        thread.join()
        store.commit()
    assert store.read("b") == 2 and "a" not in store


def test_the_collector_of_another_thread(store):
    w = store.create_array("w", 3)
    store.commit()
    abandon(store)
    w[:] = 1
    thread, _ = in_thread(gc.collect)
    thread.join()
    assert w.all() and not store.in_transaction
    with told(), store.transaction():
        assert not w.any()
        w[:] = 2
    assert w.all() and store.sequence == 2


@pytest.mark.parametrize("use", ["commit", "rollback", "transaction", "close"])
def test_a_thread_that_waits_for_the_lock_goes_on(store, use):
    w = store.create_array("w", 3)
    store.commit()
    abandon(store)
    w[:] = 1
    asked = threading.Event()

    def other():
        asked.set()
        with pytest.warns(AbandonedTransactionWarning):
            USES[use](store)
        return not w.any()

    thread, out = in_thread(other)
    asked.wait()
    gc.collect()
    thread.join()
    assert out == [True]


def test_the_collector_while_another_thread_is_inside_an_operation(store):
    inside, go = threading.Event(), threading.Event()
    abandon(store, a=1)

    def stay():
        inside.set()
        go.wait()

    in_the_middle("alloc", stay)
    thread, out = in_thread(lambda: store.__setitem__("n", np.zeros(1000)))
    inside.wait()
    gc.collect()  # does not wait for it
    go.set()
    thread.join()
    assert out == [None]
    with told():
        assert len(store) == 0
    assert store.check().ok


@pytest.mark.parametrize("inner", [False, True])
def test_a_transaction_that_had_joined_it_is_refused(store, inner):
    """Or, if it is the inner one that is abandoned, that it had joined."""
    if not inner:
        abandon(store, a=1)
    with pytest.raises(pmstore.TransactionError), store.transaction():
        if inner:
            abandon(store, a=1)
        in_the_middle("put", gc.collect)
        store["n"] = 1
    assert len(store) == 0 and not store.in_transaction


def test_a_warning_that_is_an_error(open_store):
    store = open_store()
    w = store.create_array("w", 3)
    store.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in (store.commit, store.transaction().__enter__, lambda: store.__setitem__("b", 1), store.close):
            abandon(store, a=1)
            gc.collect()
            w[:] = 1
            with pytest.raises(AbandonedTransactionWarning):
                use()
            assert not w.any() and not store.in_transaction
            thread, out = in_thread(lambda: None if store.closed else store.commit())
            thread.join()
            assert out == [None]
        assert store.closed
        assert list(open_store()) == ["w"]


def test_a_rollback_that_is_interrupted_is_done_again_and_told_by_the_next(store):
    abandon(store, a=1)
    gc.collect()

    def interrupt():
        raise KeyboardInterrupt

    in_the_middle("rollback", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store["b"] = 1
    with told():
        assert len(store) == 0


def test_a_transaction_of_a_finalizer_can_not_begin_before_the_rollback(store):
    errors = []

    class Finalizer:
        def __del__(self):
            try:
                with store.transaction():
                    raise AssertionError
            except pmstore.TransactionError as error:
                errors.append(str(error))

    def collect():
        gc.collect()
        Finalizer()

    abandon(store, a=1)
    in_the_middle("put", collect)
    store["n"] = 1
    assert len(errors) == 1 and "rolled back first" in errors[0]
    with told():
        assert len(store) == 0
    with store.transaction():
        store["n"] = 1
    assert store["n"] == 1


def test_a_store_that_is_closed_by_its_with(store):
    abandon(store, a=1)
    gc.collect()
    with told(), pytest.raises(KeyError), store:
        raise KeyError
    assert store.closed


def test_a_forked_child_is_silent(store):
    abandon(store, a=1)

    def child():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gc.collect()
            with pytest.raises(pmstore.ForkedStoreError):
                store.commit()
        return "fine"

    assert in_fork(child) == "fine"
    gc.collect()
    assert in_fork(child) == "fine"
    with told():
        assert len(store) == 0


@pytest.mark.parametrize("collected, errors", [(False, False), (True, False), (True, True)])
def test_at_the_end_of_the_interpreter(medium, child, collected, errors):
    path = medium.directory / "store.pm"
    process = child(
        """
        import gc, sys, warnings, pmstore
        gc.disable()
        if sys.argv[3] == "True":
            warnings.simplefilter("error")
        store = pmstore.open(sys.argv[1])
        def suspended():
            with store.transaction():
                store["a"] = 1
                yield
        cycle = [suspended()]
        next(cycle[0])
        cycle.append(cycle)
        if sys.argv[2] == "True":
            del cycle
            gc.collect()
        """,
        path,
        collected,
        errors,
    )
    _, error = process.process.communicate(timeout=60)
    assert process.process.returncode == 0 and error.count("Traceback") == errors
    kind = "AbandonedTransactionWarning" if collected else "UncommittedChangesWarning"
    assert error.count("Warning: ") == 1 and kind in error
    with pmstore.open(path) as store:
        assert len(store) == 0


def test_the_lock(store):
    lock = store._catalog.lock
    with lock, lock:
        assert lock.acquire() and lock.owned()
        lock.release()
        thread, out = in_thread(lambda: (lock.owned(), lock.acquire(False), lock.release()))
        thread.join()
        assert isinstance(out[0], RuntimeError)
    with pytest.raises(RuntimeError):
        lock.release()
    thread, out = in_thread(lambda: (lock.acquire(False), lock.release()))
    thread.join()
    assert out == [(True, None)]
