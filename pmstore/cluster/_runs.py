"""What Lloyd's and Elkan's algorithms have in common: runs from different centres, of which the best is kept.

A kernel of scikit-learn's reads one of two arrays of centres and writes the other, straight into the store, by turns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore import _sklearn as common
from pmstore._fit import Fit
from pmstore._state import Field
from pmstore.cluster import _sklearn

Array = npt.NDArray[Any]


class Runs(Fit):
    """All runs for an estimator.

    Parameters
    ----------
    estimator : KMeans
        Checked, with ``_n_init`` and ``_n_threads`` set.
    X : ndarray or CSR matrix of shape (n, d), float32 or float64, in C order
    weights : ndarray of shape (n,)
        Of the samples; weighted says whether they were given.
    init : str, callable or ndarray of shape (k, d)
    in_place : bool
        Whether the data, if they are dense, are to be centred where they are. `put_data_back` undoes that.
    """

    version = 3
    full_stop = ""  # behind the inertia that verbose prints

    def __init__(self, estimator: Any, X: Any, weights: Array, init: Any, *, weighted: bool, in_place: bool) -> None:
        super().__init__(estimator, X, weights if weighted else None, threads=estimator._n_threads)
        self.X, self.weights, self.init = X, weights, init
        self.runs, self.max_iter, self.threads = estimator._n_init, estimator.max_iter, estimator._n_threads
        self.dense = isinstance(X, np.ndarray)
        self._in_place = in_place
        self._mean: Any = None  # by which the data were centred
        self._squared_norms: Any = None  # a pass over the data, which a resume may not need
        self._inertia_kernel = _sklearn.inertia_dense if self.dense else _sklearn.inertia_sparse

    def fields(self) -> Iterable[Field]:
        """The table of the state, but for labels and what belongs to them."""
        (n, d), k, dtype = self.X.shape, self.estimator.n_clusters, self.X.dtype
        yield from super().fields()
        yield Field("tolerance")  # of the centres' shift: relative to the variance of the data
        yield Field("shift")  # of all centres in the last iteration, squared
        yield Field("strictly", dtype=bool)  # the last iteration changed no label
        yield Field("centers/0", (k, d), dtype, "working")  # iteration i reads centers/(i % 2) and writes the other
        yield Field("centers/1", (k, d), dtype, "working")
        if self.dense:
            yield Field("mean", d, dtype, "working")  # by which the data are centred
        yield Field("best/centers", (k, d), dtype, "best")  # centred, until the fit is finished
        yield Field("best/labels", n, np.int32, "best")
        yield Field("best_inertia")

    # ---- what the two differ in

    @abstractmethod
    def iterate(self, old: Array, new: Array, weight_in_clusters: Array, shift: Array) -> None:
        """New labels, new centres, and how far each of them moved."""

    @abstractmethod
    def assign(self, centers: Array) -> None:
        """Label every sample with the nearest of the centres, which are the newest."""

    # ---- the algorithm

    def start(self) -> None:
        """Centres of iteration 0."""
        super().start()
        state = self.state
        if state.run == 0:
            state.tolerance = _sklearn.tolerance(self.X, self.estimator.tol)
            if self.dense:
                state.mean = self.X.mean(axis=0)
            self.center()
        if self._squared_norms is None:
            self._squared_norms = _sklearn.row_norms(self.X, squared=True)
        self.centers(0)[...] = self.estimator._init_centroids(
            self.X,
            x_squared_norms=self._squared_norms,
            init=self.init,
            random_state=self.random_state,
            sample_weight=self.weights,
        )
        if self.estimator.verbose:
            print("Initialization complete")

    def derive(self) -> None:
        """Centred data."""
        self.check_labels("best/labels")
        self.center()

    def check_labels(self, name: str) -> None:
        """Refuse labels that somebody changed to those of no cluster: the kernels would write elsewhere in memory."""
        labels = self.state[name]
        if not 0 <= labels.min() <= labels.max() < self.estimator.n_clusters:
            raise self.changed(name)

    def step(self) -> None:
        """One iteration."""
        state, i = self.state, self.state.iteration
        old, new = self.centers(i), self.centers(i + 1)
        before = state.labels.copy()
        weight_in_clusters, shift = np.zeros((2, len(old)), dtype=old.dtype)
        self.iterate(old, new, weight_in_clusters, shift)
        total = (shift**2).sum()
        state.shift, state.strictly = total, i > 0 and np.array_equal(state.labels, before)
        if self.estimator.verbose:
            print(f"Iteration {i}, inertia {self.inertia(old)}{self.full_stop}")
            if state.strictly:
                print(f"Converged at iteration {i}: strict convergence.")
            elif self.converged():
                print(f"Converged at iteration {i}: center shift {total} within tolerance {state.tolerance}.")

    def converged(self) -> bool:
        """Whether the last iteration changed no label, or moved the centres hardly at all."""
        return bool(self.state.strictly or self.state.shift <= self.state.tolerance)

    def end_run(self) -> None:
        """Labels that match the last centres, and their inertia."""
        centers = self.centers(self.state.iteration)
        if not self.state.strictly:
            with self.iterating():
                self.assign(centers)
        self._ended = self.inertia(centers)

    def better(self) -> bool:
        """Whether the run's inertia is lower, and its clusters aren't the same under other names."""
        state, k = self.state, self.estimator.n_clusters
        return self._ended < state.best_inertia and not _sklearn.is_same_clustering(
            state.labels, state["best/labels"], k
        )

    def keep(self) -> None:
        """The run that ended is the best so far."""
        state = self.state
        state["best/centers"] = self.centers(state.iteration)
        state["best/labels"] = state.labels
        state.best_inertia = self._ended

    def finish(self) -> None:
        """Centres as they are among the data that were given."""
        if self.dense:
            best = self.state["best/centers"]
            best += self.state.mean

    def centers(self, iteration: int) -> Array:
        """Those that an iteration starts from, which are those that the one before it made."""
        centers: Array = self.state[f"centers/{iteration % 2}"]
        return centers

    def inertia(self, centers: Array) -> float:
        """Of the current labels and the centres."""
        return float(self._inertia_kernel(self.X, self.weights, centers, self.state.labels, self.threads))

    # ---- the data

    def center(self) -> None:
        """Centre the data, which makes distances more accurate; initial centres too."""
        if self.dense:
            self._mean = np.array(self.state.mean)
            self.X = np.subtract(self.X, self._mean, out=self.X if self._in_place else None)
            if common.is_arraylike(self.init):
                self.init -= self._mean

    def put_data_back(self) -> None:
        """Undo what was done to the data in place."""
        if self._in_place and self._mean is not None:
            self.X += self._mean
