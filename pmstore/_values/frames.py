"""pandas' frames and series as parts. A column of numbers or times is an array of its own, in the memory of the store.

A column is described by a list whose first element is its kind; its arrays are parts with a common beginning of their
names, which is the number and the label of the column:

===========================================  ========================================================
description                                  parts
===========================================  ========================================================
["numpy"]                                    the array
["objects"]                                  a list of values
["text", storage, whether it has pandas.NA]  a list of str; None: missing
["texts", storage, the same]                 see texts.py, for many of them
["strs"]                                     the same, for many objects that are str or None
["nullable", dtype]                          the array, .mask
["zoned", dtype]                             the array, in UTC
["period", dtype]                            the ordinals
["categories", ordered, index]               the codes, and the index of the categories
["interval", closed, index, index]           the indices of the left and the right ends
===========================================  ========================================================

An index is ["range", name, start, stop, step], ["multi", names, indices] with .codes0, .codes1, … or ["index", name,
freq, description of a column].
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

import numpy as np

from pmstore._values.registry import Decode, Encode
from pmstore._values.texts import PartDict, arrow_of, arrow_parts, list_of, list_parts
from pmstore._values.values import encode

__all__ = ["by_number", "guarded", "how", "made_of", "part_name"]

_NULLABLE = {f"{sign}Int{size}" for sign in ("", "U") for size in (8, 16, 32, 64)} | {"Float32", "Float64", "boolean"}
_MANY = 1000  # texts, from which on they are arrays
_QUICK = 800_000  # bytes that are compared in some milliseconds: 100,000 objects or times
_LABEL = 60  # characters of a column's label in the name of a part, at most
_LABEL_BYTES = 120  # of them, as the name of a part has at most 255 bytes, and more may follow the label


def how(kind: Any) -> tuple[Encode, Decode]:
    """How a class of pandas is kept."""
    if kind.__name__ == "Series":
        return _series_parts, _series_of
    return _frame_parts, _frame_of


def made_of(value: Any) -> list[Any]:
    """The objects that a frame or series is made of, as far as this pandas shows them: its axes and arrays, and tuples
    and bytes for what can be changed in place."""
    axes = [getattr(axis, "_id", None) or axis for axis in value.axes]  # that of a view is the same
    named = [(*axis.names, getattr(axis, "freq", None)) for axis in value.axes]
    about = (*named, getattr(value, "name", None) if value.ndim == 1 else None, value.flags.allows_duplicate_labels)
    attrs = encode(dict(value.attrs)) if value.attrs else b""
    arrays = [block.values for block in _blocks(value)]
    return [about, attrs, *axes, *arrays, *map(_changing, arrays)]


def _changing(values: Any) -> Any:
    """What changes when pandas changes an array of a column in place that is not live, if that is quick to tell."""
    if isinstance(values.dtype, np.dtype) and values.dtype != object:
        return None
    texts = getattr(values, "_pa_array", None)
    if texts is not None:  # pandas replaces it in the array
        return texts
    times = getattr(values, "asi8", None)
    if times is not None:
        return times.tobytes() if times.nbytes <= _QUICK else None
    if type(values).__name__ == "IntervalArray":
        ends = [np.asarray(end) for end in (values.left, values.right)]
        return b"".join(end.tobytes() for end in ends) if values.nbytes <= _QUICK else None
    if not isinstance(values, np.ndarray) and type(values).__name__ != "StringArray":
        return None
    missing = _pandas().NA
    found: list[Any] = values.ravel().tolist() if values.nbytes <= _QUICK else []
    objects: list[Any] = [None if one is missing else one for one in found]
    quick = sum(len(one) for one in objects if type(one) in (str, bytes)) <= _QUICK
    return encode(objects) if objects and quick else None


def guarded(value: Any, guards: Any) -> None:
    """Let others copy the arrays of a new frame or series before they write to them, as long as there are others.

    guards: the store's (see `lost_updates.Guards`).

    pandas 3 copies on write: what was made of a frame, as by `rename`, has blocks with the same arrays, and copies them
    before it writes if it knows of another block. If the frame's block is gone, another object takes its place in
    pandas' account, so that the last one does not write to the store. These accounts are no public interface; with a
    pandas that has none, nothing is guarded. Before pandas 3, nothing copies on write unless an option says so.
    """
    pandas = _pandas()
    if int(pandas.__version__.partition(".")[0]) < 3 and pandas.options.mode.copy_on_write is not True:
        return
    given = weakref.ref(value)
    for block in _blocks(value):
        account = getattr(block, "refs", None)
        if hasattr(account, "referenced_blocks") and hasattr(account, "add_index_reference"):
            guards.watch(block, account, lambda: _blocks(given()))


def _blocks(value: Any) -> Any:
    return getattr(getattr(value, "_mgr", None), "blocks", ())


def _pandas() -> Any:
    return sys.modules["pandas"]


# ---- frames and series


def _frame_parts(frame: Any) -> PartDict:
    parts: PartDict = {"about": None}
    labels: PartDict = {}
    about = {"columns": _index_parts(frame.columns, "labels", labels), "labels": labels}
    about["index"] = _index_parts(frame.index, "index", parts)
    described = []
    for i, label in enumerate(frame.columns):
        try:
            described.append(_column_parts(frame.iloc[:, i], part_name(i, label), parts))
        except TypeError as error:
            raise TypeError(f"the column {label!r}: {error}") from error
    parts["about"] = {**about, "described": described, **_extras(frame)}
    return parts


def _frame_of(parts: PartDict) -> Any:
    pandas, about = _pandas(), parts["about"]
    columns = _index_of(about["columns"], "labels", about["labels"])
    index = _index_of(about["index"], "index", parts)
    names = by_number(parts)
    found = {i: _column_of(one, names[i], parts, index) for i, one in enumerate(about["described"])}
    if len(columns) != len(found) or any(len(one) != len(index) for one in found.values()):
        raise ValueError("columns of other lengths")
    frame = pandas.DataFrame(found, index=index, copy=False) if found else pandas.DataFrame(index=index)
    frame.columns = columns
    return _with_extras(frame, about)


def _series_parts(series: Any) -> PartDict:
    parts: PartDict = {"about": None}
    index = _index_parts(series.index, "index", parts)
    described = _column_parts(series, "values", parts)
    parts["about"] = {"name": series.name, "index": index, "described": described, **_extras(series)}
    return parts


def _series_of(parts: PartDict) -> Any:
    pandas, about = _pandas(), parts["about"]
    index = _index_of(about["index"], "index", parts)
    column = _column_of(about["described"], "values", parts, index)
    if len(column) != len(index):
        raise ValueError("an index of another length")
    series = column if isinstance(column, pandas.Series) else pandas.Series(column, index=index, copy=False)
    series.name = about["name"]
    return _with_extras(series, about)


def _extras(value: Any) -> PartDict:
    extras: PartDict = {"attrs": dict(value.attrs)} if value.attrs else {}
    return extras if value.flags.allows_duplicate_labels else {**extras, "unique": True}


def _with_extras(value: Any, about: PartDict) -> Any:
    value.attrs.update(about.get("attrs", {}))
    if about.get("unique", False):
        value.flags.allows_duplicate_labels = False
    return value


def part_name(number: int, label: Any) -> str:
    """The beginning of the names of a column's parts."""
    if type(label) is not str or not label.isprintable() or not label:
        return str(number)
    return f"{number} {label[:_LABEL].encode()[:_LABEL_BYTES].decode(errors='ignore')}"


def by_number(parts: PartDict) -> dict[int, str]:
    """The beginnings of the names of columns, by their numbers. Names that begin so come behind it."""
    names: dict[int, str] = {}
    for name in parts:
        number = name.partition(" ")[0].partition(".")[0]
        if number.isdecimal():
            names.setdefault(int(number), name)
    return names


# ---- columns


def _column_parts(column: Any, name: str, parts: PartDict) -> list[Any]:
    """The description of a Series or an Index; its parts are added."""
    dtype, values = column.dtype, column.array
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            objects = np.asarray(values).tolist()
            if len(objects) >= _MANY and set(map(type, objects)) <= {str, type(None)}:
                list_parts(objects, name, parts)
                return ["strs"]
            parts[name] = objects
            return ["objects"]
        parts[name] = np.asarray(values)
        return ["numpy"]
    kind, text = type(dtype).__name__, str(dtype)
    if kind == "StringDtype":
        about = [dtype.storage, dtype.na_value is _pandas().NA]
        if len(values) >= _MANY and dtype.storage == "pyarrow":
            arrow_parts(values.__arrow_array__(), name, parts)
            return ["texts", *about]
        found = np.asarray(values, object).tolist()
        for i in np.flatnonzero(values.isna()):
            found[i] = None
        if len(values) >= _MANY:
            list_parts(found, name, parts)
            return ["texts", *about]
        parts[name] = found
        return ["text", *about]
    if text in _NULLABLE:
        parts[name], parts[f"{name}.mask"] = values._data, values._mask
        return ["nullable", text]
    if kind == "DatetimeTZDtype" and _same(_pandas().DatetimeTZDtype.construct_from_string, dtype):
        parts[name] = _pandas().DatetimeIndex(values).asi8.view(f"M8[{dtype.unit}]")
        return ["zoned", text]
    if kind == "PeriodDtype":
        parts[name] = _pandas().PeriodIndex(values).asi8
        return ["period", text]
    if kind == "CategoricalDtype":
        parts[name] = values.codes
        return ["categories", bool(values.ordered), _index_parts(values.categories, f"{name}.categories", parts)]
    if kind == "IntervalDtype":
        parts[name] = None
        ends = [_index_parts(getattr(values, end), f"{name}.{end}", parts) for end in ("left", "right")]
        return ["interval", dtype.closed, *ends]
    ways = {
        "SparseDtype": ".sparse.to_dense()",
        "DatetimeTZDtype": '.dt.tz_convert("UTC")',
        "ArrowDtype": "a table, by pyarrow.Table.from_pandas() of the frame, or of series.to_frame()",
    }
    raise TypeError(
        f"a store can't keep the dtype {dtype}: use one of numpy's, or text, nullable numbers, categories, times with "
        f"a zone of zoneinfo, periods or intervals{f'. Here: {ways[kind]}' if kind in ways else ''}"
    )


def _same(make: Any, dtype: Any) -> bool:
    try:
        return bool(make(str(dtype)) == dtype)
    except TypeError:
        return False


def _column_of(described: Any, name: str, parts: PartDict, index: Any = None) -> Any:
    """The values of a column: an array of numpy or pandas; a Series of objects if there is an index."""
    pandas = _pandas()
    kind, *rest = described
    values = parts[name]
    if kind == "strs":
        kind, values = "objects", list_of(name, parts)
    if kind == "objects":
        made = np.fromiter(values, object, len(values))
        return made if index is None else pandas.Series(made, index=index, dtype=object, copy=False)
    if kind in ("text", "texts"):
        storage, has_na = rest
        dtype = _text_dtype(storage, pandas.NA if has_na else np.nan)
        if kind == "texts" and storage == "pyarrow" and "pyarrow" in sys.modules:
            return dtype.__from_arrow__(arrow_of(name, parts))
        values = list_of(name, parts) if kind == "texts" else values
        if not all(type(one) is str or one is None for one in values):
            raise ValueError("a text is no str")
        return pandas.array(values, dtype=dtype)
    if kind == "interval":
        closed, left, right = rest
        ends = _index_of(left, f"{name}.left", parts), _index_of(right, f"{name}.right", parts)
        return pandas.arrays.IntervalArray.from_arrays(*ends, closed=closed)
    if type(values) is not np.ndarray or values.ndim != 1:
        raise ValueError("a column is no array")
    if kind == "numpy":
        return values
    if kind == "nullable":
        (text,) = rest
        mask = parts[f"{name}.mask"]
        if text not in _NULLABLE or mask.shape != values.shape:
            raise ValueError("nullable numbers break the format")
        return pandas.api.types.pandas_dtype(text).construct_array_type()(values, mask)
    if kind == "zoned":
        dtype = pandas.DatetimeTZDtype.construct_from_string(rest[0])
        return pandas.DatetimeIndex(values).tz_localize("UTC").tz_convert(dtype.tz).array
    if kind == "period":
        dtype = pandas.PeriodDtype.construct_from_string(rest[0])
        return pandas.PeriodIndex.from_ordinals(values, freq=dtype.freq).array
    if kind == "categories":
        ordered, categories = rest
        dtype = pandas.CategoricalDtype(_index_of(categories, f"{name}.categories", parts), ordered)
        return pandas.Categorical.from_codes(values, dtype=dtype)
    raise ValueError(f"a column of the unknown kind {kind!r:.40}")


def _text_dtype(storage: Any, missing: Any) -> Any:
    if missing is _pandas().NA:
        return _pandas().StringDtype(storage)
    try:
        return _pandas().StringDtype(storage, na_value=missing)
    except TypeError:  # pandas before 2.3
        return _pandas().StringDtype("pyarrow_numpy")


# ---- indices


def _index_parts(index: Any, name: str, parts: PartDict) -> list[Any]:
    pandas = _pandas()
    if type(index) is pandas.RangeIndex:
        return ["range", index.name, index.start, index.stop, index.step]
    if type(index) is pandas.MultiIndex:
        levels = []
        for i, (level, codes) in enumerate(zip(index.levels, index.codes)):
            parts[f"{name}.codes{i}"] = np.asarray(codes)
            levels.append(_index_parts(level, f"{name}.level{i}", parts))
        return ["multi", list(index.names), levels]
    kinds = ("Index", "DatetimeIndex", "TimedeltaIndex", "PeriodIndex", "IntervalIndex", "CategoricalIndex")
    if type(index) not in [getattr(pandas, kind) for kind in kinds]:
        raise TypeError(f"a store can't keep a {type(index).__module__}.{type(index).__qualname__}")
    freq = _freq(index.freq) if type(index).__name__ in ("DatetimeIndex", "TimedeltaIndex") else None
    return ["index", index.name, freq, _column_parts(index, name, parts)]


def _freq(freq: Any) -> str | None:
    """The name of an index's frequency; None if it has none, or if its name lacks its parameters, as holidays."""
    if freq is not None:
        with contextlib.suppress(TypeError, ValueError):
            if _pandas().tseries.frequencies.to_offset(freq.freqstr) == freq:
                return str(freq.freqstr)
    return None


def _index_of(described: Any, name: str, parts: PartDict) -> Any:
    pandas = _pandas()
    kind, label, *rest = described
    if kind == "range":
        start, stop, step = rest
        return pandas.RangeIndex(start, stop, step, name=label)
    if kind == "multi":
        levels = [_index_of(one, f"{name}.level{i}", parts) for i, one in enumerate(rest[0])]
        codes = [parts[f"{name}.codes{i}"] for i in range(len(levels))]
        return pandas.MultiIndex(levels, codes, names=label)
    freq, column = rest
    values = _column_of(column, name, parts)
    if type(values) is not np.ndarray or values.flags.writeable:
        values = values.copy()  # a series that is made of the index would write to the live array
    index = pandas.Index(values, dtype=values.dtype, name=label, copy=False)
    if freq is not None:
        index.freq = freq
    return index
