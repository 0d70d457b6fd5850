"""Text of any length, which other formats have as elements of arrays, as an array of numpy's text of a fixed length."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pmstore._errors import TooLargeError
from pmstore._interchange.found import Stored, Unsupported, damage

__all__ = ["as_text"]

_TEXTS = 1 << 27  # elements, at most: a file may claim many that take no bytes in it
_MANY = 1 << 28  # bytes from which on the longest text must not make the others long


def as_text(path: str | os.PathLike[str], name: str, shape: Any, read: Callable[[], Any]) -> Stored:
    """The text is read at once, because its longest element determines the dtype. Raises TypeError if it is no text."""
    with damage(path, name):
        if math.prod(shape) > _TEXTS:
            raise TooLargeError(f"{name!r} has {math.prod(shape):,} texts, which have to be read at once")
        found = np.asarray(read(), object)
        texts = found.ravel().tolist()
        if not all(isinstance(text, str) for text in texts):
            raise Unsupported(f"{name!r} holds Python objects or values of any length, which a store can't keep")
        longest = max(map(len, texts), default=1) or 1
        if 4 * longest * len(texts) > max(_MANY, 64 * sum(map(len, texts))):
            raise TooLargeError(
                f"{name!r} has a text of {longest:,} characters, and all {len(texts):,} would get as many"
            )
        array = np.array(texts, f"U{longest}").reshape(tuple(shape))
        if array.tolist() != found.reshape(tuple(shape)).tolist():
            raise Unsupported(f"{name!r} has text with NUL characters at its end, which numpy's text lacks")

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        yield np.ascontiguousarray(array)

    return Stored(name, array.shape, array.dtype, "C", pieces if math.prod(array.shape) else lambda: iter(()))
