"""Objects of an archive that were lost or damaged: later versions are whole, and nothing is mixed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _local
from pmstore.archive._archive import Archive
from pmstore.archive._format import SEGMENT, opened, wrapped
from pmstore.archive._objects import LocalPlace, Place, place_of
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, Unreadable, archived, flip, stepping

pytest.importorskip("numcodecs")


def largest(place: Path) -> Path:
    """The largest part."""
    return max((place / "parts").iterdir(), key=lambda one: one.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def drained(path: Path, places: list[Path], name: str, value: object) -> int:
    """A commit, which is archived. Returns the version."""
    with pmstore.open(path) as store, store.drain(places) as drain:
        store[name] = value
        store.commit()
        return drain.wait()


def three(path: Path, versions: int = 3) -> Memory:
    """A place with three versions of a new store, or so many, whose step is 0, 1 and 2."""
    place = Memory()
    with pmstore.open(path) as store, stepping(store, place) as steps:
        for step in range(versions):
            store["step"] = step
            store.commit()
            archived(steps)
    return place


DAMAGED = pytest.mark.parametrize("damage", [Path.unlink, cut])


@DAMAGED
def test_a_base_does_not_refer_to_a_part_that_is_lost_or_cut(damage: Callable[[Path], None], tmp_path: Path) -> None:
    data = os.urandom(50_000)
    with pmstore.open(tmp_path / "store.pm") as store:
        for step in range(3):
            with store.drain(tmp_path / "to") as drain:
                store["data" if step == 0 else "step"] = data if step == 0 else step
                store.commit()
                drain.wait()
        damage(largest(tmp_path / "to"))
        with pytest.warns(pmstore.ArchiveWarning, match="parts of version 3 are lost or cut; contents are written"):
            drain = store.drain(tmp_path / "to")
        store["step"] = 10
        store.commit()
        assert drain.wait() == 4
        drain.close()
    assert archive.open(tmp_path / "to")[4]["data"] == data
    assert archive.open(tmp_path / "to").restore(tmp_path / "again.pm") == 4


@DAMAGED
def test_a_part_that_another_place_has_lost_is_copied_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    data = os.urandom(50_000)
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(places) as drain:
            store["data"] = data
            store.commit()
            drain.wait()
            store["step"] = 0
            store.commit()
            drain.wait()
        others = {one: one.stat().st_ino for one in (places[1] / "parts").iterdir() if one != largest(places[1])}
        damage(largest(places[1]))
        with store.drain(places) as drain:
            store["step"] = 1
            store.commit()
            drain.wait()
    assert archive.open(places[1])[3]["data"] == data
    assert others and all(one.stat().st_ino == number for one, number in others.items()), (
        "a whole part was written again"
    )


def test_a_place_without_its_description_is_no_new_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with pmstore.open(tmp_path / f"{name}.pm") as store:
            for i in range(3 if name == "one" else 6):
                store[name] = i
                store.commit()
            if name == "one":
                with store.drain(tmp_path / "to") as drain:
                    drain.wait()
                description = (tmp_path / "to" / "archive").read_bytes()
                (tmp_path / "to" / "archive").unlink()
            else:
                with pytest.raises(pmstore.ArchiveDamagedError, match="'archive', which tells whose .* is missing"):
                    store.drain(tmp_path / "to")
    with pytest.raises(pmstore.ArchiveDamagedError, match="'archive', which tells whose .* is missing"):
        archive.open(tmp_path / "to")
    (tmp_path / "to" / "archive").write_bytes(description)
    assert archive.open(tmp_path / "to")[3]["one"] == 2


@pytest.mark.parametrize("name", ["tags/best", "archive", "index/000000000001-000000000001-000000"])
def test_an_object_that_is_larger_than_memory(name: str, tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        store["x"] = 1
        store.commit()
        drain.wait()
        archive.open(places).tag("best")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    os.truncate(places[0] / name, 10**13)  # no byte of the disk
    with pytest.warns(pmstore.ArchiveWarning):
        found = archive.open(places)
        assert found.versions() == [1] and found.tags == {"best": 1} and found[1]["x"] == 1


def test_a_tag_is_made_where_its_version_is(tmp_path: Path) -> None:
    """A further place removes versions before the first one. Only the first protects the version then."""
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(places) as drain:
            for i in range(4):
                store["x"] = i
                store.commit()
                drain.wait()
        archive.open(places[1]).forget([1, 2])
        archive.open(places).tag("best", 1)
        assert archive.open(places[0]).tags == {"best": 1} and archive.open(places[1]).tags == {}
        with store.drain(places) as drain:
            store["x"] = 5
            store.commit()
            drain.wait()
    assert archive.open(places[1]).tags == {}


def test_contents_that_never_change_are_read_back_once(tmp_path: Path) -> None:
    """A base refers to them. If they are damaged, every later version would be, too."""
    path, place, data = tmp_path / "store.pm", tmp_path / "to", os.urandom(50_000)
    drained(path, [place], "data", data)
    part = largest(place)
    flip(part, 100)
    with pytest.warns(pmstore.ArchiveWarning, match=f"{part.name} is damaged at byte 0.*written anew") as told:
        assert drained(path, [place], "step", 1) == 2
    assert len(told) == 1
    assert drained(path, [place], "step", 2) == 3  # and without a warning
    found = archive.open(place)
    assert found[2]["data"] == found[3]["data"] == data
    with pytest.raises(pmstore.ArchiveDamagedError):
        found[1]["data"]
    assert [one.versions for one in found.verify()] == [(1,)]


def test_a_new_place_gets_no_damage(tmp_path: Path) -> None:
    """It begins with the first version that is whole and needs no other."""
    path, near, new, data = tmp_path / "store.pm", tmp_path / "near", tmp_path / "new", os.urandom(50_000)
    drained(path, [near], "data", data)
    drained(path, [near], "step", 1)
    flip(largest(near), 100)
    with pytest.warns(pmstore.ArchiveWarning, match=r"new can't have versions 1 to 2: .*near: parts/.* is damaged"):
        with pmstore.open(path) as store, store.drain([near, new]) as drain:
            with pytest.raises(pmstore.ArchiveDamagedError, match="is damaged at byte 0. The next base, or"):
                drain.wait()
            for step in range(3):
                store["step"] = step
                store.commit()
                assert drain.wait() == 3 + step
    found = archive.open(new)
    assert found.verify().ok and found.versions() == [3, 4, 5]
    assert all(found[version]["data"] == data for version in found)


def test_a_cut_part_is_replaced_by_the_same_bytes_only(tmp_path: Path) -> None:
    """Each of two places has what the other one lacks. No drain may take the last copy away."""
    path, places, data = tmp_path / "store.pm", [tmp_path / "near", tmp_path / "far"], os.urandom(2_000_000)
    drained(path, places, "data", data)
    part = largest(places[0])
    flip(part, 100)
    os.truncate(largest(places[1]), part.stat().st_size - 10)
    with pytest.warns(pmstore.ArchiveWarning):
        assert archive.open(places)[1]["data"] == data
        drained(path, places, "step", 1)
        assert archive.open(places)[1]["data"] == data
        found = archive.open(places)
        assert found[found.latest]["data"] == data


@pytest.mark.parametrize("folder", [False, True])
def test_a_list_that_lost_its_end(folder: bool, tmp_path: Path) -> None:
    """The token of a drain that was closed tells where the list ends. The parts stay: the list may come back."""
    path, place = tmp_path / "store.pm", tmp_path / "to"
    for step in range(3):
        drained(path, [place], "step", step)
    names = sorted((place / "index").iterdir())
    if folder:
        (place / "index").rename(tmp_path / "kept")
    else:
        names[-1].rename(tmp_path / "kept")
    report = archive.open(place).verify()
    assert not report.ok and "objects of the index are missing" in str(report)
    with pytest.raises(pmstore.ArchiveDamagedError, match="objects of the index are missing .* flush 3 was there"):
        drained(path, [place], "step", 3)
    (tmp_path / "kept").rename(place / "index" if folder else names[-1])
    assert drained(path, [place], "step", 4) == 4
    assert [archive.open(place)[version]["step"] for version in (1, 2, 3, 4)] == [0, 1, 2, 4]


def test_the_name_of_the_next_object_is_taken(tmp_path: Path) -> None:
    path, place = tmp_path / "store.pm", tmp_path / "to"
    drained(path, [place], "step", 0)
    (place / "index" / "000000000002-000000000002-000000").mkdir()
    text = "/to has something under the name of the next index object"
    with pytest.warns(pmstore.ArchiveWarning), pytest.raises(pmstore.ArchiveDamagedError, match=text):
        drained(path, [place], "step", 1)
    shutil.rmtree(place / "index" / "000000000002-000000000002-000000")
    assert drained(path, [place], "step", 2) == 3


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_a_folder_that_can_not_be_made() -> None:
    with pytest.raises(pmstore.ArchiveUnavailableError, match="/proc/pmstore: .*No such file or directory"):
        place_of("/proc/pmstore").create("archive", [b"x"])


def test_without_any_temporary_folder(tmp_path: Path) -> None:
    """A full disk has none. Versions can still be listed, restored and removed."""
    for step in range(2):
        drained(tmp_path / "store.pm", [tmp_path / "to"], "step", step)
    script = """
import sys, tempfile
tempfile._candidate_tempdir_list = list
from pmstore import archive
found = archive.open(sys.argv[1])
found.forget([1])
print(found.versions(), found.restore(sys.argv[2]))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "to"), str(tmp_path / "again.pm")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[2] 2\n", done.stderr


def test_a_tag_that_is_damaged_in_one_place(tmp_path: Path) -> None:
    path, places = tmp_path / "store.pm", [tmp_path / "near", tmp_path / "far"]
    for step in range(3):
        drained(path, places, "step", step)
    archive.open(places).tag("best", 1)
    flip(places[0] / "tags" / "best", 10)
    with pytest.warns(pmstore.ArchiveWarning):
        found = archive.open(places)
        with pytest.raises(pmstore.ArchiveDamagedError, match="near: the tag 'best' is damaged.* untag"):
            found.forget([2])
        found.untag("best")
        found.forget([2])
    assert found.versions() == [1, 3]
    assert True not in found and 1 in found


def test_a_row_that_is_lost_is_not_taken_from_another_history(tmp_path: Path) -> None:
    path, places = tmp_path / "store.pm", [tmp_path / "near", tmp_path / "far"]
    drained(path, places, "pad", os.urandom(100_000))
    drained(path, places, "owner", "both")
    shutil.copy(path, tmp_path / "copy.pm")
    for step in range(6):
        drained(path, [places[0]], "owner" if step == 0 else f"step {step}", "near")
    for step in range(3):
        drained(tmp_path / "copy.pm", [places[1]], "owner" if step == 0 else f"step {step}", "far")
    alone = {version: dict(one) for place in places for version, one in archive.open(place).items()}
    sorted((places[0] / "index").iterdir())[4].unlink()  # of version 5, which the later ones need
    with pytest.warns(pmstore.ArchiveWarning, match="these places have other contents of version 3"):
        found = archive.open(places)
    for version in found:
        assert len({found[version][name] for name in found[version] if name != "pad"}) <= 1, version
    assert found.latest in alone


def test_a_row_that_needs_itself(tmp_path: Path) -> None:
    """A hostile one does not hide that of another place."""
    one = three(tmp_path / "store.pm")
    name = "index/000000000002-000000000002-000000"
    (row,) = opened(SEGMENT, name, one.objects[name])
    for previous in (2, 3, 10**18, "text", ()):
        other = Memory(dict(one.objects))
        other.put(name, wrapped(SEGMENT, name, [(*row[:2], previous, *row[3:7], row[7] ^ 1, *row[8:])]))
        with pytest.warns(pmstore.ArchiveWarning, match="other contents of version 2"):
            assert Archive(Sources([other, one])).latest == 3
        other.put(name, wrapped(SEGMENT, name, [(*row[:2], previous, *row[3:])]))
        found = Archive(Sources([other, one]))
        assert found.versions() == [1, 2, 3]
        for version in (2, 3):
            assert list(found[version]), "as the other place has it"
            with pytest.raises(pmstore.ArchiveDamagedError):
                Archive(Sources([other]))[version]


def test_a_token_of_another_drain_stays(tmp_path: Path) -> None:
    """The place was emptied, and another drain has begun there. Its token has the same number."""
    place = tmp_path / "to"
    with pmstore.open(tmp_path / "store.pm") as store:
        first = store.drain(place)
        for step in range(5):
            store["step"] = step
            store.commit()
            first.wait()
        shutil.rmtree(place)
        place.mkdir()
        with store.drain(place) as second:
            second.wait()
        first.close()
        assert archive.open(place).verify().ok
        with store.drain(place) as third:
            store["step"] = 5
            store.commit()
            assert third.wait() == 6


def test_a_damaged_token(tmp_path: Path) -> None:
    """It is ours and the newest: the drain that merges its list writes it anew. Until then `verify` tells."""
    place = tmp_path / "to"
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(place) as drain:
        for step in range(40):
            store["step"] = step
            store.commit()
            assert drain.wait() == step + 1
            if step == 20:
                flip(place / "writers" / "000001", -3)
                found = archive.open(place).verify()
                assert len(found) == 1 and found.versions == 21
                assert "their hash" in str(found) and "versions" not in str(found)
        assert archive.open(place).verify().ok


def test_a_token_that_a_disk_can_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "to"
    assert drained(tmp_path / "store.pm", [place], "step", 0) == 1
    monkeypatch.setattr(_local, "os", Unreadable(str(place / "writers" / "000001"), 0))
    found = archive.open(place).verify()
    assert found.versions == 1 and str(found) == f"{place}: 'writers/000001' can't be read: {os.strerror(errno.EIO)}"
    assert drained(tmp_path / "store.pm", [place], "step", 1) == 2
    assert archive.open(place).verify().ok, "it has a new token"


def test_a_foreign_file_beside_the_tokens(tmp_path: Path) -> None:
    """Other programs leave files in folders, as Windows does."""
    place = tmp_path / "to"
    assert drained(tmp_path / "store.pm", [place], "step", 0) == 1
    for name in ("Thumbs.db", "-1", "²"):
        (place / "writers" / name).touch()
    assert drained(tmp_path / "store.pm", [place], "step", 1) == 2
    assert archive.open(place).verify().ok and (place / "writers" / "Thumbs.db").exists()
    archive.open(place).forget([1])
    assert archive.open(place).verify().versions == 1


class Silent(Memory):
    """A place that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.url = "silent"
        self.asked = 0
        self.back: Memory | None = None

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        return self._other().get(name, at, count)

    def list(self, folder: str) -> list[str]:
        return self._other().list(folder)

    def _other(self) -> Memory:
        self.asked += 1
        if self.back is None:
            raise pmstore.ArchiveUnavailableError("silent can't be reached")
        return self.back


@pytest.mark.parametrize("first", [False, True])
def test_a_place_that_does_not_answer(first: bool, tmp_path: Path) -> None:
    place = three(tmp_path / "store.pm")
    Archive(Sources([place])).tag("best", 2)
    places: list[Place] = [Silent(), place] if first else [place, Silent()]
    with pytest.warns(pmstore.ArchiveWarning, match="silent can't be reached: the other places are asked") as told:
        found = Archive(Sources(places))
        assert found.refresh() == 3 and found.tags == {"best": 2} and found[2]["step"] == 1
    assert {one.message.args[0].partition(":")[0] for one in told} == {"silent"}
    with pytest.raises(pmstore.ArchiveUnavailableError, match="silent can't be reached"):
        Archive(Sources([Silent(), Silent()]))


def test_a_place_that_does_not_answer_may_have_what_is_damaged_elsewhere(tmp_path: Path) -> None:
    place, silent = three(tmp_path / "store.pm"), Silent()
    silent.back = Memory(dict(place.objects))
    found = Archive(Sources([silent, place]))
    silent.back = None
    for part in place.parts:
        place.damage(part, 0, 40)
    with pytest.warns(pmstore.ArchiveWarning), pytest.raises(pmstore.ArchiveUnavailableError, match="silent"):
        found.restore(tmp_path / "restored.pm")
    assert not (tmp_path / "restored.pm").exists()


def test_a_place_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """Each question may take minutes. When the index is read again, it is asked anew."""
    place, silent = three(tmp_path / "store.pm"), Silent()
    with pytest.warns(pmstore.ArchiveWarning, match="silent can't be reached"):
        found = Archive(Sources([silent, place]))
        asked = silent.asked
        assert [found[version]["step"] for version in found] == [0, 1, 2] and found.tags == {}
        assert silent.asked == asked
        found.refresh()
        assert silent.asked == asked + 1
    silent.back, place.objects = Memory(dict(place.objects)), {}
    assert found.refresh() == 3 and [found[version]["step"] for version in found] == [0, 1, 2]


def test_an_archive_that_is_gone_or_another_one(tmp_path: Path) -> None:
    """Its versions are still shown, as they were."""
    place = three(tmp_path / "store.pm")
    found = Archive(Sources([place]))
    others, place.objects = place.objects, {}
    for call in (found.refresh, found.forget, lambda: found.restore(tmp_path / "a.pm"), lambda: found.tag("best")):
        with pytest.raises(pmstore.ArchiveError, match="there is no archive at .* any more: it was deleted"):
            call()
    place.objects = three(tmp_path / "other.pm").objects
    for call in (found.refresh, lambda: found.restore(tmp_path / "a.pm", 2), lambda: found.forget([1])):
        with pytest.raises(pmstore.ArchiveConflictError, match="has the archive of another store by now: open it anew"):
            call()
    both = Archive(Sources([Memory(dict(others)), further := Memory(dict(others))]))
    further.objects = place.objects
    with pytest.raises(pmstore.ArchiveConflictError, match="has the archive of another store by now: open it anew"):
        both.refresh()
    assert both[3]["step"] == 2
    place.objects = others
    assert found.refresh() == 3 and list(found) == [1, 2, 3] and found.restore(tmp_path / "a.pm") == 3


@pytest.mark.parametrize("order", [1, -1])
def test_a_restore_asks_a_slow_place_that_does_not_answer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    places = [tmp_path / "away", tmp_path / "near"][::order]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        store["x"] = 1
        store.commit()
        drain.wait()
    asked: list[str] = []

    def away(self: LocalPlace, name: str) -> str:
        if self.url.endswith("away"):
            asked.append(name)
            raise pmstore.ArchiveUnavailableError(errno.ENOTCONN, "away")
        return path(self, name)

    path = LocalPlace._path
    monkeypatch.setattr(Sources, "SLOW", 0.0)
    monkeypatch.setattr(LocalPlace, "_path", away)
    with pytest.warns(pmstore.ArchiveWarning, match="away"):
        assert pmstore.archive.restore(tmp_path / "restored.pm", sources=places) == 1
    assert len(asked) == 1
    with pytest.warns(pmstore.ArchiveWarning, match="away"):
        found = pmstore.archive.open(places)
        found.refresh()
    assert len(asked) == 3 and found[1]["x"] == 1
    monkeypatch.undo()
    found.refresh()
    assert not found._sources._away


class Failing(Memory):
    """Some of its calls fail, the first ones of these names."""

    def __init__(self, objects: dict[str, bytes], failures: int, names: str = "") -> None:
        super().__init__(objects)
        self.failures, self.names = failures, names

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        if self.failures and name.startswith(self.names):
            self.failures -= 1
            raise pmstore.ArchiveUnavailableError(errno.ENOTCONN, f"{self.url} was away")
        return super().get(name, at, count)


def test_a_place_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    """It may have newer versions."""
    objects = three(tmp_path / "store.pm").objects
    newest = max(name for name in objects if name.startswith("index/"))
    other = Memory({name: one for name, one in objects.items() if name != newest})
    with pytest.warns(pmstore.ArchiveWarning, match="away"):
        assert Archive(Sources([Failing(objects, 1), other])).latest == 3


@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_the_error_of_the_first_place_if_none_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    """The second one answers once."""
    monkeypatch.setattr(Sources, "SLOW", slow)
    objects = three(tmp_path / "store.pm").objects
    places = [Failing(objects, 99), Failing(objects, 99, "index/")]
    places[0].url = "first"
    with pytest.warns(pmstore.ArchiveWarning), pytest.raises(pmstore.ArchiveUnavailableError, match="first was away"):
        Archive(Sources(places))


@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_taken_from_a_place_that_does_not_say_whose_it_is(tmp_path: Path, order: int) -> None:
    objects = three(tmp_path / "store.pm").objects
    other = Failing(three(tmp_path / "other.pm", 5).objects, 99, "archive")
    with pytest.warns(pmstore.ArchiveWarning, match="away"):
        found = Archive(Sources([Memory(objects), other][::order]))
        assert found.latest == 3 and found.refresh() == 3
    other.failures = 0
    with pytest.raises(pmstore.ArchiveConflictError):
        found.refresh()


def test_a_drain_names_the_place_of_a_damaged_index(tmp_path: Path) -> None:
    places = [tmp_path / "sound", tmp_path / "damaged"]
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(places) as drain:
            store["x"] = 1
            store.commit()
            drain.wait()
        for one in (places[1] / "index").iterdir():
            one.write_bytes(b"")
        with pytest.raises(pmstore.ArchiveDamagedError, match=r"/damaged: index/.*copy it from another place"):
            store.drain(places)
