"""tests/support/faults.c: compiled, preloaded into a child process, and controlled from inside that process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pmstore
from tests.support.template import MODULES, template

SOURCE = Path(__file__).with_name("faults.c")
PWRITE, PWRITEV2, FDATASYNC, FSYNC, FALLOCATE, NAMES, SYNC_FILE_RANGE = 1, 2, 4, 8, 16, 32, 64
IO_SETUP, IO_SUBMIT, IO_RESULT, IO_GETEVENTS, MEMORY, MAPPINGS, STATUS = 128, 256, 512, 1024, 2048, 4096, 8192
ONCE, HALF, FROM_THEN, INTERRUPT, SHORT, STORM, KILL, KILL_HALF, KILL_AFTER, STOP = range(10)  # as in faults.c
CALLS = {
    "pwrite": PWRITE,
    "pwritev2": PWRITEV2,
    "fdatasync": FDATASYNC,
    "fsync": FSYNC,
    "fallocate": FALLOCATE,
    "sync_file_range": SYNC_FILE_RANGE,
}
EVERY = PWRITE | PWRITEV2 | FDATASYNC | FSYNC | FALLOCATE | SYNC_FILE_RANGE | NAMES | IO_SUBMIT
BESIDE_THE_CACHE = {
    "io_setup": IO_SETUP,
    "io_submit": IO_SUBMIT,
    "io_getevents": IO_GETEVENTS,
    "a write's end": IO_RESULT,
    "a write's end, or pwrite": IO_RESULT | PWRITE,
}
"""Calls whose failure the core handles by another way."""


class Fault(NamedTuple):
    """The fault, and the call that it affects, counted from 1."""

    call: str
    manner: int
    errno: int
    at: int = 1


def compiler() -> str | None:
    """The path of a C compiler; None if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(directory: Path) -> Path | None:
    """The library, compiled into a directory; None if there is no compiler."""
    found = compiler()
    if found is None:
        return None
    path = directory / "faults.so"
    subprocess.run([found, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(path), "-ldl"], check=True)
    return path


def environment(shim: Path) -> dict[str, str]:
    """The environment of a child that finds the tests, this pmstore, and the faults."""
    root = Path(__file__).resolve().parent.parent.parent
    path = f"{root}{os.pathsep}{Path(pmstore.__file__).parent.parent}"
    return dict(os.environ, PYTHONPATH=path, LD_PRELOAD=str(shim), OPENBLAS_NUM_THREADS="1")


def call(shim: Path, function: Callable[..., object], *arguments: object) -> str:
    """What a function of a test module prints, called in a child under the faults. The arguments have a `repr` that
    Python reads, or are paths, which the function gets as text."""
    given = ", ".join(repr(str(one) if isinstance(one, Path) else one) for one in arguments)
    name = function.__name__
    return run(shim, "-c", f"from {function.__module__} import {name}; {name}({given})")


def run(shim: Path, *arguments: str, timeout: float = 600) -> str:
    """The output of Python, called with these arguments under the faults. Raises AssertionError if it fails."""
    preloaded = template((*MODULES, "tests.conftest"), LD_PRELOAD=str(shim), OPENBLAS_NUM_THREADS="1")
    done = preloaded.run(*arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def direct_io(directory: Path) -> bool:
    """Whether files here can be written past the page cache (on disks, and on tmpfs from Linux 6.6 on), and such writes
    begun asynchronously, which a container may forbid.
    """
    setup, destroy = {"x86_64": (206, 207), "aarch64": (0, 1)}[platform.machine()]
    libc, context = ctypes.CDLL(None), ctypes.c_ulong()
    if libc.syscall(setup, 1, ctypes.byref(context)):
        return False
    libc.syscall(destroy, context)
    (directory / "direct").touch()
    try:
        os.close(os.open(directory / "direct", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


# ---- inside the child

_kept: list[bytes] = []


def variable(name: str, kind: Any = ctypes.c_int) -> Any:
    return kind.in_dll(ctypes.CDLL(None), name)


def count() -> int:
    """The number of calls since `begin`."""
    return int(variable("fault_count", ctypes.c_long).value)


def hits() -> int:
    """The number of faults since `begin`."""
    return int(variable("fault_hits", ctypes.c_long).value)


def begin(calls: int, manner: int, code: int, at: int, path: Path | None = None) -> None:
    """Start counting calls, until `end`. path: calls on other files don't count."""
    variable("fault_manner").value, variable("fault_errno").value = manner, code
    variable("fault_at", ctypes.c_long).value = at
    variable("fault_inode", ctypes.c_ulong).value = path.stat().st_ino if path else 0
    variable("fault_count", ctypes.c_long).value = variable("fault_hits", ctypes.c_long).value = 0
    variable("fault_calls").value = calls


def find_the_core() -> None:
    """Tells the library where the core's code lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, *_, name = line.split()
        if "x" in access and Path(name).name.startswith("_pmcore"):
            for variable_name, address in zip(("fault_from", "fault_to"), where.split("-"), strict=True):
                variable(variable_name, ctypes.c_ulong).value = int(address, 16)


def begin_memory(manner: int, at: int, calls: int = MEMORY) -> None:
    """Start counting the core's requests for memory, until `end`. calls: MAPPINGS for mappings and threads."""
    find_the_core()
    begin(calls, manner, errno.ENOMEM, at)


def watch_memory() -> None:
    """Note all memory that the core requests from now on, until it is freed."""
    find_the_core()
    variable("fault_watched").value = 1


def blocks_held() -> int:
    """The number of blocks of memory that were noted and not freed."""
    return int(variable("fault_live", ctypes.c_long).value)


def end() -> None:
    variable("fault_calls").value = 0


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No call counts inside the block."""
    calls = variable("fault_calls").value
    end()
    try:
        yield
    finally:
        variable("fault_calls").value = calls


@contextlib.contextmanager
def faults(fault: Fault, path: Path | None = None) -> Iterator[None]:
    """The fault affects calls inside the block, on one file or any."""
    begin((CALLS | BESIDE_THE_CACHE)[fault.call], fault.manner, fault.errno, fault.at, path)
    try:
        yield
    finally:
        end()


def pretend_ext4(is_so: bool, options: bytes | None = b"rw\ndata=ordered\n") -> None:
    """Simulate ext4. Whether the file medium uses pwritev2 depends on the file system; tests need both ways on any.
    options: as ext4 reports them, b"" for another driver, None for an empty file. A thread that opened a store before
    may have cached others."""
    variable("fault_ext4").value = int(is_so)
    _kept.append(options or b"")  # ctypes holds no reference
    variable("fault_ext4_options", ctypes.c_char_p).value = options


def pretend_device(folder: Path) -> None:
    """The folder has the files that sysfs has for the device: persistence_domain and badblocks."""
    _kept.append(os.fsencode(folder))
    variable("fault_device", ctypes.c_char_p).value = _kept[-1]
