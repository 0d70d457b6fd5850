"""Which engine a caller means."""

from __future__ import annotations

import numbers
from typing import Any

from pmstore.scale._dask import Dask
from pmstore.scale._engine import Engine
from pmstore.scale._processes import Processes

EngineLike = Any
"""A number of processes, a dask Client, or an `Engine`."""


def engine_of(given: EngineLike) -> Engine:
    """The engine for the argument ``engine``. Raises TypeError or ValueError for anything else."""
    if isinstance(given, Engine):
        return given
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        return Processes(int(given))
    if type(given).__module__.partition(".")[0] == "distributed":
        return Dask(given)
    raise TypeError(
        f"engine is a number of processes, a dask.distributed.Client or an engine of pmstore.scale, not {given!r:.200}"
    )
