"""The medium `dax` on a disk that says that it is persistent memory: tests/support/faults.c, preloaded into a child
process, grants MAP_SYNC, or refuses it, and answers for the device. Power is cut in the guest of `make test-dax` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.support import shim
from tests.support.shim import FROM_THEN, HALF, INTERRUPT, MAPPINGS, ONCE, SHORT, Fault, faults, variable

pytestmark = pytest.mark.no_sanitizer  # which is preloaded too

OF_THE_GUEST = ["tests/dax/test_dax.py", "tests/core/test_commit.py", "tests/core/test_domains.py"]
XFS_SUPER_MAGIC = 0x58465342
LEFT_OUT = ["keeps_map_sync", "full_file_system", "bad_blocks"]
"""Tests that need what nobody can pretend: the kernel's flags, a small disk, and its bad blocks."""


def statfs_name(folder: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if statfs_name(tmp_path) == "tmpfs":
        pytest.skip("a tmpfs is never DAX")
    yield tmp_path


@pytest.mark.long
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
    with pmstore.open(f"{folder}/file.pm", "x", media="file") as store:
        assert (store.media, store.stats().domain) == ("file", "disk")
    variable("fault_dax").value = 1
    assert medium_of(folder) == ("dax", "memory")
    pmstore.open(f"{folder}/s.pm", "x").close()
    shim.begin_memory(ONCE, 1, MAPPINGS)  # the question, and not the mapping that follows
    with pytest.raises(pmstore.OutOfMemoryError, match="cannot map the file"):
        pmstore.open(f"{folder}/s.pm")
    shim.end()


def test_answers_to_map_sync(disk: Path, fault_library: Path) -> None:
    shim.call(fault_library, answers, disk)


def test_what_is_not_on_dax(medium: Medium) -> None:
    if medium.name == "dax":
        pytest.skip("this is on DAX")
    place, instead = {"memory": ("on tmpfs", "memory"), "file": ("not on DAX", "file")}[medium.name]
    if medium.name == "file" and statfs_name(medium.directory) == "tmpfs":
        pytest.skip("no disk")
    refused(str(medium.directory), ValueError, f"a file on persistent memory.*{place}: use media '{instead}' or 'auto'")


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
        assert folder not in Path("/proc/self/maps").read_text()
    refused(folder, ValueError, "the device has bad blocks.*ndctl clear-errors.*'file' or 'auto'")


def test_what_the_device_says(disk: Path, fault_library: Path) -> None:
    if not Path("/sys/dev/block").is_dir():
        pytest.skip("no sysfs")
    shim.call(fault_library, devices, disk)


def no_device(folder: str) -> None:
    """What is read from the standard input is no answer of a device."""
    variable("fault_dax").value = 1
    variable("fault_magic", ctypes.c_long).value = XFS_SUPER_MAGIC  # of a tmpfs, which has no device
    for text in ("cpu_cache\n", "4711 8\n"):
        answer = Path(folder) / "answer"
        answer.write_text(text)
        fd = os.open(answer, os.O_RDONLY)
        os.dup2(fd, 0)
        os.close(fd)
        assert medium_of(folder) == ("dax", "memory")
        assert os.path.samestat(os.fstat(0), os.stat(answer)), "it is still open"


def test_a_file_system_without_a_device(directory: Path, fault_library: Path) -> None:
    shim.call(fault_library, no_device, directory)


def length(folder: str) -> None:
    """How long the file is, and how long the store says it is."""
    variable("fault_dax").value = 1
    path, longer = Path(folder) / "s.pm", Path(folder) / "longer.pm"
    array = np.arange(3 << 17)

    def grown(path: Path, found: int, size: int) -> None:
        shim.watch_memory()
        with pmstore.open(path) as store:
            assert store.media == "dax"
            syncs, before = store.stats().syncs, shim.blocks_held()
            store["large"] = array
            store.commit()
            assert 0 < store.stats().syncs - syncs < 5 and shim.blocks_held() < before + 20
            assert store.stats().file_size == size and path.stat().st_size == max(size, found)
            assert path.stat().st_blocks * 512 >= store.stats().file_size
        with pmstore.open(path, "r", verify=True) as store:
            assert (store["large"] == array).all()

    pmstore.open(path, "x").close()
    image, before = path.read_bytes(), path.stat().st_size
    with pmstore.open(path) as store:
        assert variable("fault_sync_mapped", ctypes.c_long).value == before, "all of it is mapped with MAP_SYNC"
        store["large"] = array
        size = store.stats().file_size
    for found in (before, before + 4096, size - 4096, size, size + 4096, 2 * size):
        longer.write_bytes(image)  # as a process leaves it that was killed while the store grew
        os.truncate(longer, found)
        grown(longer, found, size)


def memory(folder: str) -> None:
    """Each refused request for memory while a store grows is reported, and changes nothing. None is kept."""
    variable("fault_dax").value = 1
    path, array = Path(folder) / "s.pm", np.ones(1 << 17)
    with pmstore.open(path, "x") as store:
        size = store.stats().file_size
        shim.watch_memory()
        before = shim.blocks_held()
        with faults(Fault("pwrite", FROM_THEN, errno.ENOSPC)):
            for _ in range(25):
                with pytest.raises(pmstore.OutOfSpaceError):
                    store["large"] = array
        assert shim.blocks_held() < before + 20
        shim.begin_memory(ONCE, 1, MAPPINGS)  # of the longer file
        with pytest.raises(pmstore.OutOfMemoryError):
            store["large"] = array
        shim.end()
        found = path.read_bytes()
        assert len(found) > size and not any(found[size:])
        refused = -1
        while "large" not in store:
            refused += 1
            shim.begin_memory(ONCE, refused + 1)
            with contextlib.suppress(pmstore.OutOfMemoryError):
                store["large"] = array
            shim.end()
            assert shim.hits() == ("large" not in store)
        assert refused > 0 and store.media == "dax"
        # Growth needs memory, too.
        shim.begin_memory(ONCE, 1)
        with pytest.raises(pmstore.OutOfMemoryError, match="no memory to write zeros"):
            store["larger"] = np.ones(1 << 20)
        shim.end()
        store.commit()
        assert store.check().ok and (store["large"] == 1).all()


def test_memory_that_is_refused_while_a_store_grows(disk: Path, fault_library: Path) -> None:
    shim.call(fault_library, memory, disk)


def test_a_file_is_as_long_as_its_store(disk: Path, fault_library: Path) -> None:
    shim.call(fault_library, length, disk)


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
    signals = {signal.SIGUSR1, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for n, (call, manner) in enumerate((("pwrite", SHORT), ("pwrite", INTERRUPT), ("fsync", INTERRUPT))):
        with pmstore.open(path) as store, faults(Fault(call, manner, errno.EINTR)):
            store[f"y/{n}"] = np.full(1 << 20, n)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == signals
    for call, failed in (("fsync", "cannot sync the file"), ("pwrite", "cannot write to the file")):
        store = pmstore.open(path)
        with faults(Fault(call, ONCE, errno.EIO)), pytest.raises(pmstore.StoreIOError, match=failed):
            store["z"] = np.ones(1 << 22)
        with pytest.raises(pmstore.FailedStoreError):
            store.close()
    with pmstore.open(path) as store:
        assert store.check().ok and store["x"][1] == 4 and "z" not in store
        assert all((store[f"y/{n}"] == n).all() for n in range(3))


def test_a_disk_that_fails_while_a_store_grows(disk: Path, fault_library: Path) -> None:
    shim.call(fault_library, growth, disk)
