"""Versions on their way to an archive: changes are encoded, and versions share a part.

    Changes ──encode──▶ frames, a directory ──▶ the part that is being filled
                                                   │ full, or flushed
                                                   ▼
                                     Flush: parts, and the rows of their versions

A base has no previous version. It does not write contents anew that are in the archive as a whole already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from pmstore._catalog.catalog import Catalog
from pmstore._core import Entry, hash64
from pmstore.archive._capture import Change, Changes
from pmstore.archive._codecs import FRAME, Bytes, Chain
from pmstore.archive._format import Directory, Frame, Item, Piece, Row, part_name

__all__ = ["Flush", "Stored", "Writing"]

_CHEAP = 1 << 16  # bytes of differentials that are no reason for a base
_WORTH = 4  # times as many bytes as a base would write are one
_LONGEST = 1000  # differentials until the next base, at most
_ENTRY = 64  # bytes of an entry in a directory, about

Stored = tuple[Frame, Chain]


class Flush(NamedTuple):
    """What goes to a place in one step. parts: name and bytes; rows: of the versions that are whole then; nbytes:
    of the parts."""

    parts: list[tuple[str, list[Any]]]
    rows: list[Row]
    nbytes: int


class Writing:
    """Encodes versions.

    Parameters
    ----------
    writer : str
        What the names of its parts begin with, and no others: 16 hexadecimal digits.
    codec
        Of `chosen`.
    part_size : int
        Bytes of a part, at most, unless a frame or a directory alone is larger.
    flush : callable
        Called with each `Flush`, in order.
    last : int, optional
        The newest version in the archive.
    stored : iterable of (key, Stored), optional
        Frames that are in the archive, and each have one run of an entry's contents by themselves.
    """

    def __init__(
        self,
        writer: str,
        codec: tuple[dict[str, Any], ...] | None,
        part_size: int,
        flush: Callable[[Flush], None],
        last: int | None = None,
        stored: Iterable[tuple[bytes, Stored]] = (),
    ) -> None:
        self.room: Callable[[], None] | None = None  # called in the middle of a version; it may wait, or raise
        self.base_after: int | None = None  # differentials until the next base; None: as `_base_is_due` says
        self._writer, self._codec, self._part_size, self._flush = writer, codec, part_size, flush
        self._number = 0  # of the part that is being filled,
        self._pieces: list[Any] = []  # its pieces,
        self._length = 0  # and its bytes
        self._full: list[tuple[str, list[Any]]] = []  # parts that were filled, and not flushed
        self._full_bytes = 0
        self._written = 0  # bytes of all parts that were filled
        self.rows: list[Row] = []  # of versions that were encoded, and not flushed
        self._previous = last
        self._have = {(key, one[0].runs, one[0].checksum): one for key, one in stored}
        self._whole: dict[bytes, tuple[Stored, ...]] = {}  # frames that have all of an entry's contents by themselves
        self._entries: dict[bytes, Entry] | None = None  # of the last version that was encoded
        self._since = 0  # differentials since the last base,
        self._since_bytes = 0  # their bytes,
        self._since_keys: set[bytes] = set()  # and the entries whose contents they change

    @property
    def base_bytes(self) -> int:
        """Bytes of the last version, if it is a base, with the contents that were in the archive already."""
        frames = (frame for found in self._whole.values() for frame, _ in found)
        return sum(frame.piece.length for frame in frames) + _ENTRY * len(self._entries or ())

    @property
    def waiting(self) -> int:
        """Bytes that were encoded, and not flushed."""
        return self._full_bytes + self._length

    def flush(self) -> None:
        """Hand over all versions that were encoded."""
        self._end_part()
        if self._full or self.rows:
            self._hand_over()

    def version(self, changes: Changes) -> Row:
        """Encode a version. After an exception it is as if it had not been called, but for bytes of parts."""
        as_base = self._base_is_due()
        begun = self._written + self._length
        entries = changes.entries
        before: dict[bytes, Entry] = {} if as_base else (self._entries or {})
        whole = {key: found for key, found in self._whole.items() if key in entries and key not in changes.changed}
        frames: dict[bytes, tuple[Stored, ...]] = {}  # of this version's directory
        for key, entry in entries.items():
            if not entry.offset:
                continue
            change = changes.changed.get(key)
            if key not in whole and (as_base or (key in changes.changed and change is None)):
                whole[key] = tuple(self._pieces_of(key, changes))
            elif change is not None:
                found = tuple(self._differences(key, change, changes.element(key)))
                if change.before is None and change.runs == [(0, entry.length)]:
                    whole[key] = found
                frames[key] = found
            if key in whole and (as_base or key in changes.changed):
                frames[key] = whole[key]
        items = {
            key: (entry, frames.get(key))
            for key, entry in entries.items()
            if as_base or key in frames or before.get(key) != entry
        }
        row = self._row(changes, items, tuple(key for key in before if key not in entries), as_base, begun)
        self._settle(row, changes, whole)
        return row

    def _row(
        self,
        changes: Changes,
        items: dict[bytes, tuple[Entry, tuple[Stored, ...] | None]],
        gone: tuple[bytes, ...],
        as_base: bool,
        begun: int,
    ) -> Row:
        """Writes the directory of a version. begun: bytes that had been written before it."""
        codecs: dict[bytes, tuple[int, Chain]] = {}
        parts: dict[str, None] = {}

        def numbered(frame: Frame, chain: Chain) -> Frame:
            parts[frame.piece.part] = None
            return frame._replace(codec=codecs.setdefault(msgpack.packb(chain), (len(codecs), chain))[0])

        found = {
            key: Item(
                entry.kind,
                entry.flags,
                entry.meta,
                entry.length if entry.offset else 0,
                None if frames is None else tuple(numbered(*one) for one in frames),
            )
            for key, (entry, frames) in items.items()
        }
        place = self._add(Directory(found, gone, tuple(chain for _, chain in codecs.values())).packed())
        return Row(
            version=changes.sequence,
            time=changes.time,
            previous=None if as_base else self._previous,
            raw=sum(entry.length for entry in changes.entries.values() if entry.offset),
            stored=self._written + self._length - begun,
            parts=(*parts, *(() if place.part in parts else (place.part,))),
            directory=place,
            state=changes.state,
            note=Catalog(changes.core, read_only=True).note(),
        )

    def _settle(self, row: Row, changes: Changes, whole: dict[bytes, tuple[Stored, ...]]) -> None:
        self._entries, self._whole, self._previous = changes.entries, whole, row.version
        self._have.clear()
        self.rows.append(row)
        if row.previous is None:
            self._since, self._since_bytes, self._since_keys = 0, 0, set()
        else:
            self._since, self._since_bytes = self._since + 1, self._since_bytes + row.stored
            self._since_keys.update(changes.changed)

    def _base_is_due(self) -> bool:
        """Whether differentials have grown so large that a base adds little."""
        if self._entries is None or self._since >= (_LONGEST if self.base_after is None else self.base_after):
            return True
        if self.base_after is not None:
            return False
        contents = sum(self._entries[key].length for key in self._since_keys if key in self._entries)
        return self._since_bytes > max(_CHEAP, _WORTH * (contents + _ENTRY * len(self._entries)))

    # ---- frames

    def _differences(self, key: bytes, change: Change, element: int) -> Iterator[Stored]:
        at = 0
        for runs in _split(change.runs):
            count = sum(length for _, length in runs)
            before = None if change.before is None else change.before[at : at + count]
            yield self._frame(key, runs, change.data[at : at + count], before, element)
            at += count

    def _pieces_of(self, key: bytes, changes: Changes) -> Iterator[Stored]:
        element = changes.element(key)
        for at, data in changes.pieces(key):
            yield self._frame(key, ((at, len(data)),), data, None, element)

    def _frame(
        self, key: bytes, runs: tuple[tuple[int, int], ...], data: Bytes, before: Bytes | None, element: int
    ) -> Stored:
        checksum = hash64(data.data)
        known = self._have.get((key, runs, checksum))
        if known is not None:
            return known
        chain = Chain.of(self._codec, element, len(data), before is not None)
        encoded = chain.encode(data, before)
        if len(encoded) >= len(data) and self._codec is None:
            chain, encoded = Chain(False, 1, ()), data.data
        if not chain.configs and not chain.delta:
            encoded = bytes(encoded)  # the data may be a replica, which changes; `encode` looks after others
        made = (Frame(runs, self._add(encoded), 0, checksum), chain)
        if not chain.delta and len(runs) == 1:
            self._have[key, runs, checksum] = made  # in case that this version has to be encoded again
        return made

    # ---- parts

    def _add(self, data: Any) -> Piece:
        """Puts bytes into a part."""
        count = len(data)
        if self._length and self._length + count > self._part_size:
            self._end_part()
            if self._full_bytes >= self._part_size:  # of a version whose row comes later
                self._hand_over()
                if self.room is not None:
                    self.room()
        piece = Piece(part_name(self._writer, self._number), self._length, count, hash64(data))
        self._pieces.append(data)
        self._length += count
        return piece

    def _end_part(self) -> None:
        if self._length:
            self._full.append((part_name(self._writer, self._number), self._pieces))
            self._full_bytes += self._length
            self._written += self._length
            self._number, self._pieces, self._length = self._number + 1, [], 0

    def _hand_over(self) -> None:
        job = Flush(self._full, self.rows, self._full_bytes)
        self._full, self._full_bytes, self.rows = [], 0, []
        self._flush(job)


def _split(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Runs in groups, each inside one FRAME of the contents: whoever reads a part of them needs only its frames."""
    group: list[tuple[int, int]] = []
    for at, length in runs:
        while length:
            if group and group[0][0] // FRAME != at // FRAME:
                yield tuple(group)
                group = []
            count = min(length, FRAME - at % FRAME)
            group.append((at, count))
            at, length = at + count, length - count
    if group:
        yield tuple(group)
