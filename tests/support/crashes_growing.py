"""Workloads with arrays that grow, to crash. I36: what an entry counts was written before, in the same transaction.

The sequences of steps that could break it:

- Rows are written into spare rows, and a crash comes before the commit: they have no meaning (`rows`).
- A rollback takes rows back, and others are appended in their place (`rows`).
- An array of before a rollback, or of before it became shorter, is written to behind the last row. That is committed
  with the extent, and must not be in the rows that come later (`stale`).
- Rows that are gone are in the committed image, and the array becomes longer again: its new rows are zeros (`stale`).
- The rows move. The log still has changes of the old extent, whose space others take (I8), and the new extent is
  declared, or gone again before the commit (`moves`).
- Old rows have pending changes when they move (`moves`).
- A move is rolled back, and the old extent changes again (`moves`).
- The extent has two slots when rows are appended, and when they move (`slotted`).
- Another name takes the extent of an array that moved, in the same commit and in a later one (`moves`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import pmstore
from pmstore._catalog.names import key_of
from pmstore._values.array import address_of

__all__ = ["GROWING", "bounded", "moves", "rows", "slotted", "stale"]


def _row(i: int, width: int) -> Any:
    return np.arange(i * width, (i + 1) * width, dtype="f8")


def rows(store: pmstore.Store) -> None:
    """Rows one by one, also with rollbacks between, in a page and across pages."""
    store.create_array("narrow", 0, "i4", maxshape=(None,))
    store.create_array("wide", (0, 300), maxshape=(None, 300))
    store.commit()
    for i in range(12):
        store.append("narrow", range(i, i + 90))
        store.append("wide", _row(i, 300))
        if i % 3 == 1:
            store.rollback()
            store.append("wide", -_row(i, 300))
        store["i"] = i
        store.commit()


def stale(store: pmstore.Store) -> None:
    """Bytes in spare rows that are those of other rows."""
    long = store.create_array("x", data=np.ones((20, 200)), maxshape=(None, 200))
    store.commit()
    for i in range(6):
        store.resize("x", 4 + i)
        store.commit()
        long[10] = 7 + i  # no row of the array any more
        store["i"] = i
        store.commit()
        if i % 2:
            store.resize("x", 15)
            assert not store["x"][4 + i :].any()
        else:
            taken = store.append("x", np.full((3, 200), -2.0))
            store.rollback()
            taken[-1] = 9
        store.commit()
        assert not store["x"][4 + i :].any()


def moves(store: pmstore.Store) -> None:
    """Moves, and others that take the space; moves within one commit, and moves that are rolled back."""
    store.create_array("x", (3, 400), maxshape=(None, 400))
    store["other"] = np.ones(700)
    store.commit()
    for i in range(5):
        x = store["x"]
        x[::2] += 1 + i
        store.commit()  # in the log
        x[1::2] -= 1  # not committed before the move
        room = store._catalog.core.get(key_of("x")).length // 3200  # type: ignore[union-attr]
        store.append("x", np.full((room - len(x) + 1, 400), float(i)))
        assert store["x"].base is not x.base
        if i == 2:
            store.rollback()
            assert store["x"] is x
            x[0] = -1
            store.commit()
            continue
        if i == 3:
            store.resize("x", 60)
            store.resize("x", 8)
        store["new"] = np.full(600 + 100 * i, float(i))
        store.commit()
        store["other"] = np.full(len(store["x"]) * 300, float(-i))  # may take the place of the old rows
        store.pop("new")
        store.commit()
        store["x"][-1] += 0.5
        store.commit()


def slotted(store: pmstore.Store) -> None:
    """All of the array changes in each commit, so that it has two slots."""
    store.create_array("x", (2, 40_000), maxshape=(None, 40_000))
    store.resize("x", 3)
    for i in range(9):
        store["x"][:] += 1
        store.commit()
        if i in (3, 6):
            store.append("x", np.full(40_000, -1.0))
        elif i == 4:
            store.append("x", np.full((3, 40_000), -2.0))
            store.rollback()
        elif i == 5:
            store.resize("x", 3)
    store.commit()


def bounded(store: pmstore.Store) -> None:
    """All of the space is there from the beginning."""
    x = store.create_array("x", (0, 100), maxshape=(40, 100))
    address = address_of(x)
    store.commit()
    for i in range(10):
        x = store.append("x", np.full((4, 100), float(i)))
        x[0] += 1
        assert address_of(x) == address
        store.commit()


GROWING = [rows, stale, moves, slotted, bounded]
