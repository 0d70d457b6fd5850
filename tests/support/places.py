"""The places of contents, in the store and in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import pmstore
from pmstore._catalog.names import key_of
from pmstore._core import Entry

__all__ = ["address_of", "entry_of", "offset_of"]


def entry_of(store: pmstore.Store, name: str) -> Entry:
    """What the catalog has under a name."""
    entry = store._catalog.core.get(key_of(name))
    assert entry is not None, f"nothing is stored under {name!r}"
    return entry


def offset_of(store: pmstore.Store, name: str) -> int:
    """The region offset, in bytes, of what is stored under a name."""
    return entry_of(store, name).offset


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of its first element."""
    return int(array.__array_interface__["data"][0])
