"""A small crash explorer: every state that a crash could leave of a recorded run is recovered and judged.

The model of the medium, from what the `trace` medium records:

- memory: a line (64 bytes) keeps its stores in program order; a crash keeps any prefix of them, and of the next one
  any of its 8-byte pieces. A fence makes what was streamed, or flushed before it, durable; a cached store may become
  durable at any time on its own.
- file: a sector (512 bytes) keeps any prefix of its writes. A sync makes all durable, a range sync what lies in it.

The oracle: the recovered store equals the state after commit k, acknowledged <= k <= started, and is sound; recovered
again after a crash inside recovery it is the same; and it goes on: it commits, and that survives too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pmstore
from pmstore._core import lib

Snapshot = dict[str, Any]
Workload = Callable[[pmstore.Store, Callable[[], None]], None]


class Event(NamedTuple):
    kind: int
    offset: int
    length: int
    data: bytes


class Recording(NamedTuple):
    """A life: the durable bytes before it, its events, and the state after each commit."""

    medium: str
    base: bytes
    events: list[Event]
    states: dict[int, Snapshot]  # by sequence


class CrashError(AssertionError):
    """A crash that loses or mixes data."""


def snapshot(store: pmstore.Store) -> Snapshot:
    """Everything in the store, comparable with ==."""
    out: Snapshot = {}
    for name, value in store.items():
        if isinstance(value, np.ndarray):
            out[name] = (value.dtype.str, value.shape, value.flags.f_contiguous, value.tobytes())
        elif isinstance(value, pmstore.PersistentList):
            out[name] = ("list", list(value))
        else:
            out[name] = value
    return out


def record(
    path: Path, medium: str, workload: Workload, known: dict[int, Snapshot] | None = None, **options: Any
) -> Recording:
    """Run a workload on the store in `path`, recovery included, and record it. The workload calls its second argument
    after every commit."""
    base = path.read_bytes()
    store = pmstore.open(path, "r+", media=f"trace:{medium}", **options)
    states = dict(known or {})
    states[store.sequence] = snapshot(store)

    def committed() -> None:
        states[store.sequence] = snapshot(store)

    workload(store, committed)
    events = [Event(*event) for event in store._catalog.core.trace()]
    store._drop(discard=True)
    return Recording(medium, base, events, states)


# ---- the medium ------------------------------------------------------------------------------------------------------


class Cell:
    """A line or a sector with writes that may be lost. durable_at_fence: how many of them the next fence keeps."""

    __slots__ = ("durable_at_fence", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.durable_at_fence = 0


class Medium:
    """What is durable, and what is on its way."""

    def __init__(self, recording: Recording) -> None:
        self.memory = recording.medium == "memory"
        self.unit = 64 if self.memory else 512
        self.durable = bytearray(recording.base)
        self.cells: dict[int, Cell] = {}

    def feed(self, event: Event) -> None:
        kind, offset, length, data = event
        if kind in (lib.PM_EVENT_STORE, lib.PM_EVENT_STREAM, lib.PM_EVENT_WRITE):
            for unit in self._units(offset, length):
                start, end = max(offset, unit * self.unit), min(offset + length, (unit + 1) * self.unit)
                cell = self.cells.setdefault(unit, Cell())
                cell.writes.append((start, data[start - offset : end - offset]))
                if kind == lib.PM_EVENT_STREAM:
                    cell.durable_at_fence = len(cell.writes)
        elif kind == lib.PM_EVENT_FLUSH:
            for unit in self._units(offset, length):
                if unit in self.cells:
                    self.cells[unit].durable_at_fence = len(self.cells[unit].writes)
        elif kind == lib.PM_EVENT_FENCE:
            for unit, cell in list(self.cells.items()):
                self._settle(unit, cell.durable_at_fence)
        elif kind == lib.PM_EVENT_SYNC_RANGE:
            for unit in self._units(offset, length):
                if unit in self.cells:
                    self._settle(unit, len(self.cells[unit].writes))
        elif kind == lib.PM_EVENT_SYNC:
            for unit, cell in list(self.cells.items()):
                self._settle(unit, len(cell.writes))
        elif kind == lib.PM_EVENT_GROW:
            self.durable.extend(bytes(max(0, offset - len(self.durable))))

    def _units(self, offset: int, length: int) -> range:
        return range(offset // self.unit, (offset + length - 1) // self.unit + 1) if length else range(0)

    def _settle(self, unit: int, count: int) -> None:
        cell = self.cells[unit]
        _apply(self.durable, cell.writes[:count])
        cell.writes = cell.writes[count:]
        cell.durable_at_fence = 0
        if not cell.writes:
            del self.cells[unit]

    def image(self, kept: dict[int, int], torn: random.Random | None = None) -> bytes:
        """The bytes that a crash leaves if of each cell the first kept[unit] writes are kept. torn: on memory, also
        any 8-byte pieces of the next write of each cell."""
        image = bytearray(self.durable)
        for unit, cell in self.cells.items():
            count = kept.get(unit, 0)
            _apply(image, cell.writes[:count])
            if torn and self.memory and count < len(cell.writes):
                offset, data = cell.writes[count]
                for piece in range(0, len(data), 8):
                    if torn.random() < 0.5:
                        _apply(image, [(offset + piece, data[piece : piece + 8])])
        return bytes(image)

    def crashes(self, rng: random.Random, each: int) -> Iterator[tuple[str, bytes]]:
        """States that a crash now could leave: all that is on its way, nothing, each cell lost or kept alone (at most
        `each` of them), and random ones."""
        all_kept = {unit: len(cell.writes) for unit, cell in self.cells.items()}
        yield "all", self.image(all_kept)
        if not self.cells:
            return
        yield "nothing", self.image({})
        units = list(self.cells)
        for unit in rng.sample(units, min(each, len(units))):
            yield f"without {unit * self.unit:#x}", self.image({u: n for u, n in all_kept.items() if u != unit})
            yield f"only {unit * self.unit:#x}", self.image({unit: all_kept[unit]})
        edge = rng.randrange(len(units) + 1)
        yield f"the first {edge} cells", self.image({u: all_kept[u] for u in units[:edge]})
        yield f"the last {len(units) - edge} cells", self.image({u: all_kept[u] for u in units[edge:]})
        for _ in range(2):
            yield "random", self.image({u: rng.randint(0, n) for u, n in all_kept.items()}, rng)


def _apply(image: bytearray, writes: list[tuple[int, bytes]]) -> None:
    for offset, data in writes:
        image[offset : offset + len(data)] = data


# ---- judging ---------------------------------------------------------------------------------------------------------


class Crash(NamedTuple):
    label: str
    image: bytes
    acknowledged: int
    started: int


STATES_PER_EVENT = 10  # about


def crashes(recording: Recording, rng: random.Random, most: int, each: int = 4) -> Iterator[Crash]:
    """States of every crash point of the recording, or of so many points, taken at random, as give about `most` of
    them. Equal images in a row are judged once."""
    count = len(recording.events)
    points = set(rng.sample(range(count), min(count, -(-most // STATES_PER_EVENT))))
    medium = Medium(recording)
    acknowledged = started = min(recording.states)
    seen: set[int] = set()
    for number, event in enumerate(recording.events):
        if event.kind == lib.PM_EVENT_COMMIT_BEGIN:
            started = event.offset
        elif event.kind in (lib.PM_EVENT_COMMIT_END, lib.PM_EVENT_RECOVERED):
            acknowledged = started = event.offset
            seen.clear()  # what was good enough before is not any more
        medium.feed(event)
        if number not in points:
            continue
        for label, image in medium.crashes(rng, each):
            key = hash(image)
            if key not in seen:
                seen.add(key)
                yield Crash(f"event {number}, {label}", image, acknowledged, started)


class Judge:
    """Recovers images in `directory`, and compares. depth: crashes inside recovery and after it, within one another."""

    def __init__(self, directory: Path, seed: int, budget: int) -> None:
        self.path = directory / "crashed.pm"
        self.seed = seed
        self.left = budget
        self.rng = random.Random(seed)
        self.judged = 0

    def explore(self, recording: Recording, depth: int = 1) -> None:
        """CrashError, with what reproduces it, for the first crash that loses or mixes data. Within the budget crash
        points are taken at random; with a large one, all of them."""
        for crash in crashes(recording, self.rng, max(1, self.left)):
            if self.left <= 0:
                break
            self.left -= 1
            self.judged += 1
            where = f"{recording.medium}, seed {self.seed}: {crash.label}"
            sequence = self.recovers(recording, crash, where)
            if depth and self.left > 0 and self.rng.random() < 0.05:
                self.goes_on(recording, crash, sequence, where, depth)

    def recovers(self, recording: Recording, crash: Crash, where: str) -> int:
        self.path.write_bytes(crash.image)
        try:
            with pmstore.open(self.path, "r", media=recording.medium) as readers:
                read = snapshot(readers)
            with pmstore.open(self.path, "r+", media=recording.medium) as store:
                sequence, state, report = store.sequence, snapshot(store), store.check()
        except pmstore.Error as error:
            raise CrashError(f"{where}: does not open: {error}") from error
        if not crash.acknowledged <= sequence <= crash.started:
            raise CrashError(
                f"{where}: recovered to commit {sequence}, acknowledged {crash.acknowledged}, started {crash.started}"
            )
        if state != recording.states[sequence]:
            raise CrashError(f"{where}: commit {sequence} is mixed: {difference(state, recording.states[sequence])}")
        if read != state:
            raise CrashError(f"{where}: a reader sees something else: {difference(read, state)}")
        if not report.ok:
            raise CrashError(f"{where}: not sound: {report}")
        return sequence

    def goes_on(self, recording: Recording, crash: Crash, sequence: int, where: str, depth: int) -> None:
        """Recover under the recorder, commit on, and explore the crashes of that."""

        def more(store: pmstore.Store, committed: Callable[[], None]) -> None:
            for i in range(2):
                store[f"after/{i}"] = np.arange(700 * i + 3)
                for value in store.values():
                    if isinstance(value, np.ndarray) and value.dtype == "f8" and value.size:
                        value += 1
                store["after/count"] = i
                store.commit()
                committed()

        self.path.write_bytes(crash.image)
        before = {n: state for n, state in recording.states.items() if n == sequence}
        again = record(self.path, recording.medium, more, before)
        if again.states[sequence] != recording.states[sequence]:
            raise CrashError(f"{where}: recovered twice, and differently")
        outer, self.left = self.left, min(self.left, 60)
        budget = self.left
        try:
            self.explore(again, depth - 1)
        except CrashError as error:
            raise CrashError(f"{where}; then: {error}") from error
        finally:
            self.left = outer - (budget - self.left)


def difference(found: Snapshot, expected: Snapshot) -> str:
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    return f"names {sorted(names)[:5]} differ"
