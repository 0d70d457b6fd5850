"""Message and attributes of a commit: `Store.transaction` takes them, `Store.commit_note` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pmstore._errors import CorruptStoreError
from pmstore._values.values import decode, encode

__all__ = ["CommitNote", "decoded", "encoded"]


class CommitNote(NamedTuple):
    """The note of a commit, as `Store.transaction` got it.

    message: a str, or None if there is none. attributes: a dict of str to values, which may be empty.
    """

    message: str | None
    attributes: dict[str, Any]


def encoded(message: str | None, attributes: Mapping[str, Any] | None) -> bytes:
    """A note as bytes. Raises TypeError for a wrong type."""
    if message is not None and type(message) is not str:
        raise TypeError(f"a message is a str, not {type(message).__name__}: {message!r:.80}")
    if attributes is not None and not isinstance(attributes, Mapping):
        raise TypeError(f"attributes are a dict of str to values, not {type(attributes).__name__}")
    values = dict(attributes or {})
    for name in values:
        if type(name) is not str:
            raise TypeError(f"the name of an attribute is a str, not {type(name).__name__}: {name!r:.80}")
    try:
        return encode([message, values])
    except TypeError:
        for name, value in values.items():
            try:
                encode(value)
            except TypeError as error:
                raise TypeError(f"the attribute {name!r}: {error}") from None
        raise


def decoded(note: bytes) -> CommitNote:
    """The note that is encoded in bytes. Raises CorruptStoreError if they encode none."""
    value = decode(note)
    if type(value) is list and len(value) == 2:
        message, attributes = value
        if type(message) in (str, type(None)) and type(attributes) is dict and {*map(type, attributes)} <= {str}:
            return CommitNote(message, attributes)
    raise CorruptStoreError("a damaged note of a commit")
