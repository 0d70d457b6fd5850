"""Types of the standard library and of numpy that become lists of simpler values, and back.

`values.py` encodes such a list, with the type's code in front. The lists come from a file and are not trusted: `make`
checks them, and may raise any exception. The classes are those of this table, and no file can name another one.

====  =======================  ==================================================================================
code  type                     parts
====  =======================  ==================================================================================
6     set                      the elements
7     frozenset                the elements
8     collections.OrderedDict  key, value, key, value, …
9     datetime.date            year, month, day
10    datetime.time            hour, minute, second, microsecond, fold, zone
11    datetime.datetime        year, month, day, hour, minute, second, microsecond, fold, zone
12    datetime.timedelta       days, seconds, microseconds
13    decimal.Decimal          its text
14    fractions.Fraction       numerator, denominator
15    uuid.UUID                16 bytes, big-endian
16    pathlib paths            the name of the class, the path as text
17    slice                    start, stop, step
18    range                    start, stop, step
19    ndarray of StringDType   shape, order "C" or "F", coerce, [] or [missing], the elements; None: missing
20    numpy.random.Generator   see generators.py
====  =======================  ==================================================================================

The codes 1 to 5 and 21 are those of `values.py`: the next type has the code 22. Two types with one code are an error
when this module is imported.

A zone is None; [microseconds from UTC] or [microseconds from UTC, name] for datetime.timezone; or the key of a
zoneinfo.ZoneInfo, whose rules are those of the machine that reads it.
"""

from __future__ import annotations

import collections
import datetime
import math
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from pmstore._errors import CorruptStoreError, DecodeError
from pmstore._values.array import order_of
from pmstore._values.generators import generator_of, generator_parts

__all__ = ["BY_CODE", "CODES_OF_VALUES", "Small", "is_text", "small_of"]

_MICROSECOND = datetime.timedelta(microseconds=1)


class Small(NamedTuple):
    """How values of one type are kept.

    code: of the extension. parts: the list for a value; raises TypeError if it can't be kept. make: the value of a
    list. mutable: whether a value can be changed in place. holds: whether the parts may be any values. raw: used
    instead of `make` when a value is only looked at (`decode(raw=True)`): an unknown time zone, say, is no error then.
    """

    code: int
    parts: Callable[[Any], list[Any]]
    make: Callable[[list[Any]], Any]
    mutable: bool = False
    holds: bool = False
    raw: Callable[[list[Any]], Any] | None = None


def small_of(kind: type) -> Small | None:
    """How values of exactly this type are kept; None if that is not this module's business."""
    found = _BY_NAME.get(kind.__name__)
    if found is None:
        return None
    module, small = found
    return small if getattr(sys.modules.get(module), kind.__name__, None) is kind else None


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether it is numpy's StringDType, whose elements are not in the array's own memory."""
    return dtype.kind == "T"


def _ints(parts: Iterable[Any]) -> None:
    if not all(type(part) is int for part in parts):
        raise CorruptStoreError("a damaged value: numbers that are no int")


# ---- containers


def _set_of(kind: type) -> Callable[[list[Any]], Any]:
    def make(parts: list[Any]) -> Any:
        made = kind(parts)
        if len(made) != len(parts):
            raise CorruptStoreError("a damaged value: a set has an element twice")
        return made

    return make


def _pairs(value: Any) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _ordered(parts: list[Any]) -> Any:
    made = collections.OrderedDict(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(made) != len(parts):
        raise CorruptStoreError("a damaged value: an OrderedDict has a key twice")
    return made


def _bounds(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _range(parts: list[Any]) -> Any:
    _ints(parts)
    start, stop, step = parts
    return range(start, stop, step)


def _slice(parts: list[Any]) -> Any:
    start, stop, step = parts
    return slice(start, stop, step)


# ---- dates and times


def _zone(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [offset // _MICROSECOND, *name]
    found = sys.modules.get("zoneinfo")
    if found is not None and type(zone) is found.ZoneInfo and zone.key is not None:
        return zone.key
    if type(zone) is _Unknown:
        return zone.key
    kind = type(zone)
    raise TypeError(
        f"a store can't keep the time zone {zone!r:.80}, a {kind.__module__}.{kind.__qualname__}: use a "
        "zoneinfo.ZoneInfo with a key, or a datetime.timezone, as in value.astimezone(datetime.timezone.utc)"
    )


def _zone_of(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is str:
        import zoneinfo

        try:
            return zoneinfo.ZoneInfo(zone)
        except (LookupError, OSError) as error:
            raise DecodeError(
                f"the time zone {zone!r:.80} is unknown to this machine: install the package tzdata, or the system's"
            ) from error
    offset, *name = zone
    _ints([offset])
    return datetime.timezone(offset * _MICROSECOND, *name)


class _Unknown(datetime.tzinfo):
    """A zone that this machine does not know. A time in it compares as one without a zone."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"zoneinfo.ZoneInfo(key={self.key!r})"

    def utcoffset(self, _: datetime.datetime | None) -> None:
        return None

    dst = tzname = utcoffset


def _zone_if_known(zone: Any) -> Any:
    try:
        return _zone_of(zone)
    except DecodeError:
        return _Unknown(zone)


def _date(parts: list[Any]) -> Any:
    _ints(parts)
    return datetime.date(*parts)


def _date_parts(value: Any) -> list[Any]:
    return [value.year, value.month, value.day]


def _time_parts(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _zone(value.tzinfo)]


def _timed(kind: Any, count: int, zone_of: Callable[[Any], Any] = _zone_of) -> Callable[[list[Any]], Any]:
    def make(parts: list[Any]) -> Any:
        *numbers, fold, zone = parts
        _ints([*numbers, fold])
        if len(numbers) != count:
            raise CorruptStoreError("a damaged value: a time breaks the format")
        return kind(*numbers, tzinfo=zone_of(zone), fold=fold)

    return make


def _timedelta(parts: list[Any]) -> Any:
    _ints(parts)
    days, seconds, microseconds = parts
    return datetime.timedelta(days, seconds, microseconds)


# ---- numbers, identifiers, paths


def _decimal(parts: list[Any]) -> Any:
    import decimal

    (text,) = parts
    made = decimal.Decimal(text)
    if type(text) is not str or str(made).lower() != text.lower():  # the context chooses between 1E+5 and 1e+5
        raise CorruptStoreError("a damaged value: a decimal number breaks the format")
    return made


def _fraction(parts: list[Any]) -> Any:
    import fractions

    _ints(parts)
    numerator, denominator = parts
    made = fractions.Fraction(numerator, denominator)
    if made.denominator != denominator:
        raise CorruptStoreError("a damaged value: a fraction is not in lowest terms")
    return made


def _uuid(parts: list[Any]) -> Any:
    import uuid

    (contents,) = parts
    return uuid.UUID(bytes=contents)


_PATHS: dict[str, Any] = {
    kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}


def _path(parts: list[Any]) -> Any:
    name, text = parts
    if type(text) is not str:
        raise CorruptStoreError("a damaged value: a path breaks the format")
    return _PATHS[name](text)


# ---- numpy


def text_parts(value: Any) -> list[Any]:
    """The parts of an array whose dtype is a StringDType."""
    order = order_of(value)
    dtype = value.dtype
    missing = [dtype.na_object] if hasattr(dtype, "na_object") else []
    if missing and missing[0] is not None and type(missing[0]) not in (float, str):
        raise TypeError(
            f"a store can't keep a StringDType whose missing value is {missing[0]!r:.80}: use None or float('nan'), as "
            "in array.astype(np.dtypes.StringDType(na_object=None))"
        )
    elements = value.ravel().tolist()
    if missing and type(missing[0]) is not str:
        elements = [None if element is missing[0] else element for element in elements]
    return [list(value.shape), order, bool(dtype.coerce), missing, elements]


def _text_array(parts: list[Any]) -> Any:
    shape, order, coerce, missing, elements = parts
    _ints(shape)
    absent = [None] if missing and type(missing[0]) is not str else []
    if (
        order not in ("C", "F")
        or type(coerce) is not bool
        or type(missing) is not list
        or len(missing) > 1
        or not all(one is None or type(one) in (float, str) for one in missing)
        or type(elements) is not list
        or not all(type(one) is str or one in absent for one in elements)
        or not all(n >= 0 for n in shape)
        or math.prod(shape) != len(elements)
    ):
        raise CorruptStoreError("a damaged value: an array of text breaks the format")
    dtype: Any = np.dtypes.StringDType(coerce=coerce, **({"na_object": missing[0]} if missing else {}))
    array: Any = np.empty(len(elements), dtype)
    array[:] = [missing[0] if one is None else one for one in elements] if elements else []
    return np.array(array.reshape(shape), order=order)


TEXT = Small(19, text_parts, _text_array, mutable=True)
"""Arrays of numpy's StringDType."""

_PATH = Small(16, lambda value: [type(value).__name__, str(value)], _path)

_TIME = Small(10, _time_parts, _timed(datetime.time, 4), raw=_timed(datetime.time, 4, _zone_if_known))
_DATETIME = Small(
    11,
    lambda value: _date_parts(value) + _time_parts(value),
    _timed(datetime.datetime, 7),
    raw=_timed(datetime.datetime, 7, _zone_if_known),
)

_BY_NAME: dict[str, tuple[str, Small]] = {
    "set": ("builtins", Small(6, list, _set_of(set), mutable=True, holds=True)),
    "frozenset": ("builtins", Small(7, list, _set_of(frozenset), holds=True)),
    "OrderedDict": ("collections", Small(8, _pairs, _ordered, mutable=True, holds=True)),
    "date": ("datetime", Small(9, _date_parts, _date)),
    "time": ("datetime", _TIME),
    "datetime": ("datetime", _DATETIME),
    "timedelta": ("datetime", Small(12, lambda value: [value.days, value.seconds, value.microseconds], _timedelta)),
    "Decimal": ("decimal", Small(13, lambda value: [str(value)], _decimal)),
    "Fraction": ("fractions", Small(14, lambda value: [int(value.numerator), int(value.denominator)], _fraction)),
    "UUID": ("uuid", Small(15, lambda value: [value.bytes], _uuid)),
    **dict.fromkeys(_PATHS, ("pathlib", _PATH)),
    "slice": ("builtins", Small(17, _bounds, _slice, holds=True)),
    "range": ("builtins", Small(18, _bounds, _range)),
    "Generator": ("numpy.random", Small(20, generator_parts, generator_of, mutable=True)),
}

CODES_OF_VALUES = {1, 2, 3, 4, 5, 21}
"""The codes of the extensions that `values.py` encodes itself."""

BY_CODE: dict[int, Small] = {}
"""The types by the codes of their extensions."""

for _small in (TEXT, *(small for _, small in _BY_NAME.values())):
    if _small.code in CODES_OF_VALUES or BY_CODE.setdefault(_small.code, _small) is not _small:
        raise AssertionError(f"the code {_small.code} has a type already")  # stored values of it would be misread
