"""The forms that values and attributes have in other formats, and back.

Each value has a readable form, in JSON or as a scalar of the format. Where that does not tell the exact type, a hint
has the encoding of the value in a store, too. A hint counts only as long as the readable form agrees with it:
another program that changes the readable form changes the value.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pmstore._errors import CorruptStoreError, DecodeError
from pmstore._values.as_json import to_json
from pmstore._values.dtypes import descriptor_of, dtype_of
from pmstore._values.values import decode, encode

__all__ = ["ATTRIBUTES", "HINTS", "RESERVED", "VALUES", "Hints", "MaxShape", "exact", "in_json", "json_of"]

VALUES = "__values__"  # where the values are that are no arrays
ATTRIBUTES = "__attributes__"  # where attributes are, in formats that have none
HINTS = "__pmstore__"
MaxShape = tuple[int | None, ...] | None  # of an array that grows; None: of one that does not
RESERVED = {f"{name}{end}" for name in (VALUES, ATTRIBUTES, HINTS) for end in ("", ".json")} | {"__metadata__"}


def in_json(value: Any) -> str:
    """JSON's text of what `to_json` returned."""
    return json.dumps(value, allow_nan=False)


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text of a file. Raises ValueError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def exact(value: Any) -> bool:
    """Whether a value comes back from JSON as the same type."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(exact, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(exact, value.values()))
    return value is None or (kind in (bool, int, str) and to_json(value) is value)


class Hints(NamedTuple):
    """The information that the readable forms in a file lose.

    arrays: by name, the "order", whether it is "fixed", its "dtype", where these are not the file's, and its "maxshape"
    if it grows. values and attributes: encodings. lists: the names of persistent lists.
    """

    arrays: dict[str, dict[str, Any]]
    values: dict[str, str]
    lists: list[str]
    attributes: dict[str, dict[str, str]]

    @classmethod
    def of(
        cls,
        arrays: Iterable[tuple[str, np.dtype[Any], np.dtype[Any], str, bool, MaxShape]],
        values: Mapping[str, Any],
        lists: list[str],
        attributes: Mapping[str, Mapping[str, Any]],
        every: bool,
        other: Container[tuple[str, str]] = (),
    ) -> Hints:
        """arrays: name, dtype, the dtype that the file tells, order ("" if the file tells it), writeable, maxshape.
        every: also of values that JSON tells exactly. other: attributes that the file has in another form, by name and
        key."""
        about = {}
        for name, dtype, told, order, writeable, maxshape in arrays:
            known: dict[str, Any] = {}
            if order == "F":
                known["order"] = "F"
            if not writeable:
                known["fixed"] = True
            if maxshape is not None:
                known["maxshape"] = list(maxshape)
            with contextlib.suppress(TypeError, ValueError):
                if (descriptor := descriptor_of(dtype)) != descriptor_of(told):
                    known["dtype"] = descriptor
            if known:
                about[name] = known
        return cls(
            about,
            {name: _text(value) for name, value in values.items() if every or not exact(value)},
            lists,
            {
                name: found
                for name, some in attributes.items()
                if (
                    found := {
                        key: _text(value)
                        for key, value in some.items()
                        if every or (name, key) in other or not exact(value)
                    }
                )
            },
        )

    @classmethod
    def read(cls, found: Any) -> Hints:
        """The hints in the JSON of a file, which is not trusted: damaged ones are left out."""
        found = found if isinstance(found, dict) else {}
        arrays, values, lists, attributes = (found.get(name) for name in cls._fields)
        return cls(
            {key: one for key, one in _dict(arrays).items() if isinstance(one, dict)},
            {key: one for key, one in _dict(values).items() if isinstance(one, str)},
            [one for one in lists if isinstance(one, str)] if isinstance(lists, list) else [],
            {key: one for key, one in _dict(attributes).items() if isinstance(one, dict)},
        )

    def json(self) -> dict[str, Any]:
        """The hints in JSON, for the file; {} if there are none."""
        return {name: part for name, part in self._asdict().items() if part}

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The dtype that an array had in the store; None if it is the file's."""
        if "dtype" not in (known := self.arrays.get(name, {})):
            return None
        try:
            return dtype_of(known["dtype"])
        except CorruptStoreError:
            return None

    def value(self, name: str, found: Any) -> Any:
        """The value with this readable form."""
        return _restored(repr(name), self.values.get(name), found, found)

    def is_value(self, name: str, found: Any) -> bool:
        """Whether a scalar was a value, and no array without axes."""
        return _restored(repr(name), self.values.get(name), found, _NONE) is not _NONE

    def attribute(self, name: str, key: str, found: Any) -> Any:
        """The attribute with this readable form."""
        return _restored(f"{name!r}, attribute {key!r}", self.attributes.get(name, {}).get(key), found, found)


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return base64.b85encode(encode(value)).decode()


_NONE = object()


def _restored(what: str, hint: Any, found: Any, otherwise: Any) -> Any:
    """Values of registered types are `Parts`, so that their `decode` is not called. Raises DecodeError if this machine
    does not know a time zone, without which the forms can't be compared."""
    if isinstance(hint, str):
        try:
            encoded = base64.b85decode(hint)
            value = decode(encoded, raw=True)
            wanted = to_json(value)
            if (isinstance(found, str) and found == in_json(wanted)) or _same(to_json(found), wanted):
                return value
            decode(encoded)
        except DecodeError as error:
            raise DecodeError(f"{what}: {error}") from error
        except (ValueError, TypeError, RecursionError):  # CorruptStoreError is a ValueError
            pass
    return otherwise


def _same(a: Any, b: Any) -> bool:
    """Whether two are the same JSON: True is not 1 there."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)
