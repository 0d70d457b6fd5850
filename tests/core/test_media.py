"""The instructions themselves: the crash explorer sees what the media report, not what they do."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other instructions")
def test_every_way_of_copying_and_flushing(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "media"
    command = [compiler, "-std=gnu11", "-O1", "-w", "-I", str(ROOT / "csrc"), str(Path(__file__).with_name("media.c"))]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
