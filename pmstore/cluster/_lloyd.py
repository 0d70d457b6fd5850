"""Lloyd's algorithm. An iteration commits one array of centres and the record.

The labels of the last iteration, which show whether the next one changes anything, are derived: assigning the data to
the older centres restores them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pmstore._resume import sklearn as common
from pmstore._resume.state import Field
from pmstore.cluster import _sklearn
from pmstore.cluster._runs import Array, Runs


class Lloyd(Runs):
    """All runs of Lloyd's algorithm for an estimator."""

    full_stop = "."

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kernel = _sklearn.lloyd_iter_chunked_dense if self.dense else _sklearn.lloyd_iter_chunked_sparse

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        yield from super().fields()
        yield Field("labels", self.X.shape[0], np.int32, "derived")

    def derive(self) -> None:
        """Centred data, and the labels of the last iteration."""
        super().derive()
        if self.state.iteration:
            with self.iterating():
                self.assign(self.centers(self.state.iteration - 1))

    def iterating(self) -> AbstractContextManager[None]:
        """BLAS in one thread: inside the kernels' own threads, it would start too many, and add in another order
        than scikit-learn."""
        return common.one_blas_thread()

    def iterate(self, old: Array, new: Array, weight_in_clusters: Array, shift: Array) -> None:
        """New labels, new centres, and how far each centre moved."""
        self._kernel(self.X, self.weights, old, new, weight_in_clusters, self.state.labels, shift, self.threads)

    def assign(self, centers: Array) -> None:
        """Label every sample with the nearest of the centres."""
        unused, labels = np.zeros(len(centers), dtype=centers.dtype), self.state.labels
        self._kernel(self.X, self.weights, centers, centers, unused, labels, unused, self.threads, update_centers=False)
