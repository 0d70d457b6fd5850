"""Archives that are damaged, cut, or made to harm: no wrong bytes, no unbounded memory, and errors of pmstore only."""

from __future__ import annotations

import random
import resource
import warnings
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import pmstore
from pmstore.archive import _format
from pmstore.archive._archive import Archive
from pmstore.archive._format import ARCHIVE, SEGMENT, Directory, Piece, opened, wrapped
from pmstore.archive._objects import MissingObjectError
from pmstore.archive._sources import Sources
from tests.archive.stepping import Memory, archived, contents, same, stepping

pytest.importorskip("numcodecs")

Objects = dict[str, bytes]

REFUSED = (
    MissingObjectError,
    pmstore.ArchiveError,
    pmstore.FormatVersionError,
    pmstore.UnknownVersionError,
    pmstore.CorruptStoreError,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Objects, dict[int, Any]]:
    """The objects of an archive, and the contents of its versions."""
    place, states = Memory(), {}
    rng = np.random.default_rng(0)
    with pmstore.open(tmp_path_factory.mktemp("made") / "store.pm") as store, stepping(store, place) as steps:
        store["x"], store["list"], store["text"] = rng.random(5000), [1, 2], "a" * 3000
        for step in range(4):
            store["x"][step * 700 : step * 800] += rng.random(step * 100)
            store["step"] = {"step": step}
            store.commit()
            archived(steps)
            states[store.sequence] = contents(store)
    return place.objects, states


def looked_at(objects: Objects, states: dict[int, Any], *more: Objects, trusted: bool = True) -> int:
    """How many values could be read. Each is that of its version, unless somebody made other hashes, too."""
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmstore.ArchiveWarning)
        try:
            found = Archive(Sources([Memory(dict(one)) for one in (objects, *more)]))
            versions = found.versions()
            found.log()
        except REFUSED:
            return 0
        for version in versions:
            for name in states.get(version, ()):
                try:
                    value = found[version][name]
                except REFUSED:
                    continue
                assert not trusted or same(contents({name: value})[name], states[version][name]), (version, name)
                count += 1
    return count


def damaged(objects: Objects, rng: random.Random) -> Objects:
    """A byte flipped, an object cut, gone, or in another's place."""
    changed = dict(objects)
    name, other = rng.choice(sorted(objects)), rng.choice(sorted(objects))
    data = bytearray(objects[name])
    how = rng.choice(["flip", "flip", "cut", "gone", "swap", "longer"])
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    changed[name] = bytes(data) * (2 if how == "longer" else 1)
    if how == "gone":
        del changed[name]
    if how == "swap":
        changed[name], changed[other] = objects[other], objects[name]
    return changed


def test_nothing_wrong_is_read_from_a_damaged_archive(made: tuple[Objects, dict[int, Any]]) -> None:
    objects, states = made
    all_values = looked_at(objects, states)
    assert all_values == sum(map(len, states.values()))
    rng = random.Random(1)
    found = [looked_at(damaged(objects, rng), states) for _ in range(300)]
    assert min(found) < all_values, "some damage was noticed"


def test_another_place_has_what_one_lacks(made: tuple[Objects, dict[int, Any]]) -> None:
    objects, states = made
    whole, rng = looked_at(objects, states), random.Random(2)
    for _ in range(60):
        assert looked_at(damaged(objects, rng), states, objects) == whole


def test_an_older_version_is_restored_and_said(tmp_path: Path, made: tuple[Objects, dict[int, Any]]) -> None:
    objects, states = made
    found = Archive(Sources([Memory(dict(objects))]))
    part = found._find(4)[1].directory.part
    place = Memory(dict(objects) | {part: objects[part][:-1] + b"x"})
    broken = Archive(Sources([place]))
    with pytest.raises(pmstore.ArchiveDamagedError):
        broken.restore(tmp_path / "wanted.pm", 4)
    with pytest.warns(pmstore.ArchiveWarning, match="version 4 is damaged.*older"):
        assert broken.restore(tmp_path / "again.pm") == 3
    with pmstore.open(tmp_path / "again.pm", "r") as store:
        assert same(contents(store), states[3]) and store.sequence == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.pm"]
    report = broken.verify()
    assert not report.ok and report[0].versions == (4,) and part in str(report)


def test_a_newer_format_is_refused(made: tuple[Objects, dict[int, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_format, "FORMAT", 99)
    newer = b"".join(wrapped(ARCHIVE, "archive", {"id": "x", "lineage": "y"}))
    monkeypatch.undo()
    with pytest.raises(pmstore.FormatVersionError, match="newer pmstore"):
        Archive(Sources([Memory(made[0] | {"archive": newer})]))


def hostile(objects: Objects, change: Any, directory: Any = None) -> Objects:
    """The rows changed by a function, and the directory of the last one, with hashes that are right."""
    from pmstore._core import hash64

    made = dict(objects)
    name = max(name for name in objects if name.startswith("index/"))
    rows = [list(row) for row in opened(SEGMENT, name, objects[name])]
    if directory is not None:
        piece = Piece(*rows[-1][6])
        data = msgpack.unpackb(made[piece.part][piece.at : piece.at + piece.length], strict_map_key=False)
        packed = bytes(msgpack.packb(directory(data)))
        part = "parts/" + "f" * 16 + "-0000000000"
        made[part] = packed
        rows[-1][5] = [*rows[-1][5], part]
        rows[-1][6] = [part, 0, len(packed), hash64(packed)]
    change(rows)
    made[name] = b"".join(wrapped(SEGMENT, name, rows))
    return made


def set_row(field: int, value: Any) -> Any:
    def change(rows: list[Any]) -> None:
        rows[-1][field] = value

    return change


def test_hostile_rows(made: tuple[Objects, dict[int, Any]]) -> None:
    objects, states = made
    values = (-1, 1 << 62, 1 << 63, None, "x", b"x", [], {}, 1.5, float("nan"), True, ["parts/../../etc/passwd"], 4, 9)
    for field in range(10):
        for value in values:
            looked_at(hostile(objects, set_row(field, value)), states)
    looked_at(hostile(objects, lambda rows: rows.append(list(rows[-1]))), states)
    looked_at(hostile(objects, lambda rows: rows.clear()), states)
    looked_at(hostile(objects, set_row(6, ["parts/" + "0" * 16 + "-0000000000", 0, 1 << 61, 0])), states)


def test_hostile_directories(made: tuple[Objects, dict[int, Any]]) -> None:
    objects, states = made
    rng = random.Random(3)
    values = (-1, 0, 1 << 40, 1 << 61, None, "x", b"", [], [[]], {}, True, ["pickle"], {"id": "pickle"}, [0, 1 << 40])

    def changed(data: Any) -> Any:
        """One place, at any depth, has another value."""
        if isinstance(data, list) and data and rng.random() < 0.85:
            at = rng.randrange(len(data))
            return [*data[:at], changed(data[at]), *data[at + 1 :]]
        return rng.choice(values)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(400):
        looked_at(hostile(objects, lambda rows: None, changed), states, trusted=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "KiB"


def test_a_small_archive_that_claims_much(made: tuple[Objects, dict[int, Any]], tmp_path: Path) -> None:
    """A frame of zstd that is as long as it says, and far longer than a frame may be."""
    import numcodecs

    from pmstore._core import hash64

    objects = dict(made[0])
    bomb = bytes(numcodecs.Zstd(level=1).encode(np.zeros(200 << 20, np.uint8)))
    part = "parts/" + "e" * 16 + "-0000000000"

    def directory(data: Any) -> Any:
        for item in data[0]:
            if item[0] == b"nx":
                frame = [[0, 40_000], [part, 0, len(bomb), hash64(bomb)], 0, 0]
                item[5] = [frame]
        return [data[0], data[1], [[False, 1, [{"id": "zstd", "level": 1}]]]]

    made_of = hostile(objects, lambda rows: rows[-1].__setitem__(2, None), directory) | {part: bomb}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = Archive(Sources([Memory(made_of)]))
    with pytest.raises(pmstore.ArchiveDamagedError):
        found[4]["x"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"


def test_directories_come_back_as_they_were(made: tuple[Objects, dict[int, Any]]) -> None:
    found = Archive(Sources([Memory(dict(made[0]))]))
    for version in found:
        directory = found._library.directory(found._find(version)[1])
        assert Directory.checked("again", Directory.packed(*directory)) == directory


def test_the_object_of_an_archive_is_checked(made: tuple[Objects, dict[int, Any]]) -> None:
    for about in ([], {}, {"id": 5, "lineage": "x"}, {"id": "x", "lineage": "y", "parent": [1, 2]}, None):
        objects = made[0] | {"archive": b"".join(wrapped(ARCHIVE, "archive", about))}
        with pytest.raises(pmstore.ArchiveDamagedError):
            Archive(Sources([Memory(objects)]))


def test_a_differential_that_claims_to_be_a_base(tmp_path: Path) -> None:
    """Its directory lacks contents, which would be missing without an error."""
    place = Memory()
    with pmstore.open(tmp_path / "store.pm") as store, stepping(store, place, codec=None) as steps:
        store["x"], store["y"] = np.arange(1000.0), np.arange(2000)
        store.commit()
        archived(steps)
        store["x"] = np.arange(1000.0) + 1
        store.commit()
        archived(steps)
    found = Archive(Sources([place]))
    row = found._index.find(2)
    assert row is not None and row.previous == 1
    found._index._rows[1] = row._replace(previous=None).packed()
    with pytest.raises(pmstore.ArchiveDamagedError, match="version 2 is no base"):
        found[2]
    assert found[1]["y"][5] == 5
