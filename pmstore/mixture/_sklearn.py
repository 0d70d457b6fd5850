"""The adapter to scikit-learn's mixtures; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from sklearn.mixture import BayesianGaussianMixture as SklearnBayesianGaussianMixture
from sklearn.mixture import GaussianMixture as SklearnGaussianMixture
from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky as compute_precisions_cholesky
from sklearn.mixture._gaussian_mixture import (
    _compute_precision_cholesky_from_precisions as _precisions_cholesky_of,
)
from sklearn.mixture._gaussian_mixture import _estimate_log_gaussian_prob as estimate_log_gaussian_prob
from sklearn.utils._array_api import get_namespace

__all__ = [
    "SklearnBayesianGaussianMixture",
    "SklearnGaussianMixture",
    "check_parameters",
    "checked_start",
    "compute_precisions_cholesky",
    "estimate_log_gaussian_prob",
    "precisions_cholesky_of",
]


def check_parameters(mixture: Any, X: Any) -> None:
    """Check a mixture's parameters against the data. The resulting priors become attributes of the mixture."""
    check = mixture._check_parameters
    if "xp" in inspect.signature(check).parameters:  # a required argument from 1.8 on
        check(X, xp=get_namespace(X)[0])
    else:
        check(X)


def checked_start(components: int, kind: str, given: Any, features: int) -> tuple[Any, Any, Any]:
    """First weights, means and precisions for so many features, as arrays or None. Raises ValueError if they can't
    be."""
    weights, means, precisions = given
    mixture = SklearnGaussianMixture(
        components, covariance_type=kind, weights_init=weights, means_init=means, precisions_init=precisions
    )
    check_parameters(mixture, np.zeros((1, features)))
    return mixture.weights_init, mixture.means_init, mixture.precisions_init


def precisions_cholesky_of(precisions: Any, kind: str) -> Any:
    """The Cholesky factors of given precisions."""
    if "xp" in inspect.signature(_precisions_cholesky_of).parameters:
        return _precisions_cholesky_of(precisions, kind, xp=get_namespace(precisions)[0])
    return _precisions_cholesky_of(precisions, kind)
