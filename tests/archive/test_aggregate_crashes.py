"""Aggregates whose processes are killed between and inside of their steps: no half version is ever listed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmstore.archive import LocalGroup, aggregate, latest_common, open_aggregate
from pmstore.archive import _aggregate as module
from pmstore.archive._local import LocalPlace
from pmstore.archive._objects import place_of
from pmstore.testing._files.fixture import CrashFiles

STEPS = {
    module._Work: ["begin", "_look", "_divide", "_write", "_write_small", "_stream", "_finish", "_create", "_retire"],
    LocalGroup: ["allgather", "gather", "broadcast"],
    LocalPlace: ["open_shared", "write_shared", "publish", "create", "delete"],
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [(kind, name) for kind, names in STEPS.items() for name in names], ids=lambda s: s[1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed(tmp_path: Path, rank: int, step: tuple[Any, str], when: str) -> None:
    """No half version is ever listed, and the next group goes on, with all that is whole."""
    url = tmp_path / "to"
    aggregate(url, 1, {"w": np.zeros(1000)})
    kind, name = step
    real = getattr(kind, name)

    def dies(self: Any, *arguments: Any, **more: Any) -> Any:
        if when == "after":
            real(self, *arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    def work(group: LocalGroup) -> None:
        if group.rank == rank:
            setattr(kind, name, dies)
        own = {"w": np.full(1000, group.rank), "large": np.full(9000, group.rank, "u1")}
        aggregate(url, 2, own, group, part_size=9000, keep=1)

    pids = []
    for member in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                work(LocalGroup(tmp_path / "group", member, 2, timeout=60))
            finally:
                os._exit(0)
        pids.append(pid)
    killed = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) == -signal.SIGKILL
    if killed:
        os.kill(pids[1 - rank], signal.SIGKILL)  # as the launcher of a job does
    os.waitpid(pids[1 - rank], 0)
    found = latest_common([url], verify=True)
    assert found == open_aggregate(url).sequence
    assert found == 2 if not killed else found in (1, 2)
    if found == 2:
        assert all((open_aggregate(url).read(member, "w") == member).all() for member in range(2))
    module._swept.clear()
    own = {"w": np.full(1000, 5)}
    aggregate(url, 3, own, keep=1)
    assert latest_common([url], verify=True) == 3
    left = os.listdir(url / "parts")
    assert len(left) == 1 and left[0].startswith(f"{3:016d}"), "what the dead have left is deleted"


def makes(directory: Path) -> None:
    for version in (1, 2, 3):
        own = {"a": np.full(100, version), "b": bytes([version]) * 700, "c": bytes([version]) * 1000}
        aggregate(directory / "to", version, own, part_size=1000, keep=2)
        print(version)


def checks(directory: Path, said: str) -> None:
    module._swept.clear()
    done = int(said.split()[-1]) if said else 0
    found = latest_common([directory / "to"], verify=True)
    assert found is not None or not done
    assert (found or 0) >= done
    for version in map(int, place_of(directory / "to").list("manifests")):
        shards = open_aggregate(directory / "to", version).shards(0)
        assert shards["b"] == bytes([version]) * 700 and shards["c"] == bytes([version]) * 1000
    aggregate(directory / "to", 9, {"a": b"new"}, keep=1)
    assert [name[:16] for name in os.listdir(directory / "to" / "parts")] == [f"{9:016d}"]


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_crash_at_any_moment(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, filesystem: str) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    report = CrashFiles(tmp_path / "files").run(makes, checks, filesystem=filesystem, stale=3, budget=200)
    assert report.tally.judged > 30
