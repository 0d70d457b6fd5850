"""The space map, or a slab, contradicts the place of an extent. A reader of its contents gets an error, and the other
extents can be read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._catalog.kinds import BLOB
from pmstore._core import Entry
from tests.support.images import DATA, FREE, MAP, MAP_LIST, META, PAGE, REGION, ROOT, SLAB, SLAB_PAGE, Image

PAGES = 1100  # of the large array


def image_of(path: Path) -> Image:
    with pmstore.open(path, "x", media="file") as store:
        store["large"] = np.full(511 * PAGES, 0x5555555555555555)  # as the space map says of pages of contents
        store["small"] = np.arange(9.0)
        store["next"] = np.arange(9.0) + 1
        store["larger"] = np.arange(20.0)
    return Image(path)


def place(image: Image, name: str) -> int:
    return next(cell.offset for cell in image.cells(image.tree) if cell.key == b"n" + name.encode())


def refused(image: Image, name: str, match: str) -> None:
    """Its contents are neither read nor freed, and the others can be used."""
    image.save()
    with pmstore.open(image.path, "r", media="file", exclusive=True) as store:
        with pytest.raises(pmstore.CorruptStoreError, match=match):
            store[name]
        for other in {"large", "small", "next", "larger"} - {name}:
            store[other]


def test_every_page_of_an_extent_belongs_to_contents(tmp_path: Path) -> None:
    """The map has 32 pages in a word."""
    image = image_of(tmp_path / "store.pm")
    first = place(image, "large") // PAGE
    pages = range(first, first + PAGES)
    for page in {*pages[:3], *pages[-2:], *(page for page in pages if page % 32 in (0, 31) and page % 992 < 70)}:
        image.map_kind(page * PAGE, (FREE, META, SLAB_PAGE)[page % 3])
        image.save()
        with (
            pmstore.open(image.path, "r", media="file", exclusive=True) as store,
            pytest.raises(pmstore.CorruptStoreError, match=f"the space map disagrees at region offset {page * PAGE}$"),
        ):
            store["large"]
        image.map_kind(page * PAGE, DATA)
    image.save()
    with pmstore.open(image.path, "r", media="file", exclusive=True) as store:
        assert store.check().ok and (store["large"] == 0x5555555555555555).all()


def test_a_large_extent_is_on_whole_pages(tmp_path: Path) -> None:
    image = image_of(tmp_path / "store.pm")
    image.change_cell(b"nlarge", offset=place(image, "large") + 64)
    refused(image, "large", "it is not on whole pages")


@pytest.mark.parametrize("offset", [1 << 45, 1 << 60, (1 << 63) + 5 * PAGE])
def test_a_large_extent_lies_in_the_store(tmp_path: Path, offset: int) -> None:
    """Nothing else asks that before the lists of the space map are read, as an array of 256."""
    image = image_of(tmp_path / "store.pm")
    image.change_cell(b"nlarge", offset=offset)
    refused(image, "large", "it lies outside the store$")


def test_an_extent_is_a_block_in_use_of_a_slab_of_its_class(tmp_path: Path) -> None:
    path = tmp_path / "store.pm"
    image = image_of(path)
    small, larger = place(image, "small"), place(image, "larger")
    slab = small // PAGE * PAGE
    block = (small - slab - 64) // 128
    image.put(slab, 24, image.get(slab, 24) & ~(1 << block))
    refused(image, "small", f"no such block at region offset {small}$")
    for offset, length in (
        (small + 8, 72),  # between two blocks
        (slab + 64 + 128 * 25, 72),  # a block that is free
        (slab, 72),
        (slab + 8, 72),
        (slab + 64 - 128, 72),  # in the page before
        (larger // PAGE * PAGE + 64, 72),  # in a slab of another class, where both have a block
    ):
        image = image_of(path.with_name(f"{offset}.pm"))
        image.change_cell(b"nsmall", offset=offset, length=length)
        refused(image, "small", f"(no such block|no slab) at region offset {offset}$")


NEXT, PREVIOUS, SLABS = 32, 40, 40  # fields of a slab; the lists of slabs in the root
NOWHERE = 60 * PAGE


def with_lists(path: Path) -> tuple[Image, list[int], dict[int, str]]:
    """A store with a list of three slabs, each with a free block and one in use, and a full slab. The slabs in the
    list's order, and a name of each; the full one is the last."""
    with pmstore.open(path, "x", media="file") as store:
        for i in range(8):
            store[f"a{i}"] = np.full(251, i)  # two fill a slab
        store.commit()
        for i in (0, 2, 4):
            del store[f"a{i}"]
    image = Image(path)
    slabs = [image.get(0, SLABS + 8 * 8)]
    while following := image.get(slabs[-1], NEXT):
        slabs.append(following)
    names = {place(image, f"a{i}") // PAGE * PAGE: f"a{i}" for i in (1, 3, 5, 6)}
    return image, [*slabs, place(image, "a6") // PAGE * PAGE], names


@pytest.mark.parametrize("field", [NEXT, PREVIOUS])
@pytest.mark.parametrize("which", range(3))
def test_an_array_is_deleted_whose_slab_can_not_leave_its_list(tmp_path: Path, which: int, field: int) -> None:
    image, slabs, names = with_lists(tmp_path / "store.pm")
    image.put(slabs[which], field, NOWHERE)
    image.save()
    with pmstore.open(image.path, media="file") as store:
        del store[names.pop(slabs[which])]
        store.commit()
        store["new"] = np.zeros(251)
        assert sorted(store) == sorted([*names.values(), "a7", "new"])


@pytest.mark.parametrize("field", [NEXT, PREVIOUS])
def test_a_full_slab_that_can_not_leave_its_list_is_an_error(tmp_path: Path, field: int) -> None:
    image, slabs, names = with_lists(tmp_path / "store.pm")
    image.put(slabs[0], field, NOWHERE)
    image.save()
    with pmstore.open(image.path, media="file") as store:
        with pytest.raises(pmstore.CorruptStoreError):
            store["new"] = np.zeros(251)
        store.rollback()
        assert sorted(store) == sorted([*names.values(), "a7"])


@pytest.mark.parametrize("there", ["nothing", "another size", "contents"])
def test_the_first_of_a_list_is_no_such_slab(tmp_path: Path, there: str) -> None:
    image, slabs, names = with_lists(tmp_path / "store.pm")
    if there == "nothing":
        image.put(0, SLABS + 8 * 8, NOWHERE)
    elif there == "contents":  # an array that looks like a slab with a free block
        with pmstore.open(image.path, media="file") as store:
            store["trap"] = np.zeros(PAGE, "u1")
        image = Image(image.path)
        trap, slab = place(image, "trap"), slabs[0]
        image.bytes[REGION + trap : REGION + trap + 64] = image.bytes[REGION + slab : REGION + slab + 64]
        image.put(trap, 8, trap)  # its own place
        image.put(0, SLABS + 8 * 8, trap)
        names[trap] = "trap"
    else:
        image.put(slabs[0], 20, 7, "I")
    image.save()
    with pmstore.open(image.path, media="file") as store:
        with pytest.raises(pmstore.CorruptStoreError):
            store["new"] = np.zeros(251)
        store.rollback()
        del store["a7"]  # its slab, which was full, would enter the list
        store.commit()
        assert sorted(store) == sorted(names.values())


def test_a_list_of_slabs_that_ends_nowhere(tmp_path: Path) -> None:
    """Few slabs are looked at, so that a list in a circle is left."""
    image, slabs, names = with_lists(tmp_path / "store.pm")
    image.put(slabs[0], NEXT, slabs[0])
    image.put(slabs[0], 24, 0b11)  # both of its blocks are in use
    image.save()
    with pmstore.open(image.path, media="file") as store:
        store["new"] = np.zeros(251)
        store.commit()
        assert sorted(store) == sorted([*names.values(), "a7", "new"])


@pytest.mark.parametrize("kind", [ROOT, MAP_LIST, MAP])
def test_the_root_and_the_map_are_not_given_away(tmp_path: Path, kind: int) -> None:
    """The map says that its own page is free, or its list, or the root: the next write, which comes before the commit,
    destroyed the file.
    """
    image = image_of(tmp_path / "store.pm")
    image.map_kind(next(image.pages(kind)), FREE)
    image.save()
    with pmstore.open(image.path, media="file") as store:
        with pytest.raises(pmstore.CorruptStoreError, match="free in it"):
            store["x"] = np.full(400, 1.0)
        with pytest.raises(pmstore.CorruptStoreError, match="free in it"):
            store._catalog.core.alloc(500)  # of a class that has no slab yet
        store["y"] = np.full(3000, 2.0)  # pages that follow each other are elsewhere
        store.commit()
    with pmstore.open(image.path, media="file") as store:
        assert {name: store[name].sum() for name in ("small", "next", "y")} == {"small": 36, "next": 45, "y": 6000}


@pytest.mark.parametrize(("place", "pages"), [("first", 4), ("first", 5), ("last", 5)])
def test_pages_in_a_row_are_given_away_without_metadata(tmp_path: Path, place: str, pages: int) -> None:
    """A slab that is free in the map is the first of the pages, or the last."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        if place == "last":
            store["gone"] = np.zeros(4 * 500)
        store["small"] = np.arange(9.0)
        if place == "first":
            store["gone"] = np.zeros(4 * 500)
        store["wall"] = np.zeros(4 * 500)
        store.commit()
        del store["gone"]
    image = Image(path)
    slab = next(image.pages(SLAB))
    image.map_kind(slab, FREE)
    image.save()
    with pmstore.open(path, media="file") as store:
        core = store._catalog.core
        assert core.alloc(72) // PAGE * PAGE == slab  # which reads it
        with pytest.raises(pmstore.CorruptStoreError, match=f"metadata at region offset {slab} are free in it"):
            core.alloc(pages * (PAGE - 8))
        store.rollback()
    with pmstore.open(path, media="file") as store:
        assert (store["wall"] == 0).all() and sorted(store) == ["small", "wall"]


@pytest.mark.parametrize("how", ["write", "fill", "commit"])
def test_pages_that_came_into_use_meanwhile_are_not_written(tmp_path: Path, how: str) -> None:
    """Somebody else has changed the space map in the file."""
    image = image_of(tmp_path / "store.pm")
    space_map = next(image.pages(MAP))

    def change(page: int, kind: int) -> None:
        image.map_kind(page, kind)
        with open(image.path, "r+b") as file:
            file.seek(REGION + space_map)
            file.write(image.bytes[REGION + space_map : REGION + space_map + PAGE])

    with pmstore.open(image.path, media="file") as store:
        core, length = store._catalog.core, 2 * (PAGE - 8)
        first = core.alloc(length)
        if how == "commit":
            core.write(first, 0, bytes(length), length)
            core.put(b"k", Entry(first, length, BLOB, 0, b""))
        for page in (first, first + PAGE):
            change(page, DATA)
            with pytest.raises(pmstore.CorruptStoreError, match=f"given away pages at region offset ({first}|{page})"):
                if how == "write":
                    core.write(first, 0, bytes(length), length)
                elif how == "fill":
                    core.fill(first, 2 * PAGE - 16, bytes(8))
                else:
                    store.commit()
            change(page, FREE)
        store.rollback()
        store["x"] = np.full(1000, 3.0)
    with pmstore.open(image.path, verify=True) as store:
        assert (store["x"] == 3).all()


def test_a_place_in_other_metadata_is_no_block_of_a_slab(tmp_path: Path) -> None:
    for kind in (ROOT, MAP):
        path = tmp_path / f"{kind}.pm"
        image = image_of(path)
        page = next(image.pages(kind))
        image.map_kind(page, SLAB_PAGE)
        image.change_cell(b"nsmall", offset=page + 64)
        refused(image, "small", f"page at region offset {page} is of another kind than its reference says")
