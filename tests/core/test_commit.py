"""What a commit writes, seen from outside: how much, how often it waits, and that every way of writing it is sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Event, Recording
from tests.conftest import Medium

OpenStore = Callable[..., pmstore.Store]


def test_a_commit_without_changes_writes_nothing(store: pmstore.Store) -> None:
    store["x"] = np.ones(100)
    store.commit()
    before, sequence = store.stats(), store.sequence
    store["x"][:] = 1.0
    store.commit()
    after = store.stats()
    assert (after.bytes_logged, after.syncs, after.fences, store.sequence) == (
        before.bytes_logged,
        before.syncs,
        before.fences,
        sequence,
    )


def test_nor_does_one_whose_like_would_not_fit_the_log_any_more(store: pmstore.Store) -> None:
    """Making room before anything is known to have changed would write, and make the file larger."""
    array = store.create_array("x", 40_000)
    store.commit()
    for _ in range(3):
        array += 1
        store.commit()
        before = store.stats()
        store.commit()
        after = store.stats()
        assert (after.file_size, after.checkpoints, after.syncs, after.fences) == (
            before.file_size,
            before.checkpoints,
            before.syncs,
            before.fences,
        )


def events_of(store: pmstore.Store) -> list[Event]:
    recording = Recording("memory", b"", *store._catalog.core.trace.raw())
    return [recording.event(number) for number in range(len(recording))]


def test_one_ordering_point_for_a_commit_that_fits_the_log(medium: Medium, open_store: OpenStore) -> None:
    """It is one synchronous write of one range on disks. (Every second record of a trace leaves in parts: not this.)"""
    store = open_store(media=f"trace:{medium.name}")
    array = store.create_array("x", (100, 64))
    store["n"] = 0
    store.commit()
    store.stats()  # the committed image is up to date
    store._catalog.core.trace.clear()
    array[3:5] += 1
    store["n"] = 1
    store.commit()
    kinds = [event.kind for event in events_of(store)]
    ordering = [kind for kind in kinds if kind in (lib.PM_EVENT_FENCE, lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE)]
    assert ordering == [lib.PM_EVENT_SYNC_RANGE if medium.name == "file" else lib.PM_EVENT_FENCE]
    if medium.name == "file":
        assert kinds.index(lib.PM_EVENT_SYNC_RANGE) == 2  # after the commit's beginning and a single write


def test_stats_count_every_ordering_point(medium: Medium, open_store: OpenStore) -> None:
    store = open_store(media=f"trace:{medium.name}")
    store["n"] = 0
    before = store.stats()
    store._catalog.core.trace.clear()
    store["n"] = 1
    store.commit()
    store._catalog.core.checkpoint()
    store["large"] = np.zeros(100_000)  # for which the file grows
    store.commit()
    after, kinds = store.stats(), [event.kind for event in events_of(store)]
    assert after.fences - before.fences == kinds.count(lib.PM_EVENT_FENCE)
    assert after.syncs - before.syncs == kinds.count(lib.PM_EVENT_SYNC) + kinds.count(lib.PM_EVENT_SYNC_RANGE)
    assert medium.name == "file" or after.fences > before.fences + 1


def test_stats_count_all_bytes_that_reach_the_committed_image(store: pmstore.Store) -> None:
    x = store.create_array("x", 20_000)
    store.commit()
    before = store.stats()
    for i in range(3):
        x[[0, 5000, 9000]] = i + 1
        store.commit()
    after = store.stats()
    assert after.bytes_home - before.bytes_home >= 3 * 3 * 8


def test_the_log_grows_for_rare_checkpoints_up_to_a_limit(medium: Medium, store: pmstore.Store) -> None:
    array = store.create_array("x", 100_000)
    store.commit()
    for value in range(1, 300):
        array[:5120] = value  # 40 KiB
        store.commit()
    assert 1 << 20 < store.stats().log_size <= (16 << 20 if medium.name == "file" else 4 << 20)


def test_the_log_grows_for_large_commits_up_to_a_limit(directory: Path) -> None:
    with pmstore.open(directory / "store.pm", media="file") as store:
        pages = store.create_array("x", (6000, 512))
        store.commit()
        for value in range(1, 4):
            pages[::2, :5] = value  # 12 MB
            store.commit()
        assert 32 << 20 <= store.stats().log_size <= 64 << 20


def test_what_follows_an_array_in_its_last_page_is_not_logged(medium: Medium, open_store: OpenStore) -> None:
    """So that 62,720 bytes with their hashes, and the record's header, are sixteen pages."""
    store = open_store(media=f"trace:{medium.name}")
    array = store.create_array("x", 7840)
    store["n"] = 0
    store.commit()
    store.stats()  # the committed image is up to date
    store._catalog.core.trace.clear()
    array += 1
    store.commit()
    assert store.stats().dirty_bytes == 62_720 + 16 * 8
    if medium.name == "file":
        record = next(event for event in events_of(store) if event.kind == lib.PM_EVENT_WRITE)
        assert record.length == 16 * 4096


def test_only_what_changed_is_logged(medium: Medium, open_store: OpenStore) -> None:
    store = open_store()
    array = store.create_array("x", (4000, 64))  # 2 MB
    store.commit()
    array[1234, 5] = 1.0
    store.commit()
    assert store.stats().dirty_bytes <= (1024 if medium.name == "memory" else 3 * 4096)


def test_extents_that_change_as_a_whole_are_written_whole_for_a_while(medium: Medium, open_store: OpenStore) -> None:
    """Pages of an array that mostly changed are logged unseen; once it does not change any more, they are compared."""
    path = medium.directory / "whole.pm"
    rng = np.random.default_rng(0)
    with pmstore.open(path, media=medium.name) as store:
        array = store.create_array("x", 64 * 512)
        expected = np.zeros(64 * 512)
        for round_ in range(12):
            if round_ % 4 < 2:
                expected += rng.random(expected.size)
            else:
                expected[rng.integers(expected.size)] = round_
            array[:] = expected
            store.commit()
            if round_ % 4 == 3:
                assert store.stats().dirty_bytes <= 3 * 4096
        array += 1
        expected += 1
        store.commit()
        sequence = store.sequence
        store.commit()
        assert store.sequence == sequence  # bytes that did not change are never written
        assert store.check().ok
        store._drop(discard=True)
    with pmstore.open(path, media=medium.name) as store:
        np.testing.assert_array_equal(store["x"], expected)


@pytest.mark.long_on("file")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "crash"])
def test_a_commit_larger_than_any_log(medium: Medium, how: str) -> None:
    """It is written to free space, declared in a small record, and copied into the committed image (D3)."""
    path = medium.directory / "large.pm"
    store = pmstore.open(path, media=medium.name)
    array = store.create_array("x", 9_500_000)  # 76 MB; the log has 64 MiB at most
    store.commit()
    array += np.arange(9_500_000)
    store["also"] = "new"
    store.commit()
    assert store.stats().log_size <= 64 << 20
    if how == "crash":
        store._drop(discard=True)
    else:
        store.close()
    del array
    with pmstore.open(path, media=medium.name, verify=True) as store:
        assert store["also"] == "new"
        np.testing.assert_array_equal(store["x"], np.arange(9_500_000))


@pytest.mark.long_on("file")
def test_a_commit_larger_than_any_log_with_a_declared_write_set(medium: Medium) -> None:
    """The store grows in the commit, and its notes on declared pages move to a larger place."""
    path = medium.directory / "large.pm"
    with pmstore.open(path, media=medium.name) as store:
        array = store.create_array("x", 9_100_000)
        store.commit()
        before = store.stats()
        with store.transaction(only=[array[1000:]]):
            array[1000:] = 7
        assert before.region_size < 128 << 20 < store.stats().region_size
        store._drop(discard=True)
        del array
    with pmstore.open(path, media=medium.name) as store:
        assert (store["x"][:1000] == 0).all() and (store["x"][1000:] == 7).all()


def test_a_commit_beyond_the_log_that_finds_no_space_stays_pending(medium: Medium, open_store: OpenStore) -> None:
    store = open_store(max_size=24 << 20)
    array = store.create_array("x", 2_000_000)  # 16 MB
    store.commit()
    array += 1
    with pytest.raises(pmstore.OutOfSpaceError):
        store.commit()
    assert (array == 1).all()
    array[1000:] = 0
    store.commit()
    assert store.check().ok
    store.rollback()
    assert array[:1000].sum() == 1000 and not array[1000:].any()


def test_many_arrays_in_one_commit(store: pmstore.Store) -> None:
    arrays: list[np.ndarray[Any, Any]] = [store.create_array(f"g/{i}", 1 + i % 40) for i in range(800)]
    store.commit()
    for i, array in enumerate(arrays):
        array += i
    store.commit()
    store.rollback()
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert store.check().ok
