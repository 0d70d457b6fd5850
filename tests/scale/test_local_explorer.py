"""The crash explorer with local states: all schedules pass, and mutants are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from pmstore.scale import _work
from pmstore.scale._broadcasts import Log
from pmstore.scale._copies import Copies
from pmstore.scale._local import Slots
from pmstore.scale._messages import HASH, Tag, digest_of
from pmstore.testing import CrashFailure, explore_mapreduce
from pmstore.testing._scale.disks import SimulatedCopies
from pmstore.testing._scale.schedule import COMMIT, KINDS, LOCAL, RARE
from tests.conftest import LONGER
from tests.scale.test_explorer import require_found
from tests.support.sharded import Factors, several


class Short(Factors):
    max_iter = 4


class Runs(Factors):
    """Three runs of two epochs. The second run is the best one, or the third, as `best` says."""

    max_iter = 2
    runs = 3
    best = 1

    def start(self) -> None:
        super().start()
        self.state.H = self.state.H + self.state.run

    def better(self) -> bool:
        return bool(self.state.run == self.best)


class LastOfRuns(Runs):
    best = 2


class Long(Runs):
    """Two runs that are long enough for the log of the first one, which is the best, to be cut off."""

    max_iter = 5
    runs = 2
    best = 0


def make(count: int = 4, kind: type[Factors] = Short) -> Factors:
    return kind([part[:6] for part in several(count)])


@pytest.mark.longer
@pytest.mark.parametrize("count, workers", [pytest.param(4, 3, marks=pytest.mark.long), (1, 1), (3, 2)])
def test_I35_every_schedule_has_the_bits_of_the_undisturbed_fit(count: int, workers: int) -> None:
    schedules = (250 if count == 4 else 50) * LONGER
    report = explore_mapreduce(lambda: make(count), schedules=schedules, workers=workers, seed=count)
    assert (report.schedules, report.shards, report.workers, report.epochs) == (schedules, count, workers, 4)
    if count == 4:
        assert set(report.accidents) >= {*KINDS, *LOCAL, *COMMIT} - {"another shard's", *RARE}
    assert report.outcomes["same bits"] > 0.85 * schedules


@pytest.mark.longer
@pytest.mark.parametrize("kind, every", [(Short, 2), (Short, 3), (Runs, 1), (LastOfRuns, 2)])
def test_I35_every_schedule_with_runs_and_fewer_commits(kind: type[Factors], every: int) -> None:
    report = explore_mapreduce(lambda: make(3, kind), schedules=60 * LONGER, commit_every=every, seed=every)
    assert set(report.accidents) >= {"machine lost", "bits rot", *COMMIT, "coordinator killed"}
    assert report.outcomes["same bits"] > 0.8 * 60 * LONGER


@pytest.mark.long
@pytest.mark.longer
@pytest.mark.parametrize("seed", range(4))
def test_more_schedules(seed: int) -> None:
    explore_mapreduce(lambda: make(5), schedules=100 * LONGER, seed=100 + seed, workers=seed + 1, faults=4 + 4 * seed)


# ---- mutants


def bring(accepts: Callable[[Slots, int, bytes], bool], skipped: int = 0) -> Callable[..., int]:
    """`Slots.bring` with another test of a state, or a replay that leaves out epochs."""

    def brought(self: Slots, epoch: int, wanted: bytes, log: Any, start: Any, steps: Any, copies: Any) -> int:
        if epoch == self.marks.began:
            self._begin(start)
            return epoch
        if accepts(self, epoch, wanted):
            return epoch
        for base in self._bases(epoch, copies):
            if base < min(log, default=epoch):
                return base
            if base == self.marks.began:
                self._begin(start)
            self._record["epoch"][self._slot(base)] += skipped
            for one in range(base + skipped, epoch):
                self.step(one, steps(one, log[one]))
            if accepts(self, epoch, wanted):
                return epoch
            self._discard(base)
        return -1

    return brought


def right(slots: Slots, epoch: int, wanted: bytes) -> bool:
    return slots.hash(epoch) == wanted


def its_epoch(slots: Slots, epoch: int, wanted: bytes) -> bool:
    return bool(slots.noted(epoch))


def of_any_run(slots: Slots, epoch: int, wanted: bytes) -> bool:
    """Sound, as the record of the slot tells, but perhaps of another run."""
    if not its_epoch(slots, epoch, wanted):
        return False
    hashes = (digest_of(slots._shard, Tag(run, 0, epoch), slots.arrays(epoch)) for run in (slots.run, "another run"))
    return right(slots, epoch, wanted) or slots.noted(epoch).hex() in hashes


def plant_replay_with_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes what the question broadcasts, instead of the log."""
    true = _work.Work.bring

    def brought(self: Any, slots: Any, i: int, held: Any, epoch: int, wanted: bytes, log: Any) -> int:
        newest = log[max(log)] if log else None
        return true(self, slots, i, held, epoch, wanted, dict.fromkeys(log, newest))

    monkeypatch.setattr(_work.Work, "bring", brought)


def plant_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is cut off below the last two epochs, though no other copy of the states exists."""
    true = Log.capture

    def capture(self: Log, group: Any) -> None:
        true(self, group)
        epochs = sorted({int(name.partition("/")[0]) for name in group})
        for name in list(group):
            if int(name.partition("/")[0]) in epochs[:-2]:
                del group[name]

    monkeypatch.setattr(Log, "capture", capture)


def plant_cut_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is cut off below the newest copy that any shard has."""

    def log_from(self: Copies, run: str, shards: int, now: int) -> int:
        return max((epoch for epochs in self.epochs(run).values() for epoch in epochs), default=0)

    monkeypatch.setattr(Copies, "log_from", log_from)


def plant_other_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has other arrays than its hash is of."""
    true = SimulatedCopies.put

    def put(self: SimulatedCopies, run: str, shard: int, epoch: int, found: bytes, arrays: Any) -> None:
        true(self, run, shard, epoch, found, [array + 1 for array in arrays])

    monkeypatch.setattr(SimulatedCopies, "put", put)


def plant_hash_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply has the hash of the state that the map began with."""
    true = _work.Work.__call__

    def call(self: Any, i: int, held: Any, contents: str, shared: Any, tag: Any, disk: Any) -> Any:
        result = true(self, i, held, contents, shared, tag, disk)
        if HASH in result and tag.epoch:
            result = {**result, HASH: shared["/hashes"][i][None]}
        return result

    monkeypatch.setattr(_work.Work, "__call__", call)


def place(slot: Callable[[Slots, int], int]) -> Callable[[pytest.MonkeyPatch], None]:
    """The state of an epoch is written to another slot."""
    return lambda monkeypatch: monkeypatch.setattr(Slots, "_place", lambda self, epoch, *read: slot(self, epoch))


OVERWRITTEN = "has overwritten the local state"
WRONG = "other bits|NondeterminismError|AssertionError"

MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a state is overwritten before its epoch is decided": (place(lambda slots, epoch: 0), OVERWRITTEN),
    "the wrong parity": (place(lambda slots, epoch: epoch // 2 % 2), OVERWRITTEN),
    "the hash is not compared": (lambda m: m.setattr(Slots, "bring", bring(its_epoch)), WRONG),
    "a state of another run counts": (lambda m: m.setattr(Slots, "bring", bring(of_any_run)), WRONG),
    "a replay leaves out an epoch": (lambda m: m.setattr(Slots, "bring", bring(right, 1)), "NondeterminismError"),
    "a replay takes the newest broadcast": (plant_replay_with_present, "NondeterminismError"),
    "the log is cut without copies": (plant_cut, "commit 3 .* other bits"),
    "the log is cut below the copies of another shard": (plant_cut_without_copies, "has no copy that is as new"),
    "copies have other arrays": (plant_other_arrays, "before epoch . is lost"),
    "the reply has the hash of the state before": (plant_hash_of_the_reply, "other bits: .*local_hashes"),
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_it_finds_a_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found(*MUTANTS[mutant], make, monkeypatch)


def plant_end_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins with the states that the run before has left, where they are."""
    true = Slots._begin

    def begin(self: Slots, start: Any) -> None:
        if not self.noted(self.marks.began):
            true(self, start)

    monkeypatch.setattr(Slots, "_begin", begin)


def plant_log_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has nothing of the best run."""
    true = Log.cut
    monkeypatch.setattr(Log, "cut", lambda self, first, end=None, best=None: true(self, first, end))


def plant_copies_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of the best run are deleted with those of others."""
    true = SimulatedCopies.forget
    monkeypatch.setattr(SimulatedCopies, "forget", lambda self, run, before, spared: true(self, run, before, range(0)))


def without_decided(slots: Slots, epoch: int) -> int:
    """The slot for an epoch, if only the epoch before it counts."""
    slot = slots._slot(epoch)
    others = [one for one in range(len(slots._arrays)) if slots._record["epoch"][one] != max(epoch - 1, 0)]
    return others[0] if slot is None else slot


MORE_MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, type[Factors], int]] = {
    "the decided state is overwritten": (place(without_decided), OVERWRITTEN, Short, 2),
    "the run before goes on": (plant_end_of_the_run_before, WRONG, Runs, 1),
    "the log of the best run is lost": (plant_log_of_the_best_run, "commit .* other bits", Runs, 2),
    "the copies of the best run are lost": (plant_copies_of_the_best_run, "has no copy that is as new", Long, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", MORE_MUTANTS)
def test_it_finds_a_mutant_with_runs_or_fewer_commits(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message, kind, every = MORE_MUTANTS[mutant]
    require_found(plant, message, lambda: make(3, kind), monkeypatch, commit_every=every)


# ---- users' own mistakes


def test_a_start_that_is_no_function_is_found() -> None:
    drawn = iter(range(1 << 20))

    class Clock(Short):
        def local_start(self, shard: Any, local: Any, rng: np.random.Generator) -> None:
            local.W = 1 + next(drawn)

    with pytest.raises(CrashFailure, match=r"other bits|NondeterminismError"):
        explore_mapreduce(lambda: Clock([part[:6] for part in several(3)]), schedules=100)


def test_a_state_beside_the_local_state_is_found() -> None:
    class Beside(Short):
        """Keeps a number for each shard in the process."""

        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator, local: Any) -> Mapping[str, Any]:
            calls = vars(self).setdefault("calls", {})
            calls[len(shard)] = calls.get(len(shard), 0) + 1
            local.W += calls[len(shard)]
            return super().map(shard, shared, rng, local)

    with pytest.raises(CrashFailure, match="two results|other bits|NondeterminismError"):
        explore_mapreduce(lambda: Beside([part[:6] for part in several(3)]), schedules=100)
