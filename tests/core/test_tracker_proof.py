"""The tracker's self-test: on a kernel that is wrong in some way, a tracker is chosen that does not rely on it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Medium

ROOT = Path(__file__).resolve().parent.parent.parent
EXPECTED = {
    "honest": "uffd",
    "no scan": "pagemap",
    "no pagemap": "compare",
    "no userfaultfd": "pagemap",
    "not asynchronous": "pagemap",
    "nothing written": "pagemap",
    "written for ever": "pagemap",
    "all written": "pagemap",
    "not what it read": "pagemap",
    "not what it found": "pagemap",
    "not what it showed": "pagemap",
    "no filling": "pagemap",
    "others unnoticed": "pagemap",
    "still watched": "pagemap",
    "read is private": "compare",
    "nothing private": "compare",
    "only exclusive": "compare",
    "swapped is nothing": "compare",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("lies") / "lies"
    command = [compiler, "-std=gnu11", "-O1", "-w", "-I", str(ROOT / "csrc")]
    subprocess.run([*command, str(Path(__file__).with_name("trackers.c")), "-o", str(program)], check=True)
    return program


def test_no_lie_of_the_kernel_is_believed(program: Path, medium: Medium) -> None:
    file = medium.directory / "pages"
    file.write_bytes(bytes(range(256)) * 256)
    said = subprocess.run([program, file], capture_output=True, text=True, check=True).stdout
    found = dict(line.split(": ") for line in said.splitlines())
    if found["honest"] != "uffd":
        pytest.skip(f"this kernel, or what it allows, has nothing better than {found['honest']}")
    assert found == EXPECTED
