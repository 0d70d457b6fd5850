"""Arrays that grow, and datasets of HDF5 that do: exports and imports keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.interchange.test_round_trips import described

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")


@pytest.mark.parametrize(
    ("shape", "most"),
    [((0, 2), None), ((3, 2), None), ((3, 2), 3), ((3, 2), 100), ((3,), (1 << 63) - 1), ((2, 9999), 4)],
)
def test_arrays_that_grow(tmp_path: Path, form: str, shape: tuple[int, ...], most: int | None) -> None:
    """A program finds its array with the same maxshape, and appends to it."""
    longest = (most, *shape[1:])
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first.create_array("log", shape, maxshape=longest, fill_value=1)
        first["fixed"] = first["log"]
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second) and second.check().ok
        assert second.require_array("log", (0, *shape[1:]), maxshape=longest).shape == shape
        with pytest.raises(TypeError, match="'fixed' has the fixed shape"):
            second.append("fixed", np.zeros(shape[1:]))
        if most == shape[0]:
            with pytest.raises(ValueError, match="has maxshape"):
                second.append("log", np.zeros(shape[1:]))
        else:
            second.append("log", np.zeros(shape[1:]))
            assert len(second["log"]) == shape[0] + 1 and second["log"].sum() == first["log"].sum()
            second.commit()


@pytest.mark.parametrize(
    ("shape", "longest", "dtype"),
    [
        ((3, 2), (None, 2), "f8"),
        ((0, 2), (5, 2), "f8"),
        ((3,), (None,), np.dtype(("i4", (2,)))),
        ((2,), (None,), "S3"),
    ],
    ids=str,
)
def test_datasets_that_grow(
    store: pmstore.Store, tmp_path: Path, shape: tuple[int, ...], longest: tuple[int | None, ...], dtype: Any
) -> None:
    """So does the array if only the first axis of the dataset may become longer."""
    h5py = pytest.importorskip("h5py", "3.10")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("log", shape, dtype, maxshape=longest)
    assert pmstore.load_into(store, tmp_path / "x.h5") == 1
    assert store.require_array("log", (0, *shape[1:]), dtype, maxshape=longest) is store["log"]
    store.append("log", np.zeros(store["log"].shape[1:], store["log"].dtype))
    assert len(store["log"]) == shape[0] + 1


@pytest.mark.parametrize("longest", [(3, None), (None, None), (5, 4), (3, 2)], ids=str)
def test_other_datasets_do_not(store: pmstore.Store, tmp_path: Path, longest: tuple[int | None, ...]) -> None:
    h5py = pytest.importorskip("h5py", "3.10")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("log", (3, 2), "f8", maxshape=longest)
    assert pmstore.load_into(store, tmp_path / "x.h5") == 1
    with pytest.raises(TypeError, match="has the fixed shape"):
        store.append("log", [0, 0])


def test_h5py_resizes_what_was_exported(store: pmstore.Store, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", "3.10")
    store.create_array("log", (2, 3), fill_value=1, maxshape=(None, 3))
    pmstore.export(store, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["log"].resize(5000, axis=0)
        file["log"][2:] = 2
    pmstore.load_into(store.group("again"), tmp_path / "x.h5")
    assert store["again/log"].shape == (5000, 3) and store["again/log"].sum() == 6 + 2 * 3 * 4998
    assert len(store.append("again/log", [3, 3, 3])) == 5001


def test_texts_that_grow(store: pmstore.Store, tmp_path: Path) -> None:
    """A longer text than those of the file is not cut."""
    h5py = pytest.importorskip("h5py", "3.10")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("log", data=np.array(["one", "two"], h5py.string_dtype()), maxshape=(None,))
    assert pmstore.load_into(store, tmp_path / "x.h5") == 1
    assert store.append("log", "six").tolist() == ["one", "two", "six"]
    with pytest.raises(TypeError, match="log"):
        store.append("log", "four")


@pytest.mark.parametrize(
    "hint",
    [{}, "abc", 3, [], [3], [2, 2], [None, 3], [None, None], [None, 2, 2], [-1, 2], [0.5, 2], [[3], 2], [1 << 70, 2]],
    ids=str,
)
def test_a_maxshape_that_contradicts_the_array(store: pmstore.Store, tmp_path: Path, hint: Any) -> None:
    """The array comes, and does not grow."""
    head = {"x": {"dtype": "F64", "shape": [3, 2], "data_offsets": [0, 48]}}
    hints = json.dumps({"arrays": {"x": {"maxshape": hint}}})
    text = json.dumps({"__metadata__": {"__pmstore__": hints}, **head}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + np.arange(6.0).tobytes())
    assert pmstore.load_into(store, tmp_path / "x.safetensors") == 1
    assert store["x"].tolist() == [[0, 1], [2, 3], [4, 5]] and store.check().ok
    with pytest.raises(TypeError, match="has the fixed shape"):
        store.append("x", [6, 7])
