"""Objects of an archive that were lost or damaged: later versions are whole, and nothing is mixed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pmstore
from pmstore import archive

pytest.importorskip("numcodecs")


def largest(place: Path) -> Path:
    """The largest part."""
    return max((place / "parts").iterdir(), key=lambda one: one.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGED = pytest.mark.parametrize("damage", [Path.unlink, cut])


@DAMAGED
def test_a_base_does_not_refer_to_a_part_that_is_lost_or_cut(damage: Callable[[Path], None], tmp_path: Path) -> None:
    data = os.urandom(50_000)
    with pmstore.open(tmp_path / "store.pm") as store:
        for step in range(3):
            with store.drain(tmp_path / "to") as drain:
                store["data" if step == 0 else "step"] = data if step == 0 else step
                store.commit()
                drain.wait()
        damage(largest(tmp_path / "to"))
        with pytest.warns(pmstore.ArchiveWarning, match="parts of version 3 are lost or cut; contents are written"):
            drain = store.drain(tmp_path / "to")
        store["step"] = 10
        store.commit()
        assert drain.wait() == 4
        drain.close()
    assert archive.open(tmp_path / "to")[4]["data"] == data
    assert archive.open(tmp_path / "to").restore(tmp_path / "again.pm") == 4


@DAMAGED
def test_a_part_that_another_place_has_lost_is_copied_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    data = os.urandom(50_000)
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(places) as drain:
            store["data"] = data
            store.commit()
            drain.wait()
        damage(largest(places[1]))
        with store.drain(places) as drain:
            store["step"] = 1
            store.commit()
            drain.wait()
    assert archive.open(places[1])[2]["data"] == data


def test_a_place_without_its_description_is_no_new_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with pmstore.open(tmp_path / f"{name}.pm") as store:
            for i in range(3 if name == "one" else 6):
                store[name] = i
                store.commit()
            if name == "one":
                with store.drain(tmp_path / "to") as drain:
                    drain.wait()
                description = (tmp_path / "to" / "archive").read_bytes()
                (tmp_path / "to" / "archive").unlink()
            else:
                with pytest.raises(pmstore.ArchiveDamagedError, match="'archive', which tells whose .* is missing"):
                    store.drain(tmp_path / "to")
    with pytest.raises(pmstore.ArchiveDamagedError, match="'archive', which tells whose .* is missing"):
        archive.open(tmp_path / "to")
    (tmp_path / "to" / "archive").write_bytes(description)
    assert archive.open(tmp_path / "to")[3]["one"] == 2


@pytest.mark.parametrize("name", ["tags/best", "archive", "index/000000000001-000000000001-000000"])
def test_an_object_that_is_larger_than_memory(name: str, tmp_path: Path) -> None:
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store, store.drain(places) as drain:
        store["x"] = 1
        store.commit()
        drain.wait()
        archive.open(places).tag("best")
    os.truncate(places[0] / name, 10**13)  # no byte of the disk
    with pytest.warns(pmstore.ArchiveWarning):
        found = archive.open(places)
        assert found.versions() == [1] and found.tags == {"best": 1} and found[1]["x"] == 1


def test_a_tag_is_made_where_its_version_is(tmp_path: Path) -> None:
    """A further place removes versions before the first one. Only the first protects the version then."""
    places = [tmp_path / "near", tmp_path / "far"]
    with pmstore.open(tmp_path / "store.pm") as store:
        with store.drain(places) as drain:
            for i in range(4):
                store["x"] = i
                store.commit()
                drain.wait()
        archive.open(places[1]).forget([1, 2])
        archive.open(places).tag("best", 1)
        assert archive.open(places[0]).tags == {"best": 1} and archive.open(places[1]).tags == {}
        with store.drain(places) as drain:
            store["x"] = 5
            store.commit()
            drain.wait()
    assert archive.open(places[1]).tags == {}
