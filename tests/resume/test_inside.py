"""Fits that are called inside of themselves, twice at once, or beside changes that their callers have pending."""

from __future__ import annotations

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
