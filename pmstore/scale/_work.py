"""A worker's work in an epoch: it calls the map of an algorithm, and brings the local state of the shard there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pmstore._resume.fingerprint import digest
from pmstore.scale._copies import Copies
from pmstore.scale._holder import _checked, read_only
from pmstore.scale._local import Disk, Local, Slots, Step, behind, checked_fields
from pmstore.scale._messages import HASH, HASHES, MARKS, Array, Marks, Result, Tag
from pmstore.scale._travel import arrived


class Work:
    """A worker's work in an epoch, with a copy of a `MapReduce`.

    Attributes
    ----------
    fields : list of tuple of Field
        The local fields of each shard.
    """

    def __init__(self, algorithm: Any, directory: str, copies: Copies | None = None) -> None:
        # The state is in the store of the coordinator, and a shard comes to a worker by its loader.
        stays = ("state", "shards", "history_", "described")
        travels = {
            name: value
            for name, value in vars(algorithm).items()
            if name not in stays and not name.startswith("_pmstore_")
        }
        copied = object.__new__(type(algorithm))
        vars(copied).update(travels)
        self._algorithm = arrived(copied, "the algorithm", shares=False)  # its bits must not depend on the engine
        self._contents: list[str] = [one["contents"] for one in algorithm.described]
        self._directory, self._copies = directory, copies
        count = len(self._contents) if directory else 0
        self.fields = [checked_fields(algorithm.local_fields(i), i) for i in range(count)]

    def expected(self, i: int) -> str | None:
        return self._contents[i]

    def prepare(self, data: Any) -> Any:
        return read_only(self._algorithm.prepare(data))

    def adds(self, shared: Mapping[str, Array]) -> bool:
        return not self._directory and self._algorithm._adds(shared)

    def __call__(
        self, i: int, held: Any, contents: str, shared: Mapping[str, Array], tag: Tag, disk: Disk
    ) -> Mapping[str, Any]:
        if not self._directory:
            result: Mapping[str, Any] = self._algorithm.map(held, dict(shared), self._random(tag.epoch, i))
            return _own_names(result)
        own, log = parted(shared)
        slots = disk.slots(self.path(tag.run, i), tag, i, self.fields[i])
        slots.marks = marks = Marks(*map(int, shared[MARKS]))
        wanted = shared[HASHES][i].tobytes()
        found = self.bring(slots, i, held, tag.epoch, wanted, log)
        if found != tag.epoch:
            return behind(found)
        if self._copies is not None and self._copies.is_due(i, tag.epoch, marks):
            self._copies.put(tag.run, i, tag.epoch, wanted, slots.arrays(tag.epoch).values())
        left = slots.step(tag.epoch, self._step(i, held, tag.epoch, own))
        return {**left, HASH: np.frombuffer(slots.noted(tag.epoch + 1), np.uint8)[None]}

    # ---- local states

    def path(self, run: str, i: int) -> str:
        """The store of a shard."""
        return os.path.join(self._directory, run, f"shard-{i}.pm")

    def layout(self) -> str:
        """A hash of all local fields, for the fingerprint."""
        rows = [[(field.name, field.shape, str(field.dtype)) for field in fields] for fields in self.fields]
        return digest({"fields": rows})

    def bring(self, slots: Slots, i: int, held: Any, epoch: int, wanted: bytes, log: Mapping[int, Any]) -> int:
        """`Slots.bring`, with the methods of the algorithm."""

        def start(local: Local) -> None:
            self._algorithm.local_start(held, local, self._random(slots.marks.began, i, 0))

        def steps(one: int, shared: Mapping[str, Array]) -> Step:
            return self._step(i, held, one, shared)

        return slots.bring(epoch, wanted, log, start, steps, self._copies)

    def _step(self, i: int, held: Any, epoch: int, shared: Mapping[str, Array]) -> Step:
        def step(local: Local) -> Result:
            given = read_only(shared)
            return _checked(_own_names(self._algorithm.map(held, given, self._random(epoch, i), local)))

        return step

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self._algorithm.seed, spawn_key=key))


def _own_names(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a map returned. Raises ValueError for names with a / before, which are those of the protocol."""
    if isinstance(result, Mapping) and any(str(name).startswith("/") for name in result):
        raise ValueError(f"map() must not return names that begin with '/': {', '.join(map(str, result))}")
    return result


def parted(shared: Mapping[str, Array]) -> tuple[dict[str, Array], dict[int, dict[str, Array]]]:
    """The broadcast of a question, and the log that came with it."""
    own: dict[str, Array] = {}
    log: dict[int, dict[str, Array]] = {}
    for name, array in shared.items():
        if not name.startswith("/"):
            own[name] = array
        elif name not in (HASHES, MARKS):
            _, epoch, rest = name.split("/", 2)
            log.setdefault(int(epoch), {}).update({rest: array} if rest else {})
    return own, log
