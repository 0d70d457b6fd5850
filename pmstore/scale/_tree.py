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

    def put(self, leaf: int, value: T) -> None:
        """Add the result of a leaf, once for each of them."""
        level, place, width = 0, leaf, self._leaves
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

    def root(self) -> T:
        """The combination of all leaves, which are all there."""
        (value,) = self._root
        return value
