"""The places that `Store.check` tells with the core's problems: name, offset, length, block and rows.

An entry has the offset and the length of its contents, a page those of the page. Blocks that the disk can't read are in
test_unreadable.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import pmstore
from tests.core.test_lost_writes import digest
from tests.support.images import DATA, MAP, MAP_LIST, PAGE, REGION, SLAB, SLAB_PAGE, SLOTS, WORD, Cell, Image

LINE = 64
FREE_PAGES = range(40 * PAGE, 45 * PAGE, PAGE)


class Place(NamedTuple):
    name: str | None
    offset: int
    length: int
    block: int | None = None
    rows: range | None = None
    says: str = ""  # in the text


class File:
    """A store's image, with a catalog of one leaf and one slab."""

    def __init__(self, path: Path) -> None:
        with pmstore.open(path, "x", media="file") as store:
            store["a"] = np.arange(3000.0)
            store["b"] = np.arange(2000.0).reshape(500, 4)
            store["small"] = np.arange(9.0)
            store["other"] = np.arange(9.0) + 1
        self.image = Image(path)
        self.tree = self.image.tree
        self.slab, self.list, self.map = (next(self.image.pages(kind)) for kind in (SLAB, MAP_LIST, MAP))
        self.at = {cell.key[1:].decode(): cell.offset for cell in self.image.cells(self.tree)}
        self.size_of_block = abs(self.at["other"] - self.at["small"])

    def entry(self, name: str, block: int | None = 0, rows: range | None = None, says: str = "") -> Place:
        """The place of an entry as the catalog has it now."""
        cell = next(cell for cell in self.image.cells(self.tree) if cell.key == b"n" + name.encode())
        return Place(name, cell.offset, cell.length, block, rows, says)

    def flip(self, at: int) -> None:
        self.image.bytes[at] ^= 1

    def move(self, name: str, offset: int) -> None:
        self.image.change_cell(b"n" + name.encode(), offset=offset)

    def update_digest(self, place: int | None = None, more: int = 0) -> None:
        update_digest(self.image, place, more)


def update_digest(image: Image, place: int | None = None, more: int = 0) -> None:
    """Set the digest: that of the image, unless the contribution of a place is to differ, and more."""
    total, moment = digest(image)
    if place is not None:
        total, moment = (total + 5) & WORD, (moment + 5 * (place // LINE) + more) & WORD
    for copy in (0, PAGE):
        struct.pack_into("<QQ", image.bytes, copy + 72, total, moment)
    image.set_header()


def header(file: File) -> list[Place]:
    file.flip(PAGE + 50)
    return [Place(None, 0, 0)]


def damaged_pages(file: File) -> list[Place]:
    file.flip(REGION + file.map + 100)
    file.flip(REGION + file.at["b"] + PAGE)
    return [Place(None, file.map, PAGE), file.entry("b", 1, range(128, 256))]


def list_of_maps(file: File) -> list[Place]:
    file.flip(REGION + file.list + 100)
    return [Place(None, file.list, PAGE, says="the list of the space map page")]


def slab(file: File) -> list[Place]:
    file.flip(REGION + file.slab + 30)
    return [Place(None, file.slab, LINE, says="is damaged")]


def blocks_of_a_slab(file: File) -> list[Place]:
    file.image.put(file.slab, 24, file.image.get(file.slab, 24) | 1 << 40)
    file.update_digest()
    return [Place(None, file.slab, LINE)]


def size_of_blocks(file: File) -> list[Place]:
    file.image.put(file.slab, 20, file.image.get(file.slab, 20, "I") + 1, "I")
    file.update_digest()
    return [file.entry(name, 0, range(9)) for name in ("other", "small")]


def contents(file: File) -> list[Place]:
    file.flip(REGION + file.at["a"] + 2 * PAGE + 5)
    file.flip(REGION + file.at["b"] + 3 * PAGE + 5)
    file.flip(REGION + file.at["small"])
    return [
        file.entry("a", 2, range(1024, 1536)),
        file.entry("b", 3, range(384, 500)),
        file.entry("small", 0, range(9)),
    ]


def contents_and_space(file: File) -> list[Place]:
    """Damaged contents tell nothing of other problems, and hide none."""
    file.flip(REGION + file.at["a"])
    file.image.map_kind(FREE_PAGES[0], DATA)
    file.update_digest()
    return [file.entry("a", 0, range(512)), Place(None, FREE_PAGES[0], PAGE, says="the space map says")]


def no_contents(file: File) -> list[Place]:
    file.image.change_cell(b"nsmall", length=0)
    return [file.entry("small", 0, says="lies outside the store")]


def contents_without_an_end(file: File) -> list[Place]:
    """The size that they would have in the store is 2^64 bytes and some more."""
    file.image.change_cell(b"nsmall", length=-(-(1 << 61) // 513) * PAGE)
    return [file.entry("small", 0, says="lies outside the store")]


def no_block(file: File) -> list[Place]:
    file.move("small", file.at["other"] + 8)  # in a block that another array has
    file.update_digest()
    return [file.entry("small", 0, range(9), says) for says in ("is not on a block", "its contents are damaged")]


def behind_the_last_block(file: File) -> list[Place]:
    blocks = (PAGE - LINE) // file.size_of_block
    file.move("small", file.slab + LINE + blocks * file.size_of_block)
    return [file.entry("small", 0, range(9), says) for says in ("is not on a block", "its contents are damaged")]


def block_in_contents(file: File) -> list[Place]:
    file.move("small", file.at["a"] + LINE)
    return [Place("small", file.at["a"], PAGE, 0, range(9)), file.entry("small", 0, range(9))]


def block_used_twice(file: File) -> list[Place]:
    file.move("small", file.at["other"])
    return [file.entry("small", 0, range(9))]


def page_used_twice(file: File) -> list[Place]:
    file.move("b", file.at["a"] + PAGE)
    return [Place("b", file.at["a"] + PAGE, PAGE, 0, range(128))]


def outside(file: File) -> list[Place]:
    file.move("b", file.image.region_size - PAGE)
    return [file.entry("b", 0, range(128))]


def between_pages(file: File) -> list[Place]:
    file.move("b", file.at["b"] + LINE)
    return [Place("b", file.at["b"] + LINE, PAGE, 0, range(128))]


def key_of_another_node(file: File) -> list[Place]:
    cells = file.image.cells(file.tree)  # the last two in one node, although the last one separates it from the other
    for page, some in zip(FREE_PAGES[:2], (cells[:2], cells[2:]), strict=True):
        file.image.write_node(page, 0, some)
    between = Cell(cells[3].key, offset=FREE_PAGES[1])
    file.image.write_node(file.tree, 1, [between], first_child=FREE_PAGES[0])
    return [Place(None, 0, 0), Place(None, FREE_PAGES[1], PAGE)]  # the scan of all keys, and the core


def bounds_of_a_child(file: File) -> list[Place]:
    """The last child of the first node has the key that separates that node from the second one."""
    cells, (left, right, *leaves) = file.image.cells(file.tree), FREE_PAGES
    for page, some in zip(leaves, (cells[:1], cells[1:3], cells[3:]), strict=True):
        file.image.write_node(page, 0, some)
    file.image.write_node(left, 1, [Cell(cells[1].key, offset=leaves[1])], first_child=leaves[0])
    file.image.write_node(right, 1, [], first_child=leaves[2])
    file.image.write_node(file.tree, 2, [Cell(cells[2].key, offset=right)], first_child=left)
    return [Place(None, leaves[1], PAGE, says="holds a key of another node")]


def order_of_keys(file: File) -> list[Place]:
    cells = file.image.cells(file.tree)
    file.image.write_node(FREE_PAGES[0], 0, cells[:2])
    file.image.write_node(FREE_PAGES[1], 0, [cells[3], cells[0]])
    file.image.write_node(file.tree, 1, [Cell(cells[2].key, offset=FREE_PAGES[1])], first_child=FREE_PAGES[0])
    return [Place(None, 0, 0), Place(None, FREE_PAGES[1], PAGE, says="the catalog node")]


def level_of_a_node(file: File) -> list[Place]:
    cells = file.image.cells(file.tree)
    file.image.write_node(FREE_PAGES[0], 0, cells[:2])
    file.image.write_node(FREE_PAGES[1], 1, cells[2:])
    file.image.write_node(file.tree, 1, [Cell(cells[2].key, offset=FREE_PAGES[1])], first_child=FREE_PAGES[0])
    return [Place(None, 0, 0), Place(None, FREE_PAGES[1], PAGE, says="the catalog node")]


def height_of_the_catalog(file: File) -> list[Place]:
    file.image.put(file.tree, 20, 24, "I")
    return [Place(None, 0, 0), Place(None, 0, PAGE, says="the catalog's root")]


def child_behind_the_region(file: File) -> list[Place]:
    cells, end = file.image.cells(file.tree), file.image.region_size
    file.image.write_node(FREE_PAGES[0], 0, cells[:2])
    file.image.write_node(file.tree, 1, [Cell(cells[2].key, offset=end)], first_child=FREE_PAGES[0])
    return [Place(None, 0, 0), Place(None, end, PAGE, says="points outside")]


def space_map(file: File) -> list[Place]:
    file.image.map_kind(FREE_PAGES[0], DATA)
    file.update_digest()
    return [Place(None, FREE_PAGES[0], PAGE)]


def space_map_of_the_root(file: File) -> list[Place]:
    file.image.map_kind(0, SLAB_PAGE)
    file.update_digest()
    return [Place(None, 0, PAGE, says="is a slab; it is metadata")]


def root(file: File) -> list[Place]:
    file.image.set_root(file.tree, 7)
    file.update_digest()
    return [Place(None, 0, PAGE)]


def place_of_the_catalog(file: File) -> list[Place]:
    end = file.image.region_size
    file.image.set_root(end, 4)
    file.image.bytes[REGION + end : REGION + end + LINE] = bytes(LINE)  # could be the head of a node
    return [Place(None, 0, 0), Place(None, 0, PAGE, says="the catalog's root")]


def another_page(file: File) -> list[Place]:
    file.update_digest(file.map)
    return [Place(None, file.map, PAGE)]


def another_root(file: File) -> list[Place]:
    file.update_digest(0)
    return [Place(None, 0, PAGE, says="the root page")]


def another_slab(file: File) -> list[Place]:
    file.update_digest(file.slab)
    return [Place(None, file.slab, LINE, says="the slab page")]


def other_contents(file: File) -> list[Place]:
    file.update_digest(file.at["a"] + 2 * PAGE)
    return [file.entry("a", 2, range(1024, 1536))]


def damaged_and_other_contents(file: File) -> list[Place]:
    file.flip(REGION + file.at["a"] + PAGE)
    return [file.entry("a", 1, range(512, 1024), says="damaged"), *other_contents(file)]


def deleted_contents(file: File) -> list[Place]:
    file.update_digest(FREE_PAGES[0] + LINE)
    return [Place(None, FREE_PAGES[0] + LINE, LINE)]


def several(file: File) -> list[Place]:
    file.update_digest(file.map, more=1)
    return [Place(None, 0, file.image.region_size, says="several pages")]


def several_that_point_behind_the_region(file: File) -> list[Place]:
    file.update_digest(file.image.region_size)
    return [Place(None, 0, file.image.region_size, says="several pages")]


CASES: list[Callable[[File], list[Place]]] = [
    *(header, damaged_pages, list_of_maps, slab, blocks_of_a_slab, size_of_blocks, contents),
    *(contents_and_space, no_contents, contents_without_an_end, no_block),
    *(behind_the_last_block, block_in_contents),
    *(block_used_twice, page_used_twice, outside, between_pages, key_of_another_node, bounds_of_a_child),
    *(order_of_keys, level_of_a_node, child_behind_the_region, height_of_the_catalog),
    *(space_map, space_map_of_the_root, root, place_of_the_catalog),
    *(another_page, another_root, another_slab, other_contents, damaged_and_other_contents, deleted_contents),
    *(several, several_that_point_behind_the_region),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_check_tells_where_a_problem_is(case: Callable[[File], list[Place]], tmp_path: Path) -> None:
    file = File(tmp_path / "x.pm")
    expected = case(file)
    file.image.save()
    with pmstore.open(file.image.path, "r", media="file", exclusive=True) as store:
        report, of_core = store.check(), store._catalog.core.check()
    found = [Place(one.name, one.offset, one.length, one.block, one.rows) for one in report]
    assert found == [place._replace(says="") for place in expected], report
    assert all(place.says in one.text for place, one in zip(expected, report, strict=True)), report
    for offset, _, block, key, text in of_core:
        assert key or not block, "only contents have blocks"
        assert {int(at) for at in re.findall(r"region offset (\d+)", text)} <= {offset}
        assert {int(at) for at in re.findall(r"\(bytes (\d+)", text)} <= {block * PAGE}


def test_check_reads_the_table_of_slots(tmp_path: Path) -> None:
    """It compares arrays with their slots."""
    with pmstore.open(tmp_path / "x.pm", "x", media="file") as store:
        x = store.create_array("x", 200_000)
        for value in range(5):  # from the third commit on it has two slots
            x[:] = value
            store.commit()
    image = Image(tmp_path / "x.pm")
    (cell,) = image.cells(image.tree)
    image.change_cell(b"nx", length=cell.length - 8)
    image.save()
    with pmstore.open(image.path, "r", media="file", exclusive=True) as store:
        (problem,) = store.check()
    assert (problem.name, problem.offset, problem.length, problem.block) == ("x", cell.offset, cell.length - 8, 0)
    assert "another length than its slots" in problem.text
    image.change_cell(b"nx", length=cell.length)
    (table,) = image.pages(SLOTS)
    update_digest(image, table)
    image.save()
    with pmstore.open(image.path, "r", media="file", exclusive=True) as store:
        (problem,) = store.check()
    assert (problem.offset, problem.length) == (table, PAGE) and "table of slots" in problem.text


def test_check_keeps_a_thousand_problems(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "x.pm", "x", media="file") as store:
        for number in range(1010):
            store[f"{number:04d}"] = np.full(9, 0x5555)
    data = (tmp_path / "x.pm").read_bytes()
    (tmp_path / "x.pm").write_bytes(data.replace(struct.pack("<9q", *[0x5555] * 9), struct.pack("<9q", *[0x5554] * 9)))
    with pmstore.open(tmp_path / "x.pm", "r", media="file", exclusive=True) as store:
        report = store.check()
    assert [problem.name for problem in report] == [f"{number:04d}" for number in range(1000)]
