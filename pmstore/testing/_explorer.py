"""`CrashExplorer`: records a workload, explores its crashes, and describes failures in the user's terms."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pmstore
from pmstore._store import hooks
from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._base.progress import Counted, terminal
from pmstore.testing._base.scratch import Scratch
from pmstore.testing._faults.damage import Damage, DamageReport, explore_damage
from pmstore.testing._faults.explore import explore_faults
from pmstore.testing._faults.fault import Fault, FaultReport
from pmstore.testing._store import describe as _describe
from pmstore.testing._store import engine
from pmstore.testing._store.check import Check, CheckRunner, refused_already
from pmstore.testing._store.coverage import CrashReport
from pmstore.testing._store.describe import MEMORY, Sandbox
from pmstore.testing._store.engine import Found, Options, Schedule, Tally, Verdict
from pmstore.testing._store.failure import SUFFIX, Failure, place_of, save
from pmstore.testing._store.message import commands, describe
from pmstore.testing._store.plan import MEDIA, CrashOptions, Plan, StateOptions, one_medium, plan, shows_options
from pmstore.testing._store.recording import Recorder, Recording
from pmstore.testing._store.same import require_same
from pmstore.testing._store.shrink import shrink
from pmstore.testing._store.workload import passes, raised, require_change, require_commits, require_runs

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MEDIA", "CrashExplorer", "CrashOptions", "Plan", "plan", "shows_options"]

Run = Callable[[pmstore.Store], Any]
ProgressCall = Callable[[int, int], None]

_busy = threading.Lock()  # stores are recorded for the whole process, not for one explorer


class _Hidden(contextlib.AbstractContextManager[str]):
    """A context manager. Its crash failures and errors of use are raised from the with statement, so that pytest's
    traceback shows only the user's code.
    """

    def __init__(self, inner: contextlib.AbstractContextManager[str]) -> None:
        self._inner = inner

    def __enter__(self) -> str:
        __tracebackhide__ = True
        try:
            return self._inner.__enter__()
        except CrashTestError as error:
            raise error.with_traceback(None)  # noqa: B904

    def __exit__(self, *exception: Any) -> bool | None:
        __tracebackhide__ = True
        try:
            return self._inner.__exit__(*exception)
        except (CrashFailure, CrashTestError) as error:
            if error is exception[1]:
                raise
            raise error.with_traceback(None)  # noqa: B904


class CrashExplorer:
    """Runs code that uses a store, and crashes it in the ways that its medium allows.

    The pytest fixture ``crash_explorer`` is a CrashExplorer. Without pytest, use one in a with statement.

    Parameters
    ----------
    name : str
        The name in failure files and messages.
    directory : path, optional
        The place for failure files; by default ``.pmstore-crash``.
    """

    def __init__(self, name: str = "crash", *, directory: str | os.PathLike[str] | None = None) -> None:
        self.name = name
        self._directory = None if directory is None else Path(directory)
        self._places: dict[str, Scratch] = {}
        self._path: str | None = None

    def __enter__(self) -> CrashExplorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary files."""
        for place in self._places.values():
            place.close()
        self._places.clear()

    @property
    def path(self) -> str:
        """The store's file, while a workload runs."""
        if self._path is None:
            raise CrashTestError(
                "path is known while a workload runs: `with explorer.recording(...) as path:`, or store.path"
            )
        return self._path

    # ---- running

    @shows_options
    def run(self, *runs: Run, progress: ProgressCall | None = None, **options: Unpack[CrashOptions]) -> CrashReport:
        """Record the runs of a store, twice, and explore the states that crashes could leave.

        Parameters
        ----------
        *runs : callable
            Functions of the open store. Each is one run of a process: the store is opened for it (and recovered, if
            necessary). Unless the function closes the store, the process counts as killed at the function's end. The
            next run opens the same file. The functions are called several times, and must do the same each time.
        check : callable, optional
            check(store) or check(store, crash), called with the store recovered from each crash, open for writing. It
            raises AssertionError, or any other exception, if something is wrong. Without it, the explorer verifies only
            that the store is at a whole commit, that no acknowledged commit is lost, and that nothing is damaged.
        budget : int, optional
            The number of crash states to evaluate on each medium; by default that of pytest's ``--crash-budget``, which
            is 2000. Beyond it, one state after each commit is evaluated, and crashes in recovery.
        seed : int, optional
            The seed of all random choices; by default that of ``--crash-seed``, which is 1.
        media : sequence of {"memory", "file"}
            Models of media: lines of persistent memory, and sectors of a disk.
        depth : int
            The number of crashes that may follow the first one: inside recovery, or after it.
        sector : {512, 4096}
            The number of bytes that a disk writes atomically.
        eadr : bool
            Whether the processor's caches survive a power cut too.
        kinds : iterable of str, optional
            Only these kinds of states.
        progress : callable, optional
            Called with the number of states evaluated, and the total. By default, a terminal shows the progress.

        Returns
        -------
        CrashReport
            The coverage.

        Raises
        ------
        CrashFailure
            An AssertionError: a crash was found that loses or mixes data, or that the check refuses. It was shrunk,
            written to a failure file, and the message has the command that replays it.
        CrashTestError
            The test is impossible in this form: the message has a remedy.
        """
        __tracebackhide__ = True  # pytest's traceback ends at the user's code
        chosen = plan("CrashExplorer.run", **options)
        require_runs(runs)
        with self._alone():
            tallies: dict[str, Tally] = {}
            count = 0
            for medium in chosen.media:
                recording = self._record_twice(runs, medium, chosen.options)
                count = self._explore(recording, chosen, tallies, progress)
        return self._reported(chosen, tallies, count)

    @shows_options
    def recording(
        self,
        check: Check | None = None,
        *,
        media: Sequence[str] | str | None = None,
        medium: str | None = None,
        progress: ProgressCall | None = None,
        **options: Unpack[StateOptions],
    ) -> contextlib.AbstractContextManager[str]:
        """A with statement for code that opens the store itself. It provides the path to open, records the operations,
        and explores them at the end::

            with crash_explorer.recording(check) as path:
                KMeans(n_clusters=3, n_init=1, random_state=0, store=path).fit(X)

        The parameters are those of `run`, for one medium, by default "file" (given as media or as medium). The code
        runs once, so that the explorer can't detect whether it is deterministic.
        """
        __tracebackhide__ = True
        chosen = plan("CrashExplorer.recording", check=check, media=one_medium(media, medium), **options)
        return _Hidden(self._recording(chosen, progress))

    @contextlib.contextmanager
    def _recording(self, chosen: Plan, progress: ProgressCall | None) -> Iterator[str]:
        with self._alone():
            path = self._fresh(chosen.media[0])
            with self._recorded(path, chosen.media[0], chosen.options.seed) as recorder:
                try:
                    yield path
                except SystemExit as error:
                    raise raised(error, ()) from error
                self._drop_left_open(path)
            tallies: dict[str, Tally] = {}
            require_commits(recorder.recording)
            count = self._explore(recorder.recording, chosen, tallies, progress)
        self._reported(chosen, tallies, count)

    def explore(self, recording: Recording, chosen: Plan, progress: ProgressCall | None = None) -> CrashReport:
        """Explore a recording that was made elsewhere, for example by another process."""
        __tracebackhide__ = True
        with self._alone():
            tallies: dict[str, Tally] = {}
            require_commits(recording)
            count = self._explore(recording, chosen, tallies, progress)
        return self._reported(chosen, tallies, count)

    # ---- failing calls, and damage

    def faults(
        self,
        *runs: Run,
        check: Check | None = None,
        budget: int | None = None,
        seed: int | None = None,
        media: Sequence[str] | str = MEDIA,
        progress: ProgressCall | None = None,
        only: Fault | None = None,
    ) -> dict[str, FaultReport]:
        """Run the functions once for each of their system calls that can fail, and for each way to fail. The calls are
        writes, syncs, growth and mappings; the failures are no space, a disk error, half of a write, and an interrupt.

        The parameters are those of `run`; budget is the number of cases to try on each medium, by default all; only is
        the one fault to try, on one medium, as the message of a failure names it. Returns a report for each medium.
        Raises CrashFailure if something is lost, mixed or silently wrong.
        """
        __tracebackhide__ = True
        chosen = plan("CrashExplorer.faults", check=check, seed=seed, media=media)
        if only is not None and len(chosen.media) > 1:
            raise CrashTestError('only= tries a fault on one medium: add media="memory" or media="file"')
        reports = {}
        with self._alone():
            for medium in chosen.media:
                with self._shown(f"failing calls, {medium}", progress) as shown:
                    reports[medium] = explore_faults(
                        runs, check, medium=medium, seed=chosen.options.seed, budget=budget, progress=shown, only=only
                    )
        for report in reports.values():
            session.keep_report(str(report))
        return reports

    def damage(
        self,
        source: str | os.PathLike[str] | bytes,
        check: Check | None = None,
        *,
        media: Sequence[str] | str | None = None,
        medium: str | None = None,
        budget: int | None = None,
        seed: int | None = None,
        older: bytes | None = None,
        progress: ProgressCall | None = None,
        only: Damage | None = None,
    ) -> DamageReport:
        """Damage the file of a store in one place after the other, and test that no damage goes unnoticed.

        source: its path, or its bytes. older: an earlier version, whose sectors stand for lost writes. only: the one
        piece of damage to try, as the message of a failure names it. The other parameters are those of `run`, for one
        medium, by default "file" (given as media or as medium). Raises CrashFailure if damage is not noticed.
        """
        __tracebackhide__ = True
        medium = one_medium(media, medium)
        chosen = plan("CrashExplorer.damage", check=check, budget=budget, seed=seed, media=medium)
        with self._alone(), self._shown(f"damage, {medium}", progress) as shown:
            budget, seed = chosen.options.budget, chosen.options.seed
            report = explore_damage(
                source, check, medium=medium, budget=budget, seed=seed, older=older, progress=shown, only=only
            )
        session.keep_report(str(report))
        return report

    @contextlib.contextmanager
    def _shown(self, what: str, progress: ProgressCall | None) -> Iterator[ProgressCall | None]:
        shown = None if progress is not None else terminal(f"{self.name}, {what}")
        try:
            yield progress or shown
        finally:
            if shown is not None:
                shown.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        __tracebackhide__ = True
        if not _busy.acquire(blocking=False):
            raise CrashTestError(
                "two crash explorers at once: another one is recording or exploring in this process. Let it end first, "
                "and don't explore inside a workload or a check"
            )
        try:
            yield
        finally:
            self._path = None
            _busy.release()

    def _reported(self, chosen: Plan, tallies: dict[str, Tally], count: int) -> CrashReport:
        __tracebackhide__ = True
        report = CrashReport(tallies, count, chosen.check is not None, chosen.options.seed)
        if not report.evaluated:
            kinds = f"kinds={','.join(sorted(chosen.options.kinds))} has none here" if chosen.options.kinds else "none"
            raise CrashTestError(f"no crash was evaluated: {kinds} within a budget of {chosen.options.budget}")
        session.keep_report(str(report))
        return report

    # ---- recording

    def _fresh(self, medium: str) -> str:
        """A path without a file, for a store on a medium: the same path each time."""
        __tracebackhide__ = True
        if medium not in self._places:
            base = None
            if medium == "memory":
                if not os.access(MEMORY, os.W_OK):
                    raise CrashTestError(
                        f'the medium "memory" needs a tmpfs, and {MEMORY} is none that can be written: run with '
                        'media=("file",), or mount one'
                    )
                base = MEMORY
            self._places[medium] = Scratch(base)
        place = os.path.join(self._places[medium].path, "new")
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place, 0o700)
        self._path = os.path.join(place, "store.pm")
        return self._path

    @contextlib.contextmanager
    def _recorded(self, path: str, medium: str, seed: int) -> Iterator[Recorder]:
        __tracebackhide__ = True
        recorder = Recorder(path, medium, seed)
        others = {store: store.sequence for store in hooks.usable_stores()}
        with recorder:
            try:
                yield recorder
            except BaseException:
                self._drop_left_open(path)
                raise
        for store in hooks.usable_stores():
            if store.sequence != others.get(store, store.sequence):
                raise CrashTestError(
                    f"the workload committed to the store {store.path!r}, which was opened outside the explorer, and "
                    "nothing of that was recorded: use the store that the workload is given"
                )

    @staticmethod
    def _drop_left_open(path: str) -> None:
        """Drop the stores that the workload left open, with their uncommitted changes, as a kill of the process
        does."""
        for store in hooks.usable_stores():
            if store.path == path:
                hooks.kill(store)

    def _record(self, runs: Sequence[Run], medium: str, options: Options) -> Recording:
        __tracebackhide__ = True
        path = self._fresh(medium)
        with self._recorded(path, medium, options.seed) as recorder:
            for number, run in enumerate(runs):
                store = pmstore.open(path)  # keep the store open: closing it would make a checkpoint
                sequence = store.sequence
                run(store)
                if number:
                    require_change(run, store, sequence)
                self._drop_left_open(path)
        return recorder.recording

    def _record_twice(self, runs: Sequence[Run], medium: str, options: Options) -> Recording:
        __tracebackhide__ = True
        try:
            first = self._record(runs, medium, options)
        except (Exception, SystemExit) as error:
            raise raised(error, runs) from error
        require_commits(first)
        try:
            second = self._record(runs, medium, options)
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            raise CrashTestError(
                f"the workload is not deterministic: its second run raised {type(error).__name__}: {error}; the first "
                "did not. A workload runs twice, each time on a new store: what it keeps elsewhere has to be made anew"
            ) from error
        with Sandbox() as sandbox:
            require_same(first, second, options, sandbox)
        return first

    # ---- exploring

    def _explore(
        self, recording: Recording, chosen: Plan, tallies: dict[str, Tally], progress: ProgressCall | None
    ) -> int:
        """Adds to the tallies. Returns the number of commits."""
        __tracebackhide__ = True
        medium, options = recording.medium, chosen.options
        count = len(_describe.commits(recording))
        shown = None if progress is not None else terminal(f"{self.name}, {medium}")
        counted = Counted(progress or shown)
        with Sandbox() as sandbox:
            runner = None if chosen.check is None else CheckRunner(chosen.check, medium, sandbox)
            if runner is not None:
                self._require_check_passes(recording, options, runner)
            try:
                tally, found = engine.explore(recording, options, runner, counted)
            except KeyboardInterrupt:
                where = f"{self.name}, {medium}"
                print(f"\n{where}: interrupted after {counted.done:,} states; none failed so far", file=sys.stderr)
                raise
            finally:
                if shown is not None:
                    shown.close()
            tallies[medium] = tally
            if found is not None:
                untried = chosen.media[chosen.media.index(medium) + 1 :]
                report = CrashReport(dict(tallies), count, runner is not None, options.seed, medium, untried)
                self._fail(recording, chosen, found, report, runner, sandbox)
        return count

    def _require_check_passes(self, recording: Recording, options: Options, runner: CheckRunner) -> None:
        __tracebackhide__ = True
        last = max(recording.states)
        schedule = Schedule(len(recording), "all")
        text = runner(engine.image(recording, schedule, options), last, last)
        if text is not None:
            raise refused_already(text, "crash", "what the workload leaves at its end", "workload") from runner.error

    def _fail(
        self,
        recording: Recording,
        chosen: Plan,
        found: Found,
        report: CrashReport,
        runner: CheckRunner | None,
        sandbox: Sandbox,
    ) -> None:
        __tracebackhide__ = True

        def evaluate(schedule: Schedule) -> Verdict | None:
            try:
                return engine.evaluate(recording, schedule, chosen.options, runner)
            except CrashTestError:  # a schedule that this recording doesn't have
                return None

        # If the check refuses the state of a whole commit, that commit is the clearest description.
        whole = []
        if found.verdict.problem == "check":
            event = recording.ends().get(found.verdict.sequence or 0)
            whole = [Schedule(event, "all")] if event is not None else []
        found = shrink(found, evaluate, whole)
        again = evaluate(found.schedule)  # for the check's exception
        file = (self._directory or session.directory()) / f"{self.name}{SUFFIX}"
        text = describe(recording, found, chosen.options, sandbox, runner)
        if again is None:
            text.append("  note: evaluated once more, this state passed: the check is not deterministic")
        covered = [f"  {line}" for line in str(report).splitlines()]
        place = None if chosen.check is None else place_of(chosen.check)
        checked = found.verdict.problem == "check"
        message = "\n".join([*text, *commands(file, chosen.options), *covered])
        failure = Failure(
            self.name, message, recording, found.schedule, chosen.options, place, checked, pmstore.__version__
        )
        path: str | None = os.fspath(file)
        try:
            save(failure, file)
        except OSError as error:
            path = None
            kept = f"  not kept: {error.filename or file} can't be written: {error.strerror or error}"
            message = "\n".join([*text, *commands(None, chosen.options), kept, *covered])
        cause = runner.error if runner is not None and checked else None
        raise CrashFailure(message, path=path, report=report) from cause
