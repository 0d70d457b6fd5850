"""Shards that have no room: data larger than the memory of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmstore.scale import Holder, Serial, Shard, Tag, shards_of
from pmstore.scale import _memory as memory
from pmstore.scale._holder import Describe
from tests.support.sharded import Walk, result, rows

GROUPS = Path("/sys/fs/cgroup")
SIZE = 8 << 20  # bytes of a shard


class Copying(Walk):
    """Holds copies of its shards, which take private memory, unlike memory maps."""

    max_iter = 3

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        return super().map(shard[:: len(shard) // 100], shared, rng)  # needs no memory of its own

    def prepare(self, shard: Any) -> Any:
        return np.array(shard)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """60 shards of 8 MiB."""
    paths = [tmp_path / f"{i}.npy" for i in range(60)]
    some = np.resize(rows(0, 1000), (SIZE // 32, 4))
    for i, path in enumerate(paths):
        np.save(path, some + i)
    return paths


def test_a_holder_keeps_what_has_room(tmp_path: Path) -> None:
    loads: list[int] = []

    def load(i: int) -> Any:
        loads.append(i)
        return rows(i, 100)  # 3,200 bytes

    holder = Holder("here", memory=7000)
    shards = [Shard(load, i) for i in range(4)]
    for epoch in range(3):
        for i, shard in enumerate(shards):
            reply = holder.answer(i, shard, Describe(), {}, Tag("run", 1, epoch))
            assert reply.failure is None
    assert loads.count(0) == loads.count(1) == 1
    assert loads.count(2) == loads.count(3) == 3


def test_memory_maps_take_no_room(files: list[Path]) -> None:
    holder = Holder("here", memory=1)
    for i, path in enumerate(files[:3]):
        holder.answer(i, Shard(np.load, path, mmap_mode="r"), Describe(), {}, Tag("run", 1, 0))
    assert len(holder._held) == 3


def test_what_is_available_is_within_the_limit_of_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.available()
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for names in memory._FILES:
        folder = tmp_path / names[0]
        folder.mkdir()
        (folder / names[0]).write_text("1000000\n")
        (folder / names[1]).write_text("900000\n")
        (folder / "memory.stat").write_text(f"anon 200000\n{names[2]} 700000\n")
        monkeypatch.setattr(memory, "_cgroups", lambda folder=folder: [folder])
        assert memory.available() == 800000
    (folder / names[0]).write_text("max\n")
    assert memory.available() > 800000


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup with a limit of 160 MiB."""
    group = GROUPS / "memory" / "pmstore-test"
    limit = group / "memory.limit_in_bytes"
    if not (GROUPS / "memory").is_dir():
        group, limit = GROUPS / "pmstore-test", GROUPS / "pmstore-test" / "memory.max"
    try:
        group.mkdir(exist_ok=True)
        limit.write_text(str(160 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.long
@pytest.mark.slow
def test_data_three_times_the_memory_limit_are_fitted(files: list[Path], limited: Path, path: Path) -> None:
    """Neither the coordinator nor its worker can take more than a third of the data."""
    expected = result(Copying(files).run(engine=Serial()))
    command = [sys.executable, "-m", "tests.scale.test_memory", str(limited), str(path), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "lost 0\n"), done.stderr  # the system killed no process
    assert result(Copying(files).run(path, "walk", engine=Serial())) == expected


def test_a_memory_map_whose_changes_are_not_in_its_file(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "rows.bin", np.float64, "w+", shape=(32, 2))
    array.flush()
    changed = np.memmap(tmp_path / "rows.bin", np.float64, "c", shape=(32, 2))
    changed[...] = 1.0
    for data in (changed, [changed]):
        assert all((shard() == 1.0).all() for shard in shards_of(data))


def in_group(group: str, store: str, *files: str) -> None:
    """The program that fits in the cgroup."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    copying = Copying(list(files))
    copying.run(store, "walk", engine=1)
    print("lost", int(copying.history_["lost"].sum()))


if __name__ == "__main__":
    in_group(*sys.argv[1:])
