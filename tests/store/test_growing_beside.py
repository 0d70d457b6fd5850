"""Arrays that grow beside everything else: declared write sets, slots, readers, forks, copies, damage."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import pmstore
from pmstore._catalog.names import key_of
from pmstore._cli import main
from pmstore._values.array import Growth, layout
from tests.conftest import Medium
from tests.core.test_damage import flipped
from tests.store.test_growing import growth_of, made, rows
from tests.store.test_interrupts import interrupted_at
from tests.support.images import REGION

Open = Callable[..., pmstore.Store]


def test_assignment(store: pmstore.Store) -> None:
    x = made(store, 3, 100)
    store["x"] = rows(7, 3)
    assert store["x"] is x and np.array_equal(x, rows(7, 3))
    store["x"] += 1
    del x
    for count in (30, 0, 100):  # another number of rows: another array, which grows as well
        store["x"] = np.asfortranarray(rows(0, count))
        assert np.array_equal(store["x"], rows(0, count)) and growth_of(store, "x") == (100, 100)
    store.resize("x", 5)
    store["x"] = rows(1, 5)
    store.commit()
    assert np.array_equal(store.append("x", rows(6, 1)), rows(1, 6))
    for other in (rows(0, 101), rows(0, 3).astype("f4"), np.zeros((3, 4)), np.zeros(3), "text"):
        made(store, 3, 100, "y")
        store["y"] = other
        with pytest.raises(TypeError, match="fixed shape|is for arrays"):
            store.append("y", 1)
        del store["y"]
    big = store.create_array("big", (10_000, 5), maxshape=(None, 5))
    store.append("big", rows(0, 1))
    del big
    gc.collect()
    store.commit()
    store["big"] = rows(0, 10_001)  # written once, to another place
    store.commit()
    assert np.array_equal(store.append("big", rows(10_001, 1)), rows(0, 10_002)) and store.check().ok


def test_append_to_what_is_no_array(store: pmstore.Store) -> None:
    store.create_list("list")
    store["text"] = "text"
    for name, hint in (("list", '; store["list"].append() appends to a list'), ("text", "")):
        with pytest.raises(TypeError, match=f"append.. is for arrays, and '{name}' is ") as caught:
            store.append(name, 1)
        assert str(caught.value).endswith(hint) and ("appends" in str(caught.value)) == bool(hint)


def test_rename_copy_pop_and_delete(store: pmstore.Store) -> None:
    made(store, 3)
    x = store.append("x", rows(3, 1))
    store.rename("x", "g/y")
    assert store["g/y"] is x
    y = store.append("g/y", rows(4, 1))
    store.copy("g/y", "z")
    assert growth_of(store, "z") == (5, None)  # a copy has no spare rows
    z = store.append("z", rows(5, 200))
    store.copy("g", "h")
    assert np.array_equal(z, rows(0, 205)) and np.array_equal(y, rows(0, 5))
    assert np.array_equal(store.append("h/y", rows(5, 1)), rows(0, 6))
    store.commit()
    gone = store.pop("z")
    assert np.array_equal(gone, rows(0, 205))
    del store["g/y"]
    with pytest.raises(KeyError):
        store.append("z", rows(0, 1))
    store.rollback()
    assert np.array_equal(store.append("g/y", rows(5, 1)), rows(0, 6)) and store.check().ok


def test_declared_write_sets_and_mark_dirty(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    large = store.create_array("large", (5000, 100), maxshape=(None, 100))
    store.append("large", np.ones((10, 100)))
    other = store.create_array("other", 20_000)
    store.commit()
    with store.transaction(only=[other[3:4]]):
        other[3] = 1
        large = store.append("large", np.full((2, 100), 2.0))
    store.rollback()
    assert len(large) == 5012 and large[5011, 7] == 2 and other[3] == 1
    with store.transaction(only=[large[:1]]):
        large[0] = 5
        large = store.resize("large", 20_000)  # moves
        assert large[0, 0] == 5
    store.rollback()
    assert len(store["large"]) == 20_000 and store["large"][0, 0] == 5 and store.check().ok
    store.mark_dirty(large[10_000:])
    store.commit()
    old = store["large"]
    store.resize("large", 10)
    store.commit()
    monkeypatch.setenv("PMSTORE_DEBUG", "1")
    store.close()
    store = open_store()
    longer = store.resize("large", 15)
    store.commit()
    store.resize("large", 10)
    store.commit()
    longer[12] = 1
    with pytest.raises(pmstore.TransactionError, match=r"\[12, 0\]"), store.transaction(only=[store["large"][:1]]):
        store["k"] = 1
    del old
    store.rollback()


@pytest.mark.parametrize("width", [100, 20_000])
def test_arrays_with_two_slots(store: pmstore.Store, width: int) -> None:
    x = store.create_array("x", (10, width), maxshape=(None, width))
    store.resize("x", growth_of(store, "x").capacity)
    expected = np.zeros((0, width))
    for i in range(12):
        x = store["x"]
        x[:] = np.arange(x.size).reshape(x.shape) + i
        expected = x.copy()
        store.commit()
        if i % 4 == 3:
            x = store.append("x", np.full(width, -1.0))  # moves
            expected = np.concatenate([expected, np.full((1, width), -1.0)])
            if i % 8 == 3:
                store.rollback()
                expected = expected[:-1]
        x = store["x"]
        assert np.array_equal(x, expected)
        x[:] += 1
        store.rollback() if len(x) == len(expected) and i % 4 != 3 else store.commit()
    assert store.check().ok


def test_derived_arrays_follow(open_store: Open) -> None:
    store = open_store()
    made(store, 3)
    store.derive("sum", np.sum, "x", kwargs={"axis": 0})
    for i in range(3, 600):
        store.append("x", rows(i, 1))
        if i % 90 == 0:
            assert np.array_equal(store["sum"], rows(0, i + 1).sum(axis=0))
            store.commit()
    store.append("x", rows(9, 9))
    store.rollback()
    assert np.array_equal(store["sum"], store["x"].sum(axis=0))
    store.resize("x", 2)
    assert np.array_equal(store["sum"], rows(0, 2).sum(axis=0))
    store.close()
    with open_store(mode="r") as reader:
        reader.derive("sum", np.sum, "x", kwargs={"axis": 0})
        assert np.array_equal(reader["sum"], rows(0, 2).sum(axis=0))


def test_readers_see_whole_commits(open_store: Open) -> None:
    store = open_store()
    made(store, 3)
    store.commit()
    with open_store(mode="r") as reader:
        snapshot = reader["x"]
        for i in range(3, 300):
            store.append("x", rows(i, 1))
            if i % 50 == 0:
                store.commit()
                assert np.array_equal(snapshot, rows(0, 3)) and reader["x"] is snapshot
                count = len(reader.read("x")[0] if isinstance(reader.read("x"), list) else reader.read("x"))
                assert count == i + 1
                assert np.array_equal(reader.read(("x", np.s_[i - 2 :])), rows(i - 2, 3))
        before = reader.sequence
        store.commit()
        reader.wait(after=before, timeout=10)
        reader.refresh()
        assert np.array_equal(reader["x"], rows(0, 300)) and np.array_equal(snapshot, rows(0, 3))
        assert not reader["x"].flags.writeable
    store.backup(Path(store.path).with_name("backup.pm"))
    store.append("x", rows(300, 1))
    store.rollback()
    with open_store("backup.pm") as backup:
        assert np.array_equal(backup.append("x", rows(300, 1)), rows(0, 301)) and backup.check().ok


def test_a_forked_child(store: pmstore.Store) -> None:
    made(store, 3)
    x = store.append("x", rows(3, 1))
    store.commit()
    pending = store.append("x", rows(4, 1))
    child = os.fork()
    if not child:
        ok = np.array_equal(pending, rows(0, 5)) and np.array_equal(store["x"], rows(0, 4)) and len(x) == 4
        try:
            store.append("x", rows(0, 1))
            ok = False
        except pmstore.ForkedStoreError:
            pass
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(store.append("x", rows(5, 1)), rows(0, 6))


def test_compact_and_salvage_drop_spare_rows(open_store: Open) -> None:
    with open_store() as store:
        made(store, 3000)
        store.append("x", rows(3000, 1))
        store.create_array("bounded", (0, 784), maxshape=(1000, 784))
        store.create_array("reserved", (10_000,), maxshape=(None,))
        store.resize("reserved", 0)
        path = Path(store.path)
    size = path.stat().st_size
    pmstore.salvage(path, path.with_name("salvaged.pm"))
    assert pmstore.compact(path) > 6_000_000 and path.stat().st_size < size - 6_000_000
    for name in ("store.pm", "salvaged.pm"):
        with open_store(name) as store:
            assert growth_of(store, "x") == (3001, None) and growth_of(store, "bounded") == (1, 1000)
            assert growth_of(store, "reserved") == (1, None) and np.array_equal(store["x"], rows(0, 3001))
            assert np.array_equal(store.append("x", rows(3001, 1)), rows(0, 3002))
            assert store.append("bounded", np.ones((2, 784))).shape == (2, 784)
            assert growth_of(store, "bounded") == (1000, 1000)
            assert store.check().ok


def test_damage(open_store: Open, medium: Medium) -> None:
    """A damaged block would get a new hash when it moves, so nothing moves then."""
    with open_store() as store:
        made(store, 1000)
        store.commit()
    flipped(medium.directory / "store.pm", rows(125, 1).tobytes())
    with open_store() as store:
        report = store.check()
        assert [problem.name for problem in report] == ["x"] and 125 in report[0].rows
        with pytest.raises(pmstore.CorruptStoreError, match="'x'"):
            store.append("x", rows(1000, 1))
        assert len(store["x"]) == 1000
        with pytest.raises(pmstore.CorruptStoreError):
            store.copy("x", "y")


def damage_at(path: Path, offset: int, *places: int) -> None:
    """Flips a bit in each of these places behind an offset in the store's region."""
    image = bytearray(path.read_bytes())
    for place in places:
        image[REGION + offset + place] ^= 1
    path.write_bytes(image)


def extent_of(store: pmstore.Store, name: str) -> int:
    entry = store._catalog.core.get(key_of(name))
    assert entry is not None
    return entry.offset


def test_I36_damage_in_spare_rows_costs_no_rows(open_store: Open) -> None:
    """Salvage, a copy and a move take the rows that the entry counts, which are sound."""
    with open_store() as store:
        made(store, 1000)  # 40 bytes each: 9 blocks and a part of the tenth
        x = store.append("x", rows(1000, 1))
        store.create_array("none", (0, 5), maxshape=(2000, 5))
        store.commit()
        assert growth_of(store, "x").capacity > 1100
        path, places = Path(store.path), (extent_of(store, "x"), extent_of(store, "none"))
        del x
    damage_at(path, places[0], 11 * 4096)
    damage_at(path, places[1], 0)
    with open_store(mode="r") as store:
        assert {problem.name: problem.rows for problem in store.check()} == {"x": None, "none": None}
    report = pmstore.salvage(path, path.with_name("salvaged.pm"))
    assert str(report).count("all of its rows are copied") == 2 and not report.ok
    with open_store("salvaged.pm") as store:
        assert store.check().ok and np.array_equal(store["x"], rows(0, 1001)) and len(store["none"]) == 0
        assert np.array_equal(store.append("x", rows(1001, 1)), rows(0, 1002))
    with open_store() as store:
        store.copy("x", "y")
        store.copy("none", "nothing")
        assert np.array_equal(store["y"], rows(0, 1001)) and len(store["nothing"]) == 0
        capacity = growth_of(store, "x").capacity
        assert np.array_equal(store.append("x", rows(1001, capacity)), rows(0, 1001 + capacity))  # it has moved
        assert np.array_equal(store.append("none", rows(0, 2000)), rows(0, 2000))  # each of its blocks is written
        store.commit()
        assert store.check().ok


@pytest.mark.parametrize(("block", "sound"), [(3, 3 * 4096 // 40), (9, 9 * 4096 // 40), (0, None)])
def test_salvage_of_the_rows_before_the_damage(open_store: Open, block: int, sound: int | None) -> None:
    """Block 9 has the last rows and spare ones: one hash covers both, so the damage may be in the rows."""
    with open_store() as store:
        made(store, 1000)
        store.append("x", rows(1000, 1))
        path, place = Path(store.path), extent_of(store, "x")
    damage_at(path, place, block * 4096 + 4095, 10 * 4096 + 5)
    report = pmstore.salvage(path, path.with_name("salvaged.pm"))
    assert {problem.name for problem in report} == {"x"}
    with open_store("salvaged.pm") as store:
        if sound is None:
            assert "x" not in store
        else:
            assert f"its rows from number {sound} on are left out" in str(report)
            assert np.array_equal(store["x"], rows(0, sound)) and store.check().ok
    with open_store() as store, pytest.raises(pmstore.CorruptStoreError):
        store.copy("x", "y")


@pytest.mark.parametrize("lost", [[2], [2, 4]], ids=str)
def test_I12_damage_in_spare_rows_hides_no_lost_write(open_store: Open, lost: list[int]) -> None:
    """Blocks that are older than the last commit are reported beside it, and the rows in a known one are not copied."""
    with open_store() as store:
        made(store, 1000)
        store.append("x", rows(1000, 1))
        store["short"] = np.ones(30)
    path = Path(store.path)
    before = path.read_bytes()
    with open_store() as store:
        for block in lost:
            store["x"][block * 4096 // 40 + 5] = -1
        store.commit()
        place, length = REGION + extent_of(store, "x"), growth_of(store, "x").capacity * 40
    image = bytearray(path.read_bytes())
    for block in lost:
        for at, size in ((place + block * 4096, 4096), (place + length + block * 8, 8)):  # contents, and their hash
            image[at : at + size] = before[at : at + size]
    path.write_bytes(image)
    damage_at(path, place - REGION, 11 * 4096)
    report = pmstore.salvage(path, path.with_name("salvaged.pm"))
    said = [(problem.name, problem.block) for problem in report]
    assert ("x", 11) in said and "not those that were committed last" in str(report)
    if len(lost) == 1:
        assert ("x", 2) in said
        with open_store("salvaged.pm", mode="r") as store:
            assert np.array_equal(store["x"], rows(0, 2 * 4096 // 40))
    else:
        assert None in {name for name, block in said} and "does not match its digest" in str(report)


@pytest.mark.parametrize(
    "growth",
    [
        [4, None], [6, None], [0, None], [-5, None], [5, 4], [5, 3], [5.0, None], [5, "9"], [5], [5, None, 1], 5, [],
        [1 << 63, None], [1 << 61, 1 << 62], [True, None], [5, -1],
    ],
)  # fmt: skip
def test_hostile_descriptions(store: pmstore.Store, growth: Any) -> None:
    made(store, 5)
    core = store._catalog.core
    described = layout((5, 5), "f8", "C", True, Growth(5, None))
    offset = core.alloc(described.length)
    core.write(offset, 0, bytes(described.length), described.length)
    parts = msgpack.unpackb(described.meta)
    entry = core.get(key_of("x"))
    assert entry is not None
    core.put(key_of("y"), entry._replace(offset=offset, length=described.length, meta=described.meta))
    assert store["y"].shape == (5, 5)
    parts[4] = growth
    core.put(key_of("y"), entry._replace(offset=offset, length=described.length, meta=msgpack.packb(parts)))
    for use in (lambda: store["y"], lambda: store.append("y", rows(0, 1)), lambda: store.resize("y", 1)):
        with pytest.raises(pmstore.CorruptStoreError):
            use()
    assert [problem.name for problem in store.check()] == ["y"]
    store["y"] = 1
    for shape, order, writeable in ((5, 5), "F", True), ((5, 5), "C", False), ((5, 0), "C", True), ((), "C", True):
        meta = msgpack.packb(["<f8", list(shape), order, writeable, [5, None]])
        core.put(key_of("x"), entry._replace(meta=meta))
        with pytest.raises(pmstore.CorruptStoreError):
            store["x"]


def test_without_space_only_what_is_needed_is_taken(directory: Path) -> None:
    with pmstore.open(directory / "full.pm", max_size=14 << 20, media="memory") as store:
        store.create_array("x", (60_000, 5), maxshape=(None, 5))  # 2.4 MB
        store.commit()
        x = store.resize("x", 80_000)
        assert growth_of(store, "x") == (120_000, None)
        store.commit()
        x = store.resize("x", 130_000)  # twice as many as before would not fit
        assert growth_of(store, "x").capacity == 130_000
        store.commit()
        x[:] = 1
        with pytest.raises(pmstore.OutOfSpaceError):
            store.append("x", np.ones((60_000, 5)))
        assert store["x"] is x and len(x) == 130_000 and x.flags.writeable
        store.commit()
        assert store.check().ok


def test_what_is_shown(store: pmstore.Store, capsys: pytest.CaptureFixture[str]) -> None:
    made(store, 3)
    store.group("g").create_array("y", (0, 2), "i4", maxshape=(9, 2))
    store["plain"] = np.zeros((3, 5))
    assert "(3, 5) of (None, 5) float64  120 B" in str(store) and "(0, 2) of (9, 2) int32" in str(store)
    assert "(3, 5) of (None, 5) float64" in store._repr_html_()
    store.commit()
    assert main(["ls", "-l", str(store.path)]) == 0
    out = capsys.readouterr().out
    assert "(3, 5) of (None, 5) float64" in out and "plain  (3, 5) float64" in out
    assert main(["info", str(store.path)]) == 0
    store.close()
    assert main(["dump", str(store.path), "x", "--npy", str(store.path) + ".npy"]) == 0
    assert np.array_equal(np.load(io.BytesIO(Path(str(store.path) + ".npy").read_bytes())), rows(0, 3))
    assert main(["export", str(store.path), str(store.path) + ".npz"]) == 0
    with np.load(str(store.path) + ".npz") as exported:
        assert exported["x"].shape == (3, 5) and exported["g/y"].shape == (0, 2)


def test_threads_append(store: pmstore.Store) -> None:
    made(store)

    def run(number: int) -> None:
        for _ in range(300):
            store.append("x", np.full((2, 5), float(number)))

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = store["x"]
    assert x.shape == (1800, 5) and [int((x == number).sum()) for number in (1, 2, 3)] == [3000] * 3
    assert np.array_equal(x[::2], x[1::2])


def test_old_arrays_do_not_slow_commits_down(store: pmstore.Store) -> None:
    """Arrays that were read before share one buffer."""
    store.create_array("x", (0, 784), maxshape=(1000, 784))
    kept = [store.append("x", np.full(784, float(i))) for i in range(300)]
    assert store.stats().buffers == 1
    store.commit()
    assert [len(array) for array in kept] == list(range(1, 301)) and kept[0][0, 0] == 0 == kept[-1][0, 0]


@pytest.mark.parametrize("change", ["append", "resize"])
@pytest.mark.parametrize("count", [1, 500])
def test_an_interrupt_at_any_moment(store: pmstore.Store, change: str, count: int) -> None:
    def grow() -> None:
        store.append("x", rows(50, count)) if change == "append" else store.resize("x", 50 + count)

    at, interrupted = 0, True
    while interrupted:
        at += 1
        x = made(store, 50)
        store.commit()
        x[0] = -1
        interrupted = interrupted_at(at, grow)
        found = store["x"]
        assert len(found) in ({50, 50 + count} if interrupted else {50 + count}) and found.flags.writeable
        assert np.array_equal(found[1:50], rows(1, 49)) and (found[0] == -1).all()
        if len(found) > 50:
            assert np.array_equal(found[50:], rows(50, count) if change == "append" else np.zeros((count, 5)))
        store.commit()
        assert np.array_equal(store["x"], found) and np.array_equal(store.append("x", rows(1, 1))[-1:], rows(1, 1))
        store.rollback()
        assert store.check().ok and np.array_equal(store["x"], found)
        del store["x"]
        store.commit()
    assert at > 20


def test_a_rollback_of_a_move_where_names_can_not_be_read(
    store: pmstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.create_array("log", (0, 7), "i8", maxshape=(None, 7))
    store.commit()

    def unreadable(*_: Any) -> Any:
        raise pmstore.CorruptStoreError("the metadata are damaged")

    with monkeypatch.context() as patch:
        patch.setattr(type(store._catalog.core), "scan", unreadable)
        with pytest.raises(ZeroDivisionError), store.transaction():
            moved = store.append("log", np.ones((1000, 7), "i8"))
            raise ZeroDivisionError
    assert not moved.flags.writeable and not before.flags.writeable
    assert store["log"].shape == (0, 7)
