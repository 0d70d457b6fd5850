"""Pages of the catalog: how full one can be, where it is divided, and when two become one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import pmstore
from pmstore._core import Entry
from tests.support.images import PAGE, REGION, Image

LONGEST = 760  # bytes of a name, and of a value that its entry carries: a page has room for two and a half of these


def filled(store: pmstore.Store, names: list[str], value: bytes) -> None:
    for name in names:
        store[name] = value


@pytest.mark.parametrize("count", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_any_entries_can_share_pages(open_store, count):
    """Entries of all sizes, in all orders of the sizes, any of them the last to come."""
    store = open_store()
    sizes = {"small": (1, 0), "medium": (400, 0), "long": (LONGEST, 0), "largest": (LONGEST, LONGEST - 30)}
    for kinds in itertools.product(sizes.values(), repeat=count):
        entries = [(f"{i}" + "x" * (length - 1), b"y" * size) for i, (length, size) in enumerate(kinds)]
        for last in range(count):
            for name, value in [*entries[:last], *entries[last + 1 :], entries[last]]:
                store[name] = value
            assert list(store.items()) == entries
            store.rollback()
    filled(store, [name for name, _ in entries], b"")
    store.commit()
    assert store.check().ok


def test_a_page_is_filled_to_its_last_byte(open_store):
    """One of these last names fills it, and the next one needs another page."""
    store = open_store()
    filled(store, [f"{i}" + "x" * 699 for i in range(5)], b"")
    store.commit()
    full = set()
    for length in range(8, 700):
        before = store.stats().region_used
        store["9" * length] = b""
        full.add(store.stats().region_used - before)
        assert len(store["9" * length]) == 0 and len(store) == 6
        store.rollback()
    assert len(full) == 2, "with one page, and with three"


def test_a_page_has_room_for_as_many_entries_as_its_bytes_allow(open_store):
    """Each entry takes a cell and the two bytes of its place, behind the first 64 bytes (docs/format.md)."""
    store = open_store()
    core = store._catalog.core
    used = store.stats().region_used
    count = 0
    while store.stats().region_used == used:
        core.put(b"%08d" % count, Entry(0, 0, 1, 0, b""))
        count += 1
    assert count - 1 == (4096 - 64) // (24 + 8 + 2)
    store.rollback()


def test_the_padding_of_an_entry_shows_nothing_of_the_one_before(open_store):
    store = open_store()
    core = store._catalog.core
    for length in (39, 32):  # of these, a cell of 64 bytes has 64 and 57
        core.delete(b"k")
        core.put(b"k", Entry(0, 0, 1, 0, b"\xff" * length))
    store.commit()
    store.close()
    image = Image(Path(store.path))
    cell = REGION + image.tree + image.get(image.tree, 64, "H")
    assert image.bytes[cell + 56 : cell + 64] == b"\xff" + bytes(7)


def test_names_that_only_grow_leave_full_pages(open_store):
    """Those that come in the other order leave half of each page free."""
    store = open_store()
    names = [f"{i:04}" + "x" * 100 for i in range(1500)]
    used = []
    for order in (names, names[::-1]):
        before = store.stats().region_used
        filled(store, order, b"")
        used.append(store.stats().region_used - before)
        store.rollback()
    assert used[0] < 0.6 * used[1]


def test_pages_that_have_become_sparse_are_joined(open_store):
    store = open_store()
    names = [f"{i:04}" + "x" * 100 for i in range(1500)]
    empty = store.stats().region_used
    filled(store, names, b"")
    store.commit()
    used = store.stats().region_used - empty
    for i, name in enumerate(names):
        if i % 30:
            del store[name]
    store.commit()
    assert list(store) == names[::30] and store.check().ok
    assert (store.stats().region_used - empty) * 4 < used


def test_the_last_page_is_joined_with_the_one_before(open_store):
    store = open_store()
    filled(store, ["a"], b"")
    store.commit()
    used = store.stats().region_used
    names = [f"{i:02}" + "x" * 100 for i in range(40)]
    filled(store, names, b"")
    store.commit()
    assert store.stats().region_used > used, "two pages, and a root"
    kept = [name for i, name in enumerate(names) if i in (0, 39)]
    for name in names[1:39]:  # first those of the page before, which finds the last one full
        del store[name]
    store.commit()
    assert list(store) == [*kept, "a"] and store.check().ok
    assert store.stats().region_used == used


def test_half_full_pages_are_not_joined(open_store):
    """They would be divided again soon, where one name comes and goes."""
    store = open_store()
    names = [f"{i:02}" + "x" * 100 for i in range(80)]
    filled(store, names[::-1], b"")  # which leaves half of each page free
    used = store.stats().region_used
    for name in names[1:-1:5]:
        del store[name]
        assert store.stats().region_used == used
        store[name] = b""
        assert store.stats().region_used == used


def test_a_division_takes_all_its_pages_or_none(open_store):
    """It needs a page for each level of the tree that is full, and one for a new root."""
    store = open_store(max_size=1 << 20)
    core = store._catalog.core
    taken, refused = [], []
    with pytest.raises(pmstore.OutOfSpaceError):
        while True:
            taken.append(core.alloc(PAGE - 8))
    for i in range(60):
        name, again = f"{i * 37 % 60:0700}".encode(), 0
        while True:
            used = store.stats().region_used
            try:
                core.put(name, Entry(0, 0, 1, 0, b""))
                break
            except pmstore.OutOfSpaceError:
                assert store.stats().region_used == used
                core.free(taken.pop(), PAGE - 8)
                again += 1
        refused.append(again)
    assert set(refused) >= {0, 1, 2, 3}
    store.commit()
    assert not core.check()
