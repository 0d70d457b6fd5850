"""The engine of a simulated world, and the eyes on one coordinator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pmstore.scale._engine import Engine
from pmstore.scale._messages import BEHIND, Array, Lost, Reply, Result, Tag
from pmstore.testing._scale.memory import MemoryStore
from pmstore.testing._scale.world import Broken, Part, Question, Worker, World


class SimulatedEngine(Engine):
    """Carries the questions of one coordinator to the workers of the world.

    It gives a question that is asked again to a worker that was not asked yet, if there is one, and tells of the death
    of a worker if the world lets it notice that. Beside that it watches the coordinator: attempts, and replies that
    differ.
    """

    def __init__(self, world: World, store: MemoryStore, once: Callable[[Any], Any]) -> None:
        self.clock = self._clock
        self._world, self._store, self._once = world, store, once
        self._asked: dict[tuple[int, Tag], list[Worker]] = {}
        self._tags: list[Tag] = []  # of the questions, in their order
        self._seen: dict[tuple[int, Tag], str] = {}  # the hashes of valid replies that the coordinator has
        self._differ = ""
        self._to_ask: set[tuple[int, Tag]] = set()  # what was lost or damaged
        self.failures: dict[tuple[int, Tag], list[str]] = {}  # what the coordinator was told of a question
        world.notice = self._notice

    def _clock(self) -> float:
        return self._world.now

    def start(self, shards: Sequence[Any]) -> None:
        self._count = len(shards)
        self._world.step("before its first question")

    def submit(self, i: int, function: Any, shared: Mapping[str, Array], tag: Tag) -> None:
        world = self._world
        if not self._tags or tag != self._tags[-1]:
            self._begin(tag)
        world.step("before a question")
        if not 0 <= i < self._count:
            raise Broken(f"the coordinator asks for shard {i} of {self._count}")
        self._to_ask.discard((i, tag))
        asked = self._asked.setdefault((i, tag), [])
        worker = world.workers[i * len(world.workers) // self._count]
        if worker in asked:
            others = [one for one in world.workers if one not in asked]
            worker = others[0] if others else world.workers[len(asked) % len(world.workers)]
        asked.append(worker)
        question: Question = (i, self._once(function), shared, tag)
        world.send(worker, question)

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        world = self._world
        if self._differ:
            raise Broken(f"two results for one question were not noticed: {self._differ}")
        for i, tag in self._to_ask:
            if tag == self._tags[-1] and (i, tag) not in self._seen:
                raise Broken(f"the coordinator does not ask again for shard {i}, which was lost in epoch {tag.epoch}")
        self._to_ask.clear()
        world.step("before it waits")
        world.wait(timeout)
        world.step("with messages")
        messages, world.inbox = world.inbox, []
        for message in messages:
            self._watch(message)
        return messages

    def cancel(self, tag: Tag) -> None:
        for worker in self._world.workers:
            worker.waiting = deque(question for question in worker.waiting if question[3] != tag)

    def close(self) -> None:
        self._world.notice = lambda worker, reason: None

    def _notice(self, worker: Worker, reason: str) -> None:
        """Tell the coordinator which questions a worker will not answer."""
        for (i, tag), asked in self._asked.items():
            if worker in asked and (i, tag) not in self._seen:
                self._world.inbox.append(Lost(i, tag, worker.name, reason))

    def _begin(self, tag: Tag) -> None:
        """The coordinator asks for another epoch."""
        self._tags.append(tag)
        self._world.asked_for(tag)
        if tag.epoch < 0:
            return
        committed = self._store.attempt
        if tag.attempt != committed:
            raise Broken(f"the coordinator asks as attempt {tag.attempt}, and committed attempt {committed}")
        if tag.attempt <= self._world.last_attempt:
            raise Broken(f"attempt {tag.attempt} is that of an earlier coordinator, too")
        self._world.this_attempt = tag.attempt

    def _watch(self, message: Reply | Lost) -> None:
        """Note a message to the coordinator."""
        shards = message.shards
        if shards.start < 0 or shards.stop > self._count:
            return  # damaged, and it does not tell what it answers
        questions = [(i, message.tag) for i in shards]
        if isinstance(message, Lost):
            self._fail(questions, "lost")
            self._to_ask.update(questions)
            return
        if message.failure is not None:
            self._fail(questions, message.failure.kind)
        if message.result is None or (message.result.sound and BEHIND in message.result):  # type: ignore[attr-defined]
            return
        if not message.result.sound:  # type: ignore[attr-defined]
            self._fail(questions, "damaged")
            self._to_ask.update(questions)
            return
        for question, digest in zip(questions, message.hashes, strict=True):
            if self._seen.setdefault(question, digest) != digest and message.tag in self._tags[-2:]:
                self._differ = f"shard {question[0]}, epoch {message.tag.epoch}"

    def _fail(self, questions: Sequence[tuple[int, Tag]], kind: str) -> None:
        for question in questions:
            self.failures.setdefault(question, []).append(kind)


class Watched:
    """Stands for the object with which a MapReduce asks, and checks the origin of the results that are combined."""

    def __init__(self, asking: Any, count: int, again: Counter[str]) -> None:
        self.epochs, self.run = asking.epochs, asking.run
        self._asking, self._count, self._again = asking, count, again

    def epoch(self, shared: Mapping[str, Any], attempt: int, epoch: int, combine: Any) -> Result:
        """The combined replies of one epoch."""

        def checked(left: Any, right: Any) -> Result:
            for part in (left, right):
                self._require_valid(part, attempt, epoch)
            if left.last != right.first:
                raise Broken(
                    f"shards {left.first} to {left.last - 1} are combined with {right.first} to {right.last - 1}"
                )
            total = Part(combine(left, right))
            total.first, total.last, total.tag = left.first, right.last, left.tag
            return total

        try:
            total: Any = self._asking.epoch(shared, attempt, epoch, checked)
        finally:
            self._again["late"] += self.epochs.late
            self._again["lost"] += self.epochs.lost
        self._require_valid(total, attempt, epoch)
        if (total.first, total.last) != (0, self._count):
            raise Broken(f"the total is of the shards {total.first} to {total.last - 1} of {self._count}")
        return dict(total)

    @staticmethod
    def _require_valid(part: Any, attempt: int, epoch: int) -> None:
        if not part.sound:
            raise Broken(f"a damaged reply of shard {part.first} counts in epoch {epoch}")
        if (part.tag.attempt, part.tag.epoch) != (attempt, epoch):
            raise Broken(
                f"a reply of shard {part.first} in attempt {part.tag.attempt}, epoch {part.tag.epoch} counts in "
                f"attempt {attempt}, epoch {epoch}"
            )
