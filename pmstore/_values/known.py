"""Types of numpy, SciPy, pandas, pyarrow and polars as parts. None of their modules is imported here: a program with a
value of such a type has imported its module.

==============================  =======================================================================
type                            parts
==============================  =======================================================================
numpy.ma.MaskedArray            data; mask, unless there is none; about: [fill value, whether it is hard]
numpy.recarray                  array
scipy.sparse CSR, CSC           data, indices, indptr; shape
scipy.sparse COO                data; coords0, coords1, …; shape; canonical
pandas.DataFrame, Series        see frames.py
pyarrow.Table                   see tables.py
polars.DataFrame, Series        see tables.py
==============================  =======================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pmstore._values.registry import Decode, Encode, Registered

__all__ = ["known_name", "known_type", "module_of"]

_BY_TYPE: dict[type, Registered] = {}
_BY_NAME: dict[str, Registered] = {}
_LOADED: set[str] = set()

_UNWATCHED = ("numpy", "pyarrow")  # all of a recarray is live, and a table of Arrow can't be changed
_SPARSE = [f"{kind}_{what}" for kind in ("csr", "csc", "coo") for what in ("array", "matrix")]


def known_type(kind: type) -> Registered | None:
    """How values of exactly this type are kept; None if it is not one of these."""
    if kind.__name__ not in _NAMES:
        return None
    _load()
    return _BY_TYPE.get(kind)


def known_name(name: str) -> Registered | None:
    """The type of that name, if it is one of these and its module is imported."""
    if module_of(name) is None:
        return None
    _load()
    return _BY_NAME.get(name)


def module_of(name: str) -> str | None:
    """The module that has the type of a name, if it is one of these."""
    module, _, last = name.rpartition(".")
    return module if module in _TABLES and last in _TABLES[module][0] else None


def _load() -> None:
    """Make the entries of modules that were imported since the last call."""
    for module, (names, how) in _TABLES.items():
        loaded = sys.modules.get(module)
        if loaded is None or module in _LOADED:
            continue
        kinds = [getattr(loaded, name, None) for name in names]
        if not all(isinstance(kind, type) for kind in kinds):
            continue  # an old version, or in the middle of its import
        for name, kind in zip(names, kinds):
            assert kind is not None
            found = Registered(kind, f"{module}.{name}", *how(kind), *_watching(module))
            _BY_TYPE[kind] = _BY_NAME[found.name] = found
        _LOADED.add(module)


def _watching(module: str) -> tuple[Any, ...]:
    """The last fields of Registered: how a module's values are watched."""
    if module == "pandas":
        from pmstore._values import frames

        return True, frames.made_of, frames.guarded
    if module == "polars":
        from pmstore._values import tables

        return True, tables.made_of
    return (True, _arrays_of) if module == "scipy.sparse" else (module not in _UNWATCHED,)


# ---- numpy


def _masked(kind: Any) -> tuple[Encode, Decode]:
    nomask = sys.modules["numpy.ma"].nomask

    def encode(value: Any) -> dict[str, Any]:
        data, mask = value.data, value.mask
        if type(data) is not np.ndarray:
            raise TypeError(f"a store can't keep a masked {type(data).__name__}, only a masked array")
        parts = {"data": data, "about": [value.fill_value, bool(value.hardmask)]}
        return parts if mask is nomask else {**parts, "mask": mask}

    def decode(parts: dict[str, Any]) -> Any:
        data, (fill_value, hard) = _array(parts["data"]), parts["about"]
        mask = parts.get("mask", nomask)
        if mask is not nomask and mask.shape != data.shape:
            raise ValueError("data and mask have different shapes")
        made = kind(data, mask=mask, hard_mask=hard, copy=False, shrink=False)
        # numpy's own, "N/A", may be longer than the elements, and to set it would cut it.
        if not (isinstance(fill_value, str | bytes) and made.fill_value == fill_value):
            made.fill_value = fill_value
        return made

    return encode, decode


def _records(kind: Any) -> tuple[Encode, Decode]:
    def decode(parts: dict[str, Any]) -> Any:
        array = _array(parts["array"])
        made = array.view(kind)
        if made.dtype != array.dtype:  # a recarray of plain elements
            raise ValueError("no dtype of records")
        return made

    return (lambda value: {"array": value.view(np.ndarray)}), decode


# ---- SciPy


def _sparse(kind: Any) -> tuple[Encode, Decode]:
    if kind.__name__.startswith("coo"):
        return _coo(kind)
    by_row = kind.__name__.startswith("csr")

    def encode(value: Any) -> dict[str, Any]:
        parts = {name: getattr(value, name) for name in ("data", "indices", "indptr")}
        parts["indices"], parts["indptr"] = _of_one_dtype(parts["indices"], parts["indptr"])
        return {**parts, "shape": tuple(map(int, value.shape))}

    def decode(parts: dict[str, Any]) -> Any:
        data, indices, indptr = (_array(parts[name], 1) for name in ("data", "indices", "indptr"))
        shape = _shape(parts["shape"])
        major, minor = (1, *shape) if len(shape) == 1 and by_row else shape if by_row else shape[::-1]
        _check_indices(indices, minor)
        _check_indices(indptr, min(len(data), len(indices)) + 1)
        if len(indptr) != major + 1 or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
            raise ValueError("indptr breaks the format")
        if indices.dtype != indptr.dtype:
            raise ValueError("indices and indptr have different dtypes")
        made = kind(shape)
        made.data, made.indices, made.indptr = data, indices, indptr  # the constructor would copy other integers
        return made

    return encode, decode


def _coo(kind: Any) -> tuple[Encode, Decode]:
    def encode(value: Any) -> dict[str, Any]:
        coords = value.coords if hasattr(value, "coords") else (value.row, value.col)
        parts = {"data": value.data, **{f"coords{axis}": one for axis, one in enumerate(_of_one_dtype(*coords))}}
        return {**parts, "shape": tuple(map(int, value.shape)), "canonical": bool(value.has_canonical_format)}

    def decode(parts: dict[str, Any]) -> Any:
        data, shape = _array(parts["data"], 1), _shape(parts["shape"])
        coords = tuple(_array(parts[f"coords{axis}"], 1) for axis in range(len(shape)))
        for one, length in zip(coords, shape):
            _check_indices(one, length)
            if len(one) != len(data) or one.dtype != coords[0].dtype:
                raise ValueError("coordinates break the format")
        made = kind(shape)
        made.data = data
        if hasattr(made, "coords"):
            made.coords = coords
        else:
            made.row, made.col = coords
        made.has_canonical_format = bool(parts["canonical"])
        return made

    return encode, decode


def _of_one_dtype(*indices: Any) -> list[Any]:
    """Index arrays of int32 or int64, as SciPy's own calculations want them. A program may have set others."""
    integer = np.int32 if np.result_type(np.int32, *indices) == np.int32 else np.int64
    return [one.astype(integer, casting="same_kind", copy=False) for one in indices]


def _check_indices(indices: Any, length: int) -> None:
    """SciPy's compiled code would read and write outside of its arrays."""
    if indices.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise ValueError(f"indices of the dtype {indices.dtype}")
    if len(indices) and not (indices.min() >= 0 and indices.max() < length):
        raise ValueError("an index is outside of the shape")


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or not shape or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("no shape")
    return shape


def _array(array: Any, ndim: int | None = None) -> Any:
    if type(array) is not np.ndarray or (ndim is not None and array.ndim != ndim):
        raise ValueError("a part that is to be an array is none")
    return array


# ---- frames and tables


def _pandas(kind: Any) -> tuple[Encode, Decode]:
    from pmstore._values import frames

    return frames.how(kind)


def _arrays_of(matrix: Any) -> list[Any]:
    own = vars(matrix)
    names = ("data", "indices", "indptr", "row", "col", "_shape")
    return [*(own.get(name) for name in names), *own.get("coords", ())]


def _arrow(kind: Any) -> tuple[Encode, Decode]:
    from pmstore._values import tables

    return tables.arrow(kind)


def _polars(kind: Any) -> tuple[Encode, Decode]:
    from pmstore._values import tables

    return tables.polars(kind)


_TABLES: dict[str, tuple[list[str], Callable[[Any], tuple[Encode, Decode]]]] = {
    "numpy.ma": (["MaskedArray"], _masked),
    "numpy": (["recarray"], _records),
    "scipy.sparse": (_SPARSE, _sparse),
    "pandas": (["DataFrame", "Series"], _pandas),
    "pyarrow": (["Table"], _arrow),
    "polars": (["DataFrame", "Series"], _polars),
}
"""Names of types by module, and how they are kept. A file can name no others."""

_NAMES = {name for names, _ in _TABLES.values() for name in names}
