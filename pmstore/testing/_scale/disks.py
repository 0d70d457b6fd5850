"""The disks of simulated workers, with the local states of shards."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._resume.state import Field
from pmstore.scale._copies import Copies
from pmstore.scale._local import GROUP, SLOTS, Disk
from pmstore.scale._messages import Tag, digest_of
from pmstore.testing._scale.memory import MemoryStore

DIRECTORY = "/local"

Contents = dict[str, dict[str, Any]]
"""The contents of stores, by their paths."""


class Machine:
    """A disk. Some workers have one together; then one of them at a time has a store open.

    Attributes
    ----------
    stores : dict of str to DiskStore
    """

    def __init__(self) -> None:
        self.stores: dict[str, DiskStore] = {}

    def lose(self) -> None:
        """All that was on the disk."""
        self.stores = {}

    def rot(self, chance: random.Random) -> None:
        """Another bit in a slot of each store, at rest and in the memory of the worker that has it open."""
        for store in self.stores.values():
            slot = f"{GROUP}/{chance.randrange(_count(store.live))}/"
            place = chance.random()
            for values in (store.live, store.committed):
                for name, value in values.items():
                    if name.startswith(slot) and value.nbytes:
                        value.reshape(-1).view(np.uint8)[int(place * value.nbytes)] ^= 1

    def has(self, shard: int, tag: Tag, wanted: bytes) -> bool:
        """Whether the state of a shard before the epoch of a tag, with this hash, is at rest in one of its slots."""
        values = next((one.committed for path, one in self.stores.items() if path.endswith(f"/shard-{shard}.pm")), {})
        slots = [_slot(values, slot) for slot in range(_count(values))]
        return any(digest_of(shard, tag._replace(attempt=0), arrays) == wanted.hex() for arrays in slots)

    def contents(self) -> Contents:
        """A copy of all that is at rest."""
        return {path: _copy(store.committed) for path, store in self.stores.items()}

    def put(self, contents: Contents, chance: random.Random) -> None:
        """Leave the stores of another run: other values, whose hashes are theirs."""
        for path, values in contents.items():
            shard = int(path.rpartition("-")[2].removesuffix(".pm"))
            store = self.stores[path] = DiskStore()
            store.committed = values = _copy(values)
            for slot in range(_count(values)):
                arrays = _slot(values, slot)
                for array in arrays.values():
                    array[...] = np.roll(array, 1) + array.dtype.type(chance.randrange(2))
                record = values[f"{GROUP}/slots"][slot]
                tag = Tag("another run", 0, int(record["epoch"]))
                record["hash"] = np.frombuffer(bytes.fromhex(digest_of(shard, tag, arrays)), np.uint8)


class DiskStore(MemoryStore):
    """A store of a shard on a simulated disk."""

    def __init__(self) -> None:
        super().__init__()
        self.holder: SimulatedDisk | None = None  # the worker that has it open

    def close(self) -> None:
        self.holder = None


class SimulatedDisk(Disk):
    """The disk of a machine, as one process of a worker has it.

    Parameters
    ----------
    machine : Machine
    step : callable
        Called before and after each commit, with what it is. It may raise, to kill the worker.
    """

    def __init__(self, machine: Machine, step: Callable[[str], None]) -> None:
        super().__init__()
        self._machine, self._step = machine, step

    def open(self, path: str) -> Any:
        store = self._machine.stores.setdefault(path, DiskStore())
        if store.holder is not None:
            return None
        store.holder, store.step = self, self._step
        store.reopen()
        return store

    @contextlib.contextmanager
    def look(self, path: str) -> Iterator[Mapping[str, Any]]:
        store, snapshot = self._machine.stores.get(path), MemoryStore()
        if store is not None:
            snapshot.live = store.committed
        yield snapshot.group(GROUP)

    def crash(self) -> None:
        """The process ends: its locks are free, and its uncommitted changes are lost."""
        self._slots.clear()
        for store in self._machine.stores.values():
            if store.holder is self:
                store.holder = None


class SimulatedCopies(Copies):
    """An archive in plain memory."""

    def __init__(self, every: int) -> None:
        super().__init__("/archive", every)
        self._kept: dict[tuple[int, int], tuple[bytes, dict[str, Any]]] = {}

    def put(self, run: str, shard: int, epoch: int, found: bytes, arrays: Iterable[Any]) -> None:
        self._kept[shard, epoch] = found, {f"{number}": array.copy() for number, array in enumerate(arrays)}

    def epochs(self, run: str) -> dict[int, list[int]]:
        return {shard: sorted(epoch for one, epoch in self._kept if one == shard) for shard, _ in self._kept}

    def get(self, run: str, shard: int, epoch: int, fields: Iterable[Field]) -> tuple[bytes, dict[str, Any]] | None:
        found, arrays = self._kept[shard, epoch]
        return found, {field.name: array for field, array in zip(fields, arrays.values(), strict=True)}

    def forget(self, run: str, before: float = math.inf, spared: range = range(0)) -> None:
        self._kept = {key: kept for key, kept in self._kept.items() if key[1] >= before or key[1] in spared}


def _count(values: Mapping[str, Any]) -> int:
    """The number of slots in a store: two, or three if one of the third's names is there."""
    return SLOTS if _slot(values, SLOTS - 1) else SLOTS - 1


def _slot(values: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """The arrays in a slot, by the names of their fields."""
    begin = f"{GROUP}/{slot}/"
    return {name[len(begin) :]: value for name, value in values.items() if name.startswith(begin)}


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.copy() for name, value in values.items()}
