"""What a drain copies from place to place, and what it takes from the archive of an earlier drain, is whole."""

from __future__ import annotations

import errno
import gc
import os
import tracemalloc
from pathlib import Path

import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _local, _target
from pmstore.archive._archive import Archive
from pmstore.archive._format import Directory
from pmstore.archive._index import Index
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, Unreadable, archived, flip, stepping
from tests.archive.test_lost_objects import drained, largest

pytest.importorskip("numcodecs")

DAMAGED = "can't have .* is damaged at byte"


class Counting(Memory):
    """A place that counts the bytes that are read."""

    read = 0

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        found = super().get(name, at, count)
        if name.startswith("parts/"):
            self.read += len(found)
        return found

    def size(self, name: str) -> int:
        return len(super().get(name))


def test_versions_that_share_a_part(tmp_path: Path) -> None:
    """Only the later one is damaged. It comes when the place before is mended, and no sooner."""
    path, near, far = tmp_path / "store.pm", tmp_path / "near", tmp_path / "far"
    data = [os.urandom(20_000) for _ in range(2)]
    with pmstore.open(path) as store, store.drain(near) as drain:
        for step in range(2):
            store[f"data {step}"] = data[step]
            store.commit()
            drain.capture()
        drain.wait()
    assert len(list((near / "parts").iterdir())) == 1
    whole = largest(near).read_bytes()
    flip(largest(near), 30_000)
    for _ in range(3):
        with pytest.warns(pmstore.ArchiveWarning, match=f"far {DAMAGED}"), pmstore.open(path) as store:
            with store.drain([near, far]) as drain, pytest.raises(pmstore.ArchiveDamagedError, match=DAMAGED):
                drain.wait()
        assert archive.open(far).versions() == [1] and archive.open(far)[1]["data 0"] == data[0]
    largest(near).write_bytes(whole)
    assert drained(path, [near, far], "step", 3) == 3
    assert archive.open(far).verify().ok and archive.open(far)[2]["data 1"] == data[1]


def test_a_damaged_part_of_a_further_folder_is_copied_again(tmp_path: Path) -> None:
    path, data = tmp_path / "store.pm", os.urandom(50_000)
    first, middle, last = (tmp_path / name for name in ("first", "middle", "last"))
    drained(path, [first, middle], "data", data)
    flip(largest(middle), 100)
    drained(path, [first, middle], "step", 1)
    assert archive.open(middle).verify().ok
    flip(largest(middle), 100)
    os.truncate(largest(middle), largest(middle).stat().st_size - 10)  # and it is cut
    drained(path, [first, middle], "step", 2)
    drained(path, [first, middle, last], "step", 3)
    assert archive.open([first, middle, last]).verify().ok and archive.open(last)[1]["data"] == data


def two_arrays(store: pmstore.Store, near: Memory, far: Memory) -> str:
    """Archive two arrays in one part, which is returned."""
    near.near = far.near = True
    with stepping(store, near, far) as steps:
        store["a"], store["b"] = os.urandom(20_000), os.urandom(20_000)
        store.commit()
        archived(steps)
    return max(near.parts, key=near.size)


def test_a_part_that_takes_the_place_of_another_one_has_what_only_that_has(tmp_path: Path) -> None:
    """Each place has lost the contents of an array. The next version needs only what is whole in the place before."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        part = two_arrays(store, near, far)
        row = Index.read(near).find(1)
        assert row is not None
        directory = Directory.checked("", near.get(part, row.directory.at, row.directory.length))
        frames = {key: item.frames[0] for key, item in directory.items.items() if item.frames}
        (_first, lower), (second, upper) = sorted(frames.items(), key=lambda one: one[1].piece.at)
        assert upper.piece.at >= lower.piece.length
        whole = near.objects[part]
        near.damage(part, upper.piece.at, 10)
        far.damage(part, 0, 10)
        del store["b" if second.endswith(b"b") else "a"]
        store.commit()
        with stepping(store, near, far) as steps:
            archived(steps)
        assert far.objects[part] == whole
    assert Archive(Sources([far])).verify().ok and Archive(Sources([far])).versions() == [1, 2]


def test_a_cut_part_of_which_nothing_else_is_whole(tmp_path: Path) -> None:
    """The further place has nothing to lose, and the next version needs only what is whole in the place before."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        part = two_arrays(store, near, far)
        at = near.objects[part].index(bytes(store["a"])[:40])
        near.damage(part, at, 40)
        far.objects[part] = far.objects[part][:10]
        del store["a"]
        store.commit()
        with stepping(store, near, far) as steps:
            archived(steps)
        assert Archive(Sources([far]))[2]["b"] == store["b"]


def test_a_drain_writes_anew_what_copying_finds_damaged(tmp_path: Path) -> None:
    """A part of an array that never changes is altered while the further place is away. Each later version needs it."""
    near, far, told = Memory(), Memory(), []
    far.near = True  # the first place is an object store: the drain does not read it
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far, keep=2) as steps:
        steps.attach(lambda: None, told.append)
        steps._writing.base_after = 0
        data = store["data"] = os.urandom(100_000)
        for step in range(6):
            store["step"] = os.urandom(30_000)
            store.commit()
            steps.capture()
            steps.flush()
            while steps.write():
                pass
            if step == 0:
                part = max(near.parts, key=near.size)
                at = near.objects[part].index(data[:40])
                near.damage(part, at, 40)
            while steps.copy(1):
                pass
        assert len(told) == 1 and f"can't have version 1: memory: {part} is damaged" in told[0]
        found = Archive(Sources([far]))
        assert found.latest == 6 and found[6]["data"] == data and found.verify().ok
        assert len(near.list("parts")) <= 4, "the first place waits for the further one no more"


def test_bases_do_not_read_what_was_copied_again(tmp_path: Path) -> None:
    near, far = Counting(), Counting()
    with pmstore.open(tmp_path / "store.pm") as store:
        store["data"] = os.urandom(500_000)
        with stepping(store, near, far) as steps:
            steps._writing.base_after = 2
            for step in range(10):
                store["step"] = step
                store.commit()
                archived(steps)
                assert step == 0 or near.read + far.read < 50_000
                near.read = far.read = 0
        with stepping(store, near, far) as steps:  # nor in the next drain, as both are object stores
            store["step"] = 11
            store.commit()
            archived(steps)
        assert near.read + far.read < 100_000
    assert [row.previous for row in Index.read(far).rows()].count(None) > 3 and Archive(Sources([far])).verify().ok


def test_versions_that_are_left_out_are_told_of_in_each_mode(tmp_path: Path) -> None:
    path, near, far = tmp_path / "store.pm", tmp_path / "near", tmp_path / "far"
    drained(path, [near], "data", os.urandom(50_000))
    flip(largest(near), 100)
    with pytest.warns(pmstore.ArchiveWarning, match="its contents are written anew"):
        drained(path, [near], "step", 1)
    with pytest.warns(pmstore.ArchiveWarning, match=f"far can't have version 1: {near}: parts/.* is damaged"):
        with pmstore.open(path) as store, store.drain([near, far], on_error="raise") as drain:
            assert drain.wait() == 2
    assert archive.open(far).versions() == [2]


class Copies(Memory):
    """A place that returns other bytes each time, as a disk does."""

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        return bytes(bytearray(super().get(name, at, count)))


def test_versions_that_are_lost_keep_no_part_in_memory(tmp_path: Path) -> None:
    near, far = Copies(), Memory()
    near.near = True
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, near) as steps:
            steps._writing.base_after = 0
            for _ in range(10):
                store["data"] = os.urandom(500_000)
                store.commit()
                archived(steps)
        for name in near.parts:
            near.damage(name, 50)
        with stepping(store, near, far) as steps:
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                assert not steps.copy(1)
                gc.collect()
                assert tracemalloc.get_traced_memory()[0] < before + 250_000
            finally:
                tracemalloc.stop()
            lost = steps.targets[1].lost
            assert lost is not None and lost[0] == 10 and "can't have versions 1 to 10" in str(lost[1])


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_damaged_tag_in_the_place_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: bool) -> None:
    path, near, far = tmp_path / "store.pm", tmp_path / "near", tmp_path / "far"
    drained(path, [near], "step", 0)
    archive.open(near).tag("best", 1)
    if unreadable:
        monkeypatch.setattr(_local, "os", Unreadable(str(near / "tags" / "best"), 0))
    else:
        flip(near / "tags" / "best", -1)
    assert drained(path, [near, far], "step", 1) == 2
    assert archive.open(far).versions() == [1, 2]
    with pytest.warns(pmstore.ArchiveWarning, match="tag"):
        assert archive.open(near).tags == {}
    archive.open(near).untag("best")


def test_a_part_of_which_a_disk_can_read_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read in small pieces for ever; `verify` tells of it, and the next version is whole."""
    path, near, far, data = tmp_path / "store.pm", tmp_path / "near", tmp_path / "far", os.urandom(3_000_000)
    drained(path, [near], "data", data)
    bad, reads = str(largest(near)), 0

    class Worn(Unreadable):
        def pread(self, fd: int, count: int, at: int) -> bytes:
            nonlocal reads
            if os.readlink(f"/proc/self/fd/{fd}") == bad:
                reads += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.pread(fd, count, at)

    monkeypatch.setattr(_local, "os", Worn(bad, 0))
    assert [one.versions for one in archive.open(near).verify()] == [(1,)]
    with pytest.warns(pmstore.ArchiveWarning, match="can't have version 1: .*can't be read|written anew"):
        assert drained(path, [near, far], "step", 1) == 2
    assert reads < 300 and archive.open(far).versions() == [2] and archive.open(far)[2]["data"] == data


def test_an_object_of_the_index_that_a_disk_can_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "to"
    for step in range(4):
        drained(tmp_path / "store.pm", [place], "step", step)
    name = sorted((place / "index").iterdir())[3]
    monkeypatch.setattr(_local, "os", Unreadable(str(name), 0))
    with pytest.warns(pmstore.ArchiveWarning, match=f"'index/{name.name}' can't be read: .*not listed there"):
        assert archive.open(place).versions() == [1, 2, 3]
    assert f"'index/{name.name}' can't be read" in str(archive.open(place).verify())


def test_what_is_known_of_a_damaged_part_is_read_once(tmp_path: Path) -> None:
    """A version needs many parts that are damaged in the further place."""
    near, far = Counting(), Counting()
    near.near = far.near = True
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, near, far, part_size=1 << 16) as steps:
            steps._writing.base_after = 0
            for number in range(12):
                store[f"data {number}"] = os.urandom(60_000)
                store.commit()
                archived(steps)
        for name in far.parts:
            far.damage(name, 10)
        near.read = 0
        with stepping(store, near, far) as steps:
            store["step"] = 1
            store.commit()
            archived(steps)
    assert near.read < 4 * sum(map(len, near.objects.values())), "each part, and the directories, are read a few times"
    assert Archive(Sources([far])).verify().ok


def test_a_part_that_was_refused_is_not_taken_for_that_of_the_further_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bases share a part. The second one is damaged in the place before; the further place has only the first."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far, codec=None) as steps:
        steps._writing.base_after = 0
        for name in "abc":
            store[name] = os.urandom(4000)
            if name == "c":
                del store["b"]
            store.commit()
            steps.capture()
        steps.flush()
        while steps.write():
            pass
        first = next(iter(steps.targets[0].index.rows())).directory
        with monkeypatch.context() as patched:
            patched.setattr(_target, "_TOGETHER", 1)
            steps.copy(1)
        end = first.at + first.length
        near.damage(first.part, end + 5, 9)
        far.objects[first.part] = far.objects[first.part][:end]
        while steps.copy(1):
            pass
        found = Archive(Sources([far]))
        assert found.verify().ok and found.versions() == [1, 3] and found[3]["c"] == store["c"]


def test_damage_in_the_second_of_three_places(tmp_path: Path) -> None:
    first, second, third = Memory(), Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, first, second, third) as steps:
        store["data"] = os.urandom(20_000)
        store.commit()
        steps.capture()
        steps.flush()
        assert steps.write() and steps.copy(1)
        part = second.parts[0]
        second.damage(part, 90, 9)
        with pytest.raises(pmstore.ArchiveDamagedError, match="can't have version 1"):
            archived(steps)
        store["step"] = 1
        store.commit()
        archived(steps)
        assert [target.last for target in steps.targets] == [2, 2, 2]
        assert Archive(Sources([third])).verify().ok and Archive(Sources([third]))[2]["data"] == store["data"]


def test_a_bad_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk can't read a part of an earlier drain. The drain goes on, and writes the contents anew."""
    path, place, data = tmp_path / "store.pm", tmp_path / "to", os.urandom(300_000)
    drained(path, [place], "data", data)
    monkeypatch.setattr(_local, "os", Unreadable(str(largest(place)), 0))
    with pytest.warns(pmstore.ArchiveWarning, match="is damaged at byte 0; its contents are written anew"):
        assert drained(path, [place], "step", 1) == 2
    assert archive.open(place)[2]["data"] == data


def test_a_bad_sector_in_the_place_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has two arrays, of which a disk can't read one. The next version needs the other one."""
    path, near, far = tmp_path / "store.pm", tmp_path / "near", tmp_path / "far"
    data = [os.urandom(50_000) for _ in range(2)]
    with pmstore.open(path) as store, store.drain(near) as drain:
        store["a"], store["b"] = data
        store.commit()
        drain.wait()
    monkeypatch.setattr(_local, "os", Unreadable(str(largest(near)), 8192))
    with pytest.warns(pmstore.ArchiveWarning, match="far can't have version 1: .*is damaged at byte|written anew"):
        with pmstore.open(path) as store, store.drain([near, far]) as drain:
            store["step"] = 1
            store.commit()
            assert drain.wait(timeout=60) == 2
    found = archive.open(far)
    assert found.versions() == [2] and found[2]["a"] == data[0] and found[2]["b"] == data[1]


@pytest.mark.parametrize("lost", [0, 1000])
@pytest.mark.parametrize("near", [False, True])
def test_a_part_that_was_lost_or_cut_in_a_further_object_store(tmp_path: Path, near: bool, lost: int) -> None:
    """lost: bytes that are left; 0: the part is missing. No drain reads the object store."""
    before, far = Memory(), Memory()
    before.near = near
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, before, far) as steps:
            store["data"] = os.urandom(50_000)
            store.commit()
            archived(steps)
        part = max(far.parts, key=far.size)
        whole = far.objects.pop(part)
        if lost:
            far.objects[part] = whole[:lost]
        with stepping(store, before, far) as steps:
            store["step"] = 1
            store.commit()
            archived(steps)
    assert far.objects[part] == whole
    assert Archive(Sources([far])).verify().ok


def test_closing_does_not_wait_for_a_place_that_has_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "to")
        store["step"] = 1
        store.commit()
        assert drain.wait() == 1
        asked = []

        def away(self: object, folder: str) -> list[str]:
            asked.append(folder)
            raise pmstore.ArchiveUnavailableError(errno.ENOTCONN, "away")

        monkeypatch.setattr(_local.LocalPlace, "list", away)
        drain.close(timeout=600)
        assert asked == ["writers"], "it is asked once"
