"""Crashes, states and lost bytes in the user's terms: commits, names and rows instead of events and offsets."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pmstore
from pmstore._core import lib
from pmstore._display import count_text, name_text
from pmstore._store import hooks
from pmstore._values.values import encode
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.scratch import Scratch
from pmstore.testing._store import engine
from pmstore.testing._store.engine import Options, Schedule, Verdict
from pmstore.testing._store.recording import Recording

__all__ = [
    "Commit",
    "States",
    "Sandbox",
    "commits",
    "contents_text",
    "contents",
    "differences",
    "name_text",
    "phase",
    "read",
    "require_event",
    "shortened",
    "timeline",
    "verdict_text",
    "when_text",
]

Contents = dict[str, Any]

COMMIT_BEGIN: int = lib.PM_EVENT_COMMIT_BEGIN
COMMIT_END: int = lib.PM_EVENT_COMMIT_END
OPEN: int = lib.PM_EVENT_OPEN
RECOVERED: int = lib.PM_EVENT_RECOVERED
FENCES = frozenset({lib.PM_EVENT_FENCE, lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE})

MEMORY = Path("/dev/shm")
MOST_SHOWN = 60  # characters of a value
MOST_NAMES = 8
MOST_CONTENTS = 3  # names in one line of a store's contents
MOST_NAME = 40


# ---- stores from images


class Sandbox:
    """A directory of its own, in memory if there is a tmpfs, where images become stores for a moment."""

    def __init__(self) -> None:
        self._scratch = Scratch(MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.directory = self._scratch.path
        self._count = 0
        self._free: list[str] = []  # files to be overwritten, which is much cheaper than a new file for each image

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory."""
        self._scratch.close()

    def _write(self, image: bytes) -> str:
        if self._free:
            path = self._free.pop()
        else:
            self._count += 1
            path = os.path.join(self.directory, f"crash-{self._count}.pm")
        # Unbuffered: the file is one write, and no object of the io module is needed.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, len(image))
            view = memoryview(image)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        return path

    @contextlib.contextmanager
    def store(self, image: bytes, medium: str, mode: Any = "r") -> Iterator[pmstore.Store]:
        """The store in an image; uncommitted changes are dropped."""
        path = self._write(image)
        try:
            store = pmstore.open(path, mode, media=medium)  # type: ignore[arg-type]
            try:
                yield store
            finally:
                hooks.kill(store)
        finally:
            self._free.append(path)


def contents(store: pmstore.Store) -> Contents:
    """All values of a store, copied. Derived arrays are left out, because only the program knows their functions."""
    return {name: _copied(hooks.value_of(store, name)) for name in hooks.names_of(store)}


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value, order="K")
    if isinstance(value, pmstore.Parts):
        return pmstore.Parts(value.type_name, {name: _copied(part) for name, part in value.items()})
    return list(value) if isinstance(value, pmstore.PersistentList) else value


# ---- moments of the run


class Commit(NamedTuple):
    """A commit of a recording: the numbers of events that had happened when it began and when it was acknowledged."""

    sequence: int
    begun: int
    acknowledged: int | None


def commits(recording: Recording) -> list[Commit]:
    """The commits that began in a recording, in order."""
    found: list[Commit] = []
    for number in range(len(recording)):
        event = recording.event(number)
        if event.kind == COMMIT_BEGIN:
            found.append(Commit(event.offset, number + 1, None))
        elif event.kind == COMMIT_END and found and found[-1].sequence == event.offset:
            found[-1] = found[-1]._replace(acknowledged=number + 1)
    return [commit for i, commit in enumerate(found) if not _repeated(found, i)]


def _repeated(found: Sequence[Commit], i: int) -> bool:
    """Whether an earlier commit of the same number was begun and given up (it had no changes, or failed)."""
    return found[i].acknowledged is None and i + 1 < len(found) and found[i + 1].sequence == found[i].sequence


def phase(recording: Recording, event: int) -> str:
    """The moment of a crash after so many events, in words: "after commit 3 began, before its fence"."""
    return next(itertools.islice(phases(recording), event, None), "after the end")


def phases(recording: Recording) -> Iterator[str]:
    """The moments of all crashes: before the first event, after it, and so on."""
    coming = [(commit.begun, commit.sequence) for commit in commits(recording)]
    word = "fence" if recording.medium == "memory" else "sync"
    begun: int | None = None
    acknowledged = run = 0
    fenced = ready = False
    for number in range(len(recording) + 1):
        if number:
            kind, offset = recording.event(number - 1)[:2]
            if kind == OPEN:
                begun, ready, run = None, False, run + 1
            elif kind == COMMIT_BEGIN:
                begun, fenced = offset, False
            elif kind in (COMMIT_END, RECOVERED):
                acknowledged, begun, ready = offset, None, True
            elif kind in FENCES:
                fenced = True
        while coming and coming[0][0] <= number:
            del coming[0]
        if begun is not None:
            after = f"after the {word} of commit {begun}, before it was acknowledged"
            yield after if fenced else f"after commit {begun} began, before its {word}"
        elif not ready:
            yield f"inside the recovery of run {run}" if run > 1 else "while the store was being opened"
        elif not acknowledged:
            yield f"before commit {coming[0][1]} began" if coming else "before any commit"
        else:
            then = f", before commit {coming[0][1]} began" if coming else ""
            yield f"after commit {acknowledged} was acknowledged{then}"


# ---- committed states


class States:
    """The contents after each commit of a recording. They are read on demand."""

    def __init__(self, recording: Recording, options: Options, sandbox: Sandbox) -> None:
        self._recording = recording
        self._options = options
        self._sandbox = sandbox
        self._known: dict[int, Contents | None] = {}
        self._events = recording.ends()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._events))

    def image(self, sequence: int) -> bytes | None:
        """The file directly after a commit, with all writes kept."""
        event = self._events.get(sequence)
        if event is None:
            return None
        return engine.image(self._recording, Schedule(event, "all"), self._options)

    def __getitem__(self, sequence: int) -> Contents | None:
        """The contents after a commit; None if they can't be read, or no such commit was seen."""
        if sequence not in self._known:
            image = self.image(sequence)
            self._known[sequence] = None if image is None else read(image, self._recording.medium, self._sandbox)
        return self._known[sequence]


def read(image: bytes, medium: str, sandbox: Sandbox) -> Contents | None:
    """The contents of an image; None if it can't be opened or read."""
    try:
        with sandbox.store(image, medium) as store:
            return contents(store)
    except pmstore.Error:
        return None


# ---- values and differences


def shortened(value: Any) -> str:
    """A value on one line, cut to a bounded length."""
    if isinstance(value, np.ndarray):
        with np.printoptions(threshold=6, edgeitems=3, linewidth=10_000):
            text = " ".join(str(value).split())
    else:
        text = str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def contents_text(state: Contents, others: Sequence[Contents | None] = ()) -> str:
    """The contents on one line: ``a = 70, b = 30``. If there are many, those that differ from the other contents
    come first."""
    if not state:
        return "empty"

    def same(name: str) -> int:
        return sum(name in other and equal(state[name], other[name]) for other in others if other is not None)

    names = list(state)
    if len(names) > MOST_CONTENTS:
        names.sort(key=same)
    shown = [f"{short_name(name)} = {shortened(state[name])}" for name in names[:MOST_CONTENTS]]
    more = len(state) - len(shown)
    return ", ".join(shown) + (f", and {count_text(more, 'more name')}" if more > 0 else "")


def short_name(name: str) -> str:
    """A name, cut to a bounded length."""
    text = name_text(name)
    return text if len(text) <= MOST_NAME else text[: MOST_NAME - 1] + "…"


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, bytes of arrays included (NaN equals itself)."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
            return False
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or repr(one) == repr(other)  # NaN, at any depth
    except ValueError:  # arrays in it
        return encode(one) == encode(other)


def differences(found: Contents, expected: Contents, states: States | None, sequence: int, most: int) -> list[str]:
    """The differences, one sentence for each name. sequence: the commit whose state is `expected`; `most`: the
    newest commit that the store may be at; states: other possible sources of the contents.
    """
    out = []
    for name in sorted({*found, *expected}):
        if name not in found:
            out.append(f"{name!r} of commit {sequence} is missing")
        elif name not in expected:
            out.append(f"{name!r} is there, which commit {sequence} does not have")
        elif not equal(found[name], expected[name]):
            out.append(_difference(name, found[name], expected[name], states, sequence, most))
    return out


def _difference(name: str, found: Any, expected: Any, states: States | None, sequence: int, most: int) -> str:
    arrays = isinstance(found, np.ndarray) and isinstance(expected, np.ndarray)
    if arrays and found.dtype == expected.dtype and found.shape == expected.shape:
        rows = changed_rows(found, expected)
        return f"array {name!r} {rows_text(found, rows)} {_origin(name, found, rows, states, sequence, most)}"
    if arrays and found.dtype != expected.dtype:
        return f"array {name!r} has dtype {found.dtype}, not {expected.dtype} as in commit {sequence}"
    if arrays:
        return f"array {name!r} has shape {found.shape}, not {expected.shape} as in commit {sequence}"
    if type(found) is not type(expected):
        return f"{name!r} is of type {_type(found)}, not {_type(expected)} as in commit {sequence}"
    origin = _equals(name, found, states, sequence, most)
    where = f", as in commit {origin}" if origin is not None else ", as in no commit at all"
    return f"{name!r} is {shortened(found)}{where}, not {shortened(expected)} as in commit {sequence}"


def _type(value: Any) -> str:
    return "array" if isinstance(value, np.ndarray) else type(value).__name__


def _others(states: States | None, sequence: int, most: int) -> list[int]:
    """Other commits, the nearest first; earlier ones before later ones."""
    if states is None:
        return []
    known = [n for n in states if n != sequence and n <= most + 1]
    return sorted(known, key=lambda n: (n > sequence, abs(n - sequence)))


def _equals(name: str, found: Any, states: States | None, sequence: int, most: int) -> int | None:
    for other in _others(states, sequence, most):
        state = states[other] if states is not None else None
        if state is not None and name in state and equal(found, state[name]):
            return other
    return None


def changed_rows(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> list[int]:
    """The rows (indices of the first axis) whose bytes differ; [0] for an array without axes."""
    if not found.ndim or not len(found):
        return [0]
    return [i for i in range(len(found)) if found[i].tobytes() != expected[i].tobytes()]


def rows_text(array: np.ndarray[Any, Any], rows: Sequence[int]) -> str:
    """``rows 4–7``, ``row 3``, ``elements 0–2`` (of one axis), ``rows 4–7 and others up to 90``."""
    if not array.ndim:
        return "(its only element)"
    if len(rows) == len(array):
        return f"(all {count_text(len(rows), 'row' if array.ndim > 1 else 'element')})"
    noun = "row" if array.ndim > 1 else "element"
    end = 0
    while end + 1 < len(rows) and rows[end + 1] == rows[end] + 1:
        end += 1
    text = f"{noun} {rows[0]}" if not end else f"{noun}s {rows[0]}–{rows[end]}"
    rest = len(rows) - end - 1
    return text + (f" (and {rest} more up to {rows[-1]})" if rest else "")


def _origin(name: str, found: Any, rows: list[int], states: States | None, sequence: int, most: int) -> str:
    verb = "is" if not found.ndim or len(rows) == 1 else "are"
    for other in _others(states, sequence, most):
        state = states[other] if states is not None else None
        old = None if state is None else state.get(name)
        if not isinstance(old, np.ndarray) or old.dtype != found.dtype or old.shape != found.shape:
            continue
        if all(old[i].tobytes() == found[i].tobytes() for i in rows) if found.ndim else equal(old, found):
            if other < sequence:
                return f"{verb} older than commit {sequence}: as in commit {other}"
            return f"{verb} newer than commit {sequence}: as in commit {other}"
    return f"{verb} of no commit at all: {shortened(found[rows[0]] if found.ndim else found)} is there"


# ---- the complete sentence


def verdict_text(verdict: Verdict, found: Contents | None, states: States) -> list[str]:
    """The problem in the user's terms. The first line has the most important facts."""
    n, old, new = verdict.sequence, verdict.acknowledged, verdict.started
    if verdict.problem == "open":
        return [verdict.text if verdict.text.startswith("the store") else f"the store does not open: {verdict.text}"]
    if verdict.problem == "sequence" and n is not None:
        if n < old:
            return [f"commit {old}, which was acknowledged, is lost: the store is back at commit {n}"]
        return [f"the store is at commit {n}, though only {'commit' if new else 'state'} {new} had begun"]
    if verdict.problem == "mixed" and n is not None:
        expected = states[n]
        if found is not None and expected is not None:
            lines = differences(found, expected, states, n, new)
            if lines:
                return [lines[0].replace(f"than commit {n}:", f"than {_standing(n, old)} {n}:"), *lines[1:MOST_NAMES]]
        return [f"the store is not what commit {n} left: {verdict.text}"]
    if verdict.problem == "unsound":
        return [f"the store is damaged: {verdict.text}"]
    if verdict.problem == "reader":
        return [f"opened read-only, the store has other contents than after recovery: {verdict.text}"]
    if verdict.problem == "write":
        return [f"after the recovery it can't go on: {verdict.text}"]
    if verdict.problem == "check":
        return verdict.text.splitlines() or ["the check failed"]
    return [verdict.text or verdict.problem]


def _standing(sequence: int, acknowledged: int) -> str:
    return "acknowledged commit" if sequence <= acknowledged else "commit"


def when_text(recording: Recording, schedule: Schedule, verdict: Verdict | None) -> str:
    """The moment of the crash, and of the second one if there is one."""
    moment = phase(recording, schedule.event)
    text = f"process killed {moment}" if schedule.killed else f"crash {moment}"
    inner = schedule.then
    if inner is not None:
        outer_begun = max((c.sequence for c in commits(recording) if c.begun <= schedule.event), default=0)
        more = 0 if verdict is None else verdict.started - outer_begun
        where = "in the recovery or soon after it"
        if more > 0:
            where = f"after the recovery and {count_text(more, 'more commit')}"
        second, on = "a second crash", inner.event
        if schedule.killed:
            second, on = "a crash of the machine", inner.event - schedule.event
        text += f"; then {second}, {where} ({count_text(on, 'event')} on)"
    return text


def require_event(recording: Recording, event: int) -> None:
    """Raises CrashTestError if there is no such moment."""
    if not 0 <= event <= len(recording):
        raise CrashTestError(f"the recording has events 0 to {len(recording)}, and no {event}")


def timeline(recording: Recording) -> list[str]:
    """The moments of a run, one line for each stretch of events with the same phase."""
    lines = ["       events  a crash then is …"]
    first = 0
    for text, stretch in itertools.groupby(phases(recording)):
        last = first + sum(1 for _ in stretch) - 1
        lines.append(f"{f'{first}–{last}' if last > first else first:>13}  {text}")
        first = last + 1
    return lines
