"""The training loops, one for all strategies: scikit-learn's own steps, with a halt after each.

A loop gives the state that it starts from, and then after every iteration how long that took and the state that a
checkpoint has to hold. Its arrays stay as they are until the iteration after the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
from _common import Array
from sklearn.cluster._kmeans import lloyd_iter_chunked_dense
from sklearn.mixture import GaussianMixture
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from threadpoolctl import threadpool_limits

State = dict[str, Array]
Loop = Callable[[Array, int, int], Iterator[tuple[float, State]]]

DERIVED = ("precisions_cholesky",)
"""What can be computed from the rest of the state. scikit-learn's attributes hold it too."""
REGULARIZATION = 1e-3  # of covariances: pixels at the border hardly vary


def progress(iteration: int) -> Array:
    """What a loop has to remember beside its arrays."""
    return np.array([0, iteration, 0, 0], dtype=np.int64)


def kmeans(X: Array, clusters: int, iterations: int) -> Iterator[tuple[float, State]]:
    """Lloyd's algorithm from random rows; stops early when nothing moves."""
    mean = X.mean(axis=0)
    X = X - mean
    rng = np.random.default_rng(0)
    new = X[rng.choice(len(X), clusters, replace=False)]
    weights, labels = np.ones(len(X)), np.full(len(X), -1, np.int32)
    in_clusters, shift = np.zeros(clusters), np.zeros(clusters)
    threads = _openmp_effective_n_threads()
    yield 0.0, {"centers": new, "progress": progress(0)}
    for iteration in range(1, iterations + 1):
        old, new = new, np.zeros_like(new)
        started = perf_counter()
        with threadpool_limits(1, "blas"):
            lloyd_iter_chunked_dense(X, weights, old, new, in_clusters, labels, shift, threads)
        seconds = perf_counter() - started
        if np.array_equal(old, new):
            return
        yield seconds, {"centers": new, "progress": progress(iteration)}


def mixture(X: Array, clusters: int, iterations: int) -> Iterator[tuple[float, State]]:
    """Expectation and maximization for a mixture with full covariances, from random rows."""
    model = GaussianMixture(clusters, init_params="random_from_data", reg_covar=REGULARIZATION, random_state=0)
    model._check_parameters(X)
    model._initialize_parameters(X, np.random.RandomState(0))

    def state(iteration: int) -> State:
        return {
            "weights": model.weights_,
            "means": model.means_,
            "covariances": model.covariances_,
            "precisions_cholesky": model.precisions_cholesky_,
            "progress": progress(iteration),
        }

    yield 0.0, state(0)
    for iteration in range(1, iterations + 1):
        started = perf_counter()
        log_probability, log_responsibilities = model._e_step(X)
        model._m_step(X, log_responsibilities)
        model._compute_lower_bound(log_responsibilities, log_probability)
        yield perf_counter() - started, state(iteration)


LOOPS: dict[str, Loop] = {"KMeans": kmeans, "GaussianMixture": mixture}
