"""Noticing lost updates: copies of lists, dicts and arrays that were read, changed, and not assigned back.

What was handed out is encoded again at the next commit, and compared by a hash with what it was. That is the end of it
for copies that nobody holds any more, as after ``store["config"]["lr"] = 2``. Those that are held are looked at again:
one or two that take at most about 1 KiB together at every commit, the others after 2, 4, 8, ... commits, so that what
is merely held costs a few microseconds; and all of them when the store is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pmstore import _names
from pmstore._core import hash64
from pmstore._values import encode

__all__ = ["Watch"]

_LARGEST = 64 << 20  # bytes encoded: larger ones would take too much memory for a warning
_EACH = 1 << 9  # bytes that take as long to encode as looking at anything at all
_AT_ONCE = _EACH + (1 << 10)  # of both, for what is looked at in every commit
_SWEEP = 64, 1 << 20  # how many, and bytes encoded, are handed out before those that nobody holds are forgotten
# References to a value that nobody but the watch has: the _Seen's attribute and getrefcount's argument.
_OURS = 2


class _Seen:
    __slots__ = ("checksum", "key", "size", "value", "wait", "what")

    def __init__(self, key: bytes, what: str, value: Any, encoded: bytes) -> None:
        self.key = key
        self.what = what
        self.value = value  # None: no longer watched
        self.size = len(encoded)
        self.checksum = hash64(encoded)  # as it was when it and the store were last the same
        self.wait = 1  # commits between two looks


class Watch:
    """Values that can be changed in place and were handed out. Falsy as long as there are none.

    Not thread-safe: the store's lock is held around every call.

    Parameters
    ----------
    stored : callable
        Gives the encoding that is stored under a catalog key, or None.
    """

    __slots__ = ("_commits", "_due", "_new", "_new_bytes", "_stored", "_sweep_at", "changed", "seen")

    def __init__(self, stored: Callable[[bytes], bytes | None]) -> None:
        self._stored = stored
        self._commits = 0
        self.clear()

    def __bool__(self) -> bool:
        return bool(self.seen) or bool(self.changed)

    def clear(self) -> None:
        """Forget about everything that was handed out."""
        self.seen: dict[int, _Seen] = {}  # by the value's id, which stays its own as the _Seen refers to it
        self._due: dict[int, list[_Seen]] = {}  # by the commit at which to look
        self.changed: list[tuple[str, str]] = []
        self._new, self._new_bytes = 0, 0  # handed out since the last sweep
        self._sweep_at = _SWEEP

    def handed_out(self, key: bytes, what: str, value: Any, encoded: bytes) -> None:
        """A copy of what is stored under key goes to the user; what is the name for a warning."""
        if len(encoded) > _LARGEST:
            return
        if self._new >= self._sweep_at[0] or self._new_bytes + len(encoded) >= self._sweep_at[1]:
            self._sweep()
        seen = self.seen[id(value)] = _Seen(key, what, value, encoded)
        self._due.setdefault(self._commits + 1, []).append(seen)
        self._new += 1
        self._new_bytes += seen.size

    def assigned(self, value: Any, encoded: bytes) -> None:
        """The value was stored: if it had been handed out, then no change of it up to now is lost."""
        seen = self.seen.get(id(value))
        if seen is not None:
            seen.checksum = hash64(encoded)

    def lost(self, *, all_of_them: bool = False) -> list[tuple[str, str]]:
        """What was changed and not assigned back, each once, and the statement's left side that assigns it.

        To be called once for each commit. all_of_them: also those whose turn it isn't.
        """
        self._commits += 1
        now = self._due.pop(self._commits, [])
        if all_of_them:
            now, self._due = list(self.seen.values()), {}
        at_once = 0
        for seen in now:
            if seen.value is None or not self._look(seen):
                continue
            cost = _EACH + seen.size
            if at_once + cost <= _AT_ONCE:
                at_once += cost
                wait = 1
            else:
                wait = seen.wait = 2 * seen.wait
            self._due.setdefault(self._commits + wait, []).append(seen)
        changed, self.changed = self.changed, []
        return changed

    def _sweep(self) -> None:
        """Look at those that nobody holds any more, and forget them."""
        for seen in list(self.seen.values()):
            if sys.getrefcount(seen.value) <= _OURS:
                self._look(seen)
        self._new, self._new_bytes = 0, 0
        held = sum(seen.size for seen in self.seen.values())
        self._sweep_at = max(_SWEEP[0], len(self.seen)), max(_SWEEP[1], held)

    def _look(self, seen: _Seen) -> bool:
        """Whether it is unchanged and held, and so to be watched on."""
        try:
            now = hash64(encode(seen.value))
        except Exception:  # something was put into it that can't be stored, or another thread is changing it
            now = -1
        if now == seen.checksum:
            if sys.getrefcount(seen.value) > _OURS:
                return True
        else:
            stored = self._stored(seen.key)
            # Anything else in the store by now: the name was given another value knowingly.
            if stored is not None and hash64(stored) == seen.checksum:
                self.changed.append((seen.what, _place(seen)))
        del self.seen[id(seen.value)]  # warned of once, or assigned to knowingly, or no longer held
        seen.value = None
        return False


def _place(seen: _Seen) -> str:
    element = _names.split_element(seen.key)
    if element is None:
        return f"store[{seen.what!r}]"
    return f"store[{seen.what.rpartition('[')[0]!r}][{element[1]}]"
