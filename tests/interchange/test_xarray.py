"""xarray.open_dataset with the engine of stores: names of axes, lazy reading, several threads and processes."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore

if sys.version_info >= (3, 11):
    import tomllib

xarray = pytest.importorskip("xarray", "2024.7")
BACKEND = importlib.import_module("pmstore._interchange.xarray").PmstoreBackend
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with pmstore.open(tmp_path / "run.pm") as store:
        store["g/t"] = np.arange(24.0 * 50 * 40).reshape(24, 50, 40)
        store["g/f"] = np.asfortranarray(np.arange(24.0 * 50).reshape(24, 50))
        store["g/time"] = np.arange(24, dtype="i4")
        store["g/x"] = np.linspace(0, 1, 40)
        store["g/packed"] = np.array([1, 2, -1], "i2")
        store["g/epoch"], store["g/config"], store["g/run"] = 3, {"k": 5}, "second"
        store["g/deep/inside"] = store["top"] = np.zeros(2)
        store["g/empty"] = np.zeros((0, 3))
        store.attrs("g").update(title="a run", Conventions="CF-1.8")
        store.attrs("g/t").update(units="K", dims=["time", "y", "x"])
        store.attrs("g/f").update(dims=["time", "y"])
        store.attrs("g/time").update(units="hours since 2024-05-06", dims=["time"])
        store.attrs("g/x").update(dims=["x"])
        store.attrs("g/packed").update(scale_factor=0.5, _FillValue=np.int16(-1))
    return tmp_path / "run.pm"


@pytest.fixture
def dataset(path: Path) -> Iterator[Any]:
    with xarray.open_dataset(path, engine=BACKEND, group="g") as dataset:
        yield dataset


def test_variables_axes_and_attributes(dataset: Any, path: Path) -> None:
    assert set(dataset.variables) == {"t", "f", "time", "x", "packed", "epoch", "run", "empty"}
    assert dataset.t.dims == ("time", "y", "x") and set(dataset.coords) == {"time", "x"}
    assert dataset.t.attrs == {"units": "K"} and dataset.attrs == {"title": "a run", "Conventions": "CF-1.8"}
    assert str(dataset.time.values[1]).startswith("2024-05-06T01") and dataset.packed.dims == ("packed_0",)
    assert dataset.packed.values.tolist()[:2] == [0.5, 1.0] and np.isnan(dataset.packed.values[2])
    assert int(dataset.epoch) == 3 and str(dataset.run.values) == "second" and dataset["empty"].shape == (0, 3)
    with pmstore.open(path, "r") as store:
        assert np.array_equal(dataset.t, store["g/t"]) and np.array_equal(dataset.f, store["g/f"])
    with xarray.open_dataset(path, engine=BACKEND, decode_times=False, drop_variables=["top"]) as root:
        assert not root.variables
    with pytest.raises(pmstore.UnknownNameError, match="no group 'none'"):
        xarray.open_dataset(path, engine=BACKEND, group="none")
    with pytest.raises(pmstore.StoreNotFoundError):
        xarray.open_dataset(path.with_name("none.pm"), engine=BACKEND)


def test_what_xarray_has_is_refused_with_a_hint(dataset: Any, store: pmstore.Store) -> None:
    for value in (dataset, xarray.DataTree(dataset)) if hasattr(xarray, "DataTree") else (dataset,):
        with pytest.raises(TypeError, match=r"store value\[name\].values of each variable"):
            store["x"] = value
        store["x"] = value["x"].values
    for value in (dataset.t, dataset.t.variable):
        with pytest.raises(TypeError, match="store value.values$"):
            store["x"] = value
        assert not dataset.t.variable._in_memory  # a hint reads no contents
    store["x"] = dataset.t.values


def test_axes_without_a_name_have_one_of_their_own(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store.update({"x": np.zeros((5, 3)), "x_0": 1.5, "x_0_": np.ones(5), "y": np.zeros((4, 2)), "z": np.zeros(7)})
        store.attrs("z")["dims"] = ["y_1"]
        store.attrs("y")["dims"] = 5
    with xarray.open_dataset(tmp_path / "run.pm", engine=BACKEND) as dataset:
        assert float(dataset.x_0) == 1.5 and dataset.x.shape == (5, 3) and not dataset.indexes
        assert [dataset[name].dims for name in ("x", "x_0_", "y", "z")] == [
            ("x_0__", "x_1"),
            ("x_0__0",),
            ("y_0", "y_1_"),
            ("y_1",),
        ]


def test_letters_are_not_joined(tmp_path: Path) -> None:
    bases = np.array([[b"A", b"C", b"G"], [b"T", b"T", b"A"]])
    with pmstore.open(tmp_path / "run.pm") as store:
        store["bases"] = bases
        store.attrs("bases")["dims"] = ["sample", "site"]
    with xarray.open_dataset(tmp_path / "run.pm", engine=BACKEND) as dataset:
        assert dataset.bases.dims == ("sample", "site") and np.array_equal(dataset.bases, bases)
    with xarray.open_dataset(tmp_path / "run.pm", engine=BACKEND, concat_characters=True) as dataset:
        assert dataset.bases.values.tolist() == [b"ACG", b"TTA"]


def test_rows_are_read_when_they_are_used(dataset: Any) -> None:
    whole = np.arange(24.0 * 50 * 40).reshape(24, 50, 40)
    loaded: list[int] = []
    core = dataset.t.variable._data
    while not hasattr(core, "_store"):
        core = core.array
    snapshot = core._store._catalog.core.snapshot
    copy = type(snapshot).copy

    def counted(self: Any, offset: int, length: int, at: int, address: Any, count: int) -> None:
        loaded.append(count)
        copy(self, offset, length, at, address, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(snapshot), "copy", counted)
        assert np.array_equal(dataset.t.isel(time=slice(3, 5)), whole[3:5]) and loaded == [2 * 50 * 40 * 8]
        assert np.array_equal(dataset.t.isel(time=7, y=3), whole[7, 3])
        assert np.array_equal(dataset.t.isel(time=[5, 2, 9], x=[0, 3]), whole[[5, 2, 9]][..., [0, 3]])
        assert np.array_equal(dataset.t.isel(time=slice(None, None, -5), y=slice(1, 40, 7)), whole[::-5, 1:40:7])
        assert np.array_equal(dataset.f.isel(y=[1, 1, 0]), np.arange(24.0 * 50).reshape(24, 50)[:, [1, 1, 0]])
        assert dataset.t.isel(time=[]).shape == (0, 50, 40) and dataset.t.isel(time=slice(4, 4)).values.size == 0
        assert np.array_equal(dataset.t.sel(time="2024-05-06T02", x=1.0), whole[2, :, -1])
    assert sum(loaded) < 3 * whole.nbytes


def test_pickles_and_threads(dataset: Any) -> None:
    again = pickle.loads(pickle.dumps(dataset))
    assert again.equals(dataset) and again.t.attrs == {"units": "K"}
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda k: float(again.t.isel(time=k % 24).sum()), range(96)))
    assert sums == [float(again.t[k % 24].sum()) for k in range(96)]
    again.close()


def test_beside_a_writer(path: Path) -> None:
    """The dataset shows one commit, or raises."""
    with pmstore.open(path) as store, xarray.open_dataset(path, engine=BACKEND, group="g") as dataset:
        loaded = dataset.x.values.copy()
        for k in range(3):
            store["g/t"][:] = k
            store["g/x"] = np.zeros((3, 3))
            store.commit()
            store._catalog.core.checkpoint()
        try:
            found = dataset.t.values
        except pmstore.StaleSnapshotError:
            pass
        else:
            assert found[0, 0, 1] == 1 and found[-1, -1, -1] == found.size - 1
        assert np.array_equal(dataset.x, loaded)


def test_a_pickle_does_not_mix_commits(path: Path) -> None:
    """Numbers and indices are in the pickle; arrays of a later commit do not fit them."""
    with xarray.open_dataset(path, engine=BACKEND, group="g") as dataset:
        sent = pickle.dumps(dataset)
    with pmstore.open(path) as store:
        store["g/epoch"] = 4
        store["g/t"][:] = store["g/time"][:] = 4
        store.commit()
        last = store.sequence
    with pickle.loads(sent) as late:
        assert int(late.epoch) == 3 and str(late.time.values[1]).startswith("2024-05-06T01")
        for name in ("t", "f", "empty"):
            with pytest.raises(pmstore.StaleSnapshotError, match=f"'g/{name}': the store has another commit"):
                late[name].load()
    with xarray.open_dataset(path, engine=BACKEND, group="g") as dataset:
        sent = pickle.dumps(dataset)
    path.unlink()
    with pmstore.open(path) as store:  # with as many commits, and of another history
        store["g/t"] = np.zeros((24, 50, 40))
        for _ in range(last - store.sequence):
            store["g/t"][:] += 1
            store.commit()
        assert store.sequence == last
    with pickle.loads(sent) as other, pytest.raises(pmstore.StaleSnapshotError):
        other.t.load()


def test_groups_are_a_tree(path: Path) -> None:
    if not hasattr(xarray, "open_datatree"):
        pytest.skip("this xarray has no trees")
    with pmstore.open(path, "r+") as store:
        store["g/deep/er/z"] = np.ones(2)
        store.attrs("g/deep")["title"] = "inside"
    with xarray.open_datatree(path, engine=BACKEND) as tree:
        assert set(tree.groups) == {"/", "/g", "/g/deep", "/g/deep/er"}
        assert tree["g/t"].dims == ("time", "y", "x") and tree["g"].attrs["title"] == "a run"
        assert tree["g/deep"].attrs == {"title": "inside"} and tree["g/deep/er/z"].values.tolist() == [1, 1]
        assert np.array_equal(tree["g/f"], np.arange(24.0 * 50).reshape(24, 50)) and tree["top"].shape == (2,)
    with pytest.raises(pmstore.ClosedStoreError):
        tree["g/t"].compute()
    with xarray.open_datatree(path, engine=BACKEND, group="g/deep", decode_times=False) as tree:
        assert set(tree.groups) == {"/", "/er"} and tree["inside"].shape == (2,)
    with pytest.raises(pmstore.UnknownNameError, match="no group 'none'"):
        xarray.open_datatree(path, engine=BACKEND, group="none")


def test_groups_are_of_one_commit(path: Path) -> None:
    if not hasattr(xarray, "open_groups"):
        pytest.skip("this xarray has no groups")
    with pmstore.open(path, "r+") as store:
        groups = xarray.open_groups(path, engine=BACKEND)
        store["top"], store["g/x"] = np.ones(3), np.ones(40)
        store.commit()
        assert groups["/"].top.values.tolist() == [0, 0] and groups["/g"].x.values[-1] == 1
    groups["/"].close()
    sent = pickle.loads(pickle.dumps(groups["/g"]))
    sent.close()
    with pytest.raises(pmstore.ClosedStoreError):
        sent.f.load()
    assert groups["/g"].f.values[1, 0] == 50  # the others are open
    for dataset in groups.values():
        dataset.close()


def test_groups_that_are_no_tree(tmp_path: Path) -> None:
    if not hasattr(xarray, "open_datatree"):
        pytest.skip("this xarray has no trees")
    with pmstore.open(tmp_path / "run.pm") as store:
        for name, rows in (("a", 3), ("g/a", 4)):
            store[name] = np.arange(rows)
            store.attrs(name)["dims"] = ["a"]
    with pytest.raises(ValueError, match="not aligned"):
        xarray.open_datatree(tmp_path / "run.pm", engine=BACKEND)
    groups = xarray.open_groups(tmp_path / "run.pm", engine=BACKEND)
    assert groups["/g"].a.shape == (4,)
    for dataset in groups.values():
        dataset.close()


def test_a_round_trip_of_zarr(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("zarr", "3")
    with pmstore.open(path, "r") as store:
        pmstore.export(store.group("g"), tmp_path / "g.zarr", names=["t", "time", "x"])
    with xarray.open_dataset(path, engine=BACKEND, group="g") as one:
        with xarray.open_zarr(tmp_path / "g.zarr", consolidated=False) as other:
            assert (
                other.t.dims == one.t.dims and np.array_equal(other.t, one.t) and set(other.coords) == set(one.coords)
            )
            assert np.array_equal(other.time, one.time)


@pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*Zarr format 3.*", "ignore:.*onsolidated.*")
@pytest.mark.parametrize("version", [2, 3])
def test_missing_elements_of_zarr_are_missing(tmp_path: Path, version: int) -> None:
    """xarray has `_FillValue` in the array's own fill value, or as base64 in the attributes."""
    pytest.importorskip("zarr", "3")
    data = np.array([1.0, np.nan, 3.0])
    values = {"f": data, "half": data.astype("f4"), "i": data, "scaled": data, "z": data * 1j, "n": np.array(5.0)}
    encoding: dict[str, dict[str, Any]] = {
        "f": {"_FillValue": -9999.1},
        "half": {"_FillValue": np.float32(1e20)},
        "i": {"dtype": "i4", "_FillValue": -1},
        "scaled": {"dtype": "i2", "scale_factor": 0.1, "_FillValue": -9999},
        "z": {"_FillValue": 1 + 2j},
    }
    made = xarray.Dataset({name: (["x"][: value.ndim], value) for name, value in values.items()})
    made["flag"] = "x", [True, False, True]
    made["time"] = "x", np.array(["2020-01-01", "NaT", "2020-01-03"], "M8[ns]")
    made.to_zarr(tmp_path / "x.zarr", zarr_format=version, encoding=encoding)
    with pmstore.open(tmp_path / "run.pm") as store:
        pmstore.load_into(store, tmp_path / "x.zarr")
        assert store["f"][1] == store.attrs("f")["_FillValue"] == -9999.1
        assert store["scaled"].tolist() == [10, -9999, 30]
        assert "_FillValue" not in store.attrs("flag") and list(store.attrs("n")) == ["_FillValue"]
        pmstore.export(store, tmp_path / "again.zarr")
    with xarray.open_zarr(tmp_path / "x.zarr") as wanted:
        with xarray.open_dataset(tmp_path / "run.pm", engine=BACKEND) as found:
            xarray.testing.assert_equal(found, wanted)
        with xarray.open_zarr(tmp_path / "again.zarr", consolidated=False) as found:
            xarray.testing.assert_equal(found, wanted)


def test_fill_values_of_exports_come_back(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", "3")
    fills = {"a": np.float32(0.1), "b": float("nan"), "c": -5, "d": "text", "e": [1.5], "f": np.float64(2)}
    fills |= {"h": np.int16(3), "i": True, "j": 2**53 + 1, "k": 10**400, "l": np.uint64(2**64 - 1), "m": 10**300}
    with pmstore.open(tmp_path / "run.pm") as store:
        for name, value in fills.items():
            store[name] = np.zeros(2, "f4")
            store.attrs(name)["_FillValue"] = value
            store.attrs(name)["pair"] = (1, 2)
        store["z"] = np.zeros(2, "c8")
        store.attrs("z")["_FillValue"] = 1j
        pmstore.export(store, tmp_path / "x.zarr")
        pmstore.load_into(store.group("again"), tmp_path / "x.zarr")
        for name in [*fills, "z"]:
            one, other = store.attrs(name)["_FillValue"], store.attrs(f"again/{name}")["_FillValue"]
            assert type(one) is type(other) and repr(one) == repr(other), name
            assert list(store.attrs(name)) == list(store.attrs(f"again/{name}")), name
        other = zarr.open_group(tmp_path / "other.zarr", mode="w")
        other.create_array("g", data=np.zeros(2)).attrs["_FillValue"] = "AAAA"
        other.create_array("z", data=np.zeros(2, "c8")).attrs["_FillValue"] = 1
        pmstore.load_into(store.group("other"), tmp_path / "other.zarr")
        assert store.attrs("other/g")["_FillValue"] == "AAAA" and store.attrs("other/z")["_FillValue"] == 1


@pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*Zarr format 3.*")
@pytest.mark.parametrize("fill", [-9999, np.int16(-9999), np.float64(-9999)], ids=repr)
def test_an_int_marks_missing_floats(tmp_path: Path, fill: Any) -> None:
    pytest.importorskip("zarr", "3")
    with pmstore.open(tmp_path / "run.pm") as store:
        store["x"] = np.array([1.5, -9999.0])
        store.attrs("x").update(_FillValue=fill, dims=["n"])
        pmstore.export(store, tmp_path / "x.zarr")
    with xarray.open_zarr(tmp_path / "x.zarr", consolidated=False) as found:
        assert found.x.values[0] == 1.5 and np.isnan(found.x.values[1])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
def test_the_entry_point(path: Path) -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = described["project"]["entry-points"]["xarray.backends"]["pmstore"].partition(":")
    assert getattr(importlib.import_module(module), name) is BACKEND
    assert BACKEND().guess_can_open(path) and not BACKEND().guess_can_open("x.nc") and not BACKEND().guess_can_open(b"")


def test_a_file_of_netcdf(tmp_path: Path) -> None:
    """Times and scaled numbers come as from the file: netCDF's library writes their attributes in another way."""
    h5py = pytest.importorskip("h5py", "3.10")
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        file["time"], file["t"] = np.arange(3), np.array([1, 2, -9], "i2")
        file["time"].make_scale("time")
        file["time"].attrs["units"] = np.bytes_("days since 2020-01-01")
        file["t"].dims[0].attach_scale(file["time"])
        file["t"].attrs.update(_FillValue=np.array([-9], "i2"), scale_factor=np.array([0.5]))
    with pmstore.open(tmp_path / "run.pm") as store:
        pmstore.load_into(store, tmp_path / "x.nc")
    with xarray.open_dataset(tmp_path / "run.pm", engine=BACKEND) as dataset:
        assert dataset.t.dtype == float and np.isnan(dataset.t.values[2])
        assert float(dataset.t.sel(time="2020-01-02").values) == 1
