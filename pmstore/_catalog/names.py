"""Names: the rules for them, and the catalog keys of names, of list elements and of parts of objects.

======  =======================================  ==========================================
key     followed by                              holds
======  =======================================  ==========================================
``a``   name or group, NUL                       its attributes; those of the store: an empty name
``d``   name, NUL, ``s`` or ``v``                the stamp of a derived array, and its value if that is stored
``n``   the name in UTF-8                        an array, a value, a list, an object or a derived array
``l``   list id, index: 8 bytes big-endian each  an element of a list
``o``   id, number: 8 and 4 bytes big-endian;    a part of an object
        the part's name in UTF-8
``m``   ``list-id``                              the next id of a list or an object, 8 bytes little-endian
``m``   ``commit-note``                          message and attributes of a commit, after its sequence number
``m``   ``lineage``                              the history that the store has: see _store/lineage.py
======  =======================================  ==========================================
"""

from __future__ import annotations

import struct

from pmstore._errors import CorruptStoreError, InvalidNameError

__all__ = [
    "ATTRIBUTES_PREFIX",
    "DERIVED_PREFIX",
    "HIDDEN_KEYS",
    "LINEAGE_KEY",
    "LIST_ID_KEY",
    "LIST_PREFIX",
    "NAME_PREFIX",
    "NOTE_KEY",
    "OBJECT_PREFIX",
    "PREFIXES",
    "attributes_key",
    "check_name",
    "derived_prefix",
    "element_key",
    "element_prefix",
    "key_of",
    "name_of",
    "object_prefix",
    "owner_of",
    "owner_of_attributes",
    "parents",
    "part_key",
    "split_element",
    "split_part",
    "stamp_key",
    "value_key",
]

INDEX_MAX = (1 << 64) - 1
NAME_MAX = 764  # bytes in UTF-8; a catalog key has room for 768
NAME_PREFIX = b"n"
LIST_PREFIX = b"l"
DERIVED_PREFIX = b"d"
OBJECT_PREFIX = b"o"
ATTRIBUTES_PREFIX = b"a"
LIST_ID_KEY = b"mlist-id"
NOTE_KEY = b"mcommit-note"
LINEAGE_KEY = b"mlineage"
HIDDEN_KEYS = LIST_ID_KEY, NOTE_KEY, LINEAGE_KEY
PREFIXES = NAME_PREFIX, LIST_PREFIX, OBJECT_PREFIX, DERIVED_PREFIX, ATTRIBUTES_PREFIX  # of all other keys

_ELEMENT = struct.Struct(">cQQ")
_LIST = struct.Struct(">cQ")
_PART = struct.Struct(">cQI")


def check_name(name: object) -> bytes:
    """The name in UTF-8. Raises TypeError if it isn't a str, InvalidNameError (a ValueError) if it breaks a rule."""
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}: {name!r:.80}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"the name {name!r:.200} holds a lone surrogate, which UTF-8 lacks") from error
    if not name:
        raise InvalidNameError("a name can't be empty")
    if len(encoded) > NAME_MAX:
        raise InvalidNameError(f"a name has at most {NAME_MAX} bytes in UTF-8; {name[:40]!r}... has {len(encoded)}")
    if "\0" in name:
        raise InvalidNameError(f"the name {name!r:.200} holds a NUL character")
    if name[0] == "/" or name[-1] == "/" or "//" in name:
        raise InvalidNameError(
            f'the name {name!r:.200} has an empty part: "/" stands between two parts of a name, as in "model/weights"'
        )
    return encoded


def key_of(name: object) -> bytes:
    """The catalog key of a name; checks the name."""
    return NAME_PREFIX + check_name(name)


def name_of(key: bytes) -> str:
    """The name of a catalog key that starts with NAME_PREFIX. Raises CorruptStoreError if it can't be a name."""
    try:
        name = key[1:].decode()
        check_name(name)
    except ValueError as error:
        raise CorruptStoreError(f"a damaged name: {key[1:]!r:.200}") from error
    return name


def parents(name: str) -> list[str]:
    """The groups above a name: "a" and "a/b" for "a/b/c"."""
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def element_prefix(list_id: int) -> bytes:
    """The prefix of the keys of a list's elements."""
    return _LIST.pack(LIST_PREFIX, list_id)


def element_key(list_id: int, index: int) -> bytes:
    """The catalog key of a list's element."""
    return _ELEMENT.pack(LIST_PREFIX, list_id, index)


def split_element(key: bytes) -> tuple[int, int] | None:
    """The list id and the index of an element's key; None if it is no such key."""
    if len(key) != _ELEMENT.size or key[:1] != LIST_PREFIX:
        return None
    _, list_id, index = _ELEMENT.unpack(key)
    return list_id, index


def object_prefix(object_id: int) -> bytes:
    """The prefix of the keys of an object's parts."""
    return _LIST.pack(OBJECT_PREFIX, object_id)


def part_key(object_id: int, number: int, name: str) -> bytes:
    """The catalog key of a part of an object."""
    return _PART.pack(OBJECT_PREFIX, object_id, number) + name.encode()


def split_part(key: bytes) -> tuple[int, int, str] | None:
    """The object's id, the number and the name of a part's key; None if it is no such key."""
    if len(key) <= _PART.size or key[:1] != OBJECT_PREFIX:
        return None
    _, object_id, number = _PART.unpack_from(key)
    try:
        return object_id, number, key[_PART.size :].decode()
    except UnicodeDecodeError:
        return None


def derived_prefix(key: bytes) -> bytes:
    """The prefix of the keys that belong to a derived array, by the key of its name; names contain no NUL."""
    return DERIVED_PREFIX + key[1:] + b"\0"


def stamp_key(key: bytes) -> bytes:
    """The key of the stamp of a derived array, by the key of its name."""
    return derived_prefix(key) + b"s"


def value_key(key: bytes) -> bytes:
    """The key of the stored value of a derived array, by the key of its name."""
    return derived_prefix(key) + b"v"


def owner_of(key: bytes) -> bytes | None:
    """The key of the name that a stamp's or a stored value's key belongs to; None for any other key."""
    if key[:1] != DERIVED_PREFIX or key[-2:] not in (b"\0s", b"\0v"):
        return None
    return NAME_PREFIX + key[1:-2]


def attributes_key(name: str) -> bytes:
    """The key of the attributes of a valid name or group; "" for those of the store."""
    return ATTRIBUTES_PREFIX + name.encode() + b"\0"


def owner_of_attributes(key: bytes) -> str:
    """The name that the attributes under a key belong to; "" for the store. Raises CorruptStoreError."""
    if key == ATTRIBUTES_PREFIX + b"\0":
        return ""
    if key[-1:] != b"\0":
        raise CorruptStoreError(f"a damaged name: {key[1:]!r:.200}")
    return name_of(key[:-1])
