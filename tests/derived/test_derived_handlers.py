"""Signal handlers in the middle of a change of a derived array: they commit, roll back, delete or raise, and run before
or after it (I16, I41)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.store.test_interrupts import signal_at
from tests.support.interrupting import signalled_at

pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)

NEW = np.arange(600.0) + 1


def running(x: Any) -> Any:
    return np.cumsum(x)


def begin(store: Any) -> Any:
    """A stored array of the committed input, which has changed since."""
    store.clear()
    store["x"] = np.arange(600.0)
    sums = store.derive("sums", running, "x", policy="store")
    assert sums.value is not None
    store.commit()
    store["x"][:] = NEW
    return sums


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "declare": lambda store, sums: store.derive("other", running, "x", policy="store"),
    "declare anew": lambda store, sums: store.derive("sums", running, "x", policy="store", version=2, replace=True),
    "read": lambda store, sums: sums.value,
    "set": lambda store, sums: sums.set(np.cumsum(NEW)),
}


def save(store: Any) -> None:
    store.commit()


def roll_back(store: Any) -> None:
    store.rollback()


def delete(store: Any) -> None:
    del store["sums"]
    store.commit()


def require_true_values(path: str) -> None:
    """A process that comes later computes nothing where a valid value is stored."""
    with pmstore.open(path, "r") as reader:
        assert reader.check().ok, reader.check()
        for name in set(reader) - {"x"}:
            for version in (1, 2):
                with contextlib.suppress(pmstore.DerivedMismatchError):
                    derived = reader.derive(name, running, "x", policy="store", version=version)
            assert np.array_equal(derived.value, np.cumsum(reader["x"])), name


# A rollback before `set` makes the value that it was given one of other inputs, whoever rolls back.
CASES = [(change, handler) for change in CHANGES for handler in (save, roll_back, delete)]
CASES.remove(("set", roll_back))


@pytest.mark.parametrize(("change", "handler"), CASES)
def test_a_value_is_never_kept_for_other_inputs(open_store: Any, change: str, handler: Callable[[Any], None]) -> None:
    store, number, there = open_store(), 1, [0]
    while there:
        sums = begin(store)
        with (
            signal_at(number, lambda *_: handler(store)) as there,
            contextlib.suppress(pmstore.UnknownNameError, pmstore.DerivedMismatchError, pmstore.DerivedArrayError),
        ):
            CHANGES[change](store, sums)
        store.commit()
        require_true_values(store.path)
        store["x"][:] = NEW  # as before the rollback
        store.commit()
        require_true_values(store.path)
        number += 1 + number // 12
    assert number > 5


def test_an_interrupted_reading_can_be_repeated(store: Any) -> None:
    store["x"] = np.zeros(3)
    sums, number = store.derive("sums", running, "x", policy="recompute"), 1

    def read() -> object:
        store["x"][0] = number
        return sums.value

    while signalled_at(number, read):
        assert read()[0] == number  # type: ignore[index]
        number += 1
    assert number > 5
