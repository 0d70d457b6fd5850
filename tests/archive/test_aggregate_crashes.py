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
from pmstore.archive._fsspec import FsspecPlace
from pmstore.archive._local import LocalPlace
from pmstore.archive._objects import place_of
from pmstore.testing._files.fixture import CrashFiles
from tests.archive.conftest import Server, Target

OF_ALL = {
    module._Work: ["begin", "_divide", "_write", "_write_small"],
    LocalGroup: ["allgather", "gather", "broadcast"],
    LocalPlace: ["open_shared", "write_shared"],
}
OF_THE_LEADER = {
    module._Work: ["_check_new", "_finish", "_create", "_retire"],
    LocalPlace: ["publish", "create", "delete"],
}
ON_S3 = {module._Work: ["_write_small", "_stream", "_create"], FsspecPlace: ["put", "create"], LocalGroup: ["gather"]}


def each(steps: dict[Any, list[str]], rank: int) -> list[Any]:
    return [pytest.param(kind, name, rank, id=f"{name}-{rank}") for kind, names in steps.items() for name in names]


def die_and_go_on(target: Target, meeting: Path, kind: Any, name: str, rank: int, when: str) -> None:
    """One of two processes is killed at a step. What is listed is whole, and the next group goes on and cleans up."""
    url, options = target
    aggregate(url, 1, {"w": np.zeros(1000)}, storage_options=options)
    real = getattr(kind, name)

    def dies(self: Any, *arguments: Any, **more: Any) -> Any:
        if when == "after":
            real(self, *arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    def work(group: LocalGroup) -> None:
        if group.rank == rank:
            setattr(kind, name, dies)
        own = {"w": np.full(1000, group.rank), "large": np.full(9000, group.rank, "u1")}
        aggregate(url, 2, own, group, part_size=9000, keep=1, storage_options=options)

    pids = []
    for member in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                work(LocalGroup(meeting, member, 2, timeout=60))
            finally:
                os._exit(0)
        pids.append(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) == -signal.SIGKILL
    os.kill(pids[1 - rank], signal.SIGKILL)  # as the launcher of a job does
    os.waitpid(pids[1 - rank], 0)
    found = latest_common([url], verify=True, storage_options=options)
    whole = open_aggregate(url, storage_options=options)
    assert found == whole.sequence and found in (1, 2)
    if found == 2:
        assert all((whole.read(member, "w") == member).all() for member in range(2))
    module._swept.clear()
    aggregate(url, 3, {"w": np.full(1000, 5)}, keep=1, storage_options=options)
    assert latest_common([url], verify=True, storage_options=options) == 3
    left = target.place().list("parts")
    assert len(left) == 1 and left[0].startswith(f"{3:016d}"), "what the dead have left is deleted"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind, name, rank", [*each(OF_ALL, 0), *each(OF_ALL, 1), *each(OF_THE_LEADER, 0)])
def test_a_process_that_is_killed(tmp_path: Path, kind: Any, name: str, rank: int, when: str) -> None:
    die_and_go_on(Target(str(tmp_path / "to"), {}), tmp_path / "group", kind, name, rank, when)
    assert len(os.listdir(tmp_path / "to" / "parts")) == 1, "no temporary files either"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind, name, rank", each(ON_S3, 0))
def test_a_process_that_is_killed_while_it_streams(
    s3: Server, tmp_path: Path, kind: Any, name: str, rank: int, when: str
) -> None:
    die_and_go_on(s3.target(), tmp_path / "group", kind, name, rank, when)


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
    assert report.tally.evaluated > 30
