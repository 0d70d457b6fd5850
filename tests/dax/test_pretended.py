"""The medium `dax` on a disk that says that it is persistent memory: tests/support/faults.c, preloaded into a child
process, grants MAP_SYNC, or refuses it, and answers for the device. Power is cut in the guest of `make test-dax` only.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.support import shim
from tests.support.shim import FROM_THEN, HALF, INTERRUPT, ONCE, SHORT, Fault, faults, variable

pytestmark = pytest.mark.no_sanitizer  # which is preloaded too

OF_THE_GUEST = ["tests/dax/test_dax.py", "tests/core/test_commit.py", "tests/core/test_domains.py"]
LEFT_OUT = ["keeps_map_sync", "full_file_system", "bad_blocks"]
"""Tests that need what nobody can pretend: the kernel's flags, a small disk, and its bad blocks."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout == "tmpfs\n":
        pytest.skip("a tmpfs is never DAX")
    yield tmp_path


def test_what_the_guest_is_asked(disk: Path, fault_library: Path) -> None:
    chosen = " and ".join(["dax", *(f"not {name}" for name in LEFT_OUT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *OF_THE_GUEST],
        env={
            **shim.environment(fault_library),
            "PMSTORE_PRETENDED_DAX": "1",
            "PMSTORE_DAX_EXPECT": "sync",
            "PMSTORE_DAX_FILES": str(disk),
            "PMSTORE_DAX_DOMAIN": "memory",
        },
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 30


def in_a_child(case: str, disk: Path, fault_library: Path) -> None:
    shim.run(fault_library, "-c", f"from tests.dax.test_pretended import {case}; {case}({str(disk)!r})")


def refused(folder: str, error: type[Exception], match: str, media: str = "dax") -> None:
    with pytest.raises(error, match=match):
        pmstore.open(f"{folder}/new.pm", "x", media=media)
    assert not os.path.exists(f"{folder}/new.pm")


def medium_of(folder: str) -> tuple[str, str]:
    """The medium and the domain that a new store gets."""
    with pmstore.open(f"{folder}/new.pm", "x") as store:
        store["x"] = 1
        found = store.media, store.stats().domain
    with pmstore.open(f"{folder}/new.pm", "r") as store:
        assert (store.media, store.stats().domain) == found and store["x"] == 1
    os.unlink(f"{folder}/new.pm")
    return found


def answers(folder: str) -> None:
    for error in (errno.EOPNOTSUPP, errno.EINVAL):
        variable("fault_dax").value = -error
        assert medium_of(folder) == ("file", "disk")
        refused(folder, ValueError, "needs MAP_SYNC, and the kernel refuses it.*virtio-pmem.*'file' or 'auto'")
    variable("fault_dax").value = -errno.ENOMEM
    for media in ("auto", "dax"):
        refused(folder, MemoryError, "cannot map the file", media)
    variable("fault_dax").value = 1
    assert medium_of(folder) == ("dax", "memory")


def test_answers_to_map_sync(disk: Path, fault_library: Path) -> None:
    in_a_child("answers", disk, fault_library)


def devices(folder: str) -> None:
    variable("fault_dax").value = 1
    device = Path(folder) / "device"
    device.mkdir()
    shim.pretend_device(device)
    for domain, blocks, expected in (
        ("cpu_cache\n", "", ("dax", "cpu_cache")),
        ("memory_controller\n", "", ("dax", "memory")),
        ("cpu_cache\n", None, ("dax", "cpu_cache")),
        (None, "", ("dax", "memory")),
        ("", "", ("dax", "memory")),
        ("cpu_cache\n", "4711 8\n", ("file", "disk")),
    ):
        for name, text in (("persistence_domain", domain), ("badblocks", blocks)):
            (device / name).unlink(missing_ok=True)
            if text is not None:
                (device / name).write_text(text)
        before = len(os.listdir("/proc/self/fd"))
        found = medium_of(folder)
        assert found == expected, (domain, blocks, found)
        assert len(os.listdir("/proc/self/fd")) == before
    refused(folder, ValueError, "the device has bad blocks.*ndctl clear-errors.*'file' or 'auto'")


def test_what_the_device_says(disk: Path, fault_library: Path) -> None:
    if not Path("/sys/dev/block").is_dir():
        pytest.skip("no sysfs")
    in_a_child("devices", disk, fault_library)


def growth(folder: str) -> None:
    variable("fault_dax").value = 1
    path = Path(folder) / "grown.pm"
    with pmstore.open(path, "x") as store:
        assert store.media == "dax"
        store["x"] = np.arange(1000.0)
        store.commit()
        for n, (call, manner) in enumerate((("pwrite", FROM_THEN), ("pwrite", HALF), ("fallocate", ONCE))):
            with faults(Fault(call, manner, errno.ENOSPC)), pytest.raises(pmstore.OutOfSpaceError):
                store["large"] = np.ones(1 << 20)
            store["x"][1] += 1
            store.commit()
            assert store["x"][1] == n + 2 and "large" not in store
    for n, (call, manner) in enumerate((("pwrite", SHORT), ("pwrite", INTERRUPT), ("fsync", INTERRUPT))):
        with pmstore.open(path) as store, faults(Fault(call, manner, errno.EINTR)):
            store[f"y/{n}"] = np.full(1 << 20, n)
    store = pmstore.open(path)
    with faults(Fault("fsync", ONCE, errno.EIO)), pytest.raises(pmstore.StoreIOError):
        store["z"] = np.ones(1 << 22)
    with pytest.raises(pmstore.FailedStoreError):
        store.close()
    with pmstore.open(path) as store:
        assert store.check().ok and store["x"][1] == 4 and "z" not in store
        assert all((store[f"y/{n}"] == n).all() for n in range(3))


def test_a_disk_that_fails_while_a_store_grows(disk: Path, fault_library: Path) -> None:
    in_a_child("growth", disk, fault_library)
