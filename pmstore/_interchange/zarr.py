"""zarr: a group in a directory. Version 3 is written, versions 2 and 3 are read."""

from __future__ import annotations

import base64
import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pmstore._errors import InterchangeError
from pmstore._interchange.forms import ATTRIBUTES, HINTS, VALUES, Hints
from pmstore._interchange.found import Found, Stored, Unsupported, damage, require
from pmstore._interchange.source import Described, Format, Source, chunk_of, elsewhere, places
from pmstore._interchange.text import as_text
from pmstore._values.as_json import to_json

__all__ = ["Zarr"]

_CHUNK = 8 << 20  # bytes of a chunk, about
_LONGEST = 255  # bytes of the name of a file
_WRITTEN = "written"  # in the document of hints: the names of all arrays
_DIMS = "_ARRAY_DIMENSIONS"  # where xarray keeps names of axes in version 2
_FILL = "_FillValue"  # of CF: elements with this value are missing
_PACKED: dict[str, tuple[str, tuple[type, ...]]] = {  # see `_packed`
    "f": ("<f8", (int, float, np.integer, np.floating)),
    "c": ("<c16", (complex, np.complexfloating)),
}
# Codecs of zarr and numcodecs that only compute. "pickle" would run code of the file.
# fmt: off
_CODECS = {
    "bytes", "gzip", "zstd", "blosc", "crc32c", "sharding_indexed", "transpose", "vlen-utf8", "vlen-bytes",
    "zlib", "bz2", "lzma", "lz4", "shuffle", "delta", "fixedscaleoffset", "packbits", "quantize", "bitround",
    "astype", "crc32", "adler32", "fletcher32", "jenkins_lookup3", "fixed_length_utf32", "cast_value",
    "scale_offset", "pmstore.planes",
}
# fmt: on


class Zarr(Format):
    """A chunk has about 8 MiB. Arrays are little-endian and in C order."""

    directory = True

    def prepare(self) -> None:
        try:
            importlib.import_module("zarr")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'zarr is missing: pip install "pmstore[export]" (or export to .npz)', name="zarr"
            ) from error

    def check(self, described: Described) -> None:
        _check_path(described.name, array=True)
        if described.dtype.kind in "mM" and np.datetime_data(described.dtype)[0] == "generic":
            raise TypeError(f"{described.name!r} has dtype {described.dtype} without a unit, which zarr lacks")

    def write(self, source: Source, path: str) -> None:
        zarr = importlib.import_module("zarr")
        attributes = {name: to_json(found) for name, found in source.attributes.items()}
        for name in attributes:
            if name not in source.values:
                _check_path(name, array=False)
        root = zarr.create_group(path, zarr_format=3, overwrite=False)
        groups = {"": root}
        told = {}  # records come back as other structures
        made = {}
        fills = set()
        for one in source.arrays:  # no contents are written before all types are known to come back
            above, _, last = one.name.rpartition("/")
            if above not in groups:
                groups[above] = root.require_group(above)
            about = attributes.pop(one.name, {})
            if _FILL in about and (packed := _packed(source.attributes[one.name][_FILL], one.dtype.kind)):
                about[_FILL] = packed
                fills.add((one.name, _FILL))
            dims = _dims(about, len(one.shape))
            options: dict[str, Any] = {} if dims is None else {"dimension_names": dims}
            try:
                # Chunks that equal the fill value are written, too: -0.0 equals 0.0.
                config = {"write_empty_chunks": True}
                options |= {"chunks": chunk_of(one, _CHUNK), "config": config, "attributes": about}
                made[one.name] = groups[above].create_array(last, shape=one.shape, dtype=one.little, **options)
                again = zarr.open_array(os.path.join(path, one.name), mode="r")
                told[one.name] = np.dtype(again.dtype)
                if (again.dtype, again.shape) != (one.little, one.shape):
                    raise TypeError(f"it would come back as {again.dtype}")
            except (TypeError, ValueError) as error:
                text = f"{one.name!r} has dtype {one.dtype}, which zarr can't keep ({error})"
                raise TypeError(f"{text}: {elsewhere(one.dtype)}") from error
        for one in source.arrays:
            self._fill(made[one.name], source, one)
        for name in [name for name in attributes if name and name not in source.values]:
            root.require_group(name).attrs.update(attributes.pop(name))
        about = attributes.pop("", {})
        if attributes:  # of values
            about[ATTRIBUTES] = attributes
        if source.readable:
            about[VALUES] = source.readable
        about[HINTS] = {**source.hints(lambda one: told[one.name], other=fills), _WRITTEN: list(made)}
        root.attrs.update(about)

    @staticmethod
    def _fill(made: Any, source: Source, one: Described) -> None:
        for place, piece in source.blocks(one, _CHUNK, made.chunks):
            made[place or ...] = piece.astype(one.little, copy=False)
            source.written(piece.nbytes)

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[Found]:
        zarr = importlib.import_module("zarr")
        with damage(path):
            if not os.path.exists(path):
                raise FileNotFoundError(2, os.strerror(2), path)
            _require_inside(path, os.path.realpath(path))
            found = Found()
            root = zarr.open(path, mode="r")
            text = f"it is an array, and no group of arrays: store[name] = zarr.open({path!r})[...] copies it"
            require(not hasattr(root, "shape"), text)
            # Consolidated metadata do not have what was added later.
            root = zarr.open_group(path, mode="r", use_consolidated=False)
            about = dict(root.attrs)
            document = about.pop(HINTS, None)
            found.values, found.hints = about.pop(VALUES, {}), Hints.read(document)
            found.attributes = about.pop(ATTRIBUTES, {})
            require(isinstance(found.attributes, dict), "its attributes are damaged")
            found.describe("", about)
            written = _written(document)
            _look(path, root, "", found, written)
            there = {one.name for one in found.arrays}
            for name in sorted(written - there - found.refused.keys()):
                text = f"{path!r} lacks {name!r}, which was exported to it: names= chooses from what is there"
                found.refused[name] = InterchangeError(text)
        yield found


def _check_path(name: str, array: bool) -> None:
    """Raise ValueError unless an array, or a group that has attributes, can have the name."""
    parts = name.split("/")
    if "zarr.json" in parts or (array and any(part.startswith("__") for part in parts)):
        raise ValueError(f"the name {name!r} has a meaning of its own in zarr: export to .npz keeps it")
    if max(len(os.fsencode(part)) for part in parts) > _LONGEST:
        raise ValueError(f"{name!r} has a part of over {_LONGEST} bytes, too long for a file: export to .npz keeps it")


def _written(document: Any) -> set[str]:
    """The names of the arrays that an export wrote; none in a directory of another program."""
    names = document.get(_WRITTEN) if isinstance(document, dict) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _look(path: str, group: Any, prefix: str, found: Found, written: set[str]) -> None:
    """Each member is opened by itself: `group.members` gives none if it can't open one."""
    for part in sorted(os.listdir(os.path.join(path, prefix))):
        name = prefix + part
        if not os.path.isdir(os.path.join(path, name)):
            continue
        with found.member(path, name):
            try:
                member = group[part]
            except KeyError:
                found.left_out.append((name, f"the directory {name!r} is neither an array nor a group of zarr"))
                continue
            if hasattr(member, "shape"):
                found.arrays.append(_stored(path, name, member))
                if name in written:
                    _require_chunks(os.path.join(path, name), member)
            found.describe(name, _attributes(member))
        if name not in found.refused and not hasattr(member, "shape"):
            _look(path, member, f"{name}/", found, written)


def _require_chunks(folder: str, member: Any) -> None:
    """Raise ValueError unless all chunks of an array are there, as an export writes them. zarr takes the fill value
    for one that is missing."""
    count = math.prod(-(-n // chunk) for n, chunk in zip(member.shape, member.shards or member.chunks, strict=True))
    there = sum(_is_chunk(name) for _, _, files in os.walk(folder) for name in files)
    text = f"{there} of its {count} chunks are there; an export writes all, and so does zarr with write_empty_chunks"
    require(there >= count, text)


def _is_chunk(name: str) -> bool:
    """Whether a file in the directory of an array is a chunk, by its name, which ends in the place along an axis."""
    return name == "c" or name.rpartition(".")[2].isdecimal()


def _require_inside(folder: str, root: str) -> None:
    """Raise ValueError for a symbolic link that leads out of the directory: a file must not read others."""
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                inside = f"{os.path.realpath(entry.path)}/".startswith(f"{root}/")
                require(inside, f"{os.path.relpath(entry.path, root)!r} is a link to another file")
            elif entry.is_dir():
                _require_inside(entry.path, root)


def _dims(attributes: dict[str, Any], axes: int, key: str = "dims") -> list[str] | None:
    dims = attributes.get(key)
    if isinstance(dims, list) and len(dims) == axes and all(isinstance(dim, str) for dim in dims):
        return dims
    return None


def _attributes(member: Any) -> dict[str, Any]:
    found = dict(member.attrs)
    if not hasattr(member, "shape"):
        return found
    kind = np.dtype(member.dtype).kind
    dims = ["" if dim is None else dim for dim in getattr(member.metadata, "dimension_names", None) or ()]
    if member.metadata.zarr_format == 3 and _FILL in found:
        found[_FILL] = _unpacked(found[_FILL], kind)
    if member.metadata.zarr_format == 2 and _dims(found, len(member.shape), _DIMS) is not None:
        dims = found.pop(_DIMS)
        if member.fill_value is not None and kind in "biufcS":  # xarray keeps it there
            found.setdefault(_FILL, member.fill_value)
    if any(dims):
        found.setdefault("dims", dims)
    return found


def _packed(value: Any, kind: str) -> Any:
    """The form in which xarray has the `_FillValue` of floating-point and complex elements in version 3: doubles in
    base64. None for other elements and values, and for an int that no double equals."""
    code, types = _PACKED.get(kind, ("", ()))
    if not isinstance(value, types) or isinstance(value, bool):
        return None
    if isinstance(value, int | np.integer) and not _is_double(int(value)):
        return None
    parts = [base64.b64encode(part.tobytes()).decode() for part in np.array([value], code).view("<f8")]
    return parts if kind == "c" else parts[0]


def _is_double(value: int) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _unpacked(found: Any, kind: str) -> Any:
    """The number of this form; what was found if it has another form."""
    if kind not in _PACKED:
        return found
    try:
        parts = [base64.b64decode(part, validate=True) for part in (found if kind == "c" else [found])]
        return np.frombuffer(b"".join(parts), _PACKED[kind][0]).item()
    except (TypeError, ValueError):
        return found


def _stored(path: str, name: str, member: Any) -> Stored:
    described = member.metadata.to_dict()
    _check_codecs(name, [described.get(key) for key in ("codecs", "filters", "compressor")])
    dtype = np.dtype(member.dtype)
    if dtype.hasobject or dtype.kind == "T":
        return as_text(path, name, member.shape, lambda: member[...])

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        with damage(path, name):
            for place in places(member.shape, dtype.itemsize, _CHUNK, member.chunks):
                yield np.ascontiguousarray(member[place or ...], dtype)

    return Stored(name, tuple(member.shape), dtype, "C", pieces)


def _check_codecs(name: str, found: Any) -> None:
    """Raise Unsupported for a codec that might do more than compute: a file must not run code."""
    for one in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(one, (list, tuple)):
            _check_codecs(name, one)
        elif one is not None:
            about = one if isinstance(one, dict) else getattr(one, "get_config", dict)()
            codec = str(about.get("name", about.get("id", ""))).removeprefix("numcodecs.")
            if codec not in _CODECS:
                raise Unsupported(f"{name!r} has the codec {codec!r}, which is not read: a file must not run code")
            inner = about.get("configuration") or {}
            _check_codecs(name, [inner.get("codecs"), inner.get("index_codecs")])
