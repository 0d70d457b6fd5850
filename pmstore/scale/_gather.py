"""Sums on a worker: neighbouring results that are there at the same time travel as one.

A reply of its own for each shard costs more than a short map: copies, hashes and a message. So a worker adds what it
would send together, in the tree of the shards' numbers, and sends the nodes of that tree. Each leaf's hash goes along,
so that the coordinator still compares two results of a shard::

    shards of a worker     2   3   4   5   6          three replies: of 2 and 3, of 4 and 5, of 6
                            ╲ ╱     ╲ ╱    │
    sent                    2,3     4,5    6

A sum has the same bits wherever it is computed. What an algorithm combines in its own way is combined by the
coordinator, whose BLAS is that of the whole fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pmstore.scale._messages import Array, Reply, Result, digest_of
from pmstore.scale._tree import Tree


class Gathering:
    """The replies of a worker that were not sent yet.

    Parameters
    ----------
    shards : int
        The number of all shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._clear()

    def _clear(self) -> None:
        self._apart: list[Reply] = []
        self._sums: Tree[list[Reply]] = Tree(self._shards, _added)
        self._has: set[int] = set()  # the shards whose results are in the sums

    def __bool__(self) -> bool:
        return bool(self._apart or self._has)

    def put(self, reply: Reply, function: Any, shared: Mapping[str, Array]) -> None:
        """Add the reply to a question about one shard. All questions until the next `take` have the same tag."""
        if reply.result is None or reply.shard in self._has or not function.adds(shared):
            self._apart.append(reply)
        else:
            self._has.add(reply.shard)
            self._sums.put(reply.shard, [reply])

    def take(self) -> list[Reply]:
        """The replies that are to be sent now."""
        replies = [*self._apart, *(_hashed(reply) for node in self._sums.nodes() for reply in node)]
        self._clear()
        return replies


def sums(left: Result, right: Result) -> Result:
    """The sums of two contributions. Booleans and small integers are added as 64-bit integers.

    Raises
    ------
    ValueError
        The contributions have other names, shapes or dtypes.
    TypeError
        They have dtypes that can't be added, such as text.
    """
    if _layouts(left) != _layouts(right):
        raise ValueError(f"map() returned {_kinds(left)} for one shard, and {_kinds(right)} for its neighbour")
    try:
        return {name: np.asarray(np.add(left[name], right[name], dtype=_dtype_of_sum(left[name]))) for name in left}
    except TypeError as error:
        raise TypeError(f"map() returned {_kinds(left)}, which can't be added: override combine()") from error


def as_sum(total: Result) -> Result:
    """The total with the dtypes of sums, which the contribution of a single shard does not have yet."""
    return {name: array.astype(_dtype_of_sum(array), copy=False) for name, array in total.items()}


def _added(left: list[Reply], right: list[Reply]) -> list[Reply]:
    """One reply for two neighbours, whose hash is still missing; or the replies of both, if they can't be added."""
    (first, *others), (second, *more) = left, right
    assert first.result is not None and second.result is not None
    if others or more or _layouts(first.result) != _layouts(second.result):
        return [*left, *right]  # the coordinator tells what is wrong
    try:
        total = sums(first.result, second.result)
    except Exception:  # also what map() has set, such as np.seterr
        return [*left, *right]
    return [dataclasses.replace(first, result=total, leaves=(*first.hashes, *second.hashes))]


def _hashed(reply: Reply) -> Reply:
    if not reply.leaves:
        return reply
    assert reply.result is not None
    return dataclasses.replace(reply, digest=digest_of(reply.shard, reply.tag, reply.result, reply.leaves))


def _layouts(result: Result) -> dict[str, tuple[Any, ...]]:
    """The dtypes and shapes by name, which must be the same in two contributions."""
    return {name: (_dtype_of_sum(array), array.shape) for name, array in result.items()}


def _dtype_of_sum(array: Array) -> np.dtype[Any]:
    """The dtype in which arrays are added: counts of many shards need more room than those of one."""
    small = array.dtype.itemsize < 8 and array.dtype.kind in "biu"
    return np.dtype(np.uint64 if array.dtype.kind == "u" else np.int64) if small else array.dtype.newbyteorder("=")


def _kinds(result: Result) -> str:
    """Names, dtypes and shapes of a contribution, in words."""
    return ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in result.items()) or "nothing"
