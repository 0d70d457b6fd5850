"""A value of a fit is a tree, as in the store: what a step puts into two places of it is copied, with and without a
store. Otherwise an undisturbed fit would change both places together, and a resumed one would not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.support.resuming import copied


class Steps(pmstore.Resumable):
    """Applies a function to the state: to start with, where the iteration is 0, and then in each step."""

    max_iter = 5

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change, self.rng = change, np.random.default_rng(0)

    def fields(self) -> list[pmstore.Field]:
        values = [pmstore.Field("v", dtype=object), pmstore.Field("w", dtype=object)]
        return [pmstore.Field("x", (3,)), *values, pmstore.Field("rng", generator=self.rng)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.change(self.state)

    def step(self) -> None:
        self.change(self.state)


def told(state: Any) -> str:
    """The results, without the addresses of generators."""
    return re.sub(" at 0x[0-9A-F]+", "", repr((state.x, state.v, state.w)))


def same_array(state: Any) -> None:
    if state.v is None:
        a = np.zeros(2)
        state.v = {"now": a, "best": a}
    state.v["now"] += 1


def a_view_beside_its_array(state: Any) -> None:
    if state.v is None:
        a = np.zeros(4)
        state.v = [a, a[1:3]]
    state.v[1][:] += 1


def rows_of_one_list(state: Any) -> None:
    if state.v is None:
        state.v = [[0] * 2] * 3
    state.v[0][0] += 1


def a_dict_in_two_tuples(state: Any) -> None:
    if state.v is None:
        one: dict[str, int] = {"n": 0}
        state.v = [(1, one), (2, (one,))]
    state.v[0][1]["n"] += 1


def put_in_place(state: Any) -> None:
    state.v = state.v or [[0], [5]]
    state.v[0].append(len(state.v[1]))
    if len(state.v[0]) == 3:
        state.v[1] = state.v[0]


def an_array_of_another_field(state: Any) -> None:
    state.v = state.v or {}
    state.x += 1
    state.v["x"] = state.v.get("x", state.x)


def a_list_of_another_value(state: Any) -> None:
    state.v, state.w = state.v or {}, state.w or [0]
    state.w.append(len(state.w))
    state.v.setdefault("w", state.w)


def axes_in_another_order(state: Any) -> None:
    state.v = state.v or {"a": np.random.default_rng(1).normal(size=(7, 9, 11)), "sum": 0.0}
    state.v["a"] = np.transpose(state.v["a"], (1, 2, 0)).copy(order="K")
    state.v["sum"] += state.v["a"].sum() * 1.1


def a_generator_of_another_field(state: Any) -> None:
    state.v = state.v or {"rng": state.rng, "bits": np.random.Generator(state.rng.bit_generator), "drawn": []}
    state.v["drawn"].append(state.v["rng"].normal() + state.v["bits"].normal() + state.rng.normal())


def two_generators_over_one(state: Any) -> None:
    if state.v is None:
        bits = np.random.PCG64(5)
        state.v, state.w = [np.random.Generator(bits), np.random.Generator(bits), []], np.random.Generator(bits)
    state.v[2].append([rng.normal() for rng in (*state.v[:2], state.w, *state.v[1].spawn(1))])


def an_element_beside_its_array(state: Any) -> None:
    if state.v is None:
        records = np.zeros(2, [("n", int)])
        state.v = {"records": records, "first": records[0]}
    state.v["first"]["n"] += 1


def parts_in_two_places(state: Any) -> None:
    if state.v is None:
        one = pmstore.Parts("tests.shared.Two", {"a": np.zeros(2), "l": [0]})
        state.v = [one, (one,)]
    state.v[0]["a"][:] += 1
    state.v[0]["l"].append(1)


def moved_to_another_field(state: Any) -> None:
    if state.v is None:
        state.v = [np.full(3, float(n)) for n in range(6)]
    state.w = one = state.v.pop()
    one += 100
    state.x += state.w


def memory_of_bytes(state: Any) -> None:
    if state.v is None:
        state.v = []
    else:
        state.w = one = state.v.pop()
        one += 100
        state.x += state.w
    state.v.append(np.frombuffer(bytearray(24)))


def a_part_of_a_larger_array(state: Any) -> None:
    if state.v is None:
        state.v = [np.arange(12.0)[3:6]]
    state.v.append(getattr(state.v[0].base, "nbytes", 24))
    state.v[0] = np.concatenate([state.v[0], [0]])[:3]


CHANGES = [moved_to_another_field, memory_of_bytes, a_part_of_a_larger_array]
CHANGES += [a_generator_of_another_field, two_generators_over_one, an_element_beside_its_array, parts_in_two_places]
CHANGES += [same_array, a_view_beside_its_array, rows_of_one_list, a_dict_in_two_tuples, put_in_place]
CHANGES += [an_array_of_another_field, a_list_of_another_value, axes_in_another_order]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("commit_every", [1, 2])
def test_a_fit_that_was_killed_has_the_value_of_an_undisturbed_one(
    change: Callable[[Any], Any], commit_every: int, path: Path
) -> None:
    wanted = told(Steps(change).run())
    with copied(path) as copies:
        assert told(Steps(change).run(path, "fit", commit_every=commit_every)) == wanted
    assert len(copies) >= 4
    for copy in copies:
        assert told(Steps(change).run(copy, "fit")) == wanted


@pytest.mark.parametrize(
    "value",
    [
        [1, 1, "one", "one", (1, 2), (1, 2)],
        [np.float64(2), (half := (1.5, "x")), half, half],
        {"a": (rows := np.arange(12.0).reshape(4, 3))[0].copy(), "b": rows[1].copy()},
        [[], [], {}, np.zeros(0), np.zeros(0)],
        [list("ab"), list("ab"), np.ones(2), np.ones(2)],
    ],
    ids=str,
)
def test_what_is_in_one_place_is_not_copied(value: Any) -> None:
    class Once(Steps):
        def start(self) -> None:
            self.state.v = value

        def step(self) -> None:
            assert self.state.v is value

    assert Once(lambda state: None).run().v is value


def test_much_that_can_not_change_may_be_in_many_places() -> None:
    deep: Any = (1.5, "x")
    for _ in range(60):
        deep = (deep, deep)

    def share(state: Any) -> None:
        state.v = deep

    assert Steps(share).run().v is deep


def test_a_value_that_holds_itself_is_refused_by_the_store(path: Path) -> None:
    def holds_itself(state: Any) -> None:
        state.v = state.v or []
        state.v.append(state.v)

    Steps(holds_itself).run()
    with pytest.raises(ValueError, match="holds itself"):
        Steps(holds_itself).run(path, "fit")
