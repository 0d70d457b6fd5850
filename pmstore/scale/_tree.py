"""The reduction: a binary tree over the numbers of the shards.

Neighbours are combined, the lower number on the left, then neighbours among the results, and so on; the last of an odd
number goes up alone. The order in which results arrive changes nothing::

    0   1   2   3   4
     ╲ ╱     ╲ ╱    │
     0,1     2,3    4
        ╲   ╱       │
         0–3        4
            ╲      ╱
              0–4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Tree(Generic[T]):
    """Combines the results of `leaves` shards. A result waits only until its neighbour is there."""

    def __init__(self, leaves: int, combine: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._combine = combine
        self._waiting: dict[tuple[int, int], T] = {}
        self._root: list[T] = []

    def put(self, first: int, value: T, count: int = 1) -> None:
        """Add the result of a leaf, or of a node: of `count` leaves from `first` on, which it has combined.

        Each leaf comes once, but a node may come after some of its leaves, not all: it takes their place, as they wait
        for neighbours that come no more.
        """
        level = (count - 1).bit_length()
        place, width = first >> level, -(-self._leaves >> level)
        while width > 1:
            neighbour = place ^ 1
            if neighbour < width:
                if (level, neighbour) not in self._waiting:
                    self._waiting[level, place] = value
                    return
                other = self._waiting.pop((level, neighbour))
                value = self._combine(value, other) if place < neighbour else self._combine(other, value)
            level, place, width = level + 1, place // 2, (width + 1) // 2
        self._root.append(value)

    def is_node(self, first: int, count: int) -> bool:
        """Whether a node of the tree has these leaves."""
        whole = 1 << (count - 1).bit_length()
        return first % whole == 0 and count == min(whole, self._leaves - first)

    def nodes(self) -> list[T]:
        """The leaves that were added so far, combined as far as their neighbours are there."""
        return [*self._root, *self._waiting.values()]

    def root(self) -> T:
        """The combination of all leaves, which are all there."""
        (value,) = self._root
        return value
