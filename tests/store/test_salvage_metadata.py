"""`salvage` of stores whose metadata are damaged: a page costs what it holds, and nothing that it leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.core.test_slots import make_double_buffered
from tests.core.test_unreadable import disk, in_child  # noqa: F401
from tests.store.test_salvage import contents, salvaged
from tests.support.bad_disk import BadDisk
from tests.support.derivations import doubled
from tests.support.images import MAP, MAP_LIST, NODE, PAGE, REGION, ROOT, SLAB, SLOTS, Image

Open = Callable[..., pmstore.Store]
pytestmark = pytest.mark.parametrize("medium", ["memory"], indirect=True)


def fill(store: pmstore.Store) -> None:
    """Some of everything, in a catalog with inner nodes, and an array whose second slot is current."""
    store.update({f"group/{i:03}": i for i in range(300)})
    store.update({f"small/{i:03}": np.full(9, i) for i in range(100)})
    store["f"], store["value"] = np.arange(9e4), "v" * 9000
    store["plain"] = pmstore.Parts("p", {"a": np.ones(5000)})
    store.create_list("list").extend("e" * i for i in range(0, 6000, 60))
    store.derive("derived", doubled, "f", policy="store", verify="hash")
    store.attrs("f").update(units="K")
    store.attrs().update(made="here")
    make_double_buffered(store, commits=1)


@pytest.fixture
def filled(open_store: Open) -> tuple[Image, dict[str, Any]]:
    with open_store() as store:
        fill(store)
    with open_store(mode="r") as store:
        return Image(Path(store.path)), contents(store)


def damage(image: Image, pages: Iterable[int]) -> Path:
    for page in pages:
        image.bytes[REGION + page + 40] ^= 0x55
    image.save()
    return image.path


def names_in(image: Image, page: int) -> set[str]:
    return {cell.key[1:].decode() for cell in image.cells(page) if cell.key[:1] == b"n"}


def leaves(image: Image) -> list[int]:
    """The leaves, in the order of their keys."""
    return sorted(filter(image.is_leaf, image.pages(NODE)), key=image.cells)


def above_leaves(image: Image, *kinds: int) -> list[int]:
    """The pages of these kinds, but for leaves."""
    return [page for page in image.pages(*kinds) if not image.is_leaf(page)]


def put_back(image: Image, before: Image, pages: Iterable[int]) -> Path:
    """What a disk has that lost the last writes of these pages."""
    for page in pages:
        image.bytes[REGION + page : REGION + page + PAGE] = before.bytes[REGION + page : REGION + page + PAGE]
    image.save()
    return image.path


@pytest.mark.parametrize("kinds", [(ROOT,), (MAP_LIST,), (MAP,), (MAP_LIST, MAP), (SLAB,)], ids=str)
def test_nothing_is_lost_with_the_root_the_map_or_slabs(
    filled: tuple[Image, dict[str, Any]], kinds: tuple[int, ...]
) -> None:
    image, before = filled
    report, found = salvaged(damage(image, image.pages(*kinds)))
    assert found == before and report and all(problem.name is None for problem in report)
    assert "missing" not in str(report)


@pytest.mark.parametrize("root", [False, True])
def test_nothing_is_lost_with_inner_nodes(filled: tuple[Image, dict[str, Any]], root: bool) -> None:
    image, before = filled
    inner = above_leaves(image, NODE)
    report, found = salvaged(damage(image, [*inner, 0] if root else inner))
    assert found == before and inner and ("may be missing" in str(report)) == root


@pytest.mark.parametrize("above", [None, NODE, ROOT])
def test_a_leaf_takes_its_own_names(filled: tuple[Image, dict[str, Any]], above: int | None) -> None:
    """Also if what is above it is lost: then the leaves beside it are found without that."""
    image, before = filled
    gone = next(page for page in leaves(image) if {"group/200", "group/201"} <= names_in(image, page))
    names, lost = names_in(image, gone), {None: [], NODE: above_leaves(image, NODE), ROOT: [0]}[above]
    report, found = salvaged(damage(image, [gone, *lost]))
    assert found == {name: value for name, value in before.items() if name not in names} and len(names) > 9
    last, first = max(name for name in found if name < min(names)), min(name for name in found if name > max(names))
    where = "" if above else f" behind {last!r} before {first!r}"
    assert f"any names{where} may be missing" in str(report)


def test_leaves_with_elements_of_a_list(filled: tuple[Image, dict[str, Any]]) -> None:
    """The list ends before the first element that is lost. Attributes in the same leaf are lost with it."""
    image, before = filled
    first, second, *_ = (page for page in leaves(image) if any(cell.key[:1] == b"l" for cell in image.cells(page)))
    for page, left in ((second, True), (first, False)):
        report, found = salvaged(damage(image, [page]))
        length = sum(cell.key[:1] == b"l" for cell in image.cells(first)) if left else 0
        assert found == {**before, "list": ("list", before["list"][1][:length])} and length < 100
        assert f"'list': its elements from number {length} on are left out: it is missing" in str(report)
        assert ("any attributes may be missing" in str(report)) is not left
        image.path.with_name("rescued.pm").unlink()


def test_the_last_elements_of_a_list(open_store: Open) -> None:
    """Nothing behind them shows that they are missing."""
    with open_store() as store:
        store.create_list("l").extend(range(300))
        store.update({f"{i:03}": i for i in range(100)})
    image = Image(Path(store.path))
    gone = next(page for page in leaves(image) if {cell.key[:1] for cell in image.cells(page)} > {b"l"})
    lost = sum(cell.key[:1] == b"l" for cell in image.cells(gone))
    report, found = salvaged(damage(image, [gone]))
    assert 0 < lost < 300 and found["l"] == ("list", list(range(300 - lost)))
    assert f"'l': any elements from number {300 - lost} on may be missing" in str(report)


def test_a_list_whose_name_is_lost(open_store: Open) -> None:
    """The report tells of its elements once."""
    with open_store() as store:
        store.create_list("l").extend(range(300))
        store.update({f"{i:03}": i for i in range(100)})
    image = Image(Path(store.path))
    report, found = salvaged(damage(image, [page for page in leaves(image) if "l" in names_in(image, page)]))
    assert "l" not in found and str(report).count("an element of a list is out of its place") == 1 and len(report) < 5


@pytest.fixture
def changed(open_store: Open) -> tuple[Image, Image, dict[str, Any]]:
    """A store before names came and went, and after that. Pages that are free now still have what they had as leaves,
    and space that is free now has the contents of deleted arrays."""
    with open_store() as store:
        store.update({f"{i:04}": np.full(40, i) for i in range(0, 1200, 2)})
        make_double_buffered(store)
    before = Image(Path(store.path))
    with open_store() as store:
        store["x"][...] += 1
        for i in range(200, 600, 2):
            del store[f"{i:04}"]
        store.update({f"{i:04}": np.full(40, i) for i in range(601, 900, 2)})
    with open_store(mode="r") as store:
        return before, Image(Path(store.path)), contents(store)


@pytest.mark.parametrize("kinds", [(MAP,), (MAP_LIST,), (ROOT,), (NODE,)], ids=str)
def test_names_that_were_deleted_stay_so(changed: tuple[Image, Image, dict[str, Any]], kinds: tuple[int, ...]) -> None:
    """Also if the pages are damaged that say what is free."""
    _, image, there = changed
    report, found = salvaged(damage(image, above_leaves(image, *kinds)))
    assert found == there and report


@pytest.mark.parametrize("kind", [ROOT, MAP_LIST, MAP, NODE])
def test_a_page_of_metadata_that_a_lost_write_left_as_it_was(
    changed: tuple[Image, Image, dict[str, Any]], kind: int
) -> None:
    """Its checksum is that of its contents."""
    before, image, there = changed
    report, found = salvaged(put_back(image, before, above_leaves(image, kind)))
    assert found == there and bool(report) == (kind != MAP_LIST)


def test_pages_that_lost_writes_left_as_they_were(open_store: Open) -> None:
    """One page is told from the others by the digest of the last commit, also if the number of names is the same. Two
    can't be, which the report says."""
    with open_store() as store:
        store.update({f"{i:04}": np.full(40, i) for i in range(300)})
    before = Image(Path(store.path))
    with open_store() as store:
        for i in range(120):
            del store[f"{i:04}"]
        store.update({f"{i:04}": np.full(40, i) for i in range(300, 420)})
    with open_store(mode="r") as store:
        there, after = contents(store), Path(store.path).read_bytes()
    for kinds in ((MAP,), (NODE,), (ROOT,), (MAP, NODE)):
        image = Image(Path(store.path))
        report, found = salvaged(put_back(image, before, above_leaves(image, *kinds)))
        one = len(kinds) == 1
        assert (found == there) == one and report.ok == (bytes(image.bytes) == after)
        assert ("does not match its digest" in str(report)) is not one
        image.path.write_bytes(after)
        image.path.with_name("rescued.pm").unlink()


def test_an_old_leaf_is_told(open_store: Open) -> None:
    """Also if its values are in the leaf itself, and the root counts other keys."""
    with open_store() as store:
        store.update({f"{i:03}": i for i in range(70)})
    before = Image(Path(store.path))
    with open_store() as store:
        store.update({f"{i:03}": -i for i in range(60)})
        del store["069"]
    image = Image(Path(store.path))
    (page,) = leaves(image)
    report, found = salvaged(put_back(image, before, [page]))
    assert found == {f"{i:03}": i for i in range(70)}
    assert f"the catalog node page at region offset {page} is not the one that was committed last" in str(report)


def test_a_root_that_a_lost_write_left_as_it_was_before_the_tree_grew(open_store: Open) -> None:
    with open_store() as store:
        store.update({f"{i:04}": i for i in range(20)})
    before = Image(Path(store.path))
    with open_store() as store:
        store.update({f"{i:04}": i for i in range(20, 300)})
    image = Image(Path(store.path))
    report, found = salvaged(put_back(image, before, [0]))
    assert len(found) == 300 and "missing" not in str(report) and report


def test_a_cell_that_is_not_in_its_only_leaf(open_store: Open) -> None:
    """The checksum of the page is right, and the page is not believed."""
    with open_store() as store:
        store.update({f"{i:04}": i for i in range(20)})
    image = Image(Path(store.path))
    image.put(image.tree, 64, 0xFFF0, "H")  # where the first cell begins
    image.save()
    report, found = salvaged(image.path)
    assert not found and "any names may be missing" in str(report)


def test_a_leaf_that_a_lost_write_left_as_it_was(changed: tuple[Image, Image, dict[str, Any]]) -> None:
    """Arrays that were deleted since do not come back from free space."""
    before, image, there = changed
    for page in leaves(image):
        then = before.bytes[REGION + page : REGION + page + PAGE]
        if not before.is_leaf(page) or then == image.bytes[REGION + page : REGION + page + PAGE]:
            continue
        report, found = salvaged(put_back(Image(image.path), before, [page]))
        assert found.items() <= there.items() and report
        lost = there.keys() - found.keys()
        assert lost <= names_in(image, page) or lost <= {problem.name for problem in report} | names_in(image, page)
        image.save()
        image.path.with_name("rescued.pm").unlink()


@pytest.mark.parametrize("found", [True, False])
def test_a_root_and_a_table_of_slots(filled: tuple[Image, dict[str, Any]], found: bool) -> None:
    """A table whose place nothing knows is told of, and one that is there is used."""
    image, before = filled
    report, now = salvaged(damage(image, [0] if found else [0, *image.pages(SLOTS)]))
    assert (now == before) == found and ("large arrays may be those of an earlier commit" in str(report)) != found


def test_a_lost_table_of_slots_is_told(filled: tuple[Image, dict[str, Any]]) -> None:
    """The array with two slots may be that of the commit before; all other contents are those of the last one."""
    image, before = filled
    report, found = salvaged(damage(image, image.pages(SLOTS)))
    x = found.pop("x")
    assert np.frombuffer(x[3])[0] in (4.0, 5.0) and before.pop("x")[:3] == x[:3]
    assert found == before and "large arrays may be those of an earlier commit" in str(report)


@pytest.mark.parametrize("kinds", [(ROOT, NODE), (MAP_LIST,), (MAP,)], ids=str)
@pytest.mark.parametrize("list_damaged", [False, True])
def test_nothing_is_lost_with_metadata_that_can_not_be_read(
    filled: tuple[Image, dict[str, Any]],
    disk: BadDisk,  # noqa: F811
    kinds: tuple[int, ...],
    list_damaged: bool,
) -> None:
    """Nor does a damaged list of the map lead to a page that can't be read, which would be a signal."""
    image, before = filled
    if list_damaged:
        damage(image, image.pages(MAP_LIST))
    (disk.behind / "bad.pm").write_bytes(image.bytes)
    disk.spoil("bad.pm", *((REGION + page) // PAGE for page in above_leaves(image, *kinds)))

    def rescue() -> None:
        report = pmstore.salvage(disk.mount / "bad.pm", disk.behind / "new.pm")
        with pmstore.open(disk.behind / "new.pm", "r", verify=True) as store:
            assert (contents(store) == before or (ROOT in kinds and list_damaged)) and report

    in_child(rescue)


def test_pages_that_can_not_be_read_and_that_the_log_changes(open_store: Open, disk: BadDisk) -> None:  # noqa: F811
    """A process that was killed leaves a log. Salvage applies it to all other pages."""
    store = open_store()
    store.update({f"{i:03}": i for i in range(300)})
    store.commit()
    store.update({f"{i:03}": -i for i in range(0, 300, 50)})
    store.commit()
    there = contents(store)
    image = Image(Path(store.path))
    store._drop()
    store.close()
    for number, page in enumerate([0, image.tree, *image.pages(MAP)]):
        (disk.behind / f"{number}.pm").write_bytes(image.bytes)
        disk.spoil(f"{number}.pm", (REGION + page) // PAGE)

    def rescue() -> None:
        for number in range(3):
            report = pmstore.salvage(disk.mount / f"{number}.pm", disk.behind / f"{number}.new")
            with pmstore.open(disk.behind / f"{number}.new", "r", verify=True) as store:
                assert contents(store) == there and report

    in_child(rescue)
