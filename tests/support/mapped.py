"""What the kernel says of the mappings of this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mapped", "mappings"]


class Mapped(NamedTuple):
    """A mapping: its first address, the one behind it, permissions such as "rw-s", the file's inode, and VmFlags."""

    begin: int
    end: int
    permissions: str
    inode: int
    flags: set[str]


def mappings() -> Iterator[Mapped]:
    """All mappings, in the order of their addresses."""
    head: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            head = words
        elif words[0] == "VmFlags:":
            begin, end = (int(address, 16) for address in head[0].split("-"))
            yield Mapped(begin, end, head[1], int(head[4]), set(words[1:]))
