"""What the benchmarks share: baselines, paired repetitions, the machine's description, raw results."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import json
import math
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import pmstore

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
CSRC = HERE.parent / "csrc"

MEDIA = {"memory": "memory", "disk": "file"}  # as the reports call them, and as pmstore.open does
# tmpfs stands for persistent memory. Where it is measured as it is, the tables say "domain process".
os.environ.setdefault("PMSTORE_DOMAIN", "memory")
SIZES = {"8 B": 8, "4 KiB": 4096, "62,720 B": 62_720, "1 MiB": 1 << 20, "49 MB": 49_000_000}
ROWS, COLUMNS = 8192, 784
ROW_BYTES = COLUMNS * 8
CHANGED = {"1 row": 1, "1% of rows": ROWS // 100 + 1, "10% of rows": ROWS // 10}  # of ROWS × COLUMNS float64, 51 MB

Array = np.ndarray[Any, Any]


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on tmpfs (default: %(default)s)")
    p.add_argument("--disk", type=Path, default=HERE.parent / "build", help="a directory on a disk (default: build/)")
    p.add_argument("--raw", type=Path, help="write every single measurement to this JSON file")
    p.add_argument("--scale", type=float, default=1.0, help="multiplies the number of repetitions")
    p.add_argument("--quick", action="store_true", help="fewer repetitions, smaller stores: to see that it runs")
    p.add_argument("--media", nargs="+", choices=tuple(MEDIA), default=list(MEDIA), help="default: both")
    return p


def parent(options: argparse.Namespace, medium: str) -> Path:
    """The directory for a medium."""
    return Path(options.memory if medium == "memory" else options.disk)


def real_time() -> str:
    """Asks for real-time priority: at normal priority a loaded machine shows its scheduler, not the medium."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except (AttributeError, OSError):
        return "normal priority"
    return "real-time priority"


def machine() -> str:
    """One line: processor, kernel, versions, load."""
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


def file_system(directory: Path) -> str:
    """The type of file system that a directory is on."""
    best, kind = -1, "unknown"
    with contextlib.suppress(OSError):
        where = str(directory.resolve())
        for line in Path("/proc/self/mounts").read_text().splitlines():
            mounted, this = line.split()[1:3]
            if (where + "/").startswith(mounted.rstrip("/") + "/") and len(mounted) >= best:
                best, kind = len(mounted), this
    return kind


def versions() -> dict[str, str]:
    """The installed versions of all libraries that are measured."""
    found = {}
    for name in ("pmstore", "numpy", "lmdb", "ZODB", "zarr", "h5py", "safetensors", "joblib", "scikit-learn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new directory inside, removed afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="pmstore-bench-", dir=directory))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


# ---- C


def compiled(name: str, sources: list[Path], *flags: str) -> Path:
    """The library or program made of these C sources, in build/bench; compiled again when a source has changed."""
    target = BUILD / name
    known = [*sources, HERE / "baseline.h", CSRC / "base" / "hash.h"]
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in known):
        BUILD.mkdir(parents=True, exist_ok=True)
        # Its fused form is the core's own business: without it, the harness copies and hashes one after the other.
        fused = ["-DHASH_COPIES"] if "pm_hash64_copy_page" in (CSRC / "base" / "hash.h").read_text() else []
        made = target.with_suffix(f".{os.getpid()}")
        command = ["cc", "-std=gnu11", "-O3", *fused, f"-I{CSRC}", *map(str, sources), "-o", str(made), *flags]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)
    return target


class BaselineLibrary:
    """The functions of baseline.c. They give seconds."""

    def __init__(self) -> None:
        library = ctypes.CDLL(
            str(compiled("baseline.so", [HERE / "baseline.c", CSRC / "base" / "hash.c"], "-shared", "-fPIC")),
            use_errno=True,
        )
        pointer, size, fd = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, arguments in {
            "baseline_memory": (pointer, pointer, size),
            "baseline_memory_rows": (pointer, pointer, size, pointer, size),
            "baseline_disk": (fd, pointer, size, pointer),
            "flush_lines": (pointer, size),
            "part_fence": (pointer, pointer, size),
            "part_stream": (pointer, pointer, size),
            "part_hash_copy": (pointer, pointer, size),
            "part_image": (pointer, pointer, size, fd),
        }.items():
            function = getattr(library, name)
            function.restype, function.argtypes = ctypes.c_double, arguments
            setattr(self, name, function)

    baseline_memory: Callable[..., float]
    baseline_memory_rows: Callable[..., float]
    baseline_disk: Callable[..., float]
    flush_lines: Callable[..., float]
    part_fence: Callable[..., float]
    part_stream: Callable[..., float]
    part_hash_copy: Callable[..., float]
    part_image: Callable[..., float]


_library: BaselineLibrary | None = None


def library() -> BaselineLibrary:
    """baseline.c, compiled and loaded once."""
    global _library
    _library = _library or BaselineLibrary()
    return _library


def padded(count: int) -> Array:
    """float64 zeros, with readable room behind them: what is streamed is whole cache lines."""
    return np.zeros(count + 8)[:count]


class MemoryBaseline:
    """A non-temporal copy of the same bytes into a mapped, touched file, and a fence."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self._library = library()
        fd = os.open(directory / "baseline", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, size + 64)
        self.map = np.frombuffer(mmap.mmap(fd, size + 64), np.uint8)
        os.close(fd)
        self.map[:] = 1

    def __call__(self, source: Array) -> float:
        return self._library.baseline_memory(self.map.ctypes.data, source.ctypes.data, source.nbytes)

    def rows(self, rows: Array, values: Array) -> float:
        """The same, row by row, with one fence."""
        return self._library.baseline_memory_rows(
            self.map.ctypes.data, values.ctypes.data, values.shape[1] * 8, rows.ctypes.data, len(rows)
        )


class DiskBaseline:
    """One pwrite and one fdatasync of the same bytes, into an allocated, already written file."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self._library = library()
        self.fd = os.open(directory / "baseline", os.O_RDWR | os.O_CREAT)
        for at in range(0, size, 1 << 24):
            os.write(self.fd, bytes(min(1 << 24, size - at)))
        os.fsync(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)

    def __call__(self, source: Array, writing: ctypes.c_double | None = None) -> float:
        """writing: gets the seconds that the pwrite took."""
        pointer = None if writing is None else ctypes.addressof(writing)
        taken = self._library.baseline_disk(self.fd, source.ctypes.data, source.nbytes, pointer)
        if taken < 0:
            raise OSError(ctypes.get_errno(), "the baseline's write failed")
        return taken

    def rows(self, rows: Array, values: Array) -> float:
        """The same number of bytes, in one piece."""
        return self(values)


def baseline_of(medium: str, directory: Path, size: int) -> MemoryBaseline | DiskBaseline:
    return MemoryBaseline(directory, size) if medium == "memory" else DiskBaseline(directory, size)


# ---- measuring


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Switch the garbage collector off inside the block, as timeit does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def paired(
    what: Callable[[], float],
    baseline: Callable[[], float],
    *,
    seconds: float,
    least: int = 5,
    most: int = 1000,
    warm_up: int = 3,
) -> tuple[list[float], list[float]]:
    """Seconds of the baseline and of the other function, which take turns after a warm-up."""
    with no_collection():
        for _ in range(warm_up):
            baseline(), what()
        both: list[tuple[float, float]] = []
        end = perf_counter() + seconds
        while len(both) < least or (len(both) < most and perf_counter() < end):
            both.append((baseline(), what()))
    return [w for _, w in both], [f for f, _ in both]


def ratio(what: list[float], baseline: list[float]) -> float:
    """The median of the paired ratios."""
    return statistics.median(w / f for w, f in zip(what, baseline))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share (0 to 1) of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}" if value * factor < 100 else f"{value * factor:,.0f} {unit}"
    return f"{value * 1e9:.0f} ns"


def save(path: Path | None, name: str, raw: dict[str, Any]) -> None:
    """Keep raw numbers, with the machine that they were measured on."""
    if path:
        known = {"benchmark": name, "machine": machine(), "versions": versions(), "seconds": "rounded to ns"}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded({**known, **raw}), separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value
