"""docs/crash-testing.md does what it says: its files are written, its commands run, and what they print compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pmstore

ROOT = Path(pmstore.__file__).parent.parent
TUTORIAL = Path(__file__).resolve().parent.parent.parent / "docs" / "crash-testing.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SPEED = re.compile(r"[\d,]+(?= a second$)|(?<= in )[\d.]+(?=s$)")  # the only numbers that are not compared


def comparable(line: str) -> str:
    return SPEED.sub("N", re.sub(r"(?<=s) \(\d+:\d\d:\d\d\)$", "", line.rstrip()))  # pytest adds this to 60 s and more


def run(command: str, directory: Path) -> str:
    words = shlex.split(command)
    if words[0] == "pytest":
        words[:1] = [sys.executable, "-m", "pytest", "-p", "pytest_pmstore", "-p", "no:cacheprovider", "--rootdir", "."]
    words = [sys.executable if word == "python" else word for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def require_output(command: str, expected: list[str], output: str) -> None:
    """The lines, in order; "…" stands for any."""
    lines = [comparable(line) for line in output.splitlines()]
    at, skipping = 0, False
    for line in expected:
        if line == "…":
            skipping = True
            continue
        want = comparable(line)
        while skipping and at < len(lines) and lines[at] != want:
            at += 1
        assert at < len(lines), f"$ {command}\ndoes not print\n{line}\nbut\n{output}"
        assert lines[at] == want, f"$ {command}\nprints\n{lines[at]}\nrather than\n{want}\nin\n{output}"
        at, skipping = at + 1, False


@pytest.mark.long
def test_the_tutorial(tmp_path: Path) -> None:
    passed = set()  # files that ran as they stand: they need not run again
    for kind, text in BLOCK.findall(TUTORIAL.read_text(encoding="utf-8")):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            if name:
                (tmp_path / name[1]).write_text(text, encoding="utf-8")
                passed.discard(name[1])
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *expected = part.splitlines()
            require_output(command, expected, run(command, tmp_path))
            if command.startswith("pytest") and "passed" in expected[-1]:
                passed.add(command.split()[-1])
    assert {"test_bank.py", "test_disk.py"} <= passed
    others = [path.name for path in tmp_path.glob("test_*.py") if path.name not in passed]
    done = run(f"pytest -q {shlex.join(others)}", tmp_path)  # as they stand at its end
    assert re.search(r"\d passed", done), done
    assert "failed" not in done, done


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((TUTORIAL.parent.parent / "examples").glob("crash_test_*.py")), ids=str)
def test_the_examples(path: Path, tmp_path: Path) -> None:
    output = run(f"pytest -q --crash-budget 500 {shlex.quote(str(path))}", tmp_path)
    assert " passed" in output, output
