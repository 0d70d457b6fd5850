"""The instructions themselves: the crash explorer sees what the media report, not what they do."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import compiled


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other instructions")
def test_every_way_of_copying_and_flushing(tmp_path: Path) -> None:
    program = compiled(tmp_path / "instructions", [Path(__file__).with_name("instructions.c")])
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
