"""`Store.backup`: a whole, sound copy of one commit, also beside the process that writes the store."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._snapshot import Reader, Snapshot
from pmstore._store.backup import backup
from pmstore.testing._files.fixture import CrashFiles
from pmstore.testing._store.recording import Recording
from tests.conftest import Medium
from tests.core.test_damage import flipped
from tests.core.test_file_systems import KINDS, image_of, mounted
from tests.core.test_readers import MIXED, Writer, assert_one_commit, beside, make
from tests.store.test_compact import fill, snapshot_of_stored
from tests.support import shim
from tests.support.crashes import OPTIONS, SEED, WORKLOADS, Workload, bulky, record
from tests.support.images import REGION
from tests.support.places import entry_of, offset_of

Open = Callable[..., pmstore.Store]


def test_everything_is_there_as_of_one_commit(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.commit()
    told: list[tuple[int, int]] = []
    store["f"][3] = -1  # pending
    store["pending"] = 1
    path = Path(store.path).with_name("copy.pm")
    assert store.backup(path, progress=lambda done, total: told.append((done, total))) == store.sequence
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 20_000 * 4
    store.rollback()
    before = snapshot_of_stored(store)
    with open_store("copy.pm", "r+", verify=True) as copy:
        assert copy.sequence == store.sequence and snapshot_of_stored(copy) == before
        assert not copy["fixed"].flags.writeable
        for i in range(4):  # the copy is a store like any other
            copy["f"][:] = i
            copy["list"].append(i)
            copy[f"new/{i}"] = np.full(30_000, i)
            copy.commit()
        assert copy.check().ok
    assert snapshot_of_stored(store) == before
    for mode in ("r", "r+"):
        with open_store("copy.pm", mode) as closed:
            assert closed.backup(path.with_name(f"from-{mode}.pm")) == closed.sequence


@pytest.mark.parametrize("size", [1, 2016, 2017, 4096, 300_000])
def test_arrays_of_every_size_and_their_second_slots(
    open_store: Open, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmstore._store.backup._PIECE", 16 * 4096)
    store = open_store()
    a = store.create_array("a", size, "u1")
    for k in range(5):
        a[:] = k
        a[-1] = 255 - k
        store.commit()
        store.backup(Path(store.path).with_name(f"{k}.pm"))
    for k in range(5):
        with open_store(f"{k}.pm", "r+", verify=True) as copy:
            assert (copy["a"][:-1] == k).all() and copy["a"][-1] == 255 - k
            for value in (7, 8, 9):
                copy["a"][:] = value
                copy.commit()
            assert copy.check().ok


def assert_backups_are_commits(recording: Recording, path: Path, seed: int) -> int:
    """The writer's events come between the reads of the backups. How many were compared with the state of their
    commit."""
    dice, compared, copy = random.Random(seed), 0, path.with_name("copy.pm")
    writer = Writer(recording, path, dice)
    writer.until_it_is_a_store()
    fd = os.open(path, os.O_RDONLY)
    while writer:
        with beside(writer, dice, dice.choice([1, 3, 20])):
            sequence = backup(fd, str(path), copy, None)
        with pmstore.open(copy, "r+") as store:
            assert store.sequence == sequence
            if sequence in recording.states:
                assert store._catalog.core.state_hash() == recording.states[sequence]
                compared += 1
        copy.unlink()
        for _ in range(dice.randrange(1, max(2, len(recording) // 8))):
            writer.step()
    os.close(fd)
    os.close(writer.fd)
    return compared


@pytest.mark.long_on("memory")
@pytest.mark.parametrize("workload", [bulky, *WORKLOADS], ids=lambda workload: workload.__name__)
def test_I22_a_backup_is_a_commit_whatever_happens_meanwhile(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, readers=False, **OPTIONS.get(workload, {}))
    assert assert_backups_are_commits(recording, medium.directory / "played.pm", SEED) >= 2


def test_contents_that_come_back(open_store: Open) -> None:
    """Three rounds: contents, others in their place, and the first ones again."""
    store = open_store()
    arrays = {name: store.create_array(name, 40_000) for name in ("a", "m1", "m2")}
    store["z"] = np.ones(200_000)
    store.commit()
    calls = 0

    def put(size: int) -> None:
        del store["z"]
        store.commit()
        store["z"] = np.full(size, 1.0 if size == 200_000 else 2.0)
        store.commit()
        store._catalog.core.checkpoint()

    def change(name: str) -> None:
        arrays[name][100] += 1  # before it is copied
        store.commit()
        store._catalog.core.checkpoint()

    places = [offset_of(store, "z")]

    def step(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 4, 5):
            change("m1" if calls == 1 else "m2")
        if calls in (4, 8):
            put(190_000 if calls == 4 else 200_000)
            places.append(offset_of(store, "z"))

    copy = Path(store.path).with_name("copy.pm")
    store.backup(copy, progress=step)
    assert len(set(places)) == 1 and len(places) == 3 and calls == 12
    with pmstore.open(copy, "r", verify=True) as backed_up:
        assert (backed_up["z"] == 1).all() and (backed_up["m1"][100], backed_up["m2"][100]) == (1, 2)


def test_pages_beside_those_that_the_log_changes_are_not_copied(open_store: Open) -> None:
    """Nothing needs the free page behind an array that ends with its page, and that holds what was deleted."""
    store = open_store()
    store["whole"] = np.zeros(511)  # with the hash: a page
    store["deleted"] = np.full(50_000, 7.25)
    store.commit()
    places = [store._catalog.core.get(key).offset for key in (b"nwhole", b"ndeleted")]
    assert places[1] == places[0] + 4096
    del store["deleted"]
    store.commit()
    store._catalog.core.checkpoint()
    store["whole"][:] = 1
    store.commit()
    copy = Path(store.path).with_name("copy.pm")
    with open_store(mode="r") as reader:
        reader.backup(copy)
    deleted = np.full(8, 7.25).tobytes()
    assert [deleted in path.read_bytes() for path in (Path(store.path), copy)] == [True, False]
    with open_store("copy.pm", "r", verify=True) as store:
        assert (store["whole"] == 1).all()


def test_beside_a_writer_at_work(medium: Medium, child: Any) -> None:
    path, copy = medium.directory / "store.pm", medium.directory / "copy.pm"
    make(path)
    writer = child(MIXED, path)
    assert writer.line() == "ready"
    last = 0
    with pmstore.open(path, "r") as reader:
        for _ in range(4):
            sequence = reader.backup(copy)
            assert sequence >= last
            last = sequence
            with pmstore.open(copy, "r+", verify=True) as store:
                assert store.sequence == sequence
                assert_one_commit(store)
            copy.unlink()
    writer.process.kill()
    writer.process.wait()
    with pmstore.open(path, "r") as reader:  # of what the kill left
        sequence = reader.backup(copy)
    with pmstore.open(copy, "r") as store, pmstore.open(path, "r+") as original:
        assert store.sequence == sequence == original.sequence and store["n"] == original["n"]


def test_a_damaged_store_has_no_backup(open_store: Open) -> None:
    data = np.random.default_rng(0).random(50_000)
    with open_store() as store:
        store["small"], store["data"] = data[:9], data
    path = Path(store.path)
    whole = path.read_bytes()
    for damage in (data[2000:2100].tobytes(), data[:9].tobytes()):
        path.write_bytes(whole)
        flipped(path, damage)
        with open_store(mode="r") as store, pytest.raises(pmstore.CorruptStoreError, match="salvage copies what is"):
            store.backup(path.with_name("copy.pm"))
        assert os.listdir(path.parent) == ["store.pm"]


def test_nobody_else_may_read_the_backup_of_a_private_store(open_store: Open) -> None:
    store = open_store()
    os.chmod(store.path, 0o600)
    copy = Path(store.path).with_name("copy.pm")
    store.backup(copy)
    assert copy.stat().st_mode & 0o777 == 0o600


def test_what_fails_leaves_nothing(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store["x"], store["y"] = np.ones(300_000), np.ones(300_000)  # more than the log holds
    store.commit()
    path = Path(store.path)
    link = path.with_name("link")
    link.symlink_to(path.name)
    for target, text in ((path, "is the store itself"), (link, "is the store itself"), (path.parent, "exists")):
        with pytest.raises(pmstore.StoreExistsError, match=text):
            store.backup(target)
    with pytest.raises(pmstore.StoreNotFoundError, match="the directory"):
        store.backup(path.parent / "none" / "copy.pm")
    for wrong in (7, None):
        with pytest.raises(TypeError):
            store.backup(wrong)  # type: ignore[arg-type]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.backup(path.with_name("copy.pm"), progress=stop)
    monkeypatch.setattr("pmstore._snapshot._TRIES", 4)
    monkeypatch.setattr("pmstore._snapshot._PATIENCE", 0.0)
    copied = []

    def change(done: int, total: int) -> None:
        copied.append(done)
        for _ in range(2):
            store["x"] += 1
            store["y"] += 1  # one of the two is not copied yet
            store.commit()

    with pytest.raises(pmstore.StaleSnapshotError, match="changes too quickly: try again"):
        store.backup(path.with_name("copy.pm"), progress=change)
    assert len(copied) == 4 * 2
    assert sorted(os.listdir(path.parent)) == ["link", "store.pm"]
    store.close()
    with pytest.raises(pmstore.ClosedStoreError):
        store.backup(path.with_name("copy.pm"))


def test_a_full_disk(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("2m")
    with pmstore.open(tmp_path / "s.pm") as store:
        store["a"] = np.random.default_rng(0).random(450_000)
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError, match="no space for the backup") as caught:
            store.backup(disk / "copy.pm")
    assert caught.value.errno == errno.ENOSPC and not os.listdir(disk)


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_blocks_are_shared_where_the_file_system_can(kind: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).random(2_000_000)

    def used(directory: Path) -> int:
        os.sync()
        state = os.statvfs(directory)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    with mounted(image_of(KINDS[kind], tmp_path / "image"), "") as directory:
        with pmstore.open(directory / "s.pm") as store:
            store["a"] = data
        before = used(directory)
        with pmstore.open(directory / "s.pm", "r") as store:
            store.backup(directory / "copy.pm")
        assert used(directory) - before < data.nbytes // 2
        with pmstore.open(directory / "s.pm") as store:  # has blocks of its own now
            store["a"][:] = 0
        with pmstore.open(directory / "copy.pm", verify=True) as copy:
            assert (copy["a"] == data).all()


@pytest.mark.slow
def test_a_crash_leaves_no_half_backup(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    crash(CrashFiles(tmp_path / "files", budget=60))


def crash(files: CrashFiles) -> None:
    with pmstore.open(files.dir / "run.pm") as store:
        store["x"] = np.arange(90_000.0)
        store.create_list("list").extend([1, 2, 3])

    def backs_up(directory: Path) -> None:
        with pmstore.open(directory / "run.pm", "r") as store:
            store.backup(directory / "copy.pm")
        print("done")

    def check(directory: Path, said: str) -> None:
        copy = directory / "copy.pm"
        assert copy.exists() or not said
        if copy.exists():
            with pmstore.open(copy, "r", verify=True) as store:
                assert store["x"][89_999] == 89_999 and list(store["list"]) == [1, 2, 3]
        pmstore.open(directory / "another.pm").close()  # sweeps what a dead backup left
        assert not set(os.listdir(directory)) - {"another.pm", "run.pm", "copy.pm"}

    files.run(backs_up, check)


def test_I22_a_table_that_changes_between_two_pieces_of_an_array(open_store: Open, tmp_path: Path) -> None:
    """The array's last bytes share a page with the hashes of its first ones."""
    store = open_store()
    w = store.create_array("w", 4096 * 4096 + 5000, "u1", fill_value=7)
    store.commit()

    def progress(done: int, total: int) -> None:
        if w[0] == 7:
            w[0] = 9
            store.commit()
            store._catalog.core.checkpoint()

    store.backup(tmp_path / "copy.pm", progress=progress)
    with pmstore.open(tmp_path / "copy.pm", "r", verify=True) as copy:
        assert copy["w"][0] in (7, 9) and (copy["w"][1:] == 7).all()


def shared_blocks(directory: str) -> None:
    """Run in a child with the shim: a file system that shares blocks, of which two come from another commit."""
    path, data = Path(directory) / "s.pm", np.random.default_rng(0).random(100_000)
    with pmstore.open(path, "x") as store:
        store["a"], store["b"] = data, data[:30_000]
    calls = []
    for shares in (0, 1, 3):
        shim.variable("fault_reflinks").value = shares
        copy = Path(directory) / f"copy{shares}.pm"
        with pmstore.open(path, "r") as store:
            shim.begin(shim.PWRITE, shim.ONCE, 0, 1 << 40)
            store.backup(copy)
            calls.append(shim.count())
            shim.end()
        with pmstore.open(copy, "r", verify=True) as store:
            assert (store["a"] == data).all() and (store["b"] == data[:30_000]).all()
    assert calls[1] < calls[2] < calls[0], calls


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_block_that_is_shared_and_wrong_is_written(directory: Path, fault_library: Path) -> None:
    shim.call(fault_library, shared_blocks, directory)


def test_I22_contents_that_come_back_after_a_copy_of_others_that_were_not_right(open_store: Open) -> None:
    """The second snapshot's contents are damaged, as those that a commit is changing look. They are in the copy then,
    in the place of those that the first one had there."""
    with open_store() as store:
        store["a"] = np.arange(40_000.0)
    path = Path(store.path)
    whole = path.read_bytes()
    with open_store(mode="r+") as store:
        store["a"][:] += 0.5
        store.commit()
        entry = entry_of(store, "a")
    damaged = bytearray(path.read_bytes())
    damaged[REGION + entry.offset : REGION + entry.offset + entry.length] = bytes(entry.length)
    there = Snapshot.hashes(entry.length)
    with open(path.with_name("copy.pm"), "w+b") as copy:
        for image, right in ((whole, True), (damaged, False), (whole, True)):
            path.write_bytes(image)
            with path.open("rb") as file:
                snapshot = Reader(file.fileno()).take()
                snapshot.begin_copy(copy.fileno())
                found = snapshot.copy_contents(copy.fileno(), entry.offset, entry.length, 0, entry.length, there)
                assert found == right
        snapshot.end_copy(copy.fileno())
    with open_store("copy.pm", "r", verify=True) as store:
        assert (store["a"] == np.arange(40_000.0)).all()
