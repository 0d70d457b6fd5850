"""An engine on a Ray cluster: an actor with a holder of shards for each of its processors.

    pip install ray; python examples/engine_ray.py STORE

Actors that die are made again by Ray, without shards; the engine sends them with each question.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from logistic_regression import LogisticRegression, data

from pmstore.scale import Engine, Holder, Lost, Reply, Shard, Tag


@ray.remote(max_restarts=-1)
class Actor:
    """Holds shards on a worker of the cluster."""

    def __init__(self, number: int) -> None:
        self.holder = Holder(f"actor {number}")

    def answer(self, *question: Any) -> Reply:
        return self.holder.answer(*question)


class Ray(Engine):
    """Actors of the cluster that this process is connected to."""

    def __init__(self, actors: int) -> None:
        self.actors = [Actor.remote(number) for number in range(actors)]

    def start(self, shards: Sequence[Shard]) -> None:
        self.shards = [ray.put(shard) for shard in shards]
        self.open: dict[Any, tuple[int, Tag, int]] = {}
        self.sent: dict[int, Any] = {}
        self.times: dict[tuple[int, Tag], int] = {}

    def put(self, given: Any) -> Any:
        """An object of the cluster, which is sent once."""
        if id(given) not in self.sent:
            self.sent[id(given)] = ray.put(given), given
        return self.sent[id(given)][0]

    def submit(self, i: int, function: Any, shared: Mapping[str, Any], tag: Tag) -> None:
        again = self.times.get((i, tag), 0)  # another actor than before
        self.times[i, tag] = again + 1
        actor = (i * len(self.actors) // len(self.shards) + again) % len(self.actors)
        reply = self.actors[actor].answer.remote(i, self.shards[i], self.put(function), self.put(shared), tag)
        self.open[reply] = i, tag, actor

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        done, _ = ray.wait(list(self.open), timeout=timeout) if self.open else ([], [])
        return [self.received(one) for one in done]

    def received(self, reply: Any) -> Reply | Lost:
        i, tag, actor = self.open.pop(reply)
        try:
            answer: Reply = ray.get(reply)
            return answer
        except ray.exceptions.RayError as error:
            return Lost(i, tag, f"actor {actor}", str(error))

    def cancel(self, tag: Tag) -> None:
        self.times = {key: times for key, times in self.times.items() if key[1] != tag}
        self.sent = {key: sent for key, sent in self.sent.items() if not isinstance(sent[1], dict)}

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    algorithm = LogisticRegression(np.column_stack(data()))
    state = algorithm.run(store=sys.argv[1], name="cancer", engine=Ray(2))
    print(f"{state.epoch} epochs in {state.attempt} attempts, loss {state.loss!r}")
