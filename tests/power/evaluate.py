"""The disk after a power cut: mounted, and the store recovered and compared with the acknowledged states."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pmstore

from .cuts import Cut, Images
from .file_systems import BY_NAME, FileSystem, check
from .record import STORE, Recorded
from .requests import SECTOR
from .system import loop, mounted
from .workloads import digest

CHUNK = 1 << 16


class Verdict(NamedTuple):
    """The results of a cut. refused: why the kernel did not mount the file system as it was, empty if it did.
    mounted: whether it was mounted in the end. lost: the blocks of a file that the file system's check gave up.
    failure: the problem of the store, empty if there is none. found: its state, or -1.
    """

    refused: str
    mounted: bool
    lost: str = ""
    failure: str = ""
    found: int = -1


class Disk:
    """A file that holds one image after another."""

    def __init__(self, path: Path, recorded: Recorded, honest: bool = True) -> None:
        self.path = path
        self.images = Images(recorded.recording, recorded.base, honest)
        used = recorded.base.reshape(-1, CHUNK).any(axis=1)
        for request in recorded.recording.requests:
            used[request.sector * SECTOR // CHUNK : -(-request.end * SECTOR // CHUNK)] = True
        self.chunks = np.flatnonzero(used)

    def become(self, cut: Cut) -> None:
        """Write the image of a cut; cuts come in the order of their places."""
        patches = list(self.images.patches(cut))
        disk = self.images.disk.reshape(-1, CHUNK)
        with open(self.path, "wb", buffering=0) as file:
            file.truncate(disk.size)
            for chunk in self.chunks:
                os.pwrite(file.fileno(), disk[chunk], int(chunk) * CHUNK)
            for offset, contents in patches:
                os.pwrite(file.fileno(), contents, offset)


def evaluate(recorded: Recorded, cut: Cut, image: Path, point: Path) -> Verdict:
    """Mount an image at a point, and recover the store. Without a journal the file system's check comes first."""
    system = BY_NAME[recorded.system]
    refused = ""
    if system.journal:
        try:
            return Verdict("", True, "", *_mounted(system, recorded, cut, image, point))
        except OSError as error:
            refused = f"mount says {error.strerror!r}"
    checked = check(system, image)
    if checked.failed:
        return Verdict(f"{refused}, and its check does not repair it: {checked.failed}".lstrip(", "), False)
    try:
        return Verdict(refused, True, checked.lost, *_mounted(system, recorded, cut, image, point))
    except OSError as error:
        return Verdict(f"{refused}, after its check mount says {error.strerror!r}", False)


def _mounted(system: FileSystem, recorded: Recorded, cut: Cut, image: Path, point: Path) -> tuple[str, int]:
    """Raises OSError if the image can't be mounted."""
    with loop(image) as device, mounted(device, point, system.kind, system.options):
        failure, found = examine(point / STORE, recorded.states, *recorded.bounds(cut.at))
        gc.collect()
        return failure, found


def examine(path: Path, states: list[str], least: int, most: int) -> tuple[str, int]:
    """The problem of a store, which must be in one of the states from least to most; and the state that it is in."""
    if not path.exists():
        return (f"the file is missing, and state {least} was acknowledged" if least >= 0 else ""), -1
    try:
        store = pmstore.open(path, "r+", media="file", verify=True)
    except (pmstore.Error, OSError) as error:
        return f"it does not open: {type(error).__name__}: {error}", -1
    try:
        report = store.check()
        if not report.ok:
            return f"check() finds: {report}", -1
        now = digest(store)
        fitting = [n for n in range(max(least, 0), most + 1) if states[n] == now]
        if not fitting:
            others = [n for n, known in enumerate(states) if known == now]
            what = f"it is in state {others}" if others else "it is in no state that was committed"
            return f"{what}, and has to be in one from {least} to {most}", -1
        store["after the cut"] = np.arange(3000.0)
        store.commit()
        if not store.check().ok:
            return "a commit after recovery leaves it damaged", -1
        return "", fitting[-1]
    except (pmstore.Error, OSError) as error:
        return f"it can't be used: {type(error).__name__}: {error}", -1
    finally:
        store._drop(discard=True)
