"""Masked and record arrays, sparse matrices, and frames: they come back equal, with their types and live arrays."""

from __future__ import annotations

import datetime
import re
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values import known
from pmstore._values.as_json import to_json


def shared(array: Any, part: Any) -> bool:
    """Whether an array is in the memory of a live array of the store."""
    return not part.size or np.shares_memory(array, part)


# ---- numpy

MASKED = [
    np.ma.array(np.arange(5.0), mask=[0, 1, 0, 0, 0], fill_value=-1),
    np.ma.array(np.arange(6).reshape(2, 3), mask=np.ma.nomask),
    np.ma.array(np.arange(3), mask=[False] * 3, hard_mask=True),
    np.ma.array(5.0, mask=True),
    np.ma.zeros((0, 3)),
    np.ma.array([("a", 1)], mask=[(True, False)], dtype=[("s", "U3"), ("n", "i4")]),
    np.ma.array(["2020-01-01"], dtype="M8[D]"),
    np.ma.array(["a", "b"], mask=[1, 0]),
    np.ma.array([b"abc"], mask=[1], fill_value=b"x"),
]


@pytest.mark.parametrize("value", MASKED, ids=range(len(MASKED)))
def test_masked_arrays(open_store: Any, value: Any) -> None:
    with open_store() as store:
        store["m"], store["l"] = value, [value]
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for out in (store["m"], store["l"][0]):
                assert type(out) is np.ma.MaskedArray and out.dtype == value.dtype and out.shape == value.shape
                assert out.data.tobytes() == value.data.tobytes() and repr(out.fill_value) == repr(value.fill_value)
                assert (out.mask is np.ma.nomask) == (value.mask is np.ma.nomask)
                assert np.array_equal(out.mask, value.mask) and out.hardmask == value.hardmask
            assert shared(store["m"].data, store.parts("m")["data"])


def test_masked_arrays_are_live(store: Any) -> None:
    store["m"] = np.ma.array(np.arange(5.0), mask=[0, 1, 0, 0, 0])
    live = store["m"]
    live[0], live[2] = 9, np.ma.masked
    assert store["m"].tolist() == [9, None, None, 3, 4]
    store.rollback()
    store["r"] = np.rec.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])
    store["r"].a[0] = 7
    assert type(store["r"]) is np.recarray and store["r"].tolist() == [(7, 2.5), (3, 4.5)]
    assert type(store["r"][0]) is np.record


def test_a_mask_that_the_store_lacks_is_a_lost_update(store: Any) -> None:
    store["m"] = np.ma.array([1.0, 2.0])
    store.commit()
    copy = store["m"]
    copy[1] = 3.0  # the data are live
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.commit()
    copy[0] = np.ma.masked
    with pytest.warns(pmstore.LostUpdateWarning, match="'m' was read from the store and changed"):
        store.commit()
    store["m"] = copy
    assert store["m"].tolist() == [None, 3.0]


def test_a_type_of_another_module_is_watched_unless_the_table_says_otherwise(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("another")
    module.Box = type("Box", (types.SimpleNamespace,), {})
    monkeypatch.setitem(sys.modules, "another", module)
    monkeypatch.setitem(known._TABLES, "another", (["Box"], lambda kind: (vars, lambda parts: kind(**parts))))
    monkeypatch.setattr(known, "_NAMES", {*known._NAMES, "Box"})
    for one in ("_BY_TYPE", "_BY_NAME", "_LOADED"):
        monkeypatch.setattr(known, one, getattr(known, one).copy())
    store["box"] = module.Box(x=np.zeros(3), label="old")
    store.commit()
    box = store["box"]
    box.label = "new"
    with pytest.warns(pmstore.LostUpdateWarning, match="'box' was read from the store and changed"):
        store.commit()


def test_what_a_masked_array_hides_is_refused(store: Any) -> None:
    for value in (np.ma.array([object()]), np.ma.masked, np.ma.array(np.zeros(2).view(type("Own", (np.ndarray,), {})))):
        with pytest.raises(TypeError):
            store["m"] = value
    store["m"] = pmstore.Parts(
        "numpy.ma.MaskedArray", {"data": np.zeros(3), "mask": np.zeros(2, bool), "about": [0, 1]}
    )
    with pytest.raises(pmstore.DecodeError, match="different shapes"):
        store["m"]


# ---- SciPy

KINDS = [f"{kind}_{what}" for kind in ("csr", "csc", "coo") for what in ("array", "matrix")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("long", [False, True])
def test_sparse(open_store: Any, kind: str, long: bool) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    values = [getattr(sparse, kind)(np.where(np.random.default_rng(0).random((20, 30)) < 0.2, 1.5, 0))]
    values += [getattr(sparse, kind)((3, 0)), getattr(sparse, kind)((0, 3), dtype="i8")]
    for value in values if long else ():
        for name in ("indices", "indptr", "row", "col"):
            if hasattr(value, name):
                setattr(value, name, getattr(value, name).astype(np.int64))
    with open_store() as store:
        for i, value in enumerate(values):
            store[f"v{i}"] = value
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for i, value in enumerate(values):
                out, parts = store[f"v{i}"], store.parts(f"v{i}")
                assert type(out) is type(value) and out.shape == value.shape and out.dtype == value.dtype
                assert (out.toarray() == value.toarray()).all() and (out @ np.ones(out.shape[1])).shape
                for name in ("data", "indices", "indptr", "row", "col"):
                    if hasattr(value, name):
                        assert getattr(out, name).dtype == getattr(value, name).dtype
                assert shared(out.data, parts["data"])
                if "indices" in parts:
                    assert shared(out.indices, parts["indices"]) and shared(out.indptr, parts["indptr"])
            assert store.check().ok


@pytest.mark.parametrize(
    "first, second, kept",
    [("i4", "i8", "i8"), ("i8", "i4", "i8"), ("u4", "u4", "i8"), ("i2", "i2", "i4"), ("u8", "i4", "i8")],
)
def test_sparse_with_other_integers(store: Any, first: str, second: str, kept: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    value = sparse.csr_array(np.eye(3))
    value.indices, value.indptr = value.indices.astype(first), value.indptr.astype(second)
    store["s"] = value
    assert store["s"].toarray().tolist() == np.eye(3).tolist()
    assert store["s"].indices.dtype == store["s"].indptr.dtype == kept
    value = sparse.coo_array(np.eye(3))
    if hasattr(value, "coords"):  # the setter of `col` casts
        value.coords = value.row.astype(first), value.col.astype(second)
    else:
        value.row, value.col = value.row.astype(first), value.col.astype(second)
    store["c"] = value
    assert store["c"].toarray().tolist() == np.eye(3).tolist()
    assert store["c"].row.dtype == store["c"].col.dtype == kept
    value = sparse.csr_array(np.eye(3))
    value.indices = value.indices.astype("f8")
    with pytest.raises(TypeError, match="float64"):
        store["s"] = value


def test_sparse_in_place(store: Any) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    store["s"] = sparse.csr_array(np.eye(3))
    store["s"].data *= 5
    store.commit()
    assert store["s"].toarray().tolist() == (5 * np.eye(3)).tolist()
    assert to_json(store["s"])["parts"]["shape"] == [3, 3]


@pytest.mark.parametrize("kind", ["csr_array", "csc_matrix", "coo_array"])
def test_sparse_with_another_array(store: Any, kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    store["s"] = getattr(sparse, kind)(np.eye(3))
    store.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = store["s"]
        assert (matrix @ np.ones(3)).tolist() == [1.0] * 3 and matrix.sum() == matrix.T.tocsc().nnz == 3
        matrix.data[0] = 4.0
        store.commit()
        store.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pmstore.LostUpdateWarning)
        if kind == "coo_array":  # other arrays, with the same contents
            matrix.coords = tuple(one.copy() for one in matrix.coords)
        for _ in range(2):
            store.commit()
    matrix = store["s"]
    matrix.data = matrix.data * 2
    with pytest.warns(pmstore.LostUpdateWarning, match="'s' was read from the store and changed"):
        store.commit()
    assert store["s"].data.tolist() == [4.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["dok_array", "lil_matrix", "bsr_array", "dia_matrix"])
def test_other_sparse_kinds_are_refused_with_a_hint(store: Any, kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    value = getattr(sparse, kind)(np.eye(3))
    with pytest.raises(TypeError, match=r"store value.tocsr\(\)"):
        store["v"] = value
    store["v"] = value.tocsr()


def csr(**changed: Any) -> Any:
    parts = {
        "data": np.ones(2), "indices": np.array([0, 2], "i4"), "indptr": np.array([0, 1, 2], "i4"), "shape": (2, 3)
    }  # fmt: skip
    return pmstore.Parts("scipy.sparse.csr_array", {**parts, **changed})


HOSTILE = [
    csr(indices=np.array([0, 3], "i4")),
    csr(indices=np.array([-1, 2], "i4")),
    csr(indptr=np.array([0, 1, 3], "i4")),
    csr(indptr=np.array([0, 2, 1], "i4")),
    csr(indptr=np.array([1, 1, 2], "i4")),
    csr(indptr=np.array([0, 1], "i4")),
    csr(indptr=np.array([0, 1, 2], "i8")),
    csr(indices=np.array([0, 2], "f8")),
    csr(data=np.ones(1)),
    csr(data=[1, 2]),
    csr(shape=[2, 3]),
    csr(shape=(2, -3)),
    csr(shape=(2, 3, 4)),
    csr(shape=(2,)),
    pmstore.Parts("scipy.sparse.csr_array", {"data": np.ones(1)}),
    pmstore.Parts(
        "scipy.sparse.coo_matrix",
        {"data": np.ones(1), "coords0": np.array([5]), "coords1": np.array([0]), "shape": (5, 5), "canonical": True},
    ),
    pmstore.Parts(
        "scipy.sparse.coo_matrix",
        {"data": np.ones(1), "coords0": np.array([0, 1]), "coords1": np.array([0]), "shape": (5, 5), "canonical": True},
    ),
]


@pytest.mark.parametrize("parts", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_sparse(store: Any, parts: Any) -> None:
    """SciPy's compiled code does not check indices."""
    pytest.importorskip("scipy.sparse")
    store["v"] = csr()
    assert store["v"].nnz == 2
    store["v"] = parts
    store.commit()
    for read in (store.__getitem__, store.read):
        with pytest.raises(pmstore.DecodeError, match="'v': decode of scipy.sparse"):
            read("v")


# ---- pandas


def frame(n: int) -> Any:
    pandas = pytest.importorskip("pandas")
    times = n // 10
    cells = [1, "a", None, 2.5, [1, [2, 3]], (1,), {"a": 1}, b"x", True, np.float64(2)] * times
    text = ["a", None, "ä", "", "b"] * (n // 5)
    found = {
        "i": np.arange(n), "f": np.linspace(0, 1, n), "b": np.arange(n) % 2 == 0, "s": [f"x{i}" for i in range(n)],
        "o": pandas.Series(cells, dtype=object), "strs": pandas.Series(text, dtype=object),
        "c": pandas.Categorical(list("abcabcabca") * times, categories=list("cbad"), ordered=True),
        "ci": pandas.Categorical([1, 2, None, 1, 2] * (n // 5)),
        "d": pandas.date_range("2020", periods=n), "tz": pandas.date_range("2020", periods=n, tz="Europe/Paris"),
        "to": pandas.date_range("2020", periods=n, tz=datetime.timezone(datetime.timedelta(hours=5))),
        "utc": pandas.date_range("2020", periods=n, tz="UTC").as_unit("s"),
        "td": pandas.timedelta_range("1h", periods=n), "I": pandas.array([1, None] * (n // 2), dtype="Int64"),
        "B": pandas.array([True, None] * (n // 2), dtype="boolean"),
        "F": pandas.array([1.5, None] * (n // 2), dtype="Float32"),
        "S": pandas.array(text, dtype="string"), "Sp": pandas.array(text, dtype=pandas.StringDtype("python")),
        "per": pandas.period_range("1000", periods=n, freq="M"), "iv": pandas.IntervalIndex.from_breaks(range(n + 1)),
        "c16": np.arange(n) * 1j, "f4": np.arange(n, dtype="f4"), "big": np.arange(n, dtype=">i4"),
    }  # fmt: skip
    return pandas.DataFrame(found)


def frames() -> Any:
    pandas = pytest.importorskip("pandas")
    base = frame(10)
    yield from (base, base.iloc[:0], base.iloc[::-2], base.iloc[:, ::-1], base.T.iloc[:2])
    yield from (pandas.DataFrame(), pandas.DataFrame(index=range(3)), pandas.DataFrame(columns=["a", "b"]))
    yield from (base.set_index(name) for name in ("d", "tz", "per", "iv", "c", "ci", "s", "o", "I", "td"))
    yield base.set_index(["s", "c", "i"])
    yield from (pandas.DataFrame(np.arange(6.0).reshape(3, 2), columns=columns) for columns in (None, ["a", "a"]))
    columns = pandas.MultiIndex.from_product([["x", "y"], [1, 2]], names=["u", None])
    yield pandas.DataFrame(np.zeros((2, 4)), columns=columns)
    yield pandas.DataFrame({1: [1], "x/y": [2], None: [3], (1, 2): [4], "\x1b[2J" + "l" * 300: [5], "": [6]})
    yield pandas.DataFrame({"x": [1.0, 2.0]}, index=pandas.date_range("2020", periods=2, freq="D", name="day"))
    yield pandas.DataFrame({"x": [1.0]}, columns=pandas.Index(["x"], name="columns"))
    yield frame(2000)
    noted = pandas.DataFrame({"x": [1.0]}).set_flags(allows_duplicate_labels=False)
    noted.attrs = {"unit": "m"}
    yield noted


def test_frames(open_store: Any) -> None:
    testing = pytest.importorskip("pandas.testing")
    values = list(frames())
    with open_store() as store:
        before = [value.copy(deep=True) for value in values]
        for i, value in enumerate(values):
            store[f"f{i}"] = value
            testing.assert_frame_equal(value, before[i])  # storing changes nothing
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for i, value in enumerate(values):
                out = store[f"f{i}"]
                testing.assert_frame_equal(out, value, check_freq=True, check_flags=True)
                assert type(out) is type(value) and list(out.dtypes) == list(value.dtypes), i
                assert type(out.index) is type(value.index) and type(out.columns) is type(value.columns)
                assert out.columns.names == value.columns.names and out.attrs == value.attrs
            assert store.check().ok and len(store) == len(values)


def test_long_labels(store: Any) -> None:
    """More of them than the name of a part has room for, in every kind of column."""
    pandas, many = pytest.importorskip("pandas"), [f"text {i}" for i in range(2000)]
    label = "\U0001d4b3" * 100  # each takes four bytes
    columns = [pandas.Series(many, dtype=dtype) for dtype in ("str", "string[python]", object, "category")] + [
        pandas.Series(range(2000), dtype="Int64"),
        pandas.cut(pandas.Series(range(2000)), 1500),
    ]
    frame = pandas.DataFrame({f"{label}{i}": column for i, column in enumerate(columns)})
    store["f"], store["s"] = frame, frame[f"{label}3"]
    store["m"] = frame.set_index([f"{label}3", f"{label}5"])
    for name, value in ("f", frame), ("m", frame.set_index([f"{label}3", f"{label}5"])):
        pandas.testing.assert_frame_equal(store[name], value)
    assert store["s"].name == f"{label}3" and len({part.partition(" ")[2] for part in store.parts("f")}) > 5


def test_an_index_whose_frequency_has_parameters(store: Any) -> None:
    pandas, testing = pytest.importorskip("pandas"), pytest.importorskip("pandas.testing")
    holidays = pandas.offsets.CustomBusinessDay(holidays=["2020-01-02"])
    for freq, kept in ((holidays, False), (pandas.DateOffset(months=1, days=2), False), ("2h", True), ("W-TUE", True)):
        value = pandas.DataFrame({"x": range(5)}, index=pandas.date_range("2020", periods=5, freq=freq))
        store["f"] = value
        testing.assert_frame_equal(store["f"], value, check_freq=kept)
        assert (store["f"].index.freq is not None) is kept


def test_series(store: Any) -> None:
    testing = pytest.importorskip("pandas.testing")
    base = frame(10)
    for name in base:
        column = base[name]
        store["s"] = column
        testing.assert_series_equal(store["s"], column, check_freq=True)
        store["s"] = column.set_axis(list("abcdefghij")).rename((1, "x"))
        testing.assert_series_equal(store["s"], column.set_axis(list("abcdefghij")).rename((1, "x")))
        store["l"] = {"k": [column]}
        testing.assert_series_equal(store["l"]["k"][0], column)


def test_columns_of_numbers_are_live(open_store: Any) -> None:
    pandas = pytest.importorskip("pandas")
    with open_store() as store:
        store["f"] = frame(10)
        out, parts = store["f"], store.parts("f")
        names = {name.partition(" ")[2]: part for name, part in parts.items() if isinstance(part, np.ndarray)}
        for name in ("i", "f", "b", "d", "td", "c16", "f4", "big"):
            assert shared(out[name].to_numpy(), names[name]), name
        for name in ("I", "B", "F"):
            assert shared(out[name].array._data, names[name]) and shared(out[name].array._mask, names[f"{name}.mask"])
        out.loc[0, "f"] = 99.0
        out["i"] += 1
        store["f"] = out
    with open_store(mode="r") as store:
        assert store["f"].loc[0, "f"] == 99 and store["f"]["i"].tolist() == list(range(1, 11))
        assert pandas.DataFrame(store["f"]).shape == (10, 23)


def test_frames_with_types_of_arrow(store: Any) -> None:
    """They are refused, and come back from the table that the error names."""
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    types = [pyarrow.decimal128(10, 2), pyarrow.list_(pyarrow.int8()), pyarrow.timestamp("us", "Asia/Tokyo")]
    columns = [pandas.Series([None] * 2, dtype=pandas.ArrowDtype(kind), name="x") for kind in types]
    index = pandas.Index(["a", "b"], dtype=pandas.ArrowDtype(pyarrow.string()))
    for value in (*columns, columns[0].to_frame(), pandas.Series([1, 2], index, name="x")):
        with pytest.raises(TypeError, match=r"a table, by pyarrow\.Table\.from_pandas\(\) .* series\.to_frame\(\)"):
            store["refused"] = value
        frame = value.to_frame() if isinstance(value, pandas.Series) else value
        store["table"] = pyarrow.Table.from_pandas(frame)
        back = store["table"].to_pandas(types_mapper=pandas.ArrowDtype)
        pandas.testing.assert_frame_equal(back.astype(frame.dtypes), frame, check_index_type=False)


def test_frames_that_can_not_be_stored(store: Any) -> None:
    pandas = pytest.importorskip("pandas")

    class Own(pandas.DataFrame):
        pass

    store["f"] = pandas.DataFrame({"a": [1]})
    for value, hint in [
        (pandas.DataFrame({"a": [1.0], "b": [object()]}), "the part '1 b' of a pandas.DataFrame: a store can't keep"),
        (
            pandas.DataFrame({"a": pandas.arrays.SparseArray([1, 0])}),
            r"the column 'a': .* Sparse\[int64, 0\].*sparse\.to_dense",
        ),
        (pandas.Index(["a"]), r"value.to_frame\(\)"),
        (pandas.Timestamp("2020"), r"value.to_pydatetime\(\)"),
        (Own({"a": [1]}), "a subclass of pandas.DataFrame: store a pandas.DataFrame"),
    ]:
        with pytest.raises(TypeError, match=hint):
            store["f"] = value
    assert store["f"]["a"].tolist() == [1]
    store["i"] = pandas.Index(["a"]).to_frame()  # as the hint says
    ragged = pandas.DataFrame({"r": [[1], [2, 3], []]})
    store["r"] = ragged
    assert store["r"]["r"].tolist() == [[1], [2, 3], []]


def test_hostile_frames(store: Any) -> None:
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"a": np.arange(3.0), "s": pandas.array(["x"] * 3, dtype="string")})
    sound = dict(store.parts("f"))
    about = sound["about"]
    for change in (
        {"0 a": np.arange(4.0)},
        {"0 a": [1, 2, 3]},
        {"1 s": [1, 2, 3]},
        {"about": {**about, "described": [["eval", "x"], ["numpy"]]}},
        {"about": {**about, "described": about["described"][:1]}},
        {"about": {**about, "index": ["range", None, 0, 2, 1]}},
        {"about": {**about, "described": [["nullable", "category"], about["described"][1]]}},
        {"about": {**about, "described": [["period", "x"], about["described"][1]]}},
        {"about": 5},
    ):
        store["g"] = pmstore.Parts("pandas.DataFrame", {**sound, **change})
        with pytest.raises(pmstore.DecodeError, match="'g': decode of pandas.DataFrame failed"):
            store["g"]
    assert store["f"]["a"].tolist() == [0, 1, 2]


def test_hostile_texts(store: Any) -> None:
    pandas = pytest.importorskip("pandas")
    for storage in ("python", *(["pyarrow"] if _has("pyarrow") else [])):
        column = pandas.array(["ab", None] * 1000, dtype=pandas.StringDtype(storage))
        store["f"] = pandas.DataFrame({"s": column})
        sound = dict(store.parts("f"))
        data, ends = sound["0 s"], sound["0 s.ends"]
        for change in (
            {"0 s.ends": ends[::-1].copy()},
            {"0 s.ends": ends + 1},
            {"0 s.ends": ends.astype("i4")},
            {"0 s.ends": ends[:-1].copy()},
            {"0 s": np.full(len(data), 255, np.uint8)},
            {"0 s": data[:-1].copy()},
            {"0 s.missing": np.zeros(5, bool)},
        ):
            store["g"] = pmstore.Parts("pandas.DataFrame", {**sound, **change})
            with pytest.raises(pmstore.DecodeError):
                store["g"]


class Total(pmstore.Resumable):
    """A fit whose data and whose state are frames."""

    max_iter = 2

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def fields(self) -> Any:
        return [pmstore.Field("frame", dtype=object)]

    def fingerprint(self) -> dict[str, Any]:
        return {"frame": self.frame}

    def start(self) -> None:
        self.state.frame = self.frame

    def step(self) -> None:
        self.state.frame = self.state.frame * 2


@pytest.mark.parametrize("dtype", ["f8", "Sparse[float64]"])
def test_frames_of_fits(store: Any, dtype: str) -> None:
    """They count with their labels, even if a store can't keep them, and a result is a copy."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1.0, 10.0], [2.0, 20.0]], columns=["price", "cost"], dtype=dtype)
    others = [frame[["cost", "price"]].set_axis(["price", "cost"], axis=1), frame.set_axis([1, 0]), frame["price"]]
    others += [frame.set_axis(["cost", "price"], axis=1), frame["price"].rename("cost"), frame.astype("f4")]
    names = set()
    for one in (frame, *others, frame.copy()):
        fit = Total(one)
        if dtype == "f8":
            state = fit.run(store)
            state.frame.iloc[0] = -1
            store.commit()
            assert (fit.run(store).frame == one * 4).all(axis=None)
        names.add(fit.slot_name_ or str(fit._whole_fingerprint()))
    assert len(names) == 1 + len(others)


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def test_values_of_pandas_and_its_like_are_refused_with_a_hint(store: Any) -> None:
    pandas = pytest.importorskip("pandas")
    store["f"] = pandas.DataFrame({"a": [1.0, 2.0]})
    values = {
        "to_pydatetime()": pandas.Timestamp("2026-01-02", tz="Europe/Paris"),
        "to_pytimedelta()": pandas.Timedelta(3, "s"),
        "Series(value)": pandas.Categorical(["a"]),
        "Series(value) ": pandas.array([1, None], dtype="Int64"),
    }
    for hint, value in values.items():
        with pytest.raises(TypeError, match=rf": store .*{re.escape(hint.strip())}"):
            store["v"] = value
    store["v"] = pandas.Series(values["Series(value)"])
    store["v"] = values["to_pydatetime()"].to_pydatetime()
    assert store["v"] == values["to_pydatetime()"] and store["v"].tzinfo.key == "Europe/Paris"
    with pytest.raises(TypeError, match=r"labels, dtypes and attrs, of a pandas.DataFrame: .*pandas.*Timestamp"):
        store["v"] = pandas.DataFrame({pandas.Timestamp("2026-01-02"): [1], "b": [2]})
    for declared in (store["f"], store["f"]["a"]):
        with pytest.raises(TypeError, match=r"not (DataFrame|Series): of a column, column.to_numpy\(\)"):
            store.transaction(only=[declared])
    with store.transaction(only=[store["f"]["a"].to_numpy()]):
        store["f"].loc[0, "a"] = 3
    assert store.read("f")["a"].tolist() == [3, 2]


def test_other_values_of_arrow_and_polars_are_refused_with_a_hint(store: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: make test-frames installs it")
    with pytest.raises(TypeError, match=r"store value.as_py\(\)"):
        store["v"] = pyarrow.scalar(1)
    polars = pytest.importorskip("polars", reason="no polars: make test-frames installs it")
    with pytest.raises(TypeError, match=r"store value.collect\(\)"):
        store["v"] = polars.DataFrame({"a": [1]}).lazy()
