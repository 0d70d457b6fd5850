"""Arrow tables, and frames and series of polars."""

from __future__ import annotations

import datetime
import decimal
import warnings
from typing import Any

import numpy as np
import pytest

import pmstore


def polars_frame(n: int = 2000) -> Any:
    polars = pytest.importorskip("polars")
    half, day = n // 2, datetime.datetime(2020, 1, 1)
    return polars.DataFrame(
        {
            "i": range(n), "f": np.linspace(0, 1, n), "in": [1, None] * half, "s": ["a", "ü"] * half,
            "sn": ["a", None] * half, "d": [datetime.date(2020, 1, 1)] * n, "dt": [day, None] * half,
            "tz": polars.Series([day] * n).dt.replace_time_zone("Europe/Paris"), "td": [datetime.timedelta(1)] * n,
            "t": [datetime.time(1)] * n, "b": [True, None] * half, "l": [[1, 2], []] * half,
            "st": [{"a": 1, "b": "x"}] * n, "c": polars.Series(["a", "b"] * half, dtype=polars.Categorical),
            "e": polars.Series(["a", "b"] * half, dtype=polars.Enum(["b", "a"])), "null": [None] * n,
            "u8": polars.Series([1, 2] * half, dtype=polars.UInt8), "bin": [b"a", b"\xff"] * half,
            "dec": polars.Series([decimal.Decimal("1.5")] * n), "x/\x1b[2J": [1.5] * n,
            "f4": polars.Series([1.5, None] * half, dtype=polars.Float32),
        }
    )  # fmt: skip


def column(store: Any, label: str) -> Any:
    return next(part for name, part in store.parts("f").items() if name.partition(" ")[2] == label)


def test_polars(open_store: Any) -> None:
    polars, testing = pytest.importorskip("polars"), pytest.importorskip("polars.testing")
    frame = polars_frame()
    values = [frame, frame[:0], frame[3:9], polars.DataFrame(), polars.concat([frame, frame], rechunk=False)]
    with open_store() as store:
        for i, value in enumerate(values):
            store[f"f{i}"] = value
        for name in frame.columns:
            store[f"series/{frame.columns.index(name)}"] = frame[name]
        store["l"] = {"k": [frame]}
        store["f"] = frame
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for i, value in enumerate(values):
                out = store[f"f{i}"]
                testing.assert_frame_equal(out, value)
                assert type(out) is polars.DataFrame and out.schema == value.schema
            for i, name in enumerate(frame.columns):
                out = store[f"series/{i}"]
                testing.assert_series_equal(out, frame[name])
                assert type(out) is polars.Series
            testing.assert_frame_equal(store["l"]["k"][0], frame)
            for name in ("i", "f", "u8", "d", "td", "in", "dt", "f4"):
                assert isinstance(column(store, name), np.ndarray), name
            if mode == "r+":
                live = store["f"]["i"].to_numpy()
                assert np.shares_memory(live, column(store, "i"))
            assert store.check().ok


def test_polars_without_names_or_columns(store: Any) -> None:
    polars, testing = pytest.importorskip("polars"), pytest.importorskip("polars.testing")
    values = [polars.DataFrame({"": [1, 2], "a": ["x", "y"]}), polars.DataFrame({"": ["x"]}), polars.DataFrame()]
    if polars.DataFrame({"x": [1, 2, 3]}).drop("x").height == 3:
        values.append(polars.DataFrame({"x": [1, 2, 3]}).drop("x"))
    for value in values:
        store["f"] = value
        testing.assert_frame_equal(store["f"], value)
        assert store["f"].columns == value.columns and store["f"].shape == value.shape


def test_polars_with_names_of_its_types(store: Any) -> None:
    """A category or a field that is called like the dtype is none. Text may be anything."""
    polars, testing = pytest.importorskip("polars"), pytest.importorskip("polars.testing")
    mark = "POLARS_EXTENSION_TYPE"
    frame = polars.DataFrame(
        {
            "Object": [1, 2], "e": polars.Series(["Object", "b"], dtype=polars.Enum(["Object", "b"])),
            "st": [{"Object": 1}, {"Object": 2}], "l": [[{"Object": 1}], []], "s": [mark, f"a {mark}"],
            "c": polars.Series(["Object", mark], dtype=polars.Categorical), "bin": [mark.encode()] * 2,
        }
    )  # fmt: skip
    store["f"] = frame
    testing.assert_frame_equal(store["f"], frame)
    for name in frame.columns:
        store["s"] = frame[name]
        testing.assert_series_equal(store["s"], frame[name])
    for refused in (
        polars.DataFrame({mark: [1]}),
        polars.DataFrame({"s": [{mark: 1}]}),
        polars.DataFrame({"e": polars.Series(["b"], dtype=polars.Enum([mark, "b"]))}),
    ):
        with pytest.raises(TypeError, match=f"no column, field or category is called {mark}"):
            store["f"] = refused
    testing.assert_frame_equal(store["f"], frame)
    for start in (b"", b"\xff\xff\xff", b"\xff" * 4 + b"\xff" * 4):  # a hostile stream
        stream = np.frombuffer(start, "u1")
        store["h"] = pmstore.Parts("polars.Series", {"schema": start, "kinds": ["stream"], "rows": 1, "0": stream})
        with pytest.raises(pmstore.DecodeError):
            store["h"]


def test_polars_that_can_not_be_stored(store: Any) -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(TypeError, match="the column 'o': .* column of objects"):
        store["f"] = polars.DataFrame({"i": [1], "o": [object()]})
    empty = polars.Array(polars.Int32, 0)
    for kind in (empty, polars.List(empty), polars.Struct({"a": empty})):
        with pytest.raises(TypeError, match="the column 'a': .* arrays of width 0"):
            store["f"] = polars.DataFrame({"a": polars.Series([], dtype=kind)})
    assert not list(store)


def arrow_table() -> Any:
    arrow = pytest.importorskip("pyarrow")
    found = {
        "i": arrow.array([1, None, 3], arrow.int16()), "s": ["a", None, "ü"],
        "c": arrow.chunked_array([[1.5], [2.5, 3]]), "ls": arrow.array(["x", "", None], arrow.large_string()),
        "d": arrow.array(["a", "b", "a"]).dictionary_encode(),
        "ts": arrow.array([1, 2, None], arrow.timestamp("us", "UTC")),
        "dec": arrow.array([decimal.Decimal("1.1")] * 3), "b": [True, None, False], "h": np.arange(3, dtype="f2"),
        "d64": arrow.array([0, 86400000, None], arrow.date64()),
        "l": [[1], None, [2, 3]], "n": arrow.nulls(3), "u": arrow.array([1, 2, 3], arrow.uint64()),
    }  # fmt: skip
    return arrow.table(found).replace_schema_metadata({"k": "v"})


def test_arrow(open_store: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow_table()
    long = arrow.table({"f": np.linspace(0, 1, 5000), "s": [f"text {i}" for i in range(5000)]})
    values = [
        table, table.slice(1, 1), table.slice(0, 0), arrow.table({}), arrow.concat_tables([table, table]),
        table.rename_columns(["a"] * table.num_columns), long, long.slice(7, 4000),
    ]  # fmt: skip
    with open_store() as store:
        for i, value in enumerate(values):
            store[f"f{i}"] = value
        store["l"], store["f"] = [table], long
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for i, value in enumerate(values):
                out = store[f"f{i}"]
                assert type(out) is arrow.Table and out.equals(value, check_metadata=True), i
                out.validate(full=True)
            assert store["l"][0].equals(table)
            elements = np.frombuffer(store["f"].column("f").chunk(0).buffers()[1])
            if mode == "r+":
                assert np.shares_memory(elements, column(store, "f"))
            assert store.check().ok


def test_arrow_without_columns(store: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    for value in (arrow.table({"x": [1, 2, 3]}).select([]), arrow_table().select([]), arrow.table({})):
        store["f"] = value
        assert store["f"].num_rows == value.num_rows and store["f"].equals(value, check_metadata=True)


def test_what_speaks_arrow_is_refused_with_a_hint(store: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.record_batch({"a": [1, 2]})
    with pytest.raises(TypeError, match=r"store pyarrow.table\(value\)"):
        store["b"] = batch
    store["b"] = arrow.table(batch)
    assert store["b"].to_pydict() == {"a": [1, 2]}
    for values in ([1, 2], ["a", None], [[1], [2, 3]]):
        for array in (arrow.array(values), arrow.chunked_array([values])):
            with pytest.raises(TypeError, match=r"store pyarrow.table\(\{'x': value\}\), or np.asarray\(value\) if it"):
                store["c"] = array
            store["c"] = arrow.table({"x": array})
            assert store["c"].to_pydict() == {"x": values}


@pytest.mark.parametrize("package", ["polars", "pyarrow"])
def test_hostile_tables(store: Any, package: str) -> None:
    pytest.importorskip(package)
    table = arrow_table() if package == "pyarrow" else polars_frame(10)
    store["f"] = table
    sound, name = dict(store.parts("f")), store.parts("f").type_name
    stream = next(part for part, kind in zip([p for p in sound if p[0].isdigit() and "." not in p], sound["kinds"])
                  if kind == "stream")  # fmt: skip
    first = next(part for part in sound if part.startswith("0 "))
    for change in (
        {"kinds": sound["kinds"][:-1]},
        {"kinds": ["fixed"] * len(sound["kinds"])},
        {"kinds": ["stream"] * len(sound["kinds"])},
        {"schema": b"x"},
        {"schema": sound["schema"][: len(sound["schema"]) // 2]},
        {first: sound[first][:-1].copy()},
        {first: sound[first].astype("c16")},
        {first: [1]},
        {stream: np.zeros(10, np.uint8)},
        {stream: sound[stream][: len(sound[stream]) // 3].copy()},
    ):
        store["g"] = pmstore.Parts(name, {**sound, **change})
        with pytest.raises(pmstore.DecodeError, match="'g': decode of"):
            store["g"]
    assert store["f"] is not None


def test_texts_that_rows_share_are_stored_once(tmp_path: Any) -> None:
    polars = pytest.importorskip("polars")
    about = polars.DataFrame({"about": ["x" * 10_000]})
    frame = polars.DataFrame({"id": range(2000)}).join(about, how="cross")
    with pmstore.open(tmp_path / "store.pm") as store:
        store["f"] = frame
        store.commit()
        assert store["f"].equals(frame)
        assert store.stats().bytes_written < 1 << 20


def test_an_arrow_array_with_padding(store: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    offsets = arrow.py_buffer(np.array([0, 1, 3], np.int64).tobytes() + b"\xff" * 5)
    array = arrow.Array.from_buffers(arrow.large_string(), 2, [None, offsets, arrow.py_buffer(b"abcd")])
    store["f"] = arrow.table({"a": array})
    assert store["f"]["a"].to_pylist() == ["a", "bc"]


@pytest.mark.parametrize(
    ("data", "ends", "error"),
    [
        (b"a\xff", [0, 1, 2], "UTF8"),
        (b"\xc3\xbc", [0, 1, 2], "UTF8"),  # half of a letter
        (b"ab", [0, 5, 2], "out of bounds"),
        (b"ab", [0, 2, 2, 1, 2], "non-monotonic"),
    ],
)
def test_a_text_that_is_no_text(tmp_path: Any, data: bytes, ends: list[int], error: str) -> None:
    """It could not be read again."""
    arrow = pytest.importorskip("pyarrow")
    buffers = [None, arrow.py_buffer(np.array(ends, np.int32)), arrow.py_buffer(data)]
    array = arrow.Array.from_buffers(arrow.string(), len(ends) - 1, buffers)
    sound = arrow.array(["a", "b"])
    with pmstore.open(tmp_path / "store.pm") as store:
        for column in array, arrow.chunked_array([sound, array]), arrow.chunked_array([array, sound]):
            with pytest.raises(ValueError, match=error):
                store["table"] = arrow.table({"a": column})
            assert list(store) == []


def test_text_of_which_a_part_is_none(store: Any) -> None:
    """What no row has is not looked at, and is not stored."""
    arrow = pytest.importorskip("pyarrow")
    offsets = arrow.py_buffer(np.array([1, 2, 3, 5], np.int32))
    array = arrow.Array.from_buffers(arrow.string(), 3, [None, offsets, arrow.py_buffer(b"\xffab\xc3\xbc\xff")])
    for begin, texts in (0, ["a", "b", "ü"]), (1, ["b", "ü"]), (2, ["ü"]):
        store["f"] = arrow.table({"a": array[begin:]})
        assert store["f"]["a"].to_pylist() == texts
        assert column(store, "a").tobytes() == "".join(texts).encode()


CHANGES_OF_POLARS = {
    "number": lambda frame: frame.__setitem__((0, "f4"), 9.0),
    "missing": lambda frame: frame.__setitem__((1, "f4"), 9.0),
    "text": lambda frame: frame.__setitem__((0, "s"), "other"),
    "flag": lambda frame: frame.__setitem__((0, "b"), not frame[0, "b"]),
    "column": lambda frame: frame.insert_column(0, frame["u8"].alias("new")),
    "rows": lambda frame: frame.extend(frame.clone()),
    "gone": lambda frame: frame.drop_in_place("u8"),
    "labels": lambda frame: setattr(frame, "columns", [*frame.columns[:-1], "last"]),
}


@pytest.mark.parametrize("change", CHANGES_OF_POLARS)
def test_a_changed_frame_of_polars_is_told(store: Any, change: str) -> None:
    frame = polars_frame(10)
    store["f"] = frame
    store.commit()
    found = store["f"]
    CHANGES_OF_POLARS[change](found)
    with pytest.warns(pmstore.LostUpdateWarning, match="'f' was read from the store and changed"):
        store.commit()
    assert store["f"].equals(frame)


def test_an_unchanged_frame_of_polars_is_not_told(store: Any) -> None:
    frame = polars_frame(10)
    store["f"], store["s"] = frame, frame["s"]
    store.commit()
    changed, assigned, series, live = store["f"], store["f"], store["s"], store["f"]
    changed[0, "u8"] = changed[0, "u8"]  # polars makes a new column
    assigned[0, "u8"] = 7
    store["f"] = assigned
    assigned[0, "u8"] = 1  # what the store has again
    store["f"] = assigned
    part = next(value for name, value in store.parts("f").items() if name.endswith("u8"))
    part[1] = 77
    assert store["f"][1, "u8"] == 77
    with warnings.catch_warnings():
        warnings.simplefilter("error", pmstore.LostUpdateWarning)
        for _ in range(4):
            store["k"] = 1
            store.commit()
    series[0] = "other"
    with pytest.warns(pmstore.LostUpdateWarning, match="'s' was read from the store and changed"):
        store.close()
    assert live.height == 10
