"""A store in plain memory, as far as a fit uses one: the changes of a transaction are durable at once, as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pmstore._resume.state import PROGRESS
from pmstore._values.values import encode

GROUP = "fit"
_APART = (f"{GROUP}/history/", f"{GROUP}/fingerprint")
LOG = f"{GROUP}/broadcasts/"


class MemoryStore:
    """Values by name, twice: those that the program changes, and those of the last commit."""

    path = "a simulated store"
    mode = "a"
    recorded = True  # so that a history has no times

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.step: Callable[[str], None] = lambda what: None  # where a coordinator may be killed
        self.on_commit: Callable[[], None] = lambda: None

    def reopen(self) -> None:
        """Go to the state that a process finds if it opens the store after a kill."""
        self.live = _copies(self.committed)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield
        self.step("before a commit")
        self.committed = _copies(self.live)
        self.on_commit()
        self.step("after a commit")

    def _has_pending(self) -> bool:
        """Whether something was changed outside of a transaction: nothing ever is."""
        return False

    def group(self, name: str) -> _Group:
        return _Group(self, f"{name}/")

    def check(self) -> list[Any]:
        return []

    def __contains__(self, name: str) -> bool:
        return name in self.live

    @property
    def attempt(self) -> int:
        """The attempt in the last commit."""
        progress = self.committed.get(f"{GROUP}/{PROGRESS}")
        return 0 if progress is None else int(progress["attempt"])

    def signature(self) -> tuple[Any, ...]:
        """All bits of the last commit, but for the attempt and the history."""
        return tuple(
            (name, _bits(name, value)) for name, value in sorted(self.committed.items()) if not name.startswith(_APART)
        )


class _Group(MutableMapping[str, Any]):
    """The values whose names begin with a prefix."""

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getitem__(self, name: str) -> Any:
        value = self._store.live[self._prefix + name]
        return value if isinstance(value, np.ndarray) else _copy(value)

    def __setitem__(self, name: str, value: Any) -> None:
        self._store.live[self._prefix + name] = _copy(value)

    def __delitem__(self, name: str) -> None:
        del self._store.live[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._store.live

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in list(self._store.live) if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(name.startswith(self._prefix) for name in self._store.live)

    def create_array(self, name: str, shape: Any, dtype: Any) -> Any:
        self[name] = np.zeros(shape, dtype)
        return self[name]

    def group(self, name: str) -> _Group:
        return _Group(self._store, f"{self._prefix}{name}/")

    def _own_value(self, name: str) -> Any:
        return _copy(self.get(name))


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, with arrays of their own; nothing else in a group changes in place."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value if value is None or isinstance(value, bool | int | float | str | bytes) else copy.deepcopy(value)


def _bits(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return encode(value)
    if name.endswith(f"/{PROGRESS}"):
        value = value.copy()
        value["attempt"] = 0
        for one in {"log_from", "best_log_from"} & set(value.dtype.names):
            value[one] = 0  # which copies there are depends on the accidents
    return value.dtype.str, value.shape, value.tobytes()
