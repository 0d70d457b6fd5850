"""The commits of a recording: which were acknowledged, which had begun, and the states that they left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pmstore._core import lib
from pmstore.testing._store import engine
from pmstore.testing._store.engine import Options, Schedule
from pmstore.testing._store.recording import Recording

__all__ = ["Marks", "beginning_at", "first_difference", "image_may_lag"]

EVENT = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("kind", "<u4"), ("has_data", "<u2"), ("thread", "<u2"), ("data", "<u8")]
)


def events_of(recording: Recording) -> np.ndarray[Any, np.dtype[np.void]]:
    """The events, as an array with the fields of pm_event."""
    return np.frombuffer(recording.events, EVENT)


class Marks:
    """The marks of a recording that begins with a new store: the bounds on the state at its end, and the hashes of
    the states by sequence. A commit that was repeated with more changes has several hashes.
    """

    def __init__(self, recording: Recording, until: int | None = None) -> None:
        self.acknowledged = self.started = 0
        self.hashes: dict[int, list[int]] = {0: [0]}  # a new store is empty
        events = events_of(recording)[:until]
        kinds = events["kind"]
        for event in events[(kinds >= lib.PM_EVENT_COMMIT_BEGIN) & (kinds != lib.PM_EVENT_DURABLE)]:
            sequence, hash = int(event["offset"]), int(event["length"])
            self.hashes.setdefault(sequence, [])
            if hash not in self.hashes[sequence]:
                self.hashes[sequence].append(hash)
            if event["kind"] == lib.PM_EVENT_COMMIT_BEGIN:
                self.started = max(self.started, sequence)
            else:
                self.acknowledged = self.started = sequence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def image_may_lag(recording: Recording, sequence: int) -> bool:
    """Whether the committed image may lack commit `sequence`, the last one with a durable record, if a write failed at
    the end of the recording (I3).

    After a synced record there are only writes, of its durable marker and then of the committed image, within the
    commit or behind it (D13). Writes of a new array, or of a header behind an overflowed commit, are taken for writes
    of the committed image if no event of another kind comes before them.
    """
    events = events_of(recording)
    kinds, write = events["kind"], lib.PM_EVENT_WRITE
    marks = np.flatnonzero((kinds >= lib.PM_EVENT_COMMIT_BEGIN) & (kinds != lib.PM_EVENT_DURABLE))
    if not len(marks) or events["offset"][marks[-1]] != sequence:
        return False  # the record of the commit in progress is not durable
    last = int(marks[-1])
    if kinds[last] != lib.PM_EVENT_COMMIT_END:
        return bool(kinds[last] == lib.PM_EVENT_COMMIT_BEGIN)
    behind = kinds[last - 1] == write and kinds[last - 2] != write  # only the marker preceded the acknowledgement
    return bool(behind and (kinds[last + 1 :] == write).all())


def first_difference(one: Recording, other: Recording) -> int:
    """The number of events from the start that are equal in two recordings."""
    first, second = (np.frombuffer(r.events, "<u8").reshape(-1, EVENT.itemsize // 8) for r in (one, other))
    most = min(len(first), len(second))
    differs = (first[:most] != second[:most]).any(axis=1)
    return int(differs.argmax()) if differs.any() else most


def _lazily(events: np.ndarray[Any, np.dtype[np.void]]) -> bool:
    """Whether commits are acknowledged before they are durable, at the end of these events."""
    said = events["kind"][(events["kind"] == lib.PM_EVENT_OPEN) | (events["kind"] == lib.PM_EVENT_DURABLE)]
    return bool(len(said) and said[-1] == lib.PM_EVENT_DURABLE)


def beginning_at(recording: Recording, event: int) -> Recording:
    """A recording that begins with a new store: from the last sync before an event, when nothing was in flight, or
    from the start if there was no sync.
    """
    events = events_of(recording)
    syncs = np.flatnonzero(events["kind"][:event] == lib.PM_EVENT_SYNC)
    start = int(syncs[-1]) + 1 if len(syncs) else 0
    marks = Marks(recording, start)
    # A commit in progress there has had its sync: no event before this one failed.
    head = np.array([(marks.started, marks.hashes[marks.started][-1], lib.PM_EVENT_RECOVERED, 0, 0, 0)], EVENT)
    if _lazily(events[:start]):
        head = np.append(head, np.array([(marks.started, 0, lib.PM_EVENT_DURABLE, 0, 0, 0)], EVENT))
    base = engine.image(recording, Schedule(start, "nothing"), Options()) if start else recording.base
    return replace(recording, base=base, events=head.tobytes() + events[start:].tobytes())
