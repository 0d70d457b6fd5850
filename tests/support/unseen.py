"""Writes that the kernel's page protection does not tell."""

from __future__ import annotations

import fcntl
import struct
from typing import Any

import numpy as np

from pmstore._values.array import address_of

PAGE = 4096
PAGEMAP_SCAN = 0xC0606610
WRITTEN, PROTECT = 2, 1


def hide(array: np.ndarray[Any, Any]) -> None:
    """Protect the pages of an array again after a write, as if a device had written to them past the protection.

    An array that is not armed stays as it is, as there is nothing that could miss the write.
    """
    address = address_of(array)
    start, end = address // PAGE * PAGE, -(-(address + array.nbytes) // PAGE) * PAGE
    found = bytearray(24 * 512)
    view = np.frombuffer(found, "u1")
    at = address_of(view)
    with open("/proc/self/pagemap", "rb") as pagemap:
        while start < end:
            argument = bytearray(struct.pack("=12Q", 96, PROTECT, start, end, 0, at, 512, 0, 0, WRITTEN, 0, WRITTEN))
            try:
                fcntl.ioctl(pagemap, PAGEMAP_SCAN, argument)
            except OSError:
                return
            (start,) = struct.unpack_from("=Q", argument, 32)
