"""Elements that a caller gives: the first ones of an array, and rows that are appended to one. Rows are converted to
its dtype: floats are rounded within their range, and any other loss is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pmstore._values.array import Array, Layout
from pmstore._values.tensors import array_of_tensor, is_tensor

__all__ = ["filling", "fitting", "given_array"]

_FROM = {"U": "US", "S": "US", "V": "V"}  # kinds of dtype from which numpy converts to one, without making up text


def filling(fill_value: Any, described: Layout) -> Array | bytes:
    """The first elements of an array: as an array of its shape, or the bytes of one element. Raises ValueError for an
    array that can't be broadcast to the shape."""
    if is_tensor(fill_value):
        fill_value = array_of_tensor(fill_value)
    if isinstance(fill_value, np.ma.MaskedArray):
        raise TypeError("fill_value is a masked array: store data and mask as two arrays")
    if isinstance(fill_value, np.ndarray) and fill_value.ndim:
        given = fill_value.astype(described.dtype, copy=False)
        try:
            return np.broadcast_to(given, described.shape)
        except ValueError:
            raise ValueError(
                f"fill_value has the shape {given.shape}, which can't be broadcast to the array's, {described.shape}"
            ) from None
    if type(fill_value) is int and fill_value == 0:  # as np.zeros does: "" and not "0" for a str dtype
        return bytes(max(described.dtype.itemsize, 1))
    cell = np.empty((), described.dtype)
    cell[()] = fill_value
    return cell.tobytes()


def given_array(rows: Any) -> Array | None:
    """The rows as an array, if the dtype of the stored array makes no difference for that."""
    if is_tensor(rows):
        return array_of_tensor(rows)
    if isinstance(rows, np.ma.MaskedArray):
        raise TypeError("the rows are a masked array: store data and mask as two arrays")
    first = rows[0] if isinstance(rows, list) and rows else None
    is_array = hasattr(rows, "__array__") or getattr(getattr(first, "dtype", None), "names", None) is not None
    return np.asarray(rows) if is_array else None


def fitting(given: Array | None, rows: Any, name: str, described: Layout) -> Array:
    """The rows to append to an array, of shape (n, …). They may have another dtype, whose conversion loses nothing.

    Raises TypeError, OverflowError, and ValueError for another shape.
    """
    axes = described.shape[1:]
    array = _fit(given, rows, name, described.dtype)
    if array.shape == axes:
        array = array[np.newaxis]
    elif array.shape == (0,):
        array = array.reshape(0, *axes)
    if array.shape[1:] != axes or not array.ndim:
        raise ValueError(
            f"rows of shape {array.shape} can't be appended to {name!r}: it takes rows of shape {axes}, one or many"
        )
    return array


def _fit(given: Array | None, rows: Any, name: str, dtype: np.dtype[Any]) -> Array:
    if dtype.names is not None:
        return _fit_python_records(rows, name, dtype) if given is None else _fit_records(given, name, dtype)
    array = _of_python(rows, name, dtype) if given is None else given
    if array.dtype == dtype or not array.size:
        return array
    numbers = array.dtype.kind in "biu" and dtype.kind in "biu" and given is None
    related = array.dtype.kind in _FROM.get(dtype.kind, array.dtype.kind)
    if not related or not (numbers or np.can_cast(array.dtype, dtype, "same_kind")):
        raise TypeError(_lossy(array, name, dtype))
    if (dtype.kind in "mMV" or not np.can_cast(array.dtype, dtype)) and not _keeps(array, dtype):
        raise OverflowError(_too_large(name, dtype)) if dtype.kind in "biufc" else TypeError(_lossy(array, name, dtype))
    return array


def _fit_records(array: Array, name: str, dtype: np.dtype[Any]) -> Array:
    """Records of an array: fields go to those of the same name."""
    if array.dtype == dtype or not array.size:
        return array
    if sorted(array.dtype.names or ()) != sorted(dtype.names or ()):
        raise TypeError(_lossy(array, name, dtype, "give them the same fields"))
    made = np.zeros(array.shape, dtype)
    for field in dtype.names or ():
        if array[field].shape != made[field].shape:
            raise TypeError(_lossy(array, name, dtype, f"the field {field!r} has another shape"))
        made[field] = _fit(array[field], None, f"{name}[{field}]", made[field].dtype)
    return made


def _fit_python_records(rows: Any, name: str, dtype: np.dtype[Any]) -> Array:
    """Records of tuples: fields are in order."""
    for field, column in zip(dtype.names or (), zip(*_tuples(rows, name, dtype))):
        _fit(None, list(column), f"{name}[{field}]", dtype[field].base)
    return np.asarray(rows, dtype)


def _tuples(rows: Any, name: str, dtype: np.dtype[Any]) -> Iterator[tuple[Any, ...]]:
    if isinstance(rows, list):
        for one in rows:
            yield from _tuples(one, name, dtype)
    elif isinstance(rows, tuple) and len(rows) == len(dtype.names or ()):
        yield rows
    else:
        raise TypeError(
            f"a row of {name!r} is a tuple with the fields {', '.join(dtype.names or ())}, not {rows!r:.80}"
        )


def _lossy(array: Array, name: str, dtype: np.dtype[Any], advice: str = "convert them with astype") -> str:
    return f"rows of dtype {array.dtype} can't be appended to {name!r} of dtype {dtype} without loss: {advice}"


def _too_large(name: str, dtype: np.dtype[Any]) -> str:
    return f"the rows have numbers that {name!r}, of dtype {dtype}, can't hold"


def _of_python(rows: Any, name: str, dtype: np.dtype[Any]) -> Array:
    """Rows of Python's values, with all of each value; those of other types than numbers, text and times as the dtype
    has them."""
    if dtype.kind in "biufc":
        return _numbers(np.asarray(rows), rows, name, dtype)
    if dtype.kind in "US":
        for value in np.asarray(rows, object).flat:
            if not isinstance(value, str | bytes):
                raise TypeError(f"{name!r} of dtype {dtype} takes text, not {value!r:.80}")
        return np.asarray(rows).astype(dtype.kind, copy=False)
    if dtype.kind == "V" and any(
        isinstance(one, bytes) and len(one) > dtype.itemsize for one in np.asarray(rows, object).flat
    ):
        raise TypeError(f"{name!r} of dtype {dtype} takes {dtype.itemsize} bytes at most")
    if dtype.kind in "mM" and not any(isinstance(one, int) for one in np.asarray(rows, object).flat):
        return np.asarray(rows, f"{dtype.kind}8")
    return np.asarray(rows, dtype)


def _numbers(array: Array, rows: Any, name: str, dtype: np.dtype[Any]) -> Array:
    """Numbers of Python. numpy has no type for all whole numbers, and takes floats or objects for large ones."""
    if dtype.kind in "iuf" and array.dtype.kind in "fO":
        exactly = np.asarray(rows, object)
        if all(isinstance(number, int | np.integer) for number in exactly.flat):
            try:
                return exactly.astype(float if dtype.kind == "f" and dtype.itemsize < 8 else dtype)
            except OverflowError as error:
                raise OverflowError(_too_large(name, dtype)) from error
    return array


def _keeps(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether whole numbers, text or times are the same in another dtype, and finite numbers stay finite."""
    if dtype.kind == "V":
        return array.dtype.itemsize == dtype.itemsize
    if dtype.kind not in "biufcUSmM":
        return True
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "fc":
        parts = (converted.real, array.real), (converted.imag, array.imag)
        return all(bool((np.isfinite(one) == np.isfinite(other)).all()) for one, other in parts)
    if dtype.kind in "iu" and array.dtype.kind in "iu" and not np.array_equal(converted < 0, array < 0):
        return False
    return np.array_equal(converted.astype(array.dtype), array, equal_nan=dtype.kind in "mM")
