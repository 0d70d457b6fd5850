"""The examples that train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_train_cnn(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_cnn.py"), "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("goes on after iteration") == 2
    assert "the same bits" in done.stdout and "in 144 iterations" in done.stdout
