"""Persistent lists, compared with plain ones."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import MutableSequence

import numpy as np
import pytest

import pmstore
from pmstore._core import Core

LONG = b"long " * 500  # kept in an extent of its own


@pytest.fixture
def items(store):
    return store.create_list("items")


def test_it_is_a_list(items):
    assert isinstance(items, MutableSequence) and items == [] and len(items) == 0 and not items
    items.append(1)
    items += [2, "three", LONG]
    assert items == [1, 2, "three", LONG] and list(items) == [1, 2, "three", LONG]
    assert items[0] == 1 and items[-1] == LONG and items[1:3] == [2, "three"] and items[np.int64(1)] == 2
    assert 2 in items and items.index("three") == 2 and items.count(2) == 1
    assert items.pop() == LONG and items.pop(0) == 1
    items[0] = LONG
    items.insert(1, 5)
    items.reverse()
    items.remove(5)
    assert items == ["three", LONG]
    assert items != ["three"] and items != ("three", LONG) and list(reversed(items)) == [LONG, "three"]
    items.clear()
    assert items == []
    with pytest.raises(TypeError, match="unhashable"):
        hash(items)


def test_elements_keep_their_types_and_are_copies(items):
    values = [(1, [2]), {"a": 1}, np.float32(1), np.arange(3), None, 2**70]
    items.extend(values)
    for stored, value in zip(items, values):
        assert type(stored) is type(value)
    items[3][0] = 7
    assert items[3].tolist() == [0, 1, 2]


def test_errors_of_a_list(items):
    items.extend([1, 2])
    for i in (2, -3, 10**30):
        with pytest.raises(IndexError):
            items[i]
        with pytest.raises(IndexError):
            items[i] = 1
        with pytest.raises(IndexError):
            del items[i]
    for i in ("a", 1.5, None):
        with pytest.raises(TypeError, match="indices"):
            items[i]
    with pytest.raises(TypeError):
        items.append(object())
    with pytest.raises(TypeError):
        items.extend([3, object()])
    with pytest.raises(ValueError, match="extended slice"):
        items[::-1] = [1]
    with pytest.raises(IndexError):
        pmstore.PersistentList.pop(items, 5)
    for use in (items.index, items.remove):
        with pytest.raises(ValueError, match="'absent' is not in the list 'items'"):
            use("absent")
    with pytest.raises(ValueError):
        items.index(1, 1)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"list\(it\)"):
            use(items)
    assert items == [1, 2]


def test_against_a_plain_list(open_store):
    rng = random.Random(7)
    with open_store() as store:
        items, plain = store.create_list("items"), []
        for step in range(600):
            value = rng.choice([step, str(step), LONG + b"%d" % step, [step]])
            i, j = rng.randint(-12, 12), rng.randint(-12, 12)
            part = slice(rng.choice([None, i]), rng.choice([None, j]), rng.choice([None, 1, 2, -1, -2]))
            action = rng.randrange(8)
            if action <= 2:
                items.append(value), plain.append(value)
            elif action == 3:
                items.insert(i, value), plain.insert(i, value)
            elif action == 4 and len(plain) > 10:
                del items[part], plain[part]
            elif action == 5 and plain:
                k = rng.randrange(len(plain))
                items[k] = plain[k] = value
            elif action == 6 and (part.step in (None, 1)):
                new = [value] * rng.randrange(4)
                items[part] = new
                plain[part] = new
            elif action == 7 and part.step not in (None, 1):
                new = list(range(len(plain[part])))
                items[part] = new
                plain[part] = new
            assert items[part] == plain[part]
            if step % 50 == 0:
                assert items == plain and list(items) == plain
                store.commit()
        assert items == plain
    with open_store(mode="r") as store:
        assert store["items"] == plain and store.check().ok


def test_a_list_is_part_of_transactions(store, items):
    items.append(1)
    store.commit()
    with pytest.raises(ZeroDivisionError):
        with store.transaction():
            items.append(2)
            items[0] = 9
            raise ZeroDivisionError
    assert items == [1]


def test_stale_handles(store, items):
    items.append(1)
    store.commit()
    del store["items"]
    for use in (lambda: items[0], lambda: items.append(1), lambda: len(items), lambda: list(items)):
        with pytest.raises(KeyError, match="deleted, replaced or rolled back"):
            use()
    assert "deleted" in repr(items)
    store.rollback()
    assert items == [1]
    store["items"] = 5
    with pytest.raises(KeyError):
        items.append(1)
    del store["items"]
    assert store.create_list("items") == []
    with pytest.raises(KeyError):
        items.append(1)
    new = store.create_list("new")
    store.rollback()
    with pytest.raises(KeyError):
        new.append(1)
    newer = store.create_list("new")  # its id isn't that of the list that was rolled back
    with pytest.raises(KeyError):
        new.append(1)
    newer.append(1)


def test_deleting_and_replacing_deletes_the_elements(store):
    for end in (lambda: store.__delitem__("items"), lambda: store.__setitem__("items", 1), lambda: store.clear()):
        before = store.stats().keys
        items = store.create_list("items")
        items.extend([1, LONG, 2] * 300)
        store.commit()
        end()
        store.commit()
        store.pop("items", None)
        assert store.stats().keys <= before + 1 and len(store) == 0 and store.check().ok
        del items
        gc.collect()


def test_lists_and_assignment(store, items):
    items.append(1)
    store["items"] += [2]
    assert items == [1, 2] and store["items"] == items
    for name in ("other", "items"):
        other = store.create_list("x") if name == "items" else items
        with pytest.raises(TypeError, match="persistent list"):
            store[name] = other
    assert store.pop("items") == [1, 2]
    store["plain"] = [1, 2]
    assert type(store["plain"]) is list
    with pytest.raises(ValueError, match="taken"):
        store.create_list("plain")


def test_two_lists_do_not_mix(store, items):
    other = store.create_list("z/other")
    for i in range(300):
        items.append(i)
        other.append(-i)
    assert items == list(range(300)) and other == [-i for i in range(300)]
    assert store["z/other"] == other and other.name == "z/other"
    items += items
    assert len(items) == 600


def test_index(items):
    plain = [i % 100 for i in range(300)]
    items.extend(plain)
    for bounds in ((), (5,), (50, 200), (-100,), (-100, -10), (0, 10**30)):
        assert items.index(60, *bounds) == plain.index(60, *bounds)
    assert items.index(99, 150) == 199 and 99 in items and "x" not in items


def test_the_number_of_names_beside_lists(store):
    assert len(store) == 0
    store.create_list("empty")
    assert len(store) == 1
    for i in range(5):
        store.create_list(f"list{i}").extend(range(i * 100))
    assert len(store) == len(list(store)) == 6
    store.update({f"value{i}": i for i in range(100)})
    assert len(store) == len(list(store)) == 106
    scans = []
    core = store._catalog.core
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(core), "scan", lambda *arguments: scans.append(arguments) or iter(()))
        assert len(store) == 106
    assert not scans
    del store["list2"], store["empty"]
    store["list3"].clear()
    assert len(store) == len(list(store)) == 104


def test_appending_is_cheap_at_any_length(store, items):
    items.extend(range(20_000))
    store.commit()
    items.append(1)
    store.commit()
    assert store.stats().dirty_bytes < 65_536


@pytest.mark.slow
def test_the_length_of_a_long_list_is_not_that_of_the_file(store, items, monkeypatch):
    """Statistics count the used pages, which takes longer in a larger file."""
    items.extend(range(1 << 16))
    monkeypatch.setattr(Core, "stats", lambda self: pytest.fail("statistics"))
    items.append(1)
    assert len(items) == (1 << 16) + 1 and items.pop() == 1 and len(store) == 1
    core = store._catalog.core
    core.put(core.last(b"l").key[:-8] + bytes([0, 0, 1, 0, 0, 0, 0, 0]), core.last(b"l").entry)  # a damaged length
    with pytest.raises(pmstore.CorruptStoreError, match="a damaged list"):
        items.reverse()
    store.rollback()


REPLACEMENTS = {"delete": None, "value": 5, "blob": "y" * 9000, "array": np.arange(700.0), "empty": np.zeros(0)}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_list_goes_in_one_call(open_store, monkeypatch, how):
    """Elements that outlive their list, after an interrupt between two calls, could never be deleted."""
    store = open_store()
    store.create_list("other").extend(range(10))
    store.commit()
    keys = store.stats().keys
    items = store.create_list("l")
    items.extend(range(700))
    items.extend([b"large" * 200] * 5)
    store.commit()
    assert store.stats().keys == keys + 706
    calls = []

    def counting(real):
        def call(*arguments):
            calls.append(real)
            return real(*arguments)

        return call

    monkeypatch.setattr(Core, "put", counting(Core.put))
    monkeypatch.setattr(Core, "delete", counting(Core.delete))
    for end in (store.rollback, store.commit):
        calls.clear()
        if how == "delete":
            del store["l"]
        else:
            store["l"] = REPLACEMENTS[how]
        assert len(calls) == 1
        assert store.stats().keys == keys + (how != "delete")
        end()
        assert len(items) == 705 if end == store.rollback else "l" not in store or how != "delete"
    assert store.check().ok and list(store["other"]) == list(range(10))
    assert store.stats().keys == keys + (how != "delete")
