"""The door to scikit-learn's clusterers: see pmstore._sklearn, which has what other families need too."""

from __future__ import annotations

from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.cluster._k_means_common import (
    _inertia_dense as inertia_dense,
)
from sklearn.cluster._k_means_common import (
    _inertia_sparse as inertia_sparse,
)
from sklearn.cluster._k_means_common import (
    _is_same_clustering as is_same_clustering,
)
from sklearn.cluster._k_means_lloyd import lloyd_iter_chunked_dense, lloyd_iter_chunked_sparse
from sklearn.cluster._kmeans import _tolerance as tolerance
from sklearn.utils.extmath import row_norms

__all__ = [
    "SklearnKMeans",
    "inertia_dense",
    "inertia_sparse",
    "is_same_clustering",
    "lloyd_iter_chunked_dense",
    "lloyd_iter_chunked_sparse",
    "row_norms",
    "tolerance",
]
