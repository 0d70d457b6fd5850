"""A map-style dataset over a store, as torch's DataLoader takes."""

from __future__ import annotations

from typing import Any

import pmstore


class Rows:
    """Pairs of a row and its label."""

    def __init__(self, store: pmstore.Store) -> None:
        self.store = store
        self.data = store.group("data")

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, i: int) -> Any:
        return self.store["data/X"][i], int(self.data["y"][i])
