"""What recovery makes of logs: honest ones of either medium, and some that nobody's store has written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmstore

from .images import PAGE, REGION, RUN, SLOT, SPILL, Image, body_hash, item
from .test_hostile import run_in_child

OpenStore = Callable[..., pmstore.Store]


def test_pages_that_home_has_lost_come_back_from_the_log(medium, open_store: OpenStore, tmp_path: Path) -> None:
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


def a_spill_over_itself(path: Path, then: bytes, size: int) -> None:
    """A run of a spilled record changes the pages where the items behind it stand."""
    with pmstore.open(path, "w", media="file") as store:
        store["a"] = np.arange(100.0)
    image = Image(path)
    place = image.region_size - 16 * PAGE
    page = bytes(16) + then
    body = item(RUN, place + PAGE, PAGE, page.ljust(PAGE, b"\0")) + item(RUN, place + 4 * PAGE, size, bytes(size))
    image.bytes[REGION + place : REGION + place + len(body)] = body
    sound = body_hash(body, REGION + place, 77)
    image.set_log(item(SPILL, place, len(body), struct.pack("<QQ", sound, 0)), 77)
    image.save()
    for mode in ("r", "r+"):
        with pytest.raises(pmstore.CorruptStoreError, match="its own list"):
            pmstore.open(path, mode)


@pytest.mark.parametrize("what, size", [("slot", PAGE), ("run", 64)])
def test_a_spilled_record_that_changes_itself(medium, what: str, size: int) -> None:
    items = {"slot": item(SLOT, 0, 1, struct.pack("<QQ", 0, 1 << 32)), "run": item(RUN, 1 << 41, 64, bytes(64))}
    call = f"a_spill_over_itself(l.Path({str(medium.directory / 'hostile.pm')!r}), {items[what]!r}, {size})"
    run_in_child(f"import tests.test_replay as l; l.{call}")
