"""Aggregates whose processes are killed between and inside of their steps: no half version is ever listed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
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


def killed(work: Callable[[], object]) -> None:
    """A forked process does some work, and is killed in it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def dies(self: Any, *arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_list_without_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some targets answer with an old list, or with none. It makes no version a leftover of a dead group."""
    aggregate(tmp_path, 1, {"w": b"first"})
    module._swept.clear()
    real = LocalPlace.list
    with monkeypatch.context() as patched:
        patched.setattr(LocalPlace, "list", lambda self, folder: [] if folder == "manifests" else real(self, folder))
        aggregate(tmp_path, 2, {"w": b"second"})
    assert [open_aggregate(tmp_path, version).read(0, "w") for version in (1, 2)] == [b"first", b"second"]


@pytest.mark.parametrize("name", ["_create", "_retire"])
def test_a_replacement_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The parts that the manifest names stay, and those of other groups go."""
    aggregate(tmp_path, 1, {"w": b"old"})
    with monkeypatch.context() as patched:
        patched.setattr(module._Work, name, dies)
        for _ in range(2):
            killed(lambda: aggregate(tmp_path, 1, {"w": b"new", "large": bytes(1000)}, replace=True, part_size=500))
    module._swept.clear()
    aggregate(tmp_path, 2, {"w": b"next"})
    found = open_aggregate(tmp_path, 1)
    assert found.is_whole(verify=True) and found.read(0, "w") == {"_create": b"old", "_retire": b"new"}[name]
    assert len(os.listdir(tmp_path / "parts")) == {"_create": 2, "_retire": 3}[name]


def test_spools_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(module._Work, "_stream", dies)
        killed(lambda: aggregate("memory://dead", 1, {"x": b"dead"}))
    assert len(os.listdir(tmp_path)) == 1
    stream, seen = module._Work._stream, []

    def beside(self: Any) -> None:
        """Another group sweeps while this one has a spool."""
        if not seen:
            seen.append(len(os.listdir(tmp_path)))
            aggregate("memory://beside", 1, {"x": b"beside"})
        stream(self)

    monkeypatch.setattr(module._Work, "_stream", beside)
    aggregate("memory://alive", 1, {"x": b"alive"})
    assert seen == [1] and not os.listdir(tmp_path)
    assert [open_aggregate(f"memory://{name}").read(0, "x") for name in ("beside", "alive")] == [b"beside", b"alive"]


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
