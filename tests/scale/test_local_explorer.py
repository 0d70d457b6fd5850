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


def make(count: int = 4) -> Short:
    return Short([part[:6] for part in several(count)])


@pytest.mark.longer
@pytest.mark.parametrize("count, workers", [(4, 3), (1, 1), (3, 2)])
def test_I35_every_schedule_has_the_bits_of_the_undisturbed_fit(count: int, workers: int) -> None:
    schedules = (250 if count == 4 else 50) * LONGER
    report = explore_mapreduce(lambda: make(count), schedules=schedules, workers=workers, seed=count)
    assert (report.schedules, report.shards, report.workers, report.epochs) == (schedules, count, workers, 4)
    if count == 4:
        assert set(report.accidents) >= {*KINDS, *LOCAL, *COMMIT} - {"another shard's", *RARE}
    assert report.outcomes["same bits"] > 0.85 * schedules


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_more_schedules(seed: int) -> None:
    explore_mapreduce(lambda: make(5), schedules=200 * LONGER, seed=100 + seed, workers=seed + 1, faults=4 + 4 * seed)


# ---- mutants


def bring(accepts: Callable[[Slots, int, bytes], bool], skipped: int = 0) -> Callable[..., int]:
    """`Slots.bring` with another test of a state, or a replay that leaves out epochs."""

    def brought(self: Slots, epoch: int, wanted: bytes, log: Any, start: Any, steps: Any, copies: Any) -> int:
        if epoch == 0:
            self._begin(start)
            return 0
        if accepts(self, epoch, wanted):
            return epoch
        for base in self._bases(epoch, copies):
            if base < min(log, default=epoch):
                return base
            if base == 0:
                self._begin(start)
            for one in range(base + skipped, epoch):
                self.step(one, steps(one, log[one]))
            if accepts(self, epoch, wanted):
                return epoch
            self._discard()
        return -1

    return brought


def right(slots: Slots, epoch: int, wanted: bytes) -> bool:
    return slots.hash(epoch) == wanted


def its_epoch(slots: Slots, epoch: int, wanted: bytes) -> bool:
    return bool(slots._record["epoch"][epoch % 2] == epoch)


def of_any_run(slots: Slots, epoch: int, wanted: bytes) -> bool:
    """Sound, as the record of the slot tells, but perhaps of another run."""
    hashes = (digest_of(slots._shard, Tag(run, 0, epoch), slots.arrays(epoch)) for run in (slots.run, "another run"))
    record = slots._record["hash"][epoch % 2].tobytes().hex()
    return right(slots, epoch, wanted) or (its_epoch(slots, epoch, wanted) and record in hashes)


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


def plant_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "arrays", lambda self, epoch: self._arrays[0])


def plant_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs 2 and 3 have the same slot."""
    monkeypatch.setattr(Slots, "arrays", lambda self, epoch: self._arrays[epoch // 2 % 2])


WRONG = "other bits|NondeterminismError|AssertionError"

MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a state is overwritten before its epoch is decided": (plant_one_slot, "has overwritten the local state"),
    "the wrong parity": (plant_parity, "has overwritten the local state"),
    "the hash is not compared": (lambda m: m.setattr(Slots, "bring", bring(its_epoch)), WRONG),
    "a state of another run counts": (lambda m: m.setattr(Slots, "bring", bring(of_any_run)), WRONG),
    "a replay leaves out an epoch": (lambda m: m.setattr(Slots, "bring", bring(right, 1)), "NondeterminismError"),
    "a replay takes the newest broadcast": (plant_replay_with_present, "NondeterminismError"),
    "the log is cut without copies": (plant_cut, "commit 3 .* other bits"),
    "the log is cut below the copies of another shard": (plant_cut_without_copies, "has no copy that is as new"),
    "copies have other arrays": (plant_other_arrays, "before epoch . is lost"),
    "the reply has the hash of the state before": (plant_hash_of_the_reply, "other bits: .*local_hashes"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_it_finds_a_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found(*MUTANTS[mutant], make, monkeypatch)


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
