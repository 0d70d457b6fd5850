"""A version of an archive as a mapping from names to values, like a store that can't be changed.

the index ──chain──▶ base, differential, …, differential        rows
                        │ directories: entries of the catalog, and frames
                        ▼
VersionCore: key ──▶ entry, and the frames of its contents in all directories, oldest first
                        │ when a value is read: decoded one over the other, each checked
                        ▼
Catalog, NameMapping: as for a store
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.kinds import ARRAY
from pmstore._catalog.names import NAME_PREFIX, key_of, name_of
from pmstore._core import Core, Entry, hash64
from pmstore._core import Row as CoreRow
from pmstore._derived.arrays import DerivedArrays
from pmstore._errors import ArchiveDamagedError, OutOfMemoryError, ReadOnlyStoreError
from pmstore._locks import Lock
from pmstore._store.mapping import NameMapping
from pmstore.archive._codecs import FRAME, Bytes, Chain
from pmstore.archive._format import Directory, Frame, Item, Loss, Piece, Row
from pmstore.archive._objects import MissingObjectError
from pmstore.archive._sources import Sources

__all__ = ["Contents", "Entries", "Library", "Version", "VersionCore"]

_DIRECTORIES = 4096  # that are kept in memory
_AHEAD = 64 << 10  # bytes in front of a directory that are read with it: mostly the version's contents
_WINDOWS = 16  # of these that are kept in memory
_THREADS = 2  # that decode large contents

Frames = Sequence[tuple[Frame, Chain]]
Reading = Callable[[], contextlib.AbstractContextManager[None]]


class Library:
    """Reads directories and frames of an archive, each checked."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._directories: OrderedDict[Piece, Directory] = OrderedDict()
        self._windows: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # of parts: from which byte on, and bytes

    def piece(self, piece: Piece, ahead: int = 0) -> bytes:
        """The bytes of a piece of a part. ahead: so many bytes in front of it are read with it, and kept."""
        window = self._windows.get(piece.part)
        if window is not None and window[0] <= piece.at and piece.at + piece.length <= window[0] + len(window[1]):
            data = window[1][piece.at - window[0] : piece.at - window[0] + piece.length]
            if piece.matches(data):
                return data  # or else another place may have it
        start = max(0, piece.at - ahead)

        def check(data: bytes) -> bytes:
            found = data[piece.at - start :] if start < piece.at else data
            if not piece.matches(found):
                raise ArchiveDamagedError(f"{piece.part} is damaged at byte {piece.at}: it does not match its hash")
            if start < piece.at:
                self._keep(piece.part, start, data)
            return found

        try:
            return self.sources.read(piece.part, check, start, piece.at + piece.length - start)
        except MissingObjectError as error:
            raise ArchiveDamagedError(str(error)) from error

    def _keep(self, part: str, start: int, data: bytes) -> None:
        self._windows.pop(part, None)
        self._windows[part] = start, data
        if len(self._windows) > _WINDOWS:
            self._windows.popitem(last=False)

    def directory(self, row: Row) -> Directory:
        """The changes of a version."""
        found = self._directories.get(row.directory)
        if found is None:
            data = self.piece(row.directory, _AHEAD)
            found = Directory.checked(f"the directory of version {row.version}", data)
            self._directories[row.directory] = found
            if len(self._directories) > _DIRECTORIES:
                self._directories.popitem(last=False)
        return found

    def entries(self, chain: Sequence[Row], before: Entries | None = None) -> Entries:
        """The entries of the last version of a chain. before: those of the version that the first one changes, unless
        it is a base."""
        found = {} if before is None else dict(before.changes)
        for row in chain:
            directory = self.directory(row)
            if row.previous is None:
                found = {}
                if not directory.items.has(row.raw):
                    raise ArchiveDamagedError(f"the archive is damaged: version {row.version} is no base")
            for key in directory.gone:
                found.pop(key, None)
            for key in directory.items:
                found[key] = _Change(found.get(key), directory)
        return Entries(dict(sorted(found.items())))

    def contents(self, item: Contents, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes start … stop of the contents of an entry; all by default."""
        stop = item.length if stop is None else stop
        if stop - start <= FRAME:
            return self.decoded(item.frames, start, stop)
        try:
            out = np.empty(stop - start, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"no memory for {stop - start} bytes of contents") from error
        for _ in self._pieces(item, start, stop, out):
            pass
        return out

    def pieces(self, item: Contents) -> Generator[Bytes, None, None]:
        """All contents in pieces, one after the other. Threads decode the next ones meanwhile."""
        return self._pieces(item, 0, item.length, None)

    def _pieces(self, item: Contents, start: int, stop: int, out: Bytes | None) -> Generator[Bytes, None, None]:
        """out: memory for bytes start … stop."""
        bounds = [start, *range((start // FRAME + 1) * FRAME, stop, FRAME), stop]
        windows = _by_window(item.frames)
        spans: list[tuple[Frames, int, int]] = [
            (windows.get(low // FRAME, ()), low, high) for low, high in itertools.pairwise(bounds)
        ]
        if windows.keys() == {-1}:  # frames that do not keep to windows
            spans = [(item.frames, start, stop)]

        def decoded(frames: Frames, low: int, high: int) -> Bytes:
            return self.decoded(frames, low, high, None if out is None else out[low - start : high - start])

        if len(spans) == 1:
            yield decoded(*spans[0])
            return
        ahead: deque[Future[Bytes]] = deque()
        with ThreadPoolExecutor(_THREADS, "pmstore-archive") as pool:
            try:
                for span in spans:
                    ahead.append(pool.submit(decoded, *span))
                    if len(ahead) > 2 * _THREADS:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for one in ahead:
                    one.cancel()

    def decoded(self, given: Frames, start: int, stop: int, out: Bytes | None = None) -> Bytes:
        """Bytes start … stop of contents, from frames that have all of them. out: memory for them."""
        low, high = start, stop
        while True:  # a difference needs what was there before, also outside of what is asked for
            frames = [one for one in given if one[0].runs[0][0] < high and _end(one[0]) > low]
            wide = min([low, *(f.runs[0][0] for f, _ in frames)]), max([high, *(_end(f) for f, _ in frames)])
            if wide == (low, high):
                break
            low, high = wide
        try:
            made = np.empty(high - low, np.uint8) if out is None or wide != (start, stop) else out
            for frame, chain in frames:
                self._apply(frame, chain, made, low)
        except MemoryError as error:
            raise OutOfMemoryError(f"no memory for {high - low} bytes of contents") from error
        if out is None or made is out:
            return made[start - low : stop - low]
        out[:] = made[start - low : stop - low]
        return out

    def _apply(self, frame: Frame, chain: Chain, out: Bytes, low: int) -> None:
        views = [out[at - low : at - low + count] for at, count in frame.runs]
        before = views[0]
        if len(views) > 1 and chain.delta:
            before = np.concatenate(views)
        place = views[0] if len(views) == 1 else None  # decoded to where it belongs, and not copied
        decoded = chain.decode(self.piece(frame.piece), frame.nbytes, before, place)
        if hash64(decoded.data) != frame.checksum:
            raise ArchiveDamagedError(
                f"{frame.piece.part} is damaged at byte {frame.piece.at}: other contents came out"
            )
        at = 0
        for view in views if place is None else ():
            view[:] = decoded[at : at + len(view)]
            at += len(view)


def _by_window(frames: Frames) -> dict[int, list[tuple[Frame, Chain]]]:
    """Frames by the number of the window of FRAME bytes that they are in; -1 alone: some are in several."""
    found: dict[int, list[tuple[Frame, Chain]]] = {}
    for one in frames:
        window = one[0].runs[0][0] // FRAME
        if (_end(one[0]) - 1) // FRAME != window:
            return {-1: []}
        found.setdefault(window, []).append(one)
    return found


def _end(frame: Frame) -> int:
    at, count = frame.runs[-1]
    return at + count


class Contents(NamedTuple):
    """An entry of a version, and the frames of its contents, oldest first."""

    kind: int
    flags: int
    meta: bytes
    length: int
    frames: tuple[tuple[Frame, Chain], ...]
    loss: Loss | None = None

    @classmethod
    def after(cls, before: Contents | None, item: Item, directory: Directory) -> Contents:
        """The contents of an entry after a directory."""
        loss = item.loss
        if item.frames is None:
            if item.length and (before is None or before.length != item.length):
                raise ArchiveDamagedError("the archive is damaged: an entry has no contents")
            frames = before.frames if before is not None and item.length else ()
            loss = before.loss if before is not None and item.length else None
        else:
            new = tuple((frame, Chain(*directory.codecs[frame.codec])) for frame in item.frames)
            if _whole(new, item.length):
                frames = new
            elif before is None or before.length != item.length:
                raise ArchiveDamagedError("the archive is damaged: an entry lacks a part of its contents")
            else:
                frames = before.frames + new
        return cls(item.kind, item.flags, item.meta, item.length, frames, loss)


class _Change:
    """The contents of an entry after a directory. before: its contents in the version before."""

    __slots__ = ("before", "directory", "made")

    def __init__(self, before: _Change | None, directory: Directory) -> None:
        self.before = before
        self.directory = directory
        self.made: Contents | None = None

    def contents(self, key: bytes) -> Contents:
        """The contents. They are put together once, with those that they need. Raises ArchiveDamagedError."""
        needed = [self]
        while (last := needed[-1]).made is None and last.before is not None:
            needed.append(last.before)
        made = needed[-1].made
        for change in reversed(needed):
            if change.made is None:
                change.made = Contents.after(made, change.directory.items[key], change.directory)
            made = change.made
        assert made is not None
        return made


class Entries(Mapping[bytes, Contents]):
    """The entries of a version, in the order of their keys. Each is put together when it is used."""

    __slots__ = ("changes",)

    def __init__(self, changes: dict[bytes, _Change]) -> None:
        self.changes = changes

    def __getitem__(self, key: bytes) -> Contents:
        return self.changes[key].contents(key)

    def __contains__(self, key: object) -> bool:
        return key in self.changes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    @property
    def room(self) -> int:
        """Bytes of a region that has these contents, about."""
        pages = sum(-(-(item.length + item.length // 512 + 16) // 4096) for item in self.values() if item.length)
        return (pages + len(self) // 8 + 64) * 4096 * 17 // 16


def _whole(frames: Sequence[tuple[Frame, Chain]], length: int) -> bool:
    """Whether frames have all contents by themselves. A frame's runs do not overlap."""
    if any(chain.delta for _, chain in frames):
        return False
    runs = sorted(run for frame, _ in frames for run in frame.runs)
    end = 0
    for at, count in runs:
        if at != end:
            return False
        end += count
    return end == length


class VersionCore(Core):
    """A core that reads a version of an archive, for a catalog. The offset of an entry is its number.

    reading: makes a context around what reads contents.
    """

    __slots__ = ("_entries", "_keys", "_library", "_reading", "_sequence")

    def __init__(
        self, library: Library, sequence: int, entries: Entries, reading: Reading = contextlib.nullcontext
    ) -> None:
        self.lock = Lock()
        self.gone = False
        self.snapshot = self.trace = None
        self._library = library
        self._sequence = sequence
        self._entries = entries
        self._reading = reading
        self._keys = list(entries)

    def __del__(self) -> None:
        pass

    @property
    def sequence(self) -> int:
        return self._sequence

    def require_open(self) -> None:
        pass

    def _entry(self, number: int) -> CoreRow:
        key = self._keys[number]
        item = self._entries[key]
        offset = 8 * (number + 1) if item.length else 0
        return CoreRow(key, Entry(offset, item.length, item.kind, item.flags, item.meta))

    def get(self, key: bytes) -> Entry | None:
        if key not in self._entries:
            return None
        return self._entry(bisect.bisect_left(self._keys, key)).entry

    def scan(self, prefix: bytes, after: bytes | None = None, start: bytes = b"") -> Iterator[CoreRow]:
        from_key = after or start or prefix
        number = (bisect.bisect_right if after is not None else bisect.bisect_left)(self._keys, from_key)
        while number < len(self._keys) and self._keys[number].startswith(prefix):
            yield self._entry(number)
            number += 1

    def first(self, prefix: bytes, after: bytes | None = None) -> CoreRow | None:
        return next(self.scan(prefix, after), None)

    def last(self, prefix: bytes) -> CoreRow | None:
        number = bisect.bisect_left(self._keys, prefix + b"\xff" * 768) - 1
        return self._entry(number) if number >= 0 and self._keys[number].startswith(prefix) else None

    def count_keys(self) -> int:
        return len(self._keys)

    def item(self, offset: int) -> Contents:
        """The contents of an entry with that offset."""
        return self._entries[self._keys[offset // 8 - 1]]

    def bytes_of(self, item: Contents, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes start … stop of the contents of an entry; all by default."""
        with self._reading():
            return self._library.contents(item, start, stop)

    def buffer(self, offset: int, length: int, writable: bool, fixed: bool = False) -> Any:
        return self.bytes_of(self.item(offset)).data

    def require_readable(self, offset: int, length: int, at: int, count: int) -> None:
        pass

    def contents(self, offset: int, length: int) -> bytearray:
        return bytearray(self.bytes_of(self.item(offset)).data)

    def verify(self, offset: int, length: int, count: int) -> None:
        """Does nothing: contents of an archive are verified whenever they are read."""

    def read_into(self, offset: int, length: int, out: Any) -> None:
        memoryview(out).cast("B")[:] = self.bytes_of(self.item(offset)).data


class _VersionCatalog(Catalog):
    __slots__ = ()

    def writable(self) -> None:
        raise ReadOnlyStoreError("a version of an archive can't be changed; restore it, or fork it, to go on from it")


class Version(NameMapping):
    """A version of an archive: a mapping from names to values. A value is read and checked when it is used; that raises
    UnknownVersionError if a drain has removed the version meanwhile. Arrays are copies that can't be written.

    Attributes
    ----------
    version : int
        The sequence number of the commit in the store.
    time : float
        When it was archived, in seconds since the epoch.
    message, attributes : str or None, dict
        Of the commit: see `Store.transaction`.
    losses : dict of str to Loss
        The arrays that are approximations of a lossy codec, and their errors.
    """

    __slots__ = ("_core", "attributes", "losses", "message", "time", "url", "version")

    def __init__(self, library: Library, row: Row, entries: Entries, reading: Reading) -> None:
        """Only `Archive` calls this. reading: see `VersionCore`."""
        self._core = VersionCore(library, row.version, entries, reading)
        self._catalog = _VersionCatalog(self._core, read_only=True)
        self._derived = DerivedArrays(self._catalog, library.sources.url)
        self._prefix = ""
        self.version = row.version
        self.time = row.time
        self.message, self.attributes = row.noted
        lossy = entries.items() if row.lossy else ()
        self.losses = {name_of(key): item.loss for key, item in lossy if item.loss and key[:1] == NAME_PREFIX}
        self.url = library.sources.url

    @property
    def store(self) -> Any:
        """The version itself, as groups have a `store`."""
        return self

    @property
    def path(self) -> str:
        """The URL of the archive, with the version."""
        return f"{self.url}@{self.version}"

    @property
    def closed(self) -> bool:
        """False: a version stays readable."""
        return False

    media = "archive"
    mode = "r"
    openings = 1

    def read(self, name: str, rows: Any) -> Any:
        """Some rows of an array, as a new array. Other rows are not read.

        Parameters
        ----------
        name : str
            Of an array in C order with at least one axis.
        rows : slice
            Of the first axis, with the step 1: ``np.s_[100:200]``.

        Raises
        ------
        UnknownNameError, TypeError, UnknownVersionError, ArchiveDamagedError
        """
        from pmstore._values.array import read_layout

        entry = self._core.get(key_of(self._full(name)))
        if entry is None:
            raise self._catalog.unknown(name)
        if entry.kind != ARRAY:
            raise TypeError(f"{name!r} is not an array")
        described = read_layout(self._core, entry)
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not described.shape or described.order == "F":
            raise TypeError("read() takes rows, as in np.s_[100:200], of an array in C order; version[name] has all")
        start, stop, _ = rows.indices(operator.index(described.shape[0]))
        shape = (max(stop - start, 0), *described.shape[1:])
        width = described.nbytes // described.shape[0] if described.shape[0] else 0
        if not shape[0] or not width:
            return np.empty(shape, described.dtype)
        contents = self._core.bytes_of(self._core.item(entry.offset), start * width, stop * width)
        return contents.view(described.dtype).reshape(shape)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) >> 4
