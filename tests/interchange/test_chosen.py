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
from tests.interchange.test_import import Bomb, h5py, npz_with, refused, zarr

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


def test_the_name_that_is_empty_is_chosen(store: pmstore.Store, tmp_path: Path) -> None:
    """It is a group, too, if names begin with "/"."""
    npz_with(tmp_path / "x.npz", ["", "a"])
    npz_with(tmp_path / "y.npz", ["/a", "/b/c", "b"])
    assert pmstore.load_into(store, tmp_path / "x.npz", names={"": "x"}) == 1
    assert pmstore.load_into(store, tmp_path / "y.npz", names={"": "y"}) == 2
    assert list(store) == ["x", "y/a", "y/b/c"]
    np.savez(tmp_path / "z.npz", a=np.arange(3))
    refused(store, tmp_path / "z.npz", pmstore.UnknownNameError, "''", names={"": "x"})


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


# ---- exports to zarr that are no longer whole


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zarr()
    monkeypatch.setattr("pmstore._interchange.zarr._CHUNK", 100)
    path = tmp_path / "x.zarr"
    arrays = {"g/x": np.arange(60.0).reshape(6, 10), "one": np.array(5), "none": np.zeros((0, 3)), "zero": np.zeros(50)}
    pmstore.export(arrays, path)
    return path


@pytest.mark.parametrize(
    "lost", ["g/x/c/1/0", "one/c", "zero/c/0", "zero/c", "one/zarr.json", "g/x/zarr.json", "g/zarr.json", "g", "none"]
)
def test_an_export_to_zarr_that_lacks_a_part(store: pmstore.Store, exported: Path, lost: str) -> None:
    name = "g/x" if lost.startswith("g") else lost.split("/")[0]
    assert pmstore.load_into(store.group("whole"), exported) == 4
    os.replace(exported / lost, exported.parent / "lost")
    refused(store, exported, pmstore.InterchangeError, f"'{name}'")
    refused(store, exported, pmstore.InterchangeError, f"'{name}'", names=["g", "none", "one", "zero"])
    others = [other for other in ("g/x", "none", "one", "zero") if other != name]
    assert pmstore.load_into(store, exported, names=others) == 3


def test_a_temporary_file_is_no_chunk(store: pmstore.Store, exported: Path) -> None:
    chunk = exported / "zero" / "c" / "1"
    chunk.rename(chunk.with_suffix(".0f.partial"))
    refused(store, exported, pmstore.InterchangeError, "'zero' can't be read: 4 of its 5 chunks are there")


def test_arrays_that_another_program_adds_to_an_export(store: pmstore.Store, exported: Path) -> None:
    """It need not write chunks of zeros, and the chunks of its array may be in shards."""
    root = zarr().open_group(exported)
    root.create_array("added", shape=(20,), chunks=(5,), dtype="f8")
    root.create_array("one", shape=(20,), chunks=(5,), shards=(10,), dtype="f8", overwrite=True)[:] = 1
    root["g/x"][:] += 1
    assert pmstore.load_into(store, exported) == 5
    assert not store["added"].any() and store["one"].all() and store["g/x"][0, 0] == 1


def test_claims_of_an_export_without_contents(store: pmstore.Store, exported: Path) -> None:
    about = exported / "zero" / "zarr.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"shape": [1 << 60]}))
    refused(store, exported, pmstore.InterchangeError, "'zero' can't be read: 5 of its")
    root = exported / "zarr.json"
    for written in (5, [5, ["x"]], {"x": 1}):
        found = json.loads(root.read_text())
        found["attributes"]["__pmstore__"] = {"written": written}
        root.write_text(json.dumps(found))
        refused(store, exported, (pmstore.TooLargeError, pmstore.OutOfSpaceError), None)


def test_types_that_zarr_lacks_are_found_before_anything_is_written(tmp_path: Path) -> None:
    zarr()
    told: list[int] = []
    arrays = {"a": np.arange(1000), "b": np.zeros(3, "g")}
    with pytest.raises(TypeError, match="'b' has dtype"):
        pmstore.export(arrays, tmp_path / "x.zarr", progress=lambda done, _: told.append(done))
    assert not told and not os.listdir(tmp_path)


def test_names_that_no_directory_of_zarr_has(store: pmstore.Store, tmp_path: Path) -> None:
    """Also of groups that are made for their attributes only."""
    zarr()
    long = {"b" * 256, "é" * 128}
    for name in ("zarr.json", *long):
        for content in (np.arange(3), 5):
            store[f"{name}/x"] = content
            store.attrs(name)["title"] = "x"
            with pytest.raises(ValueError, match="over 255 bytes" if name in long else "a meaning of its own") as told:
                pmstore.export(store, tmp_path / "x.zarr")
            assert name in str(told.value) and not os.path.exists(tmp_path / "x.zarr")
            del store[f"{name}/x"]
    store["g"] = {"a": 1}
    store["b" * 255 + "/x"] = np.arange(3)
    store["b" * 256] = 5  # a value is in the JSON
    assert pmstore.export(store, tmp_path / "x.zarr") == pmstore.load_into(store.group("again"), tmp_path / "x.zarr")


@pytest.mark.parametrize("end", ["npz", "zarr"])
def test_another_file_that_exists_is_not_the_target(tmp_path: Path, end: str) -> None:
    if end == "zarr":
        zarr()
    target = tmp_path / f"x.{end}"
    for made in (tmp_path, target):

        def progress(done: int, total: int, made: Path = made) -> None:
            os.mkdir(made)

        with pytest.raises(OSError) as told:
            pmstore.export({"x": np.arange(3)}, target, progress=progress)
        assert (type(told.value) is pmstore.StoreExistsError) == (made is target)
        assert ("exists: an export is a new file" in str(told.value)) == (made is target)
