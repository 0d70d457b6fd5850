"""The manifest of an aggregate: which bytes of which part belong to which shard of which process.

A manifest is the object ``manifests/SEQUENCE``. It is written last, and an aggregate without it does not exist:

    8 bytes    b"pmsaggr1"
    8 bytes    XXH3 of all that follows, little-endian
    the rest   msgpack: {"sequence": n, "time": seconds since 1970, "parts": [[name, bytes, hash], ...],
                         "counts": [the number of shards of each process], "names": [of the shards],
                         "kinds": [[dtype, shape, order, by rows], ...], "kind": of each shard,
                         "hashes": of each shard, "pieces": [[shard, part, at, bytes, hash], ...]}

"kind", "hashes" and "pieces" are byte strings of little-endian uint64. The bytes of a shard are its pieces, one after
the other; small shards follow each other through parts of one size, so that a shard may continue in the next part. The
hash of a part is XXH3 of the hashes of its pieces, 8 bytes each, in the order of their offsets: the processes that
write one part can't hash it as a whole.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from pmstore._core import hash64
from pmstore._errors import ArchiveDamagedError, CorruptStoreError
from pmstore._values.dtypes import dtype_of
from pmstore.archive._place import Place, checked

__all__ = [
    "Manifest",
    "Part",
    "Piece",
    "Shard",
    "Written",
    "byte_count",
    "checked_sequence",
    "column",
    "decode",
    "join",
    "manifest_name",
    "part_hash",
    "sequence_of",
    "sequences",
]

_MAGIC = b"pmsaggr1"
_HASH = struct.Struct("<Q")
_COLUMN = np.dtype("<u8")
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
    """The version that a part belongs to; None: it is no part of an aggregate."""
    match = re.fullmatch(r"([0-9]{16})-[0-9a-f]{12}-(?:n[0-9]{4,}|r[0-9]{6,})-[0-9]{6,}", name)
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


class Written(NamedTuple):
    """The list of the parts that one process has written, as it tells the leader. Columns of uint64 are bytes.

    In `pieces`, the number of a part k that it shares with others is 2 * k, and that of a part with its shard number k
    alone is 2 * k + 1.
    """

    names: list[str]
    kinds: list[list[Any]]
    kind: bytes
    hashes: bytes
    pieces: bytes


def column(numbers: Iterable[int]) -> bytes:
    """Numbers as little-endian uint64."""
    return np.array(list(numbers), _COLUMN).tobytes()


def join(sequence: int, found: list[Written], name_of: Callable[[int, int], str]) -> tuple[bytes, list[Part], int]:
    """The manifest of the parts of all processes; these parts; the number of shards.

    name_of(rank, number) is the name of a part. Raises ValueError if rows of several processes do not fit together.
    """
    names: list[str] = []
    kinds: list[list[Any]] = []
    kind, pieces, of_rows = [], [], {}  # type: ignore[var-annotated]
    parts: dict[str, int] = {}
    for rank, written in enumerate(found):
        own = np.frombuffer(written.kind, _COLUMN)
        for name, number in zip(written.names, own.tolist()):
            dtype, shape, _, rows = written.kinds[number]
            if rows:
                first, *known = of_rows.setdefault(name, (rank, dtype, shape[1:]))
                if known != [dtype, shape[1:]]:
                    raise ValueError(
                        f"the rows of {name!r} differ: {known} in rank {first}, {[dtype, shape[1:]]} in {rank}"
                    )
        kind.append(own + np.uint64(len(kinds)))
        kinds += written.kinds
        table = np.frombuffer(written.pieces, _COLUMN).reshape(-1, 5).copy()
        table[:, 0] += np.uint64(len(names))
        different, inverse = np.unique(table[:, 1], return_inverse=True)
        numbers = [parts.setdefault(name_of(rank, int(part)), len(parts)) for part in different]
        table[:, 1] = np.array(numbers, _COLUMN)[inverse]
        pieces.append(table)
        names += written.names
    whole = np.concatenate(pieces)  # those of a part by their offsets: each rank writes behind the ranks before it
    made = []
    for name, number in parts.items():
        own = whole[whole[:, 1] == number]
        made.append(Part(name, int(own[:, 3].sum()), hash64(own[:, 4].tobytes())))
    known = {"sequence": sequence, "time": time.time(), "parts": [list(part) for part in made], "names": names}
    known |= {"counts": [len(written.names) for written in found], "kinds": kinds, "pieces": whole.tobytes()}
    known |= {"kind": np.concatenate(kind).tobytes(), "hashes": b"".join(one.hashes for one in found)}
    body = msgpack.packb(known)
    return bytes(_MAGIC + _HASH.pack(hash64(body)) + body), made, len(names)


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
    ranks = [rank for rank, count in enumerate(raw["counts"]) for _ in range(min(_count(count), len(raw["names"])))]
    kinds = [_kind(*kind) for kind in raw["kinds"]]
    number = np.frombuffer(raw["kind"], _COLUMN).tolist()
    hashes = np.frombuffer(raw["hashes"], _COLUMN).tolist()
    table = np.frombuffer(raw["pieces"], _COLUMN).reshape(-1, 5).tolist()
    if not len(ranks) == sum(raw["counts"]) == len(raw["names"]) == len(number) == len(hashes):
        raise ValueError("there are other numbers of names, kinds and hashes")
    of_shard: list[list[Piece]] = [[] for _ in ranks]
    of_part: list[list[Piece]] = [[] for _ in parts]
    for index, *piece in table:
        of_shard[index].append(Piece(*piece))
        of_part[piece[0]].append(of_shard[index][-1])
    shards = []
    for rank, name, kind, hash, pieces in zip(ranks, raw["names"], number, hashes, of_shard):
        dtype, shape, order, rows, size = kinds[kind]
        shards.append(Shard(rank, name, dtype, shape, order, rows, hash, tuple(pieces)))
        if type(name) is not str or shards[-1].size != size:
            raise ValueError(f"the shard {name!r:.80} has another size than its pieces")
    if len({shard[:2] for shard in shards}) != len(shards) or len({part.name for part in parts}) != len(parts):
        raise ValueError("a name is there twice")
    of_rows: dict[str, Any] = {}
    for shard in shards:
        if shard.rows and of_rows.setdefault(shard.name, (shard.dtype, shard.shape[1:])) != (
            shard.dtype,
            shard.shape[1:],
        ):
            raise ValueError(f"the rows of {shard.name!r:.80} differ")
    for part, pieces in zip(parts, of_part):
        pieces.sort(key=lambda piece: piece.at)
        ends = [0, *(piece.at + piece.size for piece in pieces)]
        if [piece.at for piece in pieces] != ends[:-1] or ends[-1] != part.size or part_hash(pieces) != part.hash:
            raise ValueError(f"the pieces of {part.name!r} do not make it up")
    return Manifest(_count(raw["sequence"]), len(raw["counts"]), float(raw["time"]), parts, tuple(shards))


def _kind(dtype: Any, shape: Any, order: Any, rows: Any) -> tuple[Any, tuple[int, ...], str, bool, int]:
    known = None if dtype is None else dtype_of(dtype)
    size = math.prod(map(_count, shape)) * (1 if known is None else known.itemsize)
    bytes_alone = known is None and (rows or len(shape) != 1)
    if order not in ("C", "F") or type(rows) is not bool or len(shape) > 64 or bytes_alone:
        raise ValueError("a kind of shard breaks the format")
    if rows and (not shape or order != "C"):
        raise ValueError("a shard that is split by rows has none")
    return known, tuple(shape), order, rows, size


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no count")
    return value
