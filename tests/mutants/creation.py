"""The names and the syncs of a new store's file: see tests/mutants/battery.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._store import opening
from tests.mutants.damage import Noticed


class Watched:
    """The os module, for the module that creates stores: its operations on files are noted, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in ("fsync", "link", "rename", "replace", "unlink"):
            return function

        def noted(*arguments: Any, **options: Any) -> Any:
            what = arguments[0]
            place = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)
            function(*arguments, **options)
            self.done.append((name, place))

        return noted


def names_of_new_files(directory: Path, medium: str) -> None:
    """The file is durable before it gets its name, and the name is durable before the store opens."""
    path = directory / f"created-{medium}.pm"
    for mode in ("x", "w"):
        watched = Watched()
        opening.os = watched  # type: ignore[assignment]
        try:
            store = pmstore.open(path, mode, media=medium)
        finally:
            opening.os = os
        done = [name for name, _ in watched.done]
        named = next((i for i, name in enumerate(done) if name in ("link", "rename", "replace")), None)
        if named is None or not watched.done[named][1].startswith(str(directory / ".pmstore-creating-")):
            raise Noticed("names", f"a store was not written under another name first: {watched.done}")
        if ("fsync", watched.done[named][1]) not in watched.done[:named]:
            raise Noticed("names", "a file got its name before it was durable")
        if ("unlink", str(path)) in watched.done:
            raise Noticed("names", "the old store is gone before the new one has its name")
        if ("fsync", str(directory)) not in watched.done[named:]:
            raise Noticed("names", "the directory was not synced after the name changed")
        store["x"] = np.ones(1000)
        store.commit()
        try:
            pmstore.open(path, "w", media=medium).close()
        except pmstore.StoreLockedError:
            pass
        else:
            raise Noticed("names", "a store that is open was replaced")
        store.close()
        left = [name for name in os.listdir(directory) if name.startswith(".pmstore")]
        if left:
            raise Noticed("names", f"creating left {left}")
    path.unlink()
