"""The crash explorer over a recording: a thin layer over csrc/explore/crash.h, which explains the fields."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pmstore import _core
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.fork import fork
from pmstore.testing._pmexplorer import ffi, lib
from pmstore.testing._store.recording import Recording

__all__ = ["KINDS", "Cell", "Found", "Options", "Schedule", "Tally", "Verdict", "cells", "explore", "image", "evaluate"]

KINDS = ("prefix", "nothing", "all", "lost-one", "kept-one", "pair", "torn", "random", "exhaustive", "stale")
PROBLEMS = ("fine", "open", "sequence", "mixed", "unsound", "reader", "write", "check")
SIZE_CELL: int = lib.PM_CRASH_SIZE_CELL
EXHAUSTIVE = 4096  # a header copy, torn in all ways

Check = Callable[[bytes, int, int], "str | None"]
Progress = Callable[[int, int], None]


class Cell(NamedTuple):
    """The writes to one line or sector that a crash keeps: the first `kept` of the `of` writes on their way to it, and
    the 8-byte pieces in the mask `torn` of the next one. offset: in the file; SIZE_CELL for the file's size.
    """

    offset: int
    kept: int
    torn: int
    of: int


class Schedule(NamedTuple):
    """A crash state. Of cells that are not listed everything is kept.

    event: so many events have happened. kind: one of KINDS. stale: not 0 if space never written holds something else
    than zeros. then: a crash in the recovery of this one, or after the commits that follow it. killed: it was only the
    process that died, so that recovery finds everything, and what is on its way still is; `then` is a crash of the
    machine, whose events are counted from the first of this recording.
    """

    event: int
    kind: str
    cells: tuple[Cell, ...] = ()
    stale: int = 0
    then: Schedule | None = None
    killed: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields in types of JSON."""
        out: dict[str, Any] = {"event": self.event, "kind": self.kind, "cells": [list(cell) for cell in self.cells]}
        if self.stale:
            out["stale"] = self.stale
        if self.then is not None:
            out["then"] = self.then.to_json()
        if self.killed:
            out["killed"] = True
        return out

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        then = value.get("then")
        return cls(
            int(value["event"]),
            str(value["kind"]),
            tuple(Cell(*map(int, cell)) for cell in value["cells"]),
            int(value.get("stale", 0)),
            None if then is None else cls.from_json(then),
            bool(value.get("killed", False)),
        )

    def levels(self) -> list[Schedule]:
        """This crash and those that follow it."""
        return [self, *(self.then.levels() if self.then is not None else [])]


class Options(NamedTuple):
    """How to explore. budget: states to evaluate. depth: crashes in recovery, and after it, within one another (0-3).
    sector: of a disk, 512 or 4096 bytes. eadr: memory whose caches are durable too. kinds: those of KINDS to evaluate,
    None for all. workers: threads.
    """

    budget: int = 2000
    seed: int = 1
    depth: int = 1
    sector: int = 512
    eadr: bool = False
    kinds: frozenset[str] | None = None
    workers: int = 1


class Verdict(NamedTuple):
    """The failure of a state. problem: one of PROBLEMS. text: the core's words, or the check's. The bounds are
    those of the last crash.
    """

    problem: str
    text: str
    sequence: int | None
    acknowledged: int
    started: int


class Found(NamedTuple):
    """A state that fails, and its failure."""

    schedule: Schedule
    verdict: Verdict


class Tally(NamedTuple):
    """How much was covered.

    points: crash points. evaluated: states built. distinct: of them, recovered and compared. pruned: not recovered, as
    they differ from one that was only in what recovery writes over unseen; the rest equal one of them. nested:
    states of crashes in and after recovery. possible: decimal digits of the number of states that the model allows.
    exhaustive: all of them were evaluated. by_kind: evaluated states. left_out: crash points at which the budget, too
    small, left nothing to evaluate but what a commit leaves.
    """

    points: int
    evaluated: int
    distinct: int
    nested: int
    possible: float
    exhaustive: bool
    seconds: float
    by_kind: dict[str, int]
    pruned: int = 0
    left_out: int = 0


def _raise(status: int) -> None:
    if status == lib.PM_INVALID:
        raise CrashTestError(str(_core.error(status, lib)))
    if status:
        raise _core.error(status, lib)


class _Native(NamedTuple):
    """The C structs of a recording and of options, and the objects that own their memory."""

    recording: Any
    options: Any
    kept: tuple[Any, ...]


def _native(recording: Recording, options: Options, *, worker: int = 0, raw: bool = False) -> _Native:
    base, events, data = (ffi.from_buffer(part) for part in (recording.base, recording.events, recording.data))
    recovered = next(
        (e for e in ffi.from_buffer("pm_event[]", recording.events) if e.kind == lib.PM_EVENT_RECOVERED), None
    )
    sequence = recovered.offset if recovered is not None else 0
    record = ffi.new(
        "pm_recording *",
        (
            ffi.cast("uint8_t *", base),
            len(recording.base),
            ffi.cast("pm_event *", events),
            len(recording),
            ffi.cast("uint8_t *", data),
            len(recording.data),
            sequence,
            sequence,
        ),
    )
    kinds = KINDS if options.kinds is None else options.kinds
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise CrashTestError(f"no kind of crash state is called {unknown[0]!r}: there are {', '.join(KINDS)}")
    if options.budget < 1:
        raise CrashTestError(f"a budget of {options.budget} states explores nothing: give 1 or more")
    if options.sector not in (512, 4096):
        raise CrashTestError(f"a sector has 512 or 4096 bytes, not {options.sector}")
    if not 0 <= options.depth < lib.PM_CRASH_DEPTH:
        raise CrashTestError(f"depth is 0 to {lib.PM_CRASH_DEPTH - 1}, not {options.depth}")
    native = ffi.new(
        "pm_crash_options *",
        {
            "media": _core.MEDIA[recording.medium],
            "sector": options.sector,
            "eadr": options.eadr,
            "kinds": sum(1 << KINDS.index(kind) for kind in kinds),
            "depth": options.depth,
            "raw": raw,
            "worker": worker,
            "workers": options.workers,
            "exhaustive": EXHAUSTIVE,
            "seed": options.seed & (1 << 64) - 1,
            "budget": max(1, options.budget // options.workers),
        },
    )
    return _Native(record, native, (base, events, data))


class _Calls:
    """The callbacks of one exploration. Their exceptions are raised when it is over."""

    def __init__(self, check: Check | None, progress: Progress | None) -> None:
        self.refused: str | None = None
        self.raised: BaseException | None = None
        self._check = check
        self._progress = progress
        self.check = ffi.NULL if check is None else self._callback("pm_crash_callback", self._on_check)
        self.progress = self._callback("pm_crash_progress", self._on_progress)

    def _callback(self, kind: str, function: Callable[..., int]) -> Any:
        # A signal is handled between any two steps: KeyboardInterrupt may come outside a function's own try.
        return ffi.callback(kind, function, error=0, onerror=self._on_error)

    def _on_error(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        self.raised = error

    def _on_check(self, user: Any, data: Any, size: int, acknowledged: int, started: int) -> int:
        assert self._check is not None
        try:
            self.refused = self._check(ffi.buffer(data, size)[:], acknowledged, started)
        except BaseException as error:
            self.raised = error
            return 0
        return self.refused is None

    def _on_progress(self, user: Any, evaluated: int, budget: int) -> int:
        try:
            if self._progress is not None:
                self._progress(evaluated, budget)
        except BaseException as error:
            self.raised = error
        return self.raised is None


def _found(result: Any, calls: _Calls) -> Found | None:
    if calls.raised is not None:
        raise calls.raised
    if not result.problem:
        return None
    schedule = None
    for i in reversed(range(result.level_count)):
        level = result.levels[i]
        listed = tuple(Cell(c.offset, c.kept, c.torn, c.of) for c in level.cells[0 : level.cell_count])
        schedule = Schedule(level.event, KINDS[level.kind], listed, level.stale, schedule, bool(level.killed))
    assert schedule is not None
    last = result.levels[result.level_count - 1]
    problem = PROBLEMS[result.problem]
    text = ffi.string(result.text).decode("utf-8", "replace")
    if problem == "check":
        text = calls.refused or ""
    sequence = None if problem == "open" else int(result.sequence)
    return Found(schedule, Verdict(problem, text, sequence, int(last.acknowledged), int(last.started)))


class _Part(NamedTuple):
    """The results of one worker."""

    points: int
    evaluated: int
    distinct: int
    nested: int
    pruned: int
    possible: float
    sampled: int
    left_out: int
    by_kind: tuple[int, ...]
    found: Found | None


def _explore_part(recording: Recording, options: Options, calls: _Calls, worker: int, raw: bool) -> _Part:
    native = _native(recording, options, worker=worker, raw=raw)
    result = ffi.gc(ffi.new("pm_crash_result *"), lib.pm_crash_result_free)
    _raise(lib.pm_crash_explore(native.recording, native.options, calls.check, calls.progress, ffi.NULL, result))
    return _Part(
        int(result.points),
        int(result.evaluated),
        int(result.distinct),
        int(result.nested),
        int(result.pruned),
        float(result.possible),
        int(result.sampled_points),
        int(result.left_out),
        tuple(result.by_kind),
        _found(result, calls),
    )


class _Worker:
    """A fork of this process that explores a part: threads would wait for each other at every mapping of a file."""

    def __init__(self, work: Callable[[], _Part]) -> None:
        reader, writer = os.pipe()
        self.pid = fork()
        if self.pid:
            os.close(writer)
            self._answer = os.fdopen(reader, "rb")
            self._ended = False
            return
        try:
            os.close(reader)
            with open(writer, "wb") as out:
                out.write(self._outcome(work))
        finally:
            os._exit(0)

    @staticmethod
    def _outcome(work: Callable[[], _Part]) -> bytes:
        try:
            return pickle.dumps(work())
        except BaseException as error:
            try:
                out = pickle.dumps(error)
                pickle.loads(out)
                return out
            except Exception:
                return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))

    def result(self) -> _Part:
        answer = self._answer.read()
        self._answer.close()
        os.waitpid(self.pid, 0)
        self._ended = True
        outcome = pickle.loads(answer) if answer else RuntimeError("a worker of the crash explorer died")
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, _Part)
        return outcome

    def kill(self) -> None:
        """End it, if its result is not wanted or could not be had."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _explore_parts(
    recording: Recording, options: Options, check: Check | None, progress: Progress | None, raw: bool
) -> list[_Part]:
    def part(worker: int) -> _Part:
        return _explore_part(recording, options, _Calls(check, None if worker else progress), worker, raw)

    workers: list[_Worker] = []
    try:
        for number in range(1, options.workers):
            workers.append(_Worker(functools.partial(part, number)))
        parts = [part(0)]
        while workers and parts[-1].found is None:
            parts.append(workers[0].result())
            workers.pop(0)
        return parts
    finally:
        for worker in workers:
            worker.kill()


def explore(
    recording: Recording,
    options: Options,
    check: Check | None = None,
    progress: Progress | None = None,
    *,
    raw: bool = False,
) -> tuple[Tally, Found | None]:
    """Evaluate states that a crash could leave, until the budget is spent or one is wrong.

    check: gets image, acknowledged and started of each state that the core finds no fault with, and returns None, or a
    sentence that says what is wrong. progress: gets how many were evaluated, of how many. raw: states are not
    recovered, only handed to check. The same options give the same states. Workers but the first are forks of this
    process, and so is what check changes there.

    Raises CrashTestError for options that make no sense, and what check or progress raise.
    """
    if options.workers < 1:
        raise CrashTestError(f"{options.workers} workers explore nothing: give 1 or more")
    started = time.perf_counter()
    parts = _explore_parts(recording, options, check, progress, raw)
    found = [part.found for part in parts if part.found is not None]
    kinds = {kind: sum(part.by_kind[i] for part in parts) for i, kind in enumerate(KINDS)}
    tally = Tally(
        parts[0].points,
        sum(part.evaluated for part in parts),
        sum(part.distinct for part in parts),
        sum(part.nested for part in parts),
        parts[0].possible,
        not found and not any(part.sampled or part.left_out for part in parts),
        time.perf_counter() - started,
        {kind: number for kind, number in kinds.items() if number},
        sum(part.pruned for part in parts),
        sum(part.left_out for part in parts),
    )
    return tally, min(found, key=lambda one: one.schedule.event, default=None)


@contextmanager
def _levels(schedule: Schedule) -> Iterator[tuple[Any, int]]:
    steps = schedule.levels()
    levels = ffi.new("pm_crash_schedule[]", len(steps))
    kept = []
    for level, step in zip(levels, steps):
        if step.kind not in KINDS:
            raise CrashTestError(f"no kind of crash state is called {step.kind!r}")
        listed = ffi.new("pm_crash_cell[]", max(1, len(step.cells)))
        for i, cell in enumerate(step.cells):
            listed[i] = {"offset": cell.offset, "kept": cell.kept, "torn": cell.torn, "of": cell.of}
        kept.append(listed)
        level.event, level.kind, level.stale = step.event, KINDS.index(step.kind), step.stale
        level.killed = step.killed
        level.cells, level.cell_count = listed, len(step.cells)
    yield levels, len(steps)
    del kept


def evaluate(recording: Recording, schedule: Schedule, options: Options, check: Check | None = None) -> Verdict | None:
    """Evaluate one state: None if it is right. The check is asked about crashes of the recording, not of recoveries."""
    native = _native(recording, options)
    calls = _Calls(check, None)
    result = ffi.gc(ffi.new("pm_crash_result *"), lib.pm_crash_result_free)
    with _levels(schedule) as (levels, count):
        _raise(lib.pm_crash_evaluate(native.recording, native.options, levels, count, calls.check, ffi.NULL, result))
    found = _found(result, calls)
    return None if found is None else found.verdict


def image(recording: Recording, schedule: Schedule, options: Options) -> bytes:
    """The bytes that the (last) crash of a schedule leaves."""
    native = _native(recording, options)
    out, size = ffi.new("uint8_t **"), ffi.new("uint64_t *")
    with _levels(schedule) as (levels, count):
        _raise(lib.pm_crash_image(native.recording, native.options, levels, count, out, size))
    try:
        return bytes(ffi.buffer(out[0], size[0]))
    finally:
        lib.pm_crash_free(out[0])


def cells(recording: Recording, event: int, options: Options) -> list[Cell]:
    """The cells that are on their way when so many events have happened, as nothing of them were kept."""
    native = _native(recording, options)
    out, count = ffi.new("pm_crash_cell **"), ffi.new("uint64_t *")
    _raise(lib.pm_crash_cells(native.recording, native.options, event, out, count))
    try:
        return [Cell(cell.offset, cell.kept, cell.torn, cell.of) for cell in out[0][0 : count[0]]]
    finally:
        lib.pm_crash_free(out[0])
