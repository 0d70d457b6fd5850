"""`Store.backup`: a copy of one commit of a store that may be written meanwhile (I22).

    a snapshot ─── contents, verified by its hashes ─────▶ the copy    some have changed meanwhile
    the next one ─ blocks that the copy does not have ───▶ the copy    and so on, until none has
    the last one ─ header and metadata ──────────────────▶ the copy ── checked, synced ──▶ its name

The next snapshots copy only blocks with another hash. So they are quick, and few contents change meanwhile.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from pmstore._catalog.catalog import Catalog
from pmstore._core import BLOCK, Core
from pmstore._errors import CorruptStoreError, OutOfSpaceError, StaleSnapshotError
from pmstore._snapshot import Reader, Snapshot, newest
from pmstore._store.cores import opened_core
from pmstore._store.held import tell_pid
from pmstore._store.new_store import Progress, new_file, refuse_taken
from pmstore._store.opening import path_of
from pmstore._store.report import check

__all__ = ["backup"]

_PIECE = 4096 * BLOCK  # bytes of contents between two calls of progress

Extent = tuple[int, int]  # offset and length


def backup(fd: int, source: str, path: str | bytes | os.PathLike[Any], progress: Progress | None) -> int:
    """See `Store.backup`. fd: of the file of the store, whose path is `source`."""
    target = path_of(path)
    refuse_taken(target, fd, "the store", "a backup is a new file")
    try:
        with new_file(target) as held:
            try:
                os.fchmod(held.fd, stat.S_IMODE(os.fstat(held.fd).st_mode) & os.fstat(fd).st_mode)  # as cp does
                os.ftruncate(held.fd, 0)
                sequence = _Copying(fd, held.fd, progress).run()
            except BaseException:
                os.close(held.fd)
                raise
            copy = Catalog(opened_core(target, held, "auto", read_only=True), read_only=True)
            try:
                report = check(copy)
            finally:
                copy.close()
            if not report.ok:
                raise CorruptStoreError(str(report))
    except OutOfSpaceError as error:
        raise OutOfSpaceError(error.errno, f"there is no space for the backup {target!r}: {error}", target) from error
    except StaleSnapshotError as error:
        raise StaleSnapshotError(f"{source!r} changes too quickly: try again when fewer commits come") from error
    except CorruptStoreError as error:
        text = f"{source!r} is damaged, and there is no backup of it; pmstore.salvage copies what is sound: {error}"
        raise CorruptStoreError(text) from error
    return sequence


class _Copying:
    """copy: the descriptor of the new file."""

    def __init__(self, fd: int, copy: int, progress: Progress | None) -> None:
        self.fd, self.copy, self.progress = fd, copy, progress
        self.reader = Reader(fd, tell_pid, changing=True)
        self.there: dict[Extent, Any] = {}  # what the copy has of the extents of the last snapshot
        self.missing: list[Extent] = []  # and what not
        self.told = 0

    def run(self) -> int:
        """Returns the sequence number of the commit that was copied."""
        return self.reader.patiently(self._round)

    def _round(self) -> int:
        """Copy the missing parts of the newest commit. StaleSnapshotError: later commits have changed some of them."""
        snapshot = self.reader.take()
        core = Core.of_snapshot(snapshot)
        try:
            snapshot.begin_copy(self.copy)
            self._contents(core, snapshot)
            if not self.missing:
                snapshot.end_copy(self.copy)
                return core.sequence
            if newest(self.fd) <= core.sequence:
                raise CorruptStoreError("contents do not match their hashes")
            raise StaleSnapshotError
        finally:
            core.close()

    def _contents(self, core: Core, snapshot: Snapshot) -> None:
        """Copy the contents of a snapshot, those first that were missing of the last one: they change most often."""
        extents = dict.fromkeys((row.entry.offset, row.entry.length) for row in core.scan(b"") if row.entry.offset)
        self.there = {one: self.there.get(one) or snapshot.hashes(one[1]) for one in extents}
        order = dict.fromkeys(one for one in self.missing if one in extents) | extents
        self.missing = []
        total, done = sum(length for _, length in extents), 0
        for one in order:
            offset, length = one
            whole = True
            for at in range(0, length, _PIECE):
                count = min(_PIECE, length - at)
                there = snapshot.copy_contents(self.copy, offset, length, at, count, self.there[one])
                whole &= there
                done += count if there else 0
                if self.progress is not None:
                    self.told = max(self.told, done)
                    self.progress(min(self.told, total), total)
            if not whole:
                self.missing.append(one)
