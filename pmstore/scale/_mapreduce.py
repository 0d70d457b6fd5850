"""Algorithms whose iterations map over shards and add up: the loop of `Resumable`, with workers.

The store of the coordinator is the only durable state. An epoch asks all shards for their parts, combines these in a
tree, and commits what `update` makes of the total::

    coordinator   attempt + 1 ──▶ ask ──▶ combine ──▶ update ──▶ one commit: state, epoch + 1 ──▶ ask …
                  (a commit)       │         ▲
    workers                        └──▶ map ─┘          a worker that dies, hangs or lags: another one is asked
"""

from __future__ import annotations

import contextlib
import json
import numbers
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._resume.fingerprint import Fingerprint, digest
from pmstore._resume.fit_group import FitGroup, StoreOrPath
from pmstore._resume.history import Rows
from pmstore._resume.loop import Resumable
from pmstore._resume.state import Field, State
from pmstore.scale._engine import Engine
from pmstore.scale._engines import EngineLike, engine_of
from pmstore.scale._epochs import Epochs
from pmstore.scale._gather import sums
from pmstore.scale._holder import Describe
from pmstore.scale._messages import Array, Result, Tag
from pmstore.scale._shards import shards_of


class MapReduce(Resumable):
    """An iterative algorithm over shards of data, on many workers, that continues after its last commit.

    A subclass sets `shards`, and defines `fields`, `fingerprint` and `start` as for `Resumable`, and two more: `map` is
    the contribution of one shard, computed by a worker, and `update` the iteration itself, given the sum of all
    contributions. The result is the same, bit for bit, with any engine and any number of workers, whichever of them
    died: it depends on the shards, and the sum is added up in an order that the shards' numbers fix.

    Attributes
    ----------
    shards : array, list, path or Shard
        The data, as `shards_of` takes them: an array of numpy (its rows are cut into blocks), dask or zarr, a list of
        arrays, of paths of ``.npy`` and ``.parquet`` files, of `Shard`. The hashes of their contents are part of the
        fingerprint.
    seed : int
        For the random numbers that `map` gets. 0 by default; part of the fingerprint.
    described : list of dict
        While `run` works: for each shard "shape" and "dtype", which are None if it is no array, and "contents", a hash.

    Notes
    -----
    Fields named ``attempt`` and ``epoch`` belong to this class: the number of the coordinator, and of epochs in all
    runs. The `history_` has two columns of its own: ``late`` and ``lost``, the number of times that the epoch asked
    again because a reply was late, and because a worker or a reply was lost.

    Examples
    --------
    >>> import numpy as np, pmstore
    >>> class Mean(pmstore.MapReduce):
    ...     max_iter = 1
    ...
    ...     def __init__(self, shards):
    ...         self.shards = shards
    ...
    ...     def fields(self):
    ...         return [pmstore.Field("mean", self.described[0]["shape"][1:])]
    ...
    ...     def fingerprint(self):
    ...         return {}
    ...
    ...     def start(self):
    ...         pass
    ...
    ...     def map(self, shard, shared, rng):
    ...         return {"sum": shard.sum(axis=0), "rows": len(shard)}
    ...
    ...     def update(self, total):
    ...         self.state.mean = total["sum"] / total["rows"]
    >>> Mean(np.arange(12.0).reshape(6, 2)).run(store="mean.pm", name="mean", engine=2).mean
    array([5., 6.])
    """

    shards: Any
    seed: int = 0
    described: list[dict[str, Any]]

    # ---- methods that define an algorithm

    @abstractmethod
    def map(self, shard: Any, shared: dict[str, Array], rng: np.random.Generator) -> Mapping[str, Any]:
        """The contribution of one shard. A worker calls it, on a copy of this object without `state` and `shards`.

        It must be a function of its arguments: a shard may be computed twice, and on any worker.

        Parameters
        ----------
        shard : array
            What the shard's loader, or `prepare`, returned. It can't be written to.
        shared : dict of ndarray
            What `shared` returned. The arrays can't be written to.
        rng : Generator
            The same for the same `seed`, epoch and shard.

        Returns
        -------
        dict of array-like
            With the same names, shapes and dtypes for each shard, unless `combine` takes others.
        """

    @abstractmethod
    def update(self, total: Result) -> Mapping[str, float] | None:
        """One iteration, in place, from the combined contributions of all shards. Inside a transaction.

        Returns
        -------
        dict of float, or None
            Figures for the `history`: the ``"objective"``, and at most one other.
        """

    def check_shards(self) -> None:
        """Called once `described` is there, before anything else of a run.

        Raise ValueError for shards that don't fit. Attributes that this sets travel to the workers, and `fields` and
        `fingerprint` can use them.
        """

    def prepare(self, shard: Any) -> Any:
        """What a worker keeps of a shard after loading it, such as centred data. Called on the worker, as `map` is."""
        return shard

    def shared(self) -> Mapping[str, Any]:
        """What all workers need of the state, as arrays and numbers. By default, all fields that are stored until the
        fit is finished, but for generators and Python values."""
        fields = [field for field in self.fields() if field.role in ("result", "working")]
        return {field.name: self.state[field.name] for field in fields if field.is_array or field.is_scalar}

    def combine(self, left: Result, right: Result) -> Result:
        """The combination of two neighbours' contributions, the lower shards' on the left: by default their sums.
        Booleans and small integers are added as 64-bit integers.

        Raises
        ------
        ValueError
            The contributions have other names, shapes or dtypes.
        """
        return sums(left, right)

    # ---- methods for callers

    def run(
        self,
        store: StoreOrPath | None = None,
        name: str | None = None,
        *,
        commit_every: float = 1,
        engine: EngineLike = 1,
        timeout: float | None = None,
    ) -> State:
        """Run the algorithm, or the rest of it, or load its result.

        Parameters
        ----------
        store, name, commit_every
            As for `Resumable.run`.
        engine : int, dask.distributed.Client or Engine, default=1
            Where maps are computed: a number of processes on this machine, which end with this call; the workers of a
            dask cluster; or an engine of `pmstore.scale`.
        timeout : float, optional
            The seconds that a shard may take in an epoch. None: no limit; a late shard is asked for elsewhere, but
            a map that never ends anywhere is waited for.

        Returns
        -------
        State
            As for `Resumable.run`.

        Raises
        ------
        ShardError
            A shard can't be loaded, has changed, or its map raised; the message names the shard and the worker, and has
            the worker's traceback.
        ShardTimeoutError
            A shard has no result after `timeout`.
        NondeterminismError
            A map gave two results for the same shard and state.
        WorkersLostError
            No worker can be had, or workers compute with different libraries.
        RuntimeError
            The engine, an object, is at work for another run, in another thread or around this call.
        TypeError
            The shards, or this object, can't be sent to workers.
        FingerprintMismatchError, CorruptStoreError, OutOfSpaceError, StoreLockedError, TransactionError
            As for `Resumable.run`. Whatever the error, the store keeps the last epoch that was committed.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is a number of seconds greater than 0, or None, not {timeout!r}")
        with self._at_work(engine_of(engine), timeout):
            return super().run(store, name, commit_every=commit_every)

    def reset(self, store: StoreOrPath, name: str | None = None) -> None:
        """Forget the fit in the store, so that the next `run` starts anew.

        Parameters
        ----------
        store : Store, str or path-like
            As for `run`.
        name : str, default=None
            As for `run`. None: the fit that this object worked on last.

        Raises
        ------
        ValueError
            There is no name, and this object worked on no fit.
        FingerprintMismatchError, TransactionError, StoreLockedError
            As for `Resumable.reset`.
        """
        name = self.slot_name_ if name is None else name
        if name is None:
            raise ValueError("with name=None, reset() forgets the fit that this object worked on last: call run first")
        super().reset(store, name)

    def step(self) -> Mapping[str, float]:
        """One epoch: ask, combine, update."""
        state, asking = self.state, self._asking
        total = asking.epoch(self.shared(), state.attempt, state.epoch, self.combine)
        figures = self.update(total) or {}
        state.epoch += 1
        return {**figures, "late": asking.epochs.late, "lost": asking.epochs.lost}

    _asking: _Asking

    @contextlib.contextmanager
    def _at_work(self, engine: Engine, timeout: float | None) -> Iterator[None]:
        """A context with workers, which have told of the shards."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, numbers.Integral) or self.seed < 0:
            raise ValueError(f"seed is a whole number from 0, not {self.seed!r}: maps draw from it")
        if not hasattr(self, "shards"):
            raise TypeError(f"{self.title} has no data: set the attribute shards in its __init__")
        shards = shards_of(self.shards)
        with _alone(engine), contextlib.closing(engine):
            engine.start(shards)
            epochs = Epochs(engine, shards, timeout, engine.clock)
            try:
                run = uuid.uuid4().hex
                self.described = _described(epochs, len(shards), run)
                self.check_shards()
                self._asking = _Asking(epochs, _Mapping(self, [one["contents"] for one in self.described]), run)
                yield
            finally:
                self.__dict__.pop("_asking", None)

    def _adds(self, shared: Mapping[str, Array]) -> bool:
        """Whether contributions to this epoch are combined by sums, as `combine` does if it is not overridden. Workers
        then add what they have. They call this, too."""
        return type(self).combine is MapReduce.combine

    def _table(self) -> Iterable[Field]:
        yield Field("attempt", dtype=np.int64)
        yield Field("epoch", dtype=np.int64)
        yield from super()._table()

    def _whole_fingerprint(self) -> Fingerprint:
        shards = {f"shard {i}": told["contents"] for i, told in enumerate(self.described)}
        workers = {f"workers' {key}": value for key, value in json.loads(self._asking.epochs.environment).items()}
        whole = {**super()._whole_fingerprint(), "seed": self.seed, **workers, "shards": len(shards), **shards}
        self._asking.run = digest(whole)
        return whole

    def _finish_runs(self, fit_group: FitGroup | None, commits: Any, rows: Rows) -> None:
        with contextlib.nullcontext() if fit_group is None else fit_group.store.transaction():
            self.state.attempt += 1
        super()._finish_runs(fit_group, commits, rows)


_at_work: set[int] = set()  # the ids of the engines that run
_looking = threading.Lock()


@contextlib.contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    """A context that has the engine for itself. Raises RuntimeError if another run has it."""
    with _looking:
        if id(engine) in _at_work:
            raise RuntimeError("this engine is at work for another fit, which has not ended: give each an engine")
        _at_work.add(id(engine))
    try:
        yield
    finally:
        with _looking:
            _at_work.remove(id(engine))


class _Asking:
    """The questions of one call of `run`."""

    def __init__(self, epochs: Epochs, function: _Mapping, run: str) -> None:
        self.epochs = epochs
        self._function = function
        self.run = run  # in a store, the hash of the fingerprint takes its place

    def epoch(self, shared: Mapping[str, Any], attempt: int, epoch: int, combine: Any) -> Result:
        """The combined replies of one epoch."""
        sent = {name: np.array(value, order="C") for name, value in shared.items()}
        for name, array in sent.items():
            if array.dtype.hasobject:
                raise TypeError(f"shared() returns arrays and numbers; {name!r} is {shared[name]!r:.200}")
            array.flags.writeable = False
        return self.epochs.run(self._function, sent, Tag(self.run, attempt, epoch), combine)


class _Mapping:
    """What a worker does in an epoch."""

    def __init__(self, algorithm: MapReduce, contents: list[str]) -> None:
        # The state is in the store of the coordinator, and a shard comes to a worker by its loader.
        stays = ("state", "shards", "history_", "described", "_asking")
        travels = {name: value for name, value in vars(algorithm).items() if name not in stays}
        self._algorithm = object.__new__(type(algorithm))
        vars(self._algorithm).update(travels)
        self._contents = contents

    def expected(self, i: int) -> str | None:
        return self._contents[i]

    def prepare(self, data: Any) -> Any:
        return self._algorithm.prepare(data)

    def adds(self, shared: Mapping[str, Array]) -> bool:
        return self._algorithm._adds(shared)

    def __call__(self, i: int, held: Any, contents: str, shared: Mapping[str, Array], tag: Tag) -> Mapping[str, Any]:
        rng = np.random.default_rng(np.random.SeedSequence(self._algorithm.seed, spawn_key=(tag.epoch, i)))
        return self._algorithm.map(held, dict(shared), rng)


def _described(epochs: Epochs, count: int, run: str) -> list[dict[str, Any]]:
    """What the workers tell of each shard."""
    told: dict[str, Array] = epochs.run(Describe(), {}, Tag(run, 0, -1), lambda left, right: {**left, **right})
    return [json.loads(told[str(i)].tobytes()) for i in range(count)]
