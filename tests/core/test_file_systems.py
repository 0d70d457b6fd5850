"""Which file system it is, and what follows from that: real ones, in images that are mounted here.

What a commit has handed to the disk is what an image holds when the commit returns. A copy of it, made without
unmounting anything, is what a crash of the system leaves. That needs root and loop devices; without them only the
choice is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore
from pmstore._core import ffi
from tests.conftest import run_in_fork
from tests.support import shim as shims
from tests.support.shim import (
    FDATASYNC,
    FROM_THEN,
    INTERRUPT,
    ONCE,
    Fault,
    begin,
    count,
    direct_io,
    end,
    faults,
    hits,
    pretend_ext4,
    variable,
)
from tests.support.snapshots import snapshot


class Kind(NamedTuple):
    """make: the command that makes it, without the image; options: how it is mounted; size: of the image, in MiB."""

    make: str
    options: str = ""
    size: int = 64


KINDS = {
    "ext4-ordered": Kind("mkfs.ext4 -q -F", "data=ordered"),
    "ext4-writeback": Kind("mkfs.ext4 -q -F", "data=writeback"),
    "ext4-journal": Kind("mkfs.ext4 -q -F", "data=journal"),
    "ext4-no-journal": Kind("mkfs.ext4 -q -F -O ^has_journal"),
    "ext4-dioread-lock": Kind("mkfs.ext4 -q -F", "dioread_lock"),
    "ext3": Kind("mkfs.ext3 -q -F"),
    "ext2": Kind("mkfs.ext2 -q -F"),
    "xfs": Kind("mkfs.xfs -q -f", size=300),
    "btrfs": Kind("mkfs.btrfs -q -f", size=128),
}


silent: list[str] = []  # why no more mounts are tried


def run(*command: str | Path, timeout: float = 60) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=timeout)


def image_of(kind: Kind, path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root may mount an image")
    program, *arguments = kind.make.split()
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    with path.open("wb") as file:
        file.truncate(kind.size << 20)
    run(program, *arguments, path)
    return path


@contextlib.contextmanager
def mounted(image: Path, options: str) -> Iterator[Path]:
    if silent:
        pytest.skip(silent[0])
    place = image.with_suffix(".mounted")
    place.mkdir()
    try:
        run("mount", "-o", f"loop,{options}" if options else "loop", image, place, timeout=10)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"an image can't be mounted: {error.stderr.decode().strip()}")
    except subprocess.TimeoutExpired:
        silent.append("an image can't be mounted: the kernel's loop devices do not answer")
        pytest.skip(silent[0])
    try:
        yield place
    finally:
        busy = subprocess.run(
            ["umount", place], check=False, capture_output=True, timeout=60
        ).returncode  # by a test that failed
        if busy:
            run("umount", "--lazy", place)


def crashed(image: Path, copy: Path) -> Path:
    """The disk as it is now. Without a journal a check comes before the next mount."""
    run("cp", "--sparse=always", "--reflink=never", image, copy)
    if "no-journal" in image.name or "ext2" in image.name:
        subprocess.run(["e2fsck", "-fy", copy], check=False, capture_output=True, timeout=60)
    return copy


def keeps_what_is_synced(place: Path, image: Path) -> bool:
    """False if the kernel itself forgets: see media/file_system.h, ext4 without a journal."""
    fd = os.open(place / "probe", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1 << 20)
    os.fsync(fd)
    os.pwrite(fd, b"here", 1 << 18)
    os.fdatasync(fd)
    os.close(fd)
    with mounted(crashed(image, image.with_name("probe-no-journal.img")), "") as copy:
        return (copy / "probe").exists() and b"here" in (copy / "probe").read_bytes()


def commits(store: pmstore.Store, step: int) -> None:
    """A new array in reserved space, a small record, one of 200 KB, an array that is written whole."""
    if step == 0:
        store["new"] = np.arange(40_000.0)
        store["small"] = np.zeros(3)
        store["middle"] = np.zeros(30_000)
        store["whole"] = np.zeros(200_000)
    store["small"][:] = step
    if step % 3:
        store["middle"][step:] = step
    if step > 2:
        store["whole"] += 1
    store.commit()


@pytest.mark.parametrize("name", KINDS)
def test_what_a_commit_has_given_to_the_disk(name: str, tmp_path: Path) -> None:
    image = image_of(KINDS[name], tmp_path / f"{name}.img")
    left = []
    with mounted(image, KINDS[name].options) as place:
        if "no-journal" in name and not keeps_what_is_synced(place, image):
            pytest.skip("this kernel's fdatasync forgets that blocks were written")
        store = pmstore.open(place / "store.pm", "x", media="file")
        for step in range(7):
            commits(store, step)
            if step in (0, 6):
                left.append((crashed(image, tmp_path / f"{name}-{step}.img"), store.sequence, snapshot(store)))
        store.close()
    for copy, sequence, state in left:
        with mounted(copy, KINDS[name].options) as place:
            with pmstore.open(place / "store.pm", media="file", verify=True) as store:
                assert store.sequence == sequence and snapshot(store) == state


XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC = 0x58465342, 0x9123683E

CHOICES = {
    "rw\ndata=ordered\n": (False, True, os.RWF_DSYNC),
    "rw\ndata=writeback\n": (False, True, os.RWF_DSYNC),
    "rw\nbarrier\ndata=journal\n": (True, False, 0),
    "rw\nbarrier\n": (False, True, os.RWF_SYNC),  # no journal
    "": (True, False, 0),  # ext2's own driver
}
NOT_TRUSTED = (True, False, 0)


def choice(path: Path, options: str | None) -> tuple[bool, bool, int]:
    """Whether small commits sync the whole file, and how those past the page cache are durable, if ext4 says this."""
    pretend_ext4(True, None if options is None else options.encode())
    with pmstore.open(path, "x", media="file") as store:
        store["x"] = np.zeros(8)
        store.commit()
        variable("fault_past_cache", ctypes.c_long).value = variable("fault_flags").value = 0
        begin(FDATASYNC, ONCE, errno.EIO, 1 << 40, path)
        for i in range(5):
            store["x"][0] = i + 1
            store.commit()
        found = count() > 0, variable("fault_past_cache", ctypes.c_long).value > 0, variable("fault_flags").value
        end()
    return found


def choices(directory: str) -> None:
    paths = (Path(directory) / f"{i}.pm" for i in itertools.count())

    def choose(options: str | None, expected: tuple[bool, bool, int]) -> None:
        before = len(os.listdir("/proc/self/fd"))
        assert choice(next(paths), options) == expected, options
        assert len(os.listdir("/proc/self/fd")) == before
        print("as expected")

    def in_a_thread(*arguments: Any) -> None:
        thread = threading.Thread(target=choose, args=arguments)  # a thread asks once
        thread.start()
        thread.join()

    for options, expected in CHOICES.items():
        in_a_thread(options, expected)
    in_a_thread(None, NOT_TRUSTED)
    variable("fault_no_sysfs").value = 1
    in_a_thread("rw\ndata=ordered\n", NOT_TRUSTED)
    variable("fault_no_sysfs").value = 0
    variable("fault_dax").value = -errno.EOPNOTSUPP
    in_a_thread("rw\ndata=ordered\n", NOT_TRUSTED)


@pytest.mark.no_sanitizer  # which is preloaded too
def test_what_is_trusted(tmp_path: Path, fault_library: Path) -> None:
    said = shims.call(fault_library, choices, tmp_path)
    assert len(said.splitlines()) == len(CHOICES) + 3


def changed_pages_wait(directory: str) -> None:
    """Run in a child with the shim: new arrays beside changes of 26 pages, which the kernel may write back later."""
    pretend_ext4(True)
    path = Path(directory) / "waits.pm"
    syncs = []
    with pmstore.open(path, "x", media="file") as store:
        w = store.create_array("w", (1024, 512), "f8")
        store.commit()
        for i in range(8):
            w[i::40, 0] = 1
            store[f"n{i}"] = np.ones(3000)
            begin(FDATASYNC, ONCE, errno.EIO, 1 << 40, path)
            store.commit()
            syncs.append(count())
            end()
    assert not any(syncs[4:]), syncs


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_commit_does_not_wait_for_the_pages_of_those_before(directory: Path, fault_library: Path) -> None:
    if not direct_io(directory):
        pytest.skip("the whole file is synced")
    shims.call(fault_library, changed_pages_wait, directory)


def mounts(directory: str) -> None:
    """Run in a child with the shim: one thread, which has stores on what seem to be several mounts."""
    paths = (Path(directory) / f"{i}.pm" for i in itertools.count())
    journal, ordered, neither = "rw\nbarrier\ndata=journal\n", "rw\ndata=ordered\n", "rw\n"
    shims.find_the_core()
    assert choice(next(paths), ordered) == CHOICES[ordered]
    assert choice(next(paths), journal) == CHOICES[ordered], "the mount is the same, and can't have other options"
    for name, options in (("mount", journal), ("fsid", ordered), ("device_number", journal)):
        variable(f"fault_{name}", ctypes.c_ulong).value = 4711
        assert choice(next(paths), options) == CHOICES[options], name
    variable("fault_mount", ctypes.c_ulong).value = 4712
    assert choice(next(paths), neither) == (False, True, os.RWF_SYNC), "what was read before is forgotten"
    variable("fault_mount", ctypes.c_ulong).value = 4713
    variable("fault_no_sysfs").value = 1
    assert choice(next(paths), neither) == NOT_TRUSTED
    variable("fault_magic", ctypes.c_long).value = XFS_SUPER_MAGIC
    assert choice(next(paths), journal) == (False, True, os.RWF_DSYNC)


@pytest.mark.no_sanitizer
def test_a_thread_asks_again_for_another_mount(directory: Path, fault_library: Path) -> None:
    if not direct_io(directory):
        pytest.skip("this file system has no writes past the page cache")
    shims.call(fault_library, mounts, directory)


def choices_of_two(*directories: str) -> None:
    """One thread has stores on both."""
    journal, ordered = "rw\nbarrier\ndata=journal\n", "rw\ndata=ordered\n"
    assert choice(Path(directories[0]) / "a.pm", journal) == CHOICES[journal]
    assert choice(Path(directories[1]) / "b.pm", ordered) == CHOICES[ordered]
    assert choice(Path(directories[0]) / "c.pm", journal) == CHOICES[journal]


@pytest.mark.no_sanitizer
def test_a_thread_with_stores_on_two_file_systems(tmp_path: Path, directory: Path, fault_library: Path) -> None:
    if tmp_path.stat().st_dev == directory.stat().st_dev:
        pytest.skip("there is one only")
    shims.call(fault_library, choices_of_two, directory, tmp_path)


def nothing_is_reserved(directory: str) -> None:
    """Run in a child with the shim: fallocate is refused, so that blocks are reserved by writing them."""
    for code in (errno.EOPNOTSUPP, errno.EPERM):  # the second from a sandbox
        path = Path(directory) / f"{code}.pm"
        with faults(Fault("fallocate", FROM_THEN, code)), pmstore.open(path, "x", media="file") as store:
            for size in (0, 1000, 1 << 20):
                store[f"a{size}"] = np.ones(size)
                store.commit()
                file = path.stat()
                assert file.st_blocks * 512 >= file.st_size > 8 * size


@pytest.mark.no_sanitizer
def test_space_that_can_not_be_reserved_is_written(directory: Path, fault_library: Path) -> None:
    """Otherwise a commit would find the disk full that was promised its space."""
    shims.call(fault_library, nothing_is_reserved, directory)


def forbidden(directory: str) -> None:
    """Run in a child with the shim: a sandbox forbids what makes a range durable."""
    pretend_ext4(True)
    for call, code in (
        (call, code) for call in ("sync_file_range", "pwritev2") for code in (errno.ENOSYS, errno.EPERM)
    ):
        path = Path(directory) / f"{call}{code}.pm"
        with pmstore.open(path, "x", media="file") as store:
            for size in (1 << 20, 3):
                with faults(Fault(call, FROM_THEN, code)):
                    store[f"a{size}"] = np.ones(size)
                    store["a3"] = np.ones(3)
                    store.commit()
                assert shims.hits() == (1 if size > 3 else 0), "it is not tried again"
            begin(shims.FDATASYNC, ONCE, 0, 1 << 40, path)
            store["a3"][:] = 2
            store.commit()
            assert count() == 1, "the commit is durable"
            end()
        with pmstore.open(path, "r", verify=True) as store:
            assert (store[f"a{1 << 20}"] == 1).all() and (store["a3"] == 2).all()


@pytest.mark.no_sanitizer
def test_a_sandbox_that_forbids_to_sync_a_range(directory: Path, fault_library: Path) -> None:
    """It gets fdatasync."""
    shims.call(fault_library, forbidden, directory)


def messages(directory: str) -> None:
    """Run in a child with the shim: the space that is asked for is refused."""
    for length in (150, 255, 256, 300):  # of the path; the kernel is asked for up to 255 bytes
        folder = Path(directory)
        while len(str(folder)) < length - 2:
            folder /= "d" * min(100, length - 3 - len(str(folder)))
        folder.mkdir(parents=True)
        pmstore.open(folder / "s", "x").close()
        with pmstore.open(folder / "s") as store:
            assert len(str(folder / "s")) == length
            before = store.stats().file_size
            with faults(Fault("fallocate", ONCE, errno.ENOSPC)), pytest.raises(pmstore.OutOfSpaceError) as caught:
                store["a"] = np.ones(1 << 20)
            store["a"] = np.ones(1 << 20)
            asked = (store.stats().file_size - before) // 1024
        told = re.search(
            r"can't grow by (\d+) KiB: (.*) has (\d+) KiB left \(make room and try again", str(caught.value)
        )
        assert told and (int(told[1]), told[2]) == (asked, f"{folder}/" if length < 256 else "its file system")
        system = os.statvfs(folder)
        assert abs(int(told[3]) - system.f_bavail * system.f_frsize // 1024) < 1 << 20, "others use it as well"
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.no_sanitizer
def test_a_lack_of_space_is_told_with_its_folder(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, messages, directory)


def refused_growth(directory: str) -> None:
    """Run in a child with the shim: a file can't grow, for want of space or for other reasons."""
    for media in ("auto", "file"):
        path = Path(directory) / f"{media}.pm"
        store = pmstore.open(path, "x", media=media)  # type: ignore[call-overload]
        store["a"] = np.ones(3)
        store.commit()
        with faults(Fault("fallocate", ONCE, errno.EDQUOT)), pytest.raises(pmstore.OutOfSpaceError) as quota:
            store["b"] = np.ones(1 << 20)
        assert re.search(rf"grow by \d+ KiB in {directory}/, where a quota leaves less \(raise it", str(quota.value))
        assert "KiB left" not in str(quota.value), "that would be the file system's"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        with pytest.raises(
            pmstore.OutOfSpaceError, match=r"grow by \d+ KiB in .*limited to \d+ KiB .*ulimit -f"
        ) as full:
            store["b"] = np.ones(1 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store["b"] = np.ones(1 << 20)
        store.commit()
        store["a"][0] = 2
        with faults(Fault("fallocate", ONCE, errno.EROFS)), pytest.raises(pmstore.StoreIOError) as failed:
            store["c"] = np.ones(1 << 22)
        told = rf"can't grow by \d+ KiB in {directory}/: Read-only .*; the store has failed: .* without changes since"
        assert re.search(told, str(failed.value))
        assert "make room" not in f"{full.value} {failed.value}"
        with pytest.raises(pmstore.FailedStoreError):
            store.commit()
        store._drop(discard=True)
        with pmstore.open(path, "r", verify=True) as store:
            assert store["a"][0] == 1 and len(store) == 2


@pytest.mark.no_sanitizer
def test_growth_that_is_refused_says_why(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, refused_growth, directory)


def test_a_limit_on_the_size_of_files_is_named(directory: Path) -> None:
    """A snapshot's file in memory counts, too; with exclusive=True there is none."""
    path = directory / "s.pm"
    with pmstore.open(path) as store:
        store["a"] = np.ones(1000)
        store.commit()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(pmstore.OutOfSpaceError, match=r"for a snapshot: files are limited to 64 KiB .*ulimit -f"):
            pmstore.open(path, "r")
        with pmstore.open(path, "r", exclusive=True) as store:
            assert store["a"].all()

    run_in_fork(limited)


def test_a_memory_file_without_seals_is_memory() -> None:
    """Whatever error an earlier call has left in errno."""
    place = Path("/dev/shm")
    if not place.is_dir():
        pytest.skip("no /dev/shm")
    fd = os.memfd_create("store", os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryDirectory(dir=place) as directory:
        pmstore.open(Path(directory) / "store.pm", "x").close()
        os.write(fd, (Path(directory) / "store.pm").read_bytes())
    for mode in ("r+", "r"):
        ffi.errno = errno.EINVAL
        with pmstore.open(f"/proc/self/fd/{fd}", mode) as store:  # type: ignore[arg-type]
            ffi.errno = errno.EINVAL
            assert store.media == "memory", mode
    os.close(fd)


def unknown(directory: str) -> None:
    """Run in a child with the shim: each time that the core asks for the file's status, it gets none."""
    path = Path(directory) / "unknown.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["n"] = 1
    shims.find_the_core()
    for at in range(1, 20):
        begin(shims.STATUS, ONCE, errno.EIO, at)
        try:
            pmstore.open(path, "r+", media="file").close()
        except pmstore.StoreIOError as error:
            assert "cannot look at the file" in str(error), at
        else:
            assert not hits(), at
            break
        finally:
            end()
    assert 2 < at < 19
    with pmstore.open(path, "r+", media="file") as store:
        assert store["n"] == 1


@pytest.mark.no_sanitizer
def test_a_file_whose_status_is_unknown_is_not_opened(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, unknown, directory)


def interrupted_growth(directory: str) -> None:
    """Run in a child with the shim: a process made the file longer, and was killed before it synced that."""
    for media, calls in (("memory", 1), ("file", 2)):
        path = Path(directory) / f"{media}.pm"
        pmstore.open(path, "x", media=media).close()
        os.truncate(path, 64 << 20)
        with pmstore.open(path, media=media) as store:
            begin(shims.FSYNC | shims.FALLOCATE, ONCE, 0, 1 << 40, path)
            store["a"] = np.ones(1 << 20)
            assert store.stats().file_size < 64 << 20
            assert count() == calls, "space is reserved, and on disks its growth synced"
            end()


@pytest.mark.no_sanitizer
def test_space_that_an_interrupted_growth_left_is_reserved(directory: Path, fault_library: Path) -> None:
    if subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True).stdout != "tmpfs\n":
        pytest.skip("no tmpfs")
    shims.call(fault_library, interrupted_growth, directory)


def own_blocks(directory: str) -> None:
    """Run in a child with the shim: file systems that can share blocks between files."""
    signals = {signal.SIGUSR1, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    first, last, extents = (
        variable(f"fault_{name}", kind)
        for name, kind in (("first_shared", ctypes.c_long), ("last_shared", ctypes.c_long), ("extents", ctypes.c_int))
    )
    for magic in (BTRFS_SUPER_MAGIC, XFS_SUPER_MAGIC):
        variable("fault_magic", ctypes.c_long).value = magic
        path = Path(directory) / f"{magic}.pm"
        pmstore.open(path, "x", media="file").close()
        end_of_file = (path.stat().st_size - 1) // 4096
        for block, at_once in ((0, 1000), (1, 1000), (31, 32), (32, 32), (1, 1), (end_of_file, 1), (end_of_file, 1000)):
            first.value, last.value, extents.value = block, block, at_once
            for mode in ("r", "r+"):
                variable("fault_reflinks").value = 2
                with faults(Fault("fallocate", INTERRUPT, errno.EINTR)):
                    pmstore.open(path, mode, media="file").close()  # type: ignore[call-overload]
                assert variable("fault_reflinks").value == (2 if mode == "r" else 1), "they are shared no more"
        for nothing in (1, 4):  # is shared, or is known
            variable("fault_reflinks").value = nothing
            begin(shims.FALLOCATE, ONCE, 0, 1 << 40)
            pmstore.open(path, "r+", media="file").close()
            assert count() == 0
            end()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == signals


@pytest.mark.no_sanitizer
def test_a_copy_that_shares_blocks_gets_blocks_of_its_own(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, own_blocks, directory)


def in_place(directory: str) -> None:
    """Run in a child with the shim."""
    extents, in_place, none = 0x80000, 0x800000, -2  # of linux/fs.h; none: the file system has no flags
    for magic, before, after in (
        (BTRFS_SUPER_MAGIC, 0, in_place),
        (BTRFS_SUPER_MAGIC, extents, extents | in_place),
        (BTRFS_SUPER_MAGIC, extents | in_place, extents | in_place),
        (BTRFS_SUPER_MAGIC, none, none),
        (0, extents, extents),
    ):
        variable("fault_magic", ctypes.c_long).value = magic
        variable("fault_inode_flags").value = before
        path = Path(directory) / "store.pm"
        pmstore.open(path, "x", media="file").close()
        assert variable("fault_inode_flags").value == after
        variable("fault_inode_flags").value = before
        pmstore.open(path, "r+", media="file").close()
        assert variable("fault_inode_flags").value == before, "this is for new files"
        path.unlink()


@pytest.mark.no_sanitizer
def test_a_new_file_is_written_in_place(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, in_place, directory)
