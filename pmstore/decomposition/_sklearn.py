"""The door to scikit-learn's decompositions: see pmstore._sklearn, which has what other families need too."""

from __future__ import annotations

from sklearn.decomposition import IncrementalPCA as SklearnIncrementalPCA
from sklearn.utils import gen_batches

__all__ = ["SklearnIncrementalPCA", "gen_batches"]
