"""IncrementalPCA over shards, in one epoch.

A worker learns its shard batch by batch, with scikit-learn's own ``partial_fit``. What it learned of two neighbours is
combined as ``partial_fit`` combines the past with a batch: the singular vectors, times their values, take the place of
the batch's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.state import Field
from pmstore.decomposition import _sklearn
from pmstore.scale._fit import Matrix, ShardedFit
from pmstore.scale._shards import Shard

Array = npt.NDArray[Any]
Result = dict[str, Array]

MORE = 10
"""A shard's summary has twice as many components as are asked for, and so many more."""


class ShardedPCA(ShardedFit):
    """The fit of an IncrementalPCA."""

    version = 1
    max_iter = 1

    def __init__(self, estimator: Any, shards: Sequence[Shard]) -> None:
        super().__init__(estimator, shards)
        self.wanted, self.batch_size = estimator.n_components, estimator.batch_size

    def check_shards(self) -> None:
        super().check_shards()
        self.batch_size = self.batch_size or 5 * self.features
        n, d = sum(self.rows), self.features
        # scikit-learn takes as many as the first batch has rows.
        self.kept = self.wanted or min(d, self.batch_size, *self.rows)
        if self.kept > d:
            raise ValueError(
                f"n_components={self.kept} invalid for n_features={d}, need more rows than columns for IncrementalPCA "
                "processing"
            )
        if self.kept > n:
            raise ValueError(f"n_components={self.kept} must be less or equal to the number of samples {n}")
        if self.alone and self.kept > min(n, self.batch_size):
            raise ValueError(
                f"n_components={self.kept} must be less or equal to the batch number of samples "
                f"{min(n, self.batch_size)} for the first partial_fit call."
            )
        # What a shard's summary leaves out is lost: it has more than what is asked for.
        self.carried = self.kept if self.alone else min(d, 2 * self.kept + MORE)
        self.single = self.alone and len(self.batches()) == 1

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        k, d = self.kept, self.features
        dtype = self.dtype if self.single else np.dtype(np.float64)
        yield from super().fields()
        yield Field("components", (k, d), dtype)
        yield Field("singular_values", k, dtype)
        yield Field("mean", d)
        yield Field("var", d)
        yield Field("n_samples_seen", dtype=object)  # of scikit-learn's type
        yield Field("noise_variance")

    def prepare(self, shard: Any) -> Matrix:
        return Matrix(shard, self.dtype, "K")  # sums over batches are added in that order

    def map(self, shard: Matrix, shared: Mapping[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        X = shard.numbers()
        least = min(self.carried, len(X))
        size, smallest = max(self.batch_size, least), (self.wanted or 0) if self.alone else least
        pca = _sklearn.SklearnIncrementalPCA(least)
        pca.components_, pca.n_samples_seen_, pca.mean_, pca.var_ = None, 0, 0.0, 0.0
        with common.one_blas_thread(), np.errstate(divide="ignore", invalid="ignore"):
            for batch in _sklearn.gen_batches(len(X), size, min_batch_size=smallest):
                pca.partial_fit(np.array(X[batch]), check_input=False)
        return {
            "components": pca.components_,
            "singular_values": pca.singular_values_,
            "mean": pca.mean_,
            "var": pca.var_,
            "rows": pca.n_samples_seen_,
            "noise_variance": np.float64(pca.noise_variance_),
        }

    def combine(self, left: Result, right: Result) -> Result:
        n, m = int(left["rows"]), int(right["rows"])
        between = left["mean"] - right["mean"]
        stacked = np.vstack(
            (
                left["singular_values"].reshape(-1, 1) * left["components"],
                right["singular_values"].reshape(-1, 1) * right["components"],
                np.sqrt(n / (n + m) * m) * between,
            )
        )
        components, values = _sklearn.singular_vectors(stacked.astype(np.float64, copy=False))
        squares = left["var"] * n + right["var"] * m + between**2 * (n / (n + m) * m)
        return {
            "components": components[: self.carried],
            "singular_values": values[: self.carried],
            "mean": (left["mean"] * n + right["mean"] * m) / (n + m),
            "var": squares / (n + m),
            "rows": left["rows"] + right["rows"],
            "noise_variance": np.zeros(()),
        }

    def update(self, total: Result) -> Mapping[str, float]:
        """The whole. The objective is the part of the variance that the components explain."""
        state, n = self.state, int(total["rows"])
        values = total["singular_values"][: self.kept]
        state.components, state.singular_values = total["components"][: self.kept], values
        state.mean, state.var, state.n_samples_seen = total["mean"], total["var"], np.asarray(total["rows"])[()]
        squares = values.astype(np.float64) ** 2
        whole = float(np.sum(total["var"] * n))
        if self.alone:
            state.noise_variance = total["noise_variance"]
        elif self.kept < min(n, self.features):
            state.noise_variance = max(0.0, whole - squares.sum()) / (n - 1) / (min(n, self.features) - self.kept)
        return {"objective": squares.sum() / whole if whole else np.nan, "noise_variance": state.noise_variance}

    def batches(self) -> list[slice]:
        """The batches of a single shard. Several shards count as one batch, all of whose vectors are components."""
        if not self.alone:
            return [slice(0, self.kept)]
        return list(_sklearn.gen_batches(self.rows[0], self.batch_size, min_batch_size=self.wanted or 0))
