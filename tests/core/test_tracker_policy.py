"""Which arrays are armed, and what commits ask the kernel for the others: csrc/dirty/policy.h.

A wrong decision loses no write; it makes commits slower. Here the kernel says which memory it watches, and the shim
counts how often it is asked, so that no time is measured. The costs in csrc/dirty/policy.c give the numbers of commits.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import Medium
from tests.core.test_trackers import Open, can_scan, can_watch
from tests.support import shim as shims
from tests.support.shim import variable

PAGE = 4096
PAGEMAP_SCAN = 0xC0606610
LEAST = 64  # pages: of fewer, all are compared
ARMED_MOST = 1024  # arrays
CAN_BE_ARMED, WRITTEN = 1, 2  # PAGE_IS_WPALLOWED, PAGE_IS_WRITTEN
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def can_be_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMSTORE_TRACKER", raising=False)
    if not (can_scan() and can_watch()):
        pytest.skip("the kernel watches no memory, or does not let this process use it")


def pages_that_are(what: int, array: Array) -> int:
    """How many of the pages of an array have this category of the kernel."""
    address = address_of(array)
    start, end = address // PAGE * PAGE, -(-(address + array.nbytes) // PAGE) * PAGE
    room = ctypes.create_string_buffer(24 * 1024)  # for so many ranges of pages
    argument = bytearray(struct.pack("=12Q", 96, 0, start, end, 0, ctypes.addressof(room), 1024, 0, 0, what, 0, what))
    with open("/proc/self/pagemap", "rb") as pagemap:
        count = fcntl.ioctl(pagemap, PAGEMAP_SCAN, argument)
    ranges = itertools.islice(struct.iter_unpack("=3Q", room), count)
    return sum(last - first for first, last, _ in ranges) // PAGE


def is_armed(array: Array) -> bool:
    """Whether the kernel tells writes to the pages of an array."""
    return pages_that_are(CAN_BE_ARMED, array) > 0


def written_whole(store: pmstore.Store, pages: int) -> Array:
    """An array whose pages are all private, so that it pays to watch it if little changes."""
    w = store.create_array("w", (pages, PAGE // 8))
    store.commit()
    w += 1
    store.commit()
    return w


def commits(store: pmstore.Store, w: Array, changed: int, most: int) -> list[bool]:
    """Commits, each of which changes so many pages: whether the array is armed after each."""
    out = []
    for _ in range(most):
        w[:changed, 0] += 1
        store.commit()
        out.append(is_armed(w))
    return out


def test_an_array_of_which_little_changes_is_armed_after_some_commits(open_store: Open) -> None:
    """20 of 300 pages: each commit compares 280 in vain, until that has cost more than watching the array twice."""
    store = open_store()
    w = written_whole(store, 300)
    after = commits(store, w, 20, 10)
    assert after == sorted(after) and after[-1] and not after[2]
    assert all(commits(store, w, 20, 30)), "faults cost less than comparing all pages would"
    for _ in range(3):
        w[:20] = -1
        store.rollback()
    assert is_armed(w) and (w[:, 1] == 1).all()


def test_an_array_of_which_most_changes_is_not_armed(open_store: Open) -> None:
    store = open_store()
    w = written_whole(store, 100)
    assert not any(commits(store, w, 95, 40))


def test_an_array_that_changes_as_a_whole_now_and_then_is_not_armed(open_store: Open) -> None:
    """Faults in all of its pages would cost more than the comparisons in between."""
    store = open_store()
    w = written_whole(store, 300)
    for _ in range(4):
        w += 1
        store.commit()
    for _ in range(10):
        direct = store.stats().bytes_direct
        assert not any(commits(store, w, 20, 2))
        w += 1
        store.commit()
        assert store.stats().bytes_direct - direct >= w.nbytes, "it has two slots"


def test_an_array_of_which_most_changes_is_armed_no_longer(open_store: Open) -> None:
    store = open_store()
    w = written_whole(store, 300)
    assert commits(store, w, 20, 10)[-1]
    assert not any(commits(store, w, 250, 4)[1:])
    after = commits(store, w, 1, 40)
    assert after == sorted(after) and after[-1], "it is armed again"


def test_an_array_whose_changes_are_declared_is_armed_no_longer(open_store: Open) -> None:
    """Its faults find nothing that the program has not said."""
    store = open_store()
    w = written_whole(store, 300)
    for _ in range(2):
        assert commits(store, w, 20, 10)[-1]
        for i in range(20):
            with store.transaction(only=[w[:4]]):
                w[:4] += 1
            assert is_armed(w) or i > 2
        assert not is_armed(w)


def test_an_array_in_which_nothing_changes_stays_armed(open_store: Open) -> None:
    store = open_store()
    w = written_whole(store, 300)
    assert commits(store, w, 20, 10)[-1]
    assert all(commits(store, w, 0, 3))


def test_a_rollback_of_an_array_that_is_not_armed(open_store: Open) -> None:
    """It lets others be armed as before."""
    store = open_store()
    w = written_whole(store, 300)
    other = store.create_array("other", (100, PAGE // 8))
    store.commit()
    other[:3] = 1
    store.commit()
    other[:3] = -1
    store.rollback()
    assert not is_armed(other) and (other[:3] == 1).all()
    assert commits(store, w, 20, 10)[-1]


def test_an_array_before_another_one_does_not_end_its_notes(open_store: Open) -> None:
    """The space of the other one is armed no longer when it is used again (I9)."""
    store = open_store()
    store.create_array("before", (100, PAGE // 8))
    store.create_array("large", (300, PAGE // 8))
    store.close()
    store = open_store()
    large = store["large"]
    large += 1
    assert commits(store, large, 20, 20)[-1]
    assert address_of(store["before"]) < address_of(large)
    store["before"][0] = 1
    store.commit()
    assert is_armed(large)
    address = address_of(large)
    del large, store["large"]
    store.commit()
    again = store.create_array("again", (300, PAGE // 8))
    assert address_of(again) == address and not is_armed(again)


def test_small_arrays_are_not_armed(open_store: Open) -> None:
    """Nor are those that take the place of one that was (I9)."""
    store = open_store()
    w = written_whole(store, LEAST - 1)
    assert not any(commits(store, w, 1, 40))
    large = store.create_array("large", (300, PAGE // 8))
    store.commit()
    large += 1
    assert commits(store, large, 20, 12)[-1]
    address = address_of(large)
    del large, store["large"]
    store.commit()
    small = []
    for i in range(9):
        small.append(store.create_array(f"small{i}", (30, PAGE // 8)))
        assert not any(map(is_armed, small))
    store.commit()
    assert address in map(address_of, small)
    assert not any(map(is_armed, small))


def test_the_smallest_array_that_is_armed(open_store: Open) -> None:
    store = open_store()
    w = written_whole(store, LEAST)
    assert commits(store, w, 1, 40)[-1]


@pytest.fixture
def forced(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> pmstore.Store:
    """Watches each array from its first commit on."""
    monkeypatch.setenv("PMSTORE_TRACKER", "uffd")
    return open_store()


def test_an_array_that_can_not_be_armed_is_not_tried_again(forced: pmstore.Store) -> None:
    store = forced
    w = store.create_array("w", (100, PAGE // 8))
    store.commit()
    assert commits(store, w, 1, 2)[-1]
    (offset,) = (row.entry.offset for row in store._catalog.core.scan(b"") if row.entry.length == w.nbytes)
    address = address_of(w)
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(store.path, os.O_RDWR)
    # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED
    assert mmap(address, 100 * PAGE, 3, 0x12, fd, offset + 2 * PAGE) == address
    os.close(fd)
    assert not any(commits(store, w, 1, 5))
    del w, store["w"]
    store.commit()
    w = store.create_array("w", (100, PAGE // 8))
    store.commit()
    assert address_of(w) == address and commits(store, w, 1, 2)[-1], "another array may be"


def test_an_array_that_is_not_in_memory_is_armed(open_store: Open, forced: pmstore.Store) -> None:
    """Its space is armed no longer when another one takes it (I9)."""
    forced.create_array("w", (100, PAGE // 8))
    forced.close()
    store = open_store()
    w = store["w"]
    store.commit()
    assert is_armed(w)
    address = address_of(w)
    del w, store["w"]
    store.commit()
    w = store.create_array("w", (100, PAGE // 8))
    assert address_of(w) == address and not is_armed(w)


@pytest.mark.parametrize(("written", "others"), [(40, 60), (60, 0)])
def test_where_most_pages_were_written_the_others_are_watched_too(
    open_store: Open, forced: pmstore.Store, written: int, others: int
) -> None:
    """A page that is not in memory counts as written until it is watched, and makes the kernel's list longer."""
    forced.create_array("w", (100, PAGE // 8))
    forced.close()
    store = open_store()
    w = store["w"]
    w[:written] = 1
    store.commit()
    assert pages_that_are(WRITTEN, w) == others


def test_so_many_arrays_are_armed_and_no_more(forced: pmstore.Store) -> None:
    """Each may split a mapping, of which the system allows some ten thousands."""
    store = forced

    arrays = {i: store.create_array(f"w{i}", 500) for i in range(ARMED_MOST + 20)}  # of one page each
    store.commit()
    for _ in range(2):
        for w in arrays.values():
            w[0] += 1
        store.commit()
        assert sum(map(is_armed, arrays.values())) == ARMED_MOST
    for i in range(100):
        del arrays[i], store[f"w{i}"]
    store.commit()
    fresh = [store.create_array(f"fresh{i}", 500) for i in range(100)]  # most of them in the places of those
    store.commit()
    store.commit()
    assert sum(map(is_armed, fresh)) > 50 and sum(map(is_armed, [*fresh, *arrays.values()])) <= ARMED_MOST


# ---- the questions


def count_questions(path: str, medium: str) -> None:
    """Run in another process, under the shim. Prints how often the kernel was asked in 32 commits, for arrays of which
    so many of 100 pages were written before. So much changes that none is armed.
    """
    with pmstore.open(path, media=medium) as store:  # type: ignore[call-overload]
        for written in (90, 50, 33):
            w = store.create_array(f"{written}", (100, PAGE // 8))
            store.commit()
            w[:written] += 1
            store.commit()
            before = variable("fault_scans", ctypes.c_long).value
            for _ in range(32):
                w[:written:3] += 1
                store.commit()
            print(variable("fault_scans", ctypes.c_long).value - before)
            assert not is_armed(w)
            del w, store[f"{written}"]
            store.commit()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_how_often_the_kernel_is_asked(medium: Medium, fault_library: Path) -> None:
    """Once in 16 commits if most pages are private, as the answer saves little, and by each commit otherwise."""
    path = medium.directory / "s.pm"
    assert shims.call(fault_library, count_questions, path, medium.name) == "2\n32\n32\n"
