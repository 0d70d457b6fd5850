"""k-means over shards: the question of each epoch, and the use of its total.

The state names the phase, and each epoch ends with the phase of the next one::

    MEAN → SPREAD → the start → LLOYD ⟳ → FINAL → ENDED
                                 │  ▲
              an empty cluster   ▼  │
                              RELOCATE

The start is one of those in `_starts.py`. Later runs of ``n_init`` begin with it.

Sums are added in the order of the samples, as scikit-learn's kernel adds them in one thread. For a single shard,
centres, inertia and iterations have its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.state import Field, State
from pmstore.cluster import _sklearn
from pmstore.cluster._starts import Phase, Starts
from pmstore.scale._fit import Matrix, ShardedFit

Array = npt.NDArray[Any]
Result = dict[str, Array]

NOTHING = {"objective": np.nan, "shift": np.nan}


class Clustering(Starts):
    """k-means as phases, for an algorithm that has the state.

    Parameters
    ----------
    clusters, init, max_iter, tol
        As in scikit-learn's KMeans, and init="k-means||". max_iter=0: the centres are those of the start.
    """

    def __init__(self, clusters: int, init: Any, max_iter: int, tol: float) -> None:
        super().__init__(clusters, init)
        self.max_iter, self.tol = max_iter, tol

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        k, d, dtype = self.clusters, self.features, self.dtype
        yield from super().fields()
        yield Field("tolerance")  # for the centres' shift: relative to the variance of the data
        yield Field("around_mean")  # the sum of the squared distances from the mean of the data
        yield Field("lloyd", dtype=np.int64)  # iterations of Lloyd's algorithm in this run
        yield Field("shift")  # of all centres in the last of them, squared
        yield Field("relocated", dtype=bool)  # it moved centres of empty clusters
        yield Field("strictly", dtype=bool)  # it changed no label
        yield Field("centers/0", (k, d), dtype, "working")  # iteration i reads centers/(i % 2) and writes the other
        yield Field("centers/1", (k, d), dtype, "working")
        yield Field("mean", d, dtype)  # of the data, which is subtracted from them
        yield Field("empty", dtype=np.int64)  # clusters without samples
        yield Field("inertia")
        yield Field("distinct", dtype=np.int64)  # clusters with samples
        yield Field("same", dtype=bool)  # the best run has the same clusters

    # ---- on the coordinator

    def begin(self, state: State, random_state: np.random.RandomState) -> None:
        """The first phase of a run."""
        state.lloyd = 0
        state.relocated = state.strictly = False
        if state.run == 0:
            state.phase = Phase.MEAN
        else:
            self.begin_start(state, random_state)

    def shared(self, state: State) -> Mapping[str, Any]:
        """The arrays and numbers that the workers need for the next epoch."""
        told: dict[str, Any] = {"phase": state.phase, "mean": state.mean}
        if state.phase in (Phase.LLOYD, Phase.RELOCATE):
            told["centers"] = self.centers(state, state.lloyd)
            # Without relocations, centres that don't move tell that no label changed. With them, labels are compared.
            moved = state.lloyd and (state.relocated or state.phase == Phase.RELOCATE)
            told["previous"] = self.centers(state, state.lloyd - 1) if moved else told["centers"][:0]
            told["empty"] = state.empty
        elif state.phase == Phase.FINAL:
            told["centers"], told["assigning"] = self.result(state)
            told["others"] = state["best/assigning"] if state.best_run >= 0 else told["centers"][:0]
        else:
            told.update(self.shared_for_start(state))
        return told

    @staticmethod
    def adds(phase: int) -> bool:
        """Whether the results of a phase are sums. Those of the others keep the rows that are best among all."""
        return phase not in (Phase.SAMPLE, Phase.DRAW, Phase.ROUND, Phase.RELOCATE)

    def combine(self, phase: int, left: Result, right: Result) -> Result:
        """The combination of the results of neighbours."""
        if phase == Phase.RELOCATE:
            total = {name: left[name] + right[name] for name in ("sums", "counts", "changed")}
            far = {name: np.concatenate([left[name], right[name]]) for name in ("distances", "far", "labels")}
            order = np.argsort(-far["distances"], kind="stable")[: len(left["distances"])]
            return {**total, **{name: array[order] for name, array in far.items()}}
        return self.combine_start(phase, left, right)

    def update(self, state: State, total: Result, random_state: np.random.RandomState) -> Mapping[str, float]:
        """Update the state with the total of an epoch. Returns figures for the history."""
        phase, rows = state.phase, sum(self.rows)
        if phase == Phase.MEAN:
            state.mean = np.true_divide(total["sums"], rows)
            state.phase = Phase.SPREAD
        elif phase == Phase.SPREAD:
            state.tolerance = np.mean(np.true_divide(total["squares"], rows)) * self.tol if self.tol else 0
            state.around_mean = total["squares"].sum(dtype=np.float64)
            self.begin_start(state, random_state)
        elif phase == Phase.LLOYD and not total["counts"].all():
            state.empty = np.count_nonzero(total["counts"] == 0)
            state.phase = Phase.RELOCATE
        elif phase in (Phase.LLOYD, Phase.RELOCATE):
            return self._iterate(state, total)
        elif phase == Phase.FINAL:
            state.inertia = total["inertia"]
            state.distinct = np.count_nonzero(total["counts"])
            together = total["together"]
            state.same = bool(len(together)) and bool((np.count_nonzero(together, axis=1) <= 1).all())
            state.phase = Phase.ENDED
        else:
            centers = self.update_start(state, total, random_state)
            if centers is not None:
                self.centers(state, 0)[...] = centers
                state.phase = Phase.LLOYD if self.max_iter else Phase.ENDED
        return NOTHING

    def centers(self, state: State, iteration: int) -> Array:
        """The centres that an iteration starts from, which the previous one made."""
        centers: Array = state[f"centers/{iteration % 2}"]
        return centers

    def result(self, state: State) -> tuple[Array, Array]:
        """The newest centres, and those that the labels belong to: the same ones, or the last but one."""
        newest = self.centers(state, state.lloyd)
        return newest, self.centers(state, state.lloyd - 1) if state.strictly else newest

    def _iterate(self, state: State, total: Result) -> Mapping[str, float]:
        """New centres."""
        old, new = self.centers(state, state.lloyd), self.centers(state, state.lloyd + 1)
        sums, weights = np.array(total["sums"]), total["counts"].astype(old.dtype)
        compared = state.lloyd > 0 and (state.relocated or "far" in total)
        state.relocated = "far" in total and _relocate(sums, weights, total)
        _average(sums, weights)
        new[...] = sums
        shift = (_sklearn.distances_of_pairs(old, new) ** 2).sum()
        state.shift, state.lloyd = shift, state.lloyd + 1
        state.strictly = compared and not total["changed"]
        if state.strictly or shift <= state.tolerance or state.lloyd == self.max_iter:
            state.phase = Phase.FINAL
        else:
            state.phase = Phase.LLOYD
        means = new.astype(np.float64, copy=False)
        inertia = state.around_mean - float(np.sum(np.einsum("ij,ij->i", means, means) * weights))
        return {"objective": max(0.0, inertia), "shift": shift}

    # ---- on a worker

    def map(self, shard: Matrix, shared: Mapping[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        """The contribution of a shard."""
        phase = shared["phase"]
        if phase == Phase.MEAN:
            return {"sums": shard.numbers().sum(axis=0)}
        X = shard.centred(shared["mean"])
        if phase == Phase.SPREAD:
            return {"squares": (X * X).sum(axis=0)}
        if phase == Phase.FINAL:
            return self._finally(X, shared)
        if phase not in (Phase.LLOYD, Phase.RELOCATE):
            return self.map_start(shard, X, shared, rng)
        labels = self._labels(shard, X, shared["centers"])
        before = labels
        if len(shared["previous"]):
            before = _sklearn.nearest(X, shared["previous"])
        result = {
            "sums": _sklearn.sums_of_clusters(X, labels, self.clusters),
            "counts": np.bincount(labels, minlength=self.clusters),
            "changed": np.count_nonzero(labels != before),
        }
        if phase == Phase.RELOCATE:
            result.update(self._farthest(X, labels, shared["centers"], int(shared["empty"])))
        return result

    def labels(self, X: Array, centers: Array) -> Array:
        """The nearest centres."""
        return _sklearn.nearest(X, centers)

    def _labels(self, shard: Matrix, X: Array, centers: Array) -> Array:
        """The nearest centres, which a relocation needs a second time."""
        known = shard.memo.get("labels")
        if known is None or not np.array_equal(known[0], centers):
            known = shard.memo["labels"] = centers.copy(), _sklearn.nearest(X, centers)
        labels: Array = known[1]
        return labels

    def _farthest(self, X: Array, labels: Array, centers: Array, count: int) -> Mapping[str, Any]:
        """The samples that are farthest from their centres, and their distances, the farthest first."""
        distances = ((X - centers[labels]) ** 2).sum(axis=1)
        if self.alone:
            order = np.argpartition(distances, -count)[: -count - 1 : -1]  # scikit-learn's order among equals
        else:
            order = np.argsort(-distances, kind="stable")[:count]
        result = {"distances": distances[order], "far": X[order], "labels": labels[order]}
        missing = count - len(order)
        return {
            name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=-1)
            for name, array in result.items()
        }

    def _finally(self, X: Array, shared: Mapping[str, Array]) -> Mapping[str, Any]:
        """Inertia and labels, compared with those of the best run so far."""
        k = self.clusters
        labels = _sklearn.nearest(X, shared["assigning"])
        together = np.zeros((0, k), np.int64)
        if len(shared["others"]):
            others = _sklearn.nearest(X, shared["others"])
            together = np.bincount(labels.astype(np.int64) * k + others, minlength=k * k).reshape(k, k)
        return {
            "inertia": np.float64(_sklearn.inertia_dense(X, np.ones(len(X), X.dtype), shared["centers"], labels, 1)),
            "counts": np.bincount(labels, minlength=k),
            "together": together,
        }


class KMeansFit(ShardedFit):
    """All runs of k-means for an estimator."""

    version = 1

    def __init__(self, estimator: Any, shards: Any, init: Any, runs: int) -> None:
        super().__init__(estimator, shards)
        self.runs = runs
        self.clustering = Clustering(estimator.n_clusters, init, estimator.max_iter, estimator.tol)

    def check_shards(self) -> None:
        super().check_shards()
        self.clustering.take(self)

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        k, d, dtype = self.clustering.clusters, self.features, self.dtype
        yield from super().fields()
        yield from self.clustering.fields()
        yield Field("best/centers", (k, d), dtype, "best")  # centred, as are the next ones
        yield Field("best/assigning", (k, d), dtype, "best")  # those that the labels belong to
        yield Field("best_inertia")
        yield Field("best_lloyd", dtype=np.int64)
        yield Field("best_distinct", dtype=np.int64)

    def start(self) -> None:
        super().start()
        self.clustering.begin(self.state, self.random_state)

    def prepare(self, shard: Any) -> Matrix:
        return Matrix(shard, self.dtype)

    def shared(self) -> Mapping[str, Any]:
        return self.clustering.shared(self.state)

    def map(self, shard: Matrix, shared: Mapping[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        with common.one_blas_thread():
            return self.clustering.map(shard, shared, rng)

    def combine(self, left: Result, right: Result) -> Result:
        return self.clustering.combine(self.state.phase, left, right)

    def _adds(self, shared: Mapping[str, Array]) -> bool:
        return self.clustering.adds(int(shared["phase"]))

    def update(self, total: Result) -> Mapping[str, float]:
        return self.clustering.update(self.state, total, self.random_state)

    def converged(self) -> bool:
        return bool(self.state.phase == Phase.ENDED)

    def better(self) -> bool:
        """Whether the run's inertia is lower, and its clusters aren't the same under other numbers."""
        return bool(self.state.inertia < self.state.best_inertia and not self.state.same)

    def keep(self) -> None:
        """The run that ended is the best so far."""
        state = self.state
        state["best/centers"], state["best/assigning"] = self.clustering.result(state)
        state.best_inertia, state.best_lloyd, state.best_distinct = state.inertia, state.lloyd, state.distinct


def _relocate(sums: Array, weights: Array, total: Result) -> bool:
    """Give each empty cluster one of the farthest samples, as scikit-learn does; whether there are such samples."""
    if total["distances"].max() <= 0:
        return False  # fewer distinct samples than clusters
    for i, empty in enumerate(np.flatnonzero(weights == 0)):
        sample, label = total["far"][i], total["labels"][i]
        sums[label] -= sample
        sums[empty] = sample
        weights[empty] = 1
        weights[label] -= 1
    return True


def _average(sums: Array, weights: Array) -> None:
    """Make means of sums. A cluster that is still empty gets the values that the largest one has at that moment."""
    largest = np.argmax(weights)
    for j, weight in enumerate(weights):
        sums[j] = sums[j] * (sums.dtype.type(1) / weight) if weight > 0 else sums[largest]


def labels_of(block: Array, mean: Array, centers: Array) -> Array:
    """The labels of a block of rows after a fit."""
    with common.one_blas_thread():
        X = np.ascontiguousarray(block, dtype=mean.dtype) - mean
        return _sklearn.nearest(X, centers, common.openmp_threads())
