"""Expectation-maximisation over shards: one epoch an iteration.

The first parameters are made by phases of k-means over shards and one more epoch, MOMENTS::

    k-means: mean → … → centres → MOMENTS → EM ⟳ → ENDED

Everything is computed in coordinates around the mean of the data. A shard's contribution to covariances is around the
means of the iteration before, so that nothing large cancels when the coordinator moves them to the new means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.state import Field
from pmstore.cluster._sharded import Clustering
from pmstore.cluster._starts import Phase
from pmstore.mixture import _sklearn
from pmstore.scale._fit import Matrix, ShardedFit
from pmstore.scale._shards import Shard

Array = npt.NDArray[Any]
Result = dict[str, Array]

MOMENTS, EM, ENDED = 100, 101, 102  # after the phases of k-means
NUMBERS = 1 << 18  # of a block of rows

# What scikit-learn's mixture asks its KMeans for. Other starts are rows of the data, or random responsibilities.
CENTRES = {"kmeans": ("k-means++", 300), "k-means++": ("k-means++", 0), "random_from_data": ("random", 0)}
NOTHING = {"objective": np.nan, "change": np.nan}


class MixtureFit(ShardedFit):
    """All runs of expectation-maximisation for a GaussianMixture."""

    version = 1

    def __init__(self, estimator: Any, shards: Sequence[Shard]) -> None:
        super().__init__(estimator, shards)
        self.runs, self.components, self.kind = estimator.n_init, estimator.n_components, estimator.covariance_type
        self.tol, self.regularization, self.most = estimator.tol, estimator.reg_covar, estimator.max_iter
        self.start_with = estimator.init_params
        self.given = estimator.weights_init, estimator.means_init, estimator.precisions_init
        init, iterations = CENTRES.get(self.start_with, ("random", 0))
        self.clustering = Clustering(self.components, init, iterations, 1e-4)
        self._known: tuple[Any, Any] = None, None

    def check_shards(self) -> None:
        super().check_shards()
        rows = sum(self.rows)
        if rows < self.components:
            raise ValueError(
                f"Expected n_samples >= n_components but got n_components = {self.components}, n_samples = {rows}"
            )
        if rows < 2:
            raise ValueError(f"Found {rows} sample, while a mixture needs 2 at least.")
        self.clustering.take(self)
        self.given = _sklearn.checked_start(self.components, self.kind, self.given, self.features)

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        k, d, dtype = self.components, self.features, self.dtype
        shape = {"full": (k, d, d), "tied": (d, d), "diag": (k, d), "spherical": (k,)}[self.kind]
        yield from super().fields()
        yield from self.clustering.fields()
        yield Field("em", dtype=np.int64)  # iterations in this run
        yield Field("bounds", dtype=object, role="working")  # of the log-likelihood, after each of them
        yield Field("close", dtype=bool)  # the last one hardly changed the bound
        for prefix, role in (("", "working"), ("best/", "best")):
            yield Field(f"{prefix}weights", k, dtype, role)  # type: ignore[arg-type]
            yield Field(f"{prefix}means", (k, d), dtype, role)  # type: ignore[arg-type]
            yield Field(f"{prefix}covariances", shape, dtype, role)  # type: ignore[arg-type]
        yield Field("best/bounds", dtype=object, role="best")
        yield Field("best_em", dtype=np.int64)
        yield Field("best_close", dtype=bool)

    # ---- on the coordinator

    def start(self) -> None:
        super().start()
        state = self.state
        state.em, state.bounds, state.close = 0, np.zeros(0), False
        if state.run == 0 or self._needs_centres():
            self.clustering.begin(state, self.random_state)
        else:
            self._begin_moments()

    def prepare(self, shard: Any) -> Matrix:
        return Matrix(shard, self.dtype)

    def shared(self) -> Mapping[str, Any]:
        state = self.state
        if state.phase < MOMENTS:
            return self.clustering.shared(state)
        told = {"phase": state.phase, "mean": state.mean, "draw": state.draw}
        if state.phase == EM:
            return {**told, "weights": state.weights, "means": state.means, "cholesky": self._cholesky()}
        if self._needs_centres():
            told["means"] = self.clustering.result(state)[1]
        return told

    def combine(self, left: Result, right: Result) -> Result:
        return self.clustering.combine(self.state.phase, left, right)

    def _adds(self, shared: Mapping[str, Array]) -> bool:
        return self.clustering.adds(int(shared["phase"]))

    def update(self, total: Result) -> Mapping[str, float]:
        state = self.state
        if state.phase == EM:
            return self._iterate(total)
        if state.phase == MOMENTS:
            self._initialize(total)
            return NOTHING
        self.clustering.update(state, total, self.random_state)
        if state.phase in (Phase.FINAL, Phase.ENDED) or (state.phase == Phase.SPREAD and not self._needs_centres()):
            self._begin_moments()
        return NOTHING

    def converged(self) -> bool:
        return bool(self.state.phase == ENDED)

    def better(self) -> bool:
        """Whether the run's lower bound is higher. Without iterations there is none, and the last run is kept."""
        state = self.state
        return not state.best_em or bool(state.bounds[-1] > state["best/bounds"][-1])

    def keep(self) -> None:
        """The run that ended is the best so far."""
        state = self.state
        for name in ("weights", "means", "covariances", "bounds"):
            state[f"best/{name}"] = state[name]
        state.best_em, state.best_close = state.em, state.close

    def _needs_centres(self) -> bool:
        return self.start_with in CENTRES and any(value is None for value in self.given)

    def _begin_moments(self) -> None:
        state = self.state
        state.phase = MOMENTS
        if self.start_with == "random":
            state.draw = self.random_state.randint(np.iinfo(np.int32).max)
        if all(value is not None for value in self.given):
            self._initialize({})

    def _initialize(self, total: Result) -> None:
        """The first parameters: the caller's, and the others from the moments."""
        state, (weights, means, precisions) = self.state, self.given
        if total:
            around = np.zeros((self.components, self.features))
            if self._needs_centres():
                around = self.clustering.result(state)[1].astype(np.float64)
            nk, state.means, state.covariances = self._parameters(total, around)
            state.weights = nk / sum(self.rows)
        if weights is not None:
            state.weights = weights
        if means is not None:
            state.means = means - state.mean
        if precisions is None:
            self._cholesky()  # raises ValueError if there is none
        state.phase = EM if self.most else ENDED

    def _iterate(self, total: Result) -> Mapping[str, float]:
        """New parameters, from the responsibilities of the old ones."""
        state, n = self.state, sum(self.rows)
        bound = float(total["log_likelihood"]) / n
        nk, state.means, state.covariances = self._parameters(total, state.means.astype(np.float64))
        state.weights = nk / nk.sum()
        change = bound - (state.bounds[-1] if state.em else -np.inf)
        state.bounds, state.em = np.append(state.bounds, bound), state.em + 1
        self._cholesky()  # raises ValueError if there is none
        state.close = abs(change) < self.tol
        if state.close or state.em == self.most:
            state.phase = ENDED
        return {"objective": bound, "change": change}

    def _parameters(self, total: Result, around: Array) -> tuple[Array, Array, Array]:
        """Samples per component, means and covariances, from moments around some means. Without moments, each component
        has one sample, which is its mean."""
        counts = total.get("counts", np.ones(self.components))
        first = total.get("first", around)
        nk = counts + 10 * np.finfo(self.dtype).eps
        means = first / nk[:, np.newaxis]
        if self.kind == "tied":
            covariances = total["second"] - (nk * means.T) @ means
            if "counts" not in total:  # scikit-learn computes this around the origin of the original data
                mean = self.state.mean.astype(np.float64)
                original = means + mean
                covariances = total["second"] + sum(self.rows) * np.outer(mean, mean) - (nk * original.T) @ original
            covariances /= nk.sum()
            covariances.flat[:: self.features + 1] += self.regularization
            return nk, means, covariances
        second = total["second"] if "counts" in total else 0.0
        moved = means - around
        rest = first - counts[:, np.newaxis] * around
        if self.kind == "full":
            mixed = rest[:, :, np.newaxis] * moved[:, np.newaxis, :]
            squares = moved[:, :, np.newaxis] * moved[:, np.newaxis, :]
            covariances = second - mixed - mixed.transpose(0, 2, 1) + counts[:, np.newaxis, np.newaxis] * squares
            covariances = covariances / nk[:, np.newaxis, np.newaxis]
            covariances.reshape(self.components, -1)[:, :: self.features + 1] += self.regularization
            return nk, means, covariances
        variances = second - 2 * rest * moved + counts[:, np.newaxis] * moved**2
        variances = np.maximum(variances, 0.0) / nk[:, np.newaxis] + self.regularization
        return nk, means, variances if self.kind == "diag" else variances.mean(axis=1)

    def _cholesky(self) -> Array:
        """The Cholesky factors of the precisions."""
        state = self.state
        if not state.em and self.given[2] is not None:
            made: Array = _sklearn.precisions_cholesky_of(self.given[2], self.kind).astype(self.dtype)
            return made
        known, made = self._known
        if known is None or not np.array_equal(known, state.covariances):
            made = _sklearn.compute_precisions_cholesky(np.array(state.covariances), self.kind)
            self._known = np.array(state.covariances), made
        return made

    # ---- on a worker

    def map(self, shard: Matrix, shared: Mapping[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        with common.one_blas_thread():
            phase = shared["phase"]
            if phase < MOMENTS:
                return self.clustering.map(shard, shared, rng)
            X = shard.centred(shared["mean"])
            return self._expect(X, shared) if phase == EM else self._first(X, shared, rng)

    def _expect(self, X: Array, shared: Mapping[str, Array]) -> Mapping[str, Any]:
        """The log-likelihood, and the moments with the responsibilities of the components."""
        weights, means, cholesky = shared["weights"], shared["means"], shared["cholesky"]
        likelihood = np.zeros(())
        with np.errstate(divide="ignore"):
            logs = np.log(weights)

        def responsibilities(block: Array) -> Array:
            weighted = _sklearn.estimate_log_gaussian_prob(block, means, cholesky, self.kind) + logs
            highest = weighted.max(axis=1, keepdims=True)
            norms = highest + np.log(np.exp(weighted - highest).sum(axis=1, keepdims=True))
            likelihood[...] += norms.sum(dtype=np.float64)
            resp: Array = np.exp(weighted - norms)
            return resp

        moments = self._moments(X, responsibilities, means)
        return {"log_likelihood": likelihood, **moments}

    def _first(self, X: Array, shared: Mapping[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        """The moments that the first parameters follow from."""
        k = self.components
        if self.start_with == "random":
            rng = np.random.default_rng([int(shared["draw"]), *rng.integers(1 << 62, size=2).tolist()])

            def drawn(block: Array) -> Array:
                resp = rng.uniform(size=(len(block), k)).astype(X.dtype)
                resp /= resp.sum(axis=1, keepdims=True)
                return resp

            return self._moments(X, drawn, np.zeros((k, self.features), X.dtype))
        if self.start_with == "kmeans":
            labels = self.clustering.labels(X, shared["means"])
            done = 0

            def of_labels(block: Array) -> Array:
                nonlocal done
                resp = np.zeros((len(block), k), X.dtype)
                resp[np.arange(len(block)), labels[done : done + len(block)]] = 1
                done += len(block)
                return resp

            return self._moments(X, of_labels, shared["means"])
        return {"second": (X.T @ X).astype(np.float64) if self.kind == "tied" else np.zeros(0)}

    def _moments(self, X: Array, responsibilities: Callable[[Array], Array], around: Array) -> Result:
        """Sums of the responsibilities, of the samples, and of their squares around some means, in float64."""
        k, d = around.shape
        shape = {"full": (k, d, d), "tied": (d, d)}.get(self.kind, (k, d))
        counts, first, second = np.zeros(k), np.zeros((k, d)), np.zeros(shape)
        size = max(64, NUMBERS // max(k, d))
        for begin in range(0, len(X), size):
            block = X[begin : begin + size]
            resp = responsibilities(block)
            counts += resp.sum(axis=0, dtype=np.float64)
            first += resp.T @ block
            if self.kind == "tied":
                second += block.T @ block
                continue
            for j in range(k):
                apart, weights = block - around[j], resp[:, j]
                second[j] += (weights * apart.T) @ apart if self.kind == "full" else weights @ (apart * apart)
        return {"counts": counts, "first": first, "second": second}
