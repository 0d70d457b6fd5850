"""The interface of an engine: five methods that carry questions to workers, and replies back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pmstore.scale._holder import Function, Holder, limited_threads
from pmstore.scale._messages import Array, Lost, Reply, Tag
from pmstore.scale._shards import Shard
from pmstore.scale._travel import arrived


class Engine(ABC):
    """Workers, wherever they are. pmstore has three: `Processes`, `Dask` and `Serial`.

    An engine decides where a shard is computed. It promises nothing about order, and may lose, repeat or delay what it
    carries: the coordinator asks again, and counts one reply for each shard. It does not start over by itself. On its
    workers it keeps one `Holder` each, and calls `Holder.answer`. Shards go there through pickles, also within a
    process: a pickle has arrays with gaps in C order, in which numpy adds in another order.

    Attributes
    ----------
    clock : callable
        Returns the time in seconds, by which a reply is late: `time.monotonic`. A simulation has a clock of its own.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    @abstractmethod
    def start(self, shards: Sequence[Shard]) -> None:
        """Take the shards, and begin to start workers."""

    def has_begun(self) -> bool:
        """Whether a worker takes questions, or has done so since `start`. `completed` returns, perhaps with no message,
        when this becomes true. The `timeout` of a fit does not count the time before."""
        return True

    @abstractmethod
    def submit(self, i: int, function: Function, shared: Mapping[str, Array], tag: Tag) -> None:
        """Ask a worker for ``holder.answer(i, shards[i], function, shared, tag)``. Does not wait.

        The same question may be asked again while it is open: then another worker than before gets it, if there is
        one. `function` and `shared` are the same objects for all questions of an epoch, and do not change.
        """

    @abstractmethod
    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        """The messages that arrived: at least one, or none after `timeout` seconds (None: no limit).

        Raises
        ------
        WorkersLostError
            There are no workers, and no new ones can be had.
        """

    @abstractmethod
    def cancel(self, tag: Tag) -> None:
        """Nobody waits for the replies to this tag any more. Questions that no worker has begun may be dropped."""

    @abstractmethod
    def close(self) -> None:
        """End the workers that this engine started. May be called twice, and after errors."""


class Serial(Engine):
    """Everything in this process and thread: for debugging a map, and for small data.

    Algorithm and shards go through a pickle, as on their way to other processes, so that maps see the same memory
    order and no attributes that `update` changes. Arrays in shards that have no gaps are not copied.
    """

    def __init__(self) -> None:
        self._holder = Holder("this process")
        self._shards: Sequence[Shard] = ()
        self._asked: list[tuple[Any, ...]] = []

    def start(self, shards: Sequence[Shard]) -> None:
        self._shards = arrived(tuple(shards), "the shards", shares=True)
        self._holder.close()
        self._holder = Holder("this process")  # shards of an earlier run have the same numbers

    def submit(self, i: int, function: Function, shared: Mapping[str, Array], tag: Tag) -> None:
        self._asked.append((i, self._shards[i], function, shared, tag))

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        if not self._asked:
            return []
        with limited_threads(1):
            return [self._holder.answer(*self._asked.pop(0))]

    def cancel(self, tag: Tag) -> None:
        self._asked = [asked for asked in self._asked if asked[-1] != tag]

    def close(self) -> None:
        self._asked.clear()
        self._holder.close()
        self._holder = Holder("this process")
