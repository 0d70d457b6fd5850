"""Copies that share a store's blocks (`cp` on xfs, btrfs): what the store has reserved is needed once more.

On small file systems of their own, in images that are mounted here, which needs root.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore

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
