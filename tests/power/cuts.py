"""The states that a power cut may leave on the disk.

The disk has a volatile cache. A write is done when the disk reports it. It is durable when a flush has ended that was
requested after the write was done; with FUA, it is durable when it is done. A write that requests a flush before it
(PREFLUSH) begins when that flush has ended. Of all other writes, any sectors may be lost: after the cut, each sector
has the bytes of any write since its last durable one, or of that one. So writes overtake each other and are torn at
every sector, those in flight included. A sector is written whole or not at all.

docs/power.md has the same rules, and the limits of the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .requests import SECTOR, Recording, Request, sectors_of

KINDS = ("all", "nothing", "lost-one", "kept-one", "random", "prefix", "torn", "torn-one")
"""The writes that are not durable and that a cut keeps. all, nothing; lost-one, kept-one: all except one, only one;
random: few, half or most of them; prefix: the first ones. These kinds lose or keep whole writes. torn: few, half or
most of the sectors; torn-one: all, or none, of the other writes, and some sectors of one write."""


class Cut(NamedTuple):
    """at: a place in the trace; everything before it has happened. seed: of all random choices."""

    at: int
    kind: str
    seed: int


class State(NamedTuple):
    """The writes of a recording at a place, as indices of requests. durable: durable ones; open: the others, whose
    sectors may be kept or lost; needs: for some of those, the place where the flush before them was queued.
    """

    durable: list[int]
    open: list[int]
    needs: dict[int, int]


def state(recording: Recording, at: int, honest: bool = True) -> State:
    """honest: whether the disk obeys flushes and FUA."""
    flushed = 0  # writes done before this place are durable
    for request in recording.requests:
        if request.done < at and (request.preflush or not request.sectors):
            flushed = max(flushed, request.queued)
    durable, open_, needs = [], [], {}
    for i, request in enumerate(recording.requests):
        if request.queued >= at:
            break
        if not request.sectors:
            continue
        if honest and (request.done < flushed or request.durable_at < at):
            durable.append(i)
            continue
        open_.append(i)
        if honest and request.preflush and request.done >= at:
            needs[i] = request.queued
    return State(durable, open_, needs)


def choose(recording: Recording, now: State, cut: Cut) -> dict[int, np.ndarray]:
    """The sectors that are kept of each write that is not durable, as booleans."""
    rng = random.Random(cut.seed)
    requests = recording.requests
    share = rng.choice((0.1, 0.5, 0.9))
    one = rng.choice(now.open) if now.open else -1
    others = rng.random() < 0.5
    first = rng.randrange(len(now.open) + 1)
    whole: dict[str, Callable[[int, int], bool]] = {
        "all": lambda n, i: True,
        "nothing": lambda n, i: False,
        "lost-one": lambda n, i: i != one,
        "kept-one": lambda n, i: i == one,
        "random": lambda n, i: rng.random() < share,
        "prefix": lambda n, i: n < first,
    }
    kept = {}
    for n, i in enumerate(now.open):
        sectors = requests[i].sectors
        if cut.kind == "torn" or (cut.kind == "torn-one" and i == one):
            kept[i] = np.array([rng.random() < share for _ in range(sectors)])
        else:
            keep = others if cut.kind == "torn-one" else whole[cut.kind](n, i)
            kept[i] = np.full(sectors, keep)
    # A write after its own flush: if any part of it is kept, so is everything that was done before it was queued.
    needed = max((queued for i, queued in now.needs.items() if kept[i].any()), default=0)
    for i in now.open:
        if requests[i].done < needed:
            kept[i][:] = True
    return kept


class Images:
    """Images of the disk after cuts of a recording, in the order of the cuts' places.

    base: the disk before the recording. It is changed, and holds the durable state.
    """

    def __init__(self, recording: Recording, base: np.ndarray, honest: bool = True) -> None:
        self.recording, self.honest = recording, honest
        self.disk = base.reshape(-1, SECTOR)
        self.last = np.full(len(self.disk), -1, np.int64)  # the write that the bytes of each sector come from
        self.put: set[int] = set()

    def _write(self, i: int, keep: np.ndarray | None, disk: np.ndarray) -> None:
        """Write the kept sectors of a request, except where later ones are durable."""
        request = self.recording.requests[i]
        mine = self.last[request.sector : request.end] < i
        if keep is not None:
            mine &= keep
        disk[request.sector : request.end][mine] = sectors_of(request.data)[mine]

    def advance(self, now: State) -> None:
        for i in now.durable:
            if i not in self.put:
                self._write(i, None, self.disk)
                request = self.recording.requests[i]
                np.maximum(self.last[request.sector : request.end], i, out=self.last[request.sector : request.end])
                self.put.add(i)

    def patches(self, cut: Cut) -> Iterator[tuple[int, bytes]]:
        """The changes to `disk`, as offset and bytes, for the image of a cut. Cuts come in the order of places."""
        now = state(self.recording, cut.at, self.honest)
        self.advance(now)
        for i, keep in choose(self.recording, now, cut).items():
            request = self.recording.requests[i]
            keep = keep & (self.last[request.sector : request.end] < i)
            rows = sectors_of(request.data)
            for begin, end in _runs(keep):
                yield (request.sector + begin) * SECTOR, rows[begin:end].tobytes()

    def image(self, cut: Cut) -> np.ndarray:
        """The whole image, as bytes."""
        patches = list(self.patches(cut))
        made = self.disk.reshape(-1).copy()
        for offset, contents in patches:
            made[offset : offset + len(contents)] = np.frombuffer(contents, np.uint8)
        return made


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.view(np.int8), [0]))))
    return zip(edges[::2].tolist(), edges[1::2].tolist())


def plan(recording: Recording, count: int, seed: int, since: int = 0) -> list[Cut]:
    """Cuts of a recording, in the order of their places, from a place on.

    A quarter are where a flush, or a write that is durable by itself, is about to end: most writes are in flight there.
    A quarter are soon after a write was queued. A quarter are directly after a line of the workload, whose
    acknowledgement must not be lost. The others are anywhere.
    """
    rng = random.Random(seed)
    flushing = [r for r in recording.requests if r.preflush or r.fua or not r.sectors or r.durable_at < recording.end]
    ends = [min(r.done, r.durable_at) for r in flushing if since < r.done < recording.end]
    said = [at + 1 for at, _ in recording.said if at >= since]
    soon = [min(r.queued + rng.randrange(1, 9), recording.end) for r in recording.requests if r.queued >= since]
    out = []
    for n in range(count):
        places = (ends, soon, said, None)[n % 4]
        at = rng.choice(places) if places else rng.randrange(since + 1, recording.end + 1)
        out.append(Cut(at, KINDS[rng.randrange(len(KINDS))], rng.randrange(1 << 32)))
    return sorted(out)


def pending(recording: Recording, at: int) -> list[Request]:
    """The writes that are not durable at a place: for reports."""
    return [recording.requests[i] for i in state(recording, at).open]
