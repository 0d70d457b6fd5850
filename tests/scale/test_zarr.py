"""Arrays of zarr as shards: their chunks, and what a worker finds of them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial, shards_of
from tests.support.sharded import Walk, result, rows

zarr = pytest.importorskip("zarr", reason="no zarr: make test-scale installs it")

X = rows(0, 60)


def stored(store: Any, **options: Any) -> Any:
    array = zarr.create_array(store, shape=X.shape, chunks=(13, 4), dtype="f8", **options)
    array[:] = X
    return array


@pytest.mark.parametrize("options", [{}, {"name": "a/b"}, {"zarr_format": 2, "order": "F"}])
def test_chunks_are_shards_wherever_a_worker_was_started(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    array = stored("x.zarr", **options)
    blocks = [X[i : i + 13] for i in range(0, 60, 13)]
    expected = [np.asarray(array[i : i + 13]) for i in range(0, 60, 13)]
    shards, root = shards_of(array), array.store.root
    monkeypatch.chdir("elsewhere")
    for several in (shards, pickle.loads(pickle.dumps(shards))):
        found = [shard() for shard in several]
        assert list(map(np.ndarray.tolist, found)) == list(map(np.ndarray.tolist, blocks))
        assert [one.strides for one in found] == [one.strides for one in expected]
    assert array.store.root == root  # the program's array is as it was
    assert not os.listdir()


def test_chunks_that_a_worker_does_not_find(tmp_path: Path) -> None:
    """zarr gives fill values for them."""
    array = stored(tmp_path / "x.zarr")
    shards = shards_of(array)
    os.rename(tmp_path / "x.zarr", tmp_path / "y.zarr")
    with pytest.raises(FileNotFoundError, match=rf"no zarr array 'file://{tmp_path}/x.zarr' here: store it"):
        shards[0]()
    with pytest.raises(pmstore.ShardError, match=r"(?s)shard 0 of 5.*FileNotFoundError.*x.zarr"):
        Walk(array).run(engine=Serial())
    assert os.listdir(tmp_path) == ["y.zarr"]


@pytest.mark.parametrize(
    "other", [{"shape": (59, 4)}, {"dtype": "f4"}, {"chunks": (12, 4)}, {"shape": (60, 5), "chunks": (13, 5)}]
)
def test_a_worker_that_finds_another_array(other: dict[str, Any], tmp_path: Path) -> None:
    shards = shards_of(stored(tmp_path / "x.zarr"))
    zarr.create_array(
        tmp_path / "x.zarr", **{"shape": X.shape, "chunks": (13, 4), "dtype": "f8", **other}, overwrite=True
    )
    with pytest.raises(ValueError, match=r"x\.zarr' is another array now: one of float.* in chunks of"):
        shards[0]()


def test_a_worker_that_finds_another_order_of_bytes(tmp_path: Path) -> None:
    shards = shards_of(stored(tmp_path / "x.zarr", zarr_format=2))
    zarr.create_array(tmp_path / "x.zarr", shape=X.shape, chunks=(13, 4), dtype=">f8", zarr_format=2, overwrite=True)
    with pytest.raises(ValueError, match=r"x\.zarr' is another array now: one of >f8.* and it was one of float64"):
        shards[0]()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("before, after", [(None, "auto"), ("auto", None)])
def test_an_array_that_was_written_anew_with_other_codecs(
    version: int, before: Any, after: Any, tmp_path: Path
) -> None:
    """A worker has the metadata of the array as it was when the fit began."""
    shards = shards_of(stored(tmp_path / "x.zarr", zarr_format=version, compressors=before))
    stored(tmp_path / "x.zarr", zarr_format=version, compressors=after, overwrite=True)
    assert np.array_equal(np.concatenate([shard() for shard in shards]), X)


def test_texts(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", shape=(4,), chunks=(2,), dtype=np.dtypes.StringDType())
    array[:] = np.array(["a", "bc", "", "d"], dtype=np.dtypes.StringDType())
    assert [shard().tolist() for shard in shards_of(array)] == [["a", "bc"], ["", "d"]]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("is_file", [True, False])
def test_numbers_in_another_order_of_bytes(version: int, is_file: bool, tmp_path: Path) -> None:
    """zarr 3 forgets the order when the array is opened again, as by a program that resumes its fit."""
    store = tmp_path / "x.zarr" if is_file else zarr.storage.MemoryStore()
    made = zarr.create_array(store, shape=X.shape, chunks=(13, 4), dtype=">f8", zarr_format=version)
    made[:] = X
    first, again = ([shard() for shard in shards_of(one)] for one in (made, zarr.open_array(store)))
    assert np.array_equal(np.concatenate(first), X) and np.array_equal(np.concatenate(again), X)
    assert {one.dtype for one in first} == {one.dtype for one in again}


def test_an_array_in_memory_travels_once(tmp_path: Path) -> None:
    array = stored(zarr.storage.MemoryStore(), compressors=None)
    shards = shards_of(array)
    sizes = [len(pickle.dumps(shard)) for shard in shards]
    assert len(shards) == 5 and sum(sizes) < X.nbytes + 5 * 500
    expected = result(Walk(stored(tmp_path / "x.zarr")).run(engine=Serial()))
    assert result(Walk(array).run(engine=Serial())) == result(Walk(array).run(engine=1)) == expected


def test_a_store_that_has_no_copy_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zarr.storage.ZipStore(path, mode="w") as store:
        stored(store)
    with zarr.storage.ZipStore(path, mode="a") as store:
        shards = shards_of(zarr.open_array(store))
        assert np.array_equal(np.concatenate([shard() for shard in shards]), X)
