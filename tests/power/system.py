"""The parts that need root: a mount namespace of our own, mounts, loop devices, the kernel's trace.

Everything is mounted in a private namespace, and every loop device clears itself when it is no longer used, so that the
kernel cleans up after a process however it ends. A process that was killed leaves a directory in /dev/shm and one of
the trace; `sweep` removes those whose process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRATCH = Path("/dev/shm")
TRACING = Path("/sys/kernel/tracing")
NAME = "pmstore-power-"

PR_SET_PDEATHSIG = 1
CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 16384, 1 << 18, 2
LOOP_CTL_GET_FREE, LOOP_CONFIGURE, AUTOCLEAR = 0x4C82, 0x4C0A, 4
EVENTS = (
    "block/block_bio_queue",
    "block/block_rq_complete",
    "iomap/iomap_dio_rw_begin",
    "iomap/iomap_dio_complete",
)

libc = ctypes.CDLL(None, use_errno=True)


class Unusable(Exception):
    """This machine doesn't allow something that is needed; the text names it."""


def mount(source: str, target: Path | str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """Call mount(2). Raises OSError if it fails."""
    kind_ = kind.encode() if kind else None
    if libc.mount(source.encode(), os.fsencode(target), kind_, ctypes.c_ulong(flags), options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


def unmount(target: Path, flags: int = 0) -> None:
    if libc.umount2(os.fsencode(target), flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


@contextlib.contextmanager
def mounted(source: str, target: Path, kind: str, options: str = "") -> Iterator[None]:
    mount(source, target, kind, 0, options)
    try:
        yield
    except BaseException:
        unmount(target, MNT_DETACH)
        raise
    unmount(target)


def missing() -> str:
    """The reason why power can't be cut here; empty if it can."""
    if os.geteuid():
        return "it needs root, for mounts and loop devices"
    for needed in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(needed, os.R_OK | os.W_OK):
            return f"there is no {needed}"
    if not os.access(SCRATCH, os.W_OK):
        return f"{SCRATCH} is not writable"
    return ""


def prepare() -> None:
    """Make a mount namespace of our own, with the kernel's trace in it. Raises Unusable if that is refused."""
    if libc.unshare(CLONE_NEWNS):
        raise Unusable(f"mounts are not allowed: {os.strerror(ctypes.get_errno())}")
    try:
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        if not (TRACING / "instances").is_dir():
            mount("tracefs", TRACING, "tracefs")
    except OSError as error:
        raise Unusable(f"mounts are not allowed: {error}") from None
    for event in EVENTS:
        if not (TRACING / "events" / event).is_dir():
            raise Unusable(f"the kernel's trace does not tell {event}")
    sweep()


def _alive(owner: str) -> bool:
    return owner.isdecimal() and Path(f"/proc/{owner}").is_dir()


def sweep() -> None:
    """Remove the files of earlier processes that are gone."""
    for left in (TRACING / "instances").glob(f"{NAME}*"):
        if not _alive(left.name.removeprefix(NAME)):
            with contextlib.suppress(OSError):
                left.rmdir()
    for left in SCRATCH.glob(f"{NAME}*"):
        if not _alive(left.name.removeprefix(NAME)):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory that belongs to this process."""
    made = SCRATCH / f"{NAME}{os.getpid()}"
    made.mkdir()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


# ---- devices


@contextlib.contextmanager
def loop(file: Path) -> Iterator[str]:
    """The path of a loop device on a file. The device exists until it is no longer used."""
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        device, fd = _configured(backing)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(fd)


def _configured(backing: int) -> tuple[str, int]:
    info = struct.pack("<QQQQQIIII64s64s32sQQ", 0, 0, 0, 0, 0, 0, 0, 0, AUTOCLEAR, NAME.encode(), b"", b"", 0, 0)
    configuration = struct.pack("<II", backing, 512) + info + bytes(64)
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        for _ in range(100):  # other processes take devices at the same time
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, LOOP_CONFIGURE, configuration)
                return device, fd
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
    raise Unusable("no loop device is free")


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[str]:
    """The path of a loop device on the file `image` of a folder; the writes to it go to the files `writes`, `data`."""
    target = folder / "device"
    target.touch()
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        mount(NAME, target, "fuse", 0, f"fd={fuse},rootmode=100000,user_id=0,group_id=0,max_read={1 << 20}")
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.power.fuse", str(fuse), str(folder)], pass_fds=[fuse], cwd=ROOT
        )
    finally:
        os.close(fuse)
    try:
        with loop(target) as device:
            yield device
    finally:
        _retry_unmount(target)
        server.wait(60)


def _retry_unmount(target: Path) -> None:
    """Retry: a loop device releases its file a moment after it was closed."""
    for _ in range(200):
        try:
            return unmount(target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            subprocess.run(["sleep", "0.01"], check=False)
    unmount(target, MNT_DETACH)


# ---- the trace


class KernelTrace:
    """An instance of the kernel's trace that holds the requests to one device, and the lines written to `marker`.

    Its clock is a counter, so that all events are in one order.
    """

    def __init__(self) -> None:
        self.folder = TRACING / "instances" / f"{NAME}{os.getpid()}"

    def __enter__(self) -> KernelTrace:
        self.folder.mkdir()
        self._set("trace_clock", "counter")
        self._set("buffer_size_kb", "16384")
        self._set("tracing_on", "0")
        self.marker = os.open(self.folder / "trace_marker", os.O_WRONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.marker)
        self.folder.rmdir()

    def _set(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value)

    def begin(self, device: str) -> None:
        """Start tracing a device."""
        number = os.stat(device).st_rdev
        kernel = os.major(number) << 20 | os.minor(number)
        self._set("trace", "")
        for event in EVENTS:
            self._set(f"events/{event}/filter", f"dev == {kernel}")
            self._set(f"events/{event}/enable", "1")
        self._set("tracing_on", "1")

    def end(self) -> str:
        """The whole trace. Raises RuntimeError if events were lost."""
        self._set("tracing_on", "0")
        for event in EVENTS:
            self._set(f"events/{event}/enable", "0")
        for statistics in self.folder.glob("per_cpu/cpu*/stats"):
            lost = [line for line in statistics.read_text().splitlines() if line.startswith(("overrun", "dropped"))]
            if any(int(line.split(":")[1]) for line in lost):
                raise RuntimeError(f"the kernel's trace is not complete: {lost}")
        text = (self.folder / "trace").read_text()
        self._set("trace", "")
        return text
