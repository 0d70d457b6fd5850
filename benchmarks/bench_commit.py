"""What a commit costs when everything changed, beside the floor, and what `with store.transaction()` adds."""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _common import DiskFloor, MemoryFloor, machine, paired, parser, ratio, real_time, save, scratch, seconds

import pmstore

SIZES = {"8 B": 8, "4 KiB": 4096, "62,720 B": 62_720, "1 MiB": 1 << 20, "49 MB": 49_000_000}


def commits(directory: Path, medium: str, size: int, repetitions: int) -> dict[str, Any]:
    floor = (MemoryFloor if medium == "memory" else DiskFloor)(directory, size)
    with pmstore.open(directory / "store.pm", "w", media=medium) as store:
        array = store.create_array("array", size // 8, "f8")
        store.commit()
        core = store._catalog.core
        source = np.zeros(size // 8 + 8)

        def baseline() -> float:
            source.__iadd__(1.0)
            return floor(source[: size // 8] if medium == "file" else source)

        def commit() -> float:
            array.__iadd__(1.0)
            start = perf_counter()
            core.commit()
            return perf_counter() - start

        def transaction() -> float:
            start = perf_counter()
            with store.transaction():
                array.__iadd__(1.0)
            return perf_counter() - start

        def by_hand() -> float:
            start = perf_counter()
            array.__iadd__(1.0)
            core.commit()
            return perf_counter() - start

        before = store.stats()
        measured, floors = paired(commit, baseline, repetitions)
        after = store.stats()
        whole, bare = paired(transaction, by_hand, repetitions)
        return {
            "commit": measured,
            "floor": floors,
            "transaction": whole,
            "bare": bare,
            "syncs per commit": (after.syncs - before.syncs) / repetitions,
            "checkpoints": after.checkpoints - before.checkpoints,
        }


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    print(f"{machine()}; {real_time()}\n")
    raw: dict[str, Any] = {}
    for medium, parent in (("memory", options.memory), ("file", options.disk)):
        heads = ("commit", "floor", "ratio", "p99", "floor p99", "with adds", "syncs")
        print(f"{medium:8}" + "".join(f"{head:>{width}}" for head, width in zip(heads, (12, 12, 8, 12, 12, 12, 8))))
        for label, size in SIZES.items():
            repetitions = int(options.scale * max(12, min(3000 if medium == "memory" else 300, 1.2e9 / size)))
            with scratch(parent) as directory:
                result = commits(directory, medium, size, repetitions)
            raw[f"{medium}, {label}"] = result
            c, f = result["commit"], result["floor"]
            added = statistics.median(result["transaction"]) - statistics.median(result["bare"])
            print(
                f"{label:8}{seconds(statistics.median(c)):>12}{seconds(statistics.median(f)):>12}{ratio(c, f):8.2f}"
                f"{seconds(sorted(c)[int(len(c) * 0.99)]):>12}{seconds(sorted(f)[int(len(f) * 0.99)]):>12}"
                f"{added * 1e6:9.2f} µs{result['syncs per commit']:8.2f}"
            )
        print()
    save(options.raw, "commit", raw)


if __name__ == "__main__":
    main()
