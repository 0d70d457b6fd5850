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
from pmstore.testing._store.recording import Recorder
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
