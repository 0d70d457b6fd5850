"""The attributes of an algorithm are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial

NAMES = ("_asking", "_began", "_commits", "_copies", "_log", "_parts", "_temporary")


class Private(pmstore.MapReduce):
    """Has attributes with names that any class may choose, and a local state."""

    max_iter = 2

    def __init__(self) -> None:
        self.shards = [np.arange(4.0), np.arange(3.0)]
        for name in NAMES:
            setattr(self, name, 3.0)

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("sum")]

    def fingerprint(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in NAMES}

    def start(self) -> None:
        pass

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, *local: Any) -> Mapping[str, Any]:
        return {"sum": sum(getattr(self, name) for name in NAMES) * shard.sum()}

    def update(self, total: Mapping[str, Any]) -> None:
        assert all(getattr(self, name) == 3.0 for name in NAMES)
        self.state.sum = total["sum"]


class PrivateLocal(Private):
    def local_fields(self, i: int) -> list[pmstore.Field]:
        return [pmstore.Field("w", 2)]


@pytest.mark.parametrize("kind", [Private, PrivateLocal])
@pytest.mark.parametrize("engine", [Serial(), 1], ids=["serial", "processes"])
def test_private_names_of_an_algorithm_are_its_own(kind: Any, engine: Any) -> None:
    algorithm = kind()
    assert algorithm.run(engine=engine).sum == 3 * len(NAMES) * (6 + 3)
    assert all(vars(algorithm)[name] == 3.0 for name in NAMES)


@pytest.mark.parametrize("engine", [Serial(), 1], ids=["serial", "processes"])
def test_a_map_returns_no_name_of_the_protocol(engine: Any) -> None:
    class Takes(Private):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {"/behind": 1}

    with pytest.raises(pmstore.ShardError, match="must not return names that begin with '/': /behind"):
        Takes().run(engine=engine)
