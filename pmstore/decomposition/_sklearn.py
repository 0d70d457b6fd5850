"""The adapter to scikit-learn's decompositions; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import linalg
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA
from sklearn.utils import gen_batches
from sklearn.utils.extmath import svd_flip

__all__ = ["SklearnIncrementalPCA", "gen_batches", "laid_out", "singular_vectors"]


def components_order() -> Literal["C", "F"]:
    """The memory order of ``partial_fit``'s components, which SciPy's SVD determines: by columns before SciPy 1.18."""
    components = linalg.svd(np.eye(2), full_matrices=False)[2]
    return "C" if components.flags.c_contiguous else "F"


def laid_out(components: npt.NDArray[Any], batches: Sequence[slice]) -> npt.NDArray[Any]:
    """The components, in memory as ``partial_fit`` leaves them after these batches: the first ones of all singular
    vectors that it computed. Products with them are added in an order that follows from it."""
    k, d = components.shape
    rows = batches[-1].stop - batches[-1].start + (k + 1 if len(batches) > 1 else 0)
    vectors = np.empty((min(rows, d), d), components.dtype, components_order())
    vectors[:k] = components
    return vectors[:k]


def singular_vectors(stacked: Any) -> tuple[Any, Any]:
    """The right singular vectors of a matrix, as rows, with the signs that ``partial_fit`` gives them, and their
    values."""
    left, values, right = linalg.svd(stacked, full_matrices=False, check_finite=False)
    return svd_flip(left, right, u_based_decision=False)[1], values
