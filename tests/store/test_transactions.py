"""Transactions: kept changes, rollbacks, and waits for each other. Interrupts: see test_interrupts.py."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of


class Stop(Exception):
    pass


def reopened(open_store, store):
    store.rollback()
    store.close()
    return open_store(mode="r")


def test_leaving_commits(open_store):
    store = open_store()
    with store.transaction() as entered:
        assert entered is store and store.in_transaction
        store["a"] = 1
        w = store.create_array("w", 3)
        w[:] = 2
    assert not store.in_transaction and store.sequence == 1
    again = reopened(open_store, store)
    assert again["a"] == 1 and again["w"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_takes_everything_back_in_place(store, error):
    w = store.create_array("w", (100, 100), fill_value=1)
    gone = store.create_array("gone", 1000, fill_value=2)
    swapped = store.create_array("swapped", 1000, fill_value=3)
    store["v"], store["text"] = 1, "x" * 5000
    items = store.create_list("items")
    items.append(1)
    store.commit()
    sequence = store.sequence
    address = address_of(w)
    with pytest.raises(error):
        with store.transaction():
            w += 5
            gone[:] = 9
            del store["gone"]
            store["swapped"] = np.zeros(5)
            store["v"], store["text"] = 2, "y" * 6000
            items.append(2)
            new = store.create_array("new", 1000, fill_value=4)
            store["new value"] = 1
            raise error
    assert (w == 1).all() and address_of(w) == address and store["w"] is w
    assert (gone == 2).all() and store["gone"] is gone
    assert (swapped == 3).all() and store["swapped"] is swapped
    assert (store["v"], store["text"]) == (1, "x" * 5000) and items == [1]
    assert "new" not in store and "new value" not in store
    assert (new == 4).all()  # detached: it keeps its last bytes
    new += 1
    assert store.sequence == sequence and not store.in_transaction
    gone += 1
    swapped += 1
    store.commit()
    assert (store["gone"] == 3).all() and (store["swapped"] == 4).all() and store.check().ok


def test_writes_before_it_began_belong_to_it(store):
    w = store.create_array("w", 3)
    store.commit()
    w[:] = 1
    with pytest.raises(Stop):
        with store.transaction():
            raise Stop
    assert not w.any()


def test_commit_and_rollback_by_hand(open_store):
    store = open_store()
    w = store.create_array("w", 3)
    store.commit()
    w[:] = 1
    store.commit()
    w[:] = 2
    store["x"] = 1
    store.rollback()
    assert w.tolist() == [1, 1, 1] and "x" not in store
    assert reopened(open_store, store)["w"].tolist() == [1, 1, 1]


def test_by_hand_inside_a_transaction(store):
    w = store.create_array("w", 3)
    store.commit()
    with store.transaction():
        w[:] = 1
        for use in (store.commit, store.rollback, store.close):
            with pytest.raises(pmstore.TransactionError, match="inside a transaction"):
                use()
        with store.transaction(), pytest.raises(pmstore.TransactionError):
            store.commit()
        assert w.all() and store.sequence == 1
    assert store.sequence == 2
    store.commit()


def test_inner_ones_join(store):
    w = store.create_array("w", 3)
    with store.transaction():
        w[:] = 1
        with store.transaction():
            w[:] = 2
        assert store.sequence == 0
        w[:] = 3
    assert store.sequence == 1 and w.tolist() == [3, 3, 3]


def test_an_exception_out_of_an_inner_one_dooms_the_outer(store):
    w = store.create_array("w", 3)
    store.commit()
    with pytest.raises(pmstore.TransactionError, match="inner"):
        with store.transaction():
            w[:] = 1
            with contextlib.suppress(Stop), store.transaction():
                w[:] = 2
                raise Stop
            w[:] = 3
    assert not w.any()
    with pytest.raises(Stop):  # the error of the outer one is its own
        with store.transaction():
            with contextlib.suppress(KeyError), store.transaction():
                raise KeyError
            raise Stop
    with store.transaction():
        w[:] = 4
    assert w.tolist() == [4, 4, 4]


def test_an_exception_caught_inside_does_not_matter(store):
    with store.transaction():
        with store.transaction():
            with contextlib.suppress(Stop):
                raise Stop
            store["a"] = 1
    assert store["a"] == 1


def test_one_object_is_for_one_with_statement(store):
    transaction = store.transaction()
    with transaction, pytest.raises(pmstore.TransactionError, match="its own"):
        transaction.__enter__()
    with transaction:  # left, so that it may be entered again
        store["b"] = 1
        with pytest.raises(pmstore.TransactionError, match="its own"), transaction:
            raise AssertionError
        assert store.in_transaction
    assert store.sequence == 1 and store["b"] == 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.transaction())
        store["a"] = 1
    assert store.sequence == 2
    with pytest.raises(Stop), contextlib.ExitStack() as stack:
        stack.enter_context(store.transaction())
        store["a"] = 2
        raise Stop
    assert store["a"] == 1


def test_a_read_only_store_has_none(open_store):
    open_store().close()
    store = open_store(mode="r")
    with pytest.raises(pmstore.ReadOnlyStoreError):
        with store.transaction():
            raise AssertionError
    for use in (store.commit, store.rollback):
        with pytest.raises(pmstore.ReadOnlyStoreError):
            use()


def test_a_commit_without_space_leaves_what_is_pending(open_store):
    store = open_store(max_size=1 << 20)
    w = store.create_array("w", 20_000)
    store.commit()
    w[:] = 1
    store["v"] = 1
    with pytest.raises(pmstore.OutOfSpaceError):
        with store.transaction():
            for i in range(100):
                store[f"x{i}"] = np.ones(20_000)
    assert not w.any() and len(store) == 1  # an exception in the block, and so rolled back
    store["small"] = 1
    store.commit()
    assert store.check().ok


def test_a_store_closed_by_its_with_inside_a_transaction(store):
    with pytest.raises(Stop):
        with store.transaction():
            with store:
                raise Stop
    assert store.closed and not store.in_transaction


def test_two_stores(store, open_store):
    other = open_store("other.pm")
    with pytest.raises(Stop):
        with store.transaction():
            store["a"] = 1
            with other.transaction():
                other["a"] = 1
            raise Stop
    assert "a" not in store and other["a"] == 1 and other.sequence == 1


# ---- left out of order


def changing(store, name, error=None):
    with store.transaction():
        store[name] = 1
        yield
        if error is not None:
            raise error


@pytest.mark.parametrize("first, second", [(None, None), (None, Stop), (Stop, None), (Stop, Stop)])
def test_generators_that_leave_out_of_order(store, first, second):
    store.commit()
    one, two = changing(store, "one", first), changing(store, "two", second)
    next(one), next(two)
    with pytest.raises(first or pmstore.TransactionError, match=None if first else "a yield inside"):
        next(one)
    assert store.in_transaction and "one" in store
    with pytest.raises(pmstore.TransactionError, match="out of order"), store.transaction():
        raise AssertionError
    with pytest.raises(second or pmstore.TransactionError, match=None if second else "a yield inside"):
        next(two)
    assert not store.in_transaction and len(store) == 0 and store.sequence == 0
    with store.transaction():
        store["a"] = 1
    assert store.sequence == 1


def test_generators_that_leave_in_order(store):
    one, two = changing(store, "one"), changing(store, "two")
    next(one), next(two)
    assert next(two, "end") == next(one, "end") == "end"
    assert dict(store) == {"one": 1, "two": 1} and store.sequence == 1


def test_a_generator_that_leaves_beside_an_inner_transaction(store):
    generator = changing(store, "one")
    next(generator)
    with pytest.raises(pmstore.TransactionError, match="out of order"):
        with store.transaction(), store.transaction():
            store["a"] = 1
            with pytest.raises(pmstore.TransactionError, match="out of order"):
                next(generator)
    assert not store.in_transaction and len(store) == 0


def test_tasks_that_leave_out_of_order(store):
    async def main():
        entered, left = asyncio.Event(), asyncio.Event()

        async def one():
            with store.transaction():
                store["one"] = 1
                await entered.wait()

        async def two():
            with store.transaction():
                store["two"] = 1
                entered.set()
                await left.wait()
                raise Stop

        tasks = asyncio.create_task(one()), asyncio.create_task(two())
        out = await asyncio.gather(tasks[0], return_exceptions=True)
        left.set()
        return out + await asyncio.gather(tasks[1], return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [pmstore.TransactionError, Stop]
    assert not store.in_transaction and len(store) == 0


# ---- threads


def in_thread(function):
    """A started thread, and a list that gets what the function returns or raises."""
    out = []

    def run():
        try:
            out.append(function())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


@pytest.mark.parametrize("use", ["transaction", "commit", "rollback", "close"])
def test_other_threads_wait(store, use):
    order = []
    asked = threading.Event()

    def other():
        assert not store.in_transaction
        asked.set()
        if use == "transaction":
            with store.transaction():
                order.append("other")
        else:
            getattr(store, use)()
            order.append("other")

    with store.transaction():
        thread, out = in_thread(other)
        asked.wait()
        store["a"] = 1
        order.append("mine")
    thread.join()
    assert out == [None] and order == ["mine", "other"]
    assert store.closed == (use == "close")


def test_a_store_closed_while_one_waits(store):
    asked = threading.Event()

    def other():
        asked.set()
        with store.transaction():
            raise AssertionError

    with store._commits.lock.inner:  # as close() does
        thread, out = in_thread(other)
        asked.wait()
        store.close()
    thread.join()
    assert isinstance(out[0], pmstore.ClosedStoreError)


def test_names_of_other_threads_do_not_wait(store):
    with store.transaction():
        thread, out = in_thread(lambda: store.__setitem__("a", 1))
        thread.join()
        assert out == [None]
    assert store["a"] == 1


def test_a_generator_closed_by_another_thread(store):
    def steps():
        with store.transaction():
            store["a"] = 1
            yield

    generator = steps()
    next(generator)
    thread, out = in_thread(generator.close)
    thread.join()
    assert out == [None] and not store.in_transaction
    with pytest.warns(pmstore.AbandonedTransactionWarning):
        assert "a" not in store
    with store.transaction():
        store["a"] = 2
    thread, out = in_thread(store.commit)
    thread.join()
    assert out == [None]
