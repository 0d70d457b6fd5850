"""The choice of crash states, and the reduction of a failing state to its essential losses."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.evaluator import Evaluator
from pmstore.testing._files.model import Image, Lost, Model

__all__ = ["FILESYSTEMS", "SECTORS", "Found", "Options", "State", "Tally", "explore", "prove_check", "shrink"]

FILESYSTEMS = ("posix", "ext4")
SECTORS = (512, 4096)
ENOUGH = 400  # successive states that were all known: the kind is exhausted
MOST_SHRINKING = 500  # states that are evaluated to shrink a failure
MOST_EARLIER = 150  # earlier points that are tried


class Options(NamedTuple):
    """The options of an exploration."""

    filesystem: str = "posix"
    sector: int = 512
    stale: int = 0
    """0: space that was never written reads as zeros; otherwise the seed of its contents."""
    budget: int = 1000
    """The number of distinct states to evaluate."""
    seed: int = 1
    jobs: int = 1

    def verified(self) -> Options:
        """The options themselves. Raises CrashTestError for an impossible value."""
        if self.filesystem not in FILESYSTEMS:
            raise CrashTestError(f"filesystem is one of {', '.join(FILESYSTEMS)}, not {self.filesystem!r}")
        for name in ("sector", "stale", "budget", "seed", "jobs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise CrashTestError(f"{name} is a whole number, not {value!r}")
        if self.sector not in SECTORS:
            raise CrashTestError(f"sector is 512 or 4096 bytes, not {self.sector}")
        if self.budget < 1:
            raise CrashTestError(f"a budget of {self.budget} evaluates no state: give at least 1, or leave it out")
        if self.jobs < 1:
            raise CrashTestError(f"{self.jobs} checks at once evaluate no state: give at least 1")
        if self.stale < 0 or self.seed < 0:
            raise CrashTestError("stale and seed are numbers from 0")
        return self


class State(NamedTuple):
    """A crash: after so many events, with these pieces lost."""

    point: int
    lost: Lost
    kind: str


class Found(NamedTuple):
    """A state that the check did not accept, and the check's complaint."""

    state: State
    text: str


class Tally(NamedTuple):
    """The number of states that were evaluated."""

    points: int
    evaluated: int
    exhaustive: bool
    possible: float
    """log10 of the number of states in the model, before equal ones are counted once; if not exhaustive, of an upper
    bound.
    """
    by_kind: dict[str, int]
    seconds: float


class Search:
    """One pass over the states of a model."""

    def __init__(self, model: Model, options: Options) -> None:
        self.model = model
        self.options = options
        self.random = random.Random(options.seed)
        self.said = [0]
        for event in model.recording.events:
            self.said.append(self.said[-1] + (event.kind == "said"))
        self.pending = [model.pending_at(point) for point in range(model.points)]
        self.seen: set[bytes] = set()
        self.by_kind: dict[str, int] = {}
        self.possible = self._possible()
        self.exhaustive = self._small()

    def _possible(self) -> float:
        """log10 of the number of states, if each piece needed only the earlier ones of its own chain."""
        total = 0.0
        for pending in self.pending:
            lengths: dict[tuple[object, ...], int] = {}
            for n in pending:
                piece = self.model.pieces[n]
                key = (n,) if piece.kind == "entry" else (piece.kind, piece.inode, piece.kind == "data" and piece.place)
                lengths[key] = lengths.get(key, 0) + 1
            log = sum(math.log10(length + 1) for length in lengths.values())
            total = max(total, log) + math.log10(1 + 10 ** -abs(total - log))
        return total

    def _small(self) -> bool:
        """Whether all distinct states fit the budget. Many are equal, so that more are looked at."""
        if any(len(pending) > 400 for pending in self.pending):
            return False
        most = max(2000, 8 * self.options.budget)
        states = list(itertools.islice(self._all(), most + 1))
        if len(states) > most:
            return False
        if len(states) > self.options.budget:
            distinct = set()
            for point, lost in states:
                distinct.add(self._digest(point, self.model.image(point, lost)))
                if len(distinct) > self.options.budget:
                    return False
        self.possible = math.log10(len(states))
        return True

    def _all(self) -> Iterator[tuple[int, Lost]]:
        return ((point, lost) for point in range(self.model.points) for lost in self.model.states(point))

    def _digest(self, point: int, image: Image) -> bytes:
        """A digest of what a check gets: the files, and what was said."""
        key = hashlib.blake2b(digest_size=16)
        key.update(self.said[point].to_bytes(8, "little"))
        for name, file in image.items():
            key.update(f"{len(name)} {name} {file.kind} ".encode("utf-8", "surrogateescape") + file.digest)
        return key.digest()

    def new(self, state: State) -> Image | None:
        """The image of a state, or None if an equal one has been seen."""
        image = self.model.image(state.point, state.lost)
        digest = self._digest(state.point, image)
        if digest in self.seen:
            return None
        self.seen.add(digest)
        self.by_kind[state.kind] = self.by_kind.get(state.kind, 0) + 1
        return image

    def states(self) -> Iterator[tuple[State, Image]]:
        """New states, the most likely failures first, until there are no more or the budget is spent."""
        budget = self.options.budget
        kinds: list[tuple[str, Callable[[int], Iterator[Lost]]]] = [
            ("in order", lambda point: iter([frozenset()])),
            ("nothing", lambda point: iter([frozenset(self.pending[point])])),
            ("one lost", self._one_lost),
            ("one kept", self._one_kept),
            ("prefix", self._prefixes),
            ("piece lost", self._piece_lost),
            ("piece kept", self._piece_kept),
            ("pair", self._pairs),
            ("random", self._random),
        ]
        if self.exhaustive:
            kinds = [*kinds[:2], ("exhaustive", self.model.states)]
        left = budget
        for number, (kind, source) in enumerate(kinds):
            if left == 0:
                break
            # A kill at each point comes first. Later kinds get the rest of a share that was not needed.
            share = left if self.exhaustive else max(1, left // (3 if number < 2 else len(kinds) - number))
            for state, image in itertools.islice(self._round(kind, source), share):
                yield state, image
                left -= 1

    def _round(self, kind: str, source: Callable[[int], Iterator[Lost]]) -> Iterator[tuple[State, Image]]:
        """A state of each point in turn."""
        points = list(range(self.model.points))
        if not self.exhaustive:
            self.random.shuffle(points)
        turns = deque((point, source(point)) for point in points)
        known = 0
        while turns and (self.exhaustive or known < ENOUGH + len(points)):
            point, lost_sets = turns.popleft()
            lost = next(lost_sets, None)
            if lost is None:
                continue
            turns.append((point, lost_sets))
            state = State(point, lost, kind)
            image = self.new(state)
            if image is None:
                known += 1
            else:
                known = 0
                yield state, image

    # ---- kinds of states

    def _groups(self, point: int) -> list[list[int]]:
        """Pieces that are likely to be lost or kept together: of all files, of one file, of one event."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for n in self.pending[point]:
            piece = self.model.pieces[n]
            contents = piece.kind != "entry"
            for key in (
                (piece.kind,),
                ("contents", contents),
                (piece.inode, piece.kind),
                (piece.inode, "contents", contents),
                (piece.event,),
                (piece.event, piece.kind),
            ):
                groups.setdefault(key, []).append(n)
        found = {tuple(group): group for group in groups.values()}
        return list(found.values())

    def _one_lost(self, point: int) -> Iterator[Lost]:
        for group in self._groups(point):
            yield self.model.close(point, group, self.pending[point])

    def _one_kept(self, point: int) -> Iterator[Lost]:
        for group in self._groups(point):
            yield self.model.keep(group, self.pending[point])

    def _prefixes(self, point: int) -> Iterator[Lost]:
        pending = self.pending[point]
        events = sorted({self.model.pieces[n].event for n in pending})
        for event in self.random.sample(events, len(events)):
            yield self.model.close(point, [n for n in pending if self.model.pieces[n].event >= event], pending)

    def _shuffled(self, point: int) -> list[int]:
        return self.random.sample(self.pending[point], len(self.pending[point]))

    def _piece_lost(self, point: int) -> Iterator[Lost]:
        for n in self._shuffled(point):
            yield self.model.close(point, [n], self.pending[point])

    def _piece_kept(self, point: int) -> Iterator[Lost]:
        for n in self._shuffled(point):
            yield self.model.keep([n], self.pending[point])

    def _pairs(self, point: int) -> Iterator[Lost]:
        pairs = list(itertools.islice(itertools.combinations(self._groups(point), 2), 5000))
        self.random.shuffle(pairs)
        for one, other in pairs:
            yield self.model.close(point, [*one, *other], self.pending[point])
            yield self.model.keep([*one, *other], self.pending[point])

    def _random(self, point: int) -> Iterator[Lost]:
        groups = self._groups(point)
        while groups:
            rate = self.random.choice((0.05, 0.2, 0.5, 0.8))
            if self.random.random() < 0.5:
                lost = [n for group in groups if self.random.random() < rate for n in group]
            else:
                lost = [n for n in self.pending[point] if self.random.random() < rate]
            yield self.model.close(point, lost, self.pending[point])


def explore(
    model: Model, evaluate: Evaluator, options: Options, progress: Callable[[int, int], None] | None = None
) -> tuple[Tally, Found | None]:
    """Evaluates states until one fails, none is left, or the budget is spent. The same seed gives the same states."""
    start = time.perf_counter()
    search = Search(model, options)
    most = min(options.budget, round(10**search.possible)) if search.exhaustive else options.budget
    evaluated = 0
    found: Found | None = None
    with contextlib.ExitStack() as cleanup:
        pool = ThreadPoolExecutor(options.jobs)
        cleanup.callback(pool.shutdown, cancel_futures=True)
        cleanup.push(lambda kind, *rest: evaluate.stop() if kind is not None else None)
        running: deque[tuple[State, Future[str | None] | str | None]] = deque()
        states = search.states()
        more = True
        while more or running:
            while more and len(running) < (2 * options.jobs if options.jobs > 1 else 1):
                item = next(states, None)
                if item is None:
                    more = False
                    break
                state, image = item
                said = model.said(state.point)
                running.append(
                    (state, pool.submit(evaluate, image, said) if options.jobs > 1 else evaluate(image, said))
                )
            if not running:
                break
            state, answer = running.popleft()
            text = answer.result() if isinstance(answer, Future) else answer
            evaluated += 1
            if progress is not None:
                progress(evaluated, most)
            if text is not None:
                found = Found(state, text)
                break
    seconds = time.perf_counter() - start
    exhaustive = search.exhaustive and found is None
    return Tally(model.points, evaluated, exhaustive, search.possible, search.by_kind, seconds), found


def prove_check(model: Model, evaluate: Evaluator) -> str | None:
    """Tries the check on the finished run, and returns a remark if it may be too lenient.

    Raises
    ------
    CrashTestError
        Without any crash, the check does not accept the files that the program left, or those from before it ran.
    """
    text = evaluate(model.image(model.points - 1), model.recording.said)
    if text is not None:
        raise CrashTestError(f"the check fails on the finished files, without any crash: {text}. Fix the check first")
    text = evaluate(model.image(0), b"")
    if text is not None:
        raise CrashTestError(
            f"the check refuses the directory as it was before the program ran: {text}. A crash may leave it like "
            "that: accept it (`if not path.exists(): return`), or put a version 0 there first"
        )
    if model.recording.said and evaluate(model.image(0), model.recording.said) is None:
        return (
            "the check passes even if everything that was printed as saved is gone: use what was said "
            "({said} in --check) if that must not happen"
        )
    return None


# ---- shrinking


def shrink(
    model: Model, evaluate: Evaluator, found: Found, progress: Callable[[int, int], None] | None = None
) -> Found:
    """The same failure with as few lost pieces, and as early, as can be found."""
    left = MOST_SHRINKING
    known: dict[tuple[int, Lost], str | None] = {}

    def fails(point: int, lost: Lost) -> str | None:
        nonlocal left
        if (point, lost) not in known:
            if left <= 0:
                return None
            left -= 1
            known[point, lost] = evaluate(model.image(point, lost), model.said(point))
            if progress is not None:
                progress(MOST_SHRINKING - left, MOST_SHRINKING)
        return known[point, lost]

    point, lost, text = found.state.point, found.state.lost, found.text
    for _ in range(2):
        lost, text = _fewer(model, point, lost, text, fails)
        for earlier in range(max(0, point - MOST_EARLIER), point):
            remaining = lost & frozenset(model.pending_at(earlier))
            answer = fails(earlier, remaining) if remaining or not lost else None
            if answer is not None:
                point, lost, text = earlier, remaining, answer
                break
    return Found(State(point, lost, found.state.kind), text)


def _fewer(
    model: Model, point: int, lost: Lost, text: str, fails: Callable[[int, Lost], str | None]
) -> tuple[Lost, str]:
    """Delta debugging: restores whole files, then events, then halves of pieces, while the failure stays."""

    def without(pieces: list[int]) -> Lost:
        return model.keep([*pieces, *(n for n in model.pending_at(point) if n not in lost)], model.pending_at(point))

    for field in ("inode", "event"):
        for value in sorted({getattr(model.pieces[n], field) for n in lost}, reverse=True):
            group = [n for n in lost if getattr(model.pieces[n], field) == value]
            fewer = without(group)
            answer = fails(point, fewer) if group and fewer != lost else None
            if answer is not None:
                lost, text = fewer, answer
    size = len(lost) // 2
    while size >= 1:
        ordered = sorted(lost)
        for start in range(0, len(ordered), size):
            group = [n for n in ordered[start : start + size] if n in lost]
            fewer = without(group)
            answer = fails(point, fewer) if group and fewer != lost else None
            if answer is not None:
                lost, text = fewer, answer
        size //= 2
    return lost, text
