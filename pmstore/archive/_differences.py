"""The differences between two versions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import ATTRIBUTES_PREFIX, NAME_PREFIX, name_of, owner_of_attributes
from pmstore._values.array import Layout, read_layout
from pmstore.archive._codecs import Bytes
from pmstore.archive._versions import Contents, Version

__all__ = ["Difference", "difference"]


class Difference(NamedTuple):
    """The difference of one name.

    Attributes
    ----------
    kind : str
        "added", "removed", "changed" (other elements, or another value), "replaced" (another shape, dtype or type) or
        "attributes": only the attributes of the name or group differ; the name "" stands for the store.
    elements : ndarray of int64, or None
        Of a changed array: where its elements differ, as indices into the flattened array in C order; None for anything
        else.
    """

    kind: str
    elements: Any = None


def difference(old: Version, new: Version) -> dict[str, Difference]:
    """See `Archive.diff`."""
    before, after = old._core._entries, new._core._entries
    found: dict[str, Difference] = {}
    for key in sorted({*before, *after}, reverse=True):  # names before attributes
        if key.startswith(ATTRIBUTES_PREFIX):
            one, other = before.get(key), after.get(key)
            if one is None or other is None or not _same_bytes(old, new, one, other):
                found.setdefault(owner_of_attributes(key), Difference("attributes"))
            continue
        if not key.startswith(NAME_PREFIX):
            continue
        name, one, other = name_of(key), before.get(key), after.get(key)
        if one is None or other is None:
            found[name] = Difference("added" if one is None else "removed")
        elif one.kind != other.kind or (one.kind == ARRAY and not _same_shape(old, new, key, one, other)):
            found[name] = Difference("replaced")
        elif one.kind == ARRAY:
            if (different := _array(old, new, key, one, other)) is not None:
                found[name] = different
        elif not _same(old, new, name, one, other):
            found[name] = Difference("changed")
    return dict(sorted(found.items()))


def _same_shape(old: Version, new: Version, key: bytes, one: Contents, other: Contents) -> bool:
    """Whether it is the same array, with other elements perhaps. Spare rows of one that grows make no difference."""
    if one.meta == other.meta:
        return True
    a, b = (_described(version, key) for version in (old, new))
    return (a.dtype, a.shape, a.order, a.writeable) == (b.dtype, b.shape, b.order, b.writeable)


def _described(version: Version, key: bytes) -> Layout:
    entry = version._core.get(key)
    assert entry is not None
    return read_layout(version._core, entry)


def _array(old: Version, new: Version, key: bytes, one: Contents, other: Contents) -> Difference | None:
    if one.frames == other.frames:
        return None
    described = _described(new, key)
    a, b = _bytes(old, one), _bytes(new, other)
    changed = np.flatnonzero(a[: described.nbytes] != b[: described.nbytes])
    if not len(changed):
        return None
    elements = np.unique(changed // max(1, described.dtype.itemsize))
    if described.order == "F":
        places = np.unravel_index(elements, described.shape, order="F")
        elements = np.sort(np.ravel_multi_index(places, described.shape))
    return Difference("changed", elements.astype(np.int64)) if len(elements) else None


def _same(old: Version, new: Version, name: str, one: Contents, other: Contents) -> bool:
    """Whether two values are equal: values that are not arrays, and lists, whose elements have entries of their own."""
    from pmstore._catalog.kinds import LIST, OBJECT

    if one.kind == OBJECT:
        return bool(_content(old, name) == _content(new, name))
    if one.kind == LIST:
        a, b = old[name], new[name]
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return _same_bytes(old, new, one, other)


def _same_bytes(old: Version, new: Version, one: Contents, other: Contents) -> bool:
    if one.meta != other.meta or one.length != other.length:
        return False
    if one.frames == other.frames:
        return True
    return bytes(_bytes(old, one)) == bytes(_bytes(new, other))


def _content(version: Version, name: str) -> Any:
    """The type of an object, and of each part the name, the entry and the contents."""
    from pmstore._catalog.names import key_of
    from pmstore._catalog.objects import head_of, rows

    entry = version._core.get(key_of(name))
    assert entry is not None
    found = [
        (part, row.entry._replace(offset=0), version._core._entries[row.key])
        for part, row in rows(version._catalog, entry)
    ]
    return head_of(entry).type_name, [(part, one, bytes(_bytes(version, item))) for part, one, item in found]


def _bytes(version: Version, item: Contents) -> Bytes:
    return version._core.bytes_of(item)


def _equal(a: Any, b: Any) -> bool:
    from pmstore._values.values import encode

    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and encode(a) == encode(b)
