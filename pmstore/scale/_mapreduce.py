"""Algorithms whose iterations map over shards and add up: the loop of `Resumable`, with workers.

The store of the coordinator is the only durable state. An epoch asks all shards for their parts, combines these in a
tree, and commits what `update` makes of the total::

    coordinator   attempt + 1 ──▶ ask ──▶ combine ──▶ update ──▶ one commit: state, epoch + 1 ──▶ ask …
                  (a commit)       │         ▲
    workers                        └──▶ map ─┘          a worker that dies, hangs or lags: another one is asked
"""

from __future__ import annotations

import contextlib
import functools
import json
import numbers
import os
import tempfile
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._resume.fingerprint import Fingerprint, digest
from pmstore._resume.fit_group import FitGroup, StoreOrPath, opened, path_of
from pmstore._resume.history import Rows, Source
from pmstore._resume.loop import Resumable
from pmstore._resume.state import Field, State
from pmstore._store.store import Store
from pmstore.scale._broadcasts import Log, Recovery, stored_log
from pmstore.scale._copies import Copies
from pmstore.scale._engine import Engine, Serial
from pmstore.scale._engines import EngineLike, engine_of
from pmstore.scale._epochs import Epochs
from pmstore.scale._gather import as_sum, sums
from pmstore.scale._holder import Describe
from pmstore.scale._lazy import LazyParts
from pmstore.scale._local import Local
from pmstore.scale._messages import HASH, HASHES, MARKS, Array, Marks, Result, Tag
from pmstore.scale._processes import Processes
from pmstore.scale._prune import forget_copies, local_directory, prune_local
from pmstore.scale._shards import shards_of
from pmstore.scale._work import Work


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
    again because a reply was late, and because a worker or a reply was lost. Attributes whose names begin with
    ``_pmstore_`` belong to this class, too.

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
    def map(
        self, shard: Any, shared: dict[str, Array], rng: np.random.Generator, *args: Any, **kwargs: Any
    ) -> Mapping[str, Any]:
        """The contribution of one shard. A worker calls it, on a copy of this object without `state` and `shards`.

        It is defined as ``map(self, shard, shared, rng)``, or with local fields as ``map(self, shard, shared, rng,
        local)``. It must be a function of its arguments: a shard may be computed twice, and on any worker.

        Parameters
        ----------
        shard : array
            What the shard's loader, or `prepare`, returned. It can't be written to.
        shared : dict of ndarray
            What `shared` returned. The arrays can't be written to.
        rng : Generator
            The same for the same `seed`, epoch and shard.
        local : Local
            The arrays of `local_fields`, as attributes: the state before this epoch. The map changes it, in place, to
            that of the next epoch.

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
            Figures for the `history`: the ``"objective"``, and at most one other, neither ``"late"`` nor ``"lost"``.
        """

    def check_shards(self) -> None:
        """Called once `described` is there, before anything else of a run.

        Raise ValueError for shards that don't fit. Attributes that this sets travel to the workers, and `fields` and
        `fingerprint` can use them.
        """

    def prepare(self, shard: Any) -> Any:
        """The data that a worker keeps of a loaded shard, such as centred data. Called on the worker, as `map` is."""
        return shard

    def local_fields(self, i: int) -> Iterable[Field]:
        """The table of the state that shard i has for itself, on its worker: by default none.

        Only arrays of numbers, whose shapes may follow from ``self.described[i]``. A lost state is computed again, so
        that it has the same bits, whichever process dies.
        """
        return ()

    def local_start(self, shard: Any, local: Local, rng: np.random.Generator) -> None:
        """Fill the local state for the run's first epoch: all zeros until then. A function of its arguments, called as
        `map` is.

        With several `runs`, each run begins with such states. `rng` is made from ``SeedSequence(seed, spawn_key=(e, i,
        0))``, where e is the epoch with which the run begins.
        """

    def shared(self) -> Mapping[str, Any]:
        """The part of the state that all workers need, as arrays and numbers. By default, all fields that are stored
        until the fit is finished, but for generators and Python values."""
        fields = [field for field in self.fields() if field.role in ("result", "working")]
        return {field.name: self.state[field.name] for field in fields if field.is_array or field.is_scalar}

    def combine(self, left: Result, right: Result) -> Result:
        """The combination of two neighbours' contributions, the lower shards' on the left: by default their sums.
        Booleans and small integers are added as 64-bit integers; those of a single shard become such, too.

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
        local: str | os.PathLike[str] | None = None,
        archive: str | os.PathLike[str] | None = None,
        archive_every: int = 100,
    ) -> State:
        """Run the algorithm, or the rest of it, or load its result.

        Parameters
        ----------
        store, name, commit_every
            As for `Resumable.run`. With local fields, a third state of each shard is kept if not every epoch is
            committed.
        engine : int, dask.distributed.Client or Engine, default=1
            Where maps are computed: a number of processes on this machine, which end with this call; the workers of a
            dask cluster; or an engine of `pmstore.scale`.
        timeout : float, optional
            The seconds that a shard may take in an epoch, with a replay of its local state. They count from when the
            first process of the engine takes questions. None: no limit; a late shard is asked for elsewhere, but a map
            that never ends anywhere is waited for.
        local : path, optional
            For algorithms with local fields: a directory, on a disk of its own for each machine, that workers can
            write. They keep the local states there, below a name that follows from the fit. By default, workers on this
            machine use the store's path with ``.local`` behind it, or a temporary directory if there is no store or it
            is in memory.
        archive : str or path, optional
            For algorithms with local fields: a folder or URL that all workers reach, for copies of the local states.
            Then the store keeps the broadcasts of some `archive_every` epochs, and not of all. ``s3://…`` and others
            need the extra `archive`.
        archive_every : int, default=100
            The number of epochs between two copies of a shard's state.

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
            This object, or the engine, an object, is at work for another run, in another thread or around this call.
        TypeError
            The shards, or this object, can't be sent to workers.
        ValueError
            With local fields: `local` is needed. Or the path is ":memory:", as for `Resumable.run`.
        FingerprintMismatchError, CorruptStoreError, OutOfSpaceError, StoreLockedError, TransactionError
            As for `Resumable.run`. Whatever the error, the store keeps the last epoch that was committed.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is a number of seconds greater than 0, or None, not {timeout!r}")
        chosen = engine_of(engine)

        def run() -> State:
            directory = self._local_directory(store, chosen, local)
            copies = self._archive(archive, archive_every)
            with self._at_work(chosen, timeout, directory, copies):
                state = self._run_to_the_end(store, name, commit_every)
                self._pmstore_parts = self._recovery(store) if directory else None
                if copies is not None:
                    copies.let_go()
                return state

        return self._alone(run)

    def local_parts(self, name: str) -> LazyParts:
        """The arrays of a local field at the end of the fit, one for each shard; of several `runs`, of the best one.

        An access copies the array out of the directory of the local states. If that is on another machine, or lost, or
        damaged, or if a later run was worse than the best one, the state is computed again, in this process.

        Parameters
        ----------
        name : str

        Returns
        -------
        LazyParts
            ``parts[i]`` is the array of shard i. An access raises NondeterminismError if the state that is computed
            here has other bits than on the workers, ShardError if the shard can't be loaded or has changed, or if the
            state is lost because the fit was forgotten or its store deleted, KeyError if it has no such field.

        Raises
        ------
        ValueError
            There was no `run`, or there are no local fields.
        """
        if self._pmstore_parts is None:
            raise ValueError(f"{self.title} has no local states of a finished run: call run, and define local_fields")
        return self._pmstore_parts.parts(name)

    def reset(
        self, store: StoreOrPath, name: str | None = None, *, archive: str | os.PathLike[str] | None = None
    ) -> None:
        """Forget the fit in the store, so that the next `run` starts anew.

        With local fields, this also calls `pmstore.scale.prune_local(store)`: it deletes the local states next to the
        store of all fits that the store does not have. States in other directories stay.

        Parameters
        ----------
        store : Store, str or path-like
            As for `run`.
        name : str, default=None
            As for `run`. None: the fit that this object worked on last.
        archive : str or path, optional
            As it was given to `run`: the copies of the fit's local states are deleted there, before the fit is
            forgotten. None: they stay.

        Raises
        ------
        ValueError
            There is no name, and this object worked on no fit; or an archive, and there are no local fields.
        ArchiveUnavailableError
            The archive can't be reached, or refuses. The fit is not forgotten: call again.
        FingerprintMismatchError, TransactionError, StoreLockedError
            As for `Resumable.reset`.
        """
        name = self.slot_name_ if name is None else name
        if name is None:
            raise ValueError("with name=None, reset() forgets the fit that this object worked on last: call run first")
        copies = self._archive(archive, 1)
        if not isinstance(store, Store) and not os.path.exists(path_of(store)):
            return  # nothing to forget, and nothing is created
        with opened(store, "reset() commits", "r+") as own:  # no other process begins the fit meanwhile
            if copies is not None:
                forget_copies(own, name, copies)
            super().reset(own, name)
            if self._has_local_state:
                prune_local(store)  # the path as it was given names the directory

    def step(self) -> Mapping[str, float]:
        """One epoch: ask, combine, update."""
        state, asking, log = self.state, self._pmstore_asking, self._pmstore_log
        if log is None:
            shared = self.shared()
            total = asking.epoch(shared, state.attempt, state.epoch, self._combined)
        else:
            marks = Marks(self._pmstore_began, *self._pmstore_commits)
            self._cut(log, marks)
            shared = _sendable(self.shared())
            sent = {**shared, HASHES: state.local_hashes, MARKS: marks}
            hashes, total = _apart(asking.epoch(sent, state.attempt, state.epoch, self._combine_with_hashes))
            state.local_hashes = hashes
            log.add(state.epoch, shared)
        if self._adds(shared):
            total = as_sum(total)
        figures = self._figures_of.figures(self.update(total))
        state.epoch += 1
        return {**figures, "late": asking.epochs.late, "lost": asking.epochs.lost}

    def _cut(self, log: Log, marks: Marks) -> None:
        """Forget the part of the log that no shard needs any more, because its states are copied."""
        state, copies, run = self.state, self._pmstore_copies, self._pmstore_asking.run
        if copies is not None and copies.is_due(0, state.epoch, marks):  # this state and the log are those of a commit
            copies.forget(run, state.log_from, self._of_best_run(1))
            state.log_from = max(state.log_from, copies.log_from(run, len(self.described), state.epoch))
        log.cut(state.log_from, best=self._of_best_run())

    @property
    def _pmstore_began(self) -> int:
        """The epoch with which the run began."""
        return int(self.state.began) if self.runs > 1 else 0

    def _of_best_run(self, more: int = 0) -> range:
        """The epochs whose broadcasts, or so many more whose copies, the local states of the best run need."""
        return range(self.state.best_log_from, self.state.best_epoch + more) if self.runs > 1 else range(0)

    def _committed(self) -> None:
        self._pmstore_commits = self.state.epoch, self._pmstore_commits[0]

    def _run_ended(self, last: bool) -> None:
        """Keep what the states of the best run need; the next run begins with this epoch."""
        state, log = self.state, self._pmstore_log
        if log is None or self.runs == 1:
            return
        if state.best_run == state.run:
            state.best_began, state.best_epoch, state.best_log_from = state.began, state.epoch, state.log_from
            state.best_hashes = state.local_hashes
        if last:
            state.began, state.log_from = state.best_began, state.best_log_from
            log.cut(state.log_from, state.best_epoch)
        else:
            state.began = state.log_from = state.epoch
            log.cut(state.log_from, best=self._of_best_run())

    _pmstore_asking: _Asking
    _figures_of = Source("update()", ("late", "lost"))
    _pmstore_commits: tuple[int, int] = (0, -1)  # the epochs of the last commits, the newest first
    _pmstore_copies: Copies | None = None
    _pmstore_log: Log | None = None
    _pmstore_parts: Recovery | None = None

    def _combine_with_hashes(self, left: Result, right: Result) -> Result:
        """The combination of contributions, and the hashes of the local states in the order of the shards."""
        (ours, left), (theirs, right) = _apart(left), _apart(right)
        return {**self._combined(left, right), HASH: np.concatenate([ours, theirs])}

    def _combined(self, left: Result, right: Result) -> Result:
        result = self.combine(left, right)
        if not isinstance(result, Mapping):
            raise TypeError(f"combine() returns a dict of arrays by name, not {result!r:.200}")
        return result

    @property
    def _has_local_state(self) -> bool:
        return type(self).local_fields is not MapReduce.local_fields

    def _local_directory(self, store: Any, engine: Engine, given: Any) -> str:
        """The directory in which workers keep local states; "" if there are none."""
        if not self._has_local_state:
            if given is not None:
                raise ValueError(f"{self.title} has no local_fields, and run() was given local={given!r:.200}")
            return ""
        directory: str
        here = isinstance(engine, Processes | Serial)
        if given is not None:
            directory = os.path.abspath(os.fspath(given))
        elif not here:
            raise ValueError(
                f"the workers of {type(engine).__name__} may be on other machines: give run() local=, a directory in "
                "which each worker can keep the local states of its shards"
            )
        elif store is None or (isinstance(store, Store) and not os.path.exists(store.path)):  # in memory
            self._pmstore_temporary = tempfile.TemporaryDirectory(prefix="pmstore-")
            directory = self._pmstore_temporary.name
        else:
            directory = local_directory(store)
        return directory

    def _archive(self, url: Any, every: int) -> Copies | None:
        """The copies of local states in an archive; None if there are none."""
        if url is None:
            return None
        if not self._has_local_state:
            raise ValueError(f"{self.title} has no local_fields, and archive={url!r:.200} was given")
        if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 1:
            raise ValueError(f"archive_every is a whole number from 1, not {every!r}")
        return Copies(url, int(every))

    def _recovery(self, store: Any) -> Recovery:
        """The way to the local states of a fit that has ended."""
        log: Any = functools.partial(contextlib.nullcontext, self._pmstore_log)
        if store is not None:
            log = functools.partial(stored_log, path_of(store), str(self.slot_name_), self._pmstore_asking.run)
        state, asking, shards = self.state, self._pmstore_asking, shards_of(self.shards)
        keeps = vars(self).get("_pmstore_temporary")
        hashes, end = (state.best_hashes, state.best_epoch) if self.runs > 1 else (state.local_hashes, state.epoch)
        environment = asking.epochs.environment
        return Recovery(
            asking.function, shards, asking.run, self._pmstore_began, end, np.array(hashes), log, environment, keeps
        )

    @contextlib.contextmanager
    def _at_work(
        self, engine: Engine, timeout: float | None, directory: str = "", copies: Copies | None = None
    ) -> Iterator[None]:
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
                self._pmstore_log = Log() if directory else None
                self._pmstore_copies = copies
                self._pmstore_asking = _Asking(epochs, Work(self, directory, copies), run, self._pmstore_log)
                yield
            finally:
                self.__dict__.pop("_pmstore_asking", None)
                self.__dict__.pop("_pmstore_log", None)

    def _adds(self, shared: Mapping[str, Array]) -> bool:
        """Whether contributions to this epoch are combined by sums, as `combine` does if it is not overridden. Workers
        then add their contributions. They call this, too."""
        return getattr(self.combine, "__func__", None) is MapReduce.combine

    def _table(self) -> Iterable[Field]:
        yield Field("attempt", dtype=np.int64)
        yield Field("epoch", dtype=np.int64)
        if self._pmstore_log is not None:
            yield Field("log_from", dtype=np.int64)
            yield Field("local_hashes", (len(self.described), 16), np.uint8)
            if self.runs > 1:
                names = ("began", "best_began", "best_epoch", "best_log_from")
                yield from (Field(name, dtype=np.int64) for name in names)
                yield Field("best_hashes", (len(self.described), 16), np.uint8, role="best")
            yield Field("broadcasts", keeper=self._pmstore_log)
        yield from super()._table()

    def _loop_fingerprint(self) -> Fingerprint:
        shards = {f"shard {i}": told["contents"] for i, told in enumerate(self.described)}
        environment = json.loads(self._pmstore_asking.epochs.environment)
        workers = {f"workers' {key}": value for key, value in environment.items()}
        own = {**super()._loop_fingerprint(), "seed": self.seed, **workers, "shards": len(shards), **shards}
        return own if self._pmstore_log is None else {**own, "local fields": self._pmstore_asking.function.layout()}

    def _whole_fingerprint(self) -> Fingerprint:
        whole = super()._whole_fingerprint()
        self._pmstore_asking.run = digest(whole)
        return whole

    def _found(self, fit_group: FitGroup) -> None:
        # Equal fingerprints may have other hashes, as 1 == 1.0. Local states have the one of that which the store has.
        self._pmstore_asking.run = digest(fit_group.fingerprint or {})

    def _finish_runs(self, fit_group: FitGroup | None, commits: Any, rows: Rows) -> None:
        with contextlib.nullcontext() if fit_group is None else fit_group.store.transaction():
            self.state.attempt += 1
        self._pmstore_commits = self.state.epoch, self.state.epoch - 1
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

    def __init__(self, epochs: Epochs, function: Work, run: str, log: Log | None) -> None:
        self.epochs = epochs
        self.function = function
        self.run = run  # in a store, the hash of the fingerprint takes its place
        self._log = log

    def epoch(self, shared: Mapping[str, Any], attempt: int, epoch: int, combine: Any) -> Result:
        """The combined replies of one epoch."""
        sent, log = _sendable(shared), self._log

        def with_log(first: int) -> dict[str, Array] | None:
            since = None if log is None else log.since(first, epoch)
            return None if since is None else {**sent, **since}

        tag = Tag(self.run, attempt, epoch)
        return self.epochs.run(self.function, sent, tag, combine, None if log is None else with_log)


def _sendable(shared: Mapping[str, Any]) -> dict[str, Array]:
    """Copies that can't be written to. Raises TypeError for values that are no arrays of numbers."""
    sent = {name: np.array(value, order="C") for name, value in shared.items()}
    for name, array in sent.items():
        if array.dtype.hasobject:
            raise TypeError(f"shared() returns arrays and numbers; {name!r} is {shared[name]!r:.200}")
        array.flags.writeable = False
    return sent


def _apart(result: Result) -> tuple[Array, Result]:
    """The hashes of local states, and the contribution."""
    return result[HASH], {name: array for name, array in result.items() if name != HASH}


def _described(epochs: Epochs, count: int, run: str) -> list[dict[str, Any]]:
    """The workers' descriptions of the shards."""
    told: dict[str, Array] = epochs.run(Describe(), {}, Tag(run, 0, -1), lambda left, right: {**left, **right})
    return [json.loads(told[str(i)].tobytes()) for i in range(count)]
