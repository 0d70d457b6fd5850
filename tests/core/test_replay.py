"""What recovery makes of logs: honest ones of either medium, and some that nobody's store has written."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.conftest import Medium, run_in_fork
from tests.support import shim
from tests.support.crashes import ends
from tests.support.images import HEADER, LOGGED, OVERFLOW, PAGE, REGION, SLOT, Image, body_hash, item
from tests.support.snapshots import snapshot

OpenStore = Callable[..., pmstore.Store]


def test_pages_that_the_image_has_lost_come_back_from_the_log(medium, open_store: OpenStore, tmp_path: Path) -> None:
    """Wherever they are in a region of 16 MiB, in the newest version; on a disk also from the log of a memory store."""
    store = open_store(max_size=64 << 20)
    w = store.create_array("w", (4000, PAGE // 8))
    store.commit()
    for _ in range(2):
        w[:1500] -= 1
        store.commit()  # so that the log is large
    store._catalog.core.checkpoint()
    path = Path(store.path)
    before = path.read_bytes()
    for i in range(1, 6):
        w[np.arange(3, 4000, 509) + i] = i
        w[np.arange(511, 4000, 512)] = 10 + i
        w[3200:3300] = i
        w[::700, 5] += i
        store.commit()
    wanted = w.copy()
    store._drop(discard=True)
    image = Image(path)
    assert image.word(32) == struct.unpack_from("<Q", before, 32)[0], "a checkpoint has emptied the log"
    image.bytes[REGION : REGION + image.region_size] = before[REGION : REGION + image.region_size]
    image.path = tmp_path / "again.pm"
    image.save()
    for mode in ("r", "r+"):
        with pmstore.open(image.path, mode, media="file") as again:
            assert (again["w"] == wanted).all() and again.check().ok


def lost(image: Image) -> dict[int, list[int]]:
    """Fills pages that the log can bring back with noise. For each that it names, how many bytes it has, in order."""
    pages: dict[int, list[int]] = {}
    for kind, offset, length in image.items():
        size = length if kind == LOGGED else (length + 7 & ~7) + 8 * -(-length // PAGE)
        for at in range(0, size, PAGE):
            pages.setdefault(offset + at, []).append(min(PAGE, size - at) if kind == LOGGED else 0)
    for page, found in pages.items():
        if found[-1]:
            image.bytes[REGION + page : REGION + page + PAGE] = b"\xa5" * PAGE
    return pages


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_pages_that_end_with_their_extent(tmp_path: Path, durability: str) -> None:
    """Their ends are not in the log, and mean nothing; but that of what uses such a page before or afterwards does."""
    path = tmp_path / "store.pm"
    with pmstore.open(path, "x", media="file") as store:
        for length in (252, 300, 511, 512, 1022, 1023, 7840):  # one page with its hash, and about whole ones
            store[f"a{length}"] = np.zeros(length)
    store = pmstore.open(path, "r+", media="file", durability=durability)  # type: ignore[call-overload]
    arrays = list(store.values())
    store["n"] = 0  # the log begins
    for _ in range(2):
        for array in arrays:
            array += 1
        arrays[-1][::600] -= 1
        store.commit()
    ends(store)
    for array in arrays:
        array[-1] = 7
    store.commit()
    wanted = snapshot(store)
    store._drop(discard=True)
    image = Image(path)
    pages = lost(image)
    runs = [[size < PAGE for size in found if size] for found in pages.values()]
    roles = {pair for ends_ in runs for pair in itertools.pairwise(ends_)}
    assert roles == set(itertools.product((False, True), repeat=2)), "no page is an end, then none, and an end again"
    image.save()
    for mode in ("r", "r+"):
        with pmstore.open(path, mode, media="file") as again:
            assert snapshot(again) == wanted and again.check().ok
    whole = path.read_bytes()
    for page, found in pages.items():
        if 0 < found[-1] < PAGE:  # written whole, and so not read first
            assert not any(whole[REGION + page + found[-1] : REGION + page + PAGE])


def test_lines_at_the_beginning_of_pages_are_no_ends(medium: Medium) -> None:
    """The log of a memory store has such lines; on a disk, the bytes after them stay."""
    path = medium.directory / "store.pm"
    store = pmstore.open(path, "x", media=medium.name)
    w = store.create_array("w", 2 * PAGE // 8)
    w[:] = np.arange(w.size)
    store.commit()
    store._catalog.core.checkpoint()
    w[0] = -1
    store.commit()
    wanted = w.copy()
    store._drop(discard=True)
    runs = {(offset % PAGE, length) for _, offset, length in Image(path).items()}
    assert runs == {(0, 64)} or medium.name == "file"
    with pmstore.open(path, "r+", media="file") as again:
        assert (again["w"] == wanted).all() and again.check().ok


def an_overflow_over_itself(path: Path, then: bytes, size: int) -> None:
    """A run of a overflowed record changes the pages where the items behind it stand."""
    with pmstore.open(path, "w", media="file") as store:
        store["a"] = np.arange(100.0)
    image = Image(path)
    place = image.region_size - 16 * PAGE
    page = bytes(16) + then
    body = item(LOGGED, place + PAGE, PAGE, page.ljust(PAGE, b"\0")) + item(LOGGED, place + 9 * PAGE, size, bytes(size))
    image.bytes[REGION + place : REGION + place + len(body)] = body
    sound = body_hash(body, REGION + place, 77)
    image.set_log(item(OVERFLOW, place, len(body), struct.pack("<QQ", sound, 0)), 77)
    image.save()
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.CorruptStoreError, match="its own list"):
            pmstore.open(path, mode)


@pytest.mark.parametrize("what, size", [("slot", PAGE), ("run", 64)])
def test_a_overflowed_record_that_changes_itself(medium, what: str, size: int) -> None:
    items = {"slot": item(SLOT, 0, 1, struct.pack("<QQ", 0, 1 << 32)), "run": item(LOGGED, 1 << 41, 64, bytes(64))}
    run_in_fork(an_overflow_over_itself, medium.directory / "hostile.pm", items[what], size)


def the_end_of_the_log(path: str) -> None:
    """Run in a child with the shim: pages that can't be touched are behind the file."""
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = 1
    image = Image(Path(path))
    page = bytes(image.bytes[REGION : REGION + PAGE])
    image.set_log(item(LOGGED, 0, PAGE, page), 77, image.log_size)
    image.save()
    shim.variable("fault_fences").value = 1
    for mode in ("r", "r+"):
        with pmstore.open(path, mode) as store:  # type: ignore[call-overload]
            assert store.sequence == image.word(HEADER["sequence"]) + 1 and store["a"] == 1


@pytest.mark.no_sanitizer  # which is preloaded too
def test_a_record_that_ends_where_the_log_does(tmp_path: Path, fault_library: Path) -> None:
    shim.call(fault_library, the_end_of_the_log, tmp_path / "store.pm")
