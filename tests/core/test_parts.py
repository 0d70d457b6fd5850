"""csrc/reader/parts.c in a program whose two threads take turns as seeds decide: parts.c, beside this file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.programs import compiled

SEEDS = 20_000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("parts") / "parts", [Path(__file__).with_name("parts.c")], "-pthread")


def run(program: Path, *arguments: int) -> list[int]:
    """The numbers that it prints."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(number) for number in done.stdout.split()]


def test_I20_each_page_is_done_once_whoever_is_first_late_or_fails(program: Path) -> None:
    both_worked, late, waited = run(program, 0, SEEDS)
    assert min(both_worked, late, waited) > SEEDS // 50


def test_fewer_pages_are_taken_towards_the_end(program: Path) -> None:
    assert run(program, 4096) == [*[512] * 5, 384, 288, 216, 162, 121, 91, 68, 64, 64, 64, 14]
    assert run(program, 65) == [64, 1]
    assert run(program, 64) == [64]
    assert run(program, 0) == []
