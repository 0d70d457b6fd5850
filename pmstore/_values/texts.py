"""Columns of text as two arrays: the UTF-8 of all texts, one behind the other, and where each ends.

Arrow has the same form. With pyarrow, which is used only if the program has imported it, such a column is read without
a copy.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["PartDict", "arrow_of", "arrow_parts", "in_one", "list_of", "list_parts", "validity"]

PartDict = dict[str, Any]


def list_parts(texts: Sequence[str | None], name: str, parts: PartDict) -> None:
    """Adds the parts of a list of texts, where None is missing: name, .ends, and .missing if there are such."""
    missing, found = None, texts
    if any(map(operator.is_, texts, itertools.repeat(None))):
        missing = np.fromiter(map(operator.is_, texts, itertools.repeat(None)), bool, len(texts))
        found = ["" if text is None else text for text in texts]
    data = "".join(found).encode("utf-8", "surrogatepass")  # type: ignore[arg-type]
    ends = np.zeros(len(found) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, found), np.int64, len(found)), out=ends[1:])  # type: ignore[arg-type]
    if ends[-1] != len(data):  # not all of it is ASCII
        lengths = (len(text.encode("utf-8", "surrogatepass")) for text in found)  # type: ignore[union-attr]
        np.cumsum(np.fromiter(lengths, np.int64, len(found)), out=ends[1:])
    _add(np.frombuffer(data, np.uint8), ends, missing, name, parts)


def arrow_parts(array: Any, name: str, parts: PartDict) -> None:
    """The same for an array of strings of pyarrow. Raises ValueError if they are no texts: none could be read again."""
    encoded = array.cast(sys.modules["pyarrow"].large_binary())
    encoded.validate(full=True)
    whole = in_one(encoded)
    _, offsets, data = whole.buffers()
    ends = np.zeros(1, np.int64)
    if offsets is not None and len(whole):
        ends = np.frombuffer(offsets, np.int64, len(whole) + 1, whole.offset * 8)  # it may be padded
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    content = content[ends[0] : ends[-1]]
    if not _is_ascii(content):
        array.validate(full=True)
    missing = np.asarray(whole.is_null()) if whole.null_count else None
    _add(content, ends - ends[0] if ends[0] else ends, missing, name, parts)


def in_one(array: Any) -> Any:
    """An array of pyarrow that has no chunks, with the same elements."""
    arrow = sys.modules["pyarrow"]
    if not isinstance(array, arrow.ChunkedArray):
        return array
    if array.num_chunks == 1:  # concat_arrays would copy it
        return array.chunk(0)
    return arrow.concat_arrays(array.chunks) if array.num_chunks else arrow.array([], array.type)


def validity(missing: Any) -> Any:
    """Arrow's bitmap of the elements that are there, or None if none is missing."""
    if missing is None:
        return None
    return sys.modules["pyarrow"].py_buffer(np.packbits(~missing, bitorder="little").tobytes())


def _add(data: Any, ends: Any, missing: Any, name: str, parts: PartDict) -> None:
    parts[name], parts[f"{name}.ends"] = data, ends
    if missing is not None:
        parts[f"{name}.missing"] = missing


def _is_ascii(data: Any) -> bool:
    """Whether bytes are ASCII, which is always UTF-8. Arrow's check of UTF-8 takes ten times as long as this one."""
    return not len(data) or bool(data.max() < 128)


def _checked(name: str, parts: PartDict) -> tuple[Any, Any, Any]:
    data, ends, missing = parts[name], parts[f"{name}.ends"], parts.get(f"{name}.missing")
    if (
        not all(type(array) is np.ndarray and array.ndim == 1 for array in (data, ends))
        or (data.dtype, ends.dtype) != (np.uint8, np.int64)
        or not len(ends)
        or ends[0] != 0
        or ends[-1] != len(data)
        or (ends[1:] < ends[:-1]).any()
        or (missing is not None and (missing.dtype != bool or missing.shape != (len(ends) - 1,)))
    ):
        raise ValueError("texts break the format")
    return data, ends, missing


def list_of(name: str, parts: PartDict) -> list[Any]:
    """The texts of `list_parts`. Raises ValueError if they are damaged."""
    data, ends, missing = _checked(name, parts)
    contents, bounds = data.tobytes(), ends.tolist()
    if contents.isascii():
        text = contents.decode("ascii")
        found: list[Any] = [text[start:end] for start, end in itertools.pairwise(bounds)]
    else:
        found = [contents[start:end].decode("utf-8", "surrogatepass") for start, end in itertools.pairwise(bounds)]
    if missing is not None:
        for i in np.flatnonzero(missing):
            found[i] = None
    return found


def arrow_of(name: str, parts: PartDict) -> Any:
    """An array of strings of pyarrow over the parts. Raises ValueError if they are damaged."""
    arrow = sys.modules["pyarrow"]
    data, ends, missing = _checked(name, parts)
    buffers = arrow.py_buffer(ends), arrow.py_buffer(data), validity(missing)
    made = arrow.LargeStringArray.from_buffers(len(ends) - 1, *buffers)
    if not _is_ascii(data):
        made.validate(full=True)
    return made
