"""Recording what stores do to their durable bytes, for crash tests: csrc/media/trace.h, as Python sees it."""

from __future__ import annotations

from pmstore._core import ffi, lib, require_ok
from pmstore._errors import OutOfMemoryError

__all__ = ["Trace"]


class Trace:
    """Records the operations of stores on their durable bytes, makes operations fail, and gives stores ids that are the
    same in every run (seed; 0: random ones).
    """

    def __init__(self, seed: int = 0) -> None:
        pointer = lib.pm_trace_new(seed)
        if not pointer:
            raise OutOfMemoryError("no memory for a trace")
        self.pointer = ffi.gc(pointer, lib.pm_trace_free)

    def __len__(self) -> int:
        return int(lib.pm_trace_count(self.pointer))

    def clear(self) -> None:
        lib.pm_trace_clear(self.pointer)

    def raw(self) -> tuple[bytes, bytes]:
        """The pm_events, and the bytes that they wrote."""
        if lib.pm_trace_incomplete(self.pointer):
            raise OutOfMemoryError("no memory to record all that the store did: record less")
        size = len(self) * ffi.sizeof("pm_event")
        events = ffi.buffer(lib.pm_trace_events(self.pointer), size)[:] if size else b""
        size = lib.pm_trace_bytes(self.pointer)
        return events, ffi.buffer(lib.pm_trace_data(self.pointer), size)[:] if size else b""

    def fail(self, operations: int, at: int, error: int, lasting: bool = False) -> None:
        """Count the operations (PM_OPERATION_* bits) from now on. Number `at` fails with errno `error` (0: a write is
        cut short), and with `lasting` all later ones fail, too. at=0: none fails.
        """
        lib.pm_trace_fail(self.pointer, ffi.new("pm_fault *", (operations, error, at, lasting)))

    def sync_ranges(self, how: bool | None) -> None:
        """Whether records on files are written by a synced write of their range, as on ext4 and xfs, or by write and
        fdatasync, as elsewhere. None: by the file system.
        """
        lib.pm_trace_sync_ranges(self.pointer, -1 if how is None else int(how))

    def background(self, seed: int, pace: int) -> None:
        """Make stores that are opened later do their background work in an order that the seed decides. pace: the
        probability, in 256ths, of a piece of work at each point where it is possible; 0: only work that a thread waits
        for. No store may be open.
        """
        require_ok(lib.pm_trace_background(self.pointer, seed, pace))

    def operations(self) -> tuple[int, int]:
        """How many were counted since `fail`, and how many of them failed."""
        faults = ffi.new("uint64_t *")
        return int(lib.pm_trace_operations(self.pointer, faults)), int(faults[0])
