"""`salvage` copies all that is sound in a damaged store, and names what it left out.

tests/core/test_hostile.py gives it hostile files.
"""

from __future__ import annotations

import datetime
import os
import shlex
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._store.report import CheckReport
from tests.conftest import Medium
from tests.core.test_damage import flipped
from tests.store.test_compact import fill
from tests.support.derivations import CALLS, doubled
from tests.support.images import REGION, Cell, Image
from tests.support.snapshots import Snapshot, snapshot

Open = Callable[..., pmstore.Store]
one_medium = pytest.mark.parametrize("medium", ["memory"], indirect=True)


def contents(store: pmstore.Store) -> Snapshot:
    if "derived" in store:
        store.derive("derived", doubled, "f", policy="store", verify="hash")
    return snapshot(store)


def salvaged(path: Path) -> tuple[CheckReport, Snapshot]:
    before = path.read_bytes()
    target = path.with_name("rescued.pm")
    report = pmstore.salvage(path, target)
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == ["rescued.pm", path.name]
    with pmstore.open(target, verify=True) as store:
        return report, contents(store)


def test_a_sound_store(open_store: Open) -> None:
    CALLS.clear()
    with open_store() as store:
        fill(store)
    with open_store(mode="r") as store:
        before = contents(store)
    report, found = salvaged(Path(store.path))
    assert report.ok and found == before and CALLS == ["doubled"]
    with open_store("rescued.pm", mode="r") as store:
        assert store["list"][2]["i"] == 2
        store._drop()
    with open_store("rescued.pm") as store:
        assert not store["fixed"].flags.writeable and store["f"].flags.writeable


@pytest.fixture
def no_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A call after which this process knows no time zone."""

    def forget() -> None:
        for name in {"tzdata", *sys.modules}:  # with its packages, if another test has imported them
            if name.partition(".")[0] == "tzdata":
                monkeypatch.setitem(sys.modules, name, None)
        zoneinfo.reset_tzpath(to=[])
        zoneinfo.ZoneInfo.clear_cache()

    yield forget
    zoneinfo.reset_tzpath()
    zoneinfo.ZoneInfo.clear_cache()


@pytest.mark.parametrize("command", ["dump", "watch --once --json", "top --once --json"])
def test_a_time_zone_that_the_machine_lacks_does_not_hide_other_names(
    open_store: Open, no_zones: Callable[[], None], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with open_store() as store:
        store.create_list("l").append(datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")))
        store["sound"] = "seen"
    no_zones()
    path = os.path.dirname(store.path) if command.startswith("top") else store.path
    status = _cli.main([*command.split(), path])
    out, err = capsys.readouterr()
    assert status == (1 if command == "dump" else 0) and ('"sequence": 1' if "top" in command else "seen") in out
    assert "damaged" not in out + err and ("top" in command or "is unknown to this machine" in out + err)


def test_a_time_zone_that_the_machine_lacks_is_no_damage(open_store: Open, no_zones: Callable[[], None]) -> None:
    when = datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    with open_store() as store:
        store["a"], store["d"], store["time"] = when, {when: [when], "data": 5}, when.timetz()
        store["o"] = pmstore.Parts("unknown", {"x": np.arange(3), "when": when})
        store["plain"] = pmstore.Parts("unknown", {"when": when})
        store.create_list("l").extend([1, when, 3])
        store.attrs("a").update(when=when, units="K")
        store.attrs().update(when=when)
        values = {name: store[name] for name in ("a", "d", "time", "plain")}
    path, target = Path(store.path), Path(store.path).with_name("rescued.pm")
    no_zones()
    with open_store(mode="r") as store:
        for read in (lambda: store["a"], lambda: store["d"], lambda: store["l"][1], lambda: store.attrs("a")["when"]):
            with pytest.raises(pmstore.DecodeError, match="'Europe/Berlin' is unknown to this machine: install"):
                read()
        assert store.check().ok and "Europe/Berlin" in repr(store.parts("o")["when"])
        store.backup(path.with_name("backup.pm"))
    assert pmstore.salvage(path, target).ok
    pmstore.compact(path)
    zoneinfo.reset_tzpath()
    for name in (target, path, path.with_name("backup.pm")):
        with pmstore.open(name, "r") as store:
            assert {name: store[name] for name in values} == values and list(store["l"]) == [1, when, 3]
            assert store["o"]["when"] == when and len(store["o"]["x"]) == 3
            assert dict(store.attrs("a")) == {"when": when, "units": "K"} and dict(store.attrs()) == {"when": when}


def test_damaged_contents(open_store: Open) -> None:
    """An array, a value, an element of a list, the stored value of a derived array: one damaged block in each."""
    data = np.random.default_rng(0).random(5000)
    CALLS.clear()
    with open_store() as store:
        store["bad"], store["good"], store["f"] = data, data[::-1].copy(), np.arange(5000.0)
        store["value"], store["sound value"] = b"v" * 9000, "v" * 9001
        store.create_list("list").extend([i * "e" + i * "l" for i in range(0, 4000, 500)])
        assert store.derive("derived", doubled, "f", policy="store", verify="hash").value.shape == (5000,)
    path = Path(store.path)
    with open_store(mode="r") as store:
        before = contents(store)
    for needle in (
        data[600:700].tobytes(),
        b"v" * 8192,
        b"e" * 1500 + b"l" * 1500,
        np.arange(1e3, 1e3 + 60, 2).tobytes(),
    ):
        flipped(path, needle)
    report, found = salvaged(path)
    del before["bad"], before["value"]
    before["list"] = "list", before["list"][1][:3]
    assert found == before
    assert {problem.name for problem in report} == {"bad", "value", "list", "list[3]", "derived"}
    assert "'list': its elements from number 3 on are left out" in str(report)
    assert CALLS == ["doubled"] * 2  # the damaged value is computed again


@one_medium
def test_contents_of_an_earlier_commit(open_store: Open) -> None:
    """A write that the disk lost: the old contents are sound by themselves."""
    with open_store() as store:
        store["lost"], store["other"] = np.arange(300.0), np.ones(50)
    path = Path(store.path)
    before = path.read_bytes()
    with open_store() as store:
        store["lost"] += 0.5
        store["other"] += 1
    image = Image(path)
    at = before.find(np.arange(300.0).tobytes())
    image.bytes[at : at + 2408] = before[at : at + 2408]  # with their hash
    image.save()
    report, found = salvaged(path)
    assert [problem.name for problem in report] == ["lost"] and "not those that were committed last" in str(report)
    assert found == {"other": ("<f8", (50,), True, np.full(50, 2.0).tobytes())}


@one_medium
@pytest.mark.parametrize("pages", [(3,), (3, 7), (0,), (-1,), (4, 5)], ids=str)
def test_damaged_pages_of_the_catalog(open_store: Open, pages: tuple[int, ...]) -> None:
    """The names of all other pages are copied."""
    with open_store() as store:
        store.update({f"group/{i * 37 % 1000:03}/ü{i}": i for i in range(1000)})
    path = Path(store.path)
    image = Image(path)
    leaves = sorted((image.cells(page), page) for page in image.pages() if image.is_leaf(page))
    gone = set()
    for number in pages:
        cells, page = leaves[number]
        gone |= {cell.key[1:].decode() for cell in cells}
        image.bytes[8192 + page + 100] ^= 1
    image.save()
    report, found = salvaged(path)
    assert len(gone) > 20 and found.keys() == {f"group/{i * 37 % 1000:03}/ü{i}" for i in range(1000)} - gone
    first, last = min(gone), max(gone)
    between = [str(problem) for problem in report if "any names" in str(problem)]
    if pages in [(3,), (4, 5)]:
        assert len(between) == 1 and min(found) < first and last < max(found)
        assert repr(max(name for name in found if name < first)) in between[0]
        assert repr(min(name for name in found if name > last)) in between[0]


@one_medium
def test_more_damage_than_a_report_holds(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array is copied only because the report was full before it."""
    monkeypatch.setattr("pmstore._catalog.copying._PIECE", 4096)
    data = np.random.default_rng(0).integers(0, 1 << 60, (1030, 4))
    with open_store() as store:
        store.update({f"small/{i}": row for i, row in enumerate(data)})
        store["y"], store["z"] = data.astype("f8"), data
    path = Path(store.path)
    image = bytearray(path.read_bytes())
    for row in data:
        at = image.find(row.tobytes())
        image[at] ^= 1
    path.write_bytes(image)
    flipped(path, data[600:].tobytes())
    report, found = salvaged(path)
    assert list(found) == ["y"] and len(report) > 1000 and "z" in {problem.name for problem in report}


@one_medium
def test_names_that_share_their_contents(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lists the same contents again and again does not fill the disk, even if no check had found that."""
    with open_store() as store:
        store["a00"] = np.ones(100_000)
    path = Path(store.path)
    image = Image(path)
    (cell,) = image.cells(image.tree)
    cells = [Cell(b"na%02d" % i, cell.meta, cell.offset, cell.length, cell.kind) for i in range(30)]
    image.write_node(image.tree, 0, cells)
    image.set_root(image.tree, len(cells))
    image.save()
    report, found = salvaged(path)
    assert len(found) == 1 and len([problem for problem in report if problem.name]) == 29
    path.with_name("rescued.pm").unlink()
    monkeypatch.setattr("pmstore._store.salvaging.check", lambda catalog, gaps: CheckReport(()))
    report, found = salvaged(path)
    assert len(found) < 4 and len(found) + len(report) == 30 and "more contents than the file" in str(report)


@one_medium
def test_a_name_below_a_value(open_store: Open) -> None:
    with open_store() as store:
        store["a"] = 1
    path = Path(store.path)
    image = Image(path)
    (cell,) = image.cells(image.tree)
    image.write_node(image.tree, 0, [cell, cell._replace(key=b"na//c"), cell._replace(key=b"na/b")])
    image.set_root(image.tree, 3)
    image.save()
    report, found = salvaged(path)
    assert found == {"a": 1} and "'a' is a value, and so no group" in str(report) and "a damaged name" in str(report)


@one_medium
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_that_does_not_open_names_the_way_out(
    open_store: Open, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store() as store:
        store["a"] = 1
    image = Image(Path(store.path))
    image.bytes[REGION + 40] ^= 0x55  # the root
    image.save()
    with pytest.raises(pmstore.CorruptStoreError, match=r"offset 0 is damaged \(`pmstore salvage ") as told:
        pmstore.open(store.path, mode)
    command = str(told.value).split("`")[1].replace("NEW", f"{store.path}.new")
    assert _cli.main(shlex.split(command)[1:]) == 1 and "offset 0 is damaged" in capsys.readouterr().out
    with pmstore.open(f"{store.path}.new") as new:
        assert new["a"] == 1


def test_what_is_refused(open_store: Open, medium: Medium) -> None:
    with open_store() as store:
        store["a"] = 1
        with pytest.raises(pmstore.StoreLockedError):
            pmstore.salvage(store.path, medium.directory / "new")
    path = Path(store.path)
    before = path.read_bytes()
    (medium.directory / "other").write_bytes(b"no store at all" * 1000)
    (medium.directory / "dangling").symlink_to("nowhere")
    for target, text in (
        (path, "is the damaged store itself"),
        ("other", "exists"),
        ("dangling", "exists"),
        (".", "exists"),
    ):
        with pytest.raises(pmstore.StoreExistsError, match=text):
            pmstore.salvage(path, medium.directory / target)
    with pytest.raises(pmstore.NotAStoreError):
        pmstore.salvage(medium.directory / "other", medium.directory / "new")
    for source, target in (("none", "new"), (path, "none/new")):
        with pytest.raises(pmstore.StoreNotFoundError):
            pmstore.salvage(medium.directory / source, medium.directory / target)
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == ["dangling", "other", "store.pm"]
