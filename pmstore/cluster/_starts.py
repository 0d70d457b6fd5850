"""The first centres of k-means over shards: from one epoch to some for each centre.

=============  ============  ===================================================================================
init           shards        epochs
=============  ============  ===================================================================================
an array       any           none
"random"       one           ROWS: the rows that scikit-learn would choose
"random"       several       SAMPLE: rows at random
"k-means++"    one           SEED: scikit-learn's own
"k-means++"    several       SAMPLE: the first centre; for each other one DRAW, candidates with probabilities like their
                             squared distances, and TRY, which of them is best
"k-means||"    any           SAMPLE, `ROUNDS` times ROUND, WEIGH
=============  ============  ===================================================================================

A worker draws for its shard only. So that the whole is drawn as from one place, each candidate has a key: an
exponential random number divided by its weight. The smallest keys of all shards win (P. S. Efraimidis, P. G. Spirakis,
"Weighted random sampling with a reservoir", 2006). An epoch of DRAW or SAMPLE then needs no other one for the totals.

k-means||: B. Bahmani et al., "Scalable k-means++", VLDB 2012. Each round draws exactly ``OVERSAMPLING * clusters``
candidates. In the end, each of them weighs as many samples as are nearest to it, and scikit-learn's k-means++ chooses
among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume.fingerprint import state_of
from pmstore._resume.state import Field, State, check_generator_state
from pmstore.cluster import _sklearn
from pmstore.scale._fit import Matrix, ShardedFit
from pmstore.scale._gather import sums

Array = npt.NDArray[Any]
Result = dict[str, Array]

ROUNDS = 5
OVERSAMPLING = 2
DISTANCES = 1 << 20  # distances that are in memory at a time


class Phase(IntEnum):
    """The computation of the next epoch."""

    MEAN = 0
    SPREAD = 1
    ROWS = 2
    SEED = 3
    SAMPLE = 4
    DRAW = 5
    TRY = 6
    ROUND = 7
    WEIGH = 8
    LLOYD = 9
    RELOCATE = 10
    FINAL = 11
    ENDED = 12


class Starts:
    """The phases from the mean of the data to the first centres.

    Parameters
    ----------
    clusters : int
    init : {"k-means++", "k-means||", "random"} or ndarray of shape (clusters, features)
    """

    rows: tuple[int, ...]
    features: int
    dtype: np.dtype[Any]
    alone: bool

    def __init__(self, clusters: int, init: Any) -> None:
        self.clusters, self.init = clusters, init

    def take(self, fit: ShardedFit) -> None:
        """Take over the description of the shards. Raises ValueError if they are too few or of another width."""
        self.rows, self.features, self.dtype, self.alone = fit.rows, fit.features, fit.dtype, fit.alone
        if sum(self.rows) < self.clusters:
            raise ValueError(f"n_samples={sum(self.rows)} should be >= n_clusters={self.clusters}.")
        if not isinstance(self.init, str) and self.init.shape != (self.clusters, self.features):
            raise ValueError(
                f"The shape of the initial centers {self.init.shape} does not match the number of clusters "
                f"{self.clusters} and of features {self.features}."
            )

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        yield Field("phase", dtype=np.int64)
        yield Field("draw", dtype=np.int64)  # a seed of the run for the workers' random numbers
        yield Field("rows", dtype=object, role="working")  # of scikit-learn's choice
        yield Field("found", dtype=object, role="working")  # the centres or candidates so far, (m, features)
        yield Field("ends", dtype=object, role="working")  # how many there were after each epoch
        yield Field("tried", dtype=object, role="working")  # candidates for the next centre

    def begin_start(self, state: State, random_state: np.random.RandomState) -> None:
        """Choose the first phase of the start."""
        state.rows = state.found = state.ends = state.tried = None
        if not isinstance(self.init, str):
            state["centers/0"] = self.init.astype(self.dtype) - state.mean
            state.phase = Phase.LLOYD
        elif self.alone and self.init == "random":
            n = self.rows[0]
            weights = np.ones(n, self.dtype)
            state.rows = random_state.choice(n, size=self.clusters, replace=False, p=weights / weights.sum())
            state.phase = Phase.ROWS
        elif self.alone and self.init == "k-means++":
            state.rows = _packed(random_state)
            state.phase = Phase.SEED
        else:
            state.draw = random_state.randint(np.iinfo(np.int32).max)
            state.phase = Phase.SAMPLE

    def shared_for_start(self, state: State) -> Mapping[str, Any]:
        """The arrays and numbers that the workers need for the next epoch of the start."""
        told: dict[str, Any] = {"draw": state.draw}
        for name in ("rows", "found", "ends", "tried"):
            if state[name] is not None:
                told[name] = state[name]
        return told

    def combine_start(self, phase: int, left: Result, right: Result) -> Result:
        """The combination of the results of neighbours."""
        if phase in (Phase.SAMPLE, Phase.ROUND):
            keys = np.concatenate([left["keys"], right["keys"]])
            order = np.argsort(keys, kind="stable")[: len(left["keys"])]
            return {"keys": keys[order], "drawn": np.concatenate([left["drawn"], right["drawn"]])[order]}
        if phase == Phase.DRAW:
            first = left["keys"] <= right["keys"]
            return {
                "keys": np.where(first, left["keys"], right["keys"]),
                "drawn": np.where(first[:, np.newaxis], left["drawn"], right["drawn"]),
            }
        return sums(left, right)

    def update_start(self, state: State, total: Result, random_state: np.random.RandomState) -> Array | None:
        """Update the state with the total of an epoch of the start. Returns the centres if they are all there."""
        phase, k = state.phase, self.clusters
        if phase == Phase.ROWS:
            return total["drawn"]
        if phase == Phase.SEED:
            _unpack(random_state, total)
            return total["drawn"]
        if phase in (Phase.SAMPLE, Phase.ROUND):
            drawn = total["drawn"][np.isfinite(total["keys"])]
            if self.init == "random":
                return drawn
            state.found = np.concatenate([state.found, drawn]) if phase == Phase.ROUND else drawn
            state.ends = np.append(state.ends if phase == Phase.ROUND else [0], len(state.found)).astype(np.int64)
            if self.init == "k-means++":
                state.phase = Phase.DRAW
            else:
                state.phase = Phase.ROUND if len(state.ends) <= 1 + ROUNDS else Phase.WEIGH
        elif phase == Phase.DRAW:
            state.tried, state.phase = total["drawn"], Phase.TRY
        elif phase == Phase.TRY:
            best = state.tried[np.argmin(total["potentials"])]
            state.found, state.phase = np.concatenate([state.found, best[np.newaxis]]), Phase.DRAW
            state.ends = np.append(state.ends, len(state.found))
            state.tried = None
        else:
            return _sklearn.kmeans_plusplus(state.found, k, total["counts"].astype(self.dtype), random_state)
        return self._complete(state)

    def _complete(self, state: State) -> Array | None:
        """The centres of k-means++, if they are all there."""
        if self.init != "k-means++" or len(state.found) < self.clusters:
            return None
        found: Array = state.found
        return found

    # ---- on a worker

    def map_start(
        self, shard: Matrix, X: Array, shared: Mapping[str, Array], rng: np.random.Generator
    ) -> Mapping[str, Any]:
        """The contribution of a shard to the start."""
        phase, n = shared["phase"], len(X)
        if phase == Phase.ROWS:
            return {"drawn": X[shared["rows"]]}
        if phase == Phase.SEED:
            random_state = np.random.RandomState(0)
            _unpack(random_state, {"state": shared["rows"]})
            drawn = _sklearn.kmeans_plusplus(X, self.clusters, np.ones(n, X.dtype), random_state)
            return {"drawn": drawn, "state": _packed(random_state)}
        rng = np.random.default_rng([int(shared["draw"]), *rng.integers(1 << 62, size=2).tolist()])
        if phase == Phase.SAMPLE:
            return _smallest(X, rng.exponential(size=n), self.clusters if self.init == "random" else 1)
        if phase == Phase.WEIGH:
            labels = _sklearn.nearest(X, shared["found"])
            return {"counts": np.bincount(labels, minlength=len(shared["found"]))}
        closest = self._closest(shard, X, shared["found"], shared["ends"])
        if phase == Phase.ROUND:
            with np.errstate(divide="ignore"):
                keys = rng.exponential(size=n) / closest
            return _smallest(X, keys, OVERSAMPLING * self.clusters)
        if phase == Phase.DRAW:
            trials = 2 + int(np.log(self.clusters))
            sums = np.cumsum(closest, dtype=np.float64)
            chosen = np.searchsorted(sums, rng.uniform(size=trials) * sums[-1]).clip(max=n - 1)
            with np.errstate(divide="ignore"):
                return {"keys": rng.exponential(size=trials) / sums[-1], "drawn": X[chosen]}
        potentials = np.zeros(len(shared["tried"]))
        for at in _blocks(n, len(potentials)):
            distances = _sklearn.euclidean_distances(shared["tried"], X[at], squared=True)
            potentials += np.minimum(distances, closest[at]).sum(axis=1, dtype=np.float64)
        return {"potentials": potentials}

    def _closest(self, shard: Matrix, X: Array, found: Array, ends: Array) -> Array:
        """The squared distances to the nearest of the rows found so far, taken up in the groups in which they were
        found."""
        known, closest = shard.memo.get("closest", (found[:0], None))
        if not np.array_equal(known, found[: len(known)]) or len(known) not in ends:
            known, closest = found[:0], None
        first = int(np.searchsorted(ends, len(known)))
        closest = np.full(len(X), np.inf, X.dtype) if closest is None else closest.copy()
        for begin, end in zip(ends[first:], ends[first + 1 :], strict=False):
            if end > begin:
                for at in _blocks(len(X), int(end - begin)):
                    distances = _sklearn.euclidean_distances(found[begin:end], X[at], squared=True)
                    np.minimum(closest[at], distances.min(axis=0), out=closest[at])
        shard.memo["closest"] = found, closest
        return closest


def _blocks(rows: int, width: int) -> Iterable[slice]:
    """Parts of the rows with so few distances that they don't need much memory."""
    size = max(256, DISTANCES // max(1, width))
    return (slice(begin, min(begin + size, rows)) for begin in range(0, rows, size))


def _smallest(X: Array, keys: Array, count: int) -> Mapping[str, Any]:
    """The rows with the smallest keys, in their order; with infinite keys if there are not as many."""
    order = np.argsort(keys, kind="stable")[:count]
    missing = count - len(order)
    return {
        "keys": np.pad(keys[order], (0, missing), constant_values=np.inf),
        "drawn": np.pad(X[order], ((0, missing), (0, 0))),
    }


def _packed(random_state: np.random.RandomState) -> Array:
    """The state of a generator as numbers. They are all below 2**53, but for the Gaussian number."""
    now = state_of(random_state)
    return np.array([*now["state"]["key"], now["state"]["pos"], now["has_gauss"], now["gauss"]], np.float64)


def _unpack(random_state: np.random.RandomState, total: Mapping[str, Array]) -> None:
    """Set a generator to a state of `_packed`. Raises ValueError if it is no such state."""
    *key, pos, has_gauss, gauss = total["state"].tolist()
    check_generator_state("MT19937", {"state": {"pos": int(pos)}})
    random_state.set_state(("MT19937", np.array(key, np.uint32), int(pos), int(has_gauss), gauss))
