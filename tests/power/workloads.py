"""Workloads that use a store while their disk is recorded, and a program that runs them.

`python -m tests.power.workloads NAME STORE MARKER` runs one. After each commit that returned it writes to MARKER, the
kernel's trace, which of its states is now acknowledged ("ack 7"), or only committed ("state 7", with commits that
become durable later). It prints JSON: a digest of each state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import pmstore
from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import key_of
from pmstore._core import Entry
from pmstore._values.array import layout
from tests.support import crashes, crashes_async, crashes_slots

Life = Callable[[Any], None]


class Workload(NamedTuple):
    """Runs of a store: each opens it, and ends as by a kill, unless it closes the store."""

    runs: tuple[Life, ...]
    options: Mapping[str, Any] = MappingProxyType({})


def digest(store: Any) -> str:
    """A digest of all values in a store, which differs between states."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(store):
        value = store[name]
        hashed.update(f"{len(name)} {name} {type(value).__name__} ".encode())
        if isinstance(value, np.ndarray):
            hashed.update(f"{value.dtype.str} {value.shape} {value.flags.f_contiguous} ".encode() + value.tobytes())
        else:
            hashed.update(repr(list(value) if isinstance(value, pmstore.PersistentList) else value).encode())
    return hashed.hexdigest()


class Observer:
    """A store that reports which of its states is acknowledged. say: writes to the trace; states: receives digests."""

    def __init__(self, store: pmstore.Store, say: Callable[[str], None], states: list[str], later: bool) -> None:
        self._store, self._say, self._states, self._later = store, say, states, later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __getitem__(self, name: str) -> Any:
        return self._store[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def __delitem__(self, name: str) -> None:
        del self._store[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __contains__(self, name: object) -> bool:
        return name in self._store

    def _committed(self, durable: bool = False) -> None:
        self._say(f"{'state' if self._later and not durable else 'ack'} {len(self._states)}")
        self._states.append(digest(self._store))

    def commit(self) -> None:
        self._store.commit()
        self._committed()

    @contextlib.contextmanager
    def transaction(self, **options: Any) -> Iterator[None]:
        with self._store.transaction(**options):
            yield
        self._committed()

    def sync(self) -> None:
        self._store.sync()
        self._say(f"ack {len(self._states) - 1}")

    def close(self) -> None:
        """Commit the pending changes, too, and close."""
        last = digest(self._store)
        self._store.close()
        self._say(f"ack {len(self._states)}")
        self._states.append(last)


def small(store: Any) -> None:
    """Commits of a few bytes each, in sequence."""
    x = store.create_array("x", 5, "f8")
    y = store.create_array("y", 300, "f8")
    store.commit()
    for i in range(60):
        x += 1
        if i % 3 == 0:
            y[i::7] = i
        store["epoch"] = i
        store.commit()


def rows(store: Any) -> None:
    """Rows of a larger array: one, some, and so many that their record is written in parts (D15)."""
    x = store.create_array("x", (6000, 100), "f8")
    store.commit()
    rng = np.random.default_rng(1)
    for i in range(24):
        some = rng.integers(len(x), size=(1, 30, 3, 400)[i % 4])
        with store.transaction():
            x[some] += 1 + i
    for _ in range(12):
        with store.transaction(only=[x[7:9]]):
            x[7:9] += 1


def new(store: Any) -> None:
    """New arrays that go directly to their place, are changed there in the next commit, and are deleted."""
    for i in range(8):
        store[f"new{i}"] = np.full(9000 * (1 + i % 4), float(i))
        store[f"small{i}"] = np.full(40, -1.0 * i)
        store.commit()
        store[f"new{i}"][::600] = -i
        store.commit()
        if i > 2:
            del store[f"new{i - 3}"]
            store.commit()


def sparse(store: Any) -> None:
    """Reserved space that is written in separate places: the file system keeps more extents than the inode has room
    for."""
    described = layout(1_500_000, "f8", "C", True)
    core = store._catalog.core
    core.put(key_of("x"), Entry(core.alloc(described.length), described.length, ARRAY, 0, described.meta))
    store.commit()
    x = store["x"]
    for i in range(20):
        x[i * 9000 :: 200_000] = 1 + i
        store.commit()
        store[f"new{i}"] = np.full(3000, float(i))
        store.commit()


def lazy_growth(store: Any) -> None:
    """The file grows under commits that are durable later."""
    for i in range(6):
        store[f"more{i}"] = np.full(40_000 * (1 + i), float(i))
        store.commit()
        store["n"] = i
        store.commit()
        if i == 3:
            store.sync()
    store.close()


def opened_again(store: Any) -> None:
    """Change the existing values, and close."""
    for value in [store[name] for name in store]:
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value += 1
            store.commit()
    store.close()


ASYNC = crashes_async.ASYNC
WORKLOADS = {
    "small": Workload((small,)),
    "rows": Workload((rows,)),
    "whole": Workload((crashes_slots.slots, crashes_slots.slots_again, crashes_slots.slots_shut)),
    "cooled": Workload((crashes_slots.cooled,)),
    "new": Workload((new,)),
    "names": Workload((crashes.arrays, crashes.names)),
    "reuse": Workload((crashes.reuse, crashes.freed)),
    "sparse": Workload((sparse,)),
    "growth": Workload((crashes.growth, opened_again)),
    "scattered": Workload((crashes.scattered,)),
    "full": Workload((crashes.full,), crashes.OPTIONS[crashes.full]),
    "bulk": Workload((crashes.bulk,)),
    "runs": Workload((crashes.names, crashes.again, crashes.closed, opened_again)),
    "async": Workload((crashes_async.lazily, crashes_async.freed_late), ASYNC),
    "async-whole": Workload((crashes_async.flipped_late,), ASYNC),
    "async-growth": Workload((lazy_growth, opened_again), ASYNC),
}


def run(workload: Workload, path: Path, say: Callable[[str], None]) -> list[str]:
    """Execute all runs; returns digests of the states."""
    states: list[str] = []
    later = workload.options.get("durability") == "async"
    for run in workload.runs:
        store = pmstore.open(path, **workload.options)
        observer = Observer(store, say, states, later)
        if not states:
            observer._committed(durable=True)
        try:
            run(observer)
        finally:
            if not store.closed:
                store._drop(discard=True)
    return states


def recover(path: Path, before: list[str], say: Callable[[str], None]) -> list[str]:
    """Open the store that a power cut left, change it and close it. before: the states that it may be in."""
    states = list(before)
    store = pmstore.open(path, "r+", verify=True)
    observer = Observer(store, say, states, later=False)
    observer._committed()
    store["after"] = np.arange(3000.0)
    observer.commit()
    store["after"][7] = -1
    observer.commit()
    observer.close()
    return states


def main() -> None:
    name, path, marker = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def say(text: str) -> None:
        os.write(marker, text.encode())

    if name == "recover":
        states = recover(path, sys.argv[4:], say)
    else:
        states = run(WORKLOADS[name], path, say)
    print(json.dumps(states))


if __name__ == "__main__":
    main()
