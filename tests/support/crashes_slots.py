"""Workloads of arrays with two slots, to crash."""

from __future__ import annotations

import numpy as np

import pmstore


def double_buffered_length(store: pmstore.Store) -> int:
    """The length of the shortest float64 array, approximately, that commits write as a whole."""
    return 131_500 if store.media == "file" else 1000


def slots(store: pmstore.Store) -> None:
    """Arrays that change as a whole are written into one of two slots; small changes are logged into the current
    slot; rollbacks, deletions and new arrays come in between (I7, I8, I9).
    """
    n = double_buffered_length(store)
    x = store.create_array("x", n, "f8")
    y = store.create_array("y", n + 600, "f8")
    store.commit()
    for i in range(4):
        x += i + 1
        if i > 1:
            y -= 1
        store.commit()
    x[7] = -1
    store.commit()
    x += 1
    y += 1
    store.rollback()
    assert x[7] == -1 and x[8] == 10
    x[600:] *= 2
    store["epoch"] = 4
    store.commit()
    y += 1
    store.commit()
    x += 1
    y += 1
    store.commit()
    del store["y"]
    x += 1
    store.rollback()
    y[3] = 1
    store.commit()
    del y, store["y"]
    store.commit()
    store["z"] = np.full(n, 3.0)
    store["z2"] = np.full(n, 4.0)
    x += 1
    store.commit()
    for value in (5.0, 6.0, 7.0):
        store["z"][:] = value
        store.commit()
    del x, store["x"]
    store.commit()
    store["x"] = np.full(n + 300, 8.0)
    store.commit()
    for _ in range(3):
        store["x"][:] += 1
        store.commit()


def flips(store: pmstore.Store) -> None:
    """One array that changes as a whole, and nothing else. Its memory is given back while either slot is current."""
    x = store.create_array("x", double_buffered_length(store), "f8")
    store.commit()
    for i in range(5):
        x += 1
        store.commit()
        if i > 2:
            x[600 * i] = -1  # uncommitted when the memory is given back
            store.release()


def slots_again(store: pmstore.Store) -> None:
    """Another run with the arrays of `slots`: memory may lie over the second slot now."""
    z, x = store["z"], store["x"]
    z[5] += 1
    store.commit()
    z += 1
    x += 1
    store.rollback()
    for _ in range(3):
        z += 1
        x[9:] += 1
        store.commit()
    x[11] = 0
    store.release()
    store.commit()
    x += 1
    store.rollback()
    assert x[11] == 0
    del store["z"]
    store["w"] = np.full(len(z), 9.0)
    store.commit()
    assert z[5] != 9
    store["z"] = store.pop("w")
    store.commit()


def slots_shut(store: pmstore.Store) -> None:
    """Another run, which closes the store."""
    store["x"][:] -= 1
    store.commit()
    store["z"][:] -= 1
    store.close()


def cooled(store: pmstore.Store) -> None:
    """An array that no longer changes as a whole gives its second slot back, from either slot; others take the
    space."""
    x = store.create_array("x", double_buffered_length(store), "f8")
    store.commit()
    for odd in (0, 1):
        for _ in range(3 + odd):
            x += 1
            store.commit()
        for i in range(36):
            x[i] = -i
            store.commit()
        store[f"new{odd}"] = np.full(len(x), 2.0)
        x[9] = 5
        store.commit()
