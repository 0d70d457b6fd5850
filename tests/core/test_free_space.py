"""Free space: what stands there was not committed, also where it equals what is written there next (I2, I8); and space
that nothing owns is free again.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.support.crashes import explored, freed, record
from tests.support.images import PAGE, REGION, Image
from tests.support.places import offset_of


def test_I2_free_space_is_no_committed_image(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    _, found = explored(record(path, medium.name, freed), depth=0)
    assert found is None, found
    with pmstore.open(path) as store:  # as after a kill
        assert store.check().ok, store.check()


def test_I2_the_head_of_a_slab_is_logged_where_free_space_shows_the_same_bytes(open_store):
    """They were written there by no commit, and an older record has others for the place."""
    store = open_store()
    store["a"] = np.zeros(3)
    store.commit()
    slab = offset_of(store, "a") // PAGE * PAGE
    del store["a"]
    store.commit()
    new = {"b": np.zeros(3), "c": np.zeros(3)}
    copy = Path(store.path + ".twin")
    shutil.copyfile(store.path, copy)
    with pmstore.open(copy, media=store.media) as twin:
        twin.update(new)
        assert offset_of(twin, "b") // PAGE * PAGE == slab
    store["x"] = np.frombuffer(copy.read_bytes()[REGION + slab :][: 2 * PAGE], "u1")
    assert offset_of(store, "x") == slab
    store.rollback()
    store.update(new)
    store.commit()
    assert offset_of(store, "b") // PAGE * PAGE == slab
    shutil.copyfile(store.path, copy)  # what a kill leaves
    with pmstore.open(copy, media=store.media, verify=True) as left:
        assert left.keys() == {"b", "c"}


def test_an_extent_that_nobody_took_is_freed_by_the_commit(open_store):
    """An interrupt leaves it, between the core's allocation and the entry that was to own it."""
    store = open_store()
    store["a"] = np.arange(3000.0)
    store.commit()
    core = store._catalog.core
    before = store.stats()
    offsets = [core.alloc(50_000), core.alloc(100), core.alloc(5000)]
    store["b"] = 1
    store.commit()
    assert store.check().ok, store.check()
    assert store.stats().region_used == before.region_used
    assert [core.alloc(50_000), core.alloc(100), core.alloc(5000)] == offsets
    store.rollback()
    core.alloc(50_000)
    sequence = store.sequence
    store.commit()
    assert store.sequence == sequence and store.stats().region_used == before.region_used
    assert store.check().ok
    store.close()
    assert open_store(verify=True)["b"] == 1


def test_reads_without_a_commit_do_not_pile_up(open_store):
    store = open_store()
    store["w"] = np.zeros(10)
    store["large"] = np.zeros(5000)
    store.commit()
    for _ in range(2000):
        store["w"][0], store["large"][0]
    assert store.stats().buffers <= 4
    store.close()
    store = open_store(mode="r")  # which never commits
    for _ in range(2000):
        store["w"][0], store["large"][0]
    assert store.stats().buffers <= 4


def test_arrays_that_come_and_go_without_a_commit_do_not_pile_up(open_store):
    store = open_store()
    for i in range(2000):
        store.create_array("x", 10 if i % 2 else 700)[:] = i
        del store["x"]
    assert store.stats().buffers <= 300
    assert store.stats().file_size < 4 << 20


def test_arrays_that_a_rollback_takes_back_do_not_pile_up(open_store):
    """Nobody holds them, so that their space is free again at once."""
    store = open_store()
    store["a"] = 1
    store.commit()
    size = store.stats().region_size
    for i in range(100):
        store[f"small{i}"], store["large"] = np.full(10, 1.0), np.full(5000, 1.0)
        store["small" + str(i)][0], store["large"][0]
        store.rollback()
        assert store.stats().buffers == 0
    assert store.stats().region_size == size and list(store) == ["a"]


def test_deletions_that_a_rollback_takes_back_do_not_pile_up(open_store):
    """Each notes that readers may map the array, once for all of them."""
    store = open_store()
    constant = store.create_array("constant", 5000, writeable=False)
    store.commit()
    for _ in range(100):
        del store["constant"]
        store.rollback()
    assert store.stats().buffers <= 2
    assert not constant.any()


def test_arrays_that_were_let_go_do_not_pile_up_over_commits(open_store):
    """Neither those that were read nor those that were written: a later commit need not compare them."""
    store = open_store()
    names = [f"a{i}" for i in range(50)]
    for i, name in enumerate(names):
        store[name] = np.zeros(10 if i % 2 else 700)
    store.commit()
    kept = store["a0"]
    for first in range(2):
        for i, name in enumerate(names):
            if i % 2 == first:
                store[name][0] += 1
            else:
                store[name][0]
        store.commit()
        assert store.stats().buffers == 1
    del kept
    store.commit()
    assert store.stats().buffers == 0 and all(store[name][0] == 1 for name in names)


LENGTHS = [
    1 << 63,
    (1 << 64) - 1,
    (1 << 64) - 4095,
    (1 << 64) * 512 // 513 + 5000,
    (1 << 63) - 1,
    1 << 50,
    (1 << 41) + 1,
]


@pytest.mark.parametrize("length", LENGTHS, ids=hex)
def test_absurd_lengths_find_no_space(open_store, length):
    store = open_store(max_size=400 << 20)
    before = store.stats()
    for call in (lambda: store._catalog.core.alloc(length), lambda: store._catalog.core.alloc(length - 8)):
        with pytest.raises(pmstore.OutOfSpaceError):
            call()
    after = store.stats()
    assert (after.file_size, after.region_used) == (before.file_size, before.region_used)
    store["a"] = np.ones(1000)
    store.commit()
    assert store.check().ok


def test_a_length_that_the_format_allows_is_told_as_too_long_for_the_file(open_store):
    """Half of the largest region, and one byte more."""
    core = open_store(max_size=400 << 20)._catalog.core
    with pytest.raises(pmstore.OutOfSpaceError, match="max_size"):
        core.alloc(1 << 41)
    with pytest.raises(pmstore.OutOfSpaceError, match="more than a store can hold"):
        core.alloc((1 << 41) + 1)


MAP = (PAGE - 64) * 4  # pages that one page of the space map describes


def test_free_pages_of_one_map_are_not_those_of_the_next(open_store):
    """Pages at the end of a map and at its beginning are not in a row."""
    core = open_store()._catalog.core

    def length(pages: int) -> int:
        return pages * (PAGE - 8)

    def alloc(pages: int) -> int:
        return core.alloc(length(pages)) // PAGE

    first = alloc(3 * MAP)
    core.free(first * PAGE, length(3 * MAP))
    assert first < MAP and alloc(MAP - first) == first
    at_first, rest, at_last, behind = alloc(100), alloc(MAP - 200), alloc(100), alloc(MAP // 2)
    assert [at_first, rest, at_last, behind] == [MAP, MAP + 100, 2 * MAP - 100, 2 * MAP]
    core.free(at_first * PAGE, length(100))
    core.free(at_last * PAGE, length(100))
    assert alloc(150) == behind + MAP // 2


def test_the_only_free_pages_behind_full_ones_are_found(open_store):
    """A search goes past 32 full pages at a time: whatever their place, from one map to the next."""
    core = open_store()._catalog.core

    def alloc(pages: int) -> int:
        return core.alloc(pages * (PAGE - 8)) // PAGE

    core.free(alloc(3 * MAP) * PAGE, 3 * MAP * (PAGE - 8))  # the pages of the map stay
    low = alloc(1)
    holes = []
    for around in (MAP, 2 * MAP):
        alloc(around - 52 - (holes[-1] + 2 if holes else low + 1))
        for _ in range(35):
            holes.append(alloc(2))
            alloc(1)
    alloc(3 * MAP - 50 - holes[-1])
    core.free(low * PAGE, PAGE - 8)  # a search for two pages begins here
    for page in holes:
        core.free(page * PAGE, 2 * (PAGE - 8))
        assert alloc(2) == page
    assert min(holes) < MAP < holes[34] and holes[35] < 2 * MAP < max(holes)


@pytest.mark.parametrize("maps", [1, 3])
def test_pages_in_use_are_counted_in_every_map(open_store, maps):
    store = open_store()
    core, length = store._catalog.core, maps * MAP * (PAGE - 8)
    core.free(core.alloc(length), length)  # the pages of the map stay
    before = store.stats().region_used
    offset = core.alloc(length)
    assert store.stats().region_used == before + maps * MAP * PAGE
    core.free(offset, length)
    assert store.stats().region_used == before
    store["a"] = 1
    store.commit()
    assert store.check().ok, store.check()


def test_the_last_map_describes_one_page_of_the_store(open_store):
    """It is that page itself."""
    store = open_store()
    log_size = store.stats().log_size
    store.close()
    store = open_store(max_size=(2 + MAP + 1) * PAGE + log_size)
    core = store._catalog.core
    core.alloc((MAP - 66) * (PAGE - 8))
    with pytest.raises(pmstore.OutOfSpaceError):
        for _ in range(63):
            core.alloc(PAGE - 8)
    assert store.stats().region_used == store.stats().region_size == (MAP + 1) * PAGE


def test_pages_of_a_map_that_a_rollback_takes_back_are_found_again(open_store):
    core = open_store()._catalog.core
    first = [core.alloc(PAGE - 8) for _ in range(10)]
    core.rollback()
    core.alloc(3 * MAP * (PAGE - 8))
    core.rollback()
    assert [core.alloc(PAGE - 8) for _ in range(10)] == first


def test_I9_a_page_behind_those_under_an_array_may_be_in_use(open_store):
    """A search that goes on behind an array that lives examines the next page, too."""
    store = open_store()
    core = store._catalog.core
    arrays = [store.create_array(name, 511 * pages) for name, pages in (("x", 2), ("used", 1), ("hole", 1), ("end", 1))]
    places = [offset_of(store, name) // PAGE for name in ("x", "used", "hole", "end")]
    assert np.diff(places).tolist() == [2, 1, 1], "in a row"
    store.commit()
    held = arrays[0]
    del arrays, store["x"], store["hole"]
    store.commit()
    assert core.alloc(2 * (PAGE - 8)) // PAGE > places[-1] and core.alloc(PAGE - 8) // PAGE == places[2]
    held[:] = 1


def test_I13_what_is_new_goes_past_pages_that_wait_for_a_sync(tmp_path):
    """They are found again after the sync, and nothing waits for it before."""
    with pmstore.open(tmp_path / "s.pm", media="file", durability="async", sync_interval=3600) as store:
        core = store._catalog.core

        def alloc(pages: int) -> int:
            return core.alloc(pages * (PAGE - 8)) // PAGE

        first, between, behind = alloc(10), alloc(20), alloc(100)
        for page, pages in ((first, 10), (between, 20), (behind, 100)):
            core.free(page * PAGE, pages * (PAGE - 8))
        store["first"], store["waits"] = np.zeros(10 * 511), np.zeros(20 * 511)
        store.commit()
        del store["waits"]
        store.commit()  # the file and both commits agree that its pages are free
        before = store.stats()
        assert before.durable_sequence < store.sequence
        assert [alloc(20), alloc(1), alloc(3)] == [behind, behind + 20, behind + 21]
        after = store.stats()
        assert (after.durable_sequence, after.file_size) == (before.durable_sequence, before.file_size)
        store.rollback()
        store.sync()
        assert [alloc(20), alloc(1)] == [between, behind]
        store.rollback()
        assert store.check().ok


@pytest.mark.parametrize("order", ["forward", "backward", "from the middle", "at random"])
def test_a_catalog_of_three_levels_gives_all_its_pages_back(order: str, tmp_path: Path) -> None:
    names = [f"{i:03}" + "x" * 200 for i in range(400)]
    with pmstore.open(tmp_path / "store.pm", "x", media="file") as store:
        store["n"] = 0
        store.commit()
        used = store.stats().region_used
        for name in names:
            store[name] = b"y" * 1000
        store.commit()
    image = Image(tmp_path / "store.pm")
    assert image.get(image.tree, 20, "I") == 2, "levels above the leaves"
    if order == "backward":
        names.reverse()
    elif order == "from the middle":
        names = names[200:] + names[:200]
    elif order == "at random":
        random.Random(7).shuffle(names)
    with pmstore.open(tmp_path / "store.pm") as store:
        for i, name in enumerate(names):
            del store[name]
            if i % 57 == 0:
                assert set(store) == {"n", *names[i + 1 :]} and store.check().ok
                store.commit()
        store.commit()
        assert list(store) == ["n"] and store.check().ok and store.stats().region_used == used
        del store["n"]
        store[names[0]] = 1
    with pmstore.open(tmp_path / "store.pm", "r", verify=True) as store:
        assert list(store) == names[:1]


@pytest.mark.parametrize("levels", [1, 2])
def test_nodes_with_a_single_child_go_with_it(tmp_path: Path, levels: int) -> None:
    """Deleting makes no such root, and the format allows it."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["n"] = 1
    image = Image(path)
    for level in range(1, levels + 1):
        node = image.region_size - level * PAGE
        image.write_node(node, level, [], image.tree)
        image.set_root(node, 1)
    image.save()
    with pmstore.open(path) as store:
        (forged,) = store.check()
        assert "digest" in forged.text
        used = store.stats().region_used
        del store["n"]
        store.commit()
        assert not len(store) and list(store.check()) == [forged] and store.stats().region_used < used
        store["m"] = 2
        store.commit()
        assert dict(store) == {"m": 2} and list(store.check()) == [forged]
