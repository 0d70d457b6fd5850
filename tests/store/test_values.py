"""Values of every kind come back as the very same type; everything else is refused; arrays of every dtype."""

from __future__ import annotations

import collections
import copy
import enum
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import pmstore
from pmstore._values.values import contents_of, decode, encode
from tests.conftest import LONGER

SIMPLE = [
    None, True, False, 0, -1, 2**63, -(2**63) - 1, 2**64, 10**4000, -(10**4000), 0.0, -0.0, 1.5, math.inf, 5e-324,
    1j, complex(-0.0, math.inf), "", "a\0b", "日本", "\ud800 lone", b"", b"\0\xff", b"x" * 5000, "y" * 5000,
]  # fmt: skip
NUMPY = [
    np.bool_(True), np.int8(-1), np.uint8(255), np.int16(5), np.uint16(5), np.int32(5), np.uint32(5), np.int64(-5),
    np.uint64(2**64 - 1), np.longlong(7), np.ulonglong(7), np.float16(0.1), np.float32(0.1), np.float64(0.1),
    np.longdouble(1) / 3, np.complex64(1j), np.complex128(1j), np.clongdouble(1j) / 3, np.str_("a\0"), np.str_(""),
    np.str_("\udc00"), np.bytes_(b"a\0\0"), np.bytes_(b""), np.datetime64("2020-01-01T00:00:00.5", "25ms"),
    np.datetime64("NaT"), np.datetime64("2020"), np.timedelta64(3, "W"), np.timedelta64(3), np.void(b"abc"),
    np.array([(1, 2.5, "x")], [("a", "i4"), ("b", ">f8"), ("c", "U3")])[0],
    np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0],
]  # fmt: skip
CONTAINERS = [
    (), [], {}, (1,), [1, [2, (3, {"x": None})]], {"b": 1, "a": 2}, {1: "x", (1, 2): "y", None: "z", 1.5: 2, b"k": 3},
    {"": {"": {}}}, list(range(5000)), [2**70, 1j, np.float32(1)], ((), ((),)),
    {np.int32(3): np.float64(2), np.str_("s"): True},
]  # fmt: skip


def same(a, b):
    """Equal, of the same types all the way down, NaN like NaN and -0.0 unlike 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, np.generic):
        if isinstance(a, (str, bytes)) and (len(a) != len(b) or a[:] != b[:]):
            return False
        return a.dtype == b.dtype and a.dtype.char == b.dtype.char and repr(a) == repr(b)
    return a == b


def test_round_trip(open_store):
    values = {f"v{number}": value for number, value in enumerate(SIMPLE + NUMPY + CONTAINERS)}
    with open_store() as store:
        for name, value in values.items():
            store[name] = value
            assert same(store[name], value), ascii(value)[:80]
    with open_store(mode="r") as store:
        for name, value in values.items():
            assert same(store[name], value), ascii(value)[:80]


def test_dicts_keep_their_order(store):
    store["d"] = dict.fromkeys("zax")
    assert list(store["d"]) == list("zax")


def test_values_are_copies(store):
    value = [1, {"a": 2}]
    store["v"] = value
    value[1]["a"] = 3
    assert store["v"] == [1, {"a": 2}]
    assert store["v"] is not store["v"]


def test_nested_arrays(store):
    arrays = [np.arange(6).reshape(2, 3), np.asfortranarray(np.eye(3)), np.zeros((0, 3)), np.array(5.0)]
    store["v"] = {"x": arrays, "t": (arrays[0],)}
    out = store["v"]
    assert same(out["x"], arrays) and same(out["t"], (arrays[0],))
    assert out["x"][1].flags.f_contiguous
    out["x"][0][0, 0] = 7  # a plain copy
    assert store["v"]["x"][0][0, 0] == 0
    assert all(array.flags.owndata for array in out["x"])


@pytest.mark.parametrize("dtype", ["S0", "U0", "V0"])
def test_nested_arrays_of_elements_without_bytes(store, dtype):
    """numpy makes no such array of a text by itself, but gives them as fields of records."""
    fields = np.zeros(3, [("nothing", dtype), ("n", "i4")])["nothing"]
    for array in (fields, np.ndarray((1 << 40,), dtype, buffer=b"")):
        store["v"] = [array]
        assert (store["v"][0].dtype, store["v"][0].shape) == (array.dtype, array.shape)


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Text(str):
    pass


class Own(np.ndarray):
    pass


REFUSED = [
    (Colour.RED, r"int\(value\)"),
    (Point(1, 2), r"tuple\(value\)"),
    (collections.defaultdict(list), r"dict\(value\)"),
    (Text("x"), r"str\(value\)"),
    (bytearray(b"x"), r"bytes\(value\)"),
    (memoryview(b"x"), r"bytes\(value\)"),
    (object(), "Nothing is pickled"),
    (print, "Nothing is pickled"),
    (np.array([object()]), "references to Python objects"),
    (np.zeros(2, [("a", "O")]), "references to Python objects"),
    (np.zeros(2).view(Own), r"np.asarray\(value\)"),
    (msgpack.Timestamp(1), "Nothing is pickled"),
    (msgpack.ExtType(1, b""), r"tuple\(value\)"),
]


def test_other_types_are_refused_with_a_hint(store):
    store["v"] = 1
    for value, hint in REFUSED:
        for wrapped in (value, [value], {"k": (value,)}):
            with pytest.raises(TypeError, match=hint):
                store["v"] = wrapped
        assert store["v"] == 1, type(value)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}])
def test_nesting_has_a_limit(store, wrap):
    value = 0
    for _ in range(128):
        value = wrap(value)
    store["v"] = value
    assert same(store["v"], value)
    with pytest.raises(ValueError, match="128 levels"):
        store["v"] = wrap(value)
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="holds itself"):
        store["v"] = endless
    assert same(store["v"], value)


# ---- arrays

ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=">i4").reshape(3, 4)),
    np.arange(24).reshape(2, 3, 4)[:, ::-1, ::2],
    np.array(5.0),
    np.zeros((3, 0, 2)),
    np.zeros(0, "U5"),
    np.array(["a", "日本", ""]),
    np.array([b"a", b"bc\0d"]),
    np.array(["2020-01-01", "NaT"], "M8[s]"),
    np.array([1, 2], "m8[3D]"),
    np.array([True, False]),
    np.zeros(3, []),
    np.zeros(3, "V7"),
    np.zeros(3, "q"),
    np.ones(3, "g") / 3,
    np.array([(1, 2.5, "x", [1, 2])], [("a", "i1"), ("b", ">f8"), ("c", "U3"), ("d", "u2", (2,))]),
    np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(3, [("a", "i1"), ("b", "f8"), ("c", "i2")])[["c", "a"]],
    np.zeros(3, [(("a title", "a"), "i1")]),
    np.zeros(3, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}),
    np.zeros(3, np.dtype((np.record, [("a", "i4")]))),
    np.zeros(2, [(f"a field with a long name, number {i}", "f8") for i in range(100)]),
    np.zeros((1,) * 32),
]


def test_arrays_round_trip(open_store):
    with open_store() as store:
        for number, array in enumerate(ARRAYS):
            name, about = f"a{number}", f"{array.dtype.str}{array.shape}"
            store[name] = array
            live = store[name]
            assert type(live) is np.ndarray and live is not array, about
            assert same(live, array), about
            if array.size and array.dtype.itemsize:
                assert store[name] is live, about
            store[f"c/{name}"] = live
    with open_store(mode="r") as store:
        for number, array in enumerate(ARRAYS):
            for name in (f"a{number}", f"c/a{number}"):
                out, about = store[name], f"{array.dtype.str}{array.shape}"
                assert same(out, array), about
                assert out.dtype.isalignedstruct == array.dtype.isalignedstruct, about
                assert out.dtype.type is array.dtype.type, about
                if array.ndim > 1 and array.flags.contiguous:
                    assert out.flags.f_contiguous == array.flags.f_contiguous, about
        assert store.check().ok


def test_subarray_dtypes_become_axes(store):
    assert store.create_array("a", 3, "(2,2)i4").shape == (3, 2, 2)
    assert store.require_array("a", 3, "(2,2)i4") is store["a"]


def test_a_memmap_is_stored_as_an_array(store, tmp_path):
    mapped = np.memmap(tmp_path / "m", dtype="f8", mode="w+", shape=(5,))
    mapped[:] = 3
    store["m"] = mapped
    assert type(store["m"]) is np.ndarray and (store["m"] == 3).all()


def test_big_arrays_of_any_layout(open_store):
    base = np.arange(3_000_000, dtype="f4").reshape(1000, 3000)
    views = {"whole": base, "columns": base[:, ::3], "turned": base[:-1, 1:].T, "back": base[::-1], "row": base[5]}
    with open_store() as store:
        for name, view in views.items():
            store[name] = view
    with open_store() as store:
        for name, view in views.items():
            assert np.array_equal(store[name], view)
        assert store["turned"].flags.c_contiguous
        assert store.check().ok


def test_live_arrays_pickle_and_copy_as_plain_copies(store):
    w = store.create_array("w", 3, fill_value=2)
    for out in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w), copy.copy(w)):
        out += 1
    assert w.tolist() == [2, 2, 2]


dtypes = (
    nps.scalar_dtypes()
    | nps.byte_string_dtypes(min_len=1)
    | nps.unicode_string_dtypes(min_len=1)
    | nps.array_dtypes(max_size=3, allow_subarrays=True)
    | nps.nested_dtypes(max_itemsize=200)
)


@pytest.mark.slow
@pytest.mark.longer
@settings(max_examples=50 * LONGER, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=nps.arrays(dtypes, nps.array_shapes(min_dims=0, min_side=0, max_side=4)), order=st.sampled_from("CF"))
def test_any_array_round_trips(tmp_path, array, order):
    assume(not array.dtype.hasobject)
    with pmstore.open(tmp_path / "s", "w") as store:
        store["a"] = np.asarray(array, order=order)
        store["l"] = [array]
        live = store["a"]
        assert same(live, array) and same(store["l"], [array])
        if live.size:
            scalar = array[(0,) * array.ndim]
            if isinstance(scalar, np.generic):
                store["s"] = scalar
                assert type(store["s"]) is type(scalar) and store["s"].tobytes() == scalar.tobytes()
    with pmstore.open(tmp_path / "s", "r") as store:
        assert same(store["a"], array)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
    | st.integers(0, len(NUMPY) - 1).map(NUMPY.__getitem__)
)
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda v: st.tuples(v, v) | st.tuples(v),
    max_leaves=3,
)
values = st.recursive(
    leaves,
    lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(hashables, v, max_size=4),
    max_leaves=12,
)


@given(values)
def test_any_value_round_trips(value):
    assert same(decode(encode(value)), value)


@given(st.binary(max_size=60))
def test_hostile_bytes_give_one_error(data):
    try:
        decode(data)
    except pmstore.CorruptStoreError:
        pass


@pytest.mark.longer
@settings(max_examples=100 * LONGER)
@given(st.data())
def test_damaged_values_give_one_error(data):
    seeds = SIMPLE[:-2] + NUMPY + CONTAINERS
    encoded = bytearray(encode(seeds[data.draw(st.integers(0, len(seeds) - 1))]))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(encoded))
    except pmstore.CorruptStoreError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 3000 + b"\xc0",
        msgpack.packb(msgpack.Timestamp(5)),
        msgpack.packb([[msgpack.Timestamp(5, 7)]]),
        msgpack.packb(msgpack.ExtType(99, b"\x90")),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(["|O8", b"12345678", True]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["<f8", [2**62, 2**62], "C", b""]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["<f8", [-1], "C", b"12345678"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["<f8", [1], "K", b"12345678"]))),
        b"\x81\x90\xc0",  # a list as a key
    ],
    ids=lambda d: d[:12].hex(),
)
def test_hostile_values(data):
    with pytest.raises(pmstore.CorruptStoreError):
        decode(data)


def test_hostile_nesting_of_extensions():
    data = b"\x90"
    for _ in range(2000):
        data = msgpack.packb(msgpack.ExtType(3, data))
    with pytest.raises(pmstore.CorruptStoreError):
        decode(data)


def test_contents_of_a_value_follow_what_can_be_changed_in_place(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    mapped = np.memmap(tmp_path / "map", "f8", "w+", shape=3)
    csr, masked, named = sparse.eye_array(3, format="csr"), np.ma.masked_array([1.0, 2.0]), np.zeros(2, "i4,f8")

    def renamed() -> None:
        named.dtype.names = ("a", "b")

    parts = pmstore.Parts("some.type", {"x": [1]})
    changes: list[Any] = [
        (mapped, lambda: mapped.__setitem__(0, 1)),
        (slice(None, csr), lambda: csr.data.__setitem__(0, 7)),
        ((1, (csr,)), lambda: csr.data.__setitem__(0, 8)),
        (masked, lambda: masked.__setitem__(0, 5)),
        (named, renamed),
        ((parts,), lambda: parts["x"].append(2)),
    ]
    for value, change in changes:
        before = contents_of(value)
        assert before is not None and contents_of(value) == before, type(value)
        change()
        assert contents_of(value) != before, type(value)
    for constant in (None, 1, "text", b"x", (1, "a"), np.float32(1), frozenset({1}), slice(1, 2)):
        assert contents_of(constant) is None


def test_a_hint_reads_no_contents(store):
    """Datasets of h5py and arrays of dask are such values."""

    class Lazy:
        dtype = np.dtype("f8")

        def __array__(self, dtype=None, copy=None):
            raise AssertionError

    with pytest.raises(TypeError, match=r"Lazy: store np.asarray\(value\)"):
        store["x"] = Lazy()
