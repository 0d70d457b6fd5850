"""Functions for derived arrays, which note their calls."""

from __future__ import annotations

import numpy as np

CALLS: list[str] = []


def doubled(x):
    CALLS.append("doubled")
    return x * 2.0


def columns(x, k=0, *, scale=1):
    CALLS.append("columns")
    return np.add.reduce(x, axis=0) * scale + k


def table(store, name="x"):
    store[name] = np.arange(12.0).reshape(3, 4)
    return store[name]
