"""Files of other programs, damaged and hostile ones: all comes, or nothing, with a clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.store.test_attributes import seen

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")


def zarr() -> Any:
    return pytest.importorskip("zarr", "3")


def h5py() -> Any:
    return pytest.importorskip("h5py", "3.10")


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def refused(store: pmstore.Store, path: Path, error: Any, text: str | None, **options: Any) -> None:
    """Nothing comes, and what is there stays."""
    store["kept"] = 1
    store.attrs()["kept"] = 1
    before = list(store), seen(store)
    with pytest.raises(error, match=text):
        pmstore.load_into(store, path, **options)
    assert (list(store), seen(store)) == before and store.check().ok


def npz_with(path: Path, names: list[str]) -> None:
    """Names that `np.savez` does not take, too."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            content = io.BytesIO()
            np.save(content, np.arange(3))
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())


# ---- other programs' files


def test_a_file_of_h5py(store: pmstore.Store, tmp_path: Path) -> None:
    library = h5py()
    with library.File(tmp_path / "x.h5", "w") as file:
        file.attrs["title"] = "a title"
        file["run/data"] = np.arange(12.0).reshape(3, 4)
        file["run/data"].attrs.update({"units": "K", "range": np.array([0, 11]), "names": ["a", "ü"], "count": 3})
        file["run/data"].dims[0].label = "time"
        file["run"].attrs["empty"] = library.Empty("f8")
        file["packed"] = np.arange(1000)
        file.create_dataset("chunked", data=np.arange(10_000).reshape(100, 100), chunks=(7, 9), compression="gzip")
        file["text"] = "hé"
        file["texts"] = np.array(["one", "zwölf", ""], library.string_dtype())
        file["number"] = 2.5
        file["enum"] = np.array([0, 1], library.enum_dtype({"RED": 0, "GREEN": 1}, basetype="i1"))
        file["flags"] = np.array([True, False])
        file.create_dataset("lazy", (1000,), "f4", fillvalue=7)
        file["nothing"] = np.zeros((0, 3))
    assert pmstore.load_into(store, tmp_path / "x.h5") == 10
    assert store.attrs()["title"] == "a title" and store["run/data"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
    about = store.attrs("run/data")
    assert about["units"] == "K" and about["range"].tolist() == [0, 11] and about["names"] == ["a", "ü"]
    assert about["count"] == 3 and about["dims"] == ["time", ""] and store.attrs("run")["empty"] is None
    assert (
        store["chunked"][99, 99] == 9999 and store["text"] == "hé" and store["texts"].tolist() == ["one", "zwölf", ""]
    )
    assert store["number"].shape == () and store["number"] == 2.5 and store["enum"].dtype == "i1"
    assert store["flags"].dtype == bool and store["lazy"][999] == 7 and store["nothing"].shape == (0, 3)


def test_elements_that_are_arrays(store: pmstore.Store, tmp_path: Path) -> None:
    elements = np.dtype(("i4", (2, 3)))
    with h5py().File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (4,), elements)[...] = np.arange(24).reshape(4, 2, 3)
        file.create_dataset("one", (), elements)[()] = np.arange(6).reshape(2, 3)
    assert pmstore.load_into(store, tmp_path / "x.h5") == 2
    assert np.array_equal(store["x"], np.arange(24).reshape(4, 2, 3)) and store["x"].dtype == "i4"
    assert np.array_equal(store["one"], np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("format", ["h5", "zarr"])
def test_attributes_of_groups_without_names(format: str, store: pmstore.Store, tmp_path: Path) -> None:
    path = tmp_path / f"x.{format}"
    file: Any = h5py().File(path, "w") if format == "h5" else zarr().open_group(path, mode="w")
    file.create_group("run").create_group("params").attrs["rate"] = 0.1
    file["run"].attrs["kept"] = 1
    file.create_group("nothing")
    if format == "h5":
        file["run/x"] = np.arange(3)
        file.close()
    else:
        file["run"].create_array("x", data=np.arange(3))
    with pytest.warns(UserWarning, match="left out: the attributes of 'run/params', which has no arrays") as told:
        assert pmstore.load_into(store, path) == 1
    assert len(told) == 1 and dict(store.attrs("run")) == {"kept": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pmstore.load_into(store, path, names={"run/x": "y"})


@pytest.mark.parametrize("format", ["zarr", "safetensors"])
def test_attributes_without_names(format: str, store: pmstore.Store, tmp_path: Path) -> None:
    path, texts = tmp_path / f"x.{format}", {"": "1", "a\0b": "2", "kept": "3"}
    if format == "zarr":
        file = zarr().open_group(path, mode="w")
        file.create_array("x", data=np.arange(3)).attrs.update(texts)
        file.attrs.update(texts)
    else:
        head = json.dumps({"__metadata__": texts, "x": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}})
        path.write_bytes(len(head).to_bytes(8, "little") + head.encode() + np.arange(3).tobytes())
    with pytest.warns(UserWarning, match="left out: ") as told:
        assert pmstore.load_into(store, path) == 1
    owners = ["the file"] * 2 + ["'x'"] * 2 * (format == "zarr")
    start = f"{path}: left out: an attribute of "
    assert [str(one.message).removeprefix(start).partition(": the name")[0] for one in told] == owners
    assert dict(store.attrs) == {"kept": "3"} and dict(store.attrs("x")) == ({"kept": "3"} if format == "zarr" else {})
    assert store["x"].tolist() == [0, 1, 2]


def test_consolidated_metadata_that_are_out_of_date(store: pmstore.Store, tmp_path: Path) -> None:
    library, path = zarr(), tmp_path / "x.zarr"
    root = library.open_group(path, mode="w", zarr_format=2)
    root.create_array("x", data=np.arange(3))
    library.consolidate_metadata(path)
    root.create_array("later", data=np.arange(4))
    library.open_array(path / "x", mode="r+").append(np.arange(2))
    assert pmstore.load_into(store, path) == 2
    assert store["x"].tolist() == [0, 1, 2, 0, 1] and store["later"].tolist() == [0, 1, 2, 3]


def test_a_zarr_of_one_array(store: pmstore.Store, tmp_path: Path) -> None:
    zarr().create_array(tmp_path / "x.zarr", data=np.arange(3))
    refused(
        store,
        tmp_path / "x.zarr",
        pmstore.InterchangeError,
        r"no group of arrays: store\[name\] = zarr.open\(.*x.zarr'\)",
    )


def test_claims_without_contents(store: pmstore.Store, tmp_path: Path) -> None:
    """A small file that claims arrays of any size."""
    library = h5py()
    for name, dtype, shape in (("x", "f8", (1 << 20,) * 3), ("text", library.string_dtype(), (1 << 40,))):
        with library.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("first", data=np.arange(3))
            file.create_dataset(name, shape, dtype, chunks=(1,) * len(shape))
        refused(store, tmp_path / f"{name}.h5", (pmstore.TooLargeError, pmstore.OutOfSpaceError), None)
    with pytest.raises(TypeError, match="takes a Store or a Group"):
        pmstore.load_into({}, tmp_path / "x.h5")  # type: ignore[arg-type]


def test_what_hdf5_has_and_a_store_lacks(store: pmstore.Store, tmp_path: Path) -> None:
    library = h5py()
    (tmp_path / "secret").write_bytes(bytes(80))
    with library.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(3)
    with library.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3)
        file["soft"] = library.SoftLink("/x")
        file["out"] = library.ExternalLink("other.h5", "/x")
        file["type"] = np.dtype("f8")
        file.create_dataset("null", data=library.Empty("f8"))
        file["x"].attrs["self"] = file["x"].ref
    with pytest.warns(UserWarning) as told:
        assert pmstore.load_into(store, tmp_path / "x.h5") == 1
    text = " ".join(str(one.message) for one in told)
    assert all(f"{name!r}" in text for name in ("soft", "out", "type", "null", "self")) and list(store) == ["x"]
    for name, make in {
        "refs": lambda file: file.create_dataset("y", data=[file.ref], dtype=library.ref_dtype),
        "ragged": lambda file: file.create_dataset("y", (2,), library.vlen_dtype("i4")),
        "external": lambda file: file.create_dataset("y", (10,), "f8", external=[(str(tmp_path / "secret"), 0, 80)]),
        "virtual": lambda file: file.create_virtual_dataset("y", library.VirtualLayout((3,), "i8")),
    }.items():
        with library.File(tmp_path / f"{name}.h5", "w") as file:
            file["a"] = np.arange(3)
            make(file)
        refused(store, tmp_path / f"{name}.h5", TypeError, "'y' (holds|has its contents)")
    with library.File(tmp_path / "loop.h5", "w") as file:
        file["a/b/x"] = 1
        file["a/b/loop"] = file["a"]
    refused(store, tmp_path / "loop.h5", pmstore.InterchangeError, "'a/b/loop' is in itself")


def test_a_file_of_numpy(store: pmstore.Store, tmp_path: Path) -> None:
    np.savez_compressed(
        tmp_path / "x.npz", np.arange(5), w=np.asfortranarray(np.ones((3, 4))), **{"a/b": np.array("x")}
    )
    assert pmstore.load_into(store, tmp_path / "x.npz", names={"arr_0": "first", "w": "g/w", "a": "a"}) == 3
    assert store["first"].tolist() == [0, 1, 2, 3, 4] and store["g/w"].flags.f_contiguous and store["a/b"] == "x"


def test_a_file_of_safetensors(store: pmstore.Store, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file({"w.0": np.ones((2, 3), "f2"), "b": np.arange(4)}, tmp_path / "x.safetensors", {"epoch": "3"})
    assert pmstore.load_into(store, tmp_path / "x.safetensors") == 2
    assert store["w.0"].dtype == "f2" and store["b"].tolist() == [0, 1, 2, 3] and store.attrs()["epoch"] == "3"


def test_types_of_torch(store: pmstore.Store, tmp_path: Path) -> None:
    """bfloat16 is a structured dtype in a store, and BF16 in the file."""
    store["x"] = np.arange(3, dtype="u2").view([("bfloat16", "<u2")])
    pmstore.export(store, tmp_path / "x.safetensors")
    head = (tmp_path / "x.safetensors").read_bytes()[8:200]
    assert b'"BF16"' in head
    pmstore.load_into(store.group("again"), tmp_path / "x.safetensors")
    assert store["again/x"].dtype == store["x"].dtype and store["again/x"].tobytes() == store["x"].tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_a_group_of_zarr(store: pmstore.Store, tmp_path: Path, version: int) -> None:
    zarr = pytest.importorskip("zarr", "3")
    root = zarr.create_group(tmp_path / "x.zarr", zarr_format=version, attributes={"title": "x"})
    made = root.create_array("g/x", shape=(30, 7), dtype="f4", chunks=(4, 3), fill_value=2, attributes={"units": "K"})
    made[:5] = 1
    if version == 2:
        made.attrs["_ARRAY_DIMENSIONS"] = ["y", "x"]
    else:
        root.create_array("named", shape=(3,), dtype="i4", dimension_names=["n"])
    root.create_group("nothing")
    root["g"].attrs["of"] = "g"
    texts = root.create_array("texts", shape=(2,), dtype=str)
    texts[:] = np.array(["a", "zwölf"], object)
    assert pmstore.load_into(store, tmp_path / "x.zarr") == 3 - (version == 2)
    assert store["g/x"][:5].tolist() == [[1] * 7] * 5 and store["g/x"][29, 6] == 2 and store.attrs()["title"] == "x"
    assert (
        store.attrs("g/x")["units"] == "K"
        and store.attrs("g")["of"] == "g"
        and store["texts"].tolist() == ["a", "zwölf"]
    )
    if version == 2:
        assert dict(store.attrs("g/x")) == {"units": "K", "dims": ["y", "x"], "_FillValue": 2}
    else:
        assert store.attrs("named")["dims"] == ["n"]


# ---- refused


def test_nothing_is_unpickled(store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "x.npz", a=np.arange(3), bomb=np.array([Bomb()], object))
    refused(store, tmp_path / "x.npz", TypeError, "'bomb' holds pickled Python objects")
    zarr = pytest.importorskip("zarr", "3")
    codec = {"id": "pickle", "protocol": 5}
    for name, changes in {
        "filter": {"filters": [codec]},
        "compressor": {"compressor": codec},
        "object": {"filters": [codec], "dtype": "|O", "fill_value": None},
        "objects": {"compressor": codec, "dtype": "|O", "fill_value": None},
    }.items():
        path = tmp_path / f"{name}.zarr"
        root = zarr.create_group(path, zarr_format=2)
        root.create_array("bomb", shape=(3,), dtype="f8", chunks=(3,), compressors=None)[:] = 1
        described = json.loads((path / "bomb" / ".zarray").read_text()) | changes
        (path / "bomb" / ".zarray").write_text(json.dumps(described))
        (path / "bomb" / "0").write_bytes(pickle.dumps(Bomb()))
        refused(store, path, (TypeError, pmstore.InterchangeError), "pickle|O")
    assert not (tmp_path / "exploded").exists()


def test_only_known_codecs_of_zarr_are_used(store: pmstore.Store, tmp_path: Path) -> None:
    """A codec that this process happens to have may do anything."""
    zarr = pytest.importorskip("zarr", "3")
    numcodecs = pytest.importorskip("numcodecs")
    used = []

    class Evil(numcodecs.abc.Codec):  # type: ignore[misc]
        codec_id = "evil"

        def encode(self, buf: Any) -> Any:
            return buf

        def decode(self, buf: Any, out: Any = None) -> Any:
            used.append(1)
            return buf

    numcodecs.register_codec(Evil)
    root = zarr.create_group(tmp_path / "x.zarr", zarr_format=2)
    made = root.create_array("x", shape=(3,), dtype="f8", chunks=(3,), compressors=Evil())
    made[:] = 1
    refused(store, tmp_path / "x.zarr", TypeError, "'x' has the codec 'evil', which is not read")
    assert not used and made[:].sum() == 3 and used


@pytest.mark.parametrize(
    "names, error, text",
    [
        (["a", "a/b"], pmstore.NameConflictError, "beside 'a'"),
        (["a//b"], pmstore.InvalidNameError, "empty part"),
        (["/a"], pmstore.InvalidNameError, "empty part"),
        ([""], pmstore.InvalidNameError, "empty"),
        (["n" * 800], pmstore.InvalidNameError, "764 bytes"),
        (["kept"], pmstore.NameConflictError, "'kept' is taken"),
        (["kept/x"], pmstore.NameConflictError, "'kept' is a value"),
    ],
)
def test_names_that_other_formats_allow(
    store: pmstore.Store, tmp_path: Path, names: list[str], error: type[Exception], text: str
) -> None:
    npz_with(tmp_path / "x.npz", ["first", *names])
    refused(store, tmp_path / "x.npz", error, text)
    new = {name: f"x{i}" for i, name in enumerate(["first", *names])}
    if "a/b" not in names:
        assert pmstore.load_into(store.group("renamed"), tmp_path / "x.npz", names=new) == len(new)


HEADS: dict[str, Any] = {
    "no json": b"{",
    "a list": [],
    "too long": {"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 12]}},
    "negative": {"x": {"dtype": "U8", "shape": [-3], "data_offsets": [0, 3]}},
    "huge": {"x": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [0, 1 << 62]}},
    "beyond": {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
    "gap": {"x": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}},
    "overlap": {
        "x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "y": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
    },
    "twice": b"{%s,%s}" % (2 * (b'"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}',)),
    "bad values": {"__metadata__": {"__values__": "[1"}, "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
    "nan": {"__metadata__": {"__values__": '{"a": NaN}'}, "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
    "a list as a type": {"x": {"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]}},
    "a number as values": {"__metadata__": {"__values__": 5}},
    "listed": {"__metadata__": {"__values__": "[1]"}, "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
}


@pytest.mark.parametrize("descr", ["5", "None", "'zzz'", "['x']", "[('a', 5)]"])
def test_hostile_heads_of_npz(store: pmstore.Store, tmp_path: Path, descr: str) -> None:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}\n".encode()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head + bytes(8))
    refused(store, tmp_path / "x.npz", pmstore.InterchangeError, "can't be read")


@pytest.mark.parametrize("name", HEADS)
def test_hostile_heads_of_safetensors(store: pmstore.Store, tmp_path: Path, name: str) -> None:
    head = HEADS[name] if isinstance(HEADS[name], bytes) else json.dumps(HEADS[name]).encode()
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"abc")
    error, text = (TypeError, "the type 'F4'") if name == "too long" else (pmstore.InterchangeError, "can't be read")
    refused(store, tmp_path / "x.safetensors", error, text)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 8 + head)
    refused(store, tmp_path / "x.safetensors", pmstore.InterchangeError, "can't be read")


@pytest.mark.parametrize("where", ["v", "x, attribute k"])
def test_a_value_that_a_store_can_not_keep_is_named(store: pmstore.Store, tmp_path: Path, where: str) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    document = ("__values__", {"v": deep}) if where == "v" else ("__attributes__", {"x": {"k": deep}})
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr(f"{document[0]}.json", json.dumps(document[1]))
    refused(store, tmp_path / "x.npz", ValueError, f"^'{where}': the value is nested more than 128 levels deep")


def test_every_damaged_byte_is_survived(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    """A damaged file is an error, or the damage is where no format has a checksum. Nothing half remains."""
    if form == "zarr":
        pytest.skip("many files; zarr's own codecs are tested elsewhere")
    with pmstore.open(":memory:") as first:
        first.update({"x": np.arange(40.0), "g/i": np.arange(6, dtype="i2").reshape(2, 3), "v": {"a": 1}})
        first.create_array("log", (3, 200), maxshape=(None, 200))
        first.attrs("x")["units"] = "K"
        pmstore.export(first, tmp_path / f"x.{form}")
    sound = (tmp_path / f"x.{form}").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / f"damaged.{form}"
    for round in range(120):
        data = bytearray(sound)
        if round % 3 == 0:
            data = data[: int(rng.integers(len(data)))]
        for _ in range(int(rng.integers(1, 4)) if data else 0):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            pmstore.load_into(store, path, form)
        except (pmstore.Error, TypeError):
            assert not len(store)
        assert store.check().ok
        store.clear()
        store.attrs().clear()


def test_another_format(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x.{form}"
    with pytest.raises(FileNotFoundError):
        pmstore.load_into(store, path, form)
    path.write_bytes(b"no such format" * 100)
    with pytest.raises((pmstore.InterchangeError, OSError)):
        pmstore.load_into(store, path, form)
    with pytest.raises(ValueError, match="format= is one of zarr, npz, safetensors, hdf5"):
        pmstore.load_into(store, tmp_path / "x.parquet")
    assert not len(store)


@pytest.mark.parametrize("package, format", [("zarr", "zarr"), ("h5py", "hdf5")])
def test_a_missing_package(
    store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, format: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"zarr": "export", "h5py": "hdf5"}[package]
    for call in (pmstore.export, pmstore.load_into):
        with pytest.raises(ModuleNotFoundError, match=rf'{package} is missing: pip install "pmstore\[{extra}\]"'):
            call(store, tmp_path / "x", format)
    assert os.listdir(tmp_path) == ["store.pm"]


def test_an_interrupt_leaves_nothing(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    with pmstore.open(":memory:") as first:
        first.update({"a": np.arange(10.0), "b": np.arange(10**5), "c": 1})
        first.attrs()["x"] = 1
        pmstore.export(first, tmp_path / "x", form)

    def stop(done: int, total: int) -> None:
        if done > 80:
            raise KeyboardInterrupt

    refused(store, tmp_path / "x", KeyboardInterrupt, None, format=form, progress=stop)
    store.commit()
    assert list(store) == ["kept"]
    reader = pmstore.open(store.path, "r")
    with reader, pytest.raises(pmstore.ReadOnlyStoreError):
        pmstore.load_into(reader, tmp_path / "x", form)


def test_no_space_leaves_nothing(tmp_path: Path, form: str) -> None:
    with pmstore.open(":memory:") as first:
        first.update({"a": np.arange(10.0), "b": np.random.default_rng(0).random(10**6)})
        pmstore.export(first, tmp_path / "x", form)
    with pmstore.open(tmp_path / "store.pm", max_size=4 << 20) as store:
        refused(store, tmp_path / "x", pmstore.OutOfSpaceError, None, format=form)


# ---- failed and killed imports


def test_a_failed_import_leaves_the_attributes_of_groups(store: pmstore.Store, tmp_path: Path) -> None:
    store["g/a"] = 1
    store.attrs("g").update(title="old", other=2)
    store.commit()
    np.savez(tmp_path / "x.npz", **{"g/b": np.arange(3)})
    for bad in ({"a\0b": 1}, {"": 1}, {"long": "x" * (1 << 20)}):
        with zipfile.ZipFile(tmp_path / "y.npz", "w") as file:
            with zipfile.ZipFile(tmp_path / "x.npz") as other:
                file.writestr("g/b.npy", other.read("g/b.npy"))
            file.writestr("__attributes__.json", json.dumps({"g": {"more": "new"}, "g/b": bad}))
        refused(store, tmp_path / "y.npz", (ValueError, pmstore.TooLargeError), None)
    store.attrs("g")["title"] = "x" * ((1 << 20) - 100)
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as file:
        file.writestr("__values__.json", json.dumps({"g/c": 1}))
        file.writestr("__attributes__.json", json.dumps({"g": {"more": "x" * 100}}))
    refused(store, tmp_path / "z.npz", pmstore.TooLargeError, "the attributes of 'g'")


KILLED = """
import os, signal, sys, pmstore
with pmstore.open(sys.argv[1]) as store:
    pmstore.load_into(store, sys.argv[2], sys.argv[3], progress=lambda done, total: (
        os.kill(os.getpid(), signal.SIGKILL) if done > total // 2 else None))
"""


def test_a_killed_import_can_be_done_again(tmp_path: Path, form: str) -> None:
    with pmstore.open(":memory:") as first:
        first.update({f"{k}": np.full(50_000, k) for k in range(6)})
        pmstore.export(first, tmp_path / "x", form)
    with pmstore.open(tmp_path / "store.pm") as store:
        store["kept"] = 1
    command = [sys.executable, "-c", KILLED, tmp_path / "store.pm", tmp_path / "x", form]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    with pmstore.open(tmp_path / "store.pm") as store:
        assert list(store) == ["kept"] and store.check().ok
        assert pmstore.load_into(store, tmp_path / "x", form) == 6
    with pmstore.open(tmp_path / "store.pm", "r", verify=True) as store:
        assert all((store[f"{k}"] == k).all() for k in range(6))


def test_crashes_leave_all_or_nothing(crash_explorer: Any, tmp_path: Path) -> None:
    """Contents are written directly to their place (D3) before the commit that has their names (I1)."""
    with pmstore.open(":memory:") as first:
        first.update({"g/a": np.arange(3000.0), "g/b": np.arange(70_000), "c": (1, 2)})
        first.attrs("g/a")["units"] = "K"
        pmstore.export(first, tmp_path / "x.npz")

    def imported(store: pmstore.Store) -> None:
        store["kept"] = 1
        store.commit()
        pmstore.load_into(store, tmp_path / "x.npz")
        store.commit()

    def whole(store: pmstore.Store) -> None:
        names = set(store) - {"kept"}
        assert not names or (names == {"g/a", "g/b", "c"} and store["g/b"][-1] == 69_999)
        assert not names or store.attrs("g/a")["units"] == "K"

    crash_explorer.run(imported, check=whole, budget=60)
