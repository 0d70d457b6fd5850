"""Large contents and many tables of hashes, which two threads of a reader read and verify."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import pmstore
from pmstore._core import Core
from pmstore._snapshot import Reader
from tests.conftest import Medium, run_in_fork
from tests.core.test_readers_damage import before_each_read

PAGE = 4096
SHARED_FROM = 384  # pages, csrc/reader/parts.c
DAMAGED_AT = (0, 511, 512, 1000, 1023, 1535, 1999)  # blocks, of 2,000


@pytest.fixture
def path(medium: Medium) -> Iterator[str]:
    yield str(medium.directory / "parts.pm")


def written(path: str, medium: Medium, array: np.ndarray) -> None:
    with pmstore.open(path, "w", media=medium.name) as store:
        store["array"] = array


@pytest.mark.long_on("memory")
@pytest.mark.parametrize("pages", [SHARED_FROM - 1, SHARED_FROM, 1000, 2500])
@pytest.mark.parametrize("less", [0, 8])
def test_I20_every_part_of_a_large_array(path: str, medium: Medium, pages: int, less: int) -> None:
    array = np.random.default_rng(pages).integers(0, 256, pages * PAGE - less, np.uint8)
    written(path, medium, array)
    with pmstore.open(path, "r") as store:
        np.testing.assert_array_equal(store.read("array"), array)
        np.testing.assert_array_equal(store["array"], array)
        for part in (np.s_[1:], np.s_[: -PAGE - 1], np.s_[PAGE:-PAGE], np.s_[5 : pages * PAGE - PAGE // 2]):
            np.testing.assert_array_equal(store.read(("array", part)), array[part])


def test_I20_an_array_that_ends_where_the_region_does(path: str, medium: Medium) -> None:
    with pmstore.open(path, "w", media=medium.name) as store:
        before = store.stats()
        free = before.region_size - before.region_used
        array = np.random.default_rng(1).integers(0, 256, free // PAGE * (PAGE - 8), np.uint8)
        store["array"] = array
        store.commit()
        assert store.stats().region_used == store.stats().region_size == before.region_size
    with pmstore.open(path, "r") as store:
        np.testing.assert_array_equal(store["array"], array)
        np.testing.assert_array_equal(store.read(("array", np.s_[5:-5])), array[5:-5])


@pytest.mark.parametrize("block", DAMAGED_AT)
def test_I20_a_damaged_block_of_a_large_array(path: str, medium: Medium, block: int) -> None:
    """Whichever thread reads it, the error is the caller's."""
    array = np.random.default_rng(1).integers(0, 256, 2000 * PAGE, np.uint8)
    written(path, medium, array)
    with open(path, "r+b") as file:
        where = file.read().index(array[block * PAGE : (block + 1) * PAGE].tobytes())
        file.seek(where + 100)
        file.write(bytes([array[block * PAGE + 100] ^ 1]))
    with pmstore.open(path, "r") as store:
        for _ in range(5):
            with pytest.raises(pmstore.CorruptStoreError, match="damaged"):
                store.read("array")
        for part in (np.s_[: block * PAGE + 1], np.s_[(block + 1) * PAGE - 1 :]):  # one byte of it, which is sound
            with pytest.raises(pmstore.CorruptStoreError, match="damaged"):
                store.read(("array", part))
        part = np.s_[: block * PAGE] if block else np.s_[PAGE:]
        np.testing.assert_array_equal(store.read(("array", part)), array[part])


def test_I20_a_file_that_is_cut_short(path: str, medium: Medium) -> None:
    array = np.random.default_rng(1).integers(0, 256, 4000 * PAGE, np.uint8)
    written(path, medium, array)
    with pmstore.open(path, "r") as store:
        size = os.path.getsize(path)
        for left in (3000, 1500, 100):
            os.truncate(path, left * PAGE)
            with pytest.raises(pmstore.CorruptStoreError, match="truncated"):
                store.read("array")
            with pytest.raises(pmstore.CorruptStoreError, match="truncated"):
                store.read(("array", np.s_[left * PAGE + 5 : left * PAGE + 90]))
        os.truncate(path, size)


def test_I20_tables_of_many_arrays(path: str, medium: Medium) -> None:
    """Their pages are hashed when the store is opened, and again where a commit has changed them."""
    arrays = {f"a{i}": np.full(66 * PAGE // 4, i, np.int32) for i in range(SHARED_FROM + 40)}
    with pmstore.open(path, "w", media=medium.name, max_size=1 << 30) as store:
        for name, array in arrays.items():
            store[name] = array
        store.commit()
        with pmstore.open(path, "r") as reader:
            for name in ("a0", "a100", "a423"):
                store[name][::PAGE] = -1
                arrays[name][::PAGE] = -1
                store.commit()
                with pytest.raises(pmstore.StaleSnapshotError):
                    reader[name]
                reader.refresh()
            for name, array in arrays.items():
                np.testing.assert_array_equal(reader[name], array)


def test_a_reader_that_follows_reads_what_is_new(path: str, medium: Medium) -> None:
    """It reads each array once. Later commits in the log cost it a few reads each, however many arrays there are."""
    with pmstore.open(path, "x", media=medium.name) as store, open(path, "rb") as file:
        store.update({f"a{i}": np.full(600, i) for i in range(300)})
        store["small"] = np.ones(3)
        store.commit()
        store["a0"][:] = -1
        store.commit()  # of an open store: the log was empty before
        reads: list[int] = []
        with before_each_read(lambda: reads.append(1)):
            reader = Reader(file.fileno())
            reader.take()
            assert 300 < len(reads) < 350
            for i in range(5):
                store[f"a{i}"][:] = -2
                store.commit()
                reads.clear()
                core = Core.of_snapshot(reader.take())
                assert core.sequence == store.sequence and len(reads) < 10
                core.close()


def allocated() -> int:
    """Bytes that C code has allocated and not freed."""
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    kind = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(one, ctypes.c_size_t) for one in fields.split()]})
    function = ctypes.CDLL(None).mallinfo2
    function.restype = kind
    return int(function().uordblks) + int(function().hblkhd)


@pytest.mark.no_sanitizer
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="an older libc")
def test_readers_of_many_arrays_leave_no_memory(path: str, medium: Medium) -> None:
    with pmstore.open(path, "w", media=medium.name) as store:
        for i in range(300):
            store[f"a{i}"] = np.full(3 * PAGE // 4, i, np.int32)
    before = 0
    for i in range(60):
        with pmstore.open(path, "r") as reader:
            assert reader["a7"][0] == 7
        if i == 9:
            before = allocated()
    assert allocated() - before < 100_000


@pytest.mark.long_on("file")
def test_a_fork_while_a_large_array_is_read(path: str, medium: Medium) -> None:
    """The child has no second thread, and reads like any process."""
    array = np.random.default_rng(1).integers(0, 256, 2000 * PAGE, np.uint8)
    written(path, medium, array)
    with pmstore.open(path, "r") as store:
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                store.read("array")

        def child() -> None:
            np.testing.assert_array_equal(store.read("array"), array)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in range(5):
                run_in_fork(child)
        finally:
            stop.set()
            thread.join()
