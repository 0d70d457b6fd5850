"""A version of each commit, however quickly commits come; when bases are written; and how little is read for one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore._core import Core
from pmstore.archive._archive import Archive
from pmstore.archive._local import LocalPlace
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, archived, stepping

pytest.importorskip("numcodecs")


def test_a_version_of_each_commit(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        x = store.create_array("x", 20_000)
        for step in range(60):
            x += 1
            store["step"] = step
            store.commit()
            assert drain.capture() == store.sequence == drain.progress().captured
        assert drain.wait() == store.sequence == 60
        assert drain.capture() == 60  # there is no newer commit
    found = archive.open(tmp_path / "archive")
    assert list(found) == list(range(1, 61)) and found.verify().ok
    for version in found:
        assert (found[version]["x"] == version).all() and found[version]["step"] == version - 1


def test_versions_that_wait_for_a_slow_place_share_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    put = LocalPlace.put

    def slow(self: LocalPlace, name: str, data: Sequence[Any]) -> None:
        begun.set()
        assert go.wait(60)
        put(self, name, data)

    monkeypatch.setattr(LocalPlace, "put", slow)
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        for step in range(40):
            store["x"] = np.full(1000, step)
            store.commit()
            drain.capture()
            if not step:  # the first version is on its way
                waiting = threading.Thread(target=drain.wait)
                waiting.start()
                assert begun.wait(60)
        go.set()
        drain.wait()
        waiting.join()
    found = archive.open(tmp_path / "archive")
    assert len(found) == 40 and found.verify().ok
    assert len(list((tmp_path / "archive" / "parts").iterdir())) <= 3


def test_a_capture_that_does_not_come(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "archive")
        drain.close()
        store["x"] = 1
        store.commit()
        with pytest.raises(pmstore.ArchiveUnavailableError, match="the drain is closed"):
            drain.capture()
        with store.drain(tmp_path / "archive") as drain, drain._capturing:
            store["x"] = 2
            store.commit()
            with pytest.raises(pmstore.ArchiveUnavailableError, match="not enough time .* commit 2"):
                drain.capture(timeout=0)


def kinds(found: Archive) -> str:
    return "".join(one.kind[0] for one in found.log())


def test_bases_where_differentials_save_little(tmp_path: Path) -> None:
    """A differential in between tries whether that has changed."""
    place, rng = Memory(), np.random.default_rng(0)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        x, constant = store.create_array("x", 5000), rng.random(50_000)
        store["constant"] = constant
        for _ in range(12):
            x[:] = rng.random(5000)
            store.commit()
            archived(steps)
        for _ in range(12):
            x[:100] += 1
            store.commit()
            archived(steps)
        found = Archive(Sources([place]))
        assert kinds(found) == "bddbdbbdbbbb" + 12 * "d"
        assert sum(one.size for one in found.log()[1:12]) < 12 * 5000 * 8  # the constant array is written once
        assert (found[24]["x"] == x).all() and (found[3]["constant"] == constant).all()


def test_no_bases_where_arrays_change_in_turn(tmp_path: Path) -> None:
    """A base would write both."""
    place, rng = Memory(), np.random.default_rng(0)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for name in "xy":
            store[name] = rng.random(5000)
        arrays = [store["x"], store["y"]]
        for step in range(7):
            arrays[step % 2][:] = rng.random(5000)
            store.commit()
            archived(steps)
    found = Archive(Sources([place]))
    assert kinds(found) == "bdddddd" and sum(one.size for one in found.log()) < 8.2 * 5000 * 8


def test_small_differentials_stay(tmp_path: Path) -> None:
    """Also where they have the bytes of a base."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for step in range(10):
            store["x"] = step
            store.commit()
            archived(steps)
    assert kinds(Archive(Sources([place]))) == "b" + 9 * "d"


class Counted(Memory):
    reads = 0

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        self.reads += name.startswith("parts/")
        return super().get(name, at, count)


def test_one_read_for_a_small_version(tmp_path: Path) -> None:
    """The contents are read with the directory behind them, and versions before are not read again."""
    place = Counted()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        x = store.create_array("x", 5000)
        for step in range(1, 9):
            x[step] = step
            store.commit()
            archived(steps)
    found = Archive(Sources([place]))
    assert kinds(found) == "bddddddd"
    place.reads = 0
    for version in found:
        assert found[version]["x"].sum() == version * (version + 1) / 2
        assert place.reads == version
    assert found[8]["x"][8] == 8 and place.reads == 8
    found = Archive(Sources([place]))
    place.reads = 0
    assert found[8]["x"][8] == 8 and place.reads == 8  # one for each version that it needs


def test_what_was_read_ahead_is_checked(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["x"], store["y"] = np.random.default_rng(0).random((2, 2000))
        store.commit()
        archived(steps)
        x = store["x"].copy()
    (name,) = (name for name in place.objects if name.startswith("parts/"))
    whole = place.objects[name]
    item = Archive(Sources([place]))[1]._core._entries[b"ny"]
    at = item.frames[0][0].piece.at
    place.objects[name] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    found = Archive(Sources([place]))
    assert (found[1]["x"] == x).all()
    with pytest.raises(pmstore.ArchiveDamagedError, match=f"damaged at byte {at}"):
        found[1]["y"]
    place.objects[name] = whole  # another place would be asked, too
    assert len(found[1]["y"]) == 2000


def test_small_contents_that_did_not_change_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, Memory()) as steps:
        for number in range(100):
            store[f"x{number}"] = np.full(3, number)
        store.commit()
        archived(steps)
        contents, read = Core.contents, list[int]()

        def noted(core: Core, offset: int, length: int) -> Any:
            read.append(offset)
            return contents(core, offset, length)

        monkeypatch.setattr(Core, "contents", noted)
        store["x7"][1] = -1
        store.commit()
        archived(steps)
        assert 1 <= len(read) < 10
        found = Archive(Sources([steps.targets[0].place]))
        assert found[2]["x7"].tolist() == [7, -1, 7] and found[2]["x8"].tolist() == [8, 8, 8]
