"""The log of broadcasts, and its use: computing the local state of a shard again.

The coordinator's store has the log: what each epoch broadcast, committed with the decision of that epoch. From it, any
process that can load a shard computes the shard's local state of any epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pmstore._errors import NondeterminismError, ShardError
from pmstore._resume.fingerprint import digest
from pmstore._resume.fit_group import FitGroup
from pmstore._resume.state import PROGRESS
from pmstore._store.entrance import open as open_store
from pmstore.scale._holder import limited_threads, loaded_again
from pmstore.scale._lazy import LazyParts
from pmstore.scale._local import Disk, Memory, Slots
from pmstore.scale._messages import Array, Marks
from pmstore.scale._shards import Shard
from pmstore.scale._work import Work, parted

_ENDLESS = 1 << 62


class Log:
    """The broadcasts of the epochs. A Keeper of `pmstore._resume.state`."""

    def __init__(self, first: int = 0) -> None:
        self._new: dict[int, dict[str, Array]] = {}  # not in the store yet; without a store, all
        self._group: Any = None
        # The epochs of the best run and of this one that are in the log, and those that the log in the store has.
        self._needed = self._captured = range(0), range(first, _ENDLESS)

    @property
    def first(self) -> int:
        """Earlier epochs of the run are not in the log any more."""
        return self._needed[1].start

    def add(self, epoch: int, shared: Mapping[str, Array]) -> None:
        """Add the broadcast of an epoch. The next commit of the store contains it."""
        self._new[epoch] = dict(shared)

    def cut(self, first: int, end: int | None = None, best: range = range(0)) -> None:
        """Forget other epochs than those from the epoch `first` to that before `end`, and those of the best run. The
        next commit of the store has no more of them."""
        needed = best, range(first, _ENDLESS if end is None else end)
        if needed != self._needed:
            self._needed = needed
            self._new = {epoch: arrays for epoch, arrays in self._new.items() if self._needs(epoch)}

    def _needs(self, epoch: int) -> bool:
        return any(epoch in some for some in self._needed)

    def since(self, first: int, epoch: int) -> dict[str, Array] | None:
        """The broadcasts from the epoch `first` to that before `epoch`, by ``/<epoch>/<name>``, as workers get them.
        None: the log does not go back so far."""
        if first < self.first:
            return None
        found: dict[str, Array] = {}
        for one in range(first, epoch):
            found[f"/{one}/"] = np.zeros(0)  # so that the epoch is there, whatever it broadcast
            found.update({f"/{one}/{name}": array for name, array in self._of(one).items()})
        return found

    def _of(self, epoch: int) -> dict[str, Array]:
        if epoch in self._new or self._group is None:
            return self._new.get(epoch, {})
        return {name: np.array(array) for name, array in self._group.group(str(epoch)).items()}

    # ---- the store

    def capture(self, group: MutableMapping[str, Any]) -> None:
        if self._captured != self._needed:
            for key in list(group):
                if not self._needs(int(key.partition("/")[0])):
                    del group[key]
            self._captured = self._needed
        for epoch, arrays in self._new.items():
            for name, array in arrays.items():
                group[f"{epoch}/{name}"] = array
        self._new.clear()
        self._group = group

    def resume(self, group: Mapping[str, Any]) -> None:
        self._group = group

    def load(self, group: Mapping[str, Any]) -> None:
        """Nothing: `Recovery` opens the store when a state is computed again."""

    def check(self, fit_group: FitGroup, name: str) -> None:
        group = fit_group.group.group(name)
        epochs = {key.partition("/")[0] for key in group}
        if not epochs <= {str(epoch) for epoch in range(int(fit_group.group[PROGRESS]["epoch"]))}:
            raise fit_group.changed(name, "the broadcasts of the epochs until now", "something else")


class Recovery:
    """The local states at the end of a fit: of its best run.

    Parameters
    ----------
    function : Work
    shards : sequence of Shard
    run : str
    began, epoch : int
        The epoch with which the run began, and the one after its last.
    hashes : ndarray of uint8, shape (n, 16)
    log : callable
        Returns a context with the log.
    environment : str
        That of the workers, as JSON.
    keeps : object
        What must not go before this does.
    """

    def __init__(
        self,
        function: Work,
        shards: tuple[Shard, ...],
        run: str,
        began: int,
        epoch: int,
        hashes: Array,
        log: Callable[[], AbstractContextManager[Log]],
        environment: str,
        keeps: Any,
    ) -> None:
        self._function, self._shards, self._run = function, shards, run
        self._marks, self._epoch = Marks(began, epoch, epoch), epoch
        self._hashes, self._log, self._environment, self._keeps = hashes, log, environment, keeps

    def parts(self, name: str) -> LazyParts:
        """The arrays of a field."""
        return LazyParts([Shard(self.load, i, name) for i in range(len(self._shards))], _as_it_is)

    def load(self, i: int, name: str) -> Array:
        """The array of a field of a shard."""
        function, epoch, wanted = self._function, self._epoch, self._hashes[i].tobytes()
        slots = Slots(Memory(), self._run, i, function.fields[i])
        with Disk().look(function.path(self._run, i)) as found:
            slots.take(found)
        slots.marks = self._marks
        if epoch == self._marks.began or slots.hash(epoch) != wanted:
            self._replay(slots, i, wanted)
        return slots.arrays(epoch)[name]

    @contextlib.contextmanager
    def _opened_log(self, i: int) -> Iterator[Log]:
        with contextlib.ExitStack() as until_closed:
            try:
                log = until_closed.enter_context(self._log())
            except _ForgottenError as error:
                folder = os.path.dirname(self._function.path(self._run, i))
                raise ShardError(
                    f"the local state of shard {i} is lost: {folder} does not have it any more, and it can't be "
                    f"computed again from the log of broadcasts, as {error}. Copy the parts that you need before a fit "
                    "is forgotten or its store is deleted; run() computes the fit anew",
                    i,
                ) from None
            yield log

    def _replay(self, slots: Slots, i: int, wanted: bytes) -> None:
        """Compute the state again, as a worker does."""
        function, epoch = self._function, self._epoch
        loaded = loaded_again(i, self._shards[i], function.expected(i))
        with limited_threads(json.loads(self._environment)["BLAS threads"]), self._opened_log(i) as log:
            held, first = function.prepare(loaded), epoch
            while True:
                since = log.since(first, epoch)
                if since is None:
                    raise ShardError(f"the local state of shard {i} is lost: {log_too_short(log.first)}", i)
                found = function.bring(slots, i, held, epoch, wanted, parted(since)[1])
                if found == epoch:
                    break
                if found < 0:
                    raise NondeterminismError(
                        f"the local state of shard {i} was computed again here, and has other bits than on the worker "
                        f"that computed it, which had {self._environment}: this process has other libraries, or map() "
                        "and local_start() are no functions of their arguments",
                        i,
                    )
                first = found


class _ForgottenError(Exception):
    """The store does not have the log of a fit any more. The text tells why."""


@contextlib.contextmanager
def stored_log(path: str, name: str, run: str) -> Iterator[Log]:
    """The log in the store of a finished fit. Raises _ForgottenError."""
    try:
        opened = open_store(path, "r")
    except FileNotFoundError:
        raise _ForgottenError(f"the store {path} does not exist any more") from None
    with contextlib.closing(opened) as store:
        fit_group = FitGroup(store, name)
        fingerprint, group = fit_group.fingerprint, fit_group.group
        if fingerprint is None:
            raise _ForgottenError(f"the store {path} has no fit {name!r} any more")
        if digest(fingerprint) != run:
            raise _ForgottenError(f"the fit {name!r} in {path} is another one now")
        if not fit_group.finished:
            raise _ForgottenError(f"the fit {name!r} in {path} was begun again, and has not ended")
        log = Log(int(group[PROGRESS]["log_from"]))
        log.resume(group.group("broadcasts"))
        yield log


def log_too_short(first: int) -> str:
    """Why a state can't be computed again, in words."""
    return (
        f"its directory does not have it, the log of broadcasts begins with epoch {first}, and no sound copy in the "
        "archive is as new as that"
    )


def _as_it_is(array: Array) -> Array:
    return array
