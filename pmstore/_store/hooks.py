"""The access to stores that pmstore.testing needs beyond their public interface. Nothing else uses this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pmstore._core import Core
from pmstore._store import entrance
from pmstore._store import store as stores
from pmstore._store.store import Store, close_all
from pmstore._trace import Trace

__all__ = [
    "close_all",
    "core_of",
    "kill",
    "names_of",
    "number_lists_anew",
    "record",
    "recorded",
    "usable_stores",
    "value_of",
]


def record(recorder: Callable[[str, str, str], tuple[str, Trace | None]] | None) -> None:
    """Call this function at each opening, with path, mode and media. It returns the medium and the trace. None: no
    function is called any more."""
    entrance.recorder = recorder


def recorded() -> bool:
    return entrance.recorder is not None


def usable_stores() -> list[Store]:
    """The open stores of this process, without those that are being closed or only read."""
    return [store for store in list(stores.open_stores) if store._commits.lock.usable]


def kill(store: Store) -> None:
    """Close a store as the end of its process would: nothing is committed, and no warning is given."""
    if not store.closed:
        store._drop(discard=True)


def core_of(store: Store) -> Core:
    return store._catalog.core


def names_of(store: Store) -> list[str]:
    """The names of all values except derived arrays."""
    return [name for name, kind, *_ in store._rows() if kind != "derived"]


def value_of(store: Store, name: str) -> Any:
    """A value; of a registered type, its parts, so that nothing of the program's runs."""
    parts = store._catalog.parts(name)
    return store[name] if parts is None else parts


def number_lists_anew(store: Store) -> None:
    """Close the gap that lists leave in the numbers of lists when they are rolled back."""
    store._catalog._next_list = 1
