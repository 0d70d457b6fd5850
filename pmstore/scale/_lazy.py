"""Predictions for data in shards, computed shard by shard when they are asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from pmstore.scale._shards import Shard, check_kind, is_dask, shards_of, with_columns

Array = npt.NDArray[Any]


class LazyParts(NDArrayOperatorsMixin, Sequence[Array]):
    """The results for the shards of a data set, as a sequence of arrays. Nothing is held.

    Each access loads the shard and computes its result, in this process: ``parts[i]`` for shard i, iteration for one
    after the other. ``numpy.asarray(parts)`` computes all, and joins them along the first axis, as operators and
    functions of numpy do: ``X[parts == 0]``. `shards_of` makes shards of them, so that a fit takes them.

    Parameters
    ----------
    shards : sequence of Shard
    function : callable
        From the array of a shard to its result.
    """

    def __init__(self, shards: Sequence[Shard], function: Callable[[Array], Array]) -> None:
        self._shards, self._function = tuple(shards), function

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, i: int) -> Array: ...

    @overload
    def __getitem__(self, i: slice) -> LazyParts: ...

    def __getitem__(self, i: int | slice) -> Array | LazyParts:
        if isinstance(i, slice):
            return LazyParts(self._shards[i], self._function)
        return _result(self._shards[i], self._function)

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("copy=False is impossible: the parts are computed and joined into a new array")
        whole = np.concatenate(list(self))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(one, LazyParts) for one in options.get("out", ())):
            return NotImplemented
        options = {name: _whole(one) for name, one in options.items()}
        return getattr(ufunc, method)(*map(_whole, inputs), **options)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == _whole(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != _whole(other)

    __hash__ = None  # type: ignore[assignment]

    def as_shards(self) -> list[Shard]:
        """The same results, which workers compute each time that they load them."""
        return [Shard(_result, shard, self._function) for shard in self._shards]

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", getattr(self._function, "func", self._function))
        return f"<LazyParts of {len(self)} shards, by {getattr(name, '__name__', name)}>"


def _whole(one: Any) -> Any:
    return np.asarray(one) if isinstance(one, LazyParts) else one


def _result(shard: Shard, function: Callable[[Array], Array]) -> Array:
    return of_block(shard(), function)


def is_sharded(data: Any) -> bool:
    """Whether data for a prediction are in shards: anything that `shards_of` takes, but an array of numpy."""
    if isinstance(data, list | tuple):
        return any(_is_part(part) or (isinstance(part, np.ndarray) and part.ndim > 1) for part in data)
    return _is_part(data)


def lazily(data: Any, function: Callable[[Array], Array], columns: Sequence[str] | None = None) -> Any:
    """The results of a function of a block of rows: a dask array for one of dask, otherwise `LazyParts`. columns: those
    that .parquet files must have, in any order."""
    return _over_dask(data, function) if is_dask(data) else LazyParts(_shards_of(data, columns), function)


def blocks_of(data: Any, columns: Sequence[str] | None = None) -> Iterator[Array]:
    """The blocks of rows of data in shards, one after the other, but for those without rows. columns: see `lazily`."""
    return (block for block in (_rows_of(shard()) for shard in _shards_of(data, columns)) if len(block))


def _shards_of(data: Any, columns: Sequence[str] | None) -> Sequence[Shard]:
    shards = shards_of(data)
    return shards if columns is None else with_columns(shards, columns, "the data of the fit")


def of_block(block: Any, function: Callable[[Array], Array]) -> Array:
    """The result for a block, also for one without rows, which scikit-learn refuses."""
    block = _rows_of(block)
    if len(block) or block.ndim != 2:
        return function(block)
    return function(np.ones((1, block.shape[1]), block.dtype))[:0]


def _rows_of(block: Any) -> Array:
    check_kind(block)
    if not isinstance(block, np.ndarray):
        kind = type(block).__name__
        raise TypeError(f"a shard for a prediction is an array, not a {kind}: let the loader return one")
    return np.asarray(block)


def _is_part(data: Any) -> bool:
    return (
        isinstance(data, Shard | LazyParts | str | os.PathLike)
        or is_dask(data)
        or type(data).__module__.startswith("zarr.")
    )


def _over_dask(data: Any, function: Callable[[Array], Array]) -> Any:
    if data.ndim != 2:
        raise ValueError(f"a dask array of samples has two axes, not {data.ndim}: reshape it")
    if len(data.chunks[1]) > 1:
        data = data.rechunk({1: -1})
    meta = of_block(np.ones((0, data.shape[1]), data.dtype), function)
    block = functools.partial(of_block, function=function)
    if meta.ndim == 1:
        return data.map_blocks(block, dtype=meta.dtype, drop_axis=1, meta=meta)
    return data.map_blocks(block, dtype=meta.dtype, chunks=(data.chunks[0], (meta.shape[1],)), meta=meta)
