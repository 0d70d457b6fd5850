"""A drain that begins: an interrupt or an error at that moment leaves no thread and no descriptor that nobody owns."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import pmstore
from pmstore import archive

pytest.importorskip("numcodecs")

START = threading.Thread.start


def drains() -> list[str]:
    """The names of the threads of drains."""
    return [one.name for one in threading.enumerate() if one.name.startswith("pmstore-drain")]


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_while_the_threads_start(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread.start waits for its thread, so that Ctrl-C often arrives there. The store ends the drain."""

    def start(self: threading.Thread) -> None:
        START(self)
        if self.name == f"pmstore-drain-{number}":
            signal.raise_signal(signal.SIGINT)

    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        store.commit()
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            store.drain(tmp_path / "to")
        monkeypatch.undo()
        store["x"] = 2
        store.commit()
    assert not drains()
    assert archive.open(tmp_path / "to")[2]["x"] == 2


def test_a_handler_that_closes_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when the threads have started. The descriptor is closed once: its number may be another file's then."""

    def start(self: threading.Thread) -> None:
        START(self)
        if self.name == "pmstore-drain-1":
            signal.raise_signal(signal.SIGTERM)

    def close(number: int, frame: object) -> None:
        store.close()
        raise SystemExit(7)

    store = pmstore.open(tmp_path / "store.pm")
    store["x"] = 1
    store.commit()
    before = signal.signal(signal.SIGTERM, close)
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        with pytest.raises(SystemExit, match="7") as found:
            store.drain(tmp_path / "to")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found.value.__context__ is None or not isinstance(found.value.__context__, OSError)
    assert not drains()
    assert archive.open(tmp_path / "to").latest == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_thread_that_can_not_start(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        if self.name == f"pmstore-drain-{number}":
            raise RuntimeError("can't start new thread")
        START(self)

    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        store.commit()
        known = set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            store.drain(tmp_path / "to")
        monkeypatch.undo()
        with pytest.warns(pmstore.ArchiveWarning, match="has none.*can't start new thread"):
            store._end_drains()
        assert not drains()
        assert set(os.listdir("/proc/self/fd")) <= known
        with store.drain(tmp_path / "to") as drain:
            assert drain.wait() == 1
