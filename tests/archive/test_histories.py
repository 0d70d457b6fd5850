"""An archive has one history: a copy of a store that went another way is refused, and so is a fork's parent."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore._core import META_MAX
from pmstore._store.lineage import entry_of
from pmstore.archive._archive import Archive
from pmstore.archive._index import Index
from pmstore.archive._objects import Buffer, place_of
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, archived, contents, drained, flip, same, stepping

pytest.importorskip("numcodecs")


def commits(path: Path, value: float, count: int, place: Any = None) -> int:
    """Commits of x, each archived if there is a place. Returns the last one."""
    with pmstore.open(path) as store:
        if "x" not in store:
            store.create_array("x", (3000,))
        for step in range(count):
            store["x"][:] = value + step
            store.commit()
            if place is not None:
                drained(store, place)
        return store.sequence


@pytest.fixture
def put_back(tmp_path: Path) -> Path:
    """A store that was put back to version 1, and then made three commits, as many as its archive has."""
    path, place = tmp_path / "store.pm", tmp_path / "archive"
    commits(path, 0, 1, place)
    shutil.copy(path, tmp_path / "copy.pm")
    assert commits(path, 100, 3, place) == 4
    shutil.copy(tmp_path / "copy.pm", path)
    assert commits(path, 200, 3) == 4
    return path


def test_a_store_that_was_put_back_and_caught_up(put_back: Path) -> None:
    """Its newest commit has the number of a version that has other contents: no drain may call it durable."""
    place = put_back.with_name("archive")
    for mode in ("r+", "r"):
        with pmstore.open(put_back, mode) as store:
            with pytest.raises(pmstore.ArchiveConflictError, match="version 4 with other contents"):
                store.drain(place)
    assert archive.open(place)[4]["x"][0] == 102, "nothing was changed"
    with pmstore.open(put_back) as store, store.drain(place.with_name("another")) as drain:
        assert drain.wait() == 4


def test_a_further_place_of_another_history(put_back: Path) -> None:
    """Its newest version has the number of the first place's, and other contents."""
    near, far = put_back.with_name("near"), put_back.with_name("archive")
    with pmstore.open(put_back) as store:
        drained(store, near)
        assert store.sequence == 4
        with pytest.raises(pmstore.ArchiveConflictError, match="other contents"):
            store.drain([near, far])


def test_places_of_two_copies_are_not_mixed(tmp_path: Path) -> None:
    """A machine with one of two places is lost. The run goes on from the other place, which lags. Then the first place
    is there again, and both are opened."""
    near, far, both = tmp_path / "near", tmp_path / "far", [tmp_path / "near", tmp_path / "far"]
    commits(tmp_path / "store.pm", 0, 3, both)
    commits(tmp_path / "store.pm", 100, 2, near)
    assert archive.open(far).restore(tmp_path / "again.pm") == 3
    with pmstore.open(tmp_path / "again.pm") as store:
        store["only here"] = 200
        for step in range(5):
            store["x"][step] = 200 + step  # a differential: the rest is that of the version before
            store.commit()
            drained(store, far)
    alone = archive.open(far)
    for places in (both, both[::-1]):
        with pytest.warns(pmstore.ArchiveWarning, match="other contents of version 4: two copies of a store"):
            found = archive.open(places)
        assert found.versions() == alone.versions() == [1, 2, 3, 4, 5, 6, 7, 8]
        for version in found:
            assert same(contents(found[version]), contents(alone[version])), version
        restored = tmp_path / f"from-{places[0].name}.pm"
        assert found.refresh() == found.restore(restored) == 8  # it is told once
        with pmstore.open(restored, "r") as store:
            assert store["only here"] == 200 and store["x"][0] == 200 and store["x"][5] == 2
    assert archive.open(near)[5]["x"][0] == 101, "a place alone has all that it has"


@pytest.mark.parametrize("lost", [False, True])
def test_a_version_whose_previous_one_only_another_copy_has(tmp_path: Path, lost: bool) -> None:
    """An object of the list is damaged or lost, and no number is in both lists."""
    near, far, path = tmp_path / "near", tmp_path / "far", tmp_path / "store.pm"
    commits(path, 0, 3, [near, far])
    assert archive.open(far).restore(tmp_path / "again.pm") == 3
    with pmstore.open(path) as store, store.drain(near) as drain:
        for step in range(2):
            store["x" if step == 0 else "step"] = np.full(3000, 104.0) if step == 0 else step
            store.commit()
            drain.wait()
    commits(tmp_path / "again.pm", 204, 1, far)
    segment = next(one for one, rows in Index.read(place_of(near)).segments if any(row[0] == 4 for row in rows))
    if lost:
        (near / segment.name).unlink()
    else:
        flip(near / segment.name, -1)
    for places in ([near, far], [far, near]):
        with pytest.warns(pmstore.ArchiveWarning, match="its versions are not listed there"):
            found = archive.open(places)
        assert found.versions() == [1, 2, 3, 4, 5] and found[4]["x"][0] == 204
        assert not found.is_whole(5)
        with pytest.raises(pmstore.ArchiveDamagedError, match="version 5 needs version 4, which is not in it"):
            found[5]


def test_two_drains_of_other_exactness_at_once(tmp_path: Path) -> None:
    """One has each commit approximated, the other one every fifth. Each version is read with what its drain wrote."""
    from pmstore.codecs import LCDelta

    exact, near = Memory(), Memory()
    rng, states = np.random.default_rng(1), {}
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, exact) as some:
        with stepping(store, near, codec={"w": LCDelta(rebase_every=1000)}) as each:
            store["w"] = np.zeros(20_000)
            some._writing.base_after, each._writing.base_after = 100, 8
            for number in range(1, 21):
                store["w"][:3000] += rng.standard_normal(3000)
                store.commit()
                archived(each)
                if number % 5 == 0:
                    archived(some)
                    states[number] = store["w"].copy()
    alone = Archive(Sources([near]))
    for places in ([exact, near], [near, exact]):
        found = Archive(Sources(places))
        assert found.versions() == list(range(1, 21))
        for version in reversed(found.versions()):
            first = states.get(version) if places[0] is exact else None
            assert same(found[version]["w"], alone[version]["w"] if first is None else first), version


@pytest.mark.parametrize("lossy", [False, True])
def test_a_list_with_a_damaged_object_does_not_hide_versions_of_another_drain(tmp_path: Path, lossy: bool) -> None:
    """Two drains write the same commits to two places. The first place lists versions that need one it has lost."""
    from pmstore.codecs import LCDelta

    first, second = tmp_path / "first", tmp_path / "second"
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = np.random.default_rng(0).standard_normal(5000)
        with store.drain(first) as one, store.drain(second, codec={"x": LCDelta()} if lossy else "zstd") as other:
            for step in range(8):
                store["x"][step * 10] = store["step"] = step
                store.commit()
                one.wait()
                other.wait()
    flip(sorted((first / "index").iterdir())[3], -1)
    alone = archive.open(second)
    for places in ([first, second], [second, first]):
        with pytest.warns(pmstore.ArchiveWarning, match="its versions are not listed there"):
            found = archive.open(places)
            assert found.restore(tmp_path / f"{places[0].name}.pm") == 8
        for version in range(1, 9):
            assert found[version]["step"] == version - 1
            if places[0] == second or version > 4:
                assert same(found[version]["x"], alone[version]["x"])


def test_places_that_part_later_complete_each_other_before(tmp_path: Path) -> None:
    """The list of the one that goes further has a damaged object from before they part."""
    first, second = Memory(), Memory()
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store, stepping(store, first) as one, stepping(store, second) as other:
        store.create_array("x", (3000,))
        for step in range(6):
            store["x"][step * 10] += 1
            store.commit()
            archived(one)
            archived(other)
    shutil.copy(path, tmp_path / "copy.pm")
    for name, place, count in ((path, first, 3), (tmp_path / "copy.pm", second, 1)):
        with pmstore.open(name) as store, stepping(store, place) as steps:
            for _ in range(count):
                store["x"][:3] += count
                store.commit()
                archived(steps)
    first.objects[f"index/{first.list('index')[1]}"] = b"damaged"
    with pytest.warns(pmstore.ArchiveWarning):
        found = Archive(Sources([first, second]))
    assert [found[version]["x"][1] for version in found.versions()] == [0] * 6 + [3, 6, 9]


def test_versions_with_the_same_contents_complete_each_other_afterwards(tmp_path: Path) -> None:
    """A store that was compacted has other spare rows, which its program overwrites later."""
    first, second = Memory(), Memory()
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store.create_array("rows", (0, 1000), maxshape=(None, 1000))
        store.append("rows", np.ones((1, 1000)))
        store["gone"] = np.zeros(100_000)
        store["x"] = np.zeros(3000)
        store.commit()
        del store["gone"]
        store.resize("rows", 0)
        store.commit()
        with stepping(store, first) as steps:
            archived(steps)
    pmstore.compact(path)
    with pmstore.open(path) as store:
        with stepping(store, second) as steps:
            archived(steps)
        with stepping(store, first) as one, stepping(store, second) as other:
            for step in range(7):
                if step == 1:
                    del store["rows"]
                store["x"][step * 10] += 1
                store.commit()
                archived(one)
                if step < 6:
                    archived(other)
    first.objects[f"index/{first.list('index')[-3]}"] = b"damaged"
    with pytest.warns(pmstore.ArchiveWarning):
        found = Archive(Sources([first, second]))
    alone = Archive(Sources([second]))
    for version in alone.versions()[2:]:
        assert same(found[version]["x"], alone[version]["x"]), version
    with pytest.warns(pmstore.ArchiveWarning, match="an older version is restored"):
        assert found.restore(tmp_path / "restored.pm") == alone.latest


class Late(Memory):
    """The place of a writer that does not see newer ones, from some time on."""

    late = False
    token = b""

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        super().put(name, data)
        if name == "writers/000001":
            self.token = self.objects[name]

    def list(self, folder: str) -> list[str]:
        return ["000001"] if self.late and folder == "writers" else super().list(folder)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        return self.token if self.late and name == "writers/000001" else super().get(name, at, count)


@pytest.mark.parametrize("how", ["next", "together", "newest"])
def test_a_flush_that_was_under_way_is_taken_for_the_versions_that_it_has(tmp_path: Path, how: str) -> None:
    """Another copy goes on. It computes the first version of that flush with the same bits, and others with others. It
    makes a version of each commit, perhaps together with the first; or only of those that the flush has."""
    path, other = tmp_path / "store.pm", tmp_path / "other.pm"
    place = Memory()
    before = Late(place.objects)

    def step(store: pmstore.Store, by: int) -> None:
        store["x"][:] = np.arange(3000) * (10 * store.sequence + by)
        store.commit()

    with pmstore.open(path) as store, stepping(store, before) as late:
        store.create_array("x", (3000,))
        store.commit()
        archived(late)
        shutil.copy(path, other)
        for number in range(3):
            step(store, 0)
            if number != 1:
                late.capture()
        late.flush()
        with pmstore.open(other) as copy, stepping(copy, place) as steps:
            before.late = True
            while late.write():
                pass
            for number, by in enumerate([0, 1, 1, 1]):
                step(copy, by)
                if number != 1 or how != "newest":
                    steps.capture()
                if number == 0 and how != "together":
                    archived(steps)
            with pytest.raises(pmstore.ArchiveConflictError, match="other contents"):
                archived(steps)
    found = Archive(Sources([place]))
    assert found.versions() == [1, 2, 4] and found.verify().ok


def test_a_version_of_another_drain_is_not_taken_for_one_that_was_read(tmp_path: Path) -> None:
    """The first place has version 5 with damaged contents, the second one has it whole, and alone has version 6."""
    first, second = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, second) as longer:
        store["x"] = np.random.default_rng(0).standard_normal(5000)
        with stepping(store, first) as shorter:
            for step in range(6):
                store["x"][step * 10] = step
                store.commit()
                archived(longer)
                if step < 5:
                    archived(shorter)
    row = Index.read(first).find(5)
    assert row is not None
    first.damage(row.directory.part, 3)
    found = Archive(Sources([first, second]))
    assert list(found[5]) == ["x"], "its directory is whole"
    assert found[6]["x"][50] == 5


def test_the_same_contents_go_on(tmp_path: Path) -> None:
    """Its bytes may lie elsewhere, as in a copy, a compacted or a restored store."""
    path, place = tmp_path / "store.pm", tmp_path / "archive"
    with pmstore.open(path) as store:
        store["values"] = {"a": [1, 2, {"b": "text"}], "big": np.arange(70_000)}
        store.create_list("list").extend([1, "two", np.zeros(5000)])
        store.create_array("grows", (5, 400), maxshape=(None, 400))
        store["words"] = np.array(["a", "longer"] * 3000, np.dtypes.StringDType())
        store.create_array("fixed", data=np.arange(9000.0), writeable=False)
        store["gone"] = np.zeros(100_000)
        store["fields"] = np.zeros(700, "f8,i4")
        for _ in range(3):
            store.append("grows", np.ones((30, 400)))
            store.commit()
        del store["gone"]
        drained(store, place)
        store.resize("grows", 40)
        store["fields"] = store["fields"][::-2]
        drained(store, place)
        store.backup(tmp_path / "backup.pm")
    shutil.copy(path, tmp_path / "copied.pm")
    archive.open(place).restore(tmp_path / "restored.pm")
    shutil.copy(tmp_path / "restored.pm", tmp_path / "compacted.pm")
    pmstore.compact(tmp_path / "compacted.pm")
    pmstore.compact(tmp_path / "copied.pm")
    for name in ("store", "backup", "copied", "restored", "compacted"):
        for mode in ("r", "r+"):
            with pmstore.open(tmp_path / f"{name}.pm", mode) as store, store.drain(place) as drain:
                assert drain.wait() == store.sequence, name


@pytest.mark.parametrize("name", ["rows", "also", None])
def test_a_compacted_copy_with_other_contents(name: str | None, tmp_path: Path) -> None:
    """It lacks spare rows, so that its arrays that grow are compared row by row, and all others by their hashes."""
    place, last = tmp_path / "archive", tmp_path / "last.pm"
    with pmstore.open(tmp_path / "store.pm") as store:
        store.create_array("rows", (0, 400), maxshape=(None, 400))
        store.create_array("few", (0, 2), maxshape=(None, 2))
        store["also"] = np.zeros(3000)
        for _ in range(3):
            store.append("rows", np.ones((30, 400)))
            store.append("few", np.ones((3, 2)))
            store.commit()
        store.backup(last)
        store["rows"][:] = 2
        drained(store, place)
    with pmstore.open(last) as store:
        store["rows"][:] = 2
        if name is not None:
            store[name][70] = 7
        store.commit()
    assert pmstore.compact(last) > 0
    with pmstore.open(last) as store:
        if name is None:
            drained(store, place)
        else:
            with pytest.raises(pmstore.ArchiveConflictError, match="other contents"):
                store.drain(place)


def test_an_approximated_version_is_not_compared(tmp_path: Path) -> None:
    """Its state is that of the approximation, so that the store's contents prove nothing."""
    from pmstore.codecs import LCDelta

    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = np.random.default_rng(0).normal(size=30_000)
        for _ in range(2):
            with stepping(store, place, codec={"x": LCDelta(2)}) as steps:
                for _ in range(3):
                    store["x"] *= 1.001
                    store.commit()
                    archived(steps)
    found = Archive(Sources([place]))
    assert any(one.lossy for one in found.log()) and len(found) == 6


def test_a_fork_without_a_version_of_its_own(tmp_path: Path) -> None:
    """Its drain was killed before the first one. What is restored goes on with the fork's archive, not the parent's."""
    trunk, branch, again = tmp_path / "trunk", tmp_path / "branch", tmp_path / "again.pm"
    commits(tmp_path / "store.pm", 0, 4, trunk)
    archive.open(trunk).fork(2, tmp_path / "fork.pm")
    with pmstore.open(tmp_path / "fork.pm") as store, store.drain(branch):
        pass
    for folder in ("index", "writers"):
        shutil.rmtree(branch / folder)
    found = archive.open(branch)
    assert found.versions() == [1, 2]
    assert found.restore(again) == 2
    with pmstore.open(again) as store:
        with pytest.raises(pmstore.ArchiveConflictError, match="fork"):
            store.drain(trunk)
        store["x"][:] = 7
        drained(store, branch)
    found = archive.open(branch)
    assert found.versions() == [1, 2, 3] and found[3]["x"][0] == 7 and found.parent == (str(trunk), 2)
    assert found.restore(tmp_path / "older.pm", 2) == 2
    with pmstore.open(tmp_path / "older.pm") as store:
        for place in (trunk, branch):
            with pytest.raises(pmstore.ArchiveConflictError, match="fork"):
                store.drain(place)


@pytest.mark.parametrize("how", ["fork", "restore"])
def test_a_compacted_fork_goes_on_with_its_archive(tmp_path: Path, how: str) -> None:
    trunk, branch, path = tmp_path / "trunk", tmp_path / "branch", tmp_path / "fork.pm"
    commits(tmp_path / "store.pm", 0, 4, trunk)
    getattr(archive.open(trunk), how)(*((2, path) if how == "fork" else (path, 2)))
    for round in range(3):
        commits(path, 10 * round, 2, branch)
        with pmstore.open(path) as store:
            with pytest.raises(pmstore.ArchiveConflictError, match="fork"):
                store.drain(trunk)
            store["large"] = np.ones(500_000)
            store.commit()
            del store["large"]
        assert pmstore.compact(path) > 0
    assert archive.open(branch).parent == (str(trunk), 2)
    newest = archive.open(branch).versions()[-1]
    assert newest == 12 and archive.open(branch)[newest]["x"][0] == 21


def test_a_url_that_leaves_no_room_for_a_forks_lineage() -> None:
    room = META_MAX - len(entry_of("0" * 16, ("", 1)).meta)
    url = "x" * (room - 2)  # long texts have a longer head
    assert len(entry_of("0" * 16, (url, 1)).meta) == META_MAX
    entry_of(None, (url, 1))
    with pytest.raises(ValueError, match="too long"):
        entry_of(None, (url + "x", 1))


def test_a_fork_whose_parent_lost_the_version(tmp_path: Path) -> None:
    """An older version than that of the fork does not go on with the fork's archive."""
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    commits(tmp_path / "store.pm", 0, 4, trunk)
    archive.open(trunk).fork(3, tmp_path / "fork.pm")
    with pmstore.open(tmp_path / "fork.pm") as store, store.drain(branch):
        pass
    for folder in ("index", "writers"):
        shutil.rmtree(branch / folder)
    archive.open(trunk).untag("fork-3")
    archive.open(trunk).forget([3])
    assert archive.open(branch).restore(tmp_path / "again.pm") == 2
    with pmstore.open(tmp_path / "again.pm") as store, pytest.raises(pmstore.ArchiveConflictError, match="fork"):
        store.drain(branch)


def test_a_fork_of_a_version_that_only_the_parent_has(tmp_path: Path) -> None:
    trunk, branch, twig = tmp_path / "trunk", tmp_path / "branch", tmp_path / "twig"
    commits(tmp_path / "store.pm", 0, 4, trunk)
    archive.open(trunk).fork(3, tmp_path / "fork.pm")
    commits(tmp_path / "fork.pm", 10, 2, branch)
    found = archive.open(branch)
    assert found.fork(2, tmp_path / "again.pm") == 2
    assert found.tags == {} and archive.open(trunk).tags == {"fork-2": 2, "fork-3": 3}
    commits(tmp_path / "again.pm", 20, 2, twig)
    again = archive.open(twig)
    assert again.parent == (str(trunk), 2)
    assert [again[version]["x"][0] for version in again] == [0, 1, 20, 21]


def test_a_parent_that_is_gone_is_told_once(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    commits(tmp_path / "store.pm", 0, 2, trunk)
    archive.open(trunk).fork(1, tmp_path / "fork.pm")
    commits(tmp_path / "fork.pm", 10, 2, branch)
    shutil.rmtree(trunk)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = archive.open(branch)
        assert found.latest == 3 and list(found) == [2, 3] == [one.version for one in found.log()]
        assert found.restore(tmp_path / "again.pm") == 3
    assert len(told) == 1 and "the past before is not shown" in str(told[0].message)


def test_a_path_that_is_taken_leaves_no_tag(tmp_path: Path) -> None:
    commits(tmp_path / "store.pm", 0, 2, tmp_path / "archive")
    found = archive.open(tmp_path / "archive")
    with pytest.raises(pmstore.StoreExistsError):
        found.fork(1, tmp_path / "store.pm")
    assert archive.open(tmp_path / "archive").tags == {}


def test_a_compacted_store_whose_spare_rows_are_other_ones(tmp_path: Path) -> None:
    """There are as many of them, and the program had written to them."""
    place = tmp_path / "archive"
    with pmstore.open(tmp_path / "store.pm") as store:
        store.create_array("rows", (0, 1000), maxshape=(None, 1000))
        store.append("rows", np.ones((1, 1000)))
        store["gone"] = np.zeros(100_000)
        store.commit()
        del store["gone"]
        store.resize("rows", 0)
        drained(store, place)
    assert pmstore.compact(tmp_path / "store.pm") > 0
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(place) as drain:
        assert drain.wait() == store.sequence


def test_a_place_that_lacks_a_part_does_not_tell(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with pmstore.open(tmp_path / "store.pm") as store:
        store.create_array("rows", (0, 400), maxshape=(None, 400))
        for _ in range(3):
            store.append("rows", np.ones((30, 400)))
            store.commit()
        drained(store, place)
    for part in (place / "parts").iterdir():
        part.unlink()
    pmstore.compact(tmp_path / "store.pm")
    with pmstore.open(tmp_path / "store.pm") as store:
        with pytest.warns(pmstore.ArchiveWarning, match="all contents are written anew"):
            drain = store.drain(place)
        store["x"] = 1
        store.commit()
        assert drain.wait() == store.sequence
    assert (archive.open(place)[archive.open(place).latest]["rows"] == 1).all()


def test_parts_of_a_version_that_another_writer_has_listed(tmp_path: Path) -> None:
    """The writer that goes on leaves its own row of it out. Its later bases refer to what that row refers to."""
    path, other = tmp_path / "store.pm", tmp_path / "other.pm"
    place = Memory()
    before = Late(place.objects)

    def step(store: pmstore.Store) -> None:
        store["x"][:] = np.arange(3000) * store.sequence
        store.commit()

    with pmstore.open(path) as store, stepping(store, before) as late:
        store["z"], store["x"] = np.random.default_rng(0).random((2, 3000))
        store.commit()
        archived(late)
        shutil.copy(path, other)
        step(store)
        late._writing.restart()  # the late flush has all contents anew
        late.capture()
        late.flush()
        with pmstore.open(other) as copy, stepping(copy, place, keep=1) as steps:
            before.late = True
            while late.write():
                pass
            steps._writing.base_after = 0
            for _ in range(4):
                step(copy)
                archived(steps)
            found = Archive(Sources([place]))
            assert found.versions() == [5] and found.verify().ok and same(found[5]["z"], copy["z"])


def test_three_places_with_two_histories(tmp_path: Path) -> None:
    """The first and the third have the same one. A damaged list of the first hides nothing that the third has whole."""
    path, other = tmp_path / "store.pm", tmp_path / "copy.pm"
    first, second, third = Memory(), Memory(), Memory()

    def step(store: pmstore.Store, by: int) -> None:
        store["x"][store.sequence * 10] += by
        store.commit()

    with pmstore.open(path) as store:
        store["x"] = np.random.default_rng(0).random(30_000)
        store.commit()
        with stepping(store, first) as one, stepping(store, second) as two, stepping(store, third) as three:
            for number in range(8):
                for steps in (one, three, two) if number < 4 else (one, three):
                    archived(steps)
                if number == 3:
                    shutil.copy(path, other)
                step(store, 1)
    with pmstore.open(other) as store, stepping(store, second) as steps:
        for _ in range(4):
            step(store, 5)
            archived(steps)
    first.objects[f"index/{first.list('index')[2]}"] = b"damaged"
    whole = Archive(Sources([third]))
    for places in ([first, second, third], [first, third, second]):
        with pytest.warns(pmstore.ArchiveWarning):
            found = Archive(Sources(places))
        assert found.versions() == whole.versions()
        for version in whole.versions():
            assert same(found[version]["x"], whole[version]["x"]), version
