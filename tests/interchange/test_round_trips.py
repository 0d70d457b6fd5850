"""What a store exports comes back with the same types, orders, values and attributes."""

from __future__ import annotations

import datetime
import enum
import shutil
import warnings
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import pmstore
from pmstore._values import registry
from tests.conftest import LONGER
from tests.store.test_salvage import no_zones

__all__ = ["no_zones"]

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")

NAMES = ["a", "g/a", "g/h/b", "g/c", "ünï", "x-y", "k/1"]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), TEXT, st.binary(max_size=5)
)
SCALARS = st.sampled_from([np.float32(0.5), np.int8(-3), np.bool_(True), np.datetime64("2024-05-06"), np.str_("x")])
VALUES = st.recursive(
    ATOMS | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
NUMBERS = st.one_of(npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.floating_dtypes(sizes=(16, 32, 64)))
PLAIN = NUMBERS | npst.boolean_dtypes()
OTHERS = (
    npst.complex_number_dtypes(sizes=(64, 128))
    | npst.byte_string_dtypes(min_len=1, max_len=5)
    | npst.unicode_string_dtypes(min_len=1, max_len=4)
    | st.sampled_from([np.dtype(f"M8[{unit}]") for unit in ("D", "s", "ns")] + [np.dtype("m8[ms]")])
    | st.just(np.dtype([("n", "<i4"), ("x", ">f8"), ("s", "S3")]))
)
WIDE = st.just(np.dtype([("n", "<i4"), ("m", "<i2", (2,)), ("in", [("a", "?")])]))
DTYPES = {"safetensors": PLAIN, "npz": PLAIN | OTHERS | WIDE, "zarr": PLAIN | OTHERS, "hdf5": PLAIN | OTHERS | WIDE}


@st.composite
def contents(draw: st.DrawFn, form: str) -> dict[str, Any]:
    """Values by name, some of them arrays."""
    found: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        if draw(st.booleans()):
            found[name] = draw(VALUES)
            continue
        dtype = draw(DTYPES[form])
        shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        seed = np.random.default_rng(draw(st.integers(0, 99)))
        count = int(np.prod(shape)) * dtype.itemsize
        if dtype.kind == "U":
            flat = np.array([draw(TEXT) for _ in range(int(np.prod(shape)))], dtype)
        elif dtype.kind == "b":
            flat = seed.integers(0, 2, int(np.prod(shape))).astype(bool)
        elif dtype.kind in "SV":
            flat = seed.integers(0 if dtype.names else 1, 2 if dtype.names else 255, count, np.uint8).view(dtype)
        else:
            flat = np.frombuffer(seed.bytes(count), dtype)
        found[name] = np.array(flat.reshape(shape), order=draw(st.sampled_from("CF")))
    return found


def plain(value: Any) -> Any:
    """Comparable with ==, with types and bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, str(value.dtype), value.shape, value.flags.f_contiguous, value.tobytes()
    if isinstance(value, pmstore.PersistentList):
        return "persistent", plain(list(value))
    if isinstance(value, (list, tuple)):
        return type(value), [plain(item) for item in value]
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    return type(value), repr(value)


def described(mapping: Any) -> dict[str, Any]:
    values = {
        name: (plain(value), getattr(getattr(value, "flags", None), "writeable", 0)) for name, value in mapping.items()
    }
    attributes = {}
    for name in ("", *mapping, *{name.rpartition("/")[0] for name in mapping}):
        about = mapping.attrs(name)
        attributes[name] = {key: plain(about[key]) for key in sorted(about)}
    shapes = {name: mapping._layout(name).maxshape for name, kind, *_ in mapping._rows() if kind == "array"}
    return {"values": values, "attributes": attributes, "maxshape": shapes}


@pytest.mark.longer
@settings(max_examples=25 * LONGER, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_all_comes_back(tmp_path: Path, form: str, data: st.DataObject) -> None:
    found = data.draw(contents(form))
    about = {
        name: data.draw(st.dictionaries(TEXT.filter(bool), VALUES, max_size=2))
        for name in data.draw(st.lists(st.sampled_from(["", "g", *found]), unique=True, max_size=3))
        if not name or name in found or any(one.startswith(f"{name}/") for one in found)
    }
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").mkdir()
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in found.items():
            if type(value) is np.ndarray and value.ndim and value[:1].nbytes and data.draw(st.booleans()):
                longest = (data.draw(st.none() | st.integers(len(value), 1 << 62)), *value.shape[1:])
                first.create_array(name, value.shape, value.dtype, maxshape=longest)
            first[name] = value
        for name, some in about.items():
            first.attrs(name).update(some)
        assert pmstore.export(first, tmp_path / "out" / "x", form) == len(found)
        assert pmstore.load_into(second, tmp_path / "out" / "x", form) == len(found)
        assert described(first) == described(second) and second.check().ok


def test_layouts_and_lists(tmp_path: Path, form: str) -> None:
    """Order, writeable=False, byte order and persistent lists are the store's own."""
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["f"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
        first.create_array("fixed", 5, "i2", fill_value=3, writeable=False)
        first["big-endian"] = np.arange(3, dtype=">i4")
        first.create_list("list").extend([1, (2, b"x")])
        first.attrs("fixed").update(units="K", dims=["n"], some=[1, 2], pair=(1.5, 2), none=None, a=np.arange(3))
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)
        second["list"].append(3)
        assert second["f"].flags.f_contiguous and not second["fixed"].flags.writeable


EACH = [
    np.True_, np.False_, *(np.dtype(code).type(1) for code in "bBhHiIlLqQefdgFDG"), np.float64("nan"), np.float32("-0"),
    np.datetime64("2020-01-01"), np.datetime64("NaT", "s"), np.timedelta64(5, "ms"), np.timedelta64(3),
    np.str_("a\0b"), np.str_(""), np.bytes_(b"\xff\0"), np.void(b"abc"), np.array([(1, 2.5)], "i4,>f8")[0],
]  # fmt: skip


@pytest.mark.parametrize("array", [False, True])
def test_scalars_of_numpy(tmp_path: Path, form: str, array: bool) -> None:
    """They are no arrays without axes, and these are no scalars."""
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        for i, scalar in enumerate(EACH):
            if not array:
                first[f"{i}"] = scalar
                first.attrs()[f"{i}"] = scalar
            elif scalar.dtype.char in "?bBhHiIlLefd":
                first[f"{i}"] = np.array(scalar)
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)
        assert all(type(second[name]) is (np.ndarray if array else type(EACH[int(name)])) for name in second)


@pytest.mark.parametrize("dtype", [np.longlong, np.ulonglong, np.long, ">i8"])
def test_two_integers_of_one_size(tmp_path: Path, form: str, dtype: Any) -> None:
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["x"] = np.arange(3, dtype=dtype)
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert second["x"].tolist() == [0, 1, 2] and second["x"].dtype == np.dtype(dtype)
        assert second["x"].dtype.char == np.dtype(dtype).char


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("m8", "npz hdf5"),
        ("M8", "npz hdf5"),
        ([("n", "i4"), ("m", "m8")], "npz zarr"),
        ("V0", "npz"),
        ([("n", "i4"), ("v", "V0")], "npz"),
        ([("n", "i4"), ("s", "S0"), ("u", "U0")], "npz"),
        ([("v", "V0")], "npz"),
    ],
    ids=str,
)
def test_dtypes_without_a_unit_or_without_bytes(tmp_path: Path, form: str, dtype: Any, kept: str) -> None:
    """A format that can't keep one refuses the export. What is exported can be imported."""
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["x"], first["f"] = np.zeros(3, dtype), np.zeros((2, 3), dtype, order="F")
        first["empty"], first["one"], first["beside"] = np.zeros((0, 2), dtype), np.zeros((), dtype), np.arange(3)
        if form not in kept:
            with pytest.raises(TypeError, match="'(x|f|empty|one)' has dtype"):
                pmstore.export(first, tmp_path / "x", form)
            assert not (tmp_path / "x").exists()
            return
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second) and second.check().ok


def test_groups_and_some_names(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    store["m/w"], store["m/k"], store["other"] = np.arange(3.0), 5, np.ones(2)
    store.attrs("m")["of"] = "m"
    store.attrs("m/w")["units"] = "K"
    assert pmstore.export(store.group("m"), tmp_path / "group", form) == 2
    assert pmstore.load_into(store.group("n/o"), tmp_path / "group", form) == 2
    assert store["n/o/k"] == 5 and store.attrs("n/o")["of"] == "m" and store.attrs("n/o/w")["units"] == "K"
    assert pmstore.export(store, tmp_path / "some", form, names=["m", "n/o/k"]) == 3
    assert pmstore.load_into(store.group("p"), tmp_path / "some", form, names={"m/w": "v", "n": "q"}) == 2
    assert sorted(store.group("p")) == ["q/o/k", "v"] and store.attrs("p/v")["units"] == "K"
    with pytest.raises(pmstore.UnknownNameError):
        pmstore.export(store, tmp_path / "none", form, names=["m", "none"])
    with pytest.raises(pmstore.UnknownNameError, match="no name 'none' in the group 'm'"):
        pmstore.export(store.group("m"), tmp_path / "none", form, names=["none"])
    with pytest.raises(pmstore.UnknownNameError, match="no name 'none' in the file"):
        pmstore.load_into(store.group("r"), tmp_path / "some", form, names=["none"])
    assert not (tmp_path / "none").exists() and store.check().ok


def test_larger_than_a_piece(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmstore._interchange.source.PIECE", 1000)
    monkeypatch.setattr("pmstore._interchange.hdf5.PIECE", 1000)
    monkeypatch.setattr("pmstore._interchange.zarr._CHUNK", 1000)
    told: list[tuple[int, int]] = []
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["rows"] = np.arange(7000.0).reshape(70, 100)
        first["wide"] = np.arange(4000.0).reshape(2, 2000)
        first["odd"] = np.arange(999, dtype="i2").reshape(3, 333)
        first["f"] = np.asfortranarray(np.arange(600.0).reshape(20, 30))
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form, progress=lambda done, total: told.append((done, total)))
        assert described(first) == described(second)
        total = sum(array.nbytes for array in first.values())
        assert told[-1] == (total, total) and told == sorted(told)


def test_attributes_with_names_that_mean_something(tmp_path: Path, form: str) -> None:
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first["g/x"] = np.arange(3)
        first.attrs("g/x").update({"NAME": "n", "CLASS": (1, 2), "a/b": 1, "large": "l" * 100_000, "dims": ["x", "y"]})
        first.attrs("g")["CLASS"] = "c"
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)
        first.attrs()["__values__"] = 1
        with pytest.raises(ValueError, match="the attribute '__values__' has a meaning"):
            pmstore.export(first, tmp_path / "y", form)


def test_what_was_changed_in_the_file_counts(tmp_path: Path) -> None:
    """A hint about a type does not bring an old value back."""
    h5py = pytest.importorskip("h5py", "3.10")
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first.update({"epoch": 3, "rate": np.float32(0.5), "config": (1, 2), "x": np.arange(3.0)})
        first.attrs("x").update(units="K", scale=(1, 2))
        pmstore.export(first, tmp_path / "x.h5")
        with h5py.File(tmp_path / "x.h5", "r+") as file:
            file["epoch"][()] = 7
            file["x"].attrs["units"] = "m"
            file["x"].attrs["scale"] = np.array([3, 4])
        pmstore.load_into(second, tmp_path / "x.h5")
        assert int(second["epoch"]) == 7 and second["rate"] == 0.5 and type(second["rate"]) is np.float32
        assert second["config"] == (1, 2) and second.attrs("x")["units"] == "m"
        assert second.attrs("x")["scale"].tolist() == [3, 4]


def test_text_of_any_length_is_a_value(store: pmstore.Store, tmp_path: Path, form: str) -> None:
    store["t"] = np.array(["a", "bc" * 100], np.dtypes.StringDType())
    store["x"] = np.arange(3)
    assert pmstore.export(store, tmp_path / "x", form) == 2
    with pmstore.open(":memory:") as other:
        pmstore.load_into(other, tmp_path / "x", form)
        assert other["t"].dtype == store["t"].dtype and other["t"].tolist() == store["t"].tolist()
        assert other["x"].tolist() == [0, 1, 2]


class Mode(enum.IntEnum):
    FAST = 1
    SLOW = 2


class Kind(str, enum.Enum):
    A = "a"


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(registry._BY_TYPE), dict(registry._BY_NAME)
    yield
    registry._BY_TYPE, registry._BY_NAME = before


def test_registered_types_that_are_numbers_or_text(tmp_path: Path, form: str, clean_registry: None) -> None:
    """What is beside them keeps its types, too."""
    for kind in Mode, Kind, Access:
        pmstore.register(kind)
    beside = {"mode": Mode.FAST, "shape": (3, 4), "w": np.arange(3), "blob": b"xy", "tags": {1, 2}}
    values = [Mode.SLOW, Kind.A, Access.READ | Access.WRITE, beside, {Mode.FAST: 1.5}, {Kind.A: (1,)}, [Mode.SLOW] * 2]
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        for i, value in enumerate(values):
            first[f"{i}"] = first.attrs()[f"{i}"] = value
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert described(first) == described(second)


def test_ints_that_have_no_text(tmp_path: Path, form: str) -> None:
    large = 1 << 20_000
    with pmstore.open(":memory:") as first, pmstore.open(":memory:") as second:
        first.update({"n": large, "l": [1, -large], "d": {"prime": large}})
        first.attrs()["n"] = large
        pmstore.export(first, tmp_path / "x", form)
        pmstore.load_into(second, tmp_path / "x", form)
        assert dict(second) == dict(first) and second.attrs()["n"] == large


@pytest.fixture
def registered(clean_registry: None) -> Any:
    """A type that is registered for one test, and whose `decode` fails while `fails` is true."""

    class Model:
        fails = False

        def __init__(self, x: Any) -> None:
            self.x = x

    def decode(parts: Any) -> Model:
        if Model.fails:
            raise ZeroDivisionError("no")
        return Model(parts["x"])

    pmstore.register(Model, vars, decode, name="Model")
    return Model


def test_a_decode_that_fails_loses_nothing(store: pmstore.Store, tmp_path: Path, form: str, registered: Any) -> None:
    """The type comes back as it was stored, and reading it fails until its `decode` works."""
    with pmstore.open(":memory:") as first:
        first["v"], first["l"], first["a"] = registered(5), [registered((1, 2))], np.arange(3.0)
        first.attrs("a").update(one=registered(6), more=[registered(7)])
        first.attrs()["of all"] = registered(8)
        pmstore.export(first, tmp_path / "x", form)
    registered.fails = True
    assert pmstore.load_into(store, tmp_path / "x", form) == 3
    for mapping, key in (store, "v"), (store, "l"), (store.attrs("a"), "one"), (store.attrs(), "of all"):
        with pytest.raises(pmstore.DecodeError, match="decode of Model failed"):
            mapping[key]
    registered.fails = False
    assert (store["v"].x, store["l"][0].x) == (5, (1, 2))
    assert (store.attrs("a")["one"].x, store.attrs("a")["more"][0].x, store.attrs()["of all"].x) == (6, 7, 8)


def test_a_time_zone_that_the_machine_lacks(
    store: pmstore.Store, tmp_path: Path, form: str, no_zones: Callable[[], None]
) -> None:
    when = datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    with pmstore.open(":memory:") as first:
        first["a"] = np.arange(3.0)
        first.attrs("a")["when"] = when
        pmstore.export(first, tmp_path / "x", form)
    no_zones()
    with pytest.raises(pmstore.DecodeError, match="'a', attribute 'when': the time zone .* install the package tzdata"):
        pmstore.load_into(store, tmp_path / "x", form)
    assert not len(store)


@pytest.mark.parametrize("end", ["H5", "He5", "HDF5", "NPZ", "Zarr", "SafeTensors"])
def test_the_end_of_a_path_in_letters_of_any_case(store: pmstore.Store, tmp_path: Path, end: str) -> None:
    if end[0] in "HZ":
        pytest.importorskip("zarr" if end == "Zarr" else "h5py")
    store["x"] = np.arange(5)
    path = tmp_path / f"run.{end}"
    assert pmstore.export(store, path) == 1 and path.exists()
    with pmstore.open(tmp_path / "other.pm") as other:
        assert pmstore.load_into(other, path) == 1 and other["x"][4] == 4


def test_netcdf_is_read_and_not_written(store: pmstore.Store, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    (tmp_path / "old.nc").write_bytes(b"CDF\x01" + bytes(60))  # netCDF-3, which is not HDF5
    with pytest.raises(pmstore.InterchangeError, match="old.nc"):
        pmstore.load_into(store, tmp_path / "old.nc")
    with pytest.raises(ValueError, match=r"ends in no format: .*\.h5"):
        pmstore.export(store, tmp_path / "new.nc")


def test_paths_of_other_files(store: pmstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store["x"] = np.arange(3)
    pmstore.export(store, "~/x.npz")
    assert pmstore.load_into(store.group("a"), "~/x.npz") == 1
    assert pmstore.load_into(store.group("b"), f"file://{tmp_path}/x.npz") == 1
    for call in (pmstore.export, pmstore.load_into):
        with pytest.raises(ValueError, match="'s3://bucket/x.npz' is not on this machine, and an .*: copy it"):
            call(store, "s3://bucket/x.npz")
        with pytest.raises(TypeError, match="path is a str, bytes or os.PathLike, not Store"):
            call(store, store)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [">M8[Y]", ">m8[s]", ">f8", "<M8[ns]"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_other_byte_orders(shape: tuple[int, ...], dtype: str, store: pmstore.Store, tmp_path: Path) -> None:
    pytest.importorskip("h5py", "3.10")
    store["x"] = np.full(shape, 50, "i8").astype(dtype)
    pmstore.export(store, tmp_path / "x.h5")
    pmstore.load_into(store.group("again"), tmp_path / "x.h5")
    assert store["again/x"].dtype == np.dtype(dtype) and np.array_equal(store["again/x"], store["x"])
