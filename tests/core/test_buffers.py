"""Buffers over extents: which of them is used again, and what becomes of it when the extent changes its owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.support.crashes import assert_survives, record
from tests.support.images import PAGE
from tests.support.places import entry_of, offset_of

LENGTHS = [9, 511, 3000]  # elements: a block of a slab, a page, several pages


def opened(store: pmstore.Store, name: str, writable: bool = True) -> np.ndarray[Any, Any]:
    """A buffer of the core, beside the one that the store keeps for a name."""
    entry = entry_of(store, name)
    return np.frombuffer(store._catalog.core.buffer(entry.offset, entry.length, writable), count=9)


def with_zeros(store: pmstore.Store, length: int) -> pmstore.Store:
    store["x"] = np.zeros(length)
    store.commit()
    return store


def replace_by_ones(store: pmstore.Store, length: int) -> None:
    """Space of "x" that nothing keeps is free after the first commit, and the new array takes it."""
    del store["x"]
    store.commit()
    store["y"] = np.ones(length)
    store.commit()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_new_array_in_the_place_of_one_of_this_transaction_is_committed(open_store, length):
    """The old one lets go of its buffer before it is deleted: nobody owns that any more."""
    store = open_store()
    store.create_array("old", length)[:] = 1
    before = offset_of(store, "old")
    del store["old"]
    x = store.create_array("new", length)
    assert offset_of(store, "new") == before
    x[:] = 2
    store.commit()
    x[:] = 3
    store.commit()
    store.close()
    with open_store(verify=True) as store:
        assert (store["new"] == 3).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_buffers_behind_one_that_nobody_owns_are_used_again(open_store, length):
    store = open_store()
    store.create_array("old", length)[:] = 1
    before = offset_of(store, "old")
    del store["old"]
    store.create_array("new", length)[:] = 2
    assert offset_of(store, "new") == before
    buffers = store.stats().buffers
    for _ in range(20):
        assert store["new"][0] == 2
    assert store.stats().buffers == buffers


@pytest.mark.parametrize("length", LENGTHS)
def test_each_buffer_has_one_user(open_store, length):
    """Two users of an extent have a buffer each, so that the second keeps its bytes when the first lets go."""
    store = with_zeros(open_store(), length)
    first, second = opened(store, "x"), opened(store, "x")
    del first
    replace_by_ones(store, length)
    assert not second.any()


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_nothing_is_left_of_a_buffer_without_user_and_owner(open_store, ended):
    store = open_store()
    store["kept"] = 1
    store.commit()
    buffers = store.stats().buffers
    x = store.create_array("x", 3000)
    del x
    if ended == "commit":
        del store["x"]
    getattr(store, ended)()
    assert store.stats().buffers == buffers


def test_buffers_of_arrays_that_were_read_do_not_pile_up(open_store):
    """A store that is only read makes no commits, which free such buffers in others."""
    with open_store() as store:
        store.update({f"{i}": np.full(9, i) for i in range(1000)})
    with open_store(mode="r") as store:
        assert all(store[f"{i}"][0] == i for i in range(1000))
        assert store.stats().buffers < 200


@pytest.mark.parametrize("length", LENGTHS)
def test_I9_a_buffer_that_is_used_again_keeps_its_space(open_store, length):
    store = with_zeros(open_store(), length)
    x = opened(store, "x")
    buffers = store.stats().buffers
    del x
    x = opened(store, "x")
    assert store.stats().buffers == buffers
    replace_by_ones(store, length)
    assert not x.any()


@pytest.mark.parametrize("length", LENGTHS)
def test_what_may_be_written_is_asked_each_time(open_store, length):
    """A buffer that was opened to be read is not the one of a program that writes."""
    store = with_zeros(open_store(), length)
    assert not opened(store, "x", writable=False).any()
    x = opened(store, "x")
    x[:] = 1
    del x
    store.commit()
    store.close()
    with open_store() as store:
        assert store["x"][:9].all()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mark_reaches_the_buffer_that_is_written(open_store, length):
    """Another one over the same extent only reads."""
    store = with_zeros(open_store(), length)
    reads, x = opened(store, "x", writable=False), opened(store, "x")
    store.mark_dirty(x)
    with store.transaction(only=[x]):
        x[:] = 1
    assert reads.all()
    store.close()
    with open_store() as store:
        assert store["x"][:9].all()


@pytest.mark.parametrize("before", [0, 1, 3])
def test_I11_a_rollback_leaves_an_array_in_the_place_of_metadata(open_store, before):
    """The last of its pages belonged to a slab that came and went in the same transaction."""
    store = open_store()
    if before:
        store.create_array("before", 511 * before)
    store.create_array("small", 100)
    page = offset_of(store, "small") // PAGE * PAGE - before * PAGE
    store.clear()
    x = store.create_array("x", 511 * (before + 1))
    assert offset_of(store, "x") == page
    x[:] = 7
    store.rollback()
    assert (x == 7).all() and "x" not in store
    store["y"] = np.ones(511)
    store.commit()
    assert (x == 7).all() and store.check().ok


def test_I1_contents_in_the_place_of_metadata_are_flushed(medium: Medium) -> None:
    """The page belonged to a slab that came and went in the same transaction. A commit changes a few of its bytes, and
    then the log is emptied."""

    def run(store: pmstore.Store) -> None:
        store.create_array("small", 100)
        page = offset_of(store, "small") // PAGE * PAGE
        store.clear()
        x = store.create_array("x", 511)
        assert offset_of(store, "x") == page
        x[:] = 7
        store.commit()
        x[3] = 8
        store.commit()
        store.close()

    assert_survives(record(medium.directory / "store.pm", medium.name, run), budget=60)


def test_I11_a_slab_in_the_place_of_metadata_that_a_rollback_undid(open_store):
    """A commit takes the slab's header and its blocks, and not the whole page."""
    store = open_store()
    store["a"] = 1
    store.commit()
    for k in range(300):  # a catalog of several pages
        store[f"k{k}"] = k
    store.rollback()
    small = store.create_array("small", 9)
    small[:] = 7
    store.commit()
    store.create_array("other", 9)[:] = 8
    small[:] = 9
    store.commit()
    assert store.check().ok
    store.close()
    with open_store(verify=True) as store:
        assert (store["small"] == 9).all() and (store["other"] == 8).all() and store.check().ok


def test_I9_space_up_to_an_array_that_lives_is_used_again(open_store):
    store = open_store()
    for name in "abc":
        store[name] = np.zeros(511)
    store.commit()
    place, held = offset_of(store, "a"), store["b"]
    assert offset_of(store, "b") == place + PAGE
    del store["a"], store["b"]
    store.commit()
    store["d"] = np.ones(511)
    assert offset_of(store, "d") == place and not held.any()
