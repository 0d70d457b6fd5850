"""The adapter to scikit-learn's clusterers; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import sklearn.cluster._kmeans
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.cluster import MiniBatchKMeans as SklearnMiniBatchKMeans
from sklearn.cluster._k_means_common import (
    _inertia_dense as inertia_dense,
)
from sklearn.cluster._k_means_common import (
    _inertia_sparse as inertia_sparse,
)
from sklearn.cluster._k_means_common import (
    _is_same_clustering as is_same_clustering,
)
from sklearn.cluster._k_means_elkan import (
    elkan_iter_chunked_dense,
    elkan_iter_chunked_sparse,
    init_bounds_dense,
    init_bounds_sparse,
)
from sklearn.cluster._k_means_lloyd import lloyd_iter_chunked_dense, lloyd_iter_chunked_sparse
from sklearn.cluster._kmeans import _tolerance as tolerance
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.extmath import row_norms

from pmstore._resume import sklearn as common

__all__ = [
    "INIT",
    "SAMPLES_BY_WEIGHT",
    "SklearnKMeans",
    "SklearnMiniBatchKMeans",
    "check_mini_batch_parts",
    "checked_init",
    "distances_of_pairs",
    "elkan_iter_chunked_dense",
    "elkan_iter_chunked_sparse",
    "euclidean_distances",
    "inertia_dense",
    "inertia_sparse",
    "init_bounds_dense",
    "init_bounds_sparse",
    "is_same_clustering",
    "kmeans_plusplus",
    "labels_inertia",
    "lloyd_iter_chunked_dense",
    "lloyd_iter_chunked_sparse",
    "mini_batch_step",
    "nearest",
    "row_norms",
    "sums_of_clusters",
    "tolerance",
    "validated",
]

Array = npt.NDArray[Any]

INIT = [StrOptions({"k-means++", "k-means||", "random"}), callable, "array-like"]
"""The constraint of KMeans' `init`."""

SAMPLES_BY_WEIGHT = tuple(map(int, re.findall(r"\d+", common.version)[:2])) >= (1, 9)
"""Whether MiniBatchKMeans draws batches with the samples' weights as probabilities. Older versions weight the
samples."""

# Functions that a step of MiniBatchKMeans uses, and KMeans doesn't.
mini_batch_step: Any = getattr(sklearn.cluster._kmeans, "_mini_batch_step", None)
labels_inertia: Any = getattr(sklearn.cluster._kmeans, "_labels_inertia_threadpool_limit", None)


def check_mini_batch_parts() -> None:
    """Raise NotImplementedError if this scikit-learn lacks the functions that a step of MiniBatchKMeans uses."""
    methods = (getattr(SklearnMiniBatchKMeans, name, None) for name in ("_mini_batch_convergence", "_random_reassign"))
    if None in (mini_batch_step, labels_inertia, *methods):
        raise NotImplementedError(
            f"scikit-learn {common.version} lacks what the steps of MiniBatchKMeans are made of in 1.5 to 1.9, so that "
            "its fit can't be kept in a store: install one of those versions, or fit with store=None"
        )


def validated(estimator: Any, X: Any) -> Any:
    """The data in the form that scikit-learn's clusterers need; a copy is made only if necessary."""
    return common.validate_data(
        estimator,
        X,
        accept_sparse="csr",
        dtype=[np.float64, np.float32],
        order="C",
        copy=False,
        accept_large_sparse=False,
    )


def checked_init(estimator: Any, X: Any) -> Any:
    """`init`, as a copy if it is an array. Checks all parameters against the data as scikit-learn does."""
    # A stand-in for the data: computing the tolerance needs a pass over them, and the fit group holds its result.
    estimator._check_params_vs_input(np.broadcast_to(X.dtype.type(0), (X.shape[0], 1)))
    if not common.is_arraylike(estimator.init):
        return estimator.init
    init = common.check_array(estimator.init, dtype=X.dtype, copy=True, order="C")
    estimator._validate_center_shape(X, init)
    return init


# ---- parts of KMeans over shards, in one thread


def nearest(X: Array, centers: Array, threads: int = 1) -> Array:
    """The number of the nearest centre of each sample, as Lloyd's kernel finds it: of shape (n,), int32."""
    labels = np.zeros(len(X), np.int32)
    unused = np.zeros(len(centers), X.dtype)
    weights = np.ones(len(X), X.dtype)
    lloyd_iter_chunked_dense(X, weights, centers, None, None, labels, unused, threads, update_centers=False)
    return labels


def sums_of_clusters(X: Array, labels: Array, clusters: int) -> Array:
    """The sums of the samples of each cluster, added in the order of the samples, as the kernel does."""
    members = scipy.sparse.csc_matrix(
        (np.ones(len(X), X.dtype), labels, np.arange(len(X) + 1, dtype=np.int32)), shape=(clusters, len(X))
    )
    sums: Array = members @ X
    return sums


def distances_of_pairs(some: Array, others: Array) -> Array:
    """The distances between the rows of two arrays, as the kernel computes the shift of centres."""
    one, zero = np.ones(1, some.dtype), np.zeros(1, np.int32)
    distances: Array
    squares = [inertia_dense(others[i : i + 1], one, some[i : i + 1], zero, 1) for i in range(len(some))]
    distances = np.sqrt(np.array(squares, some.dtype))
    return distances


def kmeans_plusplus(X: Array, clusters: int, weights: Array, random_state: np.random.RandomState) -> Array:
    """The centres that scikit-learn's k-means++ chooses among the rows."""
    norms = row_norms(X, squared=True)
    centers: Array = sklearn.cluster._kmeans._kmeans_plusplus(X, clusters, norms, weights, random_state)[0]
    return centers
