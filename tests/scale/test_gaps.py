"""Arrays with gaps, which a pickle turns into C order, and arrays that are not aligned give the same bits on every
engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial


def test_an_array_with_gaps_is_the_same_on_every_engine() -> None:
    wide = np.random.default_rng(0).normal(size=(90, 2, 3))

    class Sum(pmstore.MapReduce):
        max_iter = 1
        shards = (pmstore.Shard(np.asarray, wide[:, ::2, ::2]), pmstore.Shard(np.asarray, a=wide[:, 1, ::2]))

        def fields(self) -> list[pmstore.Field]:
            return [pmstore.Field("sum")]

        def fingerprint(self) -> Mapping[str, Any]:
            return {}

        def start(self) -> None:
            pass

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"sum": shard.sum(), "strides": np.array(shard.strides[-1])}

        def update(self, total: Mapping[str, Any]) -> None:
            self.state.sum = total["sum"]
            assert total["strides"] == 2 * shard_item, "the shards have no gaps"

    shard_item = wide.itemsize
    assert Sum().run(engine=Serial()).sum == Sum().run(engine=1).sum


class Weighted(pmstore.MapReduce):
    """Sums over attributes and over nested arguments of a loader, whose arrays may have gaps."""

    max_iter = 3

    def __init__(self, weights: Any, stop_at: int = -1) -> None:
        self.weights, self.stop_at = weights, stop_at
        self.shards = [pmstore.Shard(dict.get, {"x": weights}, "x"), np.ones((2, 2))]

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("sum")]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"weights": self.weights}

    def start(self) -> None:
        self.state.sum = 1.0

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        return {"sum": np.sum(self.weights) * shared["sum"] + shard.sum()}

    def update(self, total: Mapping[str, Any]) -> None:
        if self.state.epoch == self.stop_at:
            raise ConnectionError
        self.state.sum = total["sum"] * 1e-3


def test_arrays_with_gaps_anywhere_are_the_same_on_every_engine(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).random(size=(501, 2003)).astype(np.float32)[:, ::2]
    assert weights.sum() != weights.copy().sum(), "the gaps make no difference"
    whole = Weighted(weights).run(engine=Serial()).sum
    assert whole == Weighted(weights).run(engine=1).sum
    with pytest.raises(ConnectionError):
        Weighted(weights, stop_at=1).run(tmp_path / "mixed.pm", "w", engine=Serial())
    assert Weighted(weights).run(tmp_path / "mixed.pm", "w", engine=1).sum == whole


def test_arrays_that_are_not_aligned_are_the_same_on_every_engine(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(40_000, 7))
    file = tmp_path / "values.bin"
    file.write_bytes(b"x" + values.tobytes())
    mapped = np.memmap(file, "f8", "r", 1, values.shape)
    assert mapped.sum() != values.sum(), "the alignment makes no difference"

    class Shards(Weighted):
        def __init__(self, *shards: Any) -> None:
            super().__init__(np.ones(1))
            self.shards = shards

    for shard in (mapped, mapped[:], mapped.T, pmstore.Shard(dict.get, {"x": mapped[:]}, "x")):
        assert Shards(shard).run(engine=Serial()).sum == Shards(shard).run(engine=1).sum


class Fixed(Weighted):
    """Weighted over given shards. prepare: from the shard to the array whose sum is taken."""

    def __init__(self, *shards: Any, weights: Any = 1.0, prepare: Any = np.asarray) -> None:
        super().__init__(weights)
        self.shards, self._prepare = shards, prepare

    def prepare(self, shard: Any) -> Any:
        return self._prepare(shard)


def unaligned(array: Any) -> Any:
    """The array at an odd address, in its own order of memory."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return np.frombuffer(b"x" + array.tobytes(order), array.dtype, offset=1).reshape(array.shape, order=order)


def test_shards_that_are_not_aligned_have_the_bits_of_those_that_are(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(40_000, 7))
    file = tmp_path / "values.bin"
    file.write_bytes(b"x" + values.tobytes())
    mapped = np.memmap(file, "f8", "r", 1, values.shape)
    loaded = pmstore.Shard(unaligned, values)
    assert mapped.sum() == loaded().sum() != values.sum(), "the alignment makes no difference"
    expected = Fixed(values).run(engine=Serial()).sum
    for shard in (mapped, mapped[:], loaded, pmstore.Shard(unaligned, values.T)):
        for engine in (Serial(), 1):
            assert Fixed(shard).run(engine=engine).sum == expected
    in_a_list = pmstore.Shard(lambda: [unaligned(values)])
    assert Fixed(in_a_list, prepare=lambda shard: shard[0]).run(engine=Serial()).sum == expected


def test_loaders_get_aligned_arguments() -> None:
    """The contents of the shard follow from them."""
    values = np.random.default_rng(0).normal(size=(40_000, 7))
    shards = [pmstore.Shard(lambda given: given["x"] - given["x"].sum(), {"x": x}) for x in (values, unaligned(values))]
    first, second = (Fixed(shard) for shard in shards)
    assert first.run(engine=Serial()).sum == second.run(engine=Serial()).sum
    assert first.described == second.described


def test_records_that_are_not_aligned_have_the_bits_of_those_that_are() -> None:
    """A record has the alignment 1, whichever its fields have."""
    records = np.zeros(40_000, [("point", [("x", "f8"), ("y", "f8")])])
    records["point"]["x"] = np.random.default_rng(0).normal(size=40_000)
    sums = {
        Fixed(shard, prepare=lambda shard: shard["point"]["x"]).run(engine=engine).sum
        for shard in (records, unaligned(records), pmstore.Shard(unaligned, records))
        for engine in (Serial(), 1)
    }
    assert len(sums) == 1


def test_what_is_broadcast_is_aligned_on_every_engine() -> None:
    """dask receives large arrays at any address."""

    class Unaligned(Serial):
        def submit(self, i: int, function: Any, shared: Mapping[str, Any], tag: Any) -> None:
            super().submit(i, function, {name: unaligned(array) for name, array in shared.items()}, tag)

    class Broadcast(Fixed):
        def fields(self) -> list[pmstore.Field]:
            return [*super().fields(), pmstore.Field("large", (40_000, 7))]

        def start(self) -> None:
            self.state.large = np.random.default_rng(0).normal(size=(40_000, 7))

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"sum": shared["large"].sum()}

    assert Broadcast(np.ones(2)).run(engine=Unaligned()).sum == Broadcast(np.ones(2)).run(engine=Serial()).sum


def test_results_are_aligned_with_every_engine() -> None:
    """A fit in a task of dask receives large arrays at any address."""

    class Unaligned(Serial):
        def completed(self, timeout: float | None) -> Any:
            replies = super().completed(timeout)
            return [replace(one, result={name: unaligned(x) for name, x in one.result.items()}) for one in replies]

    class Whole(Fixed):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"shard": shard}

        def combine(self, left: Any, right: Any) -> Any:
            return {"sum": left["shard"].sum() + right["shard"].sum()}

    values = np.random.default_rng(0).normal(size=(40_000, 7))
    sums = [Whole(values, values).run(engine=engine).sum for engine in (Serial(), Unaligned())]
    assert sums[0] == sums[1]


def test_serial_copies_attributes_and_shares_the_arrays_of_shards() -> None:
    found = []

    class Look(Weighted):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            found.append((self.weights, shard))
            return {"sum": self.weights[0, 0]}

        def update(self, total: Mapping[str, Any]) -> None:
            self.weights += 1

    weights = np.ones((3, 2))
    Look(weights).run(engine=Serial())
    assert weights[0, 0] == 4
    assert all(seen[0, 0] == 1 and not np.shares_memory(seen, weights) for seen, _ in found)
    assert np.shares_memory(found[0][1], weights)
    assert not found[0][1].flags.writeable


class Local(Weighted):
    """Its local states are such sums."""

    def local_fields(self, i: int) -> list[pmstore.Field]:
        return [pmstore.Field("sums", 2, np.float32)]

    def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
        local.sums = [self.weights.sum(), shard.sum()]

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, *local: Any) -> Mapping[str, Any]:
        return {"sum": local[0].sums.sum()}


@pytest.mark.parametrize("engine", [Serial(), 1], ids=["serial", "processes"])
def test_local_states_that_are_computed_again_have_the_same_bits(engine: Any, tmp_path: Path) -> None:
    weights = np.random.default_rng(1).random(size=(501, 2003)).astype(np.float32)[:, ::2]
    algorithm = Local(weights)
    algorithm.run(tmp_path / "fit.pm", "w", engine=engine)
    parts = np.array(algorithm.local_parts("sums"))
    shutil.rmtree(tmp_path / "fit.pm.local")
    assert np.array_equal(np.array(algorithm.local_parts("sums")), parts)
    assert parts[0] == pytest.approx(weights.copy().sum(), rel=1e-3)


def test_serial_does_not_copy_memory_maps(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60.0).reshape(20, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = []

    class Look(Weighted):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            found.append(shard)
            return {"sum": shard.sum()}

    algorithm = Look(np.ones(1))
    algorithm.shards = [pmstore.Shard(np.asarray, mapped)]
    assert float(algorithm.run(engine=Serial()).sum) == 1770.0 * 1e-3
    assert found and all(np.shares_memory(shard, mapped) for shard in found)
