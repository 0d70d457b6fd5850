"""Scales of HDF5 and netCDF-4, which name the axes of datasets."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import pmstore

h5py = pytest.importorskip("h5py", "3.10")


def test_attributes_that_scales_have_too(store: pmstore.Store, tmp_path: Path) -> None:
    """Those of a scale, by which HDF5 finds it, are left out, and those of a program with the same names stay."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["time"] = np.zeros((2, 3)), np.arange(2)
        file["time"].make_scale("the time")
        file["x"].dims[0].attach_scale(file["time"])
        file["x"].attrs.update({"NAME": "detector", "CLASS": np.arange(3), "REFERENCE_LIST": 5})
        file.attrs["CLASS"] = "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pmstore.load_into(store, tmp_path / "x.h5") == 2
    assert store.attrs("time") == {"dims": ["time"]} and store.attrs()["CLASS"] == "run"
    about = store.attrs("x")
    assert about["NAME"] == "detector" and about["CLASS"].tolist() == [0, 1, 2] and about["REFERENCE_LIST"] == 5
    assert set(about) == {"NAME", "CLASS", "REFERENCE_LIST", "dims"} and about["dims"] == ["time", ""]


def test_axes_are_named_by_scales(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["g/t"], file["g/u"], file["g/labelled"] = np.zeros((2, 3, 4)), np.zeros(2), np.zeros((2, 3))
        file["g/time"], file["x"], file["other"], file["grid"] = np.arange(2), np.arange(3), np.arange(3), np.eye(2)
        for name in ("g/time", "x", "other", "grid"):
            file[name].make_scale()
        for axis, name in ((0, "g/time"), (1, "x"), (1, "other")):
            file["g/t"].dims[axis].attach_scale(file[name])
            file["g/labelled"].dims[axis].attach_scale(file[name])
        file["g/labelled"].dims[1].label = "y"
        file["g/u"].dims[0].attach_scale(file["g/time"])
        file["g/u"].attrs["dims"] = ["mine"]
    assert pmstore.load_into(store, tmp_path / "x.h5") == 7
    assert store.attrs("g/t") == {"dims": ["time", "x", ""]} and store.attrs("g/labelled") == {"dims": ["time", "y"]}
    assert store.attrs("x") == {"dims": ["x"]} and not store.attrs("grid") and store.attrs("g/u") == {"dims": ["mine"]}


def test_scales_that_are_gone_or_damaged(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["y"], file["z"], file["s"] = np.zeros((2, 3)), np.zeros(2), np.zeros(2), np.arange(2)
        file["s"].make_scale()
        for name in ("x", "y"):
            file[name].dims[0].attach_scale(file["s"])
        file["y"].attrs["DIMENSION_LIST"] = [file["s"].ref] * 3  # as many as no axes
        file["z"].attrs["DIMENSION_LIST"] = np.arange(1)  # of a program, which calls something else that
        del file["s"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pmstore.load_into(store, tmp_path / "x.h5") == 3
    assert not store.attrs("x") and not store.attrs("y") and store.attrs("z")["DIMENSION_LIST"].tolist() == [0]


def test_scales_of_netcdf_that_have_a_length_only(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file["t"], file["row"], file["odd"] = np.ones(3), np.zeros(3, "f4"), np.ones(2)
        file["row"].make_scale("This is a netCDF dimension but not a netCDF variable.         3")
        file["t"].dims[0].attach_scale(file["row"])
        file["odd"].attrs.update(CLASS="DIMENSION_SCALE", NAME=5)
    assert pmstore.load_into(store, tmp_path / "x.nc") == 2
    assert set(store) == {"t", "odd"} and store.attrs("t") == {"dims": ["row"]} and store["t"][2] == 1


def test_attributes_of_netcdf(store: pmstore.Store, tmp_path: Path) -> None:
    """netCDF's library writes text as bytes, or in an array of one text, and each number as an array of one."""
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        file["t"] = np.array([1, 2, -9], "i2")
        texts = np.array(["°C"], h5py.string_dtype()), np.array(["a", "b"], h5py.string_dtype())
        file["t"].attrs.update(units=np.bytes_("K"), empty=np.bytes_(""), label=texts[0], names=texts[1])
        file["t"].attrs.update(_FillValue=np.array([-9], "i2"), scale_factor=np.array([0.1]), range=np.arange(2))
        file["t"].attrs.update(latin=np.bytes_("é".encode("latin1")))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["g/t"] = 1
        file["g/t"].attrs.update(units=np.bytes_("K"), one=np.arange(1))
    for name in ("x.nc", "x.h5"):
        pmstore.load_into(store, tmp_path / name)
    assert not store.attrs()
    about = dict(store.attrs("t"))
    assert about.pop("range").tolist() == [0, 1]
    assert about == {
        "units": "K",
        "empty": "",
        "label": "°C",
        "names": ["a", "b"],
        "_FillValue": -9,
        "scale_factor": 0.1,
        "latin": b"\xe9",
    }
    assert type(about["units"]) is str and type(about["_FillValue"]) is np.int16
    other = store.attrs("g/t")
    assert type(other["units"]) is np.bytes_ and other["one"].shape == (1,)
    store.attrs("t").update(mine=np.arange(1), kept=np.bytes_("K"))
    pmstore.export(store, tmp_path / "again.h5")
    with pmstore.open(":memory:") as again:
        pmstore.load_into(again, tmp_path / "again.h5")
        assert again.attrs("t")["mine"].shape == (1,) and type(again.attrs("t")["kept"]) is np.bytes_


def test_attributes_that_netcdf_hides(store: pmstore.Store, tmp_path: Path) -> None:
    """Its library shows none of them, and xarray can't write them into another file of netCDF. Those of a store, which
    an export wrote, stay."""
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs.update(_NCProperties=np.bytes_("version=2"), _nc3_strict=np.array([1], "i4"), title=np.bytes_("t"))
        file["g/x"] = np.arange(3)
        file["g/x"].attrs["_nc3_strict"] = "mine"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pmstore.load_into(store, tmp_path / "x.nc")
    assert dict(store.attrs) == {"title": "t"} and dict(store.attrs("g/x")) == {"_nc3_strict": "mine"}
    store.attrs["_NCProperties"] = "version=2"
    pmstore.export(store, tmp_path / "x.h5")
    with pmstore.open(":memory:") as again:
        pmstore.load_into(again, tmp_path / "x.h5")
        assert dict(again.attrs) == {"title": "t", "_NCProperties": "version=2"}


def test_unlimited_axes_of_netcdf(store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the length of the longest variable, and the others are filled up to it."""
    monkeypatch.setattr("pmstore._interchange.hdf5.PIECE", 16)
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        texts = h5py.string_dtype()
        for name, data, axes in (
            ("a", np.arange(9, dtype="f4"), (None,)),
            ("b", np.arange(2), (None,)),
            ("c", np.ones((2, 1)), (2, None)),
            ("d", np.zeros((0, 2), "i2"), (None, 2)),
            ("s", np.array(["x"], texts), (None,)),
            ("unfilled", np.ones(1), (None,)),
            ("alone", np.arange(3), (None,)),
        ):
            fill = None if data.dtype == object or name == "unfilled" else -5
            file.create_dataset(name, data=data, maxshape=axes, chunks=(2,) * data.ndim, fillvalue=fill)
        for name, length, most in (("t", 0, None), ("x", 2, 2)):
            file.create_dataset(name, (length,), "f4", maxshape=(most,))
            file[name].make_scale(f"This is a netCDF dimension but not a netCDF variable.{length:10}")
        for name, scales in (("a", "t"), ("b", "t"), ("c", "xt"), ("d", "tx"), ("s", "t"), ("unfilled", "t")):
            for axis, scale in enumerate(scales):
                file[name].dims[axis].attach_scale(file[scale])
    assert pmstore.load_into(store, tmp_path / "x.nc") == 7
    assert store["unfilled"].tolist() == [1.0] + [9.9692099683868690e36] * 8
    assert store["a"].tolist() == list(range(9)) and store["b"].tolist() == [0, 1] + [-5] * 7
    assert store["c"].tolist() == [[1.0] + [-5.0] * 8] * 2 and store["d"].tolist() == [[-5, -5]] * 9
    assert store["s"].tolist() == ["x"] + [""] * 8 and store["alone"].tolist() == [0, 1, 2]
    assert store.append("d", [3, 4])[-2:].tolist() == [[-5, -5], [3, 4]]
    with pytest.raises(TypeError, match="'c' has the fixed shape"):
        store.append("c", [0.0] * 9)


@pytest.mark.parametrize("properties", [True, False])
def test_coordinates_of_netcdf_with_two_axes(store: pmstore.Store, tmp_path: Path, properties: bool) -> None:
    """Such a scale refers to no other: its axes have numbers. Libraries before 4.4.1 gave the file no properties."""
    with h5py.File(tmp_path / "x.nc", "w") as file:
        if properties:
            file.attrs["_NCProperties"] = np.bytes_("version=2,netcdf=4.9.2,hdf5=1.14.3")
        file.create_dataset("g/t", data=np.arange(4.0).reshape(2, 2), maxshape=(None, 2), chunks=(2, 2), fillvalue=-1)
        file.create_dataset("w", data=np.ones((5, 3)), maxshape=(None, 3), chunks=(2, 3))
        file["n"], file["x"] = np.zeros(2, "f4"), np.zeros(3, "f4")
        for number, (name, length) in enumerate((("g/t", 0), ("n", 2), ("x", 3))):
            only = f"This is a netCDF dimension but not a netCDF variable.{length:10}"
            file[name].make_scale(only if length else "t")
            file[name].attrs["_Netcdf4Dimid"] = np.int32(number)
        file["g/t"].attrs["_Netcdf4Coordinates"] = np.array([0, 1], "i4")
        for axis, name in enumerate(("g/t", "x")):
            file["w"].dims[axis].attach_scale(file[name])
        file["w"].attrs["n"] = np.array([7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pmstore.load_into(store, tmp_path / "x.nc") == 2
    assert store["g/t"].tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1], [-1, -1]]
    assert store.attrs("g/t") == {"dims": ["t", "n"]} and store.attrs("w") == {"dims": ["t", "x"], "n": 7}


def test_numbers_of_axes_that_are_damaged(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        for name, number, numbers in (("a", "none", [0]), ("b", [1, 2], [7, 8]), ("c", 1, "ab"), ("d", 2, [1, 1, 1])):
            file.create_dataset(name, data=np.ones((2, 2)), maxshape=(None, 2), chunks=(2, 2))
            file[name].make_scale(name)
            file[name].attrs.update(_Netcdf4Dimid=number, _Netcdf4Coordinates=numbers)
    assert pmstore.load_into(store, tmp_path / "x.nc") == 4
    assert all(store[name].shape == (2, 2) and not store.attrs(name) for name in "abcd")


def test_variables_of_netcdf_with_the_name_of_another_axis(store: pmstore.Store, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.nc", "w") as file:
        file["g/x"] = np.zeros(3, "f4")
        file["g/x"].make_scale("This is a netCDF dimension but not a netCDF variable.         3")
        file["g/_nc4_non_coord_x"], file["g/_nc4_non_coord_y"] = np.arange(4), np.arange(5)
        file["_nc4_non_coord_z"], file["z"] = np.arange(6), np.arange(7)
        file["_nc4_non_coord_link"], file["link"] = np.arange(8), h5py.ExternalLink("other.h5", "/x")
    with pytest.warns(UserWarning, match="'link' is a soft or external link"):
        assert pmstore.load_into(store, tmp_path / "x.nc") == 5
    assert {name: len(store[name]) for name in store} == {
        "g/x": 4,
        "g/_nc4_non_coord_y": 5,
        "_nc4_non_coord_z": 6,
        "z": 7,
        "_nc4_non_coord_link": 8,
    }


def test_netcdf_3_is_named(store: pmstore.Store, tmp_path: Path) -> None:
    (tmp_path / "x.nc").write_bytes(b"CDF\x02" + bytes(100))
    with pytest.raises(pmstore.InterchangeError, match="it is of netCDF-3, which is not HDF5: make it netCDF-4"):
        pmstore.load_into(store, tmp_path / "x.nc")
