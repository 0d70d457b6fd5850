"""Ctrl-C in the calls of a drain: its threads and other callers go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import archive
from pmstore.archive._drain import Drain
from tests.store.test_transactions import in_thread
from tests.support.interrupting import interrupted_at

pytest.importorskip("numcodecs")


def in_another_thread(function: Callable[[], Any]) -> Any:
    """The result of a call by another thread, which must not hang."""
    thread, out = in_thread(function)
    thread.join(20)
    assert out, "it hangs"
    return out[0]


def wait(drain: Drain) -> None:
    with contextlib.suppress(pmstore.ArchiveUnavailableError):
        drain.wait(timeout=0.01)


def capture(drain: Drain) -> None:
    with contextlib.suppress(pmstore.ArchiveUnavailableError):
        drain.capture(timeout=0.01)


@pytest.mark.parametrize("call", [wait, capture, Drain.progress])
def test_an_interrupt_anywhere_leaves_a_drain_that_goes_on(
    call: Callable[[Drain], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(tmp_path / "archive") as drain:
        drain.wait()
        taken = drain._steps.capture
        monkeypatch.setattr(drain._steps, "capture", lambda: gate.wait() and taken())  # the call has to wait for it
        store["x"] = 1
        store.commit()
        try:
            moment = 0
            while interrupted_at(moment := moment + 1, lambda: call(drain)):
                assert in_another_thread(drain.progress).captured == 0
        finally:
            gate.set()
        assert moment > (10 if call is Drain.progress else 30)
        assert in_another_thread(drain.wait) == 1
    assert archive.open(tmp_path / "archive")[1]["x"] == 1


def test_an_interrupt_anywhere_in_close_ends_the_drain(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        moment, goes_on = 0, True
        while goes_on:
            drain = store.drain(tmp_path / "archive")
            threads = [one for one in threading.enumerate() if one.name.startswith("pmstore-drain")]
            goes_on = interrupted_at(moment := moment + 1, drain.close)
            assert in_another_thread(drain.close) is None
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        assert moment > 30
