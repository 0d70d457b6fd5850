"""Copies of local states in a folder or an object store that all workers reach, so that the log needs not go back to
the beginning.

An object is one state of one shard: its hash, and then the arrays. A worker writes one when it is asked for a later
epoch, so that only decided states are there.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from pmstore._resume.state import Field
from pmstore.scale._messages import Array, Marks

logger = logging.getLogger("pmstore")

PATIENCE = 60.0  # seconds for which a place may be out of reach

_NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,18})")


class Copies:
    """The copies of a fit's local states.

    Parameters
    ----------
    url : str or path-like
        A folder, or a URL that fsspec knows.
    every : int
        A shard is copied every so many epochs, not all shards in the same one.
    """

    def __init__(self, url: str | os.PathLike[str], every: int) -> None:
        self.url = url if isinstance(url, str) and "://" in url else os.path.abspath(os.fspath(url))
        self.every = every
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    @property
    def place(self) -> Any:
        """The place of the objects; the imports take a while."""
        if self._opened is None:
            from pmstore.archive._objects import Retrying, place_of

            stop = threading.Event()
            tell = logger.warning
            self._opened = Retrying(place_of(self.url), stop, lambda error: tell("%s", error), patience=PATIENCE)
        return self._opened

    def let_go(self) -> None:
        """Take the place as it is when it is needed next, also if its folder has gone meanwhile."""
        self._opened = None

    def is_due(self, shard: int, epoch: int, marks: Marks) -> bool:
        """Whether the state of a shard before this epoch is to be copied: it is decided, and the commit before was
        that of an epoch before the shard's turn."""
        turns = (epoch + shard) // self.every - (marks.before + shard) // self.every
        return marks.decided == epoch > marks.began and turns > 0

    def put(self, run: str, shard: int, epoch: int, found: bytes, arrays: Iterable[Array]) -> None:
        """Write a copy of a state with this hash, or the same one again."""
        self.place.put(f"{run}/{shard}-{epoch}", [found, *(array.tobytes() for array in arrays)])

    def epochs(self, run: str) -> dict[int, list[int]]:
        """The epochs of which there are copies, by shards, the oldest first."""
        found: dict[int, list[int]] = {}
        for name in self.place.list(run):
            if match := _NAME.fullmatch(name):
                found.setdefault(int(match[1]), []).append(int(match[2]))
        return {shard: sorted(epochs) for shard, epochs in found.items()}

    def get(self, run: str, shard: int, epoch: int, fields: Iterable[Field]) -> tuple[bytes, dict[str, Array]] | None:
        """The hash of a copy, and its arrays, which may be damaged; None if it is missing or has another length."""
        from pmstore.archive._objects import MissingObjectError

        sizes = {field.name: math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields}  # type: ignore[arg-type]
        try:
            data = self.place.get(f"{run}/{shard}-{epoch}")
        except MissingObjectError:
            return None
        if len(data) != 16 + sum(sizes.values()):
            return None
        arrays, at = {}, 16
        for field in fields:
            end = at + sizes[field.name]
            arrays[field.name] = np.frombuffer(data[at:end], field.dtype).reshape(field.shape)
            at = end
        return data[:16], arrays

    def log_from(self, run: str, shards: int, now: int) -> int:
        """The epoch from which on the log is needed at most: each shard has two copies of states since then."""
        found = self.epochs(run)
        epochs = [[epoch for epoch in found.get(shard, []) if epoch <= now] for shard in range(shards)]
        return min((copies[-2] if len(copies) > 1 else 0 for copies in epochs), default=0)

    def forget(self, run: str, before: float = math.inf, spared: range = range(0)) -> None:
        """Delete copies of states before an epoch, such as the first one of the log, as no state can be computed from
        them any more; but for some epochs. By default all copies of the fit are deleted."""
        found = self.epochs(run).items()
        old = ((shard, epoch) for shard, epochs in found for epoch in epochs if epoch < before and epoch not in spared)
        self.place.delete(f"{run}/{shard}-{epoch}" for shard, epoch in old)
