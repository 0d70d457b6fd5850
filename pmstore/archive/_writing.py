"""Versions on their way to an archive: changes are encoded, and versions share a part.

    Changes ──encode──▶ frames, a directory ──▶ the part that is being filled
                                                   │ full, or flushed
                                                   ▼
                                     Flush: parts, and the rows of their versions

A base has no previous version. It does not write contents anew that are in the archive as a whole already.

I27  A lossy difference is taken to what the version before decodes to. The hash of its contents, and the state of its
     version, are those of what it decodes to, and the error stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.names import NAME_PREFIX, NOTE_KEY, name_of
from pmstore._core import Entry, hash64
from pmstore.archive._capture import Approximation, Change, Changes
from pmstore.archive._codecs import FRAME, LOSSY, Bytes, Chain, Codecs
from pmstore.archive._format import Directory, Frame, Item, Loss, Piece, Row, part_name, writer_of

if TYPE_CHECKING:
    from pmstore.codecs._passes import Buckets, Coder
    from pmstore.codecs._passes import Changes as Counted

__all__ = ["Flush", "Stored", "Writing"]

_CHEAP = 1 << 16  # bytes of differentials that are no reason for a base
_WORTH = 4  # times as many bytes as a base would write are one
_LONGEST = 1000  # differentials until the next base, at most
_ENTRY = 64  # bytes of an entry in a directory, about
_POOR, _SMALL = 0.75, 4096  # a differential saves little if it has this share of the bytes of a base, or is small
_BASES = 16  # that follow one another because differentials saved little, at most

Stored = tuple[Frame, Chain]


class Flush(NamedTuple):
    """The data that one step writes to a place. parts: name and bytes; rows: of the versions that are whole then;
    nbytes: of the parts. useful: after a capture that failed, those of the parts before that a later version may still
    name."""

    parts: list[tuple[str, list[Any]]]
    rows: list[Row]
    nbytes: int
    useful: frozenset[str] | None = None


class Writing:
    """Encodes versions.

    Parameters
    ----------
    writer : str
        What the names of its parts begin with, and no others: 16 hexadecimal digits.
    codecs
        Of `chosen`.
    part_size : int
        Bytes of a part, at most, unless a frame or a directory alone is larger.
    flush : callable
        Called with each `Flush`, in order.
    last : int, optional
        The newest version in the archive.
    stored : iterable of (key, Stored), optional
        Frames that are in the archive, and each have one run of an entry's contents by themselves.
    is_whole : callable
        Called with the piece of such a frame before a version relies on it.
    """

    def __init__(
        self,
        writer: str,
        codecs: Codecs,
        part_size: int,
        flush: Callable[[Flush], None],
        last: int | None = None,
        stored: Iterable[tuple[bytes, Stored]] = (),
        is_whole: Callable[[Piece], bool] = lambda piece: True,
    ) -> None:
        self.tell: Callable[[str], object] = lambda text: None  # of a codec that does not take some contents
        self.room: Callable[[], None] | None = None  # called in the middle of a version; it may wait, or raise
        self.base_after: int | None = None  # differentials until the next base; None: as `_base_is_due` says
        self._told: set[str] = set()  # codecs that `tell` told of
        self._writer, self._codecs, self._part_size, self._flush = writer, codecs, part_size, flush
        self._coder: Coder | None = None  # of lossy differences
        self._number = 0  # of the part that is being filled,
        self._pieces: list[Any] = []  # its pieces,
        self._length = 0  # and its bytes
        self._full: list[tuple[str, list[Any]]] = []  # parts that were filled, and not flushed
        self._full_bytes = 0
        self._written = 0  # bytes of all parts that were filled
        self.rows: list[Row] = []  # of versions that were encoded, and not flushed
        self._previous = last
        self._stored = {(key, one[0].runs, one[0].checksum): one for key, one in stored}
        self._is_whole = is_whole
        self._have: dict[tuple[bytes, Any, int], Stored] = {}  # frames of the version that is being encoded
        self._tried: set[tuple[bytes, Any, int]] = set()  # names of all frames that the last try to encode it needed
        self._mark = self._state()  # the parts before that version
        self._whole: dict[bytes, tuple[Stored, ...]] = {}  # frames that have all of an entry's contents by themselves
        self._distrusted: frozenset[str] = frozenset()  # parts that the next version must not refer to,
        self._avoided: frozenset[str] = frozenset()  # and those that the last base does not
        self._entries: dict[bytes, Entry] | None = None  # of the last version that was encoded
        self._since = 0  # differentials since the last base,
        self._since_bytes = 0  # their bytes,
        self._since_keys: set[bytes] = set()  # and the entries whose contents they change
        self._whole_bytes: dict[bytes, int] = {}  # of contents, when they were last written as a whole
        self._changed: set[bytes] = set()  # entries whose contents the last version changed
        self._poor = self._bases = 0  # bases that the last differential led to; of these, those that are still to come

    @property
    def last(self) -> int | None:
        """The last version that was encoded, or the newest one before it."""
        return self._previous

    def distrust(self, parts: Iterable[str]) -> None:
        """Parts are damaged: the next version is a base that does not refer to them. Another thread may call this."""
        self._distrusted = self._distrusted.union(parts) - self._avoided

    def _state(self) -> tuple[int, list[Any], int, int, int, int, int]:
        full, count = len(self._full), len(self._pieces)
        return self._number, self._pieces, count, self._length, full, self._full_bytes, self._written

    def roll_back(self) -> None:
        """Forget what was encoded of a version that will not be, but for parts that were handed over already. After a
        MemoryError it is as if it had not been called."""
        first = part_name(self._writer, self._mark[0])  # of the parts that are forgotten, too
        parts = ((name, one, one[0].piece.part) for name, one in self._have.items())
        have = {
            name: one
            for name, one, part in parts
            if name in self._tried and (part < first or writer_of(part) != self._writer)
        }
        encoded = (part for row in self.rows for part in row.parts)  # of versions before, whose rows come later
        useful = frozenset(one[0].piece.part for one in have.values()).union(encoded)
        self._number, self._pieces, count, self._length, full, self._full_bytes, self._written = self._mark
        del self._pieces[count:], self._full[full:]
        self._have = have
        self._flush(Flush([], [], 0, useful))

    def restart(self) -> None:
        """The next version is a base, with contents that are written anew."""
        self._entries, self._whole = None, {}

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
        bad = self._distrusted
        self._tried = set()
        as_base = bool(bad) or self._base_is_due()
        begun = self._written + self._length
        entries = changes.entries
        before: dict[bytes, Entry] = {} if as_base else (self._entries or {})
        whole = {
            key: found
            for key, found in self._whole.items()
            if key in entries and key not in changes.changed and bad.isdisjoint(one.piece.part for one, _ in found)
        }
        frames = {} if as_base else self._approximated(changes)  # of this version's directory
        for key, entry in entries.items():
            if not entry.offset or key in frames:
                continue
            change = changes.changed.get(key)
            again = self._without_loss(key, changes, as_base)
            if again is not None:
                whole[key] = tuple(self._differences(key, again, changes.element(key)))
            if key not in whole and (as_base or (key in changes.changed and change is None)):
                whole[key] = tuple(self._pieces_of(key, changes))
            elif change is not None and again is None:
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
        self._finalize(row, changes, whole)
        self._avoided |= bad  # before the other one: another thread may look
        self._distrusted -= bad
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
        losses = changes.losses

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
                losses.get(key),
            )
            for key, (entry, frames) in items.items()
        }
        place = self._add(Directory.packed(found, gone, (chain for _, chain in codecs.values())))
        return Row(
            version=changes.sequence,
            time=changes.time,
            previous=None if as_base else self._previous,
            raw=sum(entry.length for entry in changes.entries.values() if entry.offset),
            stored=self._written + self._length - begun,
            parts=(*parts, *(() if place.part in parts else (place.part,))),
            directory=place,
            state=changes.state,
            note=Catalog(changes.core, read_only=True).note() if NOTE_KEY in changes.entries else None,
            lossy=len(losses),
            loss=Loss.worst(losses.values()),
        )

    def _finalize(self, row: Row, changes: Changes, whole: dict[bytes, tuple[Stored, ...]]) -> None:
        mark = self._state()
        self.rows.append(row)
        self._entries, self._whole, self._previous, self._mark = changes.entries, whole, row.version, mark
        self._have.clear()
        self._stored.clear()
        as_base = row.previous is None
        for key in whole if as_base else changes.changed:
            if key in whole:
                self._whole_bytes[key] = sum(frame.piece.length for frame, _ in whole[key])
        if as_base:
            self._since, self._since_bytes, self._since_keys = 0, 0, set()
            self._whole_bytes = {key: self._whole_bytes[key] for key in whole}
            self._bases = max(0, self._bases - 1)
        else:
            self._since, self._since_bytes = self._since + 1, self._since_bytes + row.stored
            self._since_keys.update(changes.changed)
            self._rate(row.stored)
        self._changed = set(changes.changed)

    def _rate(self, stored: int) -> None:
        """Write bases next if a differential saved little: they are read without it. Each such differential makes more
        bases follow. A base also has to write the contents that the version before the differential changed, because
        they may change again."""
        again = self._since_keys | self._changed
        base = sum(self._whole_bytes.get(key, 0) for key in again) + _ENTRY * len(self._entries or ())
        poor = not self._codecs.any_lossy and stored > _SMALL and stored >= _POOR * base
        self._poor = self._bases = min(_BASES, 2 * self._poor or 1) if poor else 0

    def _base_is_due(self) -> bool:
        """Whether differentials have grown so large that a base adds little."""
        if self._entries is None or self._since >= (_LONGEST if self.base_after is None else self.base_after):
            return True
        if self.base_after is not None:
            return False
        if self._bases:
            return True
        contents = sum(self._entries[key].length for key in self._since_keys if key in self._entries)
        return self._since_bytes > max(_CHEAP, _WORTH * (contents + _ENTRY * len(self._entries)))

    # ---- approximations

    def _approximated(self, changes: Changes) -> dict[bytes, tuple[Stored, ...]]:
        """Frames of lossy differences. The arrays of a rule share the exponents that are kept."""
        rules: dict[int, list[tuple[bytes, Change]]] = {}
        for key, change in changes.changed.items():
            if change is None or change.lossy is None:
                continue
            found = self._codecs.lossy(key)
            if found is not None and change.lossy < found[1].rebase_every:
                rules.setdefault(found[0], []).append((key, change))
        frames = {}
        for arrays in rules.values():
            buckets, counted = self._buckets(changes, arrays)
            for key, change in arrays:
                frames[key] = tuple(self._lossy(key, change, changes, buckets, counted[key]))
        return frames

    def _buckets(
        self, changes: Changes, arrays: Sequence[tuple[bytes, Change]]
    ) -> tuple[Buckets, dict[bytes, list[Counted]]]:
        """The buckets of all changes, and those of each frame."""
        from pmstore.codecs._passes import Buckets

        buckets, counted = Buckets(), {}
        for key, change in arrays:
            kind, before = self._kind(key, changes), change.before
            assert before is not None
            counted[key] = [
                buckets.add(kind, change.data[at : at + FRAME], before[at : at + FRAME])
                for at in range(0, len(change.data), FRAME)
            ]
        return buckets, counted

    def _kind(self, key: bytes, changes: Changes) -> Any:
        found, dtype = self._codecs.lossy(key), changes.dtype(key)
        assert found is not None and dtype is not None
        return found[1].kind(dtype)

    def _lossy(
        self, key: bytes, change: Change, changes: Changes, buckets: Buckets, counted: list[Counted]
    ) -> Iterator[Stored]:
        """The frames of an array. From then on, the version has their decoded values."""
        from pmstore.codecs._passes import Coder, Errors, plain

        found, kind = self._codecs.lossy(key), self._kind(key, changes)
        assert found is not None and change.before is not None and change.lossy is not None
        bits, self._coder = found[1].bits, self._coder or Coder()
        table, errors, contents = buckets.kept(bits), Errors(), np.empty(len(change.data), np.uint8)
        for at, one in zip(range(0, len(change.data), FRAME), counted):
            data, before = change.data[at : at + FRAME], change.before[at : at + FRAME]
            encoded, out, error = self._coder.coded(kind, bits, table, one, data, before)
            errors.add(error, exact=len(encoded) >= len(data))
            if len(encoded) >= len(data):
                encoded, out = plain(data, kind.size), data
            contents[at : at + len(data)] = out
            yield Frame(((at, len(data)),), self._add(encoded), 0, hash64(out.data)), Chain(True, kind.size, LOSSY)
        loss = Loss(errors.absolute, errors.relative)
        changes.approximate(key, contents, Approximation(change.lossy + 1, loss))

    @staticmethod
    def _without_loss(key: bytes, changes: Changes, as_base: bool) -> Change | None:
        """All contents of an array, if it is the time to write them as they are: those of the commit, or, in a base
        where they did not change, those that the last version approximates them by."""
        change, known = changes.changed.get(key), changes.known[key]
        if change is not None and change.lossy is not None:
            return change._replace(before=None)
        if change is None and as_base and known.approximation is not None and known.replica is not None:
            return Change([(0, len(known.replica))], known.replica, None)
        return None

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
        name = key, runs, checksum
        self._tried.add(name)
        stored = self._stored.pop(name, None)
        if stored is not None and stored[0].piece.part not in self._distrusted and self._is_whole(stored[0].piece):
            self._have[name] = stored
        if name in self._have and self._have[name][0].piece.part not in self._distrusted:
            return self._have[name]
        configs = self._codecs.configs(key)
        chain = Chain.of(configs, element, len(data), before is not None)
        try:
            encoded = chain.encode(data, before)
        except MemoryError:
            raise
        except Exception as error:  # of a codec that a user chose: some take whole elements only
            if not configs:
                raise
            self._tell(key, configs, error)
            configs = None
            chain = Chain.of(None, element, len(data), before is not None)
            encoded = chain.encode(data, before)
        if len(encoded) >= len(data) and configs is None:
            chain, encoded = Chain(False, 1, ()), data.data
        if not chain.configs and not chain.delta:
            encoded = bytes(encoded)  # the data may be a replica, which changes; `encode` looks after others
        made = (Frame(runs, self._add(encoded), 0, checksum), chain)
        if not chain.delta and len(runs) == 1:
            self._have[name] = made  # in case that this version has to be encoded again
        return made

    def _tell(self, key: bytes, configs: tuple[dict[str, Any], ...], error: Exception) -> None:
        name = configs[0]["id"]
        if name not in self._told:
            self._told.add(name)
            what = f"of {name_of(key)!r}" if key.startswith(NAME_PREFIX) else "of a value"
            self.tell(f"the codec {name!r} does not take the contents {what} ({error}); such contents have the default")

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
        mark = self._number, self._pieces, len(self._pieces), self._length, 0, 0, self._written
        self._flush(job)
        self._full, self.rows, self._full_bytes = [], [], 0
        self._mark = mark


def _split(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Runs in groups, each inside one FRAME of the contents. A reader of some runs then needs few frames."""
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
