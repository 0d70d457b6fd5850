"""Copies that share a store's blocks (`cp` on xfs, btrfs): what the store has reserved is needed once more.

On small file systems of their own, in images that are mounted here, which needs root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._recording import Recorder

from .snapshots import snapshot
from .test_file_systems import KINDS, image_of, mounted

BLOCK = 4096


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    name = getattr(request, "param", "xfs")
    image = image_of(KINDS[name], tmp_path / f"{name}.img")
    with mounted(image, "") as directory:
        yield directory


def copy(path: Path) -> None:
    """As `cp` does from coreutils 9 on; on btrfs it can't, for the store is written in place there."""
    subprocess.run(["cp", "--reflink=auto", path, path.with_suffix(".copy")], check=True)


class Disk:
    """A file that takes all space, and gives back some."""

    def __init__(self, directory: Path, least: int = BLOCK) -> None:
        self.fd = os.open(directory / "fill", os.O_CREAT | os.O_RDWR)
        size = 64 << 20
        while size >= least:
            try:
                os.posix_fallocate(self.fd, os.fstat(self.fd).st_size, size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                size //= 4

    def give_back(self, blocks: int) -> None:
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size - blocks * BLOCK, 0))
        os.fsync(self.fd)

    def close(self) -> None:
        os.ftruncate(self.fd, 0)
        os.fsync(self.fd)
        os.close(self.fd)


def create(path: Path, **options: str) -> pmstore.Store:
    store = pmstore.open(path, "x", media="file", **options)
    store["large"] = np.zeros(400_000)
    store["small"] = np.zeros(3)
    store.commit()
    store["small"][:] = 1
    store.commit()
    return store


def change(store: pmstore.Store, step: int) -> None:
    """From a page or two to more than the log takes."""
    store["small"][:] = step
    store["large"][step :: (100_000, 5000, 1000)[step % 3]] = step


@pytest.mark.parametrize("place", ["xfs", "btrfs"], indirect=True)
def test_opening_gives_a_store_blocks_of_its_own(place: Path) -> None:
    path = place / "store.pm"
    create(path).close()
    copy(path)
    with pmstore.open(path) as store:
        disk = Disk(place, 16 * BLOCK)
        for step in range(20):  # of a few pages each: they fit into the log that there is
            store["small"][:] = step
            store["large"][step::100_000] = step
            store.commit()
        assert store.check().ok
    with pmstore.open(path, "r") as store:
        assert store["small"][0] == 19
    disk.close()


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_copy_of_an_open_store_on_a_full_disk(place: Path, durability: str) -> None:
    """Commits work, or raise OutOfSpaceError with everything pending. The amounts of space let each kind of write be
    the first that fails: a header, a record, home, a page of the log's growth."""
    path = place / "store.pm"
    store = create(path, durability=durability)
    copy(path)
    disk = Disk(place)
    refused = done = 0
    pending = None
    for blocks in (0, 1, 1, 2, 3, 5, 8, 13, 0, 30, 100, 0, 400):
        disk.give_back(blocks)
        for step in range(8):
            try:
                if pending is None:
                    change(store, done + step)
                    pending = snapshot(store)
                store.commit()
                assert snapshot(store) == pending
                committed, pending = pending, None
                done += 1
                assert store.check().ok
            except pmstore.OutOfSpaceError:
                refused += 1
                break
    disk.close()
    assert refused and done
    if pending is not None:
        assert snapshot(store) == pending
        store.commit()
        committed = pending
    store["new"] = np.ones(300_000)
    store.close()
    with pmstore.open(path, verify=True) as store:
        assert store["new"].sum() == 300_000 and {k: v for k, v in snapshot(store).items() if k != "new"} == committed


@pytest.mark.parametrize("blocks", [0, 4, 12, 3000])
def test_a_copy_of_a_killed_store_on_a_full_disk(place: Path, blocks: int) -> None:
    path = place / "store.pm"
    store = create(path)
    change(store, 7)
    store.commit()
    expected = snapshot(store)
    store._drop(discard=True)  # as a kill leaves it
    copy(path)
    disk = Disk(place)
    disk.give_back(blocks)
    try:
        with pmstore.open(path) as store:
            assert snapshot(store) == expected
    except pmstore.OutOfSpaceError as error:
        assert blocks < 3000 and "mode='r'" in str(error)
    with pmstore.open(path, "r", verify=True) as store:
        assert snapshot(store) == expected
    disk.close()
    with pmstore.open(path, verify=True) as store:
        assert snapshot(store) == expected


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_no_commit_is_lost_behind_a_write_that_lacked_space(tmp_path: Path, durability: str) -> None:
    """Each write of a checkpoint, of both header copies among them, and of the commit and the call behind it."""
    path = tmp_path / "store.pm"
    happened = 0
    with pmstore.open(path, "x", media="file") as store:
        store["a"], store["b"] = np.zeros(700), np.zeros(9000)
    image = path.read_bytes()
    for number in range(1, 40):
        path.write_bytes(image)
        with Recorder(path, "file") as recorder:
            store = pmstore.open(path, durability=durability)
            store["a"][:] = store["b"][:] = 1
            store.commit()
            recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC)
            for step in (2, 3):
                try:
                    store["a"][:] = step
                    store.commit()
                    store._catalog.core.checkpoint()
                except pmstore.OutOfSpaceError:
                    pass
            faults = recorder.trace.operations()[1]
            recorder.trace.fail(0, 0, 0)
            store["a"][5] = 4
            store.commit()
            assert store.check().ok
            store.sync()
            expected = snapshot(store)
            store._drop(discard=True)  # as a kill leaves it
        with pmstore.open(path, verify=True) as store:
            assert snapshot(store) == expected, number
        happened += faults
        if not faults:
            break
    assert happened > 5


def test_I11_nothing_is_committed_before_a_rollback_that_lacked_space(tmp_path: Path) -> None:
    """Home has to be brought up to date first, and that lacks space: what was to be undone is still there."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(700)
    image = path.read_bytes()
    refused = 0
    for number in range(1, 12):
        path.write_bytes(image)
        with Recorder(path, "file") as recorder:
            store = pmstore.open(path)
            a = store["a"]
            a[:] = 1
            recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC, lasting=True)
            with contextlib.suppress(pmstore.OutOfSpaceError):
                store.commit()
            committed = store._catalog.core.sequence
            with contextlib.suppress(ZeroDivisionError, pmstore.OutOfSpaceError), store.transaction():
                a[:] = 2
                raise ZeroDivisionError
            recorder.trace.fail(0, 0, 0)
            if a[0] == 2:
                for change in (store.commit, lambda store=store: store.update(b=1), store.close):
                    with pytest.raises(pmstore.OutOfSpaceError, match=r"call rollback\(\) again"):
                        change()
                refused += 1
                store.rollback()
                assert "b" not in store
            assert a[0] == (1 if committed > 1 else 0)
            store["b"] = 2
            store.close()
        with pmstore.open(path, verify=True) as store:
            assert store["a"][0] == a[0] and store["b"] == 2
    assert refused
