"""Noticing lost updates: copies of lists and dicts that were read, changed, and not assigned back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pmstore._core import hash64
from pmstore._values import encode

__all__ = ["Watch"]

_LARGEST = 1 << 20  # bytes encoded: encoding more again at every commit would cost more than the warning is worth
_SWEEP = 64
# References to a value that nobody but the watch has: the _Seen's attribute and getrefcount's argument.
_OURS = 2


class _Seen:
    __slots__ = ("checksum", "key", "value", "what")

    def __init__(self, key: bytes, what: str, value: Any, checksum: int) -> None:
        self.key = key
        self.what = what
        self.value = value
        self.checksum = checksum  # of the value's encoding, as it was when it and the store were last the same


class Watch:
    """Values with containers that were handed out. Falsy as long as there are none.

    Not thread-safe: the store's lock is held around every call.

    Parameters
    ----------
    stored : callable
        Gives the encoding that is stored under a catalog key, or None.
    """

    __slots__ = ("_changed", "_seen", "_stored", "_sweep_at")

    def __init__(self, stored: Callable[[bytes], bytes | None]) -> None:
        self._stored = stored
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._seen) or bool(self._changed)

    def clear(self) -> None:
        """Forget about everything that was handed out."""
        self._seen: dict[int, _Seen] = {}  # by the value's id, which stays its own as the _Seen refers to it
        self._changed: list[str] = []
        self._sweep_at = _SWEEP

    def handed_out(self, key: bytes, what: str, value: Any, encoded: bytes) -> None:
        """A copy of what is stored under key goes to the user; what is the name for a warning."""
        if len(encoded) > _LARGEST:
            return
        self._seen[id(value)] = _Seen(key, what, value, hash64(encoded))
        if len(self._seen) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(_SWEEP, 2 * len(self._seen))

    def assigned(self, value: Any, encoded: bytes) -> None:
        """The value was stored: if it had been handed out, then no change of it up to now is lost."""
        seen = self._seen.get(id(value))
        if seen is not None:
            seen.checksum = hash64(encoded)

    def lost(self) -> list[str]:
        """What was changed and not assigned back, each once."""
        self._sweep()
        changed, self._changed = self._changed, []
        return changed

    def _sweep(self) -> None:
        for identity, seen in list(self._seen.items()):
            try:
                now = hash64(encode(seen.value))
            except (TypeError, ValueError):  # something was put into it that can't be stored
                now = -1
            if now != seen.checksum:
                stored = self._stored(seen.key)
                # Anything else in the store by now: the name was given another value knowingly.
                if stored is not None and hash64(stored) == seen.checksum:
                    self._changed.append(seen.what)
                del self._seen[identity]  # warned of once, or assigned to knowingly
            elif sys.getrefcount(seen.value) <= _OURS:
                del self._seen[identity]
