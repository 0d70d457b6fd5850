"""Shards and algorithms as pickles for other processes, also those that a notebook or a script defines."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from pmstore.scale._messages import Array

T = TypeVar("T")

_MAIN_WHERE_SPAWNED = "__mp_main__"
"""The module of the program that was started, in a process that multiprocessing has spawned."""


def packed(value: Any, what: str) -> bytes:
    """A pickle. Raises TypeError if there can't be one."""
    return _packed(value, what, None)


def packed_apart(value: Any, what: str) -> list[Any]:
    """A pickle, and then the memory of the arrays in it."""
    buffers: list[pickle.PickleBuffer] = []
    data = _packed(value, what, buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def arrived(value: T, what: str, *, shares: bool) -> T:
    """A value as other processes get it: out of a pickle. What is computed here has the same bits then.

    Arrays with gaps, wherever they are in the value, become copies in C order: numpy adds these in another order. So it
    does with arrays that are not aligned, which become aligned copies. Functions, classes and modules stay the same
    objects. shares: other arrays are views of the same memory that can't be written to; otherwise they are copies, too.
    Raises TypeError if there can't be a pickle.
    """
    code: list[Any] = []

    class Pickler(_library().Pickler):  # type: ignore[misc]
        def persistent_id(self, one: Any) -> int | None:
            """cloudpickle's copy of a class of the program would replace the methods of the class itself."""
            if not isinstance(one, type | types.FunctionType | types.ModuleType):
                return None
            code.append(one)
            return len(code) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Any:
            return code[number]

    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    with _in_words(what):
        Pickler(file, protocol=5, buffer_callback=buffers.append if shares else None).dump(value)
    file.seek(0)
    made: T = Unpickler(file, buffers=map(_aligned, buffers)).load()
    return made


def _aligned(buffer: pickle.PickleBuffer) -> memoryview:
    """Its memory, which can't be written to."""
    one: object = memoryview(buffer).obj
    if isinstance(one, np.ndarray) and not _is_aligned(one):
        return memoryview(buffer.raw().tobytes())
    return buffer.raw().toreadonly()


def aligned(array: Array) -> Array:
    """The array, or a copy if it is not aligned: numpy adds other numbers in another order then, and the same array may
    be aligned in one process and not in the next one. dask receives arrays at any address."""
    if _is_aligned(array):
        return array
    if type(array) is np.memmap:
        array = array.view(np.ndarray)  # the copy is not in the file
    return np.array(array, order="K", subok=True)


def _is_aligned(array: Array) -> bool:
    """Whether numbers, and those fields of records that a copy could align, are at multiples of their alignment."""
    if not array.flags.aligned or array.dtype.fields is None:
        return array.flags.aligned
    address = array.__array_interface__["data"][0]
    sizes = [size for size in _alignments(array.dtype) if not any(stride % size for stride in array.strides)]
    return not any(address % size for size in sizes)


def _alignments(dtype: np.dtype[Any]) -> set[int]:
    """The alignments of the fields of a record, and of the records in it."""
    if dtype.base.fields is None:
        return {dtype.base.alignment}
    return set().union(*(_alignments(field[0]) for field in dtype.base.fields.values()))


def _packed(value: Any, what: str, take: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    library = _library()
    with _in_words(what):
        if library is not pickle:
            data: bytes = library.dumps(value, protocol=5, buffer_callback=take)
            return data
        file = io.BytesIO()
        pickler = _Pickler(file, 5, buffer_callback=take)
        pickler.dump(value)
    if pickler.needs_program:
        raise TypeError(
            f"{what} can't be sent to workers, as a part of it is defined in the program that was started or in a "
            "notebook: put that into a module of its own, or pip install cloudpickle"
        )
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Notes whether a value needs classes or functions of the program: those of a worker are others."""

    needs_program = False

    def reducer_override(self, one: Any) -> Any:
        if getattr(one, "__module__", None) in ("__main__", _MAIN_WHERE_SPAWNED):
            by_name = isinstance(one, type | types.FunctionType) or isinstance(one.__reduce_ex__(5), str)
            self.needs_program |= by_name
        return NotImplemented


def _library() -> Any:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    if _MAIN_WHERE_SPAWNED in sys.modules:  # no worker has it
        cloudpickle.register_pickle_by_value(sys.modules[_MAIN_WHERE_SPAWNED])
    return cloudpickle


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Errors of a pickle become a TypeError."""
    try:
        yield
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to workers: {error}. Give them arrays, paths and plain values; a loader, or "
            "prepare(), opens files and connections on the worker."
        ) from error
