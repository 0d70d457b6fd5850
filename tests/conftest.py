"""Fixtures: the media that the suite runs over, stores that are closed when a test ends, Python children."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, cast

import hypothesis
import pytest

import pmstore
from pmstore.testing._files.record import tracing_refused
from tests.support import shim
from tests.support.template import close_templates, modules_for, template

MEMORY = Path("/dev/shm")
LONGER = int(os.environ.get("PMSTORE_LONGER", "1"))
"""The factor for the length of randomized tests: 1 in make test, more in make torture."""

# The time of an example depends mostly on the load of the machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# A shell starts background jobs with interrupts ignored, and the programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


_tests = itertools.count(1)


def pytest_collection_finish() -> None:
    """Hide objects from before the first test from the garbage collector.

    scikit-learn, hypothesis and the tests create so many objects that a collection is slow, and tests collect thousands
    of times: `open_store` at each end, the fault explorer after each case.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Hide what pytest keeps of the tests before, too: after a thousand tests a collection would take 30 ms."""
    if next(_tests) % 50 == 0:
        pytest_collection_finish()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A test that leaves interrupts ignored or put off would take them from all later ones."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert before is signal.default_int_handler, f"the test has left the handler {before}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``long_on(medium)`` are marked ``long`` where they have that medium."""
    for item in items:
        mark = item.get_closest_marker("long_on")
        if mark is not None and cast(pytest.Function, item).callspec.params["medium"] in mark.args:
            item.add_marker(pytest.mark.long)


def pytest_sessionfinish() -> None:
    close_templates()


class Medium(NamedTuple):
    """name: as in pmstore.open; directory: a new one on that medium."""

    name: str
    directory: Path


DAX = os.environ.get("PMSTORE_DAX_FILES") if os.environ.get("PMSTORE_DAX_EXPECT") == "sync" else None
"""A directory on DAX. There is one in the guest of make test-dax only."""


@pytest.fixture(params=["memory", "file", *["dax"] * bool(DAX)])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    """Every medium in turn. The file medium works on any file system, also if the temporary directory is on a tmpfs."""
    if request.param == "file":
        yield Medium("file", tmp_path)
        return
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=DAX if request.param == "dax" else MEMORY))
    try:
        yield Medium(request.param, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """No test leaves a setting of pmstore behind, which those after it would run with."""

    def found() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("PMSTORE_")}

    before = found()
    yield
    assert found() == before


@pytest.fixture
def open_store(medium: Medium) -> Iterator[Callable[..., pmstore.Store]]:
    """open_store(name="store.pm", mode="a", **options): a store on the medium, closed when the test ends."""
    opened: list[pmstore.Store] = []

    def open_(name: str = "store.pm", mode: Any = "a", **options: Any) -> pmstore.Store:
        if options.setdefault("media", medium.name) == "trace:dax":
            pytest.skip("DAX is not recorded: it does what memory does")
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
    """A directory in memory, if possible, for tests of the file medium with many syncs that check only the calls."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=MEMORY))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """small_disk("2m"): a directory on a tmpfs of that size. Needs root."""
    mounts: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"of {size}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount")
        mounts.append(place)
        return place

    yield mount
    for place in mounts:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A directory on overlayfs, whose mappings are of another file than the one that was opened."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root may mount overlayfs")
    parts = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*parts)
    done = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", parts[-1]], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"overlayfs can't be mounted: {done.stderr.strip()}")
    try:
        yield parts[-1]
    finally:
        subprocess.run(["umount", "-l", parts[-1]], check=False)


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/support/faults.c, to be preloaded into a child process."""
    library = shim.build(tmp_path_factory.mktemp("faults"))
    if library is None:
        pytest.skip("no C compiler")
    return library


@pytest.fixture(scope="session")
def tracing() -> None:
    """A fixture for tests that record the calls of other programs."""
    refused = tracing_refused()
    if refused:
        pytest.skip(refused)


def run_in_fork(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in a fork of this process: a crash fails the test, and no modules need to be imported again.

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
    """A Python process that runs code and prints lines. `line` reads one; `go` lets the process pass an ``input()``."""

    def __init__(self, code: str, *arguments: Any) -> None:
        self.process = template(modules_for(code)).start("-c", textwrap.dedent(code), *arguments)

    def line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            _, error = self.process.communicate()
            raise AssertionError(f"the child ended with {self.process.returncode}:\n{error}")
        return line.rstrip("\n")

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """The rest of its output. Raises AssertionError if it failed."""
        out, error = self.process.communicate()
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
