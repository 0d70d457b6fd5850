"""npz: numpy's own format, not compressed. np.load reads it. Nothing is pickled, and nothing is unpickled."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from pmstore._interchange.forms import ATTRIBUTES, HINTS, VALUES, Hints, in_json, json_of
from pmstore._interchange.found import Found, Stored, Unsupported, damage, require
from pmstore._interchange.source import Described, Format, Source, whole_elements
from pmstore._store.held import off_streams
from pmstore._values.as_json import to_json

__all__ = ["Npz"]

_HEAD = 1 << 20  # bytes of a member's head, at most
_DOCUMENT = 16 << 20  # bytes of JSON that a few compressed ones may become; `export` compresses none
_DOCUMENTS = (VALUES, ATTRIBUTES, HINTS)
# Records of a zip file: each with its signature, and the fields that are looked at.
_MEMBER, _LOCAL = b"PK\x03\x04", struct.Struct("<4s2xH18x2H")  # flags, the lengths of name and extra field
_ENTRY, _CENTRAL = b"PK\x01\x02", struct.Struct("<4s24x3H12x")  # the lengths of name, extra field and comment
_LAST, _END = b"PK\x05\x06", struct.Struct("<4s6xHL4xH")  # entries, bytes of the directory, length of the comment
_LAST64, _END64 = b"PK\x06\x06", struct.Struct("<4sQ20xQQ8x")  # length of what follows, entries, bytes
_LOCATOR = 20  # bytes between the last two
_LONG = re.compile(r"(?<=[(, ])(\d+)L(?=[,)])")
_UTF8 = 0x800  # the flag of names in UTF-8


class Npz(Format):
    """A zip file with a member ``name.npy`` for each array, and members in JSON for the rest."""

    def check(self, described: Described) -> None:
        try:
            np.lib.format.dtype_to_descr(described.dtype)
        except (TypeError, ValueError) as error:
            text = f"{described.name!r} has dtype {described.dtype}, which npz can't keep: {error}"
            raise TypeError(text) from error

    def write(self, source: Source, path: str) -> None:
        with off_streams(lambda: zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)) as archive:
            for one in source.arrays:
                with archive.open(f"{one.name}.npy", "w", force_zip64=True) as member:
                    member.write(_head_of(one, order := source.order(one)))
                    for piece in source.flat(one, order):
                        member.write(piece.view(np.uint8).data)
                        source.written(piece.nbytes)
            attributes = {name: to_json(found) for name, found in source.attributes.items()}
            for name, document in zip(_DOCUMENTS, (source.readable, attributes, source.hints(_told, order=False))):
                if document:
                    archive.writestr(zipfile.ZipInfo(f"{name}.json"), in_json(document))

    @contextlib.contextmanager
    def read(self, path: str) -> Iterator[Found]:
        with contextlib.ExitStack() as stack:
            with damage(path):
                file = stack.enter_context(open(path, "rb"))
                archive = stack.enter_context(zipfile.ZipFile(file))
                _require_whole(file, archive)
                found = _look(path, archive)
            yield found


def _told(one: Described) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(one.dtype))


def _head_of(one: Described, order: str) -> bytes:
    """The head of a member, of version 1 or, for names that Latin-1 lacks, version 3."""
    about = {"descr": np.lib.format.dtype_to_descr(one.dtype), "fortran_order": order == "F", "shape": one.shape}
    text = repr(about)
    version, encoded = 1, text.encode("latin1", "replace")
    if len(encoded) > 60_000 or encoded.decode("latin1") != text:
        version, encoded = 3, text.encode()
    width = 2 if version == 1 else 4
    encoded += b" " * (-(8 + width + len(encoded) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(encoded).to_bytes(width, "little") + encoded


def _require_whole(file: IO[bytes], archive: zipfile.ZipFile) -> None:
    """Raise ValueError unless zipfile has found all members, by the names that they have themselves.

    zipfile reads the directory up to the size in the end record, and counts nothing: an entry whose length is damaged
    hides those behind it. It may also take another zip file, in a member, for the whole if the end record is damaged.
    """
    members = archive.infolist()
    file.seek(archive.start_dir)
    for _ in members:
        _, *lengths = _record(file.read(_CENTRAL.size), _CENTRAL, _ENTRY)
        file.seek(sum(lengths), 1)
    known = len(members), file.tell() - archive.start_dir
    end = file.read(1 << 17)  # more than the longest comment
    large = end.startswith(_LAST64)
    if large:
        _, length, *told = _record(end, _END64, _LAST64)
        end = end[12 + length + _LOCATOR :]
    _, entries, nbytes, comment = _record(end, _END, _LAST)
    require(known == (tuple(told) if large else (entries, nbytes)), "its directory is damaged")
    require(len(end) == _END.size + comment, "it does not end with its directory")
    for member in members:
        file.seek(member.header_offset)
        _, flags, length, _ = _record(file.read(_LOCAL.size), _LOCAL, _MEMBER)
        name = file.read(length).decode("utf-8" if flags & _UTF8 else "cp437")
        require(name == member.orig_filename, f"the member {name!r} is {member.orig_filename!r} in its directory")


def _record(data: bytes, kind: struct.Struct, signature: bytes) -> tuple[Any, ...]:
    require(len(data) >= kind.size and data.startswith(signature), "its directory is damaged")
    return kind.unpack_from(data)


def _look(path: str, archive: zipfile.ZipFile) -> Found:
    found, documents = Found(), {}
    names = archive.namelist()
    require(len(set(names)) == len(names), "a member is in it twice")
    for member in archive.infolist():
        name, _, end = member.filename.rpartition(".")
        if end == "npy":
            with found.member(path, name):
                found.arrays.append(_described(path, archive, member, name))
        elif end == "json" and name in _DOCUMENTS:
            small = member.compress_type == zipfile.ZIP_STORED or member.file_size <= _DOCUMENT
            require(small, f"{member.filename} is compressed, and has over {_DOCUMENT >> 20} MiB")
            documents[name] = json_of(archive.read(member))
        elif not member.is_dir():
            found.left_out.append((member.filename, f"the member {member.filename!r} is no array"))
    found.values = documents.get(VALUES, {})
    found.attributes = documents.get(ATTRIBUTES, {})
    found.hints = Hints.read(documents.get(HINTS))
    return found


def _described(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Stored:
    with archive.open(member) as file:
        dtype, shape, order, start = _head(file, name)
        nbytes = math.prod(shape) * dtype.itemsize
        require(start + nbytes == member.file_size, "its size is not that of its elements")

    def pieces() -> Iterator[np.ndarray[Any, Any]]:
        with damage(path, name), archive.open(member) as file:
            file.read(start)
            left, buffer = nbytes, bytearray(min(nbytes, whole_elements(dtype)))
            while left:
                with memoryview(buffer)[:left] as part:
                    at = 0
                    while at < len(part):
                        count = file.readinto(part[at:])  # type: ignore[attr-defined]
                        require(count, "it ends too early")
                        at += count
                yield np.frombuffer(buffer, dtype, at // dtype.itemsize)
                left -= at
            require(not file.read(1), "it is too long")  # the checksum is verified at the end

    return Stored(name, shape, dtype, order, pieces)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:  # Python 2 of Windows wrote lengths as 2L
        return ast.literal_eval(_LONG.sub(r"\1", text))


def _head(file: Any, name: str) -> tuple[np.dtype[Any], tuple[int, ...], str, int]:
    """dtype, shape, order, and where the elements begin. numpy's own function would read pickles, too, if asked."""
    magic = file.read(8)
    require(magic[:6] == b"\x93NUMPY" and magic[6] in (1, 2, 3), "it is no array of numpy")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    require(length <= _HEAD, "its head is too long")
    text = file.read(length).decode("utf-8" if magic[6] == 3 else "latin1")
    try:
        head = _literal(text.strip())
    except (MemoryError, RecursionError):  # it is nested more deeply than the parser can follow
        head = None
    require(isinstance(head, dict) and head.keys() == {"descr", "fortran_order", "shape"}, "its head is damaged")
    shape = head["shape"]
    require(isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape), "its shape is damaged")
    require(isinstance(head["descr"], str | list | tuple), "its dtype is damaged")
    dtype = np.lib.format.descr_to_dtype(head["descr"])
    if dtype.hasobject:
        raise Unsupported(f"{name!r} holds pickled Python objects, which are never loaded")
    return dtype, shape, "F" if head["fortran_order"] else "C", 8 + width + length
