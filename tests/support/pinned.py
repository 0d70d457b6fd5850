"""Writes to memory that is pinned, past the kernel's page protection: io_uring's registered buffers, without a library.

A registered buffer stays pinned. A read into it copies through the kernel's own mapping of the pages, as a device
would, so that there is no page fault for the program's mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from typing import Any

import numpy as np

from pmstore._values.array import address_of

SETUP, ENTER, REGISTER = 425, 426, 427  # the system calls' numbers, on every processor but Alpha
REGISTER_BUFFERS, READ_FIXED, GETEVENTS = 0, 4, 1
SQES_AT = 0x10000000
SINGLE_MMAP = 1  # a feature of Linux 5.4: both rings are in one mapping

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> int:
    result = int(LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Pinned:
    """The memory of a contiguous array, registered with io_uring."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        """Raises OSError if there is no io_uring here, or if it may not pin so much."""
        if platform.machine() not in ("x86_64", "aarch64"):
            raise OSError("the numbers of its system calls are not known")
        parameters = ctypes.create_string_buffer(120)
        self.fd = _call(SETUP, 4, parameters)
        *_, features = struct.unpack_from("6I", parameters)
        self.sq = struct.unpack_from("8I", parameters, 40)  # head, tail, mask, entries, flags, dropped, array
        self.cq = struct.unpack_from("8I", parameters, 80)  # head, tail, mask, entries, overflow, cqes
        if not features & SINGLE_MMAP:
            raise OSError("io_uring is too old")
        room = max(self.sq[6] + 4 * self.sq[3], self.cq[5] + 16 * self.cq[3])
        self.rings = mmap.mmap(self.fd, room, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.entries = mmap.mmap(
            self.fd, 64 * self.sq[3], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=SQES_AT
        )
        self.address, self.length = address_of(array), array.nbytes
        vector = struct.pack("2Q", self.address, self.length)
        _call(REGISTER, self.fd, REGISTER_BUFFERS, vector, 1)

    def read(self, fd: int, at: int, length: int, offset: int = 0) -> None:
        """Read so many bytes of a file, from this offset on, to bytes `at` of the buffer."""
        entry = struct.pack("BBHiQQIIQH22x", READ_FIXED, 0, 0, fd, offset, self.address + at, length, 0, 1, 0)
        self.entries[:64] = entry
        (tail,) = struct.unpack_from("I", self.rings, self.sq[1])
        struct.pack_into("I", self.rings, self.sq[6] + 4 * (tail % self.sq[3]), 0)
        struct.pack_into("I", self.rings, self.sq[1], tail + 1)
        _call(ENTER, self.fd, 1, 1, GETEVENTS, None, 0)
        (head,) = struct.unpack_from("I", self.rings, self.cq[0])
        _, result, _ = struct.unpack_from("QiI", self.rings, self.cq[5] + 16 * (head % self.cq[3]))
        struct.pack_into("I", self.rings, self.cq[0], head + 1)
        if result != length:
            raise OSError(-result, f"a fixed read of {length} bytes gave {result}")

    def close(self) -> None:
        self.entries.close()
        self.rings.close()
        os.close(self.fd)
