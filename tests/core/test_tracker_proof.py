"""The tracker's self-test: on a kernel that is wrong in some way, a tracker is chosen that does not rely on it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Medium
from tests.support.programs import compiled

EXPECTED = {
    "honest": "uffd",
    "no scan": "pagemap",
    "private of one page": "1",
    "no pagemap": "compare",
    "no userfaultfd": "pagemap",
    "no populating": "uffd",
    "not asynchronous": "pagemap",
    "nothing written": "pagemap",
    "written for ever": "pagemap",
    "all written": "pagemap",
    "not what it read": "pagemap",
    "not what it found": "pagemap",
    "not what it showed": "pagemap",
    "no filling": "pagemap",
    "others unnoticed": "pagemap",
    "still armed": "pagemap",
    "read is private": "compare",
    "nothing private": "compare",
    "only exclusive": "compare",
    "swapped is nothing": "compare",
    "interrupted read": "pagemap",
    "interrupted scan": "uffd",
    "no dropping": "pagemap",
    "not the last": "pagemap",
    "told twice": "pagemap",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("lies") / "lies", [Path(__file__).with_name("trackers.c")])


def chosen(program: Path, file: Path) -> dict[str, str]:
    said = subprocess.run([program, file], capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ") for line in said.splitlines())


def test_no_lie_of_the_kernel_is_believed(program: Path, medium: Medium) -> None:
    file = medium.directory / "pages"
    file.write_bytes(bytes(range(256)) * 256)
    found = chosen(program, file)
    if found["honest"] != "uffd":
        pytest.skip(f"this kernel, or what it allows, has nothing better than {found['honest']}")
    assert found == EXPECTED


def test_the_same_is_chosen_where_the_file_has_a_hole(program: Path, medium: Medium) -> None:
    """The kernel maps fewer pages of a hole on tmpfs together with one that is read."""
    full, hole = medium.directory / "full", medium.directory / "hole"
    full.write_bytes(bytes(range(256)) * 256)
    hole.touch()
    os.truncate(hole, full.stat().st_size)
    assert chosen(program, hole) == chosen(program, full)
