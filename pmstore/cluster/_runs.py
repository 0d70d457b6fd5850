"""The common part of Lloyd's and Elkan's algorithms: runs from different centres, of which the best is kept.

In alternation, a kernel of scikit-learn reads one of two arrays of centres and writes the other, directly in the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fit import Fit
from pmstore._resume.state import Field
from pmstore.cluster import _sklearn

Array = npt.NDArray[Any]


class Runs(Fit):
    """All runs for an estimator.

    Parameters
    ----------
    estimator : KMeans
        The estimator, checked, with ``_n_init`` and ``_n_threads`` set.
    X : ndarray or CSR matrix of shape (n, d), float32 or float64, in C order
    weights : ndarray of shape (n,)
        The weights of the samples; `weighted` tells whether they were given.
    init : str, callable or ndarray of shape (k, d)
    in_place : bool
        Whether dense data are centred in place. `put_data_back` undoes that.
    """

    version = 3
    _steps_draw = False
    full_stop = ""  # follows the inertia in verbose output

    def __init__(self, estimator: Any, X: Any, weights: Array, init: Any, *, weighted: bool, in_place: bool) -> None:
        super().__init__(estimator, X, weights if weighted else None, threads=estimator._n_threads)
        self.X, self.weights, self.init = X, weights, init
        self.runs, self.max_iter, self.threads = estimator._n_init, estimator.max_iter, estimator._n_threads
        self.dense = isinstance(X, np.ndarray)
        self._in_place = in_place
        self._mean: Any = None  # the mean that was subtracted from the data
        self._squared_norms: Any = None  # needs a pass over the data, which a resumed fit may not need
        self._around_zero: float | None = None  # the inertia of the data around the origin
        self._buffers: tuple[Array, ...] = ()  # for what `iterate` tells; the kernels overwrite them
        self._inertia_kernel = _sklearn.inertia_dense if self.dense else _sklearn.inertia_sparse

    def fields(self) -> Iterable[Field]:
        """The table of the state, without the labels and the fields that belong to them."""
        (n, d), k, dtype = self.X.shape, self.estimator.n_clusters, self.X.dtype
        yield from super().fields()
        yield Field("tolerance")  # for the centres' shift: relative to the variance of the data
        yield Field("shift")  # of all centres in the last iteration, squared
        yield Field("strictly", dtype=bool)  # the last iteration changed no label
        yield Field("centers/0", (k, d), dtype, "working")  # iteration i reads centers/(i % 2) and writes the other
        yield Field("centers/1", (k, d), dtype, "working")
        if self.dense:
            yield Field("mean", d, dtype, "working")  # the mean that is subtracted from the data
        yield Field("best/centers", (k, d), dtype, "best")  # centred, until the fit is finished
        yield Field("best/labels", n, np.int32, "best")
        yield Field("best_inertia")

    # ---- the differences between the two

    @abstractmethod
    def iterate(self, old: Array, new: Array, weight_in_clusters: Array, shift: Array) -> None:
        """New labels, new centres, and how far each centre moved."""

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
        self._compute_norms()
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
        """Refuse labels that other code changed to a cluster that does not exist: the kernels would write elsewhere
        in memory."""
        labels = self.state[name]
        if not 0 <= labels.min() <= labels.max() < self.estimator.n_clusters:
            raise self.changed(name)

    def step(self) -> Mapping[str, float]:
        """One iteration. The objective is the inertia around the new centres."""
        state, i = self.state, self.state.iteration
        old, new = self.centers(i), self.centers(i + 1)
        labels = state.labels
        before = labels.tobytes()
        if not self._buffers:
            self._buffers = np.zeros(len(old), old.dtype), np.zeros(len(old), old.dtype)
        weight_in_clusters, shift = self._buffers
        self.iterate(old, new, weight_in_clusters, shift)
        total = (shift**2).sum()
        state.shift, state.strictly = total, i > 0 and labels.tobytes() == before
        if self.estimator.verbose:
            print(f"Iteration {i}, inertia {self.inertia(old)}{self.full_stop}")
            if state.strictly:
                print(f"Converged at iteration {i}: strict convergence.")
            elif self.converged():
                print(f"Converged at iteration {i}: center shift {total} within tolerance {state.tolerance}.")
        return {"objective": self._inertia_of_means(new, weight_in_clusters), "shift": total}

    def fitted(self) -> dict[str, Any]:
        """The newest centres, in the coordinates of the original data."""
        centers = self.centers(self.state.iteration + 1)
        return {"cluster_centers_": centers + self.state.mean if self.dense else centers.copy()}

    def converged(self) -> bool:
        """Whether the last iteration changed no label, or hardly moved the centres."""
        return bool(self.state.strictly or self.state.shift <= self.state.tolerance)

    def end_run(self) -> None:
        """Labels that match the last centres, and their inertia."""
        centers = self.centers(self.state.iteration)
        if not self.state.strictly:
            with self.iterating():
                self.assign(centers)
        self._ended = self.inertia(centers)

    def better(self) -> bool:
        """Whether the run's inertia is lower, and its clusters aren't the same under other numbers."""
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
        """Move the centres back to the coordinates of the original data."""
        if self.dense:
            best = self.state["best/centers"]
            best += self.state.mean

    def centers(self, iteration: int) -> Array:
        """The centres that an iteration starts from, which the previous one made."""
        centers: Array = self.state[f"centers/{iteration % 2}"]
        return centers

    def inertia(self, centers: Array) -> float:
        """The inertia of the current labels and the centres."""
        return float(self._inertia_kernel(self.X, self.weights, centers, self.state.labels, self.threads))

    def _inertia_of_means(self, means: Array, weight_in_clusters: Array) -> float:
        """The inertia, if the centres are the means of their clusters: without a pass over the data."""
        if self._around_zero is None:
            self._compute_norms()
            self._around_zero = float(np.sum(self._squared_norms * self.weights, dtype=np.float64))
        means = means.astype(np.float64, copy=False)
        return max(0.0, self._around_zero - float((np.einsum("ij,ij->i", means, means) * weight_in_clusters).sum()))

    def _compute_norms(self) -> None:
        if self._squared_norms is None:
            self._squared_norms = _sklearn.row_norms(self.X, squared=True)

    # ---- the data

    def center(self) -> None:
        """Centre the data, and initial centres too: this makes distances more accurate."""
        if self.dense:
            self._mean = np.array(self.state.mean)
            self.X = np.subtract(self.X, self._mean, out=self.X if self._in_place else None)
            if common.is_arraylike(self.init):
                self.init -= self._mean

    def put_data_back(self) -> None:
        """Undo the changes of the data in place."""
        if self._in_place and self._mean is not None:
            self.X += self._mean
