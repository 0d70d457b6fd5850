"""What a store needs of a file system, on each one that PMSTORE_MOUNTS names.

It is a JSON object of names, and for each the directory, and null or the same directory as its server sees it.
`make test-filesystems` mounts them in a guest. Others can be tried, too:

    PMSTORE_MOUNTS='{"ours": ["/mnt/ours", null]}' .venv/bin/python -m pytest tests/file_systems/test_mounted.py
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore
from tests.conftest import Child
from tests.support.kills import change, check_changed, check_grown, grow

MOUNTS: dict[str, tuple[str, str | None]] = json.loads(os.environ.get("PMSTORE_MOUNTS", "{}"))
UNMAPPABLE = "9p-none"
"""The name of one that has no shared mappings."""

FOLLOWED = 19
COMMITS = """
import sys
from tests.file_systems.test_mounted import commit
for n in commit(*sys.argv[1:], 0):
    print(n, flush=True)
"""
LOOKS = f"""
import sys, pmstore
with pmstore.open(sys.argv[1], "r") as reader:
    for _ in range({FOLLOWED}):
        input()
        reader.refresh()
        print(reader["n"], float(reader["array"].sum()), flush=True)
"""


class Folder(NamedTuple):
    """A new directory on a file system, and the same one as the server sees it."""

    name: str
    path: Path
    behind: Path | None


def names(*without: str) -> list[Any]:
    found = [name for name in MOUNTS if name not in without]
    return found or [pytest.param("", marks=pytest.mark.skip("PMSTORE_MOUNTS names no directory"))]


@pytest.fixture(params=names(UNMAPPABLE))
def folder(request: pytest.FixtureRequest) -> Iterator[Folder]:
    place, behind = MOUNTS[request.param]
    called = request.node.originalname
    path = Path(place) / called
    path.mkdir()
    try:
        yield Folder(request.param, path, Path(behind) / called if behind else None)
    finally:
        gc.collect()
        shutil.rmtree(path, ignore_errors=True)


def expect(store: pmstore.Store, contents: dict[str, np.ndarray[Any, Any]]) -> None:
    assert set(store) == set(contents)
    for name, array in contents.items():
        assert np.array_equal(store[name], array), name


def commit(changed: str, grown: str, first: int) -> Iterator[int]:
    """Goes on from commit `first` of two stores. Gives the number of each commit that both have."""
    with pmstore.open(changed) as one, pmstore.open(grown) as other:
        for n in range(first + 1, first + 100_000):
            change(one, n)
            one.commit()
            grow(other, n)
            other.commit()
            yield n


def expect_commits(changed: Path, grown: Path, acknowledged: int) -> None:
    for path, check in ((changed, check_changed), (grown, check_grown)):
        with pmstore.open(path) as store:
            assert store.check().ok
            assert acknowledged <= store["n"] <= acknowledged + 1
            check(store, store["n"])


def test_mappings_show_what_was_committed(folder: Folder, tmp_path: Path) -> None:
    """Small and large changes, growth, deletion and rollback. No array lives between commits, so that each is mapped
    anew. The server has each commit when it returns."""
    rng, contents = np.random.default_rng(1), {}
    path = folder.path / "store.pm"
    with pmstore.open(path) as store:
        for step in range(24):
            name, kind = f"array {step % 5}", step % 4
            if kind == 0 or name not in contents:
                contents[name] = rng.random(int(rng.integers(1, 120_000)))
                store[name] = contents[name]
            elif kind == 1:
                at = int(rng.integers(0, len(contents[name])))
                contents[name][at] = store[name][at] = step
            elif kind == 2:
                contents[name] += 1
                array = store[name]
                array += 1
                del array
            else:
                del store[name], contents[name]
            store.commit()
            assert store.media == "file"
            gc.collect()
            expect(store, contents)
            if folder.behind is not None:
                shutil.copyfile(folder.behind / path.name, tmp_path / "server.pm")
                with pmstore.open(tmp_path / "server.pm") as server:
                    expect(server, contents)
        store["array 0"] = np.zeros(10)
        store.rollback()
        expect(store, contents)
        assert store.check().ok
    with pmstore.open(path, "r", verify=True) as store:
        expect(store, contents)


def test_copies(folder: Folder) -> None:
    path, backup = folder.path / "store.pm", folder.path / "backup.pm"
    with pmstore.open(path) as store:
        store["w"] = np.arange(300_000.0)
        store["gone"] = np.ones(300_000)
        store.commit()
        del store["gone"]
        store.commit()
        store.backup(backup)
    if folder.name.startswith("smb"):  # a file that is replaced while it is open would be lost
        with pytest.raises(pmstore.ReadOnlyStoreError, match="on SMB"):
            pmstore.compact(path)
        with pytest.raises(pmstore.ReadOnlyStoreError, match="delete the old one first"):
            pmstore.open(path, "w")
    else:
        before = path.stat().st_size
        pmstore.compact(path)
        assert path.stat().st_size < before
    for one in (path, backup):
        with pmstore.open(one, "r", verify=True) as store:
            expect(store, {"w": np.arange(300_000.0)})
    with pytest.raises(pmstore.StoreExistsError):
        pmstore.open(path, "x")
    if folder.name.startswith("smb"):
        path.unlink()
    with pmstore.open(path, "w") as store:
        assert not len(store)
    assert sorted(os.listdir(folder.path)) == ["backup.pm", "store.pm"]


def test_processes(folder: Folder, child: Callable[..., Child]) -> None:
    """A second writer is refused, and a reader in another process follows each commit."""
    path = folder.path / "store.pm"
    with pmstore.open(path) as store:
        store["n"], store["array"] = 0, np.zeros(50_000)
        store.commit()
        with pytest.raises(AssertionError, match="StoreLockedError"):
            child("import sys, pmstore; pmstore.open(sys.argv[1])", path).end()
        reader = child(LOOKS, path)
        for n in range(1, FOLLOWED + 1):
            with store.transaction():
                store["n"] = n
                store["array"] += 1
            reader.go()
            assert reader.line().split() == [str(n), str(50_000.0 * n)]
        reader.end()


def test_a_writer_that_is_killed(folder: Folder, child: Callable[..., Child]) -> None:
    """The next one finds each commit that had returned."""
    paths = folder.path / "changed.pm", folder.path / "grown.pm"
    for last in (1, 7):
        for path in paths:
            path.unlink(missing_ok=True)
        writer = child(COMMITS, *paths)
        while int(writer.line()) < last:
            pass
        writer.process.kill()
        said, _ = writer.process.communicate()
        expect_commits(*paths, max([last, *map(int, said.split()[: said.count("\n")])]))


@pytest.mark.skipif(UNMAPPABLE not in MOUNTS, reason="PMSTORE_MOUNTS does not name it")
def test_no_shared_mappings() -> None:
    folder = Path(MOUNTS[UNMAPPABLE][0])
    with pytest.raises(pmstore.StoreIOError, match="mount 9p with cache=mmap"):
        pmstore.open(folder / "store.pm")
    assert os.listdir(folder) == []
