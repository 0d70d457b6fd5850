"""safetensors: 8 bytes, the length of the head; the head, in JSON; the elements, little-endian, in C order, no gaps."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pmstore._interchange.forms import ATTRIBUTES, HINTS, VALUES, Hints, in_json, json_of
from pmstore._interchange.found import Found, Stored, Unsupported, damage, require
from pmstore._interchange.source import Described, Format, Source, elsewhere, whole_elements
from pmstore._store.held import off_streams
from pmstore._values.as_json import to_json
from pmstore._values.tensors import BITS, named

__all__ = ["Safetensors"]

_TYPES = {
    **{f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)},
    "b1": "BOOL",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
}
_OF_TORCH = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
_DTYPES = {
    **{text: np.dtype(f"<{code}") for code, text in _TYPES.items()},
    **{text: np.dtype([(name, BITS[name])]) for name, text in _OF_TORCH.items()},
}
_HEAD = 100_000_000  # bytes, as the format's library has it


class Safetensors(Format):
    """Needs no package."""

    def check(self, described: Described) -> None:
        if _type(described.dtype) is None:
            text = f"{described.name!r} has dtype {described.dtype}, and safetensors has no such type"
            raise TypeError(f"{text}: {elsewhere(described.dtype)}")

    def write(self, source: Source, path: str) -> None:
        at = 0
        arrays = sorted(source.arrays, key=lambda one: (-one.dtype.itemsize, one.name))  # so that each is aligned
        places: dict[str, Any] = {}
        for one in arrays:
            end = at + one.nbytes
            places[one.name] = {"dtype": _type(one.dtype), "shape": list(one.shape), "data_offsets": [at, end]}
            at = end
        about = {"format": "np"}
        attributes = {name: to_json(found) for name, found in source.attributes.items()}
        for name, document in ((VALUES, source.readable), (ATTRIBUTES, attributes), (HINTS, source.hints(_told))):
            if document:
                about[name] = in_json(document)
        text = json.dumps({"__metadata__": about, **places}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _HEAD:
            raise ValueError("the names and values take more than safetensors allows: 100 MB")
        with off_streams(lambda: open(path, "wb")) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for one in arrays:
                for piece in source.flat(one, "C"):
                    file.write(piece.astype(one.little, copy=False).view(np.uint8).data)
                    source.written(piece.nbytes)

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[Found]:
        with contextlib.ExitStack() as stack:
            with damage(path):
                file = stack.enter_context(open(path, "rb", buffering=0))
                found = _look(path, file)
            yield found


def _told(one: Described) -> np.dtype[Any]:
    return _DTYPES[str(_type(one.dtype))]


def _type(dtype: np.dtype[Any]) -> str | None:
    return _OF_TORCH.get(named(dtype)) or _TYPES.get(f"{dtype.kind}{dtype.itemsize}")


def _look(path: str, file: Any) -> Found:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    require(size >= 8 and length <= min(size - 8, _HEAD), "it is no safetensors file: its head is longer than the file")
    head = json.loads(file.read(length), object_pairs_hook=_once)
    require(isinstance(head, dict), "its head is no object")
    about = head.pop("__metadata__", {})
    require(isinstance(about, dict), "its metadata are no object")
    found, ends = Found(), []
    for name, one in head.items():
        require(isinstance(one, dict) and one.keys() >= {"dtype", "shape", "data_offsets"}, f"{name!r} is damaged")
        dtype, shape, places = (one[key] for key in ("dtype", "shape", "data_offsets"))
        require(isinstance(dtype, str), f"{name!r}: its type is no text")
        require(isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape), f"{name!r}: its shape")
        require(isinstance(places, list) and len(places) == 2 and all(type(at) is int for at in places), f"{name!r}")
        first, end = places
        require(0 <= first <= end, f"the place of {name!r} is damaged")
        ends.append((first, end))
        if dtype not in _DTYPES:
            text = f"{name!r} has the type {dtype!r} of safetensors, for which a store has none"
            found.refused[name] = Unsupported(text)
            continue
        nbytes = math.prod(shape) * _DTYPES[dtype].itemsize
        require(end - first == nbytes, f"the place of {name!r} is not that of its elements")
        found.arrays.append(_stored(path, file, name, tuple(shape), _DTYPES[dtype], 8 + length + first))
    try:
        _require_filled(ends, size - 8 - length)
    except ValueError as error:
        for unknown in found.refused.values():  # elements of its type may have places by other rules
            raise unknown from error
        raise
    require(all(isinstance(about.get(name, ""), str) for name in (VALUES, ATTRIBUTES, HINTS)), "its values are no text")
    documents = {name: json_of(about[name]) for name in (VALUES, ATTRIBUTES, HINTS) if name in about}
    found.values, found.attributes = documents.get(VALUES, {}), documents.get(ATTRIBUTES, {})
    found.hints = Hints.read(documents.get(HINTS))
    others = {key: value for key, value in about.items() if key not in (VALUES, ATTRIBUTES, HINTS)}
    if others not in ({}, {"format": "np"}):
        found.describe("", {**found.attributes.get("", {}), **others})
    return found


def _require_filled(ends: list[tuple[int, int]], size: int) -> None:
    at = 0
    for first, end in sorted(ends):
        require(first == at, "arrays overlap, or there are gaps between them")
        at = end
    require(at == size, "it has another size than its head says")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    require(len(found) == len(pairs), "a name is in its head twice")
    return found


def _stored(path: str, file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Stored:
    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        at, end = start, start + math.prod(shape) * dtype.itemsize
        buffer = bytearray(min(end - at, whole_elements(dtype)))
        while at < end:
            with damage(path, name), memoryview(buffer)[: end - at] as part:
                done = 0
                while done < len(part):
                    count = os.preadv(file.fileno(), [part[done:]], at + done)
                    require(count, "it ends too early")
                    done += count
            yield np.frombuffer(buffer, dtype, done // dtype.itemsize)
            at += done

    return Stored(name, shape, dtype, "C", pieces)
