"""`explore_mapreduce`: runs a `MapReduce` under many schedules of accidents, and compares the bits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pmstore._errors import FingerprintMismatchError, NondeterminismError, ShardError
from pmstore._resume.fit_group import FitGroup
from pmstore._resume.history import history_of
from pmstore._resume.loop import _Commits
from pmstore._resume.state import PROGRESS
from pmstore.scale._epochs import LOADS, LOSSES
from pmstore.scale._holder import _checked
from pmstore.scale._local import Local
from pmstore.scale._mapreduce import MapReduce
from pmstore.scale._messages import Tag, digest_of
from pmstore.scale._shards import shards_of
from pmstore.scale._work import Work
from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._base.progress import Counted, terminal
from pmstore.testing._scale.disks import DIRECTORY, Contents, SimulatedCopies
from pmstore.testing._scale.memory import GROUP, LOG, MemoryStore
from pmstore.testing._scale.processes import Tally, first_failure
from pmstore.testing._scale.report import MapReduceReport
from pmstore.testing._scale.schedule import Schedule, parse, schedule
from pmstore.testing._scale.simulated import SimulatedEngine, Watched
from pmstore.testing._scale.world import Broken, Killed, World, altered

__all__ = ["explore_mapreduce"]

WHOLE = 16
"""Of so many schedules, one computes each map that is asked for; the others remember results."""

SHOWN = 60  # lines of the log of a failure

_APART = ("attempt", "late", "lost")  # columns of a history that accidents change


def explore_mapreduce(
    make: Callable[[], MapReduce],
    *,
    schedules: int = 1000,
    seed: int = 0,
    workers: int = 3,
    faults: int = 8,
    jobs: int = 1,
    commit_every: int = 1,
    only: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MapReduceReport:
    """Run a fit over shards under many schedules of accidents, and require the bits of the undisturbed fit.

    Coordinator, workers, messages and store are in this process and thread, in virtual time: the code of `MapReduce`
    and of its protocol is that of production, and a simulated engine loses, delays, repeats, reorders and damages
    messages, kills and stops workers, also in commits of their own stores, and kills the coordinator before and after
    each call of the engine and each commit. Messages that are on their way when a coordinator is killed reach the next
    one. Loaders fail once, and in some schedules a shard changes, or a worker computes something else. With local
    fields, disks are lost or damaged, have states of another run at first, or are one for all workers; some schedules
    have an archive. After at most `faults` accidents nothing more happens, so that each fit must end.

    Of each schedule it is required that

    - each commit has the bits of one epoch of the undisturbed fit, and the next commit those of the next;
    - each coordinator commits a larger attempt before it asks;
    - only undamaged replies to questions of this attempt and epoch are combined, each shard's once, in order;
    - no worker overwrites the local state that the first undecided epoch begins with, and the log of broadcasts is cut
      off where each shard has a copy that is as new;
    - the fit ends, and at its end all fields but `attempt`, and the history but for its attempts and what was asked
      again, have the bits of the undisturbed fit;
    - an error is justified: by two different replies to one question, which must be noticed; by a shard that changed;
      by losses or failing loads as often as the protocol allows.

    Each map is called twice for each question, and must give the same. Its result is remembered for other schedules,
    except in every 16th, which calls all maps.

    Parameters
    ----------
    make : callable
        Returns the algorithm with its shards: a new object each time, as a new process makes one. Keep it small: three
        or four shards, a few rows, two or three epochs.
    schedules : int
        How many to run.
    seed : int
        The same seed gives the same schedules.
    workers : int
    faults : int
        The largest number of accidents in a schedule.
    jobs : int
        The number of processes that run schedules, for instance ``os.cpu_count()``. They are forked. The result is the
        same, but for the time.
    commit_every : int
        As for `MapReduce.run`: the number of epochs between two commits.
    only : str, optional
        Run this one schedule, as a failure names it.
    progress : callable, optional
        Called with the number of schedules that are done, and their number.

    Returns
    -------
    MapReduceReport

    Raises
    ------
    CrashFailure
        An AssertionError: a schedule broke one of these rules. The message has the accidents, as few as suffice, and
        the argument `only` that runs them again.
    CrashTestError
        The fit fails without any accident, or an argument makes no sense.
    """
    __tracebackhide__ = True
    if not callable(make):
        raise CrashTestError(f"make is a function that returns a pmstore.MapReduce, not {make!r:.200}")
    counts = {"schedules": schedules, "workers": workers, "faults": faults, "jobs": jobs, "commit_every": commit_every}
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise CrashTestError(f"{name} is a number from 1, not {value!r}")
    if not 0 <= seed < 1 << 31:
        raise CrashTestError(f"seed is a number from 0 to 2**31 - 1, not {seed}")
    case = _Case(make, workers, commit_every)
    length = case.learn()
    if only is not None:
        chosen = [parse(only, length, faults, case.local)]
    else:
        chosen = [schedule((seed << 32) + number, length, faults, case.local) for number in range(schedules)]
    shown = None if progress is not None else terminal("schedules of a MapReduce")
    counted = Counted(progress or shown)

    def passes(number: int) -> bool:
        return case.run(chosen[number], whole=number % WHOLE == 0) is None

    try:
        failed, done, seconds = _explore(case, len(chosen), min(jobs, len(chosen)), passes, counted)
    finally:
        if shown is not None:
            shown.close()
    report = case.report(seed, done, seconds)
    if failed is not None:
        case.fail(chosen[failed], failed % WHOLE == 0, report)
    session.keep_report(str(report))
    return report


def _explore(
    case: _Case, count: int, jobs: int, passes: Callable[[int], bool], counted: Callable[[int, int], None]
) -> tuple[int | None, int, float]:
    """The first of the schedules that fails, how many were run, and the processor time."""
    if jobs > 1:
        failed, done, seconds, tallies = first_failure(count, jobs, passes, lambda: case.tally, counted)
        for tally in tallies:
            for ours, theirs in zip(case.tally, tally, strict=True):
                ours.update(theirs)
        if failed is not None:
            passes(failed)  # here, too, for its log
        return failed, done, seconds
    began = time.process_time()
    for number in range(count):
        counted(number, count)
        if not passes(number):
            return number, number + 1, time.process_time() - began
    return None, count, time.process_time() - began


class _Case:
    """A fit, its undisturbed run, and the counts of its schedules."""

    def __init__(self, make: Callable[[], MapReduce], workers: int, commit_every: int = 1) -> None:
        self.make, self.workers, self.commit_every = make, workers, commit_every
        self._known: dict[Any, Mapping[str, Any]] = {}
        self._loaded: dict[tuple[int, bool], Any] = {}
        self._accidents: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.again: Counter[str] = Counter()  # questions that were asked again
        self.states: list[Any] = []  # the signatures of the undisturbed run's commits
        self.history: Any = None
        self.local = False  # whether the algorithm has local fields
        self.left: list[Contents] = []  # what was on the disks after each commit of the undisturbed run

    def learn(self) -> int:
        """Run without accidents; returns the number of points."""
        algorithm = self.make()
        if not isinstance(algorithm, MapReduce):
            raise CrashTestError(f"make returns a pmstore.MapReduce, not {algorithm!r:.200}")
        self.shards = shards_of(algorithm.shards)
        self.local = algorithm._has_local_state
        run = _Run(self, Schedule(0, frozenset(), ()), whole=True)
        try:
            what = run.to_its_end()
        except Exception as error:
            raise CrashTestError(f"the fit fails without any accident: {type(error).__name__}: {error}") from error
        if what is not None:
            raise CrashTestError(f"the fit fails without any accident: {what}") from run.error
        self.states, self.history = run.states, run.history
        self.outcomes.clear()
        self.again.clear()
        return run.world.points

    def load(self, i: int, changed: bool = False) -> Any:
        """The contents of a shard."""
        if (i, changed) not in self._loaded:
            self._loaded[i, changed] = altered(self.load(i)) if changed else self.shards[i]()
        return self._loaded[i, changed]

    def run(self, one: Schedule, whole: bool) -> str | None:
        """Run one schedule. Returns the failure, or None."""
        run = _Run(self, one, whole)
        what = run.to_its_end()
        self._accidents.update(run.world.tally)
        self._last = run
        return what

    @property
    def tally(self) -> Tally:
        """The counters that the schedules add to."""
        return self._accidents, self.outcomes, self.again

    def fail(self, one: Schedule, whole: bool, report: MapReduceReport) -> None:
        """Shrink a schedule that failed, which was the last one, and raise CrashFailure."""
        __tracebackhide__ = True
        count = len(self._last.world.applied)
        points, before = frozenset(self._last.world.applied), None
        while points != before:  # an accident that was needed with others may not be needed without them
            before = points
            for point in sorted(points):
                if point in points and self.run(one.only(points - {point}), whole) is not None:
                    points = frozenset(self._last.world.applied)  # where they happened now
        smallest = one.only(points)
        what = self.run(smallest, whole)
        if what is None:
            what = "it passes when it is run again: the algorithm depends on something that it is not given"
        log = self._last.world.log
        every = "" if self.commit_every == 1 else f"commit_every={self.commit_every}, "
        more = [f"  … {len(log) - SHOWN} more before"] if len(log) > SHOWN else []
        message = [
            what,
            f"  after {len(points)} of {count} accidents that happened in the schedule of seed {one.seed}:",
            *more,
            *(f"  {line}" for line in log[-SHOWN:]),
            f'  again: pmstore.testing.explore_mapreduce(…, workers={self.workers}, {every}only="{smallest}")',
            *(f"  {line}" for line in str(report).splitlines()),
        ]
        raise CrashFailure("\n".join(message), report=report) from self._last.error

    def report(self, seed: int, done: int, seconds: float) -> MapReduceReport:
        """The report of the schedules until now."""
        counts = len(self.shards), self.workers, len(self.history["iteration"]) // 8
        return MapReduceReport(
            done,
            *counts,
            dict(self._accidents),
            dict(self.outcomes),
            self.again["late"],
            self.again["lost"],
            seed,
            seconds,
        )

    def once(self, function: Any) -> _Once:
        """A function of workers that remembers its results."""
        return _Once(function, self._known)


class _Run:
    """One schedule: one coordinator after the other on the same store."""

    def __init__(self, case: _Case, one: Schedule, whole: bool) -> None:
        self._case, self._whole = case, whole
        self.world = World(one, case.workers, len(case.shards), case.load)
        self._copies = SimulatedCopies(one.archived) if one.archived else None
        if one.stale and case.left:
            chance = random.Random(one.seed)
            for worker in self.world.workers:
                worker.machine.put(chance.choice(case.left), chance)
        self.world.needed = self._needed
        self.store = MemoryStore()
        self.store.step = self.world.step
        self.store.on_commit = self._committed
        self.states: list[Any] = []
        self.history: Any = None
        self.error: BaseException | None = None
        self._place = -1  # the commit of the undisturbed run that this one has reached

    def to_its_end(self) -> str | None:
        """Run coordinators until one of them ends by itself. Returns the failure, or None."""
        world = self.world
        while True:
            world.coordinator += 1
            world.tell(f"coordinator {world.coordinator} begins")
            self.store.reopen()
            self._engine = SimulatedEngine(world, self.store, self._once())
            try:
                self._run_coordinator()
            except Killed:
                outcome = "killed"
            except Broken as broken:
                self.error = broken
                return str(broken)
            except Exception as error:
                outcome = self._justified(error)
                world.tell(f"{type(error).__name__}: {_first_line(error)}")
                if not outcome:
                    self.error = error
                    return f"{type(error).__name__}, which no accident justifies: {_first_line(error)}"
                if not outcome.startswith("lost"):
                    self._case.outcomes[outcome] += 1
                    return None
            else:
                return self._compare()
            self._case.outcomes[outcome] += 1
            world.last_attempt = world.this_attempt
            world.pass_by(10 ** world.between(-3, 0.7))

    def _once(self) -> Callable[[Any], Any]:
        """A decorator of the functions that go to workers."""
        if self._whole:
            return lambda function: function
        if self._case.local:
            return lambda function: _Twice.of(function) if isinstance(function, Work) else function
        last: list[Any] = [None, None]

        def once(function: Any) -> Any:
            if last[0] is not function:
                last[:] = function, self._case.once(function)
            return last[1]

        return once

    def _run_coordinator(self) -> None:
        """One coordinator: `MapReduce.run` with a simulated store and simulated workers."""
        algorithm = self._case.make()
        with algorithm._at_work(self._engine, None, DIRECTORY if self._case.local else "", self._copies):
            fingerprint = algorithm._whole_fingerprint()
            asking = algorithm._pmstore_asking
            algorithm._pmstore_asking = Watched(asking, len(self._case.shards), self._case.again)  # type: ignore[assignment]
            group = FitGroup(self.store, GROUP)  # type: ignore[arg-type]
            algorithm._run_in(group, fingerprint, _Commits(self._case.commit_every))

    def _needed(self, i: int, tag: Tag) -> tuple[Tag, bytes] | None:
        """The local state that the first undecided epoch begins with, and its hash, while a worker has a question of
        the newest coordinator. None for the questions of others, and if that epoch is the first one of its run."""
        progress = self.store.committed.get(f"{GROUP}/{PROGRESS}")
        if not self._case.local or progress is None or tag.attempt != progress["attempt"]:
            return None
        decided = int(progress["epoch"])
        if not _of(progress, "began") < decided <= tag.epoch:
            return None
        return tag._replace(epoch=decided), self.store.committed[f"{GROUP}/local_hashes"][i].tobytes()

    def _committed(self) -> None:
        """A commit has the bits of the undisturbed run's last or next one."""
        self.world.may_change = True
        found, states = self.store.signature(), self._case.states
        if not states:  # this is the undisturbed run
            self.states += [found] if found not in self.states[-1:] else []
            machines = {id(worker.machine): worker.machine for worker in self.world.workers}.values()
            self._case.left.append({path: found for one in machines for path, found in one.contents().items()})
        elif not self.world.impure:
            self._require_recoverable()
            place = self._place
            if place < 0 or not self._same(found, states[place]):
                place += 1
                if place == len(states) or not self._same(found, states[place]):
                    raise Broken(
                        f"commit {place} of the undisturbed run has other bits: {_difference(states, place, found)}"
                    )
            self._place = place

    def _logs(self) -> list[tuple[int, int, int]]:
        """The parts of the log of broadcasts: the first epoch of the run, that of the log, and the one after the last.
        They are of this run, and of the best one."""
        progress = self.store.committed.get(f"{GROUP}/{PROGRESS}")
        if self._copies is None or progress is None:
            return []
        parts = [("began", "log_from", "epoch"), ("best_began", "best_log_from", "best_epoch")]
        return [(_of(progress, began), _of(progress, first), _of(progress, end)) for began, first, end in parts]

    def _same(self, found: Any, wanted: Any) -> bool:
        """Whether two commits have the same bits, except for the part that was cut off the log."""
        if self._copies is None:
            return bool(found == wanted)
        logs = [range(first, end) for _, first, end in self._logs()]

        def is_needed(name: str) -> bool:
            return not name.startswith(LOG) or any(int(name.split("/")[2]) in log for log in logs)

        return [one for one in wanted if is_needed(one[0])] == list(found)

    def _require_recoverable(self) -> None:
        """Each shard has a copy that is as new as the log. Raises Broken if not."""
        for began, first, end in self._logs():
            found = self._copies.epochs("") if first > began and self._copies is not None else {}
            for i in range(len(self._case.shards) if first > began else 0):
                if not any(first <= epoch <= end for epoch in found.get(i, [])):
                    raise Broken(f"the log is cut off below epoch {first}, and shard {i} has no copy that is as new")

    def _compare(self) -> str | None:
        """How the results of the last coordinator differ from those of the undisturbed run; None if they do not."""
        history = history_of(self.store.group(GROUP))
        self.history = {name: column.tobytes() for name, column in history.items() if name not in _APART}
        states = self._case.states
        if states and not self.world.impure:
            if self._place != len(states) - 1:
                return f"the fit ended after commit {self._place} of {len(states) - 1}"
            if self.history != self._case.history:
                return "the history has other rows than that of the undisturbed run"
        self._case.outcomes["impure, seen once" if self.world.impure else "same bits"] += 1
        return None

    def _justified(self, error: Exception) -> str:
        """Why an error is right; empty if it isn't."""
        world = self.world
        if world.impure:
            return "noticed: impure"
        if world.changed is not None and isinstance(error, NondeterminismError | FingerprintMismatchError):
            return "noticed: changed"
        if isinstance(error, ShardError):
            told = [kinds for (i, _), kinds in self._engine.failures.items() if i == error.shard][-1:]
            kinds = told[0] if told else []
            if "changed" in kinds:
                return "noticed: changed" if world.changed == error.shard else ""
            if kinds.count("load") > LOADS:
                return "lost: not loaded"
            if len(kinds) >= LOSSES:
                return "lost"
        return ""


class _Once:
    """A function of workers. It is called twice for each question, and its result is remembered."""

    __slots__ = ("_function", "_known", "adds", "expected", "prepare")

    def __init__(self, function: Any, known: dict[Any, Mapping[str, Any]]) -> None:
        self._function, self._known = function, known
        self.expected, self.prepare, self.adds = function.expected, function.prepare, function.adds

    def __call__(
        self, i: int, held: Any, contents: str, shared: Mapping[str, Any], tag: Any, disk: Any
    ) -> Mapping[str, Any]:
        key = (i, contents, tag.epoch, *(array.tobytes() for array in shared.values()))
        result = self._known.get(key)
        if result is None:
            result = self._function(i, held, contents, shared, tag, disk)
            again = self._function(i, held, contents, shared, tag, disk)
            if digest_of(i, tag, _checked(result)) != digest_of(i, tag, _checked(again)):
                raise _two_results(i, tag.epoch)
            self._known[key] = result
        return result


class _Twice(Work):
    """A function of workers with local states. Each step is called twice."""

    @classmethod
    def of(cls, function: Work) -> _Twice:
        made = object.__new__(cls)
        vars(made).update(vars(function))
        return made

    def _step(self, i: int, held: Any, epoch: int, shared: Mapping[str, Any]) -> Callable[[Local], Any]:
        step = super()._step(i, held, epoch, shared)

        def twice(local: Local) -> Any:
            other = {field.name: local[field.name].copy() for field in self.fields[i]}
            again, result = step(Local(other)), step(local)
            mine = {f"/{name}": local[name] for name in other}
            theirs = {f"/{name}": array for name, array in other.items()}
            tag = Tag("", 0, epoch)
            if digest_of(i, tag, {**result, **mine}) != digest_of(i, tag, {**again, **theirs}):
                raise _two_results(i, epoch)
            return result

        return twice


def _of(progress: Any, name: str) -> int:
    """A number of the record of the progress; 0 if it has none, as those of a fit with one run."""
    return int(progress[name]) if name in progress.dtype.names else 0


def _first_line(error: Exception) -> str:
    """The first line of the message of an error, which may be empty."""
    return str(error).partition("\n")[0]


def _two_results(i: int, epoch: int) -> Broken:
    return Broken(f"map() gave two results for shard {i} in epoch {epoch}, called twice with the same")


def _difference(states: list[Any], place: int, found: Any) -> str:
    """The names whose values differ."""
    wanted = dict(states[min(place, len(states) - 1)])
    names = [name.partition("/")[2] for name, value in found if wanted.get(name) != value]
    return ", ".join(names) or "names are missing"
