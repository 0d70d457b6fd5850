"""A workload on a file system on a device that keeps every write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import requests
from .file_systems import BY_NAME, FileSystem
from .system import ROOT, KernelTrace, mounted, recorded

STORE = "store.pm"


class WorkloadFailed(Exception):
    """The workload stopped, though no power was cut."""


@dataclass
class Recorded:
    """system: the name of a file system. recording: its requests; base: the disk before. states: digests.

    acknowledged: the last state that must not be lost from the beginning on, -1 if there need not be a store.
    committed: the last committed state then; one more may exist.
    """

    system: str
    workload: str
    recording: requests.Recording
    base: np.ndarray
    states: list[str]
    acknowledged: int = -1
    committed: int = -1

    def bounds(self, at: int) -> tuple[int, int]:
        """The last state that a cut at a place must not lose, and the last one that may exist."""
        least, most = self.acknowledged, self.committed
        for place, said in self.recording.said:
            if place >= at:
                break
            word, number = said.split()
            most = int(number)
            if word == "ack":
                least = most
        return least, min(most + 1, len(self.states) - 1)


def record(
    system: FileSystem,
    workload: str,
    folder: Path,
    base: Path | None = None,
    before: list[str] | None = None,
    preload: str = "",
) -> Recorded:
    """Run a workload on a new file system, or on an existing one (base), in a folder for the recording.

    before: with the workload "recover", states that the store may be in. preload: a library for the workload's process.
    """
    folder.mkdir()
    if base is None:
        system.made(folder / "image")
    else:
        copy(base, folder / "image")
    copy(folder / "image", folder / "base")
    point = folder / "mounted"
    point.mkdir()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OPENBLAS_NUM_THREADS="1")
    if preload:
        environment["LD_PRELOAD"] = preload
    with KernelTrace() as trace:
        with recorded(folder) as device:
            trace.begin(device)
            with mounted(device, point, system.kind, system.options):
                command = [sys.executable, "-m", "tests.power.workloads", workload, str(point / STORE)]
                done = subprocess.run(
                    [*command, str(trace.marker), *(before or [])],
                    pass_fds=[trace.marker],
                    capture_output=True,
                    text=True,
                    env=environment,
                    cwd=ROOT,
                )
            text = trace.end()  # before another process gets the device
        (folder / "trace").write_text(text)
    if done.returncode:
        raise WorkloadFailed(done.stderr.strip().rpartition("\n")[2])
    known = {"system": system.name, "workload": workload, "states": json.loads(done.stdout)}
    first = {"acknowledged": 0, "committed": len(before) - 2} if before else {}
    (folder / "known").write_text(json.dumps({**known, **first}))
    return load(folder)


def load(folder: Path) -> Recorded:
    """A recording that is kept in a folder."""
    known = json.loads((folder / "known").read_text())
    recording = requests.parse((folder / "trace").read_text())
    requests.fill(recording, requests.written(folder))
    base = np.fromfile(folder / "base", np.uint8)
    assert known["system"] in BY_NAME
    return Recorded(recording=recording, base=base, **known)


def keep(folder: Path, target: Path) -> None:
    """Copy the files that `load` needs."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("known", "trace", "base", "writes", "data"):
        copy(folder / name, target / name)


def copy(source: Path, target: Path) -> None:
    """Copy a file as a sparse one."""
    subprocess.run(["cp", "--sparse=always", str(source), str(target)], check=True)
