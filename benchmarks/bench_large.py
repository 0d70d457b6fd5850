"""Large things: arrays of gigabytes, stores larger than memory, a million names, ten thousand arrays alive, growth and
computing beside commits.

Each is measured beside its physical baseline. On memory that is one non-temporal copy of the same bytes into a mapped
file, once into a file that was written before and once into one whose pages are only allocated. On a disk it is a
pwrite of the same bytes into an allocated file that was written before, and fdatasync.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _common import MemoryBaseline, machine, parser, real_time, save, scratch, seconds

import pmstore

MIB, GIB = 1 << 20, 1 << 30
PARTS = ("store", "limited", "names", "alive", "growth", "beside")


def timed(what: Callable[[], Any]) -> float:
    start = perf_counter()
    what()
    return perf_counter() - start


def private() -> int:
    """Bytes of private memory of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.partition("Anonymous:")[2].split()[0]) << 10


class Peak:
    """Bytes by which the resident set, which shows the store's own pages too, rose at most since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @staticmethod
    def _read(name: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) << 10

    def rise(self) -> int:
        return self._read("VmHWM") - self._before


def write_file(path: Path, source: np.ndarray[Any, Any]) -> float:
    """pwrite and fdatasync of all of it; the file stays."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    bytes_ = memoryview(source).cast("B")

    def write() -> None:
        for at in range(0, len(bytes_), 16 * MIB):
            os.pwrite(fd, bytes_[at : at + 16 * MIB], at)
        os.fdatasync(fd)

    try:
        return timed(write)
    finally:
        os.close(fd)


def baselines(medium: str, directory: Path, source: np.ndarray[Any, Any]) -> dict[str, float]:
    """Baselines into space that was written before, and into space that is new."""
    path = directory / "baseline"
    if medium == "file":
        new = write_file(path, source)
        again = min(write_file(path, source) for _ in range(2))
    else:
        start = perf_counter()
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, source.nbytes + 64)
        allocated = perf_counter() - start
        os.close(fd)
        path.unlink()
        baseline = MemoryBaseline(directory, source.nbytes)  # allocates too, and touches
        again = min(baseline(source) for _ in range(3))
        del baseline
        path.unlink()
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, source.nbytes)
        os.close(fd)
        first = np.memmap(path, np.uint8, "r+")
        new = allocated + timed(lambda: np.copyto(first, source.view(np.uint8)))
        del first
    path.unlink()
    return {"baseline, written before": again, "baseline, new": new}


def store(medium: str, directory: Path, size: int) -> dict[str, float]:
    """`store["X"] = array` and its commit: new, again (nobody holds it), and a fill."""
    source = np.arange(size // 8, dtype="f8")
    out = baselines(medium, directory, source)
    with pmstore.open(directory / "store.pm", "w", media=medium) as s:
        s["one"] = 1
        s.commit()

        def put(name: str, make: Callable[[], Any]) -> None:
            before, peak = private(), Peak()
            out[f"{name}: array"] = timed(make)
            out[f"{name}: commit"] = timed(s.commit)
            out[f"{name}: private MiB"] = (private() - before) / MIB
            out[f"{name}: resident MiB"] = peak.rise() / MIB

        put("new", lambda: s.__setitem__("X", source))
        put("again, new space", lambda: s.__setitem__("X", source))
        put("again", lambda: s.__setitem__("X", source))
        del s["X"]
        s.commit()
        put("zeros", lambda: s.create_array("X", size // 8))
    return out


LIMITED = """
import sys, time
from pathlib import Path
import numpy as np
import pmstore
group, path, size, what = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
(group / "cgroup.procs").write_text("0")
store = pmstore.open(path, "w", media="file")
if what == "half":
    array = store.create_array("x", size * 6 // 10 // 8)
    store.commit()
    start = time.perf_counter()
    array += 1
    store.commit()
    print(time.perf_counter() - start, array.nbytes)
else:
    for i in range(12):
        store.create_array(f"x{i}", size // 4 // 8)
        store.commit()
    start = time.perf_counter()
    for i in range(12):
        array = store[f"x{i}"]
        array += 1
        store.commit()
        store.release(f"x{i}")
    print(time.perf_counter() - start, 12 * array.nbytes)
store.close()
"""


def limited(directory: Path, size: int) -> dict[str, float]:
    """Measure in a memory cgroup: a store of three times its size is read, one array of 0.6 of it changed whole."""
    out: dict[str, float] = {"limit, MiB": size / MIB}
    for root, limit, peak in (
        ("/sys/fs/cgroup", "memory.max", "memory.peak"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ):
        group = Path(root) / f"pmstore-bench-{os.getpid()}"
        for what in ("half", "walk"):
            with contextlib.suppress(OSError):
                group.mkdir()
                try:
                    (group / limit).write_text(str(size))
                    run = subprocess.run(
                        [sys.executable, "-c", LIMITED, str(group), str(directory / what), str(size), what],
                        capture_output=True,
                        text=True,
                        env=dict(os.environ, PYTHONPATH=str(Path(pmstore.__file__).parent.parent)),
                    )
                    taken, count = map(float, run.stdout.split()) if run.returncode == 0 else (float("nan"), size)
                    out[f"{what}: changed and committed"] = taken
                    out[f"{what}: MB/s"] = count / taken / 1e6
                    out[f"{what}: peak MiB"] = int((group / peak).read_text()) / MIB
                finally:
                    group.rmdir()
    out["baseline: MB/s"] = size / min(write_file(directory / "baseline", np.ones(size // 8)) for _ in range(3)) / 1e6
    return out


def names(medium: str, directory: Path, count: int) -> dict[str, float]:
    """Many small values, each with a name of its own."""
    out: dict[str, float] = {"names": count}
    path = directory / "store.pm"
    s = pmstore.open(path, "w", media=medium)
    before = private()

    def fill() -> None:
        for start in range(0, count, 10_000):
            with s.transaction():
                for i in range(start, min(start + 10_000, count)):
                    s[f"group {i % 1000}/{i}"] = i

    out["setting one"] = timed(fill) / count
    out["private MiB"] = (private() - before) / MIB
    out["file MiB"] = s.stats().file_size / MIB
    some = [f"group {i % 1000}/{i}" for i in range(0, count, max(1, count // 10_000))]
    out["getting one"] = timed(lambda: [s[name] for name in some]) / len(some)
    out["changing one, commit"] = median(
        timed(lambda n=name: (s.__setitem__(n, 1), s.commit())) for name in some[:2000]
    )
    out["listing one"] = timed(lambda: sum(1 for _ in s)) / count
    out["close"] = timed(s.close)
    start = perf_counter()
    s = pmstore.open(path)
    out["open"] = perf_counter() - start
    s.close()
    return out


def alive(medium: str, directory: Path, count: int) -> dict[str, float]:
    """Many arrays alive, one changed: each commit compares all. The baseline reads as many bytes once."""
    out: dict[str, float] = {}
    for size in (64, 1024, 8192):
        with pmstore.open(directory / f"{size}.pm", "w", media=medium) as s:
            arrays = [s.create_array(f"x{i}", size // 8) for i in range(count)]
            s.commit()
            core = s._catalog.core
            taken = []
            for i in range(60):
                arrays[i * 7919 % count] += 1
                taken.append(timed(core.commit))
            one = np.ones(size // 8 * count)
            out[f"{size} B: commit"] = median(taken)
            out[f"{size} B: baseline"] = median(timed(one.sum) for _ in range(60))
            del arrays
    return out


def growth(medium: str, directory: Path, size: int) -> dict[str, float]:
    """The file grows by new arrays while another thread writes to one: the speed of growth, and of the writer."""
    with pmstore.open(directory / "store.pm", "w", media=medium) as s:
        array = s.create_array("used", MIB // 8)
        s.commit()
        rounds, speed, stop = 0, 0.0, threading.Event()

        def write() -> None:
            nonlocal rounds, speed
            start = perf_counter()
            while not stop.is_set():
                array[:] = rounds = rounds + 1
            speed = rounds * MIB / (perf_counter() - start) / 1e6

        thread = threading.Thread(target=write)
        alone = timed(lambda: [s.create_array(f"alone {i}", 4 * MIB // 8) for i in range(size // 4 // MIB)])
        s.commit()
        thread.start()
        both = timed(lambda: [s.create_array(f"both {i}", 4 * MIB // 8) for i in range(size // 4 // MIB)])
        stop.set()
        thread.join()
        s.commit()
        assert (array == rounds).all()
        return {"growing": alone, "growing, another thread writes": both, "its MB/s": speed}


def beside(medium: str, directory: Path, size: int) -> dict[str, float]:
    """The speed of a thread that computes in Python while another thread commits."""
    with pmstore.open(directory / "store.pm", "w", media=medium) as s:
        array = s.create_array("x", size // 8)
        s.commit()
        steps, stop = 0, threading.Event()

        def compute() -> None:
            nonlocal steps
            while not stop.is_set():
                steps += 1

        thread = threading.Thread(target=compute)
        thread.start()
        start, before = perf_counter(), steps
        threading.Event().wait(0.5)
        alone = (steps - before) / (perf_counter() - start)
        taken, done = 0.0, 0
        for _ in range(20):
            array += 1
            before, start = steps, perf_counter()
            s.commit()
            taken += perf_counter() - start
            done += steps - before
        stop.set()
        thread.join()
        return {"commit": taken / 20, "share of its speed": done / taken / alone}


def show(title: str, result: dict[str, float]) -> None:
    print(title)
    for name, value in result.items():
        plain = any(unit in name for unit in ("MiB", "MB/s", "names", "share"))
        print(f"  {name:34}{f'{value:,.2f}' if plain else seconds(value):>14}")
    print(flush=True)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--gib", type=float, default=4.0, help="the largest array (default: %(default)s)")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    chosen = options.parse_args()
    size, raw = int(chosen.gib * GIB) // MIB * MIB, {}
    print(f"{machine()}; {real_time()}\n")
    for medium, parent in (("memory", chosen.memory), ("file", chosen.disk)):
        runs: dict[str, tuple[str, Callable[[Path], dict[str, float]]]] = {
            "store": (f"one array of {chosen.gib:g} GiB", lambda d, m=medium: store(m, d, size)),
            "limited": ("a store three times its cgroup", lambda d: limited(d, max(size // 16, 128 * MIB))),
            "names": ("a million names", lambda d, m=medium: names(m, d, int(1e6 * chosen.scale))),
            "alive": (
                "ten thousand arrays alive, one changed",
                lambda d, m=medium: alive(m, d, int(1e4 * chosen.scale)),
            ),
            "growth": ("growth while an array is in use", lambda d, m=medium: growth(m, d, size // 8)),
            "beside": ("a thread beside commits of 64 MiB", lambda d, m=medium: beside(m, d, 64 * MIB)),
        }
        for part in chosen.parts:
            if part == "limited" and medium == "memory":
                continue  # a tmpfs is the memory
            title, run = runs[part]
            with scratch(parent) as directory:
                raw[f"{medium}, {title}"] = result = run(directory)
            show(f"{medium}: {title}", result)
    save(chosen.raw, "large", raw)


if __name__ == "__main__":
    main()
