"""The one door to scikit-learn, its private parts above all.

Everything that pmstore's clusterers take from scikit-learn comes through here, so that a change there is met in
one place. The names exist, with these signatures, in scikit-learn 1.5 to 1.9.
"""

from __future__ import annotations

from typing import Any

from sklearn import __version__ as version
from sklearn.base import _fit_context as fit_context
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
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads as openmp_threads
from sklearn.utils.extmath import row_norms
from sklearn.utils.parallel import _get_threadpool_controller as threadpool_controller
from sklearn.utils.validation import _check_sample_weight as check_sample_weight
from sklearn.utils.validation import _is_arraylike_not_scalar as is_arraylike

__all__ = [
    "ConvergenceWarning",
    "SklearnKMeans",
    "check_array",
    "check_random_state",
    "check_sample_weight",
    "fit_context",
    "inertia_dense",
    "inertia_sparse",
    "is_arraylike",
    "is_same_clustering",
    "lloyd_iter_chunked_dense",
    "lloyd_iter_chunked_sparse",
    "openmp_threads",
    "row_norms",
    "threadpool_controller",
    "tolerance",
    "validate_data",
    "version",
]

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6 it was a method

    def validate_data(estimator: Any, X: Any, **options: Any) -> Any:
        """Check and convert `X`, and record its number of features on the estimator."""
        return estimator._validate_data(X, **options)
