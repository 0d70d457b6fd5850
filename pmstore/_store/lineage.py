"""Whose history a store has: its own, that of the store whose newest version it was restored from, or a branch.

A store without an entry here has a lineage of its own, its id. A restored one has the entry of the archive that it
goes on with; a fork has the place that it left.
"""

from __future__ import annotations

import msgpack

from pmstore._catalog.kinds import INLINE
from pmstore._catalog.names import LINEAGE_KEY
from pmstore._core import META_MAX, Core, Entry
from pmstore._errors import MALFORMED, CorruptStoreError

_OWN = 16  # bytes that a store's id takes more than none

__all__ = ["entry_of", "lineage_of", "parent_of"]


def entry_of(lineage: str | None, parent: tuple[str, int] | None) -> Entry:
    """The entry of a restored store or a fork, or of one that was compacted. parent: url and version. Raises ValueError
    if the url is too long, also if there would be no room for the lineage that compacting a fork writes down."""
    meta = msgpack.packb([lineage, parent])
    if len(meta) + (_OWN if lineage is None else 0) > META_MAX:
        raise ValueError("the URL of the archive is too long to be kept in a fork")
    return Entry(0, 0, INLINE, 0, meta)


def _read(core: Core) -> tuple[str | None, tuple[str, int] | None]:
    entry = core.get(LINEAGE_KEY)
    if entry is None:
        return None, None
    try:
        lineage, parent = msgpack.unpackb(entry.meta)
        if not isinstance(lineage, (str, type(None))):
            raise ValueError("of another type")
        return lineage, None if parent is None else (str(parent[0]), int(parent[1]))
    except MALFORMED as error:
        raise CorruptStoreError(f"the store's lineage is damaged: {error}") from error


def lineage_of(core: Core) -> str:
    """The id of an open store's history."""
    lineage, _ = _read(core)
    return lineage if lineage is not None else f"{core.store_id:016x}"


def parent_of(core: Core) -> tuple[str, int] | None:
    """URL and version of the archive that a fork left; None for any other store."""
    return _read(core)[1]
