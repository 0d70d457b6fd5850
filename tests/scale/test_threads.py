"""Fits in several threads of a process, which have one number of BLAS threads in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.scale import Serial
from tests.support.sharded import rows

threadpoolctl = pytest.importorskip("threadpoolctl")


class Calls(pmstore.MapReduce):
    """Calls a function in its only map."""

    max_iter = 1

    def __init__(self, function: Callable[[], Any]) -> None:
        self.shards, self.function = [rows(0)], function

    def fields(self) -> list[pmstore.Field]:
        return []

    def fingerprint(self) -> Mapping[str, Any]:
        return {}

    def start(self) -> None:
        pass

    def map(self, shard: Any, shared: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        self.function()
        return {}

    def update(self, total: Mapping[str, Any]) -> None:
        pass


def blas() -> set[int]:
    return {library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}


def test_the_limit_of_blas_ends_with_the_last_of_several_fits() -> None:
    first_maps, second_maps = threading.Event(), threading.Event()
    seen = []

    def in_first() -> None:
        first_maps.set()
        assert second_maps.wait(60)

    def in_second() -> None:
        second_maps.set()
        first.join()
        seen.append(blas())

    first, second = (
        threading.Thread(target=Calls(function).run, kwargs={"engine": Serial()}) for function in (in_first, in_second)
    )
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas()
        first.start()
        assert first_maps.wait(60)
        second.start()
        second.join()
        assert seen == [{1}] and blas() == before
