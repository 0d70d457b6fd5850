"""A region of more than 31 GiB, which a second list of maps describes. Its file has holes, so that it takes no space:
tests/support/faults.c, preloaded into a child process, reserves none.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import Core
from tests.conftest import Medium, run_in_fork
from tests.support import shim
from tests.support.places import offset_of
from tests.support.shim import variable

pytestmark = [pytest.mark.long, pytest.mark.no_sanitizer]  # which is preloaded too

PAGE = 4096
ONE_PAGE = PAGE - 8  # bytes that fill a page together with their hash
LISTED = 504 * 16128 * PAGE  # bytes that one list of maps describes
SMALL = range(40, 2000, 40)  # bytes of arrays in slabs of all classes


def take_all_listed(core: Core) -> list[tuple[int, int]]:
    """Takes all pages that the first list describes, and the next one. Returns places and lengths."""
    taken: list[tuple[int, int]] = []
    end, size = 0, 16 << 30
    while end < LISTED:
        while size > ONE_PAGE and end + size + (size >> 6) > LISTED:  # hashes, and the pages of maps, take less
            size = max(size // 2, ONE_PAGE)
        taken.append((core.alloc(size), size))
        end = taken[-1][0] + size
    return taken


def beyond(path: str, media: str) -> None:
    """Arrays behind the pages of the first list: commits, readers, and another process after a crash."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    variable("fault_sparse").value = 1

    def died() -> None:
        with pmstore.open(path, "x", media=media) as store:
            store.update({f"small/{n}": np.full(n, 255, "u1") for n in SMALL})
            store.commit()  # which has no second list
            taken = take_all_listed(store._catalog.core)
            for i in range(3):
                store[f"x/{i}"] = np.full(1000 + i, i)
            store["text"] = "x" * 300
            assert LISTED <= offset_of(store, "x/0") < LISTED + (1 << 20)  # all of this was free
            for offset, length in taken:
                store._catalog.core.free(offset, length)
            store.commit()
            with pmstore.open(path, "r") as snapshot:
                assert snapshot["x/1"].tolist() == [1] * 1001 and len(snapshot) == 4 + len(SMALL)
                store["x/1"][7] = 9
                store.commit()
                snapshot.refresh()
                assert snapshot["x/1"][7] == 9 and snapshot["text"] == "x" * 300
            store["x/2"][:] = 3
            store.commit()
            os._exit(0)

    run_in_fork(died)
    with pmstore.open(path, "r+", media=media) as store:
        assert store.check().ok, store.check()
        assert store["x/1"][7] == 9 and store["x/2"].tolist() == [3] * 1002 and store["text"] == "x" * 300
        before = offset_of(store, "x/0")
        store.group("x").clear()
        store.group("small").clear()
        store["low"] = np.ones(1000)
        assert offset_of(store, "low") < LISTED <= before
    with pmstore.open(path, "r", verify=True) as store:
        assert list(store) == ["low", "text"] and store["low"].sum() == 1000


def test_a_second_list_of_maps(medium: Medium, fault_library: Path) -> None:
    shim.call(fault_library, beyond, medium.directory / "huge.pm", medium.name)
