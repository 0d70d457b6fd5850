"""The competitors of pmstore: each keeps one array in files, makes it durable when it is asked to, and reads it back.

A competitor gets its array when it is made, and holds it as `array`. A measurement changes `array` and
calls `put`, or calls `put_rows`, which changes rows and makes them durable. After `close`, `read` opens the files anew.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _common import Array


@dataclass(frozen=True)
class Guarantee:
    """What a crash leaves, from documentation and code.

    killed: of the process; cut: of the power, on a disk that honours flushes.
    """

    atomic: str
    torn: str
    killed: str
    cut: str
    safe: bool = True  # whole, and durable when the call returns


WHOLE_FILE = "one file"
OLD_OR_NEW = "old or new"
LAST = "the last commit"
ENGINE = Guarantee("transactions", "no", LAST, LAST)
PLAIN_FILE = Guarantee("no", "yes: the file is emptied first", "part of the new file", "part, or nothing", safe=False)
RENAMED = Guarantee(WHOLE_FILE, "no", OLD_OR_NEW, OLD_OR_NEW)
IN_PLACE = Guarantee("no", "yes", "a mixture", "a mixture of pages", safe=False)
PMEMOBJ = Guarantee("transactions", "no, if every range was added by hand", LAST, LAST)


class Competitor:
    """One way to keep an array."""

    name = ""
    module = ""
    guarantee = ENGINE
    whole = True  # can keep an array as a whole
    rows = True  # can keep one by rows, even if it writes all of it
    partial = False  # writes only the rows that changed
    back_to_back = False  # is timed right behind another change of the same kind
    media: tuple[str, ...] = ("memory", "disk")

    def __init__(self, directory: Path, medium: str, array: Array) -> None:
        self.directory = directory
        self.medium = medium
        self.array = array
        self.path = directory / "file"
        self.start()

    def start(self) -> None:
        """Open, and keep the array as it is."""
        self.put()

    def put(self) -> None:
        """Make all of `array` durable."""
        raise NotImplementedError

    def put_rows(self, rows: Array, values: Array) -> None:
        """Change rows, and make them durable."""
        self.array[rows] = values
        self.put()

    def drain(self) -> None:
        """Finish, unmeasured, what the call left to the kernel, so that it does not slow the next baseline down."""

    def close(self) -> None:
        """Close the files."""

    def read(self) -> Array:
        """Read the array from the files."""
        raise NotImplementedError

    def shaped(self, data: Any) -> Array:
        return np.frombuffer(data, self.array.dtype).reshape(self.array.shape)


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- files that are written whole


class NumpySave(Competitor):
    name, guarantee = "np.save", PLAIN_FILE

    def put(self) -> None:
        self.write(self.path)

    def drain(self) -> None:
        sync_path(self.path)

    def write(self, path: Path) -> None:
        with open(path, "wb") as file:
            np.save(file, self.array)

    def read(self) -> Array:
        with open(self.path, "rb") as file:
            return np.asarray(np.load(file))


class NumpySavez(NumpySave):
    name = "np.savez"

    def write(self, path: Path) -> None:
        with open(path, "wb") as file:
            np.savez(file, array=self.array)

    def read(self) -> Array:
        with np.load(io.BytesIO(self.path.read_bytes())) as file:
            return np.asarray(file["array"])


class Joblib(NumpySave):
    name, module = "joblib.dump", "joblib"

    def write(self, path: Path) -> None:
        importlib.import_module("joblib").dump(self.array, path)

    def read(self) -> Array:
        return np.asarray(importlib.import_module("joblib").load(self.path))


class Safetensors(NumpySave):
    name, module = "safetensors", "safetensors"

    def write(self, path: Path) -> None:
        importlib.import_module("safetensors.numpy").save_file({"array": self.array}, path)

    def read(self) -> Array:
        return np.asarray(importlib.import_module("safetensors.numpy").load_file(self.path)["array"])


def renamed(kind: type[NumpySave]) -> type[Competitor]:
    """The same into a temporary file: write, fsync, rename, fsync of the directory."""

    class Renamed(kind):  # type: ignore[misc, valid-type]
        name, guarantee = f"{kind.name}, fsync, rename", RENAMED

        def put(self) -> None:
            temporary = self.directory / "temporary"
            self.write(temporary)
            sync_path(temporary)
            os.replace(temporary, self.path)
            sync_path(self.directory)

    return Renamed


class Memmap(Competitor):
    name, guarantee, partial = "np.memmap, flush", IN_PLACE, True

    def start(self) -> None:
        self.map: Any = np.memmap(self.path, self.array.dtype, "w+", shape=self.array.shape)
        self.put()

    def put(self) -> None:
        self.map[...] = self.array
        self.map.flush()

    def put_rows(self, rows: Array, values: Array) -> None:
        self.map[rows] = values
        self.map.flush()

    def close(self) -> None:
        del self.map

    def read(self) -> Array:
        return self.shaped(self.path.read_bytes())


# ---- databases


class LMDB(Competitor):
    name, module, guarantee = "LMDB", "lmdb", ENGINE
    writemap = False
    room = 64 << 20  # bytes of the map, besides four arrays

    def start(self) -> None:
        lmdb = importlib.import_module("lmdb")
        size = 4 * self.array.nbytes + self.room
        self.environment = lmdb.open(str(self.path), map_size=size, subdir=False, sync=True, writemap=self.writemap)
        self.put()

    def put(self) -> None:
        with self.environment.begin(write=True) as transaction:
            transaction.put(b"array", self.array.data.cast("B"))

    def close(self) -> None:
        self.environment.close()

    def read(self) -> Array:
        lmdb = importlib.import_module("lmdb")
        with lmdb.open(str(self.path), subdir=False, readonly=True) as environment, environment.begin() as transaction:
            return self.shaped(transaction.get(b"array"))


class LMDBWritemap(LMDB):
    name, writemap = "LMDB, writemap", True
    guarantee = Guarantee("transactions", "by a stray store only", LAST, LAST)


class LMDBRows(LMDB):
    name, whole, partial = "LMDB, one key per row", False, True

    def put(self) -> None:
        self.put_rows(np.arange(len(self.array)), self.array)

    def put_rows(self, rows: Array, values: Array) -> None:
        with self.environment.begin(write=True) as transaction:
            for row, value in zip(rows.tolist(), values):
                transaction.put(row.to_bytes(4, "big"), value.data)

    def read(self) -> Array:
        lmdb = importlib.import_module("lmdb")
        with lmdb.open(str(self.path), subdir=False, readonly=True) as environment, environment.begin() as transaction:
            return self.shaped(b"".join(value for _, value in transaction.cursor()))


class LMDBRowsWritemap(LMDBRows):
    name, writemap, guarantee = "LMDB, one key per row, writemap", True, LMDBWritemap.guarantee


class SQLite(Competitor):
    name, module, guarantee, partial = "sqlite3, WAL, FULL", "sqlite3", ENGINE, True

    def connect(self) -> Any:
        return importlib.import_module("sqlite3").connect(self.path, isolation_level=None)

    def start(self) -> None:
        self.connection = self.connect()
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("CREATE TABLE arrays (id INTEGER PRIMARY KEY, data BLOB)")
        self.write(np.arange(len(self.array)) if self.array.ndim == 2 else np.zeros(1, int), self.array)

    def write(self, rows: Array, values: Array) -> None:
        parts = values if values.ndim == 2 else [values]
        self.connection.execute("BEGIN")
        self.connection.executemany(
            "INSERT OR REPLACE INTO arrays VALUES (?, ?)", ((row, part.data) for row, part in zip(rows.tolist(), parts))
        )
        self.connection.execute("COMMIT")

    def put(self) -> None:
        self.write(np.zeros(1, int), self.array)

    def put_rows(self, rows: Array, values: Array) -> None:
        self.write(rows, values)

    def close(self) -> None:
        self.connection.close()

    def read(self) -> Array:
        with contextlib.closing(self.connect()) as connection:
            return self.shaped(b"".join(data for (data,) in connection.execute("SELECT data FROM arrays ORDER BY id")))


class Zodb(Competitor):
    name, module, guarantee = "ZODB, FileStorage", "ZODB", ENGINE

    def start(self) -> None:
        self.database = importlib.import_module("ZODB").DB(str(self.path), large_record_size=1 << 30)
        self.connection = self.database.open()
        self.put()

    def put(self) -> None:
        self.connection.root()["array"] = self.array
        self.connection.transaction_manager.commit()

    def close(self) -> None:
        self.connection.close()
        self.database.close()

    def read(self) -> Array:
        database = importlib.import_module("ZODB").DB(str(self.path))
        connection = database.open()
        try:
            return np.array(connection.root()["array"])
        finally:
            connection.close()
            database.close()


# ---- array formats


class Zarr(Competitor):
    name, module = "zarr", "zarr"
    guarantee = Guarantee("each chunk", "a mixture of chunks", "a mixture of chunks", "not said: no fsync", safe=False)
    synced = False
    partial = True

    def start(self) -> None:
        zarr = importlib.import_module("zarr")
        shape = self.array.shape
        self.chunk = 64 if len(shape) == 2 else shape[0]
        self.stored = zarr.create_array(
            store=str(self.path), shape=shape, chunks=(self.chunk, *shape[1:]), dtype="f8", compressors=None
        )
        self.stored[...] = self.array

    def put(self) -> None:
        self.stored[...] = self.array
        self.changed = np.zeros(1, int)
        if self.synced:
            self.drain()

    def put_rows(self, rows: Array, values: Array) -> None:
        self.stored.oindex[rows] = values
        self.changed = rows
        if self.synced:
            self.drain()

    def drain(self) -> None:
        folders = set()
        for chunk in np.unique(self.changed // self.chunk).tolist():
            path = self.path / "c" / str(chunk)
            path = path / "0" if self.array.ndim == 2 else path
            sync_path(path)
            folders.add(path.parent)
        for folder in folders:
            sync_path(folder)

    def read(self) -> Array:
        return np.asarray(importlib.import_module("zarr").open_array(str(self.path), mode="r")[...])


class ZarrSynced(Zarr):
    name, synced, media = "zarr, + fsync of each chunk", True, ("disk",)
    guarantee = Guarantee("each chunk", "a mixture of chunks", "a mixture of chunks", "a mixture of chunks", safe=False)


class H5py(Competitor):
    name, module, partial = "h5py, flush", "h5py", True
    guarantee = Guarantee(
        "no", "yes; the file may not open", "a mixture", "a mixture, or no file: no fsync", safe=False
    )
    synced = False

    def start(self) -> None:
        self.file = importlib.import_module("h5py").File(self.path, "w")
        self.stored = self.file.create_dataset("array", data=self.array)
        self.file.flush()

    def put(self) -> None:
        self.stored.write_direct(self.array)
        self.flush()

    def put_rows(self, rows: Array, values: Array) -> None:
        for row, value in zip(rows.tolist(), values):  # a third of the time that a list of rows takes it
            self.stored[row] = value
        self.flush()

    def flush(self) -> None:
        self.file.flush()
        if self.synced:
            self.drain()

    def drain(self) -> None:
        os.fsync(self.file.id.get_vfd_handle())

    def close(self) -> None:
        self.file.close()

    def read(self) -> Array:
        with importlib.import_module("h5py").File(self.path, "r") as file:
            return np.asarray(file["array"][...])


class H5pySynced(H5py):
    name, synced, media = "h5py, flush, fsync", True, ("disk",)
    guarantee = Guarantee("no", "yes; the file may not open", "a mixture", "a mixture, or no file", safe=False)


COMPETITORS: list[type[Competitor]] = [
    LMDB,
    LMDBWritemap,
    LMDBRows,
    LMDBRowsWritemap,
    SQLite,
    Zodb,
    renamed(NumpySave),
    renamed(NumpySavez),
    renamed(Joblib),
    renamed(Safetensors),
    NumpySave,
    NumpySavez,
    Joblib,
    Safetensors,
    Zarr,
    ZarrSynced,
    H5py,
    H5pySynced,
    Memmap,
]
