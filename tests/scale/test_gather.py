"""Sums: on workers they have the same bits as on the coordinator, which tells of contributions that can't be added."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Processes, Serial
from pmstore.scale._gather import Gathering
from pmstore.scale._messages import digest_of
from tests.support.sharded import Walk, result, several


class Sums(Serial):
    """Answers all questions at a time, as one worker with sums. Some of the leaves come before, and all come again."""

    longest = 0

    def completed(self, timeout: float | None) -> Any:
        gathering = Gathering(len(self._shards))
        leaves = []
        for i, shard, function, shared, tag in self._asked:
            leaves.append(self._holder.answer(i, shard, function, shared, tag))
            gathering.put(leaves[-1], function, shared)
        self._asked.clear()
        replies = gathering.take()
        self.longest = max(self.longest, *(len(reply.shards) for reply in replies))
        return [*leaves[1:2], *replies, *leaves]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8])
def test_I32_sums_of_workers_have_the_same_bits(count: int) -> None:
    engine = Sums()
    assert result(Walk(several(count)).run(engine=engine)) == result(Walk(several(count)).run(engine=Serial()))
    assert engine.longest == count


def test_I33_a_leaf_of_a_sum_that_differs_is_noticed() -> None:
    class Differs(Sums):
        def completed(self, timeout: float | None) -> Any:
            replies = list(super().completed(timeout))
            whole = replies[1]
            if whole.leaves:
                leaves = (*whole.leaves[:2], whole.leaves[2][::-1], *whole.leaves[3:])
                digest = digest_of(whole.shard, whole.tag, whole.result, leaves)
                replies[1] = dataclasses.replace(whole, leaves=leaves, digest=digest)
            return replies

    with pytest.raises(pmstore.NondeterminismError, match="shard 2 of 4") as caught:
        Walk(several(4)).run(engine=Differs())
    assert caught.value.shard == 2


def test_contributions_that_cannot_be_added_are_told_by_the_coordinator() -> None:
    class Odd(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"sums": np.zeros(len(shard))}

    with pytest.raises(ValueError, match=r"map\(\) returned sums: float64 \(\d+,\) for shard \d of 3, "):
        Odd(several(3)).run(engine=Sums())

    class Text(Walk):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"sums": np.array("text")}

    with pytest.raises(TypeError, match=r"map\(\) returned sums: <U4 \(\), which can't be added: override combine"):
        Text(several(3)).run(engine=(engine := Sums()))
    assert engine.longest == 1


def test_numbers_of_another_byte_order_are_added() -> None:
    class Swapped(Walk):
        def map(self, *question: Any) -> Mapping[str, Any]:
            given = super().map(*question)
            return {**given, "sums": given["sums"].astype(">f8")}

    for engine in (Sums(), Serial()):
        assert result(Swapped(several(3)).run(engine=engine)) == result(Walk(several(3)).run(engine=Serial()))


def test_combine_can_be_replaced() -> None:
    class Largest(Walk):
        max_iter = 1

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"rows": shard[-2:], "count": np.array(len(shard))}

        def combine(self, left: Any, right: Any) -> Any:
            return {"rows": np.concatenate([left["rows"], right["rows"]]), "count": max(left["count"], right["count"])}

        def update(self, total: Mapping[str, Any]) -> None:
            self.state.shift = float(total["count"])
            self.state.centers = total["rows"][:3]

    state = Largest(several(3)).run(engine=Sums())  # which leaves the combination to the coordinator
    assert state.shift == 44
    np.testing.assert_array_equal(state.centers, np.concatenate([part[-2:] for part in several(3)])[:3])


def test_a_combine_that_returns_nothing_is_named() -> None:
    class Forgets(Walk):
        def combine(self, left: Any, right: Any) -> Any:
            left.update(right)

    with pytest.raises(TypeError, match=r"combine\(\) returns a dict of arrays by name, not None"):
        Forgets(several(3)).run(engine=Serial())


def test_combine_can_be_an_attribute() -> None:
    """The attribute is one of the object, not of its class."""

    def largest(left: Any, right: Any) -> Any:
        return {name: np.maximum(left[name], right[name]) for name in left}

    def fit(engine: Any) -> bytes:
        walk = Walk(several(4))
        walk.combine = largest  # type: ignore[method-assign]
        return result(walk.run(engine=engine))

    assert fit(Sums()) == fit(Serial())


class Counts(Walk):
    max_iter = 1

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, *local: Any) -> Any:
        return {"small": np.full(2, 200, np.uint8), "flag": np.array(True), "swapped": np.ones(2, ">f4")}

    def update(self, total: Mapping[str, Any]) -> None:
        assert [total[name].dtype for name in ("small", "flag", "swapped")] == [np.uint64, np.int64, np.float32]
        self.state.shift = float(2 * total["small"][0] + total["flag"])


class LocalCounts(Counts):
    def local_fields(self, i: int) -> list[pmstore.Field]:
        return [pmstore.Field("state", 1)]


@pytest.mark.parametrize("kind", [Counts, LocalCounts])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_small_integers_are_added_as_large_ones(kind: type[Counts], count: int) -> None:
    assert kind(several(count)).run(engine=Serial()).shift == count * 401


class Waits:
    """A map that waits until a test writes into a pipe."""

    def __init__(self, pipe: Path, shard: Any) -> None:
        self.pipe, self.shard = pipe, shard

    def __call__(self, shard: Any) -> None:
        if np.array_equal(shard, self.shard):
            self.pipe.read_bytes()


def test_a_map_that_takes_long_keeps_no_result_back(tmp_path: Path) -> None:
    """The result of shard 0 comes while shard 1, which the same process has, waits for that."""

    class Writes(Processes):
        def completed(self, timeout: float | None) -> Any:
            messages = super().completed(timeout)
            if any((one.shard, one.tag.epoch) == (0, 0) for one in messages):
                (tmp_path / "pipe").write_bytes(b"go on")
            return messages

    os.mkfifo(tmp_path / "pipe")
    walk = Walk(several(2), Waits(tmp_path / "pipe", several(2)[1]))
    walk.max_iter = 1
    walk.run(engine=Writes(1), timeout=60)
