"""A lossy difference of arrays, and back: LC-Checkpoint (ICML 2020), by the passes of csrc/codecs/lcdelta.c.

    changes ──by sign and exponent──▶ buckets ──the largest exponents are kept──▶ a code for each element, 0: no change
    each kept bucket ──the mean of its changes──▶ one value
    codes, values, exact elements ──zstd──▶ the bytes of the difference

An element is never farther from what it should be than it was before. What is read is not trusted: sizes are checked
before memory is asked for.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numcodecs import Shuffle, Zstd

from pmstore._core import ffi, lib
from pmstore._errors import memory_errors

__all__ = ["DOUBLE", "Buckets", "Bytes", "Changes", "Coder", "Errors", "Kind", "decoded", "kind_of", "plain"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# How, type or bytes of an element, bits, values, exact elements, elements or bytes, bytes of packed codes.
_HEADER = struct.Struct("<BBBBIQQ")
_CODED, _SHUFFLED, _RAW = 1, 2, 3  # how
_LEVEL = 1
_END = 0xA5  # the last byte of what is compressed: zstd does not tell that there is less than was asked for
_BUCKETS, _SIGN = 4096, 2048
_ROOM = 1 << 18  # bytes that C counts with
_MOST = 1 << 31  # bytes of a difference


class Kind(NamedTuple):
    """A type of elements. number: as C calls it; size: bytes; value: dtype of the values of buckets."""

    number: int
    size: int
    value: str


DOUBLE = Kind(lib.PM_LCDELTA_DOUBLE, 8, "<f8")
FLOAT = Kind(lib.PM_LCDELTA_FLOAT, 4, "<f4")
HALF = Kind(lib.PM_LCDELTA_HALF, 2, "<f4")
BRAIN = Kind(lib.PM_LCDELTA_BRAIN, 2, "<f4")
_KINDS = {kind.number: kind for kind in (DOUBLE, FLOAT, HALF, BRAIN)}
_NAMED = {"float64": DOUBLE, "float32": FLOAT, "float16": HALF, "bfloat16": BRAIN}
_BFLOAT16 = np.dtype([("bfloat16", "<u2")])


def _wider() -> Any:
    """The bucket of a double for each of a float: its exponent is biased by another number."""
    exponent = np.arange(512) % 256
    wider = np.where(exponent == 255, _SIGN - 1, exponent + 1023 - 127)
    return np.where(exponent, wider, 0) + np.arange(512) // 256 * _SIGN


_WIDER = _wider()


def kind_of(dtype: np.dtype[Any], named: str | None = None) -> Kind | None:
    """The type of the elements of an array; None if they have no lossy difference.

    named: "float16", "bfloat16", "float32" or "float64": elements of this type only; of the second also as uint16.
    """
    if dtype == _BFLOAT16:
        found: Kind | None = BRAIN
    elif dtype.kind == "f" and dtype.newbyteorder("<") == dtype:
        found = _NAMED.get(dtype.name)
    else:
        found = BRAIN if named == "bfloat16" and dtype == np.dtype("<u2") else None
    return found if named is None or found is _NAMED[named] else None


def _pointer(data: Any) -> Any:
    return ffi.from_buffer(data)


class Errors:
    """The errors of results: `absolute`, the largest difference; `relative`, the root of the
    mean square of the differences, divided by that of the elements, or inf if a double can't tell it. Elements that are
    not finite are exact."""

    def __init__(self) -> None:
        self._found = np.zeros(3)

    def add(self, other: Errors, exact: bool) -> None:
        """Add the errors of further elements. exact: the elements have the exact values after all."""
        self._found += [0, 0, other._found[2]] if exact else [0, *other._found[1:]]
        self._found[0] = max(self._found[0], 0 if exact else other._found[0])

    @property
    def absolute(self) -> float:
        return float(self._found[0])

    @property
    def relative(self) -> float:
        _, squares, total = map(float, self._found)
        if not squares and not self.absolute:
            return 0.0
        return (squares / total) ** 0.5 if squares and squares < np.inf and 0 < total < np.inf else float("inf")

    @property
    def pointer(self) -> Any:
        """The pointer that C functions take."""
        return ffi.from_buffer("double[]", self._found)


class Changes(NamedTuple):
    """The changes of an array, or of a part of it: which buckets they have, their number and their sum in each."""

    buckets: Any
    numbers: Any
    sums: Any


class Buckets:
    """How often changes have each sign and exponent, in all arrays that share the kept buckets."""

    def __init__(self) -> None:
        self._counts, self._room = np.zeros(_BUCKETS, np.uint64), np.zeros(_ROOM // 8, np.uint64)

    def add(self, kind: Kind, x: Bytes, before: Bytes) -> Changes:
        """Counts the changes of an array, or of a part of it."""
        buckets = _BUCKETS if kind is DOUBLE else len(_WIDER)
        numbers, sums = np.zeros(buckets, np.uint64), np.zeros(buckets)
        lib.pm_lcdelta_count(
            kind.number,
            _pointer(x),
            _pointer(before),
            len(x) // kind.size,
            _pointer(self._room),
            ffi.from_buffer("uint64_t[]", numbers),
            ffi.from_buffer("double[]", sums),
        )
        there = np.flatnonzero(numbers)
        wide = there if kind is DOUBLE else _WIDER[there]
        self._counts[wide] += numbers[there]
        return Changes(wide, numbers[there], sums[there])

    def kept(self, bits: int) -> Bytes:
        """The code of each bucket: 1, 2, … for the 2^bits - 1 of the largest exponents, of equal ones the fuller one
        first; 0 for the others."""
        exponents = np.arange(_BUCKETS) % _SIGN
        there = np.flatnonzero((self._counts > 0) & (exponents > 0) & (exponents < _SIGN - 1))
        order = sorted(there.tolist(), key=lambda one: (-(one % _SIGN), -int(self._counts[one]), one))
        table = np.zeros(_BUCKETS, np.uint8)
        table[order[: (1 << bits) - 1]] = np.arange(1, 1 + min(len(order), (1 << bits) - 1))
        return table


class Coder:
    """Makes lossy differences, one after the other, in the same memory. It is for one thread at a time."""

    def __init__(self) -> None:
        self._codes = self._packed = self._out = self._body = np.empty(0, np.uint8)
        self._places = np.empty(0, np.uint32)

    def coded(
        self, kind: Kind, bits: int, table: Bytes, changes: Changes, x: Bytes, before: Bytes
    ) -> tuple[bytes, Bytes, Errors]:
        """The bytes of a lossy difference, the array that they decode to (until the next call), and its distance to x.

        table: of `Buckets.kept`; changes: of `Buckets.add`; x, before: contiguous bytes of elements.
        """
        count = len(x) // kind.size
        if len(self._out) < len(x) or len(self._codes) < count:
            self._codes, self._packed = np.empty(count, np.uint8), np.empty(count, np.uint8)
            self._places, self._out = np.empty(count, np.uint32), np.empty(len(x), np.uint8)
        codes, out = self._codes[:count], self._out[: len(x)]
        values, errors = _values(table, changes).astype(kind.value), Errors()
        by_code, by_bucket = _by_code(values), table if kind is DOUBLE else table[_WIDER]
        exact = lib.pm_lcdelta_apply(
            kind.number,
            _pointer(x),
            _pointer(before),
            count,
            ffi.from_buffer(by_bucket),
            _pointer(by_code),
            ffi.from_buffer(codes),
            _pointer(out),
            ffi.from_buffer("uint32_t[]", self._places),
            errors.pointer,
        )
        packed = lib.pm_lcdelta_pack(ffi.from_buffer(codes), count, bits, ffi.from_buffer(self._packed))
        places = self._places[:exact]
        parts = [
            self._packed[:packed],
            values.view(np.uint8),
            np.diff(places, prepend=np.uint32(0)).astype("<u4").view(np.uint8),
            x.view(f"<u{kind.size}")[places].view(np.uint8),
            np.array([_END], np.uint8),
        ]
        length = sum(map(len, parts))
        if len(self._body) < length:
            self._body = np.empty(2 * length, np.uint8)
        body = np.concatenate(parts, out=self._body[:length])
        header = _HEADER.pack(_CODED, kind.number, bits, len(values), exact, count, packed)
        return header + _compressed(body), out, errors


def _values(table: Bytes, changes: Changes) -> Any:
    """The mean of the changes of each code but 0, up to the last one that occurs."""
    codes = table[changes.buckets]
    sums, numbers = np.zeros((2, int(np.max(codes, initial=0)) + 1))
    sums[codes], numbers[codes] = changes.sums, changes.numbers
    with np.errstate(all="ignore"):
        values = sums[1:] / np.maximum(numbers[1:], 1)
    for code in np.flatnonzero(~np.isfinite(values)).tolist():  # the sum is too large for a double
        bucket = int(np.flatnonzero(table == code + 1)[0])
        values[code] = np.ldexp(-1.0 if bucket >= _SIGN else 1.0, bucket % _SIGN - 1023)
    return values


def _by_code(values: Any) -> Any:
    found = np.zeros(256, values.dtype)
    found[1 : len(values) + 1] = values
    return found


def plain(data: Bytes, size: int) -> bytes:
    """The bytes of data without loss. size: bytes of an element. They are at most 24 bytes more."""
    shuffled = Shuffle(elementsize=size).encode(data) if size > 1 else data
    made = _compressed(np.concatenate([np.frombuffer(shuffled, np.uint8), [np.uint8(_END)]]))
    if len(made) < len(data):
        return _HEADER.pack(_SHUFFLED, size, 0, 0, 0, len(data), 0) + bytes(made)
    return _HEADER.pack(_RAW, size, 0, 0, 0, len(data), 0) + data.tobytes()


def _compressed(body: Bytes) -> bytes:
    with memory_errors():
        return bytes(Zstd(level=_LEVEL).encode(body))


def decoded(stored: Any, before: Bytes | None, most: int = _MOST) -> Bytes:
    """The decoded array: `before`, or zeros, plus the difference. most: bytes. Raises ValueError for anything else than
    `Coder` and `plain` have made."""
    stored = np.frombuffer(stored, np.uint8)
    _require(len(stored) >= _HEADER.size, "it is too short")
    how, number, bits, values, exact, count, packed = _HEADER.unpack(stored[: _HEADER.size].tobytes())
    rest: Bytes = stored[_HEADER.size :]
    if how == _CODED:
        _require(packed <= count and exact <= count, "its header")
        return _decoded(rest, number, bits, values, exact, count, packed, before, most)
    _require(how in (_SHUFFLED, _RAW) and 1 <= number <= 8 and count <= most, "its header")
    if how == _RAW:
        _require(len(rest) == count, "its length")
        return np.array(rest)
    data = _body(rest, count)
    if number > 1:
        data = Shuffle(elementsize=number).decode(data, out=np.empty(count, np.uint8))
    return data


def _decoded(
    rest: Bytes,
    number: int,
    bits: int,
    values: int,
    exact: int,
    count: int,
    packed: int,
    before: Bytes | None,
    most: int,
) -> Bytes:
    kind = _KINDS.get(number)
    _require(kind is not None and 1 <= bits <= 8 and values < 1 << bits, "its header")
    assert kind is not None
    _require(count * kind.size <= most, "its size")
    _require(before is None or len(before) == count * kind.size, "its size is another one than before")
    lengths = [packed, values * np.dtype(kind.value).itemsize, 4 * exact, kind.size * exact]
    parts = np.split(_body(rest, sum(lengths)), np.cumsum(lengths)[:-1])
    codes = np.empty(count, np.uint8)
    unpacked = lib.pm_lcdelta_unpack(ffi.from_buffer(parts[0]), packed, bits, ffi.from_buffer(codes), count)
    _require(unpacked == count and int(np.max(codes, initial=0)) <= values, "its codes")
    out = np.zeros(count * kind.size, np.uint8) if before is None else before.copy()
    found = _by_code(np.frombuffer(parts[1].tobytes(), kind.value))
    lib.pm_lcdelta_add(kind.number, _pointer(out), ffi.from_buffer(codes), count, _pointer(found))
    places = np.cumsum(np.frombuffer(parts[2].tobytes(), "<u4"), dtype=np.uint64)
    _require(not exact or int(places.max()) < count, "its exact elements")
    out.view(f"<u{kind.size}")[places] = np.frombuffer(parts[3].tobytes(), f"<u{kind.size}")
    return out


def _body(stored: Bytes, count: int) -> Bytes:
    """`count` bytes that were compressed."""
    out = np.zeros(count + 1, np.uint8)
    try:
        with memory_errors():
            Zstd().decode(stored, out=out)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the lossy difference is damaged: {error}") from error
    _require(out[-1] == _END, "its length")
    return out[:-1]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the lossy difference is damaged: {what}")
