"""Copies the parts of versions from one place to the next. Each piece that a version needs is compared with its hash.

Without that, a piece that is damaged in the place before would count as durable in the next one, or take the place of
a whole one there. A part may have pieces of several versions, of which some are damaged. So a piece that no version of
the further place needs yet is read there, too, if its part is there already.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from pmstore._errors import ArchiveDamagedError, ArchiveError
from pmstore.archive._format import Directory, Piece, Row
from pmstore.archive._index import Index
from pmstore.archive._objects import MissingObjectError, Place, ShortObjectError
from pmstore.archive._place import BadSectorError
from pmstore.archive._sources import Sources
from pmstore.archive._versions import Library

__all__ = ["Copying", "is_whole", "parts_of"]

_SECTOR = 4096  # bytes that a disk reads or fails to read together
_FAILURES = 100  # of reads of one part, until all of it counts as damaged


def is_whole(place: Place, piece: Piece) -> bool:
    """Whether a place has a piece unharmed. Raises ArchiveUnavailableError if the place does not answer."""
    return _of_place(place, piece) is not None


def _of_place(place: Place, piece: Piece) -> bytes | None:
    """The piece as a place has it; None if it is not whole there."""
    try:
        data = place.get(piece.part, piece.at, piece.length)
    except (MissingObjectError, ShortObjectError, ArchiveDamagedError):
        return None
    return data if piece.matches(data) else None


def parts_of(place: Place) -> dict[str, int]:
    """The parts that are in a place, with the number of bytes of each."""
    return {f"parts/{name}": size for name, size in place.sizes("parts").items()}


def _of_part(piece: Piece, data: bytes) -> bytes:
    return data[piece.at : piece.at + piece.length]


class Copying:
    """The parts that one place has of another.

    Parameters
    ----------
    source, target : Place
        The place before, and the further one.
    near, here : Index
        Their indexes.
    """

    def __init__(self, source: Place, target: Place, near: Index, here: Index) -> None:
        self._source, self._target = source, target
        self.damaged: set[str] = set()  # parts of the place before
        self._copied = ""  # the part that was written last
        self._sizes = parts_of(target)
        self._last: tuple[str, bytes] = "", b""  # the part that was read last
        self._whole: set[Piece] = set()  # pieces in the further place that need not be read
        newest = None if target.near else near.find(here.newest)  # a folder is read: nothing else looks after it
        if newest is not None:
            with contextlib.suppress(ArchiveError):
                items = Library(Sources([source])).entries(near.chain(newest)).values()
                self._whole.update(frame.piece for item in items for frame, _ in item.frames)

    def look(self) -> None:
        """Parts of the further place were deleted."""
        self._sizes = parts_of(self._target)

    def rest(self) -> None:
        """No part is kept in memory."""
        self._last = "", b""

    def take(self, row: Row, indexes: Iterable[Index]) -> None:
        """Copies the parts of a version that are missing or damaged. Raises ArchiveDamagedError if one of them is
        damaged in the place before, too.

        indexes: those of both places. Of a damaged part, the pieces that only the further place has whole stay.
        """
        pieces = self._pieces(row)
        known: dict[str, set[Piece]] | None = None
        for part, needed in pieces.items():
            if part not in self._sizes:
                self._put(part, needed)
            elif not all(self._is_there(piece) for piece in needed):
                known = self._pieces_of_all(indexes) if known is None else known
                self._put(part, needed, known.get(part, set()))
        if row.previous is None:  # later versions refer to no others than a base and what follows it
            self._whole = set()
        self._whole.update(itertools.chain.from_iterable(pieces.values()))

    def _pieces(self, row: Row) -> dict[str, list[Piece]]:
        """The pieces that a version names, by their part."""
        found: dict[str, list[Piece]] = {part: [] for part in row.parts}
        found.setdefault(row.directory.part, []).append(row.directory)
        for piece in self._directory(row).pieces():
            found.setdefault(piece.part, []).append(piece)
        return found

    def _directory(self, row: Row) -> Directory:
        piece = row.directory
        if piece.part not in self._sizes or self._last[0] == piece.part:  # it is copied as a whole
            data = _of_part(piece, self._part(piece.part))
        else:
            data = self._read(piece.part, piece.at, piece.length)
        if not piece.matches(data):
            self._refuse(piece)
        return Directory.checked(f"the directory of version {row.version}", data)

    def _pieces_of_all(self, indexes: Iterable[Index]) -> dict[str, set[Piece]]:
        """The pieces that are known, by their part."""
        library = Library(Sources([self._source, self._target]))
        rows = {row.directory: row for index in indexes for row in index.rows()}
        found: dict[str, set[Piece]] = {}
        for row in rows.values():
            with contextlib.suppress(ArchiveError):  # what is lost already
                for piece in (row.directory, *library.directory(row).pieces()):
                    found.setdefault(piece.part, set()).add(piece)
        return found

    def _is_there(self, piece: Piece) -> bool:
        if not piece.is_within(self._sizes):
            return False
        if piece in self._whole:
            return True
        if self._last[0] == piece.part == self._copied:  # the same bytes
            return piece.matches(_of_part(piece, self._last[1]))
        return is_whole(self._target, piece)

    def _put(self, part: str, needed: Sequence[Piece], known: Iterable[Piece] = ()) -> None:
        """Copies a part, with the pieces that only the further place has whole."""
        data = self._part(part)
        kept: list[tuple[Piece, bytes]] = []
        for piece in {*needed, *known}:
            if piece.matches(_of_part(piece, data)):
                continue
            there = _of_place(self._target, piece) if part in self._sizes else None
            if there is not None:
                kept.append((piece, there))
            elif piece in needed:
                self._refuse(piece)
        if kept:
            whole = bytearray(data.ljust(max(piece.at + piece.length for piece, _ in kept), b"\0"))
            for piece, there in kept:
                whole[piece.at : piece.at + piece.length] = there
            data = bytes(whole)
        self._target.put(part, [data])
        self._sizes[part] = len(data)
        self._last, self._copied = (part, data), part

    def _refuse(self, piece: Piece) -> NoReturn:
        self.damaged.add(piece.part)
        raise ArchiveDamagedError(f"{self._source.url}: {piece.part} is damaged at byte {piece.at}")

    def _part(self, part: str) -> bytes:
        if self._last[0] != part:
            self._last, self._copied = (part, self._read(part)), ""
        return self._last[1]

    def _read(self, part: str, at: int = 0, count: int | None = None) -> bytes:
        """Bytes of a part. What a disk can't read is zeros, so that the pieces beside it are not lost with it."""
        try:
            return self._readable(part, at, count, itertools.count())
        except (MissingObjectError, ShortObjectError, ArchiveDamagedError) as error:
            self.damaged.add(part)
            raise ArchiveDamagedError(str(error)) from error

    def _readable(self, part: str, at: int, count: int | None, failures: Iterator[int]) -> bytes:
        """The same. Raises BadSectorError after many failures: each takes a disk seconds."""
        try:
            return self._source.get(part, at, count)
        except BadSectorError:
            if next(failures) > _FAILURES:
                raise
        count = self._source.size(part) - at if count is None else count
        if count <= _SECTOR:
            return bytes(count)
        half = max(1, count // 2 // _SECTOR) * _SECTOR
        halves = (at, half), (at + half, count - half)
        return b"".join(self._readable(part, start, length, failures) for start, length in halves)
