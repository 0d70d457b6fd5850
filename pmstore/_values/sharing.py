"""What values share in memory: with each other, at two places of their own, or with what is beside them. A store keeps
a tree, so that it can't give any of this back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pmstore._values.array import Array, address_of, is_solid, root_of
from pmstore._values.generators import parts_of_generator
from pmstore._values.registry import Parts, registered
from pmstore._values.tensors import array_of_tensor, is_tensor
from pmstore._values.types import small_of
from pmstore._values.values import ATOMS, inside, is_constant

__all__ = ["sharing"]


def sharing(values: Mapping[str, Any], beside: Iterable[Any]) -> set[str]:
    """The names of values that would change with something else, or that a store would give back in memory of another
    kind: in another order, or in arrays of their own where they are parts of a larger one, as the columns of a frame,
    whose sums depend on that. `values.copied` gives what a store would. Raises the errors of `parts_of`.

    beside: arrays and generators that no value is to share.
    """
    memory = _Memory()
    for one in beside:
        memory.add_beside(one)
    found = {name for name, value in values.items() if memory.add(name, value)}
    return found | memory.overlaps()


class _Memory:
    """What was seen, by id. It has to live as long, as what `encode` of a type makes has no other owner."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._arrays: list[tuple[str, Array]] = []  # with the name of the value; what is beside has none
        self._views = False  # of values: without one, no array of theirs overlaps another

    def add_beside(self, one: Any) -> None:
        self._seen[id(one)] = one
        self._note("", one)

    def add(self, name: str, value: Any) -> bool:
        """Whether a value shares something with those before, or within itself, or has gaps."""
        shares, again = False, []
        waiting: list[Any] = [[value]]
        while waiting:
            ones = waiting.pop()
            for one in () if ATOMS.issuperset(map(type, ones)) else ones:
                if type(one) in ATOMS:
                    continue
                if id(one) in self._seen:
                    again.append(one)
                    continue
                self._seen[id(one)] = one
                shares |= self._note(name, one)
                waiting.append(inside(one))
        return shares or _any_changes(again)

    def _note(self, name: str, one: Any) -> bool:
        """Note the memory of an object. Returns whether it is that of another one, or has gaps, or is not its own."""
        if isinstance(one, np.ndarray):
            self._arrays.append((name, one))
            self._views |= bool(name) and one.base is not None
            root = root_of(one)
            return not is_solid(one) or not root.flags.owndata or root.nbytes != one.nbytes
        if isinstance(one, np.void):  # it may be an element of an array
            return one.base is not None
        if isinstance(one, np.random.Generator | np.random.RandomState):
            parts = [part for part in parts_of_generator(one) if part is not None]
            shared = any(id(part) in self._seen for part in parts)
            self._seen.update((id(part), part) for part in parts)
            return shared
        if is_tensor(one):
            self._arrays.append((name, array_of_tensor(one)))
            self._views = True
        return False

    def overlaps(self) -> set[str]:
        """The names of values with arrays that overlap others."""
        found: set[str] = set()
        if not self._views:
            return found
        places = [(address_of(array), array.nbytes, name) for name, array in self._arrays if is_solid(array)]
        end, owner = 0, ""
        for start, nbytes, name in sorted(place for place in places if place[1]):
            if start < end and (name or owner):
                found.add(name or owner)
            if start + nbytes > end:
                end, owner = start + nbytes, name
        return found


def _changes(one: Any) -> bool:
    """Whether an object itself can be changed in place."""
    kind = type(one)
    if (small := small_of(kind)) is not None:
        return small.mutable
    if kind is Parts or (found := registered(kind)) is None:
        return kind is not tuple and not is_constant(one)
    return found.watched


def _any_changes(ones: list[Any]) -> bool:
    """Whether one of the objects, or anything inside of them, can be changed in place."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [ones]
    while waiting:
        for one in waiting.pop():
            if type(one) in ATOMS or id(one) in seen:
                continue
            seen[id(one)] = one
            if _changes(one):
                return True
            waiting.append(inside(one))
    return False
