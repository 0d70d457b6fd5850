"""Refusals of kernels and containers, other uses of the memory of arrays, and other writers of it.

Each combination works, or is a clear error. None loses a write: a commit has what the array shows.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import Medium, run_in_fork
from tests.core.test_trackers import Open, assert_committed, can_scan, can_watch, tracked, tracker  # noqa: F401
from tests.support import shim as shims
from tests.support.images import HEADER, Image
from tests.support.mapped import mappings
from tests.support.restricted import become_nobody, filter_calls, hide_proc
from tests.support.shim import variable

PAGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
Array = np.ndarray[Any, Any]


def is_refused(array: Array, how: int) -> bool:
    """Call madvise for all pages of a large array."""
    address = address_of(array)
    length = -(-array.nbytes // PAGE) * PAGE
    return bool(LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), how))


def work(store: pmstore.Store, w: Array) -> None:
    """Changes of a few pages and of all, committed and rolled back."""
    for k in range(6):
        w[k * 40] = k + 100
        w[k * 41, 7] = -k
        store.commit()
        assert_committed(store)
        before = w.copy()
        w[k * 39] = 5
        if k % 3 == 2:
            w += 1
        store.rollback()
        assert np.array_equal(w, before)


# ---- what is refused


def restricted(path: Path, media: Any, restrict: Callable[[], None], expected: set[str], late: bool) -> None:
    """Run in a fork that is restricted. late: the restriction comes when the array is already armed."""
    if not late:
        restrict()
    with pmstore.open(path, media=media) as store:
        w = tracked(store)
        if late:
            restrict()
        work(store, w)
        assert store.stats().tracker in expected, store.stats().tracker
        assert store.check().ok


RESTRICTIONS: dict[str, tuple[Callable[[], None], set[str]]] = {
    "no userfaultfd: EPERM": (lambda: filter_calls(userfaultfd=errno.EPERM), {"pagemap"}),
    "no userfaultfd: ENOSYS": (lambda: filter_calls(userfaultfd=errno.ENOSYS), {"pagemap"}),
    "no scan: EPERM": (lambda: filter_calls(pagemap_scan=errno.EPERM), {"pagemap"}),
    "no scan: ENOTTY": (lambda: filter_calls(pagemap_scan=errno.ENOTTY), {"pagemap"}),
    "neither": (lambda: filter_calls(userfaultfd=errno.ENOSYS, pagemap_scan=errno.EPERM), {"pagemap"}),
    "no proc": (hide_proc, {"compare"}),
}


@pytest.mark.parametrize("what", RESTRICTIONS)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.long)], ids=["before", "later"])
def test_what_containers_refuse(medium: Medium, what: str, late: bool) -> None:
    restrict, expected = RESTRICTIONS[what]
    trackers = {"uffd", "pagemap", "compare"} if late else expected

    def run() -> None:
        try:
            restricted(medium.directory / "s.pm", medium.name, restrict, trackers, late)
        except OSError as error:
            if "no filter" in str(error) or "name space" in str(error) or "can't mount" in str(error):
                print(f"not here: {error}")
                os._exit(0)
            raise

    run_in_fork(run)


def test_a_sandbox_without_madvise(medium: Medium) -> None:
    """Opening is an error, because a rollback would need it."""
    path = medium.directory / "s.pm"
    with pmstore.open(path, media=medium.name) as store:
        store["v"] = 1
        store.commit()

    def run() -> None:
        try:
            filter_calls(madvise=errno.EPERM)
        except OSError as error:
            print(f"not here: {error}")
            return
        for name in ("s.pm", "new.pm"):
            with pytest.raises(pmstore.StoreIOError, match="madvise failed: Operation not permitted"):
                pmstore.open(medium.directory / name, media=medium.name)

    run_in_fork(run)
    assert [one.name for one in medium.directory.glob("*.pm")] == ["s.pm"]
    with pmstore.open(path, media=medium.name, verify=True) as store:
        assert store["v"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
@pytest.mark.parametrize("started", [False, True], ids=["dropped-privileges", "started-as-nobody"])
def test_an_unprivileged_user(medium: Medium, started: bool) -> None:
    """The kernel lets such a user watch pages for the program's own faults only (vm.unprivileged_userfaultfd=0).

    A program that has dropped privileges since it started may not open its own /proc/self/pagemap.
    """

    def run() -> None:
        become_nobody(directory)
        if started:
            LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which execve sets
        expected = {"compare"} if not started else {"uffd"} if can_watch() and can_scan() else {"pagemap"}
        restricted(Path(directory) / "s.pm", medium.name, lambda: None, expected, late=False)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if medium.name == "memory" else "/var/tmp") as directory:
        run_in_fork(run)


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
def test_somebody_else_watches_the_array(open_store: Open) -> None:
    """A range belongs to one userfaultfd. The store finds changes otherwise."""
    if not can_watch():
        pytest.skip("no userfaultfd")
    store = open_store()
    w = store.create_array("w", (300, 512))
    other = LIBC.syscall(323, os.O_CLOEXEC | 1)
    try:
        fcntl.ioctl(other, 0xC018AA3F, struct.pack("=3Q", 0xAA, 1 << 15 | 1 << 13, 0))
        fcntl.ioctl(other, 0xC020AA00, struct.pack("=4Q", address_of(w), 300 * PAGE, 2, 0))
        store.commit()
        work(store, w)
        for k in range(20):
            w[k] += 1
            store.commit()
        work(store, w)
    finally:
        os.close(other)
    work(store, w)


# ---- writers


@pytest.mark.usefixtures("tracker")
def test_the_kernel_writes(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    w = tracked(store)
    sevens = np.full((8, 512), 7.0)
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    source = tmp_path / "sevens"
    source.write_bytes(sevens.tobytes())

    def through_pipe() -> None:
        os.write(writing, sevens[0].tobytes())
        with open(reading, "rb", buffering=0, closefd=False) as pipe:
            assert pipe.readinto(w[20].data) == PAGE  # type: ignore[arg-type]

    def through_socket() -> None:
        left.sendall(sevens[0].tobytes())
        assert right.recv_into(w[40].view("u1").data) == PAGE

    def past_the_cache() -> None:
        try:
            fd = os.open(source, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return  # the file system has no such reads
        try:
            assert os.preadv(fd, [w[60:64].view("u1").data, w[203].view("u1").data], 0) == 5 * PAGE
        finally:
            os.close(fd)

    def from_another_process() -> None:
        """process_vm_writev, which looks the pages up from outside."""
        child = os.fork()
        if not child:
            at = address_of(sevens)
            local = ctypes.create_string_buffer(struct.pack("2Q", at, 2 * PAGE))
            remote = ctypes.create_string_buffer(struct.pack("2Q", address_of(w[80:]) + 8, 2 * PAGE))
            done = LIBC.process_vm_writev(os.getppid(), local, 1, remote, 1, 0) == 2 * PAGE
            os._exit(0 if done or ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else 1)
        assert os.waitpid(child, 0)[1] == 0

    def through_proc() -> None:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(address_of(w[100:]) + 24)
            memory.write(sevens[:2].tobytes())

    def from_a_device() -> None:
        with open("/dev/zero", "rb", buffering=0) as zero:
            zero.readinto(w[120:124].view("u1").data)  # type: ignore[arg-type]

    try:
        for _ in range(2):  # pages that nobody has written, and pages that are private
            for write in (
                through_pipe,
                through_socket,
                past_the_cache,
                from_another_process,
                through_proc,
                from_a_device,
            ):
                write()
                store.commit()
                assert_committed(store)
                before = w.copy()
                write()
                w[299] += 1
                store.rollback()
                assert np.array_equal(w, before), write.__name__
            w += 1
            store.commit()
    finally:
        os.close(reading)
        os.close(writing)
        left.close()
        right.close()


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
def test_the_kernel_writes_while_commits_are_made(open_store: Open) -> None:
    """A thread reads from a pipe into rows of its own. What it has read is in the commit after that."""
    store = open_store()
    w = tracked(store, shape=(1100, 512))
    reading, writing = os.pipe()
    count = 400

    def write() -> None:
        for k in range(count):
            os.write(writing, np.full(512, float(k)).tobytes())

    def read() -> None:
        with open(reading, "rb", buffering=0) as pipe:
            for k in range(count):
                left = w[(k * 37) % 1100].view("u1").data
                while left.nbytes:
                    left = left[pipe.readinto(left) :]  # type: ignore[arg-type]

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.commit()
    for thread in threads:
        thread.join()
    os.close(writing)
    store.commit()
    assert_committed(store)


# ---- memory management

DONTNEED, FREE, REMOVE, DONTFORK, DOFORK, MERGEABLE, HUGEPAGE, WIPEONFORK = 4, 8, 9, 10, 11, 12, 14, 18
COLD, PAGEOUT, POPULATE_READ, POPULATE_WRITE, COLLAPSE = 20, 21, 22, 23, 25
HARMLESS = {
    "SEQUENTIAL": 2,
    "WILLNEED": 3,
    "MERGEABLE": MERGEABLE,
    "HUGEPAGE": HUGEPAGE,
    "NOHUGEPAGE": 15,
    "COLD": COLD,
    "PAGEOUT": PAGEOUT,
    "POPULATE_READ": POPULATE_READ,
    "POPULATE_WRITE": POPULATE_WRITE,
    "COLLAPSE": COLLAPSE,
    "DONTFORK": DONTFORK,
    "DOFORK": DOFORK,
}


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
def test_advice_that_keeps_the_bytes(open_store: Open) -> None:
    store = open_store()
    w = tracked(store)
    for how in HARMLESS.values():
        before = w.copy()
        w[7] += 1
        before[7] += 1
        is_refused(w, how)  # some are refused, which changes nothing
        assert np.array_equal(w, before)
        w[9] += 1
        store.commit()
        assert_committed(store)
        is_refused(w, how)
    work(store, w)


@pytest.mark.usefixtures("tracker")
def test_advice_that_the_kernel_refuses(open_store: Open) -> None:
    """They would take bytes away, and are for other kinds of memory."""
    store = open_store()
    w = tracked(store)
    w[7] += 1
    before = w.copy()
    for how in (FREE, REMOVE, WIPEONFORK):
        assert is_refused(w, how)
        assert np.array_equal(w, before)
    store.commit()
    assert_committed(store)


@pytest.mark.usefixtures("tracker")
def test_dropped_pages_show_the_last_commit(open_store: Open) -> None:
    """MADV_DONTNEED is a rollback of these pages, which the program asked for."""
    store = open_store()
    w = tracked(store)
    before = w.copy()
    w[50:60] = 7
    assert not is_refused(w[50:60], DONTNEED)
    assert np.array_equal(w, before)
    store.commit()
    assert_committed(store)
    work(store, w)
    w[70] = 3
    w[80] = 3
    assert not is_refused(w[80], DONTNEED)
    store.commit()
    assert (w[70] == 3).all() and not (w[80] == 3).all()
    assert_committed(store)


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
def test_dropped_pages_of_an_array_that_changes_as_a_whole(open_store: Open) -> None:
    """They may show an older commit. After mark_dirty the next commit, or a rollback, makes array and store agree."""
    store = open_store()
    w = store.create_array("w", 200_000)
    for k in range(9):
        w += 1
        store.commit()
        if k < 4:
            continue
        assert not is_refused(w[: 8 * 512], DONTNEED)
        store.mark_dirty(w)
        if k % 2:
            store.rollback()
        else:
            store.commit()
        assert_committed(store)


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmLck:")[2].split()[0])


@pytest.mark.no_sanitizer  # which locks no memory
@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 18), reason="before, it is unlocked")
def test_dropped_pages_stay_locked(open_store: Open) -> None:
    store = open_store()
    w = store.create_array("w", (300, 512))
    store.commit()
    at, length = ctypes.c_void_p(address_of(w)), ctypes.c_size_t(w.nbytes)
    if LIBC.mlock(at, length):
        pytest.skip(f"no mlock: {os.strerror(ctypes.get_errno())}")
    before = locked_bytes()
    for drop in (store.rollback, lambda: (store.commit(), store.release())):
        w[::3] += 1
        drop()
        assert locked_bytes() == before > 0
    assert (w[::3] == 1).all() and not w[1::3].any()
    LIBC.munlock(at, length)


def test_protection_by_the_program(open_store: Open) -> None:
    """mprotect splits the mapping, and joins it again."""
    store = open_store()
    w = tracked(store)
    at = ctypes.c_void_p(address_of(w[100]))
    for _ in range(3):
        w[100:110] += 1
        assert LIBC.mprotect(at, ctypes.c_size_t(5 * PAGE), mmap.PROT_READ) == 0
        w[99] += 1
        store.commit()
        assert_committed(store)
        assert LIBC.mprotect(at, ctypes.c_size_t(5 * PAGE), mmap.PROT_READ | mmap.PROT_WRITE) == 0
        w[103] += 1
        store.commit()
        assert_committed(store)
    work(store, w)


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize("huge", ["always", "advise"])
def test_huge_pages(tmp_path: Path, huge: str) -> None:
    """A tmpfs of huge pages, which are split where a part of them is armed or changed."""
    place = tmp_path / "huge"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size=64m,huge={huge}", "tmpfs", place]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs of huge pages")
    try:
        with pmstore.open(place / "s.pm") as store:
            w = tracked(store, shape=(2048, 512))
            is_refused(w, HUGEPAGE)
            work(store, w)
            is_refused(w, COLLAPSE)
            for k in range(10):
                w[k::500] += 1
                store.commit()
            work(store, w)
            assert store.check().ok
            del w
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_arrays_that_outlive_their_store_are_not_given_huge_pages(tmp_path: Path) -> None:
    """Each small array would take 2 MiB of a kernel that gives them unasked."""
    with pmstore.open(tmp_path / "s.pm", "x") as store:
        first = store.create_array("first", 1000, fill_value=1.0)
        store["between"] = np.zeros(3 << 18)
        last = store.create_array("last", 1000, fill_value=2.0)
        store.commit()
    for array in (first, last):
        place = address_of(array)
        assert ["nh" in one.flags for one in mappings() if one.begin <= place < one.end] == [True]
    assert (first == 1).all() and (last == 2).all()


@pytest.mark.long
@pytest.mark.usefixtures("tracker")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can add swap space")
def test_real_swap(open_store: Open, tmp_path: Path) -> None:
    """Pages of an array are swapped out before and after they are found, and brought back by reads and writes."""
    file = tmp_path / "swap"
    file.write_bytes(bytes(32 << 20))
    file.chmod(0o600)
    if not shutil.which("mkswap") or subprocess.run(["mkswap", file], capture_output=True).returncode:
        pytest.skip("no mkswap")
    if subprocess.run(["swapon", file], capture_output=True).returncode:
        pytest.skip("no swap space can be added here")
    try:
        store = open_store()
        w = tracked(store)
        before = w.copy()
        for k in range(6):
            w[k::60] += 1
            before[k::60] += 1
            assert not is_refused(w, PAGEOUT)
            w[299 - k] += 1
            before[299 - k] += 1
            store.commit()
            assert not is_refused(w, PAGEOUT)
            assert_committed(store)
            assert np.array_equal(w, before)
            assert not is_refused(w, PAGEOUT)
            w[k + 100] = 5
            store.rollback()
            assert np.array_equal(w, before)
        work(store, w)
    finally:
        subprocess.run(["swapoff", file], check=True)


# ---- forks


@pytest.mark.usefixtures("tracker")
def test_a_child_that_no_handler_has_seen(open_store: Open) -> None:
    """Made by the system call itself: all pages are shared with it, and the parent's writes copy them."""
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is another")
    store = open_store()
    w = tracked(store)
    w[33] = 1
    go = os.pipe()
    child = LIBC.syscall(57)
    if not child:
        os.close(go[1])
        os.read(go[0], 1)
        os._exit(0)
    try:
        w[34] = 2
        store.commit()
        assert_committed(store)
        work(store, w)
    finally:
        os.close(go[0])
        os.close(go[1])
        os.waitpid(child, 0)
    work(store, w)


def without_random_numbers(directory: str) -> None:
    """Run in a child with the shim. Ids tell stores and logs apart all the same."""
    variable("fault_no_random").value = 1
    ids, salts = set(), set()
    for number in range(3):
        path = Path(directory) / f"{number}.pm"
        with pmstore.open(path, "x") as store:
            for value in range(4):
                store["n"] = value
                store.commit()
                store._catalog.core.checkpoint()
                salts.add(Image(path).word(HEADER["salt"]))
        ids.add(Image(path).store_id)
        with pmstore.open(path, "r", verify=True) as store:
            assert store["n"] == 3
    assert len(ids) == 3 and len(salts) == 12 and min(ids | salts) > 1 << 32


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_kernel_without_random_numbers(directory: Path, fault_library: Path) -> None:
    shims.call(fault_library, without_random_numbers, directory)
