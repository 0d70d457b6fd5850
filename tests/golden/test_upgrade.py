"""Stores of format 0 become stores of format 1 with their first commit, or by `pmstore.upgrade` (D28)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._cli import main
from pmstore._core import ffi, lib
from tests.conftest import LONGER, Medium
from tests.golden import layout
from tests.golden.files import check_contents, registered, unpacked
from tests.support.crashes import assert_survives, explored, record, record_failed_sync
from tests.support.crashes_async import ASYNC

CLEAN, LOGGED = "format0/{}-compacted", "format0/{}-log"
OLD = [f"format0/{medium}-{name}" for medium in ("memory", "file") for name in ("compacted", "log", "overflow")]
FEATURES, WRITE_FEATURES, OPTIONAL, RESERVED = 12, 220, 224, 228

every_old = pytest.mark.parametrize("golden", OLD)
both_orders = pytest.mark.parametrize("first", [0, 4096])


@pytest.fixture(autouse=True)
def _types(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)


def versions(path: Path) -> list[int]:
    """The versions of both copies of the header."""
    data = path.read_bytes()
    return [int.from_bytes(data[copy + 8 : copy + 12], "little") for copy in (0, 4096)]


def opened(path: Path, mode: Any, medium: Medium) -> pmstore.Store:
    return pmstore.open(path, mode, media=medium.name)  # type: ignore[arg-type]


def state(path: Path) -> tuple[dict[bytes, layout.Entry], int, layout.Digest]:
    found = layout.Store(path.read_bytes())
    return found.entries, found.sequence, found.digest


def set_header(path: Path, *fields: tuple[int, int]) -> None:
    """Sets words of 32 bits in both copies of the header, with the checksum of format 1."""
    data = bytearray(path.read_bytes())
    for copy in (0, 4096):
        for place, value in fields:
            struct.pack_into("<I", data, copy + place, value)
        struct.pack_into("<I", data, copy + 252, lib.pm_crc32c(ffi.from_buffer(data[copy : copy + 252]), 252, 0))
    path.write_bytes(data)


# ---- when


@every_old
def test_only_a_commit_or_a_recovery_upgrades(golden: str, medium: Medium) -> None:
    path = unpacked(golden, medium.directory)
    before = path.read_bytes()
    opened(path, "r", medium).close()
    assert path.read_bytes() == before
    opened(path, "r+", medium).close()
    if golden.endswith("compacted"):  # it was closed: nothing had to be written
        assert path.read_bytes() == before
        with opened(path, "r+", medium) as store:
            store["new"] = 1
        assert versions(path) == [1, 1]
        with opened(path, "r+", medium) as store:
            del store["new"]
    assert versions(path) == [1, 1]
    with opened(path, "r", medium) as store:
        assert store.check().ok
        check_contents(store, golden)


@every_old
def test_an_upgrade_changes_nothing_else(golden: str, medium: Medium) -> None:
    path = unpacked(golden, medium.directory)
    before = state(path)
    assert pmstore.upgrade(path) == 0
    assert versions(path) == [1, 1] and state(path) == before
    once = path.read_bytes()
    assert pmstore.upgrade(path) == 1 and path.read_bytes() == once
    with opened(path, "r+", medium) as store:
        check_contents(store, golden)
        assert store.check().ok


def test_a_store_that_is_open_is_not_upgraded(medium: Medium, child: Any) -> None:
    path = unpacked(CLEAN.format("file"), medium.directory)
    with opened(path, "r+", medium), pytest.raises(pmstore.StoreLockedError):
        pmstore.upgrade(path)
    child("import sys, pmstore; store = pmstore.open(sys.argv[1], 'r+'); print(flush=True); input()", path).line()
    with pytest.raises(pmstore.StoreLockedError):
        pmstore.upgrade(path)
    assert versions(path) == [0, 0]


def test_a_reader_follows_an_upgrade(medium: Medium) -> None:
    path = unpacked(LOGGED.format(medium.name), medium.directory)
    with opened(path, "r", medium) as reader:
        before = reader["sparse"].copy()
        assert pmstore.upgrade(path) == 0
        assert np.array_equal(reader["sparse"], before)
        with opened(path, "r+", medium) as store:
            store["sparse"][0] = 9
            store.commit()
            reader.refresh()
            assert reader["sparse"][0] == 9 and reader.sequence == store.sequence


def test_the_command(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    path = unpacked(CLEAN.format(medium.name), medium.directory)
    assert main(["info", "--json", str(path)]) == 0 and '"format_version": 0' in capsys.readouterr().out
    assert main(["upgrade", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: format 1 now, 0 before\n"
    assert main(["upgrade", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: format 1 already\n"
    assert main(["upgrade", "--json", str(path)]) == 0
    assert '"version_before": 1' in capsys.readouterr().out
    assert main(["upgrade", str(path) + "x"]) == 2


def test_copies_are_of_format_1(medium: Medium) -> None:
    golden = f"format0/{medium.name}-overflow"
    path = unpacked(golden, medium.directory)
    before = path.read_bytes()
    with opened(path, "r", medium) as store:
        store.backup(medium.directory / "backup.pm")
    pmstore.salvage(path, medium.directory / "salvaged.pm")
    assert path.read_bytes() == before
    assert pmstore.compact(path) > 0
    for copy in (path, medium.directory / "backup.pm", medium.directory / "salvaged.pm"):
        assert versions(copy) == [1, 1]
        with pmstore.open(copy, "r+", verify=True) as store:
            check_contents(store, golden)


def test_an_archive_of_it(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("numcodecs")
    golden = LOGGED.format("file")
    path = unpacked(golden, tmp_path)
    with pmstore.open(path, "r+") as store, store.drain(tmp_path / "archive") as drain:
        drain.wait()
    pmstore.archive.open(tmp_path / "archive").restore(tmp_path / "restored.pm")
    assert versions(tmp_path / "restored.pm") == [1, 1]
    with pmstore.open(tmp_path / "restored.pm", verify=True) as store:
        check_contents(store, golden)


# ---- crashes

STEPS = """
A crash may come                                                what is there               tested by
before the first copy is durable                                0, 0                        every exploration
while the first copy is written: it is torn                     torn, 0 or 0, torn          every exploration
between the two                                                 1, 0 or 0, 1                half upgraded, explored
while the second copy is written                                1, torn or torn, 1          explored
in the recovery of each of these, or after its first commit     as above                    depth 2
before, with an old copy that was torn or can't be read         torn, 0                     torn before, unreadable
"""


def change(store: pmstore.Store) -> None:
    """The first commit of this version, and what follows. Nothing but the header is different."""
    store["new"] = 1
    store.commit()
    store["new array"] = np.full(700, 2.0)
    for name, value in store.items():
        if isinstance(value, np.ndarray) and value.dtype == float and name != "new array":
            value[:10] += 1
    store.commit()


def change_and_close(store: pmstore.Store) -> None:
    change(store)
    store.close()


@pytest.mark.parametrize("name", ["compacted", "log", "later", "overflow"])
def test_I1_every_crash_of_an_upgrade_leaves_a_whole_commit(medium: Medium, name: str) -> None:
    path = unpacked(f"format0/{medium.name}-{name}", medium.directory)
    recording = record(path, medium.name, change_and_close)
    assert versions(path) == [1, 1] and min(recording.states) == layout.Store(recording.base).sequence
    assert_survives(recording, depth=2 if name in ("compacted", "later") else 1)


@pytest.mark.parametrize("name", ["compacted", "later"])
def test_I4_every_crash_of_an_upgrade_without_a_commit(medium: Medium, name: str) -> None:
    path = unpacked(f"format0/{medium.name}-{name}", medium.directory)
    recording = record(path, medium.name, lambda store: store._catalog.core.checkpoint())
    tally, found = explored(recording, budget=5000, depth=2)
    assert found is None and tally.nested > 10, found
    written = [recording.event(number) for number in range(len(recording))]
    places = [event.offset for event in written if event.data and event.offset in (0, 4096)]
    assert len(places) >= 2 and places[:2] in ([0, 4096], [4096, 0])


@pytest.mark.parametrize("name", ["compacted", "later"])
def test_I13_every_crash_of_an_upgrade_whose_commits_are_durable_later(tmp_path: Path, name: str) -> None:
    path = unpacked(f"format0/file-{name}", tmp_path)
    recording = record(path, "file", change_and_close, **ASYNC)
    assert versions(path) == [1, 1]
    assert_survives(recording, depth=1)


@pytest.mark.slow
def test_D7_a_sync_of_an_upgrade_fails(tmp_path: Path) -> None:
    """Whichever it is, the next opening finds every commit."""
    for number in range(1, 20):
        path = unpacked(CLEAN.format("file"), tmp_path)
        recording = record_failed_sync(path, change, number)
        if recording is None:
            break
        assert versions(path) == [1, 1]
        assert_survives(recording, budget=60)
    assert 4 < number < 19


@pytest.mark.longer
@both_orders
def test_I4_a_torn_copy_of_format_0(medium: Medium, first: int) -> None:
    path = unpacked(CLEAN.format(medium.name), medium.directory)
    data = bytearray(path.read_bytes())
    data[first + 16] ^= 1
    path.write_bytes(data)
    recording = record(path, medium.name, change_and_close)
    tally, found = explored(recording, budget=2000 if LONGER > 1 else 500, depth=2)
    assert found is None and tally.nested > 100, found


@both_orders
@every_old
def test_half_upgraded(golden: str, medium: Medium, first: int) -> None:
    """A crash between the two copies: one is of format 1. Both tell the same, as the log is empty or was not begun."""
    path = unpacked(golden, medium.directory)
    before, old = state(path), path.read_bytes()
    pmstore.upgrade(path)
    new = bytearray(path.read_bytes())
    new[first : first + 256] = old[first : first + 256]
    path.write_bytes(new)
    assert sorted(versions(path)) == [0, 1]
    for mode in ("r", "r+"):
        with opened(path, mode, medium) as store:
            check_contents(store, golden)
            assert store.check().ok
    assert versions(path) == [1, 1] and state(path) == before


@both_orders
def test_half_upgraded_by_hand(medium: Medium, first: int) -> None:
    """`upgrade` completes what a crash left."""
    path = unpacked(CLEAN.format(medium.name), medium.directory)
    old = path.read_bytes()
    pmstore.upgrade(path)
    data = bytearray(path.read_bytes())
    data[first : first + 256] = old[first : first + 256]
    path.write_bytes(data)
    assert pmstore.upgrade(path) == 1 and versions(path) == [1, 1]


@both_orders
def test_a_damaged_copy_of_format_0_is_reported_and_replaced(medium: Medium, first: int) -> None:
    path = unpacked(CLEAN.format(medium.name), medium.directory)
    for place in (0, 8, 100, 219, 220, 223):
        data = bytearray(path.read_bytes())
        data[first + place] ^= 0x40
        damaged = path.with_name("damaged.pm")
        damaged.write_bytes(data)
        with opened(damaged, "r", medium) as store:
            assert len(store) == 400
        with pmstore.open(damaged, "r", exclusive=True) as store:  # not a snapshot, whose header is its own
            assert f"copy {'AB'[first // 4096]} of the file's header is damaged" in str(store.check())
        with opened(damaged, "r+", medium) as store:
            assert store.check().ok and len(store) == 400
        assert versions(damaged) == [1, 1]
        damaged.unlink()


# ---- features, and later versions


def unknown(path: Path, place: int, value: int = 4) -> None:
    with pmstore.open(path, "w") as store:
        store["x"] = np.arange(5.0)
    set_header(path, (place, value))


def test_a_feature_that_a_reader_must_know(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    unknown(path, FEATURES)
    before = path.read_bytes()
    for mode in ("r", "r+", "a"):
        with pytest.raises(pmstore.FormatVersionError, match=r"features \(0x4\)"):
            opened(path, mode, medium)
    for work in (pmstore.upgrade, pmstore.compact):
        with pytest.raises(pmstore.FormatVersionError):
            work(path)
    with pytest.raises(pmstore.FormatVersionError):
        pmstore.salvage(path, medium.directory / "new.pm")
    assert path.read_bytes() == before
    with opened(path, "w", medium) as store:  # replaces whatever is there
        assert len(store) == 0


def test_a_feature_that_a_writer_must_know(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    unknown(path, WRITE_FEATURES)
    before = path.read_bytes()
    with opened(path, "r", medium) as store:
        assert store["x"][4] == 4 and store.check().ok
        store.backup(medium.directory / "copy.pm")
    with pmstore.open(path, "r", exclusive=True) as store:
        assert store["x"][4] == 4
    for copy in (path, medium.directory / "copy.pm"):  # a copy has the feature, too
        for mode in ("r+", "a"):
            with pytest.raises(pmstore.FormatVersionError, match=r"\(0x4\) that this pmstore can't write.*mode='r'"):
                opened(copy, mode, medium)
        for work in (pmstore.upgrade, pmstore.compact):
            with pytest.raises(pmstore.FormatVersionError, match="can't write"):
                work(copy)
    assert path.read_bytes() == before


def test_features_that_nobody_must_know_are_kept(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    unknown(path, OPTIONAL, 1 << 31)
    set_header(path, (RESERVED, 7), (RESERVED + 20, 9))
    with opened(path, "r+", medium) as store:
        store["y"] = np.ones(300_000)  # the file grows
        store.commit()
        store.backup(medium.directory / "copy.pm")
    for copy in (path, medium.directory / "copy.pm"):
        data = copy.read_bytes()
        for header in (data[:256], data[4096 : 4096 + 256]):
            assert struct.unpack_from("<II", header, 8) == (1, 0) and struct.unpack_from("<I", header, 220) == (0,)
            assert struct.unpack_from("<II", header, OPTIONAL) == (1 << 31, 7)
            assert struct.unpack_from("<I", header, RESERVED + 20) == (9,)
    with opened(path, "r", medium) as store:
        assert store.check().ok and len(store) == 2


def test_a_later_format_is_refused(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    unknown(path, 8, 2)
    before = path.read_bytes()
    for mode in ("r", "r+", "a"):
        with pytest.raises(pmstore.FormatVersionError, match="format version 2; this pmstore reads versions up to 1"):
            opened(path, mode, medium)
    with pytest.raises(pmstore.FormatVersionError):
        pmstore.upgrade(path)
    assert path.read_bytes() == before
    assert main(["check", str(path)]) == 2
