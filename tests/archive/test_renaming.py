"""File systems of fsspec that do not rename a file as POSIX does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive._objects import ObjectExistsError, Place, place_of

pytest.importorskip("numcodecs")
fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem


class Silent(MemoryFileSystem):  # type: ignore[misc, valid-type]
    """Does not rename a file to a name that is taken, and raises no error: fsspec's webhdfs drops the answer."""

    protocol = "silent"
    before: Callable[[], object] = staticmethod(lambda: None)  # called once before a file is renamed
    refuses = False  # to rename any

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        before, Silent.before = Silent.before, staticmethod(lambda: None)
        before()
        if not (self.refuses or self.exists(path2)):
            super().mv(path1, path2, **options)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Place:
    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(Silent, "store", {})
    monkeypatch.setattr(Silent, "pseudo_dirs", [""])
    return place_of("silent://x/archive")


def test_a_damaged_part_is_replaced_where_a_rename_fails_silently(silent: Place, tmp_path: Path) -> None:
    places = [tmp_path / "near", silent.url]
    for step in range(2):
        with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
            store.require_array("large", 30_000)[:] = np.arange(30_000)
            store["x"] = step
            store.commit()
            drain.wait()
        if not step:
            name = max(silent.sizes("parts"), key=silent.sizes("parts").__getitem__)
            (part,) = (path for path in Silent.store if path.endswith(name))
            Silent.store[part].truncate(20)
    assert archive.open(silent.url).verify().ok
    assert not [path for path in Silent.store if "pmstore-object" in path]


def test_an_object_of_another_writer_is_not_replaced_where_a_rename_fails_silently(silent: Place) -> None:
    other = fsspec.filesystem("silent")
    Silent.before = staticmethod(lambda: other.pipe_file("silent://x/archive/index/1", b"other"))
    with pytest.raises(ObjectExistsError):
        silent.create("index/1", [b"mine"])
    assert silent.get("index/1") == b"other" and len(Silent.store) == 1


def test_a_file_system_that_renames_nothing(silent: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Silent, "refuses", True)
    for write in (silent.create, silent.put):
        with pytest.raises(pmstore.ArchiveUnavailableError, match="was not renamed"):
            write("index/1", [b"mine"])
    assert not Silent.store
