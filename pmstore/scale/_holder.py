"""A worker's part: it holds shards and answers questions about them.

A holder keeps no state that can't be made again. What it holds are copies of shards, each checked when it was loaded,
what the algorithm prepared from them, and the local states of shards (`_local.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from pmstore._errors import ShardError
from pmstore._resume.blas import limited_blas
from pmstore._resume.fingerprint import describe, describe_environment, hash_array
from pmstore.scale._local import Disk
from pmstore.scale._messages import Array, Failure, Reply, Result, Tag, digest_of, in_words
from pmstore.scale._shards import Shard, check_kind
from pmstore.scale._travel import aligned, arrived


class Function(Protocol):
    """A worker's work on a shard. It travels to the worker as a pickle."""

    def expected(self, i: int) -> str | None:
        """The contents that the shard must have, as `contents_of` returns them; None: any."""

    def prepare(self, data: Any) -> Any:
        """The data that the holder keeps of a loaded shard."""

    def adds(self, shared: Mapping[str, Array]) -> bool:
        """Whether results are combined by sums. Then a `Gathering` adds them on the worker."""

    def __call__(
        self, i: int, held: Any, contents: str, shared: Mapping[str, Array], tag: Tag, disk: Disk
    ) -> Mapping[str, Any]:
        """The result for the shard, as arrays. `disk` has the local states that the worker keeps."""


class Holder:
    """Holds shards on a worker.

    Parameters
    ----------
    worker : str
        The name of the worker, for messages.
    memory : int, optional
        The number of bytes that shards may take. The holder loads what has no room again for each question. None: no
        limit. Arrays over files and over shared memory don't count, as the system can drop their pages.
    threads : int, default=1
        The number of threads that BLAS and OpenMP use here. The caller sees to it.
    """

    def __init__(self, worker: str, memory: int | None = None, threads: int = 1) -> None:
        self._worker, self._memory, self._threads = worker, memory, threads
        self._held: dict[int, tuple[str, bool, Any]] = {}  # contents, whether it is prepared, the shard
        self._bytes = 0
        self.disk = Disk()

    def close(self) -> None:
        """Close the stores of local states."""
        self.disk.close()

    def answer(self, i: int, shard: Shard, function: Function, shared: Mapping[str, Array], tag: Tag) -> Reply:
        """The reply to a question. An exception of the loader or of the map becomes a reply, too."""
        began = time.monotonic()
        maps = tag.epoch >= 0
        kind = "load"
        try:
            contents, is_prepared, held = self._loaded(i, shard, maps)
            expected = function.expected(i)
            if expected is not None and contents != expected:
                self._drop(i)
                failure = Failure("changed", f"{shard} has the contents {contents} now, not {expected}")
                return Reply(i, tag, self._worker, environment=environment(self._threads), failure=failure)
            if maps and not is_prepared:
                kind = "prepare"
                held = function.prepare(held)
            self._hold(i, contents, maps, held)
            kind = "map"
            result = _checked(function(i, held, contents, read_only(shared), tag, self.disk))
        except Exception as error:
            text = f"{in_words(error)}\n{traceback.format_exc()}"
            return Reply(i, tag, self._worker, environment=environment(self._threads), failure=Failure(kind, text))
        seconds = time.monotonic() - began
        return Reply(i, tag, self._worker, result, digest_of(i, tag, result), seconds, environment(self._threads))

    def _loaded(self, i: int, shard: Shard, maps: bool) -> tuple[str, bool, Any]:
        """The contents, whether it is prepared, and the shard. If it is not for a map, it is as it was loaded."""
        contents, is_prepared, held = self._held.get(i, ("", False, None))
        if contents and (maps or not is_prepared):
            return contents, is_prepared, held
        held = read_only(shard())
        return contents_of(held), False, held

    def _hold(self, i: int, contents: str, is_prepared: bool, held: Any) -> None:
        """Keep the shard, if there is room for it."""
        _, was_prepared, known = self._held.get(i, ("", False, None))
        if known is held and was_prepared == is_prepared:
            return
        self._drop(i)
        size = _size(held)
        if self._memory is None or self._bytes + size <= self._memory:
            self._held[i] = contents, is_prepared, held
            self._bytes += size

    def _drop(self, i: int) -> None:
        if i in self._held:
            self._bytes -= _size(self._held.pop(i)[2])


class Describe:
    """The first question of a run: the contents of a shard, and the environment of the worker."""

    def expected(self, i: int) -> str | None:
        return None

    def prepare(self, data: Any) -> Any:
        return data

    def adds(self, shared: Mapping[str, Array]) -> bool:
        return False

    def __call__(
        self, i: int, held: Any, contents: str, shared: Mapping[str, Array], tag: Tag, disk: Disk
    ) -> Mapping[str, Any]:
        told = {
            "contents": contents,
            "shape": getattr(held, "shape", None),
            "dtype": str(held.dtype) if hasattr(held, "dtype") else None,
        }
        return {str(i): np.frombuffer(json.dumps(told).encode(), np.uint8)}


def contents_of(data: Any) -> str:
    """A hash of a loader's result: an array, or a tuple, list or dict of arrays and plain values.

    Raises TypeError for other types, which may have more in them than a hash covers, such as masks and names of
    columns.
    """
    check_kind(data)
    if isinstance(data, np.ndarray) and not data.dtype.hasobject:
        return f"{data.dtype} {list(data.shape)} {hash_array(data)}"
    return hash_array(np.frombuffer(json.dumps(describe(data), sort_keys=True).encode(), np.uint8))


def loaded_again(i: int, shard: Shard, contents: str | None) -> Any:
    """The data of a shard after a fit, as a worker loads them. Raises ShardError if they have other contents now."""
    with limited_threads(1):  # a shard may be the result of another estimator, with these bits
        loaded = read_only(arrived(shard, f"shard {i}", shares=True)())
    if contents_of(loaded) != contents:
        raise ShardError(f"shard {i}, {shard}, is not what it was when the fit began", i)
    return loaded


def read_only(data: Any) -> Any:
    """The data, as aligned arrays that can't be written to: a map must not change its shard."""
    if isinstance(data, np.ndarray):
        view = aligned(data).view()
        view.flags.writeable = False
        return view
    if isinstance(data, Mapping):
        return {key: read_only(value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(read_only, data))
    if type(data) in (list, tuple):
        return type(data)(map(read_only, data))
    return data


@functools.cache
def environment(threads: int) -> str:
    """The environment that the bits of a result depend on, as JSON: versions, BLAS with its kernel, threads."""
    try:
        import scipy.linalg  # noqa: F401 (so that its BLAS is loaded on every worker, or on none)
        from threadpoolctl import threadpool_info
    except ModuleNotFoundError:
        libraries = []
    else:
        libraries = threadpool_info()
    return json.dumps({**describe_environment(threads, libraries), "BLAS threads": threads}, sort_keys=True)


@contextlib.contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """BLAS, in the whole process, and OpenMP, in this thread, compute in so many threads."""
    try:
        libraries = _libraries(len(sys.modules))
    except ModuleNotFoundError:
        yield
        return
    with limited_blas(libraries, threads), libraries.select(user_api="openmp").limit(limits=threads):
        yield


@functools.lru_cache(maxsize=1)
def _libraries(modules: int) -> Any:
    """The loaded libraries with threads. Listing them takes milliseconds, and only an import changes the list."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _checked(result: Any) -> Result:
    """The result as arrays in C order: copies, as a map may use a buffer again. Raises TypeError for anything else."""
    if not isinstance(result, Mapping) or not all(type(name) is str for name in result):
        raise TypeError(f"map() returns a dict of arrays by name, not {result!r:.200}")
    for name, value in result.items():
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"map() returned a masked array as {name!r}: return its data and its mask as two arrays")
    arrays = {name: np.array(value, order="C") for name, value in result.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"map() returns arrays of numbers; {name!r} is {result[name]!r:.200}")
    return arrays


def _size(held: Any) -> int:
    """The bytes of private memory that a shard takes, as far as it tells."""
    if isinstance(held, np.ndarray):
        base: Any = held
        while isinstance(base, np.ndarray):
            if isinstance(base, np.memmap):
                return 0
            base = base.base
        if isinstance(base, memoryview):
            base = base.obj
        return 0 if isinstance(base, mmap.mmap) else held.nbytes
    if isinstance(held, Mapping):
        return sum(map(_size, held.values()))
    if isinstance(held, list | tuple):
        return sum(map(_size, held))
    return int(getattr(held, "nbytes", 0))
