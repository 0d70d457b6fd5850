"""Attributes of a store, its groups and its names: a small dict in an entry of its own, beside what it describes.

I38  An entry of attributes belongs to the store, to a name or to a group with names in it. It is committed with it,
     moves with it, and goes with it: a group goes with its last name.
"""

from __future__ import annotations

import contextlib
from collections.abc import ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any

from pmstore._catalog.kinds import BLOB, INLINE
from pmstore._catalog.names import (
    ATTRIBUTES_PREFIX,
    attributes_key,
    check_name,
    key_of,
    owner_of_attributes,
    parents,
)
from pmstore._display import full_text, name_text
from pmstore._errors import (
    UNSOUND,
    CorruptStoreError,
    DecodeError,
    Error,
    InvalidNameError,
    TooLargeError,
    UnknownNameError,
    of,
)
from pmstore._interrupts import later
from pmstore._values.values import decode, encode, has_containers

if TYPE_CHECKING:
    from pmstore._catalog.catalog import Catalog
    from pmstore._core import Core, Entry

__all__ = [
    "ATTRIBUTES_MAX",
    "Attributes",
    "OwnAttributes",
    "all_of",
    "below",
    "brief",
    "check_attribute_name",
    "check_new",
    "decoded",
    "put_all",
    "readable",
    "what_of",
]

ATTRIBUTES_MAX = 1 << 20  # bytes of all attributes of a name, encoded

_SHOWN = 60  # characters in a listing
_SIMPLE = (str, int, float, bool, bytes, type(None))  # have no parts


class Attributes(MutableMapping[str, Any]):
    """The attributes of a name, a group or a store: a mapping from str to values, as h5py's ``attrs``.

    Values are those that a store keeps, small arrays included. Reading gives a copy: a list or an array that is changed
    has to be assigned again. Each change writes all attributes of the name anew, and is part of the transaction, like
    that of any value. All attributes of a name take at most 1 MiB.

    Every call raises UnknownNameError (a KeyError) if the name is gone, CorruptStoreError if the attributes are
    damaged, StaleSnapshotError in an old snapshot, and ClosedStoreError. Changes raise TypeError with a hint for a
    value that can't be stored, InvalidNameError (a ValueError) for an attribute's name that is empty, has a NUL or is
    no UTF-8, TooLargeError, OutOfSpaceError and ReadOnlyStoreError. Then nothing has changed. Getting values, and
    `pop`, raise DecodeError if the `decode` of a registered type fails; ``del`` and all else need no values.
    """

    __slots__ = ("_catalog", "_keeper", "_name")

    def __init__(self, catalog: Catalog, name: str) -> None:
        """name: full, or "" for the store."""
        self._catalog, self._keeper = catalog, catalog.keeper()
        self._name = name

    def __copy__(self) -> Attributes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("attributes can't be pickled: pickle dict(attributes), or the store or group that has them")

    @property
    def name(self) -> str:
        """The full name of what the attributes describe; "" for the store."""
        return self._name

    def _require(self) -> None:
        catalog = self._catalog
        catalog.core.require_open()
        if self._name and not catalog.exists(key_of(self._name)):
            raise catalog.unknown(self._name)

    def _read(self) -> dict[str, Any]:
        """All attributes, with `Parts` for values of registered types."""
        with self._catalog.lock:
            self._require()
            return all_of(self._catalog, self._name)

    def _put(self, found: dict[str, Any]) -> None:
        """Store these. The caller holds the lock."""
        key = attributes_key(self._name)
        if found:
            self._catalog.put_encoded(key, _encoded(self._name, found), "attributes")
        else:
            self._catalog.core.delete(key)

    def _out(self, name: str, value: Any) -> Any:
        """A value of `_read` that goes to the user."""
        value = typed(value)
        if not self._catalog.read_only and has_containers(value):
            key = attributes_key(self._name) + name.encode()
            with self._catalog.lock:
                self._catalog.lost_updates.handed_out(key, name, value, encode(value))
        return value

    def _unknown(self, name: str, found: dict[str, Any]) -> UnknownNameError:
        text = f"; {what_of(self._name)} has {', '.join(map(repr, found)) or 'none':.200}"
        return UnknownNameError(name, lambda: text, what="attribute")

    def __getitem__(self, name: str) -> Any:
        """A copy of the attribute. Raises UnknownNameError (a KeyError)."""
        found = self._read()
        if name not in found:
            raise self._unknown(name, found)
        return self._out(name, found[name])

    def __setitem__(self, name: str, value: Any) -> None:
        """Stores a copy of the value."""
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        """Deletes an attribute. Raises UnknownNameError (a KeyError)."""
        with self._catalog.lock, later():
            self._catalog.writable()
            found = self._read()
            if name not in found:
                raise self._unknown(name, found)
            del found[name]
            self._put(found)

    _RAISE = object()

    def pop(self, name: str, default: Any = _RAISE) -> Any:
        """Delete an attribute and return its value, or the default if there is none of the name."""
        with self._catalog.lock, later():
            self._catalog.writable()
            found = self._read()
            if name not in found:
                if default is self._RAISE:
                    raise self._unknown(name, found)
                return default
            value = typed(found.pop(name))
            self._put(found)
            return value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The stored value of an attribute. If there is none, the default is stored first; its stored form is
        returned."""
        with self._catalog.lock, later():
            if name not in self:
                self[name] = default
            return self[name]

    def update(self, /, *others: Any, **more: Any) -> None:
        """Store several attributes: all of them, or none if there is an error."""
        new: dict[Any, Any] = dict(*others, **more)
        for name in new:
            check_attribute_name(name)
        with self._catalog.lock, later():
            self._catalog.writable()
            self._put({**self._read(), **new})
            for value in new.values() if self._catalog.lost_updates else ():
                self._catalog.lost_updates.assigned(value, encode(value))

    def clear(self) -> None:
        """Delete all attributes."""
        with self._catalog.lock:
            self._catalog.writable()
            self._require()
            self._put({})

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were first assigned."""
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def keys(self) -> KeysView[str]:
        """The names of the attributes, as they are now."""
        return self._read().keys()

    def values(self) -> ValuesView[Any]:
        """Copies of the values, of one moment."""
        return self._all().values()

    def items(self) -> ItemsView[str, Any]:
        """The names, and copies of the values, of one moment."""
        return self._all().items()

    def _all(self) -> dict[str, Any]:
        return {name: self._out(name, value) for name, value in self._read().items()}

    def __repr__(self) -> str:
        what = what_of(self._name)
        try:
            found = ", ".join(f"{name!r}: {full_text(readable(value))}" for name, value in self._read().items())
            return f"<attributes of {what}: {{{found}}}>"
        except (Error, KeyError) as error:
            return f"<attributes of {what}: {error}>"


class OwnAttributes(Attributes):
    """The attributes of a group or a store. A call gives those of a name in it."""

    __slots__ = ()

    def __call__(self, name: str = "") -> Attributes:
        """The attributes of a name or a group below, by default these. Raises UnknownNameError (a KeyError)."""
        if name:
            check_name(name)
        within = self._name and f"{self._name}/"
        found = Attributes(self._catalog, f"{within}{name}" if name else self._name)
        with self._catalog.lock:
            found._require()
        return found


def check_attribute_name(name: object) -> None:
    """Raise TypeError or InvalidNameError unless an attribute can have this name."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an attribute is a str, not {type(name).__name__}: {name!r:.80}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"the attribute {name!r:.200} holds a lone surrogate, which UTF-8 lacks") from error
    if not name or "\0" in name:
        raise InvalidNameError(f"the name of an attribute is not empty and has no NUL character: {name!r:.200}")


def _encoded(name: str, found: dict[str, Any]) -> bytes:
    encoded = encode({str.__str__(key): value for key, value in found.items()})  # of numpy's strings: plain ones
    if len(encoded) > ATTRIBUTES_MAX:
        raise TooLargeError(
            f"the attributes of {what_of(name)} would take {len(encoded):,} bytes, and {ATTRIBUTES_MAX:,} is the "
            "limit: keep large contents under a name of their own"
        )
    return encoded


def check_new(catalog: Catalog, name: str, new: dict[str, Any]) -> None:
    """Raise what `Attributes.update` would raise for these of a full name, which may not exist yet."""
    for one in new:
        check_attribute_name(one)
    _encoded(name, {**all_of(catalog, name), **new})


def put_all(catalog: Catalog, name: str, found: dict[str, Any]) -> None:
    """Give a full name these attributes, and no others."""
    with catalog.lock, later():
        attributes = Attributes(catalog, name)
        attributes._require()
        attributes._put(found)


def what_of(name: str) -> str:
    """The owner of the attributes of a full name, for messages."""
    return repr(name) if name else "the store"


def decoded(catalog: Catalog, entry: Entry) -> dict[str, Any]:
    """The attributes in an entry, with `Parts` for values of registered types. Raises CorruptStoreError if they are
    none."""
    if entry.kind not in (INLINE, BLOB) or entry.length > ATTRIBUTES_MAX:
        raise CorruptStoreError("damaged attributes")
    found = decode(catalog.encoded(entry), raw=True)
    if type(found) is not dict or not all(type(name) is str and name and "\0" not in name for name in found):
        raise CorruptStoreError("damaged attributes")
    return found


def all_of(catalog: Catalog, name: str) -> dict[str, Any]:
    """The attributes of a full name, see `decoded`; {} if it has none. Raises CorruptStoreError."""
    with catalog.lock:
        entry = catalog.core.get(attributes_key(name))
        try:
            return {} if entry is None else decoded(catalog, entry)
        except CorruptStoreError as error:
            raise of(f"the attributes of {what_of(name)}", error) from error


def typed(value: Any) -> Any:
    """The value of an attribute in `all_of`, with values of registered types. Raises DecodeError."""
    return value if type(value) in _SIMPLE else decode(encode(value))


def readable(value: Any) -> Any:
    """The same, or its parts if that fails."""
    with contextlib.suppress(DecodeError):
        return typed(value)
    return value


def stored(catalog: Catalog, key: bytes) -> bytes | None:
    """The encoding of one attribute, for `LostUpdates`. key: of the attributes, with the attribute's name after it."""
    owner, _, name = key[1:].partition(b"\0")
    found = all_of(catalog, owner.decode())
    return encode(found[name.decode()]) if name.decode() in found else None


def below(catalog: Catalog, name: str) -> Iterator[str]:
    """The full names, of this one and those below it, that have attributes; name: "" for all, with "" for the store."""
    if not name or catalog.core.get(attributes_key(name)) is not None:
        for row in catalog.core.scan(attributes_key(name) if name else ATTRIBUTES_PREFIX):
            yield owner_of_attributes(row.key)
    if name:
        for row in catalog.core.scan(ATTRIBUTES_PREFIX + name.encode() + b"/"):
            yield owner_of_attributes(row.key)


def brief(catalog: Catalog, prefix: str) -> dict[str, str]:
    """The attributes in a few words each, for listings, by the names below a prefix, relative to it; "" for those of
    the store or the group itself."""
    found = {}
    for name in below(catalog, prefix.rstrip("/")):
        try:
            parts = [f"{key}={full_text(readable(value))}" for key, value in all_of(catalog, name).items()]
            text = name_text(" ".join(", ".join(parts).split()))
            text = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        except Error:
            text = "unreadable attributes"
        found[name[len(prefix) :]] = f"[{text}]"
    return found


def any_in(core: Core) -> bool:
    """Whether anything in the store has attributes. Damage elsewhere does not keep a name from being deleted."""
    with contextlib.suppress(*UNSOUND):
        return core.last(ATTRIBUTES_PREFIX) is not None
    return False


def sweep(catalog: Catalog, name: str) -> None:
    """The name may be gone: deletes its attributes, and those of groups that are gone with it (I38)."""
    with contextlib.suppress(*UNSOUND):
        for one in (name, *reversed(parents(name))):
            if catalog.exists(key_of(one)):
                break
            catalog.core.delete(attributes_key(one))
