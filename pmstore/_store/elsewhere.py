"""Methods and arguments of h5py, zarr, sqlite3 and PyMM that a store lacks, and what takes their place.

docs/coming-from.md has the tables for readers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["METHODS", "explains"]

P = ParamSpec("P")
T = TypeVar("T")

METHODS = {
    "create_dataset": "create_array(name, data=array), or store[name] = array",
    "require_dataset": "require_array(name, shape, dtype)",
    "create_group": "require_group(name)",
    "flush": "commit()",
    "compact": "pmstore compact, for a store that no process has open",
    "visit": "list(store), which has the full names of all values",
    "visititems": "store.items(), which has the full names of all values",
}

_COMPRESSED = "an array is kept as plain memory; drain(codec=…) compresses the versions of an archive"
_ARGUMENTS = {
    "chunks": "an array is kept in one piece; leave it out",
    "shards": "an array is kept in one piece; leave it out",
    "compression": _COMPRESSED,
    "compressor": _COMPRESSED,
    "compressors": _COMPRESSED,
    "filters": _COMPRESSED,
    "fillvalue": "it is named fill_value",
    "overwrite": "store[name] = array replaces an array",
    "attributes": "store.attrs(name) has the attributes of an array",
    "swmr": 'mode="r" reads beside a writer',
    "force_new": 'mode="w" replaces a store',
    "size_mb": "a store grows; max_size=bytes limits it",
    "pmem_path": "it is a part of the path",
    "isolation_level": "a transaction begins with the first change, and commit() or `with store.transaction()` ends it",
}


def explains(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose TypeError for an argument that it lacks tells what takes its place."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known and name in _ARGUMENTS:
                raise TypeError(f"{function.__name__}() has no argument {name!r}: {_ARGUMENTS[name]}")
        return function(*args, **kwargs)

    return explained
