"""Opening after a clean close: ten names against 200,000, 1 MiB of arrays against 1 GiB; and after a crash."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import machine, parser, real_time, save, scratch, seconds

import pmstore


def few_names(store: pmstore.Store) -> None:
    for i in range(10):
        store[f"name{i}"] = i


def many_names(store: pmstore.Store) -> None:
    for i in range(200_000):
        store[f"name{i}"] = i
        if i % 20_000 == 0:
            store.commit()


def small_arrays(store: pmstore.Store) -> None:
    store["array"] = np.ones(1 << 17)


def large_arrays(store: pmstore.Store) -> None:
    for i in range(8):
        store[f"array{i}"] = np.ones(1 << 24)


def opening(path: Path) -> float:
    start = perf_counter()
    store = pmstore.open(path, "r+")
    taken = perf_counter() - start
    store.close()
    return taken


def full_log(path: Path) -> tuple[float, int]:
    """Seconds to recover, and the bytes in the log."""
    store = pmstore.open(path, "r+")
    array = store.create_array("logged", 1 << 17, "f8")
    store.commit()
    for _ in range(100):  # by then the log is as large as it gets
        array += 1
        store.commit()
    while store.stats().log_used < store.stats().log_size // 2:
        array += 1
        store.commit()
    used = store.stats().log_used
    store._drop(discard=True)
    return opening(path), used


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    print(f"{machine()}; {real_time()}\n")
    raw: dict[str, Any] = {}
    for medium, parent in (("memory", options.memory), ("file", options.disk)):
        medians = {}
        fills: list[Callable[[pmstore.Store], None]] = [few_names, many_names, small_arrays, large_arrays]
        with scratch(parent) as directory:
            for fill in fills:
                with pmstore.open(directory / fill.__name__, "x", media=medium) as store:
                    fill(store)
            times: dict[str, list[float]] = {fill.__name__: [] for fill in fills}
            for _ in range(int(60 * options.scale) + 3):  # in turn, so that all see the same machine
                for name, kept in times.items():
                    kept.append(opening(directory / name))
            for name, kept in times.items():
                medians[name] = statistics.median(kept[3:])
                print(f"{medium:8}{name:16}{seconds(medians[name]):>12}")
            recovery, log_bytes = full_log(directory / "few_names")
            print(f"{medium:8}{'after a crash':16}{seconds(recovery):>12}  ({log_bytes >> 20} MiB in the log)")
        print(
            f"{'':8}200,000 names / ten {medians['many_names'] / medians['few_names']:.2f}, "
            f"1 GiB / 1 MiB {medians['large_arrays'] / medians['small_arrays']:.2f}\n"
        )
        raw[medium] = {"open": times, "recovery": recovery, "log bytes": log_bytes}
    save(options.raw, "open", raw)


if __name__ == "__main__":
    main()
