"""Persistent lists and signal handlers: whatever one does in the middle of a change, the list is whole (I41)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import pmstore
from tests.store.test_interrupts import signal_at

BEFORE = [*range(20), "z" * 3000]
OPERATIONS: dict[str, Callable[[Any], object]] = {
    "insert": lambda one: one.insert(15, "y" * 2000),
    "append": lambda one: one.append("new"),
    "extend": lambda one: one.extend(["a", "y" * 2000]),
    "slice": lambda one: one.__setitem__(slice(12, 14), ["a", "y" * 2000, "c"]),
    "step": lambda one: one.__setitem__(slice(None, None, 10), ["a", "y" * 2000, "c"]),
    "delete": lambda one: one.__delitem__(slice(None, None, 3)),
    "reverse": lambda one: one.reverse(),
}
each = pytest.mark.parametrize("name", OPERATIONS)
pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


def moments(store: Any, action: Callable[[], object], name: str) -> Any:
    """Runs the operation again and again, with the action in a handler, each time a moment later. Yields the list and
    the error."""
    number, there = 1, [0]
    while there:
        kept = store["kept"] if "kept" in store else store.create_list("kept")
        kept[:] = BEFORE
        store.commit()
        error = None
        with signal_at(number, lambda *_: action()) as there:
            try:
                OPERATIONS[name](kept)
            except BaseException as caught:
                error = caught
        yield kept, error
        number += 1
    assert number > 20


def interrupt() -> None:
    raise KeyboardInterrupt


def after(name: str) -> list[Any]:
    found: list[Any] = list(BEFORE)
    OPERATIONS[name](found)
    return found


@each
def test_an_interrupt_leaves_nothing_that_acts_later(open_store: Any, name: str) -> None:
    """Its traceback keeps what was going on alive, and dies after a commit."""
    store = open_store()
    for kept, error in moments(store, interrupt, name):
        assert list(kept) in (BEFORE, after(name))
        store.rollback()
        kept.append("later")
        store.commit()
        del error
        gc.collect()
        assert list(kept) == [*BEFORE, "later"]
    assert store.check().ok, store.check()


@each
def test_a_commit_in_the_middle_has_all_or_nothing(open_store: Any, name: str) -> None:
    store, seen = open_store(), []

    def commit() -> None:
        store.commit()
        with pmstore.open(store.path, "r") as reader:
            seen.append((list(reader["kept"]), len(reader), reader.check().ok))

    for kept, error in moments(store, commit, name):
        if error is None:
            assert list(kept) == after(name)
        else:  # a commit frees new extents that have no owner yet
            assert isinstance(error, pmstore.InternalError) and list(kept) == BEFORE, error
    assert seen and all(found in ((BEFORE, 1, True), (after(name), 1, True)) for found in seen)
    assert store.check().ok, store.check()


@each
@pytest.mark.parametrize("action", ["rollback", "clear"])
def test_a_list_that_shrinks_in_the_middle_stays_whole(open_store: Any, name: str, action: str) -> None:
    store = open_store()

    def shrink() -> None:
        if action == "clear":
            store["kept"].clear()
        else:
            store.rollback()

    for kept, error in moments(store, shrink, name):
        assert error is None or isinstance(error, (pmstore.Error, IndexError, ValueError)), error
        assert len(list(kept)) == len(kept)
        store.commit()
        assert store.check().ok, (error, store.check())


def test_indices_are_converted_before_the_list_is_looked_at(open_store: Any) -> None:
    class Clears:
        def __index__(self) -> int:
            kept.clear()
            return 3

    store = open_store()
    kept = store.create_list("kept")
    for use in (
        lambda: kept.__setitem__(Clears(), 1),
        lambda: kept.__delitem__(Clears()),
        lambda: kept[Clears()],
    ):
        kept[:] = range(5)
        with pytest.raises(IndexError):
            use()

    class Counts:
        number = 0

        def __index__(self) -> int:
            self.number += 1
            return self.number

    kept[:] = range(5)
    assert kept.pop(Counts()) == 1 and list(kept) == [0, 2, 3, 4]
    kept[Clears() :] = ["a"]
    kept.insert(Clears(), "b")
    assert list(kept) == ["b"] and store.check().ok
    with pytest.raises(TypeError, match="list indices are int or slices, not float"):
        kept.insert(1.0, 1)
