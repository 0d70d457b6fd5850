"""How much memory the shards of a worker may take."""

from __future__ import annotations

from pathlib import Path

SHARE = 0.6
"""The part of the available memory that shards may take in all processes together."""

_GROUPS = Path("/sys/fs/cgroup")
_FILES = (  # of the two versions of cgroups: the limit, what is used, and the cache of files that it contains
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available() -> int:
    """The bytes of memory that this process could take: the free ones, within the limits of its cgroups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([free, *(left for folder in _cgroups() for left in _left(folder))])


def _cgroups() -> list[Path]:
    """The folders of the cgroups that limit the memory of this process, from the inside out."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _GROUPS / controllers
            inner = root / name.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return folders


def _left(folder: Path) -> list[int]:
    """The bytes that a cgroup leaves; nothing if it has no limit."""
    for limit, used, cache in _FILES:
        try:
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
            figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return [] if most == "max" else [max(0, int(most) - now + int(figures.get(cache, 0)))]
        except (OSError, ValueError):
            continue
    return []
