"""Sizes and counts as users write them."""

from __future__ import annotations

import operator
import re
from typing import Any

__all__ = ["count_of", "size_of"]

_UNITS = {"": 1, "b": 1} | {
    prefix + unit: base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def size_of(size: int | str, what: str) -> int:
    """Bytes of a number or a text like "128MiB". Raises TypeError, ValueError, which name `what`."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{what} is a number of bytes or a text like '128MiB', not {size!r:.40}")
        size = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{what} is a number of bytes or a text like '128MiB', not {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{what} is at least 1 byte, not {size}")
    return size


def count_of(given: Any, what: str) -> int:
    """A number from 1. what: the beginning of an error's text, such as "every is a number of commits". Raises
    TypeError, ValueError."""
    try:
        count = operator.index(given)
    except TypeError:
        raise TypeError(f"{what}, not {given!r:.80}") from None
    if isinstance(given, bool) or count < 1:
        raise ValueError(f"{what}, at least 1, not {given!r}")
    return count
