"""Retrying: calls survive outages. No test waits: the clock and the waits are the tests' own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore.archive._objects import LocalPlace, MissingObjectError, ObjectExistsError, Place, RecoveredError, Retrying


class Flaky(Place):
    """A place whose next calls fail as `errors` says; None: the call works."""

    def __init__(self, place: Place) -> None:
        self.place, self.url = place, place.url
        self.errors: list[Exception | None] = []
        self.calls = 0
        self.after = False  # fails when the work is done

    def _do(self, call: Callable[[], Any]) -> Any:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is None or self.after:
            result = call()
        if error is not None:
            raise error
        return result

    def put(self, name: str, data: Sequence[Any]) -> None:
        self._do(lambda: self.place.put(name, data))

    def create(self, name: str, data: Sequence[Any]) -> None:
        self._do(lambda: self.place.create(name, data))

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        return bytes(self._do(lambda: self.place.get(name, at, count)))

    def size(self, name: str) -> int:
        return int(self._do(lambda: self.place.size(name)))

    def list(self, folder: str) -> list[str]:
        return list(self._do(lambda: self.place.list(folder)))

    def delete(self, names: Iterable[str]) -> None:
        self._do(lambda: self.place.delete(names))


def away(code: int = errno.EIO, transient: bool = True) -> pmstore.ArchiveUnavailableError:
    error = pmstore.ArchiveUnavailableError(code, "away")
    error.transient = transient
    return error


class Trial:
    """A Retrying over a flaky folder, with a clock of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.flaky = Flaky(LocalPlace(str(folder)))
        self.now = 100.0
        self.waits: list[float] = []
        self.told: list[Exception] = []
        self.stop = threading.Event()
        self.place = Retrying(
            self.flaky,
            self.stop,
            self.told.append,
            clock=lambda: self.now,
            wait=self.wait,
            **{"jitter": lambda: 0.0, **options},
        )

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return self.stop.is_set()


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_an_outage_is_told_once_and_its_end(trial: Trial) -> None:
    first = away()
    trial.flaky.errors = [first, away(), away()]
    trial.place.put("a", [b"x"])
    assert trial.told[0] is first and isinstance(trial.told[1], RecoveredError) and len(trial.told) == 2
    assert trial.told[1].seconds == pytest.approx(0.7) and "answers again, after 0.7 s" in str(trial.told[1])
    assert trial.place.get("a") == b"x" and len(trial.told) == 2


def test_waits_double_up_to_a_limit(trial: Trial) -> None:
    trial.flaky.errors = [away() for _ in range(12)]
    assert trial.place.list("") == []
    assert trial.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30])


def test_waits_differ_by_chance(tmp_path: Path) -> None:
    numbers = iter([1.0, 0.5, 0.0])
    trial = Trial(tmp_path, jitter=lambda: next(numbers))
    trial.flaky.errors = [away(), away(), away()]
    trial.place.delete(["a"])
    assert trial.waits == pytest.approx([0.05, 0.15, 0.4])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_target_is_waited_for(trial: Trial, code: int) -> None:
    trial.flaky.errors = [away(code)]
    trial.place.create("a", [b"x"])
    assert trial.place.size("a") == 1


def test_permanent_failures_are_raised_at_once(trial: Trial) -> None:
    trial.flaky.errors = [away(errno.EACCES, transient=False)]
    with pytest.raises(pmstore.ArchiveUnavailableError):
        trial.place.put("a", [b"x"])
    assert not trial.waits and not trial.told


@pytest.mark.parametrize("error", [KeyError("bug"), KeyboardInterrupt()])
def test_other_errors_pass(trial: Trial, error: Any) -> None:
    trial.flaky.errors = [error]
    with pytest.raises(type(error)):
        trial.place.list("")
    assert trial.flaky.calls == 1


def test_answers_that_are_no_failures(trial: Trial) -> None:
    trial.flaky.errors = [away()]
    with pytest.raises(MissingObjectError):
        trial.place.get("a")
    assert len(trial.waits) == 1 and isinstance(trial.told[1], RecoveredError)


def test_closing_interrupts_a_wait(tmp_path: Path) -> None:
    flaky = Flaky(LocalPlace(str(tmp_path)))
    stop = threading.Event()
    place = Retrying(flaky, stop, lambda error: stop.set())
    flaky.errors = [away()] * 5
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.put("a", [b"x"])
    assert flaky.calls == 1
    with pytest.raises(pmstore.ArchiveUnavailableError):
        place.put("a", [b"x"])
    assert flaky.calls == 2, "a call made afterwards is tried once"


def test_patience_ends(tmp_path: Path) -> None:
    trial = Trial(tmp_path, patience=1.0)
    trial.flaky.errors = [away() for _ in range(99)]
    with pytest.raises(pmstore.ArchiveUnavailableError):
        trial.place.list("")
    assert sum(trial.waits) == pytest.approx(1.0)


def test_a_creation_whose_answer_was_lost(trial: Trial) -> None:
    trial.flaky.errors, trial.flaky.after = [away()], True
    trial.place.create("a", [b"x" * 10, b"", b"y"])
    assert trial.place.get("a") == b"x" * 10 + b"y"


@pytest.mark.parametrize("other", [b"y", b"xx", b""])
def test_a_creation_that_another_one_won(trial: Trial, other: bytes) -> None:
    trial.flaky.place.create("a", [other])
    trial.flaky.errors = [away()]
    with pytest.raises(ObjectExistsError):
        trial.place.create("a", [b"x"])
    assert trial.place.get("a") == other


def test_the_same_bytes_twice_are_no_creation(trial: Trial) -> None:
    trial.place.create("a", [b"x"])
    with pytest.raises(ObjectExistsError):
        trial.place.create("a", [b"x"])


def test_names_are_kept_for_the_next_try(trial: Trial) -> None:
    trial.flaky.place.put("a", [b"x"])
    trial.flaky.errors = [away()]
    trial.place.delete(name for name in ("a", "b"))
    assert trial.place.list("") == []
