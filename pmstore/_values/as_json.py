"""Values in JSON's types, for the command line and for exports."""

from __future__ import annotations

import base64
import codecs
import datetime
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pmstore._values.registry import parts_of
from pmstore._values.types import small_of
from pmstore._values.values import PLAIN

__all__ = ["print_json", "to_json"]

_MOST_BITS = 14_000  # of 4,214 digits; int's text has 4,300 by default


def to_json(value: Any) -> Any:
    """A value in JSON's types.

    Arrays become nested lists, structured elements become objects, tuples and sets become lists (those of sets are
    sorted by their form in JSON). Bytes become ``{"bytes": base64}``, complex numbers ``{"complex": [real,
    imaginary]}``, and dicts with keys that aren't str ``{"items": [[key, value], …]}``. Dates, times and durations
    become ISO 8601 text (``"NaT"`` for a missing one; durations without a unit become numbers), and floats that aren't
    finite ``"nan"``, ``"inf"`` and ``"-inf"``. Decimal, Fraction, UUID and paths become text, slices and ranges
    ``{"slice": [start, stop, step]}``, and a random generator ``{"generator": its state}``. An int with so many digits
    that Python makes no text of it becomes ``{"int": hexadecimal text}``. Values of registered types, and `Parts`,
    become ``{"type": name, "parts": {…}}``.
    """
    if type(value) not in PLAIN and (found := parts_of(value)) is not None:
        return {"type": found[0], "parts": to_json(found[1])}
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return {"int": hex(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.ndarray):
        kind, size = value.dtype.kind, value.dtype.itemsize
        if kind in "biuU" or (kind == "f" and size <= 8 and np.isfinite(value).all()):
            return value.tolist()
        return [to_json(item) for item in value] if value.ndim else to_json(value[()])
    if isinstance(value, np.void) and value.dtype.names:
        return {name: to_json(value[name]) for name in value.dtype.names}
    if isinstance(value, np.datetime64):
        try:
            return str(value)
        except ValueError:
            return {"time without a unit": int(value.astype(np.int64))}
    if isinstance(value, np.timedelta64):
        return _duration(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, complex | np.complexfloating):
        return {"complex": [to_json(float(value.real)), to_json(float(value.imag))]}
    if isinstance(value, np.void):
        value = value.tobytes()
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, dict):
        if all(isinstance(key, str) and isinstance(to_json(key), str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return sorted(map(to_json, value), key=json.dumps)
    if isinstance(value, slice | range):
        return {type(value).__name__: [to_json(value.start), to_json(value.stop), to_json(value.step)]}
    if isinstance(value, datetime.timedelta):
        return _iso(value // datetime.timedelta(microseconds=1), "us")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, np.random.Generator):
        return {"generator": to_json(dict(value.bit_generator.state))}
    if small_of(type(value)) is not None:
        try:
            return str(value)
        except ValueError:  # a fraction of such ints
            return [to_json(value.numerator), to_json(value.denominator)]
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_LONG_UNITS = {"Y": "P{}Y", "M": "P{}M", "W": "P{}W", "D": "P{}D", "h": "PT{}H", "m": "PT{}M", "s": "PT{}S"}
_DIGITS = {"ms": 3, "us": 6, "ns": 9, "ps": 12, "fs": 15, "as": 18}  # decimal places of a second


def _duration(value: np.timedelta64) -> int | str:
    """A duration in ISO 8601, in its own unit, with a sign in front if it is negative."""
    if np.isnat(value):
        return "NaT"
    unit, step = np.datetime_data(value.dtype)
    count = int(value.astype(np.int64)) * step
    if unit == "generic":
        return count
    return _iso(count, unit)


def _iso(count: int, unit: str) -> str:
    sign, count = ("-" if count < 0 else ""), abs(count)
    if unit in _LONG_UNITS:
        return sign + _LONG_UNITS[unit].format(count)
    seconds, fraction = divmod(count, 10 ** _DIGITS[unit])
    text = f"{seconds}.{fraction:0{_DIGITS[unit]}}".rstrip("0").rstrip(".")
    return f"{sign}PT{text}S"


def print_json(value: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print a value for programs. default: gives something in place of what JSON lacks."""
    # The commands escape characters that stdout can't encode in Python's way, which isn't JSON's.
    unicode = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    json.dump(value, sys.stdout, indent=2, ensure_ascii=not unicode, allow_nan=False, default=default)
    print()
