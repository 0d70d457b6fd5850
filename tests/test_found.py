"""What an independent review found, at the face that users see: each of these went wrong once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import Core

from .conftest import Medium


def spin(turns: int) -> None:
    while turns:
        turns -= 1


@pytest.fixture
def quick_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_write_that_races_with_a_commit_is_in_the_next(open_store, medium, quick_switches):
    """A thread writes to an array while a commit gathers, and lets go of it before that ends (I10)."""
    store = open_store()
    store["a"] = np.zeros(1000)  # gathered before the large one
    large = store.create_array("large", 1_000_000)
    store.commit()
    for i in range(1, 31):
        box = [store["a"]]
        commits = []

        def race(i=i, box=box, commits=commits):
            while not commits:
                pass
            spin(int(20 * 1.38**i))
            box[0][0] = i
            box.clear()  # the last reference

        thread = threading.Thread(target=race)
        thread.start()
        large += 1
        commits.append(i)
        store.commit()
        thread.join()
        store.commit()  # begins after the write
        a = store["a"]
        store.rollback()
        assert a[0] == i, "the write is in no commit"
        del a


def test_an_extent_that_nobody_took_is_freed_by_the_commit(open_store):
    """As an interrupt leaves it, between the core's allocation and the entry that was to own it."""
    store = open_store()
    store["a"] = np.arange(3000.0)
    store.commit()
    core = store._catalog.core
    before = store.stats()
    offsets = [core.alloc(50_000), core.alloc(100), core.alloc(5000)]
    store["b"] = 1
    store.commit()
    assert store.check().ok, store.check()
    assert store.stats().region_used == before.region_used
    assert [core.alloc(50_000), core.alloc(100), core.alloc(5000)] == offsets
    store.rollback()
    core.alloc(50_000)
    sequence = store.sequence
    store.commit()
    assert store.sequence == sequence and store.stats().region_used == before.region_used
    assert store.check().ok
    store.close()
    assert open_store(verify=True)["b"] == 1


REPLACEMENTS = {"delete": None, "value": 5, "blob": "y" * 9000, "array": np.arange(700.0), "empty": np.zeros(0)}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_list_goes_in_one_call(open_store, monkeypatch, how):
    """Elements that outlive their list, after an interrupt between two calls, could never be deleted."""
    store = open_store()
    store.create_list("other").extend(range(10))
    store.commit()
    keys = store.stats().keys
    items = store.create_list("l")
    items.extend(range(700))
    items.extend([b"large" * 200] * 5)
    store.commit()
    assert store.stats().keys == keys + 706
    calls = []

    def counting(real):
        def call(*arguments):
            calls.append(real)
            return real(*arguments)

        return call

    monkeypatch.setattr(Core, "put", counting(Core.put))
    monkeypatch.setattr(Core, "delete", counting(Core.delete))
    for end in (store.rollback, store.commit):
        calls.clear()
        if how == "delete":
            del store["l"]
        else:
            store["l"] = REPLACEMENTS[how]
        assert len(calls) == 1
        assert store.stats().keys == keys + (how != "delete")
        end()
        assert len(items) == 705 if end == store.rollback else "l" not in store or how != "delete"
    assert store.check().ok and list(store["other"]) == list(range(10))
    assert store.stats().keys == keys + (how != "delete")


def test_a_copy_with_holes_gets_its_blocks_when_it_is_opened(medium: Medium):
    """Otherwise a store into a hole, on a full tmpfs, would be SIGBUS."""
    path, copy = medium.directory / "whole.pm", medium.directory / "copy.pm"
    with pmstore.open(path, media=medium.name) as store:
        store["a"] = np.arange(3000.0)
        store["zeros"] = np.zeros(100_000)
    data = path.read_bytes()
    with open(copy, "wb") as file:
        for at in range(0, len(data), 4096):
            if any(data[at : at + 4096]):
                file.seek(at)
                file.write(data[at : at + 4096])
        file.truncate(len(data))
    if os.stat(copy).st_blocks * 512 >= len(data):
        pytest.skip("a file system without holes")
    with pmstore.open(copy, "r", media=medium.name) as store:
        assert store.check().ok
    assert os.stat(copy).st_blocks * 512 < len(data)
    with pmstore.open(copy, "r+", media=medium.name) as store:
        status = os.stat(copy)
        assert status.st_blocks * 512 >= status.st_size
        store["zeros"][:] = 1
        store["b"] = np.ones(30_000)
        store.commit()
        assert store.check().ok and store["a"][-1] == 2999


@pytest.mark.parametrize("start", [b"", b"PMSTORE\x1a"], ids=["nothing", "magic"])
def test_a_file_that_is_no_store_keeps_its_holes(medium: Medium, start: bytes):
    """A disk image, opened by mistake, is left as it is."""
    path = medium.directory / "image"
    path.write_bytes(start)
    os.truncate(path, 32 << 20)
    before = os.stat(path).st_blocks
    with pytest.raises(pmstore.CorruptStoreError):
        pmstore.open(path, "r+", media=medium.name)
    assert os.stat(path).st_blocks < before + 1000  # of 512 bytes; a look at a hole on tmpfs fills it


def test_reads_without_a_commit_do_not_pile_up(open_store):
    store = open_store()
    store["w"] = np.zeros(10)
    store["large"] = np.zeros(5000)
    store.commit()
    for _ in range(2000):
        store["w"][0], store["large"][0]
    assert store.stats().buffers <= 4
    store.close()
    store = open_store(mode="r")  # which never commits
    for _ in range(2000):
        store["w"][0], store["large"][0]
    assert store.stats().buffers <= 4


def test_arrays_that_come_and_go_without_a_commit_do_not_pile_up(open_store):
    store = open_store()
    for i in range(2000):
        store.create_array("x", 10 if i % 2 else 700)[:] = i
        del store["x"]
    assert store.stats().buffers <= 300
    assert store.stats().file_size < 4 << 20


LENGTHS = [
    1 << 63,
    (1 << 64) - 1,
    (1 << 64) - 4095,
    (1 << 64) * 512 // 513 + 5000,
    (1 << 63) - 1,
    1 << 50,
    (1 << 41) + 1,
]


@pytest.mark.parametrize("length", LENGTHS, ids=hex)
def test_absurd_lengths_find_no_space(open_store, length):
    store = open_store(max_size=400 << 20)
    before = store.stats()
    for call in (lambda: store._catalog.core.alloc(length), lambda: store._catalog.core.alloc(length - 8)):
        with pytest.raises(pmstore.OutOfSpaceError):
            call()
    after = store.stats()
    assert (after.file_size, after.region_used) == (before.file_size, before.region_used)
    store["a"] = np.ones(1000)
    store.commit()
    assert store.check().ok


LIMITED = """
import resource, sys
import numpy as np
import pmstore
path, media, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
stores = []
for i in range(2):
    store = pmstore.open(f"{path}{i}", "x", media=media)
    store["a"] = np.arange(3_000_000.0)
    store.commit()
    store["a"][:] = 1
    store["b"] = np.ones(100_000)
    store.commit()
    assert store.check().ok
    store.close()
    stores.append(pmstore.open(f"{path}{i}", "r", media=media))
assert all(store["a"].sum() == 3_000_000 for store in stores)
"""


@pytest.mark.no_sanitizer
@pytest.mark.parametrize(
    "gibibytes", [1, 20, 64.5, 200, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 33, 70, 129))]
)
def test_stores_open_where_address_space_is_limited(medium: Medium, child, gibibytes):
    limit = int(gibibytes * (1 << 30))
    child(LIMITED, medium.directory / "s", medium.name, limit).end()


def test_a_fork_while_another_thread_commits(open_store):
    store = open_store()
    a = store.create_array("a", 60_000)
    store.commit()
    stop = threading.Event()
    errors = []

    def commits():
        try:
            while not stop.is_set():
                a[:] += 1
                store.create_array("b", 1000)
                store.commit()
                del store["b"]
                store.commit()
        except BaseException:
            errors.append(traceback.format_exc())

    def in_the_child():
        signal.alarm(20)  # instead of waiting for ever
        a.sum()
        a[0] = 5
        for refused in (store.commit, store.rollback, store.check, lambda: store["a"]):
            with contextlib.suppress(pmstore.ForkedStoreError):
                refused()
                return 1
        store.close()
        return 0

    thread = threading.Thread(target=commits)
    thread.start()
    try:
        for i in range(25):
            spin(i * 300)
            pid = os.fork()
            if not pid:
                code = 2
                try:
                    code = in_the_child()
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert status == 0
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    store.close()
    with open_store(verify=True) as store:
        assert len(set(store["a"])) == 1


AT_EXIT = """
import atexit, resource, sys
import numpy as np

def report():
    anonymous = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    print(int(anonymous[0].split()[1]) - before, flush=True)

atexit.register(report)  # runs after pmstore's own
import pmstore
store = pmstore.open(sys.argv[1], "x", media=sys.argv[2])
a = store.create_array("a", 8_000_000)
store.commit()
store.release()
a.sum()
before = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")][0]
"""


def test_a_process_that_ends_copies_no_arrays(medium: Medium, child):
    """Arrays of a store that is left open need no memory of their own at exit: that could be all that there is."""
    more = int(child(AT_EXIT, Path(medium.directory) / "exit.pm", medium.name).end())
    assert more < 20_000  # kB, of an array of 64 MB
