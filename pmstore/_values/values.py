"""Python values as bytes: msgpack, with extension types for the types that it lacks. Nothing is pickled.

A value is read back with exactly the same type. Subclasses (IntEnum, namedtuple, defaultdict, ...) raise TypeError.

====  ================  ========================================================================================
code  type              payload
====  ================  ========================================================================================
1     int over 64 bits  two's complement, little-endian
2     complex           real, imaginary: two little-endian doubles
3     tuple             an array of the elements, encoded
4     numpy scalar      [dtype descriptor, bytes, writeable]; ["U", str] for np.str_; ["S", bytes] for np.bytes_
5     ndarray           [dtype descriptor, shape, order "C" or "F", bytes]
6-20  others            see types.py
21    registered types  [name of the type, dict of its parts]: see registry.py
====  ================  ========================================================================================
"""

from __future__ import annotations

import copy
import datetime
import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from pmstore._core import hash64
from pmstore._errors import MALFORMED, CorruptStoreError, DecodeError, OutOfMemoryError, TooLargeError
from pmstore._values.array import memory_order, order_of
from pmstore._values.dtypes import descriptor_of, dtype_of, storable_dtype
from pmstore._values.registry import Parts, made, part_title, parts_of, registered
from pmstore._values.tensors import array_of_tensor, is_tensor
from pmstore._values.types import BY_CODE, TEXT, Small, is_text, small_of

__all__ = [
    "ATOMS",
    "DEPTH",
    "PLAIN",
    "changeable_inside",
    "contents_of",
    "copied",
    "decode",
    "encode",
    "has_containers",
    "inside",
    "is_constant",
    "type_name",
]

DEPTH = 128  # levels of nesting; tuples and extensions recurse, and Python's stack is limited

_BIG_INT, _COMPLEX, _TUPLE, _SCALAR, _ARRAY = 1, 2, 3, 4, 5
_REGISTERED = 21
ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})
_CONTAINERS = frozenset({list, tuple, dict})
_HOLD_NOTHING = ATOMS | {np.ndarray}
PLAIN = ATOMS | _CONTAINERS
"""Python's own types of values."""
_TWO_DOUBLES = struct.Struct("<2d")
_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")  # the possible starts of msgpack's own extension


def encode(value: Any) -> bytes:
    """A value as bytes. Raises TypeError with a hint if its type can't be stored, ValueError if it is nested too
    deep or too large.
    """
    kind = type(value)
    if kind not in ATOMS:
        _check(value, 0)
    try:
        return _pack(value)
    except (OverflowError, ValueError) as error:
        raise TooLargeError(
            f"a {kind.__name__} takes at most 4 GiB encoded, and so does each of its parts ({error}); "
            "keep such contents in an array"
        ) from error


def decode(encoded: bytes, *, raw: bool = False) -> Any:
    """The value that is encoded in bytes, which are not trusted. Raises CorruptStoreError if they encode none, and
    DecodeError if the `decode` of a registered type fails, or this machine lacks a time zone. raw: values of registered
    types become `Parts`, and any time zone will do.
    """
    if any(start in encoded for start in _TIMESTAMPS):
        value = _unpacked(encoded, True)  # the `decode` of a registered type may give any type
        try:
            _check(value, 0)
        except (TypeError, ValueError) as error:
            raise CorruptStoreError(f"a damaged value: {error}") from error
        if raw:
            return value
    return _unpacked(encoded, raw)


def _unpacked(encoded: bytes, raw: bool) -> Any:
    try:
        return _Decoder(0, raw).unpack(encoded)
    except (CorruptStoreError, DecodeError):
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory for a value of {len(encoded):,} encoded bytes") from error
    except MALFORMED as error:
        raise CorruptStoreError(f"a damaged value: {str(error) or type(error).__name__}") from error


def has_containers(value: Any) -> bool:
    """Whether a part of the value can be changed in place: a list, a dict, a set, an array, a generator, a structured
    scalar, or a tuple that holds one.
    """
    return _holds(value, _is_container)


def _is_container(value: Any) -> bool:
    kind = type(value)
    if (found := registered(kind)) is not None:
        return found.watched
    return kind in _CONTAINERS or kind is np.ndarray or (isinstance(value, np.void) and bool(value.flags.writeable))


def _holds(value: Any, can_change: Callable[[Any], bool]) -> bool:
    """Whether a value can be changed in place, or anything that a tuple or a type of `types.py` holds. can_change:
    answers this for every other type."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if kind is tuple:
        return any(_holds(part, can_change) for part in value)
    if (small := small_of(kind)) is not None:
        return small.mutable or (small.holds and any(_holds(part, can_change) for part in small.parts(value)))
    return can_change(value)


def changeable_inside(value: Any, arrays: bool = True) -> tuple[dict[int, Any], dict[int, np.ndarray[Any, Any]]]:
    """All that can be changed in place in a value, to any depth, by id: everything but arrays, and the arrays. Raises
    the errors of `parts_of`.

    arrays: whether arrays are wanted, which takes longer.
    """
    others: dict[int, Any] = {}
    found: dict[int, np.ndarray[Any, Any]] = {}
    seen: dict[int, Any] = {}  # by id; what `encode` of a type makes has to live as long
    waiting: list[Any] = [[value]]
    while waiting:
        ones = waiting.pop()
        kinds = set(map(type, ones))
        if arrays and np.ndarray in kinds:
            plain = ones if len(kinds) == 1 else [one for one in ones if type(one) is np.ndarray]
            found.update(zip(map(id, plain), plain))
        kinds -= _HOLD_NOTHING
        for one in ones if kinds else ():
            kind = type(one)
            if kind not in kinds or id(one) in seen:
                continue
            seen[id(one)] = one
            waiting.append(inside(one))
            small = small_of(kind)
            if isinstance(one, np.ndarray):  # a masked one, or the like
                found[id(one)] = one
            elif kind is not tuple and (small is None or small.mutable) and not is_constant(one):
                others[id(one)] = one
    return others, found


def inside(value: Any) -> list[Any] | tuple[Any, ...]:
    """What a value holds directly: elements, the values of a dict, or parts. Raises the errors of `parts_of`."""
    kind = type(value)
    if kind is np.ndarray:
        return []
    if kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return list(value.values())
    if (small := small_of(kind)) is not None:
        return small.parts(value) if small.holds else []
    parts = parts_of(value)
    return [] if parts is None else list(parts[1].values())


def is_constant(value: Any) -> bool:
    """Whether it is a scalar of numpy that can't be changed in place."""
    return isinstance(value, np.generic) and not (isinstance(value, np.void) and value.flags.writeable)


def copied(value: Any) -> Any:
    """A copy that shares nothing with the value that can be changed in place, as a store would give it: what is in two
    places is copied twice. Its arrays have no gaps, and their axes are in the same order, or in C order if theirs was
    neither C nor Fortran order.

    Values of registered types are copied as their parts. Raises the errors of `parts_of` and DecodeError.
    """
    return _copied(value, {})


def _copied(value: Any, around: dict[int, Any]) -> Any:
    """around: by id, what the value is in: the copy of a list or dict, and a value of a registered type itself."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is not list and kind is not dict:
        return _copied_parts(value, around)
    if id(value) in around:  # it holds itself, which no store keeps
        return around[id(value)]
    out: Any = kind()
    around[id(value)] = out
    if kind is list:
        out += [_copied(one, around) for one in value]
    else:
        out.update({key: _copied(one, around) for key, one in value.items()})
    del around[id(value)]
    return out


def _copied_parts(value: Any, around: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(_copied(one, around) for one in value)
    if (small := small_of(kind)) is not None:
        return small.make(_copied(small.parts(value), around)) if small.mutable or small.holds else value
    if id(value) in around:
        return value
    if kind is not np.ndarray and (parts := parts_of(value)) is not None:
        around[id(value)] = value
        inside = {name: _copied(one, around) for name, one in parts[1].items()}
        del around[id(value)]
        return made(parts[0], inside)
    if isinstance(value, np.ndarray):
        return np.array(value, order=memory_order(value) or "C", subok=True)
    if is_constant(value):
        return value
    try:  # a tensor, or what no store keeps
        return copy.deepcopy(value)
    except Exception:
        return value


def contents_of(value: Any) -> Any:
    """A hash of all that can be changed in place, or None if nothing can be. Raises the errors of `encode`."""
    if not _holds(value, _is_no_scalar):
        return None
    if is_tensor(value):
        value = array_of_tensor(value)
    is_plain = isinstance(value, np.ndarray) and registered(type(value)) is None
    if is_plain and value.nbytes and not is_text(value.dtype):  # without a copy, if it has no gaps
        array, order = np.asarray(value), order_of(value)
        return array.shape, repr(array.dtype), order, hash64(array.ravel(order).view(np.uint8).data)
    try:
        return hash64(encode(value))
    except TooLargeError:  # its parts are not, but they are not compared
        return object()


def _is_no_scalar(value: Any) -> bool:
    return not isinstance(value, np.generic) or isinstance(value, np.void)


def type_name(value: Any) -> str:
    """The name of a storable value's type: "int", "numpy.float64"."""
    kind = type(value)
    if kind in PLAIN:
        return kind.__name__
    if kind is Parts:
        return str(value.type_name)
    if (found := registered(kind)) is not None:
        return found.name
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if kind in ATOMS:
        return
    if kind in _CONTAINERS:
        if depth >= DEPTH:
            raise ValueError(f"the value is nested more than {DEPTH} levels deep, or holds itself")
        if kind is dict:
            _check_parts(value.keys(), depth)
            value = value.values()
        _check_parts(value, depth)
    elif (small := _small(kind, value)) is not None:
        _check(small.parts(value), depth)
    elif kind is np.ndarray:
        storable_dtype(value.dtype)
    elif isinstance(value, np.generic) and kind is value.dtype.type and not value.dtype.hasobject:
        descriptor_of(value.dtype)
    elif (found := parts_of(value)) is not None:
        _check({}, depth)
        for part, content in found[1].items():
            try:
                _check(content, depth + 1)
            except TypeError as error:
                raise TypeError(f"{part_title(found[0], part)}: {error}") from error
    else:
        raise TypeError(_hint(value))


def _small(kind: type, value: Any) -> Small | None:
    if kind is np.ndarray:
        return TEXT if is_text(value.dtype) else None
    return small_of(kind)


def _check_parts(parts: Any, depth: int) -> None:
    if not ATOMS.issuperset(map(type, parts)):
        for part in parts:
            _check(part, depth + 1)


def _hint(value: Any) -> str:
    kind = type(value)
    text = f"a store can't keep a {kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ma.MaskedArray):
        return f"{text}: store np.ma.MaskedArray(value), a plain masked array"
    for base in kind.__mro__[1:]:
        if (found := registered(base)) is not None:
            return f"{text}, a subclass of {found.name}: store a {found.name}, or register the subclass, too"
    if isinstance(value, np.ndarray):
        return f"{text}, a subclass of ndarray: store np.asarray(value), or its parts"
    if kind.__module__.startswith("scipy.sparse"):
        return f"{text}: store value.tocsr(), which keeps its elements"
    if is_tensor(value) or (isinstance(value, dict) and any(map(is_tensor, value.values()))):
        how = "of tensors as one" if isinstance(value, dict) else "inside another"
        return (
            f"{text} {how} value: store.group(name).update(a_dict) stores each tensor of a dict under a name of its "
            "own, and pmstore.torch.state_dict(store.group(name)) reads them"
        )
    for base in (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            return f"{text}, as it would come back as a plain {base.__name__}: store {base.__name__}(value)"
    if isinstance(value, (bytearray, memoryview)):
        return f"{text}: store bytes(value), or a numpy array of uint8"
    for how in ("to_pydatetime", "to_pytimedelta"):
        if hasattr(kind, how):
            return f"{text}: store value.{how}(), or value.to_numpy(), which keeps nanoseconds and no zone"
    if isinstance(value, datetime.datetime):
        return f"{text}: store np.datetime64(value), or the datetime.datetime that it is made from"
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return f"{text}: store the value of datetime's own class that it is made from"
    package = kind.__module__.partition(".")[0]
    if package == "pyarrow" and hasattr(value, "__array__") and not hasattr(value, "schema"):
        return f"{text}: store pyarrow.table({{'x': value}}), or np.asarray(value) if it has numbers"
    if package == "xarray" and hasattr(kind, "values"):  # `value.values` would read contents
        return f"{text}: store {'value[name].values of each variable' if callable(kind.values) else 'value.values'}"
    if hasattr(value, "__arrow_c_stream__"):
        return f"{text}: store pyarrow.table(value), or polars.DataFrame(value)"
    if hasattr(kind, "as_py"):
        return f"{text}: store value.as_py()"
    if package == "polars" and hasattr(kind, "collect"):
        return f"{text}: store value.collect()"
    if package == "pandas" and hasattr(kind, "take") and not hasattr(kind, "to_frame"):
        return f"{text}: store pandas.Series(value)"
    dtype = getattr(value, "dtype", None)
    if hasattr(value, "__array__") and (dtype is None or (isinstance(dtype, np.dtype) and not dtype.hasobject)):
        return f"{text}: store np.asarray(value)"
    if package == "pandas" and hasattr(value, "to_frame"):
        return f"{text}: store a DataFrame or a Series, as of value.to_frame(), or value.tolist()"
    return (
        f"{text}: values are numpy arrays, scalars and generators, int, float, complex, bool, None, str, bytes, dates "
        "and times, Decimal, Fraction, UUID, paths, and tuples, lists, dicts and sets of these. Nothing is pickled; "
        "pmstore.register makes a type storable by its parts"
    )


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, strict_types=True, unicode_errors="surrogatepass", default=_extension))


def _extension(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is int:
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, _TWO_DOUBLES.pack(value.real, value.imag))
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    small = _small(kind, value)
    if small is not None:
        if kind is set or kind is frozenset:  # in the order of the encodings, so that equal sets have equal bytes
            payload = msgpack.Packer().pack_array_header(len(value)) + b"".join(sorted(map(_pack, value)))
            return msgpack.ExtType(small.code, payload)
        return msgpack.ExtType(small.code, _pack(small.parts(value)))
    if kind is np.ndarray:
        order = order_of(value)
        contents = value.tobytes(order)
        return msgpack.ExtType(_ARRAY, _pack([descriptor_of(value.dtype), list(value.shape), order, contents]))
    if kind is np.str_:  # its own str() drops NULs at the end
        return msgpack.ExtType(_SCALAR, _pack(["U", str.__str__(value)]))
    if kind is np.bytes_:  # a plain scalar would lose the NULs at its end
        return msgpack.ExtType(_SCALAR, _pack(["S", bytes(value)]))
    if isinstance(value, np.generic):
        # A structured scalar that isn't writeable is hashable, and so may be a dict's key.
        return msgpack.ExtType(
            _SCALAR, _pack([descriptor_of(value.dtype), value.tobytes(), bool(value.flags.writeable)])
        )
    found = parts_of(value)
    if found is not None:
        return msgpack.ExtType(_REGISTERED, _pack(list(found)))
    raise TypeError(_hint(value))


class _Decoder:
    """Decodes one value. msgpack's C code calls `extension`, which would not know the depth otherwise."""

    __slots__ = ("_depth", "_raw")

    def __init__(self, depth: int, raw: bool) -> None:
        self._raw = raw
        if depth > DEPTH + 1:
            raise CorruptStoreError(f"a damaged value: nested more than {DEPTH} levels deep")
        self._depth = depth

    def unpack(self, encoded: bytes) -> Any:
        return msgpack.unpackb(encoded, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=self.extension)

    def extension(self, code: int, payload: bytes) -> Any:
        if code == _BIG_INT:
            return int.from_bytes(payload, "little", signed=True)
        if code == _COMPLEX:
            return complex(*_TWO_DOUBLES.unpack(payload))
        small = BY_CODE.get(code)
        if small is None and code not in (_TUPLE, _SCALAR, _ARRAY, _REGISTERED):
            raise CorruptStoreError(
                f"a value of a type that this version of pmstore does not know (extension {code}): a newer version "
                "wrote it, and can read it"
            )
        parts = _Decoder(self._depth + 1, self._raw).unpack(payload)
        if type(parts) is not list:
            raise CorruptStoreError("a damaged value: an extension breaks the format")
        if small is not None:
            return ((self._raw and small.raw) or small.make)(parts)
        if code == _TUPLE:
            return tuple(parts)
        if code == _REGISTERED:
            name, items = parts
            if type(name) is not str or type(items) is not dict or not all(type(one) is str for one in items):
                raise CorruptStoreError("a damaged value: the parts of a value break the format")
            return Parts(name, items) if self._raw else made(name, items)
        return _scalar(*parts) if code == _SCALAR else _array(*parts)


def _scalar(descriptor: Any, contents: Any, writeable: Any = None) -> Any:
    if descriptor == "U" and type(contents) is str:
        return np.str_(contents)
    if descriptor == "S" and type(contents) is bytes:
        return np.bytes_(contents)
    dtype = dtype_of(descriptor)
    if type(contents) is not bytes or len(contents) != dtype.itemsize or type(writeable) is not bool:
        raise CorruptStoreError("a damaged value: a scalar breaks the format")
    scalar: Any = np.ndarray((), dtype, buffer=bytearray(contents) if writeable else contents)[()]
    if not isinstance(scalar, np.generic):  # it has a subarray dtype
        raise CorruptStoreError("a damaged value: a scalar breaks the format")
    return scalar


def _array(descriptor: Any, shape: Any, order: Any, contents: Any) -> Any:
    dtype = dtype_of(descriptor)
    if (
        dtype.subdtype is not None
        or not all(type(n) is int and n >= 0 for n in shape)
        or order not in ("C", "F")
        or type(contents) is not bytes
        or math.prod(shape) * dtype.itemsize != len(contents)
    ):
        raise CorruptStoreError("a damaged value: an array breaks the format")
    # It owns its memory, as an array of a fit that nothing has stopped. np.empty would make S1 of S0.
    array: Any = np.ndarray(tuple(shape), dtype, order=order)
    if contents:
        array.reshape(-1, order="A").view(np.uint8)[...] = np.frombuffer(contents, np.uint8)
    return array
