"""The bytes of an archive's objects, and the checks when they are read. docs/archive.md describes them.

Nothing that is read is trusted: every object but a part has an envelope with its kind, format and hash; a piece of a
part is checked against the hash that an index or a directory has for it. Sizes are checked before memory is asked for.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgpack

from pmstore._core import hash64
from pmstore._errors import MALFORMED, ArchiveDamagedError, ArchiveWarning, CorruptStoreError, FormatVersionError
from pmstore._store.notes import CommitNote, decoded

__all__ = [
    "ARCHIVE",
    "FORMAT",
    "SEGMENT",
    "TAG",
    "UNTAG",
    "WRITER",
    "Directory",
    "Frame",
    "Item",
    "Loss",
    "Piece",
    "Row",
    "Segment",
    "is_part",
    "lossy_text",
    "opened",
    "part_name",
    "wrapped",
    "tell_losses",
    "writer_of",
]

FORMAT = 1
ARCHIVE, SEGMENT, TAG, UNTAG, WRITER = b"A", b"I", b"T", b"U", b"W"  # kinds of objects

_ENVELOPE = struct.Struct("<5scHQ")  # magic, kind, format, length
_HASH = struct.Struct("<Q")  # of the payload, of what is before it, and of the object's name
_MAGIC = b"pmarc"
_PART = re.compile(r"parts/[0-9a-f]{16}-[0-9]{10}")
_SEGMENT = re.compile(r"([0-9]{12})-([0-9]{12})-([0-9]{6})")
_LONGEST = 1 << 62


def wrapped(kind: bytes, name: str, content: Any) -> list[bytes]:
    """The bytes of an object. Its hash is of its name, too, so that no other object is valid in its place."""
    payload = msgpack.packb(content)
    about = _ENVELOPE.pack(_MAGIC, kind, FORMAT, len(payload))
    return [about, _HASH.pack(_hash(name, about, payload)), payload]


def opened(kind: bytes, name: str, data: bytes) -> Any:
    """The content of an object. Raises ArchiveDamagedError, FormatVersionError."""
    start = _ENVELOPE.size + _HASH.size
    if len(data) < start:
        raise ArchiveDamagedError(f"{name} is damaged: it has {len(data)} bytes")
    magic, found, version, length = _ENVELOPE.unpack_from(data)
    if magic != _MAGIC or found != kind:
        raise ArchiveDamagedError(f"{name} is not an object of an archive, or damaged")
    payload = memoryview(data)[start:]
    (checksum,) = _HASH.unpack_from(data, _ENVELOPE.size)
    if len(payload) != length or _hash(name, data[: _ENVELOPE.size], payload) != checksum:
        raise ArchiveDamagedError(f"{name} is damaged: its bytes do not match their hash")
    if version > FORMAT:
        raise FormatVersionError(f"{name} has the format {version} of a newer pmstore; this one reads up to {FORMAT}")
    return unpacked(name, payload)


def _hash(name: str, about: bytes, payload: bytes | memoryview) -> int:
    return hash64(payload, hash64(about + name.encode()))


def unpacked(name: str, payload: bytes | memoryview) -> Any:
    """msgpack whose hash was right. Its content may still be hostile."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False, use_list=False)
    except MALFORMED as error:
        raise ArchiveDamagedError(f"{name} is damaged: {error}") from error


def part_name(writer: str, number: int) -> str:
    """The name of a part. writer: 16 hexadecimal digits, which no other drain has in any place."""
    return f"parts/{writer}-{number:010d}"


def writer_of(part: str) -> str:
    """The first argument of `part_name`."""
    return part[6:22]


def is_part(name: str) -> bool:
    """Whether a drain gives such names to parts."""
    return _PART.fullmatch(name) is not None


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ArchiveDamagedError(f"the archive is damaged: {what}")


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LONGEST


class Piece(NamedTuple):
    """Bytes of a part, and their hash."""

    part: str
    at: int
    length: int
    checksum: int

    @classmethod
    def checked(cls, found: Any) -> Piece:
        """Check decoded msgpack."""
        _require(isinstance(found, tuple) and tuple(map(type, found)) == (str, int, int, int), "a place in a part")
        part, at, length, checksum = found
        _require(_PART.fullmatch(part) is not None, "the name of a part")
        _require(0 <= at < _LONGEST and 0 <= length < _LONGEST, "a place in a part")
        return cls(part, at, length, checksum)

    def is_within(self, parts: Mapping[str, int]) -> bool:
        """Whether its part is long enough. parts: the number of bytes of each."""
        return self.at + self.length <= parts.get(self.part, 0)

    def matches(self, data: bytes) -> bool:
        """Whether bytes are those of the piece."""
        return len(data) == self.length and hash64(data) == self.checksum


class Frame(NamedTuple):
    """Contents of an entry that were encoded together.

    runs: offset and length of each run of bytes, in order; codec: its number in the directory; checksum: of the decoded
    bytes of all runs, joined.
    """

    runs: tuple[tuple[int, int], ...]
    piece: Piece
    codec: int
    checksum: int

    @property
    def nbytes(self) -> int:
        """The number of bytes, decoded."""
        return sum(length for _, length in self.runs)

    @classmethod
    def checked(cls, found: Any, length: int, codecs: int) -> Frame:
        """Check decoded msgpack. length: of the entry's contents."""
        _require(isinstance(found, tuple) and len(found) == 4 and isinstance(found[0], tuple), "a frame")
        flat, piece, codec, checksum = found
        _require(len(flat) % 2 == 0 and bool(flat) and all(map(_count, flat)), "the runs of a frame")
        runs = tuple(zip(flat[::2], flat[1::2]))
        end = 0
        for at, count in runs:
            _require(count > 0 and at >= end and at + count <= length, "a run that is not inside its contents")
            end = at + count
        _require(type(codec) is int and 0 <= codec < codecs and type(checksum) is int, "the codec of a frame")
        return cls(runs, Piece.checked(piece), codec, checksum)

    def packed(self) -> list[Any]:
        """The fields for msgpack."""
        return [[number for run in self.runs for number in run], list(self.piece), self.codec, self.checksum]


class Loss(NamedTuple):
    """The error of an array that is an approximation of the commit's array (I27).

    Attributes
    ----------
    absolute : float
        The largest difference of two elements.
    relative : float
        The root of the mean square of the differences, divided by that of the elements; inf if a double can't tell it.
    """

    absolute: float
    relative: float

    @classmethod
    def checked(cls, found: Any) -> Loss | None:
        """Internal: check decoded msgpack."""
        if found is None:
            return None
        _require(isinstance(found, tuple) and tuple(map(type, found)) == (float, float), "the error of an array")
        _require(all(one >= 0 for one in found), "the error of an array")
        return cls(*found)

    @classmethod
    def worst(cls, losses: Iterable[Loss]) -> Loss | None:
        """The largest of each figure; None if there are none."""
        found = list(losses)
        return cls(max(one.absolute for one in found), max(one.relative for one in found)) if found else None


def tell_losses(path: str, version: int, losses: Iterable[Loss], stacklevel: int) -> None:
    """Warns that a copy of a version is an approximation of its commit."""
    found = list(losses)
    worst = Loss.worst(found)
    if worst is not None:
        text = f"{path}: version {version} {lossy_text(len(found), worst)}: they are not those of the commit"
        warnings.warn(text, ArchiveWarning, stacklevel=stacklevel + 1)


def lossy_text(count: int, worst: Loss) -> str:
    """How many arrays a version approximates, and how badly."""
    arrays = "1 array" if count == 1 else f"{count} arrays"
    return f"approximates {arrays} (relative error up to {worst.relative:.2g}, absolute {worst.absolute:.2g})"


class Item(NamedTuple):
    """An entry of the store's catalog in a version: `pmstore._core.Entry` without a place, and its contents' frames.

    frames: None if the contents are those of the version before. loss: None if they are those of the commit.
    """

    kind: int
    flags: int
    meta: bytes
    length: int
    frames: tuple[Frame, ...] | None
    loss: Loss | None = None

    @classmethod
    def checked(cls, found: Any, codecs: int) -> Item:
        """Check decoded msgpack."""
        _require(isinstance(found, tuple) and len(found) == 6, "an entry")
        kind, flags, meta, length, frames, loss = found
        _require(all(type(n) is int and 0 <= n < 256 for n in (kind, flags)) and _count(length), "an entry")
        _require(isinstance(meta, bytes) and (frames is None or isinstance(frames, tuple)), "an entry")
        checked = None if frames is None else tuple(Frame.checked(frame, length, codecs) for frame in frames)
        return cls(kind, flags, meta, length, checked, Loss.checked(loss))

    def packed(self) -> list[Any]:
        """The fields for msgpack."""
        frames = None if self.frames is None else [frame.packed() for frame in self.frames]
        return [self.kind, self.flags, self.meta, self.length, frames, self.loss]


class Items(Mapping[bytes, Item]):
    """Entries of a directory that was read. Each is checked when it is used: mostly one of many is."""

    __slots__ = ("_codecs", "_found")

    def __init__(self, found: dict[bytes, Any], codecs: int) -> None:
        self._found = found
        self._codecs = codecs

    def __getitem__(self, key: bytes) -> Item:
        return Item.checked(self._found[key], self._codecs)

    def has(self, raw: int) -> bool:
        """Whether they have so many bytes of contents in all, and each has its own."""
        try:
            lengths = [item[3] for item in self._found.values() if item[3] == 0 or item[4] is not None]
            return len(lengths) == len(self._found) and sum(lengths) == raw
        except (IndexError, TypeError, KeyError):
            return False

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Directory(NamedTuple):
    """The changes of a version: entries by catalog key, keys that are gone, and the codecs of its frames.

    Of a base: all entries, and each has all of its contents. A codec: whether its input is the difference to the
    version before, the bytes of an element, and configurations for numcodecs, in the order of encoding.
    """

    items: Items
    gone: tuple[bytes, ...]
    codecs: tuple[tuple[bool, int, tuple[dict[str, Any], ...]], ...]

    @staticmethod
    def packed(
        items: Mapping[bytes, Item],
        gone: Iterable[bytes],
        codecs: Iterable[tuple[bool, int, tuple[dict[str, Any], ...]]],
    ) -> bytes:
        """The bytes of a directory in a part."""
        entries = [[key, *item.packed()] for key, item in items.items()]
        chains = [[delta, size, list(chain)] for delta, size, chain in codecs]
        return bytes(msgpack.packb([entries, list(gone), chains]))

    def pieces(self) -> Iterator[Piece]:
        """The places of the contents that it has."""
        return (frame.piece for item in self.items.values() for frame in item.frames or ())

    @classmethod
    def checked(cls, name: str, data: bytes) -> Directory:
        """Check decoded msgpack."""
        found = unpacked(name, data)
        _require(
            isinstance(found, tuple) and len(found) == 3 and all(isinstance(x, tuple) for x in found), "a directory"
        )
        items, gone, codecs = found
        for codec in codecs:
            _require(isinstance(codec, tuple) and len(codec) == 3 and type(codec[0]) is bool, "a codec")
            _require(_count(codec[1]) and 0 < codec[1] <= 1 << 20 and isinstance(codec[2], tuple), "a codec")
            _require(all(isinstance(config, dict) for config in codec[2]), "the configuration of a codec")
        checked: dict[bytes, Any] = {}
        for item in items:
            _require(isinstance(item, tuple) and bool(item) and isinstance(item[0], bytes), "an entry")
            _require(0 < len(item[0]) <= 768, "a key")
            checked[item[0]] = item[1:]
        _require(all(isinstance(key, bytes) for key in gone), "a key")
        of_keys = Items(checked, len(codecs))
        return cls(of_keys, tuple(gone), tuple((delta, size, tuple(chain)) for delta, size, chain in codecs))


class Row(NamedTuple):
    """A version, as the index has it.

    time: seconds since the epoch. previous: the version that its directory changes; None: it is a base. raw: bytes of
    the contents that it has; stored: of its parts that were written for it. parts: all parts that it reads, except
    those of its previous versions. state: a hash of all entries and contents, as the version has them. note: of the
    commit, encoded. lossy: the number of arrays that are not those of the commit; loss: the worst of them, or None.
    kept: False if it is there for later ones only.
    """

    version: int
    time: float
    previous: int | None
    raw: int
    stored: int
    parts: tuple[str, ...]
    directory: Piece
    state: int
    note: bytes | None
    lossy: int = 0
    loss: Loss | None = None
    kept: bool = True

    @property
    def noted(self) -> CommitNote:
        """The note of the commit."""
        try:
            return CommitNote(None, {}) if self.note is None else decoded(self.note)
        except CorruptStoreError as error:
            raise ArchiveDamagedError(f"the archive is damaged: the note of version {self.version}") from error

    def packed(self) -> tuple[Any, ...]:
        """The fields for msgpack, in the types that msgpack returns."""
        loss = None if self.loss is None else tuple(self.loss)
        return (*self[:6], tuple(self.directory), *self[7:10], loss, self.kept)

    @classmethod
    def checked(cls, found: Any) -> Row:
        """Check decoded msgpack."""
        _require(isinstance(found, tuple) and tuple(map(type, found)) in _ROWS, "a version")
        version, time, previous, raw, stored, parts, directory, state, note, lossy, loss, kept = found
        _require(_count(lossy) and bool(lossy) == (loss is not None), "the error of a version")
        _require(version >= 0 <= raw and stored >= 0 <= state and time == time, "a version")
        _require(previous is None or 0 <= previous < version, "the version before a version")
        for part in parts:
            _require(type(part) is str and _PART.fullmatch(part) is not None, "the name of a part")
        place = Piece.checked(directory)
        return cls(version, time, previous, raw, stored, parts, place, state, note, lossy, Loss.checked(loss), kept)


_NOTHING = type(None)
_ROWS = {
    (int, float, previous, int, int, tuple, tuple, int, note, int, loss, bool)
    for previous in (int, _NOTHING)
    for note in (bytes, _NOTHING)
    for loss in (tuple, _NOTHING)
}


class Segment(NamedTuple):
    """The name of an object of the index: it has the versions of the flushes first … last."""

    first: int
    last: int
    generation: int

    @property
    def name(self) -> str:
        """The name of the object."""
        return f"index/{self.first:012d}-{self.last:012d}-{self.generation:06d}"

    @classmethod
    def current(cls, names: Iterable[str]) -> list[Segment]:
        """Those that count, of the names in the folder: of several that have a flush, the widest, then the newest."""
        found = [cls(*map(int, match.groups())) for match in map(_SEGMENT.fullmatch, names) if match]
        chosen: list[Segment] = []
        for one in sorted(found, key=lambda one: (one.first, -one.last, -one.generation)):
            if not chosen or one.first > chosen[-1].last:
                chosen.append(one)
        return chosen
