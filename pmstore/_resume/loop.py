"""Iterative algorithms that continue after a kill: the one loop that all of pmstore's estimators run in.

An algorithm defines its state, how a run starts, the work of an iteration, and when to stop::

    fingerprint ── finished ────────────────────────────────────────────────► load
        │
        ├── absent ───────► start() ──┐ commit
        └── unfinished ───► derive() ─┤
                                      ▼
            ┌──────────────────────► step(), … ── every commit_every: commit ──┐
            │                         ▲    └──────────────────────────────────┘
            │                         │ until converged() or max_iter
            │  one commit             ▼
        start() ◄── next run ── end_run(), better(), keep() ── last run ──► finish()

Everything between two commits is one transaction, so that after a kill, or an exception inside an iteration, the state
is that after a whole iteration.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pmstore._resume.fingerprint import Fingerprint, describe, is_same, state_of
from pmstore._resume.fit_group import FitGroup, StoreOrPath, forget, group_name, opened
from pmstore._resume.history import STEP, History, Rows, at_work, history_of
from pmstore._resume.state import PROGRESS, Field, State, check_fit_group
from pmstore._values.generators import generator_state, set_generator_state

__all__ = ["Field", "Resumable", "State"]

logger = logging.getLogger("pmstore")

BETWEEN_REPORTS = 5.0  # seconds

_running: dict[int, object] = {}  # a mark of each run, by the id of the object: two runs would change the same `state`
os.register_at_fork(after_in_child=_running.clear)  # the runs of other threads don't go on there


class Resumable(ABC):
    """An iterative algorithm whose state is in a store, and which continues after its last commit if it is killed.

    A subclass defines four methods: `fields` returns the table of its state, `fingerprint` everything that the result
    depends on, `start` makes the first state, and `step` is one iteration. A subclass has a `max_iter`, or a method
    `converged` that decides when to stop, or both. `run` does the rest: it looks in the store for an earlier attempt,
    continues it or starts, commits, and leaves the result. An algorithm must be a function of the contents of its
    fingerprint. Then the result is the same, bit for bit, however often it was killed.

    Attributes
    ----------
    state : State
        The fields of the table, `run` and `iteration`. While the algorithm runs in a store, its arrays are live ones of
        the store, and change in place; afterwards they are copies.
    max_iter : int or None
        The maximum number of iterations of a run; None (the default): no limit.
    runs : int
        The number of runs (by default one); the best one is kept.
    version : int
        Increase it when you change the algorithm so that states of the older version no longer fit.
    title : str
        The name of the algorithm in logs and errors: the name of the class. In lower case, it is the parent group of
        fit groups without a name.
    resumed_from_run_, resumed_from_iter_ : int
        The run that `run` found in the store, and the number of its iterations that were done. 0 and 0 for a new start.
    slot_name_ : str or None
        The name of the fit group, the part of the store that the last `run` worked on.
    history_ : History
        After `run`: one row for every iteration, as `pmstore.history` returns it.

    Examples
    --------
    >>> import numpy as np, pmstore
    >>> class PowerIteration(pmstore.Resumable):
    ...     max_iter = 1000
    ...
    ...     def __init__(self, A):
    ...         self.A = A
    ...
    ...     def fields(self):
    ...         return [pmstore.Field("vector", len(self.A)), pmstore.Field("value"), pmstore.Field("change")]
    ...
    ...     def fingerprint(self):
    ...         return {"A": self.A}
    ...
    ...     def start(self):
    ...         self.state.vector = 1 / np.sqrt(len(self.A))
    ...
    ...     def step(self):
    ...         product = self.A @ self.state.vector
    ...         value = np.linalg.norm(product)
    ...         self.state.vector = product / value
    ...         self.state.change = abs(value - self.state.value)
    ...         self.state.value = value
    ...
    ...     def converged(self):
    ...         return self.state.change < 1e-12
    >>> result = PowerIteration(np.diag([1.0, 2.0, 5.0])).run(store="power.pm", name="power")
    >>> round(result.value, 6), result.iteration > 1
    (5.0, True)
    """

    state: State
    max_iter: int | None = None
    runs: int = 1
    version: int = 1
    resumed_from_run_: int = 0
    resumed_from_iter_: int = 0
    slot_name_: str | None = None
    history_: History

    # ---- methods that define an algorithm

    @abstractmethod
    def fields(self) -> Iterable[Field]:
        """The table of the state. It may depend only on the contents of the fingerprint."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Everything that the result depends on, as arrays (which are hashed) and plain values. Errors use the keys
        as names."""

    @abstractmethod
    def start(self) -> Mapping[str, float] | None:
        """Fill `state` for the first iteration of run `state.run`.

        In the first run, this is not inside a transaction, and the arrays of `state` are not in the store yet. If this
        does the first iteration, too, it sets `state.iteration` to 1 and returns what `step` returns.
        """

    @abstractmethod
    def step(self) -> Mapping[str, float] | None:
        """One iteration, in place. `state.iteration` is the number of earlier ones in this run. Inside a
        transaction.

        Returns
        -------
        dict of float, or None
            Figures for the row of this iteration in the `history`: the ``"objective"``, and at most three others.
        """

    def converged(self) -> bool:
        """Whether the run ends now, decided from the state alone. Not called before the first iteration of a run."""
        return False

    def derive(self) -> None:  # noqa: B027 (optional, as those below)
        """Fill the derived fields from the stored ones, when an unfinished fit is resumed."""

    def iterating(self) -> AbstractContextManager[Any]:
        """A context for the iterations of a run, around their transactions."""
        return contextlib.nullcontext()

    def end_run(self) -> None:  # noqa: B027
        """Work at the end of a run, before it is compared with the best one. Inside a transaction."""

    def better(self) -> bool:
        """Whether the run that ended is better than the best so far. Not called for the first run."""
        return False

    def keep(self) -> None:  # noqa: B027
        """Copy the run that ended into the fields for the best run."""

    def finish(self) -> None:  # noqa: B027
        """Complete the result, at the end of the last run. Working fields still exist, and are deleted afterwards."""

    @property
    def title(self) -> str:
        """The name of the algorithm in logs and errors."""
        return type(self).__name__

    # ---- methods for callers

    def run(self, store: StoreOrPath | None = None, name: str | None = None, *, commit_every: float = 1) -> State:
        """Run the algorithm, or the rest of it, or load its result.

        Parameters
        ----------
        store : Store, str or path-like, default=None
            The path of a store, which is created if it doesn't exist, and is open while this runs; or an open store,
            outside of any transaction. In an open store, every commit includes all other pending changes. None: plain
            memory.
        name : str, default=None
            The group of the store that holds only this fit. None: a group named by the fingerprint; `pmstore.prune`
            deletes the finished ones.
        commit_every : int or float, default=1
            An int: commit after that many iterations. A float: commit after the first iteration that ends that many
            seconds after the last commit. The end of a run is always committed.

        Returns
        -------
        State
            `state`, now in plain memory: the result, and the counters.

        Raises
        ------
        FingerprintMismatchError
            The group holds something else than an earlier attempt at the same, or other code changed that attempt's
            state.
        CorruptStoreError
            The state of an unfinished attempt is damaged; the message names the array. Everything in the group is
            verified before the attempt continues. For finished fits, `Store.check` verifies it.
        ReadOnlyStoreError
            The store is open for reading, and the fit in it isn't finished.
        OutOfSpaceError
            The state of the last commit is kept.
        TransactionError
            A transaction of the store is open in this thread, or this fit is at work in it.
        RuntimeError
            This object runs already, in this thread or another.
        StoreLockedError
            The holder of the store may be waiting for this call.
        ValueError
            The path is ":memory:": that store, and the fit with it, would be gone at the end of this call.
        """
        return self._alone(lambda: self._run_to_the_end(store, name, commit_every))

    def _alone(self, run: Callable[[], State]) -> State:
        """Call a run of this object. Raises RuntimeError, and changes nothing, if there is one already."""
        here, this = id(self), object()
        try:
            if _running.setdefault(here, this) is not this:  # in one call: no other thread comes between
                raise RuntimeError(
                    f"this {type(self).__name__} is at work, and runs one fit at a time: make another one"
                )
            return run()
        finally:
            if here in _running and _running[here] is this:  # without a call: no interrupt comes between
                del _running[here]

    def _run_to_the_end(self, store: StoreOrPath | None, name: str | None, commit_every: float) -> State:
        commits = _Commits(commit_every)
        _require_count("max_iter", self.max_iter, 0)
        _require_count("runs", self.runs, 1)
        if self.max_iter is None and type(self).converged is Resumable.converged:
            raise TypeError(f"{self.title} would never end: give it a max_iter, or a method converged()")
        self.resumed_from_run_ = self.resumed_from_iter_ = 0
        self.slot_name_ = None
        if store is None:
            self.state = State(self._table())
            in_memory: dict[str, Any] = {}
            rows = Rows(in_memory, self.max_iter, self.runs, source=self._figures_of)
            self._add_first(rows, self._start())
            self._finish_runs(None, commits, rows)
            self.state.drop_working()
            self.history_ = history_of(in_memory)
            return self.state
        fingerprint = self._whole_fingerprint()
        self.slot_name_ = group_name(self.title.lower(), fingerprint) if name is None else name
        with opened(store, f"{self._call} commits after every iteration") as own:
            self._run_in(FitGroup(own, self.slot_name_), fingerprint, commits)
        return self.state

    def reset(self, store: StoreOrPath, name: str | None = None) -> None:
        """Forget the fit in the store, so that the next `run` starts anew.

        Parameters
        ----------
        store : Store, str or path-like
            As for `run`.
        name : str, default=None
            As for `run`. None: the fit of the same fingerprint.

        Raises
        ------
        FingerprintMismatchError
            The group holds something else than a fit.
        TransactionError, StoreLockedError, ValueError
            As for `run`.
        """
        forget(store, group_name(self.title.lower(), self._whole_fingerprint()) if name is None else name)

    _call = "run()"
    _figures_of = STEP
    _steps_draw = True
    """Whether a step may draw from a generator, and not only `start`, `end_run`, `keep` and `finish`."""

    def _table(self) -> Iterable[Field]:
        """All fields, with those of the loop itself."""
        return self.fields()

    def _whole_fingerprint(self) -> Fingerprint:
        """The hashed fingerprint, together with everything that the loop itself depends on."""
        given = self.fingerprint()
        if not isinstance(given, Mapping):
            raise TypeError(f"fingerprint() returns a dict of arrays and values, not {given!r:.80}")
        given = {key: describe(value) for key, value in given.items()}
        own = self._loop_fingerprint()
        for key in own.keys() & given.keys():
            if not is_same(own[key], given[key]):
                raise ValueError(f"fingerprint() has the key {key!r}, which is the loop's own: give it another name")
        return {**own, **given}

    def _loop_fingerprint(self) -> Fingerprint:
        return {
            "algorithm": self._described(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "runs": self.runs,
            "max_iter": self.max_iter,
        }

    def _described(self) -> str:
        return f"{self.title}, version {self.version}"

    def _run_in(self, fit_group: FitGroup, fingerprint: Fingerprint, commits: _Commits) -> None:
        """Run the algorithm in its group, or the rest of it, and load the result."""
        with fit_group.worked_on():
            found = fit_group.admit(fingerprint)
            fields = tuple(self._table())
            if found:
                check_fit_group(fit_group, fields, self.runs, self.max_iter)
                self._found(fit_group)
                self._tell_where(fit_group)
            if not fit_group.finished:
                fit_group.check_writable()
                fit_group.commit_pending()
                self.state = State(fields)
                try:
                    with _generators_put_back(fields):
                        self._run(fit_group, None if found else fingerprint, commits)
                finally:
                    del self.state  # closing the store would copy live arrays
            self.state = self._load(fit_group, fields)
            self.history_ = history_of(fit_group.group)

    def _tell_where(self, fit_group: FitGroup) -> None:
        """Log the progress of the fit."""
        progress = fit_group.group[PROGRESS]
        self.resumed_from_run_, self.resumed_from_iter_ = int(progress["run"]), int(progress["iteration"])
        logger.info(
            "%s: %s %r in %s, at run %d of %d, %d iterations done",
            self.title,
            "loading" if fit_group.finished else "resuming",
            fit_group.name,
            fit_group.store.path,
            self.resumed_from_run_,
            self.runs,
            self.resumed_from_iter_,
        )

    def _run(self, fit_group: FitGroup, fingerprint: Fingerprint | None, commits: _Commits) -> None:
        """Start, if there is a fingerprint to begin the group with, or resume; then iterate to the end."""
        # A crash test compares the commits of two runs.
        clock = float if fit_group.store.recorded else time.time
        rows = Rows(fit_group.group, self.max_iter, self.runs, clock, self._figures_of)
        with at_work(fit_group.store, fit_group.name, rows):
            if fingerprint is not None:
                started = self._start()
                with fit_group.store.transaction():
                    fit_group.begin(fingerprint)
                    self.state.move_to(fit_group.group)
                    self._add_first(rows, started)
                rows.committed = rows.count
            else:
                fit_group.check_sound()
                self.state.resume(fit_group.group)
                self.derive()
            self._finish_runs(fit_group, commits, rows)

    def _load(self, fit_group: FitGroup, fields: tuple[Field, ...]) -> State:
        """Copies of the results of a finished fit."""
        state = State(fields)
        state.load(fit_group.group)
        return state

    def _start(self) -> tuple[float, Mapping[str, float] | None]:
        """Start a run: the seconds that this took, and the figures of an iteration that it did."""
        began = time.monotonic()
        figures = self.start()
        self.state.settle()
        return time.monotonic() - began, figures

    def _add_first(self, rows: Rows, started: tuple[float, Mapping[str, float] | None]) -> None:
        """Write the row of an iteration that the start of the run did."""
        if self.state.iteration:
            rows.add(self.state.run, self.state.iteration, *started)

    def _finish_runs(self, fit_group: FitGroup | None, commits: _Commits, rows: Rows) -> None:
        transaction = contextlib.nullcontext if fit_group is None else fit_group.store.transaction
        state = self.state
        report = _Report(self, fit_group)
        while True:
            run = state.run
            with self.iterating():
                while not self._is_over():
                    with transaction():
                        now = commits.begin()
                        while True:
                            figures = self.step()
                            state.settle()
                            state.iteration = iteration = state.iteration + 1
                            began, now = now, report.iteration_done()
                            rows.add(run, iteration, now - began, figures)
                            if commits.due() or self._is_over():
                                break
                        state.capture(generators=self._steps_draw)
                    rows.committed = rows.count
                    self._committed()
                    report.committed()
            with transaction():
                self.end_run()
                if state.best_run < 0 or self.better():
                    self.keep()
                    state.best_run, state.best_iterations = state.run, state.iteration
                last = state.run + 1 >= self.runs
                self._run_ended(last)
                if last:
                    self.finish()
                    state.settle()
                else:
                    state.run, state.iteration = state.run + 1, 0
                    self._add_first(rows, self._start())
                state.capture()
                if last:
                    state.drop_working()
                    if fit_group is not None:
                        fit_group.finish()
            rows.committed = rows.count
            if last:
                return

    def _found(self, fit_group: FitGroup) -> None:  # noqa: B027
        """Called before a fit that the store has is continued or loaded."""

    def _committed(self) -> None:  # noqa: B027
        """Called after each commit of iterations."""

    def _run_ended(self, last: bool) -> None:  # noqa: B027
        """Called at the end of each run, once `state.best_run` tells the best one. Inside a transaction."""

    def _is_over(self) -> bool:
        """Whether the current run has reached its end."""
        iteration = self.state.iteration
        return iteration == self.max_iter or (iteration > 0 and self.converged())


@contextlib.contextmanager
def _generators_put_back(fields: Iterable[Field]) -> Iterator[None]:
    """Generators are as before if an exception leaves the block: the fingerprint may include their state, and the same
    call again is to be the same fit."""
    before = [
        (one, state_of(one) if isinstance(one, np.random.RandomState) else generator_state(one))
        for one in (field.generator for field in fields)
        if one is not None
    ]
    try:
        yield
    except BaseException:
        for one, state in before:
            if isinstance(one, np.random.RandomState):
                one.set_state(dict(state))
            else:
                set_generator_state(one, state)
        raise


class _Commits:
    """Decides when to commit: after a number of iterations, or of seconds."""

    def __init__(self, every: Any) -> None:
        check_commit_every(every)
        self._iterations = int(every) if isinstance(every, numbers.Integral) else 0  # 0: by the clock
        self._seconds = float(every)
        self._done, self._since = 0, 0.0

    def begin(self) -> float:
        """The last commit is now, at the returned time."""
        self._done, self._since = 0, time.monotonic()
        return self._since

    def due(self) -> bool:
        """Whether the iteration that ended is to be committed."""
        if not self._iterations:
            return time.monotonic() - self._since >= self._seconds
        self._done += 1
        return self._done >= self._iterations


def _require_count(name: str, count: Any, least: int) -> None:
    """Raise TypeError or ValueError for a number of runs or iterations that a loop could not reach."""
    if count is None and name == "max_iter":
        return
    if not isinstance(count, numbers.Real) or not float(count).is_integer():
        raise TypeError(f"{name} is a whole number, not {count!r}")
    if count < least:
        raise ValueError(f"{name} is at least {least}, not {count}")


def check_commit_every(every: Any) -> None:
    """Raise TypeError or ValueError unless the argument is a number of iterations (int) or seconds (float)."""
    if isinstance(every, bool | np.bool_) or not isinstance(every, numbers.Real):
        raise TypeError(f"commit_every is a number of iterations (int) or seconds (float), not {every!r}")
    if not 0 < float(every) < math.inf:
        raise ValueError(f"commit_every must be finite and greater than 0, not {every!r}")


class _Report:
    """Logs the progress: every commit (DEBUG), and from time to time the remaining work (INFO)."""

    def __init__(self, algorithm: Resumable, fit_group: FitGroup | None) -> None:
        self._algorithm = algorithm
        self._name = "" if fit_group is None else fit_group.name
        self._started = self._told = time.monotonic()
        self._iterations = 0

    def iteration_done(self) -> float:
        """Log the remaining work, if that wasn't done for a while. Returns the time."""
        self._iterations += 1
        now = time.monotonic()
        if now - self._told >= BETWEEN_REPORTS:
            self._told = now
            self._tell(now)
        return now

    def _tell(self, now: float) -> None:
        one = self._algorithm
        run, iteration, most = one.state.run, one.state.iteration, one.max_iter
        each = (now - self._started) / self._iterations
        left = ""
        if most is not None:
            left = f", {_duration(each * (most * (one.runs - run) - iteration))} left at most"
        of = "" if most is None else f" of at most {most}"
        logger.info(
            "%s: run %d of %d, %d iterations%s done, %s each%s",
            one.title, run, one.runs, iteration, of, _duration(each), left,
        )  # fmt: skip

    def committed(self) -> None:
        """Log a commit."""
        if not logger.isEnabledFor(logging.DEBUG):  # reading the state takes longer
            return
        state = self._algorithm.state
        logger.debug(
            "%s: %r committed run %d, iteration %d", self._algorithm.title, self._name, state.run, state.iteration
        )


def _duration(seconds: float) -> str:
    """A duration as text: "1:02:03", "4:05", "1.23 s", "0.00123 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
