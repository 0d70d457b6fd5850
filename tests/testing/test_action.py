"""The GitHub Action that runs a project's crash tests: its commands, as a runner gives them to a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ACTION = Path(__file__).resolve().parent.parent.parent / ".github" / "actions" / "crash-tests" / "action.yml"

TEST = """
import pmstore.testing

def conserved(store):
    assert store.get("alice", 100) + store.get("bob", 0) == 100

@pmstore.testing.crash_test(check=conserved)
def test_transfer(store):
    with store.transaction():
        store["alice"] = 70
{between}        store["bob"] = 30
"""
CAREFUL, CARELESS = TEST.format(between=""), TEST.format(between="    with store.transaction():\n")


def command() -> str:
    """The line that runs the tests, with the inputs' defaults."""
    text = ACTION.read_text(encoding="utf-8")
    inputs = dict(re.findall(r'^  (\w+):\n    description: .*\n    default: "?([^"\n]*)"?$', text, re.MULTILINE))
    assert inputs.keys() == {"tests", "install", "budget", "seed"}
    inputs |= {"budget": "200", "seed": "7"}  # the default is the number of the runner's run
    (line,) = re.findall(r"^      run: (python -m pytest .*)$", text, re.MULTILINE)
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], line)


@pytest.mark.long
@pytest.mark.parametrize(("test", "status"), [(CAREFUL, 0), (CARELESS, 1)], ids=["careful", "careless"])
def test_the_action_runs_crash_tests_and_keeps_failures(tmp_path: Path, test: str, status: int) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_bank.py").write_text(test)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command()],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ACTION.parent.parent.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    (kept,) = re.findall(r"^        path: (.*)$", ACTION.read_text(encoding="utf-8"), re.MULTILINE)
    assert bool(list((tmp_path / kept).glob("*.crash"))) == bool(status)
