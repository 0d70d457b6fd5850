"""C code of the core, compiled into a program or a library of a test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shim import compiler

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
LIBRARY = ("-fPIC", "-shared")


def compiled(path: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Compile C files into `path`, and return it. An AssertionError has what the compiler says.

    Without a compiler the test is skipped. In the build of the mutants (tests/mutants/build.py), what is compiled has
    the chosen mutant, too.
    """
    found = compiler()
    if found is None:
        pytest.skip("no C compiler")
    mutant = CSRC / "mutant.c"
    choice = ["-include", str(mutant.with_suffix(".h"))] if mutant.exists() else []
    files = dict.fromkeys([*sources, mutant] if mutant.exists() else sources)
    command = [found, "-std=gnu11", "-O1", "-w", f"-I{CSRC}", *choice, *flags, *map(str, files), "-lm"]
    done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path
