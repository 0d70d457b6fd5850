"""Free space: what stands there was not committed, also where it equals what is written there next (I2, I8)."""

from __future__ import annotations

import numpy as np
import pytest

import pmstore

from .conftest import Medium
from .crashes import Workload, explored, record


def fill(store: pmstore.Store, value: float) -> None:
    """Small arrays over all the pages that were freed."""
    for i in range(24):
        store[f"small{i}"] = np.full(120, value)
    store.commit()


def rolled_back(store: pmstore.Store) -> None:
    """Found by the explorer: contents that went straight to free space and were rolled back are in no record. Small
    arrays that took the space left out the lines that were equal, and recovery replayed an older array's over them.
    """
    store["x"] = np.ones(1000)
    store.commit()
    store["x"][:] = 7
    store.commit()
    del store["x"]
    store.commit()
    store["y"] = np.full(1000, 3.0)
    store.rollback()
    fill(store, 3.0)


def behind_an_extent(store: pmstore.Store) -> None:
    """The same behind the end of a declared extent, whose pages replay leaves alone, whole."""
    store["x"] = np.ones(1000)
    store.commit()
    store["x"][:] = 7
    store.commit()
    del store["x"]
    store.commit()
    store["y"] = np.full(525, 3.0)
    store.commit()
    del store["y"]
    store.commit()
    fill(store, 7.0)


@pytest.mark.parametrize("workload", [rolled_back, behind_an_extent], ids=lambda workload: workload.__name__)
def test_I2_free_space_is_no_committed_image(medium: Medium, workload: Workload) -> None:
    path = medium.directory / "store.pm"
    recording = record(path, medium.name, workload)
    _, found = explored(recording, depth=0)
    assert found is None, found
    with pmstore.open(path, media=medium.name) as store:  # as after a kill
        assert store.check().ok, store.check()
