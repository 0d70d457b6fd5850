"""What can be read of a file of which other parts can't be."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._interchange.found import damage
from tests.interchange.test_import import Bomb, h5py, refused, zarr

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*")


# ---- names beside one that a store can't have


def references(path: Path) -> None:
    library = h5py()
    with library.File(path, "w") as file:
        file["ok"] = np.arange(3)
        file.create_dataset("g/bad", data=[file.ref], dtype=library.ref_dtype)


def pickled(path: Path) -> None:
    np.savez(path, **{"ok": np.arange(3), "g/bad": np.array([Bomb()], object)})


def four_bits(path: Path) -> None:
    tensors = {"g/bad": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    tensors["ok"] = {"dtype": "I64", "shape": [3], "data_offsets": [1, 25]}
    head = json.dumps(tensors).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"\0" + np.arange(3, dtype="<i8").tobytes())


def objects(path: Path) -> None:
    root = zarr().create_group(path, zarr_format=2)
    root.create_array("ok", data=np.arange(3))
    root.create_array("g/bad", shape=(3,), dtype="f8", chunks=(3,), compressors=None)[:] = 1
    about = path / "g" / "bad" / ".zarray"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"dtype": "|O", "filters": [{"id": "pickle"}]}))
    (path / "g" / "bad" / "0").write_bytes(pickle.dumps(Bomb()))


FILES = {"x.h5": references, "x.npz": pickled, "x.safetensors": four_bits, "x.zarr": objects}


@pytest.mark.parametrize("end", FILES)
def test_the_sound_part_is_chosen(
    store: pmstore.Store, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / end
    FILES[end](path)
    for names in (None, ["g"], ["ok", "g/bad"], {"g": "new"}):
        refused(store, path, (TypeError, pmstore.InterchangeError), "'g/bad'", names=names)
    refused(store, path, pmstore.UnknownNameError, "'other'", names=["ok", "other"])
    assert pmstore.load_into(store, path, names={"ok": "good"}) == 1
    assert store["good"].tolist() == [0, 1, 2] and "g/bad" not in store
    assert not os.path.exists("exploded")


def test_the_place_of_a_tensor_that_is_not_read_counts(store: pmstore.Store, tmp_path: Path) -> None:
    four_bits(path := tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes().replace(b"[0, 1]", b"[0, 9]"))
    refused(store, path, TypeError, "'g/bad' has the type 'F4'", names=["ok"])


def test_a_group_of_zarr_that_is_damaged(store: pmstore.Store, tmp_path: Path) -> None:
    zarr()
    pmstore.export({"ok": np.arange(3), "g/x": np.arange(4)}, tmp_path / "x.zarr")
    (tmp_path / "x.zarr" / "g" / "zarr.json").write_text("{")
    for names in (None, ["g"], ["g/x"]):
        refused(store, tmp_path / "x.zarr", pmstore.InterchangeError, "'g' can't be read", names=names)
    assert pmstore.load_into(store, tmp_path / "x.zarr", names=["ok"]) == 1


def test_text_of_hdf5_that_is_damaged_is_named(store: pmstore.Store, tmp_path: Path) -> None:
    library = h5py()
    with library.File(tmp_path / "x.h5", "w") as file:
        file["ok"] = np.arange(3)
        file.create_dataset("g/one", data=b"\xff", dtype=library.string_dtype())
        file.create_dataset("many", data=[b"\xff"], dtype=library.string_dtype())
    refused(store, tmp_path / "x.h5", pmstore.InterchangeError, "'g/one' can't be read: 'utf-8'")
    refused(store, tmp_path / "x.h5", pmstore.InterchangeError, "'many' can't be read: 'utf-8'", names=["many"])
    assert pmstore.load_into(store, tmp_path / "x.h5", names=["ok"]) == 1


def test_an_error_without_a_text_is_told_by_its_type() -> None:
    with pytest.raises(pmstore.InterchangeError, match="'x.h5' can't be read: ZeroDivisionError$"), damage("x.h5"):
        raise ZeroDivisionError


def test_a_directory_beside_the_arrays_of_zarr_is_left_out(store: pmstore.Store, tmp_path: Path) -> None:
    root = zarr().create_group(tmp_path / "x.zarr")
    root.create_array("g/x", data=np.arange(3))
    (tmp_path / "x.zarr" / "g" / "notes").mkdir()
    (tmp_path / "x.zarr" / "read me").write_text("no array")
    with pytest.warns(UserWarning, match="'g/notes' is neither an array nor a group of zarr") as told:
        assert pmstore.load_into(store, tmp_path / "x.zarr") == 1
    assert len(told) == 1 and list(store) == ["g/x"]
