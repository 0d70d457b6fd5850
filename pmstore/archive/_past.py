"""Whether the places of a drain have the past of its store. It is refused if they have that of another copy.

A copy that was put back, and went on, makes commits with numbers that the archive has already. If it has fewer commits,
or as many, that is noticed. If it has more, the archive does not tell: it has no hash of a commit that the store left
behind.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import numpy as np

from pmstore._catalog.kinds import ARRAY
from pmstore._errors import ArchiveConflictError, ArchiveDamagedError, StaleSnapshotError
from pmstore._snapshot import Reader
from pmstore._values.array import read_layout
from pmstore.archive._capture import Changes, Seen, capture, mark
from pmstore.archive._codecs import Bytes
from pmstore.archive._format import Row
from pmstore.archive._sources import Sources
from pmstore.archive._target import Target
from pmstore.archive._versions import Library, VersionCore

__all__ = ["refuse_another_past"]


def refuse_another_past(reader: Reader, now: int, targets: Sequence[Target]) -> None:
    """Raises ArchiveConflictError if a place has the versions of another copy of the store, as far as it tells. now:
    the newest commit."""
    captured = targets[0].last
    for target in targets:
        row = target.index.find(now)
        if captured < now and row is not None and row.lossy:  # it would be another one in the first place (I27)
            raise ArchiveConflictError(
                f"{target.place.url} has version {now} with approximated arrays, and {targets[0].place.url} "
                "lacks it: name the place that has it first, or commit before the drain begins"
            )
        if target.last > now:
            raise ArchiveConflictError(
                f"{target.place.url} has version {target.last}, and the store is at {now}: it was taken back "
                "since. Archive.fork makes a store that goes on from an older version, with an archive of its own"
            )
    found = [(target, row) for target in targets if (row := target.index.find(now)) is not None and not row.lossy]
    if not found:
        return
    with contextlib.suppress(StaleSnapshotError):  # newer commits came
        other = capture(reader, Seen(0), functools.partial(_first_other, found=found))
        if other is not None:
            raise ArchiveConflictError(
                f"{other.place.url} has version {now} with other contents: another copy of the store made it. "
                "Give this copy a place of its own"
            )


def _first_other(changes: Changes, found: Sequence[tuple[Target, Row]]) -> Target | None:
    """The first place whose version is not the commit, although it has its number."""
    state = changes.state
    for target, row in found:
        if changes.sequence == row.version and state != row.state:
            with contextlib.suppress(ArchiveDamagedError):  # the place does not tell
                if not _differs_in_spare_rows(changes, target, row):
                    return target
    return None


def _differs_in_spare_rows(changes: Changes, target: Target, row: Row) -> bool:
    """Whether a commit differs from a version in spare rows of arrays that grow only: a compacted store lacks them."""
    library = Library(Sources([target.place]))
    entries = library.entries(target.index.chain(row))
    there, rest = VersionCore(library, row.version, entries), row.state - changes.state
    for key, item in entries.items():
        entry = changes.entries.get(key)
        if entry is None or entry.kind != ARRAY or item.kind != ARRAY:
            continue
        entry_there = there.get(key)
        assert entry_there is not None
        ours, theirs = read_layout(changes.core, entry), read_layout(there, entry_there)
        if ours.growth is None or theirs.growth is None:
            continue
        if (ours.dtype, ours.shape, ours.maxshape) != (theirs.dtype, theirs.shape, theirs.maxshape):
            return False
        contents = library.contents(item)
        if not _begins_with(contents[: ours.nbytes], changes, key):
            return False
        rest -= mark(key, entry_there, contents) - changes.known[key].mark
    return rest % (1 << 63) == 0


def _begins_with(rows: Bytes, changes: Changes, key: bytes) -> bool:
    """Whether the contents of an array begin with these bytes."""
    return all(
        np.array_equal(data[: max(0, len(rows) - at)], rows[at : at + len(data)]) for at, data in changes.pieces(key)
    )
