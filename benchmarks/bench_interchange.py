"""Export and import of other formats, compared with the formats' own libraries in the same run.

    export   pmstore.export of a store that was just opened; the library writes the live arrays of a store that was just
             opened, and the file is synced. Both read the store's file for the first time
    command  the same of snapshots: the time has the opening with mode "r", and reading is verified
    memory   the time of "export", compared with the library's for arrays that are in memory already
    import   pmstore.load_into a new store, and commit; the library reads the same file, and the arrays are assigned to
             names of a new store and committed. "read" is the library's reading alone, into memory

Each ratio is the library's time divided by ours, both taken in turn: speed in units of the library's speed. Needs h5py,
zarr and safetensors; formats without their package are left out.

    python benchmarks/bench_interchange.py --quick
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import pmstore

Arrays = dict[str, np.ndarray[Any, Any]]

HERE = Path(__file__).resolve().parent


def arrays_of(megabytes: int, count: int) -> Arrays:
    """Random numbers with 20 bits each, so that codecs have something to do."""
    rng = np.random.default_rng(0)
    rows = megabytes * 1_000_000 // count // 8 // 100
    return {f"g{i % 3}/x{i}": rng.integers(0, 1 << 20, (rows, 100)).astype("f8") for i in range(count)}


def hdf5_write(arrays: Arrays, path: str) -> None:
    with importlib.import_module("h5py").File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def hdf5_read(path: str) -> Arrays:
    with importlib.import_module("h5py").File(path, "r") as file:
        return {f"{group}/{name}": file[group][name][...] for group in file if group[0] != "_" for name in file[group]}


def npz_write(arrays: Arrays, path: str) -> None:
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def npz_read(path: str) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files if not name.endswith(".json")}


def safetensors_write(arrays: Arrays, path: str) -> None:
    importlib.import_module("safetensors.numpy").save_file(arrays, path)


def safetensors_read(path: str) -> Arrays:
    found: Arrays = importlib.import_module("safetensors.numpy").load_file(path)
    return found


def zarr_write(arrays: Arrays, path: str) -> None:
    root = importlib.import_module("zarr").create_group(path)
    for name, array in arrays.items():
        root.create_array(name, data=array)


def zarr_read(path: str) -> Arrays:
    root = importlib.import_module("zarr").open_group(path, mode="r")
    return {name: member[...] for name, member in root.members(max_depth=None) if hasattr(member, "shape")}


FORMATS: dict[str, tuple[str, Callable[[Arrays, str], None], Callable[[str], Arrays]]] = {
    "hdf5": ("h5py", hdf5_write, hdf5_read),
    "npz": ("numpy", npz_write, npz_read),
    "safetensors": ("safetensors", safetensors_write, safetensors_read),
    "zarr": ("zarr", zarr_write, zarr_read),
}


def sync(path: str) -> None:
    for folder, _, files in os.walk(path) if os.path.isdir(path) else [(os.path.dirname(path), [], [path])]:
        for name in files:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def delete(path: str) -> None:
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path) if os.path.exists(path) else None


def seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def measured(folder: Path, form: str, arrays: Arrays, repetitions: int) -> dict[str, list[float]]:
    _, write, read = FORMATS[form]
    source, ours, theirs, new = (
        str(folder / name) for name in ("source.pm", f"ours.{form}", f"theirs.{form}", "new.pm")
    )
    with pmstore.open(source, "w") as store:
        store.update(arrays)
    ratios: dict[str, list[float]] = {"export": [], "command": [], "memory": [], "import": [], "read": []}

    def by_us(mode: Any) -> list[float]:
        with pmstore.open(source, mode) as store:
            return [seconds(lambda: pmstore.export(store, ours, form))]

    def by_library(mode: Any) -> list[float]:
        with pmstore.open(source, mode) as store:
            return [seconds(lambda: written(dict(store)))]

    def written(arrays: Arrays) -> None:
        write(arrays, theirs)
        sync(theirs)

    def anew(call: Callable[[], Any]) -> Any:
        delete(ours)
        delete(theirs)
        return call()

    def load() -> None:
        with pmstore.open(new, "w") as store:
            pmstore.load_into(store, ours, form)

    def load_by_library() -> None:
        with pmstore.open(new, "w") as store:
            store.update(read(ours))

    for _ in range(repetitions + 1):
        exported = anew(lambda: by_us("a"))[0]
        ratios["export"].append(anew(lambda: by_library("a"))[0] / exported)
        ratios["memory"].append(anew(lambda: seconds(lambda: written(arrays))) / exported)
        slow = anew(lambda: seconds(lambda: by_library("r")))
        ratios["command"].append(slow / anew(lambda: seconds(lambda: by_us("r"))))
        times = []
        for call in (load, load_by_library):
            delete(new)
            times.append(seconds(call))
        ratios["import"].append(times[1] / times[0])
        ratios["read"].append(seconds(lambda: read(ours)) / times[0])
    delete(ours)
    delete(theirs)
    return {what: found[1:] for what, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a directory on tmpfs")
    parser.add_argument("--disk", type=Path, default=HERE.parent / "build", help="a directory on a disk")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller arrays")
    chosen = parser.parse_args()
    cases = (
        {"1 array of 20 MB": (20, 1)} if chosen.quick else {"4 arrays of 50 MB": (200, 4), "200 of 100 kB": (20, 200)}
    )
    print("| format | medium | arrays | export | command | memory | import | read |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for form, (package, *_) in FORMATS.items():
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            print(f"| {form} | no {package} | | | | | | |")
            continue
        for medium, parent in (("tmpfs", chosen.memory), ("disk", chosen.disk)):
            for case, size in cases.items():
                with tempfile.TemporaryDirectory(dir=parent) as folder:
                    found = measured(Path(folder), form, arrays_of(*size), 3 if chosen.quick else 7)
                cells = [f"{statistics.median(one):.2f} ({min(one):.2f}–{max(one):.2f})" for one in found.values()]
                print(f"| {form} | {medium} | {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
