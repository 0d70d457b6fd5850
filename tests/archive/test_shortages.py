"""What passes does not end a drain: places that refuse deletions, and a process that lacks memory or descriptors."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _capture, _codecs, _drain, _steps
from pmstore.archive._archive import Archive
from pmstore.archive._copying import Copying
from pmstore.archive._index import Index, IndexWriter
from pmstore.archive._objects import Place, Retrying
from pmstore.archive._place import unavailable
from pmstore.archive._sources import Sources
from pmstore.archive._steps import Steps
from pmstore.archive._target import Target
from pmstore.archive._writing import Writing
from tests.archive.stepping import Memory, archived, same, stepping

pytest.importorskip("numcodecs")

from pmstore.codecs import _passes, _planes


class Undeleting(Memory):
    """A place that deletes nothing. transient: it may do so later."""

    refuses = True

    def __init__(self, transient: bool) -> None:
        super().__init__()
        self._transient = transient

    def delete(self, names: Iterable[str]) -> None:
        if self.refuses and set(names):
            raise unavailable(self.url, "", "deleted from", OSError(errno.EIO, "no"), transient=self._transient)
        super().delete(names)


def patient(place: Place) -> Retrying:
    def waited(seconds: float) -> bool:
        pytest.fail("a drain waits for a deletion")

    return Retrying(place, threading.Event(), lambda error: None, wait=waited)


@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("transient", [False, True])
def test_a_place_that_refuses_deletions(tmp_path: Path, transient: bool, keep: int | None) -> None:
    """Buckets for backups do so. Drains begin and write there, and parts that nothing needs go when they can."""
    place, told = Undeleting(transient), []
    with pmstore.open(tmp_path / "store.pm") as store:
        store.create_array("x", (3000,))

        def some(steps: Steps) -> None:
            steps.attach(lambda: None, told.append)
            steps._writing.base_after = 4
            for _ in range(40):
                store["x"][:100] += 1
                store.commit()
                archived(steps)

        for _ in range(3):
            with stepping(store, patient(place), keep=keep) as steps:
                some(steps)
        found = Archive(Sources([place]))
        assert found.latest == 120 and found[120]["x"][0] == 120 and found.verify().ok
        assert len(found) == 120 if keep is None else len(found) <= 4
        assert len(told) == (0 if keep is None else 3), "each drain tells once that parts stay"
        assert len(place.list("writers")) == 3 and len(place.list("index")) > 120
        place.refuses = False
        with stepping(store, patient(place), keep=keep) as steps:
            some(steps)
        index = Index.read(place)
        assert len(place.list("writers")) == 1
        assert {f"parts/{name}" for name in place.list("parts")} == {p for row in index.rows() for p in row.parts}
    assert Archive(Sources([place]))[160]["x"][0] == 160


def test_parts_that_a_place_could_not_delete_go_with_the_next_versions(tmp_path: Path) -> None:
    place = Undeleting(True)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, patient(place), keep=1) as steps:
        steps._writing.base_after = 0
        for step in range(8):
            place.refuses = step < 6
            store["x"] = np.full(3000, step)
            store.commit()
            archived(steps)
    assert len(place.list("parts")) == 1 and Archive(Sources([place])).versions() == [8]


def some(store: pmstore.Store, steps: Steps, count: int) -> None:
    """Archive so many versions."""
    for _ in range(count):
        store["x"] = np.full(3000, store.sequence)
        store.commit()
        archived(steps)


def test_a_tag_that_a_further_place_can_not_take_away_yet(tmp_path: Path) -> None:
    """The tag is another version's by now, which stays there although it has no tag."""
    near, far = Memory(), Undeleting(True)
    far.refuses = False
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, patient(far), keep=3) as steps:
        steps._writing.base_after = 0

        some(store, steps, 2)
        Archive(Sources([near])).tag("best", 2)
        some(store, steps, 2)
        Archive(Sources([near])).untag("best")
        Archive(Sources([near])).tag("best", 4)
        far.refuses = True
        some(store, steps, 6)
        far.refuses = False
        some(store, steps, 3)
    found = Archive(Sources([far]))
    assert found.tags == {"best": 4} and found[4]["x"][0] == 3 and 2 not in found


def test_a_further_place_that_keeps_a_tag_for_good(tmp_path: Path) -> None:
    """Its other versions go as before, and the one that is tagged now stays."""
    near, far, told = Memory(), Undeleting(False), []
    far.refuses = False
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, patient(far), keep=3) as steps:
        steps._writing.base_after = 0
        steps.attach(lambda: None, told.append)

        some(store, steps, 2)
        Archive(Sources([near])).tag("best", 2)
        some(store, steps, 2)
        far.refuses = True
        Archive(Sources([near])).untag("best")
        some(store, steps, 20)
        Archive(Sources([near])).tag("best", 23)
        some(store, steps, 20)
    found = Archive(Sources([far]))
    assert found.versions() == [2, 23, 42, 43, 44] and found[23]["x"][0] == 22
    assert len(told) == 1 and "versions stay that could go" in told[0]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_drain, "_PAUSE", 0.01)


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    "error",
    [
        pmstore.StoreIOError(errno.EMFILE, "no descriptors"),
        pmstore.OutOfSpaceError("no space"),
        pmstore.OutOfMemoryError("no memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_process_that_lacks_something_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, every: int
) -> None:
    failures = iter([error] * 3)

    def capture(*arguments: Any) -> Any:
        for one in failures:
            raise one
        return _capture.capture(*arguments)

    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        store.commit()
        monkeypatch.setattr(_steps, "capture", capture)
        with pytest.warns(pmstore.ArchiveWarning, match="the drain tries again") as told:
            drain = store.drain(tmp_path / "to", every=every)
            assert drain.wait() == 1
        assert len(told) == 1 and drain.progress().error is None
        store["x"] = 2
        store.commit()
        drain.close()
    assert archive.open(tmp_path / "to")[2]["x"] == 2


@pytest.mark.filterwarnings("ignore::pmstore.ArchiveWarning")
def test_a_process_that_lacks_memory_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` raises that, the drain goes on, and closing it tells what is missing."""
    short = True

    def capture(*arguments: Any) -> Any:
        if short:
            raise pmstore.OutOfMemoryError("no memory for it")
        return _capture.capture(*arguments)

    monkeypatch.setattr(_steps, "capture", capture)
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        store.commit()
        drain = store.drain(tmp_path / "to")
        with pytest.raises(pmstore.ArchiveUnavailableError, match="has none: no memory for it"):
            drain.wait(timeout=0.5)
        monkeypatch.setattr(_drain, "_PATIENCE", 0)
        for call in (drain.wait, drain.capture):
            with pytest.raises(pmstore.OutOfMemoryError, match="no memory for it"):
                call()
        assert drain.progress().error == "no memory for it" and not drain.progress().ended
        short = False
        monkeypatch.undo()
        assert drain.wait() == 1
        short = True
        monkeypatch.setattr(_steps, "capture", capture)
        store["x"] = 2
        store.commit()
        with pytest.warns(pmstore.ArchiveWarning, match="the drain ended, and .* has version 1"):
            drain.close(timeout=0)


@pytest.mark.filterwarnings("ignore::pmstore.ArchiveWarning")
def test_nobody_waits_where_a_capture_lacked_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again although fewer than `every` commits came, and `wait` does not raise what is over."""
    failures, done = [MemoryError()], threading.Event()

    def capture(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        done.set()
        return _capture.capture(*arguments)

    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(tmp_path / "to", every=100) as drain:
            store["x"] = 1
            store.commit()
            assert drain.wait() == 1
            monkeypatch.setattr(_steps, "capture", capture)
            store["x"] = 2
            store.commit()
            with contextlib.suppress(pmstore.ArchiveUnavailableError):
                drain.wait(timeout=0.3)
            assert done.wait(60)
            assert drain.wait() == 2
            monkeypatch.setattr(_drain, "_PATIENCE", 0)
            assert drain.wait() == 2


def test_writing_that_lacked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place and the further one get the versions later."""
    failures = {1: 2, 2: 2}
    real = {1: Steps.write, 2: Steps.copy}

    def failing(number: int) -> Any:
        def call(*arguments: Any) -> Any:
            if failures[number]:
                failures[number] -= 1
                raise MemoryError
            return real[number](*arguments)

        return call

    monkeypatch.setattr(Steps, "write", failing(1))
    monkeypatch.setattr(Steps, "copy", failing(2))
    places = [tmp_path / "near", tmp_path / "far"]
    with (
        pmstore.open(tmp_path / "store.pm") as store,
        pytest.warns(pmstore.ArchiveWarning, match="no memory; the drain"),
    ):
        with store.drain(places) as drain:
            store["x"] = 1
            store.commit()
            assert drain.wait() == 1
    assert all(archive.open(place).verify().ok for place in places)


def test_what_failed_captures_encoded_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["a"], store["b"] = np.random.default_rng(0).random((2, 30_000))
        store.commit()
        for _ in range(10):
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(type(steps._writing), "_row", no_memory)
                steps.capture()
        archived(steps)
        found = Archive(Sources([place]))
        assert sum(map(len, place.objects.values())) < 2 * 2 * 30_000 * 8
        assert found[1]["a"][5] == store["a"][5] and found.verify().ok


@pytest.mark.parametrize("changes", [False, True])
def test_parts_of_failed_captures_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """The version is larger than a part, so that some are in the place before it is whole. changes: while the process
    lacks memory, other commits come."""
    place = Memory()
    random = np.random.default_rng(0)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, part_size=1 << 17) as steps:
        store["first"] = 1
        store.commit()
        archived(steps)
        for name in "abcdefgh":
            store[name] = random.random(1 << 14)
        store.commit()
        held = []
        for _ in range(8):
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(Writing, "_row", no_memory)
                steps.capture()
            while steps.write():
                pass
            held.append(len(place.parts))
            if changes:
                store["c"], store["d"], store["e"] = random.random((3, 1 << 14))
                store.commit()
        assert held[0] > 5 and held[0] <= max(held) <= held[0] + (4 if changes else 0)
        archived(steps)
        found = Archive(Sources([place]))
        assert found.verify().ok and same(found[store.sequence]["h"], store["h"])
        assert set(place.parts) == {part for row in Index.read(place).rows() for part in row.parts}
        store["h"][:] = 1
        store.commit()
        archived(steps)
        assert Archive(Sources([place])).verify().ok


def test_a_version_before_a_failed_capture_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger than a part, and its row waits for others."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, part_size=1 << 17) as steps:
        for name in "abc":
            store[name] = np.random.default_rng(0).random(12_500)
        store.commit()
        assert steps.capture() and steps.encoded and steps.jobs
        store["e"] = np.random.default_rng(1).random(12_500)
        store.commit()
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(Writing, "_row", no_memory)
            steps.capture()
        while steps.write():
            pass
        archived(steps)
    found = Archive(Sources([place]))
    assert len(found) == 2 and found.verify().ok
    assert set(place.parts) == {part for row in Index.read(place).rows() for part in row.parts}


class NoMemory:
    """A codec that lacks memory, as numcodecs tells of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def encode(self, data: Any) -> bytes:
        raise RuntimeError("Zstd compression error: b'Allocation error : not enough memory'")

    def decode(self, data: Any, out: Any = None) -> Any:
        raise RuntimeError("Zstd decompression error: b'Allocation error : not enough memory'")


@pytest.mark.parametrize("codec", ["zstd", {"id": "zstd", "level": 3}, "lossy"], ids=["default", "own", "lossy"])
def test_codecs_that_lack_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any) -> None:
    """The version is captured later, with the same codec; a version that is read then is not damaged."""
    place, told = Memory(), []
    chosen = pmstore.codecs.LCDelta() if codec == "lossy" else codec
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec=chosen) as steps:
        steps.attach(lambda: None, told.append)
        store["x"], store["text"] = np.random.default_rng(0).random(3000), "x" * 5000
        store.commit()
        archived(steps)
        store["x"] += 1e-3
        store.commit()
        with monkeypatch.context() as patched:
            patched.setattr(_planes, "_zstd", NoMemory)
            patched.setattr(_passes, "Zstd", NoMemory)
            if codec != "lossy":
                patched.setattr(_codecs, "_codec_of", NoMemory)
            with pytest.raises(MemoryError, match="not enough memory"):
                steps.capture()
            with pytest.raises(MemoryError):
                Archive(Sources([place]))[1]["x"]
        archived(steps)
    found = Archive(Sources([place]))
    assert found.versions() == [1, 2] and found.verify().ok and not told
    assert abs(found[2]["x"] - found[1]["x"] - 1e-3).max() < 1e-3


class Refuses(NoMemory):
    """A codec of a user, which takes no large contents."""

    def encode(self, data: Any) -> bytes:
        raise RuntimeError("blocks of 24000 bytes exceed the memory of this codec")


def test_a_refusal_that_names_memory_is_no_lack_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, told = Memory(), []
    codec = {"id": "zstd", "level": 3}
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec=codec) as steps:
        steps.attach(lambda: None, told.append)
        store["x"] = np.random.default_rng(0).random(3000)
        store.commit()
        with monkeypatch.context() as patched:
            patched.setattr(_codecs, "_codec_of", Refuses)
            steps.capture()
        archived(steps)
    assert len(told) == 1 and "does not take the contents of 'x'" in told[0]
    assert Archive(Sources([place])).verify().ok


@pytest.mark.parametrize("step", ["flush", "copy_tags", "end"])
def test_other_steps_that_lack_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    failures, real = [MemoryError()] * 3, getattr(Steps, step)

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(Steps, step, failing)
    places = [tmp_path / "near", tmp_path / "far"]
    with (
        pmstore.open(tmp_path / "store.pm") as store,
        pytest.warns(pmstore.ArchiveWarning, match="no memory; the drain"),
        store.drain(places) as drain,
    ):
        store["x"] = 1
        store.commit()
        drain.wait()
    assert not failures and all(archive.open(place).verify().ok for place in places)


def test_a_version_that_was_encoded_before_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the last version is not that of this one: the next version is a base."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store.create_array("x", (3000,))
        for step in range(6):
            store["x"][step * 100 : step * 200] += step
            store.commit()
            if step == 3:
                with monkeypatch.context() as patched, pytest.raises(MemoryError):
                    patched.setattr(_capture.Seen, "finalize", no_memory)
                    steps.capture()
            else:
                archived(steps)
        expected = store["x"].copy()
    found = Archive(Sources([place]))
    assert found.versions() == [1, 2, 3, 4, 5, 6]
    assert [one.kind for one in found.log()] == ["base", *["differential"] * 3, "base", "differential"]
    assert (found[6]["x"] == expected).all() and found.verify().ok


def no_memory(*arguments: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    "code, transient",
    [
        ("RequestTimeTooSkewed", True),
        ("ExpiredToken", True),
        ("BadDigest", True),
        ("XAmzContentSHA256Mismatch", True),
        ("AccessDenied", False),
        ("InvalidAccessKeyId", False),
    ],
)
def test_refusals_of_s3_that_pass(code: str, transient: bool) -> None:
    """s3fs makes them PermissionErrors. The clock of this machine is set right, or the credentials are renewed."""

    class ClientError(Exception):
        def __init__(self) -> None:
            self.response = {"Error": {"Code": code}}

    error = PermissionError(errno.EACCES, code)
    error.__cause__ = ClientError()
    assert unavailable("s3://b", "x", "read", error).transient is transient


class Once:
    """A method that lacks memory once, before it does anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.left, real = 1, getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if self.left:
                self.left -= 1
                raise MemoryError
            return real(*arguments)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("owner, name", [(IndexWriter, "append"), (IndexWriter, "_merge"), (Target, "_sweep")])
def test_writing_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """No row comes twice."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for step in range(3):
            store["x"] = step
            store.commit()
            steps.capture()
            steps.flush()
        once = Once(monkeypatch, owner, name)
        with pytest.raises(MemoryError):
            steps.write()
        archived(steps)
        assert once.left == 0 and not steps.jobs
    assert Archive(Sources([place])).versions() == [1, 2, 3] and Archive(Sources([place])).verify().ok


@pytest.mark.parametrize("newest", [2, 3])
@pytest.mark.parametrize("owner, name", [(IndexWriter, "append"), (Copying, "rest")])
def test_copying_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, newest: int
) -> None:
    """The third version, or the last one, is damaged. The whole ones beside it come all the same."""
    near, far = Memory(), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, near, far, part_size=1) as steps:
        steps.attach(lambda: None, lambda text: None)
        steps._writing.base_after = 0
        for step in range(newest + 1):
            store["x"] = np.random.default_rng(step).random(3000)
            store.commit()
            steps.capture()
            steps.flush()
            while steps.write():
                pass
        row = steps.targets[0].index.find(3)
        assert row is not None
        for part in row.parts:
            near.damage(part, 5, 20)
        Once(monkeypatch, owner, name)
        with pytest.raises(MemoryError):
            steps.copy(1)
        while steps.copy(1):
            pass
        assert steps.targets[1].index.versions == [version for version in range(1, newest + 2) if version != 3]
        assert (steps.targets[1].lost is not None) == (newest == 2)


@pytest.mark.parametrize("fails", ["roll_back", "_state"])
def test_lack_of_memory_after_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["a"], store["b"] = np.random.default_rng(0).random((2, 30_000))
        store.commit()
        with monkeypatch.context() as patched:
            Once(patched, Writing, "_row")
            Once(patched, Writing, fails)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    steps.capture()
            store["a"] = np.random.default_rng(9).random(30_000)  # other bytes come first
            store.commit()
            archived(steps)
        found = Archive(Sources([place]))
        assert found.verify().ok and (found[2]["b"] == store["b"]).all() and (found[2]["a"] == store["a"]).all()
