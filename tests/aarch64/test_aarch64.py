"""The core on aarch64, cross-compiled, under user-mode emulation: make test-aarch64 installs what it needs.

Stores go to and fro between this processor and that one, also unclosed ones: a log that one has written, the other
recovers. Emulation is quick to kill, and slow. It has no caches, so that nothing is shown of flushes but that they run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import ffi, lib
from tests.conftest import Medium

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="no cross compiler and emulator of aarch64: make test-aarch64 installs them"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SIZES = {"small": 100, "a page": 4096, "slots": 70_000, "large": 700_001}


def compiled(folder: Path, *sources: Path) -> Path:
    """A program without shared libraries, of which the machine has none for aarch64."""
    program = folder / sources[0].stem
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-static", f"-I{CSRC}"]
    subprocess.run([str(COMPILER), *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


def command(program: Path, *arguments: object) -> list[str]:
    return [str(EMULATOR), "-cpu", "max", str(program), *map(str, arguments)]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """store.c with all of the core, the explorer left out."""
    sources = [path for path in sorted(CSRC.glob("*/*.c")) if path.parent.name not in ("python", "explore")]
    return compiled(tmp_path_factory.mktemp("aarch64"), HERE / "store.c", *sources)


def run(program: Path, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        command(program, *arguments), capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expected(size: int, commit: int) -> np.ndarray:
    """The contents of an array after a commit of store.c."""
    array = np.full(size, commit - 1 + commit % 2, "u1")
    if commit % 2 == 0:
        array[np.arange(size) % 4096 < 100] = commit
    return array


def create(path: Path, commits: int = 0, kill: bool = False) -> None:
    """A store with the arrays, and commits like those of store.c. kill: in a process that ends by SIGKILL."""
    child = os.fork() if kill else 0
    if not child:
        store = pmstore.open(path, "w")
        for name, size in SIZES.items():
            store.create_array(name, size, "u1")
        store.commit()
        for commit in range(1, commits + 1):
            for name, size in SIZES.items():
                store[name][:] = expected(size, commit)
            store.commit()
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        store.close()
    elif os.waitpid(child, 0)[1] != signal.SIGKILL:
        raise AssertionError("the child ended by itself")


def assert_holds(path: Path, commit: int) -> None:
    with pmstore.open(path, "r+") as store:
        assert store.sequence == commit + 1
        assert store.check().ok
        for name, size in SIZES.items():
            assert np.array_equal(store[name], expected(size, commit)), name


def test_the_crash_explorer_compiles() -> None:
    sources = map(str, sorted(CSRC.glob("explore/*.c")))
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{CSRC}"]
    subprocess.run([str(COMPILER), *flags, *sources], check=True)


def test_the_instructions(tmp_path: Path) -> None:
    """Checksums are those of this processor, byte for byte of the format (H1)."""
    first, *lines = run(compiled(tmp_path, HERE / "instructions.c")).splitlines()
    assert first in ("cvap", "no cvap")
    state, values = 1, bytearray()
    for _ in range(100_001):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(state >> 56)
    data = ffi.from_buffer(values)
    for length in [*range(5001), len(values)]:
        seed = 0 if length > 5000 else length % 3
        here = f"{lib.pm_hash64(data, length, seed):x} {lib.pm_crc32c(data, length, 0):x}"
        assert lines[min(length, 5001)] == here


def test_commits_there_are_read_here(core: Path, medium: Medium) -> None:
    path = medium.directory / "store.pm"
    create(path)
    said = run(core, path, "change", 7).splitlines()
    assert said[1:] == [str(commit) for commit in range(1, 8)]
    assert_holds(path, 7)


def test_a_domain_and_a_flush_can_be_forced(core: Path, medium: Medium) -> None:
    """Not cvap: QEMU 7.2 says that it has it, and has not. test_the_instructions tries it."""
    if medium.name != "memory":
        pytest.skip("disks have one domain, and nothing to flush")
    path = medium.directory / "store.pm"
    create(path)
    said = run(core, path, "change", 6, PMSTORE_DOMAIN="memory", PMSTORE_FLUSH="cvac")
    assert said.startswith("memory, memory, ")
    assert_holds(path, 6)
    done = subprocess.run(
        command(core, path, "check"), capture_output=True, text=True, env={**os.environ, "PMSTORE_FLUSH": "clwb"}
    )
    assert done.returncode == 1 and "this kind of processor has no clwb" in done.stdout


def test_a_log_from_there_is_recovered_here(core: Path, medium: Medium) -> None:
    """The emulator is killed when a commit was acknowledged; the next one may be in the log, or in part."""
    for last in (1, 4, 9):
        path = medium.directory / f"store{last}.pm"
        create(path)
        with subprocess.Popen(command(core, path, "change", 200), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while process.stdout.readline().strip() != str(last):
                assert process.poll() is None
            process.kill()
        with pmstore.open(path, "r+") as store:
            reached = store.sequence - 1
        assert reached >= last
        assert_holds(path, reached)


def test_a_log_from_here_is_recovered_there(core: Path, medium: Medium) -> None:
    path = medium.directory / "store.pm"
    for commits in (1, 6):
        create(path, commits, kill=True)
        assert run(core, path, "check") == f"{commits + 1} 0\n"
        assert_holds(path, commits)
