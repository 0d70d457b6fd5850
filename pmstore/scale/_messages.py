"""The messages of a coordinator and its workers. An engine carries them, and reads nothing but the numbers."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pmstore._resume.fingerprint import hash_array
from pmstore._values.dtypes import value_bytes

Array = npt.NDArray[Any]
Result = dict[str, Array]


class Tag(NamedTuple):
    """Which question a reply belongs to. A later attempt or epoch makes earlier ones void.

    Attributes
    ----------
    run : str
        The computation.
    attempt : int
        The number of the coordinator, from 1: each one commits a larger number before it asks.
    epoch : int
        The epoch, from 0; -1 while the shards are described.
    """

    run: str
    attempt: int
    epoch: int


class Marks(NamedTuple):
    """The epochs of a fit with local states that a question tells a worker of.

    Attributes
    ----------
    began : int
        The epoch with which the run began: its states are those that `local_start` makes.
    decided : int
        The epoch that the newest commit of the coordinator has: all earlier ones are decided, and a coordinator that
        dies asks for it again.
    before : int
        The epoch that the commit before had.
    """

    began: int
    decided: int
    before: int


@dataclass(frozen=True)
class Failure:
    """Why a worker has no result.

    Attributes
    ----------
    kind : {"load", "changed", "prepare", "map"}
        The shard can't be loaded; it has other contents than at the start; `prepare` raised; the map raised, or
        returned something else than arrays.
    text : str
        The message, with the traceback if there is one.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Reply:
    """A worker's answer to the questions about one shard, or about neighbours whose results it added.

    Attributes
    ----------
    shard : int
        The first one.
    tag : Tag
    worker : str
        The name of the worker, for messages.
    result : dict of ndarray, or None
    digest : str
        `digest_of` the reply, computed by the worker.
    leaves : tuple of str
        If the result is a sum over several shards, the hash of each of their results, in order.
    seconds : float
        The time that the worker took, with loading.
    environment : str
        The versions, BLAS and threads of the worker, as JSON.
    failure : Failure, optional
    """

    shard: int
    tag: Tag
    worker: str
    result: Result | None = None
    digest: str = ""
    seconds: float = 0.0
    environment: str = ""
    failure: Failure | None = field(default=None)
    leaves: tuple[str, ...] = ()

    @property
    def shards(self) -> range:
        """The shards that this is about."""
        return range(self.shard, self.shard + max(1, len(self.leaves)))

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hash of each shard's result."""
        return self.leaves or (self.digest,)


@dataclass(frozen=True)
class Lost:
    """An engine's message: no worker will answer this request, because the one that had it is gone."""

    shard: int
    tag: Tag
    worker: str
    reason: str

    @property
    def shards(self) -> range:
        """The shard, as `Reply.shards` tells it."""
        return range(self.shard, self.shard + 1)


BEHIND = "/behind"
"""The name of the only array of a reply from a worker that lacks the local state of the shard: an epoch, from which it
needs the log of broadcasts. -1: with all of the log, the state had another hash than the one that was asked for."""

HASH = "/hash"
"""The name, in a reply, of the hash of the local state that the map left; uint8 of shape (1, 16)."""

MARKS = "/marks"
"""The name, in what is broadcast to maps with local states, of the numbers of `Marks`; int64 of shape (3,)."""

HASHES = "/hashes"
"""The name, in what is broadcast, of the hashes of the local states that the maps begin with; uint8 of shape (n, 16).
The log of an earlier epoch is in ``/<epoch>/<name>``."""


def in_words(error: Exception) -> str:
    """The type and the text of an exception, also of one whose `str()` raises."""
    return "".join(traceback.format_exception_only(error)).rstrip()


def digest_of(shard: int, tag: Tag, result: Mapping[str, Array], leaves: tuple[str, ...] = ()) -> str:
    """A hash of a result and of its question. Two replies to one question have the same hash."""
    kinds = [(name, array.dtype.str, array.shape) for name, array in result.items()]
    small = sum(array.nbytes for array in result.values()) <= _SMALL  # then one hash of a copy is quicker than several
    parts = [
        value_bytes(np.ascontiguousarray(one).reshape(-1)).tobytes() if small else hash_array(one).encode()
        for one in result.values()
    ]
    whole = b"".join([repr((shard, tuple(tag), kinds, leaves)).encode(), *parts])
    return hash_array(np.frombuffer(whole, np.uint8))


_SMALL = 4 << 10  # bytes
