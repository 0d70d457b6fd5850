"""What the benchmarks share: the floor, paired repetitions, the machine's name, raw results."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pmstore

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on tmpfs (default: %(default)s)")
    p.add_argument("--disk", type=Path, default=HERE.parent / "build", help="a directory on a disk (default: build/)")
    p.add_argument("--raw", type=Path, help="write every single measurement to this JSON file")
    p.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions")
    return p


def real_time() -> str:
    """Asks for real-time priority: at normal priority a loaded machine shows its scheduler, not the medium."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except (AttributeError, OSError):
        return "normal priority"
    return "real-time priority"


def machine() -> str:
    model = "unknown CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, pmstore {pmstore.__version__}, load {os.getloadavg()[0]:.1f}"
    )


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new directory, removed afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="pmstore-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class MemoryFloor:
    """A non-temporal copy of the same bytes into a mapped, touched file, and a fence."""

    def __init__(self, directory: Path, size: int) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        library = BUILD / "floor.so"
        source = HERE / "floor.c"
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        self._seconds = ctypes.CDLL(str(library)).floor_seconds
        self._seconds.restype = ctypes.c_double
        self.size = size
        fd = os.open(directory / "floor", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, size + 64)
        self._map = np.frombuffer(mmap.mmap(fd, size + 64), np.uint8)
        os.close(fd)
        self._map[:] = 1

    def __call__(self, source: np.ndarray[Any, Any]) -> float:
        return float(
            self._seconds(
                ctypes.c_void_p(self._map.ctypes.data), ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(self.size)
            )
        )


class DiskFloor:
    """One pwrite and one fdatasync of the same bytes, into a preallocated, already written file."""

    def __init__(self, directory: Path, size: int) -> None:
        from time import perf_counter

        self._clock = perf_counter
        self._fd = os.open(directory / "floor", os.O_RDWR | os.O_CREAT)
        os.write(self._fd, bytes(size))
        os.fsync(self._fd)

    def __call__(self, source: np.ndarray[Any, Any]) -> float:
        view = source.view(np.uint8).reshape(-1).data
        start = self._clock()
        os.pwrite(self._fd, view, 0)
        os.fdatasync(self._fd)
        return self._clock() - start


def paired(what: Callable[[], float], floor: Callable[[], float], repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of both, taken in turn; the first tenth, at least three, warms up and is dropped."""
    both = [(floor(), what()) for _ in range(repetitions)]
    kept = both[max(3, repetitions // 10) :]
    return [w for _, w in kept], [f for f, _ in kept]


def ratio(what: list[float], floor: list[float]) -> float:
    """The median of the paired ratios."""
    return statistics.median(w / f for w, f in zip(what, floor))


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e9:.0f} ns"


def save(path: Path | None, name: str, raw: dict[str, Any]) -> None:
    """Keeps raw numbers beside the machine that gave them."""
    if path:
        known = {"benchmark": name, "machine": machine(), "seconds": "rounded to ns"}
        path.write_text(json.dumps(_rounded({**known, **raw}), separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value
