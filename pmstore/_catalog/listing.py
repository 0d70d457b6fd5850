"""The rows of a listing of names, as `pmstore ls` and the display of a store show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pmstore._catalog import objects
from pmstore._catalog.declaration import Declaration
from pmstore._catalog.kinds import ARRAY, BLOB, DERIVED, LIST, OBJECT
from pmstore._catalog.names import NAME_PREFIX, name_of, value_key
from pmstore._core import Entry
from pmstore._display import value_text
from pmstore._errors import UNSOUND, StoreIOError
from pmstore._values.array import read_layout
from pmstore._values.values import decode, type_name

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog
    from pmstore._display import Row

__all__ = ["about", "rows"]


def rows(catalog: Catalog, prefix: str = "") -> Iterator[Row]:
    """The names of `Catalog.names`, with kind, shape, dtype, bytes, type and text, without reading contents."""
    for row in catalog.core.scan(NAME_PREFIX + prefix.encode()):
        name = name_of(row.key)[len(prefix) :]
        try:
            with catalog.lock:
                entry = catalog.core.get(row.key)  # what belongs to the row's own may be gone by now
                if entry is None:
                    continue
                found = about(catalog, row.key, entry)
        except UNSOUND as error:
            why = "unreadable" if isinstance(error, StoreIOError) else "damaged"
            found = "value", None, None, row.entry.length or len(row.entry.meta), why, ""
        yield name, *found


def about(catalog: Catalog, key: bytes, entry: Entry) -> tuple[str, tuple[int, ...] | None, Any, int, str, str]:
    """A row without its name. Raises the errors of a damaged entry."""
    if entry.kind == ARRAY:
        found = read_layout(catalog.core, entry)
        text = "" if found.growth is None else f"of {found.maxshape}"
        return "array", found.shape, found.dtype, found.nbytes, "numpy.ndarray", text
    if entry.kind == LIST:
        length = catalog.list_length(catalog.list_id(entry))
        return "list", (length,), None, 0, f"list of {length:,}", ""
    if entry.kind == OBJECT:
        return "object", None, None, *objects.about(catalog, entry)
    if entry.kind == DERIVED:
        text = str(Declaration.decode(catalog.encoded(entry)))
        stored = catalog.core.get(value_key(key))
        if stored is None:
            return "derived", None, None, 0, f"{text}, not stored", ""
        found = read_layout(catalog.core, stored)
        return "derived", found.shape, found.dtype, found.nbytes, f"{text}, stored", ""
    if entry.kind == BLOB:
        return "value", None, None, entry.length, entry.meta.decode("utf-8", "replace"), ""
    value = decode(catalog.encoded(entry), raw=True)
    return "value", None, None, len(entry.meta), type_name(value), value_text(value)
