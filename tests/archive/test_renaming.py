"""File systems of fsspec that do not rename a file as POSIX does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive._objects import MissingObjectError, ObjectExistsError, Place, place_of

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


class NumberedError(OSError):
    """Has a number, as those of smbprotocol, and is no FileNotFoundError or FileExistsError."""

    def __init__(self, number: int, path: str) -> None:
        super().__init__(number, os.strerror(number), path)


@contextmanager
def numbered() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        number = {FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR, FileExistsError: errno.EEXIST}
        raise NumberedError(number[type(error)], "path") from None


class Numbered(MemoryFileSystem):  # type: ignore[misc, valid-type]
    """Refuses to rename a file to a name that is taken, as fsspec's smb. No error is of a class of Python's."""

    protocol = "numbered"

    def info(self, path: str, **options: Any) -> Any:
        with numbered():
            return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        with numbered():
            return super().ls(path, detail, **options)

    def cat_file(self, path: str, *given: Any, **options: Any) -> Any:
        with numbered():
            return super().cat_file(path, *given, **options)

    def rm_file(self, path: str) -> None:
        with numbered():
            super().rm_file(path)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        with numbered():
            if path2 in self.store:
                raise FileExistsError
            self.store[path2] = self.store.pop(path1)


def test_errors_that_have_a_number_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("numbered", Numbered, clobber=True)
    monkeypatch.setattr(Numbered, "store", {})
    monkeypatch.setattr(Numbered, "pseudo_dirs", [""])
    place = place_of("numbered://x/archive")
    with pytest.raises(MissingObjectError):
        place.get("index/1")
    with pytest.raises(MissingObjectError):
        place.size("index/1")
    assert place.list("index") == []
    place.delete(["index/1"])
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(place.url) as drain:
        for step in range(40):  # flushes are merged after 32
            store["x"] = step
            store.commit()
            assert drain.wait(timeout=20) == step + 1
    assert len(archive.open(place.url)) == 40
    place.put("index/1", [b"old"])
    place.put("index/1", [b"new"])
    with pytest.raises(ObjectExistsError):
        place.create("index/1", [b"newer"])
    assert place.get("index/1") == b"new"


class Copying(MemoryFileSystem):  # type: ignore[misc, valid-type]
    """Renames a file as fsspec does for file systems that can't: it is copied, then deleted."""

    protocol = "copying"


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("copying", Copying, clobber=True)
    monkeypatch.setattr(Copying, "store", {})
    monkeypatch.setattr(Copying, "pseudo_dirs", [""])
    url = "copying://x/a*[1]"
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(url) as drain:
        store["x"] = 1
        store.commit()
        assert drain.wait(timeout=20) == 1
    assert archive.open(url).verify().ok
    assert not [path for path in Copying.store if "pmstore-object" in path]
