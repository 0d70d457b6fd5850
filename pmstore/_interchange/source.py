"""The source of an export: arrays, described without reading them where the mapping can do so; values; attributes."""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pmstore._catalog.lists import PersistentList
from pmstore._catalog.names import key_of
from pmstore._core import pointer_to
from pmstore._errors import UNSOUND, UnknownNameError, in_part, of
from pmstore._interchange.forms import RESERVED, Hints, MaxShape
from pmstore._store.reading import verify
from pmstore._values.array import chunks, order_of
from pmstore._values.as_json import to_json
from pmstore._values.registry import Parts
from pmstore._values.tensors import array_of_tensor, is_tensor
from pmstore._values.types import is_text
from pmstore._values.values import encode

__all__ = ["Described", "Format", "Place", "Progress", "Source", "chunk_of", "free", "places", "whole_elements"]

Progress = Callable[[int, int], object]
Place = tuple[slice, ...]  # where a block is in an array

PIECE = 4 << 20  # bytes that are written or read at once, about
_LIVE = 64 << 20  # the same, of arrays that are in memory: for the sake of progress only
_MOST = 16  # pieces that are read at once, at most, to have whole chunks of a file
_MANY = 1 << 13  # chunks of a file that are read at once, at most: its library takes some KiB for each
_COPIED = 1 << 20  # bytes from which on arrays of a snapshot are copied piece by piece


class Described(NamedTuple):
    """An array that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    maxshape: MaxShape = None

    @property
    def little(self) -> np.dtype[Any]:
        """The same, little-endian. Of two integers of one size that numpy has, such as long and longlong, the usual."""
        found: np.dtype[Any] = self.dtype.newbyteorder("<")
        return np.dtype(found.str) if found.kind in "iu" else found

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source:
    """names: those, and the groups of that name, are exported; all by default."""

    def __init__(self, mapping: Mapping[str, Any], progress: Progress | None, names: Iterable[str] | None) -> None:
        if not isinstance(mapping, Mapping):
            advice = (
                ": pmstore.open(path, 'r') opens the store" if isinstance(mapping, str | bytes | os.PathLike) else ""
            )
            raise TypeError(
                f"export() takes a store, a group, a version of an archive or a dict, not {mapping!r:.80}{advice}"
            )
        self._mapping = mapping
        self._progress = progress
        self._done = 0
        self._kept: dict[str, tuple[str, bool]] = {}
        self.arrays: list[Described] = []
        self.values: dict[str, Any] = {}
        self.readable: dict[str, Any] = {}
        self.lists: list[str] = []
        self._parts: dict[str, tuple[str, str, int]] = {}  # by the name in the export: object, part, its number
        self._types: dict[str, str] = {}  # of objects
        asked = None if names is None else _asked(names)
        rows = mapping._rows() if hasattr(mapping, "_rows") else ((name, "") for name in mapping)
        found = set()
        for name, kind, *about in rows:
            inside: list[str] = []
            if asked is not None and not (inside := [one for one in asked if f"{name}/".startswith(f"{one}/")]):
                continue
            found.update(inside)
            _check_name(name)
            if kind == "array":
                described = mapping._layout(name)  # type: ignore[attr-defined]
                self.arrays.append(Described(name, described.shape, described.dtype, described.maxshape))
                self._kept[name] = described.order, described.writeable
                continue
            if kind == "object":
                self._add_parts(name)
            elif kind != "derived":
                self._add(name, mapping[name])
            else:
                self._add_derived(name, about[3], asked is not None and name in asked)
        for name in asked or ():
            if name not in found:
                raise UnknownNameError(name, group=getattr(mapping, "name", ""))
        self.attributes = self._attributes()
        self._total = sum(one.nbytes for one in self.arrays)

    def _add_derived(self, name: str, what: str, asked: bool) -> None:
        """A derived array that this program does not declare is left out, unless it was asked for."""
        mapping: Any = self._mapping
        if asked or mapping._full(name) in mapping._derived.declared:
            self._add(name, mapping[name])
        else:
            text = f"left out: {name!r} is {what}: only a program that declares it can read it"
            warnings.warn(text, UserWarning, stacklevel=4)

    def _add(self, name: str, value: Any) -> None:
        if is_tensor(value):
            value = array_of_tensor(value)
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray) and not is_text(value.dtype):
            self.arrays.append(Described(name, value.shape, value.dtype))
            self._kept[name] = order_of(value), True
            return
        if isinstance(value, PersistentList):
            self.lists.append(name)
            value = list(value)
        self.values[name] = value
        try:
            self.readable[name] = to_json(value)
        except TypeError as error:
            raise in_part(repr(name), error) from error

    def _add_parts(self, name: str) -> None:
        """A value of a registered type is written as a group of its parts. The attribute ``type`` of the group has the
        name of the type; ``type_``, if the object has an attribute ``type`` of its own, and so on. A part whose name
        is no path is ``part`` and its number, with "_" behind it if another part has that name."""
        mapping: Any = self._mapping
        parts: Parts = mapping._catalog.parts(mapping._full(name))
        self._types[name] = parts.type_name
        taken = {part for part in parts if _is_path(part)}
        for i, (part, content) in enumerate(parts.items()):
            shown = part if part in taken else free(f"part {i}", taken)
            taken.add(shown)
            self._parts[f"{name}/{shown}"] = name, part, i
            self._add(f"{name}/{shown}", content)

    def _attributes(self) -> dict[str, dict[str, Any]]:
        if not hasattr(self._mapping, "_attributes"):
            return {}
        kept = {"", *self.values, *(one.name for one in self.arrays)}
        for name in list(kept):
            parts = name.split("/")
            kept.update("/".join(parts[:i]) for i in range(1, len(parts)))
        found = {name: about for name, about in self._mapping._attributes().items() if name in kept}
        for name, kind in self._types.items():
            about = found.get(name, {})
            found[name] = {free("type", about): kind, **about}
        for name in RESERVED.intersection(found.get("", ())):
            raise ValueError(f"the attribute {name!r} has a meaning of its own in an export")
        return found

    def hints(
        self,
        told: Callable[[Described], np.dtype[Any]],
        order: bool = True,
        every: bool = False,
        other: Container[tuple[str, str]] = (),
    ) -> dict[str, Any]:
        """See `Hints`, in JSON. told: the dtype that the file tells; order: whether it does not tell the order."""
        arrays = (
            (one.name, one.dtype, told(one), kept if order else "", writeable, one.maxshape)
            for one in self.arrays
            for kept, writeable in (self._kept[one.name],)
        )
        values = {name: value for name, value in self.values.items() if _storable(value)}
        return Hints.of(arrays, values, self.lists, self.attributes, every, other).json()

    def read(self, described: Described) -> np.ndarray[Any, Any]:
        if described.name in self._parts:
            name, part, number = self._parts[described.name]
            mapping: Any = self._mapping
            array = mapping._catalog.part(mapping._full(name), part, number)
        else:
            array = self._mapping[described.name]
            array = array_of_tensor(array) if is_tensor(array) else array
            if hasattr(self._mapping, "_catalog"):
                verify(self._mapping._catalog, self._mapping._full(described.name))  # type: ignore[attr-defined]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (described.shape, described.dtype):
            raise ValueError(f"{described.name!r} has changed while it was exported")
        return array

    def order(self, described: Described) -> str:
        """ "C" or "F"."""
        return self._kept[described.name][0]

    def flat(self, described: Described, order: str) -> Iterator[np.ndarray[Any, Any]]:
        """The elements in an order, in contiguous 1-d arrays. The next one may have the memory of the last one."""
        if (copied := self._copier(described, order)) is not None:
            step = whole_elements(described.dtype)
            for at in range(0, described.nbytes, step):
                yield copied(at, min(step, described.nbytes - at))
        elif described.nbytes:
            yield from chunks(self.read(described), order)

    def blocks(
        self, described: Described, nbytes: int, chunks: tuple[int, ...] = ()
    ) -> Iterator[tuple[Place, np.ndarray[Any, Any]]]:
        """The elements in blocks (see `places`), with their places. The next one may have the memory of the last one.
        Those of an array that is in memory may be larger."""
        copied, at = self._copier(described, "C"), 0
        array = self.read(described) if copied is None else None
        nbytes = nbytes if array is None else _LIVE
        for place in places(described.shape, described.dtype.itemsize, nbytes, chunks):
            if array is not None:
                yield place, array[place or ...]
            elif copied is not None:
                shape = [part.stop - part.start for part in place]
                piece = copied(at, math.prod(shape) * described.dtype.itemsize)
                at += piece.nbytes
                yield place, piece.reshape(shape)

    def _snapshot_core(self, described: Described) -> Any:
        """The core of a snapshot, from which pieces of an array can be copied; None for other mappings and parts."""
        if described.name in self._parts:
            return None
        core = getattr(getattr(self._mapping, "_catalog", None), "core", None)
        return core if core is not None and getattr(core, "snapshot", None) is not None else None

    def _copier(self, described: Described, order: str) -> Callable[[int, int], np.ndarray[Any, Any]] | None:
        """Verified pieces of an array in a snapshot, by their first byte and number of bytes: a whole copy would need
        its memory, and time to get that. None for other arrays, and if they are in another order."""
        core = self._snapshot_core(described)
        if core is None or described.nbytes < _COPIED or self.order(described) != order:
            return None
        mapping: Any = self._mapping
        entry = core.get(key_of(mapping._full(described.name)))
        if entry is None or entry.length < described.nbytes:
            raise ValueError(f"{described.name!r} has changed while it was exported")
        buffer = np.empty(0, np.uint8)

        def copied(at: int, nbytes: int) -> np.ndarray[Any, Any]:
            nonlocal buffer
            if len(buffer) < nbytes:
                buffer = np.empty(nbytes, np.uint8)
            piece = buffer[:nbytes]
            try:
                with mapping._catalog.lock:
                    core.require_open()
                    core.snapshot.copy(entry.offset, entry.length, at, pointer_to(piece), nbytes)
            except UNSOUND as error:
                raise of(described.name, error) from error
            return piece.view(described.dtype)

        return copied

    def written(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _asked(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _is_path(part: str) -> bool:
    return part not in ("", ".", "..") and not set(part) & set("/\\\0")


def free(name: str, taken: Container[str]) -> str:
    """The name, with "_" behind it as often as it is taken."""
    while name in taken:
        name += "_"
    return name


def _storable(value: Any) -> bool:
    try:
        encode(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}: {name!r:.80}")
    parts = name.split("/")
    if not all(parts) or "." in parts or ".." in parts or "\0" in name or "\\" in name:
        raise ValueError(f"the name {name!r} is no path inside an export")
    if parts[0] in RESERVED:
        raise ValueError(f"the name {name!r} has a meaning of its own in an export")


def whole_elements(dtype: np.dtype[Any]) -> int:
    """The bytes of a piece, about `PIECE`, that has whole elements."""
    return max(1, PIECE // max(1, dtype.itemsize)) * dtype.itemsize


def places(shape: tuple[int, ...], itemsize: int, nbytes: int, chunks: tuple[int, ...] = ()) -> Iterator[Place]:
    """The places of blocks that have all elements of an array, in C order: each block is contiguous in that order.

    nbytes: of a block, about. chunks: the shape of a file's chunks. Blocks have whole ones, so that each is decoded
    once. Where these would be over `_MOST` pieces, a block has that size, and a chunk is decoded for several blocks.
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    parts = [min(n, chunk) for n, chunk in zip(shape, chunks or (1,) * len(shape), strict=True)]
    counts = [-(-n // part) if chunks else 1 for n, part in zip(shape, parts, strict=True)]
    for axis in range(len(shape)):  # blocks follow each other along this one, and have one index of those before it
        inner = max(1, itemsize * math.prod(shape[axis + 1 :]))  # bytes at an index
        across = math.prod(counts[axis + 1 :])  # chunks there
        if inner <= _MOST * PIECE and across <= _MANY:
            break
    layers = nbytes // (inner * parts[axis])
    if chunks:
        layers = min(layers, _MANY // across)
    step = max(1, layers) * parts[axis]
    if step * inner > max(nbytes, _MOST * PIECE):
        step = max(1, _MOST * PIECE // inner)
    rest = tuple(slice(0, n) for n in shape[axis + 1 :])
    for index in np.ndindex(shape[:axis]):
        for at in range(0, shape[axis], step):
            yield *(slice(i, i + 1) for i in index), slice(at, min(at + step, shape[axis])), *rest


def chunk_of(one: Described, nbytes: int) -> tuple[int, ...]:
    """The shape of a chunk with so many bytes at most: rows, or a part of one."""
    chunk = [max(1, n) for n in one.shape]
    for axis in range(len(chunk)):
        whole = math.prod(chunk) * one.dtype.itemsize
        if whole <= nbytes:
            break
        chunk[axis] = max(1, chunk[axis] * nbytes // whole)
    return tuple(chunk)


def elsewhere(dtype: np.dtype[Any]) -> str:
    """Advice for an array whose dtype a format lacks."""
    try:
        np.lib.format.dtype_to_descr(dtype)
    except (TypeError, ValueError):  # its fields overlap, or are out of order
        return "no other format has it: store each field as an array"
    return "npz keeps it"


class Format(ABC):
    """How a format is written, and read."""

    directory = False

    def prepare(self) -> None:  # noqa: B027  (most need no package)
        """Raise ModuleNotFoundError if a package is missing."""

    @abstractmethod
    def check(self, described: Described) -> None:
        """Raise TypeError if the format has no type for an array, ValueError if it can't hold the name."""

    @abstractmethod
    def write(self, source: Source, path: str) -> None:
        """Write all of the source to a path: an empty file, or for a directory an empty directory."""

    @abstractmethod
    def read(self, path: str) -> Any:
        """A context manager over the `Found` of a file."""
