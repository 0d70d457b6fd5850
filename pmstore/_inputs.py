"""The inputs of derived arrays: names of the store, and what the program gives.

An input has a digest, which changes with every bit of it (a hash of 64 bits: by accident once in 10^19), and a value
for the function, which the function can't change: a read-only view, or a copy.

Arrays are hashed whenever they are looked at, pending changes included, for anyone may have written to them. What can't
change is hashed once: arrays made with writeable=False, and everything in a store that is open for reading. A buffer of
such an array is kept, and while it lives its space has no other owner (I9), so the entry tells that it is the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._array import Array, live_array, read_layout
from pmstore._core import Entry, hash64
from pmstore._dtypes import descriptor_of
from pmstore._errors import UNSOUND, DerivedArrayError, of
from pmstore._kinds import ARRAY, DERIVED, LIST
from pmstore._names import key_of
from pmstore._values import decode, encode

if TYPE_CHECKING:
    from pmstore._catalog import Catalog

__all__ = ["Given", "Input", "Looked", "Named", "combine", "given", "hash_array"]

Looked = dict[str, int]  # the digests of the names that were looked at, so that one look hashes each of them once


def combine(parts: list[Any]) -> int:
    """One digest of values and digests."""
    return hash64(encode(parts))


def hash_array(array: Array) -> int:
    """Of dtype, shape, order and contents, of an array of any layout."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    about = hash64(encode([descriptor_of(array.dtype), list(array.shape), order]))
    if not array.nbytes:
        return about
    flat = np.ascontiguousarray(array.reshape(-1, order="F" if order == "F" else "C"))
    return hash64(flat.view(np.uint8).data, about)


def read_only(array: Array) -> Array:
    """A view that can't be written, nor made writeable as long as the array itself isn't."""
    view: Array = array.view()
    view.flags.writeable = False
    return view


class Input(ABC):
    """What a function is called with."""

    __slots__ = ()
    name: str | None  # in the store

    @abstractmethod
    def digest(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> int:
        """What it is now. DerivedArrayError, of the array `owner` or of an input, if there is none."""

    @abstractmethod
    def value(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> Any:
        """What the function gets."""


class Named(Input):
    """An array, a value or a derived array of the store."""

    __slots__ = ("_key", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self._key = key_of(name)

    def digest(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> int:
        known = looked.get(self.name)
        if known is not None:
            return known
        entry, content = self._find(owner, catalog)
        if entry.kind == DERIVED:
            return catalog.derived_by(self.name).look(looked, depth + 1)
        if entry.kind == ARRAY:
            pin = catalog.pins.get(self.name)
            digest = pin[2] if pin is not None and pin[0] == entry else hash_array(content)
            if self._never_changes(catalog, entry):
                catalog.pins[self.name] = entry, content, digest
        else:
            digest = hash64(content)
        looked[self.name] = digest
        return digest

    def value(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> Any:
        entry, content = self._find(owner, catalog)
        if entry.kind == DERIVED:
            return catalog.derived_by(self.name).at_depth(looked, depth + 1)
        return content if entry.kind == ARRAY else decode(content)

    def _find(self, owner: str, catalog: Catalog) -> tuple[Entry, Any]:
        """Its entry, and the array, which shows what is live, or the encoded value."""
        with catalog.lock:
            entry = catalog.core.get(self._key)
            if entry is None:
                catalog.pins.pop(self.name, None)
                raise DerivedArrayError(owner, f"has no value: its input {self.name!r} is not in the store")
            if entry.kind == LIST:
                raise DerivedArrayError(owner, f"can't be derived from {self.name!r}, a list: make an array of it")
            try:
                if entry.kind == ARRAY:
                    return entry, self._array(catalog, entry)
                return entry, None if entry.kind == DERIVED else catalog.encoded(entry)
            except UNSOUND as error:
                raise of(self.name, error) from error

    def _array(self, catalog: Catalog, entry: Entry) -> Array:
        pin = catalog.pins.get(self.name)
        if pin is not None and pin[0] == entry:
            return pin[1]
        described = read_layout(catalog.core, entry)
        # A buffer of its own: the live array's would make every commit look for changes, if nobody else has it.
        if entry.offset and (catalog.read_only or not described.writeable):  # it is hashed once
            catalog.core.require_readable(entry.offset, entry.length, 0, entry.length)
        buffer: Any = bytearray()
        if entry.offset:
            buffer = catalog.core.buffer(entry.offset, entry.length, False, fixed=not described.writeable)
        return live_array(buffer, described, False)

    def _never_changes(self, catalog: Catalog, entry: Entry) -> bool:
        return catalog.read_only or not read_layout(catalog.core, entry).writeable


class Given(Input):
    """An array or a value of the program's, which the store doesn't keep."""

    __slots__ = ("_array", "_encoded")
    name = None

    def __init__(self, array: Array | None, encoded: bytes) -> None:
        self._array = array
        self._encoded = encoded

    def digest(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> int:
        return hash64(self._encoded) if self._array is None else hash_array(self._array)

    def value(self, owner: str, catalog: Catalog, looked: Looked, depth: int) -> Any:
        return decode(self._encoded) if self._array is None else read_only(self._array)


def given(value: Any) -> Given:
    """An array is referred to, so that changes of it are seen; any other value is copied. TypeError, with a hint, for
    what a store couldn't keep.
    """
    if type(value) is np.ndarray or type(value) is np.memmap:
        descriptor_of(value.dtype)
        return Given(value, b"")
    return Given(None, encode(value))
