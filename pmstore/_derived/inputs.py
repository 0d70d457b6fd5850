"""The inputs of derived arrays: names in the store, and values that the program gives.

An input has a digest and a value. The digest is a 64-bit hash of every bit of the input; two inputs have the same
digest by accident once in 10^19. The function gets the value as a read-only view or a copy, so that it can't change the
input.

Arrays are hashed at every access, pending changes included, because any code may have written to them. Inputs that
can't change are hashed once: arrays made with writeable=False, and everything in a store that is open for reading. A
buffer of such an array is kept. While it lives its space has no other owner (I9), so that an equal entry means the same
array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._catalog.kinds import ARRAY, DERIVED, LIST, OBJECT
from pmstore._catalog.names import key_of
from pmstore._core import Entry, hash64
from pmstore._errors import UNSOUND, DerivedArrayError, of
from pmstore._values.array import Array, live_array, order_of, read_layout
from pmstore._values.dtypes import descriptor_of, value_bytes
from pmstore._values.values import decode, encode

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog
    from pmstore._derived.arrays import DerivedArrays

__all__ = ["Given", "Input", "Digests", "Named", "combine", "given", "hash_array"]

Digests = dict[str, int]  # the digests of the names in one access, so that each name is hashed once


def combine(parts: list[Any]) -> int:
    """One digest of values and digests."""
    return hash64(encode(parts))


def hash_array(array: Array) -> int:
    """The hash of dtype, shape, order and contents of an array of any layout. Padding of elements counts as zeros."""
    order = order_of(array)
    about = hash64(encode([descriptor_of(array.dtype), list(array.shape), order]))
    if not array.nbytes:
        return about
    flat = np.ascontiguousarray(array.reshape(-1, order=order))
    return hash64(value_bytes(flat).data, about)


def read_only(array: Array) -> Array:
    """A view that can't be written, nor made writeable unless the array itself is."""
    view: Array = array.view()
    view.flags.writeable = False
    return view


class Input(ABC):
    """An argument of the function."""

    __slots__ = ()
    name: str | None  # in the store

    @abstractmethod
    def digest(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> int:
        """The current digest. Raises DerivedArrayError, of the array `owner` or of an input, if there is none."""

    @abstractmethod
    def value(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> Any:
        """The value that the function gets."""


class Named(Input):
    """An array, a value or a derived array of the store."""

    __slots__ = ("_key", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self._key = key_of(name)

    def digest(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> int:
        known = digests.get(self.name)
        if known is not None:
            return known
        entry, content = self._find(owner, arrays)
        if entry.kind == DERIVED:
            return arrays.by_name(self.name)._current_digest(digests, depth + 1)
        if entry.kind == ARRAY:
            pin = arrays.pins.get(self.name)
            digest = pin[2] if pin is not None and pin[0] == entry else hash_array(content)
            if self._never_changes(arrays.catalog, entry):
                arrays.pins[self.name] = entry, content, digest
        else:
            digest = hash64(content)
        digests[self.name] = digest
        return digest

    def value(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> Any:
        entry, content = self._find(owner, arrays)
        if entry.kind == DERIVED:
            return arrays.by_name(self.name)._at_depth(digests, depth + 1)
        return content if entry.kind == ARRAY else decode(content)

    def _find(self, owner: str, arrays: DerivedArrays) -> tuple[Entry, Any]:
        """Its entry, and the array with its live contents, or the encoded value."""
        catalog = arrays.catalog
        with catalog.lock:
            entry = catalog.core.get(self._key)
            if entry is None:
                arrays.pins.pop(self.name, None)
                raise DerivedArrayError(owner, f"has no value: its input {self.name!r} is not in the store")
            if entry.kind == LIST:
                raise DerivedArrayError(owner, f"can't be derived from {self.name!r}, a list: make an array of it")
            if entry.kind == OBJECT:
                raise DerivedArrayError(owner, f"can't be derived from {self.name!r}, which has several arrays")
            try:
                if entry.kind == ARRAY:
                    return entry, self._array(arrays, entry)
                return entry, None if entry.kind == DERIVED else catalog.encoded(entry)
            except UNSOUND as error:
                raise of(self.name, error) from error

    def _array(self, arrays: DerivedArrays, entry: Entry) -> Array:
        pin = arrays.pins.get(self.name)
        if pin is not None and pin[0] == entry:
            return pin[1]
        catalog = arrays.catalog
        described = read_layout(catalog.core, entry)
        # A buffer of its own: if no caller holds the live array, creating it would make every commit scan the array.
        if entry.offset and (catalog.read_only or not described.writeable):  # it is hashed once
            catalog.core.require_readable(entry.offset, entry.length, 0, entry.length)
        buffer: Any = bytearray()
        if entry.offset:
            buffer = catalog.core.buffer(entry.offset, entry.length, False, fixed=not described.writeable)
        return live_array(buffer, described, False)

    def _never_changes(self, catalog: Catalog, entry: Entry) -> bool:
        return catalog.read_only or not read_layout(catalog.core, entry).writeable


class Given(Input):
    """An array or a value of the program, which the store doesn't keep."""

    __slots__ = ("_array", "_encoded")
    name = None

    def __init__(self, array: Array | None, encoded: bytes) -> None:
        self._array = array
        self._encoded = encoded

    def digest(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> int:
        return hash64(self._encoded) if self._array is None else hash_array(self._array)

    def value(self, owner: str, arrays: DerivedArrays, digests: Digests, depth: int) -> Any:
        return decode(self._encoded) if self._array is None else read_only(self._array)


def given(value: Any) -> Given:
    """An array is referred to, so that its changes are seen; any other value is copied. Raises TypeError, with a
    hint, for a value that a store couldn't keep.
    """
    if type(value) is np.ndarray or type(value) is np.memmap:
        descriptor_of(value.dtype)
        return Given(value, b"")
    return Given(None, encode(value))
