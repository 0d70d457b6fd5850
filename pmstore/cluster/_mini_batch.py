"""MiniBatchKMeans that survives a kill."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fit import CONSTRAINTS, Fit, InStore
from pmstore._resume.fit_group import StoreOrPath
from pmstore._resume.state import Field
from pmstore.cluster import _sklearn

Array = npt.NDArray[Any]


class MiniBatchFit(Fit):
    """All steps for an estimator, each with a random batch of the samples.

    Two arrays of centres alternate: step i reads centers/(i % 2), and scikit-learn's own step writes the other one,
    directly in the store, and updates the weights in place. scikit-learn's tests of convergence keep their state on the
    estimator. Therefore this loop has a copy of the estimator.

    Parameters
    ----------
    estimator : MiniBatchKMeans
        The estimator, checked, with ``_n_threads`` and the attributes that ``_check_params_vs_input`` sets.
    X : ndarray or CSR matrix of shape (n, d), float32 or float64, in C order
    weights : ndarray of shape (n,)
        The weights of the samples; `weighted` tells whether they were given.
    init : str, callable or ndarray of shape (k, d)
    """

    version = 1

    def __init__(self, estimator: Any, X: Any, weights: Array, init: Any, *, weighted: bool) -> None:
        super().__init__(estimator, X, weights if weighted else None, threads=estimator._n_threads)
        self.X, self.weights, self.init, self.threads = X, weights, init, estimator._n_threads
        self.batch = estimator._batch_size
        self.max_iter = (estimator.max_iter * X.shape[0]) // self.batch
        self.monitor = copy.copy(estimator)

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        (n, d), k, dtype = self.X.shape, self.estimator.n_clusters, self.X.dtype
        yield from super().fields()
        yield Field("tolerance")  # for the centres' shift: relative to the variance of the data
        yield Field("stopped", dtype=bool)  # by a test of convergence
        yield Field("average")  # of the batches' inertia, weighted exponentially; NaN: none yet
        yield Field("lowest_average")
        yield Field("without_improvement", dtype=np.int64)  # steps
        yield Field("since_reassignment", dtype=np.int64)  # samples
        yield Field("weights", k, dtype)  # of the clusters
        yield Field("centers/0", (k, d), dtype, "working")
        yield Field("centers/1", (k, d), dtype, "working")
        yield Field("centers/result", (k, d), dtype, "best")
        if self.estimator.compute_labels:
            yield Field("labels", n, np.int32, "best")
            yield Field("inertia")

    # ---- the algorithm

    def start(self) -> None:
        """The best of n_init initializations, by its inertia on a few samples."""
        super().start()
        one, state, X, random_state = self.estimator, self.state, self.X, self.random_state
        squared_norms = _sklearn.row_norms(X, squared=True)
        evaluated_by = random_state.randint(0, X.shape[0], one._init_size)
        evaluates, their_weights = X[evaluated_by], self.weights[evaluated_by]
        best = math.inf
        for i in range(one._n_init):
            if one.verbose:
                print(f"Init {i + 1}/{one._n_init} with method {self.init}")
            centers = one._init_centroids(
                X,
                x_squared_norms=squared_norms,
                init=self.init,
                random_state=random_state,
                init_size=one._init_size,
                sample_weight=self.weights,
            )
            _, inertia = _sklearn.labels_inertia(evaluates, their_weights, centers, n_threads=self.threads)
            if one.verbose:
                print(f"Inertia for init {i + 1}/{one._n_init}: {inertia}")
            if inertia < best or not i:
                state["centers/0"], best = centers, inertia
        state.tolerance = _sklearn.tolerance(X, one.tol)
        state.average = state.lowest_average = math.nan

    def iterating(self) -> AbstractContextManager[None]:
        """BLAS in one thread, as in scikit-learn."""
        return common.one_blas_thread()

    def step(self) -> Mapping[str, float]:
        """One batch. The objective is the mean inertia of its samples around the centres before."""
        state, one, i = self.state, self.monitor, self.state.iteration
        old, new = state[f"centers/{i % 2}"], state[f"centers/{(i + 1) % 2}"]
        one._tol, one._counts, one._n_since_last_reassign = state.tolerance, state.weights, state.since_reassignment
        one._no_improvement = state.without_improvement
        one._ewa_inertia, one._ewa_inertia_min = _number(state.average), _number(state.lowest_average)

        rows, weights = self._sample()
        inertia = _sklearn.mini_batch_step(
            X=self.X[rows],
            sample_weight=weights,
            centers=old,
            centers_new=new,
            weight_sums=state.weights,
            random_state=self.random_state,
            random_reassign=one._random_reassign(),
            reassignment_ratio=one.reassignment_ratio,
            verbose=one.verbose,
            n_threads=self.threads,
        )
        shift = np.sum((new - old) ** 2) if one._tol > 0.0 else 0
        state.stopped = one._mini_batch_convergence(i, self.max_iter, self.X.shape[0], shift, inertia)

        state.since_reassignment, state.without_improvement = one._n_since_last_reassign, one._no_improvement
        state.average, state.lowest_average = _or_nan(one._ewa_inertia), _or_nan(one._ewa_inertia_min)
        return {"objective": inertia / self.batch, "shift": shift, "average": _or_nan(one._ewa_inertia)}

    def fitted(self) -> dict[str, Any]:
        """The newest centres."""
        return {"cluster_centers_": np.array(self.state[f"centers/{(self.state.iteration + 1) % 2}"])}

    def _sample(self) -> tuple[Array, Array]:
        """Rows of a batch, and their weights. Weights are used once: since scikit-learn 1.9 as the rows'
        probabilities."""
        n = self.X.shape[0]
        if not _sklearn.SAMPLES_BY_WEIGHT:
            rows = self.random_state.randint(0, n, self.batch)
            return rows, self.weights[rows]
        rows = self.random_state.choice(n, self.batch, p=self._probabilities, replace=True)
        return rows, np.ones_like(self.weights, shape=(self.batch,))

    @functools.cached_property
    def _probabilities(self) -> Array:
        return np.asarray(self.weights / np.sum(self.weights))

    def converged(self) -> bool:
        """Whether the centres hardly move, or the average of the inertia has not decreased for a while."""
        return bool(self.state.stopped)

    def finish(self) -> None:
        """The last centres, and labels if they are requested."""
        state = self.state
        centers = state["centers/result"]
        centers[...] = state[f"centers/{state.iteration % 2}"]
        if self.estimator.compute_labels:
            state["labels"], state.inertia = _sklearn.labels_inertia(
                self.X, self.weights, centers, n_threads=self.threads
            )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class MiniBatchKMeans(InStore, _sklearn.SklearnMiniBatchKMeans):
    """scikit-learn's MiniBatchKMeans, with the state of the fit in a store.

    ``fit`` commits after every step, that is, after every mini-batch, or as set by `commit_every`. The same ``fit``
    again, in another process if this one was killed, continues after the last commit. If the fit was finished, it loads
    the result. The result is the same as that of scikit-learn's own MiniBatchKMeans, bit for bit, as for
    :class:`pmstore.cluster.KMeans`. ``partial_fit`` is scikit-learn's own, and does not use the store.

    Parameters
    ----------
    n_clusters, init, max_iter, batch_size, verbose, compute_labels, random_state, tol, max_no_improvement, init_size, \
            n_init, reassignment_ratio
        As in :class:`sklearn.cluster.MiniBatchKMeans`. ``random_state`` as in :class:`pmstore.cluster.KMeans`.
    store, name, commit_every
        As in :class:`pmstore.cluster.KMeans`.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
    labels_ : ndarray of shape (n_samples,), int32
    inertia_ : float
    n_iter_, n_steps_ : int
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
        As in :class:`sklearn.cluster.MiniBatchKMeans`. Copies: they don't refer to the store.
    resumed_from_iter_ : int
        The number of steps that were done when ``fit`` found the fit in the store; 0 for a new start.
    resumed_from_run_ : int
        0: there is one run.
    history_ : History
        As in :class:`pmstore.cluster.KMeans`.

    Raises
    ------
    FingerprintMismatchError, TransactionError, StoreLockedError
        As :class:`pmstore.cluster.KMeans`.
    NotImplementedError
        By ``fit`` with a store, if this version of scikit-learn lacks the functions that the steps use.

    Notes
    -----
    The store holds two arrays of (n_clusters, n_features), one of which changes in each step, the weights of the
    clusters, and the state of the random generator (2.5 kB), which changes too; at the end the centres and the labels.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from pmstore.cluster import MiniBatchKMeans
    >>> X, _ = load_digits(return_X_y=True)
    >>> first = MiniBatchKMeans(10, batch_size=256, random_state=0, store="batches.pm").fit(X)
    >>> again = MiniBatchKMeans(10, batch_size=256, random_state=0, store="batches.pm").fit(X)  # loads
    >>> bool((first.labels_ == again.labels_).all())
    True
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 (the name and the kind are scikit-learn's)
        **_sklearn.SklearnMiniBatchKMeans._parameter_constraints,
        **CONSTRAINTS,
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        max_iter: int = 100,
        batch_size: int = 1024,
        verbose: int = 0,
        compute_labels: bool = True,
        random_state: Any = None,
        tol: float = 0.0,
        max_no_improvement: int | None = 10,
        init_size: int | None = None,
        n_init: Any = "auto",
        reassignment_ratio: float = 0.01,
        store: StoreOrPath | None = None,
        name: str | None = None,
        commit_every: float = 1,
    ) -> None:
        super().__init__(
            n_clusters=n_clusters,
            init=init,
            max_iter=max_iter,
            batch_size=batch_size,
            verbose=verbose,
            compute_labels=compute_labels,
            random_state=random_state,
            tol=tol,
            max_no_improvement=max_no_improvement,
            init_size=init_size,
            n_init=n_init,
            reassignment_ratio=reassignment_ratio,
        )
        self.store = store
        self.name = name
        self.commit_every = commit_every

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> MiniBatchKMeans:
        """Compute the clusters, continue computing them, or load them.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
        y : ignored
        sample_weight : array-like of shape (n_samples,), default=None

        Returns
        -------
        MiniBatchKMeans
            The estimator.
        """
        if self._is_scikit_learns():
            self._started_afresh()
            super().fit(X, sample_weight=sample_weight)
            return self
        _sklearn.check_mini_batch_parts()
        X = _sklearn.validated(self, X)
        weights = common.check_sample_weight(sample_weight, X, dtype=X.dtype)
        init = _sklearn.checked_init(self, X)
        self._n_threads = common.openmp_threads()
        self._check_mkl_vcomp(X, self._batch_size)

        steps = MiniBatchFit(self, X, weights, init, weighted=sample_weight is not None)
        told = None if sample_weight is None else {"sample_weight": weights}
        state = self._fit_in_store(steps, X=X, y=y, metadata=told)
        self._counts, self._tol = state.weights, state.tolerance
        self._ewa_inertia, self._ewa_inertia_min = _number(state.average), _number(state.lowest_average)
        self._no_improvement, self._n_since_last_reassign = state.without_improvement, state.since_reassignment
        self.cluster_centers_ = state["centers/result"]
        self._n_features_out = self.cluster_centers_.shape[0]
        self.n_steps_ = state.iteration
        self.n_iter_ = int(np.ceil((state.iteration * self._batch_size) / X.shape[0]))
        if self.compute_labels:
            self.labels_, self.inertia_ = state.labels, state.inertia
        else:
            self.inertia_ = self._ewa_inertia * (np.sum(weights) if _sklearn.SAMPLES_BY_WEIGHT else X.shape[0])
        steps.end_callbacks()
        return self
