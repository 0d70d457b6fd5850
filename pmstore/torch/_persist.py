"""A module and its optimizer in a store: their tensors lie in the store's memory."""

from __future__ import annotations

from typing import Any

__all__ = ["Persisted", "persist"]


class Persisted:
    """What `persist` returns."""


def persist(module: Any, optimizer: Any, store: Any) -> Persisted:
    """Keep a module and its optimizer in a store."""
    raise NotImplementedError
