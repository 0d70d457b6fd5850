"""The write sets that a program declares.

`Store.transaction(only=...)` declares a write set: of all arrays, only these views have changed.
`Store.mark_dirty` says that a view may have changed unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from pmstore._catalog import names
from pmstore._catalog.kinds import ARRAY
from pmstore._core import MARK_CONSTANT, MARK_NONE, Core, no_ranges, pointer_at, pointer_to
from pmstore._errors import UNSOUND, TransactionError
from pmstore._values.array import read_layout

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog

__all__ = ["mark", "span", "spans", "violation"]


def span(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Address and length, in bytes, of the memory that an array spans, gaps included."""
    address: int = array.__array_interface__["data"][0]
    flags = array.flags
    if flags.c_contiguous or flags.f_contiguous:
        return address, array.nbytes
    first = last = 0
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        first, last = (first + reach, last) if reach < 0 else (first, last + reach)
    return address + first, last - first + array.itemsize


def spans(catalog: Catalog, arrays: Iterable[Any]) -> Any:
    """The spans of views of live arrays, in the form that the core takes. Raises TypeError, ValueError for anything
    else."""
    if type(arrays) is list:
        views = arrays
    elif isinstance(arrays, ndarray) or not isinstance(arrays, Iterable):
        raise TypeError("only is a list of arrays of the store: only=[array]")
    else:
        views = list(arrays)
    return catalog.lock.call(_ranges_of, catalog.core, views)


def _ranges_of(core: Core, views: list[Any]) -> Any:
    ranges = no_ranges(len(views))
    for i, array in enumerate(views):
        if not isinstance(array, ndarray):
            hint = ": of a column, column.to_numpy()" if hasattr(array, "to_numpy") else ""
            raise TypeError(
                f"only is a list of arrays of the store, or views of them, not {type(array).__name__}{hint}"
            )
        length = array.nbytes
        if length:
            try:
                place = pointer_to(array)
            except (TypeError, ValueError, BufferError):  # not C-contiguous, or not a buffer's dtype
                address, length = span(array)
                place = pointer_at(address)
            if not core.holds(place, length, ranges, i):
                raise ValueError(f"only: {_not_live(array)}")
    return ranges


def _not_live(array: ndarray[Any, Any]) -> str:
    return (
        f"an array of shape {array.shape} and dtype {array.dtype} is neither a live array of this store nor a view of "
        "one (it is detached, or a copy, as after indexing with a list of rows)"
    )


def mark(core: Core, array: Any) -> None:
    """See `Store.mark_dirty`."""
    if not isinstance(array, ndarray):
        raise TypeError(f"mark_dirty takes an array of the store, or a view of one, not {type(array).__name__}")
    if not array.nbytes:
        return
    found = core.mark_dirty(*span(array))
    if found == MARK_NONE:
        raise ValueError(f"mark_dirty: {_not_live(array)}")
    if found == MARK_CONSTANT:
        raise ValueError("mark_dirty: the array was stored with writeable=False, so nothing may change it")


def holds(core: Core, memory: tuple[int, int]) -> bool:
    """Whether a live array has all of a range of memory: an address, and a length of at least one byte."""
    address, length = memory
    return not core.gone and bool(core.holds(pointer_at(address), length, no_ranges(1), 0))


def violation(catalog: Catalog, ranges: Any) -> TransactionError | None:
    """The error that names the array that changed although it was not declared, and the elements; None if there is
    none."""
    found = catalog.core.undeclared(ranges)
    if found is None:
        return None
    extent, at, length = found
    for row in catalog.core.scan(names.NAME_PREFIX):
        if row.entry.kind == ARRAY and row.entry.offset == extent:
            try:
                described = read_layout(catalog.core, row.entry)
            except UNSOUND:
                break
            size = max(1, described.dtype.itemsize)
            first, last = at // size, (at + length - 1) // size
            shape = described.room if math.prod(described.room) else (1,)
            order: Any = described.order
            start, end = (np.unravel_index(i, shape, order=order) for i in (first, last))
            where = f"elements {_index(start)} to {_index(end)}" if last > first else f"element {_index(start)}"
            return TransactionError(
                f"only= declared that nothing else changes, but {where} of {names.name_of(row.key)!r} did. "
                "Nothing is committed, and all of it stays pending: commit() takes it, rollback() drops it"
            )
    return TransactionError("only= declared that nothing else changes, but something did; all of it stays pending")


def _index(place: Any) -> str:
    return f"[{', '.join(str(int(i)) for i in place)}]"
