"""The core under ThreadSanitizer: Python's own lock would hide races from it, so the threads are C's.

make long runs them.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGER, Medium
from tests.support.programs import CSRC, compiled

ROUNDS = 30 * LONGER
SANITIZED = ("-O1", "-g", "-fsanitize=thread")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("race") / "threads"
    sources = [path for path in CSRC.rglob("*.c") if path.parent.name not in ("explore", "python")]
    try:
        compiled(program, [Path(__file__).with_name("threads.c"), *sources], "-pthread", *SANITIZED)
    except AssertionError as error:
        if "tsan" not in str(error):
            raise
        pytest.skip(f"no ThreadSanitizer: {error}")
    return program


def run(program: Path, medium: Medium) -> subprocess.CompletedProcess[str]:
    # Without it the addresses of today's kernels are not what older sanitizers expect.
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    command = [*fixed, str(program), str(medium.directory / "race.pm"), medium.name, str(ROUNDS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.no_sanitizer
def test_calls_from_many_threads_do_not_race(program: Path, medium: Medium) -> None:
    done = run(program, medium)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's addresses are not what ThreadSanitizer expects")
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:6000]
    assert done.returncode == 0, done.stdout + done.stderr[:2000]
