"""The names and the syncs of a new store's file: see tests/mutants/battery.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._core import lib
from pmstore._store import naming, opening
from tests.mutants.damage import Noticed

RENAMES = ("pm_rename_file", "link", "rename", "replace")


class Watched:
    """A module, for the one that creates stores: its operations on files are noted, in order."""

    def __init__(self, module: Any, done: list[tuple[str, str]]) -> None:
        self.module, self.done = module, done

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if name not in ("fsync", "unlink", *RENAMES):
            return function

        def noted(*arguments: Any, **options: Any) -> Any:
            what = arguments[0]
            place = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)
            result = function(*arguments, **options)
            self.done.append((name, place))
            return result

        return noted


def names_of_new_files(directory: Path, medium: str) -> None:
    """The file is durable before it gets its name, and the name is durable before the store opens."""
    path = directory / f"created-{medium}.pm"
    for mode in ("x", "w"):
        done: list[tuple[str, str]] = []
        opening.os = naming.os = Watched(os, done)  # type: ignore[assignment]
        naming.lib = Watched(lib, done)
        try:
            store = pmstore.open(path, mode, media=medium)
        finally:
            opening.os = naming.os = os
            naming.lib = lib
        named = next((i for i, (name, _) in enumerate(done) if name in RENAMES), None)
        if named is None or not done[named][1].startswith(str(directory / ".pmstore-creating-")):
            raise Noticed("names", f"a store was not written under another name first: {done}")
        if ("fsync", done[named][1]) not in done[:named]:
            raise Noticed("names", "a file got its name before it was durable")
        if ("unlink", str(path)) in done:
            raise Noticed("names", "the old store is gone before the new one has its name")
        if ("fsync", str(directory)) not in done[named:]:
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
