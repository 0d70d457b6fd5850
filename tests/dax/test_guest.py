"""How long the host waits for a guest. Here, a script takes its place."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dax.guest import Boot


class Played:
    """A guest that writes a text to its console during each wait. None: it powers off. At the end of the list it is
    stuck."""

    def __init__(self, console: Path, outputs: list[str | None]) -> None:
        self._console, self._outputs, self.killed = console, outputs, False

    def communicate(self, timeout: float) -> None:
        output = self._outputs.pop(0) if self._outputs else ""
        if output is None or self.killed:
            return
        with self._console.open("a") as console:
            console.write(output)
        raise subprocess.TimeoutExpired("guest", timeout)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def start(*outputs: str | None) -> Boot:
        console, initrd = tmp_path / "console", tmp_path / "initrd"
        console.write_text("")
        initrd.touch()
        guest = Played(console, list(outputs))
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *_, **__: guest)
            return Boot([], console, initrd)

    yield start
    assert not (tmp_path / "initrd").exists()


def test_a_guest_may_take_as_long_as_it_writes(boot: Any) -> None:
    assert boot("GUEST-UP\n", *["."] * 100, "\nGUEST-RC=3\n", None).end() == (3, f"GUEST-UP\n{'.' * 100}\nGUEST-RC=3\n")


def test_a_guest_that_writes_nothing_is_stuck(boot: Any) -> None:
    assert boot("GUEST-UP\n", "..").end() == (125, "GUEST-UP\n..")
    assert boot().end() == (125, "")
