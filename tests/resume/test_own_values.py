"""A field changes with nothing else, and a fingerprint's keys are the algorithm's own."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.values import changeable_inside

sparse = pytest.importorskip("scipy.sparse")


@dataclasses.dataclass
class Layer:
    weights: Any


pmstore.register(Layer, name="tests.own_values.Layer")


class Locked:
    """A value that can be neither pickled nor copied."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.lock = rows, threading.Lock()


pmstore.register(
    Locked, lambda value: {"rows": (value.rows,)}, lambda parts: Locked(*parts["rows"]), name="tests.own_values.Locked"
)


def around(x: Any) -> Any:
    """A sparse matrix over an array."""
    return sparse.csr_matrix((x, np.arange(3), [0, 3]), shape=(1, 3), copy=False)


def array_of(value: Any) -> Any:
    """The array in a value."""
    if isinstance(value, list):
        return array_of(value[0])
    if isinstance(value, Locked):
        return value.rows
    if isinstance(value, dict):
        return value["x"]
    return value.weights if isinstance(value, Layer) else value.data if sparse.issparse(value) else np.asarray(value)


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
        state.moved += float(np.sum(state.x + state.array + state.list[0] - array_of(state.other)))
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
        lambda state: collections.OrderedDict(x=state.x),
        lambda state: Layer(state.x),
        lambda state: Layer(state.list[0]),
        lambda state: around(state.x),
        lambda state: np.ma.array(state.array, copy=False),
        lambda state: Locked(state.x),
    ],
    ids=[
        "field",
        "view of a field",
        "array",
        "view of an array",
        "list",
        "field in a list",
        "part of a list",
        "field in an OrderedDict",
        "field in an object",
        "part of a list in an object",
        "field in a sparse matrix",
        "masked array",
        "field in an object with a lock",
    ],
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


class Best(pmstore.Resumable):
    """A value that is assigned from the best run so far."""

    max_iter, runs = 2, 3

    def __init__(self, assign: Callable[[Any], Any]) -> None:
        self.assign = assign

    def fields(self) -> Any:
        return [
            pmstore.Field("x", 3),
            pmstore.Field("best", 3, role="best"),
            pmstore.Field("first", dtype=object),
        ]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.x = float(self.state.run)

    def step(self) -> None:
        self.state.x += 10
        if self.state.run == 1 and self.state.iteration == 0:
            self.state.first = self.assign(self.state.best)

    def better(self) -> bool:
        return True

    def keep(self) -> None:
        self.state.best = self.state.x


@pytest.mark.parametrize("assign", [lambda best: best, lambda best: best[:2], lambda best: [best], Layer, around])
def test_a_field_does_not_change_with_the_best_run(assign: Callable[[Any], Any], tmp_path: Path) -> None:
    for store in (None, tmp_path / "x.pm"):
        assert (array_of(Best(assign).run(store, None if store is None else "fit").first) == 20).all()


class Kinds(pmstore.Resumable):
    """Values of types with more than an array, and arrays with gaps."""

    max_iter = 4

    def __init__(self, last: int = 9) -> None:
        self.last = last
        self.wide = np.asfortranarray(np.random.default_rng(0).normal(size=(700, 50)))

    def fields(self) -> Any:
        for name in ("masked", "late", "records", "sparse", "layer", "gaps", "inside", "turned"):
            yield pmstore.Field(name, dtype=object)
        yield pmstore.Field("sums", 50)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.masked = np.ma.array(np.arange(8.0), mask=np.arange(8) % 2 == 0)
        self.state.late = np.ma.array(np.arange(4.0))
        self.state.records = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i8"), ("b", "f8")])
        self.state.sparse, self.state.layer = around(np.ones(3)), Layer(np.ones(3))
        self.state.gaps, self.state.inside = self.wide[:500], [self.wide[:500]]
        self.state.turned = self.wide[:600].reshape(20, 30, 50).transpose(1, 0, 2)

    def step(self) -> None:
        state = self.state
        if state.iteration == self.last:
            raise KeyboardInterrupt
        state.masked = state.masked * 2 + 1
        if state.iteration == 2:
            state.late = np.ma.array(np.arange(4.0), mask=[0, 1, 0, 0])
        state.records.b += 1
        state.sparse = state.sparse * 2.0
        state.layer.weights *= 2
        state.sums += state.gaps.mean(axis=0) + state.inside[0].mean(axis=0) + state.turned.mean(axis=(0, 1))
        state.sums *= 1.1

    def found(self, state: Any) -> Iterator[Any]:
        yield from (state.masked.sum(), type(state.masked), type(state.late), state.late.mask.tolist())
        yield from (type(state.records), state.records.b.tolist(), state.sparse.data.tolist())
        yield from (state.layer.weights.tolist(), state.sums.tolist(), state.gaps.flags.f_contiguous)


@pytest.mark.parametrize("last", range(4))
def test_a_value_is_the_same_after_an_interrupt(last: int, tmp_path: Path) -> None:
    wanted = list(Kinds().found(Kinds().run()))
    with pytest.raises(KeyboardInterrupt):
        Kinds(last).run(tmp_path / "x.pm", "fit")
    assert list(Kinds().found(Kinds().run(tmp_path / "x.pm", "fit"))) == wanted
    assert list(Kinds().found(Kinds().run(tmp_path / "x.pm", "fit"))) == wanted  # loaded


def test_a_result_is_a_copy(tmp_path: Path) -> None:
    wanted = list(Kinds().found(Kinds().run()))
    with pmstore.open(tmp_path / "x.pm") as store:
        state = Kinds().run(store, "fit")
        for array in (state.masked, state.late, state.records.b, state.sparse.data, state.layer.weights, state.gaps):
            array[...] = -1
        store["other"] = 1
        store.commit()
        assert list(Kinds().found(Kinds().run(store, "fit"))) == wanted


class Rows(pmstore.Resumable):
    """A value with a lock, one that is an array, and one with an array. One of them is in another one, too."""

    max_iter = 4

    def __init__(self, last: int = 9, store: Any = None) -> None:
        self.last, self.store = last, store

    def fields(self) -> Any:
        return [pmstore.Field(name, dtype=object) for name in ("rows", "array", "layer", "list")]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.list = []
        self.state.array, self.state.layer = np.zeros(3), Layer(np.zeros(3))

    def step(self) -> None:
        state = self.state
        if state.iteration == self.last:
            raise KeyboardInterrupt
        if self.store is not None and state.iteration > 0:
            assert not np.shares_memory(state.array, self.store["fit/array"])
            assert not np.shares_memory(state.layer.weights, self.store["fit/layer"].weights)
        state.list.append(state.iteration)
        state.rows = Locked(state.list)
        state.list.append(-1)
        state.layer.weights += state.array
        state.array += 1


def test_a_value_that_cannot_be_copied(tmp_path: Path) -> None:
    """Its parts can, and belong to the fit alone: the store has those of the last commit."""
    wanted = Rows().run()
    with pmstore.open(tmp_path / "x.pm") as store:
        with pytest.raises(KeyboardInterrupt):
            Rows(2).run(store, "fit")
        for algorithm in (Rows(store=store), Rows()):  # resumed, loaded
            state = algorithm.run(store, "fit", commit_every=9)
            assert state.rows.rows == wanted.rows.rows == [0, -1, 1, -1, 2, -1, 3] and state.list == wanted.list
            assert state.layer.weights.tolist() == wanted.layer.weights.tolist() == [6.0] * 3
        state.list.append(5)
        store["other"] = 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", pmstore.LostUpdateWarning)
            store.commit()


def test_tuples_that_encode_makes_have_ids_of_their_own() -> None:
    """A tuple that is gone could have the place in memory of the next one."""
    assert len(changeable_inside([[Locked(np.ones(3))] for _ in range(50)])[1]) == 50


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


class Fails(pmstore.Resumable):
    """Fails at its first commit: one field is inside of another one; or in its first step."""

    max_iter = 2

    def __init__(self, where: str) -> None:
        self.where = where

    def fields(self) -> Any:
        yield pmstore.Field("a", 3)
        if self.where == "start":
            yield pmstore.Field("a/b", 3)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        pass

    def step(self) -> None:
        if self.where == f"step {self.state.iteration}":
            raise OSError(self.where)


@pytest.mark.parametrize("where", ["start", "step 0", "step 1"])
def test_a_fit_that_fails_takes_back_nothing_of_the_callers(where: str, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "values.pm") as store:
        store["array"] = np.zeros(2)
        store.commit()
        for value in (1, 2):  # starts, resumes
            store["array"][0] = store["value"] = value
            with pytest.raises((pmstore.NameConflictError, OSError)):
                Fails(where).run(store, "fit")
            assert store["array"][0] == store["value"] == value


class Draws(Fails):
    """A fit whose fingerprint has the state of a generator."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.generator = np.random.default_rng(0)

    def fields(self) -> Any:
        return [pmstore.Field("total"), pmstore.Field("generator", generator=self.generator)]

    def fingerprint(self) -> dict[str, Any]:
        return {"generator": self.generator}

    def step(self) -> None:
        self.state.total += self.generator.uniform()
        super().step()


def test_a_fit_that_fails_leaves_its_generator_as_it_was(tmp_path: Path) -> None:
    fit, whole = Draws("step 1"), Draws("nowhere").run().total
    with pytest.raises(OSError, match="step 1"):
        fit.run(tmp_path / "values.pm", "fit")
    fit.where = "nowhere"
    assert fit.run(tmp_path / "values.pm", "fit").total == whole
    assert fit.resumed_from_iter_ == 1


def test_fields_of_a_wrong_kind() -> None:
    with pytest.raises(ValueError, match=r"axes \(3,\) of the dtype of 'x' belong into its shape, with dtype=float64"):
        pmstore.Field("x", (2,), "(3,)f8")
    with pytest.raises(TypeError, match=r"the generator of 'g' is .* of numpy, no int: np\.random\.default_rng"):
        pmstore.Field("g", generator=3)  # type: ignore[arg-type]
