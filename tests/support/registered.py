"""Types that tests of registered types register, and a look at the parts that a store has."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore
from pmstore._catalog.names import OBJECT_PREFIX
from pmstore._store import hooks
from pmstore._values import registry


class Model:
    """A type with an encode and a decode of its own."""

    fails = ""

    def __init__(self, weights: Any, rate: float) -> None:
        self.weights, self.rate = weights, rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.rate == other.rate and np.array_equal(self.weights, other.weights)

    @staticmethod
    def encode(model: Model) -> Any:
        if Model.fails == "encode":
            raise RuntimeError("encode fails")
        return {"weights": model.weights, "rate": model.rate, "history": [1, {"loss": model.rate}]}

    @staticmethod
    def decode(parts: dict[str, Any]) -> Model:
        if Model.fails == "decode":
            raise ZeroDivisionError("decode fails")
        assert parts["history"] == [1, {"loss": parts["rate"]}]
        return Model(parts["weights"], parts["rate"])


@dataclasses.dataclass(frozen=True)
class Layer:
    weights: Any
    name: str = "layer"
    colour: Any = None

    def __post_init__(self) -> None:
        assert not hasattr(self, "made")


@dataclasses.dataclass
class Slots:
    __slots__ = ("a", "b")
    a: Any
    b: Any


class Colour(enum.Enum):
    RED = 1
    GREEN = object()


class Level(enum.IntEnum):
    LOW = 1


class Way(enum.Flag):
    UP = 1
    LEFT = 2


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.fixture(scope="module", autouse=True)
def types() -> Iterator[None]:
    """Registered for these tests only."""
    before = dict(registry._BY_TYPE), dict(registry._BY_NAME)
    pmstore.register(Model, Model.encode, Model.decode, name="Model")
    for kind in (Layer, Slots, Colour, Level, Way, Point):
        pmstore.register(kind)
    yield
    registry._BY_TYPE, registry._BY_NAME = before


def parts_in(store: Any) -> int:
    return sum(1 for _ in hooks.core_of(store).scan(OBJECT_PREFIX))


def sound(store: Any, parts: int) -> None:
    """The check finds nothing, and there are so many parts."""
    assert store.check().ok, store.check()
    assert parts_in(store) == parts
    assert len(store) == len(list(store))


def cli(*arguments: Any) -> tuple[int, str]:
    """The command, in a process that has registered nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "pmstore", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr
