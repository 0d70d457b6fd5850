"""HDF5, by h5py: a dataset for each array, scalars as datasets without axes, attributes as attributes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pmstore._errors import InterchangeError
from pmstore._interchange.forms import ATTRIBUTES, HINTS, VALUES, Hints, MaxShape, in_json, json_of
from pmstore._interchange.found import Found, Stored, Unsupported, damage, require
from pmstore._interchange.scales import (
    NUMBERED,
    OF_NETCDF,
    SCALES,
    Netcdf,
    address,
    has_length_only,
    is_scale,
    last_part,
    shown,
)
from pmstore._interchange.source import PIECE, Described, Format, Place, Source, chunk_of, elsewhere, places
from pmstore._interchange.text import as_text
from pmstore._interrupts import later
from pmstore._values.as_json import to_json
from pmstore._values.dtypes import descriptor_of, dtype_of

__all__ = ["Hdf5"]

_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS = "biufc"
_CHUNK, _LEAST_CHUNK = 1 << 20, 4096  # bytes of a chunk, at most (HDF5 caches no larger ones) and at least, about
_OF_SCALES = {"CLASS", "NAME"}  # attributes of a dataset that is a scale of others, and
_REFERENCES = {SCALES, "REFERENCE_LIST"}  # those by which both refer to each other
# Names of axes. HDF5's functions for them (`Dataset.dims` of h5py) take any attribute of this name for pointers to
# text, which they follow and free. So it is read like other attributes, and a user's own attribute of this name is
# written to ATTRIBUTES.
_LABELS = "DIMENSION_LABELS"
_FILLS = {  # netCDF's fill values, by kind and size
    "i1": -127,
    "i2": -32767,
    "i4": 1 - (1 << 31),
    "i8": 2 - (1 << 63),
    "u1": 255,
    "u2": 65535,
    "u4": (1 << 32) - 1,
    "u8": (1 << 64) - 2,
    "f4": 15.0 * 2.0**119,
    "f8": 15.0 * 2.0**119,
}


class Hdf5(Format):
    """Written in the layout of HDF5 1.8, which has large attributes, not compressed, and contiguous but for arrays that
    grow."""

    def prepare(self) -> None:
        _h5py()

    def check(self, described: Described) -> None:
        if _type(described.dtype) is None:
            text = f"{described.name!r} has dtype {described.dtype}, which HDF5 can't keep"
            raise TypeError(f"{text}: {elsewhere(described.dtype)}")

    def write(self, source: Source, path: str) -> None:
        h5py = _h5py()
        with _Sink(path) as sink:
            with contextlib.ExitStack() as stack:
                with sink.use():
                    file = h5py.File(sink, "w", libver=("v108", "v110"))
                    stack.callback(_close, file)
                _write(h5py, file, sink, source)
            sink.require_written()

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[Found]:
        h5py = _h5py()
        with contextlib.ExitStack() as stack:
            with damage(path):
                try:
                    file = stack.enter_context(h5py.File(path, "r", locking="best-effort"))
                except BlockingIOError:
                    text = "another process has it open for writing: import it when that has closed it, or a copy"
                    raise InterchangeError(f"{path!r} can't be read: {text}") from None
                except OSError:
                    if _is_netcdf_3(path):
                        text = "it is of netCDF-3, which is not HDF5: make it netCDF-4 (nccopy -k nc4), and import that"
                        raise InterchangeError(f"{path!r} can't be read: {text}") from None
                    raise
                found = _Found(netcdf=Netcdf(h5py, file))
                documents = {name: _document(h5py, file, name) for name in (VALUES, ATTRIBUTES, HINTS)}
                found.values, found.attributes = documents[VALUES], documents[ATTRIBUTES]
                found.hints = Hints.read(documents[HINTS])
                found.attributes[""] = _attributes(h5py, file, "", found)
                _look(h5py, path, file, "", found, {}, set(documents))
            yield found


def _h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('h5py is missing: pip install "pmstore[hdf5]" (or use .npz)', name="h5py") from error


# ---- writing


class _Sink(io.FileIO):
    """The file that HDF5 writes.

    HDF5 may crash when it frees what it failed to write, also when the process ends. So it never sees an error of the
    system: from the first one on, the sink keeps in memory what it should write, and `use` raises the error.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, "r+")
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # what is not in the file, with its place

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """A context for all that may make HDF5 write. No signal handler runs in it: its exception would be an error."""
        with later():
            yield
        self.require_written()

    def require_written(self) -> None:
        if self._error is not None:
            raise self._error

    def write(self, data: Any) -> int:
        at, count = self.tell(), 0
        if self._error is None:
            try:
                while count < len(data):
                    count += super().write(memoryview(data)[count:])
                return count
            except OSError as error:
                self._error = error
        self._kept.append((at, bytes(data)))
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        if self._error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._error = error
        return size or 0

    def readinto(self, buffer: Any) -> int:
        at, view = self.tell(), memoryview(buffer)
        count = super().readinto(view) or 0
        if self._error is None:
            return count
        view[count:] = bytes(len(view) - count)
        for start, data in self._kept:
            begin, end = max(at, start), min(at + len(view), start + len(data))
            if begin < end:
                view[begin - at : end - at] = data[begin - start : end - start]
        return len(view)


def _close(file: Any) -> None:
    with later():
        file.close()


def _write(h5py: Any, file: Any, sink: _Sink, source: Source) -> None:
    for one in source.arrays:
        kind = _type(one.dtype)
        if 0 < one.nbytes <= PIECE:  # in one call, which is quicker
            data = _for_h5py(one.name, source.read(one), kind)
            with sink.use():
                file.create_dataset(one.name, data=data, dtype=kind, **_growth(one))
            source.written(one.nbytes)
            continue
        with sink.use():
            made = file.create_dataset(one.name, one.shape, kind, **_growth(one))
        for place, piece in source.blocks(one, PIECE) if one.nbytes else ():
            data = _for_h5py(one.name, piece, kind)
            with sink.use():
                made[place] = data
            source.written(piece.nbytes)
    others = {}
    for name, value in source.values.items():
        if _natural(value) and type(value) is not list:
            with sink.use():
                file.create_dataset(name, data=value)
        else:
            others[name] = source.readable[name]
    with sink.use():
        unkept = _put_attributes(h5py, file, source.attributes)
    for name, document in ((VALUES, others), (ATTRIBUTES, unkept), (HINTS, source.hints(_told, every=True))):
        if document:
            with sink.use():
                file.create_dataset(name, data=in_json(document))


def _growth(one: Described) -> dict[str, Any]:
    """The options of a dataset that h5py can resize as `append` grows the array."""
    if one.maxshape is None:
        return {}
    rows, width = one.maxshape[0], math.prod(one.shape[1:]) * one.dtype.itemsize
    least = max(one.shape[0], _LEAST_CHUNK // width)
    shape = (least if rows is None else min(least, rows), *one.shape[1:])
    return {"maxshape": one.maxshape, "chunks": chunk_of(one._replace(shape=shape), _CHUNK)}


@functools.lru_cache(256)
def _type(dtype: np.dtype[Any]) -> Any:
    """The dtype for h5py; None if there is none that comes back the same."""
    h5py = _h5py()
    if dtype.kind == "U":
        return h5py.string_dtype("utf-8", dtype.itemsize) if dtype.itemsize else None
    if dtype.kind in "mM":
        return h5py.opaque_dtype(dtype)
    try:
        made = h5py.h5t.py_create(dtype, logical=True).dtype
    except (TypeError, ValueError, NotImplementedError):
        return None
    same = made == dtype and not dtype.hasobject and dtype.itemsize
    return dtype if same else None


def _told(one: Described) -> np.dtype[Any]:
    """Records, aligned and titled fields are not told, and of two integers of one size the usual is."""
    dtype = one.dtype
    if dtype.kind == "U":
        return np.dtype(f"S{dtype.itemsize}")
    if dtype.kind in "iu":
        dtype = np.dtype(dtype.str)
    return dtype if dtype.names is None else np.dtype("V1")


def _for_h5py(name: str, piece: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    if piece.dtype.kind == "U":
        try:
            return np.char.encode(piece, "utf-8").astype(kind)
        except UnicodeEncodeError as error:
            raise ValueError(f"{name!r} has text that HDF5 can't keep ({error}): npz keeps it") from error
    piece = np.asarray(piece, order="C")
    return piece.view(kind) if piece.dtype.kind in "mM" else piece


def _natural(value: Any) -> bool:
    """Whether HDF5 has the value as it is: as a scalar, an array, or a list of text or numbers."""
    kind = type(value)
    if kind is str:
        return bool(value) and "\0" not in value and value.isprintable()
    if kind is int:
        return value in _INT64
    if kind is list:
        return (
            bool(value)
            and len({*map(type, value)}) == 1
            and not isinstance(value[0], (list, np.ndarray))
            and all(map(_natural, value))
        )
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        return value.dtype.kind in _SCALARS and _type(value.dtype) is not None
    return kind in (float, complex, bool)


def _put_attributes(h5py: Any, file: Any, attributes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns those that HDF5 has no place for, in JSON."""
    others: dict[str, Any] = {}
    for name, found in attributes.items():
        if name and name not in file:
            others[name] = to_json(found)
            continue
        member = file[name] if name else file
        for key, value in found.items():
            if key == _LABELS:
                others[name] = {key: to_json(value)}
                continue
            if isinstance(value, np.ndarray) and not value.size:
                value = to_json(value)
            if _is_text(value):
                value = _texts(h5py, value)
            elif not _natural(value):
                value = in_json(to_json(value))
            member.attrs.create(key, value)
        dims: Any = found.get("dims")
        if _is_text(dims) and len(dims) == getattr(member, "ndim", None):
            member.attrs.create(_LABELS, _texts(h5py, dims))
    return others


def _is_text(value: Any) -> bool:
    return type(value) is list and _natural(value) and type(value[0]) is str


def _texts(h5py: Any, found: list[str]) -> np.ndarray[Any, Any]:
    return np.array(found, h5py.string_dtype())


# ---- reading


@dataclass(kw_only=True)
class _Found(Found):
    """netcdf: what netCDF's library shows of the file."""

    netcdf: Netcdf


def _is_netcdf_3(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) in (b"CDF\x01", b"CDF\x02", b"CDF\x05")
    except OSError:
        return False


def _document(h5py: Any, file: Any, name: str) -> Any:
    """A document in JSON; {} if there is none. It is a scalar of this file: others are not read, and it is no larger
    than the file."""
    link = file.get(name, getlink=True)
    if link is None:
        return {}
    require(isinstance(link, h5py.HardLink), f"{name} is a link")
    member = file[name]
    require(isinstance(member, h5py.Dataset) and member.shape == (), f"{name} is no text")
    require(not member.is_virtual and not member.external, f"{name} has its contents in other files")
    require(member.dtype.itemsize <= os.path.getsize(file.filename), f"{name} is too large")
    text = member[()]
    require(isinstance(text, bytes), f"{name} is no text")
    found = json_of(text)
    require(isinstance(found, dict), f"{name} is no object")
    return found


def _look(
    h5py: Any,
    path: str,
    group: Any,
    prefix: str,
    found: _Found,
    seen: dict[Any, str],
    hidden: set[str],
) -> None:
    """Links to other files are not followed: a file must not read others. seen: groups, by their first name. Another
    name of one is not followed either: groups with two names each, 40 levels deep, would have 2^40 names."""
    seen[address(h5py, group)] = prefix
    for part in group:
        name = prefix + (found.netcdf.name(group, part) if isinstance(part, str) else shown(part))
        if name in hidden:
            continue
        if isinstance(part, bytes):
            found.left_out.append((name, f"the name {name!r} is not in UTF-8"))
            continue
        if not isinstance(group.get(part, getlink=True), h5py.HardLink):
            found.left_out.append((name, f"{name!r} is a soft or external link"))
            continue
        member = group[part]
        if isinstance(member, h5py.Group):
            if (first := seen.get(address(h5py, member))) is not None:
                require(not name.startswith(first), f"the group {name!r} is in itself")
                found.left_out.append((name, f"{name!r} is another name of the group {first[:-1]!r}"))
                continue
            found.attributes[name] = _attributes(h5py, member, name, found)
            _look(h5py, path, member, f"{name}/", found, seen, hidden)
        elif isinstance(member, h5py.Dataset):
            with found.member(path, name):
                _dataset(h5py, path, member, name, found)
        else:
            found.left_out.append((name, f"{name!r} is a named type"))


def _dataset(h5py: Any, path: str, member: Any, name: str, found: _Found) -> None:
    if member.shape is None:
        found.left_out.append((name, f"{name!r} is a dataset without a shape"))
        return
    if has_length_only(h5py, member):
        return
    if member.is_virtual or member.external:
        raise Unsupported(f"{name!r} has its contents in other files, which are not read")
    try:
        text = h5py.check_string_dtype(member.dtype)
    except TypeError as error:
        raise Unsupported(f"{name!r} holds elements of a type of HDF5 that numpy lacks: {error}") from error
    found.attributes[name] = _attributes(h5py, member, name, found)
    shape = found.netcdf.shape(member)
    if text is not None and text.length is None:
        if not member.ndim:
            found.values[name] = member.asstr()[()]
        else:
            text = as_text(path, name, shape, lambda: _filled(member.asstr()[...], shape, str))
            found.arrays.append(text._replace(maxshape=_maxshape(member, shape)))
        return
    base, inner = member.dtype.subdtype or (member.dtype, ())  # each element may be an array
    dtype = _plain(h5py, base, name)
    if not member.ndim and name in found.hints.values:
        value = member[()]
        if found.hints.is_value(name, value):
            found.values[name] = value
            return
    wanted = found.hints.dtype(name)
    if text is not None and wanted is not None and wanted.kind == "U" and dtype.itemsize == wanted.itemsize:
        with damage(path, name):
            longest = _longest(member)  # another program may have written longer text
        dtype = wanted if longest <= wanted.itemsize // 4 else np.dtype(f"U{longest}")

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        with damage(path, name):
            if not member.ndim:
                yield _elements(np.asarray(member[()]), dtype)
                return
            plain = dtype.kind in _SCALARS and member.dtype == dtype and member.shape == shape
            buffer = np.empty(0, dtype)
            for place in _places(member, shape):
                sizes = [part.stop - part.start for part in place]
                if not plain:
                    block = _filled(member[place], (*sizes, *inner), lambda: _fill_of(h5py, member))
                    yield _elements(block, dtype)
                    continue
                if buffer.size < math.prod(sizes):
                    buffer = np.empty(math.prod(sizes), dtype)
                block = buffer[: math.prod(sizes)].reshape(sizes)
                member.read_direct(block, place)
                yield block

    found.arrays.append(Stored(name, (*shape, *inner), dtype, "C", pieces, _maxshape(member, shape, inner)))


def _maxshape(member: Any, shape: tuple[int, ...], inner: tuple[int, ...] = ()) -> MaxShape:
    """The maxshape of a dataset that is an array that grows: its first axis may become longer, and no other one."""
    if not shape or member.maxshape[0] == shape[0] or member.maxshape[1:] != shape[1:]:
        return None
    return (*member.maxshape, *inner)


def _fill_of(h5py: Any, member: Any) -> Any:
    """What netCDF shows of a variable behind its end: the fill value of its type, unless it has one of its own."""
    if member.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
        return member.fillvalue
    return _FILLS.get(f"{member.dtype.kind}{member.dtype.itemsize}", member.fillvalue)


def _filled(block: Any, shape: tuple[int, ...], fill: Callable[[], Any]) -> Any:
    """A block with the fill value behind its elements, up to the shape. HDF5 gives none for some types: `fill` is
    called only if it is needed."""
    if block.shape == shape:
        return block
    whole = np.full(shape, fill(), block.dtype)
    whole[tuple(slice(0, n) for n in block.shape)] = block
    return whole


def _places(member: Any, shape: tuple[int, ...]) -> Iterator[Place]:
    """The places of the blocks in which a dataset is read. Those of an axis that netCDF takes for longer end behind
    it."""
    return places(shape, member.dtype.itemsize, PIECE, member.chunks or ())


def _longest(member: Any) -> int:
    """The characters of the longest text in a dataset of UTF-8."""
    if not member.ndim:
        return len(member[()].decode())
    parts = (member[place] for place in _places(member, member.shape))
    return max((int(np.char.str_len(np.char.decode(part, "utf-8")).max()) for part in parts if part.size), default=0)


def _elements(piece: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.kind == "U" and piece.dtype.kind == "S":
        return np.char.decode(piece, "utf-8").astype(dtype)
    return np.ascontiguousarray(piece, dtype)  # elements without axes come in the machine's byte order


def _plain(h5py: Any, dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    """The dtype without h5py's notes in it. Raises Unsupported for types that a store lacks."""
    try:
        return dtype_of(descriptor_of(dtype))
    except TypeError as error:
        kind = (
            "references" if h5py.check_ref_dtype(dtype) else "elements of any length" if dtype.hasobject else str(dtype)
        )
        raise Unsupported(f"{name!r} holds {kind}, for which a store has no type") from error


def _attributes(h5py: Any, member: Any, name: str, found: _Found) -> dict[str, Any]:
    """Those that HDF5 has no place for (see `_put_attributes`) are in `found` already."""
    known, hinted = dict(found.attributes.get(name, {})), found.hints.attributes.get(name, {})
    scale = is_scale(h5py, member)
    axes = getattr(member, "ndim", 0)
    labels = [""] * axes
    scales = found.netcdf.axes(member) if scale else labels
    for key in member.attrs:
        if isinstance(key, bytes):
            found.left_out.append((name, f"the name of the attribute {shown(key)!r} of {name!r} is not in UTF-8"))
            continue
        hidden = (scale and key in _OF_SCALES) or key.startswith(NUMBERED) or (not name and key in OF_NETCDF)
        if hidden and key not in hinted:
            continue
        try:
            value = member.attrs[key]
        except (TypeError, ValueError):  # an OSError is damage
            found.left_out.append((name, f"the attribute {key!r} of {name!r} has a type that can't be read"))
            continue
        refers, value = value, _attribute(h5py, value)
        if value is _LEFT_OUT:
            if key in _REFERENCES and isinstance(member, h5py.Dataset):
                if key == SCALES and not scale and np.shape(refers) == (axes,):
                    scales = [_name_of_scale(member.file, one) for one in refers]
                continue
            found.left_out.append((name, f"the attribute {key!r} of {name!r} is a reference, or of another type"))
        elif key == _LABELS and isinstance(value, list) and len(value) == axes:
            labels = value
        else:
            known[key] = _of_netcdf(value) if found.netcdf.is_one and key not in hinted else value
    names = [label or name for label, name in zip(labels, scales, strict=True)]
    if any(names):
        known.setdefault("dims", names)
    return known


def _name_of_scale(file: Any, refers: Any) -> str:
    """The name of an axis by the first of its scales, as h5netcdf and xarray know it; "" if there is none."""
    try:
        return last_part(file[refers[0]])
    except (IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError):  # none, or it points to nothing
        return ""


_LEFT_OUT = object()


def _attribute(h5py: Any, value: Any) -> Any:
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        items = [one.decode() if isinstance(one, bytes) else one for one in value.ravel().tolist()]
        return items if value.ndim == 1 and all(isinstance(one, str) for one in items) else _LEFT_OUT
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return value.astype(dtype_of(descriptor_of(value.dtype)), copy=False)
        except (TypeError, ValueError):
            return _LEFT_OUT
    return value if isinstance(value, (str, bytes)) else _LEFT_OUT


def _of_netcdf(value: Any) -> Any:
    """The attribute that netCDF's library shows. It keeps text as bytes, and what is one number as an array of one; so
    it keeps text that is not in ASCII."""
    if isinstance(value, np.bytes_):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    elif isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype.kind in _SCALARS):
        return value[0] if np.shape(value) == (1,) else value
    return value
