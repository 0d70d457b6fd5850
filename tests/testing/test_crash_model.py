"""Litmus programs for the model of the media: each lists the exact states that a crash may leave while it runs, and
after it. docs/crash-model.md states the rules.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pmstore._core import ffi, lib
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.engine import KINDS, Options, explore
from pmstore.testing._store.recording import Recording

SIZE = 8192
X, Y, Z = 0, 64, 128  # lines; X and X + 8 are in one
A, B, C = 0, 512, 4096  # three sectors of 512 bytes; A and B are in one of 4096


class Step(NamedTuple):
    """One event. data: what it writes; or None. thread: 1 to 3: one of the store's; or one of the program's."""

    kind: int
    offset: int = 0
    length: int = 0
    data: bytes | None = None
    thread: int = 0

    def by(self, thread: int) -> Step:
        return self._replace(thread=thread)


def recorded(medium: str, base: bytes, steps: Sequence[Step]) -> Recording:
    """The steps as what a store did to `base`."""
    events = ffi.new("pm_event[]", len(steps))
    data = b""
    for event, step in zip(events, steps):
        event.kind, event.offset, event.length = step.kind, step.offset, step.length
        event.has_data, event.data, event.thread = step.data is not None, len(data), step.thread
        data += step.data or b""
    return Recording(medium, base, bytes(ffi.buffer(events)), data)


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def store(at: int, *values: int) -> Step:
    return Step(lib.PM_EVENT_STORE, at, 8 * len(values), b"".join(map(word, values)))


def stream(at: int, *values: int) -> Step:
    return Step(lib.PM_EVENT_STREAM, at, 8 * len(values), b"".join(map(word, values)))


def flush(at: int, length: int = 8) -> Step:
    return Step(lib.PM_EVENT_FLUSH, at, length, None)


def write(at: int, value: int, length: int = 8) -> Step:
    return Step(lib.PM_EVENT_WRITE, at, length, word(value) * (length // 8))


def sync_range(at: int, length: int = 8) -> Step:
    return Step(lib.PM_EVENT_SYNC_RANGE, at, length, None)


def grow(size: int) -> Step:
    return Step(lib.PM_EVENT_GROW, size, 0, None)


SYNC_FAILED = Step(lib.PM_EVENT_SYNC_FAILED, 0, 0, None)
FENCE = Step(lib.PM_EVENT_FENCE, 0, 0, None)
HAND_OVER = Step(lib.PM_EVENT_HAND_OVER, 0, 0, None)
SYNC = Step(lib.PM_EVENT_SYNC, 0, 0, None)
OPEN = Step(lib.PM_EVENT_OPEN, 0, 0, None)
DONE = Step(lib.PM_EVENT_COMMIT_END, 1, 0, None)


def states(
    medium: str, program: tuple[Step, ...], watched: tuple[int, ...], **options: Any
) -> tuple[set[Any], set[Any]]:
    """What the watched words (None: behind the end of the file) may be while the program runs, and after it."""
    recording = recorded(medium, bytes(SIZE), [*program, DONE])
    during: set[Any] = set()
    after: set[Any] = set()

    def note(image: bytes, acknowledged: int, started: int) -> None:
        values = tuple(struct.unpack_from("<Q", image, at)[0] if at + 8 <= len(image) else None for at in watched)
        (after if acknowledged else during).add(values)

    tally, _ = explore(recording, Options(**{"budget": 10**6, **options}), note, raw=True)
    assert tally.exhaustive
    return during | after, after


def every(*choices: tuple[Any, ...]) -> set[Any]:
    """All combinations."""
    out: set[Any] = {()}
    for choice in choices:
        out = {(*one, value) for one in out for value in choice}
    return out


# name: program, watched words, allowed while it runs, allowed after it
MEMORY: dict[str, tuple[tuple[Step, ...], tuple[int, ...], set[Any], set[Any]]] = {
    "a store": ((store(X, 1),), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a store, flushed": ((store(X, 1), flush(X)), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a store, flushed and fenced": ((store(X, 1), flush(X), FENCE), (X,), {(0,), (1,)}, {(1,)}),
    "a fence without a flush": ((store(X, 1), FENCE), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a flush that comes too early": ((flush(X), store(X, 1), FENCE), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a flush of another line": ((store(X, 1), flush(Y), FENCE), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a streamed store": ((stream(X, 1),), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "a streamed store, fenced": ((stream(X, 1), FENCE), (X,), {(0,), (1,)}, {(1,)}),
    "two lines, in any order": (
        (store(X, 1), store(Y, 1)),
        (X, Y),
        every((0, 1), (0, 1)),
        every((0, 1), (0, 1)),
    ),
    "one line, in order": (
        (store(X, 1), store(X + 8, 1)),
        (X, X + 8),
        {(0, 0), (1, 0), (1, 1)},
        {(0, 0), (1, 0), (1, 1)},
    ),
    "overwritten": ((store(X, 1), store(X, 2)), (X,), {(0,), (1,), (2,)}, {(0,), (1,), (2,)}),
    "stored again between flush and fence": (
        (store(X, 1), flush(X), store(X, 2), FENCE),
        (X,),
        {(0,), (1,), (2,)},
        {(1,), (2,)},
    ),
    "two words in one store, torn": (
        (store(X, 1, 1),),
        (X, X + 8),
        every((0, 1), (0, 1)),
        every((0, 1), (0, 1)),
    ),
    "a torn store behind another in its line": (
        (store(X, 1), store(X + 8, 1, 1)),
        (X, X + 8, X + 16),
        {(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)},
        {(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)},
    ),
    "a message, passed with a fence": (
        (store(X, 1), flush(X), FENCE, store(Y, 1), flush(Y), FENCE),
        (X, Y),
        {(0, 0), (1, 0), (1, 1)},
        {(1, 1)},
    ),
    "a message, passed without": (
        (store(X, 1), flush(X), store(Y, 1), flush(Y), FENCE),
        (X, Y),
        every((0, 1), (0, 1)),
        {(1, 1)},
    ),
    "streamed and stored, one fence": (
        (stream(X, 1), store(Y, 1), FENCE),
        (X, Y),
        every((0, 1), (0, 1)),
        {(1, 0), (1, 1)},
    ),
    "flushed by another thread than that of the fence": (
        (store(X, 1), flush(X).by(1), FENCE),
        (X,),
        {(0,), (1,)},
        {(0,), (1,)},
    ),
    "stored by one thread, flushed and fenced by another": (
        (store(X, 1).by(1), flush(X), FENCE),
        (X,),
        {(0,), (1,)},
        {(1,)},
    ),
    "streamed by a thread, and not fenced by it": (
        (stream(X, 1).by(2), stream(Y, 1), FENCE.by(1), FENCE),
        (X, Y),
        every((0, 1), (0, 1)),
        {(0, 1), (1, 1)},
    ),
    "flushed by two threads, one of which fences": (
        (store(X, 1), flush(X).by(1), store(X, 2), flush(X).by(2), FENCE.by(1)),
        (X,),
        {(0,), (1,), (2,)},
        {(1,), (2,)},
    ),
    "flushed by two threads, of which the later one fences": (
        (store(X, 1), flush(X).by(1), store(X, 2), flush(X).by(2), FENCE.by(2), store(X, 3), FENCE.by(1)),
        (X,),
        {(0,), (1,), (2,), (3,)},
        {(2,), (3,)},
    ),
    "streamed by one thread and handed over, fenced by another": (
        (stream(X, 1).by(4), HAND_OVER.by(4), FENCE.by(5)),
        (X,),
        {(0,), (1,)},
        {(1,)},
    ),
    "handed over, and not fenced": ((stream(X, 1), HAND_OVER), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "streamed by one thread, handed over by another": (
        (stream(X, 1).by(4), HAND_OVER.by(5), FENCE.by(5)),
        (X,),
        {(0,), (1,)},
        {(0,), (1,)},
    ),
    "stored again after the hand-over": (
        (store(X, 1), flush(X), HAND_OVER, store(X, 2), flush(X), FENCE.by(4)),
        (X,),
        {(0,), (1,), (2,)},
        {(1,), (2,)},
    ),
    "streamed by a thread of a store that is opened anew": (
        (stream(X, 1).by(1), OPEN, FENCE),
        (X,),
        {(0,), (1,)},
        {(1,)},
    ),
}

EADR: dict[str, tuple[tuple[Step, ...], tuple[int, ...], set[Any], set[Any]]] = {
    "stores are durable in order": ((store(X, 1), store(Y, 1)), (X, Y), {(0, 0), (1, 0), (1, 1)}, {(1, 1)}),
    "streamed stores are not": ((stream(X, 1),), (X,), {(0,), (1,)}, {(0,), (1,)}),
    "streamed stores need a fence": ((stream(X, 1), FENCE), (X,), {(0,), (1,)}, {(1,)}),
}

FILE: dict[str, tuple[tuple[Step, ...], tuple[int, ...], set[Any], set[Any]]] = {
    "a write": ((write(A, 1),), (A,), {(0,), (1,)}, {(0,), (1,)}),
    "a write, synced": ((write(A, 1), SYNC), (A,), {(0,), (1,)}, {(1,)}),
    "two sectors, in any order": ((write(A, 1), write(B, 1)), (A, B), every((0, 1), (0, 1)), every((0, 1), (0, 1))),
    "one write over two sectors, torn": (
        (write(A, 1, 1024),),
        (A, A + 504, B, B + 504),
        {(a, a, b, b) for a in (0, 1) for b in (0, 1)},
        {(a, a, b, b) for a in (0, 1) for b in (0, 1)},
    ),
    "one sector, in order": (
        (write(A, 1), write(A + 8, 1)),
        (A, A + 8),
        {(0, 0), (1, 0), (1, 1)},
        {(0, 0), (1, 0), (1, 1)},
    ),
    "a synced range, and what it does not cover": (
        (write(A, 1), write(B, 1), sync_range(B)),
        (A, B),
        every((0, 1), (0, 1)),
        {(0, 1), (1, 1)},
    ),
    "handed to the disk, which is not flushed": ((write(A, 1), flush(A)), (A,), {(0,), (1,)}, {(0,), (1,)}),
    "handed to the disk by another thread, and taken along": (
        (write(A, 1).by(1), flush(A).by(1), write(B, 1), sync_range(B)),
        (A, B),
        every((0, 1), (0, 1)),
        {(1, 1)},
    ),
    "handed to the disk, and taken along by the sync of another range": (
        (write(A, 1), flush(A), write(B, 1), sync_range(B)),
        (A, B),
        every((0, 1), (0, 1)),
        {(1, 1)},
    ),
    "written again after it was handed to the disk": (
        (write(A, 1), flush(A), write(A, 2), write(C, 1), sync_range(C)),
        (A, C),
        every((0, 1, 2), (0, 1)),
        {(1, 1), (2, 1)},
    ),
    "handed to the disk after the record that needs it": (
        (write(A, 1), write(C, 1), sync_range(C), flush(A)),
        (A, C),
        every((0, 1), (0, 1)),
        {(0, 1), (1, 1)},
    ),
    "handed to the disk behind the end, whose size is not synced": (
        (write(SIZE, 1), flush(SIZE), write(A, 1), sync_range(A)),
        (SIZE, A),
        every((None, 0, 1), (0, 1)),
        {(None, 1), (1, 1)},
    ),
    "not handed to the disk, for that failed": (
        (write(A, 1), SYNC_FAILED, flush(A), write(C, 1), sync_range(C)),
        (A, C),
        every((0, 1), (0, 1)),
        {(0, 1), (1, 1)},
    ),
    "growth": ((grow(SIZE + 512),), (A, SIZE), {(0, None), (0, 0)}, {(0, None), (0, 0)}),
    "growth, synced": ((grow(SIZE + 512), SYNC), (SIZE,), {(None,), (0,)}, {(0,)}),
    "growth, and a synced range before it": (
        (grow(SIZE + 512), write(A, 1), sync_range(A)),
        (A, SIZE),
        every((0, 1), (None, 0)),
        {(1, None), (1, 0)},
    ),
    "growth, and a synced range in it": (
        (grow(SIZE + 512), write(SIZE, 1), sync_range(SIZE)),
        (SIZE,),
        {(None,), (0,), (1,)},
        {(1,)},
    ),
    "a write behind the end": ((write(SIZE, 1),), (SIZE,), {(None,), (0,), (1,)}, {(None,), (0,), (1,)}),
    "a sync that failed, and one that did not": ((write(A, 1), SYNC_FAILED, SYNC), (A,), {(0,), (1,)}, {(0,), (1,)}),
    "written again after a sync that failed": (
        (write(A, 1), SYNC_FAILED, write(A, 1), SYNC),
        (A,),
        {(0,), (1,)},
        {(1,)},
    ),
    "its page written again after a sync that failed": (
        (write(A, 1), write(C, 1), SYNC_FAILED, write(B, 1), SYNC),
        (A, B, C),
        every((0, 1), (0, 1), (0, 1)),
        {(1, 1, 0), (1, 1, 1)},
    ),
    "a message, passed with a sync": (
        (write(A, 1), SYNC, write(C, 1), SYNC),
        (A, C),
        {(0, 0), (1, 0), (1, 1)},
        {(1, 1)},
    ),
}

LARGE_SECTORS: dict[str, tuple[tuple[Step, ...], tuple[int, ...], set[Any], set[Any]]] = {
    "one sector of 4096 bytes, in order": (
        (write(A, 1), write(B, 1)),
        (A, B),
        {(0, 0), (1, 0), (1, 1)},
        {(0, 0), (1, 0), (1, 1)},
    ),
    "two sectors of 4096 bytes": ((write(A, 1), write(C, 1)), (A, C), every((0, 1), (0, 1)), every((0, 1), (0, 1))),
}

CASES = [
    *(("memory", {}, name, case) for name, case in MEMORY.items()),
    *(("memory", {"eadr": True}, name, case) for name, case in EADR.items()),
    *(("file", {}, name, case) for name, case in FILE.items()),
    *(("file", {"sector": 4096}, name, case) for name, case in LARGE_SECTORS.items()),
]


@pytest.mark.parametrize(("medium", "options", "name", "case"), CASES, ids=[f"{c[0]}: {c[2]}" for c in CASES])
def test_litmus(medium: str, options: dict[str, Any], name: str, case: Any) -> None:
    program, watched, during, after = case
    kinds = frozenset({"exhaustive", "prefix", "all", "nothing"})  # without stale bytes
    assert states(medium, program, watched, kinds=kinds, **options) == (during, after)


def test_space_never_written_may_hold_anything() -> None:
    during, _ = states("file", (grow(SIZE + 512), SYNC), (A, SIZE))
    assert (0, 0) in during
    stale = {beyond for _, beyond in during} - {0, None}
    assert stale
    durable, _ = states("file", (grow(SIZE + 512), write(SIZE, 1, 512), SYNC), (SIZE,))
    _, after = states("file", (grow(SIZE + 512), write(SIZE, 1, 512), SYNC), (SIZE,))
    assert after == {(1,)}  # what was written and synced is not stale
    assert len(durable) > 3


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"stale", "torn", "exhaustive"}))
def test_each_kind_is_within_the_model(kind: str) -> None:
    """What a single kind of crash state makes is among all that there are."""
    program = (store(X, 1, 2), stream(Y, 4), store(Z, 3), flush(X), FENCE, store(Y + 8, 5), store(X, 6))
    watched = (X, X + 8, Y, Y + 8, Z)
    every_during, every_after = states("memory", program, watched)
    found: set[Any] = set()

    def note(image: bytes, acknowledged: int, started: int) -> None:
        found.add(tuple(struct.unpack_from("<Q", image, at)[0] for at in watched))

    explore(recorded("memory", bytes(SIZE), program), Options(budget=500, kinds=frozenset({kind})), note, raw=True)
    assert found and found <= every_during
    assert every_after <= every_during


def test_workers_leave_no_process(tmp_path: Path) -> None:
    recording = Recording("file", bytes(SIZE), b"", b"")
    options = Options(budget=8, workers=3)

    def fails(image: bytes, acknowledged: int, started: int) -> str | None:
        raise ZeroDivisionError

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(ZeroDivisionError):
        explore(recording, options, fails, raw=True)
    assert children.read_text() == before


@pytest.mark.parametrize("damage", ["null", "[]", '{"format": 1}', '{"format": 2}', '{"format": 3}'])
def test_what_is_no_recording(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "r"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recording.json", damage)
    with pytest.raises(CrashTestError, match="record"):
        Recording.load(path)
