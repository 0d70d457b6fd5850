"""`mark_dirty`: writes that the kernel does not see are committed and rolled back, under every tracker.

A write is hidden by protecting its pages again (tests/support/unseen.py), or is one of io_uring into pinned memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import run_in_fork
from tests.core.test_trackers import LARGE, Open, assert_committed, committed, fill_up, tracked, tracker  # noqa: F401
from tests.support.bad_disk import BadDisk
from tests.support.images import PAGE
from tests.support.pinned import Pinned
from tests.support.places import offset_of
from tests.support.unseen import hide

pytestmark = pytest.mark.usefixtures("tracker")


def write_unseen(array: np.ndarray[Any, Any], value: float) -> None:
    array[...] = value
    hide(array)


def test_marked_bytes_are_committed(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    other = tracked(store, "other")
    read_only = w[80:82]
    read_only.flags.writeable = False
    for k, view in enumerate((w[17], w[100:104], w[200:230:7, 3], w[::-1][5:7], w.T[3], read_only, w)):
        write_unseen(w[80:82] if view is read_only else view, -1.0 - k)
        store.mark_dirty(view)
        other[k] = k  # seen
        store.commit()
        assert_committed(store)
    before = store.sequence
    store.mark_dirty(w)
    store.commit()
    assert store.sequence == before  # nothing had changed
    assert store.check().ok


def test_a_mark_reaches_each_page_of_its_bytes(open_store: Open) -> None:
    store = open_store()
    w = tracked(store).reshape(-1).view("u1")
    for k, (first, last) in enumerate([(0, 1), (4095, 4096), (4096, 4097), (4095, 4097), (8190, 12289)]):
        write_unseen(w[first:last], k + 7)
        store.mark_dirty(w[first:last])
        store.commit()
        assert_committed(store)


def ones(dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(b"1\0\0\0" * dtype.itemsize, dtype, 1)[0]


@pytest.mark.long
def test_arrays_of_every_form(open_store: Open) -> None:
    """Also those that commits always compare, for which a mark is nothing."""
    store = open_store()
    large = (300, 513)
    for name, array in {
        "small": np.zeros(3),
        "scalar": np.zeros(()),
        "empty": np.zeros((0, 3)),
        "F": np.zeros(large, order="F"),
        "structured": np.zeros(large, [("a", "i4"), ("b", "f8")]),
        "text": np.zeros(large, "U3"),
        "time": np.zeros(large, "M8[s]"),
        "swapped": np.zeros(large, ">f4"),
    }.items():
        store[name] = array
    store.commit()
    for k in range(25):  # until they are watched
        for name in ("F", "structured", "text", "time", "swapped"):
            store[name][k, 0] = ones(store[name].dtype)
        store.commit()
    for name in store:
        array = store[name]
        array[...] = ones(array.dtype)
        hide(array)
        store.mark_dirty(array)
    store.commit()
    assert_committed(store)
    new = store.create_array("new", (300, 512))
    new[7] = 3
    store.mark_dirty(new)  # nothing of it is committed yet
    store.commit()
    assert_committed(store)


def test_a_rollback_takes_marked_bytes_back(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    before = w.copy()
    write_unseen(w[50:53], 7.0)
    w[9] = 7  # seen
    store.mark_dirty(w[50:53])
    store.rollback()
    assert np.array_equal(w, before)
    with pytest.raises(KeyError), store.transaction():
        write_unseen(w[3], 7.0)
        store.mark_dirty(w[3])
        raise KeyError
    assert np.array_equal(w, before)
    store.commit()
    assert_committed(store)


def test_I11_a_rollback_leaves_a_marked_array_behind_another(open_store: Open) -> None:
    """It was marked before it lost its name, and nothing reads the mark any more."""
    store = open_store()
    shape = (48, 511)  # with its hashes on whole pages
    w, behind = tracked(store, shape=shape), tracked(store, "behind", shape)
    assert offset_of(store, "behind") == offset_of(store, "w") + shape[0] * PAGE
    before = w.copy()
    store.mark_dirty(behind)
    del store["behind"]
    store.commit()
    w[-1], behind[:] = 7, 8
    store.mark_dirty(w[-1])
    store.rollback()
    assert np.array_equal(w, before) and (behind == 8).all()


def test_I10_a_mark_outlives_a_commit_of_the_array_behind(open_store: Open) -> None:
    """Marks are noted in words of 64 pages: one has the last pages of an array and the first of the next."""
    store = open_store()
    w, behind = tracked(store), tracked(store, "behind")
    assert offset_of(store, "behind") // PAGE % 64 > 10
    write_unseen(w[-1], 7.0)
    store.mark_dirty(w[-1])
    with store.transaction(only=[behind]):
        behind[2:5] = 8
    store.commit()
    assert_committed(store)


@pytest.mark.parametrize("pages", [300, LARGE])
def test_a_mark_declares_nothing(open_store: Open, pages: int) -> None:
    """It waits for a commit without a declared write set, however many come before. Nor do marks of so many pages that
    two threads would compare them."""
    store = open_store()
    w = tracked(store, "w", (pages, 512))
    x = tracked(store, "x")
    before = w.copy()
    write_unseen(w[50], 7.0)
    for k in range(3):
        with store.transaction(only=[x[k]]):
            store.mark_dirty(w[50] if pages < LARGE else w)
            x[k] = k
        assert np.array_equal(committed(store)["w"], before)
    with store.transaction(only=[w[51]]):
        w[51] = 8
    before[51] = 8
    assert np.array_equal(committed(store)["w"], before)
    with store.transaction():
        store["k"] = 1
    assert_committed(store)


@pytest.mark.long
def test_declared_violations_are_found_in_marked_arrays(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_DEBUG", "1")
    store = open_store()
    w = tracked(store)
    write_unseen(w[50, :2], 7.0)
    store.mark_dirty(w[50])
    with pytest.raises(pmstore.TransactionError, match=r"elements \[50, 0\] to \[50, 1\] of 'w'"):
        with store.transaction(only=[w[51]]):
            w[51] = 8
    store.commit()
    assert_committed(store)


@pytest.mark.long
def test_I10_a_mark_outlives_commits_that_fail_and_growth(open_store: Open) -> None:
    store = open_store(max_size=13 << 20)
    w = tracked(store, shape=(1100, 512))
    expected = w.copy()
    write_unseen(w[50], 7.0)
    store.mark_dirty(w[50])
    w[:50] = -expected[:50]  # with the rest, more than the log and what is free can hold
    w[51:] = -expected[51:]
    fill_up(store)
    with pytest.raises(pmstore.OutOfSpaceError):
        store.commit()
    w[:50] = expected[:50]
    w[51:] = expected[51:]
    store.group("filler").clear()
    store.commit()
    assert_committed(store)
    write_unseen(w[60], 7.0)
    store.mark_dirty(w[60])
    store["grows"] = np.zeros(1 << 20, "u1")
    store.commit()
    assert_committed(store)


def test_marks_do_not_outlive_their_array(open_store: Open) -> None:
    store = open_store()
    for k in range(4):
        w = tracked(store, f"w{k}")
        store.mark_dirty(w)
        del store[f"w{k}"]
        if k % 2:
            with pytest.raises(ValueError, match="neither a live array of this store"):
                store.mark_dirty(w)
        del w
        store.commit()
        reused = store.create_array(f"r{k}", (300, 512), fill_value=k)
        store.commit()
        reused[3] = -1
        store.commit()
        assert_committed(store)
    assert store.check().ok


@pytest.mark.long
def test_arrays_that_change_as_a_whole(open_store: Open) -> None:
    """They have two slots, and programs may see the one that is not current."""
    store = open_store()
    w = store.create_array("w", 200_000)
    for k in range(8):
        w += 1
        store.commit()
        write_unseen(w[1000 * k : 1000 * k + 3], -3.0)
        store.mark_dirty(w[1000 * k : 1000 * k + 3])
        store.commit()
        assert_committed(store)
        write_unseen(w[7:9], 5.0)
        store.mark_dirty(w[7:9])
        before = committed(store)["w"]
        store.rollback()
        assert np.array_equal(w, before)


@pytest.mark.long
def test_commits_that_become_durable_later(open_store: Open) -> None:
    store = open_store(durability="async", sync_interval=0.001)
    w = tracked(store)
    for k in range(5):
        write_unseen(w[10 * k], 7.0 + k)
        store.mark_dirty(w[10 * k])
        store.commit()
        before = w.copy()
        write_unseen(w[100 + k], 7.0)
        store.mark_dirty(w[100 + k])
        store.rollback()
        assert np.array_equal(w, before)
    store.sync()
    store.close()
    store = open_store(verify=True)
    assert np.array_equal(store["w"], before)


@pytest.mark.long
def test_closing_commits_what_is_marked(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    write_unseen(w[77], 7.0)
    store.mark_dirty(w)
    store.close()
    assert (open_store(verify=True)["w"][77] == 7).all()


def test_what_is_refused(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    w = tracked(store)
    constant = store.create_array("constant", (300, 512), writeable=False)
    store.commit()
    for array, error, text in (
        ([1.0], TypeError, "not list"),
        (w.data, TypeError, "not memoryview"),
        (w[0, 0], TypeError, "not float64"),
        (np.zeros(3), ValueError, r"shape \(3,\) and dtype float64 is neither a live array of this store"),
        (w[[1, 2]], ValueError, "a copy, as after indexing with a list of rows"),
        (constant, ValueError, "stored with writeable=False"),
        (constant[3:5], ValueError, "stored with writeable=False"),
    ):
        with pytest.raises(error, match=text):
            store.mark_dirty(array)
    store.mark_dirty(w[:0])
    store.mark_dirty(np.zeros(0))  # nothing can have changed
    with pmstore.open(tmp_path / "other.pm") as other:
        with pytest.raises(ValueError, match="of this store"):
            other.mark_dirty(w)
    run_in_fork(refused_in_a_fork, store, w)
    path = store.path
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        store.mark_dirty(w)
    with pmstore.open(path, "r") as reader, pytest.raises(pmstore.ReadOnlyStoreError):
        reader.mark_dirty(reader["w"])


def refused_in_a_fork(store: pmstore.Store, w: np.ndarray[Any, Any]) -> None:
    with pytest.raises(pmstore.ForkedStoreError):
        store.mark_dirty(w)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    """A file of 4 pages of sevens."""
    (tmp_path / "sevens").write_bytes(np.full(4 * 512, 7.0).tobytes())
    fd = os.open(tmp_path / "sevens", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_pinned_memory(open_store: Open, source: int) -> None:
    """The array stays registered with io_uring over many commits, and reads into it raise no page fault."""
    store = open_store()
    w = tracked(store)
    try:
        pinned = Pinned(w)
    except OSError as error:
        pytest.skip(f"no io_uring: {error}")
    try:
        for k in range(6):
            store.commit()
            pinned.read(source, 4096 * 40 * k, 4096 * (k % 4 + 1))
            w[299, k] = -1  # the program writes, too
            rows = slice(40 * k, 40 * k + k % 4 + 1)
            assert (w[rows] == 7).all()
            store.mark_dirty(w[rows])
            store.commit()
            assert_committed(store)
    finally:
        pinned.close()


def test_I10_changes_in_the_space_of_an_array_that_was_marked(open_store: Open) -> None:
    """The marks of a deleted array end with it. They do not take those of the arrays in its place along."""
    store = open_store()
    old = store.create_array("old", 100 * 512)
    store.commit()
    place = offset_of(store, "old")
    store.mark_dirty(old)
    del old, store["old"]
    store.commit()
    store["first"] = np.zeros(70 * 512)
    second = store.create_array("second", 70 * 512)
    assert offset_of(store, "first") == place < offset_of(store, "second") < place + 100 * PAGE
    store.commit()
    second[5] = 1
    store.commit()  # it is watched from now on
    second[7] = 2
    assert store._catalog.core.pending()
    first = store["first"]
    store.commit()
    assert not store._catalog.core.pending() and first[0] == 0
    assert_committed(store)


@pytest.mark.no_sanitizer
def test_bad_blocks_are_an_error(tmp_path: Path, tracker: str) -> None:  # noqa: F811
    """The pages of an array need not have been read before they are marked."""
    if tracker == "compare":
        pytest.skip("it reads all of an array in each commit, marked or not")
    try:
        disk = BadDisk(tmp_path)
    except OSError as error:
        pytest.skip(f"no file system of our own: {error}")
    try:
        with pmstore.open(disk.behind / "s.pm", "x", media="file") as store:
            store["w"] = np.full((300, 512), 3.0)
        contents = (disk.behind / "s.pm").read_bytes()
        page = contents.index(np.full(512, 3.0).tobytes()) // 4096
        disk.spoil("s.pm", page + 200)
        run_in_fork(marks_a_bad_block, disk.mount / "s.pm")
    finally:
        disk.close()


def marks_a_bad_block(path: Path) -> None:
    with pmstore.open(path, media="file") as store:
        w = store["w"]
        w[17] = 5
        store.mark_dirty(w[10:200])
        with pytest.raises(pmstore.StoreIOError, match="contents"):
            store.mark_dirty(w)
        store.commit()
        del w
