"""The protocol: how a coordinator gets one reply for every shard out of workers that die, hang and lag.

A question is open until the first valid reply to it arrives. The coordinator asks again, elsewhere if there is another
worker, when the engine says that it lost the question, when a reply was damaged, and when the reply is late::

              submit                       valid reply
    asked ─────────────▶ open ─────────────────────────────────▶ counted ──┐ a second valid reply
                          │ ▲                                       ▲      │ with the same hash
                          └─┘ lost, damaged or late: submit again   └──────┘

A worker that lacks the local state of the shard tells so, and from which epoch on it needs the log of broadcasts; the
question is then asked again with that log.

A reply is valid if its tag is that of the epoch, its shard is one of the epoch's, and its hash is that of its contents.
A second valid reply with another hash ends the fit: the map is not a function of its arguments. Replies of earlier
attempts and epochs are ignored, but those of the last epoch are still compared.

Nothing here is durable, and nothing needs to be: a coordinator that dies asks again what its last commit did not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pmstore._errors import NondeterminismError, ShardError, ShardTimeoutError, WorkersLostError
from pmstore.scale._engine import Engine
from pmstore.scale._gather import _kinds, _layouts
from pmstore.scale._holder import Function
from pmstore.scale._messages import BEHIND, Array, Lost, Reply, Result, Tag, digest_of
from pmstore.scale._shards import Shard
from pmstore.scale._travel import aligned
from pmstore.scale._tree import Tree

LATE = 1.35
"""A reply is late when it takes so many times the median of the shard's earlier ones. Each further wait is twice as
long."""

SLACK = 0.1  # seconds that no reply is late by
UNKNOWN = 3.0  # the factor for the first epochs: of the slowest reply so far, when half of the replies are there
FIRST = 60.0  # seconds after which a reply is late while there is none: without it, silent workers are waited for
MEMORY = 5  # epochs whose times a median is taken over
LOSSES = 5  # times that a shard may be lost or damaged in one epoch
LOADS = 2  # times that a loader may fail before that counts as its answer


class _Question:
    """The question of an epoch about one shard."""

    __slots__ = ("digest", "late_after", "loads", "log_from", "losses", "shared")

    def __init__(self, late_after: float, shared: Mapping[str, Array], epoch: int) -> None:
        self.late_after = late_after  # seconds after the epoch began
        self.losses = self.loads = 0  # the second: loaders that failed
        self.digest = ""  # of the reply that counted
        self.shared = shared
        self.log_from = epoch  # the first epoch of the log that is a part of what is shared


class Epochs:
    """Asks the workers of an engine, epoch after epoch.

    Parameters
    ----------
    engine : Engine
        Started.
    shards : sequence of Shard
    timeout : float, optional
        Seconds that a shard may take in an epoch, with waiting for a free worker, but not for the first worker to
        begin. None: no limit.
    clock : callable, default=time.monotonic

    Attributes
    ----------
    environment : str
        The versions, BLAS and threads of all workers, as JSON.
    late, lost : int
        How often the last epoch asked again because a reply was late, and because a worker or a reply was lost.
    """

    def __init__(
        self,
        engine: Engine,
        shards: Sequence[Shard],
        timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._shards, self._clock = engine, shards, clock
        self._timeout = math.inf if timeout is None else timeout
        self._usual: list[deque[float]] = [deque(maxlen=MEMORY) for _ in shards]  # seconds, in the last epochs
        self._earlier: tuple[Tag | None, list[_Question]] = None, []  # the epoch before
        self.environment = ""
        self._first = ""  # the name of the worker that told it
        self.late = self.lost = 0

    def run(
        self,
        function: Function,
        shared: Mapping[str, Array],
        tag: Tag,
        combine: Callable[[Result, Result], Result],
        with_log: Callable[[int], Mapping[str, Array] | None] | None = None,
    ) -> Result:
        """The combination of the replies of all shards.

        Parameters
        ----------
        function, shared, tag
            The question.
        combine : callable
            Of two results, the lower shards' on the left.
        with_log : callable, optional
            ``with_log(k)`` returns `shared` with the log of broadcasts from epoch k on, for workers that lack the local
            state of a shard; None if the log does not go back so far.

        Raises
        ------
        MapReduceError
            A shard can't be computed; the message names it, and the worker.
        ValueError
            Results that are to be added have other names, shapes or dtypes; the message names two shards.
        """
        self._function, self._tag, self._with_log = function, tag, with_log
        self._logs: dict[int, Mapping[str, Array]] = {}  # what is shared, with the log from an epoch on
        self._tree = Tree(len(self._shards), combine)
        self._missing = len(self._shards)
        self._adds = function.adds(shared)
        self._one: Reply | None = None  # whose result all others are like, if they are added
        self._slowest, self._early = 0.0, math.inf
        self.late = self.lost = 0
        self._began = self._counted = self._clock()  # the second: since when `timeout` counts
        self._questions = [_Question(self._usually_late(i), shared, tag.epoch) for i in range(self._missing)]
        self._next_late = min(question.late_after for question in self._questions)
        for i in range(self._missing):
            self._ask(i)
        while self._missing:
            has_begun = self._engine.has_begun()
            timeout = self._counted + self._timeout if has_begun else math.inf
            until = min(self._began + self._next_late, timeout) - self._clock()
            for message in self._engine.completed(max(0.0, until) if until < math.inf else None):
                self._take(message)
            if not has_begun:
                self._counted = self._clock()
            if self._missing:
                self._ask_late_ones(self._clock() - self._began)
        self._earlier = tag, self._questions
        self._engine.cancel(tag)
        return self._tree.root()

    def _ask(self, i: int) -> None:
        self._engine.submit(i, self._function, self._questions[i].shared, self._tag)

    # ---- messages

    def _take(self, message: Reply | Lost) -> None:
        shards = message.shards
        if shards.start < 0 or shards.stop > len(self._shards):
            return  # damaged; what it answered will be late
        if message.tag == self._tag:
            questions = self._questions
        elif message.tag == self._earlier[0]:
            questions = self._earlier[1]
        else:
            return
        missing = [i for i in shards if not questions[i].digest]
        if isinstance(message, Lost):
            for i in missing:
                self._lose(i, message.worker, message.reason)
        elif self._is_valid(message):
            assert message.result is not None
            if BEHIND in message.result:
                if missing:
                    self._check_environment(message)
                    self._send_log(message, int(message.result[BEHIND]))
                return
            for i, digest in zip(shards, message.hashes, strict=True):
                if questions[i].digest and questions[i].digest != digest:
                    raise self._differs(message, i)
            if missing:
                self._count(message, missing)
        elif missing:
            self._check_environment(message)
            self._take_failure(message, missing)

    def _is_valid(self, reply: Reply) -> bool:
        return (
            reply.result is not None
            and reply.digest == digest_of(reply.shard, reply.tag, reply.result, reply.leaves)
            and self._tree.is_node(reply.shard, len(reply.shards))
        )

    def _take_failure(self, reply: Reply, missing: Sequence[int]) -> None:
        """A reply without a result, or with one that was damaged."""
        if reply.failure is None:
            for i in missing:
                self._lose(i, reply.worker, "its reply was damaged on the way")
            return
        question = self._questions[reply.shard]
        if reply.failure.kind != "load" or question.loads >= LOADS:
            raise self._failed(reply)
        question.loads += 1
        self._lose(reply.shard, reply.worker, reply.failure.text)  # another worker may reach what this one doesn't

    def _send_log(self, reply: Reply, begin: int) -> None:
        """Ask again with the log from an epoch on, or from an earlier one if another worker needs that."""
        if begin < 0 or self._with_log is None:
            raise NondeterminismError(
                f"the local state of {self._name(reply.shard)} before epoch {self._tag.epoch} was computed again on "
                f"{reply.worker}, from its start, and has other bits: map() and local_start() must be functions of "
                "their arguments alone, and give the same bits on each worker.",
                reply.shard,
                reply.worker,
            )
        question = self._questions[reply.shard]
        begin = min(begin, question.log_from)
        if begin not in self._logs:
            shared = self._with_log(begin)
            if shared is None:
                raise ShardError(
                    f"the local state of {self._name(reply.shard)} before epoch {self._tag.epoch} is lost: it is not "
                    f"on {reply.worker}, the log of broadcasts does not go back to epoch {begin}, and the archive "
                    "has no sound copy that is as new as the log",
                    reply.shard,
                    reply.worker,
                )
            self._logs[begin] = shared
        question.log_from, question.shared = begin, self._logs[begin]
        epochs = self._tag.epoch - begin + 1 if self._usual[reply.shard] else 1
        question.late_after = self._clock() - self._began + epochs * self._usually_late(reply.shard)
        self._next_late = min(self._next_late, question.late_after)
        self._ask(reply.shard)

    def _count(self, reply: Reply, missing: Sequence[int]) -> None:
        """A valid reply, which has the first result of some shards."""
        assert reply.result is not None
        self._check_environment(reply)
        self._check_layout(reply)
        waited = self._clock() - self._began
        self._slowest = max(self._slowest, waited)
        for i in missing:
            self._questions[i].digest = reply.hashes[i - reply.shard]
            if self._tag.epoch >= 0:
                self._usual[i].append(waited)
        before, self._missing = self._missing, self._missing - len(missing)
        reply.result.update({name: aligned(array) for name, array in reply.result.items()})
        self._tree.put(reply.shard, reply.result, len(reply.shards))
        if self._missing > len(self._shards) // 2:  # as if all workers together gave replies at this rate
            self._early = UNKNOWN * self._slowest * len(self._shards) / (len(self._shards) - self._missing) + 1
            self._next_late = min(self._next_late, self._early)
        elif self._missing <= len(self._shards) // 2 < before:  # what is late at first follows from the first half
            for other in self._questions:
                other.late_after = min(other.late_after, UNKNOWN * self._slowest + 1)
            self._next_late = min(self._next_late, UNKNOWN * self._slowest + 1)

    def _lose(self, i: int, worker: str, reason: str) -> None:
        """Ask a lost question again. Raises ShardError after LOSSES times."""
        question = self._questions[i]
        question.losses += 1
        self.lost += 1
        if question.losses >= LOSSES:
            raise ShardError(f"{self._name(i)} was lost {LOSSES} times, the last time on {worker}: {reason}", i, worker)
        self._ask(i)

    # ---- time

    def _usually_late(self, i: int) -> float:
        """The seconds after which the reply for a shard is late."""
        usual = self._usual[i]
        if len(usual) < 2:
            return UNKNOWN * usual[0] + 1 if usual else FIRST
        median = statistics.median(usual)
        return max(LATE * median, median + SLACK)

    def _late_after(self, question: _Question) -> float:
        """The seconds after which a reply is late, as the first replies of the epoch tell if nothing else does."""
        return min(FIRST, self._early) if question.late_after == FIRST else question.late_after

    def _ask_late_ones(self, waited: float) -> None:
        """Ask again for replies that are late. Raises ShardTimeoutError for one that took too long."""
        counted = self._clock() - self._counted
        if counted >= self._timeout:
            i = next(i for i, question in enumerate(self._questions) if not question.digest)
            raise ShardTimeoutError(
                f"{self._name(i)} has no result after {counted:.3g} s in epoch {self._tag.epoch}, and timeout is "
                f"{self._timeout:g} s: its map does not end, or a loader waits for something",
                i,
            )
        if waited < self._next_late:
            return
        for i, question in enumerate(self._questions):
            if not question.digest and waited >= (late_after := self._late_after(question)):
                question.late_after = 2 * late_after
                self.late += 1
                self._ask(i)
        open_ones = (self._late_after(question) for question in self._questions if not question.digest)
        self._next_late = min(open_ones, default=math.inf)

    # ---- what ends a fit

    def _check_environment(self, reply: Reply) -> None:
        if not self.environment:
            self.environment, self._first = reply.environment, reply.worker
        elif reply.environment != self.environment:
            raise WorkersLostError(
                f"{reply.worker} computes with {reply.environment}, and {self._first} with {self.environment}, so that "
                "results would depend on which of them gets a shard: give all workers the same environment",
                reply.shard,
                reply.worker,
            )

    def _check_layout(self, reply: Reply) -> None:
        one = self._one = self._one or reply
        assert reply.result is not None and one.result is not None
        if self._adds and _layouts(reply.result) != _layouts(one.result):
            raise ValueError(
                f"map() returned {_kinds(reply.result)} for {self._name(reply.shard)} on {reply.worker}, and "
                f"{_kinds(one.result)} for {self._name(one.shard)} on {one.worker}"
            )

    def _differs(self, reply: Reply, i: int) -> NondeterminismError:
        return NondeterminismError(
            f"{self._name(i)} gave two results in epoch {reply.tag.epoch}, the second one on {reply.worker}: "
            "map() must be a function of its arguments alone. Draw random numbers from its argument rng; don't read "
            "the clock, global state, or sets, whose order differs between processes.",
            i,
            reply.worker,
        )

    def _failed(self, reply: Reply) -> ShardError:
        assert reply.failure is not None
        what = {
            "load": "can't be loaded",
            "changed": "is not what it was when the fit began",
            "prepare": "can't be prepared",
            "map": f"has no result in epoch {reply.tag.epoch}",
        }[reply.failure.kind]
        return ShardError(
            f"{self._name(reply.shard)} {what}, on {reply.worker}: {reply.failure.text}", reply.shard, reply.worker
        )

    def _name(self, i: int) -> str:
        return f"shard {i} of {len(self._shards)}, {self._shards[i]},"
