"""The file systems: how each is made, mounted, and checked after a power cut."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
EXT4 = "mkfs.ext4 -q -F -b 4096 -g 8192 -N 64 -m 0 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard"
PACKAGES = {"mkfs.ext4": "e2fsprogs", "e2fsck": "e2fsprogs", "mkfs.xfs": "xfsprogs"}


class FileSystem(NamedTuple):
    """name: on the command line. kind, options: of mount. make: a command; the image's path is appended.

    size: of the image, in bytes. journal: whether the kernel repairs the file system when it is mounted. Without a
    journal, or if the kernel refuses, only its check can repair it.
    """

    name: str
    kind: str
    make: str
    options: str = ""
    size: int = 64 * MIB
    journal: bool = True

    def made(self, image: Path) -> None:
        with open(image, "wb") as file:
            file.truncate(self.size)
        subprocess.run([*self.make.split(), str(image)], check=True, capture_output=True)

    def needs(self) -> list[str]:
        """The programs that are needed."""
        return [self.make.split()[0], *(["e2fsck"] if self.kind == "ext4" else [])]


ALL = [
    FileSystem("ext4-ordered", "ext4", f"{EXT4} -J size=4", "data=ordered"),
    FileSystem("ext4-journal", "ext4", f"{EXT4} -J size=8", "data=journal"),
    FileSystem("ext4-nojournal", "ext4", f"{EXT4} -O ^has_journal", journal=False),
    # --unsupported: smaller than the minimum of mkfs.xfs, so that thousands of cuts are quick.
    FileSystem("xfs", "xfs", "mkfs.xfs -q -f -K --unsupported -d agcount=1 -l size=8m"),
]
BY_NAME = {one.name: one for one in ALL}


def missing(systems: list[FileSystem]) -> list[str]:
    """Debian packages of programs that are missing here."""
    return sorted({PACKAGES[name] for one in systems for name in one.needs() if not shutil.which(name)})


LOST = re.compile(r"^Inode \d+[, ].*(?:extent|i_blocks|i_size|checksum|illegal|corrupt|invalid).*", re.MULTILINE)
HARMLESS = "could be shorter"


class Checked(NamedTuple):
    """failed: the output of the check, if it could not repair the file system. lost: the first place in a file's own
    map of blocks that the check gave up. The file's contents there are gone, whatever the program has synced.
    """

    failed: str = ""
    lost: str = ""


def lost_blocks(said: str) -> str:
    """The message of e2fsck about the map of a file's blocks, if it gave up a part of it."""
    return next((found[0] for found in LOST.finditer(said) if HARMLESS not in found[0]), "")


def check(system: FileSystem, image: Path) -> Checked:
    """Let the file system's check repair an image."""
    commands = ["xfs_repair -L"] if system.kind == "xfs" else ["e2fsck -fy", "e2fsck -fy -B 4096 -b 8192"]
    for command in commands:  # for ext4, also with the other superblock
        done = subprocess.run([*command.split(), str(image)], capture_output=True, text=True, check=False)
        if done.returncode in (0, 1, 2):
            return Checked(lost=lost_blocks(done.stdout))
    return Checked(failed=" ".join(done.stdout.split())[:200])
