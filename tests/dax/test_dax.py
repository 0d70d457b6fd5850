"""The medium `dax` on a real DAX mapping. `make test-dax` runs these tests in a guest (docs/dax.md).

PMSTORE_DAX_FILES is a folder there, PMSTORE_DAX_EXPECT what its device and mount allow: "sync" (MAP_SYNC is granted),
"late" (DAX without MAP_SYNC) or "none" (no DAX).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import run_in_fork
from tests.support.mapped import Mapped, mappings

EXPECT = os.environ.get("PMSTORE_DAX_EXPECT")
sync = pytest.mark.skipif(EXPECT != "sync", reason="needs MAP_SYNC: make test-dax")
guest = pytest.mark.skipif(EXPECT is None, reason="needs a guest: make test-dax")


@pytest.fixture
def files() -> Iterator[Path]:
    """A new folder in the guest's persistent memory."""
    folder = Path(os.environ["PMSTORE_DAX_FILES"]) / secrets.token_hex(4)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def mappings_of(path: Path) -> list[Mapped]:
    inode = path.stat().st_ino
    return [one for one in mappings() if one.inode == inode]


def changed(n: int, size: int = 200_000) -> np.ndarray:
    return np.arange(size, dtype="f8") + n


# ---- which medium


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_dax_elsewhere_is_refused(place, tmp_path):
    if place == "memory" or EXPECT:
        tmp_path = Path("/dev/shm") / secrets.token_hex(4)
        tmp_path.mkdir()
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True).stdout.strip()
    use = "memory" if kind == "tmpfs" else "file"
    try:
        with pytest.raises(ValueError, match=f"dax=always.*use media '{use}' or 'auto'"):
            pmstore.open(tmp_path / "s.pm", media="dax")
        assert list(tmp_path.iterdir()) == []
    finally:
        if tmp_path.parent == Path("/dev/shm"):
            shutil.rmtree(tmp_path)


@guest
def test_auto_takes_what_the_device_allows(files):
    path = files / "s.pm"
    medium = "dax" if EXPECT == "sync" else "file"
    with pmstore.open(path) as store:
        assert store.media == store.stats().medium == medium
        store["x"] = changed(1)
        store.commit()
        with pmstore.open(path, "r") as reader:
            assert reader.media == medium and (reader["x"] == changed(1)).all()
    with pmstore.open(path, "r", exclusive=True) as store:
        assert store.media == medium and (store["x"] == changed(1)).all()
    with pmstore.open(path, media="file") as store:
        assert store.media == "file"


@guest
@pytest.mark.skipif(EXPECT == "sync", reason="MAP_SYNC is granted")
def test_dax_without_map_sync_is_refused(files):
    why = "refuses it.*virtio-pmem.*'file' or 'auto'" if EXPECT == "late" else "dax=always.*not on DAX"
    with pytest.raises(ValueError, match=why):
        pmstore.open(files / "s.pm", media="dax")
    assert list(files.iterdir()) == []


@sync
def test_the_view_keeps_map_sync_when_it_grows(files):
    path = files / "s.pm"
    with pmstore.open(path) as store:
        for n in range(6):  # the view is mapped anew, or moves
            store[f"x/{n}"] = np.full(1 << (16 + n), n)
            store.commit()
            shared = [one.flags for one in mappings_of(path) if one.permissions == "rw-s"]
            assert shared and all("sf" in flags for flags in shared)
            private = [one.flags for one in mappings_of(path) if one.permissions.endswith("p")]
            assert private and not any("sf" in flags for flags in private)
        assert path.stat().st_size > 16 << 20
    assert not mappings_of(path)


@sync
def test_grown_space_is_written_once(files):
    """Then no store needs a new block, and with it a sync of the file's metadata."""
    path = files / "s.pm"
    with pmstore.open(path) as store:
        store["x"] = np.ones(1 << 20)
        store.commit()
        with open(path, "rb") as file:
            size = path.stat().st_size
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size == store.stats().file_size


@sync
def test_space_that_a_killed_process_reserved_is_synced(files):
    """It may not have come to that. The header that names this space is in a page that needs no sync itself."""
    path = files / "s.pm"
    pmstore.open(path).close()
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 32 << 20)
    with pmstore.open(path) as store:
        store["x"] = np.ones(1 << 20)
        store.commit()
        assert store.stats().syncs and path.stat().st_size == 32 << 20
    with pmstore.open(path, "r") as store:
        assert store["x"].sum() == 1 << 20


@sync
@pytest.mark.parametrize("domain", ["", "cpu_cache", "memory"])
@pytest.mark.parametrize("flush", ["", "clwb", "clflushopt", "clflush", "stream"])
def test_every_way_of_flushing(flush, domain, files, monkeypatch):
    monkeypatch.setenv("PMSTORE_FLUSH", flush)
    monkeypatch.setenv("PMSTORE_DOMAIN", domain)
    path = files / "s.pm"
    for n in range(3):
        with pmstore.open(path) as store:
            assert store.stats().domain == (domain or os.environ["PMSTORE_DAX_DOMAIN"])
            store[f"x/{n}"] = changed(n, 3000 << 3 * n)
            store["n"] = n
            store.commit()
            store["x/0"][n * 600] = -n
            store.commit()
    with pmstore.open(path) as store:
        assert store.check().ok and store["n"] == 2
        assert store["x/0"][[0, 600, 1200]].tolist() == [0, -1, -2]
        assert all((store[f"x/{n}"] == changed(n, 3000 << 3 * n)).all() for n in (1, 2))


# ---- finding changes


@guest
def test_changes_of_large_arrays_are_found(files):
    rng = np.random.default_rng(1)
    with pmstore.open(files / "s.pm") as store:
        store["x"] = np.zeros(600_000)
        store.commit()
        x = store["x"]
        expected = np.zeros(600_000)
        for n in range(1, 8):
            total = float(x.sum())  # reads all pages, so that they are in memory
            assert total == expected.sum()
            at = rng.integers(0, 600_000, 20)
            x[at] = expected[at] = n
            if n == 4:  # the kernel writes, as read(2) into an array does
                x[:512] = 0
                with open("/dev/zero", "rb") as zeros:
                    zeros.readinto(memoryview(x[1000:2000]).cast("B"))
                expected[:512] = expected[1000:2000] = 0
            store.commit()
        if EXPECT != "none":
            assert store.stats().tracker == "compare"  # opened by the first large array
    with pmstore.open(files / "s.pm", "r") as store:
        assert (store["x"] == expected).all()


@guest
def test_changes_are_found_while_a_child_lives(files):
    """A child shares the private pages. I18: it sees the bytes of the fork."""
    with pmstore.open(files / "s.pm") as store:
        store["x"] = changed(0)
        store.commit()
        x = store["x"]
        x[::700] = -1
        go, done = os.pipe()
        child = os.fork()
        if not child:
            os.read(go, 1)
            os._exit(0 if x[700] == -1 and x[701] == 701 and x[1400] == -1 else 1)
        x[1400], x[5] = -2, -3
        store.commit()
        x[6] = -4
        store.commit()
        os.write(done, b"x")
        assert os.waitpid(child, 0)[1] == 0
    with pmstore.open(files / "s.pm", "r") as store:
        assert store["x"][[700, 1400, 5, 6]].tolist() == [-1, -2, -3, -4]


@guest
@pytest.mark.skipif(EXPECT == "none", reason="no DAX")
def test_a_tracker_that_can_not_be_trusted_is_refused(files, monkeypatch):
    for name in ("uffd", "pagemap"):
        monkeypatch.setenv("PMSTORE_TRACKER", name)
        with pytest.raises(ValueError, match="can't be used on DAX"):
            pmstore.open(files / "s.pm")
    monkeypatch.setenv("PMSTORE_TRACKER", "compare")
    with pmstore.open(files / "s.pm") as store:
        store["x"] = changed(1)
        store.commit()
        store["x"][7] = 7
        store.commit()
        store.rollback()
        assert store["x"][7] == 7


# ---- one format


def leave_a_log(path: str, media: str, n: int) -> None:
    """Commit n, in a process that is killed."""

    def commit_and_die() -> None:
        store = pmstore.open(path, media=media)
        store["x"] = changed(n)
        store.commit()
        for i in range(20):
            store["x"][i * 500] = -n
            store["n"] = n
            store.commit()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="-9"):
        run_in_fork(commit_and_die)


@sync
def test_a_store_changes_its_medium(files):
    """Each medium recovers what a process left with another one."""
    memory = Path("/dev/shm") / f"{secrets.token_hex(4)}.pm"
    path = files / "s.pm"
    try:
        for n, (media, place, after) in enumerate(
            [
                ("dax", path, ("file", path)),
                ("file", path, ("dax", path)),
                ("dax", path, ("memory", memory)),
                ("memory", memory, ("dax", path)),
                ("memory", memory, ("file", path)),
            ],
            1,
        ):
            leave_a_log(str(place), media, n)
            medium, target = after
            if target != place:
                shutil.copyfile(place, target)
            with pmstore.open(target, media=medium) as store:
                expected = changed(n)
                expected[0:10_000:500] = -n
                assert store["n"] == n and (store["x"] == expected).all()
                assert store.check().ok
                store["n"] = 0
    finally:
        memory.unlink(missing_ok=True)


@sync
def test_backups_and_smaller_stores_are_on_dax_too(files):
    with pmstore.open(files / "s.pm") as store:
        for n in range(8):
            store[f"x/{n}"] = changed(n)
        store.commit()
        store.backup(files / "copy.pm")
        for n in range(1, 8):
            del store[f"x/{n}"]
    pmstore.compact(files / "s.pm") if hasattr(pmstore, "compact") else subprocess.run(
        [sys.executable, "-m", "pmstore", "compact", str(files / "s.pm")], check=True
    )
    for name, count in (("s.pm", 1), ("copy.pm", 8)):
        with pmstore.open(files / name) as store:
            assert store.media == "dax" and store.check().ok
            assert [(store[f"x/{n}"] == changed(n)).all() for n in range(count)] == [True] * count


# ---- what fails


@sync
def test_a_full_file_system_is_an_error_and_nothing_is_lost(files):
    with pmstore.open(files / "s.pm") as store:
        store["x"] = changed(1)
        store.commit()
        free = os.statvfs(files).f_bavail * os.statvfs(files).f_frsize
        with open(files / "full", "wb") as full:
            os.posix_fallocate(full.fileno(), 0, free - (8 << 20))
        with pytest.raises(pmstore.OutOfSpaceError):
            store["y"] = np.ones(16 << 20)
        store["x"][5] = -1
        store.commit()
        (files / "full").unlink()
        store["y"] = np.ones(16 << 10)
    with pmstore.open(files / "s.pm", "r") as store:
        assert store["x"][5] == -1 and store["y"].sum() == 16 << 10


@sync
def test_a_device_with_bad_blocks_is_read_with_care(files):
    """The last test of a guest: its bad blocks stay."""
    path = files / "s.pm"
    with pmstore.open(path) as store:
        store["x"] = changed(1, 20_000)  # of this size, it is read before a program gets it
        store["y"] = changed(2)
    device = os.stat(path).st_dev
    fault = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/badblocks")
    start, length = place_of(path, changed(1)[1000:1512].tobytes())
    fault.write_text(f"{start // 512} {length // 512}\n")
    with pytest.raises(ValueError, match="bad blocks.*ndctl clear-errors"):
        pmstore.open(path, media="dax")
    with pmstore.open(path) as store:  # no signal: it asks before it reads
        assert store.media == "file"
        with pytest.raises(pmstore.StoreIOError, match="cannot read"):
            store["x"]
        assert (store["y"] == changed(2)).all()
        report = store.check()
        assert not report.ok


def place_of(path: Path, contents: bytes) -> tuple[int, int]:
    """The first whole page with some contents of a file: its offset in the device, and its length."""
    page = path.read_bytes().find(contents)
    assert page >= 0
    page = -(-page // 4096) * 4096
    shown = subprocess.run(["filefrag", "-v", "-b4096", path], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        match = re.match(r"\s*\d+:\s*(\d+)\.\.\s*(\d+):\s*(\d+)\.\.", line)
        if match and int(match[1]) <= page // 4096 <= int(match[2]):
            return (int(match[3]) + page // 4096 - int(match[1])) * 4096, 4096
    raise AssertionError(shown)
