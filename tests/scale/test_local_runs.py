"""Local states with several runs, and with fewer commits than epochs."""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial, _local
from tests.conftest import LONGER
from tests.scale.test_local import counted, folder
from tests.support.sharded import EPOCHS, At, Factors, Once, Runs, killed, several


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    factors = Factors(several())
    factors.run(engine=Serial())
    return factors.bits()


class OneRun(Runs):
    """The first run of `Runs` alone. Its random numbers are those of that run."""

    runs = 1


@pytest.mark.parametrize("best", [0, 1])
@pytest.mark.parametrize("stored", [False, True])
def test_the_parts_are_those_of_the_best_run(best: int, stored: bool, path: Path) -> None:
    where = (path, "f") if stored else ()
    runs = Runs(several(3), best)
    runs.run(*where, engine=Serial())
    assert (runs.state.epoch, runs.state.best_run) == (6, best)
    assert [part.tolist() for part in runs.local_parts("epochs")] == [[3]] * 3
    for W, rows in zip(runs.local_parts("W"), several(3), strict=True):
        error = np.square(np.abs(rows) - W @ runs.state.best_H).sum()
        assert error < 0.9 * np.square(np.abs(rows)).sum()
    if best == 0:
        one = OneRun(several(3), best)
        one.run(engine=Serial())
        assert runs.result() == one.result()
    if stored:
        expected = runs.result()
        shutil.rmtree(folder(path))
        assert runs.result() == expected
        with pmstore.open(path, "r") as store:
            epochs = {name.split("/")[2] for name in store if "/broadcasts/" in name}
        assert epochs == {str(3 * best + epoch) for epoch in range(3)}


@pytest.mark.parametrize("best", [0, 1])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_I35_a_fit_of_several_runs_goes_on(best: int, lost: bool, every: int, path: Path, tmp_path: Path) -> None:
    undisturbed = Runs(several(3), best)
    undisturbed.run(engine=Serial())
    for epoch in (1, 3, 5):  # the beginning, and the middle of the second run
        in_update = At(epoch, Once(tmp_path / f"once {epoch}", "raise"))
        with pytest.raises(ConnectionError):
            Runs(several(3), best, in_update).run(path, "f", engine=Serial(), commit_every=every)
        if lost:
            shutil.rmtree(folder(path))
    runs = Runs(several(3), best)
    runs.run(path, "f", engine=Serial(), commit_every=every)
    assert runs.result() == undisturbed.result()


@pytest.mark.parametrize("every", [1, 2, 3, 5, 1e9])
def test_I35_an_attempt_goes_on_with_the_states_of_the_last_commit(
    every: float, path: Path, tmp_path: Path, undisturbed: bytes
) -> None:
    factors = Factors(several(), in_update=At(4, Once(tmp_path / "once", "raise")))
    with pytest.raises(ConnectionError):
        factors.run(path, "f", engine=Serial(), commit_every=every)
    committed = {1: 4, 2: 4, 3: 3, 5: 0, 1e9: 0}[every]
    assert counted(path, commit_every=every) == (undisturbed, 5 * (EPOCHS - committed))


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_I35_a_program_of_several_runs_that_was_killed_goes_on(every: int, path: Path, tmp_path: Path) -> None:
    undisturbed = Runs(several(), 0)
    undisturbed.run(engine=Serial())
    for epoch in (1, 4):
        in_update = At(epoch, Once(tmp_path / f"once {epoch}", "kill"))
        runs = Runs(several(), 0, in_update)
        killed(functools.partial(runs.run, path, "f", engine=2, commit_every=every))
    runs = Runs(several(), 0)
    runs.run(path, "f", engine=2, commit_every=every)
    assert runs.result() == undisturbed.result()


def test_I35_the_decided_state_survives_a_map_that_raises(path: Path, undisturbed: bytes) -> None:
    class Fails:
        calls = 0

        def __call__(self, shard: Any) -> None:
            self.calls += 1
            if self.calls == 5 * 5 + 2:
                raise ArithmeticError("not today")

    with pytest.raises(pmstore.ShardError, match="epoch 5.*not today"):
        Factors(several(), Fails()).run(path, "f", engine=Serial(), commit_every=3)
    assert counted(path, commit_every=3) == (undisturbed, 5 * (EPOCHS - 3))


def test_I35_damage_of_a_third_slot(path: Path, tmp_path: Path, undisturbed: bytes) -> None:
    factors = Factors(several(), in_update=At(5, Once(tmp_path / "once", "raise")))
    with pytest.raises(ConnectionError):
        factors.run(path, "f", engine=Serial(), commit_every=3)
    with pmstore.open(folder(path) / "shard-1.pm") as store:
        group = store.group("shard")
        assert sorted(group["slots"]["epoch"]) == [3, 5, 6]
        slot = group["slots"]["epoch"].tolist().index(3)
        group[f"{slot}/W"][0] += 1
    assert counted(path, commit_every=3) == (undisturbed, 5 * (EPOCHS - 3) + 3)


@pytest.mark.parametrize("every", [1, 2])
def test_I35_a_crash_anywhere_in_a_commit_of_the_coordinator(
    every: int, crash_explorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local.Disk, "open", lambda self, path: None)  # the explorer allows one store
    monkeypatch.setattr(_local.Disk, "look", lambda self, path: contextlib.nullcontext({}))

    def check(store: Any, crash: Any) -> None:
        """The fit goes on, with nothing but the log."""
        runs = Runs(several(3), 0)
        runs.run(store, "f", engine=Serial(), commit_every=every)
        assert runs.result() == expected

    undisturbed = Runs(several(3), 0)
    undisturbed.run(engine=Serial())
    expected = undisturbed.result()
    with crash_explorer.recording(check, budget=40 * LONGER) as path:
        Runs(several(3), 0).run(path, "f", engine=Serial(), commit_every=every)
