"""Mode "r" beside a writer, as users see it: refresh, read and wait."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.conftest import run_in_fork

Open = Callable[..., pmstore.Store]


@pytest.fixture
def writer(store: pmstore.Store) -> pmstore.Store:
    """A store with arrays in C order, in Fortran's order, and without axes."""
    store["a"] = np.arange(24.0).reshape(4, 3, 2)
    store["f"] = np.asfortranarray(store["a"])
    store["one"] = np.array(7.0)
    store.commit()
    return store


@pytest.fixture
def reader(writer: pmstore.Store) -> Iterator[pmstore.Store]:
    """The same store in mode "r"."""
    with pmstore.open(writer.path, "r") as reader:
        yield reader


PARTS = {
    "a list": [0, 2],
    "an array of indices": np.array([3, 0, 3]),
    "an array of one index": np.array([2]),
    "an index in an array": np.array(1),
    "a mask": np.array([True, False, True, False]),
    "a number": 2,
    "a negative number": np.int64(-1),
    "True": True,
    "a slice": np.s_[1:3],
    "a slice with a step": np.s_[::-2],
    "an ellipsis": ...,
    "a new axis": np.newaxis,
    "rows and columns": np.s_[1:3, 0],
    "two numbers": (1, 2),
    "indices of two axes": (np.array([0, 2]), np.array([1, 1])),
    "a number and indices": (1, np.array([2, 0])),
    "nothing": (),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_read_takes_the_same_part_as_numpy(reader: pmstore.Store, part: Any) -> None:
    expected = np.arange(24.0).reshape(4, 3, 2)[part]
    for found in reader.read(("a", part), ("f", part)):
        assert np.array_equal(found, expected) and np.shape(found) == expected.shape


def test_read_takes_parts_of_an_array_without_axes(reader: pmstore.Store) -> None:
    assert reader.read(("one", ()), ("one", ...)) == [7.0, 7.0]
    assert reader.read(("one", np.newaxis)).shape == (1,)
    with pytest.raises(IndexError):
        reader.read(("one", 0))


def test_refresh_in_the_middle_of_an_iteration(writer: pmstore.Store, reader: pmstore.Store) -> None:
    """It goes on with the names of the commit with which it began."""
    for i in range(100):
        writer[f"n{i:02}"] = i
    writer.commit()
    reader.refresh()
    before, names = list(reader), iter(reader)
    first = next(names)
    del writer["n50"]
    writer.commit()
    assert reader.refresh() == writer.sequence and "n50" not in reader
    assert [first, *names] == before


def test_wait_where_nothing_can_come(writer: pmstore.Store, reader: pmstore.Store) -> None:
    for after in (2**63, 2**64, 10**30):
        assert reader.wait(after, timeout=0) == (writer.sequence, "timeout")
    assert reader.wait(-1, timeout=0) == (writer.sequence, "commit")
    reader.close()
    for after in (None, 0, writer.sequence):
        with pytest.raises(pmstore.ClosedStoreError):
            reader.wait(after, timeout=0)


def in_a_fork(store: pmstore.Store, sequence: int) -> None:
    assert store.refresh() == sequence and store.wait(0, timeout=0) == (sequence, "commit")
    assert (store.read("a") == store["a"]).all() and store.written


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_forked_store_reads_beside_its_parent(writer: pmstore.Store, reader: pmstore.Store, mode: str) -> None:
    run_in_fork(in_a_fork, reader if mode == "r" else writer, writer.sequence)


def test_a_file_that_lost_its_name_is_read_as_before(writer: pmstore.Store, reader: pmstore.Store) -> None:
    os.unlink(writer.path)
    writer["n"] = 1
    writer.commit()
    assert reader.refresh() == writer.sequence and reader["n"] == 1


def test_others_are_told_who_writes_after_this_process_has_read(writer: pmstore.Store, child: Any) -> None:
    """Closing any descriptor of the file, as readers do, drops the lock that carries the process id."""
    other = child(
        """
        import sys, pmstore
        while True:
            input()
            try:
                pmstore.open(sys.argv[1], "r+")
            except pmstore.StoreLockedError as error:
                print(error.pid, flush=True)
        """,
        writer.path,
    )

    def told() -> int:
        other.go()
        return int(other.line())

    writer.create_array("fixed", 5000, "i8", writeable=False)
    writer["large"] = np.zeros(100_000)
    writer.commit()
    reader = pmstore.open(writer.path, "r")
    uses: list[Callable[[], object]] = [
        lambda: reader["fixed"],
        lambda: writer.read("a"),
        lambda: writer["large"].fill(1) or writer.commit() or reader.refresh(),
        lambda: reader["large"],
        lambda: reader.wait(timeout=0),
        reader.close,
        gc.collect,
    ]
    for use in uses:
        use()
        assert told() == os.getpid()
    with contextlib.suppress(pmstore.StaleSnapshotError), pmstore.open(writer.path, "r") as stale:
        writer["large"].fill(2)
        writer.commit()
        stale["large"]  # asks for a later snapshot, and gives it up
    assert told() == os.getpid()


def test_many_readers(writer: pmstore.Store) -> None:
    """Each has six descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = max(soft, 4096) if hard == resource.RLIM_INFINITY else max(soft, min(hard, 4096))
    with contextlib.ExitStack() as open_readers:
        open_readers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
        readers = [open_readers.enter_context(pmstore.open(writer.path, "r")) for _ in range(200)]
        first = writer.sequence
        for k in range(3):
            writer["n"] = k
            writer.commit()
            for reader in readers[k::3]:
                assert reader.refresh() == first + k + 1 and reader["n"] == k
        assert {reader.sequence for reader in readers} == {first + 1, first + 2, first + 3}
        assert all(reader.read("n") == 2 for reader in readers[::40])
    assert writer.check().ok


def test_readers_need_no_space_on_the_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("4m")
    with pmstore.open(disk / "s.pm") as store:
        store["a"] = np.ones(100_000)
        store.commit()
        with open(disk / "filled", "wb", buffering=0) as filled, contextlib.suppress(OSError):
            while True:
                filled.write(bytes(4096))
        with pmstore.open(store.path, "r") as reader:
            store["a"][0] = 2
            store.commit()
            assert reader.refresh() == store.sequence and reader["a"][0] == 2 and reader.read("a").sum() == 100_001
