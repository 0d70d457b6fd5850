"""Copies that share a store's blocks (`cp` on xfs, btrfs): what the store has reserved is needed once more.

On small file systems of their own, in images that are mounted here, which needs root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Recorder
from tests.conftest import Medium
from tests.core.test_file_systems import KINDS, image_of, mounted
from tests.support import shim as shims
from tests.support.shim import FDATASYNC, FROM_THEN, PWRITEV2, begin, direct_io, end, pretend_ext4
from tests.support.snapshots import snapshot

BLOCK = 4096


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    name = getattr(request, "param", "xfs")
    image = image_of(KINDS[name], tmp_path / f"{name}.img")
    with mounted(image, "") as directory:
        yield directory


def copy(path: Path) -> None:
    """Copy a file as `cp` of coreutils 9 does. On btrfs that fails, because the store is written in place there."""
    subprocess.run(["cp", "--reflink=auto", path, path.with_suffix(".copy")], check=True)


class Disk:
    """A file that takes all space, and gives back some."""

    def __init__(self, directory: Path, least: int = BLOCK) -> None:
        self.fd = os.open(directory / "fill", os.O_CREAT | os.O_RDWR)
        size = 64 << 20
        while size >= least:
            try:
                os.posix_fallocate(self.fd, os.fstat(self.fd).st_size, size)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                size //= 4

    def give_back(self, blocks: int) -> None:
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size - blocks * BLOCK, 0))
        os.fsync(self.fd)

    def close(self) -> None:
        os.ftruncate(self.fd, 0)
        os.fsync(self.fd)
        os.close(self.fd)


def create(path: Path, **options: str) -> pmstore.Store:
    store = pmstore.open(path, "x", media="file", **options)
    store["large"] = np.zeros(400_000)
    store["small"] = np.zeros(3)
    store.commit()
    store["small"][:] = 1
    store.commit()
    return store


def change(store: pmstore.Store, step: int) -> None:
    """A change of one or two pages, up to one that is larger than the log."""
    store["small"][:] = step
    store["large"][step :: (100_000, 5000, 1000)[step % 3]] = step


@pytest.mark.parametrize("place", ["xfs", "btrfs"], indirect=True)
def test_opening_gives_a_store_blocks_of_its_own(place: Path) -> None:
    path = place / "store.pm"
    create(path).close()
    copy(path)
    with pmstore.open(path) as store:
        disk = Disk(place, 16 * BLOCK)
        for step in range(20):  # of a few pages each: they fit into the log that there is
            store["small"][:] = step
            store["large"][step::100_000] = step
            store.commit()
        assert store.check().ok
    with pmstore.open(path, "r") as store:
        assert store["small"][0] == 19
    disk.close()


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_copy_of_an_open_store_on_a_full_disk(place: Path, durability: str) -> None:
    """Commits work, or raise OutOfSpaceError with everything pending. The amounts of space let each kind of write be
    the first that fails: a header, a record, the committed image, a page of the log's growth."""
    path = place / "store.pm"
    store = create(path, durability=durability)
    copy(path)
    disk = Disk(place)
    refused = done = 0
    pending = None
    for blocks in (0, 1, 1, 2, 3, 5, 8, 13, 0, 30, 100, 0, 400):
        disk.give_back(blocks)
        for step in range(8):
            try:
                if pending is None:
                    change(store, done + step)
                    pending = snapshot(store)
                store.commit()
                assert snapshot(store) == pending
                committed, pending = pending, None
                done += 1
                assert store.check().ok
            except pmstore.OutOfSpaceError:
                refused += 1
                break
    disk.close()
    assert refused and done
    if pending is not None:
        assert snapshot(store) == pending
        store.commit()
        committed = pending
    store["new"] = np.ones(300_000)
    store.close()
    with pmstore.open(path, verify=True) as store:
        assert store["new"].sum() == 300_000 and {k: v for k, v in snapshot(store).items() if k != "new"} == committed


@pytest.mark.parametrize("blocks", [0, 4, 12, 3000])
def test_a_copy_of_a_killed_store_on_a_full_disk(place: Path, blocks: int) -> None:
    path = place / "store.pm"
    store = create(path)
    change(store, 7)
    store.commit()
    expected = snapshot(store)
    store._drop(discard=True)  # as a kill leaves it
    copy(path)
    disk = Disk(place)
    disk.give_back(blocks)
    try:
        with pmstore.open(path) as store:
            assert snapshot(store) == expected
    except pmstore.OutOfSpaceError as error:
        assert blocks < 3000 and "mode='r'" in str(error)
    with pmstore.open(path, "r", verify=True) as store:
        assert snapshot(store) == expected
    disk.close()
    with pmstore.open(path, verify=True) as store:
        assert snapshot(store) == expected


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_no_commit_is_lost_behind_a_write_that_lacked_space(tmp_path: Path, durability: str) -> None:
    """Each write of a checkpoint, of both header copies among them, and of the commit and the call behind it."""
    path = tmp_path / "store.pm"
    happened = 0
    with pmstore.open(path, "x", media="file") as store:
        store["a"], store["b"] = np.zeros(700), np.zeros(9000)
    image = path.read_bytes()
    for number in range(1, 40):
        path.write_bytes(image)
        with Recorder(path, "file") as recorder:
            store = pmstore.open(path, durability=durability)
            store["a"][:] = store["b"][:] = 1
            store.commit()
            recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC)
            for step in (2, 3):
                try:
                    store["a"][:] = step
                    store.commit()
                    store._catalog.core.checkpoint()
                except pmstore.OutOfSpaceError:
                    pass
            faults = recorder.trace.operations()[1]
            recorder.trace.fail(0, 0, 0)
            store["a"][5] = 4
            store.commit()
            assert store.check().ok
            store.sync()
            expected = snapshot(store)
            store._drop(discard=True)  # as a kill leaves it
        with pmstore.open(path, verify=True) as store:
            assert snapshot(store) == expected, number
        happened += faults
        if not faults:
            break
    assert happened > 5


class Lacking(NamedTuple):
    """A store of which array "a" was set to 1, and committed, or not; and the recorder under which space is lacking."""

    recorder: Recorder
    store: pmstore.Store
    a: np.ndarray[Any, Any]
    committed: float  # what "a" holds in the last commit


@contextlib.contextmanager
def lacking(path: Path, number: int) -> Iterator[Lacking]:
    """Make writes fail for want of space from write `number` on."""
    path.unlink(missing_ok=True)
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(700)
    with Recorder(path, "file") as recorder:
        store = pmstore.open(path)
        a = store["a"]
        a[:] = 1
        recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC, lasting=True)
        with contextlib.suppress(pmstore.OutOfSpaceError):
            store.commit()
        yield Lacking(recorder, store, a, float(store._catalog.core.sequence > 1))


def test_I11_nothing_is_committed_before_a_rollback_that_lacked_space(tmp_path: Path) -> None:
    """The committed image has to be brought up to date first, and that lacks space: what was to be undone is still
    there.
    """
    path = tmp_path / "store.pm"
    refused = 0
    for number in range(1, 12):
        with lacking(path, number) as (recorder, store, a, committed):
            a[:] = 2
            with contextlib.suppress(pmstore.OutOfSpaceError):
                store.rollback()
            recorder.trace.fail(0, 0, 0)
            if a[0] == 2:
                for change in (store.commit, lambda store=store: store.update(b=1), store.close):
                    with pytest.raises(pmstore.OutOfSpaceError, match=r"call rollback\(\) again"):
                        change()
                refused += 1
                store.rollback()
                assert "b" not in store
            assert a[0] == committed
            store["b"] = 2
            store.close()
        with pmstore.open(path, verify=True) as store:
            assert store["a"][0] == a[0] and store["b"] == 2
    assert refused


def flipped(store: pmstore.Store) -> None:
    """An array with two slots, of which the current one has a change in the log, and then the other is
    current.
    """
    w = store["w"]
    for value in range(3):
        w[:] = value
        store.commit()
    store.sync()
    w[1000] = -1
    store.commit()
    w[:] = 50
    store.commit()


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("then", ["rollback", "check", "kill"])
def test_I13_a_slot_is_not_written_while_a_run_waits_for_it(tmp_path: Path, number: int, then: str) -> None:
    """The commits are durable, and could not be applied to the committed image for want of space."""
    path = tmp_path / "store.pm"
    new = np.arange(150_000.0)
    with Recorder(path, "file", pace=0) as recorder:
        store = pmstore.open(path, durability="async")
        store["w"] = np.zeros(150_000)
        flipped(store)
        recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC)
        with contextlib.suppress(pmstore.OutOfSpaceError):
            store.sync()
        store["w"][:] = new
        try:
            store.commit()
        except pmstore.OutOfSpaceError:
            recorder.trace.fail(0, 0, 0)
            store.commit()
        recorder.trace.fail(0, 0, 0)
        if then == "rollback":
            store["w"][:] = 0
            store.rollback()
            assert np.array_equal(store["w"], new)
        store.sync()
        assert store.check().ok
        store._drop(discard=then == "kill")
    with pmstore.open(path, verify=True) as store:
        assert np.array_equal(store["w"], new)


class Image:
    """Stops what is written while no commit is made, which is the committed image: ENOSPC."""

    def __init__(self, recorder: Recorder) -> None:
        self.trace = recorder.trace

    def full(self, *, but: int = 0) -> None:
        """but: for so many writes there still is space."""
        self.trace.fail(lib.PM_OPERATION_WRITE, 1 + but, errno.ENOSPC, lasting=True)

    def free(self) -> None:
        self.trace.fail(0, 0, 0)

    def commit(self, store: pmstore.Store, a: np.ndarray, value: int, *, turns: int, but: int = 0) -> None:
        """Commit this value, and leave no space; then so many turns for the thread. but: as for `full`."""
        self.free()
        a[:] = value
        store.commit()
        self.full(but=but)
        for _ in range(turns):
            store.stats()


@pytest.mark.parametrize("how", ["close", "sync"])
def test_commits_that_can_not_be_written_back_are_durable_all_the_same(tmp_path: Path, how: str) -> None:
    """close() and sync() have said so."""
    path = tmp_path / "store.pm"
    with Recorder(path, "file", pace=0) as recorder:
        image = Image(recorder)
        store = pmstore.open(path, durability="async")
        store["a"] = np.zeros(700)
        store.commit()
        for value in range(1, 5):
            image.free()
            store["a"][:] = value
            store.commit()
            image.full(but=value == 1)  # the durable marker of the first sync
            if value < 4:
                store.sync()
        getattr(store, how)()
        image.free()
        if not store.closed:
            store._drop(discard=True)
    recording = recorder.recording
    kinds = [recording.event(i).kind for i in range(len(recording))]
    last = max(i for i, kind in enumerate(kinds) if kind == lib.PM_EVENT_COMMIT_END)
    assert lib.PM_EVENT_SYNC in kinds[last:]
    with pmstore.open(path, verify=True) as store:
        assert store["a"][0] == 4


def test_the_thread_comes_back_when_there_is_space_again(tmp_path: Path) -> None:
    """Commits whose syncs lacked space become durable in the background, without another call that asks for it."""
    path = tmp_path / "store.pm"
    with Recorder(path, "file", pace=100) as recorder:
        image = Image(recorder)
        store = pmstore.open(path, durability="async")
        a = store.create_array("a", 700)
        for value in range(5):
            image.commit(store, a, value, turns=50)
        assert store.stats().durable_sequence < store.sequence
        image.free()
        for _ in range(200):
            store.stats()
        assert store.stats().durable_sequence == store.sequence
        store.close()


def test_commits_become_durable_while_one_before_can_not_be_written_back(tmp_path: Path) -> None:
    """Each is synced in the background, before there is space again."""
    path = tmp_path / "store.pm"
    with Recorder(path, "file", pace=10) as recorder:
        image = Image(recorder)
        store = pmstore.open(path, durability="async")
        a = store.create_array("a", 700)
        for value in range(4):
            image.commit(store, a, value, turns=300, but=value == 1)  # the durable marker of the first sync
        image.free()
        store._drop(discard=True)
    syncs: list[int] = []
    for number in range(len(recorder.recording)):
        kind = recorder.recording.event(number).kind
        if kind == lib.PM_EVENT_COMMIT_END:
            syncs.append(0)
        elif kind == lib.PM_EVENT_SYNC and syncs:
            syncs[-1] += 1
    assert len(syncs) == 4 and all(syncs)


def test_a_record_whose_sync_lacks_memory_fails_the_store(tmp_path: Path) -> None:
    """Its bytes may be in the page cache, where a kill leaves them: nobody may roll back and go on."""
    path = tmp_path / "store.pm"
    with Recorder(path, "file") as recorder:
        recorder.trace.sync_ranges(True)
        store = pmstore.open(path)
        store["a"] = np.zeros(700)
        store.commit()
        recorder.trace.fail(lib.PM_OPERATION_SYNC, 1, errno.ENOMEM)
        store["a"][:] = 2
        with pytest.raises(pmstore.Error):
            store.commit()
        recorder.trace.fail(0, 0, 0)
        with pytest.raises(pmstore.FailedStoreError):
            store["a"]
        store._drop(discard=True)


def two_lacks_of_space(path: str) -> None:
    """The kernel refuses a synced write for want of a block, which loses nothing, or a page of it could not be stored,
    which each descriptor of the file hears of once."""
    pretend_ext4(True)
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(3)
    for thin in (False, True):
        store = pmstore.open(path, "r+")
        a = store["a"]
        for i in range(3):  # the last one is a write past the page cache
            a[:] = i
            store.commit()
        a[:] = 3
        begin(PWRITEV2 | FDATASYNC * thin, FROM_THEN, errno.ENOSPC, 1, Path(path))
        with pytest.raises(pmstore.StoreIOError if thin else pmstore.OutOfSpaceError):
            store.commit()
        end()
        if thin:
            with pytest.raises(pmstore.FailedStoreError):
                store.commit()
            store._drop(discard=True)
        else:
            store.commit()
            store.close()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_disk_without_space_for_a_page_fails_the_store(fault_library: Path, directory: Path) -> None:
    if not direct_io(directory):
        pytest.skip("the file has one descriptor, so that every lack of space fails the store")
    shims.call(fault_library, two_lacks_of_space, directory / "store.pm")


def test_a_transaction_that_lacked_space_for_its_rollback(tmp_path: Path) -> None:
    """The next operation rolls back; no call is refused for good."""
    late = 0
    for number in range(1, 12):
        with lacking(tmp_path / "store.pm", number) as (recorder, store, a, committed):
            with contextlib.suppress(ZeroDivisionError, pmstore.OutOfSpaceError), store.transaction():
                a[:] = 2
                raise ZeroDivisionError
            recorder.trace.fail(0, 0, 0)
            if a[0] == 2:
                late += 1
                list(store)
            assert a[0] == committed
            with store.transaction():
                a[5] = 9
            store.close()
    assert late


def test_an_exception_passes_where_a_rollback_was_made_at_the_second_attempt(tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    for number in range(1, 12):
        with Recorder(path, "file") as recorder:
            store = pmstore.open(path)
            store["a"] = np.zeros(700)
            store.commit()
            a = store["a"]
            recorder.trace.fail(lib.PM_OPERATION_WRITE, number, errno.ENOSPC)
            with contextlib.suppress(pmstore.OutOfSpaceError):
                a[:] = 1
                store.commit()
                with pytest.raises(ZeroDivisionError), store.transaction():
                    a[:] = 2
                    raise ZeroDivisionError
                assert a[0] == 1
            recorder.trace.fail(0, 0, 0)
            store.close()
        path.unlink()


def sparse(path: Path, data: bytes, most: int = 1 << 30) -> None:
    """Writes a file with a hole for each page of zeros, as far as there may be so many holes."""
    with open(path, "wb") as file:
        for at in range(0, len(data), 4096):
            if most and not any(data[at : at + 4096]):
                most -= 1
                continue
            file.seek(at)
            file.write(data[at : at + 4096])
        file.truncate(len(data))


@pytest.mark.parametrize("most", [1, 1 << 30])
def test_a_copy_with_holes_gets_its_blocks_when_it_is_opened(medium: Medium, most: int):
    """Otherwise a store into a hole, on a full tmpfs, would be SIGBUS."""
    path, copy = medium.directory / "whole.pm", medium.directory / "copy.pm"
    with pmstore.open(path, media=medium.name) as store:
        store["a"] = np.arange(3000.0)
        store["zeros"] = np.zeros(500_000)
    data = path.read_bytes()
    sparse(copy, data, most)
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


def test_a_copy_with_holes_that_is_longer_than_its_store(medium: Medium) -> None:
    """A growth was interrupted before it changed the header. The blocks behind make up for no holes before."""
    path, copy = medium.directory / "whole.pm", medium.directory / "copy.pm"
    pmstore.open(path, "x", media=medium.name).close()
    data = path.read_bytes()
    sparse(copy, data)
    with open(copy, "r+b") as file:
        os.posix_fallocate(file.fileno(), len(data), len(data))
    if os.stat(copy).st_blocks * 512 >= 2 * len(data):
        pytest.skip("a file system without holes")
    with pmstore.open(copy, "r+", media=medium.name) as store:
        assert os.stat(copy).st_blocks * 512 >= 2 * len(data)
        assert store.stats().file_size == len(data)


def longer_than_its_store(folder: str, media: Any) -> None:
    """Run in a child with the shim. The file ends with a hole, and the file system reserves no space."""
    path, copy = Path(folder) / "whole.pm", Path(folder) / "copy.pm"
    with pmstore.open(path, "x", media=media) as store:
        store["a"] = np.arange(5000)
    sparse(copy, path.read_bytes())
    os.truncate(copy, 2 * path.stat().st_size)
    begin(shims.FALLOCATE, FROM_THEN, errno.EOPNOTSUPP, 1)
    with pmstore.open(copy, "r+", media=media) as store:
        assert (store["a"] == np.arange(5000)).all()
    assert shims.hits()


@pytest.mark.no_sanitizer  # which is preloaded too
def test_holes_behind_the_store_where_no_space_is_reserved(medium: Medium, fault_library: Path) -> None:
    shims.call(fault_library, longer_than_its_store, medium.directory, medium.name)
