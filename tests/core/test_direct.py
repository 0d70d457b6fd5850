"""Direct writes (D3): contents of new extents, which a commit declares with the hashes that it kept (I6)."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recorder, Recording
from tests.support.crashes import assert_survives, record
from tests.support.images import PAGE
from tests.support.places import offset_of


def sound(store: pmstore.Store) -> bool:
    """Whether the committed bytes have the hashes that were declared with them."""
    store.commit()
    with pmstore.open(store.path, "r") as reader:
        return bool(store.check().ok and reader.check().ok)


@pytest.mark.parametrize("at", [0, 100, PAGE - 8, 3 * PAGE, 3 * PAGE + 50])
def test_a_part_of_a_block_that_was_written_before(open_store: Any, at: int) -> None:
    store, expected = open_store(), np.arange(3 * PAGE + 100, dtype="u1")
    store["x"] = expected
    store._catalog.core.write(offset_of(store, "x"), at, bytes(8), 8)
    expected[at : at + 8] = 0
    assert sound(store) and np.array_equal(store["x"], expected)


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE + 100, 100 * PAGE])
def test_what_is_written_directly_is_counted(open_store: Any, size: int) -> None:
    store = open_store()
    store["values"] = np.ones(size, "u1")
    store.create_array("filled", size, "u1", fill_value=1)
    store.commit()
    assert store.stats().bytes_direct == 2 * size


def test_what_a_new_array_got_through_memory_is_counted(open_store: Any) -> None:
    store = open_store()
    x = store.create_array("x", 6 * PAGE + 100, "u1")
    before = store.stats().bytes_direct
    x[PAGE : 3 * PAGE] = 1
    x[4 * PAGE] = x[-1] = 1
    store.commit()
    assert store.stats().bytes_direct - before == 3 * PAGE + 100


def test_whole_pages_are_written_together(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm", media="trace:file") as store:
        store._catalog.core.trace.clear()
        store["x"] = np.ones(200 * PAGE, "u1")
        recording = Recording("file", b"", *store._catalog.core.trace.raw())
    kinds = [recording.event(number).kind for number in range(len(recording))]
    assert kinds.count(lib.PM_EVENT_WRITE) < 20


@pytest.mark.parametrize("number", [1, 2])
def test_a_write_without_space_is_not_taken_for_written(tmp_path: Path, number: int) -> None:
    with Recorder(tmp_path / "s.pm", "file") as recorder, pmstore.open(tmp_path / "s.pm") as store:
        store["x"] = np.zeros(8 * PAGE, "u1")
        recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC)
        with pytest.raises(pmstore.OutOfSpaceError):
            for half in (0, 4 * PAGE):
                store._catalog.core.write(offset_of(store, "x"), half, b"\1" * 4 * PAGE, 4 * PAGE)
        recorder.trace.fail(0, 0, 0)
        assert sound(store)
        written = 4 * PAGE * (number - 1)
        assert store["x"][:written].all() and not store["x"][written:].any()


@pytest.mark.parametrize(
    ("size", "count"), [*itertools.product((8, 12, 20, 24), (1000, 5000, 120_000)), (1 << 20, 3), (3 << 19, 3)]
)
def test_fill_values_of_any_size(open_store: Any, size: int, count: int) -> None:
    """Patterns that don't fit into a page come again after some pages, and each of these has a hash of its own."""
    store, dtype = open_store(), np.dtype([("number", "i4"), ("rest", f"V{size - 4}")])
    value = np.array((7, bytes(i % 251 + 1 for i in range(size - 4))), dtype)
    x = store.create_array("x", count, dtype, fill_value=value)
    assert (x["number"] == 7).all()
    del x
    assert sound(store)
    assert store["x"].tobytes() == value.tobytes() * count


def scattered(store: pmstore.Store) -> None:
    """The last commit has new arrays in 80 places apart from each other: more ranges than the medium lists. Other pages
    are not written back yet."""
    for i in range(200):
        store[f"x{i}"] = np.full(600, float(i))
    store.commit()
    store["rest"] = np.zeros(1 << 18)
    store.commit()
    for name in ["rest", *(f"x{i}" for i in range(0, 200, 2))]:
        del store[name]
    store.commit()
    for step in range(3):  # the log becomes large enough, and is emptied once
        if step == 2:
            store._catalog.core.checkpoint()
        for i in range(1, 200, 2):
            store[f"x{i}"][:] += 1
        store.commit()
    for i in range(80):
        store[f"y{i}"] = np.full(600, -1.0 - i)
    store.commit()


def test_more_ranges_than_the_medium_lists_are_all_durable_before_the_record(tmp_path: Path) -> None:
    recording = record(tmp_path / "store.pm", "file", scattered)
    kinds = [recording.event(number).kind for number in range(len(recording))]
    last = len(kinds) - kinds[::-1].index(lib.PM_EVENT_COMMIT_BEGIN)
    assert lib.PM_EVENT_SYNC in kinds[last:] and lib.PM_EVENT_SYNC_RANGE not in kinds[last:]
    assert_survives(recording, budget=60)
