"""Stores that one process writes and others read, and the processes that do this.

A subject (`Beside`) is a competitor whose files can be read while they are written; its `reader` reads them in another
process. Every element of the array that is written is the number of the commit, so that a mixture can be noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from _common import MEDIA, Array
from _competitors import LMDB, Competitor, H5py
from _subjects import Pmstore

import pmstore

HERTZ = 100
PATIENCE = 120  # seconds that an answer of another process may take
MOST = 1 << 30  # bytes that a store may take beyond what its array needs


class Reader:
    """Reads the array of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        """Open the file."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Go to the newest commit, if reading does not do that by itself."""

    def first_element(self) -> float:
        """The first element, of the newest commit."""
        raise NotImplementedError

    def read(self) -> Array:
        """A copy of the whole array, of the newest commit."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        raise NotImplementedError


class PmstoreReader(Reader):
    def start(self) -> None:
        self.store = pmstore.open(self.path, "r")

    def refresh(self) -> None:
        self.store.refresh()

    def first_element(self) -> float:
        return float(self.store.read(("array", np.s_[:1]))[0])

    def read(self) -> Array:
        return np.asarray(self.store.read("array"))

    def close(self) -> None:
        self.store.close()


class LMDBReader(Reader):
    def start(self) -> None:
        lmdb = importlib.import_module("lmdb")
        self.environment = lmdb.open(str(self.path), map_size=8 * MOST, subdir=False, readonly=True)

    def first_element(self) -> float:
        with self.environment.begin(buffers=True) as transaction:
            return float(np.frombuffer(transaction.get(b"array"))[0])

    def read(self) -> Array:
        with self.environment.begin(buffers=True) as transaction:
            return np.array(np.frombuffer(transaction.get(b"array")))

    def close(self) -> None:
        self.environment.close()


class SWMRReader(Reader):
    def start(self) -> None:
        self.file = importlib.import_module("h5py").File(self.path, "r", libver="latest", swmr=True)
        self.stored = self.file["array"]

    def first_element(self) -> float:
        self.stored.refresh()
        return float(self.stored[0])

    def read(self) -> Array:
        self.stored.refresh()
        return np.asarray(self.stored[...])

    def close(self) -> None:
        self.file.close()


class PmstoreBeside(Pmstore):
    reader = PmstoreReader

    def create(self) -> pmstore.Store:
        return pmstore.open(self.path, "w", media=MEDIA[self.medium], max_size=4 * self.array.nbytes + MOST)


class LMDBBeside(LMDB):
    reader = LMDBReader
    room = MOST  # readers keep old pages


class SWMRBeside(H5py):
    name, reader = "h5py, SWMR", SWMRReader

    def start(self) -> None:
        self.file = importlib.import_module("h5py").File(self.path, "w", libver="latest")
        self.stored = self.file.create_dataset("array", data=self.array)
        self.file.swmr_mode = True

    def flush(self) -> None:
        self.stored.flush()


Beside = type[PmstoreBeside] | type[LMDBBeside] | type[SWMRBeside]
BESIDE: list[Beside] = [PmstoreBeside, LMDBBeside, SWMRBeside]


def made(kind: Beside, directory: Path, medium: str, size: int) -> Competitor:
    """A subject with an array of so many bytes, in a new directory."""
    directory.mkdir()
    return kind(directory, medium, np.zeros(size // 8))


# ---- processes


class Worker:
    """Another process, which runs functions of this module. It ends with this one."""

    def __init__(self, stop: mmap.mmap) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, stop), daemon=True)
        self.process.start()
        other.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function there: function(connection, stop, *arguments). What it returns is received."""
        self.connection.send((function, arguments))

    def answer(self) -> Any:
        """What it sent, or returned; or an exception."""
        if not self.connection.poll(PATIENCE):
            return TimeoutError("a process of this benchmark doesn't answer")
        return self.connection.recv()

    def receive(self) -> Any:
        """The same, but an exception is raised."""
        answer = self.answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, message: Any = None) -> Any:
        self.connection.send(message)
        return self.receive()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _work(connection: Connection, stop: mmap.mmap) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    while True:
        function, arguments = connection.recv()
        try:
            connection.send(function(connection, stop, *arguments))
        except Exception as error:
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Workers:
    """Several workers, which a byte of shared memory stops."""

    def __init__(self, count: int) -> None:
        self.stop = mmap.mmap(-1, mmap.PAGESIZE)
        self.count = count
        self.all: list[Worker] = []
        self.renew()

    def renew(self) -> None:
        """Replace the processes by new ones."""
        self.end()
        self.all = [Worker(self.stop) for _ in range(self.count)]

    @contextlib.contextmanager
    def running(self, calls: list[tuple[Any, ...]], found: list[Any]) -> Iterator[None]:
        """Functions with their arguments, each in one process. They say that they have begun, run until this ends, and
        then return something, which is appended to `found`."""
        self.stop[0] = 0
        used = self.all[: len(calls)]
        for worker, call in zip(used, calls):
            worker.start(*call)
        answers = [worker.answer() for worker in used]
        begun = [worker for worker, answer in zip(used, answers) if not isinstance(answer, Exception)]
        try:
            if len(begun) == len(used):
                yield
        finally:
            self.stop[0] = 1
            answers += [worker.answer() for worker in begun]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        found += answers[len(used) :]

    def end(self) -> None:
        for worker in self.all:
            worker.end()


@contextlib.contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Workers that are ended after the block. They are forks: start them before any store is opened."""
    made = Workers(count)
    try:
        yield made
    finally:
        made.end()


# ---- what they run


def reading(
    connection: Connection, stop: mmap.mmap, kind: Beside, path: Path, whole: bool, hertz: float, first: float
) -> dict[str, Any]:
    """Reads what another process writes: refreshes and reads so many times a second, from `first` seconds on; with 0
    it reads without a pause.

    Returns
    -------
    dict
        count; mixed, older: readings of several commits at once, or of an older commit than the one before; failed:
        errors, with the text of the first one as `error`; seconds; used: seconds of processor time; longest: seconds.
    """
    reader = kind.reader(path)
    found: dict[str, Any] = dict.fromkeys(("count", "mixed", "older", "failed"), 0)
    found |= {"longest": 0.0, "error": ""}
    last = _one(reader, whole)[0]
    connection.send("begun")
    begun, used = perf_counter(), process_time()
    due = begun + first
    while not stop[0]:
        if (left := due - perf_counter()) > 0:
            time.sleep(left)
        due = max(due + 1 / hertz, perf_counter()) if hertz else 0
        start = perf_counter()
        try:
            if hertz:
                reader.refresh()
            values = _one(reader, whole)
        except Exception as error:  # of a competitor: it is counted
            found["failed"] += 1
            found["error"] = found["error"] or f"{type(error).__name__}: {error}"
            continue
        found["longest"] = max(found["longest"], perf_counter() - start)
        found["count"] += 1
        found["mixed"] += len(set(values)) > 1
        found["older"] += values[0] < last
        last = values[0]
    found |= {"seconds": perf_counter() - begun, "used": process_time() - used}
    reader.close()
    return found


def _one(reader: Reader, whole: bool) -> list[float]:
    if not whole:
        return [reader.first_element()]
    array = reader.read()
    return [float(array[i]) for i in (0, len(array) // 2, -1)]


def writing(
    connection: Connection, stop: mmap.mmap, kind: Beside, directory: Path, medium: str, size: int
) -> dict[str, Any]:
    """Commit back to back: `count` times, or for so many seconds."""
    subject, count = made(kind, directory, medium, size), 0
    connection.send("begun")
    begun = perf_counter()
    while not stop[0]:
        subject.array += 1
        subject.put()
        count += 1
    seconds = perf_counter() - begun
    subject.close()
    return {"count": count, "seconds": seconds}


def committing(connection: Connection, stop: mmap.mmap, kind: Beside, directory: Path, medium: str, size: int) -> None:
    """Commits once for each message, until one is False."""
    subject = made(kind, directory, medium, size)
    connection.send("begun")
    while connection.recv():
        subject.array += 1
        subject.put()
        subject.drain()
        connection.send("done")
    subject.close()


def holding(connection: Connection, stop: mmap.mmap, paths: dict[str, Path]) -> None:
    """Has stores open for writing, and commits a value to the one that a message names, until one is empty."""
    with contextlib.ExitStack() as opened:
        stores = {name: opened.enter_context(pmstore.open(path, "r+")) for name, path in paths.items()}
        connection.send("begun")
        while name := connection.recv():
            stores[name]["value"] = stores[name].sequence
            stores[name].commit()
            connection.send("done")


def ticking(
    connection: Connection, stop: mmap.mmap, path: Path, medium: str, pauses: list[float]
) -> list[tuple[int, int]]:
    """Commits after each of these pauses (seconds), once a message has come. Gives the time of each call of commit and
    of its return, in nanoseconds of CLOCK_MONOTONIC."""
    times = []
    with pmstore.open(path, "w", media=MEDIA[medium], max_size=MOST) as store:
        array = store.create_array("array", 1, "i8")
        store.commit()
        connection.send(store.sequence)
        connection.recv()
        for pause in pauses:
            time.sleep(pause)
            array[0] += 1
            called = time.monotonic_ns()
            store.commit()
            times.append((called, time.monotonic_ns()))
    return times
