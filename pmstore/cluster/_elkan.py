"""Elkan's algorithm: bounds on the distances to the centres save the computation of most distances.

The bounds are stored, though they could be computed anew. Those of a later iteration are looser than exact ones. If two
centres are equally near, the sample's cluster depends on whether a distance is computed. With stored bounds, the result
is scikit-learn's by construction. A commit contains one array of centres, the labels and the bounds: n (k + 1) numbers,
which is k + 1 of the d columns of the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pmstore._resume.state import Field
from pmstore.cluster import _sklearn
from pmstore.cluster._runs import Array, Runs


class Elkan(Runs):
    """All runs of Elkan's algorithm for an estimator with at least two clusters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kernel = _sklearn.elkan_iter_chunked_dense if self.dense else _sklearn.elkan_iter_chunked_sparse
        self._init_bounds = _sklearn.init_bounds_dense if self.dense else _sklearn.init_bounds_sparse

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        n, k, dtype = self.X.shape[0], self.estimator.n_clusters, self.X.dtype
        yield from super().fields()
        yield Field("labels", n, np.int32, "working")
        yield Field("bounds/upper", n, dtype, "working")  # of the distance to the sample's own centre
        yield Field("bounds/lower", (n, k), dtype, "working")  # of the distances to all centres

    def start(self) -> None:
        """Centres of iteration 0, and bounds that are exact."""
        super().start()
        state, centers = self.state, self.centers(0)
        self._measure(centers)
        state.labels, state["bounds/upper"], state["bounds/lower"] = -1, 0, 0
        self._init_bounds(
            self.X,
            centers,
            self._half_distances,
            state.labels,
            state["bounds/upper"],
            state["bounds/lower"],
            n_threads=self.threads,
        )

    def derive(self) -> None:
        """Centred data, and the distances between the centres."""
        super().derive()
        self.check_labels("labels")
        self._measure(self.centers(self.state.iteration))

    def iterate(self, old: Array, new: Array, weight_in_clusters: Array, shift: Array) -> None:
        """New labels, new centres, and how far each centre moved."""
        self._update(old, new, weight_in_clusters, shift)
        self._measure(new)

    def assign(self, centers: Array) -> None:
        """Label every sample with the nearest of the centres."""
        unused = np.zeros(len(centers), dtype=centers.dtype)
        self._update(centers, centers, unused, unused, update_centers=False)

    def _update(self, old: Array, new: Array, weight_in_clusters: Array, shift: Array, **options: Any) -> None:
        state = self.state
        self._kernel(
            self.X,
            self.weights,
            old,
            new,
            weight_in_clusters,
            self._half_distances,
            self._next_centers,
            state["bounds/upper"],
            state["bounds/lower"],
            state.labels,
            shift,
            self.threads,
            **options,
        )

    def _measure(self, centers: Array) -> None:
        """Half the distances between centres, and half the distance from each centre to the nearest other one."""
        self._half_distances = _sklearn.euclidean_distances(centers) / 2
        self._next_centers = np.partition(self._half_distances, kth=1, axis=0)[1]
