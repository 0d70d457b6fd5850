"""Stores that are never closed: whether changes are lost with them, how many, and where a warning appears."""

from __future__ import annotations

import gc
import os
import random
import warnings

import numpy as np
import pytest

import pmstore
from pmstore._store.lost_work import count_names
from tests.store.test_threads_fork import in_fork

one_medium = pytest.mark.parametrize("medium", ["memory"], indirect=True)

LARGE = 1 << 20  # bytes: enough for two slots, and for trackers


class Stop(Exception):
    pass


def doubled(x):
    return 2 * x


def filled(open_store):
    """A store of all kinds of things, committed."""
    store = open_store()
    store["v"], store["text"] = 1, "x" * 5000
    store["w"], store["large"] = np.zeros(100), np.zeros(LARGE // 8)
    store.create_list("items").extend(range(3))
    store["g/a"] = store["g/b"] = 1
    store.derive("y", doubled, "w")
    store.commit()
    return store


def assign(store, name, value):
    store[name] = value


def change(store, name, index=0, value=1.0):
    store[name][index] = value  # nobody holds it afterwards


def change_and_back(store):
    change(store, "w"), change(store, "large", -1)
    change(store, "w", value=0.0), change(store, "large", -1, 0.0)


def another_list(store):
    store.create_list("more").extend(["x" * 5000, 2])


def many(store):
    for i in range(300):
        store[f"many/{i * 7919 % 300}"] = "x" * i


def fails(store):
    with pytest.raises(Stop), store.transaction():
        store["v"] = 2
        change(store, "w")
        raise Stop


CHANGES = {
    "nothing": (lambda store: None, 0),
    "read": (lambda store: (dict(store), store["items"][0], str(store)), 0),
    "assign": (lambda store: assign(store, "v", 2), 1),
    "assign the same": (lambda store: assign(store, "v", 1), 0),
    "new": (lambda store: assign(store, "new", 1), 1),
    "long": (lambda store: assign(store, "text", "y" * 5000), 1),
    "delete": (lambda store: store.__delitem__("text"), 1),
    "new and gone": (lambda store: (assign(store, "new", 1), store.pop("new")), 0),
    "array": (lambda store: change(store, "w"), 1),
    "both": (lambda store: (change(store, "w"), change(store, "large", -1)), 2),
    "and back": (change_and_back, 0),
    "the first": (lambda store: (change(store, "large", -1), change(store, "large", -1, 0.0), change(store, "w")), 1),
    "the last": (lambda store: (change(store, "w"), change(store, "w", value=0.0), change(store, "large", -1)), 1),
    "assign an array": (lambda store: assign(store, "w", np.ones(100)), 1),
    "another array": (lambda store: (change(store, "w"), assign(store, "w", np.ones(7)), change(store, "w")), 1),
    "append": (lambda store: store["items"].extend("abcdef"), 1),
    "new list": (another_list, 1),
    "delete a list": (lambda store: store.__delitem__("items"), 1),
    "group": (lambda store: store.group("g").clear(), 2),
    "derived": (lambda store: store["y"], 0),
    "declared": (lambda store: store.derive("z", doubled, "w"), 0),
    "many": (many, 300),
    "all": (lambda store: store.clear(), 7),
    "rolled back": (lambda store: (many(store), store.clear(), store.rollback()), 0),
    "failed": (fails, 0),
}


@one_medium
@pytest.mark.parametrize("what", CHANGES)
def test_names_that_are_lost(open_store, what):
    store = filled(open_store)
    change, expected = CHANGES[what]
    change(store)
    catalog = store._catalog
    before = catalog.core.state_hash()
    assert count_names(catalog) == expected
    assert catalog.core.state_hash() == before
    store.commit()  # which finds all of it, as if nobody had asked
    assert catalog.core.state_hash() == before and count_names(catalog) == 0 and store.check().ok


def test_an_array_with_two_slots(open_store):
    store = open_store()
    w = store.create_array("w", 2 * LARGE // 8)
    for i in range(6):
        w += 1
        assert count_names(store._catalog) == 1, i
        store.commit()
        assert count_names(store._catalog) == 0, i
    w[3] = 0
    assert count_names(store._catalog) == 1
    core = store._catalog.core
    extents = {row.entry.offset for row in core.scan(b"") if row.entry.length == w.nbytes}
    assert {row.entry.offset for row in core.pending()} == extents, "it is named as the catalog names it"


@one_medium
def test_names_of_any_program(open_store):
    """A dict does the same beside the store."""
    rng = random.Random(5)
    store = open_store()
    now, committed = {}, {}
    for step in range(1500):
        name = f"{rng.randrange(60)}/{chr(120) * rng.randrange(1, 60)}"
        if rng.random() < 0.3:
            now.pop(name, None), store.pop(name, None)
        else:
            now[name] = store[name] = rng.randrange(3)
        if step % 97 == 0:
            committed = dict(now)
            store.commit()
        elif step % 13 == 0:
            names = now.keys() | committed.keys()
            assert count_names(store._catalog) == sum(now.get(name) != committed.get(name) for name in names)


def dropped(path, use):
    """Warnings of a store that is dropped after a use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = pmstore.open(path)
        store["v"] = 0
        w = store.create_array("w", 3) if "w" not in store else store["w"]
        store.commit()
        use(store, w)
        del store
        gc.collect()
    return [(warning.category, str(warning.message)) for warning in caught]


@one_medium
def test_nothing_lost_is_a_resource_warning_as_before(medium):
    path = medium.directory / "s"
    for use in (
        lambda store, w: None,
        lambda store, w: (assign(store, "v", 1), w.fill(1), store.commit()),
        lambda store, w: (assign(store, "v", 1), w.fill(2), store.rollback()),
    ):
        [(kind, text)] = dropped(path, use)
        assert kind is ResourceWarning and "are lost" not in text


@one_medium
def test_a_with_that_an_exception_leaves_is_silent(medium):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Stop), pmstore.open(medium.directory / "s") as store:
            store["v"] = 1
            raise Stop
        del store
        gc.collect()


@one_medium
@pytest.mark.parametrize("doomed", [False, True])
def test_a_store_that_is_dropped_inside_a_transaction(open_store, doomed):
    """A doomed one would be rolled back in any case, and an exception has told so."""
    store = open_store()
    transaction = store.transaction()
    transaction.__enter__()
    store["a"] = store["b"] = 1
    if doomed:
        with pytest.raises(Stop), store.transaction():
            raise Stop
    with pytest.warns(ResourceWarning if doomed else pmstore.UncommittedChangesWarning) as caught:
        pmstore._store.store._drop_with_warning(store)
    assert len(caught) == 1 and store.closed


@one_medium
def test_a_store_in_a_cycle_with_a_transaction(medium):
    path = medium.directory / "s"
    store = pmstore.open(path)
    store["a"] = 1
    cycle = [store.transaction()]
    cycle[0].__enter__()
    cycle.append(cycle)
    with pytest.warns(pmstore.UncommittedChangesWarning, match="of 1 name since") as caught:
        del store, cycle
        gc.collect()
    assert len(caught) == 1
    pmstore.open(path).close()


@one_medium
def test_a_forked_child_has_nothing_to_lose(open_store):
    store = open_store()
    store["a"] = 1

    def child():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pmstore._store.store.close_all()
            store.__del__()
        return "fine"

    assert in_fork(child) == "fine" and count_names(store._catalog) == 1


def test_a_store_that_has_failed_is_dropped_without_an_error(tmp_path):
    store = pmstore.open(tmp_path / "s", media="trace:file")
    store["a"] = 1
    store.commit()
    store["a"] = 2
    store._catalog.core.trace.fail(3, 1, 5, lasting=True)  # writes and syncs: EIO
    with pytest.raises(pmstore.StoreIOError):
        store.commit()
    with pytest.warns(ResourceWarning):
        del store
        gc.collect()


@one_medium
def test_every_loss_is_told(medium):
    """Also from the same line, and with Python's own filters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            store = pmstore.open(medium.directory / "s")
            store["a"] = 1
            del store
            gc.collect()
    assert [warning.category for warning in caught] == [pmstore.UncommittedChangesWarning] * 3
    assert {warning.filename for warning in caught} == {__file__}
    assert all(f"{os.fspath(medium.directory / 's')!r}, opened at {__file__}:" in str(w.message) for w in caught)
