"""Types that a program registers: their values are kept as named parts, which are simpler values.

A file has the name of a type and its parts. Reading looks the name up among the registered types, and neither imports
nor runs anything that the file names. A name that is not registered gives the parts themselves, as `Parts`.

`known.py` has types of numpy, SciPy, pandas, pyarrow and polars. They count as registered in programs that have
imported their package.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any, NamedTuple

from pmstore._errors import UNRELATED, DecodeError

__all__ = [
    "HEAP_TYPE",
    "NAME_MAX",
    "Parts",
    "Registered",
    "made",
    "named",
    "part_title",
    "parts_of",
    "register",
    "registered",
]

NAME_MAX = 255  # bytes in UTF-8, of a type's name and of a part's name

Encode = Callable[[Any], Mapping[str, Any]]
Decode = Callable[[dict[str, Any]], Any]


class Registered(NamedTuple):
    """How values of a type are kept. watched: whether a copy that was changed gives a LostUpdateWarning.

    Two more for types whose values share arrays with others, and copy them before a change. made_of: the objects that a
    value is made of, which are compared by identity, or tuples and bytes; a change that is not one of the live arrays
    shows in one of them. guarded: see `frames.guarded`.
    """

    type: type
    name: str
    encode: Encode
    decode: Decode
    watched: bool = True
    made_of: Callable[[Any], list[Any]] | None = None
    guarded: Callable[[Any, Any], None] | None = None


class Parts(Mapping[str, Any]):
    """The parts of a value whose type is not registered in this program: a mapping that can't be changed.

    Arrays among them are live arrays of the store, except inside of other values. `Store.parts` gives the parts of
    values of registered types, too. A Parts can be stored; that keeps the type's name.

    Attributes
    ----------
    type_name : str
        The name under which the type was registered when the value was stored.
    """

    __slots__ = ("_parts", "type_name")

    def __init__(self, type_name: str, parts: Mapping[str, Any]) -> None:
        self.type_name = type_name
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __eq__(self, other: object) -> bool:
        from pmstore._values.values import encode

        return isinstance(other, Parts) and encode(self) == encode(other)

    def __hash__(self) -> int:
        return hash(self.type_name)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name!r}: {_brief(value)}" for name, value in self._parts.items())
        return f"<Parts of a {repr(self.type_name)[1:-1]} {{{shown}}}: {_how(self.type_name)}>"


def _brief(value: Any) -> str:
    import numpy as np

    if isinstance(value, np.ndarray) and value.size > 8:
        return f"{value.shape} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _how(name: str) -> str:
    from pmstore._values.known import module_of

    if named(name) is not None:
        return "Store.parts gives them, and reading the name a value of the type"
    if module_of(name) is not None:
        return f"after 'import {module_of(name)}' it reads as one"
    return f"the type is not registered; pmstore.register(the type, encode, decode, name={name!r}) reads it"


_BY_TYPE: dict[type, Registered] = {}
_BY_NAME: dict[str, Registered] = {}


def registered(kind: type) -> Registered | None:
    """How values of exactly this type are kept; None if it is not registered."""
    found = _BY_TYPE.get(kind)
    if found is not None:
        return found
    from pmstore._values.known import known_type

    return known_type(kind)


def named(name: str) -> Registered | None:
    """The registered type of that name; None if there is none."""
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    from pmstore._values.known import known_name

    return known_name(name)


def register(
    type: type, encode: Encode | None = None, decode: Decode | None = None, *, name: str | None = None
) -> None:
    """Let stores keep values of a type, as parts with names. Nothing is pickled.

    Every program that reads such values registers the type again, because the store keeps the type's name and no code.
    Without that, reading gives a `Parts`.

    Parameters
    ----------
    type : type
        Values of exactly this type are kept. Those of its subclasses are not.
    encode : callable
        Called with a value; returns a dict of str to parts: arrays, and all else that a store keeps. An array becomes a
        live array of the store.
    decode : callable
        Called with that dict, as it was read; returns the value. Arrays in it are live: if the value refers to them,
        their changes are part of the next commit. It must not trust the parts, if files come from others.

        Commits call both, too, to notice values that were changed and not assigned back. They are called under the
        store's locks: neither may wait for a lock that a thread holds while it uses the store.

        `encode` and `decode` can be left out for enums, dataclasses and named tuples. An enum is kept by the names of
        its members, a flag by its number. Of the others the fields are kept; `__init__` and `__post_init__` are not
        called when they are read. Storing a value with attributes that are no fields is a TypeError, unless they are
        cached properties, which are computed again.
    name : str, optional
        Under which the store knows the type, at most 255 bytes in UTF-8. By default its module and name, as in
        ``"app.model.Layer"``. Give one for a type that may move, or that is defined in a program's main file.

    Raises
    ------
    ValueError
        The type is registered already, a store keeps its values anyway, or the name belongs to another type. Defining
        a class again, as in a notebook, gives another type, which takes over the name.
    TypeError
        It is no class; only one of `encode` and `decode` is given; or they are missing, and it is none of the above, or
        a dataclass that is also a dict, a list, a number or the like, whose contents are no fields.
    """
    if not isinstance(type, _TYPE):
        raise TypeError(f"register() takes a class, not {type!r:.80}")
    if (encode is None) != (decode is None):
        raise TypeError("register() takes both encode and decode, or neither for an enum, dataclass or named tuple")
    if name is None:
        name = f"{type.__module__}.{type.__qualname__}"
    check_name(name, "of a type")
    if encode is None or decode is None:
        encode, decode = _of_fields(type)
    if not callable(encode) or not callable(decode):
        raise TypeError("encode and decode are functions")
    if type in _BY_TYPE:
        raise ValueError(f"{name!r}: the type is registered already, as {_BY_TYPE[type].name!r}")
    if _kept(type):
        raise ValueError(f"a store keeps values of the type {type.__qualname__} already")
    from pmstore._values.known import module_of

    if module_of(name) is not None:  # whether its module is imported or not
        raise ValueError(f"the name {name!r} belongs to a type that stores keep without register(): give another name=")
    other = _BY_NAME.get(name)
    if other is not None:
        before = other.type
        if (before.__module__, before.__qualname__) != (type.__module__, type.__qualname__):
            raise ValueError(
                f"the name {name!r} belongs to the type {before.__module__}.{before.__qualname__}: give another name="
            )
        del _BY_TYPE[before]
    _BY_TYPE[type] = _BY_NAME[name] = Registered(type, name, encode, decode, not issubclass(type, enum.Enum))


_TYPE = type


def _kept(kind: type) -> bool:
    import numpy as np

    from pmstore._values.types import small_of
    from pmstore._values.values import PLAIN

    known = kind in PLAIN or small_of(kind) is not None or kind is np.ndarray or issubclass(kind, np.generic)
    return known or registered(kind) is not None or kind is Parts


def check_name(name: object, what: str) -> bytes:
    """A name in UTF-8. Raises TypeError or ValueError."""
    if type(name) is not str:
        raise TypeError(f"the name {what} is a str, not {type(name).__name__}: {name!r:.80}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name {what} holds a lone surrogate: {name!r:.80}") from error
    if not 0 < len(encoded) <= NAME_MAX:
        raise ValueError(f"the name {what} has 1 to {NAME_MAX} bytes in UTF-8, not {len(encoded)}: {name!r:.80}")
    return encoded


def part_title(type_name: str, part: str) -> str:
    """A part in an error."""
    of_frame = part == "about" and type_name.startswith("pandas.")
    return f"the part {part!r}{', labels, dtypes and attrs,' if of_frame else ''} of a {type_name}"


def parts_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The name of the type of a value, and its parts; None if its type is not registered.

    Raises TypeError or ValueError if `encode` gives no dict of str or a name of a Parts breaks the rules, and what
    `encode` raises.
    """
    if type(value) is Parts:
        check_name(value.type_name, "of the type of a Parts")
        for name in value._parts:
            check_name(name, f"of a part of a {value.type_name}")
        return value.type_name, value._parts
    found = registered(type(value))
    if found is None:
        return None
    parts = found.encode(value)
    if not isinstance(parts, Mapping):
        raise TypeError(f"encode of {found.name} gives a dict of str to parts, not {type(parts).__name__}")
    for name in parts:
        check_name(name, f"of a part of a {found.name}")
    return found.name, dict(parts)


def made(name: str, parts: dict[str, Any]) -> Any:
    """The value of a type from its parts. Raises DecodeError."""
    found = named(name)
    if found is None:
        return Parts(name, parts)
    try:
        return found.decode(dict(parts))
    except UNRELATED:
        raise
    except Exception as error:
        raise DecodeError(
            f"decode of {name} failed: {type(error).__name__}: {error}. Store.parts(name) gives the parts"
        ) from error


# ---- types whose values are their fields


HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class of Python code."""
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: with the one above, a class of C code


def _of_fields(kind: type) -> tuple[Encode, Decode]:
    if issubclass(kind, enum.Flag):
        return (lambda value: {"value": value.value}), (lambda parts: kind(parts["value"]))
    if issubclass(kind, enum.Enum):
        return (lambda value: {"name": value.name}), (lambda parts: kind[parts["name"]])
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        held = next(filter(_has_contents, kind.__mro__), None)
        if held is not None:
            raise TypeError(
                f"{kind.__module__}.{kind.__qualname__} is a dataclass, and has what a {held.__name__} holds besides "
                "its fields: register(type, encode, decode), where encode gives a dict of both"
            )
        # That of object, or of an exception.
        made: Any = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE).__new__

        def make(parts: dict[str, Any]) -> Any:
            _check_fields(parts, names)
            value = made(kind)
            if isinstance(value, BaseException):  # as __init__ of its base leaves them
                value.args = tuple(parts[name] for name in names)
            for name, part in parts.items():
                object.__setattr__(value, name, part)
            return value

        refuse = _refusal_of_others(kind, names)

        def fields_of(value: Any) -> dict[str, Any]:
            refuse(value)
            return {name: getattr(value, name) for name in names}

        return fields_of, make
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = list(kind._fields)

        def of(parts: dict[str, Any]) -> Any:
            _check_fields(parts, fields)
            return tuple.__new__(kind, [parts[name] for name in fields])

        refuse = _refusal_of_others(kind, fields)

        def items_of(value: Any) -> dict[str, Any]:
            refuse(value)
            return dict(zip(fields, value))

        return items_of, of
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} is no enum, dataclass or named tuple: register(type, encode, decode), "
        "where encode gives a dict of parts, and decode makes a value of it"
    )


def _refusal_of_others(kind: type, names: list[str]) -> Callable[[Any], None]:
    """A function that raises TypeError for a value with attributes that are no fields: its copy would lack them.

    A cached property may be missing, because it is computed again.
    """
    own = [base for base in kind.__mro__ if base.__flags__ & HEAP_TYPE]
    members = {name: one for base in reversed(own) for name, one in vars(base).items()}
    slots = [name for name, one in members.items() if type(one) is MemberDescriptorType and name not in names]
    cached = {name for name, one in members.items() if isinstance(one, functools.cached_property)}
    known = {*names, *cached, "__orig_class__"}  # which typing.Generic sets

    def refuse(value: Any) -> None:
        others = [name for name in getattr(value, "__dict__", ()) if name not in known]
        others += [name for name in slots if hasattr(value, name)]
        if others:
            raise TypeError(
                f"a {kind.__module__}.{kind.__qualname__} has attributes that are no fields: "
                f"{', '.join(map(repr, others))}. Make them fields, or register(type, encode, decode)"
            )

    return refuse


def _has_contents(base: type) -> bool:
    """Whether values of a class of C code hold something themselves. Exceptions count their fields as arguments."""
    in_c = base.__flags__ & (HEAP_TYPE | _IMMUTABLE_TYPE) != HEAP_TYPE
    return in_c and base.__basicsize__ > object.__basicsize__ and not issubclass(base, BaseException)


def _check_fields(parts: dict[str, Any], names: list[str]) -> None:
    if parts.keys() != set(names):
        changed = ", ".join(sorted(parts.keys() ^ set(names)))
        raise ValueError(f"the stored fields are not those of the class: {changed}")
