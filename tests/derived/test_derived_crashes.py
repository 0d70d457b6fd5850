"""Derived arrays after crashes: whatever is recovered, each is the function of its inputs as recovered (I15, I16)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore.testing import Crash, CrashExplorer, explore_faults

ELEMENTS = 1500  # three pages: in an extent of its own, which is written directly

calls: list[str] = []


@pytest.fixture
def explorer(tmp_path: Path) -> Iterator[CrashExplorer]:
    with CrashExplorer("derived", directory=tmp_path) as made:
        yield made


def doubled(x):
    calls.append("doubled")
    return x * 2


def offset(y, k):
    calls.append("offset")
    return y + k


def summed(z, x):
    calls.append("summed")
    return np.array([z.sum(), x.sum()])


def declared(store: pmstore.Store) -> list[pmstore.Derived]:
    """A chain over all policies, each verified."""
    return [
        store.derive("y", doubled, "x", policy="store", verify="hash"),
        store.derive("z", offset, "y", "k", policy="recompute", verify="hash"),
        store.derive("w", summed, "z", "x", policy="store", verify=1e-12),
        store.derive("v", summed, "y", "y", policy="auto"),
    ]


def check(store: pmstore.Store, crash: Crash) -> None:
    if "x" not in store:
        return
    x, k = store["x"].copy(), store["k"]
    y, z, w, v = declared(store)
    calls.clear()
    loaded = [name.name for name in (y, w) if name.valid]
    assert np.array_equal(w, [(2 * x + k).sum(), x.sum()])
    assert np.array_equal(v, [2 * x.sum()] * 2)
    assert np.array_equal(z, 2 * x + k)
    assert np.array_equal(y, 2 * x)
    assert ("doubled" in calls) == ("y" not in loaded)
    seen.add((crash.sequence, *loaded))


seen: set[tuple[object, ...]] = set()


def first(store: pmstore.Store) -> None:
    x = store.create_array("x", ELEMENTS, "f8")
    store["k"] = 1.0
    y, z, w, v = declared(store)
    store.commit()  # 1: none of them was computed
    x += 1
    w.value, v.value  # noqa: B018
    store.commit()  # 2: with what is derived
    x[3] = 7
    store.commit()  # 3: without
    with contextlib.suppress(ZeroDivisionError), store.transaction():
        x += 5
        w.value  # noqa: B018
        raise ZeroDivisionError
    with store.transaction():  # 4
        x += 1
        y.set(x * 2)
    z.value  # noqa: B018
    w.value  # noqa: B018
    x[:] = 3  # killed


def second(store: pmstore.Store) -> None:
    y, _, w, _ = declared(store)
    with store.transaction():  # 5: what the first life hadn't committed
        w.value  # noqa: B018
    with store.transaction():  # 6
        store["x"][:] += 1
        store["k"] = 2.0
        w.value  # noqa: B018
        store["k"] = 3.0
    with store.transaction():  # 7
        del store["w"]
        store["x"] = np.arange(float(ELEMENTS))
        y.value  # noqa: B018


def test_I16_after_a_crash_what_is_derived_fits_its_inputs(explorer):
    seen.clear()
    explorer.run(first, second, check=check, budget=160)
    # The states that there are to see, and from which of them "y" and "w" were loaded.
    assert seen >= {(1,), (2, "y", "w"), (3,), (4, "y"), (5, "y", "w"), (6, "y"), (7, "y")}


@pytest.mark.slow
def test_I16_after_a_failed_call_what_is_derived_fits_its_inputs(tmp_path):
    explore_faults([first, second], check, medium="file", directory=tmp_path, budget=12)


def test_a_failure_is_described_without_the_functions(explorer):
    def refuses(store: pmstore.Store, crash: Crash) -> None:
        assert crash.sequence != 2

    with pytest.raises(pmstore.testing.CrashFailure, match="k = 1"):
        explorer.run(first, check=refuses, budget=20, media="memory")
