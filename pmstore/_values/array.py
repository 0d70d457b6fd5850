"""Arrays in the store: their layout as an entry's meta, and live ndarrays over the bytes of an extent.

The meta of an array is msgpack of ``[dtype descriptor, shape, order, writeable]``. If that is too long for an entry's
meta, it is stored behind the array's bytes, at the next multiple of 8, and the meta is ``[nbytes, length, pm_hash64]``
of it.

The meta of an array that grows has a fifth part, ``[capacity, most]``. The extent has room for `capacity` rows. The
first ones are the array's, as shape says, and the others, the spare rows, have no meaning. The array may have up to
`most` rows, or any number if that is nil. Such a meta is never too long.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np

from pmstore._core import META_MAX, Core, Entry, hash64
from pmstore._errors import MALFORMED, CorruptStoreError, TooLargeError
from pmstore._values.dtypes import descriptor_of, dtype_of, storable_dtype

__all__ = [
    "Array",
    "Growth",
    "Layout",
    "address_of",
    "axes_of",
    "chunks",
    "decode_layout",
    "is_solid",
    "layout",
    "live_array",
    "memory_order",
    "order_of",
    "read_layout",
    "root_of",
]

Array = np.ndarray[Any, np.dtype[Any]]

_NBYTES_MAX = 1 << 62  # far above any address range; below the overflow of the computations of numpy and the core
_DIMENSIONS_MAX = 64
_CHUNK_BYTES = 1 << 20


class Growth(NamedTuple):
    """How an array grows, in rows: how many its extent has room for, and how many it may have (None: any number)."""

    capacity: int
    most: int | None


class Layout(NamedTuple):
    """The layout of an array in the bytes of an extent.

    shape is in elements; order is "C" or "F"; nbytes is the size of the elements, without spare rows and the tail. meta
    goes into the catalog, tail (often empty) behind the elements. growth: of an array that grows, otherwise None.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: str
    writeable: bool
    nbytes: int
    meta: bytes
    tail: bytes
    growth: Growth | None = None

    @property
    def row(self) -> int:
        """The number of bytes of a row, that is of an index of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def room(self) -> tuple[int, ...]:
        """The shape with the spare rows."""
        return self.shape if self.growth is None else (self.growth.capacity, *self.shape[1:])

    @property
    def maxshape(self) -> tuple[int | None, ...] | None:
        """The shape that an array that grows may have; None in it: any length."""
        return None if self.growth is None else (self.growth.most, *self.shape[1:])

    @property
    def length(self) -> int:
        """The number of bytes of the extent."""
        if self.growth is not None:
            return self.growth.capacity * self.row
        return _align8(self.nbytes) + len(self.tail) if self.tail else self.nbytes

    def with_rows(self, rows: int) -> Layout:
        """The layout of an array that grows, with so many rows in the same extent. It is quick."""
        assert self.growth is not None and rows <= self.growth.capacity
        parts = msgpack.unpackb(self.meta)
        parts[1][0] = rows
        meta = bytes(msgpack.packb(parts))
        if len(meta) > META_MAX:
            raise _too_long(len(meta))
        return self._replace(shape=(rows, *self.shape[1:]), nbytes=rows * self.row, meta=meta)

    def fits(self, array: Array) -> bool:
        """Whether the array, in place, has this layout (any caller can set its shape and dtype)."""
        return (
            array.shape == self.shape
            and array.dtype == self.dtype
            and bool(array.flags.f_contiguous if self.order == "F" else array.flags.c_contiguous)
        )


def _align8(n: int) -> int:
    return (n + 7) & ~7


def layout(shape: Any, dtype: Any, order: str, writeable: bool, growth: Growth | None = None) -> Layout:
    """The layout of an array to be created.

    Parameters
    ----------
    shape : int or sequence of int
        Lengths of the axes, in elements.
    dtype : dtype or an argument of np.dtype
        Any dtype except those that hold Python objects (TypeError). A subarray dtype adds its axes to the shape.
    order : {"C", "F"}
        Whether rows or columns are contiguous.
    writeable : bool
        Whether the array can be changed after its creation.
    growth : Growth, optional
        Of an array that grows along its first axis; the capacity is at least its rows.

    Raises
    ------
    TypeError, ValueError
        TooLargeError (a ValueError) if the array would be larger than any address range.
    """
    dtype = storable_dtype(dtype)
    if order not in ("C", "F"):
        raise ValueError(f'order is "C" or "F", not {order!r}')
    axes = axes_of(shape)
    if dtype.subdtype is not None:  # np.empty does the same
        dtype, inner = dtype.subdtype
        axes += inner
    if len(axes) > _DIMENSIONS_MAX:
        raise TooLargeError(f"an array has at most {_DIMENSIONS_MAX} dimensions, not {len(axes)}")
    nbytes = math.prod(axes) * dtype.itemsize
    room = axes if growth is None else (growth.capacity, *axes[1:])
    # numpy multiplies the axes that aren't 0 even if one is
    if math.prod(n for n in room if n) * max(dtype.itemsize, 1) > _NBYTES_MAX:
        raise TooLargeError(f"an array of shape {room} and dtype {dtype} is larger than any address range")
    if len(axes) <= 1:
        order = "C"
    parts = [descriptor_of(dtype), list(axes), order, bool(writeable)]
    if growth is not None:
        _check_growth(growth, axes, dtype, order, writeable)
        parts.append(list(growth))
    full = bytes(msgpack.packb(parts))
    if len(full) <= META_MAX:
        return Layout(dtype, axes, order, bool(writeable), nbytes, full, b"", growth)
    if growth is not None:
        raise _too_long(len(full))
    if not nbytes:
        raise TooLargeError(f"an array without elements can't keep a dtype this long: {len(full)} bytes described")
    meta = bytes(msgpack.packb([nbytes, len(full), hash64(full)]))
    return Layout(dtype, axes, order, bool(writeable), nbytes, meta, full)


def _too_long(length: int) -> TooLargeError:
    return TooLargeError(f"an array that grows can't have a dtype this long: {length} bytes described")


def _check_growth(growth: Growth, axes: tuple[int, ...], dtype: np.dtype[Any], order: str, writeable: bool) -> None:
    """Checks the conditions of each array that grows, created or read from a file."""
    capacity, most = growth
    if not axes or order != "C" or not writeable:
        raise ValueError("an array that grows has a first axis and C order, and can be written")
    if not math.prod(axes[1:]) * dtype.itemsize:
        raise ValueError(f"an array that grows can't have rows without bytes: shape {axes}, dtype {dtype}")
    if not axes[0] <= capacity or capacity < 1 or (most is not None and capacity > most):
        raise ValueError(f"an array with {axes[0]} rows can't have room for {capacity} rows and at most {most}")


def axes_of(shape: Any) -> tuple[int, ...]:
    """A shape as numpy takes it, as a tuple. Raises TypeError, ValueError."""
    axes: tuple[int, ...]
    try:
        axes = (operator.index(shape),)
    except TypeError:
        try:
            axes = tuple(operator.index(n) for n in shape)
        except TypeError as error:
            raise TypeError(f"a shape is an int or a sequence of int, not {shape!r:.80}") from error
    if any(n < 0 for n in axes):
        raise ValueError(f"a shape can't have a negative length: {axes}")
    return axes


def order_of(array: Array) -> Literal["C", "F"]:
    """The order to store an array in: its own if it is contiguous, otherwise "C"."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def is_solid(array: Array) -> bool:
    """Whether the memory of an array has no gaps."""
    return bool(array.flags.c_contiguous or array.flags.f_contiguous)


def memory_order(array: Array) -> Literal["C", "F"] | None:
    """The order of the axes in memory, also of an array with gaps; None if it is neither."""
    if is_solid(array):
        return order_of(array)
    axes = [axis for axis, (n, stride) in enumerate(zip(array.shape, array.strides)) if n > 1 and stride]
    lying = sorted(axes, key=lambda axis: -abs(array.strides[axis]))
    return "C" if lying == axes else "F" if lying == axes[::-1] else None


def root_of(array: Array) -> Array:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@functools.lru_cache(maxsize=4096)
def decode_layout(meta: bytes) -> Layout | tuple[int, int, int]:
    """The layout in an entry's meta, which is not trusted; or (nbytes, length, hash) of the tail that holds the
    layout."""
    try:
        parts = msgpack.unpackb(meta)
        if len(parts) == 3:
            nbytes, length, checksum = parts
            if not all(type(part) is int and part >= 0 for part in parts):
                raise ValueError("the place of the dtype")
            return nbytes, length, checksum
        descriptor, axes, order, writeable, *rest = parts
        growth = Growth(*rest.pop()) if rest else None
        if rest or (growth is not None and not _is_growth(growth)):
            raise ValueError("the room to grow")
        if order not in ("C", "F") or type(writeable) is not bool or not all(type(n) is int for n in axes):
            raise ValueError("shape, order or flags")
        # Build the layout anew, so that it passes the checks of creation.
        made = layout(axes, dtype_of(descriptor), order, writeable, growth)
        return made._replace(meta=meta, tail=b"")
    except CorruptStoreError:
        raise
    except MALFORMED as error:
        raise CorruptStoreError(f"a damaged description of an array: {error}") from error


def _is_growth(growth: Growth) -> bool:
    return type(growth.capacity) is int and (growth.most is None or type(growth.most) is int)


def read_layout(core: Core, entry: Entry) -> Layout:
    """The layout of the array in an entry, checked against the entry's extent."""
    decoded = decode_layout(entry.meta)
    if not isinstance(decoded, Layout):
        nbytes, length, checksum = decoded
        start = _align8(nbytes)
        if start + length != entry.length or not entry.offset:
            raise CorruptStoreError("a damaged description of an array: it is not where the entry says")
        core.require_readable(entry.offset, entry.length, start, length)
        tail = bytes(memoryview(core.buffer(entry.offset, entry.length, False))[start:])
        if hash64(tail) != checksum:
            raise CorruptStoreError("a damaged description of an array: its hash is wrong")
        inner = decode_layout(tail)
        if not isinstance(inner, Layout) or inner.nbytes != nbytes:
            raise CorruptStoreError("a damaged description of an array: its size is wrong")
        decoded = inner._replace(meta=entry.meta, tail=tail)
    if decoded.length != entry.length or bool(decoded.length) != bool(entry.offset):
        raise CorruptStoreError(
            f"a damaged description of an array: {entry.length} bytes are stored, "
            f"shape {decoded.shape} and dtype {decoded.dtype} take {decoded.length}"
        )
    return decoded


def live_array(buffer: Any, described: Layout, writeable: bool) -> Array:
    """The ndarray over a buffer object from `Core.buffer`, which lives as long as the array or a view of it."""
    if not writeable:
        # Through a read-only memoryview of the buffer, numpy would let a caller set flags.writeable. It does not
        # through this array's base.
        buffer = np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)
    order: Any = described.order
    dtype = described.dtype
    if dtype.names is not None:  # any caller can set the names, and layouts are shared
        dtype = np.dtype(dtype, copy=True)
    array: Array = np.ndarray(described.shape, dtype, buffer=buffer, order=order)
    return array


def address_of(array: Array) -> int:
    """The address of its first element."""
    return int(array.__array_interface__["data"][0])


def chunks(array: Array, order: str) -> Iterator[Array]:
    """The elements of an array in order, as contiguous 1-d arrays of about 1 MiB, to save memory."""
    if array.flags.f_contiguous if order == "F" else array.flags.c_contiguous:
        yield array.reshape(-1, order="F" if order == "F" else "C")
        return
    nditer: Any = np.nditer  # numpy's types don't know "contig"
    with nditer(
        array,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly", "contig"]],
        order=order,
        buffersize=max(1, _CHUNK_BYTES // max(1, array.itemsize)),
    ) as pieces:
        yield from pieces
