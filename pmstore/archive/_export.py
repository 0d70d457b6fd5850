"""`export`: arrays and values of a store, of a snapshot or of a version in an archive, in formats that other programs
read.

    names, dtypes and shapes ── refuse what the format can't hold ──▶ arrays, one after the other ── sync ──▶ the name

All is written under a temporary name, which is locked. A kill leaves that, and the next export beside it deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import math
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pmstore._errors import Error, OutOfSpaceError, StoreExistsError, StoreIOError
from pmstore._store import opening
from pmstore._store.mapping import NameMapping
from pmstore._values.array import chunks
from pmstore._values.as_json import to_json
from pmstore._values.registry import Parts
from pmstore.archive._format import tell_losses
from pmstore.archive._versions import Version

__all__ = ["FORMATS", "VALUES", "export"]

VALUES = "__values__"  # where the values are that are no arrays

_TEMPORARY = ".pmstore-exporting-"
_CHUNK = 8 << 20  # bytes of a chunk in zarr, about

_SAFETENSORS = {
    **{f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)},
    "b1": "BOOL",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
}

Progress = Callable[[int, int], object]


class _Described(NamedTuple):
    """An array that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def little(self) -> np.dtype[Any]:
        """The same, little-endian."""
        found: np.dtype[Any] = self.dtype.newbyteorder("<")
        return found

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Source:
    """The source of an export: the values, and the arrays, described without reading them where that is possible."""

    def __init__(self, mapping: Mapping[str, Any], progress: Progress | None) -> None:
        self._mapping = mapping
        self._progress = progress
        self._done = 0
        self.arrays: list[_Described] = []
        self.values: dict[str, Any] = {}
        self._part: dict[str, tuple[str, str]] = {}  # the object and the part, by the name of the array
        rows = mapping._rows() if hasattr(mapping, "_rows") else ((name, "") for name in mapping)
        for name, kind, *about in rows:
            _check_name(name)
            if kind == "array":
                self.arrays.append(_Described(name, about[0], about[1]))
                continue
            value = _value(mapping, name)
            if isinstance(value, Parts) and kind == "object":
                self._add_parts(name, value)
            elif isinstance(value, np.ndarray):
                self.arrays.append(_Described(name, value.shape, value.dtype))
            else:
                self.values[name] = to_json(value)
        self._total = sum(one.nbytes for one in self.arrays)

    def _add_parts(self, name: str, value: Parts) -> None:
        """Arrays of a value of a registered type get names of their own, below its name."""
        rest = {}
        for part, content in value.items():
            below = f"{name}/{part.replace('/', '_')}"
            if isinstance(content, np.ndarray) and below not in self._part:
                _check_name(below)
                self._part[below] = name, part
                self.arrays.append(_Described(below, content.shape, content.dtype))
            else:
                rest[part] = to_json(content)
        self.values[name] = {"type": value.type_name, "parts": rest}

    def read(self, described: _Described) -> np.ndarray[Any, Any]:
        name, part = self._part.get(described.name, (described.name, None))
        array = self._mapping[name] if part is None else _value(self._mapping, name)[part]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (described.shape, described.dtype):
            raise ValueError(f"{described.name!r} has changed while it was exported")
        return array

    def written(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def export(
    mapping: Mapping[str, Any],
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    progress: Progress | None = None,
) -> int:
    """Write arrays and values in another format, array by array, so that little of them is in memory at once.

    Arrays keep shape, dtype and elements; in zarr and safetensors, all are little-endian and in C order. Values that
    are no arrays (numbers, text, lists, …) become JSON, as `pmstore dump --json` shows them: a member
    ``__values__.json`` of an .npz file, an attribute ``__values__`` of the zarr group, a metadata entry ``__values__``
    of a safetensors file. Arrays of a value of a registered type (`pmstore.register`) are written below its name, and
    the rest of it as JSON.

    Parameters
    ----------
    mapping : mapping of str to arrays and values
        A store, a group, or a version of an archive. A store that is open for writing is written with its pending
        changes, and must not be changed meanwhile; one that was opened with mode "r" shows one commit.
    path : path-like
        The new file or, for zarr, the new directory. It gets its name when it is complete and synced.
    format : {"zarr", "npz", "safetensors"}, optional
        By default, what the path ends in. zarr is version 3, with the library's own codecs, and needs the package zarr.
    progress : callable, optional
        Called now and then with the bytes of arrays that were written, and that there are. An exception ends the
        export.

    Returns
    -------
    int
        The number of names. An ArchiveWarning tells of arrays of a version that a lossy codec has approximated.

    Raises
    ------
    ValueError
        No format, or a name that the format can't hold.
    TypeError
        The format has no type for the dtype of an array. Nothing stays at the path.
    ModuleNotFoundError
        The package zarr is not installed.
    StoreExistsError
        There is something at the path.
    OutOfSpaceError, StoreIOError
        The file can't be written.
    CorruptStoreError, StaleSnapshotError
        An array is damaged, or a later commit has changed it. Nothing stays at the path.
    """
    target = os.path.abspath(os.fspath(path))
    write = _FORMATS[_format_of(target, format)]
    if os.path.lexists(target):
        raise StoreExistsError(errno.EEXIST, f"{target!r} exists: an export is a new file", target)
    write.prepare()
    source = _Source(mapping, progress)
    for one in source.arrays:
        write.check(one)
    try:
        with _new(target, directory=write.directory) as temporary:
            write.write(source, temporary)
    except Error:
        raise
    except OSError as error:
        kind = OutOfSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreIOError
        raise kind(
            error.errno or errno.EIO, f"{target!r} can't be written: {error.strerror or error}", target
        ) from error
    version = getattr(mapping, "store", mapping)  # of a group, too
    if isinstance(version, Version):
        tell_losses(target, version.version, version.losses.values(), 2)
    return len(source.arrays) + len(source.values)


def _value(mapping: Mapping[str, Any], name: str) -> Any:
    """A value; of a registered type, its parts."""
    found = mapping._catalog.parts(mapping._full(name)) if isinstance(mapping, NameMapping) else None
    return mapping[name] if found is None else found


def _format_of(target: str, format: str | None) -> str:
    known = ", ".join(_FORMATS)
    if format is None:
        format = os.path.splitext(target)[1][1:]
        if format not in _FORMATS:
            raise ValueError(f"{target!r} ends in no format: format= is one of {known}")
    if format not in _FORMATS:
        raise ValueError(f"the format {format!r} is none of {known}")
    return format


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}: {name!r:.80}")
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts or "\0" in name or "\\" in name:
        raise ValueError(f"the name {name!r} is no path inside an export")
    if parts[0] in (VALUES, VALUES + ".json", "__metadata__"):
        raise ValueError(f"the name {name!r} has a meaning of its own in an export")


# ---- temporary names


@contextlib.contextmanager
def _new(target: str, *, directory: bool) -> Iterator[str]:
    """A temporary file or directory beside the target. It gets the target's name, durable, at the end of the block."""
    parent = os.path.dirname(target)
    _sweep(parent)
    temporary = os.path.join(parent, _TEMPORARY + secrets.token_hex(8))
    fd = _made(temporary, directory)
    try:
        yield temporary
        _sync(temporary)
        if directory:
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(temporary, target)
        else:
            opening._rename(temporary, target, replace=False)
        opening._sync_directory(parent)
    except FileExistsError:
        _delete(temporary)
        raise StoreExistsError(errno.EEXIST, f"{target!r} exists: an export is a new file", target) from None
    except BaseException:
        _delete(temporary)
        raise
    finally:
        os.close(fd)


def _made(temporary: str, directory: bool) -> int:
    """Makes it, and returns a descriptor that locks it."""
    if directory:
        os.mkdir(temporary)
    fd = os.open(
        temporary, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECTORY if directory else os.O_CREAT | os.O_EXCL), 0o666
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(fd)
            _delete(temporary)
            raise
    return fd


def _sweep(parent: str) -> None:
    """Delete the leftovers of exports that were killed: their locks are free."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if not name.startswith(_TEMPORARY):
                continue
            leftover = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                fd = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _delete(leftover)
                finally:
                    os.close(fd)


def _delete(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def _sync(path: str) -> None:
    """Sync a file, or all of a directory."""
    for folder, _, files in os.walk(path):
        for name in files:
            _sync_file(os.path.join(folder, name))
        opening._sync_directory(folder)
    if not os.path.isdir(path):
        _sync_file(path)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- formats


class _Format:
    directory = False

    def prepare(self) -> None:
        """Raise ModuleNotFoundError if a package is missing."""

    def check(self, described: _Described) -> None:
        """Raise TypeError if the format has no type for an array."""

    def write(self, source: _Source, path: str) -> None:
        raise NotImplementedError


class _Npz(_Format):
    """numpy's own, not compressed: np.load reads it, without pickle."""

    def write(self, source: _Source, path: str) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for one in source.arrays:
                with archive.open(f"{one.name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(_Told(member, source), source.read(one), allow_pickle=False)
            if source.values:
                archive.writestr(zipfile.ZipInfo(f"{VALUES}.json"), _json(source.values))


class _Told:
    """A file that tells the source how much was written."""

    def __init__(self, file: Any, source: _Source) -> None:
        self._file, self._source = file, source
        self._head = True

    def write(self, data: Any) -> int:
        count = int(self._file.write(data))
        self._source.written(0 if self._head else count)  # numpy writes the head first
        self._head = False
        return count


class _Safetensors(_Format):
    """8 bytes: the length of the head; the head, in JSON; the elements, without gaps, little-endian, in C order."""

    def check(self, described: _Described) -> None:
        if _safetensors_type(described.dtype) is None:
            raise TypeError(
                f"{described.name!r} has dtype {described.dtype}, and safetensors has no such type: npz keeps it"
            )

    def write(self, source: _Source, path: str) -> None:
        head: dict[str, Any] = {"__metadata__": {"format": "np"}}
        if source.values:
            head["__metadata__"][VALUES] = _json(source.values)
        at = 0
        arrays = sorted(source.arrays, key=lambda one: (-one.dtype.itemsize, one.name))  # so that each is aligned
        for one in arrays:
            end = at + one.nbytes
            head[one.name] = {
                "dtype": _safetensors_type(one.dtype),
                "shape": list(one.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > 100_000_000:
            raise ValueError("the names and values take more than safetensors allows: 100 MB")
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for one in arrays:
                for piece in chunks(source.read(one), "C") if one.nbytes else ():
                    file.write(piece.astype(one.little, copy=False).data.cast("B"))
                    source.written(piece.nbytes)


def _safetensors_type(dtype: np.dtype[Any]) -> str | None:
    return _SAFETENSORS.get(f"{dtype.kind}{dtype.itemsize}")


class _Zarr(_Format):
    """A group of zarr v3 in a directory. It has a chunk for about 8 MiB."""

    directory = True

    def prepare(self) -> None:
        try:
            importlib.import_module("zarr")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'zarr is missing: pip install "pmstore[export]" (or export to .npz)', name="zarr"
            ) from error

    def check(self, described: _Described) -> None:
        if any(part.startswith("__") or part == "zarr.json" for part in described.name.split("/")):
            raise ValueError(f"the name {described.name!r} has a meaning of its own in zarr: export to .npz keeps it")
        if described.dtype.kind in "mM" and np.datetime_data(described.dtype)[0] == "generic":
            raise TypeError(f"{described.name!r} has dtype {described.dtype} without a unit, which zarr lacks")

    def write(self, source: _Source, path: str) -> None:
        zarr = importlib.import_module("zarr")
        root = zarr.create_group(path, zarr_format=3, overwrite=False)
        if source.values:
            root.attrs[VALUES] = source.values
        for one in source.arrays:
            *groups, last = one.name.split("/")
            group = root.require_group("/".join(groups)) if groups else root
            try:
                # Chunks that equal the fill value are written, too: -0.0 equals 0.0.
                config = {"write_empty_chunks": True}
                made = group.create_array(last, shape=one.shape, dtype=one.little, chunks=_chunk(one), config=config)
                again = zarr.open_array(os.path.join(path, one.name), mode="r")
                if (again.dtype, again.shape) != (one.little, one.shape):
                    raise TypeError(f"it would come back as {again.dtype}")
            except (TypeError, ValueError) as error:
                text = f"{one.name!r} has dtype {one.dtype}, which zarr can't keep ({error}): export to .npz keeps it"
                raise TypeError(text) from error
            self._fill(made, source, one)

    @staticmethod
    def _fill(made: Any, source: _Source, one: _Described) -> None:
        array = source.read(one)
        rows = made.chunks[0] if array.ndim else 1
        for at in range(0, len(array), rows) if array.ndim else ():
            piece = array[at : at + rows]
            made[at : at + rows] = piece.astype(one.little, copy=False)
            source.written(piece.nbytes)
        if not array.ndim:
            made[...] = array.astype(one.little)
            source.written(array.nbytes)


def _chunk(one: _Described) -> tuple[int, ...]:
    """The shape of a chunk: rows, or a part of one."""
    chunk = [max(1, n) for n in one.shape]
    for axis in range(len(chunk)):
        nbytes = math.prod(chunk) * one.dtype.itemsize
        if nbytes <= _CHUNK:
            break
        chunk[axis] = max(1, chunk[axis] * _CHUNK // nbytes)
    return tuple(chunk)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False)


_FORMATS: dict[str, _Format] = {"zarr": _Zarr(), "npz": _Npz(), "safetensors": _Safetensors()}
FORMATS = tuple(_FORMATS)
