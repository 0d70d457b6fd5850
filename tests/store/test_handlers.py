"""Signal handlers that commit, roll back, or save and exit, in the middle of a change in several steps: all of it is
committed, or nothing (I37, I38)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import pmstore
from tests.store.test_interrupts import signal_at

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


def begin(store: Any) -> None:
    store.clear()
    store["matrix"] = sparse.csr_matrix(np.eye(3))
    store["old"] = np.arange(600.0)
    store["group/list"] = [1]
    store.create_list("group/persistent").extend(["a", "z" * 3000])
    store["group/matrix"] = sparse.csr_matrix(np.eye(2))
    store.attrs("old")["unit"] = "m"
    store.attrs("group/list")["unit"] = "s"
    rows = store.create_array("rows", (3,), "i8", maxshape=(None,), fill_value=1)
    assert rows.tolist() == [1, 1, 1]


CHANGES: dict[str, Callable[[Any], object]] = {
    "object": lambda store: store.__setitem__("matrix", 2 * store["matrix"]),
    "same arrays": lambda store: store.__setitem__("matrix", store["matrix"].T),
    "array": lambda store: store.__setitem__("new", np.arange(900.0)),
    "replaced": lambda store: store.__setitem__("old", np.arange(900.0)),
    "long value": lambda store: store.__setitem__("new", "y" * 5000),
    "append": lambda store: store.append("rows", [9, 9]),
    "move": lambda store: store.append("rows", [9] * 20_000),
    "shrink": lambda store: store.resize("rows", 1),
    "copy": lambda store: store.copy("group", "other"),
    "rename": lambda store: store.rename("group", "other"),
    "delete": lambda store: store.__delitem__("old"),
}


def state(store: Any) -> dict[str, Any]:
    """What a store has, but for what the handlers save."""
    found: dict[str, Any] = {}
    for name in store:
        value = store[name]
        value = value.toarray() if sparse.issparse(value) else value
        text = value if isinstance(value, str) else repr([np.shape(value), *np.ravel(value)[:700]])
        if name != "saved":
            found[name] = (type(store[name]).__name__, text, dict(store.attrs(name)))
    return found


def save(store: Any) -> None:
    store["saved"] = sparse.csr_matrix(np.ones((2, 2)))
    store.commit()


def save_and_exit(store: Any) -> None:
    save(store)
    raise SystemExit


def roll_back(store: Any) -> None:
    store.rollback()


@pytest.mark.parametrize("handler", [save, save_and_exit, roll_back])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_whole_whatever_a_handler_does(
    open_store: Any, change: str, handler: Callable[[Any], None]
) -> None:
    store, called = open_store(), 0

    def handle(number: int, frame: object) -> None:
        nonlocal called, committed
        called += 1
        handler(store)
        with pmstore.open(store.path, "r") as reader:
            assert reader.check().ok, reader.check()
            committed = state(reader)

    begin(store)
    store.commit()
    before = state(store)
    CHANGES[change](store)
    after = state(store)
    number, there = 1, [0]
    while there:
        begin(store)
        store.commit()
        committed = before
        expected = SystemExit if handler is save_and_exit else ()
        with signal_at(number, handle) as there, contextlib.suppress(expected):
            CHANGES[change](store)
        assert state(store) in (before, after) and committed in (before, after), number
        assert store.check().ok, store.check()
        number += 13
    assert called > 3
