"""Each format, if its package is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import pmstore

PACKAGES = {"npz": None, "safetensors": None, "zarr": ("zarr", "3"), "hdf5": ("h5py", "3.10")}


@pytest.fixture(params=sorted(PACKAGES))
def form(request: pytest.FixtureRequest) -> str:
    package = PACKAGES[request.param]
    if package is not None:
        pytest.importorskip(*package)
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[pmstore.Store]:
    with pmstore.open(tmp_path / "store.pm") as store:
        yield store
        store.rollback()
