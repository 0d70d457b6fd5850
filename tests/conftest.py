"""Fixtures: the media that the suite runs over, stores that are closed when a test ends, Python children."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pmstore
from pmstore.testing._files_record import tracing_refused

from . import shim

MEMORY = Path("/dev/shm")
LONGER = int(os.environ.get("PMSTORE_LONGER", "1"))
"""So many times as long tests go on that try what chance gives them: 1 in make test, more in make long."""

# A shell starts what runs in the background with interrupts ignored, and so would the programs under test be.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Hide from the garbage collector what exists before the first test.

    scikit-learn, hypothesis and the tests are so many objects that one collection takes 0.1 s, and tests collect
    thousands of times: `open_store` at each end, the fault explorer after each case.
    """
    gc.collect()
    gc.freeze()


class Medium(NamedTuple):
    """name: as pmstore.open takes it; directory: a fresh one on that medium."""

    name: str
    directory: Path


@pytest.fixture(params=["memory", "file"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    """Every medium in turn. The file medium works on any file system, also where the temporary directory is a tmpfs."""
    if request.param == "file":
        yield Medium("file", tmp_path)
        return
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=MEMORY))
    try:
        yield Medium("memory", directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def open_store(medium: Medium) -> Iterator[Callable[..., pmstore.Store]]:
    """open_store(name="store.pm", mode="a", **options): a store on the medium, closed when the test ends."""
    opened: list[pmstore.Store] = []

    def open_(name: str = "store.pm", mode: Any = "a", **options: Any) -> pmstore.Store:
        options.setdefault("media", medium.name)
        store = pmstore.open(medium.directory / name, mode, **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        if not store.closed:
            store.rollback() if store.mode != "r" else None
            store.close()
    gc.collect()


@pytest.fixture
def store(open_store: Callable[..., pmstore.Store]) -> pmstore.Store:
    """A new store."""
    return open_store()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For tests of the file medium that sync a lot, and of which only the calls matter: in memory, if possible."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=MEMORY))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/faults.c, to be preloaded into a child process."""
    library = shim.build(tmp_path_factory.mktemp("faults"))
    if library is None:
        pytest.skip("no C compiler")
    return library


@pytest.fixture(scope="session")
def tracing() -> None:
    """For tests that record the calls of other programs."""
    refused = tracing_refused()
    if refused:
        pytest.skip(refused)


def run_in_fork(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in a fork of this process: a crash fails the test, and nothing has to be imported again.

    The function must not use OpenMP, whose threads do not survive a fork.
    """
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(120 * LONGER)
                with open(1, "w", buffering=1, closefd=False) as out, redirect_stdout(out), redirect_stderr(out):
                    try:
                        function(*arguments)
                        status = 0
                    except BaseException:
                        traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        assert status == 0, f"{status}: {said.read()[-5000:].decode(errors='replace')}"


class Child:
    """A Python process that runs code and says lines, which `line` reads; `go` lets it pass an ``input()``."""

    def __init__(self, code: str, *arguments: Any) -> None:
        root = Path(pmstore.__file__).parent.parent
        environment = dict(os.environ, PYTHONPATH=f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, error = self.process.communicate()
            raise AssertionError(f"the child ended with {self.process.returncode}:\n{error}")
        return line.rstrip("\n")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """What it said since; AssertionError if it failed."""
        out, error = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, f"the child ended with {self.process.returncode}:\n{error}"
        return out


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """child(code, *arguments): a running Python process, killed when the test ends."""
    children: list[Child] = []

    def start(code: str, *arguments: Any) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for one in children:
        one.process.kill()
        one.process.communicate()
