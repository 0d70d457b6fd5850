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


def inner_nodes(image: Image) -> list[int]:
    return [page for page in image.pages(NODE) if not image.is_leaf(page)]


@pytest.mark.parametrize("kinds", [(ROOT,), (MAP_LIST,), (MAP,), (MAP_LIST, MAP), (SLAB,)], ids=str)
def test_nothing_is_lost_with_the_root_the_map_or_slabs(
    filled: tuple[Image, dict[str, Any]], kinds: tuple[int, ...]
) -> None:
    image, before = filled
    pages = list(image.pages(*kinds))
    report, found = salvaged(damage(image, pages))
    assert found == before and report and all(problem.name is None for problem in report)
    assert ("any names may be missing" in str(report)) == (kinds == (ROOT,))


@pytest.mark.parametrize("root", [False, True])
def test_nothing_is_lost_with_inner_nodes(filled: tuple[Image, dict[str, Any]], root: bool) -> None:
    image, before = filled
    inner = inner_nodes(image)
    report, found = salvaged(damage(image, [*inner, 0] if root else inner))
    assert found == before and inner and ("may be missing" in str(report)) == root


@pytest.mark.parametrize("root", [False, True])
def test_a_leaf_takes_its_own_names(filled: tuple[Image, dict[str, Any]], root: bool) -> None:
    """Also if the nodes above it are lost: then the leaves beside it are found without them."""
    image, before = filled
    gone = next(page for page in leaves(image) if {"group/200", "group/201"} <= names_in(image, page))
    names = names_in(image, gone)
    report, found = salvaged(damage(image, [gone, *inner_nodes(image), *([0] if root else [])]))
    assert found == {name: value for name, value in before.items() if name not in names} and len(names) > 9
    last, first = max(name for name in found if name < min(names)), min(name for name in found if name > max(names))
    between = f"any names behind {last!r} before {first!r}"
    assert ("any names may be missing" if root else f"{between} may be missing") in str(report)


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


def test_names_that_were_deleted_stay_so(open_store: Open) -> None:
    """Pages that are free still have what they had as leaves."""
    with open_store() as store:
        store.update({f"{i:04}": i for i in range(1000)})
        store.commit()
        for i in range(20, 990):
            del store[f"{i:04}"]
    path = Path(store.path)
    left = {f"{i:04}" for i in (*range(20), *range(990, 1000))}
    once = [page for page in Image(path).pages(NODE) if names_in(Image(path), page) - left]
    assert len(once) > 5
    for kind in (MAP, MAP_LIST, ROOT):
        image = Image(path)
        before = path.read_bytes()
        report, found = salvaged(damage(image, image.pages(kind)))
        assert found.keys() == left and report
        path.write_bytes(before)
        path.with_name("rescued.pm").unlink()


def test_a_lost_table_of_slots_is_told(filled: tuple[Image, dict[str, Any]]) -> None:
    """The array with two slots may be that of the commit before; all other contents are those of the last one."""
    image, before = filled
    report, found = salvaged(damage(image, image.pages(SLOTS)))
    x = found.pop("x")
    assert np.frombuffer(x[3])[0] in (4.0, 5.0) and before.pop("x")[:3] == x[:3]
    assert found == before and "large arrays may be those of the commit before" in str(report)


@pytest.mark.parametrize("kinds", [(ROOT, NODE), (MAP_LIST,), (MAP,)], ids=str)
def test_nothing_is_lost_with_metadata_that_can_not_be_read(
    filled: tuple[Image, dict[str, Any]],
    disk: BadDisk,  # noqa: F811
    kinds: tuple[int, ...],
) -> None:
    image, before = filled
    (disk.behind / "bad.pm").write_bytes(image.bytes)
    disk.spoil("bad.pm", *((REGION + page) // PAGE for page in image.pages(*kinds) if not image.is_leaf(page)))

    def rescue() -> None:
        report = pmstore.salvage(disk.mount / "bad.pm", disk.behind / "new.pm")
        with pmstore.open(disk.behind / "new.pm", "r", verify=True) as store:
            assert contents(store) == before and report

    in_child(rescue)
