"""Frames in the state and in the fingerprint of a fit (`make test-frames` installs what makes them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._resume.fingerprint import describe_parameters, digest
from tests.support.resuming import copied


class Frames(pmstore.Resumable):
    """Changes a frame in each step, and notes figures of it."""

    max_iter = 4

    def __init__(self, make: Callable[[], Any], change: Callable[[Any], Any], figure: Callable[[Any], float]) -> None:
        self.make, self.change, self.figure = make, change, figure

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("frame", dtype=object), pmstore.Field("seen", dtype=object)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.frame, self.state.seen = self.make(), []

    def step(self) -> None:
        changed = self.change(self.state.frame)
        if changed is not None:
            self.state.frame = changed
        self.state.seen.append(self.figure(self.state.frame).hex())


def values(seed: int) -> Any:
    """Numbers of many magnitudes, whose sum depends on the order of additions."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=330) * 10.0 ** rng.integers(-3, 9, size=330)


def of_pandas(change: Callable[[Any, Any], Any], figure: Callable[[Any], Any]) -> Callable[[], Frames]:
    def make() -> Frames:
        pandas = pytest.importorskip("pandas")
        of = lambda: pandas.DataFrame(values(1).reshape(30, 11))  # noqa: E731
        return Frames(of, lambda frame: change(pandas, frame), lambda frame: float(figure(frame)))

    return make


def of_mixed_floats() -> Frames:
    pandas = pytest.importorskip("pandas")
    columns = {f"c{n}": values(n)[:50].astype("f4" if n % 2 else "f8") for n in range(7)}
    return Frames(lambda: pandas.DataFrame(columns), lambda frame: frame * 1.1, lambda frame: frame.sum(axis=1).sum())


def with_rows(pandas: Any, frame: Any) -> Any:
    return pandas.concat([frame, pandas.DataFrame(values(len(frame)).reshape(30, 11))])


def in_place(_: Any, frame: Any) -> None:
    frame[f"n{frame.shape[1]}"] = frame.iloc[:, 0] + 0.1


def of_polars() -> Frames:
    polars = pytest.importorskip("polars")
    one = lambda seed: polars.DataFrame({"a": values(seed)})  # noqa: E731

    def grow(frame: Any) -> None:
        frame.vstack(one(len(frame)), in_place=True)

    return Frames(lambda: one(0), grow, lambda frame: frame["a"].sum())


def of_arrow() -> Frames:
    arrow = pytest.importorskip("pyarrow")
    compute = pytest.importorskip("pyarrow.compute")
    one = lambda seed: arrow.table({"a": values(seed)})  # noqa: E731
    grow = lambda table: arrow.concat_tables([table, one(len(table))])  # noqa: E731
    return Frames(lambda: one(0), grow, lambda table: compute.sum(table["a"]).as_py())


@pytest.mark.parametrize(
    "make",
    [
        of_mixed_floats,
        of_pandas(lambda _, frame: frame * 1.01, lambda frame: frame.groupby(frame[0] > 0).sum().to_numpy().sum()),
        of_pandas(with_rows, lambda frame: frame.to_numpy().sum()),
        of_pandas(in_place, lambda frame: frame.sum(axis=1).sum()),
        of_polars,
        of_arrow,
    ],
)
def test_a_resumed_frame_computes_the_same_bits(make: Callable[[], Frames], path: Path) -> None:
    wanted = make().run().seen
    with copied(path) as copies:
        assert make().run(path, "fit").seen == wanted
    assert len(copies) >= 4
    for copy in copies:
        assert make().run(copy, "fit").seen == wanted


def test_a_multi_index_counts_by_its_elements() -> None:
    pandas = pytest.importorskip("pandas")
    first = pandas.MultiIndex.from_tuples([(1, "a"), (2, "b")])
    other = pandas.MultiIndex([[2, 1], ["b", "a"]], [[1, 0], [1, 0]])
    assert describe_parameters({"p": first}) == describe_parameters({"p": other})


def test_categories_count_with_their_order() -> None:
    pandas = pytest.importorskip("pandas")
    for kind in (pandas.Categorical, pandas.CategoricalIndex):
        kinds = [(order, ordered) for order in (["a", "b"], ["b", "a"]) for ordered in (True, False)]
        made = [kind(["a", "b"], categories=order, ordered=ordered) for order, ordered in kinds]
        for wrap in (lambda one: one, lambda one: [one]):
            assert len({digest(describe_parameters({"p": wrap(one)})) for one in made}) == 4
        same = kind(["a", "b"], categories=list("ab"), ordered=True)
        assert describe_parameters({"p": same}) == describe_parameters({"p": made[0]})
