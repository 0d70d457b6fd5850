"""Arrow tables, and frames and series of polars, as parts.

A column of numbers or times is an array of its own: its elements, and .missing if some are missing. Text is kept as in
`texts.py`. Any other column is a stream of Arrow's IPC format with that column alone, and so is the schema, without
rows. The kinds of the columns are "fixed", "texts" and "stream". Columns of fixed width, and with pyarrow all columns,
are read without a copy.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np

from pmstore._values.frames import by_number, part_name
from pmstore._values.registry import Decode, Encode
from pmstore._values.texts import PartDict, arrow_of, arrow_parts, in_one, validity

__all__ = ["arrow", "made_of", "polars"]


def arrow(kind: Any) -> tuple[Encode, Decode]:
    """How pyarrow.Table is kept."""
    return _table_parts, _table_of


def polars(kind: Any) -> tuple[Encode, Decode]:
    """How a class of polars is kept."""
    if kind.__name__ == "Series":
        return (lambda series: _frame_parts(series.to_frame())), (lambda parts: _frame_of(parts).to_series())
    return _frame_parts, _frame_of


def made_of(value: Any) -> list[Any]:
    """What shows whether a frame or series of polars has changed (see `frames.made_of`)."""
    return [(_Kept(value),)]


class _Kept:
    """A frame or series that stays as it is, since polars never changes a buffer that another one has. Equal to another
    one with equal labels, types and contents."""

    __slots__ = ("_frame",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._frame = value.clone() if type(value).__name__ == "DataFrame" else value.to_frame()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kept):
            return NotImplemented
        return bool(self._frame.schema == other._frame.schema and self._frame.equals(other._frame))


def _bytes(contents: Any) -> Any:
    return np.frombuffer(contents, np.uint8)


def _fixed(values: Any, missing: Any, bits: int) -> None:
    if (
        type(values) is not np.ndarray
        or values.ndim != 1
        or not values.flags.c_contiguous
        or values.dtype.kind not in "iuf"
        or values.dtype.itemsize * 8 != bits
        or (missing is not None and (missing.dtype != bool or missing.shape != values.shape))
    ):
        raise ValueError("a column breaks the format")


# ---- pyarrow


def _table_parts(table: Any) -> PartDict:
    lib = sys.modules["pyarrow"]
    parts: PartDict = {"schema": bytes(table.schema.serialize()), "kinds": []}
    if not table.num_columns:
        parts["rows"] = table.num_rows
    for i, field in enumerate(table.schema):
        name, column = part_name(i, field.name), table.column(i)
        if str(field.type) in ("string", "large_string"):
            parts["kinds"].append("texts")
            arrow_parts(column, name, parts)
        elif (dtype := _dtype_of(field.type)) is not None:
            parts["kinds"].append("fixed")
            column = in_one(column)
            start, width = column.offset, dtype.itemsize
            buffer = column.buffers()[1]
            values = _bytes(buffer)[start * width : (start + len(column)) * width] if buffer else np.empty(0, np.uint8)
            parts[name] = values.view(dtype)
            if column.null_count:
                parts[f"{name}.missing"] = np.asarray(column.is_null())
        else:
            parts["kinds"].append("stream")
            one = lib.Table.from_arrays([column], schema=lib.schema([field]))
            sink = lib.BufferOutputStream()
            with lib.ipc.new_stream(sink, one.schema) as stream:
                stream.write_table(one)
            parts[name] = _bytes(sink.getvalue())
    return parts


def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """The dtype of the elements of a type of pyarrow with a fixed width; None for all others."""
    types = sys.modules["pyarrow"].types
    if types.is_integer(kind) or types.is_floating(kind):
        made: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return made
    if types.is_temporal(kind) and kind.bit_width in (32, 64):
        return np.dtype(f"i{kind.bit_width // 8}")
    return None


def _table_of(parts: PartDict) -> Any:
    lib = sys.modules["pyarrow"]
    schema = lib.ipc.read_schema(lib.py_buffer(parts["schema"]))
    names, columns = by_number(parts), []
    for i, (field, kind) in enumerate(zip(schema, parts["kinds"], strict=True)):
        columns.append(_arrow_column(field, kind, names[i], parts))
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of different lengths")
    if not columns and parts.get("rows"):
        rows = lib.table({"rows": lib.nulls(parts["rows"])})
        return rows.replace_schema_metadata(schema.metadata).select([])
    return lib.Table.from_arrays(columns, schema=schema)


def _arrow_column(field: Any, kind: str, name: str, parts: PartDict) -> Any:
    lib = sys.modules["pyarrow"]
    if kind == "texts":
        return arrow_of(name, parts).cast(field.type)
    if kind == "fixed":
        dtype, values, missing = _dtype_of(field.type), parts[name], parts.get(f"{name}.missing")
        if dtype is None:
            raise ValueError("a column has no fixed width")
        _fixed(values, missing, 8 * dtype.itemsize)
        return fixed_array(field.type, values, missing)
    stream = lib.ipc.open_stream(lib.py_buffer(parts[name])).read_all()
    stream.validate(full=True)
    if stream.schema.field(0).type != field.type or stream.num_columns != 1:
        raise ValueError("a column has another type than the schema says")
    return stream.column(0)


def fixed_array(kind: Any, values: Any, missing: Any) -> Any:
    """An array of pyarrow over the elements."""
    lib = sys.modules["pyarrow"]
    return lib.Array.from_buffers(kind, len(values), [validity(missing), lib.py_buffer(values)])


# ---- polars


_SHORT = 32  # bytes of a text, in the mean: with their end at most two and a half times a view
_OBJECTS = b"POLARS_EXTENSION_TYPE"  # polars' name for columns of Python objects, by their addresses in memory


def _stream_of(frame: Any, level: Any = None) -> Any:
    out = io.BytesIO()
    frame.write_ipc_stream(out, compat_level=level)
    return _bytes(out.getbuffer())


def _column_stream(series: Any) -> Any:
    """A column as a stream. Short texts are bytes and ends in it, which are smaller than polars' views of them, and
    quicker to read. Views of long texts may share them."""
    lib, level = sys.modules["polars"], None
    if series.dtype == lib.String and (series.str.len_bytes().mean() or 0) <= _SHORT:
        level = lib.CompatLevel.oldest()
    return _stream_of(series.to_frame(), level)


def _read(contents: bytes) -> Any:
    # The types are in the schema, which is the first message: perhaps four bytes of 0xff, its length, and its text.
    start = 8 if contents[:4] == b"\xff" * 4 else 4
    length = int.from_bytes(contents[start - 4 : start], "little", signed=True)
    if length < 0 or _OBJECTS in contents[: start + length]:
        raise ValueError("a stream with addresses")
    return sys.modules["polars"].read_ipc_stream(io.BytesIO(contents))


def _frame_parts(frame: Any) -> PartDict:
    for name, dtype in frame.schema.items():
        if dtype == sys.modules["polars"].Object:  # polars would write addresses
            raise TypeError(
                f"the column {name!r}: a store can't keep a column of objects of polars: store it as a list"
            )
        if _has_no_width(dtype):  # polars could not read it again
            raise TypeError(f"the column {name!r}: a store can't keep arrays of width 0 of polars")
    schema = _stream_of(frame.clear()).tobytes()
    if _OBJECTS in schema:
        text = (
            f"no column, field or category is called {_OBJECTS.decode()}, which is polars' name for columns of objects"
        )
        raise TypeError(f"a store can't keep this frame of polars: {text}")
    parts: PartDict = {"schema": schema, "kinds": [], "rows": frame.height}
    for i, series in enumerate(frame.get_columns()):
        name = part_name(i, series.name)
        physical = _physical(series.dtype)
        if physical is None:
            parts["kinds"].append("stream")
            parts[name] = _column_stream(series)
            continue
        parts["kinds"].append("fixed")
        values = series.cast(physical) if series.dtype != physical else series
        if series.null_count():
            values = values.fill_null(0)
        parts[name] = values.rechunk().to_numpy()
        if series.null_count():
            parts[f"{name}.missing"] = series.is_null().to_numpy()
    return parts


def _has_no_width(dtype: Any) -> bool:
    """Whether a type of polars has arrays of width 0 in it."""
    inner = [getattr(dtype, "inner", None), *(field.dtype for field in getattr(dtype, "fields", ()))]
    return 0 in getattr(dtype, "shape", ()) or any(_has_no_width(one) for one in inner if one is not None)


def _physical(dtype: Any) -> Any:
    """polars' type of the elements of a type with a fixed width; None for all others."""
    lib: Any = sys.modules["polars"]
    if dtype.is_integer() or dtype in (lib.Float32, lib.Float64):
        return None if dtype in (getattr(lib, "Int128", None), getattr(lib, "UInt128", None)) else dtype
    if dtype == lib.Date:
        return lib.Int32
    return lib.Int64 if dtype.is_temporal() else None


def _frame_of(parts: PartDict) -> Any:
    try:
        return _checked_frame(parts)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # polars raises it for some damaged streams; it is no Exception
            raise ValueError(str(error)) from error
        raise


def _checked_frame(parts: PartDict) -> Any:
    lib: Any = sys.modules["polars"]
    schema = _read(parts["schema"]).schema
    if not schema and parts["rows"]:
        return lib.DataFrame(height=parts["rows"])
    names, columns = by_number(parts), {}
    for i, ((label, dtype), kind) in enumerate(zip(schema.items(), parts["kinds"], strict=True)):
        name = names[i]
        if kind == "stream":
            series = _read(parts[name].tobytes()).to_series()
            if series.dtype != dtype:
                raise ValueError("a column has another type than the schema says")
        else:
            series = _series(dtype, parts[name], parts.get(f"{name}.missing"))
        columns[label] = series
    made = lib.DataFrame(columns)
    if made.height != parts["rows"] and columns:
        raise ValueError("columns of another length")
    return made


def _series(dtype: Any, values: Any, missing: Any) -> Any:
    lib: Any = sys.modules["polars"]
    physical = _physical(dtype)
    if physical is None:
        raise ValueError("a column has no fixed width")
    empty = lib.Series([], dtype=physical).to_numpy()
    _fixed(values, missing, 8 * empty.dtype.itemsize)
    if "pyarrow" in sys.modules:
        arrow = sys.modules["pyarrow"]
        series = lib.Series(fixed_array(arrow.from_numpy_dtype(values.dtype), values, missing))
    else:
        series = lib.Series(values)
        if missing is not None:
            series = lib.select(lib.when(lib.Series(missing)).then(None).otherwise(series)).to_series()
    return series if series.dtype == dtype else series.cast(physical).cast(dtype)
