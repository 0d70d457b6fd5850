"""Persistent lists where space ends: an operation changes all of a list, or nothing; and lists of many pages."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest

import pmstore
from pmstore._catalog.names import element_key
from tests.support.images import NODE, PAGE, REGION, Cell, Image

Operation = Callable[[Any], object]


def element(random_: random.Random) -> Any:
    """A value in the catalog's page, one that fills a fifth of a page, or one with an extent of its own."""
    return random_.choice([random_.randrange(1 << 40), b"y" * random_.randrange(600, 750), b"z" * 20_000])


def operation(random_: random.Random, length: int, most: int) -> Operation:
    """A change of a list of this length, as a function of the list. It may make it longer by `most` elements."""
    first, last = sorted(random_.randrange(length + 1) for _ in range(2))
    step = random_.choice([2, 3, -1, -2])
    new = [element(random_) for _ in range(random_.randrange(most + 1))]
    place = random_.randrange(max(1, length))
    return random_.choice(
        [
            lambda one: one.insert(place, new[0] if new else 1),
            lambda one: one.extend(new),
            lambda one: one.__setitem__(slice(first, last), new),
            lambda one: one.__setitem__(slice(first, last, step), [7] * len(range(length)[first:last:step])),
            lambda one: one.__delitem__(slice(first, last)),
            lambda one: one.__delitem__(slice(first, last, step)),
            lambda one: one.pop(place) if one else None,
            lambda one: one.reverse(),
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_lists_are_as_those_of_python(open_store, seed):
    random_, expected, committed = random.Random(seed), [], []
    store = open_store()
    kept = store.create_list("kept")
    before, behind = store.create_list("a"), store.create_list("z")  # their elements have the keys beside
    before.extend(range(50)), behind.extend(range(50))
    store.commit()
    for number in range(150):
        change = operation(random_, len(expected), 40 if len(expected) < 300 else 0)
        change(kept), change(expected)
        if number % 3 == 0:
            assert list(kept) == expected and len(kept) == len(expected)
        if number % 10 == 0:
            assert store.check().ok, store.check()
            store.commit()
            committed = expected.copy()
        elif number % 17 == 0:
            store.rollback()
            expected = committed.copy()
    assert list(before) == list(behind) == list(range(50))
    store.commit()
    store.close()
    store = open_store(verify=True)
    assert list(store["kept"]) == expected
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_I41_where_space_ends_nothing_changes(open_store, seed):
    random_, expected, refused = random.Random(seed), [], 0
    store = open_store(max_size=1 << 20)
    kept = store.create_list("kept")
    for number in range(120):
        change = operation(random_, len(expected), 30)
        if number % 2:
            new = [element(random_) for _ in range(10)]
            change = methodcaller("extend", new)
        try:
            change(kept)
        except pmstore.OutOfSpaceError:
            refused += 1
        else:
            change(expected)
        assert len(kept) == len(expected) and list(kept) == expected
        if number % 5 == 0:
            try:
                store.commit()
            except pmstore.OutOfSpaceError:
                store.rollback()
                expected = list(store["kept"]) if "kept" in store else []
                kept = store["kept"] if "kept" in store else store.create_list("kept")
            assert store.check().ok, store.check()
    assert refused > 3
    store.rollback()
    assert store.check().ok and store.stats().keys == len(store["kept"]) + 2
    store.close()


def test_any_page_may_be_the_last(open_store):
    """An operation that takes several pages is tried with none, with one, with two …"""
    store = open_store(max_size=1 << 20)
    kept, filling, refused = store.create_list("kept"), store.create_list("filling"), 0
    expected = [bytes([i]) * 700 for i in range(100)]
    kept.extend(expected)
    with pytest.raises(pmstore.OutOfSpaceError):
        while True:
            filling.append(b"f" * 4096)
    for number in range(25):
        refused += 1
        with contextlib.suppress(pmstore.OutOfSpaceError):
            kept[50:52] = [b"n" * 700] * 20
            refused -= 1
            expected[50:52] = [b"n" * 700] * 20
        assert list(kept) == expected, number
        filling.pop()
    assert 4 < refused < 25 and list(kept) == expected and store.check().ok
    store.rollback()
    store.close()


def test_the_first_element_goes_from_a_full_list(open_store):
    """The elements behind it move without their contents."""
    store = open_store(max_size=2 << 20)
    kept = store.create_list("kept")
    with pytest.raises(pmstore.OutOfSpaceError):
        for number in range(1000):
            kept.append(bytes([number % 256]) * 30_000)
    expected = list(kept)
    with pytest.raises(pmstore.OutOfSpaceError):
        kept.insert(0, b"x" * 60_000)
    assert list(kept) == expected
    del kept[0]
    assert kept.pop(0) == expected[1]
    kept.reverse()
    assert list(kept) == expected[:1:-1]


def test_copies_of_elements_that_stay_are_watched(open_store):
    """A change that fails, or leaves an element at its number, does not end the watch for lost updates."""
    store = open_store(max_size=1 << 20)
    kept = store.create_list("kept")
    kept.extend([{"k": 0} for _ in range(10)])
    store.commit()
    last, between, moved = kept[9], kept[1], kept[2]
    kept[0:4:2] = ["a", "b"]
    with pytest.raises(pmstore.OutOfSpaceError):
        kept.insert(3, b"x" * (2 << 20))
    last["k"] = between["k"] = moved["k"] = 1
    with pytest.warns(pmstore.LostUpdateWarning) as told:
        store.commit()
    assert sorted(str(one.message)[:9] for one in told) == ["'kept[1]'", "'kept[9]'"]


def test_a_list_that_lacks_an_element_does_not_change(open_store):
    store = open_store()
    kept = store.create_list("kept")
    kept.extend(range(10))
    store.commit()
    core = store._catalog.core
    key = next(row.key for row in core.scan(b"l") if row.key[-1] == 4)
    core.delete(key)
    with pytest.raises(pmstore.CorruptStoreError, match="lacks a member"):
        del kept[3:6]
    with pytest.raises(pmstore.CorruptStoreError, match="lacks a member"):
        kept[4:4] = ["a", "b"]
    assert list(kept[:4]) == [0, 1, 2, 3] and [kept[i] for i in range(5, 10)] == [5, 6, 7, 8, 9]
    store.rollback()
    del kept[3:6]
    assert list(kept) == [0, 1, 2, 6, 7, 8, 9]


def test_an_element_goes_nowhere_in_damaged_leaves(tmp_path):
    """Inserting one there is an error; where it is none, the element is there."""
    path = tmp_path / "damaged.pm"
    with pmstore.open(path, "x", media="file") as store:
        store.create_list("list").extend([b"x" * 500] * 40)
    sound, inserted, refused = path.read_bytes(), 0, 0
    image = Image(path)
    leaves = [page for page in image.pages(NODE) if image.get(page, 20, "I") == 0]
    assert len(leaves) > 5
    for leaf in leaves:
        path.write_bytes(sound)
        with path.open("r+b") as file:
            file.seek(REGION + leaf + PAGE - 50)
            file.write(b"damage")
        with pmstore.open(path, "r+", media="file") as store:
            length = 0
            with contextlib.suppress(pmstore.CorruptStoreError):
                found = store["list"]
                length = len(found)
            for i in range(length):
                try:
                    found.insert(i, "new")
                except pmstore.CorruptStoreError:
                    refused += 1
                else:
                    assert found[i] == "new"
                    inserted += 1
                store.rollback()
    assert inserted > 40 and refused > 40


def test_one_leaf_that_every_node_names(tmp_path):
    """Inserting an element would change the numbers of those behind it, below 61 to the power of 5 children."""
    path = tmp_path / "hostile.pm"
    with pmstore.open(path, "w", media="file") as store:
        made = store.create_list("list")
        made.append(1)
        rows = [row for prefix in (b"l", b"m", b"n") for row in store._catalog.core.scan(prefix)]
    image = Image(path)
    image.write_node(4 * PAGE, 0, [Cell(key, one.meta, one.offset, one.length, one.kind) for key, one in rows])
    for level in range(1, 6):
        child = (3 + level) * PAGE
        cells = [Cell(element_key(made._id, (1 << 20) + i), offset=child) for i in range(60)]
        image.write_node(child + PAGE, level, cells, child)
    image.set_root(9 * PAGE, len(rows))
    image.save()
    with pmstore.open(path, "r+", media="file") as store:
        for change in (lambda one: one.insert(0, 2), lambda one: one.__delitem__(0), lambda one: one.reverse()):
            with pytest.raises(pmstore.CorruptStoreError):
                change(store["list"])
        assert list(store["list"]) == [1]
