"""Small extents: blocks of slabs, pages that are divided into blocks of one size. None is given away twice, and all are
given back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import Core
from tests.support.images import REGION, SLAB, Image
from tests.support.places import offset_of

PAGE, LINE = 4096, 64
CLASSES = [64, 128, 192, 256, 384, 512, 768, 1344, 2016]  # bytes of blocks
HASH = 8  # bytes of an extent besides its contents


def blocks_of(size: int) -> int:
    return (PAGE - LINE) // size


@pytest.mark.parametrize("size", CLASSES)
def test_a_slab_has_as_many_blocks_as_fit(open_store: Callable[..., pmstore.Store], size: int) -> None:
    store = open_store()
    core: Core = store._catalog.core
    smaller = max((one for one in CLASSES if one < size), default=HASH)
    for length in (size - HASH, smaller - HASH + 1):
        before = store.stats().region_used
        taken = [core.alloc(length) for _ in range(3 * blocks_of(size))]
        assert store.stats().region_used == before + 3 * PAGE
        slabs = {offset // PAGE * PAGE for offset in taken}
        assert sorted(taken) == sorted(slab + LINE + i * size for slab in slabs for i in range(blocks_of(size)))
        core.free(taken[0], length)
        assert core.alloc(length) == taken[0]
        random.Random(size).shuffle(taken)
        for offset in taken:
            core.free(offset, length)
        assert store.stats().region_used == before
    store["n"] = 1
    store.commit()
    assert store.check().ok, store.check()


def test_blocks_are_free_again_after_the_commit(open_store: Callable[..., pmstore.Store]) -> None:
    """Those of the first slab, of one between others, and of the last one."""
    store = open_store()
    names = [f"{i:03}" for i in range(5 * blocks_of(512))]
    for i, name in enumerate(names):
        store[name] = np.full(63, i)
    store.commit()
    used, places = store.stats().region_used, {name: offset_of(store, name) for name in names}
    gone = names[:: blocks_of(512)]
    for name in gone:
        del store[name]
    store["while they are there"] = np.zeros(63)
    assert offset_of(store, "while they are there") not in places.values()
    del store["while they are there"]
    store.commit()
    assert store.stats().region_used == used
    for name in gone:
        store[name] = np.full(63, -1)
    assert {offset_of(store, name) for name in gone} == {places[name] for name in gone}
    store.commit()
    assert store.stats().region_used == used and store.check().ok


def test_blocks_that_come_and_go_at_random(open_store: Callable[..., pmstore.Store]) -> None:
    store = open_store()
    store["n"] = 0
    store.commit()
    used, chance = store.stats().region_used, random.Random(11)
    here: dict[str, int] = {}
    for step in range(1200):
        if here and chance.random() < (0.35 if step < 600 else 0.7):
            name = chance.choice(sorted(here))
            del store[name], here[name]
        else:
            name, here[f"a{step}"] = f"a{step}", step
            store[name] = np.full(chance.choice((100, 240)), step)
        if chance.random() < 0.02:
            store.commit()
    store.commit()
    assert store.check().ok, store.check()
    assert all((store[name] == value).all() for name, value in here.items())
    for name in here:
        del store[name]
    store.commit()
    assert store.stats().region_used == used and store.check().ok


def test_a_rollback_restores_a_block_and_leaves_its_neighbours_alone(
    open_store: Callable[..., pmstore.Store],
) -> None:
    """That of a deleted array, which keeps its bytes, is in the same page."""
    store = open_store()
    kept, other = store.create_array("kept", 6), store.create_array("other", 6)
    store.commit()
    page = offset_of(store, "kept") // PAGE
    assert offset_of(store, "other") // PAGE == page
    del store["kept"]
    store.commit()
    kept[:], other[:] = 5, 9
    store.rollback()
    assert (kept == 5).all() and (other == 0).all()


def test_I9_a_block_under_an_array_that_lives_is_passed_over(open_store: Callable[..., pmstore.Store]) -> None:
    with open_store() as store:
        store.update({name: np.zeros(10) for name in "abcd"})
    store = open_store()
    places = {name: offset_of(store, name) for name in "abcd"}
    held = store["b"]
    del store["b"]
    store.commit()
    store["e"], store["f"] = np.ones(10), np.ones(10)
    assert not {offset_of(store, "e"), offset_of(store, "f")} & set(places.values())
    held[:] = 5
    del held
    store.commit()
    store["g"] = np.ones(10)
    assert offset_of(store, "g") == places["b"] and store.check().ok


def test_I11_a_slab_in_a_page_that_a_rollback_freed_is_no_other_metadata(
    open_store: Callable[..., pmstore.Store],
) -> None:
    """A commit that edits its header leaves the arrays in it that were not declared as they were."""
    store = open_store()
    store["k"] = 0
    store.commit()
    nodes = store.stats().region_used
    store.update({f"{i:0100}": i for i in range(200)})  # the catalog takes more pages
    store.rollback()
    a = store.create_array("a", 3)
    store.commit()
    assert offset_of(store, "a") // PAGE * PAGE == nodes
    a[:] = 1
    with store.transaction(only=[]):
        store["b"] = np.zeros(3)
    assert store.check().ok, store.check()
    store.rollback()
    assert (a == 0).all()


@pytest.mark.parametrize(("waiting", "pages"), [(7, 0), (8, 1)])
def test_few_slabs_are_looked_at_before_a_page_is_taken(
    open_store: Callable[..., pmstore.Store], waiting: int, pages: int
) -> None:
    """The free blocks of some wait for the commit; the one after them has one that is free."""
    store = open_store()
    store.update({f"a{i:02}": np.full(251, i) for i in range(24)})  # two fill a slab
    store.commit()
    del store["a00"]
    store.commit()
    for i in range(1, waiting + 1):
        del store[f"a{2 * i:02}"]
    before = store.stats().region_used
    store["new"] = np.zeros(251)
    assert store.stats().region_used == before + pages * PAGE
    store.commit()
    assert store.check().ok


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_slab_that_goes_leaves_its_list_whole(open_store: Callable[..., pmstore.Store], gone: int) -> None:
    """Its neighbours in the list are changed by nothing else in that commit."""
    with open_store() as store:
        store.update({f"a{i}": np.full(251, i) for i in range(6)})  # two fill a slab
        store.commit()
        for i in range(0, 6, 2):
            del store[f"a{i}"]
        store.commit()
        store["one page"] = np.zeros(9000)  # so that the page of the slab is used again
        del store[f"a{2 * gone + 1}"]
        store.commit()
    with open_store() as store:
        store["another page"] = np.ones(480)
        store.commit()
        used = store.stats().region_used
        store.update({f"b{i}": np.full(251, i) for i in range(2)})
        assert store.stats().region_used == used
        store.commit()
        for name in list(store):
            if name.startswith(("a", "b")) and name != "another page":
                del store[name]
        store.commit()
        assert store.stats().region_used == used - 2 * PAGE and store.check().ok
        assert (store["another page"] == 1).all()


@pytest.mark.parametrize(("field", "value", "form"), [(20, len(CLASSES), "I"), (24, 1 << 40, "Q")])
def test_a_slab_with_more_blocks_than_fit_is_damaged(tmp_path: Path, field: int, value: int, form: str) -> None:
    """Its checksum is right. Its blocks have no size that there is, or one is used that it has not."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x") as store:
        store["small"] = np.arange(9.0)
    image = Image(path)
    (slab,) = image.pages(SLAB)
    image.put(slab, field, value | (image.get(slab, field) if form == "Q" else 0), form)
    image.save()
    with pmstore.open(path, "r+") as store:
        for use in (lambda: store["small"], lambda: store.update(other=np.arange(9.0))):
            with pytest.raises(pmstore.CorruptStoreError, match=f"the slab at region offset {slab} is damaged"):
                use()


def test_a_root_that_somebody_damages_beside_a_store(tmp_path: Path) -> None:
    """A rollback takes it from the file again. It names the first slab of each size, which a new block needs."""
    store = pmstore.open(tmp_path / "store.pm", "x")
    core: Core = store._catalog.core
    core.alloc(16)
    with open(store.path, "r+b") as file:
        file.seek(REGION + 24)
        file.write(bytes(8))
    core.rollback()
    with pytest.raises(pmstore.CorruptStoreError, match="the metadata page at region offset 0 is damaged"):
        core.alloc(16)
    store._drop(discard=True)
