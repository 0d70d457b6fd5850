"""Exports hold the store's own bytes, or nothing."""

from __future__ import annotations

import errno
import fcntl
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._interchange import target
from pmstore._interchange.forms import HINTS, VALUES
from pmstore._interchange.target import _TEMPORARY
from pmstore._values.as_json import to_json
from pmstore.archive import export
from tests.support.derivations import doubled

NUMBERS: dict[str, Any] = {
    "f8": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(600_000.0).reshape(300, 2000)),
    "model/centers": np.arange(6, dtype="f4").reshape(2, 3),
    "model/deep/labels": np.arange(70_001, dtype="i8"),
    "big-endian": np.arange(5, dtype=">i4"),
    "half": np.arange(7, dtype="f2"),
    "flags": np.array([True, False, True]),
    "bytes": np.arange(256, dtype="u1"),
    "zero": np.array(2.5),
    "empty": np.zeros((0, 3)),
    "ünïcode": np.arange(2, dtype="u8"),
    "nan": np.array([np.nan, -0.0, np.inf]),
    "negative-zeros": np.full(5000, -0.0),
    "payload": np.array([0x7FF8000000000123, 0xFFF0000000000001], "u8").view("f8"),
}
OTHERS: dict[str, Any] = {
    "complex": np.array([1 + 2j]),
    "dates": np.array(["2024-05-06", "NaT"], "M8[D]"),
    "text": np.array(["ab", "ü"]),
    "raw": np.array([b"ab", b"c"]),
    "record": np.array([(1, 2.5)], [("n", "i4"), ("x", ">f8")]),
}
VALUED: dict[str, Any] = {"epoch": 3, "config": {"k": [1, None], "tol": 1e-4}, "name": "run", "nan-value": float("nan")}
JSON = {"epoch": 3, "config": {"k": [1, None], "tol": 1e-4}, "name": "run", "nan-value": "nan", "list": [1.5, "x"]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[pmstore.Store]:
    with pmstore.open(tmp_path / "run.pm") as store:
        store.update(NUMBERS | VALUED)
        store.create_list("list").extend([1.5, "x"])
        store.commit()
        yield store


def npz(path: Path) -> tuple[dict[str, Any], Any]:
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    values = arrays.pop(f"{VALUES}.json", None)
    arrays.pop(f"{HINTS}.json", None)
    return arrays, None if values is None else json.loads(values)


def safetensors(path: Path) -> tuple[dict[str, Any], Any]:
    """Read a file by the specification of the format, and by its library if that is installed."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    metadata = head.pop("__metadata__")
    names = {
        "BOOL": "?",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "U8": "u1",
        "U64": "<u8",
        "I32": "<i4",
        "I64": "<i8",
    }
    arrays, places = {}, []
    for name, one in head.items():
        begin, end = one["data_offsets"]
        dtype = np.dtype(names[one["dtype"]])
        assert begin % dtype.itemsize == 0 == size % 8
        arrays[name] = np.frombuffer(raw[8 + size + begin : 8 + size + end], dtype).reshape(one["shape"])
        places.append((begin, end))
    places.sort()
    assert all(a[1] == b[0] for a, b in itertools.pairwise(places))
    assert 8 + size + max((end for _, end in places), default=0) == len(raw)
    try:
        library = importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError:
        pass
    else:
        loaded = library.load_file(path)
        assert loaded.keys() == arrays.keys()
        assert all(loaded[name].tobytes() == array.tobytes() for name, array in arrays.items())
    return arrays, json.loads(metadata[VALUES]) if VALUES in metadata else None


def zarr(path: Path) -> tuple[dict[str, Any], Any]:
    group = importlib.import_module("zarr").open_group(path, mode="r")
    arrays = {name: member[...] for name, member in group.members(max_depth=None) if hasattr(member, "shape")}
    return arrays, group.attrs.get(VALUES)


def hdf5(path: Path) -> tuple[dict[str, Any], Any]:
    h5py = importlib.import_module("h5py")
    with h5py.File(path, "r") as file:
        values, hints = (json.loads(file[name][()]) if name in file else {} for name in (VALUES, HINTS))
        arrays = {}

        def visit(name: str, one: Any) -> None:
            if name in (VALUES, HINTS) or not hasattr(one, "shape"):
                return
            text = h5py.check_string_dtype(one.dtype)
            if name in hints.get("values", {}):
                values[name] = to_json(one.asstr()[()] if text else one[()])
            elif text and text.encoding == "utf-8":
                arrays[name] = np.char.decode(one[...], "utf-8").astype(f"U{text.length // 4}")
            else:
                arrays[name] = one[...]

        file.visititems(visit)
    return arrays, values or None


READ: dict[str, Callable[[Path], tuple[dict[str, Any], Any]]] = {
    "hdf5": hdf5,
    "npz": npz,
    "safetensors": safetensors,
    "zarr": zarr,
}


@pytest.fixture(params=sorted(READ))
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "zarr":
        pytest.importorskip("zarr", "3")
    if request.param == "hdf5":
        pytest.importorskip("h5py", "3.10")
    return str(request.param)


def assert_same(found: Mapping[str, Any], given: Mapping[str, Any], form: str) -> None:
    assert found.keys() == given.keys()
    for name, array in given.items():
        dtype = array.dtype if form in ("npz", "hdf5") else array.dtype.newbyteorder("<")
        assert (found[name].dtype, found[name].shape) == (dtype, array.shape), name
        assert np.asarray(found[name]).tobytes() == array.astype(dtype).tobytes(), name


def test_all_arrays_and_values(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    told: list[tuple[int, int]] = []
    path = tmp_path / f"out.{form}"
    count = export(store, path, progress=lambda done, total: told.append((done, total)))
    arrays, values = READ[form](path)
    assert_same(arrays, {name: store[name] for name in NUMBERS}, form)
    assert values == JSON and count == len(store) == len(NUMBERS) + len(JSON)
    total = sum(array.nbytes for array in NUMBERS.values())
    assert told == sorted(told) and told[-1] == (total, total) and len(told) > len(NUMBERS) - 2
    assert sorted(os.listdir(tmp_path)) == [f"out.{form}", "run.pm"]


def test_any_mapping_a_group_and_a_snapshot(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    given = {"a": np.arange(3.0), "b/c": np.ones((2, 2), "i4")}
    assert export(given, tmp_path / "mapping", form) == 2
    assert_same(READ[form](tmp_path / "mapping")[0], given, form)
    assert READ[form](tmp_path / "mapping")[1] is None
    assert export({}, tmp_path / "nothing", form) == 0
    assert READ[form](tmp_path / "nothing") == ({}, None)
    assert export(store.group("model"), tmp_path / "group", form) == 2
    assert_same(READ[form](tmp_path / "group")[0], dict(store.group("model")), form)
    with pmstore.open(store.path, "r", exclusive=False) as look:
        store["f8"][:] = -1
        store.commit()
        export(look, tmp_path / "look", form)
    assert READ[form](tmp_path / "look")[0]["f8"].tolist() == NUMBERS["f8"].tolist()


def test_derived_arrays_are_arrays(tmp_path: Path, form: str) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store["x"] = np.arange(5.0)
        store.derive("twice", doubled, "x")
        export(store, tmp_path / "out", form)
        assert_same(READ[form](tmp_path / "out")[0], {"x": store["x"], "twice": store["twice"]}, form)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:.*Zarr V3.*")
def test_other_dtypes_are_kept_or_refused_before_anything_is_written(tmp_path: Path, form: str, name: str) -> None:
    given = {"before": np.arange(3.0), name: OTHERS[name]}
    path = tmp_path / "out"
    if form == "safetensors":
        with pytest.raises(TypeError, match=f"{name!r} has dtype .*npz keeps it"):
            export(given, path, form)
        assert os.listdir(tmp_path) == []
    else:
        export(given, path, form)
        assert_same(READ[form](path)[0], given, form)


@pytest.mark.parametrize("dtype", ["g", "M8"])
def test_what_zarr_can_not_keep(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("zarr", "3")
    with pytest.raises(TypeError, match="'x' has dtype .* zarr"):
        export({"x": np.zeros(3, dtype)}, tmp_path / "out.zarr")
    assert os.listdir(tmp_path) == []
    export({"x": np.zeros(3, dtype)}, tmp_path / "out.npz")
    assert npz(tmp_path / "out.npz")[0]["x"].dtype == dtype


def test_large_arrays_come_in_pieces(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmstore._interchange.zarr._CHUNK", 1000)
    given = {
        "rows": np.arange(7000.0).reshape(70, 100),
        "wide": np.arange(4000.0).reshape(2, 2000),
        "t": np.ones((3, 2, 90)),
    }
    told: list[int] = []
    export(given, tmp_path / "out", form, progress=lambda done, total: told.append(done))
    assert_same(READ[form](tmp_path / "out")[0], given, form)


def test_without_zarr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "pmstore\[export\]"'):
        export({"x": np.arange(3)}, tmp_path / "out.zarr")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "./x", "/x", "x/", "a//b", "", "a\0b", "a\\b", VALUES, "__metadata__"]
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, form: str) -> None:
    with pytest.raises(ValueError, match="the name"):
        export({"x": np.arange(3), name: np.arange(3)}, tmp_path / "out", form)
    assert os.listdir(tmp_path) == []


def test_bad_arguments(tmp_path: Path) -> None:
    for path, given in (("out", None), ("out.parquet", None), ("out.npz", "parquet")):
        with pytest.raises(ValueError, match="zarr, npz, safetensors"):
            export({}, tmp_path / path, given)
    with pytest.raises(TypeError, match="a name is a str"):
        export({1: np.arange(3)}, tmp_path / "out.npz")  # type: ignore[dict-item]
    with pytest.raises(pmstore.StoreIOError, match="can't be written"):
        export({}, tmp_path / "none" / "out.npz")


def test_what_is_there_stays(tmp_path: Path, form: str) -> None:
    path = tmp_path / "out"
    for make in (lambda: path.write_bytes(b"kept"), lambda: path.symlink_to("nowhere"), path.mkdir):
        make()
        with pytest.raises(pmstore.StoreExistsError, match="exists"):
            export({"x": np.arange(3)}, path, form)
        assert os.listdir(tmp_path) == ["out"]
        path.rmdir() if path.is_dir() else path.unlink()

    def appears(done: int, total: int) -> None:
        path.write_bytes(b"kept")

    with pytest.raises(pmstore.StoreExistsError):
        export({"x": np.arange(3)}, path, form, progress=appears)
    assert path.read_bytes() == b"kept" and os.listdir(tmp_path) == ["out"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, form: str) -> None:
    def stop(done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export({"x": np.arange(10**6), "y": np.arange(10**6)}, tmp_path / "out", form, progress=stop)
    assert os.listdir(tmp_path) == []


class Changing(dict[str, Any]):
    """Another array the second time."""

    def __getitem__(self, name: str) -> Any:
        array = super().__getitem__(name)
        self[name] = np.zeros(len(array) + 1)
        return array


def test_an_array_that_changes_meanwhile(tmp_path: Path, form: str) -> None:
    with pytest.raises(ValueError, match="'x' has changed"):
        export(Changing(x=np.zeros(3)), tmp_path / "out", form)
    assert os.listdir(tmp_path) == []


def test_a_damaged_array_is_not_exported(tmp_path: Path, form: str) -> None:
    data = np.random.default_rng(0).random(50_000)
    with pmstore.open(tmp_path / "run.pm") as store:
        store.update({"sound": np.arange(3.0), "x": data})
    raw = bytearray((tmp_path / "run.pm").read_bytes())
    raw[raw.index(data[20_000:20_010].tobytes())] ^= 1
    (tmp_path / "run.pm").write_bytes(raw)
    with pmstore.open(tmp_path / "run.pm", "r") as store, pytest.raises(pmstore.CorruptStoreError):
        export(store, tmp_path / "out", form)
    assert os.listdir(tmp_path) == ["run.pm"]


def test_a_full_disk(small_disk: Callable[[str], Path], form: str) -> None:
    disk = small_disk("4m")
    with pytest.raises(pmstore.OutOfSpaceError, match="can't be written") as caught:
        export({"x": np.random.default_rng(0).random(10**6)}, disk / "out", form)
    assert caught.value.errno == errno.ENOSPC and os.listdir(disk) == []


KILLED = """
import os, signal, sys, numpy as np
from pmstore import export
export({"x": np.arange(3)}, sys.argv[1], sys.argv[2], progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_kill_leaves_no_half_and_the_next_export_tidies_up(tmp_path: Path, form: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out", form], timeout=60, check=False)
    assert done.returncode < 0
    left = os.listdir(tmp_path)
    assert len(left) == 1 and left[0].startswith(_TEMPORARY)

    def look(done: int, total: int) -> None:  # one that is being written stays
        export({"y": np.arange(2)}, tmp_path / "other", "npz") if not (tmp_path / "other").exists() else None

    export({"x": np.arange(3)}, tmp_path / "out", form, progress=look)
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    assert_same(READ[form](tmp_path / "out")[0], {"x": np.arange(3)}, form)


@pytest.mark.parametrize("locked", [False, True])
def test_exports_beside_each_other(tmp_path: Path, form: str, locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another export finds a temporary name in the moment before it is locked, and deletes it; or has just locked it,
    and deletes it then."""
    flock, held = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if not held:
            held.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            if locked:
                flock(held[0], how)
            else:
                target.sweep(str(tmp_path))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    export({"x": np.arange(3)}, tmp_path / "out", form)
    os.close(held[0])
    assert os.listdir(tmp_path) == ["out"]
    assert_same(READ[form](tmp_path / "out")[0], {"x": np.arange(3)}, form)


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = _cli.main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_the_command(store: pmstore.Store, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    store["f8"][:] = -1  # pending
    path = tmp_path / f"out.{form}"
    assert run(capsys, "export", store.path, path) == (0, f"{path}: {len(store)} names of {store.path}\n", "")
    arrays, values = READ[form](path)
    assert_same(arrays, NUMBERS, form)
    assert values == JSON
    status, out, _ = run(capsys, "export", store.path, tmp_path / "x", "--format", form, "--group", "model", "--json")
    assert (status, json.loads(out)["names"]) == (0, 2)
    assert_same(READ[form](tmp_path / "x")[0], dict(store.group("model")), form)


def test_what_the_command_refuses(store: pmstore.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store["z"] = np.ones(3, "c16")
    store.commit()
    for arguments, text in (
        ([tmp_path / "x.safetensors"], "'z' has dtype complex128"),
        ([tmp_path / "x"], "ends in no format"),
        ([store.path, "--format", "npz"], "exists"),
        ([tmp_path / "x.npz", "--group", "none"], "none"),
        ([tmp_path / "none" / "x.npz"], "can't be written"),
    ):
        status, out, err = run(capsys, "export", store.path, *arguments)
        assert (status, out) == (2, "") and text in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["run.pm"]


def test_a_store_that_changes_too_quickly_is_copied_first(
    store: pmstore.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = pmstore.open

    def changing(path: Any, mode: str = "a", **options: Any) -> pmstore.Store:
        look = opened(path, mode, **options)
        if os.fspath(path) == store.path:  # a snapshot of it is stale at once
            store["fortran"][::7, ::7] += 1
            store.commit()
            store._catalog.core.checkpoint()
        return look

    monkeypatch.setattr(pmstore, "open", changing)
    assert run(capsys, "export", store.path, tmp_path / "out.npz")[0] == 0
    assert_same({"fortran": npz(tmp_path / "out.npz")[0]["fortran"]}, {"fortran": store["fortran"]}, "npz")
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "run.pm"]


# ---- versions of an archive


def test_a_version_of_an_archive(tmp_path: Path, form: str) -> None:
    pytest.importorskip("numcodecs")
    from pmstore import archive

    with pmstore.open(tmp_path / "run.pm") as store:
        store.update(NUMBERS | VALUED)
        store.create_list("list").extend([1.5, "x"])
        with store.drain(tmp_path / "archive") as drain:
            store.commit()
            first = store.sequence
            drain.wait(first)
            store["f8"][:] = -1
            store.commit()
            drain.wait(store.sequence)
        last = store.sequence
    versions = archive.open(tmp_path / "archive")
    for version in (first, last):
        export(versions[version], tmp_path / f"{version}", form)
        arrays, values = READ[form](tmp_path / f"{version}")
        assert_same(arrays, NUMBERS | {"f8": NUMBERS["f8"] if version == first else np.full((3, 4), -1.0)}, form)
        assert values == JSON
