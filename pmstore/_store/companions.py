"""Objects that a store calls at its commits and rollbacks: pmstore.torch keeps a module and its optimizer there."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Companion"]


class Companion(Protocol):
    """A store calls it in the thread that holds the transaction lock, and keeps a weak reference only."""

    def before_commit(self) -> None:
        """Put the companion's changes into the store, so that the commit contains them. An error is one of the commit:
        nothing is committed, and all changes stay pending."""

    def after_rollback(self) -> None:
        """Take the store's values over. A transaction that was abandoned is rolled back without this call: the
        catalog's `rollbacks` counts all of them."""
