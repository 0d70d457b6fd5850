"""I21: how long a commit waits for readers in other processes, and they for it, on a clock that goes on only where the
core sleeps."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pmstore
from pmstore._core import Core, lib
from pmstore._snapshot import Reader, Waiter
from pmstore._trace import Trace
from tests.conftest import Medium
from tests.core.test_readers import is_locked
from tests.core.test_readers_damage import before_each_read
from tests.core.test_slots import make_double_buffered
from tests.support import shim
from tests.support.shim import variable

WAITING_BYTE = (1 << 62) + (1 << 60) + 1  # csrc/commit/readers.c
ASKING_BYTES = WAITING_BYTE + 15  # one for each millisecond
PAUSING_BYTES = ASKING_BYTES + (1 << 59)  # the same
MILLISECOND = 1_000_000
POLL_INTERVAL = 10 * MILLISECOND  # a commit looks for readers no sooner than that after the last look
PAUSE = 20  # sleeps of a tenth of a millisecond: the longest pause


@contextlib.contextmanager
def called(name: str, function: Callable[[], None]) -> Iterator[None]:
    """The core calls the function: see tests/support/faults_clock.h."""
    callback, pointer = ctypes.CFUNCTYPE(None)(function), variable(name, ctypes.c_void_p)
    pointer.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield
    finally:
        pointer.value = None


class Writer:
    """A store, and the locks of another process, which is a second descriptor here."""

    def __init__(self, path: Path, now: int) -> None:
        shim.find_the_core()
        self.clock, self.naps = (variable(name, ctypes.c_long) for name in ("fault_clock", "fault_naps"))
        self.clock.value = now
        self.store = pmstore.open(path, "x")
        self.store["n"] = 0
        self.store.commit()
        self.fd = os.open(path, os.O_RDONLY)

    def lock(self, byte: int, kind: int = fcntl.F_RDLCK, count: int = 1) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, byte, count, 0))

    def sees(self, byte: int, count: int = 1) -> bool:
        """True if the store, or a reader with a descriptor of its own, has a lock on one of these bytes."""
        asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
        return bool(struct.unpack_from("@h", fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def ask(self, before: int = 0) -> int:
        """Asks for a pause, as if so many milliseconds ago. Returns the byte of the request."""
        byte = ASKING_BYTES + self.clock.value // MILLISECOND - before
        self.lock(byte)
        return byte

    def end(self, byte: int) -> None:
        self.lock(byte, fcntl.F_UNLCK)

    def commit(self, later: int = POLL_INTERVAL) -> int:
        """How often a commit sleeps, so many nanoseconds later."""
        self.clock.value += later
        before = self.naps.value
        self.store["n"] += 1
        self.store.commit()
        return int(self.naps.value - before)


def requests(directory: str) -> None:
    writer = Writer(Path(directory) / "s.pm", 10**15)
    byte = writer.ask(before=-1000)
    assert writer.commit() == 0, "what is locked further back is no request of these seconds"
    writer.end(byte)
    byte = writer.ask()
    assert writer.commit(POLL_INTERVAL - 1) == 0, "it has just looked"
    assert writer.commit(1) == PAUSE
    writer.end(byte)
    ignored = writer.clock.value + 20 * MILLISECOND
    for early, milliseconds in ((1, 40), (0, 80), (0, 160), (0, 320), (0, 640), (0, 1000), (0, 1000)):  # without one
        byte = writer.ask()
        assert writer.commit(ignored - early - POLL_INTERVAL - writer.clock.value) == 0
        if early:
            assert writer.commit() == 0
        assert writer.commit() == PAUSE
        writer.end(byte)
        ignored = writer.clock.value + milliseconds * MILLISECOND
    writer.clock.value = ignored
    assert writer.commit() == 0, "nobody asks"
    # A request counts for five seconds. This one ends in the middle of the pause, so that the next one is not ignored.
    writer.clock.value += -writer.clock.value % MILLISECOND
    writer.ask(before=4990)
    assert writer.commit() == 10
    assert writer.commit() == 0, "it is too old"
    writer.ask()
    seen: list[bool] = []
    with called("fault_sleeps", lambda: seen.append(writer.sees(PAUSING_BYTES + writer.clock.value // MILLISECOND))):
        assert writer.commit() == PAUSE
    assert seen == [True] * 9 + [False] * 11, "the lock of a pause is on the byte of its first millisecond"
    assert not writer.sees(PAUSING_BYTES, 1 << 59)
    ignored = writer.clock.value + 20 * MILLISECOND
    assert writer.commit(ignored - POLL_INTERVAL - writer.clock.value) == 0, "as after the first pause"
    assert writer.commit() == PAUSE
    writer.store.close()
    fd = os.open(Path(directory) / "s.pm", os.O_RDWR)
    core = Core(fd, "auto", read_only=False, trace=Trace(1), max_size=0)
    writer.ask()
    before = writer.naps.value
    core.commit()
    assert writer.naps.value == before, "what is recorded depends on no reader"
    core.close()


def other_locks(directory: str) -> None:
    """A reader that waits for a commit asks for no pause, even where the clock has just begun."""
    writer = Writer(Path(directory) / "s.pm", 3000 * MILLISECOND)
    value = variable("fault_woken_at", ctypes.c_uint)
    woken = variable("fault_woken", ctypes.c_long)
    before = woken.value
    assert writer.commit() == 0 and woken.value == before, "nobody waits"
    writer.lock(WAITING_BYTE)
    assert writer.commit() == 0 and woken.value > before
    assert value.value == writer.store.sequence, "of the durable marker, which readers map"
    writer.end(WAITING_BYTE)
    writer.commit()
    before = woken.value
    assert writer.commit() == 0 and woken.value == before
    byte = ASKING_BYTES  # when the clock began
    writer.lock(byte)
    assert writer.commit() == PAUSE and woken.value == before
    writer.end(byte)
    writer.store.close()


def threads(directory: str) -> None:
    """One of several threads that commit at once pauses, also if another one has looked at the clock before it."""
    writer = Writer(Path(directory) / "s.pm", 10**15)

    def another_thread() -> None:
        writer.clock.value += POLL_INTERVAL
        writer.ask(before=5000)  # so that it ends, and the next one is not ignored
        before = writer.naps.value
        writer.store._catalog.core.commit()  # the C interface, as the store's methods exclude each other
        paused.append(writer.naps.value - before)
        writer.ask()

    paused: list[int] = []
    with called("fault_looks", another_thread):
        found = writer.commit()
        assert (found, paused[0]) == (10, 10), (found, paused)
    writer.store.close()


def readers(directory: str) -> None:
    """How long a reader waits for a pause, in tenths of a millisecond."""
    path = Path(directory) / "s.pm"
    writer = Writer(path, 10**15)
    fd = os.open(path, os.O_RDONLY)
    reader = Reader(fd)

    def hold(*, begins: int, milliseconds: int) -> tuple[bool, int, int]:
        """Whether there is a pause, how often the reader slept, and the millisecond of its request. begins: the first
        locked byte, in milliseconds from now."""
        now = writer.clock.value // MILLISECOND
        writer.lock(PAUSING_BYTES + now + begins, count=milliseconds)
        before = writer.naps.value
        found = bool(lib.pm_reader_hold(reader._reader, True))
        slept = writer.naps.value - before
        asked = [i for i in range(20) if writer.sees(ASKING_BYTES + now + i)]
        lib.pm_reader_release(reader._reader)
        assert not writer.sees(ASKING_BYTES, 1 << 59)
        writer.lock(PAUSING_BYTES, fcntl.F_UNLCK, 1 << 59)
        writer.clock.value += 100 * MILLISECOND
        assert len(asked) == 1
        return found, slept, asked[0]

    assert hold(begins=-5, milliseconds=1) == (False, 120, 0), "an old lock is no pause"
    assert hold(begins=1, milliseconds=1) == (True, 10, 0), "as soon as it begins"
    assert hold(begins=12, milliseconds=1) == (True, 120, 0)
    assert hold(begins=13, milliseconds=1) == (False, 120, 0)
    # Of a pause that is on, the reader first awaits the end, for as long as a pause lasts.
    assert hold(begins=-3, milliseconds=1) == (False, 10 + 120, 1)
    assert hold(begins=-3, milliseconds=20) == (True, PAUSE, 2)
    os.close(fd)
    writer.store.close()


def whole_arrays(directory: str) -> None:
    """A reader asks for no pause because of commits before it came, which wrote an array whole, one after another."""
    path = Path(directory) / "s.pm"
    writer = Writer(path, 10**15)
    make_double_buffered(writer.store, commits=9)
    fd = os.open(path, os.O_RDONLY)
    before = writer.naps.value
    Reader(fd).take()
    assert writer.naps.value == before
    os.close(fd)
    writer.store.close()


def test_I21_a_reader_asks_no_longer_than_for_its_snapshot(medium: Medium) -> None:
    """The reader holds a request only until it is released: its later snapshots ask for themselves."""
    with pmstore.open(medium.directory / "store.pm", "x") as store:
        a = store.create_array("a", 200_000, "i8")
        for _ in range(5):  # it has two slots
            a += 1
            store.commit()
        with open(store.path, "rb") as file, open(store.path, "rb") as look:
            reader, asked = Reader(file.fileno()), []

            def commit() -> None:
                asked.append(is_locked(look.fileno(), ASKING_BYTES, 1 << 59))
                if len(asked) < 30:
                    a[:] += 1
                    store.commit()

            lib.pm_reader_hold(reader._reader, False)
            lib.pm_reader_release(reader._reader)
            with before_each_read(commit):
                reader.take()
            assert any(asked) and not is_locked(look.fileno(), ASKING_BYTES, 1 << 59)


def waits(directory: str) -> None:
    """How long a reader waits for a commit."""
    path = Path(directory) / "s.pm"
    writer = Writer(path, 10**15)
    count = variable("fault_waits", ctypes.c_long)
    fd = os.open(path, os.O_RDONLY)
    waiter = Waiter(fd, lambda: None)
    known = writer.store.sequence
    assert waiter.wait(known, 0.0) == (known, "timeout") and count.value == 0 and not writer.sees(WAITING_BYTE)
    before = writer.clock.value
    variable("fault_wakes").value = 1
    assert waiter.wait(known, 0.7) == (known, "timeout")
    assert (count.value, writer.clock.value - before) == (1 + 3, 700_000_000)
    assert writer.sees(WAITING_BYTE), "commits wake it from now on"
    del waiter
    os.close(fd)
    assert not writer.sees(WAITING_BYTE)
    writer.store.close()


def ends(directory: str) -> None:
    """The writer commits and ends when a reader has looked for commits, just before it asks whether anybody writes."""
    path = Path(directory) / "s.pm"
    writer = Writer(path, 10**15)
    fd = os.open(path, os.O_RDONLY)
    waiter = Waiter(fd, lambda: None)
    known = writer.store.sequence

    def commit_and_end() -> None:
        writer.store["n"] += 1
        writer.store.close()

    with called("fault_asks", commit_and_end):
        assert waiter.wait(known, 0.7) == (known + 1, "commit")
    assert waiter.wait(known + 1, 0.7) == (known + 1, "closed")
    del waiter
    os.close(fd)


@pytest.mark.no_sanitizer  # which is preloaded, as the shim is
@pytest.mark.parametrize("case", [requests, other_locks, threads, readers, whole_arrays, waits, ends])
def test_I21_pauses_for_readers(case: Callable[[str], None], directory: Path, fault_library: Path) -> None:
    shim.call(fault_library, case, directory)
