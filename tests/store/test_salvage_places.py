"""`salvage` where places matter: which pages it takes for leaves, in which order, and what it does not follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium
from tests.core.test_slots import make_double_buffered
from tests.core.test_unreadable import disk, in_child  # noqa: F401
from tests.store.test_salvage import contents, salvaged
from tests.store.test_salvage_metadata import above_leaves, damage, filled, leaves, names_in, put_back  # noqa: F401
from tests.support import shim
from tests.support.bad_disk import BadDisk
from tests.support.derivations import doubled
from tests.support.images import MAP, MAP_LIST, META, NODE, PAGE, REGION, SLAB, SLOTS, Image
from tests.support.snapshots import Snapshot

Open = Callable[..., pmstore.Store]
pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)
MAP_LISTS, TABLES = 112, 2160  # in the root
OF_SLOTS, OF_DIGEST = "large arrays may be those of an earlier commit", "the store does not match its digest"


@pytest.fixture
def numbers(open_store: Open) -> tuple[Image, Snapshot]:
    """A store of 900 numbers, which lie in several leaves, and an array."""
    with open_store() as store:
        store.update({f"{i:03}": i for i in range(900)})
        store["array"] = np.arange(900)
    with open_store(mode="r") as store:
        return Image(Path(store.path)), contents(store)


def values(numbers: range) -> Snapshot:
    return {f"{i:03}": i for i in numbers}


def in_order(image: Image, level: int) -> list[int]:
    """The nodes of this level, in the order of their keys."""
    return sorted((page for page in image.pages(NODE) if image.get(page, 20, "I") == level), key=image.cells)


def test_an_empty_store(open_store: Open) -> None:
    with open_store() as store:
        pass
    report, found = salvaged(Path(store.path))
    assert report.ok and not found


def test_each_key_is_found(open_store: Open) -> None:
    """Also those of derived values, which are looked up, where a leaf begins with them."""
    with open_store() as store:
        store["f"] = np.arange(9.0)
        for i in range(60):
            assert store.derive(f"derived/{i:02}" + "x" * i, doubled, "f", policy="store", verify="hash").value.size
    path = Path(store.path)
    new = path.with_name("new.pm")
    assert pmstore.salvage(path, new).ok and Image(new).get(0, 32) == Image(path).get(0, 32) > 180


def test_every_second_of_many_leaves(open_store: Open) -> None:
    with open_store() as store:
        store.update({f"{i:03}" + "x" * 700: i for i in range(999, -1, -1)})
    with open_store(mode="r") as store:
        there = contents(store)
    image = Image(Path(store.path))
    gone = leaves(image)[1::2]
    names = {name for page in gone for name in names_in(image, page)}
    report, found = salvaged(damage(image, gone))
    assert found == {name: value for name, value in there.items() if name not in names} and report
    assert len(gone) > 150 and len(found) > 300
    told = [str(problem) for problem in report if "may be missing" in str(problem)]
    assert len(told) == 100 and all("before" in text for text in told[:-1]) and "before" not in told[-1]


def test_a_store_without_a_table_of_slots_has_lost_none(numbers: tuple[Image, Snapshot]) -> None:
    image, there = numbers
    assert not list(image.pages(SLOTS))
    report, found = salvaged(damage(image, [0]))
    assert found == there and [str(problem) for problem in report if "slots" in str(problem)] == []


def test_leaves_beside_each_other_and_apart(numbers: tuple[Image, Snapshot]) -> None:
    """The report tells of the names of neighbours once, and of those between others not at all."""
    image, there = numbers
    *_, before, first, second, between, third, behind = leaves(image)
    names = {name for page in (first, second, third) for name in names_in(image, page)}
    report, found = salvaged(damage(image, [first, second, third]))
    assert found == {name: value for name, value in there.items() if name not in names}
    where = [
        f"any names behind {max(names_in(image, left))!r} before {min(names_in(image, right))!r} may be missing"
        for left, right in ((before, between), (between, behind))
    ]
    assert [str(problem) for problem in report if "may be missing" in str(problem)] == where


def test_inner_nodes_beside_each_other(open_store: Open) -> None:
    """What they lead to is found by the map, in an order of its own."""
    with open_store() as store:
        store.update({"x" * 700 + f"{i:03}": i for i in range(99, -1, -1)})
    with open_store(mode="r") as store:
        there = contents(store)
    image = Image(Path(store.path))
    _, first, second, *others = in_order(image, 1)
    assert len(others) > 2 and in_order(image, 2) and in_order(image, 0) != sorted(in_order(image, 0))
    report, found = salvaged(damage(image, [first, second]))
    assert found == there and report


@pytest.fixture
def deleted(open_store: Open) -> tuple[Image, Image, Snapshot]:
    """A store before names were deleted whose leaves are free now, and after that."""
    with open_store() as store:
        store.update({f"{i:03}": i for i in range(600)})
    before = Image(Path(store.path))
    with open_store() as store:
        for i in range(300, 600):
            del store[f"{i:03}"]
    return before, Image(Path(store.path)), values(range(300))


def test_a_damaged_map_says_of_no_page_that_it_is_a_leaf(deleted: tuple[Image, Image, Snapshot]) -> None:
    _, image, there = deleted
    (page,) = image.pages(MAP)
    image.bytes[REGION + page + 64 : REGION + page + PAGE] = bytes([0b10101010]) * (PAGE - 64)
    report, found = salvaged(damage(image, above_leaves(image, NODE)))
    assert found.items() <= there.items() and "any names may be missing" in str(report)


@pytest.mark.parametrize("at", [0, 1])
def test_an_old_inner_node_beside_a_damaged_leaf(deleted: tuple[Image, Image, Snapshot], at: int) -> None:
    """Names that were deleted stay so, though the digest can't tell the state."""
    before, image, there = deleted
    gone = leaves(image)[at]
    names = names_in(image, gone)
    put_back(image, before, above_leaves(image, NODE))
    report, found = salvaged(damage(image, [gone]))
    assert OF_DIGEST in str(report) and found == {name: value for name, value in there.items() if name not in names}


def test_a_leaf_of_before_it_was_split(open_store: Open) -> None:
    """It has names that lie in another leaf now, which has newer values."""
    with open_store() as store:
        store.update(values(range(0, 160, 2)))
    before = Image(Path(store.path))
    with open_store() as store:
        store.update({name: -value for name, value in values(range(300)).items()})
    image = Image(Path(store.path))
    old = before.tree
    names = names_in(image, old)
    assert image.is_leaf(old) and before.is_leaf(old) and names_in(before, old) - names
    report, found = salvaged(put_back(image, before, [old]))
    assert found == {name: -value for name, value in values(range(300)).items() if name not in names} and report


def test_an_old_map_and_a_new_array_with_two_slots(open_store: Open) -> None:
    """The table of slots is not told to be damaged where only the map is old."""
    with open_store() as store:
        store.update({f"{i:03}": i for i in range(300)})
    before = Image(Path(store.path))
    with open_store() as store:
        make_double_buffered(store, commits=1)
    with open_store(mode="r") as store:
        there = contents(store)
    image = Image(Path(store.path))
    report, found = salvaged(put_back(image, before, image.pages(MAP)))
    assert found == there and report and OF_SLOTS not in str(report)


def test_an_old_table_of_slots_beside_a_damaged_leaf(open_store: Open) -> None:
    """An array is found that lies where one with two slots was."""
    with open_store() as store:
        store.update({f"{i:03}": i for i in range(300)})
        length = make_double_buffered(store).size
    before = Image(Path(store.path))
    with open_store() as store:
        del store["x"]
        store.commit()
        store["x"] = np.arange(length // 2)
    with open_store(mode="r") as store:
        there = contents(store)
    image = Image(Path(store.path))
    places = [cell.offset for one in (before, image) for page in leaves(one) for cell in one.cells(page) if cell.offset]
    assert len(places) == 2 and places[0] == places[1]
    put_back(image, before, image.pages(SLOTS))
    report, found = salvaged(damage(image, leaves(image)[:1]))
    assert found["x"] == there["x"] and found.items() < there.items() and OF_DIGEST in str(report)


def test_two_damaged_pages_are_not_a_single_place(filled: tuple[Image, Snapshot]) -> None:  # noqa: F811
    """Also if the hashes in their heads are those that were committed."""
    image, before = filled
    report, found = salvaged(damage(image, image.pages(MAP, SLAB)))
    assert OF_DIGEST in str(report) and found == before


@pytest.mark.parametrize("byte", [0, 0xFF])
@pytest.mark.parametrize("head", [0, 24])
def test_nothing_of_a_damaged_root_is_believed(
    filled: tuple[Image, Snapshot],  # noqa: F811
    byte: int,
    head: int,
) -> None:
    """head: bytes of it that are sound."""
    image, before = filled
    image.bytes[REGION + head : REGION + PAGE] = bytes([byte]) * (PAGE - head)
    image.save()
    report, found = salvaged(image.path)
    assert found == before and report and "missing" not in str(report) and OF_SLOTS not in str(report)


@pytest.mark.parametrize("kind", [MAP_LIST, SLOTS])
def test_two_pages_that_only_the_root_can_tell_apart(
    filled: tuple[Image, Snapshot],  # noqa: F811
    kind: int,
) -> None:
    """The root alone says which is the first one, in a store of over 31 GiB or with more than 126 arrays that have two
    slots."""
    image, before = filled
    (page,) = image.pages(kind)
    other = image.region_size - PAGE
    image.bytes[REGION + other : REGION + other + PAGE] = image.bytes[REGION + page : REGION + page + PAGE]
    image.map_kind(other, META)
    image.put(other, 8, other)
    report, found = salvaged(damage(image, [0]))
    assert found.keys() == (before.keys() if kind == SLOTS else set()) and OF_SLOTS in str(report)


@pytest.mark.parametrize("wrong", ["far", "behind", "between"])
@pytest.mark.parametrize("which", ["first child", "child", "tree", "list", "map", "table"])
def test_a_reference_that_leads_nowhere(numbers: tuple[Image, Snapshot], which: str, wrong: str) -> None:
    """A page with it that is sound by its own checksum is as good as damaged."""
    image, there = numbers
    place = {"far": 1 << 60, "behind": image.region_size, "between": image.tree + 64}[wrong]
    if which == "child":
        first, *cells = image.cells(image.tree)
        cells = [first._replace(offset=place), *cells]
        image.write_node(image.tree, 1, cells, image.get(image.tree, 24))
    else:
        page, at = {
            "first child": (image.tree, 24),
            "tree": (0, 24),
            "list": (0, MAP_LISTS),
            "map": (next(image.pages(MAP_LIST)), 64),
            "table": (0, TABLES + 8),
        }[which]
        image.put(page, at, place)
    image.save()
    report, found = salvaged(image.path)
    assert found == there and report and (OF_SLOTS in str(report)) == (which == "table")


@pytest.mark.parametrize("place", [1 << 60, PAGE, 72])
def test_an_extent_that_is_none(open_store: Open, place: int) -> None:
    with open_store() as store:
        store.update(values(range(20)), small=np.arange(60), large=np.arange(9000))
    sound = Path(store.path).read_bytes()
    for name in ("small", "large"):
        image = Image(Path(store.path))
        image.bytes[:] = sound
        image.change_cell(b"n" + name.encode(), offset=place)
        image.save()
        report, found = salvaged(image.path)
        assert found.keys() == {*values(range(20)), "small", "large"} - {name} and report
        image.path.with_name("rescued.pm").unlink()


def test_a_leaf_without_names(numbers: tuple[Image, Snapshot]) -> None:
    image, there = numbers
    gone = leaves(image)[2]
    names = names_in(image, gone)
    image.write_node(gone, 0, [])
    image.save()
    report, found = salvaged(image.path)
    assert found == {name: value for name, value in there.items() if name not in names} and report


def test_a_leaf_to_which_the_tree_leads_twice(numbers: tuple[Image, Snapshot]) -> None:
    """The other one, to which it should lead, is found without it."""
    image, there = numbers
    gone = image.get(image.tree, 24)
    names = names_in(image, gone)
    image.write_node(gone, 0, [])
    first, *cells = image.cells(image.tree)
    image.write_node(image.tree, 1, [first._replace(offset=gone), *cells], gone)
    image.save()
    report, found = salvaged(image.path)
    assert found == {name: value for name, value in there.items() if name not in names} and report


def test_leaves_that_share_a_name(numbers: tuple[Image, Snapshot]) -> None:
    """The first of them is read."""
    image, there = numbers
    pages = leaves(image)
    shared = image.cells(pages[2])[0]
    image.write_node(pages[1], 0, [*image.cells(pages[1])[1:], shared])
    report, found = salvaged(damage(image, above_leaves(image, NODE)))
    gone = (names_in(image, pages[2]) | {min(values(range(900)).keys() - found.keys())}) - {shared.key[1:].decode()}
    assert found == {name: value for name, value in there.items() if name not in gone} and report


def test_a_store_of_many_pages(open_store: Open) -> None:
    with open_store() as store:
        store.create_array("large", 9 << 20, "f8")
        store.commit()
        store.update(values(range(300)), small=np.arange(60))
    with open_store() as store:
        del store["large"]
        assert store.stats().region_size > 64 << 20
    report, found = salvaged(Path(store.path))
    assert report.ok and found.items() > values(range(300)).items() and "small" in found


def test_the_hashes_of_large_arrays_that_can_not_be_read(open_store: Open, disk: BadDisk) -> None:  # noqa: F811
    """Their last page only, and the page behind hashes that are sound."""
    blocks = {"513": 513, "512": 512, "behind": 1}
    with open_store() as store:
        for name, some in blocks.items():
            store[name] = np.ones(some * PAGE // 8)
    with open_store(mode="r") as store:
        there = contents(store)
    image = Image(Path(store.path))
    cells = {cell.key[1:].decode(): cell for page in leaves(image) for cell in image.cells(page)}
    assert cells["behind"].offset == cells["512"].offset + 513 * PAGE and cells["513"].length == 513 * PAGE
    for name, page in (("513", cells["513"].offset // PAGE + 514), ("behind", cells["behind"].offset // PAGE)):
        (disk.behind / f"{name}.pm").write_bytes(image.bytes)
        disk.spoil(f"{name}.pm", REGION // PAGE + page)

    def rescue() -> None:
        for name in ("513", "behind"):
            report = pmstore.salvage(disk.mount / f"{name}.pm", disk.behind / f"{name}.new")
            with pmstore.open(disk.behind / f"{name}.new", "r", verify=True) as store:
                assert contents(store) == {other: value for other, value in there.items() if other != name}
            assert {problem.name for problem in report} <= {name, None}
            assert name != "behind" or OF_DIGEST not in str(report)

    in_child(rescue)


def refused_to_a_salvage(folder: str, old_map: bool, calls: int) -> None:
    """calls: of the kind that is refused once, at each place in turn."""
    path, target = Path(folder) / "store.pm", Path(folder) / "new.pm"
    with pmstore.open(path, "x", media="memory") as store:
        store.update(values(range(300)), small=np.arange(60))
    before = Image(path)
    with pmstore.open(path, "r+", media="memory") as store:
        store.update(values(range(300, 900)))
    image = Image(path)
    if old_map:
        put_back(image, before, image.pages(MAP))
    else:
        image.bytes[REGION : REGION + PAGE] = bytes(PAGE)
        image.save()
    for at in range(1, 1000):
        shim.begin_memory(shim.ONCE, at, calls)
        with contextlib.suppress(MemoryError):
            pmstore.salvage(path, target)
        refused = shim.hits()
        shim.end()
        if target.exists():
            with pmstore.open(target, "r") as store:
                assert len(store) == 901, at
            target.unlink()
        if not refused:
            break
    assert 3 < at < 999


@pytest.mark.no_sanitizer  # the shim is preloaded, too
@pytest.mark.parametrize("calls", [shim.MEMORY, shim.MAPPINGS], ids=["memory", "mappings"])
@pytest.mark.parametrize("old_map", [False, True])
def test_a_salvage_to_which_memory_is_refused_leaves_nothing_out(
    fault_library: Path,
    medium: Medium,
    old_map: bool,
    calls: int,
) -> None:
    shim.call(fault_library, refused_to_a_salvage, medium.directory, old_map, calls)
