"""The protocol: lost and late questions of a coordinator, what `timeout` counts, and the figures of epochs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore.scale import Processes, Serial, Tag, shards_of
from pmstore.scale._epochs import FIRST, Epochs
from pmstore.scale._holder import Describe
from tests.support.sharded import Once, Walk, several


@pytest.mark.parametrize("hangs", [False, True])
def test_a_timeout_does_not_count_the_start_of_workers(hangs: bool) -> None:
    now = [0.0]

    class Starts(Serial):
        """Begins after 100 s, and then answers, or hangs."""

        def has_begun(self) -> bool:
            return now[0] >= 100

        def completed(self, timeout: float | None) -> Any:
            if not self.has_begun() or hangs:
                now[0] += min(40.0, math.inf if timeout is None else timeout)
                return []
            return super().completed(timeout)

    engine, shards = Starts(), shards_of(several(3))
    engine.start(shards)
    epochs = Epochs(engine, shards, timeout=30.0, clock=lambda: now[0])
    if hangs:
        with pytest.raises(pmstore.ShardTimeoutError, match="no result after 30 s"):
            epochs.run(Describe(), {}, Tag("run", 1, -1), lambda left, right: left)
    else:
        epochs.run(Describe(), {}, Tag("run", 1, -1), lambda left, right: left)
    assert now[0] == (130 if hangs else 100)


def test_processes_tell_when_they_have_begun() -> None:
    engine, shards = Processes(2), shards_of(several(2))
    engine.start(shards)
    try:
        assert not engine.has_begun()
        while not engine.has_begun():  # without a question
            assert engine.completed(None) == []
        for place in engine._places:
            place.replace()
        assert engine.has_begun()
    finally:
        engine.close()


@pytest.mark.parametrize(("silent", "limit"), [((1, 2, 3, 4), 16.0), ((2, 3, 4), 16.0), ((0, 1, 2, 3, 4), FIRST + 10)])
def test_a_silent_worker_in_the_first_epoch(silent: tuple[int, ...], limit: float) -> None:
    """It is noticed by the time that the others took, although it has more than half of the shards."""
    now, asked = [0.0], [0] * 5

    class Silent(Serial):
        def submit(self, i: int, *question: Any) -> None:
            asked[i] += 1
            if i not in silent or asked[i] > 1:
                super().submit(i, *question)

        def completed(self, timeout: float | None) -> Any:
            replies = super().completed(timeout)
            now[0] += 1 if replies else math.inf if timeout is None else timeout
            return replies

    engine, shards = Silent(), shards_of(several(5))
    engine.start(shards)
    epochs = Epochs(engine, shards, clock=lambda: now[0])
    epochs.run(Describe(), {}, Tag("run", 1, -1), lambda left, right: left)
    assert asked == [1 + (i in silent) for i in range(5)]
    assert epochs.late == len(silent)
    assert now[0] <= limit + len(silent)


def test_shards_that_take_turns_are_not_late_in_the_first_epoch() -> None:
    """Two workers with eight shards each, which take a second."""
    now = [0.0]

    class Turns(Serial):
        def completed(self, timeout: float | None) -> Any:
            replies = [*super().completed(timeout), *super().completed(timeout)]
            now[0] += 1
            return replies

    engine, shards = Turns(), shards_of(several(16))
    engine.start(shards)
    epochs = Epochs(engine, shards, clock=lambda: now[0])
    epochs.run(Describe(), {}, Tag("run", 1, -1), lambda left, right: left)
    assert (now[0], epochs.late) == (8.0, 0)


class LeavesProcesses:
    """Starts processes in the background, by a shell and by a fork, and kills its own, once times are known."""

    def __init__(self, folder: Path) -> None:
        self.once, self.pids, self.calls = Once(folder / "once", "kill"), folder / "pids", 0

    def __call__(self, shard: Any) -> None:
        self.calls += 1
        if self.calls > 2 and not self.pids.exists():
            os.system(f"sleep 600 & echo $! >{self.pids}")
            if not (child := os.fork()):
                signal.pause()
            with self.pids.open("a") as file:
                file.write(str(child))
            self.once()


def test_I32_processes_of_a_map_do_not_hide_the_death_of_its_worker(tmp_path: Path) -> None:
    accident = LeavesProcesses(tmp_path)
    walk = Walk(several(1), accident)
    walk.run(engine=1)
    for pid in accident.pids.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert walk.history_["lost"].sum() == 1


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            {"objective": 1.0, "late": 7},
            ValueError,
            "not attempt, iteration, late, lost, .*it returned 'objective', 'late'$",
        ),
        ({"lost": 1.0}, ValueError, "not attempt, iteration, late, lost, .*it returned 'lost'$"),
        (dict.fromkeys(["objective", "a", "b"], 1.0), ValueError, "at most 1 other, .*returned 'objective', 'a', 'b'$"),
        ({"objective": "q"}, TypeError, "must be numbers, not {'objective': 'q'}$"),
        (5, TypeError, "a dict of figures, or None, not 5$"),
    ],
)
def test_errors_of_figures_name_what_update_returned(returned: Any, error: type[Exception], message: str) -> None:
    class Bad(Walk):
        def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(error, match=message) as caught:
        Bad(several(2)).run(engine=Serial())
    assert "update() " in str(caught.value) and "step()" not in str(caught.value)


def test_update_may_return_one_figure_besides_the_objective() -> None:
    class Good(Walk):
        def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
            return {**super().update(total), "other": 3.0}

    good = Good(several(2))
    good.run(engine=Serial())
    assert (good.history_["other"] == 3).all() and not good.history_["late"].any()
