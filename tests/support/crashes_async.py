"""Workloads of commits that are durable later, to crash."""

from __future__ import annotations

from typing import Any

import numpy as np

import pmstore

ASYNC: dict[str, Any] = {"durability": "async"}


def lazily(store: pmstore.Store) -> None:
    """Changes between syncs: contents that went directly to their place are changed there, deleted, and taken back by
    rollbacks. Space is freed that the durable state uses, or does not use (I7, I13, I14).
    """
    n = 3000
    kept = store.create_array("kept", n, "f8")
    store["small"] = np.arange(50.0)
    store.commit()
    store.sync()
    for i in range(5):
        store["new"] = np.full(n, float(i))
        store.commit()
        new = store["new"]
        new[::700] = -i
        kept[i] = i
        store.commit()
        new[1] = 5
        kept[:] = -1
        store["small"][3] = -1
        store.rollback()
        assert new[1] == i and new[700] == -i and (kept[: i + 1] == range(i + 1)).all() and store["small"][3] == 3
        store["new"][7] = 7
        store["small"] += 0
        store.release()
        assert new[7] == 7 and kept[i] == i
        store.commit()
        store.release()
        assert new[7] == 7 and new[700] == -i and kept[i] == i
        del new, store["new"]
        store.commit()
        store["other"] = np.full(n, 100.0 + i)
        store["text"] = "x" * (1000 * i)
        store.commit()
        if i == 2:
            store.sync()
        del store["other"]
        store.commit()
        assert store.check().ok


def freed_late(store: pmstore.Store) -> None:
    """Values of the durable state are deleted, and new arrays need their space before the deletion is durable."""
    for i in range(4):
        store[f"old{i}"] = np.full(2000, 1.0 + i)
    store.commit()
    store.sync()
    for i in range(4):
        del store[f"old{i}"]
        store.commit()
        store[f"new{i}"] = np.full(2000, 10.0 + i)
        store.commit()
    store.sync()
    for i in range(3):
        store[f"new{i}"] = np.full(2500, 20.0 + i)
        store.commit()
        store[f"new{i}"][i] = 0
        store.commit()


def flipped_late(store: pmstore.Store) -> None:
    """Whole commits of an array with two slots, in sequence, mixed with small changes."""
    x = store.create_array("x", 131_500, "f8")
    store.commit()
    for i in range(6):
        x += 1
        store.commit()
        if 1 < i < 4:
            store.release()  # over the slot of the last durable state, if there was no time for a sync (I7)
        if i > 3:
            x[i] = -i
            store.commit()
            x[i + 1] = -1
            store.rollback()
            assert x[i] == -i and x[i + 1] == i + 1
            store.release()


WORKLOADS = [lazily, freed_late, flipped_late]
