"""Free space: what stands there was not committed, also where it equals what is written there next (I2, I8)."""

from __future__ import annotations

import pmstore

from .conftest import Medium
from .crashes import explored, freed, record


def test_I2_free_space_is_no_committed_image(medium: Medium) -> None:
    path = medium.directory / "store.pm"
    _, found = explored(record(path, medium.name, freed), depth=0)
    assert found is None, found
    with pmstore.open(path) as store:  # as after a kill
        assert store.check().ok, store.check()
