"""The crash explorer of MapReduce: the protocol passes, and mutants in it are found."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Holder, Lost, Reply, Serial, Tag, _epochs, _gather, _mapreduce, _work, shards_of
from pmstore.scale._epochs import Epochs
from pmstore.scale._gather import Gathering
from pmstore.scale._holder import Describe, contents_of
from pmstore.scale._messages import digest_of
from pmstore.scale._tree import Tree
from pmstore.testing import CrashFailure, CrashTestError, MapReduceReport, explore_mapreduce
from pmstore.testing._scale.explore import _Case
from pmstore.testing._scale.schedule import KINDS, RARE
from tests.conftest import LONGER
from tests.support.sharded import Walk, several

SCHEDULES = 250
BOUND = 300  # schedules within which each mutant is found


class Short(Walk):
    """Two runs of two epochs, with a generator of its own and a value beside the arrays."""

    max_iter = 2
    runs = 2

    def __init__(self, shards: Any) -> None:
        super().__init__(shards)
        self.own = np.random.default_rng(5)

    def fields(self) -> list[pmstore.Field]:
        more = [pmstore.Field("own", generator=self.own), pmstore.Field("notes", dtype=object)]
        return [*super().fields(), *more, pmstore.Field("best", (3, 4), role="best")]

    def prepare(self, shard: Any) -> Any:
        return {"rows": shard}

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        return super().map(shard["rows"], shared, rng)

    def start(self) -> None:
        self.state.centers = self.own.normal(size=(3, 4))
        self.state.notes = [*(self.state.notes or []), "start"]

    def better(self) -> bool:
        return self.state.shift < 1

    def keep(self) -> None:
        self.state.best = self.state.centers


def make(count: int = 4) -> Short:
    return Short([part[:6] for part in several(count)])


@pytest.mark.longer
@pytest.mark.parametrize("count, workers", [pytest.param(4, 3, marks=pytest.mark.long), (1, 1), (3, 2)])
def test_I31_I32_every_schedule_has_the_bits_of_the_undisturbed_fit(count: int, workers: int) -> None:
    schedules = SCHEDULES * LONGER if count == 4 else SCHEDULES // 2 * LONGER
    report = explore_mapreduce(lambda: make(count), schedules=schedules, workers=workers, seed=count)
    assert (report.schedules, report.shards, report.workers, report.epochs) == (schedules, count, workers, 4)
    assert set(report.accidents) >= set(KINDS) - {"another shard's", *RARE}
    assert report.outcomes["same bits"] > 0.9 * schedules
    assert report.late and report.lost
    assert f"explored {schedules:,} schedules of 4 epochs" in str(report)


@pytest.mark.long
@pytest.mark.longer
@pytest.mark.parametrize("seed", range(4))
def test_more_schedules(seed: int) -> None:
    explore_mapreduce(lambda: make(5), schedules=250 * LONGER, seed=100 + seed, workers=seed + 1, faults=4 + 4 * seed)


def test_the_undisturbed_fit_is_that_of_another_engine() -> None:
    case = _Case(make, 2)
    case.learn()
    state = make().run(engine=Serial())
    last = dict(case.states[-1])
    for name in ("centers", "best"):
        assert last[f"fit/{name}"][2] == state[name].tobytes()


@pytest.mark.longer
@pytest.mark.parametrize("init", ["k-means++", "k-means||"])
def test_I31_I32_kmeans_over_shards(init: str) -> None:
    pytest.importorskip("sklearn")
    from pmstore.cluster import KMeans
    from pmstore.cluster._sharded import KMeansFit

    shards = shards_of([part[:8] for part in several(3)])
    explore_mapreduce(
        lambda: KMeansFit(KMeans(3, random_state=0, n_init=2, max_iter=3), shards, init, 2), schedules=20 * LONGER
    )


# ---- mutants


def take(change: Callable[[Epochs, Any], Any]) -> Callable[[Epochs, Any], None]:
    """`Epochs._take`, of a message that is changed before."""
    true = Epochs._take

    def taken(epochs: Epochs, message: Any) -> None:
        changed = change(epochs, message)
        if changed is not None:
            true(epochs, changed)

    return taken


def retagged(same: Callable[[Any, Any], bool]) -> Callable[[Epochs, Any], None]:
    """Takes a reply to another question, if `same` finds nothing wrong with its tag."""

    def change(epochs: Epochs, message: Any) -> Any:
        if is_sound(message) and message.tag != epochs._tag and same(message.tag, epochs._tag):
            return answer(message, message.shard, epochs._tag)
        return message

    return take(change)


def is_sound(message: Any) -> bool:
    if not isinstance(message, Reply) or message.result is None:
        return False
    return message.digest == digest_of(message.shard, message.tag, message.result, message.leaves)


def answer(reply: Any, shard: int, tag: Any) -> Reply:
    """The same result as the answer to another question."""
    digest = digest_of(shard, tag, reply.result, reply.leaves)
    return dataclasses.replace(reply, shard=shard, tag=tag, digest=digest)


def unhashed(epochs: Epochs, message: Any) -> Any:
    if isinstance(message, Reply) and message.result is not None and message.shard < 4:
        return answer(message, message.shard, message.tag)
    return message


def counted_twice(epochs: Epochs, message: Any) -> Any:
    """The second reply of a shard stands for that of its neighbour."""
    if is_sound(message) and message.tag == epochs._tag and epochs._questions[message.shard].digest:
        return answer(message, message.shard ^ 1, message.tag)
    return message


def is_old_sum(epochs: Epochs, message: Any) -> bool:
    """Whether the results of all its shards are known."""
    return (
        is_sound(message)
        and bool(message.leaves)
        and message.tag == epochs._tag
        and all(epochs._questions[i].digest for i in message.shards)
    )


def plant_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves are numbered as they arrive."""
    true = Tree.put

    def put(tree: Any, first: int, value: Any, count: int = 1) -> None:
        if count > 1:
            true(tree, first, value, count)
            return
        tree.count = getattr(tree, "count", -1) + 1
        true(tree, tree.count, value)

    monkeypatch.setattr(Tree, "put", put)


def plant_first_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is not increased."""

    def finish(self: Any, fit_group: Any, commits: Any, rows: Any) -> None:
        super(_mapreduce.MapReduce, self)._finish_runs(fit_group, commits, rows)

    monkeypatch.setattr(_mapreduce.MapReduce, "_finish_runs", finish)


def plant_attempt_without_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is increased, and committed with the first epoch only."""

    def finish(self: Any, fit_group: Any, commits: Any, rows: Any) -> None:
        self.state.attempt += 1
        super(_mapreduce.MapReduce, self)._finish_runs(fit_group, commits, rows)

    monkeypatch.setattr(_mapreduce.MapReduce, "_finish_runs", finish)


def plant_epoch_after_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the epoch is not part of the commit that decides it."""
    true = _mapreduce.MapReduce.step

    def step(self: Any) -> Any:
        figures = true(self)
        self.state.epoch -= 1
        return figures

    monkeypatch.setattr(_mapreduce.MapReduce, "step", step)


def plant_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is loaded again counts with any contents."""
    monkeypatch.setattr(_work.Work, "expected", lambda self, i: None)


def plant_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first reply is looked at."""
    done = lambda epochs, message: bool(  # noqa: E731
        isinstance(message, Reply)
        and message.tag == epochs._tag
        and 0 <= message.shard < len(epochs._questions)
        and epochs._questions[message.shard].digest
    )
    monkeypatch.setattr(Epochs, "_take", take(lambda epochs, message: None if done(epochs, message) else message))


def plant_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers depend on the attempt."""
    true = _work.Work.__call__

    def call(self: Any, i: int, held: Any, contents: str, shared: Any, tag: Any, disk: Any) -> Any:
        return true(self, i, held, contents, shared, tag._replace(epoch=tag.epoch + 10 * tag.attempt), disk)

    monkeypatch.setattr(_work.Work, "__call__", call)


def plant_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker adds what it has, neighbours or not, and the coordinator takes it."""

    def take(gathering: Gathering) -> list[Reply]:
        replies = sorted((one for node in gathering._sums.nodes() for one in node), key=lambda one: one.shard)
        apart = gathering._apart
        gathering._clear()
        if replies and all(one.shards.stop == other.shard for one, other in itertools.pairwise(replies)):
            replies = functools.reduce(_gather._added, ([one] for one in replies))
        return [*apart, *map(_gather._hashed, replies)]

    monkeypatch.setattr(Gathering, "take", take)
    monkeypatch.setattr(Tree, "is_node", lambda *given: True)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "replies of another attempt count": (
        lambda m: m.setattr(Epochs, "_take", retagged(lambda a, b: a.epoch == b.epoch)),
        "counts in attempt",
    ),
    "replies of another epoch count": (
        lambda m: m.setattr(Epochs, "_take", retagged(lambda a, b: a.attempt == b.attempt)),
        r"counts in attempt|other bits|NondeterminismError",
    ),
    "the hash is not checked": (lambda m: m.setattr(Epochs, "_take", take(unhashed)), "damaged reply|Error"),
    "a second reply counts for its neighbour": (
        lambda m: m.setattr(Epochs, "_take", take(counted_twice)),
        r"combined with|counts|other bits|NondeterminismError",
    ),
    "added in the order of arrival": (plant_arrival, "are combined with"),
    "the attempt stays": (plant_first_commit, "attempt"),
    "the attempt is not committed": (plant_attempt_without_commit, "committed attempt 0"),
    "the epoch stays": (plant_epoch_after_commit, r"attempt|other bits|counts|fails without"),
    "what is lost is not asked for again": (
        lambda m: m.setattr(Epochs, "_lose", lambda *given: None),
        "does not ask again",
    ),
    "what is late is not asked for again": (
        lambda m: m.setattr(Epochs, "_ask_late_ones", lambda *given: None),
        "hangs",
    ),
    "a silent first epoch is waited for": (lambda m: m.setattr(_epochs, "FIRST", float("inf")), "hangs"),
    "a shard that changed counts": (plant_contents, "other bits|two results"),
    "only the first reply is looked at": (plant_differences, "two results for one question were not noticed"),
    "the leaves of a sum are not looked at": (
        lambda m: m.setattr(Epochs, "_take", take(lambda epochs, one: None if is_old_sum(epochs, one) else one)),
        "two results for one question were not noticed",
    ),
    "a worker adds strangers": (plant_strangers, "are combined with|other bits|the total is of"),
    "random numbers depend on the attempt": (plant_random_numbers, "other bits"),
}


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_it_finds_a_mutant(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found(*MUTANTS[mutant], make, monkeypatch)


def require_found(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, make: Any, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> None:
    """The explorer finds a mutant, and finds it again by the schedule that it names."""
    learn = _Case.learn

    def explored(**options: Any) -> str:
        with monkeypatch.context() as patch:

            def and_plant(case: _Case) -> int:
                """The undisturbed run is one of the code without the mutant."""
                length = learn(case)
                plant(patch)
                return length

            patch.setattr(_Case, "learn", and_plant)
            with pytest.raises(CrashFailure, match=message) as caught:
                explore_mapreduce(make, **given, **options)
        assert isinstance(caught.value.report, MapReduceReport)
        return str(caught.value)

    text = explored(schedules=BOUND, seed=3)
    only = re.search(r'only="([\d:,]+)"', text)
    assert only, text
    assert explored(only=only[1]).splitlines()[0] == text.splitlines()[0]


def test_I32_processes_run_the_same_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = (explore_mapreduce(make, schedules=60, seed=9, jobs=jobs) for jobs in (1, 3))
    assert dataclasses.replace(alone, seconds=0.0) == dataclasses.replace(together, seconds=0.0)
    plant, message = MUTANTS["what is lost is not asked for again"]
    failures = []
    for jobs in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(CrashFailure, match=message) as caught:
            plant(patch)
            explore_mapreduce(make, schedules=60, seed=9, jobs=jobs)
        failures.append(re.sub(r"(?s)\n  explored.*", "", str(caught.value)))
    assert failures[0] == failures[1]


def test_a_process_that_fails_is_told() -> None:
    class Ends(Short):
        begun = 0

        def start(self) -> None:
            super().start()
            Ends.begun += 1
            if Ends.begun > 4:
                os._exit(3)

    with pytest.raises(CrashTestError, match="it ended without a message"):
        explore_mapreduce(lambda: Ends(several(2)), schedules=20, jobs=2)


# ---- users' own mistakes


def test_a_map_that_is_no_function_is_found() -> None:
    class Clock(Short):
        def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
            return {**super().map(shard, shared, rng), "sums": np.full((3, 4), random.random())}

    with pytest.raises(CrashFailure, match=r"two results|other bits|NondeterminismError"):
        explore_mapreduce(lambda: Clock(several(3)), schedules=50)


def test_state_beside_the_state_is_found() -> None:
    class Beside(Short):
        rate = 1.0

        def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
            figures = super().update(total)
            self.rate *= 0.5
            self.state.centers *= self.rate
            return figures

    with pytest.raises(CrashFailure, match=r"other bits: .*centers") as caught:
        explore_mapreduce(lambda: Beside(several(3)), schedules=200)
    assert "coordinator killed" in str(caught.value)
    assert "after 1 of " in str(caught.value)  # it was shrunk


def test_an_error_without_a_message_is_told() -> None:
    class Silent(Short):
        def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
            assert self.state.attempt < 2
            return super().update(total)

    with pytest.raises(CrashFailure, match="^AssertionError, which no accident justifies"):
        explore_mapreduce(lambda: Silent(several(3)), schedules=100)


def test_what_makes_no_sense_is_refused() -> None:
    class Broken(Short):
        def update(self, total: Mapping[str, Any]) -> Mapping[str, float]:
            raise ValueError("not today")

    with pytest.raises(CrashTestError, match="without any accident: ValueError.*: not today"):
        explore_mapreduce(lambda: Broken(several(2)))
    with pytest.raises(CrashTestError, match="schedules is a number from 1, not 0"):
        explore_mapreduce(make, schedules=0)
    with pytest.raises(CrashTestError, match="only= is a schedule"):
        explore_mapreduce(make, only="seven")
    with pytest.raises(CrashTestError, match=r"make returns a pmstore.MapReduce, not 1"):
        explore_mapreduce(lambda: 1)  # type: ignore[arg-type,return-value]
    with pytest.raises(CrashTestError, match="seed is"):
        explore_mapreduce(make, seed=-1)


# ---- what it found, and the commit of an epoch


def test_a_reply_of_no_shard_is_ignored() -> None:
    class Numbers(Serial):
        def completed(self, timeout: float | None) -> Any:
            replies = list(super().completed(timeout))
            others = [Reply(number, one.tag, one.worker) for one in replies for number in (-1, 99)]  # type: ignore[union-attr]
            return [*others, *(Lost(-1, one.tag, "nobody", "") for one in replies), *replies]

    state = make().run(engine=Numbers())
    assert state.centers.tobytes() == make().run(engine=Serial()).centers.tobytes()


def test_a_loader_that_fails_once_is_tried_again_whatever_was_lost_before() -> None:
    class Loses(Serial):
        """Loses a question twice, and then its loader fails once."""

        lost = 0

        def completed(self, timeout: float | None) -> Any:
            asked = self._asked[0]
            if asked[0] == 1 and self.lost < 2:
                self.lost += 1
                del self._asked[0]
                return [Lost(1, asked[-1], "somebody", "the process ended")]
            return super().completed(timeout)

    failing = [OSError("the file server does not answer")]

    def load() -> Any:
        if failing:
            raise failing.pop()
        return several(2)[1]

    class Own(Walk):
        max_iter = 1

    assert Own([several(2)[0], pmstore.Shard(load)]).run(engine=Loses()).epoch == 1
    assert not failing


def test_a_shard_that_is_prepared_is_loaded_again_to_be_described() -> None:
    short, holder, shard = make(1), Holder("a worker"), pmstore.Shard(lambda: several(1)[0])
    contents = contents_of(several(1)[0])
    short.described = [{"contents": contents}]
    function = _work.Work(short, "")
    shared = {"centers": np.zeros((3, 4))}
    described, mapped = [], []
    for epoch in (0, -1, 0, -1):
        reply = holder.answer(0, shard, Describe() if epoch < 0 else function, shared, Tag("run", 1, epoch))
        assert reply.failure is None
        (described if epoch < 0 else mapped).append(reply.digest)
    assert len(set(described)) == len(set(mapped)) == 1
    assert described[0] == Holder("another").answer(0, shard, Describe(), {}, Tag("run", 1, -1)).digest


def test_I31_a_crash_anywhere_in_a_commit_leaves_whole_epochs(crash_explorer: Any, tmp_path: Path) -> None:
    states = {}
    for epochs in range(4):

        class Some(Walk):
            max_iter = epochs or 1

        if epochs:
            Some.__name__ = "Walk"
            states[epochs] = Some(several(3)).run(engine=Serial()).centers.tobytes()

    class Whole(Walk):
        max_iter = 3

    Whole.__name__ = "Walk"

    def check(store: Any, crash: Any) -> None:
        if "walk/progress" not in store:
            return
        progress = store["walk/progress"]
        epoch = int(progress["epoch"])
        assert (
            epoch
            == int(progress["iteration"])
            == np.count_nonzero(store["walk/history/newest"]["iteration"] if epoch else 0)
        )
        assert epoch == 0 or store["walk/centers"].tobytes() == states[epoch]
        state = Whole(several(3)).run(store, "walk", engine=Serial())
        assert state.centers.tobytes() == states[3]

    with crash_explorer.recording(check, budget=120 * LONGER) as path:
        Whole(several(3)).run(path, "walk", engine=Serial())
