"""How much a store grows: the region for what is asked of it, the log for the commits that it held."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recording
from tests.conftest import Medium

OpenStore = Callable[..., pmstore.Store]

PAGE = 4096
REGION = 8192  # where it begins in the file
MIB = 1 << 20


def length(pages: int) -> int:
    """The bytes that fill so many pages, together with their hashes."""
    return pages * (PAGE - 8)


def grown(store: pmstore.Store, pages: int) -> int:
    """The pages by which the region grows when an extent of so many is asked for."""
    before = store.stats()
    store._catalog.core.alloc(length(pages))
    after = store.stats()
    assert after.file_size == REGION + after.region_size + after.log_size and after.log_size == before.log_size
    return (after.region_size - before.region_size) // PAGE


@pytest.mark.parametrize(
    ("taken", "pages", "memory", "file"),
    [
        (0, 61, 64, 64),  # 256 KiB at least
        (40, 30, 64, 64),
        (0, 100, 103, 103),  # what is asked for, and three pages for the space map
        (2100, 70, 1084, 1084),  # half of the region
        (0, 16_128, 16_132, 16_132),  # a page of the map for each 63 MiB
        (0, 252, 255, 255),
        (0, 253, 256, 512),  # 1 MiB: on disks there is room for a second slot
        (0, 2045, 2048, 4096),
        (0, 2046, 2049, 2049),  # more than 8 MiB
    ],
)
def test_a_region_grows(medium: Medium, open_store: OpenStore, taken: int, pages: int, memory: int, file: int) -> None:
    store = open_store()
    if taken:
        grown(store, taken)
    assert grown(store, pages) == (memory if medium.name == "memory" else file)
    size = store.stats().region_size
    store.rollback()
    store.close()
    assert open_store(mode="r+").stats().region_size == size


def test_a_region_grows_by_less_if_that_is_all_there_is(medium: Medium, open_store: OpenStore) -> None:
    """Every byte of a limited file is used."""
    with open_store("large.pm") as large:
        grown(large, 2100)
        size = large.stats().file_size
    for missing in (0, 1):
        store = open_store(f"{missing}.pm", max_size=size + 103 * PAGE - missing)
        grown(store, 2100)
        if missing:
            with pytest.raises(pmstore.OutOfSpaceError, match=f"grow to {size + 103 * PAGE} bytes; max_size is"):
                grown(store, 100)
            assert store.stats().file_size == size
        else:
            assert grown(store, 100) == 103  # half of the region would be 1084 pages
            assert store.stats().file_size == store.stats().max_size


def written(store: pmstore.Store) -> list[tuple[int, int]]:
    """The ranges of the file that were written since the trace was cleared, joined where they meet."""
    recording = Recording("file", b"", *store._catalog.core.trace.raw())
    events = [recording.event(number) for number in range(len(recording))]
    ranges = sorted((one.offset, one.offset + one.length) for one in events if one.kind == lib.PM_EVENT_WRITE)
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@pytest.mark.parametrize(("log", "pages", "growth"), [(64, 100, 103), (512, 100, 103), (64, 700, 1406)])
def test_blocks_are_written_where_the_file_of_a_disk_grew(directory: Path, log: int, pages: int, growth: int) -> None:
    """The new place of the log but not the old one, which counts until the header is written; and the space in which
    an extent may get two slots. Otherwise the first write of a block would wait for the file system's metadata."""
    with pmstore.open(directory / "s.pm", media="trace:file") as store:
        store["x"] = np.arange(20 * 512)
        store.commit()
        while store.stats().log_size < log * PAGE:
            store["x"] += 1
            store.commit()
        before = store.stats()
        assert before.log_size == log * PAGE
        store._catalog.core.trace.clear()
        assert grown(store, pages) == growth
        after = store.stats()
        first = max(before.file_size, REGION + after.region_size)
        if growth > pages + 3:
            first = REGION + before.region_size
        assert [one for one in written(store) if one[0] >= REGION] == [(first, after.file_size)]


def test_a_region_grows_beside_a_log_that_stays_longer(directory: Path) -> None:
    """16 MiB at most are written of the log's new place, which overlaps with the old one."""
    with pmstore.open(directory / "s.pm", media="file") as store:
        pages = store.create_array("x", (6000, 512))
        store.commit()
        pages[::2, :5] = 1  # 12 MB
        store.commit()
        pages[::2, :5] = 2
        store.commit()
        assert store.stats().log_size > 16 * MIB
        grown(store, store.stats().region_size // PAGE)
        pages[::2, :5] = 3
        store.commit()
        store._drop(discard=True)
    with pmstore.open(directory / "s.pm", media="file", verify=True) as store:
        assert (store["x"][::2, :5] == 3).all() and not store["x"][1::2].any()


def test_growth_is_the_only_checkpoint_of_a_commit(open_store: OpenStore) -> None:
    """The first record of a process needs a header that says that the log counts. Growth writes such a header."""
    open_store().close()
    store = open_store(mode="r+")
    store.create_array("x", 100_000)
    store.commit()
    assert store.stats().checkpoints == 1


def test_space_that_waits_for_commits_to_be_durable_is_used(directory: Path) -> None:
    """The region does not grow: the commits are made durable instead."""
    with pmstore.open(directory / "s.pm", media="file", durability="async", sync_interval=3600) as store:
        store["x"] = np.zeros(300_000)
        size = store.stats().region_size
        for value in range(4):
            store.commit()
            del store["x"]
            store["x"] = np.full(300_000, float(value))
        after = store.stats()
        assert after.region_size == size and after.durable_sequence == after.sequence == 4


def region_grows(store: pmstore.Store) -> None:
    store._catalog.core.alloc(length(300))


def log_grows(store: pmstore.Store) -> None:
    store["x"][:90] += 1
    store.commit()


def log_is_emptied(store: pmstore.Store) -> None:
    store._catalog.core.checkpoint()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("work", [region_grows, log_grows, log_is_emptied])
def test_no_failure_is_passed_over(directory: Path, work: Callable[[pmstore.Store], None], error: int) -> None:
    """Each write, sync and growth of the file fails once. An error ends the use of the store. Without space the store
    goes on, and growth may be content with less."""
    kinds = lib.PM_OPERATION_WRITE | lib.PM_OPERATION_GROW | (lib.PM_OPERATION_SYNC if error == errno.EIO else 0)
    for number in itertools.count(1):
        store = pmstore.open(directory / f"{number}.pm", media="trace:file")
        x = store.create_array("x", (180, 512))
        store.commit()
        x[::7] = 1
        store.commit()
        expected = x.copy()
        trace = store._catalog.core.trace
        trace.fail(kinds, number, error)
        said: list[pmstore.Error] = []
        try:
            work(store)
            if work is log_grows:
                store.stats()  # tells of the committed image, which the thread brings up to date
        except pmstore.Error as raised:
            said.append(raised)
        failures = trace.operations()[1]
        trace.fail(0, 0, 0)
        if error == errno.ENOSPC:
            assert all(isinstance(one, pmstore.OutOfSpaceError) for one in said)
            store.commit()
            expected = x.copy()
            assert store.check().ok
        elif failures:
            assert isinstance(said[0], pmstore.StoreIOError) or work is log_grows
            with pytest.raises(pmstore.FailedStoreError):
                store.commit()
        elif work is log_grows:
            expected = x.copy()
        store._drop(discard=True)
        with pmstore.open(directory / f"{number}.pm", "r") as again:
            begun = failures and error == errno.EIO and work is log_grows
            assert np.array_equal(again["x"], expected) or (begun and np.array_equal(again["x"], x))
        if not failures:
            break
    assert number > 2


@pytest.mark.parametrize("work", [region_grows, log_grows])
def test_a_file_that_can_not_grow_ends_the_use_of_the_store(
    medium: Medium, open_store: OpenStore, work: Callable[[pmstore.Store], None]
) -> None:
    store = open_store(media=f"trace:{medium.name}")
    store.create_array("x", (180, 512))
    store.commit()
    store["x"][90:150] = 1
    trace = store._catalog.core.trace
    trace.fail(lib.PM_OPERATION_GROW, 1, errno.EIO)
    with pytest.raises(pmstore.StoreIOError, match="the store has failed: open it again at the last commit"):
        work(store)
    trace.fail(0, 0, 0)
    store._drop(discard=True)


def test_a_full_disk_is_asked_for_less_once(medium: Medium, open_store: OpenStore) -> None:
    """The second request is smaller. The error says that there is no space, and not that the store has failed."""
    store = open_store(media=f"trace:{medium.name}")
    trace = store._catalog.core.trace
    for pages, requests in ((100, 1), (61, 1), (2100, 0), (70, 2)):
        trace.fail(lib.PM_OPERATION_GROW, 1 if requests else 0, errno.ENOSPC, lasting=True)
        if requests:
            with pytest.raises(pmstore.OutOfSpaceError) as caught:
                grown(store, pages)
            assert "failed" not in str(caught.value)
            assert trace.operations() == (requests, requests)
        else:
            grown(store, pages)
    trace.fail(0, 0, 0)
    store["x"] = 1
    store.commit()
    assert store.check().ok


# ---- the log


class Commits:
    """Commits of a store with an array of many pages. Each changes some that are not neighbours."""

    def __init__(self, store: pmstore.Store, pages: int = 6000) -> None:
        self.store = store
        if "x" not in store:
            store.create_array("x", (pages, 512))
            store.commit()
        store._catalog.core.checkpoint()
        self.array = store["x"]

    def emptied(self, pages: int) -> bool:
        """One commit. True if it emptied the log, which it does once at most."""
        before = self.store.stats()
        self.array[: 2 * pages : 2] += 1
        self.store.commit()
        after = self.store.stats()
        assert after.checkpoints - before.checkpoints <= 1
        return after.checkpoints > before.checkpoints

    def sizes(self, pages: int, times: int) -> list[int]:
        """The pages of the log after each of the next times that it is emptied."""
        found = []
        while len(found) < times:
            if self.emptied(pages):
                found.append(self.store.stats().log_size // PAGE)
        return found


@pytest.mark.parametrize(
    ("media", "pages", "sizes"),
    [
        ("memory", 12, [512, 1024, 1024]),  # it holds 32 commits; then rare checkpoints are worth 4 MiB
        ("memory", 50, [1024, 2048, 2048]),  # by a factor of 8 at most
        ("file", 1, [64] * 5 + [4096]),
        ("file", 6, [256, 256, 4096, 4096]),  # 16 MiB, once an eighth of that was used
        ("file", 20, [512, 4096]),
    ],
)
def test_a_log_grows_for_commits_like_those_before(directory: Path, media: str, pages: int, sizes: list[int]) -> None:
    with pmstore.open(directory / "s.pm", media=media) as store:  # type: ignore[arg-type]
        assert Commits(store, 200).sizes(pages, len(sizes)) == sizes


def test_a_log_grows_until_a_body_fits(medium: Medium, open_store: OpenStore) -> None:
    """The first commits that don't fit: their bodies and two pages, and not twice that."""
    grew = set()
    for pages in range(247, 254):
        store = open_store(f"{pages}.pm")
        commits = Commits(store, 3000)
        before = store.stats()
        assert commits.emptied(pages)
        after = store.stats()
        body = after.bytes_logged - before.bytes_logged
        assert after.log_used >= body > pages * PAGE
        assert after.log_size >= body + 2 * PAGE > after.log_size // 2
        grew.add(after.log_size // before.log_size)
        store.close()
    assert len(grew) == 2


def test_a_log_that_may_not_grow_is_emptied_more_often(medium: Medium, open_store: OpenStore) -> None:
    with open_store() as store:
        before = Commits(store, 200).store.stats()
    store = open_store(max_size=before.file_size)
    commits = Commits(store)
    emptied = sum(commits.emptied(20) for _ in range(30))
    after = store.stats()
    assert (after.log_size, after.file_size) == (before.log_size, before.file_size)
    assert emptied == {"memory": 4, "file": 9}[medium.name]
    assert store.check().ok
