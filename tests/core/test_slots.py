"""Extents with two slots: arrays that change as a whole are written once, and all that else happens to them."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._values.array import address_of
from tests.conftest import Medium, run_in_fork
from tests.core.test_hostile import image_of, use
from tests.support.crashes_slots import double_buffered_length
from tests.support.images import DATA, MAP, MAP_LIST, PAGE, REGION, ROOT, SLOTS, Image


def written(store: pmstore.Store) -> int:
    stats = store.stats()
    return stats.bytes_logged + stats.bytes_home + stats.bytes_direct


def make_double_buffered(store: pmstore.Store, extra: int = 0, commits: int = 0) -> Any:
    """An array of float64 with two slots, all of whose elements are 4.0 and committed; further commits add one each."""
    x = store.create_array("x", double_buffered_length(store) + extra, "f8")
    store.commit()
    for _ in range(4 + commits):
        x += 1
        store.commit()
    return x


@pytest.fixture
def store(medium: Medium) -> Any:
    with pmstore.open(medium.directory / "store.pm", media=medium.name) as store:
        yield store


def reopened(store: pmstore.Store) -> pmstore.Store:
    store.close()
    return pmstore.open(store.path, "r+", media=store.media, verify=True)  # type: ignore[arg-type]


def test_a_store_whose_table_of_slots_is_damaged_is_not_opened(store):
    """Arrays would have the contents of their first slots, which are older ones."""
    make_double_buffered(store)
    store.close()
    image = Image(Path(store.path))
    image.bytes[REGION + next(image.pages(SLOTS)) + 100] ^= 1
    image.save()
    with pytest.raises(pmstore.CorruptStoreError, match="the metadata page at region offset .* is damaged"):
        pmstore.open(store.path, "r+", media=store.media)


def test_pages_that_have_no_level_have_level_0(store):
    make_double_buffered(store)
    store.close()
    image = Image(Path(store.path))
    without = [ROOT, MAP_LIST, MAP, SLOTS]
    assert {image.get(page, 16, "I") for page in image.pages(*without)} == set(without)
    assert all(image.get(page, 20, "I") == 0 for page in image.pages(*without))


@pytest.mark.parametrize("extra", [0, 24, 1000, 7, 512])
def test_a_commit_of_a_double_buffered_array_writes_each_byte_once(store, extra):
    x = make_double_buffered(store, extra=extra)
    before = written(store)
    for _ in range(10):
        x *= 2
        store.commit()
    page = 4096 if store.media == "file" else 192  # a record
    assert (written(store) - before) / 10 <= x.nbytes * (1 + 8 / 4096) + 16 + page
    assert store.check().ok
    with reopened(store) as again:
        assert (again["x"] == 4.0 * 2**10).all()


def test_a_few_changes_do_not_write_all_of_it(store):
    x = make_double_buffered(store)
    for i in range(6):
        before = written(store)
        x[i] = -1
        store.commit()
        assert written(store) - before < x.nbytes / 4
    assert store.check().ok
    with reopened(store) as again:
        assert again["x"][:8].tolist() == [-1.0] * 6 + [4.0] * 2


@pytest.mark.parametrize(("share", "whole"), [(0.7, False), (0.8, True)])
def test_it_is_written_whole_if_three_quarters_have_changed(store, share, whole):
    x = make_double_buffered(store)
    before = store.stats().bytes_direct
    x[int((1 - share) * len(x)) :] += 1
    store.commit()
    written = store.stats().bytes_direct - before
    assert written >= x.nbytes if whole else not written


def test_a_full_log_is_emptied_for_what_is_written_whole(store):
    """Its record takes a few bytes of the log, whatever the size of the array."""
    x = make_double_buffered(store)
    before = store.stats()
    while store.stats().checkpoints == before.checkpoints:
        x += 1
        store.commit()
    assert store.stats().log_size == before.log_size and store.check().ok
    with reopened(store) as again:
        assert np.array_equal(again["x"], x)


@pytest.mark.parametrize("parts", [(1, 1, 1, 1), (1, 0.01, 1, 0.01, 1, 1, 1, 1)])
def test_one_commit_that_changes_all_of_it_gives_no_second_slot(store, parts):
    """A second slot is there after two such commits in a row; at once if the array is larger than the log ("file")."""
    x = store.create_array("x", double_buffered_length(store), "f8")
    store.commit()
    whole = []
    for part in parts:
        before = store.stats().bytes_direct
        x[: int(part * x.size)] += 1
        store.commit()
        whole.append(store.stats().bytes_direct - before >= x.nbytes)
    changed = [part == 1 for part in parts]
    assert whole == (changed if store.media == "file" else [False] * (len(parts) - 2) + [True] * 2)


def test_what_does_not_change_is_not_written(store):
    make_double_buffered(store)
    store["epoch"] = 1
    before, sequence = written(store), store.sequence
    store.commit()
    assert store.sequence == sequence + 1
    assert written(store) - before < 40_000
    store.commit()
    assert store.sequence == sequence + 1


def test_what_was_committed_through_the_log_is_not_written_again(store):
    """What was last written whole is not what is current any more."""
    x = make_double_buffered(store)
    with store.transaction(only=[x[1:]]):
        x[1:] += 1
    before, sequence = written(store), store.sequence
    store.commit()
    assert (written(store), store.sequence) == (before, sequence)


@pytest.mark.parametrize("commits", [0, 1])
def test_a_rollback_takes_all_of_it_back_from_either_slot(store, commits):
    x = make_double_buffered(store, commits=commits)
    x[:] = -7
    store.rollback()
    assert (x == 4.0 + commits).all()
    x[3] = -7
    store.rollback()
    assert (x == 4.0 + commits).all()
    x += 1
    store.commit()
    assert store.check().ok
    with reopened(store) as again:
        assert (again["x"] == 5.0 + commits).all()


@pytest.mark.parametrize("commits", [0, 1])
def test_opened_again_it_goes_on_from_the_current_slot(store, commits):
    x = make_double_buffered(store, commits=commits)
    with reopened(store) as again:
        x = again["x"]
        assert (x == 4.0 + commits).all()
        x += 1
        again.rollback()
        assert (x == 4.0 + commits).all()
        for _ in range(3):
            x += 1
            again.commit()
        x[5] = 0
        again.rollback()
        assert x[5] == 7.0 + commits
        del again["x"]
        again.rollback()
        assert again["x"] is x or (again["x"] == x).all()
        assert again.check().ok
    with pmstore.open(store.path, "r", media=store.media) as reader:
        assert (reader["x"] == 7.0 + commits).all()


@pytest.mark.parametrize("commits", [2, 3, 4, 5])
def test_release_gives_memory_back_over_either_slot(open_store, commits):
    """Memory stays over one slot, and every other commit went into the other one."""
    store = open_store()
    x = store.create_array("x", 1 << 20, "f8")
    store.commit()
    for _ in range(commits):
        x += 1
        store.commit()
    x[5] = -1
    store.release("x")
    assert private_bytes(x) == 4096, "the page that has changed since"
    assert x[5] == -1 and (x[6:] == commits).all()
    store.rollback()
    assert (x == commits).all() and store.check().ok
    x += 1
    store.commit()
    del x
    store.close()
    store = open_store(verify=True)
    assert (store["x"] == commits + 1).all()


def test_release_writes_a_slot_once(store):
    """What it has made equal stays so until the next commit."""
    x = make_double_buffered(store, commits=1)
    store.release("x")
    before = written(store)
    for _ in range(3):
        store.release("x")
    assert written(store) == before
    assert (x == 5.0).all() and store.check().ok


def private_bytes(array):
    """Bytes of the pages of an array that are private."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        address = address_of(array)
        pages = array.nbytes // 4096
        entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, address // 4096 * 8), "u8")
    present, file = (entries >> np.uint64(63)) & 1, (entries >> np.uint64(61)) & 1
    return int(((present == 1) & (file == 0)).sum()) * 4096


def test_release_keeps_every_byte(store):
    x = make_double_buffered(store)
    for i in range(4):
        x[i] = i
        store.release("x")
        assert x[i] == i and x[i + 1] == 4.0 + max(0, i - 1) * 0 + i
        x += 1
        store.release("x")
        store.commit()
        store.release("x")
        expected = x.copy()
        x[::3] = -1
        store.rollback()
        assert np.array_equal(x, expected)
    assert store.check().ok


def test_a_deleted_one_keeps_its_bytes_and_gives_both_slots_back(store):
    x = make_double_buffered(store)
    used = store.stats().region_used
    expected = x.copy()
    del store["x"]
    store.commit()
    assert used - store.stats().region_used >= 2 * x.nbytes
    for i in range(4):
        store[f"new{i}"] = np.full(len(x), 100.0 + i)
        store.commit()
    assert np.array_equal(x, expected)
    assert store.check().ok


@pytest.mark.parametrize(("commits", "whole_pages"), [(0, False), (1, False), (0, True)])
def test_it_cools_down(store, commits, whole_pages):
    """It does so from either slot: contents in the second slot go to the first before only that one is left."""
    extra = -(double_buffered_length(store) % (PAGE // 8)) if whole_pages else 0
    x = make_double_buffered(store, extra, commits=commits)
    used = store.stats().region_used
    for i in range(40):
        x[i % 8] = -i
        store.commit()
    assert used - store.stats().region_used >= x.nbytes
    expected = x.copy()
    x += 1
    store.rollback()
    assert np.array_equal(x, expected)
    assert store.check().ok
    with reopened(store) as again:
        assert np.array_equal(again["x"], expected)


def test_without_space_for_a_second_slot_all_goes_on(medium):
    with pmstore.open(medium.directory / "full.pm", media=medium.name, max_size=3_000_000) as store:
        x = store.create_array("x", max(double_buffered_length(store), 120_000), "f8")
        store["filler"] = np.ones(30_000)
        store.commit()
        for _ in range(5):
            x += 1
            store.commit()
        assert store.stats().file_size <= 3_000_000
        assert store.check().ok
    with pmstore.open(medium.directory / "full.pm", media=medium.name) as store:
        assert (store["x"] == 5.0).all()


def test_a_commit_that_fails_is_tried_again_with_what_is_there_then(medium):
    most = 12_000_000 if medium.name == "file" else 6_000_000
    with pmstore.open(medium.directory / "full.pm", media=medium.name, max_size=most) as store:
        x = make_double_buffered(store)
        y = store.create_array("y", 500_000, "f8")
        z = store.create_array("z", double_buffered_length(store), "f8")
        store.commit()
        for _ in range(2):
            z += 1  # next time it would get a second slot
            store.commit()
        before = x.copy()
        x += 1
        z += 1
        y[:300_000] = np.random.default_rng(1).random(300_000)  # not most of it: it would get a second slot
        with pytest.raises(pmstore.OutOfSpaceError):
            store.commit()
        assert store.check().ok, "the last commit gave none a second slot"
        x[7] = -5
        z[:] = 2
        z[3] = 9
        y[:] = 0
        store.commit()
        assert store.check().ok
        assert np.array_equal(x[8:], before[8:] + 1)
        x += 1
        y[:300_000] = np.random.default_rng(2).random(300_000)
        with pytest.raises(pmstore.OutOfSpaceError):
            store.commit()
        store.rollback()
        assert x[7] == -5 and z[3] == 9
        sequence = store.sequence
        store.commit()
        assert store.sequence == sequence, "what the attempt wrote is not what was committed"
    with pmstore.open(medium.directory / "full.pm", media=medium.name, verify=True) as store:
        assert store["x"][7] == -5 and store["z"][3] == 9 and store["z"][4] == 2


def test_twenty_arrays_have_two_slots_each(store):
    arrays = [store.create_array(f"x{i}", double_buffered_length(store), "f8") for i in range(20)]
    for _ in range(5):
        store.commit()
        before = store.stats().bytes_direct
        for x in arrays:
            x += 1
    store.commit()
    assert store.stats().bytes_direct - before >= sum(x.nbytes for x in arrays)


def test_more_arrays_than_can_have_two_slots(medium):
    if medium.name == "file":
        pytest.skip("they would need 2 GiB")
    with pmstore.open(medium.directory / "many.pm") as store:
        arrays = [store.create_array(f"x{i:04}", 600, "f8") for i in range(1100)]
        store.commit()
        for _ in range(4):
            for x in arrays:
                x[1:] += 1  # a page of the table may lie before one that begins with zeros
            store.commit()
        for x in arrays[::3]:  # so that the slots that are current have no regular order
            x[1:] += 1
        store.commit()
        assert store.check().ok
    with pmstore.open(medium.directory / "many.pm", verify=True) as store:
        for i in range(1100):
            x = store[f"x{i:04}"]
            assert x[0] == 0 and (x[1:] == (4.0 if i % 3 else 5.0)).all()


def test_all_of_them_change_places_with_as_many_others(medium):
    """Entries of the table that are freed are given away in the same commit: for its time there are twice as many."""
    if medium.name == "file":
        pytest.skip("they would need 4 GiB")
    with pmstore.open(medium.directory / "many.pm") as store:
        for letter in "xy":
            arrays = [store.create_array(f"{letter}{i:04}", 600, "f8") for i in range(1008)]
            store.commit()
            for i in range(3):
                if letter == "y" and i == 2:
                    store.update({f"x{j:04}": None for j in range(1008)})
                for array in arrays:
                    array += 1
                store.commit()
        for array in arrays:
            array += 1
        store.commit()
        assert store.check().ok
    with pmstore.open(medium.directory / "many.pm", verify=True) as store:
        assert all((store[name] == 4.0).all() for name in store if name.startswith("y"))


@pytest.mark.parametrize("commits", [0, 1])
def test_a_new_array_in_the_place_of_a_deleted_one_is_not_taken_for_it(store, commits):
    x = make_double_buffered(store, commits=commits)
    with reopened(store) as again:
        x = again["x"]
        expected = x.copy()
        del again["x"]
        again.commit()
        for i in range(4):
            again[f"new{i}"] = np.full(len(x), 100.0 + i)
            assert again[f"new{i}"] is not x
            assert again[f"new{i}"][0] == 100.0 + i
            again[f"new{i}"][0] = -1
        again.commit()
        assert np.array_equal(x, expected)
    assert not x.flags.writeable
    with pmstore.open(store.path, "r", media=store.media) as reader:
        for i in range(4):
            assert reader[f"new{i}"][:2].tolist() == [-1.0, 100.0 + i]


def test_views_and_several_references_of_one_array(store):
    x = make_double_buffered(store)
    view = x[10:]
    del x
    view += 1
    store.commit()
    same = store["x"]
    same[:10] = 0
    store.commit()
    assert (view == 5.0).all() and store["x"][0] == 0
    assert store.check().ok


def contradictions(path: Path) -> None:
    """The table of slots has another length for an extent than the catalog, or names another entry's extent."""

    def fill(store: pmstore.Store) -> None:
        x, store["y"] = store.create_array("x", 140_000, "f8"), np.full(300_000, 1.0)
        store.commit()
        for _ in range(3):
            x += 1
            store.commit()

    for current in (0, 1):
        for name, length in ((b"x", 5000), (b"x", 1_200_000), (b"y", 5000), (b"y", 2_400_000)):
            image = image_of(path, fill)
            table, last = image.get(0, 2160), image.region_size - 2 * PAGE
            assert image.get(table, 80) == 8 * 140_000
            named = next(cell for cell in image.cells(image.tree) if cell.key == b"n" + name)
            image.put(table, 64, named.offset)
            image.put(table, 80, length)
            if length == 5000:  # the other slot ends where the store does
                image.put(table, 72, last)
                image.map_kind(last, DATA)
                image.map_kind(last + PAGE, DATA)
            for copy in (0, PAGE):
                struct.pack_into("<Q", image.bytes, copy + 88, current)
            image.set_header()
            image.save()
            errors, damaged = use(path)
            assert damaged, (current, name, length)
            assert pmstore.CorruptStoreError in errors or length == 2_400_000


def test_a_table_of_slots_that_contradicts_the_catalog(tmp_path):
    run_in_fork(contradictions, tmp_path / "x.pm")


def another_array_is_the_second_slot(path: Path) -> None:
    """The table of slots calls an array the current slot of another one, which is shorter."""

    def fill(store: pmstore.Store) -> None:
        x, store["y"] = store.create_array("x", 140_000, "f8"), np.ones(300_000)
        store.commit()
        for _ in range(3):
            x += 1
            store.commit()

    image = image_of(path, fill)
    table = image.get(0, 2160)
    assert image.get(table, 80) == 8 * 140_000
    image.put(table, 72, next(cell for cell in image.cells(image.tree) if cell.key == b"ny").offset)
    for copy in (0, PAGE):
        struct.pack_into("<Q", image.bytes, copy + 88, 1)
    image.set_header()
    image.save()
    with pmstore.open(path, "r+", media="file") as store:
        y = store["y"]
        y[:] = 2
        store.commit()
        shutil.copyfile(path, path.with_suffix(".copy"))
    with pmstore.open(path.with_suffix(".copy"), "r", media="file", exclusive=True) as store:
        assert (store["y"] == 2).all()


def test_an_array_that_is_the_second_slot_of_another(tmp_path):
    run_in_fork(another_array_is_the_second_slot, tmp_path / "x.pm")


def with_two_slots(store: pmstore.Store) -> None:
    x = store.create_array("x", 140_000, "f8")
    store.commit()
    for _ in range(3):
        x += 1
        store.commit()


@pytest.mark.parametrize("field", ["other", "small", "empty", "large", "base"])
def test_a_damaged_entry_of_the_table_of_slots(tmp_path: Path, field: str) -> None:
    image = image_of(tmp_path / "x.pm", with_two_slots)
    table = image.get(0, 2160)
    fields = {
        "other": (72, image.get(table, 64)),  # both slots in one place
        "small": (80, 100),
        "empty": (80, 0),
        "large": (80, 1 << 60),
        "base": (88, 2),
    }
    image.put(table, *fields[field])
    image.save()
    with pytest.raises(pmstore.CorruptStoreError, match="the table of slots is damaged"):
        pmstore.open(image.path, "r+", media="file")


def test_a_table_of_slots_that_somebody_damages_beside_a_store(store: pmstore.Store) -> None:
    """A rollback takes it from the file again. The array can be deleted, though its space stays taken."""
    make_double_buffered(store)
    store["n"] = 1
    store.commit()
    store.stats()  # the file has the last commit
    table = Image(Path(store.path)).get(0, 2160)
    assert table
    del store["x"]
    with open(store.path, "r+b") as file:
        file.seek(REGION + table + 64)
        file.write(bytes(8))
    store.rollback()
    del store["x"]
    store.commit()
    assert list(store) == ["n"] and store["n"] == 1
    assert str(store.check()) == f"1 problem:\nthe table of slots page at region offset {table} is damaged"


def an_extent_of_nobody(path: Path) -> None:
    """The table of slots has an extent that no entry of the catalog has."""
    image = image_of(path, with_two_slots)
    table, last = image.get(0, 2160), image.region_size - 4 * PAGE
    for at, value in enumerate((last, last + 2 * PAGE, 5000)):
        image.put(table, 96 + 8 * at, value)
    for page in range(4):
        image.map_kind(last + page * PAGE, DATA)
    image.save()
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        said = "the table of slots names 2 extents; the catalog has 1 of them"
        assert store._catalog.core.check() == [(0, PAGE, 0, b"", said)]


def test_an_extent_with_two_slots_that_the_catalog_has_not(tmp_path):
    run_in_fork(an_extent_of_nobody, tmp_path / "x.pm")
