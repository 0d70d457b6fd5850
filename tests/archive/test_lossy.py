"""Archives with a lossy codec: the chain of differences, what is recorded of their errors, and all that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore._cli import main
from pmstore.archive._archive import Archive
from pmstore.archive._codecs import codecs_of
from pmstore.archive._format import Loss, Piece, Row
from pmstore.archive._index import Index
from pmstore.archive._sources import Sources
from pmstore.archive._writing import Writing
from tests.archive.stepping import Memory, archived, contents, drained, same, stepping
from tests.conftest import LONGER

pytest.importorskip("numcodecs")

from pmstore.codecs import LCDelta


@pytest.fixture
def store(tmp_path: Path) -> Iterator[pmstore.Store]:
    with pmstore.open(tmp_path / "store.pm") as store:
        yield store


def opened(place: Memory) -> Archive:
    return Archive(Sources([place]))


def learn(
    store: pmstore.Store, rng: np.random.Generator, names: tuple[str, ...] = ("w/a", "w/b", "w/small", "x")
) -> None:
    """A step of something that learns."""
    for name in names:
        if name not in store:
            shape = {"w/a": (60, 500), "w/b": 9000, "w/small": 100, "x": 3000}[name]
            store[name] = rng.normal(size=shape).astype("f8" if name == "w/b" else "f4")
        store[name] += (rng.standard_cauchy(store[name].shape) * 0.01).astype(store[name].dtype)
    store.commit()


def learned(store: pmstore.Store, steps: Any, number: int, seed: int = 0) -> dict[int, dict[str, Any]]:
    """So many versions, and what was committed."""
    rng, truth = np.random.default_rng(seed), {}
    for _ in range(number):
        learn(store, rng)
        archived(steps)
        truth[store.sequence] = contents(store)
    return truth


def require_recorded(found: Archive, truth: dict[int, dict[str, Any]]) -> None:
    """What is not the commit's has its error beside it, and the error is the true one."""
    for info in found.log():
        version, wanted = found[info.version], truth[info.version]
        read = contents(version)
        assert read.keys() == wanted.keys()
        for name, value in wanted.items():
            got, loss = read[name], version.losses.get(name)
            if loss is None:
                assert same(got, value), (info.version, name)
            else:
                assert got.dtype == value.dtype and got.shape == value.shape
                error = np.abs(got.astype("f8") - value)
                assert loss.absolute == error.max() > 0
                relative = math.sqrt((error**2).sum() / (value.astype("f8") ** 2).sum())
                assert loss.relative == pytest.approx(relative)
        assert info.lossy == len(version.losses)
        assert info.loss == Loss.worst(version.losses.values())


def test_I28_only_what_was_asked_for_is_lossy(store: pmstore.Store) -> None:
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta(rebase_every=4)}) as steps:
        store["w/integers"] = np.arange(5000)
        store["w/value"] = {"rate": 0.1}
        store.create_list("w/list").append(np.linspace(0, 1, 500))
        truth = learned(store, steps, 11)
        found = opened(place)
        require_recorded(found, truth)
        infos = found.log()
        assert [info.lossy for info in infos] == [0, 3, 3, 3, 3, 0, 3, 3, 3, 3, 0]
        assert found.verify().ok and found.verify().lossy == 8
        assert "8 of them with approximated arrays" in str(found.verify())


def test_lossy_versions_are_small(store: pmstore.Store) -> None:
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}) as steps:
        rng = np.random.default_rng(0)
        for _ in range(5):
            learn(store, rng, ("w/a", "w/b"))
            archived(steps)
    infos = opened(place).log()
    assert all(info.raw > 20 * info.size for info in infos[1:])


def test_I27_errors_do_not_add_up(store: pmstore.Store) -> None:
    """Differences to the true version before would add up to a growing error."""
    place, rng = Memory(), np.random.default_rng(0)
    codec = LCDelta(2, rebase_every=1000)
    with stepping(store, place, codec={"w": codec}) as steps:
        w = store.create_array("w", 20_000, "f4")
        w[:] = rng.normal(size=w.shape)
        store.commit()
        archived(steps)
        first, astray = w.copy(), w.copy()
        for _ in range(30):
            before = w.copy()
            w += rng.normal(size=w.shape).astype("f4") * 0.01
            astray += codec.decode(codec.encode(w - before)).view("f4")
            store.commit()
            archived(steps)
    version = opened(place)[store.sequence]
    moved = np.sqrt(np.mean((w - first) ** 2))
    with_feedback = np.sqrt(np.mean((version["w"] - w) ** 2)) / moved
    without = np.sqrt(np.mean((astray - w) ** 2)) / moved
    assert with_feedback < 0.4 < 0.8 < without


def test_special_numbers_are_those_of_the_commit(store: pmstore.Store) -> None:
    place, rng = Memory(), np.random.default_rng(0)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-310, -5e-324])
    with stepping(store, place, codec=LCDelta()) as steps:
        w = store.create_array("w", 5000)
        for _ in range(8):
            w[:] = rng.normal(size=5000)
            w[rng.integers(0, 5000, 64)] = np.repeat(special, 8)
            store.commit()
            archived(steps)
            got = opened(place)[store.sequence]["w"]
            exact = ~np.isfinite(w) | (np.abs(w) < 1e-300)
            assert exact.sum() > 50 and np.array_equal(got.view("u8")[exact], w.view("u8")[exact])
            assert np.isfinite(got[~exact]).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "bfloat16", "uint16"])
def test_dtypes(store: pmstore.Store, dtype: str) -> None:
    place, rng = Memory(), np.random.default_rng(0)
    brain = np.dtype([("bfloat16", "<u2")])
    with stepping(store, place, codec={"w": LCDelta(dtype="bfloat16" if dtype == "uint16" else None)}) as steps:
        x = rng.normal(size=3000).astype("f4")
        for _ in range(4):
            x += rng.normal(size=3000).astype("f4") * 0.01
            upper = (x.view("u4") >> 16).astype("u2")
            given = {"bfloat16": upper.view(brain), "uint16": upper}
            store["w"] = given[dtype] if dtype in given else x.astype(dtype)
            store.commit()
            archived(steps)
        version = opened(place)[store.sequence]
        assert version.losses.keys() == {"w"} and version["w"].dtype == store["w"].dtype
        assert 0 < version.losses["w"].relative < 0.01


def test_other_arrays_are_kept(store: pmstore.Store) -> None:
    """Other dtypes, one element, none; and an array that takes a name with another dtype."""
    place = Memory()
    with stepping(store, place, codec=LCDelta()) as steps:
        store["w"] = np.zeros(3000)
        for value in range(1, 6):
            store["big-endian"] = np.full(600, value + 0.5, ">f8")
            store["complex"] = np.full(600, value + 0.25j)
            store["one"] = np.array(value + 1e-9)
            store["empty"] = np.zeros((0, value))
            store["flags"] = np.arange(3000) % 7 == value
            store["w"] = np.random.default_rng(value).normal(size=3000)
            if value == 4:  # the same bytes but for one element, as integers
                store["w"] = np.random.default_rng(3).normal(size=3000).view("i8")
                store["w"][0] = 5
            store.commit()
            archived(steps)
            version = opened(place)[store.sequence]
            assert version.losses.keys() == ({"w"} if value in (2, 3) else set())
            for name in store:
                assert name in version.losses or same(version[name], store[name]), (value, name)


def test_an_array_that_does_not_change_stays_as_it_is(store: pmstore.Store) -> None:
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}) as steps:
        truth = learned(store, steps, 2)
        for value in range(3):
            store["value"] = value
            store.commit()
            archived(steps)
            truth[store.sequence] = contents(store)
        found = opened(place)
        require_recorded(found, truth)
        assert len({found[version]["w/a"].tobytes() for version in (2, 3, 4, 5)}) == 1
        assert found.diff(2, 5).keys() == {"value"}
        assert found.log()[-1].size < 1000 and found.log()[-1].lossy == 3


def test_a_base_in_the_middle(store: pmstore.Store) -> None:
    """An array that did not change is in it as the version before had it; one that did is the commit's."""
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}) as steps:
        truth = learned(store, steps, 3)
        steps._writing.base_after = 0
        store["w/a"] += 1
        store.commit()
        archived(steps)
        truth[store.sequence] = contents(store)
        steps._writing.base_after = None
        found = opened(place)
        assert found.log()[-1].kind == "base"
        assert found[4].losses.keys() == {"w/b", "w/small"} and same(found[4]["w/b"], found[3]["w/b"])
        rng = np.random.default_rng(9)
        for _ in range(2):
            learn(store, rng)
            archived(steps)
            truth[store.sequence] = contents(store)
    require_recorded(opened(place), truth)
    assert opened(place)[6].losses.keys() == {"w/a", "w/b", "w/small"}


def test_a_restart_begins_without_loss(store: pmstore.Store) -> None:
    place = Memory()
    codec = {"w/*": LCDelta()}
    with stepping(store, place, codec=codec) as steps:
        truth = learned(store, steps, 3)
    with stepping(store, place, codec=codec) as steps:
        truth |= learned(store, steps, 3, seed=1)
    found = opened(place)
    require_recorded(found, truth)
    assert [info.lossy for info in found.log()] == [0, 3, 3, 0, 3, 3]


def test_an_array_without_room_in_memory_is_kept(store: pmstore.Store) -> None:
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}, queue_size=100_000) as steps:
        truth = learned(store, steps, 4)
        found = opened(place)
        require_recorded(found, truth)
        assert set().union(*(found[version].losses for version in found)) == {"w/b", "w/small"}


def test_large_arrays(store: pmstore.Store, tmp_path: Path) -> None:
    """Several frames; rows of one of them."""
    place, rng = Memory(), np.random.default_rng(0)
    with stepping(store, place, codec={"w": LCDelta()}) as steps:
        w = store.create_array("w", (1500, 1024))
        for _ in range(3):
            w += rng.normal(size=w.shape)
            store.commit()
            archived(steps)
        found = opened(place)
        version = found[3]
        assert np.array_equal(version.read("w", np.s_[700:800]), version["w"][700:800])
        assert np.abs(version["w"] - w).max() == version.losses["w"].absolute


def test_the_first_pattern_counts(store: pmstore.Store) -> None:
    codecs = codecs_of({"a/b*": None, "a/*": LCDelta(2), "*": "zlib"})
    assert codecs.lossy(b"na/c") == (1, LCDelta(2)) and codecs.lossy(b"na/bc") is None
    assert codecs.configs(b"na/bc") == () and codecs.configs(b"na/c") is None
    assert codecs.configs(b"nx") == ({"id": "zlib"},) and codecs.configs(b"mlineage") is None
    place = Memory()
    with stepping(store, place, codec={"w/a": "zlib", "w/*": {"id": "pmstore.lcdelta", "bits": 2}}) as steps:
        truth = learned(store, steps, 3)
    require_recorded(opened(place), truth)
    assert opened(place)[3].losses.keys() == {"w/b", "w/small"}


@pytest.mark.parametrize(
    ("codec", "error", "text"),
    [
        ({1: LCDelta()}, TypeError, "patterns of names"),
        ({"": None}, TypeError, "patterns of names"),
        ({"w": 5}, TypeError, "codec is"),
        ({"w": "no-such-codec"}, ValueError, "the codec 'no-such-codec' can't be used"),
        ({"w": {"id": "pmstore.lcdelta", "bits": 77}}, ValueError, "bits"),
        ({"w": {"id": "quantize", "digits": 2, "dtype": "f4"}}, ValueError, "LCDelta"),
        ({"w": {"x": LCDelta()}}, TypeError, "codec is"),
    ],
)
def test_wrong_codecs(store: pmstore.Store, tmp_path: Path, codec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        store.drain(tmp_path / "archive", codec=codec)


def test_restored_stores_are_what_the_version_has(store: pmstore.Store, tmp_path: Path) -> None:
    """And not what was committed, which a warning says. Its own drain is exact, and its state is the version's."""
    place, other = Memory(), Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}) as steps:
        truth = learned(store, steps, 3)
    found = opened(place)
    with pytest.warns(pmstore.ArchiveWarning, match=r"version 3 approximates 3 arrays \(relative error up to 0\."):
        found.restore(tmp_path / "again.pm")
    with pmstore.open(tmp_path / "again.pm") as again:
        assert again.sequence == 3 and same(contents(again), contents(found[3]))
        assert not same(contents(again), truth[3])
        with stepping(again, other) as steps:
            archived(steps)
        state, restored = (Index.read(one).find(3) for one in (place, other))
        assert state is not None and restored is not None
        assert state.state == restored.state and state.lossy == 3 and restored.lossy == 0
        with stepping(again, place, codec={"w/*": LCDelta()}) as steps:  # it goes on with the archive
            truth |= learned(again, steps, 2, seed=5)
    require_recorded(opened(place), truth)
    assert [info.lossy for info in opened(place).log()] == [0, 3, 3, 0, 3]


def test_the_live_store_has_another_state(store: pmstore.Store) -> None:
    exact, lossy = Memory(), Memory()
    with stepping(store, exact) as one, stepping(store, lossy, codec={"w/*": LCDelta()}) as two:
        rng = np.random.default_rng(0)
        for _ in range(2):
            learn(store, rng)
            archived(one)
            archived(two)
    for version, equal in ((1, True), (2, False)):
        a, b = Index.read(exact).find(version), Index.read(lossy).find(version)
        assert a is not None and b is not None and (a.state == b.state) is equal


def test_forks_and_exports_warn(store: pmstore.Store, tmp_path: Path) -> None:
    with store.drain(tmp_path / "archive", codec={"w/*": LCDelta()}) as drain:
        rng = np.random.default_rng(0)
        for _ in range(3):
            learn(store, rng)
            drain.wait()
    found = archive.open(tmp_path / "archive")
    with pytest.warns(pmstore.ArchiveWarning, match="version 2 approximates 3 arrays"):
        found.fork(2, tmp_path / "fork.pm")
    with pytest.warns(pmstore.ArchiveWarning, match="version 3 approximates 3 arrays"):
        archive.export(found[3], tmp_path / "run.npz")
    archive.export(found[1], tmp_path / "first.npz")
    found.restore(tmp_path / "first.pm", 1)
    assert archive.latest_common([tmp_path / "archive"], verify=True) == 3


def test_damage_is_found(store: pmstore.Store) -> None:
    place = Memory()
    with stepping(store, place, codec={"w/*": LCDelta()}) as steps:
        truth = learned(store, steps, 3)
    for part in [name for name in place.objects if name.startswith("parts/")]:
        for at in range(0, len(place.objects[part]), 1 + len(place.objects[part]) // 40):
            data = bytearray(place.objects[part])
            data[at] ^= 4
            found = opened(Memory(place.objects | {part: bytes(data)}))
            assert not found.verify().ok
            for version in found:
                try:
                    got = contents(found[version])
                except pmstore.ArchiveDamagedError:
                    continue
                assert same(got, contents(opened(place)[version]))
    assert len(truth) == 3


def test_rows_with_hostile_errors() -> None:
    row = Row(3, 0.0, None, 1, 1, (), None, 0, None, 1, Loss(1.0, 0.5))._replace(  # type: ignore[arg-type]
        directory=Piece("parts/" + "0" * 16 + "-" + "0" * 10, 0, 1, 1)
    )
    assert Row.checked(row.packed()) == row
    for lossy, loss in (
        (0, (1.0, 0.5)),
        (1, None),
        (-1, (1.0, 0.5)),
        (1, (1.0,)),
        (1, (-1.0, 0.5)),
        (1, (math.nan, 0.5)),
    ):
        packed = list(row.packed())
        packed[9:11] = [lossy, loss]
        with pytest.raises(pmstore.ArchiveDamagedError):
            Row.checked(tuple(packed))


def test_the_command_line_shows_errors(
    store: pmstore.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with store.drain(tmp_path / "archive", codec={"w/*": LCDelta()}) as drain:
        rng = np.random.default_rng(0)
        for _ in range(2):
            learn(store, rng)
            drain.wait()
    place = str(tmp_path / "archive")
    assert main(["archive", "list", place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "approximates" not in lines[0] and "approximates 3 arrays (relative error up to 0." in lines[1]
    assert main(["archive", "list", place, "--losses"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "w/a", "w/b", "w/small"]
    assert main(["archive", "list", place, "--losses", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["loss"] is None and first["losses"] == {} and second["lossy"] == 3
    assert second["losses"]["w/a"]["relative"] <= second["loss"]["relative"]
    assert main(["archive", "verify", place]) == 0
    assert "1 of them with approximated arrays" in capsys.readouterr().out


def test_a_place_with_other_approximations_is_refused(store: pmstore.Store) -> None:
    """A version of the same number, but other contents, in two places."""
    near, far = Memory(), Memory()
    codec = {"w/*": LCDelta()}
    with stepping(store, far, codec=codec) as steps:
        learned(store, steps, 3)
    with (
        pytest.raises(pmstore.ArchiveConflictError, match="version 3 with approximated arrays"),
        stepping(store, near, far, codec=codec),
    ):
        pass
    with stepping(store, far, near, codec=codec) as steps:
        archived(steps)
    learn(store, np.random.default_rng(3))
    with stepping(store, near, far, codec=codec) as steps:
        archived(steps)
        assert [target.last for target in steps.targets] == [4, 4]


def test_two_archives_of_a_store_are_read_together(store: pmstore.Store) -> None:
    """Each version is read from the place that has what it needs, though both have versions of the same numbers."""
    one, two = Memory(), Memory()
    codec = {"w/*": LCDelta()}
    truth = {}
    rng = np.random.default_rng(0)
    with stepping(store, one, codec=codec) as first:
        learn(store, rng)
        archived(first)
        truth[store.sequence] = contents(store)
        with stepping(store, two, codec=codec) as second:
            for number in range(8):
                learn(store, rng)
                truth[store.sequence] = contents(store)
                archived(first if number % 3 == 0 else second)
                if number % 3 == 2:
                    archived(first)
    for places in ([one, two], [two, one]):
        found = Archive(Sources(list(places)))
        require_recorded(found, truth)
        assert found.latest == store.sequence


def test_a_drain_in_threads(store: pmstore.Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = {}
    with store.drain([tmp_path / "near", tmp_path / "far"], codec={"w/*": LCDelta(rebase_every=3)}) as drain:
        for _ in range(8):
            learn(store, rng)
            truth[store.sequence] = contents(store)
            drain.wait()
    for name in ("near", "far"):
        found = archive.open(tmp_path / name)
        require_recorded(found, truth)
        assert len(found) == 8 and [info.lossy for info in found.log()] == [0, 3, 3, 3, 0, 3, 3, 3]
    drained(store, tmp_path / "near")  # by default, each bit is kept
    assert archive.open(tmp_path / "near").log()[-1].version == 8


@pytest.mark.parametrize("seed", range(LONGER * 3))
def test_anything_happens_to_arrays(store: pmstore.Store, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Arrays change, come, go, get other shapes, dtypes and names; memory is short; snapshots are too late; bases come
    at any time."""
    place, rng, truth = Memory(), np.random.default_rng(seed), dict[int, dict[str, Any]]()
    names = [f"{group}/{number}" for group in "wx" for number in range(4)]
    codec = {"w/3": None, "w/*": LCDelta(2, rebase_every=3), "x/1": LCDelta(4, rebase_every=2)}
    real = Writing._row

    def late(*arguments: Any) -> Row:
        if rng.random() < 0.2:
            raise pmstore.StaleSnapshotError("too late")
        return real(*arguments)

    monkeypatch.setattr(Writing, "_row", late)
    with stepping(store, place, codec=codec, part_size=20_000, queue_size=int(rng.integers(20_000, 200_000))) as steps:
        for _ in range(40):
            for name in rng.choice(names, 3, replace=False).tolist():
                kind = rng.random()
                if name not in store or kind < 0.1:
                    dtype = str(rng.choice(["f4", "f8", "f2", "i8"]))
                    shape = [(20,), (900,), (30, 100), (7, 1000)][rng.integers(4)]
                    store[name] = (rng.normal(size=shape) * 100).astype(dtype)
                elif kind < 0.2:
                    del store[name]
                elif kind < 0.3 and (other := str(rng.choice(names))) not in store:
                    store.rename(name, other)
                else:
                    some = rng.integers(0, 2, store[name].shape, bool) if kind < 0.6 else np.s_[: rng.integers(1, 9)]
                    change = rng.normal() * 10.0 ** rng.integers(-3, 2)
                    store[name][some] += np.array(change).astype(store[name].dtype)
            store.commit()
            steps._writing.base_after = 0 if rng.random() < 0.1 else None
            archived(steps)
            truth[store.sequence] = contents(store)
    found = opened(place)
    require_recorded(found, truth)
    assert found.verify().ok and len(found) == len(truth) and sum(info.lossy for info in found.log()) > 10
