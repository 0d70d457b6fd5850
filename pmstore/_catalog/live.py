"""The live arrays of a store: those that the program has."""

from __future__ import annotations

import weakref

from pmstore._interrupts import later
from pmstore._values.array import Array

__all__ = ["LiveArrays"]


class LiveArrays:
    """Arrays by number, as long as the program has them.

    A WeakValueDictionary runs Python code when an array goes. An interrupt that comes in it is lost, since CPython
    ignores what such code raises. Here, arrays that are gone are dropped when others come.
    """

    __slots__ = ("_found", "_room")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._found: dict[int, weakref.ref[Array]] = {}
        self._room = 64

    def __setitem__(self, number: int, array: Array) -> None:
        self._found[number] = weakref.ref(array)
        if len(self._found) > self._room:
            with later():  # a handler may read arrays; what is called as an array goes may do so, too
                for known, one in list(self._found.items()):
                    if one() is None and self._found.get(known) is one:
                        del self._found[known]
                self._room = 64 + 2 * len(self._found)

    def get(self, number: int) -> Array | None:
        found = self._found.get(number)
        return None if found is None else found()

    def pop(self, number: int) -> Array | None:
        """The array of a number, which then has none."""
        found = self._found.pop(number, None)
        return None if found is None else found()

    def all(self) -> list[Array]:
        return [array for one in list(self._found.values()) if (array := one()) is not None]
