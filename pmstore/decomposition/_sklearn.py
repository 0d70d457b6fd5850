"""The door to scikit-learn's decompositions: see pmstore._sklearn, which has what other families need too."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy import linalg
from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA
from sklearn.utils import gen_batches

__all__ = ["SklearnIncrementalPCA", "components_order", "gen_batches"]


def components_order() -> Literal["C", "F"]:
    """How ``partial_fit`` lays out components: as SciPy's SVD leaves them, column by column before SciPy 1.18."""
    components = linalg.svd(np.eye(2), full_matrices=False)[2]
    return "C" if components.flags.c_contiguous else "F"
