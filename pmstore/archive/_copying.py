"""Copies the parts of versions from one place to the next. Each piece is compared with its hash first.

Without that, a piece that is damaged in the place before would count as durable in the next one, or take the place of
a whole one there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pmstore._core import hash64
from pmstore._errors import ArchiveDamagedError
from pmstore.archive._format import Directory, Piece, Row
from pmstore.archive._objects import MissingObjectError, Place, ShortObjectError

__all__ = ["Copying", "refuse_damaged"]


def refuse_damaged(piece: Piece, data: bytes, url: str) -> None:
    """Raise ArchiveDamagedError unless these bytes are the piece. url: of the place that gave them."""
    if len(data) != piece.length or hash64(data) != piece.checksum:
        raise ArchiveDamagedError(f"{url}: {piece.part} is damaged at byte {piece.at}: it does not match its hash")


class Copying:
    """The parts that one place has of another.

    Parameters
    ----------
    source, target : Place
        The place before, and the further one.
    there : mapping of str to int
        The parts of the further place that versions need, with the number of bytes of each.
    wanted : mapping of str to int
        Those of the place before.
    """

    def __init__(self, source: Place, target: Place, there: Mapping[str, int], wanted: Mapping[str, int]) -> None:
        self._source, self._target = source, target
        self._cut = {part for part, size in there.items() if size < wanted.get(part, 0)}
        self._there = there.keys() - self._cut  # they are not read
        self._copied: set[str] = set()
        self._last: tuple[str, bytes] = "", b""  # the part that was read last

    def take(self, row: Row) -> None:
        """Copies the parts of a version that are missing. Raises ArchiveDamagedError if one of them is damaged."""
        pieces = self._pieces(row)
        for part in row.parts:
            if part in self._there:
                continue
            needed = pieces.get(part, ())
            if part in self._copied:  # for another version, with other pieces
                self._check(needed)
                continue
            data = self._part(part)
            self._check(needed)
            self._refuse_another(part, data)
            self._target.put(part, [data])
            self._copied.add(part)

    def _pieces(self, row: Row) -> dict[str, list[Piece]]:
        """The pieces of contents that a version names, by their part."""
        name = f"the directory of version {row.version}"
        directory = Directory.checked(name, self._piece(row.directory))
        found: dict[str, list[Piece]] = {}
        for item in directory.items.values():
            for frame in item.frames or ():
                found.setdefault(frame.piece.part, []).append(frame.piece)
        return found

    def _check(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._piece(piece)

    def _piece(self, piece: Piece) -> bytes:
        known = piece.part in self._there or piece.part in self._copied
        if known and self._last[0] != piece.part:
            data = self._read(piece.part, piece.at, piece.length)
        else:
            data = self._part(piece.part)[piece.at : piece.at + piece.length]
        refuse_damaged(piece, data, self._source.url)
        return data

    def _part(self, part: str) -> bytes:
        if self._last[0] != part:
            self._last = part, self._read(part)
        return self._last[1]

    def _read(self, part: str, at: int = 0, count: int | None = None) -> bytes:
        try:
            return self._source.get(part, at, count)
        except (MissingObjectError, ShortObjectError) as error:
            raise ArchiveDamagedError(str(error)) from error

    def _refuse_another(self, part: str, data: bytes) -> None:
        """Raise ArchiveDamagedError if the bytes that are left of a part are others."""
        if part in self._cut:
            left = self._target.get(part)
            if left != data[: len(left)]:
                raise ArchiveDamagedError(
                    f"{part} is cut in {self._target.url}, and {self._source.url} has other bytes: one of the two is "
                    "damaged"
                )
