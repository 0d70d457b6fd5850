"""The changes of a commit: the difference between two snapshots of a store.

    snapshot ──scan──▶ entries: new, gone, or with another place       (the catalog)
             ──digest, hashes──▶ blocks of contents that changed       (tables of hashes; no contents are scanned)
             ──copy──▶ their bytes, verified by the snapshot's hashes  (I20)

The bytes are those of the snapshot's commit, whatever later commits do meanwhile (I23). A copy of the contents that
change, the replica, stays in memory within a limit. The next difference is made against it. It has what the last
version has: of an array with a lossy codec, what its bytes decode to (I27).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import LINEAGE_KEY
from pmstore._core import BLOCK, FIXED, Core, Entry, hash64, pointer_to
from pmstore._errors import CorruptStoreError, StaleSnapshotError
from pmstore._snapshot import Reader
from pmstore._values.array import read_layout
from pmstore.archive._codecs import FRAME, Bytes
from pmstore.archive._format import Loss

__all__ = ["Approximation", "Change", "Changes", "Known", "Seen", "capture", "mark"]

_SMALL = 2016  # bytes; larger contents have a table of hashes in pages of its own

Runs = list[tuple[int, int]]  # offset and length of each, in order


class Approximation(NamedTuple):
    """The approximation that the last version has instead of the commit's contents. since: lossy versions since the
    last one that was written without loss."""

    since: int
    loss: Loss


class Known(NamedTuple):
    """An entry as the last version has it."""

    entry: Entry
    digest: int  # of the table of hashes; the hash of small contents; 0 if there are no contents
    hashes: Any  # of the blocks of the commit's contents, or None
    replica: Bytes | None
    mark: int  # a hash of the key, of all that the entry says but its place, and of the version's contents
    approximation: Approximation | None = None

    def describes(self, entry: Entry) -> bool:
        """Whether an entry is the same, but for its place and contents."""
        return self.entry._replace(offset=entry.offset) == entry


class Change(NamedTuple):
    """Contents that changed. runs: where; data: their bytes, joined; before: those of the last version, if they are
    known. lossy: None, or, of whole contents that may be approximated, the lossy versions since the last one that was
    written without loss."""

    runs: Runs
    data: Bytes
    before: Bytes | None
    lossy: int | None = None


class Changes(NamedTuple):
    """A version to be written, while its snapshot is open.

    entries: all of them; changed: those whose contents are not those of the last version, and what of them; None: all,
    and `pieces` reads it. wanted: gets the extents that are to be copied together with the next snapshot, if it is too
    late for this one.
    """

    core: Core
    time: float
    entries: dict[bytes, Entry]
    changed: dict[bytes, Change | None]
    wanted: list[tuple[int, int]]
    known: dict[bytes, Known]

    @property
    def state(self) -> int:
        """A hash of all entries and contents as the version has them, by which versions of other places can be
        compared. The lineage is not part of it, because restored stores have another."""
        return sum(one.mark for key, one in self.known.items() if key != LINEAGE_KEY) % (1 << 63)

    @property
    def sequence(self) -> int:
        """The sequence number of the commit."""
        return self.core.sequence

    def pieces(self, key: bytes) -> Iterator[tuple[int, Bytes]]:
        """All contents of an entry: offset and bytes of each piece. Raises StaleSnapshotError, CorruptStoreError."""
        entry, change = self.entries[key], self.changed.get(key)
        there = change.data if change is not None and change.runs == [(0, entry.length)] else None
        for at in range(0, entry.length, FRAME):
            count = min(FRAME, entry.length - at)
            yield at, _copied(self, entry, [(at, count)]) if there is None else there[at : at + count]

    def dtype(self, key: bytes) -> np.dtype[Any] | None:
        """The dtype of an array whose contents are its elements, spare rows included; None for anything else."""
        entry = self.entries[key]
        if entry.kind != ARRAY:
            return None
        try:
            described = read_layout(self.core, entry)
        except CorruptStoreError:
            return None
        return None if described.tail else described.dtype

    def has_spare_rows(self, key: bytes) -> bool:
        """Whether an array grows. Its spare rows would count in the errors of an approximation."""
        return read_layout(self.core, self.entries[key]).growth is not None

    @property
    def losses(self) -> dict[bytes, Loss]:
        """The losses of the arrays that the version approximates."""
        found = ((key, one.approximation.loss) for key, one in self.known.items() if one.approximation is not None)
        return {key: loss for key, loss in found if loss.absolute}

    def approximate(self, key: bytes, contents: Bytes, approximation: Approximation) -> None:
        """The version has these contents, and not those of the commit (I27)."""
        change, known = self.changed[key], self.known[key]
        assert change is not None
        change.data[:] = contents
        self.known[key] = known._replace(mark=mark(key, known.entry, contents), approximation=approximation)

    def element(self, key: bytes) -> int:
        """The bytes of an element of an array, as far as codecs go; 1 for anything else."""
        dtype = self.dtype(key)
        if dtype is None:
            return 1
        if dtype.kind == "c":
            return dtype.itemsize // 2
        return dtype.itemsize if dtype.kind in "fiumMb" else 1


class Seen:
    """The entries of the last version. They change only when a capture has succeeded as a whole."""

    def __init__(self, room: int, lossy: Callable[[bytes, Any], bool] | None = None) -> None:
        """room: bytes of replicas, at most. lossy: whether an array, with its key and dtype, may be approximated."""
        self.known: dict[bytes, Known] = {}
        self.lossy = lossy
        self.room = room
        self.used = 0

    def emptied(self) -> Seen:
        """The same before the first capture."""
        return Seen(self.room, self.lossy)

    def finalize(self, known: dict[bytes, Known], changed: list[tuple[Bytes, Runs, Bytes]]) -> None:
        """Take these entries as those of the last version. changed: replicas, and their new bytes."""
        for replica, runs, data in changed:
            _put(replica, runs, data)
        self.known = known
        self.used = sum(len(one.replica) for one in known.values() if one.replica is not None)


def capture(reader: Reader, seen: Seen, write: Any) -> Any:
    """The result of `write` for the changes since the last capture, up to the newest commit.

    write: called with Changes while the snapshot is open, perhaps several times; the last call counts. Raises
    StaleSnapshotError if commits change contents as quickly as they can be copied.
    """
    wanted: list[tuple[int, int]] = []
    written = False  # `write` was called before: contents that it copies itself had changed

    def attempt() -> Any:
        nonlocal written
        core = Core.of_snapshot(reader.take(wanted))
        try:
            scan = _Scan(core, seen, wanted)
            if not written:  # most versions need nothing more of the file, and are only encoded
                reader.release()
            written = True
            result = write(scan.changes)
            seen.finalize(scan.known, scan.replicas)
            return result
        finally:
            core.close()

    return reader.patiently(attempt)


class _Scan:
    """The scan of a snapshot: its changes, and its entries as those of the last version."""

    def __init__(self, core: Core, seen: Seen, wanted: list[tuple[int, int]]) -> None:
        entries = {row.key: row.entry for row in core.scan(b"")}
        self.known: dict[bytes, Known] = {}
        self.changes = Changes(core, time.time(), entries, {}, wanted, self.known)
        self.replicas: list[tuple[Bytes, Runs, Bytes]] = []
        self._seen = seen
        self._room = seen.room - seen.used
        for key, entry in entries.items():
            self.known[key] = self._scan(key, entry)

    def _scan(self, key: bytes, entry: Entry) -> Known:
        core, before = self.changes.core, self._seen.known.get(key)
        if not entry.offset:
            if before is not None and before.entry == entry:
                return before
            return Known(entry, 0, None, None, _mark(key, entry, b""))
        assert core.snapshot is not None
        digest = core.snapshot.digest(entry.offset, entry.length)
        if before is not None and before.entry == entry and before.digest == digest:
            return before
        if entry.length <= _SMALL:
            return self._small(key, entry, digest, before)
        if before is None or before.entry.length != entry.length:
            return self._new(key, entry, digest)
        return self._differs(key, entry, digest, before)

    def _lossy(self, key: bytes, entry: Entry, before: Known) -> int | None:
        """See Change."""
        if self._seen.lossy is None or before.replica is None or not before.describes(entry):
            return None
        dtype = self.changes.dtype(key)
        if dtype is None or self.changes.has_spare_rows(key) or not self._seen.lossy(key, dtype):
            return None
        return 0 if before.approximation is None else before.approximation.since

    def _small(self, key: bytes, entry: Entry, digest: int, before: Known | None) -> Known:
        data = np.frombuffer(bytearray(self.changes.core.contents(entry.offset, entry.length)), np.uint8)
        hashes = np.array([hash64(data.data)], np.uint64)
        if before is not None and before.entry.length != entry.length:
            before = None
        if before is None or before.hashes[0] != hashes[0] or (before.approximation and not before.describes(entry)):
            everything = [(0, entry.length)]
            old, lossy = (None, None) if before is None else (before.replica, self._lossy(key, entry, before))
            self.changes.changed[key] = Change(everything, data, old, lossy)
        elif before.approximation is not None:
            return before._replace(entry=entry, digest=digest)
        return Known(entry, digest, hashes, data, _mark(key, entry, data.data))

    def _new(self, key: bytes, entry: Entry, digest: int) -> Known:
        """Contents that the last version does not have, or has in another length."""
        replica, self.changes.changed[key] = None, None
        if not entry.flags & FIXED and entry.length <= self._room:
            self._room -= entry.length
            everything = [(0, entry.length)]
            replica = _copied(self.changes, entry, everything)
            self.changes.changed[key] = Change(everything, replica, None)
        hashes = self._hashes(entry)
        return Known(entry, digest, hashes, replica, _mark(key, entry, hashes.data.cast("B")))

    def _differs(self, key: bytes, entry: Entry, digest: int, before: Known) -> Known:
        hashes = self._hashes(entry)
        runs = _runs(np.flatnonzero(hashes != before.hashes), entry.length)
        if before.approximation is not None and not runs and before.describes(entry):
            return before._replace(entry=entry, digest=digest)
        lossy = self._lossy(key, entry, before) if runs else None
        if lossy is not None or before.approximation is not None:  # the other blocks are not those of the commit
            runs = [(0, entry.length)]
        if runs:
            data = _copied(self.changes, entry, runs)
            old = None if before.replica is None else _joined(before.replica, runs)
            self.changes.changed[key] = Change(runs, data, old, lossy)
            if before.replica is not None:
                self.replicas.append((before.replica, runs, data))
        return Known(entry, digest, hashes, before.replica, _mark(key, entry, hashes.data.cast("B")))

    def _hashes(self, entry: Entry) -> Any:
        snapshot = self.changes.core.snapshot
        assert snapshot is not None
        with _noted(entry, self.changes.wanted):
            return snapshot.block_hashes(entry.offset, entry.length)


def _mark(key: bytes, entry: Entry, contents: Any) -> int:
    """See Known. contents: the bytes, or the hashes of their blocks."""
    return hash64(repr((key, entry.kind, entry.flags, entry.length, entry.meta, hash64(contents))).encode())


def mark(key: bytes, entry: Entry, contents: Bytes) -> int:
    """The mark of an entry with these contents: see Known."""
    if len(contents) <= _SMALL:
        return _mark(key, entry, contents.data)
    hashes = [hash64(contents[at : at + BLOCK].data) for at in range(0, len(contents), BLOCK)]
    return _mark(key, entry, np.array(hashes, np.uint64).data.cast("B"))


def _runs(blocks: Any, length: int) -> Runs:
    """Runs of neighbouring blocks."""
    if not len(blocks):
        return []
    if blocks[-1] - blocks[0] == len(blocks) - 1:  # as most changes are
        start, end = int(blocks[0]) * BLOCK, (int(blocks[-1]) + 1) * BLOCK
        return [(start, min(end, length) - start)]
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = blocks[np.concatenate(([0], breaks))]
    ends = blocks[np.concatenate((breaks - 1, [len(blocks) - 1]))] + 1
    return [
        (int(start) * BLOCK, min(int(end) * BLOCK, length) - int(start) * BLOCK) for start, end in zip(starts, ends)
    ]


@contextlib.contextmanager
def _noted(entry: Entry, wanted: list[tuple[int, int]]) -> Iterator[None]:
    """Contents that have changed meanwhile are wanted together with the next snapshot."""
    try:
        yield
    except StaleSnapshotError:
        wanted.append((entry.offset, entry.length))
        raise


def _copied(changes: Changes, entry: Entry, runs: Runs) -> Bytes:
    """The bytes of runs, verified."""
    if entry.length <= _SMALL:
        return np.frombuffer(changes.core.contents(entry.offset, entry.length), np.uint8)
    snapshot = changes.core.snapshot
    assert snapshot is not None
    out = np.empty(sum(count for _, count in runs), np.uint8)
    place, at = pointer_to(out), 0
    with _noted(entry, changes.wanted):
        for start, count in runs:
            snapshot.copy(entry.offset, entry.length, start, place + at, count)
            at += count
    return out


def _joined(data: Bytes, runs: Runs) -> Bytes:
    if len(runs) == 1:
        return data[runs[0][0] : runs[0][0] + runs[0][1]]
    return np.concatenate([data[at : at + count] for at, count in runs])


def _put(data: Bytes, runs: Runs, new: Bytes) -> None:
    at = 0
    for start, count in runs:
        data[start : start + count] = new[at : at + count]
        at += count
