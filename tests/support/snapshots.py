"""The contents of a store, as a value that can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np

import pmstore

Snapshot = dict[str, Any]


def snapshot(store: pmstore.Store) -> Snapshot:
    """All values of the store, comparable with ==."""
    out: Snapshot = {}
    for name, value in store.items():
        if isinstance(value, np.ndarray):
            out[name] = (value.dtype.str, value.shape, value.flags.f_contiguous, value.tobytes())
        elif isinstance(value, pmstore.PersistentList):
            out[name] = ("list", list(value))
        else:
            out[name] = value
    return out


def difference(found: Snapshot, expected: Snapshot) -> str:
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    return f"names {sorted(names)[:5]} differ"
