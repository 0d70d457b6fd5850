"""Arrays on blocks that the disk can't read, which a program changes elsewhere: commits, forks and the store's end."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._snapshot import Reader
from tests.core.test_forks import ended_children
from tests.core.test_unreadable import LARGE, PAGE, REGION, disk, in_child, page_of, refused, spoiled  # noqa: F401
from tests.support import shim
from tests.support.bad_disk import BadDisk
from tests.support.images import NODE, Image
from tests.support.places import entry_of, offset_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


BAD = np.s_[5 * PAGE // 8 : 6 * PAGE // 8]
NUMBERS = np.arange(LARGE // 8, dtype="f8")


def test_I18_a_child_sees_the_pages_beside_a_bad_block(disk: BadDisk) -> None:  # noqa: F811
    path = spoiled(disk, "large")

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # neither pytest nor a sanitizer tells of it
        store = pmstore.open(path, "r+", media="file")
        large, other = store["large"], store["other"]

        def look() -> bool:
            parts = slice(0, BAD.start), slice(BAD.stop, None)
            return all(np.array_equal(large[part], NUMBERS[part]) for part in parts) and other[-1] > 0

        with ended_children() as fork:
            one, killed = fork(look), fork(lambda: large[BAD].sum())
            large[BAD.stop : BAD.stop + 2 * PAGE // 8] += 1
            store.commit()
            store._catalog.core.checkpoint()
            assert one.looks() == "True"
            assert killed.looks() == f"ended: {-signal.SIGBUS}"
        os._exit(0)

    in_child(use)


def test_an_array_with_a_bad_block_outlives_its_store(disk: BadDisk) -> None:  # noqa: F811
    """Closing the store says which part of it has zeros now."""
    path = spoiled(disk, "large")
    with pmstore.open(disk.behind / "store.pm", "r", media="file", exclusive=True) as store:
        bad = page_of(store, "large", 5 * PAGE)

    def use() -> None:
        store = pmstore.open(path, "r+", media="file")
        large, other = store["large"], store["other"]
        large[0] = 7
        store.commit()
        refused(store.close, "still alive", f"offset {bad * PAGE} ")
        expected = NUMBERS.copy()
        expected[BAD], expected[0] = 0, 7
        assert np.array_equal(large, expected) and np.array_equal(other, NUMBERS)

    in_child(use)


@pytest.mark.parametrize("length", [LARGE + 8, LARGE + PAGE // 2, LARGE + PAGE - 8, 63 * PAGE + 8, 64 * PAGE])
def test_hashes_that_begin_inside_a_bad_block(disk: BadDisk, length: int) -> None:  # noqa: F811
    """Hashes stand behind the last bytes of their array, and are read first by a commit. Those of an array of fewer
    than 64 pages are read before.
    """
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store["x"] = np.ones(length // 8)
        store.commit()
        bad = page_of(store, "x", length)
    disk.spoil("store.pm", bad)

    def use() -> None:
        with pmstore.open(disk.mount / "store.pm", "r+", media="file") as store:
            x = store["x"]
            store.commit()
            x[0] = -1
            refused(store.commit, "the hashes of contents", f"offset {bad * PAGE} ")
            store.rollback()
            assert x[0] == 1
            os._exit(0)

    in_child(use)


def test_I36_hashes_of_the_rows_that_an_entry_counts(disk: BadDisk) -> None:  # noqa: F811
    """They stand behind the spare rows, and a copy of the array reads them."""
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store.create_array("x", data=np.ones((300, PAGE // 8)), maxshape=(None, PAGE // 8))
        store.append("x", np.ones((1, PAGE // 8)))
        bad = page_of(store, "x", entry_of(store, "x").length)
    disk.spoil("store.pm", bad)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        with pmstore.open(disk.mount / "store.pm", "r+", media="file") as store:
            assert (store["x"] == 1).all()
            refused(lambda: store.copy("x", "y"), "'x'", f"offset {bad * PAGE} ")
            os._exit(0)

    in_child(use)


def page_of_x(path: Path, commits: int) -> int:
    """Makes a store whose array x each commit writes whole. Returns the sixth page of x."""
    with pmstore.open(path, "x", media="file") as store:
        store.create_array("x", LARGE // 8)
        for value in range(commits):
            store["x"][:] = value
            store.commit()
        return page_of(store, "x", 5 * PAGE)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_commit_writes_no_array_whole_that_can_not_be_read(disk: BadDisk, slots: int) -> None:  # noqa: F811
    """One of its 256 pages is bad, and the program writes all others. A commit that compares all of them says so."""
    path = disk.behind / "store.pm"
    bad = page_of_x(path, 5 if slots == 2 else 1)
    disk.spoil("store.pm", bad)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        x = store["x"]
        for value in range(10, 14):
            x[: 5 * PAGE // 8] = x[6 * PAGE // 8 :] = value
            try:
                store.commit()
            except pmstore.StoreIOError as error:
                assert value > 10 and f"offset {bad * PAGE} " in str(error)
                break
        store.rollback()
        store._catalog.core.checkpoint()
        os._exit(0)

    in_child(use)
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        x = store["x"]
        assert x[0] >= 10 and (x[5 * PAGE // 8 : 6 * PAGE // 8] == (4 if slots == 2 else 0)).all() and x[-1] >= 10


def test_a_commit_that_writes_an_array_whole_does_not_read_it_again(disk: BadDisk) -> None:  # noqa: F811
    """The program has written all pages. The kernel has dropped those of the file, one of which is bad by then."""
    path = disk.behind / "store.pm"
    bad = page_of_x(path, 5)  # slot 0 is current

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        x = store["x"]
        x[:] = 10
        with open(disk.mount / "store.pm", "rb") as file:
            os.posix_fadvise(file.fileno(), REGION, 0, os.POSIX_FADV_DONTNEED)
        disk.spoil("store.pm", bad)
        before = store.stats().bytes_direct
        store.commit()
        assert store.stats().bytes_direct - before > LARGE and (x == 10).all()
        store._catalog.core.checkpoint()
        os._exit(0)

    in_child(use)
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        assert (store["x"] == 10).all() and store.check().ok


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_an_array_with_a_bad_block_keeps_its_second_slot(disk: BadDisk, durability: str) -> None:  # noqa: F811
    """Taking it back reads all of the array; a commit of few changes need not."""
    path = disk.behind / "store.pm"
    bad = page_of_x(path, 5)  # slot 0 is current
    disk.spoil("store.pm", bad)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file", durability=durability)
        for value in range(10, 80):
            store["x"][0] = value
            store.commit()
        store._catalog.core.checkpoint()
        os._exit(0)

    in_child(use)
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        assert store["x"][0] == 79 and (store["x"][1:] == 4).all()


def test_a_full_comparison_asks_for_the_committed_image(
    disk: BadDisk,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit asked before whether the program's memory can be read, as it tried to give the array two slots."""
    monkeypatch.setenv("PMSTORE_TRACKER", "compare")
    path = disk.behind / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["x"], store["y"] = np.ones(LARGE // 8), np.ones(LARGE // 8)
        store.commit()
        bad = page_of(store, "x", 5 * PAGE)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        name = disk.mount / "store.pm"
        store = pmstore.open(name, "r+", media="file", max_size=os.path.getsize(name))  # no space for another slot
        x = store["x"]
        x[:] = 10
        with open(name, "rb") as file:
            os.posix_fadvise(file.fileno(), REGION, 0, os.POSIX_FADV_DONTNEED)
        disk.spoil("store.pm", bad)
        refused(store.commit, "cannot read contents", f"offset {bad * PAGE} ")
        os._exit(0)

    in_child(use)


@pytest.mark.parametrize("declared", [np.s_[:], np.s_[: 6 * PAGE // 8]], ids=["all of it", "a part"])
def test_a_commit_of_declared_pages_touches_no_bad_block(disk: BadDisk, declared: slice) -> None:  # noqa: F811
    """The program has touched one of the pages that it declares. Of a whole array those that changed are read."""
    path = disk.behind / "store.pm"
    disk.spoil("store.pm", page_of_x(path, 1))

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        x = store["x"]

        def change() -> None:
            with store.transaction(only=[x[declared], x[:8]]):
                x[0] = 10

        if declared == np.s_[:]:
            change()
        else:
            refused(change, "cannot read contents")
            store.rollback()
            assert x[0] == 0
            with store.transaction(only=[x[: 5 * PAGE // 8], x[6 * PAGE // 8 :]]):
                x[0] = 10
        os._exit(0)

    in_child(use)
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        assert store["x"][0] == 10 and not store["x"][1:].any()


def not_mapped(directory: str) -> None:
    """Run in a child with the shim: the kernel can read a page, and not map it, as one that memory has lost."""
    path = Path(directory) / "store.pm"
    page_of_x(path, 1)
    with pmstore.open(path, "r+", media="file") as store:
        store["x"][0] = 1
        shim.variable("fault_populate").value = errno.EFAULT
        refused(lambda: store.release("x"), "cannot read contents", "Input/output error")
        shim.variable("fault_populate").value = 0
        store.release("x")


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_page_that_can_be_read_and_not_mapped(tmp_path: Path, fault_library: Path) -> None:
    shim.call(fault_library, not_mapped, tmp_path)


def test_debugging_touches_no_bad_block(disk: BadDisk, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What the disk can't read has no change that was not declared. One that is behind it is found."""
    disk.spoil("store.pm", page_of_x(disk.behind / "store.pm", 1))
    monkeypatch.setenv("PMSTORE_DEBUG", "1")

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        x = store["x"]
        with store.transaction(only=[x[:8]]):
            x[0] = 10
        before, behind = BAD.start - 1, BAD.stop
        for changed, first in [([behind], behind), ([before, behind], before)]:
            with pytest.raises(pmstore.TransactionError, match=rf"element \[{first}\] of 'x' did"):
                with store.transaction(only=[x[:8]]):
                    x[changed] += 1
        os._exit(0)

    in_child(use)
    with pmstore.open(disk.behind / "store.pm", "r", media="file", exclusive=True) as store:
        assert store["x"][0] == 10 and not store["x"][1:].any()


def test_a_rollback_takes_marks_back(disk: BadDisk) -> None:  # noqa: F811
    """The next commit reads no page that was marked before. The disk has lost one of them meanwhile."""
    path = disk.behind / "store.pm"
    bad = page_of_x(path, 1)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        x = store["x"]
        x[BAD] = 5
        store.mark_dirty(x[BAD])
        store.rollback()
        with open(disk.mount / "store.pm", "rb") as file:
            os.posix_fadvise(file.fileno(), bad * PAGE, PAGE, os.POSIX_FADV_DONTNEED)
        disk.spoil("store.pm", bad)
        x[0] = 6
        store.commit()
        os._exit(0)

    in_child(use)
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        assert store["x"][0] == 6 and not store["x"][1:].any()


def test_a_reader_reads_what_other_pages_of_the_table_have_hashes_of(disk: BadDisk) -> None:  # noqa: F811
    """Pages of a table are read several at a time, and those beside one that can't be read one by one."""
    blocks = 1300  # and 512 hashes in a page
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store["x"] = np.arange(blocks * PAGE // 8)
        store.commit()
        table, place = page_of(store, "x", blocks * PAGE), offset_of(store, "x")
    disk.spoil("store.pm", table + 1)
    path = disk.mount / "store.pm"

    def use() -> None:
        with open(path, "rb") as file:
            snapshot = Reader(file.fileno()).take()
        got = np.empty(200 * PAGE // 8, np.int64)
        for first in (0, 1024):
            snapshot.copy(place, blocks * PAGE, first * PAGE, got.ctypes.data, got.nbytes)
            assert got[0] == first * PAGE // 8 and (np.diff(got) == 1).all()
        with pmstore.open(path, "r") as reader:
            for first, sound in ((0, True), (512, False), (1024, True)):
                part = np.s_[first * PAGE // 8 : (first + 200) * PAGE // 8]
                if sound:
                    assert np.array_equal(reader.read(("x", part)), np.arange(part.start, part.stop))
                else:
                    refused(lambda part=part: reader.read(("x", part)), f"offset {(table + 1) * PAGE} ")
        os._exit(0)

    in_child(use)


def test_a_reader_reads_the_metadata_beside_a_bad_block(disk: BadDisk) -> None:  # noqa: F811
    """Pages in a row are read at once, and one by one if one of them can't be read."""
    path = disk.behind / "store.pm"
    names = [f"{i:04}" for i in range(1000)]
    with pmstore.open(path, "x", media="file") as store:
        for name in names:
            store[name] = int(name)
    image = Image(path)
    leaves = [page for page in image.pages(NODE) if image.is_leaf(page)]
    bad = next(page for page in leaves if {page - PAGE, page + PAGE} <= {*leaves})
    lost = {cell.key[1:].decode() for cell in image.cells(bad)}
    disk.spoil("store.pm", (REGION + bad) // PAGE)

    def use() -> None:
        with pmstore.open(disk.mount / "store.pm", "r") as reader:
            for name in names:
                if name in lost:
                    with pytest.raises(pmstore.Error):
                        reader[name]
                else:
                    assert reader[name] == int(name)
        os._exit(0)

    in_child(use)


def test_a_reader_of_more_tables_than_are_read_at_once(disk: BadDisk) -> None:  # noqa: F811
    """It reads up to 1024 pages of tables before it looks at the log again. Each array's hashes are in two pages. Of
    every third array one of them can't be read, which takes no other array its hashes.
    """
    count, length = 1500, 3 * PAGE - 8
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        for i in range(count):
            store[f"{i}"] = np.full(length // 8, i)
        store.commit()
        bad = {i: page_of(store, f"{i}", 3 * PAGE) for i in range(1, count, 3)}
        places = {i: offset_of(store, f"{i}") for i in range(count)}
    disk.spoil("store.pm", *bad.values())

    def use() -> None:
        with open(disk.mount / "store.pm", "rb") as file:
            snapshot = Reader(file.fileno()).take()
        unknown = []
        for i, place in places.items():
            try:
                snapshot.digest(place, length)
            except pmstore.StoreIOError:
                unknown.append(i)
        assert unknown == [*bad]
        os._exit(0)

    in_child(use)


def test_memory_is_given_back_only_if_the_other_slot_can_be_read(disk: BadDisk) -> None:  # noqa: F811
    """The bytes of the last commit are in the slot that is not mapped."""
    path = disk.behind / "store.pm"
    page_of_x(path, 5)

    def use() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        store["x"][:] = 10
        store.commit()
        store._catalog.core.checkpoint()
        bad = page_of(store, "x", 5 * PAGE)
        with open(store.path, "rb") as file:
            os.posix_fadvise(file.fileno(), REGION, 0, os.POSIX_FADV_DONTNEED)
        disk.spoil("store.pm", bad)
        refused(lambda: store.release("x"), "cannot read contents", f"offset {bad * PAGE} ")
        assert store["x"][0] == 10
        os._exit(0)

    in_child(use)
