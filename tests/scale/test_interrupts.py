"""Interrupts while an engine begins or ends its workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pmstore.scale import Processes, _processes
from tests.support.sharded import Walk, result, several


def open_things() -> list[str]:
    """The processes that this one has started, and its files."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [*children, *sorted(os.listdir("/proc/self/fd"))]


def test_an_interrupt_while_workers_end_leaves_none(monkeypatch: pytest.MonkeyPatch, undisturbed: bytes) -> None:
    kill, signals = _processes._kill, [KeyboardInterrupt, KeyboardInterrupt]

    def interrupted_kill(process: Any) -> None:
        kill(process)
        if signals:
            raise signals.pop()

    Walk(several(1)).run(engine=1)  # the first fork starts a process that stays
    before, engine = open_things(), Processes(3)
    monkeypatch.setattr(_processes, "_kill", interrupted_kill)
    with pytest.raises(KeyboardInterrupt):
        Walk(several()).run(engine=engine)
    assert open_things() == before
    assert result(Walk(several()).run(engine=engine)) == undisturbed
    assert open_things() == before


def test_an_interrupt_while_a_worker_begins_leaves_none(monkeypatch: pytest.MonkeyPatch, undisturbed: bytes) -> None:
    Walk(several(1)).run(engine=1)  # the first fork starts a process that stays
    popen, signals, before = _processes.subprocess.Popen, [signal.SIGINT], open_things()

    def interrupted_popen(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        if signals:
            signal.raise_signal(signals.pop())
        return process

    monkeypatch.setattr(_processes.subprocess, "Popen", interrupted_popen)
    with pytest.raises(KeyboardInterrupt):
        Walk(several()).run(engine=2)
    assert open_things() == before
    assert result(Walk(several()).run(engine=2)) == undisturbed
