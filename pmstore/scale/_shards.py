"""Shards: the parts of a data set, as loaders that a worker calls as often as it needs the data."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from pmstore._resume.fingerprint import has_plain_elements, is_plain
from pmstore._store.opening import absolute, local_path

PARTS = 16
"""The number of shards of an array that was given as a whole, unless it is large. It does not depend on the number of
workers, as the result depends on the shards."""

BYTES = 64 << 20
"""The size of such a shard, at most."""


class Shard:
    """A part of a data set: a function that loads it, and its arguments.

    A worker calls the function when it needs the data, and again if it had no room for them, or was replaced. Each call
    must return the same contents: a hash of them is part of the fingerprint, and a shard with other contents ends the
    fit with a `ShardError`.

    Parameters
    ----------
    load : callable
        Returns an array, or a tuple, list or dict of arrays and plain values. An array of objects has plain values,
        such as text. Masked arrays, data frames and other types end the fit with a `ShardError`. It is pickled, as are
        its arguments.
    *arguments, **options
        Its arguments.

    Examples
    --------
    >>> import numpy as np, pmstore
    >>> np.save("part-0.npy", np.arange(6.0).reshape(3, 2))
    >>> shard = pmstore.Shard(np.load, "part-0.npy", mmap_mode="r")
    >>> shard
    Shard(load, 'part-0.npy', mmap_mode='r')
    >>> shard().shape
    (3, 2)
    """

    __slots__ = ("_arguments", "_load", "_options")

    def __init__(self, load: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if not callable(load):
            raise TypeError(f"a Shard is a function that loads data and its arguments, not {load!r:.200}")
        self._load, self._arguments = load, tuple(map(_without_gaps, arguments))
        self._options = {key: _without_gaps(value) for key, value in options.items()}

    def __call__(self) -> Any:
        return self._load(*self._arguments, **self._options)

    def __repr__(self) -> str:
        name = getattr(self._load, "__name__", repr(self._load))
        given = [_short(value) for value in self._arguments]
        given += [f"{key}={_short(value)}" for key, value in self._options.items()]
        return f"Shard({', '.join([name.lstrip('_'), *given])})"


def shards_of(data: Any) -> tuple[Shard, ...]:
    """The shards of a data set.

    Parameters
    ----------
    data : array, list, path or Shard
        - an array of numpy, also a memory map: blocks of rows, 16 of them or as many as keep each below 64 MiB;
        - an array of dask or zarr: its chunks along the first axis;
        - the path of an ``.npy`` file: blocks of rows, as of an array; of a ``.parquet`` file: its row groups;
        - `LazyParts`, the results of another estimator: a shard for each part;
        - a list or tuple of these: their shards, in this order. An array in a list is one shard, and so is an ``.npy``
          file of up to 64 MiB; a larger one is cut into blocks below that.

        Columns of ``.parquet`` files go by their names, in the order of the first file. Those that pandas wrote as the
        index are left out.

    Returns
    -------
    tuple of Shard

    Raises
    ------
    TypeError, ValueError
        The data are of another kind, or have no rows, or ``.parquet`` files have different columns.
    """
    if isinstance(data, Shard):
        return (data,)
    if isinstance(data, list | tuple):
        shards = tuple(shard for part in data for shard in _of_part(part))
    elif isinstance(data, np.ndarray):
        shards = tuple(_rows(data))
    else:
        shards = tuple(_others(data))
    if not shards:
        raise ValueError("there are no shards: the data are empty")
    if (first := _first_group(shards)) is None:
        return shards
    return with_columns(shards, first._arguments[2], repr(first._arguments[0]))


def _of_part(part: Any) -> Iterable[Shard]:
    """The shards of an element of a list."""
    if isinstance(part, Shard):
        return (part,)
    if isinstance(part, np.memmap):
        return _mapped(part, [(0, len(part))])
    if isinstance(part, np.ndarray):
        return (Shard(_given, _of_numbers(part)),)
    return _others(part, 1)


def _rows(array: np.ndarray[Any, Any]) -> Iterable[Shard]:
    """Blocks of rows of an array."""
    _of_numbers(array)
    blocks = _blocks(len(array), array.nbytes)
    if isinstance(array, np.memmap):
        return _mapped(array, blocks)
    return [Shard(_given, array[begin:end]) for begin, end in blocks]


def _without_gaps(value: Any) -> Any:
    """The value; an array with gaps as a copy in C order. It would reach other processes in that order, and sums be
    added otherwise there. A memory map becomes a plain array, as numpy's pickle copies one."""
    if type(value) is np.memmap:
        value = value.view(np.ndarray)
    if isinstance(value, np.ndarray) and not (value.flags.c_contiguous or value.flags.f_contiguous):
        return np.array(value, order="C", subok=True)
    return value


def _blocks(rows: int, size: int, least: int = PARTS) -> Iterable[tuple[int, int]]:
    """The first and last row of every block: there are at least so many, and none is larger than BYTES."""
    count = min(rows, max(least, -(-size // BYTES)))
    ends = [rows * i // count for i in range(count + 1)] if count else []
    return itertools.pairwise(ends)


def _of_numbers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.ndim == 0 or array.dtype.hasobject:
        raise TypeError(f"the rows of an array of numbers make shards, not those of {array.ndim} axes of {array.dtype}")
    return array


def _others(data: Any, least: int = PARTS) -> Iterable[Shard]:
    """The shards of a file, of which there are at least so many, or of an array of another library."""
    if isinstance(data, str | os.PathLike):
        elsewhere = "shards of paths are read from files: give a pmstore.Shard with a loader of your own"
        return _of_file(Path(absolute(local_path(data, elsewhere))), least)
    if is_dask(data):
        return _of_dask(data)
    if hasattr(type(data), "as_shards"):  # LazyParts
        return cast("Iterable[Shard]", data.as_shards())
    if type(data).__module__.partition(".")[0] == "zarr" and hasattr(data, "chunks") and getattr(data, "shape", None):
        return _of_zarr(data)
    raise TypeError(
        f"shards are made of arrays (numpy, dask, zarr), of paths of .npy and .parquet files, of pmstore.Shard, and of "
        f"lists of these, not of {type(data).__module__}.{type(data).__qualname__}: give its values as an array"
    )


def is_dask(data: Any) -> bool:
    """Whether this is an array of dask. The type is asked, as a Delayed has any attribute."""
    return type(data).__module__.partition(".")[0] == "dask" and hasattr(type(data), "map_blocks")


def _of_zarr(data: Any) -> Iterable[Shard]:
    """The chunks of a zarr array along its first axis. Those in memory travel themselves: a shard with the array would
    have all of its store."""
    blocks = list(itertools.pairwise([*range(0, data.shape[0], data.chunks[0]), data.shape[0]]))
    if isinstance(data.store, importlib.import_module("zarr.storage").MemoryStore):
        found = _found(data)
        return [Shard(_given, np.asarray(found[begin:end])) for begin, end in blocks]
    root = getattr(data.store, "root", None)
    if isinstance(root, Path) and not root.is_absolute():
        data = copy.deepcopy(data)
        data.store.root = root.absolute()
    return [Shard(_part, data, begin, end) for begin, end in blocks]


def _of_file(path: Path, least: int) -> Iterable[Shard]:
    if path.suffix == ".npy":
        array = _looked_at(path, lambda: np.load(path, mmap_mode="r"))
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError(
                f"{os.fspath(path)!r} is an .npz file with another name: give a pmstore.Shard that loads an array of it"
            )
        _of_numbers(array)
        return [Shard(_npy, os.fspath(path), *block) for block in _blocks(len(array), array.nbytes, least)]
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("reading .parquet files needs pyarrow: pip install pyarrow") from error
        if path.is_dir():
            raise IsADirectoryError(
                f"{os.fspath(path)!r} is a directory: give the list of its files, in the order of their rows"
            )
        file = _looked_at(path, lambda: pyarrow.parquet.ParquetFile(path))
        index = (file.schema_arrow.pandas_metadata or {}).get("index_columns", [])
        columns = [name for name in file.schema_arrow.names if name not in index]
        if not columns:
            raise ValueError(
                f"{os.fspath(path)!r} has no columns but an index of pandas: make it a column by reset_index()"
                if index
                else f"{os.fspath(path)!r} has no columns"
            )
        if twice := [name for name, count in Counter(columns).items() if count > 1]:
            raise ValueError(
                f"{os.fspath(path)!r} has several columns with the name {twice[0]!r}: rename them, or give a "
                "pmstore.Shard with a loader of your own"
            )
        groups = [group for group in range(file.num_row_groups) if file.metadata.row_group(group).num_rows]
        return [Shard(_row_group, os.fspath(path), group, columns) for group in groups]
    raise ValueError(f"{os.fspath(path)!r} is no .npy or .parquet file: give a pmstore.Shard with a loader of your own")


def _looked_at(path: Path, load: Callable[[], Any]) -> Any:
    """The result of a reader. Its errors say nothing of the file."""
    try:
        return load()
    except (EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, which names the file
            raise
        text = f"it is damaged, or has more than numbers in it ({type(error).__name__}: {error})"
        raise ValueError(f"{os.fspath(path)!r} can't be read as {path.suffix}: {text}") from error


def columns_of(shards: Sequence[Shard]) -> list[str] | None:
    """The names of the columns of .parquet files; None if no shard is of one."""
    first = _first_group(shards)
    return None if first is None else first._arguments[2]


def _first_group(shards: Sequence[Shard]) -> Shard | None:
    """The first shard of a .parquet file."""
    return next((shard for shard in shards if shard._load is _row_group), None)


def with_columns(shards: Sequence[Shard], columns: Sequence[str], of: str) -> tuple[Shard, ...]:
    """The shards, with the columns of all .parquet files in this order. Raises ValueError if one has others; of: what
    has these, for the error."""
    found = []
    for shard in shards:
        if shard._load is _row_group:
            path, group, own = shard._arguments
            if others := set(own) ^ set(columns):
                raise ValueError(f"the columns {_short(sorted(others))} are only in one of {path!r} and {of}")
            shard = Shard(_row_group, path, group, list(columns))
        found.append(shard)
    return tuple(found)


def check_kind(data: Any) -> None:
    """Raise TypeError for a loader's result with more in it than arrays and plain values, such as a mask."""
    if isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            check_kind(value)
        return
    array = isinstance(data, np.ndarray) and not isinstance(data, np.ma.MaskedArray)
    if array and not has_plain_elements(data):
        raise TypeError(
            f"a shard has an array of {data.dtype} whose objects are more than plain values: let the loader return "
            "arrays of numbers or text"
        )
    if not (is_plain(data) or array or hasattr(type(data), "tocsr")):
        raise TypeError(
            f"a shard is an array, or a tuple, list or dict of arrays and plain values; {type(data).__module__}."
            f"{type(data).__qualname__} is none of them: let the loader return its arrays"
        )


def _of_dask(data: Any) -> Iterable[Shard]:
    """The chunks of a dask array along its first axis, each with its own part of the graph."""
    import dask

    if data.ndim > 1 and any(len(chunks) > 1 for chunks in data.chunks[1:]):
        data = data.rechunk(dict.fromkeys(range(1, data.ndim), -1))
    load = _fetched if _persisted(data) else _computed
    return [Shard(load, dask.optimize(block)[0]) for block in data.to_delayed().ravel().tolist()]


def _persisted(data: Any) -> bool:
    """Whether parts of a dask array are in the memory of a cluster."""
    client = sys.modules.get("distributed.client")
    return client is not None and bool(client.futures_of(data))


# ---- loaders, which workers import by their names


def _given(array: Any) -> Any:
    return array


def _mapped(array: np.memmap[Any, Any], blocks: Iterable[tuple[int, int]]) -> Iterable[Shard]:
    """Blocks of rows of a memory map, which a worker maps again."""
    if not _is_in_file(array):
        return [Shard(_given, np.asarray(array[begin:end])) for begin, end in blocks]
    path, step = os.fspath(array.filename), array.strides[0]  # type: ignore[arg-type]
    return [
        Shard(_map, path, array.dtype, array.offset + begin * step, (end - begin, *array.shape[1:]))
        for begin, end in blocks
    ]


def _is_in_file(array: np.memmap[Any, Any]) -> bool:
    """Whether the file of a memory map has its rows, in one piece."""
    private = array.base is None or array.mode == "c"  # changes are not in the file
    sliced = isinstance(array.base, np.ndarray)  # its offset is that of the other map
    if private or sliced or array.filename is None or not array.flags.c_contiguous:
        return False
    return _mapped_path(array.ctypes.data) == os.fsencode(os.path.realpath(array.filename))


def _mapped_path(address: int) -> bytes:
    """The path that the file at an address has now, with other words behind it if the file was deleted or replaced."""
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            begin, _, end = line.partition(b" ")[0].partition(b"-")
            if int(begin, 16) <= address < int(end, 16):
                return line.rstrip(b"\n").split(maxsplit=5)[-1].replace(rb"\012", b"\n")
    return b""


def _map(path: str, dtype: Any, offset: int, shape: tuple[int, ...]) -> Any:
    return np.memmap(path, dtype, "r", offset, shape) if 0 not in shape else np.zeros(shape, dtype)


def _npy(path: str, begin: int, end: int) -> Any:
    return np.load(path, mmap_mode="r")[begin:end]


def _row_group(path: str, group: int, columns: list[str]) -> Any:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path).read_row_group(group, columns)
    arrays = [_decoded(table.column(name)).to_numpy() for name in columns]
    try:
        return np.column_stack(arrays)
    except TypeError:
        _refuse_mixed(path, {array.dtype: name for name, array in zip(columns, arrays, strict=True)})
        raise


def _refuse_mixed(path: str, columns: Mapping[Any, str]) -> None:
    """Raise TypeError for columns, by their dtypes, that no array can have together, such as dates and numbers."""
    for one, other in itertools.combinations(columns, 2):
        try:
            np.column_stack([np.zeros(1, one), np.zeros(1, other)])
        except TypeError:
            raise TypeError(
                f"no array has the columns {columns[one]!r} of {one} and {columns[other]!r} of {other}, of {path!r}: "
                "write numbers instead, or give a pmstore.Shard with a loader of your own"
            ) from None


def _decoded(column: Any) -> Any:
    """A column without a dictionary. A null has no place in one, and its number would be that of a value."""
    from pyarrow.types import is_dictionary

    return column.cast(column.type.value_type) if is_dictionary(column.type) else column


def _part(array: Any, begin: int, end: int) -> Any:
    return np.asarray(_found(array)[begin:end])


def _found(array: Any) -> Any:
    """A zarr array, opened again here.

    It came with its metadata: zarr takes chunks that it does not find for fill values, and decodes others by codecs
    that the array may have had before. Raises FileNotFoundError if it is not in its store here, or ValueError if it is
    another one.
    """
    name = f"{array.store}/{array.path}".rstrip("/")
    try:
        mode = "r" if getattr(array.store, "read_only", True) else "r+"  # not every store has a copy for reading
        found = importlib.import_module("zarr").open_array(array.store, path=array.path, mode=mode)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no zarr array {name!r} here: store it where the workers find it, too"
        ) from error
    given, here = ((one.shape, one.dtype, one.chunks) for one in (array, found))
    if given != here and not _forgot_order(array, found):
        texts = [f"one of {dtype}, {shape}, in chunks of {chunks}" for shape, dtype, chunks in (here, given)]
        raise ValueError(f"{name!r} is another array now: {texts[0]}, and it was {texts[1]}: open it again")
    return found


def _forgot_order(array: Any, found: Any) -> bool:
    """Whether zarr arrays differ in the order of bytes only, which zarr 3 forgets when it opens an array again."""
    given, here = ((one.metadata.zarr_format, one.shape, one.chunks) for one in (array, found))
    if given != here or given[0] != 3:
        return False
    return array.dtype.kind in "biufcmMU" and bool(array.dtype.newbyteorder("=") == found.dtype)


def _computed(block: Any) -> Any:
    return _array(block.compute(scheduler="synchronous"))


def _fetched(block: Any) -> Any:
    """A block that is in the memory of the cluster that this worker belongs to."""
    try:
        from distributed import get_client

        client = get_client()
    except (ImportError, ValueError) as error:
        raise RuntimeError("the dask array was persisted on a cluster: pass its client, engine=client") from error
    return _array(client.compute(block).result())


def _array(block: Any) -> Any:
    """An array. One with a mask keeps it, so that it is refused, and not taken for its data. One with gaps has none
    after it was sent, so it has none here either: sums must not depend on where a block was."""
    return block if isinstance(block, np.ma.MaskedArray) else _without_gaps(np.asarray(block))


def _short(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype}, {' × '.join(map(str, value.shape))}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
