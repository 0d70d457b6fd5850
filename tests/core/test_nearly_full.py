"""File systems that are full, or nearly so, in every phase of a store: an error that says so, and nothing lost.

Small file systems are mounted for it, which needs root. docs/file-systems.md lists what each file system gives.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import Child, run_in_fork
from tests.core.test_file_systems import KINDS, Kind, image_of, mounted
from tests.core.test_shared_blocks import Disk
from tests.support.bad_disk import BadDisk
from tests.support.snapshots import snapshot

BLOCKS = (0, 3, 40, 150, 600)  # left on the disk
IMAGES = {
    "ext4": Kind("mkfs.ext4 -q -F", size=24),
    "ext2": Kind("mkfs.ext2 -q -F", size=24),
    "xfs": KINDS["xfs"],
    "btrfs": KINDS["btrfs"],
}
LONG = {"ext2", "xfs", "btrfs", "overlay on ext4", "overlay on xfs", "overlay on tmpfs"}


def mount(place: Path, *options: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")


@contextlib.contextmanager
def on(name: str, tmp_path: Path) -> Iterator[Path]:
    """A directory on a small file system of this kind."""
    if os.geteuid():
        pytest.skip("only root may mount")
    with contextlib.ExitStack() as stack:
        over = name.startswith("overlay on ")
        below = name.removeprefix("overlay on ")
        if below == "tmpfs":
            place = tmp_path / "tmpfs"
            mount(place, "-t", "tmpfs", "-o", "size=24m", "tmpfs")
            stack.callback(subprocess.run, ["umount", "-l", place], check=True)
        else:
            place = stack.enter_context(mounted(image_of(IMAGES[below], tmp_path / f"{below}.img"), ""))
        if over:
            for part in ("lower", "upper", "work"):
                (place / part).mkdir()
            layers = ",".join((f"lowerdir={place}/lower", f"upperdir={place}/upper", f"workdir={place}/work"))
            place = tmp_path / "overlay"
            mount(place, "-t", "overlay", "-o", layers, "overlay")
            stack.callback(subprocess.run, ["umount", "-l", place], check=True)
        yield place


NAMES = ["ext4", "tmpfs", "overlay on ext4", "ext2", "xfs", "btrfs", "overlay on xfs", "overlay on tmpfs"]


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in NAMES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with on(request.param, tmp_path) as directory:
        yield directory


def new_store(path: Path) -> pmstore.Store:
    store = pmstore.open(path, "x")
    store["large"] = np.zeros(100_000)
    store["small"] = np.zeros(3)
    store.commit()
    return store


def change(store: pmstore.Store, k: int) -> None:
    store["small"] = np.full(3, float(k))
    store["large"][k::3] = k


def tried(work: Callable[[], object]) -> bool:
    """False if there was no space."""
    try:
        work()
    except pmstore.OutOfSpaceError:
        return False
    return True


def test_a_store_is_created(place: Path) -> None:
    for left in BLOCKS:
        disk = Disk(place)
        disk.give_back(left)
        before = set(os.listdir(place))
        if tried(lambda: pmstore.open(place / "s.pm", "x").close()):
            before.add("s.pm")
        assert set(os.listdir(place)) == before
        disk.close()
        with pmstore.open(place / "s.pm") as store:
            store["a"] = 1
        os.unlink(place / "s.pm")


def test_growth_that_is_refused_leaves_the_space_to_others(place: Path) -> None:
    """ext4 keeps the blocks that it has reserved before it finds that there are too few."""

    def free() -> int:
        space = os.statvfs(place)
        return space.f_bavail * space.f_frsize

    with new_store(place / "s.pm") as store:
        before, file = free(), (place / "s.pm").stat().st_size
        for size in (2 * before, 3 * before // 2):
            with pytest.raises(pmstore.OutOfSpaceError) as told:
                store.create_array("new", size, "u1")
            assert (place / "s.pm").stat().st_size == file
            left = [int(said) << 10 for said in re.findall(r"can't grow .* has (\d+) KiB left", str(told.value))]
            assert left or "cannot write to the file" in str(told.value), "blocks are reserved by writing them"
            assert all(before - (2 << 20) < now <= before for now in (free(), *left))
        change(store, 1)


def test_arrays_growth_commits_and_checkpoints(place: Path) -> None:
    """What can't be stored or committed stays pending, is rolled back, or is committed when there is space."""
    for k, left in enumerate(BLOCKS):
        path = place / f"{left}.pm"
        store = new_store(path)
        disk = Disk(place)
        disk.give_back(left)
        before = snapshot(store)
        fits = tried(lambda store=store: store.__setitem__("new", np.ones(60_000)))  # type: ignore[misc]
        assert ("new" in store) == fits
        store.rollback()
        assert snapshot(store) == before
        for step in range(40):  # more than the log takes: checkpoints, and growth of the log
            change(store, step + k)
            expected = store["large"].copy()
            if not tried(store.commit):
                assert np.array_equal(store["large"], expected)
                break
        # The disk's copy has the commits that returned.
        with pmstore.open(path, "r", exclusive=False) as reader:
            assert reader.sequence == store.sequence
        disk.close()
        store["new"] = np.ones(60_000)
        store.commit()
        expected = store["large"].copy()
        assert store.check().ok
        store.close()
        with pmstore.open(path, verify=True) as store:
            assert np.array_equal(store["large"], expected) and (store["new"] == 1).all()
        os.unlink(path)


KILLED = """
import os, sys, numpy as np, pmstore
store = pmstore.open(sys.argv[1])
for k in range(5):
    store["small"] = np.full(3, float(k))
    store["large"][k::3] = k
    store.commit()
print(store.sequence, flush=True)
input()
"""


def test_recovery(place: Path, child: Callable[..., Child]) -> None:
    """A killed store opens on a full disk, or is left as it was until there is space."""
    for left in BLOCKS[:3]:
        path = place / f"{left}.pm"
        new_store(path).close()
        writer = child(KILLED, path)
        sequence = int(writer.line())
        writer.process.kill()
        writer.process.wait()
        disk = Disk(place)
        disk.give_back(left)
        tried(lambda path=path: pmstore.open(path).close())  # type: ignore[misc]
        with pmstore.open(path, "r") as store:
            assert store.sequence == sequence and (store["small"] == 4).all()
        disk.close()
        with pmstore.open(path, verify=True) as store:
            assert store.sequence == sequence and (store["small"] == 4).all()
        os.unlink(path)


def test_backup_and_compact(place: Path) -> None:
    for left in BLOCKS:
        path = place / f"{left}.pm"
        store = new_store(path)
        change(store, 3)
        store.commit()
        state = snapshot(store)
        disk = Disk(place)
        disk.give_back(left)
        copy = place / "copy.pm"
        if tried(lambda store=store, copy=copy: store.backup(copy)):  # type: ignore[misc]
            os.unlink(copy)
        assert not copy.exists()
        store.close()
        tried(lambda path=path: pmstore.compact(path))  # type: ignore[misc]
        assert {name for name in os.listdir(place) if name.endswith("pm") or ".pm" in name} == {path.name}
        disk.close()
        with pmstore.open(path, verify=True) as store:
            assert snapshot(store) == state
            store.backup(copy)
        os.unlink(copy)
        os.unlink(path)


def sparse_copy(source: Path, path: Path, *, behind: bool) -> None:
    """A copy with holes where the store has pages of zeros. behind: it also has blocks behind its end."""
    data = source.read_bytes()
    with path.open("xb") as file:
        for at in range(0, len(data), 4096):
            if any(data[at : at + 4096]):
                file.seek(at)
                file.write(data[at : at + 4096])
        file.truncate(len(data))
    if behind:
        subprocess.run(["fallocate", "-n", "-o", str(len(data)), "-l", str(len(data)), path], check=True)


@pytest.mark.parametrize("behind", [False, True])
def test_a_sparse_copy_on_a_full_tmpfs(tmp_path: Path, behind: bool) -> None:
    """A page of a hole takes space when it is touched. Without space that is an error, and never a signal."""
    with pmstore.open(tmp_path / "source.pm", "x") as store:
        store.create_array("constant", 200_000, fill_value=np.zeros(200_000), writeable=False)
        store["large"], store["value"] = np.zeros(200_000), [1, 2]
        store.commit()

    def refused(mode: Any, says: str, **options: Any) -> None:
        with pytest.raises(pmstore.OutOfSpaceError, match=says):
            pmstore.open(place / "0.pm", mode, **options)

    def without_space() -> None:
        refused("r", "the holes of this sparse file need .* has 0 KiB left", exclusive=True)
        refused("r+", "can't grow by .* has 0 KiB left")
        with pmstore.open(place / "0.pm", "r") as store:
            assert not store["constant"].any() and not store["large"].any() and store["value"] == [1, 2]
            assert store.check().ok

    def again(name: str, mode: Any, **options: Any) -> None:
        with pmstore.open(place / name, mode, **options) as store:
            full = Disk(place)
            assert not store["constant"].any() and not store["large"].any()
            assert store.check().ok
            if mode == "r+":
                store["large"][::512] = 1
                store.commit()
            full.close()

    with on("tmpfs", tmp_path) as place:
        for number in range(2):
            sparse_copy(tmp_path / "source.pm", place / f"{number}.pm", behind=behind)
        disk = Disk(place)
        run_in_fork(without_space)
        disk.close()
        run_in_fork(lambda: again("0.pm", "r", exclusive=True))
        run_in_fork(lambda: again("1.pm", "r+"))
        with pmstore.open(place / "1.pm", "r", verify=True) as store:
            assert store["large"][::512].all()


def test_a_copy_with_a_hole_at_its_end_alone_on_a_full_tmpfs(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "source.pm", "x") as store:
        store["value"] = 1
    data = (tmp_path / "source.pm").read_bytes()
    written = -(-len(data.rstrip(b"\0")) // 4096) * 4096
    assert written < len(data)
    with on("tmpfs", tmp_path) as place:
        with (place / "s.pm").open("xb") as file:
            file.write(data[:written])
            file.truncate(len(data))
        disk = Disk(place)
        with pytest.raises(pmstore.OutOfSpaceError, match=f"the holes .* need {len(data) - written >> 10} KiB"):
            pmstore.open(place / "s.pm", "r", exclusive=True)
        disk.close()


@pytest.mark.parametrize("name", ["overlay on tmpfs", pytest.param("overlay on ext4", marks=pytest.mark.long)])
def test_a_store_of_a_lower_layer(name: str, tmp_path: Path, child: Callable[..., Child]) -> None:
    """The first writer copies it up. A reader from before, and one from after, follow the commits."""
    with on(name, tmp_path) as place:
        below = tmp_path / ("tmpfs" if "tmpfs" in name else "ext4.mounted")
        subprocess.run(["umount", place], check=True)
        with pmstore.open(below / "lower" / "s.pm", "x") as store:
            store["a"] = np.zeros(50_000)
        layers = ",".join((f"lowerdir={below}/lower", f"upperdir={below}/upper", f"workdir={below}/work"))
        mount(place, "-t", "overlay", "-o", layers, "overlay")
        reader = pmstore.open(place / "s.pm", "r")
        assert reader["a"][0] == 0
        writer = child(
            """
            import sys, pmstore
            store = pmstore.open(sys.argv[1])
            store["a"][0] = 5
            store.commit()
            print("committed", flush=True)
            input()
            """,
            place / "s.pm",
        )
        assert writer.line() == "committed"
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.open(place / "s.pm", "r+")
        reader.refresh()
        assert reader["a"][0] == 5
        writer.go()
        writer.end()
        reader.close()
        with pmstore.open(below / "lower" / "s.pm", "r") as store:
            assert store["a"][0] == 0


def test_a_file_system_in_user_space(tmp_path: Path) -> None:
    """FUSE, without fallocate and with locks of this kernel: a store grows, and is locked."""
    try:
        disk = BadDisk(tmp_path)
    except OSError as error:
        pytest.skip(f"no file system of our own: {error}")
    try:
        pmstore.open(disk.behind / "s.pm").close()
        store = pmstore.open(disk.mount / "s.pm")
        assert store.media == "file"
        for k in range(6):
            store[f"a{k}"] = np.full(100_000, float(k))
            store.commit()
        with pmstore.open(disk.mount / "s.pm", "r", exclusive=False) as reader:
            assert reader.sequence == store.sequence
        store.close()
        with pmstore.open(disk.mount / "s.pm", verify=True) as store:
            assert all((store[f"a{k}"] == k).all() for k in range(6))
    finally:
        disk.close()
