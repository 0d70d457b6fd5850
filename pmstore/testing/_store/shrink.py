"""The simplest crash that still fails: the fewest lost pieces, and the earliest moment, by delta debugging.

A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pmstore.testing._store.engine import Cell, Found, Schedule, Verdict

__all__ = ["MOST_TRIES", "ddmin", "shrink"]

MOST_TRIES = 600
EARLIER = 48  # events, the largest distance to an earlier moment that is tried

Evaluator = Callable[[Schedule], "Verdict | None"]


class _Search:
    """Tries schedules, and keeps the simplest one that fails in the same way."""

    def __init__(self, found: Found, evaluate: Evaluator, tries: int) -> None:
        self.best, self.verdict = found
        self._problem = found.verdict.problem
        self._evaluate = evaluate
        self._left = tries
        self._tried: dict[Schedule, bool] = {found.schedule: True}

    def fails(self, schedule: Schedule) -> bool:
        """Whether a schedule fails like the first one. If it does, it is the best so far."""
        known = self._tried.get(schedule)
        if known is not None:
            return known
        if self._left <= 0:
            return False
        self._left -= 1
        verdict = self._evaluate(schedule)
        failed = verdict is not None and verdict.problem == self._problem
        self._tried[schedule] = failed
        if failed and verdict is not None:
            self.best, self.verdict = schedule, verdict
        return failed


def shrink(found: Found, evaluate: Evaluator, clearest: Sequence[Schedule] = (), tries: int = MOST_TRIES) -> Found:
    """The simplest crash that has the same problem.

    Parameters
    ----------
    found : Found
        A schedule and its verdict.
    evaluate : callable
        Returns the verdict of another schedule of the same recording, or None if it passes.
    clearest : sequence of Schedule
        Schedules that are tried first; if one of them fails, it is simple enough.
    tries : int
        The maximum number of calls of `evaluate`.
    """
    search = _Search(found, evaluate, tries)
    for schedule in clearest:
        if search.fails(schedule):
            return Found(search.best, search.verdict)
    if search.best.then is not None and not search.fails(search.best._replace(then=None, killed=False)):
        _simplify_inner(search)
    if not search.best.killed:  # a kill loses nothing, and later crashes are numbered from it
        _simplify(search, _outer)
    return Found(_named(search.best), search.verdict)


def ddmin(items: Sequence[Cell], fails: Callable[[tuple[Cell, ...]], bool]) -> tuple[Cell, ...]:
    """The fewest items that still fail, so that none of them can be left out. All items together fail."""
    if fails(()):
        return ()
    kept, parts = tuple(items), 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        for i, chunk in enumerate(chunks):
            if fails(chunk):
                kept, parts = chunk, 2
                break
            rest = tuple(cell for j, other in enumerate(chunks) for cell in other if j != i)
            if len(chunks) > 2 and fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(2 * parts, len(kept))
    return kept


Replace = Callable[[Schedule, Schedule], Schedule]


def _outer(whole: Schedule, level: Schedule) -> Schedule:
    return level


def _innermost(schedule: Schedule) -> Schedule:
    while schedule.then is not None:
        schedule = schedule.then
    return schedule


def _inside(whole: Schedule, level: Schedule) -> Schedule:
    """The whole schedule with another innermost crash."""
    if whole.then is None:
        return level
    return whole._replace(then=_inside(whole.then, level))


def _simplify_inner(search: _Search) -> None:
    _simplify(search, _inside)


def _simplify(search: _Search, replace: Replace) -> None:
    def level() -> Schedule:
        return search.best if replace is _outer else _innermost(search.best)

    def fails(changed: Schedule) -> bool:
        return search.fails(replace(search.best, changed))

    if level().stale:
        fails(level()._replace(stale=0))
    if level().cells:
        ddmin(level().cells, lambda cells: fails(level()._replace(cells=cells)))
        _keep_more(level, fails)
    _earlier(level, fails)


def _keep_more(level: Callable[[], Schedule], fails: Callable[[Schedule], bool]) -> None:
    """Lose as little as possible of each cell that must lose something."""
    for i in range(len(level().cells)):
        cell = level().cells[i]
        if cell.torn:
            fails(_with(level(), i, cell._replace(torn=0)))
        while level().cells[i].kept + 1 < level().cells[i].of:
            cell = level().cells[i]
            if not fails(_with(level(), i, cell._replace(kept=cell.kept + 1, torn=0))):
                break


def _with(schedule: Schedule, i: int, cell: Cell) -> Schedule:
    return schedule._replace(cells=(*schedule.cells[:i], cell, *schedule.cells[i + 1 :]))


def _earlier(level: Callable[[], Schedule], fails: Callable[[Schedule], bool]) -> None:
    """Move to the first moment at which the same loss fails, because it is the clearest."""
    first = max(0, level().event - EARLIER)
    for event in range(level().event - 1, first - 1, -1):
        if not fails(level()._replace(event=event)):
            break


def _named(schedule: Schedule) -> Schedule:
    """The schedule with the kind that fits its remaining losses."""
    if schedule.then is not None:
        schedule = schedule._replace(then=_named(schedule.then))
    if not schedule.cells and not schedule.stale:
        return schedule._replace(kind="all")
    if len(schedule.cells) == 1 and not schedule.stale:
        return schedule._replace(kind="torn" if schedule.cells[0].torn else "lost-one")
    return schedule
