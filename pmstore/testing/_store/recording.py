"""The operations of a store on its durable bytes, recorded once while a program uses it, to be crashed many times."""

from __future__ import annotations

import atexit
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pmstore
from pmstore._core import ffi, lib
from pmstore._store import hooks
from pmstore._trace import Trace
from pmstore.testing._base.errors import CrashTestError

__all__ = ["Event", "Recorder", "Recording", "from_environment"]

FORMAT = 2
MEDIA = ("memory", "file")
VARIABLE = "PMSTORE_CRASH_RECORD"
PACE = 64

_EVENT_SIZE: int = ffi.sizeof("pm_event")


class Event(NamedTuple):
    """One event on the durable bytes: see pm_event_kind in csrc/pmstore.h. data: the bytes that were written."""

    kind: int
    offset: int
    length: int
    data: bytes


@dataclass(frozen=True)
class Recording:
    """The durable bytes before the first event, and the events.

    medium: "memory" or "file". events: an array of pm_event. data: the bytes that the events wrote.
    """

    medium: str
    base: bytes
    events: bytes
    data: bytes

    def __len__(self) -> int:
        return len(self.events) // _EVENT_SIZE

    def event(self, number: int) -> Event:
        """Event `number`, counted from 0."""
        if not 0 <= number < len(self):
            raise IndexError(f"the recording has {len(self)} events, and no number {number}")
        raw = ffi.from_buffer("pm_event[]", self.events)[number]
        return Event(raw.kind, raw.offset, raw.length, self.data[raw.data : raw.data + raw.length * raw.has_data])

    @property
    def states(self) -> dict[int, int]:
        """The hash of the state after each commit, by sequence."""
        raw = ffi.from_buffer("pm_event[]", self.events)
        ends = (lib.PM_EVENT_COMMIT_END, lib.PM_EVENT_RECOVERED)
        return {event.offset: event.length for event in raw if event.kind in ends}

    def ends(self) -> dict[int, int]:
        """The number of events that had happened when each commit was acknowledged, by sequence."""
        raw = ffi.from_buffer("pm_event[]", self.events)
        out: dict[int, int] = {}
        for number, event in enumerate(raw):
            if event.kind in (lib.PM_EVENT_COMMIT_END, lib.PM_EVENT_RECOVERED):
                out.setdefault(event.offset, number + 1)
        return out

    def followed_by(self, later: Recording) -> Recording:
        """This recording and one of later runs of the same store, joined."""
        events = bytearray(later.events)
        for event in ffi.from_buffer("pm_event[]", events):
            event.data += len(self.data) if event.has_data else 0
        return Recording(self.medium, self.base, self.events + bytes(events), self.data + later.data)

    def save(self, file: Any) -> None:
        """Write the recording into a file (a path, or an open binary file)."""
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            self.add_to(archive)

    def add_to(self, archive: zipfile.ZipFile) -> None:
        """Put the recording into an open archive."""
        about = {"format": FORMAT, "event_size": _EVENT_SIZE, "medium": self.medium}
        archive.writestr("recording.json", json.dumps(about))
        for name in ("base", "events", "data"):
            archive.writestr(name, getattr(self, name))

    @classmethod
    def load(cls, file: Any) -> Recording:
        """Read a file of `save`. Raises CrashTestError if it is no recording, or has another version."""
        try:
            with zipfile.ZipFile(file) as archive:
                return cls.take_from(archive)
        except (zipfile.BadZipFile, LookupError, TypeError, ValueError, EOFError, OSError, RecursionError) as error:
            raise CrashTestError(f"{file!s} is no recording, or a damaged one ({error}): record it again") from error

    @classmethod
    def take_from(cls, archive: zipfile.ZipFile) -> Recording:
        """Read an archive of `add_to`."""
        about = dict(json.loads(archive.read("recording.json")))
        if about.get("format") != FORMAT or about.get("event_size") != _EVENT_SIZE:
            raise CrashTestError(
                f"the recording has format {about.get('format')}, and this pmstore reads format {FORMAT}: "
                "record it again with this version"
            )
        if about["medium"] not in MEDIA:
            raise ValueError(f"a medium {about['medium']!r}")
        recording = cls(about["medium"], archive.read("base"), archive.read("events"), archive.read("data"))
        if len(recording.events) % _EVENT_SIZE:
            raise ValueError("half an event")
        return recording


class Recorder:
    """A context manager. Inside it, all operations of `pmstore.open` in this process on the store at a path are
    recorded, over all its openings. Afterwards, `recording` has the result.

    Parameters
    ----------
    path : path-like
        The path of the store. It is created, empty, if there is none.
    medium : {"memory", "file"}
        The memory medium needs a path on a tmpfs, such as one below /dev/shm.
    seed : int
        It determines ids and salts of the store, and the order of its background work, so that a deterministic program
        writes the same bytes every time.
    pace : int
        The probability, in 1/256, that background work is done at each point where it is possible.

    Its `trace` records the store; `fail` of the trace makes operations of the store fail.

    Raises CrashTestError if another recorder is active. In the recorded program, raises it for openings that can't be
    recorded: of other stores for writing, and of this one with mode "w" or "x".
    """

    def __init__(
        self, path: str | os.PathLike[str], medium: str = "memory", seed: int = 1, *, pace: int = PACE
    ) -> None:
        if medium not in MEDIA:
            raise CrashTestError(f'media is "memory" or "file", not {medium!r}')
        self.path = Path(os.path.realpath(path))
        self.medium = medium
        self.trace = Trace(seed or 1)
        self.trace.background(seed or 1, pace)
        self._base: bytes | None = None
        self._recording: Recording | None = None

    def __enter__(self) -> Recorder:
        if hooks.recorded():
            raise CrashTestError("another store is being recorded: let that end first, one explorer at a time")
        hooks.record(self._on_open)
        return self

    def _on_open(self, path: str, mode: str, media: str) -> tuple[str, Trace | None]:
        if os.path.realpath(path) != str(self.path):
            if mode == "r":
                return media, None
            raise CrashTestError(
                f"the workload opened {path!r} for writing, outside the explorer, which records {str(self.path)!r}: "
                "use the store that the workload is given"
            )
        if mode in ("w", "x"):
            raise CrashTestError(
                f'the workload opened its store with mode "{mode}", which replaces the file that is recorded: '
                'use "a", or "r+"; the store is new and empty'
            )
        if mode == "r":
            return self.medium, None
        if self._base is None and (mode == "a" or self.path.exists()):
            self._base = self._first()
        return self.medium, self.trace

    def _first(self) -> bytes:
        """The file before the first run. A new store gets its ids from the trace too."""
        if not self.path.exists():
            hooks.record(lambda path, mode, media: (self.medium, self.trace))
            try:
                pmstore.open(self.path, "x").close()
            except ValueError as error:
                raise CrashTestError(f"no store on the medium {self.medium!r} at {self.path}: {error}") from error
            finally:
                hooks.record(self._on_open)
            self.trace.clear()
        return self.path.read_bytes()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks.record(None)
        if error is None and self._base is not None:
            self._recording = Recording(self.medium, self._base, *self.trace.raw())

    @property
    def opened(self) -> bool:
        """Whether the program opened the store for writing."""
        return self._base is not None

    @property
    def recording(self) -> Recording:
        """The recording until now."""
        if self._recording is None:
            raise CrashTestError(
                f"nothing was recorded: the program did not open the store at {self.path} for writing, or it failed"
            )
        return self._recording


def from_environment() -> None:
    """Record in this process as PMSTORE_CRASH_RECORD requests, in the form "medium:output:path of the store". When
    the interpreter exits, append the recording to the output of earlier processes.
    """
    medium, _, rest = os.environ[VARIABLE].partition(":")
    output, _, path = rest.partition(":")
    earlier = Recording.load(output) if os.path.exists(output) else None
    # The ids differ from those of earlier processes.
    recorder = Recorder(path, medium, seed=1 + (len(earlier) if earlier is not None else 0))
    recorder.__enter__()

    def finish() -> None:
        hooks.close_all()  # closes at exit the stores that are still open, so that their closing is recorded too
        recorder.__exit__(None, None, None)
        if recorder.opened:
            recording = recorder.recording
            (recording if earlier is None else earlier.followed_by(recording)).save(output)

    atexit.register(finish)
