"""Large things, at a scale that tests can afford: what is read, written and kept in memory. Times: bench_large.py."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import key_of
from pmstore._core import BLOCK, Entry
from pmstore._values.array import layout

MIB = 1 << 20


def anonymous():
    """Bytes of private memory: what programs allocated, and pages of live arrays that were written."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no smaps_rollup")


def verified(open_store, store):
    """The same store, closed and opened again with every hash checked."""
    assert store.check().ok
    store.close()
    return open_store(verify=True)


# ---- new arrays


def sources():
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, 5 * MIB // 2 + 4321, dtype="u1")
    square = whole[: 1200 * 1200].reshape(1200, 1200)
    wide = np.dtype([(f"field {i} with a name that is long", "u1") for i in range(100)])
    yield "whole", whole
    yield "one block", whole[:BLOCK]
    yield "one byte more", whole[: BLOCK + 1]
    yield "one byte less", whole[: 3 * BLOCK - 1]
    yield "strided", square[::2, ::3]
    yield "backwards", whole[::-1]
    yield "F order", np.asfortranarray(square)
    yield "transposed and cut", np.asfortranarray(square)[1:, 1:]
    yield "items that don't divide a block", np.frombuffer(whole[: 24 * 50_001], "V24")[::2]
    yield "a dtype behind the elements", whole[: 100 * 5001].view(wide)


@pytest.mark.parametrize("what", [name for name, _ in sources()])
def test_new_arrays_hold_their_source_and_match_their_hashes(open_store, what):
    source = dict(sources())[what]
    store = open_store()
    store["x"] = source
    store.commit()
    store["y"] = source
    store["y"][...] = source  # the same bytes, through memory
    changed = store["z"] = source.copy()
    store["z"].reshape(-1)[-1:] = source.reshape(-1)[:1]
    changed.reshape(-1)[-1:] = source.reshape(-1)[:1]
    store.commit()
    store = verified(open_store, store)
    for name, expected in (("x", source), ("y", source), ("z", changed)):
        assert np.array_equal(store[name], expected) and store[name].dtype == source.dtype


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 24, 1000, BLOCK, BLOCK + 8, 3 * BLOCK, 260 * BLOCK, MIB - 1])
@pytest.mark.parametrize("count", [1, 1 + 3 * BLOCK, 1 + MIB])
def test_filled_arrays_match_their_hashes(open_store, size, count):
    item = np.random.default_rng(size).bytes(size)
    n = -(-count // size)
    store = open_store()
    store.create_array("x", n, f"V{size}", fill_value=np.void(item))
    store.commit()
    store = verified(open_store, store)
    assert store["x"].tobytes() == item * n


@pytest.mark.parametrize("seed", range(8))
def test_an_extent_written_in_pieces_and_again(open_store, seed):
    """Ranges that begin and end anywhere, through the core and through memory, rolled back and tried again."""
    rng = random.Random(seed)
    store = open_store()
    core = store._catalog.core
    key = key_of("x")
    for turn in range(6):
        length = rng.choice([BLOCK, 5 * BLOCK, 70 * BLOCK, 3 * BLOCK + rng.randrange(BLOCK)])
        offset = core.alloc(length)
        shadow = bytearray(rng.randbytes(length))
        core.write(offset, 0, bytes(shadow), length)
        for _ in range(rng.randrange(6)):
            at = rng.choice([0, rng.randrange(length), rng.randrange(length) // BLOCK * BLOCK])
            piece = rng.randbytes(rng.choice([length - at, rng.randint(1, length - at)]))
            shadow[at : at + len(piece)] = piece
            core.write(offset, at, piece, len(piece))
        if rng.random() < 0.3:
            pattern = rng.randbytes(8)
            shadow[: length // 8 * 8] = pattern * (length // 8)
            core.fill(offset, length // 8 * 8, pattern)
        core.put(key, Entry(offset, length, ARRAY, 0, layout(length, "u1", "C", True).meta))
        if rng.random() < 0.5:
            live = memoryview(core.buffer(offset, length, True))
            for _ in range(rng.randrange(4)):
                at = rng.randrange(length)
                live[at] = shadow[at] = rng.randrange(256)
            del live
        if turn and rng.random() < 0.3:
            core.rollback()
            continue
        core.commit()
        before = bytes(shadow)
        entry = core.get(key)
        assert core.read(entry.offset, entry.length) == before
        assert store.check().ok
    store = verified(open_store, store)
    entry = store._catalog.core.get(key)
    assert store._catalog.core.read(entry.offset, entry.length) == before


def test_a_new_array_changed_between_a_commit_that_failed_and_the_next(open_store):
    store = open_store(max_size=4 * MIB)
    old = store.create_array("old", MIB // 8)
    store.commit()
    new = store.create_array("new", MIB // 8, fill_value=1.0)
    old += 1
    store["too much"] = rest = bytes(MIB // 4)
    with contextlib.suppress(pmstore.OutOfSpaceError):
        for i in range(20):
            store[f"more {i}"] = rest
    with contextlib.suppress(pmstore.OutOfSpaceError):
        store.commit()
    new[5:1000:7] = 2
    for name in [name for name in store if name.startswith("more")]:
        del store[name]
    store.commit()
    expected = new.copy()
    store = verified(open_store, store)
    assert (store["new"] == expected).all() and (store["old"] == 1).all()


def test_I6_a_source_that_changes_while_it_is_stored(open_store):
    source = np.zeros(2 * MIB, "u1")
    stop = threading.Event()

    def change():
        while not stop.is_set():
            np.add(source, 1, out=source)

    store = open_store()
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            store["x"] = source
            x = store["x"]  # and what is live and new, while it is committed
            store["y"] = source
            store.commit()
            assert store.check().ok
            x += 1
    finally:
        stop.set()
        thread.join()
    store.commit()
    verified(open_store, store)


def test_storing_and_committing_take_no_memory(store):
    source = np.ones(32 * MIB // 8)
    store["small"] = 1
    store.commit()
    before = anonymous()
    for _ in range(3):
        store["x"] = source
        assert anonymous() - before < 4 * MIB
        store.commit()
        assert anonymous() - before < 4 * MIB
    store["f"] = np.broadcast_to(source[:4096], (1024, 4096)).T
    store.create_array("zeros", 4 * MIB)
    store.commit()
    assert anonymous() - before < 6 * MIB


# ---- values that are replaced


def test_a_value_assigned_again_shows_in_every_array_and_view(store):
    """A value without arrays and views is written to another place."""
    x = np.arange(MIB, dtype="u1")
    store["x"] = x
    store.commit()
    array = store["x"]
    view = array[10:20]
    store["x"] = x + 1
    assert (array == x + 1).all()
    del array
    store["x"] = x + 2
    assert (view == x[10:20] + 2).all()
    store.commit()
    assert (view == x[10:20] + 2).all() and (store["x"] == x + 2).all()
    shaped = store["x"]
    shaped.shape = (2, -1)
    del view
    assert (store["x"] == x + 2).all()  # another array over the same bytes, which dies at once
    store["x"] = x + 3
    assert (shaped.reshape(-1) == x + 3).all()
    store.rollback()
    assert (shaped.reshape(-1) == x + 2).all() and (store["x"] == x + 2).all()
    del shaped
    store["x"] = x + 4
    store.rollback()
    assert (store["x"] == x + 2).all() and store.check().ok


def test_a_value_assigned_again_where_only_one_fits(open_store):
    store = open_store(max_size=3 * MIB)
    x = np.arange(MIB, dtype="u1")
    store["x"] = x
    store.commit()
    with contextlib.suppress(pmstore.OutOfSpaceError):
        for i in range(1000):
            store[f"full {i}"] = bytes(MIB // 8)
    store["x"] = x + 1
    for name in [name for name in store if name.startswith("full")]:
        del store[name]
    store.commit()
    assert (verified(open_store, store)["x"] == x + 1).all()


# ---- release


def test_release_gives_private_memory_back(store):
    array = store.create_array("x", 16 * MIB // 8)
    store.commit()
    before = anonymous()
    array += 1
    assert anonymous() - before > 15 * MIB
    store.commit()
    store.release("x")
    assert anonymous() - before < 6 * MIB and (array == 1).all()
    array[::100_000] = 2  # and what differs stays
    store.release()
    assert (array[::100_000] == 2).all()
    store.rollback()
    assert (array == 1).all()


def test_large_arrays_outlive_their_store(store):
    array = store.create_array("x", 40 * MIB // 8, fill_value=1)
    store.commit()
    array[::1000] = 2
    expected = array.copy()
    store.close()
    assert np.array_equal(array, expected)


WALK = """
    import sys
    from pathlib import Path
    import pmstore
    path, procs, count, elements = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    Path(procs).write_text("0")
    store = pmstore.open(path, media="file")
    for i in range(count):
        store.create_array(f"x{i}", elements, "f8", fill_value=i)
        store.commit()
    for i in range(count):
        array = store[f"x{i}"]
        array += 1
        store.commit()
        store.release(f"x{i}")
    assert all((store[f"x{i}"][::512] == i + 1).all() for i in range(count))
    large = store.create_array("large", 45 * elements // 16)
    store.commit()
    large += 1
    store.commit()
    print(store.check().ok, flush=True)
    store.close()  # with an array alive that takes half of the memory
    assert (large == 1).all()
"""


def limited(megabytes):
    """A new memory cgroup with a limit, of version 2 or 1, or None; and the file that takes processes."""
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(root) / f"pmstore-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            if root.endswith("cgroup") and "memory" not in (Path(root) / "cgroup.subtree_control").read_text():
                continue
            group.mkdir()
            try:
                (group / limit).write_text(str(megabytes * MIB))
            except OSError:
                group.rmdir()
                continue
            return group
    return None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.no_sanitizer  # its shadow memory counts
def test_a_store_three_times_its_memory(tmp_path, child):
    group = limited(96)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    try:
        walk = child(WALK, tmp_path / "store.pm", group / "cgroup.procs", 18, 16 * MIB // 8)
        assert walk.line() == "True"
        walk.end()
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


# ---- many


def test_many_arrays_alive_and_one_changed(open_store):
    store = open_store()
    arrays = [store.create_array(f"x{i}", 1 + i % 700, "i4", fill_value=i) for i in range(3000)]
    store.commit()
    for i in (0, 1499, 2999):
        arrays[i][-1] = -1
        logged = store.stats().bytes_logged
        store.commit()
        stats = store.stats()
        assert stats.dirty_bytes <= 2 * BLOCK and stats.bytes_logged - logged <= 2 * BLOCK + 1024
    del arrays
    store = verified(open_store, store)
    for i in range(3000):
        expected = np.full(1 + i % 700, i)
        if i in (0, 1499, 2999):
            expected[-1] = -1
        assert (store[f"x{i}"] == expected).all()


def test_arrays_edited_names_and_new_values_in_one_commit(open_store):
    """Candidates of all kinds, in no order."""
    rng = random.Random(5)
    store = open_store()
    expected = {}
    arrays = {}
    for _ in range(30):
        for _ in range(20):
            name = f"{rng.randrange(150):03}"
            arrays.pop(name, None)
            if rng.random() < 0.3:
                store.pop(name, None)
                expected.pop(name, None)
                continue
            expected[name] = np.full(rng.choice([1, 100, 600, 5000]), rng.randrange(1000))
            store[name] = expected[name]
            if rng.random() < 0.7:
                arrays[name] = store[name]
        for name, array in rng.sample(sorted(arrays.items()), min(5, len(arrays))):
            array[-1] = expected[name][-1] = rng.randrange(1000)
        store.commit()
        assert store.check().ok
    store = verified(open_store, store)
    assert list(store) == sorted(expected) and all(np.array_equal(store[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.long
def test_many_names(open_store):
    store = open_store()
    names = [f"{i % 97}/{i}" for i in range(40_000)]
    for start in range(0, len(names), 10_000):
        with store.transaction():
            for name in names[start : start + 10_000]:
                store[name] = name
    store = verified(open_store, store)
    assert len(store) == len(names) and list(store) == sorted(names) and len(store.group("7")) == 413
    with store.transaction():
        for name in names[::2]:
            del store[name]
    assert len(store) == len(names) // 2 and store["1/1"] == "1/1" and "0/0" not in store and store.check().ok


# ---- threads


def test_the_file_grows_while_arrays_are_in_use(open_store):
    store = open_store()
    arrays = [store.create_array(f"x{i}", size) for i, size in enumerate((3, 500, 100_000))]
    addresses = [array.ctypes.data for array in arrays]
    store.commit()
    size = store.stats().file_size
    stop = threading.Event()
    rounds = 0

    def write():
        nonlocal rounds
        while not stop.is_set():
            rounds += 1
            for array in arrays:
                array[:] = rounds
                assert (array == rounds).all()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for i in range(40):
            store.create_array(f"new {i}", 20_000 * (i + 1), "i4", fill_value=i)
            if i % 3 == 0:
                store.commit()
    finally:
        stop.set()
        thread.join()
    store.commit()
    assert rounds > 0 and store.stats().file_size > 10 * size
    assert [store[f"x{i}"].ctypes.data for i in range(3)] == addresses
    store = verified(open_store, store)
    assert all((store[f"x{i}"] == rounds).all() for i in range(3))
    assert all((store[f"new {i}"] == i).all() for i in range(40))


@pytest.mark.parametrize("what", ["commit", "store", "fill", "release", "check"])
def test_other_threads_compute_meanwhile(store, what):
    """The interval never ends: only a call that releases the GIL lets them compute."""
    size = 8 * MIB
    other = store.create_array("other", 1000, fill_value=1)
    array = store.create_array("array", size // 8)
    source = np.ones(size // 8)
    store.commit()
    go, seen = threading.Event(), []

    def compute():
        go.wait()
        seen.append(other.sum())  # an array of the store needs no lock of the store's

    before = sys.getswitchinterval()
    try:
        for _ in range(200):
            thread = threading.Thread(target=compute)
            thread.start()
            array += 1
            sys.setswitchinterval(1000)
            go.set()
            if what == "commit":
                store.commit()
            elif what == "store":
                store["new"] = source
            elif what == "fill":
                store.create_array("filled", size // 8)
            elif what == "release":
                store.release("array")
            else:
                store.check()
            during = list(seen)
            sys.setswitchinterval(before)
            thread.join()
            if during:  # otherwise it was not scheduled in time
                break
            go.clear(), seen.clear(), store.pop("filled", None)
    finally:
        sys.setswitchinterval(before)
    assert during == [1000]
