"""The state of a shard's own, on its worker: slots for the states of epochs, and the way back to a lost state.

L(e), the state before epoch e, is a function of the shard, the seed, and what was broadcast in the epochs of the run
before e. So it may be lost: a worker that lacks it takes an older one, and replays alone what was broadcast since.

    asked for epoch e, d is decided   a slot              another slot
    ──────────────────────────────────────────────────────────────────────────────────────────────
    d = e: each epoch is committed    L(e), only read     L(e-1), which nobody needs any more
    the map, in one commit            L(e)                L(e-1) ──▶ L(e+1)
    asked for e again                 L(e), only read     L(e+1) ──▶ L(e+1), the same bits

    asked for epoch e, d is decided   a slot              another slot        the third slot
    ──────────────────────────────────────────────────────────────────────────────────────────────
    d < e: e is not committed yet     L(d), not changed   L(e), only read     L(e-1), if it is not L(d)
    the map, in one commit            L(d)                L(e)                L(e-1) ──▶ L(e+1)

I35: the slot of L(d) changes only when a question tells that a later epoch is decided; and a map begins with an L(e)
that has the hash which the coordinator's question gives, or with one that was replayed and has it.
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
from pmstore.scale._messages import BEHIND, Array, Marks, Tag, digest_of

GROUP = "shard"
SLOTS = 3  # at most; the third one is made when two are needed and one is written
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
    """The slots of a shard: two of them, or three.

    Parameters
    ----------
    store : Store or Memory
    run : str
        The computation, to which the hashes belong.
    shard : int
    fields : sequence of Field

    Attributes
    ----------
    asked : tuple of int
        The attempt and the epoch of the newest question.
    marks : Marks
        Those of that question. The caller sets them.
    """

    def __init__(self, store: Any, run: str, shard: int, fields: Iterable[Field]) -> None:
        self.store, self.run, self._shard = store, run, shard
        self.asked = 0, 0
        self.marks = Marks(0, 0, 0)
        self._fields = tuple(fields)
        self._group = store.group(GROUP)
        count = _count_slots(self._group, self._fields)
        if not count:
            count = 2
            with store.transaction():
                for name in list(self._group):
                    del self._group[name]
                self._group["slots"] = np.array([(-1, 0)] * SLOTS, _RECORD)
                for slot in range(count):
                    self._make(slot)
        self._record: Array = self._group["slots"]
        self._arrays = [self._live(slot) for slot in range(count)]

    def arrays(self, epoch: int) -> dict[str, Array]:
        """The arrays of an epoch. Raises KeyError if no slot has them."""
        slot = self._slot(epoch)
        if slot is None:
            raise KeyError(epoch)
        return self._arrays[slot]

    def take(self, group: Mapping[str, Any]) -> None:
        """Copy all slots from another store of this shard, if it has any, and they can be read."""
        with contextlib.suppress(CorruptStoreError, StoreIOError, StaleSnapshotError):
            count = _count_slots(group, self._fields)
            while len(self._arrays) < count:
                self._grow()
            with self.store.transaction():
                self._record["epoch"] = -1
                for slot, arrays in enumerate(self._arrays[:count]):
                    for name, array in arrays.items():
                        array[...] = group[f"{slot}/{name}"]
                if count:
                    self._record[...] = group["slots"]

    def group(self) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self._group
        return group

    def noted(self, epoch: int) -> bytes:
        """The hash that was computed when the state of an epoch was put into its slot."""
        slot = self._slot(epoch)
        return b"" if slot is None else self._record["hash"][slot].tobytes()

    def hash(self, epoch: int) -> bytes:
        """The hash of the arrays in the slot of an epoch; empty if there is none."""
        slot = self._slot(epoch)
        return b"" if slot is None else self._hash_of(slot, epoch)

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
            The hash of the state. Not used for the first epoch of the run, which begins anew.
        log : dict
            What was broadcast in the epochs from any one to that before `epoch`.
        start : callable
            Fills the state of the run's first epoch.
        steps : callable
            ``steps(epoch, broadcast)`` is the step of that epoch.
        copies : Copies, optional

        Returns
        -------
        int
            `epoch`; or the epoch from which the log must be there; or -1 if the state can't be computed again.
        """
        if epoch == self.marks.began:
            self._begin(start)
            return epoch
        if self.hash(epoch) == wanted:
            return epoch
        for base in self._bases(epoch, copies):
            if base < min(log, default=epoch):
                return base
            if base == self.marks.began:
                self._begin(start)
            for one in range(base, epoch):
                self.step(one, steps(one, log[one]))
            if self.hash(epoch) == wanted:
                return epoch
            self._discard(base)  # what it was replayed from is no state of this fit
        return -1

    def step(self, epoch: int, step: Step) -> Any:
        """Compute the next epoch's state from that of an epoch, in one commit. Returns the result of the step."""
        before, slot = self.arrays(epoch), self._place(epoch + 1, epoch)
        with self.store.transaction():
            self._record["epoch"][slot] = -1
            for name, array in before.items():
                self._arrays[slot][name][...] = array
            result = step(Local(dict(self._arrays[slot])))
            self._note(slot, epoch + 1)
        return result

    def _begin(self, start: Step) -> None:
        """The state of the run's first epoch."""
        slot = self._place(self.marks.began)
        with self.store.transaction():
            self._record["epoch"][slot] = -1
            for array in self._arrays[slot].values():
                array[...] = np.zeros((), array.dtype)
            start(Local(dict(self._arrays[slot])))
            self._note(slot, self.marks.began)

    # ---- slots

    def _slot(self, epoch: int) -> int | None:
        """The slot that has the state of an epoch."""
        return next((slot for slot in range(len(self._arrays)) if self._record["epoch"][slot] == epoch), None)

    def _place(self, epoch: int, *read: int) -> int:
        """The slot to write the state of an epoch to: the one that has it, or one that has neither the decided state
        nor those that are read."""
        slot = self._slot(epoch)
        if slot is not None:
            return slot
        needed = {self.marks.decided, *read}
        for slot in range(len(self._arrays)):
            if int(self._record["epoch"][slot]) not in needed:
                return slot
        self._grow()
        return len(self._arrays) - 1

    def _grow(self) -> None:
        """One more slot, in a commit of its own: a map that fails must not take it back."""
        slot = len(self._arrays)
        with self.store.transaction():
            self._record["epoch"][slot] = -1
            self._make(slot)
        self._arrays.append(self._live(slot))

    def _make(self, slot: int) -> None:
        for field in self._fields:
            self._group[f"{slot}/{field.name}"] = _aligned(field)

    def _live(self, slot: int) -> dict[str, Array]:
        return {field.name: self._group[f"{slot}/{field.name}"] for field in self._fields}

    def _hash_of(self, slot: int, epoch: int) -> bytes:
        return bytes.fromhex(digest_of(self._shard, Tag(self.run, 0, epoch), self._arrays[slot]))

    def _note(self, slot: int, epoch: int) -> None:
        self._record["hash"][slot] = np.frombuffer(self._hash_of(slot, epoch), np.uint8)
        self._record["epoch"][slot] = epoch

    def _bases(self, epoch: int, copies: Copies | None) -> Iterator[int]:
        """The epochs of the run until this one whose states are in slots now, and sound, the newest first; then the
        run's first epoch."""
        began = self.marks.began
        here = {int(found) for found in self._record["epoch"] if began < found < epoch}
        elsewhere = set(copies.epochs(self.run).get(self._shard, [])) if copies is not None else set()
        for found in sorted(here | {one for one in elsewhere if began < one <= epoch}, reverse=True):
            sound = found in here and self.noted(found) == self.hash(found) != b""
            if sound or (found in elsewhere and copies is not None and self._take_copy(found, copies)):
                yield found
        yield began

    def _take_copy(self, epoch: int, copies: Copies) -> bool:
        """Put the copy of a state into its slot. Returns whether it is sound."""
        found = copies.get(self.run, self._shard, epoch, self._fields)
        if found is None:
            return False
        given, arrays = found
        if bytes.fromhex(digest_of(self._shard, Tag(self.run, 0, epoch), arrays)) != given:
            return False
        slot = self._place(epoch)
        with self.store.transaction():
            self._record["epoch"][slot] = -1
            for name, array in arrays.items():
                self._arrays[slot][name][...] = array
            self._note(slot, epoch)
        return True

    def _discard(self, since: int) -> None:
        """Forget the states of an epoch and of later ones."""
        with self.store.transaction():
            self._record["epoch"][self._record["epoch"] >= since] = -1


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


def _count_slots(group: Mapping[str, Any], fields: Iterable[Field]) -> int:
    """The number of slots for these fields that a group has; 0 if it has other contents."""
    layouts: dict[str, Any] = {"slots": ((SLOTS,), _RECORD)}
    names, count = set(group), 0
    while count < SLOTS and (count < 2 or names != set(layouts)):
        layouts |= {f"{count}/{field.name}": (field.shape, field.dtype) for field in fields}
        count += 1
    if names != set(layouts):
        return 0
    found = {name: group[name] for name in layouts}
    fits = all(
        isinstance(array, np.ndarray) and array.flags.c_contiguous and (array.shape, array.dtype) == layouts[name]
        for name, array in found.items()
    )
    return count if fits else 0


def _aligned(field: Field) -> Array:
    """Zeros at a multiple of 64 bytes, as in a store: kernels may add in another order elsewhere."""
    size = math.prod(field.shape) * field.dtype.itemsize  # type: ignore[union-attr,arg-type]
    buffer = np.zeros(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(field.dtype).reshape(field.shape)
