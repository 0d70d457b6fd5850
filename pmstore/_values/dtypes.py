"""numpy dtypes as plain values (str, int, list, dict) that msgpack can hold, and back, checked.

``dtype.str`` describes a plain dtype completely, except long long, which numpy calls ``<i8`` too. Structured dtypes
become a dict: numpy's own ``dtype.descr`` can't describe overlapping or reordered fields, which selecting columns
creates.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from pmstore._errors import MALFORMED, CorruptStoreError

__all__ = ["descriptor_of", "dtype_of", "require_lengths", "storable_dtype", "value_bytes"]

_DEPTH = 32  # of structured dtypes in structured dtypes
_PLAIN = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>][qQ]|[<>]f(?:2|4|8|12|16)|[<>]c(?:8|16|24|32)"
    r"|[|][SV][0-9]{1,10}|[<>]U[0-9]{1,10}"
    r"|[<>][mM]8(?:\[[0-9]{0,10}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_LONG_LONG = {"q": "q", "Q": "Q"} if np.dtype("q").char != np.dtype("i8").char else {}


def storable_dtype(dtype: Any) -> np.dtype[Any]:
    """np.dtype(dtype). Raises TypeError if its elements aren't plain bytes."""
    made: np.dtype[Any] = np.dtype(dtype)
    if made.hasobject:
        raise TypeError(
            f"dtype {made} holds references to Python objects, which a store can't keep: use a numeric dtype, "
            "a fixed-width string dtype such as 'U20', a list, or np.dtypes.StringDType() for a whole value"
        )
    descriptor_of(made)
    return made


def require_lengths(dtype: np.dtype[Any]) -> None:
    """Raises TypeError if elements, or fields of them, are text or bytes of length 0, which could hold no content."""
    dtype = dtype.base
    if dtype.names is not None:
        for name in dtype.names:
            require_lengths(dtype[name])
    elif not dtype.itemsize:
        raise TypeError(f"elements of the dtype {dtype.char!r} would have no bytes: give a length, as '{dtype.char}20'")


def descriptor_of(dtype: np.dtype[Any], depth: int = 0) -> Any:
    """The descriptor that `dtype_of` turns back into the dtype. Raises TypeError or ValueError if the format can't
    describe it."""
    if depth > _DEPTH:
        raise ValueError(f"a dtype is nested more than {_DEPTH} levels deep")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": descriptor_of(base, depth + 1), "shape": list(shape)}
    if dtype.names is None:
        text = dtype.str[0] + _LONG_LONG[dtype.char] if dtype.char in _LONG_LONG else dtype.str
        if dtype.hasobject or not _PLAIN.fullmatch(text) or dtype.isbuiltin == 2:
            raise TypeError(f"a store can't keep the dtype {dtype!r}: only the numeric and fixed-width ones of numpy")
        return text
    fields = []
    for name in dtype.names:
        assert dtype.fields is not None
        field, offset, *title = dtype.fields[name]
        if not all(isinstance(text, str) for text in (name, *title)):
            raise TypeError(f"the title of the field {name!r} is not a str, which a store can't keep")
        fields.append([name, descriptor_of(field, depth + 1), offset, *title])
    described: dict[str, Any] = {"fields": fields, "size": dtype.itemsize}
    if dtype.isalignedstruct:
        described["align"] = True
    if dtype.type is np.record:
        described["record"] = True
    elif dtype.type is not np.void:
        raise TypeError(f"a store can't keep the dtype {dtype!r}: its scalars are of the type {dtype.type.__name__}")
    return described


def dtype_of(descriptor: Any) -> np.dtype[Any]:
    """The dtype of a descriptor, which is not trusted. Raises CorruptStoreError if it describes none."""
    try:
        return _dtype(descriptor, 0)
    except CorruptStoreError:
        raise
    except MALFORMED as error:
        raise CorruptStoreError(f"a damaged dtype: {error}") from error


def _dtype(descriptor: Any, depth: int) -> np.dtype[Any]:
    if depth > _DEPTH:
        raise CorruptStoreError(f"a damaged dtype: nested more than {_DEPTH} levels deep")
    if type(descriptor) is str:
        if not _PLAIN.fullmatch(descriptor):
            raise CorruptStoreError(f"a damaged dtype: {descriptor!r:.80}")
        return np.dtype(descriptor)
    if "base" in descriptor:
        shape = tuple(descriptor["shape"])
        return np.dtype((_dtype(descriptor["base"], depth + 1), shape))
    fields: dict[str, Any] = {"names": [], "formats": [], "offsets": [], "itemsize": descriptor["size"]}
    titles = []
    for name, field, offset, *title in descriptor["fields"]:
        if type(name) is not str or type(offset) is not int or len(title) > 1:
            raise CorruptStoreError("a damaged dtype: a field breaks the format")
        fields["names"].append(name)
        fields["formats"].append(_dtype(field, depth + 1))
        fields["offsets"].append(offset)
        titles.append(title[0] if title else None)
    if any(title is not None for title in titles):
        if not all(title is None or type(title) is str for title in titles):
            raise CorruptStoreError("a damaged dtype: a title is not a str")
        fields["titles"] = titles
    make: Any = np.dtype
    dtype: np.dtype[Any] = make(fields, align=bool(descriptor.get("align", False)))
    return np.dtype((np.record, dtype)) if descriptor.get("record", False) else dtype


def value_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous array of one axis, as uint8, with zeros in the padding of its elements.

    Padding has what the memory had before, so that equal elements may differ there: the gaps of structures, and the
    last 6 of the 16 bytes of x86's long double.
    """
    counts = _counting_bytes(array.dtype)
    given = array.view(np.uint8)
    return given if counts is None else (given.reshape(-1, len(counts)) & counts).reshape(-1)


@functools.lru_cache(maxsize=256)
def _counting_bytes(dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """255 for each byte of an element that is part of its value, 0 for the others; None if all of them are."""
    counts = _mask(dtype)
    return None if counts.all() else counts


def _mask(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(_mask(base), int(np.prod(shape)))
    if dtype.fields is not None:
        counts = np.zeros(dtype.itemsize, np.uint8)
        for one, offset, *_ in dtype.fields.values():
            counts[offset : offset + one.itemsize] |= _mask(one)
        return counts
    if dtype.kind == "c":
        part = _mask(np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}"))
        return np.tile(part, 2)
    counts = np.full(dtype.itemsize, 255, np.uint8)
    if dtype.char == "g" and np.finfo(np.longdouble).nmant == 63:  # the format of x87
        counts[10:] = 0
        return counts if dtype.isnative else counts[::-1].copy()
    return counts
