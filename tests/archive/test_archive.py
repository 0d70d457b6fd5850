"""The archive at its public face: versions are commits, and come back with every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive._archive import Archive
from pmstore.archive._format import ARCHIVE, wrapped
from pmstore.archive._sources import Sources
from tests.archive.conftest import Target
from tests.archive.stepping import Memory, archived, contents, drained, same, stepping

pytest.importorskip("numcodecs")

VALUES: dict[str, Any] = {
    "float": np.linspace(0, 1, 5000).reshape(50, 100),
    "fortran": np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "small": np.arange(10, dtype="i2"),
    "complex": np.exp(1j * np.arange(3000)),
    "structured": np.zeros(700, dtype=[("a", "i4"), ("b", "f8", (3,)), ("c", "S5")]),
    "text": np.array(["one", "two", "three"]),
    "big-endian": np.arange(2000, dtype=">f8"),
    "dates": np.array(["2026-11-22"], dtype="M8[D]"),
    "scalar": np.float32(2.5),
    "zero-d": np.array(7.0),
    "empty": np.empty((0, 3)),
    "none": None,
    "int": 1 << 200,
    "string": "ß" * 3000,
    "bytes": bytes(range(256)) * 20,
    "nested/dict": {"a": [1, 2.0, (3, b"x")], "b": {"c": None}},
    "nested/nan": float("nan"),
}


def fill(store: pmstore.Store) -> None:
    for name, value in VALUES.items():
        store[name] = value
    store.create_array("constant", (300, 30), writeable=False)
    elements = store.create_list("list")
    elements.extend([1, "two", np.arange(400.0)])


def change(store: pmstore.Store, step: int) -> None:
    """Something of each kind."""
    rng = np.random.default_rng(step)
    store["float"][step % 50] += 1e-6 * rng.random(100)
    store["fortran"][:, step % 100] = step
    store["complex"] *= 1.0000001
    store["small"][step % 10] += 1
    store["nested/dict"] = {"step": step}
    store["list"].append(step)
    if step % 3 == 1:
        store["new"] = rng.random(3000 + step)
    if step % 3 == 2:
        del store["new"]
    if step % 4 == 3:
        store["list"].pop(0)
        store["string"] = "x" * (100 * step)


def test_versions_have_every_bit_of_their_commits(target: Target, tmp_path: Path) -> None:
    states = {}
    with pmstore.open(tmp_path / "store.pm") as store:
        fill(store)
        store.commit()
        states[store.sequence] = contents(store)
        with store.drain(target.url, storage_options=target.options) as drain:
            drain.wait()
            for step in range(8):
                change(store, step)
                with store.transaction(message=f"step {step}", attributes={"step": step}):
                    pass
                states[store.sequence] = contents(store)
                assert drain.wait() == store.sequence
    found = archive.open(target.url, **target.options)
    assert list(found) == list(states) and len(found) == len(states) and found.latest in found
    for version, state in states.items():
        assert same(contents(found[version]), state)
    assert [one.message for one in found.log()] == [None, *(f"step {step}" for step in range(8))]
    assert found[found.latest].attributes == {"step": 7}
    assert [one.kind for one in found.log()][:2] == ["base", "differential"]
    assert found.verify().ok
    for version in (found.versions()[3], found.latest):
        assert found.restore(tmp_path / f"{version}.pm", version) == version
        with pmstore.open(tmp_path / f"{version}.pm") as restored:
            assert restored.sequence == version and restored.check().ok
            assert same(contents(restored), states[version])
            assert len(restored) == len(states[version])


def test_what_is_captured_late_is_one_commit(tmp_path: Path) -> None:
    """Commits go on while the drain does not; the next version has them together."""
    with pmstore.open(tmp_path / "store.pm") as store:
        store["a"], store["b"] = np.zeros(3000), np.zeros(3000)
        store.commit()
        place, states = Memory(), {}
        with stepping(store, place) as steps:
            for step in range(12):
                store["a"][:] = store["b"][:] = step
                store.commit()
                if step % 3 == 0:
                    archived(steps)
                    states[store.sequence] = step
    found = Archive(Sources([place]))
    assert found.versions() == list(states)
    for version, step in states.items():
        assert (found[version]["a"] == step).all() and (found[version]["b"] == step).all()


def test_an_open_transaction_is_in_no_version(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["a"] = np.zeros(1000)
        store.commit()
        with store.transaction():
            store["a"][:] = 1
            store["b"] = 2
            archived(steps)
    found = Archive(Sources([place]))
    assert contents(found[found.latest])["a"].sum() == 0 and "b" not in found[found.latest]


def test_rows_of_an_array(tmp_path: Path) -> None:
    place, x = Memory(), np.arange(200_000.0).reshape(2000, 100)
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, part_size=1 << 18) as steps:
        store["x"], store["f"], store["v"] = x, np.asfortranarray(x), 1
        store.commit()
        archived(steps)
        store["x"][1000:1010] += 1
        store.commit()
        archived(steps)
        x = store["x"].copy()
    found = Archive(Sources([place]))
    version = found[found.latest]
    for rows in (np.s_[:], np.s_[990:1020], np.s_[0:0], np.s_[-5:], np.s_[1999:2005]):
        assert (version.read("x", rows) == x[rows]).all()
    for wrong in (3, np.s_[::2], (1, 2)):
        with pytest.raises(TypeError):
            version.read("x", wrong)
    for name in ("f", "v"):
        with pytest.raises(TypeError):
            version.read(name, np.s_[:1])
    with pytest.raises(pmstore.UnknownNameError):
        version.read("y", np.s_[:1])


def test_a_version_can_not_be_changed(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["x"], store["g/y"] = np.zeros(1000), 5
        store.commit()
        archived(steps)
    version = Archive(Sources([place]))[1]
    with pytest.raises(pmstore.ReadOnlyStoreError, match="restore"):
        version["x"] = 1
    with pytest.raises(ValueError, match="read-only"):
        version["x"][0] = 1
    assert version.group("g")["y"] == 5 and "g/y" in version and version.get("z") is None
    assert ("archive" in repr(version) and "1,000" in str(version)) or "(1000,)" in str(version)
    with pytest.raises(pmstore.UnknownNameError):
        version["z"]


def test_what_never_changes_is_written_once(tmp_path: Path) -> None:
    """Also by bases, and after the program has begun anew."""
    place = Memory()
    data = np.random.default_rng(0).random((400, 1000))
    for life in range(3):
        with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
            if not life:
                x = store.create_array("data", data.shape, writeable=False, fill_value=0)
                del x
                store["data"] = data
                store["w"] = np.zeros(600)
            steps._writing.base_after = 2
            for _ in range(7):
                store["w"] += 1
                store.commit()
                archived(steps)
    found = Archive(Sources([place]))
    assert [one.kind for one in found.log()].count("base") >= 6
    assert sum(map(len, place.objects.values())) < 1.3 * data.nbytes
    for version in found:
        assert (found[version]["data"] == data).all()


@pytest.mark.parametrize("codec", [None, "zstd", "lz4", {"id": "zlib", "level": 1}])
def test_codecs(tmp_path: Path, codec: Any) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec=codec) as steps:
        fill(store)
        store.commit()
        archived(steps)
        for step in range(4):
            change(store, step)
            store.commit()
            archived(steps)
        state = contents(store)
    found = Archive(Sources([place]))
    assert same(contents(found[found.latest]), state)


def test_small_changes_make_small_differentials(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["x"] = np.random.default_rng(1).random(1_000_000)
        store.commit()
        archived(steps)
        store["x"][500_000] += 1e-9
        store.commit()
        archived(steps)
    base, differential = Archive(Sources([place])).log()
    assert base.size > 6_000_000 and differential.size < 1500


def test_differences(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        fill(store)
        store.commit()
        archived(steps)
        old = store.sequence
        store["float"][3, 7] = -1
        store["fortran"][2, 5] = store["fortran"][59, 99] = -1
        store["added"] = 1
        del store["none"]
        store["int"] = 5
        store["small"] = np.zeros(3)
        store["list"][2] = np.zeros(4)
        store["bytes"] = VALUES["bytes"]
        store.commit()
        archived(steps)
        new = store.sequence
    found = Archive(Sources([place])).diff(old, new)
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "added": "added",
        "float": "changed",
        "fortran": "changed",
        "int": "changed",
        "list": "changed",
        "none": "removed",
        "small": "replaced",
    }
    assert found["float"].elements.tolist() == [307]
    assert found["fortran"].elements.tolist() == [205, 5999]


# ---- forks, and stores that are not the archive's


def test_restored_copied_and_compacted_stores_go_on(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "a.pm") as store:
        store["x"] = np.zeros(10_000)
        drained(store, places)
        store.backup(tmp_path / "b.pm")
    archive.open(places).restore(tmp_path / "c.pm")
    pmstore.compact(tmp_path / "b.pm")
    for name in ("c", "b", "a"):
        with pmstore.open(tmp_path / f"{name}.pm") as store:
            while store.sequence <= archive.open(places).latest:
                store["x"] += 1
                store.commit()
            drained(store, places)
    assert archive.open(places).verify().ok


def test_another_store_is_refused(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "a.pm") as store:
        store["x"] = 1
        drained(store, places)
    with pmstore.open(tmp_path / "b.pm") as store:
        store["x"] = 2
        store.commit()
        with pytest.raises(pmstore.ArchiveConflictError, match="another store"):
            store.drain(places)
        store["x"] = 3
    assert archive.open(places)[1]["x"] == 1


def test_a_store_that_was_taken_back_is_refused(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "a.pm") as store:
        store["x"] = 1
        store.commit()
        store.backup(tmp_path / "old.pm")
        store["x"] = 2
        drained(store, places)
        store["x"] = 3
        drained(store, places)
    with pmstore.open(tmp_path / "old.pm") as store, pytest.raises(pmstore.ArchiveConflictError, match="taken back"):
        store.drain(places)


def test_a_fork_has_an_archive_of_its_own_and_shares_the_past(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    with pmstore.open(tmp_path / "a.pm") as store, store.drain(trunk, keep=1) as drain:
        x = store["x"] = np.zeros(5000)
        x = store["x"]
        for step in range(4):
            x += 1
            store.commit()
            drain.wait()
            if step == 1:
                middle = store.sequence
                archive.open(trunk).tag("middle")
    found = archive.open(trunk)
    assert found.fork(middle, tmp_path / "b.pm") == middle
    with pmstore.open(tmp_path / "b.pm") as store:
        with pytest.raises(pmstore.ArchiveConflictError, match="fork"):
            store.drain(trunk)
        with store.drain(branch) as drain:
            for _ in range(2):
                store["x"] *= 10
                store.commit()
                drain.wait()
    forked = archive.open(branch)
    assert forked.parent == (str(trunk), middle)
    assert set(forked) >= {middle, middle + 1, middle + 2}
    assert [forked[middle + n]["x"][0] for n in range(3)] == [2, 20, 200]
    assert {one.version for one in forked.log()} == set(forked)
    assert found.tags["middle"] == middle
    with pmstore.open(tmp_path / "a.pm") as store, store.drain(trunk, keep=1) as drain:
        for _ in range(3):
            store["x"] += 1
            store.commit()
            drain.wait()
    assert archive.open(branch)[middle]["x"][0] == 2, "what a fork shares stays"


def test_a_fork_that_is_archived_before_its_first_commit(tmp_path: Path) -> None:
    """The version that both archives have is listed once."""
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    with pmstore.open(tmp_path / "a.pm") as store, store.drain(trunk) as drain:
        for value in range(3):
            store["x"] = value
            store.commit()
            drain.wait()
    archive.open(trunk).fork(2, tmp_path / "b.pm")
    with pmstore.open(tmp_path / "b.pm") as store, store.drain(branch, keep=1) as drain:
        assert drain.wait() == 2
        found = archive.open(branch)
        assert list(found) == [1, 2] == [one.version for one in found.log()] and len(found) == 2
        store["x"] = 30
        store.commit()
        drain.wait()
    found.refresh()
    assert list(found) == [1, 2, 3] == [one.version for one in found.log()]
    assert [found[version]["x"] for version in found] == [0, 1, 30]


def test_an_archive_that_claims_to_be_its_own_past(tmp_path: Path) -> None:
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place) as steps:
        store["x"] = 1
        store.commit()
        archived(steps)
    about = {"id": "id", "lineage": "x", "created": 0.0, "parent": [place.url, 5]}
    place.objects["archive"] = b"".join(wrapped(ARCHIVE, "archive", about))
    found = Archive(Sources([place]))
    with pytest.warns(pmstore.ArchiveWarning, match="its own past"):
        assert found.versions() == [1]


def test_an_archive_is_a_mapping(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        drained(store, tmp_path / "archive")
    found = archive.open(tmp_path / "archive")
    assert list(found.keys()) == [1] and found.get(2) is None and [one["x"] for one in found.values()] == [1]
    assert found == found and found != archive.open(tmp_path / "archive") and len({found, found}) == 1


def test_an_older_version_that_is_restored_is_a_fork(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "a.pm") as store, store.drain(places) as drain:
        for value in range(3):
            store["x"] = value
            store.commit()
            drain.wait()
    archive.open(places).restore(tmp_path / "b.pm", 2)
    with pmstore.open(tmp_path / "b.pm") as store:
        for _ in range(5):
            store["x"] += 10
            store.commit()
        with pytest.raises(pmstore.ArchiveConflictError, match="fork"):
            store.drain(places)


# ---- retention


def test_retention_keeps_what_it_says(tmp_path: Path) -> None:
    place, states = Memory(), {}
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"], store["step"] = np.random.default_rng(2).random(5000), 0
        store.commit()
        with stepping(store, place, keep={"last": 3, "every": 10}) as steps:
            steps._writing.base_after = 4
            for step in range(45):
                store["x"][step * 100] += 1
                store["step"] = step
                store.commit()
                archived(steps)
                states[store.sequence] = store["x"].copy()
                kept = Archive(Sources([place])).versions()
                newest = store.sequence
                assert kept == [v for v in states if v > newest - 3 or v % 10 == 0]
    found = Archive(Sources([place]))
    for version in found:
        assert (found[version]["x"] == states[version]).all()
    assert found.verify().ok
    parts = {name for name in place.objects if name.startswith("parts/")}
    assert parts == {part for row in found._index.rows() for part in row.parts}, "nothing is left"
    assert len(parts) < 30


def test_tags(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places, keep=1) as drain:
        for value in range(6):
            store["x"] = value
            store.commit()
            drain.wait()
            if value == 2:
                archive.open(places).tag("best", store.sequence)
    found = archive.open(places)
    assert found.versions() == [3, 6] and found.tags == {"best": 3} and found.log()[0].tags == ("best",)
    found.tag("best", 3)
    with pytest.raises(pmstore.ArchiveConflictError):
        found.tag("best", 6)
    with pytest.raises(pmstore.ArchiveError, match="stay"):
        found.forget([3])
    with pytest.raises(pmstore.UnknownVersionError):
        found.tag("other", 4)
    for wrong in ("", ".x", "a/b", "x" * 101, 5):
        with pytest.raises(ValueError):
            found.tag(wrong)  # type: ignore[arg-type]
    found.untag("best")
    with pytest.raises(KeyError):
        found.untag("best")
    assert found.forget([3]) == [3] and found.versions() == [6] and found.verify().ok
    assert archive.open(places)[6]["x"] == 5


def test_forget_by_a_policy(tmp_path: Path) -> None:
    places = tmp_path / "archive"
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        for value in range(9):
            store["x"] = np.full(1000, value)
            store.commit()
            drain.wait()
    found = archive.open(places)
    assert found.forget(keep={"last": 2, "every": 4}) == [1, 2, 3, 5, 6, 7]
    assert found.versions() == [4, 8, 9]
    assert [int(found[v]["x"][0]) for v in found] == [3, 7, 8]


def test_versions_that_are_not_listed_do_not_count(tmp_path: Path) -> None:
    """The newest ones of those that are listed stay."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store:
        store["w"] = np.zeros(100_000)
        with stepping(store, place) as steps:
            for step in range(12):
                store["w"][step] = 1
                store.commit()
                archived(steps)
        found = Archive(Sources([place]))
        found.forget(range(6, 12))
        assert found.versions() == [1, 2, 3, 4, 5, 12], "which needs those between"
        with stepping(store, place, keep=5) as steps:
            store["w"][50] = 1
            store.commit()
            archived(steps)
    found.refresh()
    assert found.versions() == [3, 4, 5, 12, 13] and found.verify().ok


# ---- bad input


def test_arguments_of_other_types(tmp_path: Path) -> None:
    """A number in a text, and a path in bytes."""
    path = tmp_path / "archive"
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(bytes(path), keep={"age": "86400"}) as drain:  # type: ignore[arg-type]
            for value in range(3):
                store["x"] = value
                store.commit()
                assert drain.wait() == store.sequence
    assert archive.latest_common(bytes(path)) == 3  # type: ignore[arg-type]


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        for error, wrong in (
            (ValueError, {"on_error": "ignore"}),
            (ValueError, {"every": 0}),
            (TypeError, {"every": 1.5}),
            (ValueError, {"keep": 0}),
            (ValueError, {"keep": {"first": 2}}),
            (ValueError, {"keep": {"age": -1}}),
            (ValueError, {"codec": "no-such-codec"}),
            (TypeError, {"codec": 7}),
            (ValueError, {"part_size": 0}),
            (ValueError, {"part_size": "many"}),
            (TypeError, {"queue_size": 1.5}),
        ):
            with pytest.raises(error):
                store.drain(tmp_path / "archive", **wrong)
        with pytest.raises(ValueError):
            store.drain([])
        assert not (tmp_path / "archive").exists()
    with pytest.raises(pmstore.ClosedStoreError):
        store.drain(tmp_path / "archive")
    with pytest.raises(pmstore.ArchiveError, match="no archive"):
        archive.open(tmp_path / "archive")


def test_versions_that_are_not_there(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        store["x"] = 1
        drained(store, tmp_path / "archive")
    found = archive.open(tmp_path / "archive")
    with pytest.raises(pmstore.UnknownVersionError, match="newest is 1"):
        found[2]
    with pytest.raises(TypeError):
        found["x"]  # type: ignore[index]
    with pytest.raises(pmstore.StoreExistsError):
        found.restore(tmp_path / "store.pm")
    with pytest.raises(KeyError):
        found.restore(tmp_path / "new.pm", 7)
    with pytest.raises(ValueError, match="without a file"):
        found.restore(":memory:")
    with pytest.raises(ValueError, match="without a file"):
        found.fork(1, ":memory:")
    assert not (tmp_path / "new.pm").exists()


def test_an_empty_store(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        drained(store, tmp_path / "archive")
    found = archive.open(tmp_path / "archive")
    assert found.versions() == [0] and contents(found[0]) == {}
    assert found.restore(tmp_path / "again.pm") == 0


def test_a_store_may_be_drained_twice_to_two_places(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "store.pm") as store:
        drains = [store.drain(tmp_path / name) for name in "ab"]
        store["x"] = np.arange(1000)
        store.commit()
        assert [drain.wait() for drain in drains] == [1, 1]
    assert (archive.open(tmp_path / "b")[1]["x"] == np.arange(1000)).all()
