"""The changes that a program made in the files below a directory, in order; also as one file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from pmstore.testing._base.errors import CrashTestError

__all__ = ["INSIDE", "ROOT", "Event", "Inode", "Recording", "load", "save"]

INSIDE = b"\0"  # in the content of a link: the directory, whatever its path is
ROOT = 1
"""The number of the directory itself, in Recording.inodes."""

VERSION = 1
MAGIC = "pmstore files crash"


class Inode(NamedTuple):
    """A file, directory or symbolic link as it was before the program ran; empty if the program made it."""

    kind: str
    """"file", "directory" or "link"."""
    mode: int
    content: bytes
    """For a link: its target."""
    entries: dict[str, int]
    """For a directory: name → inode."""


class Event(NamedTuple):
    """One operation of the program. The kind determines which fields are used.

    ======== ==========================================================================================
    create   a new inode enters `folder` as `name`
    link     an inode enters `folder` as `name`, also
    unlink   `name` leaves `folder`
    rename   `inode` moves from `name` in `folder` to `name2` in `folder2`, where `other` was (0: nothing)
    exchange `inode` and `other` change places
    write    `data` at `offset` of `inode`
    size     `inode` becomes `length` bytes long, by truncate or fallocate
    sync     see `how`
    close    `inode`, which had been emptied, is closed
    said     the program wrote `data` to its standard output
    ======== ==========================================================================================
    """

    kind: str
    inode: int = 0
    offset: int = 0
    length: int = 0
    data: bytes = b""
    folder: int = 0
    name: str = ""
    folder2: int = 0
    name2: str = ""
    other: int = 0
    how: str = ""
    """For a sync: "file" (fsync), "data" (fdatasync), "range" (O_DSYNC, msync: `offset`, `length`), "handed"
    (sync_file_range: to the disk, but not out of its cache) or "all" (sync)."""
    call: str = ""
    """The system call."""
    path: str = ""
    """The file's name at that time, relative to the directory."""


class Recording(NamedTuple):
    """A run of a program."""

    command: list[str]
    inodes: dict[int, Inode]
    events: list[Event]
    mapped: frozenset[int]
    """Inodes that the program wrote through shared mappings. Their stores become visible only at the next recorded
    call."""

    @property
    def said(self) -> bytes:
        """The program's whole standard output."""
        return b"".join(event.data for event in self.events if event.kind == "said")


def save(path: Path, recording: Recording, **more: Any) -> None:
    """Writes a recording, and other values to keep with it, to a file."""
    record = {
        "magic": MAGIC,
        "version": VERSION,
        "command": recording.command,
        "inodes": [[number, *inode] for number, inode in recording.inodes.items()],
        "events": [list(event) for event in recording.events],
        "mapped": sorted(recording.mapped),
        **more,
    }
    path.write_bytes(msgpack.packb(record, unicode_errors="surrogateescape"))


def _unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError):
        if MAGIC.encode() in path.read_bytes()[:64]:
            return f"{path} is damaged: it ends too early, or was changed"
    return f"{path} is no recording of files" + (f": {error.strerror}" if isinstance(error, OSError) else "")


def load(path: Path) -> tuple[Recording, dict[str, Any]]:
    """A recording, and the values that were kept with it."""
    try:
        record = msgpack.unpackb(path.read_bytes(), unicode_errors="surrogateescape", strict_map_key=False)
    except FileNotFoundError:
        raise CrashTestError(f"{path}: no such file") from None
    except Exception as error:
        raise CrashTestError(_unreadable(path, error)) from None
    if not isinstance(record, dict) or record.pop("magic", None) != MAGIC:
        raise CrashTestError(f"{path} is no recording of files")
    version = record.pop("version", None)
    if version != VERSION:
        raise CrashTestError(
            f"{path} was written in version {version} of the format, this pmstore reads version {VERSION}: "
            "replay it with the pmstore that wrote it, or run the crash test again"
        )
    try:
        inodes = {number: Inode(*rest) for number, *rest in record.pop("inodes")}
        events = [Event(*fields) for fields in record.pop("events")]
        recording = Recording(record.pop("command"), inodes, events, frozenset(record.pop("mapped")))
    except (KeyError, TypeError, ValueError) as error:
        raise CrashTestError(f"{path} is damaged: {error!r}") from None
    return recording, record
