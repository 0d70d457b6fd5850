"""Shards and algorithms as pickles for other processes, also those that a notebook or a script defines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


def packed(value: Any, what: str) -> bytes:
    """A pickle. Raises TypeError if there can't be one."""
    return _packed(value, what, None)


def packed_apart(value: Any, what: str) -> list[Any]:
    """A pickle, and then the memory of the arrays in it."""
    buffers: list[pickle.PickleBuffer] = []
    data = _packed(value, what, buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def _packed(value: Any, what: str, take: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    try:
        import cloudpickle

        dump: Callable[..., bytes] = cloudpickle.dumps
    except ModuleNotFoundError:
        dump = pickle.dumps
    try:
        data = dump(value, protocol=5, buffer_callback=take)
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to workers: {error}. Give them arrays, paths and plain values; a loader, or "
            "prepare(), opens files and connections on the worker."
        ) from error
    if dump is pickle.dumps and b"__main__" in data:
        raise TypeError(
            f"{what} can't be sent to workers, as a part of it is defined in the program that was started or in a "
            "notebook: put that into a module of its own, or pip install cloudpickle"
        )
    return data
