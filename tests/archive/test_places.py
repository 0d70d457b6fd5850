"""Archives in several places: each has the whole history, whichever of them was lost, behind, or drained to alone."""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _begin
from pmstore.archive import _index as index
from pmstore.archive import _versions as versions
from pmstore.archive._archive import Archive
from pmstore.archive._local import LocalPlace
from pmstore.archive._objects import ObjectExistsError, place_of
from pmstore.archive._sources import Sources
from pmstore.archive._versions import Version
from tests.archive.stepping import Crash, Memory, archived, contents, same, stepping
from tests.conftest import LONGER

pytest.importorskip("numcodecs")
fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem


def goes_on(path: Path, places: Sequence[Path], states: dict[int, int]) -> None:
    """Some more versions. states: what x has in each."""
    with pmstore.open(path) as store, store.drain(places) as drain:
        for _ in range(3):
            store["x"] = np.full(3000, store.sequence)
            store.commit()
            states[store.sequence] = store.sequence - 1
            drain.wait()


def is_whole(found: Archive, states: dict[int, int]) -> None:
    assert found.verify().ok, found.verify()
    for version in found:
        assert (found[version]["x"] == states[version]).all()


def test_the_first_place_is_lost(tmp_path: Path) -> None:
    """The parts of its new life have other names than those that the second place still has."""
    near, far, states = tmp_path / "near", tmp_path / "far", dict[int, int]()
    goes_on(tmp_path / "store.pm", [near, far], states)
    shutil.rmtree(near)
    goes_on(tmp_path / "store.pm", [near, far], states)
    is_whole(archive.open(far), states)
    assert list(archive.open(far)) == list(states)
    is_whole(archive.open(near), states)


def test_places_go_on_without_each_other(tmp_path: Path) -> None:
    near, far, states = tmp_path / "near", tmp_path / "far", dict[int, int]()
    for places in ([near], [near, far], [far], [near], [near, far], [far, near]):
        goes_on(tmp_path / "store.pm", places, states)
    for places in ([near], [far]):
        is_whole(archive.open(places), states)


def test_the_first_place_is_new_and_no_commit_came(tmp_path: Path) -> None:
    """Both have the same version, and the next one goes on from either."""
    places, states = [Memory(), Memory()], {1: 1, 2: 2, 3: 3}
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"], store["y"] = np.zeros(3000), np.zeros(3000)
        for order in (places[1:], places):
            with stepping(store, *order) as steps:
                for value in {1: (1,), 2: (None, 2, 3)}[len(order)]:
                    if value is not None:
                        store["x"][:] = value
                        store.commit()
                    archived(steps)
    for place in places:
        is_whole(Archive(Sources([place])), states)
        assert list(Archive(Sources([place]))) == [1, 2, 3]


def test_each_place_has_an_index_of_its_own(tmp_path: Path) -> None:
    """A far place gets several versions in one flush: objects of the same name have other versions there."""
    places, states = [Memory(), Memory()], {}
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, *places) as steps:
        for value in range(7):
            store["x"] = np.full(3000, value)
            states[store.sequence + 1] = value
            store.commit()
            steps.capture()
            steps.flush()
            steps.write()
            if value % 3 == 2:
                steps.copy(1)
    for order in (places, places[::-1]):
        is_whole(Archive(Sources(order)), states)
        assert list(Archive(Sources(order))) == list(states)
    name = "index/000000000002-000000000002-000000"
    assert name in places[1].objects
    for damage in (lambda old: old[:-1], lambda old: None):
        near = Memory(dict(places[0].objects))
        if (bad := damage(near.objects.pop(name))) is not None:
            near.objects[name] = bad
        with pytest.warns(pmstore.ArchiveWarning, match="not listed there"):
            found = Archive(Sources([near, places[1]]))
        assert list(found) == list(states) and not found.verify().ok
        with pytest.warns(pmstore.ArchiveWarning, match="not listed there"):
            alone = Archive(Sources([near]))
        assert list(alone) == [1, 3, 4, 5, 6, 7]
        assert (alone[1]["x"] == 0).all()


def test_what_one_place_keeps_is_listed(tmp_path: Path) -> None:
    """Another one may need the version for later ones only."""
    places = [Memory(), Memory()]
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, *places) as steps:
        store["x"] = np.random.default_rng(0).random(9000)
        for value in range(3):
            store["x"][value] = 0
            store.commit()
            archived(steps)
    Archive(Sources(places[:1])).forget([1])
    for order in (places, places[::-1]):
        assert list(Archive(Sources(order))) == [1, 2, 3]
    assert list(Archive(Sources(places[:1]))) == [2, 3]


def test_a_place_that_lags_keeps_its_newest_and_tagged_versions(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with pmstore.open(tmp_path / "store.pm") as store:
        for places in ([near, far], [near]):
            with store.drain(places) as drain:
                for _ in range(3):
                    store["n"] = store.get("n", 0) + 1
                    store.commit()
                    drain.wait()
            if len(places) == 2:
                first, _, newest = archive.open(far)
                archive.open(far).tag("best", first)
    gone = archive.open([near, far]).forget(keep=2)
    assert len(archive.open(near)) == 3 and first not in gone and newest not in gone
    behind = archive.open(far)
    assert list(behind) == [first, newest] and behind.verify().ok
    assert (behind[first]["n"], behind[newest]["n"]) == (1, 3)
    behind.restore(tmp_path / "again.pm")


def test_places_of_different_stores(tmp_path: Path) -> None:
    for name in "ab":
        goes_on(tmp_path / f"{name}.pm", [tmp_path / name], {})
    with pytest.raises(pmstore.ArchiveConflictError, match="same store"):
        archive.open([tmp_path / "a", tmp_path / "b"])


class Merging(Memory):
    """A place whose writer merges while its index is listed: the list has some old objects, and not the new one."""

    def list(self, folder: str) -> list[str]:
        found = super().list(folder)
        if folder == "index" and self.after is None:
            self.after = 1
            return [*found[:1], *found[2:]]
        return found


def test_a_list_that_is_made_while_a_writer_merges(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for value in range(4):
            store["x"] = value
            store.commit()
            archived(steps)
    assert list(Archive(Sources([Merging(place.objects)]))) == [1, 2, 3, 4]


# ---- contents that are read in part


def test_a_part_of_contents_that_changed_here_and_there(tmp_path: Path) -> None:
    """A difference is decoded against all that it was made from, whatever part is asked for."""
    place, x = Memory(), np.random.default_rng(0).integers(0, 255, 66 << 20, dtype=np.uint8)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, queue_size=1 << 28) as steps:
        store["x"] = x
        store.commit()
        archived(steps)
        for at in (0, 9 << 20, -1):
            store["x"][at] += 1
            x[at] += 1
        store.commit()
        archived(steps)
    found = Archive(Sources([place]))
    assert (found[2].read("x", np.s_[:10]) == x[:10]).all() and (found[2].read("x", np.s_[-10:]) == x[-10:]).all()
    (item,) = (item for item in found[2]._core._entries.values() if item.length > 1 << 20)
    assert all(frame.runs[0][0] >> 22 == frame.runs[-1][0] >> 22 for frame, _ in item.frames), "read with few others"
    found.restore(tmp_path / "again.pm")
    with pmstore.open(tmp_path / "again.pm", "r") as store:
        assert (store["x"] == x).all()


@pytest.mark.parametrize("length", [100, 30_000, 39_999, 40_000, 40_001])
def test_contents_whose_frames_keep_to_no_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A reader whose windows have another length than those of the writer."""
    place, x = Memory(), np.random.default_rng(0).random(5000)
    states = {1: x, 2: -x, 3: np.where(np.arange(5000) % 4999, -x, 7)}
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for x in states.values():
            store["x"] = x
            store.commit()
            archived(steps)
    monkeypatch.setattr(versions, "FRAME", length)
    found = Archive(Sources([place]))
    for version in (1, 2, 3, 1, 3, 2):  # memory is used again, with other contents
        for rows in (np.s_[:], np.s_[:1], np.s_[-1:], np.s_[3700:4998]):
            assert (found[version].read("x", rows) == states[version][rows]).all()
    assert found.verify().ok and found.is_whole(3, verify=True)


def test_a_large_array_is_restored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends where a window does: a store that is larger than the memory is restored, too."""
    place, lengths, x = Memory(), [], np.random.default_rng(0).random(versions.FRAME // 4)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["x"] = x
        store.commit()
        archived(steps)
    decoded = versions.Library.decoded

    def noted(self: versions.Library, *given: Any) -> Any:
        out = decoded(self, *given)
        lengths.append(len(out))
        return out

    monkeypatch.setattr(versions.Library, "decoded", noted)
    Archive(Sources([place])).restore(tmp_path / "again.pm")
    assert max(lengths) == versions.FRAME and sum(lengths) >= 2 * versions.FRAME
    with pmstore.open(tmp_path / "again.pm", "r") as store:
        assert (store["x"] == x).all()


def test_places_of_copies_that_went_on_without_each_other_are_not_joined(tmp_path: Path) -> None:
    """A differential of one history is not put on a version of the other that has the same number."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "a.pm") as store:
        store["x"], store["y"] = np.zeros(9000), 1
        store.commit()
        store.backup(tmp_path / "b.pm")
        with stepping(store, near) as steps:
            for y in (2, 3):
                archived(steps)
                store["y"] = y
                store.commit()
            archived(steps)
        with pmstore.open(tmp_path / "b.pm") as other, stepping(other, far) as steps:
            archived(steps)
            other["x"] = np.ones(9000)
            other.commit()
            archived(steps)
        with stepping(store, near, far) as steps, pytest.raises(pmstore.ArchiveConflictError, match="another history"):
            archived(steps)
    assert (Archive(Sources([far]))[2]["x"] == 1).all() and Archive(Sources([far])).versions() == [1, 2]


def test_places_that_were_drained_to_alone_by_turns(tmp_path: Path) -> None:
    """The one that lacks versions says that it has to be the first one."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, near) as one, stepping(store, far) as other:
            for step, steps in enumerate((one, other, one, other, one)):
                store["x"] = np.full(3000, step)
                store.commit()
                archived(steps)
        with stepping(store, near, far) as steps:
            with pytest.raises(
                pmstore.ArchiveConflictError, match="lacks version 3, .* version 5: .*Name memory first"
            ):
                archived(steps)
        with stepping(store, far, near) as steps:
            for step in (5, 6):
                archived(steps)
                store["x"] = np.full(3000, step)
                store.commit()
            archived(steps)
    states = {version: version - 1 for version in range(1, 8)}
    for place, listed in ((near, [1, 3, 5, 6, 7]), (far, [2, 4, 5, 6, 7])):
        is_whole(Archive(Sources([place])), states)
        assert list(Archive(Sources([place]))) == listed


def crashed(directory: Path, seed: int, which: int, after: int, codec: Any = "zstd") -> bool:
    """Steps of a drain to two places in a random order, until one of them has had so many changes. Then each version
    that a place lists is its commit, or as far from it as it says, and the next drain goes on. Returns whether the
    changes were that many."""
    rng, states = random.Random(seed), {0: dict[str, object]()}
    places = [Memory(), Memory()]
    places[which].after = after
    ended = False
    with pmstore.open(directory / f"{which}-{after}.pm") as store:
        store["x"], store["y"] = np.arange(4000.0), np.zeros(30)
        try:
            with stepping(store, *places, keep=2, part_size=4000, codec=codec) as steps:
                steps._writing.base_after = 3
                for _ in range(24):
                    store["x"][rng.randrange(4000)] += 1
                    store["y"][:] = rng.random()
                    store.commit()
                    states[store.sequence] = contents(store)
                    steps.capture()
                    for step in rng.sample([steps.flush, steps.write, lambda: steps.copy(1)], rng.randint(0, 3)):
                        step()
                archived(steps)
        except Crash:
            ended = True
        for turn in range(2):
            for place in places:
                if "archive" in place.objects:
                    found = Archive(Sources([Memory(place.objects)]))
                    assert found.verify().ok, found.verify()
                    assert all(is_commit(found[version], states[version]) for version in found)
            if not turn:
                with stepping(store, *(Memory(place.objects) for place in places), keep=2, codec=codec) as steps:
                    archived(steps)
        for place in places:
            assert Archive(Sources([place])).latest == store.sequence
    return ended


def is_commit(version: Version, state: dict[str, object]) -> bool:
    """Whether a version is what was committed, but for the errors that it has beside its arrays (I27)."""
    found = contents(version)
    for name, loss in version.losses.items():
        value: Any = state[name]
        if not np.abs(found[name] - value).max() == loss.absolute > 0:
            return False
        found[name] = value
    return same(found, state)


@pytest.mark.longer
@pytest.mark.parametrize(("seed", "lossy"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("which", [0, 1])
def test_a_crash_at_any_change_of_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, which: int, lossy: bool
) -> None:
    monkeypatch.setattr(index, "_FAN", 2)
    after, codec = 1, {"[xy]": {"id": "pmstore.lcdelta", "rebase_every": 2}} if lossy else "zstd"
    while crashed(tmp_path, seed, which, after, codec):
        after += 1 + after // (12 if LONGER > 1 else 3)
    assert after > 20


def test_a_place_gives_nothing_up_that_the_next_one_lacks(tmp_path: Path) -> None:
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far, keep=1) as steps:
        for value in range(3):
            store["x"] = value
            store.commit()
            steps.capture()
            steps.flush()
            steps.write()
        assert Archive(Sources([near])).versions() == [1, 2, 3]
        archived(steps)
        store["x"] = 3
        store.commit()
        archived(steps)
        assert Archive(Sources([far])).versions() == [4]
        store["x"] = 4
        store.commit()
        archived(steps)
    assert 1 not in Archive(Sources([near]))


class Leaving(LocalPlace):
    """A folder that goes away right after an object of the index was made, or after some calls that read from then on.

    below: a folder that is there instead, as that on which a disk was mounted.
    """

    def __init__(self, path: Path, after: int, below: bool) -> None:
        super().__init__(str(path))
        self._path_, self._left, self._below = path, after, below
        self._counts = self.away = False

    def create(self, name: str, data: Any) -> None:
        super().create(name, data)
        self._counts = self._counts or name.startswith("index/000000000002-")
        self._leave()

    def list(self, folder: str) -> list[str]:
        found = super().list(folder)
        self._leave()
        return found

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        found = super().get(name, at, count)
        self._leave()
        return found

    def size(self, name: str) -> int:
        found = super().size(name)
        self._leave()
        return found

    def _leave(self) -> None:
        if self._counts and not self.away:
            self._left -= 1
            if self._left < 0:
                self._path_.rename(self._path_.with_name("away"))
                self.away = True
                if self._below:
                    self._path_.mkdir()

    def come_back(self) -> None:
        if self._below:
            self._path_.rmdir()
        self._path_.with_name("away").rename(self._path_)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_a_folder_that_is_away_for_a_moment(after: int, below: bool, tmp_path: Path) -> None:
    """What the drain asks there is not missing: it goes on when the folder is back."""
    place = Leaving(tmp_path / "disk", after, below)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for number in range(20):
            store["x"] = number
            store.commit()
            try:
                archived(steps)
            except pmstore.ArchiveUnavailableError as error:
                assert error.transient and "has gone, or another one" in str(error)
                assert place.away
                place.come_back()
                archived(steps)
    assert place.away
    found = archive.open(tmp_path / "disk")
    assert [found[version]["x"] for version in found.versions()] == list(range(20)) and found.verify().ok


def test_nothing_is_deleted_in_a_folder_that_is_away(tmp_path: Path) -> None:
    place = LocalPlace(str(tmp_path / "disk"))
    place.put("parts/a", [b"x"])
    (tmp_path / "disk").rename(tmp_path / "away")
    with pytest.raises(pmstore.ArchiveUnavailableError, match="has gone") as caught:
        place.delete(["parts/a"])
    assert caught.value.transient
    (tmp_path / "away").rename(tmp_path / "disk")
    place.delete(["parts/a", "parts/b"])
    assert place.list("parts") == []


def test_a_place_without_an_archive_is_told(tmp_path: Path) -> None:
    """Such as a misspelt one."""
    states = dict[int, int]()
    whole, hole = tmp_path / "whole", tmp_path / "hole"
    goes_on(tmp_path / "store.pm", [whole], states)
    for number, sources in enumerate(([whole, hole], [hole, whole])):
        with pytest.warns(pmstore.ArchiveWarning, match="hole: there is no archive: the other places") as told:
            assert archive.restore(tmp_path / f"again{number}.pm", sources=sources) == max(states)
        assert len(told) == 1
    assert not hole.exists()


def test_a_place_that_connects_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is there. A restore takes the other place."""
    states = dict[int, int]()
    goes_on(tmp_path / "store.pm", [tmp_path / "whole"], states)
    away = "ftp://127.0.0.1:9/x"
    for number, sources in enumerate(([tmp_path / "whole", away], [away, tmp_path / "whole"])):
        with pytest.warns(pmstore.ArchiveWarning, match="ftp.* the other places are asked"):
            assert archive.restore(tmp_path / f"again{number}.pm", sources=sources) == max(states)
    monkeypatch.setattr(_begin, "_PATIENCE", 0.0)
    with pmstore.open(tmp_path / "store.pm") as store, pytest.warns(pmstore.ArchiveWarning):
        with pytest.raises(pmstore.ArchiveUnavailableError, match=away):
            store.drain(away)
    with pytest.raises(pmstore.ArchiveUnavailableError, match=away):
        archive.open(away)


class Connected(MemoryFileSystem):  # type: ignore[misc]
    """A file system with a connection, which is over when its server has started again."""

    protocol = "connected"
    server = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._to = Connected.server

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("ls", "info", "exists", "cat_file", "pipe_file", "makedirs") and self._to != Connected.server:
            raise OSError("Socket is closed")
        return found


def test_a_connection_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system does not connect again, as that of sftp."""
    fsspec.register_implementation("connected", Connected, clobber=True)
    monkeypatch.setattr(_begin, "_PATIENCE", 0.0)
    monkeypatch.setattr(Connected, "store", {})
    monkeypatch.setattr(Connected, "pseudo_dirs", [""])
    with pmstore.open(tmp_path / "store.pm") as store, store.drain("connected://x/archive") as drain:
        store["x"] = 1
        store.commit()
        assert drain.wait() == 1
        opened = archive.open("connected://x/archive")
        Connected.server += 1
        store["x"] = 2
        store.commit()
        with pytest.warns(pmstore.ArchiveWarning, match="Socket is closed"):
            assert drain.wait(timeout=60) == 2
        with pytest.raises(pmstore.ArchiveUnavailableError, match="Socket is closed"):
            opened.refresh()
        opened.refresh()
        assert opened[2]["x"] == 2


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_answers_a_range_with_the_whole_object(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        for at in range(5):
            store["x"] = np.arange(at, at + 1000)
            store.commit()
            drain.wait()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        opened = archive.open(f"http://127.0.0.1:{server.server_port}/archive")
        assert opened.verify().ok and len(opened) == 5
        assert [same(opened[n]["x"], np.arange(n - 1, n + 999)) for n in opened] == [True] * 5
        opened.restore(tmp_path / "restored.pm")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pmstore.open(tmp_path / "restored.pm", "r") as restored:
        assert same(restored["x"], np.arange(4, 1004))


class Interrupted(MemoryFileSystem):  # type: ignore[misc, valid-type]
    """A file system that connects anew for each question, as that of sftp, and can't for the next one."""

    protocol = "interrupted"
    exists = fsspec.AbstractFileSystem.exists
    away = False

    def info(self, path: str, **options: Any) -> Any:
        if Interrupted.away:
            Interrupted.away = False
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return super().info(path, **options)


def test_nothing_is_replaced_while_the_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("interrupted", Interrupted, clobber=True)
    monkeypatch.setattr(Interrupted, "store", {})
    monkeypatch.setattr(Interrupted, "pseudo_dirs", [""])
    place = place_of("interrupted://x/archive")
    place.create("index/1", [b"first"])
    Interrupted.away = True
    with pytest.raises(pmstore.ArchiveUnavailableError, match="Connection reset by peer"):
        place.create("index/1", [b"second"])
    with pytest.raises(ObjectExistsError):
        place.create("index/1", [b"second"])
    assert place.get("index/1") == b"first"


@pytest.mark.parametrize("password", ["p", "parts"])
def test_a_password_is_not_told_by_what_a_message_hides(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *given: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, f"u:{password}@x refused to open it at 5 pm")

    fsspec.register_implementation("interrupted", Interrupted, clobber=True)
    place = place_of(f"interrupted://u:{password}@x/parts/p")
    monkeypatch.setattr(Interrupted, "cat_file", staticmethod(refuse))
    with pytest.raises(pmstore.ArchiveUnavailableError) as caught:
        place.get("parts/1")
    assert str(caught.value.strerror) == (
        "interrupted://x/parts/p: 'parts/1' can't be read: ***@x refused to open it at 5 pm"
    )


@pytest.mark.parametrize("url", ["reference://x", "nothing://x"])
def test_a_url_that_fsspec_does_not_take(url: str) -> None:
    with pytest.raises(ValueError, match=url):
        archive.open(url)
