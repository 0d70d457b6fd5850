"""Which worker gets a question: the one that holds the shard, until it is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pmstore.scale._messages import Tag

Question = tuple[int, Tag]
"""A shard, and the epoch that asks for it."""

T = TypeVar("T")


class Routes(Generic[T]):
    """Chooses among places for workers.

    Each place is the home of some neighbouring shards, so that a worker loads a shard once. A place that has not
    answered when another one is asked in its stead is late, and gets nothing until it answers.

    Parameters
    ----------
    places : sequence
        Where workers are.
    shards : int
        The number of shards.
    load : callable
        Returns the number of questions that a place has.
    """

    def __init__(self, places: Sequence[T], shards: int, load: Callable[[T], int]) -> None:
        self._places, self._shards, self._load = places, shards, load
        self._asked: dict[Question, list[T]] = {}
        self._late: list[T] = []

    def choose(self, question: Question) -> tuple[T, int]:
        """A place, and how often it has been asked this question. It is 0 if there is any other place than those that
        were asked before."""
        asked = self._asked.setdefault(question, [])
        home = self._places[question[0] * len(self._places) // self._shards]
        place = home
        if asked or home in self._late:
            others = [one for one in self._places if one not in asked and one not in self._late]
            place = min(others, key=self._load, default=home)
        times = asked.count(place)
        if not times:
            self._late += [one for one in asked if one not in self._late]
        asked.append(place)
        return place, times

    def answered(self, question: Question) -> list[T]:
        """The places that were asked a question, which is closed."""
        return self._asked.pop(question, [])

    def on_time(self, place: T) -> None:
        """The place has answered something, or is a new one."""
        if place in self._late:
            self._late.remove(place)

    def late(self, place: T) -> None:
        """The place gets nothing until it is on time."""
        if place not in self._late:
            self._late.append(place)

    def drop(self, tag: Tag) -> None:
        """Forget the questions of an epoch."""
        self._asked = {question: places for question, places in self._asked.items() if question[1] != tag}
