"""The simulated world: workers, messages, and a clock that jumps from event to event.

It outlives coordinators. A message that was on its way when its coordinator was killed reaches the next one.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pmstore.scale._gather import Gathering
from pmstore.scale._holder import Holder
from pmstore.scale._messages import BEHIND, HASH, Lost, Reply, Tag, digest_of
from pmstore.testing._scale.disks import Machine, SimulatedDisk
from pmstore.testing._scale.schedule import ANSWERED, COMMIT, COORDINATOR, LOCAL, MAP, MESSAGE, REPLY, Schedule

LIMIT = 1e6
"""Seconds of virtual time in which a fit must end, with all that its schedule does."""

TOGETHER = 0.5
"""How often a worker with more to do keeps a reply, so that it may add the next one."""

CALLS = 10_000
"""How often the coordinators of a schedule may wait."""

Question = tuple[int, Any, Any, Tag]  # shard, function, shared, tag


class Stopped(BaseException):
    """Ends a coordinator. No handler of exceptions catches it."""


class Killed(Stopped):
    """The coordinator was killed."""


class WorkerKilled(BaseException):
    """A worker was killed in a commit of its own store."""


class Broken(Stopped):
    """The protocol, or the algorithm, broke a rule."""


class Part(dict[str, Any]):
    """A result, and where it came from.

    Attributes
    ----------
    first, last : int
        The shards that it is of: from the first to before the last.
    tag : Tag
        The question that it answers.
    sound : bool
        Whether it was not damaged on its way.
    """

    first = last = -1
    tag: Tag
    sound = True


class Worker:
    """A worker: a holder, the questions that wait for it, and the replies that it has not sent."""

    def __init__(self, number: int, shards: int, machine: Machine) -> None:
        self.number, self.machine, self.generation = number, machine, -1
        self._shards = shards
        self.waiting: deque[Question] = deque()
        self.stopped_until = 0.0

    def begin(self, memory: int | None, step: Callable[[str], None]) -> None:
        """Begin a new process, which has only the contents of the disk."""
        self.generation += 1
        self.name = f"worker {self.number}" + (f", process {self.generation + 1}" if self.generation else "")
        self.holder = Holder(self.name, memory)
        self.disk = self.holder.disk = SimulatedDisk(self.machine, step)
        self.gathering = Gathering(self._shards)
        self.waiting.clear()
        self.alive, self.busy = True, False


class World:
    """Everything but the coordinator.

    Parameters
    ----------
    schedule : Schedule
    workers : int
    shards : int
    load : callable
        ``load(i)`` and ``load(i, True)`` return what is in a shard, and what is in it after it changed.
    """

    def __init__(self, schedule: Schedule, workers: int, shards: int, load: Callable[..., Any]) -> None:
        self.schedule = schedule
        machines = [Machine() for _ in range(1 if schedule.together else workers)]
        self.workers = [Worker(number, shards, machines[number % len(machines)]) for number in range(workers)]
        for worker in self.workers:
            worker.begin(self._memory, self._in_commit)
        self.inbox: list[Reply | Lost] = []
        self.now = 0.0
        self.points = 0
        self._due = 0  # accidents that have not happened yet
        self.applied: dict[int, str] = {}
        self.tally: Counter[str] = Counter()
        self.log: list[str] = []
        self.coordinator = 0  # its number, from 1
        self.notice: Callable[[Worker, str], None] = lambda worker, reason: None
        self.needed: Callable[[int, Tag], tuple[Tag, bytes] | None] = lambda i, tag: None  # the state that must stay
        self.changed: int | None = None  # the shard with other contents
        self.impure = False  # a reply was altered as a worker would have computed it
        self.may_change = False  # not before the fit has begun
        self.last_attempt = self.this_attempt = 0  # of the coordinator before, and of this one
        self._chance = random.Random(schedule.seed ^ 0x5EED)
        self._load = load
        self._load_fails = False
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = self._waits = 0
        self._answer: Reply | None = None  # an earlier one
        self._held_back: list[Reply] = []  # until another epoch or attempt begins

    @property
    def _memory(self) -> int | None:
        return None if self.schedule.holds else 0

    # ---- accidents

    def accident(self, kinds: Sequence[str], what: Callable[[], str]) -> str | None:
        """The accident that happens at this point, if one does."""
        self.points = number = self.points + 1
        if number in self.schedule.points:
            self._due += 1
        if not self._due:
            return None
        possible = [kind for kind in kinds if kind in self.schedule.kinds]
        if not possible:
            return None  # but at the next point where there is one
        self._due -= 1
        kind = random.Random(self.schedule.seed * 1_000_003 + number).choice(possible)
        self.applied[number] = kind
        self.tally[kind] += 1
        self.tell(f"{what()}: {kind}", number)
        return kind

    def tell(self, text: str, point: int | None = None) -> None:
        """Add a line to the log."""
        self.log.append(f"{self.now:10.3f} s  {'' if point is None else f'point {point}, '}{text}")

    def step(self, what: str) -> None:
        """A point at which the coordinator may be killed."""
        if self.accident(COORDINATOR, lambda: f"coordinator {self.coordinator}, {what}"):
            raise Killed(what)

    # ---- time

    def at(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, call, arguments))

    def wait(self, timeout: float | None) -> None:
        """Let the time pass until a message arrives."""
        self._waits += 1
        if self._waits > CALLS:
            raise Broken(f"the fit hangs: its coordinators waited {CALLS:,} times")
        until = LIMIT if timeout is None else self.now + max(timeout, 1e-6)  # so that rounding stops no clock
        while not self.inbox:
            if not self._events and timeout is None:
                raise Broken("the fit hangs: nothing is on its way, and the coordinator waits without a limit")
            if not self._events or self._events[0][0] > until:
                self.now = until
                break
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        if self.now >= LIMIT:
            raise Broken(f"the fit hangs: it did not end in {LIMIT:.0e} s of virtual time")

    def pass_by(self, seconds: float) -> None:
        """Let the time pass without a coordinator."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        self.now = until

    def between(self, least: float, most: float) -> float:
        return least + (most - least) * self._chance.random()

    # ---- messages

    def send(self, worker: Worker, question: Question) -> None:
        """A question to a worker."""
        delay = self.between(0.001, 0.003)
        kind = self.accident(MESSAGE, lambda: f"question to {worker.name} about {_named(question)}")
        if kind == "delayed":
            delay += 10 ** self.between(-1, 1.5)
        elif kind == "repeated":
            self.at(delay + self.between(0, 5), self._arrive, worker, worker.generation, question)
        if kind != "dropped":
            self.at(delay, self._arrive, worker, worker.generation, question)

    def _deliver(self, message: Reply | Lost) -> None:
        self.inbox.append(message)

    def _reply(self, worker: Worker, reply: Reply) -> None:
        delay = self.between(0.001, 0.003)
        kind = self.accident(REPLY, lambda: f"reply of {worker.name} about {_told(reply)}")
        if kind == "dropped":
            return
        if kind == "delayed":
            delay += 10 ** self.between(-1, 1.5)
        elif kind == "repeated":
            self.at(delay + self.between(0, 5), self._deliver, _sent(reply, True))
        elif kind == "held back":
            self._held_back.append(_sent(reply, True))
            return
        elif kind is not None:
            sent = self._damaged(reply, kind)
            self.at(delay, self._deliver, sent)
            return
        self._answer = reply
        self.at(delay, self._deliver, _sent(reply, True))

    def asked_for(self, tag: Tag) -> None:
        """The coordinator asks the first question of an epoch: held-back replies arrive before its answers."""
        held, self._held_back = self._held_back, []
        for reply in held:
            if reply.tag == tag or tag.epoch < 0:
                self._held_back.append(reply)
            else:
                self.at(self.between(0.01, 0.1), self._deliver, reply)

    def _damaged(self, reply: Reply, kind: str) -> Reply:
        result = reply.result
        if kind == "a number of no shard":
            return _sent(dataclasses.replace(reply, shard=self._chance.choice((-1, 1 << 20))), False)
        if result is None:
            return _sent(reply, True)
        if kind == "altered hash":
            if not reply.leaves or self._chance.random() < 0.5:
                return _sent(dataclasses.replace(reply, digest=reply.digest[::-1]), False)
            return _sent(dataclasses.replace(reply, leaves=reply.leaves[::-1]), len(set(reply.leaves)) == 1)
        if kind == "another shard's":
            other = self._answer
            if other is None or other.shard == reply.shard:
                return _sent(reply, True)
            return _sent(dataclasses.replace(other, shard=reply.shard, tag=reply.tag), False)
        if kind == "cut":
            if not result:
                return _sent(reply, True)
            names = list(result)[:-1]
            return _sent(dataclasses.replace(reply, result={name: result[name] for name in names}), False)
        other_result = altered(result)
        if HASH in result and kind == "impure" and self._chance.random() < 0.5:
            other_result = {**result, HASH: altered(result[HASH])}
        if other_result is result:
            return _sent(reply, True)  # it has no bytes
        if kind == "altered" or reply.tag.epoch < 0 or BEHIND in result:  # these are no matter of a map
            return _sent(dataclasses.replace(reply, result=other_result), False)
        self.impure = True
        if self._chance.random() < 0.7:  # another worker computes the right result
            self.at(self.between(0, 0.5), self._deliver, _sent(reply, True))
        leaves = reply.leaves
        if leaves:
            which = self._chance.randrange(len(leaves))
            leaves = (*leaves[:which], leaves[which][::-1], *leaves[which + 1 :])
        digest = digest_of(reply.shard, reply.tag, other_result, leaves)
        return _sent(dataclasses.replace(reply, result=other_result, digest=digest, leaves=leaves), True)

    # ---- workers

    def _arrive(self, worker: Worker, generation: int, question: Question) -> None:
        if worker.alive and worker.generation == generation:
            worker.waiting.append(question)
            self._next(worker)

    def _next(self, worker: Worker) -> None:
        if not worker.alive or worker.busy or not worker.waiting:
            return
        worker.busy = True
        question = worker.waiting.popleft()
        seconds = self.between(0.09, 0.11)
        kind = self.accident(MAP + LOCAL, lambda: f"{worker.name} begins {_named(question)}")
        if kind == "killed":
            self.kill(worker)
            return
        if kind == "machine lost":
            for one in self.workers:
                if one.machine is worker.machine and one.alive:
                    self.kill(one)
            worker.machine.lose()
            return
        if kind == "bits rot":
            worker.machine.rot(self._chance)
        if kind == "stopped":
            worker.stopped_until = self.now + self.between(0.5, 100)
        elif kind == "slow":
            seconds *= self.between(5, 100)
        elif kind == "given up":  # the engine believes that the worker is gone
            self.notice(worker, "its connection was closed")
        elif kind == "changed" and self.may_change and self.changed is None:
            self.changed = question[0]
        self.at(seconds, self._end, worker, worker.generation, question, kind == "not loaded")

    def _end(self, worker: Worker, generation: int, question: Question, fails: bool) -> None:
        if not worker.alive or worker.generation != generation:
            return
        if self.now < worker.stopped_until:
            self.at(worker.stopped_until - self.now + 0.001, self._end, worker, generation, question, fails)
            return
        i, function, shared, tag = question
        self._load_fails = fails
        needed = self.needed(i, tag)
        kept = needed is not None and worker.machine.has(i, *needed)
        try:
            reply = worker.holder.answer(i, _Loader(self, i), function, shared, tag)  # type: ignore[arg-type]
        except WorkerKilled:
            self.kill(worker)
            return
        finally:
            self._load_fails = False
            if kept and needed is not None and not worker.machine.has(i, *needed):
                raise Broken(
                    f"{worker.name} has overwritten the local state before epoch {needed[0].epoch}, which is open"
                )
        kind = self.accident(ANSWERED, lambda: f"{worker.name} has computed {_named(question)}")
        if kind == "killed":
            self.kill(worker)
            return
        worker.gathering.put(reply, function, shared)
        together = bool(worker.waiting) and worker.waiting[0][3] == tag and self._chance.random() < TOGETHER
        if not together:
            for gathered in worker.gathering.take():
                self._reply(worker, gathered)
        if kind == "stopped":
            worker.stopped_until = self.now + self.between(0.5, 100)
        worker.busy = False
        self._next(worker)

    def _in_commit(self, what: str) -> None:
        """A point at which a worker may be killed."""
        if self.accident(COMMIT, lambda: f"a worker, {what}"):
            raise WorkerKilled

    def load(self, i: int) -> Any:
        """The shard that a worker loads."""
        if self._load_fails:
            self._load_fails = False
            raise OSError("simulated: the file server does not answer")
        return self._load(i, self.changed == i)

    def kill(self, worker: Worker) -> None:
        """A worker ends. Another process takes its place after a while; the engine may or may not notice that."""
        worker.alive = False
        worker.waiting.clear()
        worker.disk.crash()
        if self._chance.random() < 0.7:
            self.at(self.between(0, 0.5), self._notice_death, worker, worker.generation)
        self.at(self.between(0.5, 10), self._replace, worker)

    def _notice_death(self, worker: Worker, generation: int) -> None:
        if worker.generation == generation:
            self.notice(worker, "the process ended with signal 9")

    def _replace(self, worker: Worker) -> None:
        worker.begin(self._memory, self._in_commit)
        self.tell(f"{worker.name} begins")


class _Loader:
    """Stands for a shard."""

    __slots__ = ("_i", "_world")

    def __init__(self, world: World, i: int) -> None:
        self._world, self._i = world, i

    def __call__(self) -> Any:
        return self._world.load(self._i)

    def __repr__(self) -> str:
        return f"Shard({self._i})"


def _sent(reply: Reply, sound: bool) -> Reply:
    """A reply as it arrives: with arrays of its own."""
    if reply.result is None:
        return reply
    part = Part({name: array.copy() for name, array in reply.result.items()})
    part.first, part.last, part.tag, part.sound = reply.shard, reply.shards.stop, reply.tag, sound
    return dataclasses.replace(reply, result=part)


def altered(data: Any) -> Any:
    """Other data of the same kind: one bit of the first array that has any is another one, in the middle of an element,
    so that no rounding hides it."""
    if isinstance(data, np.ndarray) and data.nbytes:
        other = np.array(data, order="C")
        other.reshape(-1).view(np.uint8)[data.itemsize // 2] ^= 1
        return other
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if _is_list(data) else []
    for key, value in items:
        other_value = altered(value)
        if other_value is not value:
            if isinstance(data, dict):
                return {**data, key: other_value}
            return type(data)([*data[:key], other_value, *data[key + 1 :]])
    return data


def _is_list(data: Any) -> bool:
    return type(data) in (list, tuple)


def _named(question: Question) -> str:
    return f"shard {question[0]}, {_when(question[3])}"


def _told(reply: Reply) -> str:
    if len(reply.shards) == 1:
        return f"shard {reply.shard}, {_when(reply.tag)}"
    return f"shards {reply.shard} to {reply.shards.stop - 1}, {_when(reply.tag)}"


def _when(tag: Tag) -> str:
    return f"{f'epoch {tag.epoch}' if tag.epoch >= 0 else 'its contents'}, attempt {tag.attempt}"
