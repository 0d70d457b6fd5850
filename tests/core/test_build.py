"""The build: what it says when a tool is missing, and which flags it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILDER = ROOT / "csrc" / "build_core.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the builder as `make check` does, outside of the environment that has cffi."""
    command = [sys.executable, "-I", "-S", str(BUILDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def test_all_tools_are_here() -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_compiler_gives_one_line() -> None:
    done = run(CC="no-such-compiler -m64")
    assert done.returncode == 1
    assert re.fullmatch(r"pmstore: no C compiler \(no-such-compiler\)\. Install one: apt-get install .*\n", done.stderr)


@pytest.mark.parametrize(("header", "package"), [("Python.h", r"python3\.\d+-dev"), ("sys/mman.h", "libc6-dev")])
def test_missing_headers_give_one_line(header: str, package: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nexec grep -qv '{header}'\n")  # fails for this header only
    compiler.chmod(0o755)
    done = run(CC=str(compiler))
    assert done.returncode == 1
    assert re.fullmatch(rf"pmstore: .*apt-get install {package} .*\n", done.stderr)


def test_flags_can_be_added() -> None:
    flags = run("--flags", PMSTORE_CFLAGS="-O1 -fsanitize=address").stdout.split()
    assert flags[-2:] == ["-O1", "-fsanitize=address"]
    assert not [flag for flag in flags if flag.startswith("-march")]
