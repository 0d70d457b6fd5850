"""What is mounted where, as the system tells it."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["mount_of"]

_ESCAPED = re.compile(r"\\(0\d\d|1\d\d)")
"""A space, tab, newline, backslash or # in the name of a directory."""


def mount_of(directory: str) -> dict[str, str | None]:
    """Type and options of the mount that a directory is on, and the type below the upper layer of an overlay, if this
    process sees that layer. mountinfo names a mount by its device."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, str | None] = {"type": "unknown", "options": "", "upper": None}
    longest = -1
    real = os.path.realpath(directory)
    for line in _mountinfo().split("\n")[:-1]:
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        above = os.path.commonpath([point, real]) == point
        if fields[2] == number and above and len(point) > longest:
            longest = len(point)
            found = {"type": more[0], "options": ",".join([fields[5], *more[2:]]), "upper": None}
    upper = _upper_layer(found)
    if upper is not None and os.path.isdir(upper) and os.stat(upper).st_dev != device:
        below = mount_of(upper)
        found["upper"] = below["upper"] or below["type"]
    return found


def _mountinfo() -> str:
    try:
        return os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return ""


def _upper_layer(found: dict[str, str | None]) -> str | None:
    """The directory that takes the changes of an overlay; None for other file systems. The path is that of the process
    that mounted it: a container does not see it."""
    options = (found["options"] or "").split(",") if found["type"] == "overlay" else []
    return next((option.partition("=")[2] for option in options if option.startswith("upperdir=")), None)
