"""The manifest of an aggregate: which bytes of which part belong to which shard of which process.

A manifest is the object ``manifests/SEQUENCE``. It is written last, and an aggregate without it does not exist:

    8 bytes    b"pmsaggr1"
    8 bytes    XXH3 of all that follows, little-endian
    the rest   msgpack: {"sequence": n, "ranks": N, "time": seconds since 1970,
                         "parts": [[name, bytes, hash], ...],
                         "shards": [[rank, name, dtype, shape, order, by rows, hash, pieces], ...]}
               where pieces are [[part, at, bytes, hash], ...]

The bytes of a shard are its pieces, one after the other; small shards follow each other through parts of one size, so
that a shard may continue in the next part. The hash of a part is XXH3 of the hashes of its pieces, 8 bytes each,
little-endian, by their offsets: the processes that write one part can't hash it as a whole.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from pmstore._core import hash64
from pmstore._errors import ArchiveDamagedError, CorruptStoreError
from pmstore._values.dtypes import descriptor_of, dtype_of
from pmstore.archive._place import Place, checked

__all__ = ["Manifest", "Part", "Piece", "Shard", "byte_count", "decode", "encode", "part_hash"]

_MAGIC = b"pmsaggr1"
_HASH = struct.Struct("<Q")
_MOST_SEQUENCE = 10**16 - 1
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Piece(NamedTuple):
    """Bytes of a shard in a part."""

    part: int
    at: int
    size: int
    hash: int


class Part(NamedTuple):
    """An object with bytes of shards."""

    name: str
    size: int
    hash: int


class Shard(NamedTuple):
    """One value of one process. dtype None: bytes. rows: the array goes on, by its first axis, in the next rank."""

    rank: int
    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    order: str
    rows: bool
    hash: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Manifest(NamedTuple):
    """All of an aggregate but its bytes."""

    sequence: int
    ranks: int
    time: float
    parts: tuple[Part, ...]
    shards: tuple[Shard, ...]


def manifest_name(sequence: int) -> str:
    return f"manifests/{sequence:016d}"


def sequences(place: Place) -> list[int]:
    """The versions that have a manifest, ascending."""
    return sorted(int(name) for name in place.list("manifests") if re.fullmatch(r"[0-9]{16}", name))


def sequence_of(name: str) -> int | None:
    """The version that a part belongs to; None: it is no part of any."""
    match = re.match(r"([0-9]{16})-", name)
    return int(match[1]) if match else None


def checked_sequence(sequence: Any) -> int:
    """Raises TypeError or ValueError if it is not a version number."""
    if isinstance(sequence, bool) or not isinstance(sequence, (int, np.integer)):
        raise TypeError(f"sequence is an int, not {type(sequence).__name__}")
    if not 0 <= sequence <= _MOST_SEQUENCE:
        raise ValueError(f"sequence is a number from 0 to {_MOST_SEQUENCE}, not {sequence}")
    return int(sequence)


def byte_count(size: int | str, name: str) -> int:
    """A number of bytes, 1 or more, from an int or a text such as "128MiB"."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,15})\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{name} is a number of bytes, or a text such as "128MiB", not {size!r}')
        size = int(match[1]) * _UNITS[match[2].upper()]
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f'{name} is a number of bytes, or a text such as "128MiB"')
    if size < 1:
        raise ValueError(f"{name} is at least one byte, not {size}")
    return int(size)


def part_hash(pieces: Iterable[Piece]) -> int:
    """The hash of a part, from its pieces in the order of their offsets."""
    return hash64(b"".join(_HASH.pack(piece.hash) for piece in pieces))


def encode(manifest: Manifest) -> bytes:
    """The bytes of the object."""
    shards = [
        [
            *(shard.rank, shard.name, None if shard.dtype is None else descriptor_of(shard.dtype)),
            *(list(shard.shape), shard.order, shard.rows, shard.hash, [list(piece) for piece in shard.pieces]),
        ]
        for shard in manifest.shards
    ]
    known = {"sequence": manifest.sequence, "ranks": manifest.ranks, "time": manifest.time or time.time()}
    body = msgpack.packb({**known, "parts": [list(part) for part in manifest.parts], "shards": shards})
    return bytes(_MAGIC + _HASH.pack(hash64(body)) + body)


def decode(data: bytes, sequence: int, where: str) -> Manifest:
    """The manifest in an object, which is not trusted. Raises ArchiveDamagedError."""
    head = len(_MAGIC) + _HASH.size
    if data[: len(_MAGIC)] != _MAGIC or len(data) < head:
        raise ArchiveDamagedError(f"{where}: this is no manifest that this version of pmstore knows")
    if _HASH.unpack(data[len(_MAGIC) : head])[0] != hash64(data[head:]):
        raise ArchiveDamagedError(f"{where}: the manifest is damaged: its hash differs")
    try:
        made = _manifest(msgpack.unpackb(data[head:], strict_map_key=True))
        if made.sequence != sequence:
            raise ValueError(f"it belongs to version {made.sequence}")
        return made
    except (ArithmeticError, CorruptStoreError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ArchiveDamagedError(f"{where}: the manifest breaks the format: {error}") from error


def _manifest(raw: dict[str, Any]) -> Manifest:
    parts = tuple(Part(checked(name), _count(size), _count(hash)) for name, size, hash in raw["parts"])
    ranks = _count(raw["ranks"])
    shards, names, pieces_of = [], set(), [[] for _ in parts]  # type: ignore[var-annotated]
    for rank, name, dtype, shape, order, rows, hash, raw_pieces in raw["shards"]:
        pieces = tuple(Piece(*map(_count, piece)) for piece in raw_pieces)
        known = None if dtype is None else dtype_of(dtype)
        made = Shard(_count(rank), name, known, tuple(map(_count, shape)), order, rows, _count(hash), pieces)
        if type(name) is not str or order not in ("C", "F") or type(rows) is not bool or not made.rank < ranks:
            raise ValueError(f"the shard {name!r:.80} is none")
        if len(shape) > 64 or made.size != math.prod(made.shape) * (1 if made.dtype is None else made.dtype.itemsize):
            raise ValueError(f"the shard {name!r:.80} has another size than its pieces")
        if rows and (made.dtype is None or not shape or order != "C"):
            raise ValueError(f"the shard {name!r:.80} has no rows")
        names.add((made.rank, name))
        shards.append(made)
        for piece in pieces:
            pieces_of[piece.part].append(piece)
    if len(names) != len(shards) or len({part.name for part in parts}) != len(parts):
        raise ValueError("a name is there twice")
    for part, pieces in zip(parts, pieces_of):  # type: ignore[assignment]
        at = 0
        for piece in sorted(pieces, key=lambda piece: piece.at):
            if piece.at != at or not piece.size:
                raise ValueError(f"the pieces of {part.name!r} do not follow each other")
            at += piece.size
        if at != part.size or part_hash(sorted(pieces, key=lambda piece: piece.at)) != part.hash:
            raise ValueError(f"the pieces of {part.name!r} do not make it up")
    return Manifest(_count(raw["sequence"]), ranks, float(raw["time"]), parts, tuple(shards))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no count")
    return value
