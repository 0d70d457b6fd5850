"""Generators that spawn children: which come next is a part of their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator

import pmstore
from pmstore._resume.fingerprint import describe
from pmstore._values.generators import generator_state, set_generator_state
from tests.support.resuming import copied

KINDS = [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM]


class Spawns(pmstore.Resumable):
    max_iter = 5

    def __init__(self, fails_at: int = -1, kind: Any = np.random.PCG64) -> None:
        self.rng, self.fails_at = np.random.Generator(kind(7)), fails_at

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("x"), pmstore.Field("rng", generator=self.rng)]

    def fingerprint(self) -> dict[str, Any]:
        return {"rng": self.rng}

    def start(self) -> None:
        self.state.x = 0.0

    def step(self) -> None:
        children = self.state.rng.spawn(self.state.iteration % 3)
        self.state.x += sum(child.normal() for child in children) + self.state.rng.normal()
        if self.state.iteration == self.fails_at:
            self.fails_at = -1
            raise KeyError("once")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_was_killed_spawns_the_same_children(kind: Any, path: Path) -> None:
    wanted = Spawns(kind=kind).run().x
    with copied(path) as copies:
        assert Spawns(kind=kind).run(path, "fit").x == wanted
    for copy in copies:
        again = Spawns(kind=kind)
        assert again.run(copy, "fit").x == wanted
        assert [child.normal() for child in again.rng.spawn(2)] != [child.normal() for child in again.rng.spawn(2)]


@pytest.mark.parametrize("same", [False, True])
def test_the_same_call_after_an_exception(same: bool, path: Path) -> None:
    wanted, fails = Spawns().run().x, Spawns(fails_at=3)
    with pytest.raises(KeyError):
        fails.run(path, "fit")
    assert (fails if same else Spawns()).run(path, "fit").x == wanted


def test_a_generator_that_has_spawned_is_another_one(path: Path) -> None:
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    assert describe(one) == describe(other)
    other.spawn(1)
    assert describe(one) != describe(other)
    Spawns().run(path, "fit")
    later = Spawns()
    later.rng.spawn(1)
    with pytest.raises(pmstore.FingerprintMismatchError, match="rng"):
        later.run(path, "fit")


class Learner(BaseEstimator):
    """Keeps a generator of its own, or has one as a parameter; each batch draws from a child."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng

    def partial_fit(self, X: Any, y: Any = None) -> Learner:
        if not hasattr(self, "drawn_"):
            self.drawn_, self.rng_ = np.zeros(0), np.random.default_rng(5) if self.rng is None else self.rng
        self.drawn_ = np.append(self.drawn_, self.rng_.spawn(1)[0].normal())
        return self


@pytest.mark.parametrize("rng", [None, 3])
def test_partial_fit_goes_on_with_the_next_child(rng: Any, path: Path) -> None:
    batches = [np.full((4, 2), i) for i in range(5)]

    def learner() -> Learner:
        return Learner(rng and np.random.default_rng(rng))

    alone = learner()
    for batch in batches:
        alone.partial_fit(batch)
    with copied(path) as copies:
        found = pmstore.partial_fit(learner(), batches, store=path, name="learner")
    assert found.drawn_.tolist() == alone.drawn_.tolist() and len(copies) >= 5
    for copy in copies:
        found = pmstore.partial_fit(learner(), batches, store=copy, name="learner")
        assert found.drawn_.tolist() == alone.drawn_.tolist()


def test_states_without_a_number_of_children_leave_it() -> None:
    """Older files and numpy's own states have none."""
    rng = np.random.default_rng(3)
    rng.spawn(4)
    kept = dict(rng.bit_generator.state)
    rng.normal()
    set_generator_state(rng, kept)
    assert generator_state(rng) == {**kept, "spawned": 4}


@pytest.mark.parametrize("spawned", [-1, 1 << 32, 1.0, "1", True])
def test_a_number_of_children_that_can_not_be(spawned: Any) -> None:
    rng = np.random.default_rng(3)
    before = generator_state(rng)
    with pytest.raises(ValueError, match="has spawned 0 to 4294967295 children"):
        set_generator_state(rng, {**before, "spawned": spawned})
    assert generator_state(rng) == before


def test_seeds_of_another_kind_have_no_number_of_children() -> None:
    class Seeds(np.random.bit_generator.ISeedSequence):
        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
            return np.arange(n_words, dtype=dtype)

    rng = np.random.Generator(np.random.PCG64(Seeds()))
    assert "spawned" not in generator_state(rng)
    with pytest.raises(ValueError, match="this one has a Seeds"):
        set_generator_state(rng, {**rng.bit_generator.state, "spawned": 1})
