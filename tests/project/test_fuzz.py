"""The fuzzer of `make fuzz`: it builds with the compiler that builds the core, runs, and notices mutants."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CC = os.environ.get("CC", "cc")


pytestmark = [pytest.mark.long, pytest.mark.no_sanitizer]


@pytest.fixture(scope="module", autouse=True)
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests if there are no sanitizers."""
    program = tmp_path_factory.mktemp("link") / "a.out"
    command = [CC, "-fsanitize=address,undefined", "-x", "c", "-", "-o", str(program)]
    if subprocess.run(command, input=b"int main(void) { return 0; }", capture_output=True, check=False).returncode:
        pytest.skip(f"{CC} can't link ASan and UBSan")


def fuzz(out: Path, core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "fuzz" / "run.py"),
        "--compiler",
        "gcc",
        "--out",
        str(out),
        "--core",
        str(core),
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


def changed_copy(sound: Path, directory: Path) -> Path:
    """A folder in which only what has changed needs to be compiled."""
    out = directory / "out"
    shutil.copytree(sound, out, ignore=shutil.ignore_patterns("crashes"))
    return out


def mutant(directory: Path, name: str, old: str, new: str) -> Path:
    """A copy of the core with one change in it."""
    core = directory / "csrc"
    shutil.copytree(ROOT / "csrc", core)
    text = (core / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (core / name).write_text(text.replace(old, new), encoding="utf-8")
    return core


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fuzzer of the core as it is, that has run. Only the first process of these tests compiles it."""
    built, out = ROOT / "build" / "fuzz-tests", tmp_path_factory.mktemp("sound")
    built.mkdir(parents=True, exist_ok=True)
    with open(built / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fuzz(built, ROOT / "csrc", "--runs", "1")
        shutil.copytree(built, out, ignore=shutil.ignore_patterns("crashes"), dirs_exist_ok=True)
    done = fuzz(out, ROOT / "csrc", "--runs", "2000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2,000 executions" in done.stdout.splitlines()[-1]
    assert "harmless" in done.stdout
    return out


def test_two_thousand_executions(sound: Path) -> None:
    assert not list((sound / "crashes").iterdir())


def test_a_wrong_acceptance_is_noticed(sound: Path, tmp_path: Path) -> None:
    """Contents are not compared with their hashes: a flipped bit is passed over."""
    old, new = "!= expected) return PM_CORRUPT", "!= expected && !at) return PM_CORRUPT"
    core = mutant(tmp_path, "space/extent.c", old, new)
    out = changed_copy(sound, tmp_path)
    done = fuzz(out, core, "--runs", "40000")
    assert done.returncode == 1, done.stdout
    assert "damage was passed over" in done.stdout
    crashes = list((out / "crashes").iterdir())
    assert crashes
    assert any(f"--replay {os.path.relpath(crash)}" in done.stdout for crash in crashes)
    again = fuzz(out, core, "--replay", str(crashes[0]))
    assert again.returncode == 1, again.stderr
    whole = fuzz(sound, ROOT / "csrc", "--replay", str(crashes[0]))
    assert whole.returncode == 0, whole.stderr


def test_a_leak_is_noticed(sound: Path, tmp_path: Path) -> None:
    core = mutant(tmp_path, "recovery/recovery.c", "    free(found.declared);\n", "")
    done = fuzz(changed_copy(sound, tmp_path), core, "--runs", "2000")
    assert done.returncode == 1, done.stdout
    assert "LeakSanitizer" in done.stdout


def test_a_core_that_does_not_compile(sound: Path, tmp_path: Path) -> None:
    old = '#include "space/catalog.h"'
    core = mutant(tmp_path, "space/catalog.c", old, f'{old}\n#error "mutant"')
    done = fuzz(changed_copy(sound, tmp_path), core, "--runs", "10")
    assert done.returncode == 1
    assert "does not build" in done.stdout
    assert "mutant" in done.stderr


def test_impossible_numbers() -> None:
    done = fuzz(Path("unused"), ROOT / "csrc", "--runs", "0")
    assert done.returncode == 2
    assert "at least 1" in done.stderr
