"""The possible states of files after a crash: a model of a disk and of the file system on it.

A run is a list of events (recording.py). A crash happens between two of them, at point t: t events have happened. Each
event consists of *pieces*, which a crash keeps or loses one by one:

- **data**: the part of one write that lies in one sector (512 or 4096 bytes). A sector is written whole or not at all;
- **size**: a new length of a file. A write that makes a file longer than a page has several: it may grow in steps;
- **entry**: one change of names: create, link, unlink, mkdir, rmdir or rename. A rename is one piece: it is atomic.

A piece is *durable* from the sync on that covers it, and *pending* before. A crash may lose any set of pending pieces,
as long as no kept piece needs a lost one. The two file systems differ in two points only: which pieces a piece needs,
and which pieces a sync covers:

``posix``, the guarantees of POSIX only:
    - data needs the earlier data of its sector: a sector keeps a prefix of its writes;
    - a size needs the earlier sizes of its file, and *not* the data: space that a size covers and whose data are lost
      reads as zeros, or as anything with ``stale``;
    - an entry needs the earlier entries of the same names (in the same directories), and no others, nor any data;
    - fsync and fdatasync of a file make its data and sizes durable, not its name;
    - fsync or fdatasync of a directory makes the entries in it durable (a rename that leads into or out of it, whole).

``ext4``, with its default options (data=ordered, delayed allocation, auto_da_alloc), additionally:
    - entries and truncations go through one journal: each needs all earlier ones;
    - a size that a write gives needs the data that were written into the space it adds (data=ordered);
    - data written where a truncation had cut the file off need the truncation: they are in new blocks;
    - a rename over an existing file needs the data and sizes of the file that is renamed; and if a file was emptied and
      is closed, later entries of the journal need the writes to it (auto_da_alloc);
    - fsync of a file makes the journal durable up to the last event that concerns it, its name included; fdatasync up
      to its last change of size or creation; either of a directory up to the last change in it.

Both:
    - O_SYNC, O_DSYNC, RWF_SYNC, RWF_DSYNC and msync(MS_SYNC) make the data of their range durable, and the file's
      sizes;
    - sync_file_range (written and waited for) hands the data of its range to the disk: durable at the next sync of any
      other kind, which empties the disk's cache; not the size;
    - sync and syncfs make everything durable;
    - a truncation that is kept leaves zeros where the file grows again;
    - contents and names from before the run are durable;
    - stores to a shared mapping become visible at the next recorded call, as writes of the sectors that differ;
    - modes, owners, times, extended attributes, and locks are not part of the model.

Sources: POSIX.1-2017 (fsync, fdatasync, rename, "synchronized I/O data integrity completion"); Linux man-pages
fsync(2), open(2), sync_file_range(2), msync(2); Documentation/filesystems/ext4 (data=ordered, auto_da_alloc) in the
kernel.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pmstore.testing._files.recording import ROOT, Event, Inode, Recording

__all__ = ["PAGE", "File", "Image", "Model", "Piece"]

PAGE = 4096
NEVER = 1 << 60
Lost = frozenset[int]


class Piece(NamedTuple):
    """One part of an event that a crash keeps or loses."""

    event: int
    kind: str
    """"data", "size" or "entry"."""
    inode: int
    """The file; for an entry, the inode of the entry."""
    place: int
    """data: the sector's number. size: the length."""


class File(NamedTuple):
    """A file, directory or link in an image."""

    kind: str
    inode: int
    mode: int
    content: bytes
    digest: bytes


Image = dict[str, File]
"""An image: relative path → file, parents before children."""


class Model:
    """The crash states of one recording."""

    def __init__(self, recording: Recording, filesystem: str = "posix", sector: int = 512, stale: int = 0) -> None:
        self.recording = recording
        self.ordered = filesystem == "ext4"
        self.sector = sector
        self.stale = stale
        self.pieces: list[Piece] = []
        self.needs: list[list[int]] = []
        self.durable: list[int] = []
        """The point from which on a piece can't be lost."""
        self.by_event: list[list[int]] = []
        self.by_inode: dict[int, list[int]] = {}
        """Events on a file's contents."""
        self._build()
        self._contents: dict[tuple[int, int, Lost], tuple[bytes, bytes]] = {}

    # ---- pieces, the pieces that they need, and the points when they become durable

    def _build(self) -> None:
        self.sizes = {n: len(inode.content) for n, inode in self.recording.inodes.items() if inode.kind == "file"}
        self.current: dict[int, bytearray] = {}  # contents, with every piece kept
        self.last_data: dict[tuple[int, int], int] = {}
        self.last_size: dict[int, int] = {}
        self.last_entry: dict[tuple[int, str], int] = {}
        self.journal: list[int] = []
        self.pending: dict[int, list[int]] = {}  # data and size pieces of a file
        self.cuts: dict[int, list[int]] = {}  # sizes of a file that made it shorter
        self.handed: set[int] = set()
        self.forced: list[int] = []  # the pieces that the next journalled piece needs, beside the one before
        self.concerns: dict[int, dict[str, int]] = {}  # inode → kind of event → last event
        for number, event in enumerate(self.recording.events):
            self.by_event.append([])
            if event.kind == "write":
                self._write(number, event)
            elif event.kind == "size":
                self._size(number, event.inode, event.length, journalled=True)
            elif event.kind == "sync":
                self._sync(number, event)
            elif event.kind == "close":
                if self.ordered:
                    self.forced += self.pending.get(event.inode, [])
            elif event.kind != "said":
                self._entry(number, event)
            if event.kind in ("write", "size"):
                self.by_inode.setdefault(event.inode, []).append(number)
                self._concern(event.inode, event.kind, number)

    def _concern(self, inode: int, kind: str, event: int) -> None:
        self.concerns.setdefault(inode, {})[kind] = event

    def _add(self, piece: Piece, needs: Iterable[int]) -> int:
        number = len(self.pieces)
        self.pieces.append(piece)
        self.needs.append(sorted(set(needs)))
        self.durable.append(NEVER)
        self.by_event[piece.event].append(number)
        if piece.kind != "entry":
            self.pending.setdefault(piece.inode, []).append(number)
        return number

    def _journalled(self) -> list[int]:
        """The pieces that the next piece in the journal needs."""
        if not self.ordered:
            return []
        needs = self.journal[-1:] + self.forced
        self.forced = []
        return needs

    def _write(self, number: int, event: Event) -> None:
        old, end = self.sizes[event.inode], event.offset + event.length
        new = []
        content = self.current.setdefault(event.inode, bytearray(self.recording.inodes[event.inode].content))
        content.extend(bytes(max(0, end - len(content))))
        same = not self.stale and event.inode not in self.cuts
        for sector in range(event.offset // self.sector, -(-end // self.sector)):
            key = event.inode, sector
            if same and key not in self.last_data and _unchanged(content, event, sector * self.sector, self.sector):
                continue  # the image is the same whether it is lost or kept
            before = [self.last_data[key]] if key in self.last_data else []
            if self.ordered:
                before += [n for n in self.cuts.get(event.inode, ()) if self.pieces[n].place <= sector * self.sector]
            self.last_data[key] = self._add(Piece(number, "data", event.inode, sector), before)
            new.append(self.last_data[key])
        content[event.offset : end] = event.data
        if end > old:
            for step in _steps(max(old, event.offset), end):
                covered = [n for n in new if (self.pieces[n].place * self.sector) < step] if self.ordered else []
                self._size(number, event.inode, step, needs=covered)

    def _size(self, number: int, inode: int, size: int, *, journalled: bool = False, needs: Iterable[int] = ()) -> None:
        needed = list(needs)
        if inode in self.last_size:
            needed.append(self.last_size[inode])
        if journalled:
            needed += self._journalled()
        if size > self.sizes[inode]:
            self._concern(inode, "grown", number)
        piece = self._add(Piece(number, "size", inode, size), needed)
        if size < self.sizes[inode]:
            self.cuts.setdefault(inode, []).append(piece)
        self.sizes[inode] = size
        self.last_size[inode] = piece
        if journalled:
            self.journal.append(self.last_size[inode])

    def _entry(self, number: int, event: Event) -> None:
        if event.kind == "create":
            self.sizes[event.inode] = 0
        names = _names(event)
        needs = [self.last_entry[name] for name in names if name in self.last_entry] + self._journalled()
        if self.ordered and event.kind == "rename" and event.other:
            needs += self.pending.get(event.inode, [])
        piece = self._add(Piece(number, "entry", event.inode, 0), needs)
        self.journal.append(piece)
        for folder, name in names:
            self.last_entry[folder, name] = piece
            self._concern(folder, "entries", number)
        self._concern(event.inode, "create" if event.kind == "create" else "names", number)
        if event.other:
            self._concern(event.other, "names", number)

    # ---- syncs

    def _sync(self, number: int, event: Event) -> None:
        pending = self.pending.get(event.inode, [])
        if event.how == "data" and self.recording.inodes.get(event.inode, NO_INODE).kind == "directory":
            event = event._replace(how="file")
        if event.how == "handed":
            self.handed.update(self._inside(pending, event))
            return
        done: list[int] = list(self.handed)
        self.handed.clear()
        if event.how == "all":
            done += range(len(self.pieces))
        elif event.how == "range":
            done += self._inside(pending, event)
            done += [n for n in pending if self.pieces[n].kind == "size"]
        else:
            done += pending
        if self.ordered and event.how != "all":
            done += self._committed(event)
        elif event.how == "file":
            done += [n for n in self.journal if event.inode in {folder for folder, _ in _names(self._event(n))}]
        self._make_durable(done, number + 1)

    def _event(self, piece: int) -> Event:
        return self.recording.events[self.pieces[piece].event]

    def _inside(self, pieces: Iterable[int], event: Event) -> list[int]:
        """The data pieces in the range of a sync. Sectors that are partly in the range are included: pages are
        written whole."""
        first = event.offset // self.sector
        last = NEVER if event.length < 0 else -(-(event.offset + event.length) // self.sector)
        return [n for n in pieces if self.pieces[n].kind == "data" and first <= self.pieces[n].place < last]

    def _committed(self, event: Event) -> list[int]:
        """ext4: the part of the journal that a sync waits for."""
        about = self.concerns.get(event.inode, {})
        kinds = ("create", "names", "entries", "write", "size") if event.how == "file" else ("create", "grown", "size")
        last = max((about[kind] for kind in kinds if kind in about), default=-1)
        return [n for n in self.journal if self.pieces[n].event <= last]

    def _make_durable(self, pieces: Iterable[int], point: int) -> None:
        """Mark pieces durable, and those that they need. Data that a size needs are excluded: a sync of a range does
        not write them."""
        waiting = [n for n in pieces if self.durable[n] == NEVER]
        while waiting:
            piece = waiting.pop()
            if self.durable[piece] != NEVER:
                continue
            self.durable[piece] = point
            kind = self.pieces[piece].kind
            waiting += [n for n in self.needs[piece] if not (kind == "size" and self.pieces[n].kind == "data")]
        for inode, numbers in self.pending.items():
            self.pending[inode] = [n for n in numbers if self.durable[n] == NEVER]
        self.journal = [n for i, n in enumerate(self.journal) if self.durable[n] == NEVER or i == len(self.journal) - 1]

    # ---- crash states

    @property
    def points(self) -> int:
        """Crash points: before the first event, and after each."""
        return len(self.recording.events) + 1

    def pending_at(self, point: int) -> list[int]:
        """The pieces that a crash at a point may lose."""
        end = bisect_left(self.pieces, point, key=lambda piece: piece.event)
        return [n for n in range(end) if self.durable[n] > point]

    def close(self, point: int, lost: Iterable[int], pending: list[int] | None = None) -> Lost:
        """A set of lost pieces together with all pieces that need them."""
        gone = set(lost)
        for n in self.pending_at(point) if pending is None else pending:
            if n not in gone and not gone.isdisjoint(self.needs[n]):
                gone.add(n)
        return frozenset(gone)

    def keep(self, kept: Iterable[int], pending: list[int]) -> Lost:
        """All pending pieces except the given ones and those that they need."""
        waiting, found, possible = list(kept), set(), set(pending)
        while waiting:
            piece = waiting.pop()
            if piece not in found:
                found.add(piece)
                waiting += [n for n in self.needs[piece] if n in possible]
        return frozenset(possible - found)

    def states(self, point: int) -> Iterator[Lost]:
        """Every set that a crash at a point may lose."""
        pending = self.pending_at(point)

        def choose(at: int, lost: frozenset[int]) -> Iterator[Lost]:
            while at < len(pending) and not lost.isdisjoint(self.needs[pending[at]]):
                lost |= {pending[at]}
                at += 1
            if at == len(pending):
                yield lost
                return
            yield from choose(at + 1, lost)
            yield from choose(at + 1, lost | {pending[at]})

        return choose(0, frozenset())

    def said(self, point: int) -> bytes:
        """The program's standard output until a point."""
        return b"".join(event.data for event in self.recording.events[:point] if event.kind == "said")

    # ---- images

    def image(self, point: int, lost: Lost = frozenset()) -> Image:
        """The directory after a crash."""
        folders: dict[int, dict[str, int]] = {
            n: dict(inode.entries) for n, inode in self.recording.inodes.items() if inode.kind == "directory"
        }
        for number, event in enumerate(self.recording.events[:point]):
            if event.kind in ENTRIES and lost.isdisjoint(self.by_event[number]):
                _apply(folders, event)
        by_inode: dict[int, set[int]] = {}
        for n in lost:
            by_inode.setdefault(self.pieces[n].inode, set()).add(n)
        image: Image = {}
        self._collect(image, ROOT, "", folders, point, by_inode, frozenset())
        return image

    def _collect(
        self,
        image: Image,
        folder: int,
        path: str,
        folders: dict[int, dict[str, int]],
        point: int,
        lost: dict[int, set[int]],
        above: frozenset[int],
    ) -> None:
        for name in sorted(folders[folder]):
            number = folders[folder][name]
            inode = self.recording.inodes[number]
            full = f"{path}/{name}" if path else name
            if inode.kind == "directory":
                if number in above:
                    continue
                image[full] = File("directory", number, inode.mode, b"", b"")
                self._collect(image, number, full, folders, point, lost, above | {number})
            elif inode.kind == "link":
                image[full] = File("link", number, inode.mode, inode.content, inode.content)
            else:
                content, digest = self.content(number, point, frozenset(lost.get(number, ())))
                image[full] = File("file", number, inode.mode, content, digest)

    def content(self, inode: int, point: int, lost: Lost = frozenset()) -> tuple[bytes, bytes]:
        """A file's bytes, and a digest of them."""
        events = self.by_inode.get(inode, [])
        count = bisect_left(events, point)
        key = inode, count, lost
        if key not in self._contents:
            if len(self._contents) > 512:
                self._contents.clear()
            content = self._replay(inode, events[:count], lost)
            self._contents[key] = content, hashlib.blake2b(content, digest_size=16).digest()
        return self._contents[key]

    def _replay(self, inode: int, events: list[int], lost: Lost) -> bytes:
        data = bytearray(self.recording.inodes[inode].content)
        size = len(data)
        for number in events:
            event = self.recording.events[number]
            mine = self.by_event[number]
            if event.kind == "write":
                end = event.offset + event.length
                if len(data) < end:
                    data.extend(bytes(end - len(data)))
                if lost.isdisjoint(mine):
                    data[event.offset : end] = event.data
                else:
                    self._torn(data, event, mine, lost)
            for n in mine:
                if self.pieces[n].kind == "size" and n not in lost:
                    size = self.pieces[n].place
                    data[size:] = bytes(max(0, len(data) - size)) if event.kind == "size" else data[size:]
        return bytes(data[:size]).ljust(size, b"\0")

    def _torn(self, data: bytearray, event: Event, mine: list[int], lost: Lost) -> None:
        """A write that has lost some of its sectors."""
        old = data[event.offset : event.offset + event.length]
        data[event.offset : event.offset + event.length] = event.data
        for n in mine:
            if n not in lost or self.pieces[n].kind != "data":
                continue
            begin = max(event.offset, self.pieces[n].place * self.sector)
            end = min(event.offset + event.length, (self.pieces[n].place + 1) * self.sector)
            if self.stale and not self.needs[n] and begin >= len(self.recording.inodes[event.inode].content):
                data[begin:end] = random.Random(self.stale * 1000003 + n).randbytes(end - begin)
            else:
                data[begin:end] = old[begin - event.offset : end - event.offset]


NO_INODE = Inode("none", 0, b"", {})
ENTRIES = ("create", "link", "unlink", "rename", "exchange")


def _steps(old: int, end: int) -> list[int]:
    """The sizes that a file may have while it grows: after its first page, in the middle, before its last page, and
    in full.
    """
    first = (old // PAGE + 1) * PAGE
    last = (end - 1) // PAGE * PAGE
    middle = (first + last) // 2 // PAGE * PAGE
    return sorted({step for step in (first, middle, last) if old < step < end} | {end})


def _unchanged(content: bytearray, event: Event, begin: int, size: int) -> bool:
    """Whether a write leaves a sector as it is."""
    low, high = max(begin, event.offset), min(begin + size, event.offset + event.length)
    return content[low:high] == event.data[low - event.offset : high - event.offset]


def _names(event: Event) -> list[tuple[int, str]]:
    """The names, in their directories, that an event changes."""
    names = [(event.folder, event.name)]
    return [*names, (event.folder2, event.name2)] if event.kind in ("rename", "exchange") else names


def _apply(folders: dict[int, dict[str, int]], event: Event) -> None:
    """Apply a change of names."""
    folder = folders.setdefault(event.folder, {})
    if event.kind in ("create", "link"):
        folder[event.name] = event.inode
        return
    if event.kind == "unlink":
        folder.pop(event.name, None)
        return
    folder.pop(event.name, None)
    folders.setdefault(event.folder2, {})[event.name2] = event.inode
    if event.kind == "exchange":
        folder[event.name] = event.other
