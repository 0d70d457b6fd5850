"""The places of contents in the store."""

from __future__ import annotations

import pmstore
from pmstore._catalog.names import key_of
from pmstore._core import Entry

__all__ = ["entry_of", "offset_of"]


def entry_of(store: pmstore.Store, name: str) -> Entry:
    """What the catalog has under a name."""
    entry = store._catalog.core.get(key_of(name))
    assert entry is not None, f"nothing is stored under {name!r}"
    return entry


def offset_of(store: pmstore.Store, name: str) -> int:
    """The region offset, in bytes, of what is stored under a name."""
    return entry_of(store, name).offset
