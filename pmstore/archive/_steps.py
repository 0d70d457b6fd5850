"""The steps of a drain, without its threads.

    the store's file ──capture──▶ encoded versions ──write──▶ the first place ──copy──▶ the next place …
                                   in memory: `jobs`

`_drain.py` has a thread for each of the arrows.

I23  A version is a commit: contents, names and note are those of one snapshot (I19, I20).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pmstore._errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveUnavailableError,
    ArchiveWarning,
    StaleSnapshotError,
)
from pmstore._snapshot import Reader, newest
from pmstore._store.held import tell_pid
from pmstore.archive._capture import Seen, capture
from pmstore.archive._codecs import Codecs
from pmstore.archive._copying import is_whole, parts_of
from pmstore.archive._format import Piece, Row
from pmstore.archive._objects import Place
from pmstore.archive._past import refuse_another_past
from pmstore.archive._retention import Keep
from pmstore.archive._sources import Sources
from pmstore.archive._target import Target
from pmstore.archive._tuning import Tuner
from pmstore.archive._versions import Library
from pmstore.archive._writing import Flush, Stored, Writing

__all__ = ["Options", "Steps"]


class Options(NamedTuple):
    """The arguments of `Store.drain`, checked."""

    every: int
    keep: Keep
    codec: Codecs
    part_size: int
    queue_size: int
    raises: bool
    mtbf: float | None = None


class Steps:
    """The steps of a drain, each function in a thread of its own."""

    def __init__(self, fd: int, places: Sequence[Place], about: dict[str, Any], options: Options) -> None:
        """fd: of the store's file, open for reading; it becomes the drain's. about: the archive object, if there is
        none yet. All places are looked at before the first one is written to: a drain that is refused ends no other."""
        self.fd = fd
        self.options = options
        self.reader = Reader(fd, tell_pid)
        self.targets = [Target(place, about) for place in places]
        refuse_another_past(self.reader, newest(fd), self.targets)
        # In one order whatever the order of the places: of two stores that begin at once, one gets all of them.
        changed = [target.begin() for target in sorted(self.targets, key=lambda target: target.place.url)]
        if any(changed):  # by a writer that has come in between
            refuse_another_past(self.reader, newest(fd), self.targets)
        self.captured = self.targets[0].last
        self._tuner = None if options.mtbf is None else Tuner(options.mtbf)
        self._captured_at = time.time()
        self._measured: deque[tuple[int, float]] = deque()  # bytes and seconds of flushes
        self.jobs: deque[Flush] = deque()
        self._tell: Callable[[str], object] = lambda text: None
        self._failed = False  # the last capture
        self._told = False  # of versions that could not be removed
        self._told_parts: set[str] = set()  # that are damaged
        self._seen = Seen(options.queue_size, options.codec.approximates if options.codec.any_lossy else None)
        self._writing = Writing(
            self.targets[0].writer,
            options.codec,
            options.part_size,
            self.jobs.append,
            self._last(),
            self._stored(),
            self._is_whole,
        )

    def _last(self) -> int | None:
        return self.captured if self.captured >= 0 else None

    def _stored(self) -> list[tuple[bytes, Stored]]:
        """Frames of the newest version, which the first base need not write anew."""
        target = self.targets[0]
        row = target.index.find(self.captured)
        if row is None:
            return []
        try:
            entries = Library(Sources([target.place])).entries(target.index.chain(row))
            there = parts_of(target.place)
        except ArchiveError as error:
            warnings.warn(f"{target.place.url}: {error}; all contents are written anew", ArchiveWarning, stacklevel=2)
            return []
        frames = [
            (key, (frame, chain))
            for key, item in entries.items()
            for frame, chain in item.frames
            if not chain.delta and len(frame.runs) == 1
        ]
        found = [one for one in frames if one[1][0].piece.is_within(there)]
        if len(found) < len(frames):
            text = f"{target.place.url}: parts of version {self.captured} are lost or cut; contents are written anew"
            warnings.warn(text, ArchiveWarning, stacklevel=2)
        return found

    def _is_whole(self, piece: Piece) -> bool:
        """Whether the first place has a piece of an earlier drain unharmed. It is read only on a disk here: an object
        store has checksums of its own."""
        place = self.targets[0].place
        try:
            if not place.near or is_whole(place.once, piece):
                return True
        except ArchiveUnavailableError:  # the next drain looks at it
            return True
        if piece.part not in self._told_parts:
            self._told_parts.add(piece.part)
            self._tell(f"{place.url}: {piece.part} is damaged at byte {piece.at}; its contents are written anew")
        return False

    @property
    def queued(self) -> int:
        """Bytes that wait in memory."""
        return self._writing.waiting + sum(job.nbytes for job in list(self.jobs))

    @property
    def crowded(self) -> bool:
        """Whether more bytes wait in memory than the queue may have."""
        return self.queued > self.options.queue_size

    @property
    def encoded(self) -> bool:
        """Whether versions wait for others to share their part."""
        return bool(self._writing.rows)

    def capture(self) -> bool:
        """Encodes the newest commit, if it is newer than the last version. Returns whether it was."""
        if self._failed:
            self._catch_up()
        if newest(self.fd) <= self.captured:
            return False

        def write(changes: Any) -> Any:
            return self._writing.version(changes) if changes.sequence > self.captured else None

        try:
            row = capture(self.reader, self._seen, write)
            if row is None:
                return False
            self.captured = row.version
        except StaleSnapshotError:  # what was encoded is used again
            raise
        except BaseException:
            self._failed = True
            raise
        if self._writing.waiting >= self.options.part_size or len(self._writing.rows) >= self._tuned(row):
            self._writing.flush()
        return True

    def _catch_up(self) -> None:
        """Forgets what a capture encoded that failed. If it had its version already, the next one is a base. After a
        MemoryError it is called again."""
        self._writing.roll_back()
        last = self._writing.last
        if last is not None and last > self.captured:
            self._seen = self._seen.emptied()
            self._writing.restart()
            self.captured = last
        self._failed = False

    def _tuned(self, row: Row) -> float:
        """The versions that share a part, at most. It also sets when the next base comes."""
        if self._tuner is None:
            return math.inf
        while self._measured:
            self._tuner.wrote(*self._measured.popleft())
        self._tuner.committed(max(1e-6, row.time - self._captured_at), row.stored)
        self._captured_at = row.time
        if row.previous is None:
            self._tuner.based(self._writing.base_bytes)
        chosen = self._tuner.choice()
        self._writing.base_after = chosen.base_interval - 1
        return chosen.batch

    def attach(self, room: Callable[[], None], tell: Callable[[str], object]) -> None:
        """`room` is called in the middle of a version that has filled a part, after that was handed over; `tell` with
        the text of a warning."""
        self._writing.room = room
        self._writing.tell = self._tell = tell

    def flush(self) -> bool:
        """Hands the versions that were encoded over to the first place. False if there are none."""
        encoded = self.encoded
        self._writing.flush()
        return encoded

    def write(self) -> bool:
        """Writes the oldest of the waiting flushes to the first place. False if there is none."""
        if not self.jobs:
            return False
        begun = time.monotonic()
        self.targets[0].write(self.jobs[0])
        self._measured.append((self.jobs.popleft().nbytes, time.monotonic() - begun))
        self._retain(0)
        return True

    def copy(self, number: int) -> bool:
        """Brings a further place up to the one before. False if it is."""
        near, target = self.targets[number - 1], self.targets[number]
        copied = target.copy(near.index, near.place, self._tell)
        self._writing.distrust(target.damaged)
        if not copied:
            return False
        self.copy_tags(number)
        self._retain(number)
        return True

    def copy_tags(self, number: int) -> None:
        """Copies the tags of the place before to a further place, before versions are removed there."""
        self.targets[number].copy_tags(self.targets[number - 1].place)

    def end(self, number: int) -> None:
        """A place gets no more versions."""
        self.targets[number].end()

    def leave(self) -> None:
        """A forked process calls this: the parent keeps everything."""
        if self.fd >= 0:
            self.reader.leave()

    def close(self) -> None:
        """The file is not read any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            del self.reader
            os.close(fd)
            tell_pid()
            self._seen = Seen(0)

    def _retain(self, number: int) -> None:
        """Removes versions. If that fails, they or their parts stay, and a later call tries again."""
        try:
            self.targets[number].retain(self.options.keep, min(target.last for target in self.targets[number:]))
        except (ArchiveDamagedError, ArchiveUnavailableError) as error:
            if self.options.raises and isinstance(error, ArchiveDamagedError):
                raise
            if not self._told:
                self._told = True
                self._tell(f"versions stay that could go: {error}")
