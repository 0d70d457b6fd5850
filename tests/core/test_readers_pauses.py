"""I21: how long a commit waits for readers in other processes, on a clock that goes on only where the core sleeps."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import pmstore
from tests.support import shim
from tests.support.shim import variable

WAITING_BYTE = (1 << 62) + (1 << 60) + 1  # csrc/commit/readers.c
ASKING_BYTES = WAITING_BYTE + 15
MILLISECOND = 1_000_000
LOOK = 10 * MILLISECOND  # a commit looks for readers no sooner than that after the last look
PAUSE = 20  # sleeps of a tenth of a millisecond: the longest pause


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

    def lock(self, byte: int, kind: int = fcntl.F_RDLCK) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))

    def ask(self, before: int = 0) -> int:
        """Asks for a pause, as if so many milliseconds ago. Returns the byte of the request."""
        byte = ASKING_BYTES + self.clock.value // MILLISECOND - before
        self.lock(byte)
        return byte

    def end(self, byte: int) -> None:
        self.lock(byte, fcntl.F_UNLCK)

    def commit(self, later: int = LOOK) -> int:
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
    assert writer.commit(LOOK - 1) == 0, "it has just looked"
    assert writer.commit(1) == PAUSE
    writer.end(byte)
    ignored = writer.clock.value + 20 * MILLISECOND
    for early, milliseconds in ((1, 40), (0, 80), (0, 160), (0, 320), (0, 640), (0, 1000), (0, 1000)):  # without one
        byte = writer.ask()
        assert writer.commit(ignored - early - LOOK - writer.clock.value) == 0
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
    assert writer.commit() == PAUSE
    ignored = writer.clock.value + 20 * MILLISECOND
    assert writer.commit(ignored - LOOK - writer.clock.value) == 0, "as after the first pause"
    assert writer.commit() == PAUSE
    writer.store.close()


def other_locks(directory: str) -> None:
    """A reader that waits for a commit asks for no pause, even where the clock has just begun."""
    writer = Writer(Path(directory) / "s.pm", 3000 * MILLISECOND)
    woken = variable("fault_woken", ctypes.c_long)
    before = woken.value
    assert writer.commit() == 0 and woken.value == before, "nobody waits"
    writer.lock(WAITING_BYTE)
    assert writer.commit() == 0 and woken.value > before
    writer.end(WAITING_BYTE)
    writer.commit()
    before = woken.value
    assert writer.commit() == 0 and woken.value == before
    byte = writer.ask(before=3000)  # at the beginning
    assert writer.commit() == PAUSE and woken.value == before
    writer.end(byte)
    writer.store.close()


@pytest.mark.no_sanitizer  # which is preloaded, as the shim is
@pytest.mark.parametrize("case", [requests, other_locks])
def test_I21_pauses_for_readers(case: Callable[[str], None], directory: Path, fault_library: Path) -> None:
    code = f"import sys; from tests.core.test_readers_pauses import {case.__name__}; {case.__name__}(sys.argv[1])"
    shim.run(fault_library, "-c", code, str(directory))
