"""Aggregates: the shards of many processes, in few objects, as a whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.archive import LocalGroup, aggregate, latest_common, open_aggregate
from pmstore.archive import _aggregate as module
from pmstore.archive._objects import place_of
from tests.archive.conftest import Target

FORK = multiprocessing.get_context("fork")
DTYPE = np.dtype([("a", "<i4"), ("b", ">f8", (2,))])


def shards_of(rank: int, sequence: int = 0) -> dict[str, Any]:
    """What process `rank` has: X is split by rows, unevenly."""
    noise = np.random.default_rng((rank, sequence))
    return {
        "X": np.arange(700.0).reshape(100, 7)[10 * rank * rank : 10 * (rank + 1) ** 2] + sequence,
        "bytes": b"%d" % rank * rank,
        "fortran": np.asfortranarray(noise.normal(size=(20, 30))),
        "large": noise.integers(0, 255, 9000 + rank, np.uint8),
        "structured": np.zeros(rank, DTYPE),
        "scalar": np.float32(rank),
        "empty": np.empty((3, 0)),
        f"of {rank}": np.array(["text", "ü"]),
        "slice": np.arange(100)[::3],
        "days": np.array(["2026-01-01"], "M8[D]"),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    for name, value in expected.items():
        if isinstance(value, bytes):
            assert found[name] == value
            continue
        value = np.asarray(value)
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].tobytes() == value.tobytes() and found[name].flags.writeable
    return found.keys() == expected.keys()


def together(count: int, work: Callable[[LocalGroup], Any], folder: Path, *, timeout: float = 60) -> list[Any]:
    """The results of threads that make a group: what each returned or raised."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(LocalGroup(folder, rank, count, barrier, timeout=timeout))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def in_processes(count: int, work: Callable[[LocalGroup], Any], folder: Path, barrier: Any = None) -> list[int]:
    """The exit statuses of forked processes that make a group."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(LocalGroup(folder, rank, count, barrier, timeout=60))
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


# ---- what is written is read


def test_four_processes(target: Target, tmp_path: Path) -> None:
    if target.url.startswith("local:"):
        pytest.skip("a folder, once more")

    def work(group: LocalGroup) -> Any:
        options = {"rows": ["X"], "part_size": 8192, "storage_options": target.options}
        return aggregate(target.url, 7, shards_of(group.rank), group, **options)

    results = together(3, work, tmp_path / "group")
    first = results[0]
    assert results == [first] * 3 and first.sequence == 7 and first.shards == 30
    whole = open_aggregate(target.url, storage_options=target.options)
    assert (whole.sequence, whole.ranks, whole.nbytes) == (7, 3, first.nbytes)
    assert whole.is_whole(verify=True)
    for rank in range(3):
        assert same(whole.shards(rank), shards_of(rank)) and whole.names(rank) == list(shards_of(rank))
    assert np.array_equal(whole.read(2, "fortran"), shards_of(2)["fortran"])
    assert whole.shards(1)["fortran"].flags.f_contiguous
    assert latest_common([target.url], storage_options=target.options, verify=True) == 7
    place = target.place()
    assert len(place.list("parts")) == first.parts and place.list("manifests") == ["0000000000000007"]
    assert not [name for name in os.listdir(tmp_path / "group") if name.startswith("pmstore")], "spools are removed"


@pytest.mark.parametrize("given", [True, False], ids=["barrier", "fifos"])
def test_forked_processes(tmp_path: Path, given: bool) -> None:
    def work(group: LocalGroup) -> None:
        with group:
            for sequence in range(5):
                aggregate(
                    tmp_path / "to", sequence, shards_of(group.rank, sequence), group, rows=["X"], part_size="4KiB"
                )

    barrier = FORK.Barrier(4) if given else None
    assert in_processes(3 if not given else 4, work, tmp_path / "group", barrier) == [0] * (4 if given else 3)
    for sequence in range(5):
        whole = open_aggregate(tmp_path / "to", sequence)
        assert whole.is_whole(verify=True)
        assert all(same(whole.shards(rank), shards_of(rank, sequence)) for rank in range(whole.ranks))
    left = [name for name in os.listdir(tmp_path / "group") if not name.startswith(("up", "down"))]
    assert len(left) <= 1, "messages are removed when all have read them"


def test_one_process_alone(tmp_path: Path) -> None:
    result = aggregate(tmp_path, 1, {"a": np.arange(5)})
    assert result == (1, 1, 1, 40)
    assert np.array_equal(open_aggregate(tmp_path).shards(0)["a"], np.arange(5))


def test_nothing_at_all(tmp_path: Path) -> None:
    assert aggregate(tmp_path, 0, {}) == (0, 0, 0, 0)
    assert open_aggregate(tmp_path).shards(0) == {} and latest_common([tmp_path], verify=True) == 0


def test_arrays_of_a_store(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        store["model/w"] = np.arange(12.0).reshape(3, 4)
        store.commit()
        aggregate(tmp_path / "to", store.sequence, {"model/w": store["model/w"]})
        assert np.array_equal(open_aggregate(tmp_path / "to", store.sequence).read(0, "model/w"), store["model/w"])


# ---- few files


@pytest.mark.parametrize("sizes", [[100] * 64, [1] * 1000, [999, 1, 1000], [2500, 10, 0, 1000, 999], [0, 0], [1001]])
@pytest.mark.parametrize("remote", [False, True])
def test_few_objects(tmp_path: Path, sizes: list[int], remote: bool) -> None:
    """ceil(bytes / part) + 1 at most; shards of a part's size or more go alone."""
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}" if remote else str(tmp_path / "to")

    def work(group: LocalGroup) -> Any:
        own = {f"s{k}": b"%d" % (k % 10) * size for k, size in enumerate(sizes) if k % 3 == group.rank}
        return aggregate(url, 3, own, group, part_size=1000)

    results = together(3, work, tmp_path / "group")
    assert results[0].nbytes == sum(sizes) and results[0].shards == len(sizes)
    place = place_of(url)
    parts = place.list("parts")
    assert len(parts) == results[0].parts <= -(-sum(sizes) // 1000)
    large = [size for size in sizes if size >= 1000]
    assert sorted(place.size(f"parts/{name}") for name in parts if "-r" in name) == sorted(large)
    assert all(place.size(f"parts/{name}") <= 1000 for name in parts if "-n" in name)
    assert open_aggregate(url).is_whole(verify=True)


# ---- another number of processes


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 90, 200])
def test_rows_for_another_number_of_processes(tmp_path: Path, ranks: int) -> None:
    together(3, lambda group: aggregate(tmp_path / "to", 1, shards_of(group.rank), group, rows=["X"]), tmp_path / "g")
    whole = open_aggregate(tmp_path / "to")
    assert whole.row_counts() == {"X": 90}
    expected = np.arange(700.0).reshape(100, 7)[:90]
    shares = [whole.share(rank, ranks)["X"] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(shares), expected)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert np.array_equal(whole.rows("X", 7, 44), expected[7:44]) and whole.rows("X", 90).shape == (0, 7)
    for begin, end in ((-1, 5), (5, 4), (0, 91)):
        with pytest.raises(IndexError):
            whole.rows("X", begin, end)
    with pytest.raises(KeyError):
        whole.rows("large")
    with pytest.raises(ValueError):
        whole.share(3, 3)


def test_rows_that_do_not_fit_together(tmp_path: Path) -> None:
    def work(group: LocalGroup) -> Any:
        return aggregate(tmp_path / "to", 1, {"X": np.zeros((3, 4 + group.rank))}, group, rows=["X"])

    for result in together(2, work, tmp_path / "group"):
        assert isinstance(result, ValueError) and "the rows of 'X' differ" in str(result)
    assert os.listdir(tmp_path / "to" / "parts") == [] and latest_common([tmp_path / "to"]) is None


# ---- versions


def test_the_newest_version_that_all_have(tmp_path: Path) -> None:
    urls = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for url, versions in zip(urls, ([1, 2, 3, 5], [2, 3, 5, 6], [2, 3, 5])):
        for version in versions:
            aggregate(url, version, {"w": np.full(100, version), "v": b"1234"}, part_size=300)
    assert latest_common(urls) == 5 == latest_common(iter(urls), verify=True)
    part = max((tmp_path / "b" / "parts").glob(f"{5:016d}-*"), key=lambda path: path.stat().st_size)
    damaged = bytearray(part.read_bytes())
    damaged[7] ^= 1
    part.write_bytes(damaged)
    assert latest_common(urls) == 5 and latest_common(urls, verify=True) == 3
    part.write_bytes(damaged[:-1])
    assert latest_common(urls) == 3
    (tmp_path / "c" / "manifests" / f"{3:016d}").write_bytes(b"pmsaggr1" + bytes(100))
    assert latest_common(urls) == 2
    for path in (tmp_path / "a" / "parts").iterdir():
        path.unlink()
    assert latest_common(urls) is None and latest_common(urls[1]) == 6
    assert latest_common([tmp_path / "none", *urls]) is None
    with pytest.raises(ValueError, match="no urls"):
        latest_common([])


def test_versions_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(pmstore.ArchiveError, match="holds no version that is whole"):
        open_aggregate(tmp_path / "none")
    aggregate(tmp_path, 1, {"a": b"x"})
    with pytest.raises(pmstore.ArchiveError, match="version 2: there is none"):
        open_aggregate(tmp_path, 2)
    whole = open_aggregate(tmp_path)
    for rank in (-1, 1):
        with pytest.raises(IndexError):
            whole.shards(rank)
    with pytest.raises(KeyError):
        whole.read(0, "b")


def test_a_version_is_made_once(tmp_path: Path) -> None:
    aggregate(tmp_path, 1, {"a": b"x"})
    with pytest.raises(pmstore.ArchiveConflictError, match="has version 1 already"):
        aggregate(tmp_path, 1, {"a": b"y"})
    assert open_aggregate(tmp_path).read(0, "a") == b"x" and len(os.listdir(tmp_path / "parts")) == 1
    aggregate(tmp_path, 1, {"a": b"z"}, replace=True)
    assert open_aggregate(tmp_path).read(0, "a") == b"z" and len(os.listdir(tmp_path / "parts")) == 1


def test_two_groups_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose manifest is later has no version, and takes its parts away."""
    real = module._Work._create

    def create(self: Any, data: bytes) -> Any:
        monkeypatch.setattr(module._Work, "_create", real)
        aggregate(tmp_path, 1, {"a": b"theirs"})
        return real(self, data)

    monkeypatch.setattr(module._Work, "_create", create)
    with pytest.raises(pmstore.ArchiveConflictError, match="another group"):
        aggregate(tmp_path, 1, {"a": b"ours"})
    assert open_aggregate(tmp_path).read(0, "a") == b"theirs" and len(os.listdir(tmp_path / "parts")) == 1


def test_some_versions_are_kept(tmp_path: Path) -> None:
    for version in (3, 4, 9, 10):
        aggregate(tmp_path, version, {"a": b"%d" % version, "b": bytes(50)}, keep=2, part_size=10)
    assert [open_aggregate(tmp_path, version).read(0, "a") for version in (9, 10)] == [b"9", b"10"]
    assert sorted(os.listdir(tmp_path / "manifests")) == [f"{9:016d}", f"{10:016d}"]
    assert {name[:16] for name in os.listdir(tmp_path / "parts")} == {f"{9:016d}", f"{10:016d}"}


@pytest.mark.parametrize("name", ["engine.step", "0000000000000001-notes.txt", "0000000000000001-0123456789ab-n0000"])
def test_only_parts_of_aggregates_are_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / name).write_text("mine")
    leftover = tmp_path / "parts" / "0000000000000003-0123456789ab-n0000-000000"
    leftover.write_text("of a group that died")
    for version in (1, 2):
        aggregate(tmp_path, version, {"a": b"x"}, keep=1)
    assert (tmp_path / "parts" / name).read_text() == "mine" and not leftover.exists()


def test_an_archive_of_a_drain_is_no_place_for_aggregates(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with pmstore.open(tmp_path / "s.pm") as store:
        store["w"] = np.arange(5000.0)
        with store.drain(tmp_path / "to") as drain:
            drain.wait()
    with pytest.raises(pmstore.ArchiveConflictError, match="a place of their own"):
        aggregate(tmp_path / "to", 7, {"x": np.arange(5)})
    assert pmstore.archive.open(tmp_path / "to").verify().ok


def test_ranks_that_write_to_other_folders(tmp_path: Path) -> None:
    """Such as those on a machine where a mount is missing. The version before stays."""

    def work(group: LocalGroup, version: int, folders: list[str]) -> Any:
        shards = {"x": np.full(1000, group.rank)}
        return aggregate(tmp_path / folders[group.rank], version, shards, group, part_size=1000, keep=1)

    assert together(2, lambda group: work(group, 1, ["to", "to"]), tmp_path / "one")[0].parts == 2
    for error in together(2, lambda group: work(group, 2, ["to", "other"]), tmp_path / "two"):
        assert isinstance(error, pmstore.ArchiveUnavailableError) and "other folders" in str(error)
    assert latest_common([tmp_path / "to"]) == 1 and open_aggregate(tmp_path / "to").is_whole(verify=True)


# ---- damage


def test_what_does_not_match_is_not_returned(tmp_path: Path) -> None:
    aggregate(tmp_path, 1, {"a": np.arange(100), "b": b"x" * 100, "X": np.zeros((10, 3))}, rows=["X"])
    (part,) = (tmp_path / "parts").iterdir()
    sound = part.read_bytes()
    for at in (5, 850, 950):
        part.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        whole = open_aggregate(tmp_path)
        with pytest.raises(pmstore.ArchiveDamagedError, match=r"version 1: '\w' of rank 0 in parts/.* is damaged"):
            whole.shards(0)
        assert not whole.is_whole(verify=True) and whole.is_whole()
    with pytest.raises(pmstore.ArchiveDamagedError):
        open_aggregate(tmp_path).rows("X", 9, 10)
    assert np.array_equal(open_aggregate(tmp_path).read(0, "a"), np.arange(100)), "the others can be read"
    part.write_bytes(sound[:-1])
    with pytest.raises(pmstore.ArchiveDamagedError, match="is shorter"):
        whole.shards(0)
    part.unlink()
    with pytest.raises(pmstore.ArchiveDamagedError, match="is missing"):
        whole.shards(0)


def test_every_damage_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    aggregate(tmp_path, 1, {"a": np.arange(3), "X": np.zeros((2, 3))}, rows=["X"])
    (path,) = (tmp_path / "manifests").iterdir()
    sound = path.read_bytes()
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(pmstore.ArchiveDamagedError):
            open_aggregate(tmp_path, 1)
        path.write_bytes(sound[:at])
        with pytest.raises(pmstore.ArchiveDamagedError):
            open_aggregate(tmp_path, 1)
    os.rename(path, path.with_name(f"{2:016d}"))
    path.with_name(f"{2:016d}").write_bytes(sound)
    with pytest.raises(pmstore.ArchiveDamagedError, match="belongs to version 1"):
        open_aggregate(tmp_path, 2)


def hostile(raw: dict[str, Any]) -> list[tuple[str, Any]]:
    def table(*changes: tuple[int, int, int]) -> bytes:
        made = np.frombuffer(raw["pieces"], "<u8").reshape(-1, 5).copy()
        for row, at, value in changes:
            made[row, at] = value
        return made.tobytes()

    return [
        ("parts", [["../../etc/passwd", *raw["parts"][0][1:]]]),
        ("parts", [["/etc/passwd", *raw["parts"][0][1:]]]),
        ("parts", [[raw["parts"][0][0], 1 << 60, raw["parts"][0][2]]]),
        ("parts", raw["parts"] * 2),
        ("parts", [[1, 2, 3]]),
        ("kinds", [["|O", [3], "C", False], raw["kinds"][1]]),
        ("kinds", [["<i8", [1 << 60], "C", False], raw["kinds"][1]]),
        ("kinds", [["<i8", [-3], "C", False], raw["kinds"][1]]),
        ("kinds", [["<i8", [3], "X", False], raw["kinds"][1]]),
        ("kinds", [[None, [], "C", True], raw["kinds"][1]]),
        ("kinds", []),
        ("names", ["a", "a"]),
        ("names", [1, "X"]),
        ("names", ["a"]),
        ("counts", [1 << 62, 0]),
        ("counts", [-1, 3]),
        ("counts", [1]),
        ("kind", b"\xff" * 16),
        ("kind", b"123"),
        ("hashes", b""),
        ("pieces", table((0, 1, 9))),
        ("pieces", table((0, 0, 1))),
        ("pieces", table((0, 3, 1 << 63))),
        ("pieces", table((1, 2, 0))),
        ("pieces", table((0, 4, 1))),
        ("pieces", b""),
        ("sequence", "1"),
        ("time", []),
    ]


def test_hostile_manifests(tmp_path: Path) -> None:
    """Their hash is right, and their contents lie."""
    import msgpack

    from pmstore._core import hash64

    aggregate(tmp_path, 1, {"a": np.arange(3), "X": np.zeros((2, 3))}, rows=["X"])
    (path,) = (tmp_path / "manifests").iterdir()
    raw = msgpack.unpackb(path.read_bytes()[16:])
    for key, value in [*hostile(raw), (None, [1]), (None, b"")]:
        body = msgpack.packb({**raw, key: value} if key else value)
        path.write_bytes(b"pmsaggr1" + hash64(body).to_bytes(8, "little") + body)
        with pytest.raises(pmstore.ArchiveDamagedError, match="breaks the format|damaged"):
            open_aggregate(tmp_path, 1)
        assert latest_common([tmp_path]) is None


# ---- bad input, faults


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"sequence": -1}, ValueError, "sequence"),
        ({"sequence": 10**16}, ValueError, "sequence"),
        ({"sequence": 1.0}, TypeError, "sequence is an int"),
        ({"shards": {"a": [1, 2]}}, TypeError, "'a' is an array or bytes, not list"),
        ({"shards": {"a": np.array([None])}}, TypeError, "'a': dtype object"),
        ({"shards": {"a": np.ma.masked_less([1, 2], 2)}}, TypeError, "'a' is a masked array"),
        ({"shards": {1: b""}}, TypeError, "is a str, not int"),
        ({"shards": {"\ud800": b""}}, ValueError, "surrogates"),
        ({"shards": {"a": memoryview(b"1234")[::2]}}, TypeError, "not contiguous"),
        ({"shards": {"a": b""}, "rows": ["a"]}, TypeError, "has no rows"),
        ({"shards": {"a": np.float64(1)}, "rows": ["a"]}, ValueError, "has no axis"),
        ({"rows": "X"}, TypeError, "rows is a collection"),
        ({"part_size": 0}, ValueError, "at least one byte"),
        ({"part_size": "1 parsec"}, ValueError, "128MiB"),
        ({"part_size": 1.5}, TypeError, "128MiB"),
        ({"keep": 0}, ValueError, "keep"),
        ({"group": "world"}, TypeError, "LocalGroup or a communicator"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        aggregate(tmp_path, **{"sequence": 1, "shards": {}, **arguments})
    assert latest_common([tmp_path]) is None


@pytest.mark.parametrize("wrong", [0, 2])
def test_an_error_of_one_is_told_to_all(tmp_path: Path, wrong: int) -> None:
    def work(group: LocalGroup) -> Any:
        own = {"a": [1]} if group.rank == wrong else {"a": b"x"}
        return aggregate(tmp_path / "to", 1, own, group)

    results = together(3, work, tmp_path / "group")
    assert [type(result) for result in results] == [TypeError] * 3
    assert [f"rank {wrong}: " in str(result) for result in results] == [rank != wrong for rank in range(3)]


def test_arguments_that_differ(tmp_path: Path) -> None:
    results = together(2, lambda group: aggregate(tmp_path / "to", group.rank, {}, group), tmp_path / "group")
    assert all("sequence, part_size and rows differ" in str(result) for result in results)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("remote", [False, True])
def test_a_target_that_fails_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, remote: bool) -> None:
    """All raise the same error, nothing is left, and the next try works."""
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}" if remote else str(tmp_path / "to")
    failing = [True]

    def work(group: LocalGroup) -> Any:
        real = module._Work._write_small

        def write(self: Any, pieces: Any) -> None:
            real(self, pieces)
            if failing and self._group.rank == wrong:
                raise pmstore.ArchiveUnavailableError(28, "No space left on device")

        monkeypatch.setattr(module._Work, "_write_small", write) if group.rank == 0 else None
        group.allgather(b"")
        return aggregate(url, 1, {"a": b"x" * 100, "large": bytes(900)}, group, part_size=500)

    results = together(2, work, tmp_path / "group")
    for rank, result in enumerate(results):
        assert isinstance(result, pmstore.ArchiveUnavailableError) and result.errno == 28 and result.transient
        assert ("rank" in str(result)) == (rank != wrong)
    assert place_of(url).list("parts") == [] and latest_common([url]) is None
    assert remote or os.listdir(tmp_path / "to" / "parts") == []
    failing.clear()
    assert together(2, work, tmp_path / "again")[0].parts == 3
    assert open_aggregate(url).is_whole(verify=True)


def test_a_full_disk(small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    folder = small_disk("1m")
    aggregate(folder, 1, {"a": b"x" * 1000})
    with pytest.raises(pmstore.ArchiveUnavailableError, match="No space left"):
        aggregate(folder, 2, {"a": bytes(2 << 20)})
    results = together(2, lambda group: aggregate(folder, 2, {"a": bytes(2 << 19)}, group), tmp_path / "group")
    assert all(isinstance(result, pmstore.ArchiveUnavailableError) for result in results)
    assert latest_common([folder], verify=True) == 1 and len(os.listdir(folder / "parts")) == 1


def test_a_process_that_never_comes(tmp_path: Path) -> None:
    group = LocalGroup(tmp_path / "group", 0, 2, timeout=0.01)
    with pytest.raises(pmstore.ArchiveError, match="did not come"):
        aggregate(tmp_path / "to", 1, {}, group)
    late = LocalGroup(tmp_path / "group", 1, 2, threading.Barrier(2), timeout=0.01)
    with pytest.raises(pmstore.ArchiveError, match="did not come"):
        aggregate(tmp_path / "to", 1, {}, late)


def test_ranks_outside_the_group(tmp_path: Path) -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="is not one of 2"):
            LocalGroup(tmp_path, rank, 2)


class Communicator:
    """The lower-case methods of a communicator of mpi4py, for one process."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, message: bytes) -> list[bytes]:
        return [message]

    def gather(self, message: bytes, root: int) -> list[bytes]:
        return [message]

    def bcast(self, message: bytes, root: int) -> bytes:
        return message


def test_communicators(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    for url in (tmp_path / "to", f"memory://{tmp_path.name}"):
        assert aggregate(url, 1, {"a": b"x"}, Communicator()).parts == 1
        assert open_aggregate(url).read(0, "a") == b"x"


def test_leaders_of_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each streams the parts of its own processes, and rank 0 makes the manifest of all."""
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"

    def work(group: LocalGroup) -> Any:
        group.node = "ab"[group.rank % 2]
        own = {f"s{k}": bytes([group.rank]) * 100 for k in range(7)}
        return aggregate(url, 1, own, group, part_size=1000)

    assert [result.parts for result in together(4, work, tmp_path / "group")] == [4] * 4
    assert sorted(place_of(url).size(f"parts/{name}") for name in place_of(url).list("parts")) == [400, 400, 1000, 1000]
    whole = open_aggregate(url)
    assert whole.is_whole(verify=True) and all(whole.read(rank, "s6") == bytes([rank]) * 100 for rank in range(4))


# ---- the example


def test_the_example(tmp_path: Path) -> None:
    example = Path(pmstore.__file__).parent.parent / "examples" / "spmd_aggregate.py"
    done = subprocess.run([sys.executable, str(example), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout
