"""`Planes`: the bytes of elements, sorted by their place in the element and compressed, as a codec of numcodecs.

    elements (minus those before) ──split──▶ planes ──▶ runs of neighbouring planes ──zstd, or as they are──▶ bytes

The lowest bytes of floats are close to random, and the highest ones are nearly the same in all elements. They do not
share a block of zstd: what looks random is tried quickly, and mostly stored as it is, so that reading it is copying it.
What is read is not trusted.
"""

from __future__ import annotations

import functools
import struct
import threading
from typing import Any

import numpy as np
from numcodecs import Zstd
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy
from numcodecs.registry import register_codec

from pmstore._core import ffi, lib
from pmstore._errors import memory_errors

__all__ = ["Planes", "decode_into", "encoded"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What is encoded: the number of runs, the planes, method and bytes of each, and their bytes.
_RUN = struct.Struct("<BBQ")
_RAW, _ZSTD = 0, 1  # methods
_SIZES = (2, 4, 8)
_LEVEL, _QUICK = 1, -1  # of zstd, for all bytes and for those that look random
_WORTH = 16  # a run that looks random is compressed if that saves one byte of so many
_MOST = 1 << 31  # bytes that are decoded without a place for them

_kept = threading.local()
_zstd = functools.cache(Zstd)


def _scratch(count: int) -> Bytes:
    """Memory of this thread. It has anything."""
    found: Bytes | None = getattr(_kept, "scratch", None)
    if found is None or len(found) < count:
        found = _kept.scratch = np.zeros(max(count, 1 << 16), np.uint8)
    return found[:count]


def _pointer(data: Any) -> Any:
    return ffi.NULL if data is None else ffi.from_buffer("uint8_t[]", data)


def encoded(data: Bytes, before: Bytes | None, size: int) -> list[Any]:
    """The bytes of elements, or of their difference to those before, as buffers to be joined.

    data, before: contiguous, of the same length, which is a multiple of the size of an element.
    """
    count = len(data) // size
    planes = np.empty(len(data), np.uint8)
    dense = lib.pm_planes_split(_pointer(data), _pointer(before), count, size, _pointer(planes))
    runs, stored, first = [], [], 0
    for plane in range(1, size + 1):
        if plane < size and (dense >> plane & 1) == (dense >> first & 1):
            continue
        raw = planes[first * count : plane * count]
        looks_random = dense >> first & 1
        with memory_errors():
            made = _zstd(_QUICK if looks_random else _LEVEL).encode(raw) if len(raw) else b""
        packed = len(made) < len(raw) - (len(raw) // _WORTH if looks_random else 0)
        kept = made if packed else raw.data
        runs.append(_RUN.pack(plane - first, _ZSTD if packed else _RAW, len(kept)))
        stored.append(kept)
        first = plane
    return [bytes([len(runs)]) + b"".join(runs), *stored]


def decode_into(stored: Any, before: Bytes | None, size: int, out: Bytes) -> None:
    """Fill `out` with elements that `encoded` has encoded. before: may be `out` itself.

    If a run was cut off by hand, any bytes may come out: callers know a hash of what should. Raises ValueError.
    """
    view, count = memoryview(stored), len(out) // size
    at = 1 + view[0] * _RUN.size if len(view) else 1
    runs = list(_RUN.iter_unpack(view[1:at])) if at <= len(view) else []
    if sum([run[0] for run in runs]) != size or at + sum([run[2] for run in runs]) != len(view) or len(out) % size:
        raise ValueError("these are not the planes of so many bytes")
    raw, decoded = _pointer(view), _scratch(len(out))
    planes: list[Any] = []
    for number, method, length in runs:
        if method == _RAW and length == number * count:
            first = raw + at
        elif method == _ZSTD:
            place = decoded[len(planes) * count : (len(planes) + number) * count]
            try:
                with memory_errors():
                    _zstd(_LEVEL).decode(view[at : at + length], out=place)
            except RuntimeError as error:
                raise ValueError(f"planes can't be decompressed: {error}") from error
            first = _pointer(place) + 0
        else:
            raise ValueError("planes were stored in an unknown way, or are too short")
        planes += [first + n * count for n in range(number)]
        at += length
    lib.pm_planes_join(ffi.new("uint8_t *[]", planes), _pointer(before), count, size, _pointer(out))


class Planes(Codec):
    """A lossless codec for arrays of numbers: their bytes are sorted by the place in the element, and compressed.

    An archive uses it by default. It decodes several times faster than shuffle and zstd one after the other.

    Parameters
    ----------
    elementsize : int
        The bytes of an element: 2, 4 or 8.

    Raises
    ------
    ValueError
        For another number.
    """

    codec_id = "pmstore.planes"

    def __init__(self, elementsize: int = 8) -> None:
        if elementsize not in _SIZES:
            raise ValueError(f"elementsize is 2, 4 or 8, not {elementsize!r}")
        self.elementsize = int(elementsize)

    def encode(self, buf: Any) -> bytes:
        """The bytes, encoded. Raises ValueError if the last element is not whole.

        Parameters
        ----------
        buf : ndarray, or any object with a buffer
            Contiguous, of any shape.
        """
        data = ensure_contiguous_ndarray(buf).view(np.uint8)
        if len(data) % self.elementsize:
            raise ValueError(f"{len(data)} bytes are not whole elements of {self.elementsize} bytes")
        return len(data).to_bytes(8, "little") + b"".join(encoded(data, None, self.elementsize))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """The bytes again, in `out` if that is given.

        Raises ValueError if `encode` did not make it, or if it has more bytes than `out`, or than 2 GiB.
        """
        stored = memoryview(ensure_contiguous_ndarray(buf).view(np.uint8))
        length = int.from_bytes(stored[:8], "little")
        target = None if out is None else ensure_contiguous_ndarray(out)
        if len(stored) < 8 or length > (_MOST if target is None else target.nbytes):
            raise ValueError("these are not planes, or there is no room for them")
        made = np.empty(length, np.uint8)
        decode_into(stored[8:], None, self.elementsize, made)
        return made if out is None else ndarray_copy(made, out)


register_codec(Planes)
