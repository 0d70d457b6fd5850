"""Reading aggregates back: shards of a process, rows for another number of processes, the newest whole version."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._core import hash64
from pmstore._errors import ArchiveDamagedError, ArchiveError
from pmstore.archive._manifest import Manifest, Shard, checked_sequence, decode, manifest_name, sequences
from pmstore.archive._objects import MissingObjectError, Place, ShortObjectError, place_of

__all__ = ["Aggregate", "open_aggregate", "whole"]

_TOGETHER = 1 << 26  # bytes that are read at once


class Aggregate:
    """One version of an aggregate, made by `open_aggregate`. It keeps only the manifest in memory.

    All bytes that are read are verified. If they do not match their hash, ArchiveDamagedError is raised. Methods raise
    ArchiveUnavailableError if the target can't be reached.

    Attributes
    ----------
    sequence : int
        The version.
    ranks : int
        The number of processes that wrote it.
    nbytes : int
        The bytes of all shards.
    time : float
        When it was written, in seconds since 1970, by the writer's clock.
    """

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._place = place
        self._manifest = manifest
        self.sequence, self.ranks, self.time = manifest.sequence, manifest.ranks, manifest.time
        self.nbytes = sum(part.size for part in manifest.parts)
        self._of: dict[int, list[Shard]] = {}
        self._rows: dict[str, list[Shard]] = {}
        for shard in sorted(manifest.shards, key=lambda shard: shard.rank):
            self._of.setdefault(shard.rank, []).append(shard)
            if shard.rows:
                self._rows.setdefault(shard.name, []).append(shard)

    def __repr__(self) -> str:
        return f"Aggregate({self._place.url!r}, sequence={self.sequence}, ranks={self.ranks}, nbytes={self.nbytes:,})"

    def shards(self, rank: int) -> dict[str, Any]:
        """All shards of one process: arrays, new and writeable, and bytes. Raises IndexError if there was no such
        process."""
        if not 0 <= rank < self.ranks:
            raise IndexError(
                f"version {self.sequence} was written by {self.ranks} processes; rank {rank} is none of them"
            )
        return {shard.name: value for shard, value in self._read(self._of.get(rank, []))}

    def read(self, rank: int, name: str) -> Any:
        """One shard of one process. Raises KeyError if it has none of this name."""
        for shard in self._of.get(rank, []):
            if shard.name == name:
                return next(self._read([shard]))[1]
        raise KeyError(name)

    def names(self, rank: int) -> list[str]:
        """The names of the shards of one process."""
        return [shard.name for shard in self._of.get(rank, [])]

    def row_counts(self) -> dict[str, int]:
        """The arrays that are split by rows, and how many rows all processes have of each."""
        return {name: sum(shard.shape[0] for shard in shards) for name, shards in self._rows.items()}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray[Any, Any]:
        """Rows of an array that was declared in ``rows=``, whichever processes wrote them, as a new array.

        Only the shards that have some of the rows are read, each as a whole, because it is verified.

        Parameters
        ----------
        name : str
            The array.
        begin, end : int
            From row `begin` up to, and without, row `end`; None: the last one included.

        Raises
        ------
        KeyError
            No array of this name was declared.
        IndexError
            It has no such rows.
        """
        shards = self._rows[name]
        count = sum(shard.shape[0] for shard in shards)
        end = count if end is None else end
        if not 0 <= begin <= end <= count:
            raise IndexError(f"{name!r} has {count} rows, and no rows from {begin} to {end}")
        made: np.ndarray[Any, Any] = np.empty((end - begin, *shards[0].shape[1:]), shards[0].dtype)
        wanted, at = [], 0
        for shard in shards:
            first, last = max(begin, at), min(end, at + shard.shape[0])
            if first < last:
                wanted.append((shard, first - begin, last - begin, first - at, last - at))
            at += shard.shape[0]
        for (_, array), (_, to, to_end, of, of_end) in zip(self._read([one[0] for one in wanted]), wanted):
            made[to:to_end] = array[of:of_end]
        return made

    def share(self, rank: int, ranks: int) -> dict[str, np.ndarray[Any, Any]]:
        """The rows that process `rank` of `ranks` gets of each array that is split by rows, if all get equally many.

        It has the rows from ``count * rank // ranks`` up to, and without, ``count * (rank + 1) // ranks``.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks}")
        counts = self.row_counts()
        return {name: self.rows(name, n * rank // ranks, n * (rank + 1) // ranks) for name, n in counts.items()}

    def is_whole(self, *, verify: bool = False) -> bool:
        """Whether all parts are there and have their sizes; verify: and their hashes."""
        try:
            for part in self._manifest.parts:
                if self._place.size(part.name) != part.size:
                    return False
            if verify:
                for _ in self._read(self._manifest.shards):
                    pass
        except (MissingObjectError, ArchiveDamagedError):
            return False
        return True

    def _read(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Any]]:
        """The values of shards. Values that follow one another in a part are read at once, up to a limit."""
        some: list[Shard] = []
        size = 0
        for shard in shards:
            if some and size + shard.size > _TOGETHER:
                yield from self._read_some(some)
                some, size = [], 0
            some.append(shard)
            size += shard.size
        yield from self._read_some(some)

    def _read_some(self, shards: list[Shard]) -> Iterator[tuple[Shard, Any]]:
        values: list[np.ndarray[Any, Any]] = []
        runs: list[tuple[int, int, list[memoryview]]] = []  # part, offset, where its bytes go
        end = (-1, -1)
        for shard in shards:
            values.append(np.empty(shard.size, np.uint8))
            whole = memoryview(values[-1])  # type: ignore[arg-type, unused-ignore]
            done = 0
            for piece in shard.pieces:
                if (piece.part, piece.at) != end:
                    runs.append((piece.part, piece.at, []))
                runs[-1][2].append(whole[done : done + piece.size])
                done += piece.size
                end = piece.part, piece.at + piece.size
        for part, at, buffers in runs:
            try:
                self._place.read_into(self._manifest.parts[part].name, at, buffers)
            except (MissingObjectError, ShortObjectError) as error:
                raise ArchiveDamagedError(f"version {self.sequence}: {error}") from error
        for shard, value in zip(shards, values):
            yield shard, self._value(shard, value)

    def _value(self, shard: Shard, value: np.ndarray[Any, Any]) -> Any:
        if hash64(value.data) != shard.hash:
            parts = ", ".join(sorted({self._manifest.parts[piece.part].name for piece in shard.pieces}))
            raise ArchiveDamagedError(
                f"{self._place.url}, version {self.sequence}: {shard.name!r} of rank {shard.rank} in {parts} is damaged"
            )
        if shard.dtype is None:
            return value.tobytes()
        shape = shard.shape[::-1] if shard.order == "F" else shard.shape
        array: np.ndarray[Any, Any] = np.ndarray(shape, shard.dtype, value)  # type: ignore[arg-type, unused-ignore]
        return array.T if shard.order == "F" else array


def _found(place: Place, sequence: int) -> Aggregate:
    where = f"{place.url}, version {sequence}"
    try:
        data = place.get(manifest_name(sequence))
    except MissingObjectError:
        raise ArchiveError(f"{where}: there is none") from None
    except ShortObjectError as error:
        raise ArchiveDamagedError(f"{where}: {error}") from error
    return Aggregate(place, decode(data, sequence, where))


def whole(place: Place, sequence: int, verify: bool) -> Aggregate | None:
    try:
        found = _found(place, sequence)
    except ArchiveDamagedError:
        return None
    return found if found.is_whole(verify=verify) else None


def open_aggregate(
    url: str | os.PathLike[str],
    sequence: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Aggregate:
    """Open a version that `aggregate` wrote.

    Parameters
    ----------
    url : str or path
        The folder or target.
    sequence : int, optional
        The version. None: the newest one that is whole, by the sizes of its parts.
    storage_options : mapping, optional
        For fsspec.

    Raises
    ------
    ArchiveError
        There is no such version, or none that is whole.
    ArchiveDamagedError
        The manifest is damaged.
    ArchiveUnavailableError
        The target can't be reached.
    """
    place = place_of(url, **dict(storage_options or {}))
    if sequence is not None:
        return _found(place, checked_sequence(sequence))
    for newest in reversed(sequences(place)):
        if (found := whole(place, newest, False)) is not None:
            return found
    raise ArchiveError(f"{place.url} holds no version that is whole")
