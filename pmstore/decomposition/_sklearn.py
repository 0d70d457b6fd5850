"""The adapter to scikit-learn's decompositions; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from scipy import linalg
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA
from sklearn.utils import gen_batches
from sklearn.utils.extmath import svd_flip

__all__ = ["SklearnIncrementalPCA", "components_order", "gen_batches", "singular_vectors"]


def components_order() -> Literal["C", "F"]:
    """The memory order of ``partial_fit``'s components, which SciPy's SVD determines: by columns before SciPy 1.18."""
    components = linalg.svd(np.eye(2), full_matrices=False)[2]
    return "C" if components.flags.c_contiguous else "F"


def singular_vectors(stacked: Any) -> tuple[Any, Any]:
    """The right singular vectors of a matrix, as rows, with the signs that ``partial_fit`` gives them, and their
    values."""
    left, values, right = linalg.svd(stacked, full_matrices=False, check_finite=False)
    return svd_flip(left, right, u_based_decision=False)[1], values
