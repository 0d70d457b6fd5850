"""Signal handlers that commit, roll back, change the same names, or save and exit, in the middle of a change: they run
before or after it (I37, I38, I41)."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import pmstore
from tests.conftest import LONGER
from tests.store.test_interrupts import signal_at

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)
EYE = {size: sparse.csr_matrix(np.eye(size)) for size in (2, 3)}
ONES = {size: sparse.csr_matrix(np.ones((size, size))) for size in (2, 3, 4)}


def begin(store: Any) -> None:
    store.clear()
    store["matrix"] = EYE[3]
    store["old"] = np.arange(600.0)
    store["group/list"] = [1]
    store.create_list("group/persistent").extend(["a", "z" * 3000])
    store["group/matrix"] = EYE[2]
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
    "list": lambda store: store["group/persistent"].insert(1, "y" * 2000),
    "attributes": lambda store: store.attrs("old").update(text="y" * 5000, unit="s"),
    "create": lambda store: store.create_array("new", 900),
    "create to grow": lambda store: store.create_array("new", 9, maxshape=(None,)),
}


def state(store: Any) -> dict[str, Any]:
    """What a store has, but for what the handlers save."""
    found: dict[str, Any] = {}
    for name in store:
        if name == "saved":
            continue
        value = store[name]
        kind = type(value).__name__
        if sparse.issparse(value):
            value = (value.shape, value.dtype, value.data.tolist(), value.indices.tolist(), value.indptr.tolist())
        elif not isinstance(value, str):
            array = np.asarray(value)
            value = (array.shape, array.dtype, array.ravel()[:700].tolist())
        found[name] = (kind, value, dict(store.attrs(name)))
    return found


def save(store: Any) -> None:
    store["saved"] = ONES[2]
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
        number += 17
    assert called > 3


def begin_pending(store: Any) -> None:
    """A store of which half is committed."""
    store.clear()
    store.create_list("list").append("a")
    store["object"] = EYE[3]
    store["array"] = np.arange(600.0)
    store["group/one"] = "y" * 2000
    store.attrs("array")["unit"] = store.attrs("group/one")["unit"] = "m"
    store.create_array("rows", 600, "i8", maxshape=(None,), fill_value=1)
    store.commit()
    store["list"].extend(["b" * 3000, "c"])
    store.create_list("new list").append("a")
    store["object"] = EYE[2]
    store["new"] = 1
    store.attrs("new")["unit"] = "s"
    store["group/two"] = EYE[2]
    store.append("rows", [2])


# They return the change, so that what it uses is read before.
PREPARED: dict[str, Callable[[Any], Callable[[], object]]] = {
    "element": lambda store: functools.partial(store["list"].__setitem__, 2, "v"),
    "long element": lambda store: functools.partial(store["list"].__setitem__, 2, "v" * 3000),
    "append": lambda store: functools.partial(store["list"].append, "v"),
    "append to a new list": lambda store: functools.partial(store["new list"].append, "v" * 3000),
    "insert": lambda store: functools.partial(store["list"].insert, 1, "v"),
    "extend": lambda store: functools.partial(store["list"].extend, ["v", "v" * 3000]),
    "pop": lambda store: functools.partial(store["list"].pop, 0),
    "slice": lambda store: functools.partial(store["list"].__setitem__, slice(1, None), ["v"]),
    "step": lambda store: functools.partial(store["list"].__setitem__, slice(None, None, 2), ["v", "w"]),
    "delete an element": lambda store: functools.partial(store["list"].__delitem__, 1),
    "reverse": lambda store: store["list"].reverse,
    "clear a list": lambda store: store["list"].clear,
    "attribute": lambda store: functools.partial(store.attrs("new").__setitem__, "v", 1),
    "attributes": lambda store: functools.partial(store.attrs("array").update, v="v" * 3000, unit=1),
    "delete an attribute": lambda store: functools.partial(store.attrs("new").__delitem__, "unit"),
    "pop an attribute": lambda store: functools.partial(store.attrs("new").pop, "unit"),
    "default of an attribute": lambda store: functools.partial(store.attrs("new").setdefault, "v", 2),
    "clear attributes": lambda store: store.attrs("new").clear,
    "create": lambda store: functools.partial(store.create_array, "created", 9),
    "create below": lambda store: functools.partial(store.create_array, "group/two/created", 9),
    "require": lambda store: functools.partial(store.require_array, "array", 600),
    "require a new one": lambda store: functools.partial(store.require_array, "created", 600),
    "create a list": lambda store: functools.partial(store.create_list, "created"),
    "number": lambda store: functools.partial(store.__setitem__, "new", 2),
    "number for an object": lambda store: functools.partial(store.__setitem__, "object", 2),
    "number for a list": lambda store: functools.partial(store.__setitem__, "new list", 2),
    "same shape": lambda store: functools.partial(store.__setitem__, "array", np.ones(600)),
    "other shape": lambda store: functools.partial(store.__setitem__, "array", np.ones(900)),
    "object": lambda store: functools.partial(store.__setitem__, "object", ONES[4]),
    "delete": lambda store: functools.partial(store.__delitem__, "object"),
    "pop a value": lambda store: functools.partial(store.pop, "new"),
    "pop a list": lambda store: functools.partial(store.pop, "list"),
    "pop an object": lambda store: functools.partial(store.pop, "object"),
    "pop the first": lambda store: store.popitem,
    "default": lambda store: functools.partial(store.setdefault, "created", "y" * 2000),
    "clear a group": lambda store: store.group("group").clear,
    "rename": lambda store: functools.partial(store.rename, "group", "other"),
    "copy": lambda store: functools.partial(store.copy, "group", "other"),
    "resize": lambda store: functools.partial(store.resize, "rows", 2000),
    "append rows": lambda store: functools.partial(store.append, "rows", [3] * 2000),
}


def take(store: Any) -> None:
    for name in ("list", "new", "array"):
        if name in store:
            store.attrs(name)["v"] = "taken"
    if len(store.get("list", ())):
        store["list"].pop(0)
    store.commit()


def replace(store: Any) -> None:
    for name in list(store):
        store[name] = ONES[3]


def delete(store: Any) -> None:
    for name in list(store):
        del store[name]
    store["created/below"] = 1


def outcome(store: Any, change: Callable[[], object]) -> tuple[object, ...]:
    """What a change returns or raises."""
    try:
        result = change()
    except Exception as error:
        return (type(error),)
    return type(result), result if isinstance(result, str | int) else None


HANDLERS = [roll_back, take, replace, delete]


@pytest.mark.longer
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("change", PREPARED)
def test_a_handler_runs_before_or_after_a_change(open_store: Any, change: str, handler: Callable[[Any], None]) -> None:
    """Each handler comes at other moments: at nearly all near the beginning, and later more and more rarely.
    PMSTORE_LONGER=4 tries four times as many of the later ones. A reader looks after every second one.
    """
    store, expected = open_store(), []
    for handler_first in (True, False):
        begin_pending(store)
        prepared = PREPARED[change](store)
        if handler_first:
            handler(store)
        result = outcome(store, prepared)
        if not handler_first:
            handler(store)
        expected.append((result, state(store)))
    number, there = 1 + HANDLERS.index(handler), [0]
    read = itertools.cycle([True, False])
    while there:
        begin_pending(store)
        prepared = PREPARED[change](store)
        with signal_at(number, lambda *_: handler(store)) as there:
            result = outcome(store, prepared)
        if there:
            assert (result, state(store)) in expected, number
            store.commit()
            if next(read):
                with pmstore.open(store.path, "r") as reader:
                    assert reader.check().ok, (number, reader.check())
                    assert state(reader) in [one for _, one in expected]
        number += 1 + number // (3 * LONGER)
    assert number > 5


def test_a_rollback_is_whole_whatever_a_handler_does(open_store: Any) -> None:
    """A rollback makes arrays writeable again whose rows had moved."""
    store = open_store()
    rows = store.create_array("rows", 600, maxshape=(None,))
    number, there = 1, [0]
    while there:
        store["rows"] = np.zeros(600)
        store.commit()
        rows = store["rows"]
        store.append("rows", np.ones(1))
        assert not rows.flags.writeable
        with signal_at(number, lambda *_: save(store)) as there:
            store.rollback()
        if store["rows"] is rows:  # and not after the handler has committed the longer ones
            assert rows.flags.writeable and len(rows) == 600, number
        number += 1
    assert number > 5
