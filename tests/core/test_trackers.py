"""One contract for every way of finding changes: no write is lost, by any writer at any time.

What could lose a write, and the test that would notice:

- a page is written after it was listed and before it is copied, or while the extent is being armed: racing writers
- what a commit listed, and then failed to write, is not listed again by the kernel: failed commits
- a rollback drops pages, and what is written next looks clean: random walks
- space is used again, by another array, where the old one was armed: random walks, `test_space_is_used_again`
- pages are given back to the file (release) or were never there: random walks
- a fork shares all private pages: `test_a_fork_changes_nothing`
- the kernel writes for the program (read(2)): `test_every_kind_of_write_is_seen`
- an array dies before the commit: random walks
- two threads compare what is large, and one of them is late: `LARGE` in most of these, and test_parallel_compare.py
- somebody maps something else over an extent that is armed: `test_another_mapping_is_noticed`
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import random
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import LONGER, Medium
from tests.support import shim as shims
from tests.support.places import offset_of
from tests.support.shim import variable

PAGE = 4096
LARGE = 1100  # pages: two threads compare so many
Open = Callable[..., pmstore.Store]


@pytest.fixture(params=["learned", "uffd", "pagemap", "compare"])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Each tracker, forced, and what the store chooses by itself."""
    name: str = request.param
    monkeypatch.delenv("PMSTORE_TRACKER", raising=False)
    if name != "learned":
        monkeypatch.setenv("PMSTORE_TRACKER", name)
        try:
            pmstore.open(tmp_path / "probe.pm").close()
        except pmstore.StoreIOError as error:
            pytest.skip(str(error))
    yield name


def committed(store: pmstore.Store) -> dict[str, np.ndarray]:
    """What a crash now would leave."""
    copy = Path(store.path + ".copy")
    shutil.copyfile(store.path, copy)
    try:
        with pmstore.open(copy, "r", media=store.media, verify=True) as left:  # type: ignore[arg-type]
            return {name: np.array(value) for name, value in left.items()}
    finally:
        copy.unlink()


def assert_committed(store: pmstore.Store) -> None:
    left = committed(store)
    assert left.keys() == set(store)
    for name, value in left.items():
        assert np.array_equal(value, store[name]), name


def tracked(store: pmstore.Store, name: str = "w", shape: tuple[int, ...] = (300, 512)) -> np.ndarray:
    """An array that is armed, if it can be: several commits have changed little of it."""
    store[name] = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    array = store[name]
    store.commit()
    for i in range(20):
        array[i % 7 :: 50] += 1
        store.commit()
    return array


def fill_up(store: pmstore.Store) -> None:
    """Take all space that there is, with arrays that are pending."""
    size, number = 1 << 20, 0
    while size >= 1 << 14:
        try:
            store.create_array(f"filler/{number}", size, "u1")
            number += 1
        except pmstore.OutOfSpaceError:
            size //= 2


def test_a_large_array_may_end_where_a_word_of_pages_does(open_store: Open, tracker: str) -> None:
    """Sets of pages have 64 of them in a word."""
    store = open_store()
    store.create_array("w", (LARGE + 64, 512))
    pages = LARGE + -(offset_of(store, "w") // PAGE + LARGE) % 64
    store.rollback()
    w = store.create_array("w", (pages, 512))
    assert (offset_of(store, "w") // PAGE + pages) % 64 == 0
    store.commit()
    for i in range(1, 4):
        w[:, 7] = i
        store.commit()
    assert_committed(store)


# ---- which one


def test_stats_tell_which_it_is(open_store: Open, tracker: str) -> None:
    found = open_store().stats().tracker
    assert found == tracker if tracker != "learned" else found in {"uffd", "pagemap", "compare"}


def test_a_tracker_that_does_not_exist(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_TRACKER", "magic")
    with pytest.raises(ValueError, match="uffd, pagemap, compare, not 'magic'"):
        pmstore.open(medium.directory / "store.pm")
    assert not (medium.directory / "store.pm").exists()


def test_commits_take_no_descriptors(open_store: Open, tracker: str) -> None:
    store = open_store()
    w = tracked(store)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(3):
        w[i] += 1
        store.commit()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_store_that_can_not_be_opened_leaves_no_descriptor(medium: Medium, tracker: str) -> None:
    path = medium.directory / "store.pm"
    pmstore.open(path, media=medium.name).close()
    image = bytearray(path.read_bytes())
    image[2 * PAGE + 100] ^= 1  # of the root
    path.write_bytes(image)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(pmstore.CorruptStoreError):
        pmstore.open(path, media=medium.name)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- writers


def test_every_kind_of_write_is_seen(open_store: Open, tracker: str, tmp_path: Path) -> None:
    store = open_store()
    w = tracked(store)
    flat = w.reshape(-1)
    source = tmp_path / "bytes"
    source.write_bytes(np.full(3 * 512, 77.0).tobytes())

    def readinto() -> None:
        with open(source, "rb", buffering=0) as file:
            file.readinto(flat[1000 : 1000 + 3 * 512].view("u1").data)  # type: ignore[arg-type]

    def preadv() -> None:
        fd = os.open(source, os.O_RDONLY)
        os.preadv(fd, [w[200].view("u1").data, w[100].view("u1").data], 0)
        os.close(fd)

    writes: list[Callable[[], object]] = [
        lambda: w.__setitem__(17, 3.0),
        lambda: w.__setitem__((slice(None, None, 31), 5), 4.0),
        lambda: np.add(w[40:44], 1, out=w[40:44]),
        lambda: np.matmul(np.ones((8, 8)), np.ones((8, 512)), out=w[60:68]),
        lambda: w[250].sort(),
        lambda: w[251][::-1].sort(),
        lambda: flat[511:514].fill(9.0),  # over a page's end
        lambda: flat[-1:].fill(1.5),
        lambda: flat[:1].fill(2.5),
        lambda: np.random.default_rng(3).random(out=w[90:93]),
        lambda: memoryview(w[120].view("u1").data).__setitem__(slice(0, 8), b"12345678"),
        readinto,
        preadv,
    ]
    for write in writes:
        write()
        store.commit()
        assert_committed(store)
    before = store.sequence
    store.commit()
    assert store.sequence == before  # nothing is found that is not there


def test_more_changes_than_the_kernel_tells_at_once(open_store: Open, tracker: str) -> None:
    """Pages apart from each other are a range each, of which a call of PAGEMAP_SCAN tells 512."""
    store = open_store()
    w = tracked(store, shape=(1100, PAGE // 8))
    for first in range(2):
        w[first::2, 0] += 1
        store.commit()
        assert_committed(store)


def test_changes_far_behind_the_beginning(open_store: Open, tracker: str) -> None:
    """The kernel tells them as one range, which is noted in words of 64 pages each."""
    store = open_store()
    w = tracked(store, shape=(4500, PAGE // 8))
    w[4000:4400] += 1
    store.commit()
    assert_committed(store)


@pytest.mark.long_on("file")
@pytest.mark.longer
def test_racing_writers_lose_nothing(open_store: Open, tracker: str) -> None:
    """Every word that a writer wrote before it stopped is in the commit after that, at the latest."""
    store = open_store()
    w = tracked(store, shape=(LARGE, 512))
    stop = threading.Event()

    def write(k: int) -> None:
        rng = np.random.default_rng(k)
        while not stop.is_set():
            rows = rng.integers(0, LARGE // 2, 5) * 2 + k
            for row in rows:
                w[row, rng.integers(0, 512)] += 1
                w[row, :8] = rng.random(8)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for i in range(24 * LONGER):
        if i % 24 == 12:  # let it be armed and disarmed under their hands
            w[::2] *= 1.0
            w[:, 100] += 1
        store.commit()
    stop.set()
    for thread in threads:
        thread.join()
    store.commit()
    assert_committed(store)
    assert store.check().ok


# ---- commits that fail


def test_I10_what_a_failed_commit_found_is_found_again(open_store: Open, tracker: str) -> None:
    store = open_store(max_size=13 << 20)
    w = tracked(store, shape=(LARGE, 512))  # 4.5 MB
    old = w.copy()
    for _ in range(3):
        w[:] = -old  # more than the log and what is free can hold
        fill_up(store)
        with pytest.raises(pmstore.OutOfSpaceError):
            store.commit()
        with pytest.raises(pmstore.OutOfSpaceError):
            store.commit()
        # All but one row are as they were; that one is not written again.
        w[:400] = old[:400]
        w[401:] = old[401:]
        store.group("filler").clear()
        store.commit()
        assert_committed(store)
        old[400] = w[400]
        w[5] += 1
        old[5] += 1
        store.commit()
        assert_committed(store)


def test_I10_what_was_found_is_not_forgotten_when_the_store_grows(open_store: Open, tracker: str) -> None:
    """Asking for pending changes finds them, and the notes about them move when the file grows."""
    store = open_store()
    w = tracked(store)
    w[17] = w[200] = w[-1] = -5
    assert store._catalog.core.pending()
    store["large"] = np.zeros(20 << 20, "u1")
    store.commit()
    assert_committed(store)


def test_I10_a_failed_commit_then_a_rollback(open_store: Open, tracker: str) -> None:
    store = open_store(max_size=13 << 20)
    w = tracked(store, shape=(LARGE, 512))
    old = w.copy()
    for k in range(3):
        w[:] = -1 - k
        fill_up(store)
        with pytest.raises(pmstore.OutOfSpaceError):
            store.commit()
        store.rollback()
        assert np.array_equal(w, old)
        w[k] = 7
        old[k] = 7
        store.commit()
        assert_committed(store)
        assert np.array_equal(w, old)


# ---- everything else, in any order


@pytest.mark.longer
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_random_walks(open_store: Open, tracker: str, seed: int) -> None:
    rng = random.Random(seed)
    store = open_store()
    model: dict[str, np.ndarray] = {}
    pending: dict[str, np.ndarray] = {}

    def write(name: str) -> None:
        array = store[name]
        size = array.size
        kind = rng.randrange(10)
        if kind == 0:
            array[:] = array + rng.random()
        else:
            for _ in range(rng.randrange(1, 5)):
                at = rng.randrange(size)
                array[at : at + rng.choice([1, 3, 600, 3000])] += rng.random()
        pending[name] = array.copy()  # the store's own may die now, before the commit

    held = []
    for step in range(30 * LONGER):
        name = rng.choice("abcd")
        action = rng.random()
        if name not in pending:
            pages = rng.choice([1, 3, 70, 90, 200, LARGE])
            created = store.create_array(name, pages * 512 + rng.choice([0, 1, 100]), "f8", fill_value=rng.random())
            pending[name] = created.copy()
        elif action < 0.55:
            write(name)
        elif action < 0.6:
            held.append(store[name])  # detached, or not: it may go on living
            del store[name], pending[name]
        elif action < 0.65:
            held.clear()
        elif action < 0.75:
            store.rollback()
            pending = {key: value.copy() for key, value in model.items()}
            for key, value in pending.items():
                assert np.array_equal(store[key], value)
        elif action < 0.8:
            store.release()
        elif action < 0.83:
            store.create_array(f"grow{step}", 100_000, "u1")  # the region grows, under what is armed
            pending[f"grow{step}"] = np.zeros(100_000, "u1")
        elif action < 0.85:
            store.close()
            store = open_store()
            model = {key: value.copy() for key, value in pending.items()}
            held.clear()
        else:
            store.commit()
            model = {key: value.copy() for key, value in pending.items()}
            if rng.random() < 0.3:
                left = committed(store)
                assert left.keys() == model.keys()
                for key in model:
                    assert np.array_equal(left[key], model[key])
    assert store.check().ok


def test_space_is_used_again(open_store: Open, tracker: str) -> None:
    """The space of an array that was armed is used by another one of the same size, or by several (I9)."""
    store = open_store()
    for k in range(6):
        w = tracked(store, f"w{k}", (300, 512))
        w[3] = k
        del store[f"w{k}"]
        if k % 2:
            del w
        store.commit()
        small = [store.create_array(f"s{k}.{i}", (100, 512), "f8", fill_value=i) for i in range(3)]
        store.commit()
        for i, array in enumerate(small):
            array[i] = -i
        store.commit()
        assert_committed(store)
        for i in range(3):
            del store[f"s{k}.{i}"]


def test_arrays_outlive_their_store(open_store: Open, tracker: str) -> None:
    store = open_store()
    w = tracked(store)
    view = w[10:20]
    expected = w.copy()
    store.close()
    assert np.array_equal(w, expected)
    view[:] = 1  # into memory of its own
    assert (w[10:20] == 1).all()


def test_a_fork_changes_nothing(open_store: Open, tracker: str) -> None:
    """The parent is armed on, while its private pages are shared with a child that writes too."""
    store = open_store()
    w = tracked(store)
    go, done = os.pipe(), os.pipe()
    w[33] = 1  # pending across the fork
    child = os.fork()
    if not child:
        w[:] = -5
        os.write(done[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(done[0], 1)
        for k in range(5):
            w[k * 50] = k
            w[k * 50 + 1, 7] = k
            store.commit()
            assert (w != -5).all()
            assert_committed(store)
        w[77] = 8
        store.rollback()
        w[78] = 8
        store.commit()
        assert_committed(store)
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for fd in (*go, *done):
            os.close(fd)
    w[120] = 3
    store.commit()
    assert_committed(store)


def test_another_mapping_is_noticed(open_store: Open, tracker: str) -> None:
    """The kernel stops watching an armed array if anything maps the file over it. The store notices."""
    store = open_store()
    w = tracked(store)
    (offset,) = (row.entry.offset for row in store._catalog.core.scan(b"") if row.entry.length == w.nbytes)
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(store.path, os.O_RDWR)
    address = address_of(w)
    length = -(-w.nbytes // PAGE) * PAGE
    # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED
    assert mmap(address, length, 3, 0x12, fd, offset + 2 * PAGE) == address
    os.close(fd)
    for k in range(3):
        w[k * 40] = k + 100
        store.commit()
        assert_committed(store)


# ---- kernels before 6.7, which can't list written pages


def end_pagemaps() -> None:
    """Leave this process's stores without what the kernel tells of pages."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the list
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/pagemap"):
                os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), fd, inheritable=False)


def on_an_older_kernel(path: str) -> None:
    """Run in another process, under the shim."""
    variable("fault_no_scan").value = 1
    os.environ["PMSTORE_TRACKER"] = "uffd"
    with pytest.raises(pmstore.StoreIOError, match="PMSTORE_TRACKER=uffd is not supported here"):
        pmstore.open(path)
    del os.environ["PMSTORE_TRACKER"]
    rng = np.random.default_rng(1)
    with pmstore.open(path) as store:
        store["w"] = np.zeros((1300, PAGE // 8))  # more pages than are read at once
        store.commit()
        expected, w = np.array(store["w"]), store["w"]
        for _ in range(30):
            rows = rng.choice(len(w), int(rng.choice([1, 3, 40, 600])), replace=False)
            w[rows, rng.integers(PAGE // 8)] += 1
            if rng.random() < 0.3:
                store.rollback()
            else:
                store.commit()
                expected[...] = w
            assert np.array_equal(w, expected)
            assert_committed(store)
        assert store.stats().tracker == "pagemap"
        end_pagemaps()
        for _ in range(3):  # all bytes are compared
            w[rng.choice(len(w), 40)] += 1
            store.commit()
            assert_committed(store)
        with pmstore.open(f"{path}.next") as other:
            other["w"] = np.zeros((300, 512))
            other.commit()
    print("committed")


@pytest.mark.long_on("file")
@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_kernel_without_the_scan(medium: Medium, fault_library: Path) -> None:
    assert shims.call(fault_library, on_an_older_kernel, medium.directory / "s.pm") == "committed\n"


def without_a_pagemap(path: str) -> None:
    """Run in another process, under the shim."""
    variable("fault_no_scan").value = 1
    os.environ["PMSTORE_TRACKER"] = "pagemap"
    with pmstore.open(path) as store:
        w = tracked(store)
        end_pagemaps()
        w[3] += 1
        store.commit()
        assert_committed(store)
    print("committed")


@pytest.mark.no_sanitizer  # which is preloaded too
def test_an_older_kernel_that_stops_telling_of_pages(tmp_path: Path, fault_library: Path) -> None:
    """Each commit compares all bytes, also where this tracker has to be used."""
    assert shims.call(fault_library, without_a_pagemap, tmp_path / "s.pm") == "committed\n"


# ---- files on DAX, of which the kernel does not tell which pages are private


def on_dax(path: str) -> None:
    """Run in another process, under the shim."""
    variable("fault_dax").value = 1
    for name in ("uffd", "pagemap"):
        os.environ["PMSTORE_TRACKER"] = name
        with pytest.raises(ValueError, match=f"PMSTORE_TRACKER={name} can't be used on DAX"):
            pmstore.open(path, media="file")
    for name in ("compare", ""):
        os.environ["PMSTORE_TRACKER"] = name
        with pmstore.open(path, media="file") as store:
            w = tracked(store)
            w[::40] += 1
            store.commit()
            assert_committed(store)
            assert store.stats().tracker == "compare"
    print("committed")


@pytest.mark.no_sanitizer
def test_on_dax_all_is_compared(tmp_path: Path, fault_library: Path) -> None:
    assert shims.call(fault_library, on_dax, tmp_path / "s.pm") == "committed\n"


# ---- the one that is used is the best that there is


def can_scan() -> bool:
    """Whether the kernel has PAGEMAP_SCAN, asked for an empty list of this process's pages."""
    page = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    argument = struct.pack("=12Q", 96, 0, address, address + PAGE, 0, 0, 0, 0, 0, 0, 0, 1)
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            return fcntl.ioctl(pagemap, 0xC0606610, argument) is not None
    except OSError:
        return False


def can_watch() -> bool:
    """Whether it has userfaultfd with asynchronous write protection, and lets this process use it."""
    if platform.machine() != "x86_64":
        return False
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(323, os.O_CLOEXEC | 1)  # in user mode only
    if descriptor < 0:
        return False
    try:
        fcntl.ioctl(descriptor, 0xC018AA3F, struct.pack("=3Q", 0xAA, 1 << 15 | 1 << 13, 0))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


@pytest.mark.no_sanitizer
@pytest.mark.parametrize(("name", "possible"), [("pagemap", can_scan), ("uffd", lambda: can_scan() and can_watch())])
def test_what_the_kernel_has_is_used(
    name: str, possible: Callable[[], bool], medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not possible():
        pytest.skip("the kernel does not have it, or does not let this process use it")
    monkeypatch.setenv("PMSTORE_TRACKER", name)
    with pmstore.open(medium.directory / "s.pm", media=medium.name) as store:  # type: ignore[call-overload]
        assert store.stats().tracker == name
