"""The progress of explorations: on a terminal, and as lines of a command."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pmstore.testing._base import progress as _progress
from pmstore.testing._base.progress import in_command, terminal


@pytest.mark.parametrize("rich", [True, False])
def test_progress_shows_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rich: bool
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(_progress, "PATIENCE", 0)
    now = [0.0]
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = terminal("exploring")
    assert progress is not None
    now[0] = 10
    progress(10, 100)
    progress.close()
    shown = capsys.readouterr().err
    assert "exploring" in shown and "10 of 100, 1 a second" in shown and "90 s left" in shown
    progress = terminal("in no time")
    assert progress is not None
    progress._next = float("inf")
    progress(10, 100)
    progress.close()
    assert "in no time" not in capsys.readouterr().err


def test_progress_of_a_command_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a line of its own from time to time, and only if the command is not quiet."""
    now = [0.0]
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with in_command(quiet=True):
        assert terminal("x") is None
    with in_command(quiet=False):
        progress = terminal("exploring")
    assert progress is not None
    for seconds, done in ((9, 9), (10, 10), (19, 10), (30, 3), (40, 1)):
        now[0] = seconds
        progress(done, 1000)
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "pmstore: exploring: 10 of 1,000, 1 a second, 16 min left",
        "pmstore: exploring: 3 of 1,000, 0 a second, 2.8 h left",
        "pmstore: exploring: 1 of 1,000, 0 a second, 11.1 h left",
    ]
    assert terminal("x") is None
