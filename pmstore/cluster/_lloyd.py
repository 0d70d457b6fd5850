"""Lloyd's algorithm, one commit per iteration, by scikit-learn's own kernels.

What is in the slot of a fit (k clusters, d features, n samples)::

    progress       run, iteration, …, best_inertia: one small record, changed in place
    centers/0, /1  (k, d)  two slots used in turn: iteration i reads slot i % 2 and writes the other
    mean           (d,)    of the dense data, which are centred by it
    random_state           the generator as it is after the current run's initialisation
    best/centers   (k, d)  of the best run so far, centred; of the finished fit, not centred
    best/labels    (n,)    of the best run so far

    finished fits have neither centers/ nor mean

A run ends and the next one begins in the same commit. The labels of the last iteration, which tell whether the next
one changes anything, are not in the slot: assigning the data to the older centre slot gives them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pmstore._estimators import RANDOM_STATE, Slot, keep_random_state, restore_random_state
from pmstore._fingerprint import Fingerprint
from pmstore.cluster import _sklearn

Array = npt.NDArray[Any]

logger = logging.getLogger("pmstore")

PROGRESS = np.dtype(
    [
        ("run", "<i8"),
        ("iteration", "<i8"),  # done in this run
        ("converged", "<i8"),
        ("strictly", "<i8"),  # converged because no label changed
        ("best_iterations", "<i8"),
        ("best_inertia", "<f8"),
        ("tolerance", "<f8"),  # relative to the variance of the data
    ]
)


class Run(NamedTuple):
    """Outcome of one run."""

    labels: Array
    inertia: float
    iterations: int


class Data(NamedTuple):
    """What the kernels work on; the same in every process that works on a fit."""

    X: Any  # dense and centred, or CSR
    weights: Array
    mean: Array | None  # of the dense data before they were centred
    tolerance: float


def check_slot(slot: Slot, X: Any, clusters: int) -> None:
    """Raise FingerprintMismatchError unless all that the slot of a fit of `X` is to hold is there."""
    samples, features = X.shape
    slot.require("progress", (), PROGRESS)
    slot.require("random_state", (), RANDOM_STATE)
    slot.require("best/centers", (clusters, features), X.dtype)
    slot.require("best/labels", (samples,), np.int32)
    if slot.finished:
        return
    for name in ("centers/0", "centers/1"):
        slot.require(name, (clusters, features), X.dtype)
    if isinstance(X, np.ndarray):
        slot.require("mean", (features,), X.dtype)


class State:
    """Live arrays of an unfinished fit's slot."""

    def __init__(self, slot: Slot) -> None:
        self.progress: Array = slot.group["progress"]
        self.centers: tuple[Array, Array] = (slot.group["centers/0"], slot.group["centers/1"])

    @classmethod
    def create(cls, slot: Slot, data: Data, centers: Array) -> State:
        """Fill a slot for run 0, as part of the caller's transaction."""
        progress = np.zeros((), PROGRESS)
        progress["tolerance"] = data.tolerance
        slot.group["progress"] = progress
        slot.group["centers/0"] = centers
        slot.group["centers/1"] = np.zeros_like(centers)
        # Nothing to put there yet, but a disk that is too small is better noticed now than at the end of a run.
        slot.group.create_array("best/centers", centers.shape, centers.dtype)
        slot.group.create_array("best/labels", data.X.shape[0], np.int32)
        if data.mean is not None:
            slot.group["mean"] = data.mean
        return cls(slot)

    @property
    def run(self) -> int:
        """Number of the current run, from 0."""
        return int(self.progress["run"])

    @property
    def iteration(self) -> int:
        """Iterations done in the current run."""
        return int(self.progress["iteration"])

    def slot_of(self, iteration: int) -> Array:
        """Centres that this iteration starts from, which are those that the one before it made."""
        return self.centers[iteration % 2]

    def next_run(self, centers: Array) -> None:
        """Go on to the next run, as part of the caller's transaction."""
        self.centers[0][...] = centers
        self.progress["run"] += 1
        self.progress["iteration"] = self.progress["converged"] = self.progress["strictly"] = 0


class Lloyd:
    """Runs of Lloyd's algorithm on one data set, with their state in a slot.

    Parameters
    ----------
    slot : Slot
        Absent or unfinished, and of this fit.
    data : Data
    runs, max_iter : int
    threads : int
        OpenMP threads.
    random_state : RandomState
        Used by `initial_centers`; taken back to where it was when the slot is unfinished.
    initial_centers : callable
        Gives the centres that a run starts from.
    verbose : bool
        Print what scikit-learn prints.
    """

    def __init__(
        self,
        slot: Slot,
        data: Data,
        *,
        runs: int,
        max_iter: int,
        threads: int,
        random_state: np.random.RandomState,
        initial_centers: Callable[[], Array],
        verbose: bool = False,
    ) -> None:
        self._slot = slot
        self._data = data
        self._runs = runs
        self._max_iter = max_iter
        self._threads = threads
        self._random_state = random_state
        self._initial_centers = initial_centers
        self._verbose = verbose
        self._best_labels: Array | None = None
        dense = isinstance(data.X, np.ndarray)
        self._kernel = _sklearn.lloyd_iter_chunked_dense if dense else _sklearn.lloyd_iter_chunked_sparse
        self._inertia_kernel = _sklearn.inertia_dense if dense else _sklearn.inertia_sparse

    def start(self, fingerprint: Fingerprint, seed: int | None) -> None:
        """Run all runs of a new fit."""
        centers = self._initialize()
        with self._slot.store.transaction():
            self._slot.begin(fingerprint)
            if seed is not None:
                self._slot.group["seed"] = seed
            keep_random_state(self._slot, self._random_state)
            state = State.create(self._slot, self._data, centers)
        self._finish_runs(state)

    def resume(self) -> None:
        """Run what an unfinished fit has not run yet."""
        state = State(self._slot)
        restore_random_state(self._slot, self._random_state)
        if state.run > 0:
            self._best_labels = np.array(self._slot.group["best/labels"])
        self._finish_runs(state)

    def _finish_runs(self, state: State) -> None:
        while True:
            outcome = self._finish_run(state)
            better = self._is_better(state, outcome)
            if state.run + 1 == self._runs:
                break
            centers = self._initialize()
            with self._slot.store.transaction():
                if better:
                    self._keep(state, outcome)
                keep_random_state(self._slot, self._random_state)
                state.next_run(centers)
        with self._slot.store.transaction():
            if better:
                self._keep(state, outcome)
            self._leave_result()

    def _initialize(self) -> Array:
        centers = self._initial_centers()
        if self._verbose:
            print("Initialization complete")
        return centers

    def _finish_run(self, state: State) -> Run:
        """Iterate to the end of the current run, which may have begun in another process."""
        labels = np.full(self._data.X.shape[0], -1, dtype=np.int32)
        # BLAS inside the kernels' own threads would ask for too many, and sum in another order than scikit-learn.
        with _sklearn.one_blas_thread():
            if state.iteration > 0:
                self._assign(state.slot_of(state.iteration - 1), labels)
            previous = labels.copy()
            while not state.progress["converged"] and state.iteration < self._max_iter:
                with self._slot.store.transaction():
                    self._iterate(state, labels, previous)
                logger.debug("KMeans: %r committed run %d, iteration %d", self._slot.name, state.run, state.iteration)
                previous[:] = labels
            centers = state.slot_of(state.iteration)
            if not state.progress["strictly"]:
                self._assign(centers, labels)
            return Run(labels, self._inertia(centers, labels), state.iteration)

    def _iterate(self, state: State, labels: Array, previous: Array) -> None:
        """One iteration: new labels, new centres straight into the store, and whether that was the last."""
        X, weights, _, tolerance = self._data
        i = state.iteration
        old, new = state.slot_of(i), state.slot_of(i + 1)
        weight_in_clusters, shift = np.zeros((2, len(old)), dtype=old.dtype)
        self._kernel(X, weights, old, new, weight_in_clusters, labels, shift, self._threads)
        if self._verbose:
            print(f"Iteration {i}, inertia {self._inertia(old, labels)}.")
        if np.array_equal(labels, previous):
            state.progress["converged"] = state.progress["strictly"] = 1
            if self._verbose:
                print(f"Converged at iteration {i}: strict convergence.")
        elif (total := (shift**2).sum()) <= tolerance:
            state.progress["converged"] = 1
            if self._verbose:
                print(f"Converged at iteration {i}: center shift {total} within tolerance {tolerance}.")
        state.progress["iteration"] = i + 1

    def _assign(self, centers: Array, labels: Array) -> None:
        """Label every sample with its nearest centre."""
        X, weights, _, _ = self._data
        unused = np.zeros(len(centers), dtype=centers.dtype)
        self._kernel(X, weights, centers, centers, unused, labels, unused, self._threads, update_centers=False)

    def _inertia(self, centers: Array, labels: Array) -> float:
        X, weights, _, _ = self._data
        return float(self._inertia_kernel(X, weights, centers, labels, self._threads))

    def _is_better(self, state: State, outcome: Run) -> bool:
        """Whether a run is better than the best so far: of lower inertia, and not the same clusters renamed."""
        if self._best_labels is None:
            return True
        k = len(state.centers[0])
        return outcome.inertia < float(state.progress["best_inertia"]) and not _sklearn.is_same_clustering(
            outcome.labels, self._best_labels, k
        )

    def _keep(self, state: State, outcome: Run) -> None:
        """Make a run the best so far, as part of the caller's transaction."""
        self._slot.group["best/centers"] = state.slot_of(outcome.iterations)
        self._slot.group["best/labels"] = self._best_labels = outcome.labels
        state.progress["best_inertia"] = outcome.inertia
        state.progress["best_iterations"] = outcome.iterations

    def _leave_result(self) -> None:
        """Leave only the result in the slot, as part of the caller's transaction."""
        group = self._slot.group
        if self._data.mean is not None:
            best = group["best/centers"]
            best += self._data.mean
            del group["mean"]
        del group["centers/0"], group["centers/1"]
        self._slot.finish()
