"""What goes wrong beside a drain: it ends or goes on, tells it, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _begin, _drain, _local, _steps
from pmstore.archive._archive import Archive
from pmstore.archive._codecs import Chain
from pmstore.archive._objects import LocalPlace
from pmstore.archive._place import unavailable
from pmstore.archive._sources import Sources
from tests.archive.stepping import Crash, Memory, archived, stepping

pytest.importorskip("numcodecs")


def captures(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[str]:
    """The names of the threads that capture from now on. errors: what the first captures raise."""
    real, threads, left = _steps.capture, list[str](), list(errors)

    def capture(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        if (error := left.pop(0) if left else None) is not None:
            raise error
        return real(*arguments)

    monkeypatch.setattr(_steps, "capture", capture)
    return threads


def test_drains_leave_nothing(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        before = None
        for _ in range(5):
            with store.drain(tmp_path / "archive") as drain:
                drain.wait()
            assert drain.wait() == 0 and drain.progress().committed == 0
            before = before or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == before
        assert not store._drains


def test_only_its_own_thread_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt or a signal handler of the program can't come in between."""
    threads = captures(monkeypatch)
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "archive", every=100)
        store["x"] = 1
        store.commit()
        assert drain.wait() == 1
        store["x"] = 2
    assert archive.open(tmp_path / "archive").versions() == [1, 2]
    assert len(threads) >= 2 and set(threads) == {"pmstore-drain-0"}


def test_a_commit_that_can_not_be_captured_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures(monkeypatch, None, pmstore.StaleSnapshotError("too late"))
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        for value in range(3):
            store["x"] = value
            store.commit()
            drain.wait()


def test_versions_in_memory_are_archived_if_the_last_capture_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(pmstore.ArchiveWarning, match="too late"), pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "archive", every=100)
        drain.wait()
        for value in range(3):
            store["x"] = value
            store.commit()
            if value < 2:
                drain.capture()
        captures(monkeypatch, pmstore.StaleSnapshotError("too late"))
    assert archive.open(tmp_path / "archive").versions() == [0, 1, 2]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_capture_that_fails_while_the_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    store = pmstore.open(tmp_path / "store.pm")
    drains = [store.drain(tmp_path / name, every=100, on_error=on_error) for name in "ab"]
    for drain in drains:
        drain.wait()
    captures(monkeypatch, *[pmstore.CorruptStoreError("a bad block")] * 2)
    store["x"] = 1
    kind = pytest.warns(pmstore.ArchiveWarning) if on_error == "warn" else pytest.raises(pmstore.ArchiveError)
    with kind as found:
        store.close()
    assert "a bad block" in str(found[-1].message if on_error == "warn" else found.value)  # type: ignore[index]
    assert store.closed and not store._drains and all(all(drain._ended) for drain in drains)


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = pmstore.open(tmp_path / "store.pm")
        older = store.drain(tmp_path / "archive")
        older.wait()
        newer = store.drain(tmp_path / "archive")
        store["x"] = 1
        store.commit()
        assert newer.wait() == 1
        with pytest.raises(pmstore.ArchiveConflictError):
            older.wait()
        older.close()  # the place has all that it lacks, from the newer drain
        store.close()


def test_a_store_that_is_dropped_ends_its_drain(tmp_path: Path) -> None:
    store = pmstore.open(tmp_path / "store.pm")
    store["x"] = 1
    store.commit()
    before = {*threading.enumerate()}
    drain = store.drain(tmp_path / "archive")
    threads = {*threading.enumerate()} - before
    assert len(threads) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del store
        gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert archive.open(tmp_path / "archive").latest == 1 and drain.wait() == 1


def test_a_version_that_is_larger_than_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its place, and not in memory."""
    waits, put, peak = threading.Event(), LocalPlace.put, 0
    room = getattr(_drain.Drain, "_room", None)

    def waited(drain: archive.Drain) -> None:
        if drain._steps.queued > 1 << 20:
            waits.set()
        assert room is not None
        room(drain)

    def slow(place: LocalPlace, *arguments: Any) -> None:
        nonlocal peak
        while not waits.wait(0.01) and drain._steps.captured < 1:
            pass
        peak = max(peak, drain._steps.queued)
        put(place, *arguments)

    monkeypatch.setattr(_drain.Drain, "_room", waited, raising=False)
    monkeypatch.setattr(LocalPlace, "put", slow)
    x = np.random.default_rng(0).random(5 << 20)
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "archive", queue_size="1MiB", part_size="1MiB")
        store["x"] = x
        store.commit()
        drain.wait()
    assert peak < 16 << 20 and (archive.open(tmp_path / "archive")[1]["x"] == x).all()


def test_a_crash_anywhere_in_retention(tmp_path: Path) -> None:
    """What is listed after it can be read, and the next drain goes on."""
    start = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = np.random.default_rng(0).random(9000)
        with stepping(store, start) as steps:
            steps._writing.base_after = 1
            for step in range(9):
                store["x"][step] = 0
                store.commit()
                archived(steps)
        newest, after, crashed = store.sequence, 0, True
        while crashed:
            crashed = False
            place = Memory(dict(start.objects), after)
            try:
                with stepping(store, place) as steps:
                    steps.targets[0].forget(set(range(1, newest)) - {4})
            except Crash:
                after, crashed = after + 1, True
            found = Archive(Sources([Memory(place.objects)]))
            assert found.verify().ok and {4, newest} <= {*found}
            with stepping(store, Memory(place.objects)) as steps:
                archived(steps)
    assert list(found) == [4, newest] and after > 8


def test_a_place_that_is_away_when_a_drain_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not wait for it forever; once a drain has begun, it does."""

    def away(place: LocalPlace, folder: str) -> list[str]:
        error = pmstore.ArchiveUnavailableError(5, "away")
        error.transient = True
        raise error

    monkeypatch.setattr(_begin, "_PATIENCE", 0.0)
    with pmstore.open(tmp_path / "store.pm") as store:
        with monkeypatch.context() as patched, pytest.raises(pmstore.ArchiveUnavailableError, match="away"):
            patched.setattr(LocalPlace, "list", away)
            store.drain(tmp_path / "archive", on_error="raise")
        with store.drain(tmp_path / "archive") as drain:
            assert all(target.place.patience == math.inf for target in drain._steps.targets)


class Forgetting(Memory):
    """A drain removes all versions at the moment in which one of them gets a tag."""

    def create(self, name: str, data: Any) -> None:
        super().create(name, data)
        self.delete([f"index/{one}" for one in self.list("index")])


def test_a_tag_of_a_version_that_goes(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        archived(steps)
    found = Archive(Sources([Forgetting(place.objects)]))
    with pytest.raises(pmstore.UnknownVersionError):
        found.tag("best")
    assert not found.tags and not place.list("tags")


# ---- codecs


def test_codecs_that_are_refused(tmp_path: Path) -> None:
    """They lose bits, want other things than bytes, or run code."""
    with pmstore.open(tmp_path / "store.pm") as store:
        for wrong in (
            {"id": "quantize", "digits": 2, "dtype": "f4"},
            {"id": "astype", "encode_dtype": "u1", "decode_dtype": "f4"},
            {"id": "bitround", "keepbits": 3},
            {"id": "vlen-bytes"},
            "pickle",
        ):
            with pytest.raises(ValueError, match="codec"):
                store.drain(tmp_path / "archive", codec=wrong)
    chain = Chain(False, 1, ({"id": "pickle"},))
    with pytest.raises(pmstore.ArchiveError, match="run code"):
        chain.decode(b"", 1, None)


@pytest.mark.parametrize("config", [{"id": "unheard-of"}, {"id": "zlib", "strength": 3}])
def test_the_error_of_a_codec_that_is_not_here_names_its_settings(config: dict[str, Any]) -> None:
    text = f"the codec {config}, which can't be made here: install the package that registers it, or a newer one"
    with pytest.raises(pmstore.ArchiveError, match=re.escape(text)):
        Chain(False, 1, (config,)).decode(b"", 1, None)


def test_a_codec_that_returns_what_it_was_given(tmp_path: Path) -> None:
    """Contents that wait in memory do not change with the next version."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        with stepping(store, place, codec={"id": "shuffle", "elementsize": 1}) as steps:
            for value in range(3):
                store["x"] = np.full(5000, value)
                store.commit()
                steps.capture()
            archived(steps)
    found = Archive(Sources([place]))
    assert found.verify().ok and [int(found[v]["x"][0]) for v in found] == [0, 1, 2]


def test_numbers_of_numpy(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for value in range(3):
            store["x"] = value
            store.commit()
            archived(steps)
    found, one = Archive(Sources([place])), np.int64(1)
    assert one in found and found[one]["x"] == 0  # type: ignore[index]
    assert found.restore(tmp_path / "again.pm", one) == 1  # type: ignore[arg-type]
    assert found.forget(np.array([1, 2])) == [1, 2]  # type: ignore[arg-type]


class Undeletable(LocalPlace):
    """A place that takes objects, and lets none go, as an account without that permission finds it."""

    def delete(self, names: Any) -> None:
        for name in names:
            if not name.startswith("writers/"):
                raise unavailable(self.url, name, "deleted", PermissionError(13, "Permission denied"))


def test_a_place_that_lets_nothing_go_gets_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither retention nor the merging of the index ends the drain."""
    monkeypatch.setattr(_begin, "place_of", lambda url, *_, **__: Undeletable(url))
    with pmstore.open(tmp_path / "store.pm") as store:
        with warnings.catch_warnings(), store.drain(tmp_path / "to", keep=2) as drain:
            warnings.simplefilter("ignore", pmstore.ArchiveWarning)
            for value in range(40):
                store["n"] = value
                store.commit()
                assert drain.wait() == store.sequence
    found = archive.open(tmp_path / "to")
    assert found[found.latest]["n"] == 39 and found.verify().ok


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_damaged_tag_ends_no_drain_in_silence(tmp_path: Path, on_error: Any) -> None:
    """Nothing is removed, as the tag may name it."""
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "to", keep=1, on_error=on_error)
        for value in range(6):
            store["n"] = value
            store.commit()
            if value < 3:
                drain.wait()
            if value == 2:
                archive.open(tmp_path / "to").tag("best")
                (tmp_path / "to" / "tags" / "best").write_bytes(b"")
                first = store.sequence
        if on_error == "warn":
            with pytest.warns(pmstore.ArchiveWarning, match="versions stay that could go: .*best"):
                assert drain.wait() == store.sequence
                drain.close()
            with pytest.warns(pmstore.ArchiveWarning, match="the tag 'best' is damaged"):
                assert first in archive.open(tmp_path / "to").versions()
            return
        with pytest.raises(pmstore.ArchiveDamagedError, match="best"):
            drain.wait(store.sequence + 1)
        store["n"] = 7
        store.commit()
        with pytest.raises(pmstore.ArchiveDamagedError, match="best"):
            drain.wait()
        with pytest.raises(pmstore.ArchiveUnavailableError, match="the drain ended"):
            drain.close()


def test_a_closed_drain_does_not_answer_for_later_commits(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "to")
        store["n"] = 1
        store.commit()
        drain.close()
        assert drain.wait() == store.sequence
        store["n"] = 2
        store.commit()
        with pytest.raises(pmstore.ArchiveUnavailableError, match="the drain is closed"):
            drain.wait()
        assert drain.wait(store.sequence - 1) == store.sequence - 1


@pytest.mark.parametrize("codec", [{"id": "delta", "dtype": "<i4"}, {"id": "shuffle", "elementsize": 4}])
def test_a_codec_that_takes_whole_elements_only(tmp_path: Path, codec: Any) -> None:
    """Other contents have the default codec, and a warning says so once."""
    with pmstore.open(tmp_path / "store.pm") as store:
        with pytest.warns(pmstore.ArchiveWarning, match="'(delta|shuffle)' does not take the contents of") as told:
            with store.drain(tmp_path / "to", codec=codec) as drain:
                store["odd"], store["even"] = np.arange(7, dtype="u1"), np.arange(1000)
                for value in range(3):
                    store["odd"][0] = value
                    store["even"][0] = value
                    store.commit()
                    drain.wait()
    assert len(told) == 1
    found = archive.open(tmp_path / "to")
    assert found.verify().ok and [int(found[v]["odd"][0]) for v in found] == [0, 1, 2]
    assert found[3]["odd"].tolist() == [2, 1, 2, 3, 4, 5, 6] and found[3]["even"][[0, 999]].tolist() == [2, 999]


def test_a_codec_that_loses_bits_of_odd_lengths(tmp_path: Path) -> None:
    import numcodecs

    class Pairs(numcodecs.abc.Codec):
        codec_id = "pairs"

        def encode(self, buf: Any) -> bytes:
            data = bytes(buf)
            return data[: len(data) // 2 * 2] + b"\0" * (len(data) % 2)

        def decode(self, buf: Any, out: Any = None) -> bytes:
            return bytes(buf)

    numcodecs.register_codec(Pairs)
    with pmstore.open(tmp_path / "store.pm") as store, pytest.raises(ValueError, match="'pairs' is lossy"):
        store.drain(tmp_path / "to", codec=Pairs())


def test_the_first_place_lacks_a_part(tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = np.random.default_rng(0).normal(size=4000)
        with store.drain(places[0]) as drain:
            drain.wait()
        for part in (places[0] / "parts").iterdir():
            part.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pmstore.ArchiveWarning)
            drain = store.drain(places)
            with pytest.raises(pmstore.ArchiveDamagedError, match="far can't have version 0: .* is missing"):
                drain.wait()
            progress = drain.progress()
            assert "far can't have version 0" in str(progress.error) and not progress.ended
            store["x"][0] = 1
            store.commit()
            assert drain.wait() == 1, "it goes on with what it writes itself"
            assert drain.progress().error is None
            drain.close()
    assert archive.open(places[1]).versions() == [1]
    assert archive.open(places[1]).verify().ok


def test_a_place_that_was_emptied(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        with stepping(store, place) as steps:
            archived(steps)
            place.objects.clear()
            store["x"] = 2
            store.commit()
            with pytest.raises(pmstore.ArchiveDamagedError, match="was emptied or taken away"):
                archived(steps)
        place.objects.clear()
        with stepping(store, place) as steps:
            archived(steps)
    found = Archive(Sources([place]))
    assert found[found.latest]["x"] == 2


class Slow(Memory):
    """A place whose lists lack the newest object of the index, as those of some caches do."""

    def list(self, folder: str) -> list[str]:
        found = super().list(folder)
        return found[:-1] if folder == "index" and len(found) > 1 else found


def test_a_list_of_a_moment_ago_ends_no_drain(tmp_path: Path) -> None:
    place = Slow()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for number in range(6):
            store["x"] = number
            store.commit()
            archived(steps)
    found = Archive(Sources([Memory(place.objects)]))
    assert found.verify().ok and [found[version]["x"] for version in found] == list(range(6))


def test_a_disk_that_comes_back_under_another_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, away, identity = tmp_path / "place", tmp_path / "away", _local._identity
    place = LocalPlace(str(folder))
    place.put("parts/a", [b"1"])

    def renumbered(path: str) -> Any:
        found = identity(path)
        return found and (found[0] + 1, found[1])

    monkeypatch.setattr(_local, "_identity", renumbered)
    place.put("parts/b", [b"2"])
    folder.rename(away)
    folder.mkdir()
    for _ in range(2):  # an empty folder, as below a mount point, and a copy
        with pytest.raises(pmstore.ArchiveUnavailableError, match="another one has taken its place"):
            place.put("parts/c", [b"3"])
        shutil.rmtree(folder)
        shutil.copytree(away, folder)
    shutil.rmtree(folder)
    away.rename(folder)
    place.put("parts/c", [b"3"])
    assert place.list("parts") == ["a", "b", "c"]


@pytest.mark.parametrize("other", [False, True])
def test_a_place_whose_contents_were_exchanged(tmp_path: Path, other: bool) -> None:
    """Another disk was mounted there, or an older copy was put back. It has a token of the same number."""
    place = Memory()
    with pmstore.open(tmp_path / "other.pm") as store, stepping(store, place) as steps:
        for number in range(4):
            store["y"] = number
            store.commit()
            archived(steps)
    foreign, place = dict(place.objects), Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        for number in range(4):
            store["x"] = np.full(100, number)
            store.commit()
            archived(steps)
            if number == 1 and not other:
                foreign = dict(place.objects)
        place.objects.clear()
        place.objects.update(foreign)
        store["x"] = 4
        store.commit()
        with pytest.raises(pmstore.ArchiveDamagedError, match="has the contents of another time"):
            archived(steps)
    kept = {name for name in foreign if not name.startswith("parts/")}
    assert {name: place.objects[name] for name in kept} == {name: foreign[name] for name in kept}
    assert {name for name in place.objects if not name.startswith("parts/")} == kept
    found = Archive(Sources([place]))
    assert found.verify().ok and found[found.latest]["y" if other else "x"] is not None


def test_a_place_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "to")
    with pmstore.open(tmp_path / "store.pm") as store:
        for other in (tmp_path / "to", f"file://{tmp_path}/to", tmp_path / "link"):
            with pytest.raises(ValueError, match="each place of an archive is another one"):
                store.drain([tmp_path / "to", other])
        assert not (tmp_path / "to").exists()


def test_an_interrupt_while_a_store_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is away. Neither the store nor the end of Python waits for it again."""
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "to")
        store["x"] = 1
        store.commit()
        drain.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pmstore.ArchiveWarning)
            (tmp_path / "to").rename(tmp_path / "away")
            store["x"] = 2
            store.commit()
            changed, waits = drain._changed, list[float]()

            def wait(timeout: float | None = None) -> bool:
                if threading.current_thread() is threading.main_thread() and not waits:
                    waits.append(timeout or 0)
                    raise KeyboardInterrupt
                return type(changed).wait(changed, timeout)

            monkeypatch.setattr(changed, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                drain.close()
            drain.close(timeout=math.inf)  # it does not wait for the place any more
    (tmp_path / "away").rename(tmp_path / "to")
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "to") as drain:
        assert drain.wait() == 2


def test_an_interrupt_while_a_place_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the drain hangs in it. Closing the store and the end of Python wait for nothing."""
    answers = threading.Event()
    with pmstore.open(tmp_path / "store.pm") as store:
        drain = store.drain(tmp_path / "to")
        drain.wait()

        def put(place: LocalPlace, name: str, data: object) -> None:
            answers.wait()

        def wait(timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread():
                waits.append(timeout)
                raise KeyboardInterrupt
            return type(changed).wait(changed, timeout)

        changed, waits = drain._changed, list[float | None]()
        monkeypatch.setattr(LocalPlace, "put", put)
        monkeypatch.setattr(LocalPlace, "create", put)
        monkeypatch.setattr(changed, "wait", wait)
        try:
            store["x"] = 1
            store.commit()
            with pytest.raises(KeyboardInterrupt):
                drain.close()
            _drain._close_all()
            store.close()
        finally:
            answers.set()
    assert len(waits) == 1
