"""`compact` makes the file as small as its contents, and changes nothing else; a crash leaves one of the two files."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._catalog.kinds import INLINE
from pmstore._catalog.names import LINEAGE_KEY
from pmstore._core import Entry
from pmstore._store.new_store import written_anew
from pmstore.testing._files.fixture import CrashFiles
from tests.core.test_damage import flipped
from tests.support.derivations import CALLS, doubled
from tests.support.snapshots import snapshot

Open = Callable[..., pmstore.Store]


class Counting(pmstore.Resumable):
    max_iter = 6
    steps = 0

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("total", 3)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.total = 0.0

    def step(self) -> None:
        if Counting.steps == 3:
            raise KeyboardInterrupt
        Counting.steps += 1
        self.state.total += 1.0


def fill(store: pmstore.Store) -> None:
    """One of everything, and much that is deleted again."""
    store.update({f"gone/{i}": np.full(5000 + 40 * i, float(i)) for i in range(60)})
    store["f"] = np.asfortranarray(np.random.default_rng(0).random((90, 70)))
    store.create_array("fixed", 20_000, ">i4", fill_value=7, writeable=False)
    store["record"] = np.zeros(3, [("name", "S7"), ("long" * 400, "f8")])  # its dtype stands behind the elements
    store.update(
        {"empty": np.zeros((0, 2)), "zero": np.array(2 + 1j), "long": "text" * 5000, "config": {"k": [1, None]}}
    )
    store.update({f"small/{i}": np.arange(i) for i in range(0, 300, 7)})
    store.create_list("list").extend([{"i": i, "pad": "p" * (i * i)} for i in range(80)])
    store.commit()
    assert store.derive("derived", doubled, "f", policy="store", verify="hash").value.shape == (90, 70)
    store["list"][3:9] = []
    store.group("gone").clear()


def test_everything_stays(open_store: Open) -> None:
    CALLS.clear()
    with open_store() as store:
        fill(store)
    path = Path(store.path)
    Counting.steps = 0
    with pytest.raises(KeyboardInterrupt):
        Counting().run(store=path, name="fit")
    with open_store(mode="r") as store:
        store.derive("derived", doubled, "f", policy="store", verify="hash")
        before = snapshot(store)
    size = path.stat().st_size
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path.name)
    told: list[tuple[int, int]] = []
    gained = pmstore.compact(link, progress=lambda done, total: told.append((done, total)))
    assert gained == size - path.stat().st_size > size // 2
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 20_000 * 4
    assert sorted(os.listdir(path.parent)) == ["link", "store.pm"] and link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert pmstore.compact(path) == 0 and path.stat().st_size == size - gained
    with open_store(verify=True) as store:
        stats = store.stats()
        # Little of the file is neither contents nor log; a new store has 256 KiB of region.
        assert stats.region_size - stats.region_used < max(stats.region_used // 10, 250 << 10)
        assert store.derive("derived", doubled, "f", policy="store", verify="hash").valid and CALLS == ["doubled"]
        assert snapshot(store) == before
        assert not store["fixed"].flags.writeable and store["f"].flags.writeable
        store.create_list("another")  # its number is no other list's
        assert len(store["another"]) == 0 and len(store["list"]) == 74
        Counting.steps = -10
        assert Counting().run(store=store, name="fit").total.tolist() == [6] * 3 and Counting.steps == -7
        store.copy("fit", "fork")
        assert Counting().run(store=store, name="fork").total.tolist() == [6] * 3 and Counting.steps == -7


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An access control list as the kernel takes it. An entry: its tag, permissions and id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_extended_attributes_stay(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
    nobody = 0xFFFFFFFF
    given = {
        "user.origin": b"beamline",
        "system.posix_acl_access": acl((1, 6, nobody), (2, 4, 4242), (4, 0, nobody), (16, 4, nobody), (32, 0, nobody)),
    }
    try:
        for name, value in given.items():
            os.setxattr(store.path, name, value)
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    mode = os.stat(store.path).st_mode
    assert pmstore.compact(store.path) > 0
    assert {name: os.getxattr(store.path, name) for name in given} == given and os.stat(store.path).st_mode == mode
    open_store(mode="w").close()
    assert {name: os.getxattr(store.path, name) for name in given} == given and os.stat(store.path).st_mode == mode


def test_an_extended_attribute_that_finds_no_room(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store:
        fill(store)
    before = Path(store.path).read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "listxattr", lambda path: ["user.origin"])
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"beamline")
    monkeypatch.setattr(os, "setxattr", full)
    for use in (pmstore.compact, lambda path: pmstore.open(path, "w")):
        with pytest.raises(pmstore.OutOfSpaceError, match=r"attribute 'user.origin' can't be kept: No space left"):
            use(store.path)
        assert Path(store.path).read_bytes() == before
    monkeypatch.undo()
    assert os.listdir(Path(store.path).parent) == ["store.pm"]


def test_a_damaged_lineage_is_found_and_refused(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        store._catalog.core.put(LINEAGE_KEY, Entry(0, 0, INLINE, 0, b"\xc1"))
        store.commit()
        assert [problem.text[:32] for problem in store.check()] == ["the store's lineage is damaged: "]
    with pytest.raises(pmstore.CorruptStoreError, match="lineage is damaged"):
        pmstore.compact(store.path)


def test_commits_that_stand_in_the_log_and_arrays_with_two_slots(open_store: Open) -> None:
    store = open_store()
    w = store.create_array("w", 1 << 18)
    for i in range(12):
        w[:] = np.arange(1 << 18) + i
        store.commit()
    w[5] = -1
    store.commit()
    w[:] = 0
    store._drop(discard=True)
    path = Path(store.path)
    assert pmstore.compact(path) > 1 << 20  # it had the other slot
    assert path.stat().st_size < (2 << 20) + (1 << 20)
    with open_store(verify=True) as store:
        assert store["w"][5] == -1 and store["w"][6] == 17


def test_large_contents_and_a_wrong_estimate(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are copied in pieces; and if the new file was made too small, it grows as others do."""
    with open_store() as store:
        fill(store)
    with open_store(mode="r") as store:
        before = snapshot_of_stored(store)
    monkeypatch.setattr("pmstore._catalog.copying._PIECE", 4096)
    monkeypatch.setattr("pmstore._store.compacting._sizes", lambda source: (1, 0))
    assert pmstore.compact(store.path) > 0
    with open_store(verify=True) as store:
        assert snapshot_of_stored(store) == before


def snapshot_of_stored(store: pmstore.Store) -> dict[str, Any]:
    store.derive("derived", doubled, "f", policy="store", verify="hash")
    return snapshot(store)


@pytest.mark.parametrize("mode", ["a", "r"])
def test_not_while_it_is_open(open_store: Open, mode: str) -> None:
    open_store().close()
    store = open_store(mode=mode, exclusive=True)
    with pytest.raises(pmstore.StoreLockedError, match="is in use: this process"):
        pmstore.compact(store.path)
    store.close()
    assert pmstore.compact(store.path) == 0


def test_readers_are_told_that_another_file_has_taken_the_place(open_store: Open) -> None:
    with open_store() as store:
        store["kept"], store["gone"] = np.arange(50_000), np.zeros(200_000)
        store.commit()
        del store["gone"]
    with open_store(mode="r") as reader:
        assert pmstore.compact(reader.path) > 0
        assert (reader["kept"] == np.arange(50_000)).all()
        with pytest.raises(pmstore.StaleSnapshotError, match="open it"):
            reader.refresh()


def test_the_sequence_number_stays(open_store: Open) -> None:
    with open_store() as store:
        for i in range(30):
            store["a"] = np.full(2000 * (i % 7), float(i))
            store.commit()
        for i in range(3000):
            store[f"name/{i}"] = i  # the new store is filled by more than one commit
        del store["a"]
    with open_store(mode="r") as store:
        before, names = store.sequence, len(store)
    assert before == 31 and pmstore.compact(store.path) > 0
    with open_store(mode="r") as reader:
        assert (reader.sequence, len(reader)) == (before, names)
        with open_store() as store:
            assert store.sequence == before and store.check().ok
            store["more"] = 1
            store.commit()
            assert store.sequence == before + 1 and reader.wait(timeout=0) == (before + 1, "commit")
            assert reader.refresh() == before + 1 and reader["more"] == 1
            store._drop(discard=True)
    with open_store() as store:
        assert store.stats().records_replayed == 1 and store.sequence == before + 1 and store["more"] == 1


@pytest.mark.parametrize("sequence", [0, 1, 2, 12, 10**12, None])
def test_new_stores_begin_at_a_number(tmp_path: Path, sequence: int | None) -> None:
    path = tmp_path / "new.pm"
    with written_anew(str(path), sequence=sequence) as new:
        for i in range(5):
            new.catalog.set(f"{i}", np.arange(1000.0) + i)
            new.catalog.core.commit()
    begin = 5 if sequence is None else sequence
    with pmstore.open(path, "r", verify=True) as reader:
        assert reader.sequence == begin
    with pmstore.open(path, "r+", verify=True) as store:
        assert (store.sequence, store.stats().records_replayed) == (begin, 0)
        store["0"][3] = -1
        store.commit()
        assert store.sequence == begin + 1 and store.check().ok
        store._drop(discard=True)
    with pmstore.open(path, "r+", verify=True) as store:
        assert (store.sequence, store["0"][3]) == (begin + 1, -1) and (store["4"] == np.arange(1000.0) + 4).all()


def test_a_writer_that_waits_gets_the_new_file(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
    found: list[int] = []

    def wait() -> None:
        with pmstore.open(store.path, "r+", timeout=60) as waited:
            found.append(waited.stats().file_size)

    waiter = threading.Thread(target=wait)

    def begin(done: int, total: int) -> None:
        if not waiter.ident:
            waiter.start()

    assert pmstore.compact(store.path, progress=begin) > 0
    waiter.join()
    assert found == [os.stat(store.path).st_size]


def test_what_fails_leaves_the_store(open_store: Open) -> None:
    data = np.random.default_rng(0).random(5000)
    with open_store() as store:
        store["gone"] = np.ones(100_000)
        store["data"] = data
        store.commit()
        del store["gone"]
    path = Path(store.path)
    before = path.read_bytes()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pmstore.compact(path, progress=stop)
    assert path.read_bytes() == before
    flipped(path, data[2000:2100].tobytes())
    before = path.read_bytes()
    with pytest.raises(pmstore.CorruptStoreError, match=r"salvage copies what is sound: .*\n'data'"):
        pmstore.compact(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["store.pm"]
    with pytest.raises(pmstore.StoreNotFoundError):
        pmstore.compact(path.with_name("none"))


def test_a_full_disk(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("8m")
    with pmstore.open(disk / "s") as store:
        store["a"] = np.random.default_rng(0).random(450_000)
        store["gone"] = np.ones(200_000)
        store.commit()
        del store["gone"]
    before = (disk / "s").read_bytes()
    with pytest.raises(pmstore.OutOfSpaceError, match="is as it was: there is no space") as caught:
        pmstore.compact(disk / "s")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(pmstore.OutOfSpaceError):
        pmstore.salvage(disk / "s", disk / "t")
    assert (disk / "s").read_bytes() == before and os.listdir(disk) == ["s"]


def test_the_owner_stays(open_store: Open) -> None:
    with open_store() as store:
        store["gone"] = np.ones(100_000)
        store.commit()
        del store["gone"]
    if os.geteuid():
        pytest.skip("gives files to another user")
    os.chown(store.path, 1234, 2345)
    assert pmstore.compact(store.path) > 0
    status = os.stat(store.path)
    assert (status.st_uid, status.st_gid) == (1234, 2345)


@pytest.mark.slow
def test_every_crash_leaves_one_of_the_two(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    crash(CrashFiles(tmp_path / "files", budget=60))


def crash(files: CrashFiles) -> None:
    with pmstore.open(files.dir / "run.pm") as store:
        store["x"] = np.arange(3000.0)
        store["gone"] = np.ones(60_000)
        store.create_list("list").extend([1, 2, 3])
        for i in range(20):
            store["i"] = i
            store.commit()
        del store["gone"], store["i"]
    size = os.path.getsize(files.dir / "run.pm")

    def compacts(directory: Path) -> None:
        pmstore.compact(directory / "run.pm")
        print("done")

    def check(directory: Path, said: str) -> None:
        assert not said or os.path.getsize(directory / "run.pm") < size
        with pmstore.open(directory / "run.pm", "r", verify=True) as store:
            assert list(store) == ["list", "x"] and store["x"][2999] == 2999 and list(store["list"]) == [1, 2, 3]
            assert store.sequence == 21
        pmstore.open(directory / "another.pm").close()  # sweeps what a dead compact left
        assert sorted(os.listdir(directory)) == ["another.pm", "run.pm"]

    files.run(compacts, check)
