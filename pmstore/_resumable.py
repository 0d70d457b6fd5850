"""Iterative algorithms that go on where they were: the one loop that all of pmstore's estimators run in.

An algorithm says what its state is, how a run starts, what an iteration does and when to stop::

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

Everything between two commits is one transaction, so that a kill, or an exception inside an iteration, takes the state
back to a whole iteration.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pmstore._estimators import Slot, StoreOrPath, forget, opened, slot_name
from pmstore._fingerprint import Fingerprint, describe
from pmstore._state import PROGRESS, Field, State, check_slot

__all__ = ["Field", "Resumable", "State"]

logger = logging.getLogger("pmstore")

BETWEEN_REPORTS = 5.0  # seconds


class Resumable(ABC):
    """An iterative algorithm whose state lives in a store: killed, it goes on after its last commit.

    A subclass gives the table of its state, `fields`; what its result depends on, `fingerprint`; how it starts,
    `start`; and one iteration, `step`. It has a `max_iter`, or says in `converged` when to stop, or both. `run` does
    the rest: it looks in the store for an earlier attempt, goes on from it or starts, commits, and leaves the result.
    An algorithm must be a function of what is in its fingerprint: then the result is the same, bit for bit, however
    often it was killed.

    Attributes
    ----------
    state : State
        The fields of the table, `run` and `iteration`. While the algorithm runs in a store, its arrays are live ones of
        the store, and change in place; afterwards they are copies.
    max_iter : int or None
        Most iterations of a run; None, as long as nobody says otherwise: no limit.
    runs : int
        How many times to start and iterate (by default once), of which the best is kept.
    version : int
        To be increased when the algorithm is changed so that a state which an older one left doesn't fit.
    title : str
        What logs and errors call the algorithm: the name of the class. In small letters it is the group of the slots
        that are given no name.
    resumed_from_run_, resumed_from_iter_ : int
        The run that `run` found in the store, and how many iterations of it were done. 0 and 0 when it started afresh.
    slot_name_ : str or None
        The group of the store that the last `run` worked on.

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

    # ---- what an algorithm is

    @abstractmethod
    def fields(self) -> Iterable[Field]:
        """The table of the state. It may depend on what is in the fingerprint, and on nothing else."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """All that the result depends on, as arrays (which are hashed) and plain values. Keys are what errors call
        it."""

    @abstractmethod
    def start(self) -> None:
        """Fill `state` for the first iteration of run `state.run`.

        Of the first run this isn't inside a transaction, and the arrays of `state` are not those of the store yet.
        """

    @abstractmethod
    def step(self) -> None:
        """One iteration, in place: `state.iteration` of them were done in this run. Inside a transaction."""

    def converged(self) -> bool:
        """Whether the run is to end, from the state alone. Not asked before its first iteration."""
        return False

    def derive(self) -> None:  # noqa: B027 (optional, as those below)
        """Fill the derived fields from the stored ones, when an unfinished fit is resumed."""

    def iterating(self) -> AbstractContextManager[Any]:
        """A context for the iterations of a run, around their transactions."""
        return contextlib.nullcontext()

    def end_run(self) -> None:  # noqa: B027
        """What is to be done at the end of a run, before it is compared with the best one. Inside a transaction."""

    def better(self) -> bool:
        """Whether the run that ended is better than the best so far. Not asked of the first one."""
        return False

    def keep(self) -> None:  # noqa: B027
        """Put what ended into the fields for the best run."""

    def finish(self) -> None:  # noqa: B027
        """Complete the result, at the end of the last run. Working fields are still there, and gone afterwards."""

    @property
    def title(self) -> str:
        """What logs and errors call the algorithm."""
        return type(self).__name__

    # ---- what is done with it

    def run(self, store: StoreOrPath | None = None, name: str | None = None, *, commit_every: float = 1) -> State:
        """Run the algorithm, or what is left of it, or load what it left.

        Parameters
        ----------
        store : Store, str or path-like, default=None
            The path of a store, which is opened, and made if it isn't there, for as long as this takes; or an open
            store, in no transaction, where every commit takes whatever else is pending along. None: plain memory.
        name : str, default=None
            The group of the store that holds this fit and no other. None: a group named by the fingerprint;
            `pmstore.prune` deletes those that are finished.
        commit_every : int or float, default=1
            An int: a commit after that many iterations. A float: after the first iteration that ends as many seconds
            after the last commit. The end of a run is always committed.

        Returns
        -------
        State
            `state`, with what is in plain memory then: the result, and the counters.

        Raises
        ------
        FingerprintMismatchError
            The group holds anything but an earlier attempt at the same, or somebody changed what that left.
        CorruptStoreError
            What an unfinished attempt left is damaged; the message names the array. Everything in the store is checked
            before that is gone on with. For finished ones, `Store.check` does that.
        ReadOnlyStoreError
            The store is open for reading, and the fit in it isn't finished.
        OutOfSpaceError
            The last commit is still there.
        TransactionError
            A transaction of the store is open in this thread.
        StoreLockedError
            What has the store open may be waiting for this.
        """
        commits = _Commits(commit_every)
        if self.max_iter is None and type(self).converged is Resumable.converged:
            raise TypeError(f"{self.title} would never end: give it a max_iter, or a method converged()")
        self.resumed_from_run_ = self.resumed_from_iter_ = 0
        self.slot_name_ = None
        if store is None:
            self.state = State(self.fields())
            self.start()
            self._finish_runs(None, commits)
            self.state.drop_working()
            return self.state
        fingerprint = self._whole_fingerprint()
        self.slot_name_ = slot_name(self.title.lower(), fingerprint) if name is None else name
        with opened(store, f"{self._call} commits after every iteration") as own:
            slot = Slot(own, self.slot_name_)
            with slot.worked_on():
                found = slot.admit(fingerprint)
                fields = tuple(self.fields())
                if found:
                    check_slot(slot, fields, self.runs, self.max_iter)
                    self._tell_where(slot)
                if not slot.finished:
                    slot.check_writable()
                    self.state = State(fields)
                    try:
                        self._run(slot, None if found else fingerprint, commits)
                    finally:
                        del self.state  # what is alive would be copied when the store is closed
                self.state = self._load(slot, fields)
        return self.state

    def reset(self, store: StoreOrPath, name: str | None = None) -> None:
        """Forget the fit in the store, so that the next `run` starts afresh.

        Parameters
        ----------
        store : Store, str or path-like
            As of `run`.
        name : str, default=None
            As of `run`. None: the fit of the same fingerprint.

        Raises
        ------
        FingerprintMismatchError
            The group holds something that is no fit.
        TransactionError, StoreLockedError
            As `run`.
        """
        forget(store, slot_name(self.title.lower(), self._whole_fingerprint()) if name is None else name)

    _call = "run()"

    def _whole_fingerprint(self) -> Fingerprint:
        """The fingerprint, hashed, and with what the loop itself depends on."""
        given = {key: describe(value) for key, value in self.fingerprint().items()}
        return {
            "algorithm": self._described(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "runs": self.runs,
            "max_iter": self.max_iter,
            **given,
        }

    def _described(self) -> str:
        return f"{self.title}, version {self.version}"

    def _tell_where(self, slot: Slot) -> None:
        """Say where the fit in the slot is."""
        progress = slot.group[PROGRESS]
        self.resumed_from_run_, self.resumed_from_iter_ = int(progress["run"]), int(progress["iteration"])
        logger.info(
            "%s: %s %r in %s, at run %d of %d, %d iterations done",
            self.title,
            "loading" if slot.finished else "resuming",
            slot.name,
            slot.store.path,
            self.resumed_from_run_,
            self.runs,
            self.resumed_from_iter_,
        )

    def _run(self, slot: Slot, fingerprint: Fingerprint | None, commits: _Commits) -> None:
        """Start, if there is a fingerprint to begin the slot with, or resume; and go on to the end."""
        if fingerprint is not None:
            self.start()
            with slot.store.transaction():
                slot.begin(fingerprint)
                self.state.move_to(slot.group)
        else:
            slot.check_sound()
            self.state.resume(slot.group)
            self.derive()
        self._finish_runs(slot, commits)

    def _load(self, slot: Slot, fields: tuple[Field, ...]) -> State:
        """Copies of what a finished fit left."""
        state = State(fields)
        state.load(slot.group)
        return state

    def _finish_runs(self, slot: Slot | None, commits: _Commits) -> None:
        transaction = contextlib.nullcontext if slot is None else slot.store.transaction
        state = self.state
        report = _Report(self, slot)
        while True:
            with self.iterating():
                while not self._is_over():
                    with transaction():
                        commits.begin()
                        while True:
                            self.step()
                            state.iteration += 1
                            report.iteration_done()
                            if commits.due() or self._is_over():
                                break
                        state.capture()
                    report.committed()
            with transaction():
                self.end_run()
                if state.best_run < 0 or self.better():
                    self.keep()
                    state.best_run, state.best_iterations = state.run, state.iteration
                last = state.run + 1 >= self.runs
                if last:
                    self.finish()
                else:
                    state.run, state.iteration = state.run + 1, 0
                    self.start()
                state.capture()
                if last:
                    state.drop_working()
                    if slot is not None:
                        slot.finish()
            if last:
                return

    def _is_over(self) -> bool:
        """Whether the current run came to its end."""
        iteration = self.state.iteration
        return iteration == self.max_iter or (iteration > 0 and self.converged())


class _Commits:
    """When to commit: after so many iterations, or seconds."""

    def __init__(self, every: Any) -> None:
        check_commit_every(every)
        self._iterations = int(every) if isinstance(every, numbers.Integral) else 0  # 0: by the clock
        self._seconds = float(every)
        self._done, self._since = 0, 0.0

    def begin(self) -> None:
        """The last commit was now."""
        self._done, self._since = 0, time.monotonic()

    def due(self) -> bool:
        """Whether the iteration that ended is to be committed."""
        if not self._iterations:
            return time.monotonic() - self._since >= self._seconds
        self._done += 1
        return self._done >= self._iterations


def check_commit_every(every: Any) -> None:
    """Raise TypeError or ValueError unless that is a number of iterations (int) or seconds (float)."""
    if isinstance(every, bool | np.bool_) or not isinstance(every, numbers.Real):
        raise TypeError(f"commit_every is a number of iterations (int) or seconds (float), not {every!r}")
    if not 0 < float(every) < math.inf:
        raise ValueError(f"commit_every must be finite and greater than 0, not {every!r}")


class _Report:
    """Tells how far it is: every commit (DEBUG), and now and then what is left (INFO)."""

    def __init__(self, algorithm: Resumable, slot: Slot | None) -> None:
        self._algorithm = algorithm
        self._name = "" if slot is None else slot.name
        self._started = self._told = time.monotonic()
        self._iterations = 0

    def iteration_done(self) -> None:
        """Tell what is left, if that wasn't told for a while."""
        self._iterations += 1
        now = time.monotonic()
        if now - self._told < BETWEEN_REPORTS:
            return
        self._told = now
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
        """Tell of a commit."""
        state = self._algorithm.state
        logger.debug(
            "%s: %r committed run %d, iteration %d", self._algorithm.title, self._name, state.run, state.iteration
        )


def _duration(seconds: float) -> str:
    """To read: "1:02:03", "4:05", "1.23 s", "0.00123 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
