"""A look into one value of a store that another process writes: a bounded part of it, of one commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._catalog.lists import PersistentList
from pmstore._display import Row, full_text, lines_text, size_text, type_text
from pmstore._errors import UnknownNameError
from pmstore._store.reading import Selection, copies
from pmstore._store.store import Store

__all__ = ["inside", "names"]

MOST_NAMES = 2000
MOST_TEXT = 2000  # characters
MOST_BYTES = 64 << 20  # read of an array
MOST_VALUE = 1 << 20  # bytes of a value that isn't an array
ROWS, COLUMNS = 128, 128  # of a heat map
BLOCKS, BLOCK = 128, 256  # parts of an array of one dimension, and their elements
BINS = 40
TOO_LARGE = "its rows, or all of it in Fortran order, are too large to be looked into"
LEVELS = 255  # of a heat map


def names(store: Store) -> dict[str, Any]:
    """The first names of a store with their kinds, types and sizes, and the number of further ones."""
    found: list[dict[str, str]] = []
    more = 0
    for row in store._rows():
        if len(found) < MOST_NAMES:
            found.append(_about(row) | {"kind": row[1]})
        else:
            more += 1
    return {"names": found, "more": more}


def inside(store: Store, name: str) -> dict[str, Any]:
    """The data for the picture of a value.

    Of an array of numbers that is large, some evenly spaced rows are read. ``line`` (one dimension) or ``heat`` (levels
    from 0 to LEVELS of rows of columns, None for what is not finite), and ``histogram`` of what was read. Of other
    values, ``text``. Raises UnknownNameError.
    """
    row = next((row for row in store._rows() if row[0] == name), None)
    if row is None:
        raise UnknownNameError(name)
    about = _about(row)
    if row[1] != "array":
        return about | {"text": _value_text(store, row)}
    assert row[2] is not None
    dtype = np.dtype(row[3])
    if dtype.kind not in "biufc" or not row[2] or 0 in row[2]:
        return about | {"text": _small_text(store, row)}
    rows, values = _read(store, name, row[2], dtype)
    if rows is None:
        return about | {"text": TOO_LARGE}
    with np.errstate(all="ignore"):
        if values.dtype.kind == "c":
            values, about["type"] = abs(values), about["type"] + ", absolute values"
        return about | _pictures(rows, values.astype(float), row[2])


def _about(row: Row) -> dict[str, Any]:
    """Name, type and size. A list has no size: its elements are not read."""
    return {"name": row[0], "type": type_text(row), "size": "" if row[1] == "list" else size_text(row[4])}


def _value_text(store: Store, row: Row) -> str:
    if row[1] == "derived":
        return "a derived array: only a program that declares it can read it"
    if row[1] == "value" and row[4] > MOST_VALUE:
        return "too large to be looked into"
    if row[1] in ("value", "object"):
        return _cut(full_text(store._catalog.parts(row[0])))
    value = store[row[0]]
    return _cut(full_text(value[-100:] if isinstance(value, PersistentList) else value))


def _small_text(store: Store, row: Row) -> str:
    if row[4] > MOST_VALUE:
        return "no numbers that could be drawn"
    (value,) = copies(store._catalog.core, [Selection(row[0])], [])
    return _cut(str(value))


def _cut(text: str) -> str:
    text = lines_text(text)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _read(
    store: Store, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
    """The numbers of the rows that were read, and the rows."""
    parts, size = (BLOCKS, BLOCK) if len(shape) == 1 else (ROWS, 1)
    each = dtype.itemsize * int(np.prod(shape[1:], dtype=object))
    if shape[0] <= parts * size:
        first, size = np.zeros(1, int), shape[0]
    else:
        first = np.unique(np.linspace(0, shape[0] - size, parts).round().astype(int))
    needed = each * (shape[0] if store._layout(name).order == "F" else len(first) * size)  # "F": it is read as a whole
    if needed > MOST_BYTES:
        return None, np.zeros(0)
    asked = [Selection(name, np.s_[int(at) : int(at) + size], whole=False) for at in first]
    read = copies(store._catalog.core, asked, [])
    rows = np.concatenate([np.arange(at, at + size) for at in first])
    return rows, np.concatenate(read)


def _pictures(rows: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"text": "no finite numbers"}
    low, high = float(finite.min()), float(finite.max())
    picture: dict[str, Any] = {"low": low, "high": high, "read": values.size, "of": int(np.prod(shape, dtype=object))}
    span = high / 2 - low / 2
    share = (finite / 2 - low / 2) / (span if span > 0 else 1.0)
    picture["histogram"] = np.bincount(np.minimum(share * BINS, BINS - 1).astype(int), minlength=BINS).tolist()
    if len(shape) == 1:
        chosen = _chosen(len(rows), 2 * ROWS)
        y = [float(value) if np.isfinite(value) else None for value in values[chosen]]
        return picture | {"line": {"x": rows[chosen].tolist(), "y": y}}
    table = values.reshape(len(rows), -1)
    kept, columns = _chosen(len(rows), ROWS), _chosen(table.shape[1], COLUMNS)
    table = table[np.ix_(kept, columns)]
    levels = np.round((table / 2 - low / 2) / (span if span > 0 else 1.0) * LEVELS)
    heat = [[int(level) if np.isfinite(level) else None for level in line] for line in levels]
    return picture | {"heat": heat, "rows": rows[kept].tolist(), "columns": columns.tolist()}


def _chosen(count: int, most: int) -> npt.NDArray[Any]:
    if count <= most:
        return np.arange(count)
    chosen: npt.NDArray[Any] = np.linspace(0, count - 1, most).round().astype(int)
    return chosen
