"""Calls to the system that fail: every write, sync, growth and mapping of a workload, in every way that it can."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pmstore.testing._check import Check, CheckRunner, require_check
from pmstore.testing._describe import Workshop
from pmstore.testing._errors import CrashTestError
from pmstore.testing._fault import Fault, FaultReport
from pmstore.testing._fault_runs import Life, Runs
from pmstore.testing._recording import MEDIA
from pmstore.testing._scratch import Scratch
from pmstore.testing._workload import require_lives

__all__ = ["explore_faults"]

Progress = Callable[[int, int], None]


def explore_faults(
    workload: Life | Sequence[Life],
    check: Check | None = None,
    *,
    medium: str,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 1,
    budget: int | None = None,
    progress: Progress | None = None,
    only: Fault | None = None,
    max_size: int | None = None,
) -> FaultReport:
    """Run a workload once for each of its calls to the system and each way that the call can fail.

    Either the commit that was under way is wholly absent and the store goes on, or the store refuses to go on. Nothing
    that was acknowledged is lost: not in the process, not for whoever opens the file next, and not by a crash.

    A store that refuses to go on has to roll back all the same. Only where a write to home may have failed, behind a
    record that is durable, it need not, for home is not the last commit then. From outside, a write of a new array that
    follows those of home, with no sync between them, can't be told from them: there a refusal passes, even if wrong.

    Parameters
    ----------
    workload : callable, or sequence of callables
        Functions of the open store, each of them a life that ends with a kill; after the last one the store is opened
        once more, also under faults. An error that a workload swallows is none that the store forgets.
    check : callable, optional
        As for `CrashExplorer.run`: called with each reopened store.
    medium : {"memory", "file"}
        On memory only growing and mapping can fail.
    directory : path, optional
        Where the store is, on a tmpfs for memory; an own one, in memory if possible, unless given.
    seed : int
        Of the choice, if the budget is smaller than the number of cases, and of the crash states.
    budget : int, optional
        How many cases to try; all, unless given.
    progress : callable, optional
        Called with the number of cases tried, and how many there are to be.
    only : Fault, optional
        Only this one, to see it again.
    max_size : int, optional
        As for `pmstore.open`.

    Raises
    ------
    CrashFailure
        Something is lost, mixed or silently wrong.
    CrashTestError
        The workload raises without any fault, is not deterministic, or an argument makes no sense.
    """
    lives = tuple(workload) if isinstance(workload, Sequence) else (workload,)
    require_check(check)
    require_lives(lives)
    if medium not in MEDIA:
        raise CrashTestError(f'medium is "memory" or "file", not {medium!r}')
    if budget is not None and budget < 1:
        raise CrashTestError(f"a budget of {budget} tries nothing: give 1 or more, or none for all that there are")
    if not 0 <= seed < 1 << 64:
        raise CrashTestError(f"seed is a number from 0 to 2**64 - 1, not {seed}")
    if directory is not None and not os.path.isdir(directory):
        raise CrashTestError(f"{os.fspath(directory)} is no directory")
    begun = time.perf_counter()
    with Workshop() as workshop, Scratch(directory or workshop.directory) as place:
        runner = None if check is None else CheckRunner(check, medium, workshop)
        runs = Runs(lives, medium, Path(place), seed, max_size, runner)
        cases, commits = runs.learn()
        chosen = _chosen(cases, only, budget, seed)
        outcomes: Counter[str] = Counter()
        for done, fault in enumerate(chosen):
            if progress is not None:
                progress(done, len(chosen))
            outcomes[runs.try_(fault)] += 1
    operations = Counter(fault.operation for fault in chosen)
    seconds = time.perf_counter() - begun
    return FaultReport(medium, len(chosen), len(cases), operations, outcomes, runs.crashes, commits, seed, seconds)


def _chosen(cases: list[Fault], only: Fault | None, budget: int | None, seed: int) -> list[Fault]:
    if only is not None:
        if only not in cases:
            raise CrashTestError(f"the workload has no case {only!r}")
        return [only]
    if budget is None or budget >= len(cases):
        return cases
    return sorted(random.Random(seed).sample(cases, budget), key=cases.index)
