"""Saves two arrays in one of many ways, twice, and prints a line after each time: the program that crash tests record.

python save.py NAME DIRECTORY --prepare    saves version 0, which exists before the crashes
python save.py NAME DIRECTORY              saves versions 1 and 2, and prints "saved 1" and "saved 2"

Each saver's `load` reads the version back, for check.py and survey.py: two arrays, which must be of one version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"a": 3000, "b": 700}  # of float64: neither ends with a sector or page

Save = Callable[[int], None]


def version(k: int) -> dict[str, np.ndarray]:
    """The arrays of version k. They compress badly, and contain no zeros."""
    noise = np.random.default_rng(0)
    return {name: 1000.0 * k + noise.uniform(1, 999, size) for name, size in SIZES.items()}


class WrongDataError(Exception):
    """The reader returned contents that were never saved, without an error."""


def one_version(arrays: Any) -> int:
    """The version of the arrays. Raises WrongDataError if they belong to none, or to several."""
    for k in range(3):
        if all(np.array_equal(arrays[name], array) for name, array in version(k).items()):
            return k
    raise WrongDataError("what is read is no version that was saved")


class Saver:
    """A way to save. `before` is called once per process, with the directory. It returns the function that saves a
    version."""

    def __init__(
        self, before: Callable[[Path], Save], load: Callable[[Path], int], *, threads: bool = False, apart: bool = False
    ) -> None:
        self.before = before
        self.load = load
        self.threads = threads  # it saves in several threads
        self.apart = apart  # damaged files may crash its reader


# ---- numpy, and the rename that makes it atomic


def np_save(directory: Path) -> Save:
    def save(k: int) -> None:
        for name, array in version(k).items():
            np.save(directory / f"{name}.npy", array)

    return save


def np_load(directory: Path) -> int:
    return one_version({name: np.load(directory / f"{name}.npy") for name in SIZES})


def np_savez(directory: Path) -> Save:
    return lambda k: np.savez(directory / "run.npz", **version(k))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def renamed(syncs: Iterable[str]) -> Callable[[Path], Save]:
    """np.savez under another name, then os.replace; with the requested syncs."""

    def before(directory: Path) -> Save:
        def save(k: int) -> None:
            np.savez(directory / "new.npz", **version(k))
            if "file" in syncs:
                sync(directory / "new.npz")
            os.replace(directory / "new.npz", directory / "run.npz")
            if "directory" in syncs:
                sync(directory)

        return save

    return before


def npz_load(directory: Path) -> int:
    with np.load(directory / "run.npz") as arrays:
        return one_version({name: arrays[name] for name in SIZES})


# ---- other formats for arrays


def joblib_dump(directory: Path) -> Save:
    import joblib

    return lambda k: joblib.dump(version(k), directory / "run.joblib") and None


def joblib_load(directory: Path) -> int:
    import joblib

    return one_version(joblib.load(directory / "run.joblib"))


def h5py_update(directory: Path) -> Save:
    import h5py

    def save(k: int) -> None:
        with h5py.File(directory / "run.h5", "a") as file:
            for name, array in version(k).items():
                if name in file:
                    file[name][...] = array
                else:
                    file[name] = array

    return save


def h5py_load(directory: Path) -> int:
    import h5py

    with h5py.File(directory / "run.h5", "r") as file:
        return one_version({name: file[name][...] for name in SIZES})


def zarr_update(directory: Path) -> Save:
    import zarr

    def save(k: int) -> None:
        group = zarr.open_group(directory / "run.zarr", mode="a")
        for name, array in version(k).items():
            if name in group:
                group[name][...] = array
            else:
                group.create_array(name, data=array)

    return save


def zarr_load(directory: Path) -> int:
    import zarr

    group = zarr.open_group(directory / "run.zarr", mode="r")
    return one_version({name: group[name][...] for name in SIZES})


def safetensors_save(directory: Path) -> Save:
    from safetensors.numpy import save_file

    return lambda k: save_file(version(k), directory / "run.safetensors")


def safetensors_load(directory: Path) -> int:
    from safetensors.numpy import load_file

    return one_version(load_file(directory / "run.safetensors"))


# ---- databases


def sqlite(journal: str, synchronous: str) -> Callable[[Path], Save]:
    def before(directory: Path) -> Save:
        import sqlite3

        connection = sqlite3.connect(directory / "run.db")
        connection.execute(f"pragma journal_mode = {journal}")
        connection.execute(f"pragma synchronous = {synchronous}")
        connection.execute("pragma wal_autocheckpoint = 12")  # pages: so that the crashes include those of a checkpoint
        if not connection.execute("select count(*) from sqlite_schema").fetchone()[0]:
            connection.execute("create table arrays (name text primary key, data blob)")

        def save(k: int) -> None:
            with connection:
                for name, array in version(k).items():
                    connection.execute("insert or replace into arrays values (?, ?)", (name, array.tobytes()))

        return save

    return before


def sqlite_load(directory: Path) -> int:
    import contextlib
    import sqlite3

    with contextlib.closing(sqlite3.connect(directory / "run.db")) as connection:
        problem = connection.execute("pragma integrity_check").fetchone()[0]
        if problem != "ok":
            raise ValueError(problem)
        rows = connection.execute("select name, data from arrays").fetchall()
    return one_version({name: np.frombuffer(data) for name, data in rows})


def lmdb_environment(directory: Path, **options: Any) -> Any:
    import lmdb

    return lmdb.open(str(directory / "run.lmdb"), map_size=1 << 18, **options)


def lmdb_put(**options: Any) -> Callable[[Path], Save]:
    def before(directory: Path) -> Save:
        environment = lmdb_environment(directory, **options)

        def save(k: int) -> None:
            with environment.begin(write=True) as transaction:
                for name, array in version(k).items():
                    transaction.put(name.encode(), array.tobytes())

        return save

    return before


def lmdb_load(directory: Path) -> int:
    environment = lmdb_environment(directory)
    try:
        with environment.begin() as transaction:
            found = {name: transaction.get(name.encode(), b"") for name in SIZES}
            return one_version({name: np.frombuffer(data) for name, data in found.items()})
    finally:
        environment.close()


def pmstore_commit(directory: Path) -> Save:
    import pmstore

    store = pmstore.open(directory / "run.pm", media="file")

    def save(k: int) -> None:
        with store.transaction():
            for name, array in version(k).items():
                store.require_array(name, array.shape, array.dtype)[...] = array

    return save


def pmstore_load(directory: Path) -> int:
    import pmstore

    with pmstore.open(directory / "run.pm", media="file") as store:
        problems = store.check()
        if problems:
            raise ValueError(str(problems[0]))
        return one_version(store)


SAVERS = {
    "np.save": Saver(np_save, np_load),
    "np.savez": Saver(np_savez, npz_load),
    "savez-rename": Saver(renamed([]), npz_load),
    "savez-fsync-rename": Saver(renamed(["file"]), npz_load),
    "savez-fsync-rename-fsync": Saver(renamed(["file", "directory"]), npz_load),
    "joblib.dump": Saver(joblib_dump, joblib_load),
    "h5py": Saver(h5py_update, h5py_load, apart=True),
    "zarr": Saver(zarr_update, zarr_load, threads=True),
    "safetensors": Saver(safetensors_save, safetensors_load),
    **{
        f"sqlite3-{journal}-{synchronous}": Saver(sqlite(journal, synchronous), sqlite_load)
        for journal in ("delete", "wal")
        for synchronous in ("off", "normal", "full", "extra")
        if (journal, synchronous) != ("wal", "extra")  # for a WAL, it is the same as full
    },
    "lmdb": Saver(lmdb_put(), lmdb_load, apart=True),
    "lmdb-nosync": Saver(lmdb_put(sync=False), lmdb_load, apart=True),
    "lmdb-writemap": Saver(lmdb_put(writemap=True), lmdb_load, apart=True),
    "pmstore": Saver(pmstore_commit, pmstore_load),
}


def main(name: str, directory: Path, prepare: bool) -> None:
    """Saves version 0, or 1 and 2."""
    save = SAVERS[name].before(directory)
    for k in [0] if prepare else [1, 2]:
        save(k)
        if not prepare:
            print("saved", k, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--prepare" in sys.argv[3:])
