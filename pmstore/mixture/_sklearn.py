"""The adapter to scikit-learn's mixtures; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

import inspect
from typing import Any

from sklearn.mixture import BayesianGaussianMixture as SklearnBayesianGaussianMixture
from sklearn.mixture import GaussianMixture as SklearnGaussianMixture
from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky as compute_precisions_cholesky
from sklearn.utils._array_api import get_namespace

__all__ = [
    "SklearnBayesianGaussianMixture",
    "SklearnGaussianMixture",
    "check_parameters",
    "compute_precisions_cholesky",
]


def check_parameters(mixture: Any, X: Any) -> None:
    """Check a mixture's parameters against the data. The resulting priors become attributes of the mixture."""
    check = mixture._check_parameters
    if "xp" in inspect.signature(check).parameters:  # a required argument from 1.8 on
        check(X, xp=get_namespace(X)[0])
    else:
        check(X)
