"""Lost updates: copies that were read, changed, and not assigned back are told of, at little cost."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import operator
import sys
import unittest.mock
import warnings
import weakref

import numpy as np
import pytest

import pmstore
from pmstore._catalog import lost_updates
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.lost_updates import LostUpdates
from pmstore._core import Core
from tests.store.test_interrupts import signal_at


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_lost_update_is_warned_of_once(store):
    store["config"] = {"lr": 1, "layers": [1, 2]}
    store["g/t"] = (1, [2])
    store.commit()
    store["config"]["lr"] = 2
    with pytest.warns(pmstore.LostUpdateWarning, match="'config'") as caught:
        store.commit()
    assert caught[0].filename == __file__
    config = store["config"]
    config["layers"].append(3)
    store.group("g")["t"][1].append(3)
    with pytest.warns(pmstore.LostUpdateWarning) as caught:
        with store.transaction():
            pass
    assert sorted(str(w.message).split(" ")[0] for w in caught) == ["'config'", "'g/t'"]
    assert {w.filename for w in caught} == {__file__}
    with no_warning():
        store.commit()
    config = store["config"]
    config["lr"] = object()
    with pytest.warns(pmstore.LostUpdateWarning):
        store.commit()
    assert store["config"]["lr"] == 1


def test_lost_updates_of_list_elements(store):
    items = store.create_list("a/[items]")
    items.extend([{"a": 1}, np.zeros(3)])
    store.commit()
    items[0]["a"] = 2
    items[1][0] = 5
    with pytest.warns(pmstore.LostUpdateWarning, match=r"a/\[items\]\[[01]\]") as caught:
        store.commit()
    hints = sorted(str(w.message).rpartition(". ")[2] for w in caught)
    assert hints == [f"store['a/[items]'][{i}] = value stores it" for i in (0, 1)]
    array = items[1]
    array[0] = 7
    with no_warning():
        exec(hints[1].partition(" value ")[0] + " array", {"store": store, "array": array})
        store.commit()
    assert items[1][0] == 7


def test_of_an_attribute_that_was_renamed(store):
    for new, old in (("g/b", "g/a"), ("h", "g")):
        store["g/a"] = 1
        store.attrs("g/a")["l"] = [1]
        store.commit()
        mine = store.attrs("g/a")["l"]
        store.rename(old, new)
        mine.append(2)
        with pytest.warns(pmstore.LostUpdateWarning, match=r"store.attrs\('(g/b|h/a)'\)\['l'\]"):
            store.commit()
        store.clear()


@dataclasses.dataclass
class Held:
    w: object
    c: object = 1


pmstore.register(Held, name="tests.Held")


def test_an_object_without_its_array_is_assigned(store):
    """It was an object with a live array, and is a plain value now."""
    store["l"] = Held(np.zeros(3))
    store.commit()
    held = store["l"]
    held.w = None
    store["l"] = held
    with no_warning():
        store.commit()
        store.commit()
    held.w = 5
    with pytest.warns(pmstore.LostUpdateWarning):
        store.commit()


def test_an_array_of_an_object_is_replaced(store):
    """The other one has the same shape and dtype."""
    store["l"] = Held(np.zeros(3), 1)
    store.commit()
    held = store["l"]
    held.w += 1.0  # it is live
    with no_warning():
        store.commit()
        store.commit()
    held.w = held.w + 1.0
    with pytest.warns(pmstore.LostUpdateWarning, match="'l' was read from the store and changed"):
        store.commit()
    assert store["l"].w.tolist() == [1.0] * 3
    store["l"] = held
    held = store["l"]
    with no_warning():
        held.w += 1.0
        store.commit()
    assert store["l"].w.tolist() == [3.0] * 3


@dataclasses.dataclass
class Copying:
    w: object


pmstore.register(
    Copying,
    lambda held: {"w": held.w.astype("f4")},
    lambda parts: Copying(parts["w"].astype("f8")),
    name="tests.Copying",
)


def test_an_object_whose_type_copies_its_arrays(store):
    store["l"] = Copying(np.arange(3.0))
    store.commit()
    held = store["l"]
    with no_warning():
        for _ in range(4):
            store.commit()
    held.w[1] = 5.0
    with pytest.warns(pmstore.LostUpdateWarning):
        for _ in range(8):
            store.commit()
    assert store["l"].w.tolist() == [0.0, 1.0, 2.0]


def test_what_is_no_lost_update(store):
    store["config"] = {"lr": 1}
    store["other"] = [1]
    with no_warning():
        for _ in range(200):
            config = store["config"]
            config["lr"] += 1
            store["config"] = config
        store.commit()
        config["lr"] += 1
        store["config"] = config
        store.commit()
        config = store["config"]
        config["lr"] += 1
        store.rollback()
        store.commit()
        mine = store["other"]
        mine.append(2)
        store["other"] = [5]  # replaced knowingly
        store.commit()
        mine = store["other"]
        mine.append(2)
        del store["other"]
        store.commit()
    config = store["config"]
    config["lr"] += 1
    store["config"] = config
    config["lr"] += 1  # after it was assigned
    with pytest.warns(pmstore.LostUpdateWarning):
        store.commit()


def test_a_lost_update_as_an_error_does_not_undo_the_commit(open_store):
    store = open_store()
    store["config"] = {"lr": 1}
    store.commit()
    store["config"]["lr"] = 2
    with pytest.raises(pmstore.LostUpdateWarning), no_warning():
        with store.transaction():
            store["x"] = 1
    store.close()
    assert open_store()["x"] == 1


RECORD = np.array([(1, [2.0, 3.0])], [("a", "i4"), ("b", "f8", (2,))])[0]


def test_what_was_taken_is_the_programs_own(store):
    """An equal value that is in its place by then is another one. So is the element behind, which has moved."""
    jobs = store.create_list("jobs")
    jobs.extend([{"tries": 0} for _ in range(5)])
    store["config"] = {"lr": 1}
    store.commit()
    with no_warning():
        for take in (lambda: jobs.pop(0), jobs.pop, lambda: store.pop("config")):
            taken = take()
            taken["new"] = True
            jobs.append({"tries": 0})
            store["config"] = {"lr": 1}
            store.commit()
        moved = jobs[2]
        jobs.insert(1, {"tries": 0})
        moved["tries"] += 1
        jobs[3] = moved
        store.commit()
        del jobs[0]
        store.commit()
    for replace in (lambda: None, lambda: operator.setitem(jobs, slice(0, 1), [{"tries": 9}])):
        jobs[2]["tries"] += 1
        replace()  # one by one: the others stay where they are
        with pytest.warns(pmstore.LostUpdateWarning, match=r"store\['jobs'\]\[2\] = value"):
            store.commit()


def set_item(container, key, value):
    container[key] = value


@pytest.mark.parametrize(
    "value, change",
    [
        ([np.zeros(3)], lambda v: set_item(v[0], 0, 5)),
        ((1, np.zeros(3)), lambda v: set_item(v[1], 0, 5)),
        ((1, (2, np.zeros(3))), lambda v: set_item(v[1][1], 0, 5)),
        ({"w": np.zeros(3)}, lambda v: set_item(v["w"], 0, 5)),
        (RECORD, lambda v: set_item(v, "a", 5)),
        (RECORD, lambda v: set_item(v["b"], 0, 5)),
        ((RECORD,), lambda v: set_item(v[0], "a", 5)),
    ],
    ids=["list", "tuple", "tuples", "dict", "record", "subarray", "record in a tuple"],
)
@pytest.mark.parametrize("held", [True, False])
def test_everything_that_can_be_changed_in_place(store, value, change, held):
    store["v"] = value
    store.commit()
    copy = store["v"]
    change(copy)
    if not held:
        del copy
    with pytest.warns(pmstore.LostUpdateWarning, match=r"store\['v'\] = value"):
        store.commit()
    copy = store["v"]
    change(copy)
    store["v"] = copy
    with no_warning():
        store.commit()


def test_what_can_not_be_changed_is_not_watched(store):
    frozen = np.frombuffer(RECORD.tobytes(), RECORD.dtype)[0]
    assert not frozen.flags.writeable
    for value in (1, "x", (1, ("x", b"y")), np.float32(1), frozen, (frozen,)):
        store["v"] = value
        store["v"]
    assert not store._catalog.lost_updates


@pytest.fixture
def encoded(monkeypatch):
    """The ids of the values that watching encodes again."""
    values = []

    def encode(value):
        values.append(id(value))
        return pmstore._values.values.encode(value)

    monkeypatch.setattr(lost_updates, "encode", encode)
    return values


def test_what_is_merely_held_costs_little(store, encoded):
    store["large"] = [float(i) for i in range(1000)]
    store["small"] = {"lr": 0.1}
    large, small = store["large"], store["small"]
    for _ in range(1000):
        store.commit()
    assert encoded.count(id(large)) <= 10
    assert encoded.count(id(small)) == 1000
    encoded.clear()
    many = [store["small"] for _ in range(200)]
    for _ in range(1000):
        store.commit()
    assert len(encoded) <= 200 * 10 + 3000 and len(many) == 200


def test_large_ones_are_told_of_in_the_end(open_store):
    store = open_store()
    store["large"] = list(range(5000))
    store.commit()
    large = store["large"]
    for _ in range(5):
        store.commit()
    large[0] = -1
    with pytest.warns(pmstore.LostUpdateWarning, match="'large'") as caught:
        for _ in range(8):
            store.commit()
    assert len(caught) == 1
    large = store["large"]
    for _ in range(5):
        store.commit()
    large[0] = -1
    with pytest.warns(pmstore.LostUpdateWarning, match="'large'"):
        store.close()


def test_large_ones_that_nobody_holds(store):
    store["large"] = ["x" * 3_000_000]
    store["large"][0] = "y"
    with pytest.warns(pmstore.LostUpdateWarning, match="'large'"):
        store.commit()


def test_copies_that_nobody_holds_are_let_go(store, encoded):
    store["v"] = [np.zeros(100_000)]
    arrays = [weakref.ref(store["v"][0]) for _ in range(50)]
    gc.collect()
    assert sum(array() is not None for array in arrays) <= 3
    store.commit()
    assert len(encoded) == 50 and not any(array() is not None for array in arrays)


def test_reading_without_a_commit_takes_no_memory(store):
    store["v"] = {"a": 1}
    store.commit()
    for _ in range(1000):
        store["v"]["a"]
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        store["v"]["a"]
    gc.collect()
    assert len(gc.get_objects()) < before + 200


def test_a_value_that_changes_while_it_is_looked_at(store, monkeypatch):
    store["v"] = {1: 2}
    store.commit()
    value = store["v"]

    def encode(value):
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(lost_updates, "encode", encode)
    store["x"] = 1
    with pytest.warns(pmstore.LostUpdateWarning):
        store.commit()
    assert store.sequence == 2 and value == {1: 2}


def lines_run(call):
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def test_held_copies_cost_other_changes_nothing(store):
    for name in ("few", "many"):
        store.create_list(name).extend([{"n": n} for n in range(3 if name == "few" else 300)])
    store["value"] = {"lr": 1}
    store.attrs("value")["shape"] = [1]

    def changes(name):
        items = store[name]
        yield lines_run(lambda: items.append({"n": 0}))
        yield lines_run(lambda: items.extend([1, 2]))
        yield lines_run(items.pop)
        yield lines_run(lambda: items.insert(len(items), 1))
        yield lines_run(lambda: operator.setitem(items, slice(-2, None), [1]))
        yield lines_run(lambda: store.rename("value", f"of {name}"))
        store.rename(f"of {name}", "value")

    held = list(store["few"])
    few = list(changes("few"))
    held += store["many"]
    assert list(changes("many")) == few and len(held) == 303


def test_one_copy_that_decode_gives_twice(store):
    """A program may keep the values that its decode has made."""
    made = {}

    class Kept:
        def __init__(self, parts):
            self.parts = parts

    pmstore.register(
        Kept, lambda value: value.parts, lambda parts: made.setdefault("it", Kept(parts)), name="tests.Kept"
    )
    store["v"] = Kept({"n": [1]})
    store.commit()
    assert store["v"] is store["v"]
    store["v"].parts["n"].append(2)
    with pytest.warns(pmstore.LostUpdateWarning, match="'v'") as told:
        store.commit()
    assert len(told) == 1
    del made["it"]
    with no_warning():
        store.commit()


def test_an_append_looks_at_the_length_once(store, monkeypatch):
    """Nothing moves, so the copies of other elements stay where they are."""
    items = store.create_list("items")
    items.append({"a": 1})
    held, looks, list_length = items[0], [], Catalog.list_length
    monkeypatch.setattr(Catalog, "list_length", lambda catalog, number: looks.append(1) or list_length(catalog, number))
    items.append(2)
    assert len(looks) == 1
    held["a"] = 2
    with pytest.warns(pmstore.LostUpdateWarning, match="items"):
        store.commit()
    held = items[0]
    del items[:]
    held["a"] = 3
    with no_warning():
        store.commit()


READS = {
    "value": lambda store: store["c"],
    "attribute": lambda store: store.attrs("c")["unit"],
    "element": lambda store: store["l"][0],
}


@pytest.fixture(params=READS)
def read(store, request):
    store["c"] = {"lr": 1}
    store.attrs("c")["unit"] = {"name": "s"}
    store.create_list("l").append({"a": 1})
    store.commit()
    return READS[request.param]


def test_a_handler_that_commits_while_a_copy_is_read(store, read):
    for n in itertools.count(1):
        with signal_at(n, lambda *_: store.commit()) as sent:
            copy = read(store)
        copy["new"] = 1
        with pytest.warns(pmstore.LostUpdateWarning):
            store.commit()
        if not sent:
            break
    assert n > 10


@pytest.mark.parametrize("looks", [False, True])
def test_a_handler_that_reads_a_copy_in_a_commit(store, read, looks):
    for n in itertools.count(1):
        copies = []
        if looks:
            read(store)  # which the commit forgets
        with signal_at(n, lambda *_: copies.append(read(store))) as sent, store.transaction():  # noqa: B023
            store["n"] = n
        if not sent:
            break
        copies[0]["new"] = 1
        with pytest.warns(pmstore.LostUpdateWarning):
            store.commit()
    assert n > 10


def test_a_handler_that_raises_while_copies_are_compared(store):
    """They are as they were. The commit, if it did not succeed, can be made again, and compares all of them."""
    store["c"], store["d"] = {"lr": [1] * 100}, {"lr": [1] * 100}
    store.commit()

    def late(*_):
        raise TimeoutError

    for n in itertools.count(1):
        copies = store["c"], store["d"]
        with no_warning(), signal_at(n, late) as sent, contextlib.suppress(TimeoutError):
            store["n"] = n
            store.commit()
            assert not sent
        copies[1]["lr"] = 2
        with pytest.warns(pmstore.LostUpdateWarning, match="'d'"):
            store.commit()
        if not sent:
            break
    assert n > 20


def test_a_lost_update_is_told_of_after_a_commit_that_lacked_space(store, monkeypatch):
    store["c"] = {"lr": 1}
    store.commit()
    store["c"]["lr"] = 2
    with monkeypatch.context() as patch, pytest.raises(pmstore.OutOfSpaceError), no_warning():
        patch.setattr(Core, "commit", unittest.mock.Mock(side_effect=pmstore.OutOfSpaceError(28, "full")))
        store["n"] = 1
        store.commit()
    with pytest.warns(pmstore.LostUpdateWarning) as caught:
        store.commit()
    assert len(caught) == 1
    with no_warning():
        store["n"] = 2
        store.commit()


def test_copies_are_handed_out_under_the_lock(store, read, monkeypatch):
    """Several threads may read."""
    owned, handed_out = [], LostUpdates.handed_out

    def noted(*arguments):
        owned.append(store._catalog.lock.owned())
        handed_out(*arguments)

    monkeypatch.setattr(LostUpdates, "handed_out", noted)
    read(store)
    assert owned == [True]
