"""A warning about changes of rows that have moved: see `pmstore/_catalog/growing.py`.

A move makes the arrays over the old rows read-only. Views that programs made of them before can still be written. What
is written between the move and the next commit would be lost in silence, so that commit compares the old rows.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from pmstore._catalog.growing import Grown, Moved
from pmstore._errors import LostUpdateWarning
from pmstore._store.opening import outside

if TYPE_CHECKING:
    from pmstore._store.store import Store

__all__ = ["MovedRows"]


class MovedRows:
    """A companion of a store until its next commit or rollback."""

    __slots__ = ("__weakref__", "_grown")

    def __init__(self, grown: Grown) -> None:
        self._grown = grown

    @classmethod
    def follow(cls, store: Store) -> None:
        """Watches the rows that an append or a resize has moved."""
        grown = store._catalog.grown
        if grown.moved and grown.companion is None:
            grown.companion = cls(grown)
            store._accompany(grown.companion)

    def before_commit(self) -> None:
        self._grown.lost += [moved.name for moved in self._taken() if moved.changed()]

    def after_rollback(self) -> None:
        self._taken()
        self._grown.lost.clear()

    @staticmethod
    def warn(grown: Grown) -> None:
        """Warns of changes that the last commit lacks."""
        while grown.lost:
            name = grown.lost.pop()
            warnings.warn(
                f"{name!r} has moved because it grew, and a view of its old rows was changed since: the change is not "
                "in the store. Make views of the array that append() or resize() returned",
                LostUpdateWarning,
                stacklevel=outside()[0],
            )

    def _taken(self) -> list[Moved]:
        grown = self._grown
        moved, grown.moved, grown.companion = grown.moved, [], None
        return moved
