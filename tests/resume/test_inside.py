"""Fits that are called inside of themselves, twice at once, or beside changes that their callers have pending."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore


class Walk(pmstore.Resumable):
    """inside: called once, in the method of the name `where`."""

    max_iter = 5

    def __init__(self, inside: Callable[[], object] | None = None, where: str = "step", seed: int = 0) -> None:
        self.inside, self.where, self.seed = inside, where, seed

    def _at(self, where: str) -> None:
        if where == self.where and self.inside is not None:
            inside, self.inside = self.inside, None
            inside()

    def fields(self) -> list[pmstore.Field]:
        self._at("fields")
        return [pmstore.Field("x", 3)]

    def fingerprint(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def start(self) -> None:
        self._at("start")
        self.state.x = self.seed

    def step(self) -> None:
        self._at("step")
        self.state.x += 1

    def converged(self) -> bool:
        self._at("converged")
        return False


def test_an_object_runs_one_fit_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "s.pm"
    walk = Walk(lambda: walk.run())
    with pytest.raises(RuntimeError, match="this Walk is at work, and runs one fit at a time: make another one"):
        walk.run(path, "f")
    assert walk.run(path, "f").x.tolist() == [5, 5, 5]  # the error has left nothing
    assert Walk().run(path, "f").x.tolist() == [5, 5, 5]


def test_an_object_is_not_run_by_two_threads(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            walk.run(tmp_path / "s.pm", "g")
        except RuntimeError as error:
            found.append(error)

    def inside() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    walk = Walk(inside)
    assert walk.run(tmp_path / "s.pm", "f").x.tolist() == [5, 5, 5] and len(found) == 1
    with pmstore.open(tmp_path / "s.pm", "r") as store:
        assert "g" not in store


@pytest.mark.parametrize("call", ["run", "reset"])
@pytest.mark.parametrize("where", ["fields", "start", "step", "converged"])
def test_a_fit_inside_of_itself_does_not_wait_for_ever(where: str, call: str, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        with pytest.raises(pmstore.TransactionError, match="inside"):
            Walk(lambda: getattr(Walk(), call)(store, "f"), where).run(store, "f")
        assert Walk(lambda: Walk().run(store, "g"), "start").run(store, "f").x.tolist() == [5, 5, 5]


class Sum(pmstore.MapReduce):
    """other: the path of a store for a run inside of the first epoch."""

    max_iter = 3

    def __init__(self, other: Path) -> None:
        self.other, self.refused = other, ""
        self.shards = [np.ones((4, 3))] * 2

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("sum", 3)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        pass

    def map(self, shard: Any, shared: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"sum": shard.sum(axis=0)}

    def update(self, total: Any) -> None:
        self.state.sum += total["sum"]
        if not self.refused:
            self.refused = "not refused"
            try:
                self.run(self.other)
            except RuntimeError as error:
                self.refused = str(error)


def test_a_refused_run_of_a_fit_over_shards_leaves_the_other_one(tmp_path: Path) -> None:
    fit = Sum(tmp_path / "other.pm")
    assert fit.run(tmp_path / "s.pm").sum.tolist() == [24, 24, 24]
    assert "this Sum is at work" in fit.refused and not (tmp_path / "other.pm").exists()


def test_a_fork_may_run_what_runs_in_another_thread_of_its_parent(tmp_path: Path) -> None:
    def inside() -> None:
        inside_of.wait()
        forked.wait()

    inside_of, forked = threading.Barrier(2), threading.Barrier(2)
    walk = Walk(inside)
    thread = threading.Thread(target=walk.run)
    thread.start()
    inside_of.wait()
    child = os.fork()
    if not child:
        try:
            os._exit(0 if walk.run().x.tolist() == [5, 5, 5] else 1)
        finally:
            os._exit(1)
    forked.wait()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0 and walk.state.x.tolist() == [5, 5, 5]


def test_a_fit_by_path_inside_of_an_import_gives_its_opening_back(tmp_path: Path) -> None:
    path = tmp_path / "s.pm"
    Walk().run(path, "f")
    np.savez(tmp_path / "x.npz", a=np.ones(1000))
    found = []
    with pmstore.open(path) as store:
        pmstore.load_into(store, tmp_path / "x.npz", progress=lambda *_: found.append(Walk().run(path, "f").x.tolist()))
        assert store.openings == 1
    assert found and all(one == [5, 5, 5] for one in found)


def refused_by_its_fingerprint(path: Path) -> None:
    with pytest.raises(pmstore.FingerprintMismatchError):
        Walk(seed=1).run(path, "f")


def refused_by_its_fields(path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Walk(fail, "fields").run(path, "g")


def interrupted_in_a_step(path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Walk(stop, seed=1).run(path, "g")


def reset_of_something_else(path: Path) -> None:
    with pytest.raises(pmstore.FingerprintMismatchError):
        Walk().reset(path, "x")


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[pmstore.Store]:
    """An open store with a finished fit, and changes that are pending."""
    with pmstore.open(tmp_path / "s.pm") as store:
        Walk().run(store, "f")
        store["x"] = np.zeros(3)
        store.commit()
        store["x"][:] = 5
        store["y"] = 1
        yield store


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    "refused",
    [refused_by_its_fingerprint, refused_by_its_fields, interrupted_in_a_step, reset_of_something_else],
)
def test_what_is_pending_stays_when_a_fit_by_path_fails(
    beside: pmstore.Store, refused: Callable[[Path], None], in_thread: bool
) -> None:
    path = Path(beside.path)
    if in_thread:
        thread = threading.Thread(target=refused, args=(path,))
        thread.start()
        thread.join()
    else:
        refused(path)
    assert beside["x"].tolist() == [5, 5, 5] and beside["y"] == 1 and beside.openings == 1
    beside.commit()
    with pmstore.open(path, "r") as reader:
        assert reader["x"].tolist() == [5, 5, 5] and reader["y"] == 1
        assert "g/x" not in reader or reader["g/x"].tolist() == [1, 1, 1]
