"""The header of a file, as docs/format.md describes it: for the version of the format, and for a file that does not
open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pmstore._core import ffi, lib

__all__ = ["NEWEST", "PLACES", "SIZE", "Header", "newest_header"]

_MAGIC = b"PMSTORE\x1a"
_ENDS = (220, 252)  # of the header in formats 0 and 1, where its checksum begins
_CLEAN = 1  # of the flags: the log is empty

NEWEST = len(_ENDS) - 1
"""The newest version of the format."""
SIZE = _ENDS[-1] + 4
PLACES = (0, 4096)
"""Of the two copies in the file."""


class Header(NamedTuple):
    """Some fields of a header. clean: the log is empty. write_features: bits that a writer must know."""

    generation: int
    version: int
    log_offset: int
    log_size: int
    clean: bool
    write_features: int


def newest_header(copies: Iterable[bytes]) -> Header | None:
    """The newer one of the valid copies of a header."""
    return max(filter(None, map(_parsed, copies)), default=None)


def _parsed(copy: bytes) -> Header | None:
    def number(start: int, end: int) -> int:
        return int.from_bytes(copy[start:end], "little")

    version = min(number(8, 12), NEWEST)
    end = _ENDS[version]
    if len(copy) < SIZE or not copy.startswith(_MAGIC):
        return None
    if lib.pm_crc32c(ffi.from_buffer(copy), end, 0) != number(end, end + 4):
        return None
    features = number(220, 224) if version else 0
    return Header(number(24, 32), version, number(56, 64), number(64, 72), bool(number(216, 220) & _CLEAN), features)
