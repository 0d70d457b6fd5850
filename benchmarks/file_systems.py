"""Commits on file systems with a journal: the workloads of bench_commit.py and bench_latency.py, on loop devices.

    sudo python benchmarks/file_systems.py            the table; every measurement in build/bench/results
    sudo python benchmarks/file_systems.py --docs     and puts both into benchmarks/

Each file system is made in a file of the disk, mounted, measured and deleted. A loop device adds costs of its own, to
the baseline as much as to pmstore: so the baseline is on the same file system, in the same run. The disk itself is
measured as well.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import BUILD, HERE, percentile, ratio, seconds
from report import fill, table, times_baseline

MKFS_EXT4 = "mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0,nodiscard"
SYSTEMS = {
    "the disk itself": None,
    "ext4 without a journal, loop": (f"{MKFS_EXT4} -O ^has_journal", "ext4", ""),
    "ext4 data=ordered, loop": (MKFS_EXT4, "ext4", "data=ordered"),
    "xfs, loop": ("mkfs.xfs -q -f -K", "xfs", ""),
    "btrfs, loop": ("mkfs.btrfs -q -f -K", "btrfs", ""),
    "overlayfs on ext4, loop": (MKFS_EXT4, "ext4", "data=ordered"),
}
"""Name -> command that makes it, type, options of mount. Those whose command is not installed are left out."""
SIZE = 2 << 30
WORKLOADS = ["8 B", "62,720 B", "1 MiB", "49 MB", "1 row", "1% of rows"]
WHO = ("pmstore", "pmstore, with")
KEPT = "file-systems"  # the raw results, and the marked place in benchmarks/README.md


@contextlib.contextmanager
def laid_over(point: Path, wanted: bool) -> Iterator[Path]:
    """An overlayfs with its layers on the file system there, if wanted; otherwise the place itself."""
    if not wanted:
        yield point
        return
    parts = [point / part for part in ("lower", "upper", "work")]
    for part in parts:
        part.mkdir()
    place = point.parent / "overlay"
    place.mkdir()
    layers = ",".join(f"{name}={part}" for name, part in zip(("lowerdir", "upperdir", "workdir"), parts, strict=True))
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextlib.contextmanager
def mounted(disk: Path, how: tuple[str, str, str] | None) -> Iterator[Path]:
    """A directory on a new file system, which is gone afterwards; on the disk itself if there is no `how`."""
    disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pmstore-bench-", dir=disk) as made:
        point = Path(made) / "mounted"
        point.mkdir()
        if how is None:
            yield point
            return
        command, kind, options = how
        image = Path(made) / "image"
        with open(image, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)
            for at in range(0, SIZE, 1 << 24):  # blocks that were never written would be converted while it is measured
                os.pwrite(file.fileno(), bytes(1 << 24), at)
            os.fsync(file.fileno())
        subprocess.run([*command.split(), str(image)], check=True)
        losetup = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
        device = subprocess.run(losetup, check=True, capture_output=True, text=True).stdout.strip()
        try:
            subprocess.run(["mount", "-t", kind, *(["-o", options] if options else []), device, str(point)], check=True)
            try:
                yield point
            finally:
                subprocess.run(["umount", str(point)], check=True)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Name of a file system -> the raw results of both benchmarks."""
    found: dict[str, Any] = {}
    for name, how in SYSTEMS.items():
        if how is not None and shutil.which(how[0].split()[0]) is None:
            print(f"no {how[0].split()[0]}: {name} is left out")
            continue
        found[name] = {}
        for benchmark in ("commit", "latency"):
            print(f"\n== {name}: {benchmark} ==\n", flush=True)
            with mounted(options.disk, how) as made, laid_over(made, name.startswith("overlayfs")) as point:
                raw = made.parent / "raw.json"
                command = [sys.executable, str(HERE / f"bench_{benchmark}.py"), "--media", "disk", "--disk", str(point)]
                command += ["--raw", str(raw), *(["--quick"] if options.quick else [])]
                if benchmark == "commit":
                    command += ["--only", "pmstore", "--workloads", *WORKLOADS]
                else:
                    command += ["--scale", "0.1"]
                subprocess.run(command, check=True)
                found[name][benchmark] = json.loads(raw.read_text())
    return found


def tables(found: dict[str, Any]) -> str:
    """Medians of commits with their baselines, and the long ones."""
    rows = []
    for workload in WORKLOADS:
        who = WHO[0] if " B" in workload or "MiB" in workload or "MB" in workload else WHO[1]
        row = [workload]
        for raw in found.values():
            cells = [c for c in raw["commit"]["cells"] if c["workload"] == workload and c["who"] == who]
            row += [_cell(cells[0]) if cells else ""]
        rows.append(row)
    text = table(["median (baseline; × baseline)", *found], rows)
    rows = []
    for workload in [c["workload"] for c in next(iter(found.values()))["latency"]["cells"]]:
        row = [workload]
        for raw in found.values():
            cell = next(c for c in raw["latency"]["cells"] if c["workload"] == workload)
            high = [seconds(percentile(cell[which], 0.99)) for which in ("times", "baselines")]
            row.append(f"{high[0]} ({high[1]})")
        rows.append(row)
    first = next(iter(found.values()))["commit"]
    note = f"{first['machine']}, {first['priority']}."
    if float(first["machine"].rpartition("load ")[2]) > 2:
        note += (
            " Other programs had the processors, too: times of milliseconds are the scheduler's, and not for quoting."
        )
    return f"{text}\n\n{table(['p99 (of the baseline)', *found], rows)}\n\n{textwrap.fill(note, 120)}"


def _cell(cell: dict[str, Any]) -> str:
    middle, baseline = (seconds(statistics.median(cell[which])) for which in ("times", "baselines"))
    return f"{middle} ({baseline}; {times_baseline(ratio(cell['times'], cell['baselines']))})"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=HERE.parent / "build", help="default: build/")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: to see that it runs")
    parser.add_argument("--docs", action="store_true", help="fill benchmarks/README.md, keep the raw results")
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("it needs root, for mounts and loop devices")
    found = measure(options)
    results = BUILD / "results"
    results.mkdir(parents=True, exist_ok=True)
    data = json.dumps(found, separators=(",", ":"))
    (results / f"{KEPT}.json").write_text(data + "\n")
    print(f"\n{tables(found)}\n\n{results / f'{KEPT}.json'}")
    if options.docs:
        if options.quick:
            raise SystemExit("these are figures of the quick form: not for the documents")
        (HERE / "raw" / f"{KEPT}.json.gz").write_bytes(gzip.compress(data.encode(), mtime=0))
        document = HERE / "README.md"
        document.write_text(fill(document.read_text(), {KEPT: tables(found)}))


if __name__ == "__main__":
    main()
