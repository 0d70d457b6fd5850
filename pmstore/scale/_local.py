"""The state of a shard's own, on its worker: two slots by the parity of the epoch, and the way back to a lost state.

L(e), the state before epoch e, is a function of the shard, the seed, and what was broadcast in the epochs before e. So
it may be lost: a worker that lacks it takes an older one, and replays alone what was broadcast since.

    asked for epoch e         slot e % 2         slot (e + 1) % 2
    ────────────────────────────────────────────────────────────────────────────────────────
    all before e is decided   L(e), only read    L(e-1), which nobody needs any more
    the map, in one commit    L(e)               L(e-1) ──▶ L(e+1)
    asked for e again         L(e), only read    L(e+1) ──▶ L(e+1), the same bits

I35: the slot of L(e) changes only when a question about a later epoch tells that e is decided; and a map begins with an
L(e) that has the hash which the coordinator has committed, or with one that was replayed and has it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import pmstore._store.entrance as stores
from pmstore._errors import (
    CorruptStoreError,
    Error,
    FormatVersionError,
    NotAStoreError,
    StaleSnapshotError,
    StoreIOError,
    StoreLockedError,
)
from pmstore._resume.state import Field
from pmstore.scale._copies import Copies
from pmstore.scale._messages import BEHIND, Array, Tag, digest_of

GROUP = "shard"
_RECORD = np.dtype([("epoch", "<i8"), ("hash", "u1", (16,))])  # of each slot; no epoch: -1

Step = Callable[["Local"], Any]
"""Changes the state of an epoch to that of the next one, in place."""


class Local:
    """The local state of a shard: arrays by name. Change them in place; an assignment copies into them."""

    __slots__ = ("_arrays",)

    _arrays: dict[str, Array]

    def __init__(self, arrays: dict[str, Array]) -> None:
        object.__setattr__(self, "_arrays", arrays)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self[name][...] = value

    def __getattr__(self, name: str) -> Array:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{name!r} is none of the local fields {', '.join(self._arrays)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        array = getattr(self, name)
        if value is not array:  # as after local.W *= 2
            array[...] = value


class Memory:
    """A store in plain memory, for a shard whose store another process has."""

    def __init__(self) -> None:
        self._group: dict[str, Any] = {}

    def transaction(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def group(self, name: str) -> MutableMapping[str, Any]:
        return self._group

    def close(self) -> None:
        self._group.clear()


class Slots:
    """The two slots of a shard.

    Parameters
    ----------
    store : Store or Memory
    run : str
        The computation, to which the hashes belong.
    shard : int
    fields : sequence of Field
    """

    def __init__(self, store: Any, run: str, shard: int, fields: Iterable[Field]) -> None:
        self.store, self.run, self._shard = store, run, shard
        self.asked = 0, 0  # the newest question's attempt and epoch
        self._fields = tuple(fields)
        self._group = store.group(GROUP)
        wanted = {f"{slot}/{field.name}": field for slot in (0, 1) for field in fields}
        if not _fits(self._group, wanted):
            with store.transaction():
                for name in list(self._group):
                    del self._group[name]
                for name, field in wanted.items():
                    self._group[name] = _aligned(field)
                self._group["slots"] = np.array([(-1, 0), (-1, 0)], _RECORD)
        self._wanted = wanted
        self._record: Array = self._group["slots"]
        names = [field.name for field in self._fields]
        self._arrays = [{name: self._group[f"{slot}/{name}"] for name in names} for slot in (0, 1)]

    def arrays(self, epoch: int) -> dict[str, Array]:
        """The slot of an epoch."""
        return self._arrays[epoch % 2]

    def take(self, group: Mapping[str, Any]) -> None:
        """Copy both slots from another store of this shard, if it has any, and they can be read."""
        with contextlib.suppress(CorruptStoreError, StoreIOError, StaleSnapshotError), self.store.transaction():
            if _fits(group, self._wanted):
                self._record["epoch"] = -1
                for name in self._wanted:
                    self._group[name][...] = group[name]
                self._record[...] = group["slots"]

    def group(self) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self._group
        return group

    def noted(self, epoch: int) -> bytes:
        """The hash that was computed when the state of an epoch was put into its slot."""
        noted: bytes = self._record["hash"][epoch % 2].tobytes()
        return noted

    def hash(self, epoch: int) -> bytes:
        """The hash of the arrays in the slot of an epoch, if they are the state of that epoch."""
        return bytes.fromhex(digest_of(self._shard, Tag(self.run, 0, epoch), self.arrays(epoch)))

    def bring(
        self,
        epoch: int,
        wanted: bytes,
        log: Mapping[int, Any],
        start: Step,
        steps: Callable[..., Step],
        copies: Copies | None = None,
    ) -> int:
        """Make sure that the slot of an epoch has its state.

        Parameters
        ----------
        epoch : int
        wanted : bytes
            The hash of the state. Not used for epoch 0, which begins anew.
        log : dict
            What was broadcast in the epochs from any one to that before `epoch`.
        start : callable
            Fills the state of epoch 0.
        steps : callable
            ``steps(epoch, broadcast)`` is the step of that epoch.
        copies : Copies, optional

        Returns
        -------
        int
            `epoch`; or the epoch from which the log must be there; or -1 if the state can't be computed again.
        """
        if epoch == 0:
            self._begin(start)
            return 0
        if self.hash(epoch) == wanted:
            return epoch
        for base in self._bases(epoch, copies):
            if base < min(log, default=epoch):
                return base
            if base == 0:
                self._begin(start)
            for one in range(base, epoch):
                self.step(one, steps(one, log[one]))
            if self.hash(epoch) == wanted:
                return epoch
            self._discard()  # what it was replayed from is no state of this fit
        return -1

    def step(self, epoch: int, step: Step) -> Any:
        """Compute the next epoch's state from that of an epoch, in one commit. Returns the result of the step."""
        after = epoch + 1
        with self.store.transaction():
            self._record["epoch"][after % 2] = -1
            for name, array in self.arrays(epoch).items():
                self.arrays(after)[name][...] = array
            result = step(Local(dict(self.arrays(after))))
            self._note(after)
        return result

    def _begin(self, start: Step) -> None:
        """The state of epoch 0."""
        with self.store.transaction():
            self._record["epoch"][0] = -1
            for array in self.arrays(0).values():
                array[...] = np.zeros((), array.dtype)
            start(Local(dict(self.arrays(0))))
            self._note(0)

    def _note(self, epoch: int) -> None:
        self._record["hash"][epoch % 2] = np.frombuffer(self.hash(epoch), np.uint8)
        self._record["epoch"][epoch % 2] = epoch

    def _bases(self, epoch: int, copies: Copies | None) -> Iterator[int]:
        """The epochs until this one whose states are in their slots now, and sound, the newest first; then 0."""
        here = {int(found) for found in self._record["epoch"] if 0 < found < epoch}
        elsewhere = set(copies.epochs(self.run).get(self._shard, [])) if copies is not None else set()
        for found in sorted(here | {one for one in elsewhere if one <= epoch}, reverse=True):
            sound = found in here and self.noted(found) == self.hash(found)
            if sound or (found in elsewhere and copies is not None and self._take_copy(found, copies)):
                yield found
        yield 0

    def _take_copy(self, epoch: int, copies: Copies) -> bool:
        """Put the copy of a state into its slot. Returns whether it is sound."""
        found = copies.get(self.run, self._shard, epoch, self._fields)
        if found is None:
            return False
        given, arrays = found
        if bytes.fromhex(digest_of(self._shard, Tag(self.run, 0, epoch), arrays)) != given:
            return False
        with self.store.transaction():
            for name, array in arrays.items():
                self.arrays(epoch)[name][...] = array
            self._note(epoch)
        return True

    def _discard(self) -> None:
        with self.store.transaction():
            self._record["epoch"] = -1


class Disk:
    """The local states that a worker keeps. A store stays open while the worker is asked for its shard."""

    def __init__(self) -> None:
        self._slots: dict[str, Slots] = {}

    def slots(self, path: str, tag: Tag, shard: int, fields: Iterable[Field]) -> Slots:
        """The slots of a shard, for a question about it.

        Another process may have the store, such as a worker that hangs. Then the slots are in memory, until that
        process ends, and begin with what the store has.

        Raises
        ------
        OSError
            The directory can't be written.
        RuntimeError
            The question is older than one that was asked here. It must not touch the states, and nobody waits for the
            reply.
        """
        self._release(tag)
        slots = self._slots.get(path)
        if slots is None or isinstance(slots.store, Memory):
            store = self.open(path)
            if store is not None:
                opened = self._slots_in(store, path, tag, shard, fields)
                if slots is not None:
                    opened.take(slots.group())
                    opened.asked = slots.asked
                self._slots[path] = slots = opened
            elif slots is None:
                self._slots[path] = slots = Slots(Memory(), tag.run, shard, fields)
                with self.look(path) as found:
                    slots.take(found)
        if (tag.attempt, tag.epoch) < slots.asked:
            raise RuntimeError(f"epoch {tag.epoch} of attempt {tag.attempt} is asked for after {slots.asked}")
        slots.asked = tag.attempt, tag.epoch
        return slots

    def _slots_in(self, store: Any, path: str, tag: Tag, shard: int, fields: Iterable[Field]) -> Slots:
        """The slots in a store. A store with damaged names is made anew: its states are computed again."""
        try:
            return Slots(store, tag.run, shard, fields)
        except CorruptStoreError:
            with contextlib.suppress(Error):
                store.close()
            os.unlink(path)
            return Slots(self._opened(path), tag.run, shard, fields)

    def _release(self, tag: Tag) -> None:
        """Close the stores that this worker is not asked for any more, so that others can have them."""
        for path, slots in list(self._slots.items()):
            if slots.run != tag.run or slots.asked[1] < tag.epoch - 1:
                del self._slots[path]
                with contextlib.suppress(Error):  # what it lacks will be computed again
                    slots.store.close()

    def close(self) -> None:
        """Close all stores."""
        while self._slots:
            _, slots = self._slots.popitem()
            with contextlib.suppress(Error):
                slots.store.close()

    def __del__(self) -> None:
        self.close()

    # ---- what a simulated worker has otherwise

    def open(self, path: str) -> Any:
        """The store at a path, which is made if it isn't there; None if it is locked."""
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the local states of shards can't be kept in {folder!r}: {error.strerror}. Give run() another "
                "directory, which each worker can write to: local=",
            ) from error
        try:
            store = self._opened(path)
        except StoreLockedError:
            return None
        except (NotAStoreError, FormatVersionError) as error:
            raise OSError(
                errno.EEXIST,
                f"the local state of a shard can't be kept in {path!r}, where there is something else ({error}). "
                "Delete it, or give run() another directory: local=",
            ) from error
        except CorruptStoreError:
            os.unlink(path)  # what was in it is computed again
            store = self._opened(path)
        if store.openings > 1:  # another worker of this process has it
            store.close()
            return None
        return store

    @staticmethod
    def _opened(path: str) -> Any:
        # Nothing here must survive a power cut: the log of the coordinator does.
        return stores.open(path, durability="async")

    @contextlib.contextmanager
    def look(self, path: str) -> Iterator[Mapping[str, Any]]:
        """The names of a store that another process may be writing; none if it can't be read."""
        try:
            store = stores.open(path, "r")
        except Error:
            yield {}
            return
        with contextlib.closing(store):
            yield store.group(GROUP)


def behind(epoch: int) -> dict[str, Any]:
    """The reply of a worker that needs the log from an epoch on; -1: the state can't be computed again."""
    return {BEHIND: np.int64(epoch)}


def checked_fields(fields: Iterable[Field], shard: int) -> tuple[Field, ...]:
    """The local fields of a shard. Raises TypeError for a field that is no array."""
    fields = tuple(fields)
    for field in fields:
        if not isinstance(field, Field) or not field.is_array or field.role != "result":
            raise TypeError(f"local_fields({shard}) returns Fields with axes and of numbers, and no role, not {field}")
        if np.dtype(field.dtype).hasobject:
            raise TypeError(f"the local field {field.name!r} has Python objects in it; local fields have numbers")
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1 or name.startswith("/")})
    if twice:
        raise ValueError(f"local_fields({shard}) has two fields of the same name, or of one with a / before: {twice}")
    return fields


def _fits(group: Mapping[str, Any], wanted: Mapping[str, Field]) -> bool:
    """Whether a group has two slots for these fields, and nothing else."""
    layouts = {name: (field.shape, field.dtype) for name, field in wanted.items()}
    layouts["slots"] = (2,), _RECORD
    if set(group) != set(layouts):
        return False
    found = {name: group[name] for name in layouts}
    return all(
        isinstance(array, np.ndarray) and array.flags.c_contiguous and (array.shape, array.dtype) == layouts[name]
        for name, array in found.items()
    )


def _aligned(field: Field) -> Array:
    """Zeros at a multiple of 64 bytes, as in a store: kernels may add in another order elsewhere."""
    size = math.prod(field.shape) * field.dtype.itemsize  # type: ignore[union-attr,arg-type]
    buffer = np.zeros(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(field.dtype).reshape(field.shape)
