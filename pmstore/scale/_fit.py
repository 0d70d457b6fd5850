"""The parts that the estimators with ``engine=`` share.

An estimator is two classes. A subclass of `ShardedFit` is the algorithm: its `fields`, `fingerprint` and `start` call
super's, and it draws from ``self.random_state``. It travels to the workers, and holds plain values only, not the
estimator. A subclass of `OnShards` calls `_fit_on_shards` if ``engine`` is given.

Maps compute in one thread, of BLAS and of OpenMP, wherever they are: bits must not depend on the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fingerprint import Fingerprint, describe_parameters, digest
from pmstore._resume.fit import InStore
from pmstore._resume.loop import State
from pmstore._resume.state import Field
from pmstore.scale._holder import loaded_again
from pmstore.scale._lazy import LazyParts, blocks_of, lazily
from pmstore.scale._mapreduce import MapReduce
from pmstore.scale._shards import Shard, columns_of, shards_of

Array = npt.NDArray[Any]

ENGINE: dict[str, list[Any]] = {"engine": [common.COUNT, common.ENGINE_LIKE, None]}
"""The constraint of the parameter `engine`."""


class ShardedFit(MapReduce):
    """The fit of an estimator over shards.

    Parameters
    ----------
    estimator : OnShards
        The estimator; its parameters are checked already.
    shards : sequence of Shard

    Attributes
    ----------
    rows : tuple of int
        The numbers of rows of the shards. This and the next three are set when the shards have been described.
    features : int
    dtype : dtype
        float32 if all shards are, otherwise float64.
    alone : bool
        Whether there is one shard only: then the result is that of scikit-learn on one machine.
    random_state : RandomState
        The generator of the fit, on the coordinator.
    """

    _call = "fit()"
    rows: tuple[int, ...]
    features: int
    dtype: np.dtype[Any]
    alone: bool

    def __init__(self, estimator: Any, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        parameters = estimator.get_params(deep=False)
        self._title = type(estimator).__name__
        self._given = {"estimator": self._described(), **describe_parameters(parameters), **common.versions()}
        self._drawn = -1
        self._draws = "random_state" in parameters
        given = parameters.get("random_state", 0)
        if given is None:
            self._drawn = int(common.check_random_state(None).randint(np.iinfo(np.int32).max))
            given = self._drawn
        self.random_state: np.random.RandomState = common.check_random_state(given)

    @property
    def title(self) -> str:
        return self._title

    def fingerprint(self) -> Mapping[str, Any]:
        """Parameters and versions."""
        return self._given

    def _whole_fingerprint(self) -> Fingerprint:
        # Maps compute in one thread, whatever a worker's threads are: the engine may change between two attempts.
        whole = super()._whole_fingerprint()
        whole = {key: value for key, value in whole.items() if not key.endswith(" threads")}
        self._pmstore_asking.run = digest(whole)
        return whole

    def check_shards(self) -> None:
        """Shape and dtype of the whole data. Raises ValueError for shards that aren't matrices of the same width."""
        for i, told in enumerate(self.described):
            shape, name = told["shape"], f"shard {i} of {len(self.described)}, {self.shards[i]},"
            if shape is None or len(shape) != 2:
                found = "no array" if shape is None else f"of shape {tuple(shape)}"
                raise ValueError(f"{name} is {found}: {self.title} needs arrays of shape (rows, features)")
            if not _is_real(told["dtype"]):
                raise ValueError(f"{name} is of {told['dtype']}: {self.title} needs real numbers")
            if not shape[0]:
                raise ValueError(f"{name} is empty: leave it out, or rechunk the array that has it as a chunk")
            if shape[1] != self.described[0]["shape"][1]:
                raise ValueError(f"{name} has {shape[1]} features, and shard 0 {self.described[0]['shape'][1]}")
        self.rows = tuple(told["shape"][0] for told in self.described)
        self.features = self.described[0]["shape"][1]
        if not self.features:
            raise ValueError("the shards have no features")
        single = all(told["dtype"] == "float32" for told in self.described)
        self.dtype = np.dtype(np.float32 if single else np.float64)
        self.alone = len(self.rows) == 1

    def fields(self) -> Iterable[Field]:
        """The generator, and the seed that it was made from (-1: it came from the parameter)."""
        if not self._draws:
            return []
        return [Field("random_state", generator=self.random_state), Field("seed", dtype=np.int64)]

    def start(self) -> None:
        if self._draws and self.state.run == 0:
            self.state.seed = self._drawn

    def parts(self, function: Callable[[Array], Array]) -> LazyParts:
        """The results of a function for the shards of the fit. Loading one that has changed raises ShardError."""
        told = zip(self.shards, self.described, strict=True)
        shards = [Shard(loaded_again, i, shard, one["contents"]) for i, (shard, one) in enumerate(told)]
        return LazyParts(shards, function)

    def step(self) -> Mapping[str, float]:
        """One epoch. The coordinator computes in one thread, too."""
        with common.one_blas_thread():
            return super().step()


def _is_real(dtype: str) -> bool:
    """Whether these are real numbers."""
    try:
        return np.dtype(dtype).kind in "fiub"
    except TypeError:  # numpy can't read the text of StringDType and of structured dtypes
        return False


class Matrix:
    """The data that a worker holds of a shard: the numbers as the kernels need them, and values computed from them.

    Everything that it remembers can be computed again, with the same bits.

    Parameters
    ----------
    given : array of shape (n, d)
    dtype : dtype
        float32 or float64.
    order : {"C", "K"}, default="C"
        K: the order of the numbers in memory stays as it is given.

    Attributes
    ----------
    memo : dict
        What maps keep for the next epochs.
    nbytes : int
        The memory that this takes at most, with four numbers per row in the memo.
    """

    def __init__(self, given: Any, dtype: np.dtype[Any], order: Literal["C", "K"] = "C") -> None:
        self._given, self._dtype, self._order = given, dtype, order
        self._mean: Array = np.zeros(0)
        self._centred: Array | None = None
        self.memo: dict[str, Any] = {}
        self.nbytes = given.shape[0] * (given.shape[1] + 4) * dtype.itemsize

    def numbers(self) -> Array:
        """The data as they were given. Raises TypeError or ValueError for data that scikit-learn refuses."""
        if self._centred is not None:
            raise RuntimeError("this question belongs to an earlier epoch")
        if not isinstance(self._given, np.ndarray):
            raise TypeError(
                f"a shard is an array, not a {type(self._given).__name__}: fit sparse data without engine, "
                "or make them dense in the shard's loader"
            )
        array = np.asarray(self._given, dtype=self._dtype, order=self._order)
        if not np.isfinite(array.sum(dtype=np.float64)) and not np.isfinite(array).all():
            raise ValueError(f"Input X contains {'NaN' if np.isnan(array).any() else 'infinity'}.")
        return array

    def centred(self, mean: Array) -> Array:
        """The data minus their mean, which is the same in all questions of a fit. The original is dropped."""
        if self._centred is None:
            self._centred = self.numbers() - mean
            self._mean, self._given = mean.copy(), None
        elif not np.array_equal(self._mean, mean):
            raise RuntimeError("a question about this shard has another mean than an earlier one")
        return self._centred


class OnShards(InStore):
    """A base class for estimators with the parameter `engine`."""

    engine: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the methods of the class as they are. scikit-learn wraps them for ``set_output``, and results for shards
        are no tables. For arrays they call super's, which are wrapped."""
        own = {name: vars(cls)[name] for name in ("transform", "fit_transform") if name in vars(cls)}
        super().__init_subclass__(**options)
        for name, method in own.items():
            setattr(cls, name, method)

    def _is_sharded(self) -> bool:
        return self.engine is not None

    def _fit_on_shards(self, X: Any, make: Callable[[Sequence[Shard]], ShardedFit]) -> tuple[Any, State]:
        """Make the algorithm and run it, or the rest of it; returns both."""
        if self._has_callbacks():
            raise NotImplementedError("a fit with engine calls no callbacks: remove them, or watch the store's history")
        if hasattr(type(X), "tocsr"):  # a Delayed of dask has any attribute
            raise TypeError("engine takes dense data: fit sparse data with engine=None")
        shards = shards_of(X)
        fit = make(shards)
        try:
            state = fit.run(self.store, self.name, commit_every=self.commit_every, engine=self.engine)
        finally:
            self._group_name = fit.slot_name_
        self.resumed_from_run_, self.resumed_from_iter_ = fit.resumed_from_run_, fit.resumed_from_iter_
        self.history_ = fit.history_
        self.n_features_in_ = fit.features
        vars(self).pop("feature_names_in_", None)
        if (columns := columns_of(shards)) is not None:
            self.feature_names_in_ = np.array(columns, object)
        return fit, state

    def _over(self, method: str, X: Any) -> Any:
        """The results of a method for data in shards, lazily. Later fits of this estimator don't change them."""
        columns = None if method == "inverse_transform" else self._columns()
        return lazily(X, getattr(self._for_blocks(), method), columns)

    def _blocks(self, X: Any) -> tuple[Any, Iterator[Array]]:
        """The estimator for blocks of rows, and those of data in shards, one after the other."""
        return self._for_blocks(), blocks_of(X, self._columns())

    def _for_blocks(self) -> Any:
        """The fitted estimator as it is now, from arrays, whose columns have no names, to arrays."""
        common.check_is_fitted(self)
        frozen = copy.copy(self)
        vars(frozen).update(engine=None, _sklearn_output_config={"transform": "default"})
        for name in ("labels_", "feature_names_in_"):
            vars(frozen).pop(name, None)
        return frozen

    def _columns(self) -> list[str] | None:
        """The names of the columns that the fit's data had, if they had any."""
        names = vars(self).get("feature_names_in_")
        return None if names is None else list(names)

    def __sklearn_clone__(self) -> Any:
        plain = copy.copy(self)
        plain.engine = None  # its copy could not be the same engine
        made = super(OnShards, plain).__sklearn_clone__()  # type: ignore[misc]
        made.engine = self.engine
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if state.get("engine") is not None and not isinstance(state["engine"], Integral):
            state["engine"] = None  # its workers belong to this process
        labels = state.get("labels_")
        if isinstance(labels, LazyParts) or hasattr(labels, "dask"):
            del state["labels_"]  # they are made of the shards
        return state
