"""`load_into`: arrays, values and attributes of a file of another format become names of a store.

    names, shapes and dtypes ── refuse what a store can't hold ──▶ arrays, one after the other ──▶ values ──▶ attributes

All is done under the lock of the store's operations, and taken back if anything fails: a commit has all of it or
nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pmstore._catalog.attributes import Attributes, all_of, check_new, put_all, what_of
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.copying import Contents, put_copy
from pmstore._catalog.growing import planned
from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import key_of, parents
from pmstore._core import FIXED, Entry
from pmstore._errors import Error, InterchangeError, NameConflictError, UnknownNameError, in_part
from pmstore._interchange.formats import format_of
from pmstore._interchange.forms import Hints
from pmstore._interchange.found import Found, Stored, damage, require
from pmstore._interchange.source import Progress
from pmstore._interrupts import deliver, later
from pmstore._store.mapping import NameMapping
from pmstore._store.opening import absolute, local_path
from pmstore._values.array import Layout, layout
from pmstore._values.values import encode

__all__ = ["load_into", "source_of"]


def load_into(
    mapping: NameMapping,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    names: Iterable[str] | Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Read arrays, values and attributes from a file of another format into a store or a group of it.

    All names are new, and all of them come, or none: after an error the store is as before. They are pending changes,
    which the next commit makes durable together; other threads can't commit meanwhile. Attributes of the file itself
    become those of the store or the group; those that are there stay. Nothing is unpickled, and a file never runs code
    or reads other files.

    Parameters
    ----------
    mapping : Store or Group
        Where the names go.
    path : path-like
        The file or, for zarr, the directory. What `export` wrote comes back with its exact types; docs/interchange.md
        has the forms of other files.
    format : {"zarr", "npz", "safetensors", "hdf5"}, optional
        By default, what the path ends in; .h5 is HDF5, and so is .nc (netCDF-4). zarr may be version 2 or 3.
    names : iterable of str, or mapping of str to str, optional
        The names and groups of the file to be read; all by default. A mapping gives them new names.
    progress : callable, optional
        Called repeatedly with the number of bytes of arrays that were read and the total number. An exception ends
        the import. It can't commit, roll back or close the store: that is a TransactionError.

    Returns
    -------
    int
        The number of names. A UserWarning tells of links, and of attributes, for which a store has no form or no name,
        and of attributes that the store or a group has with other values.

    Raises
    ------
    InterchangeError (a ValueError)
        The file is damaged, or of another format. Damage of names that `names` leaves out may go unnoticed.
    DecodeError
        A time has a time zone that this machine does not know. The `decode` of registered types is not called.
    TypeError
        An array has a type that a store lacks, such as pickled objects or references: `names` chooses others.
    NameConflictError, InvalidNameError
        A name is taken, or can't be a name of a store: `names` gives it another one.
    UnknownNameError
        The file has no such name.
    ModuleNotFoundError
        The package zarr or h5py is not installed.
    OutOfSpaceError, ReadOnlyStoreError, ClosedStoreError, OSError
    """
    if not isinstance(mapping, NameMapping):
        raise TypeError(f"load_into() takes a Store or a Group, not {type(mapping).__name__}")
    source = source_of(path)
    read = format_of(source, format, reads=True)
    catalog = mapping._catalog
    catalog.writable()
    read.prepare()
    with contextlib.suppress(FileNotFoundError):  # `read` tells of it
        mode = os.stat(source).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the end of a pipe or a device never comes
            raise InterchangeError(f"{source!r} can't be read: it is neither a file nor a directory")
    with read.read(source) as found:
        with damage(source):
            require(isinstance(found.values, dict) and isinstance(found.attributes, dict), "its values are damaged")
        chosen = _Chosen(found, names)
        for name, text in [*found.left_out, *chosen.without_names()]:
            if chosen.new_group(name) is not None:
                warnings.warn(f"{source}: left out: {text}", UserWarning, stacklevel=2)
        with mapping._derived.lock, catalog.lock:
            catalog.writable()
            outer = catalog.importing  # an import in progress() of another one
            try:
                catalog.importing = True
                return _Import(mapping, source, found, chosen, progress).run()
            finally:
                catalog.importing = outer


def source_of(path: str | os.PathLike[str]) -> str:
    """The absolute path of a file to be imported. Raises what `local_path` raises."""
    return absolute(local_path(path, "an import reads files that are here: copy it first"))


class _Chosen:
    """The names of a file that are imported. pairs: the new name of each array and value."""

    def __init__(self, found: Found, names: Iterable[str] | Mapping[str, str] | None) -> None:
        there = [*(one.name for one in found.arrays), *found.values, *found.refused]
        self._attributes = found.attributes
        if isinstance(names, str):
            names = [names]
        self._all = names is None
        wanted = names if isinstance(names, Mapping) else {name: name for name in names or ()}
        self._wanted: dict[str, str] = dict(wanted)
        self.pairs = {name: new for name in there if (new := self.new(name)) is not None}
        for name, error in found.refused.items():
            if name in self.pairs or any(_is_in(old, name) for old in self._wanted):
                raise error
        for old in self._wanted:
            if not any(_is_in(name, old) for name in there):
                raise UnknownNameError(old, where="the file")

    def new(self, name: str) -> str | None:
        """The new name of a name or group; None for one that is not imported."""
        if self._all:
            return name
        for end in range(len(name), -1, -1):  # "" may be a name of a file
            old = name[:end]
            if old in self._wanted and _is_in(name, old):
                return self._wanted[old] + name[len(old) :]
        return None

    def new_group(self, name: str) -> str | None:
        """The same, and the name of a group above names that stay in it. The file itself is above all names."""
        if not name or ((new := self.new(name)) is None and self._keeps(name)):
            return name
        return new

    def without_names(self) -> Iterator[tuple[str, str]]:
        """Groups that have attributes, and no names that are imported: a store has no group without names."""
        kept = {group for name in self.pairs for group in (name, *parents(name))}
        for name, attributes in self._attributes.items():
            if name and name not in kept and attributes:
                yield name, f"the attributes of {name!r}, which has no arrays and no values"

    def _keeps(self, group: str) -> bool:
        return any(_is_in(old, group) and _is_in(new, group) for old, new in self._wanted.items())


def _is_in(name: str, group: str) -> bool:
    return f"{name}/".startswith(f"{group}/")


class _Import:
    def __init__(
        self, mapping: NameMapping, path: str, found: Found, chosen: _Chosen, progress: Progress | None
    ) -> None:
        self._mapping, self._path, self._found, self._chosen = mapping, path, found, chosen
        pairs = self._pairs = chosen.pairs
        self._catalog: Catalog = mapping._catalog
        self._progress = progress
        self._check_names()
        self._layouts = [(one, self._layout(one)) for one in found.arrays if one.name in pairs]
        self._total = sum(described.nbytes for _, described in self._layouts)
        self._done = 0
        self._values = {name: found.hints.value(name, value) for name, value in found.values.items() if name in pairs}
        for name, value in self._values.items():
            _encoded(name, value)
        self._attributes = self._exact_attributes()

    def _full(self, name: str) -> str:
        return self._mapping._full(self._pairs[name])

    def _check_names(self) -> None:
        there = [*(one.name for one in self._found.arrays), *self._found.values]
        if len(set(there)) != len(there):
            raise NameConflictError(f"{self._path!r} has a name twice")
        full: dict[str, str] = {}
        for name in self._pairs:
            new = self._full(name)
            key = key_of(new)
            if new in full:
                raise NameConflictError(f"{full[new]!r} and {name!r} would both be {new!r}")
            full[new] = name
            if self._catalog.core.get(key) is not None:
                raise NameConflictError(f"the name {new!r} is taken: import into a group, or give it another name")
            self._catalog.refuse_conflict(new, key)
        for new, name in full.items():
            for group in parents(new):
                if group in full:
                    raise NameConflictError(f"{name!r} can't be imported beside {full[group]!r}, which is no group")

    def _layout(self, one: Stored) -> Layout:
        known, dtype = self._found.hints.arrays.get(one.name, {}), one.dtype
        wanted = self._found.hints.dtype(one.name)
        if wanted is not None and _same_elements(wanted, dtype):
            dtype = wanted
        order = "F" if "F" in (one.order, known.get("order")) else "C"
        if len(one.shape) < 2:
            order = "C"
        writeable = known.get("fixed") is not True
        try:
            fixed = layout(one.shape, dtype, order, writeable)
        except TypeError as error:
            raise TypeError(f"{one.name!r}: {error}") from error
        for maxshape in one.maxshape, known.get("maxshape"):
            with contextlib.suppress(TypeError, ValueError):  # it contradicts the array
                if maxshape is not None:
                    return planned(one.shape, dtype, order, writeable, maxshape)
        return fixed

    def _exact_attributes(self) -> dict[str, dict[str, Any]]:
        """The attributes of imported names and of the groups above, by full name. Others are left out."""
        hints = self._found.hints
        out: dict[str, dict[str, Any]] = {}
        owners = {self._full(name) for name in self._pairs}
        owners |= {group for name in owners for group in parents(name)}
        for name, found in self._found.attributes.items():
            if not isinstance(found, dict) or not found:
                continue
            new = self._chosen.new_group(name)
            full = None if new is None else self._mapping._full(new) if new else self._mapping._prefix[:-1]
            if full is not None and (full in owners or not full):
                new_ones = {key: hints.attribute(name, key, found[key]) for key in _in_order(hints, name, found)}
                for key, value in new_ones.items():
                    _encoded(f"{name}, attribute {key}", value)
                there = {**all_of(self._catalog, full), **out.get(full, {})}
                self._tell_kept(full, new_ones, there)
                out.setdefault(full, {}).update({key: new_ones[key] for key in new_ones if key not in there})
                check_new(self._catalog, full, out[full])
        return out

    def _tell_kept(self, full: str, new: dict[str, Any], there: dict[str, Any]) -> None:
        """Warn of attributes that have other values where they go: those stay."""
        kept = [key for key in new if key in there and encode(new[key]) != encode(there[key])]
        if kept:
            text = f"attributes that {what_of(full)} has with other values: {', '.join(map(repr, kept))}"
            warnings.warn(f"{self._path}: left out: {text}", UserWarning, stacklevel=5)

    def run(self) -> int:
        catalog = self._catalog
        made: list[str] = []
        before: dict[str, dict[str, Any]] = {}  # the attributes of the store and of groups that are there
        try:
            for full in self._attributes:
                before[full] = all_of(catalog, full)
            for one, described in self._layouts:
                made.append(self._full(one.name))
                self._put(one, described)
            for name, value in self._values.items():
                made.append(self._full(name))
                if name in self._found.hints.lists and isinstance(value, list):
                    catalog.create_list(made[-1]).extend(value)
                else:
                    catalog.set(made[-1], value)
            for full, found in self._attributes.items():
                Attributes(catalog, full).update(found)
        except BaseException:
            try:
                self._take_back(made, before)
            except BaseException:  # a second interrupt, which may have come before `later`
                self._take_back(made, before)
                raise
            raise
        return len(made)

    def _take_back(self, made: list[str], before: dict[str, dict[str, Any]]) -> None:
        """Delete the names, give names that were there their attributes back, and empty both: all of it, or nothing."""
        with later():
            for full in made:
                with contextlib.suppress(Error):
                    self._catalog.delete(full)
            for full, found in before.items():
                with contextlib.suppress(Error):  # a new group is gone, with its attributes
                    put_all(self._catalog, full, found)
            made.clear()
            before.clear()

    def _put(self, one: Stored, described: Layout) -> None:
        key = key_of(self._full(one.name))
        flags = 0 if described.writeable else FIXED
        if not described.length:
            self._catalog.core.put(key, Entry(0, 0, ARRAY, 0, described.meta))
            return
        entry = Entry(8, described.length, ARRAY, flags, described.meta)  # put_copy chooses the place
        put_copy(self._catalog, key, entry, self._contents(one, described))

    def _contents(self, one: Stored, described: Layout) -> Contents:
        """The bytes of the array's extent, in pieces."""
        at = 0
        for piece in one.pieces() if one.order == described.order else _reordered(one):
            data: Any = np.ascontiguousarray(piece.astype(described.dtype, copy=False)).reshape(-1).view(np.uint8)
            at += data.nbytes
            if at > described.nbytes:
                break
            yield memoryview(data)
            self._done += data.nbytes
            deliver()
            if self._progress is not None:
                self._progress(self._done, self._total)
        if at != described.nbytes:
            raise InterchangeError(f"{self._path!r}, {one.name!r} has another number of elements than its shape")
        if described.tail:
            yield memoryview(bytes(described.length - described.nbytes - len(described.tail)) + described.tail)


def _reordered(one: Stored) -> Iterator[np.ndarray[Any, Any]]:
    """All elements in Fortran order, of an array that has them in C order."""
    whole = np.empty(one.shape, one.dtype)
    flat, at = whole.reshape(-1), 0
    for piece in one.pieces():
        flat[at : at + piece.size] = piece.reshape(-1)
        at += piece.size
    if at != flat.size:
        raise InterchangeError(f"{one.name!r} has another number of elements than its shape")
    yield whole.reshape(-1, order="F")


def _same_elements(wanted: np.dtype[Any], found: np.dtype[Any]) -> bool:
    """Whether elements of the one are those of the other, but for the order of bytes."""
    return wanted.newbyteorder("<") == found.newbyteorder("<") and wanted.itemsize == found.itemsize


def _in_order(hints: Hints, name: str, found: dict[str, Any]) -> list[str]:
    """The attributes' names, in the order in which they were assigned where that is known."""
    known = [key for key in hints.attributes.get(name, ()) if key in found]
    return known if len(known) == len(found) else list(found)


def _encoded(name: str, value: Any) -> None:
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        raise in_part(repr(name), error) from error
