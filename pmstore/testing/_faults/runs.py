"""A workload that runs under one fault after the other, and the results of each run."""

from __future__ import annotations

import errno
import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pmstore
from pmstore import _core
from pmstore._store import hooks
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._faults.fault import MANNERS, OPERATIONS, SHORT, Fault
from pmstore.testing._store import engine
from pmstore.testing._store.check import CheckRunner, hint, refused_already
from pmstore.testing._store.engine import Options, Schedule
from pmstore.testing._store.marks import Marks, beginning_at, first_difference, image_may_lag
from pmstore.testing._store.recording import Recorder, Recording
from pmstore.testing._store.workload import raised, require_change, require_commits

__all__ = ["Run", "Runs"]

Run = Callable[[pmstore.Store], Any]

HINTS = 16  # commits without any fault that the check is asked about when it has refused a store
CRASHES = 24  # crash states that are evaluated after each fault, and as many with the user's check
WENT_ON = "went on"
PROBE = "pmstore.testing/probe"
_COMMITS = {method.__code__ for method in (_core.Core.commit, _core.Core.commit_only)}


class Wrong(Exception):
    """A problem, as the second half of a sentence about a fault."""


class Refused(Wrong):
    """A problem that the user's check found, in a store at one of the commits from `acknowledged` to `started`."""

    def __init__(self, text: str, acknowledged: int, started: int) -> None:
        super().__init__(text)
        self.acknowledged, self.started = acknowledged, started


@contextmanager
def _told() -> Iterator[list[Exception]]:
    """Collects the errors that the core reports, whether or not the workload passes them on."""
    errors: list[Exception] = []
    real = _core.error

    def noting(status: int, extension: Any = _core.lib) -> Exception:
        errors.append(real(status, extension))
        return errors[-1]

    _core.error = noting
    try:
        yield errors
    finally:
        _core.error = real


def _in_commit(error: BaseException | None) -> bool:
    """Whether the exception was raised inside a commit."""
    at = error.__traceback__ if error is not None else None
    while at is not None:
        if at.tb_frame.f_code in _COMMITS:
            return True
        at = at.tb_next
    return False


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _kinds(errors: Sequence[Exception]) -> list[type[Exception]]:
    return [type(error) for error in errors]


def _recording(recorder: Recorder) -> Recording:
    """The recording until now, without the events before the run."""
    return Recording(recorder.medium, b"", *recorder.trace.raw())


def _marks(recorder: Recorder) -> Marks:
    """The commits of the recording until now."""
    return Marks(_recording(recorder))


def _nothing(store: pmstore.Store) -> None:
    """A run without a change."""


class _End(NamedTuple):
    """The end of a run without faults. hash: None if the workload closed the store."""

    sequence: int
    hash: int | None
    told: list[type[Exception]]


class _LastRun(NamedTuple):
    """The end of the last run, which is the one with the fault. store: None if it could not be opened."""

    number: int
    store: pmstore.Store | None
    error: Exception | None
    told: list[Exception]


class _Seen(NamedTuple):
    """The part of a run that the user's check is asked about: all before the first commit that is not the workload's
    but a test of whether the store goes on. image: the file at its end.
    """

    image: bytes
    recording: Recording


class Runs:
    """The workload, its behaviour without faults, and one run after the other under a fault."""

    def __init__(
        self,
        runs: Sequence[Run],
        medium: str,
        directory: Path,
        seed: int,
        max_size: int | None,
        runner: CheckRunner | None,
    ) -> None:
        # The last run only opens the store, so that the recovery from a kill after the workload runs under faults too.
        self._runs: tuple[Run, ...] = (*runs, _nothing)
        self._workload = runs
        self._medium, self._seed, self._max_size = medium, seed, max_size
        self._runner = runner
        self._path = directory / "store.pm"
        self._ends: list[_End] = []
        self._leaked = 0
        with Recorder(self._path, medium, ~seed & (1 << 64) - 1):  # with ids that no run has
            pmstore.open(self._path, "a").close()
        self._base = self._path.read_bytes()
        self.crashes = 0

    # ---- without faults

    def learn(self) -> tuple[list[Fault], int]:
        """Every possible fault, and the number of commits."""
        counts: dict[str, int] = {}
        for name, bit in OPERATIONS.items():
            before = _descriptors()
            recording, counts[name] = self._clean(bit)
            # The difference is negative if garbage from earlier was collected meanwhile.
            self._leaked = max(0, _descriptors() - before)
            if not counts.keys() - {name}:
                self._recording = recording
            elif Marks(recording) != Marks(self._recording):
                raise CrashTestError(
                    "the workload is not deterministic: run again on a new store, it made other commits. Seed its "
                    "random generators, and take no times, ids, addresses or orders of sets from outside"
                )
        require_commits(self._recording)
        faults = [
            Fault(operation, number, error, lasting)
            for operation, count in counts.items()
            for number in range(1, count + 1)
            for error, lasting in MANNERS[operation]
        ]
        last = max(self._recording.states)
        if self._runner is not None:
            said = self._runner(self._path.read_bytes(), last, last)
            if said is not None:
                what = "what the workload leaves at its end"
                raise refused_already(said, "fault", what, "workload") from self._runner.error
        return faults, last

    def _clean(self, operations: int) -> tuple[Recording, int]:
        self._ends = []
        self._path.write_bytes(self._base)
        with Recorder(self._path, self._medium, self._seed) as recorder:
            recorder.trace.fail(operations, 0, 0)
            for number in range(len(self._runs)):
                run = self._run_one(number)
                if run.error is not None:
                    raise raised(run.error, self._workload) from run.error
                assert run.store is not None
                sequence = int(_marks(recorder).acknowledged)
                hash = None if run.store.closed else hooks.core_of(run.store).state_hash()
                if 0 < number < len(self._workload):
                    require_change(self._workload[number], run.store, self._ends[-1].sequence)
                self._ends.append(_End(sequence, hash, _kinds(run.told)))
                hooks.kill(run.store)
            count = recorder.trace.operations()[0]
        return recorder.recording, count

    def _run_one(self, number: int) -> _LastRun:
        with _told() as told:
            try:
                store = pmstore.open(self._path, "r+", max_size=self._max_size)
            except pmstore.Error as error:
                return _LastRun(number, None, error, told)
            try:
                self._runs[number](store)
                if not store.closed:
                    hooks.core_of(store).stats()  # a write-back may be enqueued: the next call does it
            except Exception as error:
                if not isinstance(error, CrashTestError):
                    # Drop the workload's references to arrays, which would keep their space from later runs.
                    traceback.clear_frames(error.__traceback__)
                    return _LastRun(number, store, error, told)
                hooks.kill(store)
                raise
            except SystemExit as error:
                hooks.kill(store)
                raise raised(error, self._workload) from error
            except BaseException:
                hooks.kill(store)
                raise
        return _LastRun(number, store, None, told)

    # ---- under a fault

    def try_(self, fault: Fault) -> str:
        """The outcome of a fault. Raises CrashFailure if it is wrong."""
        before = _descriptors()
        self._path.write_bytes(self._base)
        run: _LastRun | None = None
        where = ""
        with Recorder(self._path, self._medium, self._seed) as recorder:
            trace = recorder.trace
            code = 0 if fault.error == SHORT else getattr(errno, fault.error)
            trace.fail(OPERATIONS[fault.operation], fault.number, code, fault.lasting)
            try:
                for number in range(len(self._runs)):
                    run = self._run_one(number)
                    if trace.operations()[1] or run.error is not None or run.store is None:
                        break
                    hooks.kill(run.store)
                assert run is not None
                where = self._where(run, recorder)
                if not trace.operations()[1]:
                    raise CrashTestError(
                        f"the workload is not deterministic: {fault}, in a run that did not get that far. It has to do "
                        "the same each time"
                    )
                trace.fail(0, 0, 0)  # the disk works again
                seen = self._seen(recorder)
                outcome = self._evaluate_run(run, fault, recorder)
                if run.store is not None:
                    hooks.kill(run.store)
                # The next run is recorded too: it sees the data that a failed sync left in the page cache only.
                reopened = self._evaluate_file(recorder)
                if outcome != WENT_ON:
                    seen = reopened
            except Wrong as wrong:
                raise self._failure(fault, where, wrong) from (run.error if run is not None else None)
            finally:
                if run is not None and run.store is not None:
                    hooks.kill(run.store)
        try:
            if _descriptors() - before > self._leaked:
                gc.collect()
            if _descriptors() - before > self._leaked:
                raise Wrong("a file descriptor was left open")
            self._evaluate_crashes(recorder.recording, None)
            if self._runner is not None:
                self._evaluate_seen(seen, self._runner)
        except Wrong as wrong:
            raise self._failure(fault, where, wrong) from run.error
        return outcome

    def _where(self, run: _LastRun, recorder: Recorder) -> str:
        acknowledged = _marks(recorder).acknowledged
        if run.store is None:
            return "while the store was opened" + (f" for run {run.number + 1}" if run.number else "")
        if _in_commit(run.error):
            return f"in commit {acknowledged + 1}"
        return f"after commit {acknowledged}" if acknowledged else "before the first commit"

    def _failure(self, fault: Fault, where: str, wrong: Wrong) -> CrashFailure:
        again = f"only=Fault{tuple(fault)!r}"
        advice = self._refused_without_fault(wrong) if isinstance(wrong, Refused) else ""
        return CrashFailure(
            f"{fault} {where}, and {wrong}\n{advice}  on {self._medium}, seed {self._seed}\n"
            f"  again: the same call, on {self._medium} alone, with {again}"
        )

    def _refused_without_fault(self, refused: Refused) -> str:
        """A line, if the check also refuses that commit in the run without faults: then no fault is to blame."""
        assert self._runner is not None
        ends = self._recording.ends()
        near = [sequence for sequence in sorted(ends) if refused.acknowledged <= sequence <= refused.started]
        with suppress(CrashTestError):  # the failure that was found says more than what is wrong with the check
            for sequence in near[-HINTS:]:
                image = engine.image(self._recording, Schedule(ends[sequence], "all"), Options())
                if self._runner(image, sequence, sequence) is not None:
                    advice = hint(sequence, min(ends)) or (
                        f"commit {sequence} alone leaves this; what belongs together has to change in one `with "
                        "store.transaction():`"
                    )
                    return f"  hint: the check also fails without any fault: {advice}\n"
        return ""

    def _evaluate_run(self, run: _LastRun, fault: Fault, recorder: Recorder) -> str:
        """Compare the results that the workload saw with the store's present state."""
        store, error = run.store, run.error
        noticed = _kinds(run.told) != self._ends[run.number].told
        if noticed and fault.error in (SHORT, "EINTR") and fault.operation != "sync":
            raise Wrong(f"the store did not handle the failure, although it can: {run.told[-1]}")
        if store is None:
            return "not opened"
        if error is not None and not noticed:
            raise Wrong(
                f"the workload raised {type(error).__name__} ({error}), which it does not without faults, though the "
                "store had not told it of any failure"
            )
        if store.closed:
            if error is None and not noticed:
                self._evaluate_end(run, _marks(recorder).acknowledged, None)
            return "closed"
        core = hooks.core_of(store)
        try:
            core.stats()
        except pmstore.FailedStoreError:
            self._evaluate_refusal(store, fault, recorder)
            return "refused"
        if fault.operation == "sync" and fault.error != "EINTR":  # a sync that was interrupted has dropped nothing
            raise Wrong("the store went on, though after a failed sync nothing is known of what was written (D7)")
        if not noticed:
            self._evaluate_end(run, core.sequence, core.state_hash())
            return "unnoticed"
        self._evaluate_going_on(run, store, fault, recorder)
        return WENT_ON

    def _evaluate_end(self, run: _LastRun, sequence: int, hash: int | None) -> None:
        end = self._ends[run.number]
        if (sequence, hash) != (end.sequence, end.hash):
            raise Wrong(
                f"no error was raised, but the workload ended at commit {sequence}"
                + (f", and not at commit {end.sequence}" if sequence != end.sequence else " with other contents")
            )

    def _evaluate_refusal(self, store: pmstore.Store, fault: Fault, recorder: Recorder) -> None:
        calls: tuple[Callable[[], Any], ...] = (store.commit, lambda: store.create_array(PROBE, 9), lambda: list(store))
        for call in calls:
            try:
                call()
            except pmstore.FailedStoreError:
                continue
            raise Wrong("the store had failed, but accepted another call")
        try:
            store.rollback()
        except pmstore.FailedStoreError:
            # The committed image could not be written: that of a commit in progress, or that of the last one, behind it
            # (D13).
            sequence = hooks.core_of(store).sequence
            if fault.operation != "write" or not image_may_lag(_recording(recorder), sequence):
                raise Wrong(
                    f"the store refuses to roll back, though the committed image is commit {sequence} (I11)"
                ) from None
            return
        marks = _marks(recorder)
        hash = hooks.core_of(store).state_hash()
        if not any(hash in marks.hashes.get(k, ()) for k in range(marks.acknowledged, marks.started + 1)):
            raise Wrong(f"a rollback did not take the arrays back to commit {marks.acknowledged} (I11)")

    def _evaluate_going_on(self, run: _LastRun, store: pmstore.Store, fault: Fault, recorder: Recorder) -> None:
        core = hooks.core_of(store)
        acknowledged = _marks(recorder).acknowledged
        clean = Marks(self._recording).hashes
        try:
            if _in_commit(run.error) and fault.number % 2:
                store.commit()  # the pending changes stay pending
                if core.sequence != acknowledged + 1 or core.state_hash() not in clean.get(acknowledged + 1, ()):
                    raise Wrong(
                        f"what was pending did not stay so: tried again, commit {acknowledged + 1} is another one"
                    )
                return
            store.rollback()
            if core.state_hash() not in _marks(recorder).hashes.get(acknowledged, ()):
                raise Wrong(f"a rollback did not take the store back to commit {acknowledged} (I11)")
            began = self._ends[run.number - 1].sequence if run.number else 0
            if run.error is not None and acknowledged == began:
                hooks.number_lists_anew(store)  # as in the run that this one is compared with
                self._runs[run.number](store)
                if not store.closed:
                    self._evaluate_end(run, core.sequence, core.state_hash())
            else:
                store[PROBE] = np.ones(2000)
                store.commit()
        except pmstore.Error as error:
            raise Wrong(f"the store, which had not failed, did not go on when all was well again: {error}") from error

    # ---- the file after the run

    def _seen(self, recorder: Recorder) -> _Seen:
        """The run until now."""
        image = self._path.read_bytes() if self._runner is not None else b""
        return _Seen(image, Recording(self._medium, self._base, *recorder.trace.raw()))

    def _evaluate_file(self, recorder: Recorder) -> _Seen:
        """The file in the next run. Returns the run until this store is changed."""
        recording = Recording(self._medium, self._base, *recorder.trace.raw())
        marks = Marks(recording)
        written = engine.image(recording, Schedule(len(recording), "all"), Options()) == self._path.read_bytes()
        try:
            store = pmstore.open(self._path, "r+", max_size=self._max_size)
        except pmstore.Error as error:
            raise Wrong(f"the store can't be opened any more: {error}") from error
        try:
            k = store.sequence
            if k < marks.acknowledged:
                raise Wrong(
                    f"commit {marks.acknowledged}, which was acknowledged, was gone after reopening: the store is back "
                    f"at commit {k}"
                )
            if k > marks.started:
                raise Wrong(f"the reopened store is at commit {k}, which never began")
            if hooks.core_of(store).state_hash() not in marks.hashes.get(k, ()):
                raise Wrong(f"the reopened store is at commit {k}, but not in its state: what was written is mixed")
            self._require_valid(store)
            if not written:
                raise Wrong("the file holds other bytes than the store wrote")
            seen = self._seen(recorder)
            store[PROBE] = np.ones(2000)
            store.commit()
            self._require_valid(store)
        except pmstore.Error as error:
            raise Wrong(f"the reopened store does not work: {error}") from error
        finally:
            hooks.kill(store)
        return seen

    @staticmethod
    def _require_valid(store: pmstore.Store) -> None:
        report = store.check()
        if not report.ok:
            raise Wrong(f"the reopened store is damaged: {report}")

    def _evaluate_seen(self, seen: _Seen, runner: CheckRunner) -> None:
        """The user's check."""
        marks = Marks(seen.recording)
        said = runner(seen.image, marks.acknowledged, marks.started)
        if said is not None:
            raise Refused(f"after reopening the check said: {said}", marks.acknowledged, marks.started)
        self._evaluate_crashes(seen.recording, runner)

    def _evaluate_crashes(self, recording: Recording, runner: CheckRunner | None) -> None:
        """Evaluate crashes since the fault, where the recording begins to differ from that of the run without one."""
        tail = beginning_at(recording, first_difference(recording, self._recording))
        options = Options(budget=CRASHES, seed=self._seed, depth=0)
        tally, found = engine.explore(tail, options, runner)
        self.crashes += tally.evaluated
        if found is not None:
            verdict = found.verdict
            text = (
                f"a crash {len(tail) - found.schedule.event} events before the end of the run, with only part of what "
                f"was not synced kept, leaves a store that is wrong: {verdict.text} (acknowledged "
                f"{verdict.acknowledged}, begun {verdict.started})"
            )
            if verdict.problem == "check":
                raise Refused(text, verdict.acknowledged, verdict.started)
            raise Wrong(text)
