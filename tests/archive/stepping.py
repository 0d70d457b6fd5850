"""A drain without threads: its steps, in the order that a test chooses, and places that fail where a test says."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pmstore
from pmstore._store.lineage import lineage_of, parent_of
from pmstore.archive._codecs import codecs_of
from pmstore.archive._objects import Buffer, MissingObjectError, ObjectExistsError, Place, ShortObjectError
from pmstore.archive._retention import Keep
from pmstore.archive._steps import Options, Steps

__all__ = ["Crash", "Memory", "Unreadable", "contents", "flip", "same", "stepping"]


class Crash(BaseException):
    """The process ends here."""


class Memory(Place):
    """Objects in a dict. after: operations that change it until the process ends; None: it does not."""

    def __init__(self, objects: dict[str, bytes] | None = None, after: int | None = None) -> None:
        self.url = "memory"
        self.objects = {} if objects is None else objects
        self.after = after
        self.changes = 0

    def _change(self) -> None:
        if self.after is not None and self.changes >= self.after:
            raise Crash
        self.changes += 1

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self._change()
        self.objects[name] = b"".join(bytes(one) for one in data)

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        if name in self.objects:
            raise ObjectExistsError(name, self.url)
        self.put(name, data)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        if name not in self.objects:
            raise MissingObjectError(name, self.url)
        found = self.objects[name][at : None if count is None else at + count]
        if count is not None and len(found) < count:
            raise ShortObjectError(name, self.url)
        return found

    @property
    def parts(self) -> list[str]:
        """The names of the parts."""
        return [name for name in self.objects if name.startswith("parts/")]

    def damage(self, name: str, at: int, count: int = 1) -> None:
        """Change bytes of an object."""
        data = bytearray(self.objects[name])
        data[at : at + count] = (byte ^ 255 for byte in data[at : at + count])
        self.objects[name] = bytes(data)

    def size(self, name: str) -> int:
        return len(self.get(name))

    def list(self, folder: str) -> list[str]:
        return sorted(name[len(folder) + 1 :] for name in self.objects if name.startswith(folder + "/"))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.objects:
                self._change()
                del self.objects[name]


@contextmanager
def stepping(store: pmstore.Store, *places: Place, **options: Any) -> Iterator[Steps]:
    """The steps of a drain. options: those of `Store.drain`."""
    chosen_options = Options(
        every=options.get("every", 1),
        keep=Keep.of(options.get("keep")),
        codec=codecs_of(options.get("codec", "zstd")),
        part_size=options.get("part_size", 1 << 20),
        queue_size=options.get("queue_size", 1 << 26),
        raises=True,
        mtbf=options.get("mtbf"),
    )
    core = store._catalog.core
    about = {"id": "id", "lineage": lineage_of(core), "created": 0.0, "parent": parent_of(core)}
    fd = store._file_lock.again(store.path)
    try:
        steps = Steps(fd, places, about, chosen_options)
    except BaseException:
        os.close(fd)
        raise
    try:
        yield steps
        for number in range(len(places)):
            steps.end(number)
    finally:
        steps.close()


def archived(steps: Steps) -> None:
    """All steps, until there is nothing to do."""
    steps.capture()
    steps.flush()
    while steps.write():
        pass
    for number in range(1, len(steps.targets)):
        while steps.copy(number):
            pass
        if (lost := steps.targets[number].lost) is not None:
            raise lost[1]


def drained(store: pmstore.Store, path: Any) -> None:
    """Commits, and archives that with a drain of its own."""
    if store.mode != "r":
        store.commit()
    with store.drain(path) as drain:
        drain.wait()


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Unreadable:
    """The module os, on a disk that can't read one byte of a file."""

    def __init__(self, path: str, at: int) -> None:
        self._path, self._at = path, at

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def pread(self, fd: int, count: int, at: int) -> bytes:
        """The data; EIO instead if the byte is among them."""
        if at <= self._at < at + count and os.readlink(f"/proc/self/fd/{fd}") == self._path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, count, at)


def contents(mapping: Any) -> dict[str, Any]:
    """Copies of all values, lists as lists."""
    found = {}
    for name in mapping:
        value = mapping[name]
        if isinstance(value, np.ndarray):
            value = value.copy(order="K")
        elif isinstance(value, pmstore.PersistentList):
            value = list(value)
        found[name] = value
    return found


def same(one: Any, other: Any) -> bool:
    """Whether values are equal, with their types and, of arrays, dtype, shape and bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (one == other or (one != one and other != other))
