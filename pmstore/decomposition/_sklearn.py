"""The adapter to scikit-learn's decompositions; pmstore._resume.sklearn is that for all families."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import linalg
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA
from sklearn.utils import gen_batches

__all__ = ["SklearnIncrementalPCA", "components_order", "gen_batches"]


def components_order() -> Literal["C", "F"]:
    """The memory order of ``partial_fit``'s components, which SciPy's SVD determines: by columns before SciPy 1.18."""
    components = linalg.svd(np.eye(2), full_matrices=False)[2]
    return "C" if components.flags.c_contiguous else "F"
