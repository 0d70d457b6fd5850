"""Arrays of any shape, in chunks of any shape, are read and written in blocks that take little memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._interchange.source import places
from tests.interchange.test_import import h5py, zarr

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")

PIECE = 1 << 16
SHAPES = {
    "a row": ((1, 1 << 21), (1, 1 << 13)),
    "columns": ((1 << 14, 128), (1 << 14, 1)),
    "four axes": ((4, 32, 64, 256), (4, 8, 16, 32)),
    "a row of columns": ((1, 1 << 14, 128), (1, 1 << 14, 1)),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source.PIECE", "hdf5.PIECE", "zarr._CHUNK"):
        monkeypatch.setattr(f"pmstore._interchange.{name}", PIECE)


@pytest.fixture
def traced() -> Iterator[None]:
    """Numpy's arrays are traced, too; what the HDF5 library itself allocates is not."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _written(path: Path, form: str, array: Any, chunks: Any) -> None:
    if form == "hdf5":
        with h5py().File(path, "w") as file:
            file.create_dataset("x", data=array, chunks=chunks)
    else:
        zarr().open_group(path, mode="w").create_array("x", data=array, chunks=chunks or array.shape)


@pytest.mark.parametrize("form", ["hdf5", "zarr"])
@pytest.mark.parametrize("case", SHAPES)
def test_an_import_takes_little_memory(
    store: pmstore.Store, tmp_path: Path, small_pieces: None, traced: None, form: str, case: str
) -> None:
    shape, chunks = SHAPES[case]
    array = np.arange(math.prod(shape), dtype="f8").reshape(shape)
    _written(tmp_path / "x", form, array, chunks)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    pmstore.load_into(store, tmp_path / "x", form)
    assert tracemalloc.get_traced_memory()[1] - before < array.nbytes // 2
    assert np.array_equal(store["x"], array)


@pytest.mark.parametrize("shape", [(1, 1 << 21), (2, 1, 1 << 20), (1 << 21,), (1 << 13, 256)], ids=str)
def test_an_export_takes_little_memory(
    tmp_path: Path, small_pieces: None, traced: None, form: str, shape: tuple[int, ...]
) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store["x"] = np.arange(math.prod(shape), dtype="f8").reshape(shape)
    with pmstore.open(tmp_path / "run.pm", "r") as store:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        pmstore.export(store, tmp_path / "x", form)
        peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < 4 * math.prod(shape)  # half of it
    with pmstore.open(":memory:") as again:
        pmstore.load_into(again, tmp_path / "x", form)
        assert np.array_equal(again["x"], np.arange(math.prod(shape), dtype="f8").reshape(shape))


def test_many_small_chunks_are_not_read_at_once(
    store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HDF5 library takes some KiB for each of them, also for those that the file lacks."""
    library, sizes = h5py(), []
    with library.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (2, 20_000), "f4", chunks=(1, 1))
    read = library.Dataset.read_direct

    def noted(self: Any, block: Any, *places: Any) -> None:
        sizes.append(block.size)
        read(self, block, *places)

    monkeypatch.setattr(library.Dataset, "read_direct", noted)
    pmstore.load_into(store, tmp_path / "x.h5")
    assert sum(sizes) == 40_000 and max(sizes) <= 8192


def test_blocks_are_all_of_an_array_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmstore._interchange.source.PIECE", 64)
    monkeypatch.setattr("pmstore._interchange.source._MANY", 40)
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(rng.integers(0, (3, 9, 60)[int(rng.integers(3))], int(rng.integers(0, 5))).tolist())
        chunks = tuple(rng.integers(1, 20, len(shape)).tolist()) if rng.integers(4) else ()
        array = np.arange(math.prod(shape), dtype="f8").reshape(shape)
        blocks = [array[place or ...] for place in places(shape, 8, 64, chunks)]
        assert np.array_equal(np.concatenate([np.empty(0), *(block.ravel() for block in blocks)]), array.ravel())
        assert all(block.nbytes <= 16 * 64 and block.size for block in blocks)
        for place in places(shape, 8, 64, chunks) if chunks else ():
            touched = [
                (part.stop - 1) // chunk - part.start // chunk for part, chunk in zip(place, chunks, strict=True)
            ]
            assert math.prod(n + 1 for n in touched) <= 2 * 40


def test_an_element_and_a_chunk_above_any_limit() -> None:
    assert list(places((3,), 1 << 30, 1 << 20)) == [(slice(i, i + 1),) for i in range(3)]
    assert list(places((), 1 << 30, 1 << 20)) == [()]
    assert list(places((2, 0), 8, 1 << 20, (1, 1))) == []
    assert next(places((1 << 20, 1 << 10), 8, 1 << 20, (1 << 20, 1))) == (slice(0, 8192), slice(0, 1024))
