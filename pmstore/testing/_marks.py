"""What a recording says of commits: which were acknowledged, which had begun, and the states that they left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pmstore._core import lib
from pmstore.testing import _engine
from pmstore.testing._engine import Options, Schedule
from pmstore.testing._recording import Recording

__all__ = ["Marks", "beginning_at", "first_difference", "home_may_lag"]

EVENT = np.dtype([("offset", "<u8"), ("length", "<u8"), ("kind", "<u4"), ("has_data", "<u4"), ("data", "<u8")])


def events_of(recording: Recording) -> np.ndarray[Any, np.dtype[np.void]]:
    """The events, as an array with the fields of pm_event."""
    return np.frombuffer(recording.events, EVENT)


class Marks:
    """Of a recording that begins with a new store: the bounds on the state at its end, and the hashes of the states by
    sequence. A commit that was tried again with more in it has more than one.
    """

    def __init__(self, recording: Recording, until: int | None = None) -> None:
        self.acknowledged = self.started = 0
        self.hashes: dict[int, list[int]] = {0: [0]}  # of a new store, which is empty
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


def home_may_lag(recording: Recording, sequence: int) -> bool:
    """Whether home may not show commit `sequence`, the last whose record is durable, if a write failed where the
    recording ends (I3).

    A synced record is followed by writes alone, of its witness and then of home, within the commit or behind it (D13).
    A write before the next event of another kind, of a new array or, behind a spilled commit, of a header, is taken for
    one of home's.
    """
    events = events_of(recording)
    kinds, write = events["kind"], lib.PM_EVENT_WRITE
    marks = np.flatnonzero((kinds >= lib.PM_EVENT_COMMIT_BEGIN) & (kinds != lib.PM_EVENT_DURABLE))
    if not len(marks) or events["offset"][marks[-1]] != sequence:
        return False  # the record of the commit that was under way is not durable
    last = int(marks[-1])
    if kinds[last] != lib.PM_EVENT_COMMIT_END:
        return bool(kinds[last] == lib.PM_EVENT_COMMIT_BEGIN)
    behind = kinds[last - 1] == write and kinds[last - 2] != write  # the witness alone came before it was acknowledged
    return bool(behind and (kinds[last + 1 :] == write).all())


def first_difference(one: Recording, other: Recording) -> int:
    """The number of events that two recordings have in common from the start."""
    first, second = (np.frombuffer(r.events, "<u8").reshape(-1, EVENT.itemsize // 8) for r in (one, other))
    most = min(len(first), len(second))
    differs = (first[:most] != second[:most]).any(axis=1)
    return int(differs.argmax()) if differs.any() else most


def _lazily(events: np.ndarray[Any, np.dtype[np.void]]) -> bool:
    """Whether commits are acknowledged before they are durable where these events end."""
    said = events["kind"][(events["kind"] == lib.PM_EVENT_OPEN) | (events["kind"] == lib.PM_EVENT_DURABLE)]
    return bool(len(said) and said[-1] == lib.PM_EVENT_DURABLE)


def beginning_at(recording: Recording, event: int) -> Recording:
    """A recording that begins with a new store, from the last sync before an event on, when nothing was on its way, or
    from the start, if there was no sync.
    """
    events = events_of(recording)
    syncs = np.flatnonzero(events["kind"][:event] == lib.PM_EVENT_SYNC)
    start = int(syncs[-1]) + 1 if len(syncs) else 0
    marks = Marks(recording, start)
    # A commit that is under way there has had its sync: none failed before the event.
    head = np.array([(marks.started, marks.hashes[marks.started][-1], lib.PM_EVENT_RECOVERED, 0, 0)], EVENT)
    if _lazily(events[:start]):
        head = np.append(head, np.array([(marks.started, 0, lib.PM_EVENT_DURABLE, 0, 0)], EVENT))
    base = _engine.image(recording, Schedule(start, "nothing"), Options()) if start else recording.base
    return replace(recording, base=base, events=head.tobytes() + events[start:].tobytes())
