"""Frames and tables of a million rows: to store and commit them, against copies of their columns in memory; to read
them. And the time of `import pmstore` against that of `import numpy`.

    copy    np.array of each column, as a new array; of text, the bytes of it
    store   store["frame"] = frame, and a commit
    read    store["frame"], which is not looked into

Each is timed in turn, several times; the median counts. Packages that are not installed are left out. The imports are
processor time of new processes, the least of several.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import pmstore

COLUMNS = 10


def frames(rows: int) -> Iterator[tuple[str, Any, list[np.ndarray[Any, Any]]]]:
    """The name of a frame, the frame, and its columns as arrays."""
    rng = np.random.default_rng(0)
    numbers = {f"c{i}": rng.random(rows) for i in range(COLUMNS)}
    texts = [f"text number {i}" for i in range(rows)]
    text = [np.frombuffer("".join(texts).encode(), np.uint8)]
    for module, make in (("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "table")):
        try:
            kind = getattr(__import__(module), make)
        except ImportError:
            print(f"{module} is not installed")
            continue
        yield f"{module}, {COLUMNS} columns of numbers", kind(numbers), list(numbers.values())
        yield f"{module}, a column of text", kind({"text": texts}), text


def median(action: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        start = perf_counter()
        action()
        found.append(perf_counter() - start)
    return statistics.median(found) * 1e3


def imported(what: str, times: int) -> float:
    """Milliseconds of processor time."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", what], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--dir", default="/dev/shm", help="where the store is")
    options = parser.parse_args()
    print("| frame | copy, ms | store, ms | store / copy | read, ms |\n|---|---|---|---|---|")
    for name, frame, columns in frames(options.rows):
        with (
            tempfile.TemporaryDirectory(dir=options.dir) as directory,
            pmstore.open(Path(directory) / "frames.pm") as store,
        ):

            def put(store: pmstore.Store = store, frame: Any = frame) -> None:
                store["frame"] = frame
                store.commit()

            put()
            gc.collect()
            copies = median(lambda columns=columns: [np.array(one) for one in columns], options.times)  # type: ignore[misc]
            stored = median(put, options.times)
            read = median(lambda store=store: store["frame"], options.times)  # type: ignore[misc]
        print(f"| {name} | {copies:.1f} | {stored:.1f} | {stored / copies:.2f} | {read:.2f} |")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    each = [imported(f"import {module}", 2 * options.times) for module in ("numpy", "pmstore")]
    print(f"import numpy {each[0]:.0f} ms, import pmstore {each[1]:.0f} ms: {each[1] / each[0]:.2f}")


if __name__ == "__main__":
    main()
