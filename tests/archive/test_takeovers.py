"""A drain that another one has ended, while it was in the middle of a step, takes nothing from the newer one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import archive
from pmstore.archive._archive import Archive
from pmstore.archive._index import _FAN
from pmstore.archive._objects import LocalPlace

pytest.importorskip("numcodecs")
pytestmark = pytest.mark.filterwarnings("ignore::pmstore.ArchiveWarning")


class Held:
    """A call of a place that does not come back before `release`, as if the place were slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, is_meant: Callable[..., bool]) -> None:
        self.begun, self._go, self.done = threading.Event(), threading.Event(), threading.Event()
        real = getattr(LocalPlace, method)

        def held(place: LocalPlace, *arguments: Any) -> Any:
            if self.begun.is_set() or not is_meant(*arguments):
                return real(place, *arguments)
            self.begun.set()
            assert self._go.wait(60)
            try:
                return real(place, *arguments)
            finally:
                self.done.set()

        monkeypatch.setattr(LocalPlace, method, held)

    def wait(self) -> None:
        assert self.begun.wait(60)

    def release(self) -> None:
        self._go.set()
        assert self.done.wait(60)


def ended(drain: Any) -> None:
    """Wait until the drain has noticed that it is not the newest one."""
    with pytest.raises(pmstore.ArchiveError):
        while True:
            drain.wait(1 << 40, timeout=0.01) if drain.progress().ended else threading.Event().wait(0.01)


def versions(store: pmstore.Store, drain: Any, values: Iterable[Any]) -> None:
    """Commit each value, and wait until its version is durable."""
    for value in values:
        store["x"] = value
        store.commit()
        drain.wait()


def whole(place: Path) -> Archive:
    """The archive, each version of which can be read."""
    found = archive.open(place)
    assert found.verify().ok
    for version in found.versions():
        dict(found[version])
    return found


def test_a_merge_that_goes_on_hides_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        first = store.drain(tmp_path / "to")
        versions(store, first, range(_FAN - 1))
        merge = Held(monkeypatch, "create", lambda name, data: name.startswith("index/000000000001-000000000032"))
        store["x"] = _FAN
        store.commit()
        first.capture()
        merge.wait()
        second = store.drain(tmp_path / "to")
        merge.release()
        for i in range(_FAN + 1, 2 * _FAN + 3):
            versions(store, second, [i])
            assert archive.open(tmp_path / "to").latest == i
    assert whole(tmp_path / "to").versions() == list(range(1, 2 * _FAN + 3))


def test_a_flush_that_comes_late_is_not_called_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is free again: the newer drain has merged its own object of this name with others."""
    late = f"index/{_FAN:012d}-{_FAN:012d}-000000"
    with pmstore.open(tmp_path / "store.pm") as store:
        first = store.drain(tmp_path / "to")
        versions(store, first, range(_FAN - 1))
        flush = Held(monkeypatch, "create", lambda name, data: name == late)
        store["x"] = "late"
        store.commit()
        first.capture()
        flush.wait()
        store["x"] = "newer"
        store.commit()
        second = store.drain(tmp_path / "to")
        assert second.wait() == _FAN + 1
        flush.release()
        ended(first)
        with pytest.raises(pmstore.ArchiveError):
            first.wait(_FAN)
    assert whole(tmp_path / "to").versions() == [*range(1, _FAN), _FAN + 1]


def test_a_sweep_that_goes_on_deletes_no_newer_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        sweep = Held(monkeypatch, "list", lambda folder: folder == "parts")
        first = store.drain(tmp_path / "to")
        store["x"] = b"1" * 5000
        store.commit()
        first.capture()
        sweep.wait()
        second = store.drain(tmp_path / "to")
        store["x"] = b"2" * 5000
        store.commit()
        assert second.wait() == 2
        sweep.release()
        ended(first)
    assert whole(tmp_path / "to").versions() == [1, 2]


def test_a_removal_that_goes_on_deletes_no_part_of_a_listed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(tmp_path / "to") as drain:
            versions(store, drain, (bytes([i]) * 5000 for i in range(_FAN)))
        removal = Held(monkeypatch, "create", lambda name, data: name.startswith("index/") and name.endswith("-000001"))
        first = store.drain(tmp_path / "to", keep=2)
        versions(store, first, [b"33" * 2500])
        removal.wait()
        second = store.drain(tmp_path / "to", keep=30)
        removal.release()
        ended(first)
        versions(store, second, (bytes([40 + i]) * 5000 for i in range(6)))
    assert whole(tmp_path / "to").latest == _FAN + 7


def test_many_drains_one_after_the_other(tmp_path: Path) -> None:
    """Each takes the place over while the one before is at work. All that a drain called durable is listed."""
    durable, more, stop = set[int](), threading.Semaphore(0), threading.Event()
    with pmstore.open(tmp_path / "store.pm") as store:
        drains = [store.drain(tmp_path / "to")]

        def commit() -> None:
            i = 0
            while not stop.is_set():
                i += 1
                store["i"] = i
                store.commit()
                with contextlib.suppress(pmstore.ArchiveError):
                    durable.add(drains[-1].wait(timeout=60))
                    more.release()

        thread = threading.Thread(target=commit)
        thread.start()
        for _ in range(_FAN + 8):
            assert more.acquire(timeout=60)
            with contextlib.suppress(pmstore.ArchiveConflictError):
                drains.append(store.drain(tmp_path / "to"))
        stop.set()
        thread.join()
    assert durable <= set(whole(tmp_path / "to").versions())
