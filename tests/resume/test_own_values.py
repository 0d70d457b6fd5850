"""A field changes with nothing else, and a fingerprint's keys are the algorithm's own."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


class Steps(pmstore.Resumable):
    """Fields that are assigned from each other, and change in place afterwards."""

    max_iter = 6

    def __init__(self, assign: Callable[[Any], Any]) -> None:
        self.assign = assign

    def fields(self) -> Any:
        return [
            pmstore.Field("x", 3),
            *(pmstore.Field(name, dtype=object) for name in ("array", "list", "other")),
            pmstore.Field("moved"),
        ]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.x = 1.0
        self.state.array, self.state.list = np.ones(3), [np.ones(3)]
        self.state.other = self.assign(self.state)

    def step(self) -> None:
        state = self.state
        state.x *= 2
        state.array *= 3
        state.list[0][...] *= 5
        found = state.other[0] if isinstance(state.other, list) else state.other
        state.moved += float(np.sum(state.x + state.array + state.list[0] - found))
        if state.iteration == 3:
            state.other = self.assign(state)


@pytest.mark.parametrize(
    "assign",
    [
        lambda state: state.x,
        lambda state: state.x[::-1],
        lambda state: state.array,
        lambda state: state.array.reshape(3, 1)[:, 0],
        lambda state: state.list,
        lambda state: [state.x],
        lambda state: [state.list[0]],
    ],
    ids=["field", "view of a field", "array", "view of an array", "list", "field in a list", "part of a list"],
)
def test_a_field_does_not_change_with_another_one(
    assign: Callable[[Any], Any], tmp_path: Path, commits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are the same in memory, in a store, and from each commit on."""
    wanted = Steps(assign).run().moved
    number = itertools.count()
    commits[0] = lambda: shutil.copy(tmp_path / "run.pm", tmp_path / f"{next(number)}.pm")
    with pmstore.open(tmp_path / "run.pm") as store:
        assert Steps(assign).run(store, "fit").moved == wanted
    copies = commits[1:]
    monkeypatch.undo()
    assert len(copies) >= 6
    for path in copies:
        assert Steps(assign).run(path, "fit").moved == wanted


def test_what_no_other_field_has_is_not_copied() -> None:
    class Once(Steps):
        def start(self) -> None:
            self.mine: list[Any] = []
            self.state.list = self.mine
            self.mine.append(1)

        def step(self) -> None:
            self.state.list.append(2)

    algorithm = Once(lambda state: None)
    assert algorithm.run().list == [1, *[2] * 6] and algorithm.mine is algorithm.state.list


@pytest.mark.parametrize("key", ["algorithm", "numpy", "machine", "runs", "max_iter"])
def test_keys_of_the_loop_are_refused(key: str, tmp_path: Path) -> None:
    class Own(Steps):
        def fingerprint(self) -> dict[str, Any]:
            return {key: "mine"}

    with pytest.raises(ValueError, match=rf"fingerprint\(\) has the key '{key}', which is the loop's own"):
        Own(lambda state: None).run(tmp_path / "x.pm", "fit")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("max_iter", -1, ValueError), ("max_iter", 2.5, TypeError), ("runs", 0, ValueError), ("runs", 1.5, TypeError)],
)
def test_counts_that_are_never_reached(name: str, value: Any, error: type[Exception]) -> None:
    algorithm = Steps(lambda state: state.x)
    setattr(algorithm, name, value)
    with pytest.raises(error, match=name):
        algorithm.run()


def test_whole_numbers_of_any_type() -> None:
    algorithm = Steps(lambda state: state.x)
    wanted = algorithm.run().moved
    for algorithm.max_iter in (6.0, np.float64(6), np.int8(6)):
        for algorithm.runs in (1.0, np.int64(1)):
            assert algorithm.run().moved == wanted
