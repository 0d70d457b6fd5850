"""A store with a fit that was interrupted, for all tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from tests.support.resuming import in_memory

HOSTILE = "<script>alert('1')</script>&\"[red]\x1b[31m"


class Falling(pmstore.Resumable):
    """Something that halves ten times, unless it is interrupted before."""

    max_iter = 10

    def __init__(self, interrupted_after: int | None = None) -> None:
        self.interrupted_after = interrupted_after

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("height")]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.height = 1024.0

    def step(self) -> dict[str, float]:
        if self.state.iteration == self.interrupted_after:
            raise InterruptedError
        self.state.height /= 2
        return {"objective": self.state.height}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store with a fit that was interrupted after three of ten iterations, and with values."""
    with in_memory(tmp_path) as directory:
        path = directory / "run.pm"
        with pmstore.open(path) as store:
            with contextlib.suppress(InterruptedError):
                Falling(3).run(store, "fits/fall")
            store["epoch"] = 7
            store["model/w"] = np.arange(12.0).reshape(3, 4)
            store.create_list("losses").extend([4.0, 2.0, 1.0])
            store[HOSTILE] = HOSTILE
        yield path
