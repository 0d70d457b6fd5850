"""System calls that fail: every write, sync, growth and mapping of a workload, in every possible way."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.scratch import Scratch
from pmstore.testing._faults.fault import Fault, FaultReport
from pmstore.testing._faults.runs import Run, Runs
from pmstore.testing._store.check import Check, CheckRunner, require_check
from pmstore.testing._store.describe import Sandbox
from pmstore.testing._store.recording import MEDIA
from pmstore.testing._store.workload import require_runs

__all__ = ["explore_faults"]

Progress = Callable[[int, int], None]


def explore_faults(
    workload: Run | Sequence[Run],
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
    """Run a workload once for each of its system calls and each way in which the call can fail.

    Either the commit in progress is completely absent and the store continues, or the store refuses to continue. No
    acknowledged commit is lost: not in the process, not when the file is opened again, and not by a crash.

    A store that refuses to continue must still roll back, with one exception: if a write to the committed image may
    have failed after a durable record, because the committed image then differs from the last commit. If the write of a
    new array follows writes to the committed image without a sync between them, the test can't tell the two apart. It
    then accepts a refusal, even if it is wrong.

    Parameters
    ----------
    workload : callable, or sequence of callables
        Functions of the open store. Each is one run of a process, which ends with a kill. After the last one the store
        is opened once more, also under faults. If a workload swallows an error, the store still remembers it.
    check : callable, optional
        As for `CrashExplorer.run`: called with each reopened store.
    medium : {"memory", "file"}
        On memory only growing and mapping can fail.
    directory : path, optional
        The directory of the store, on a tmpfs for memory. By default a temporary one, in memory if possible.
    seed : int
        The seed of the crash states, and of the choice if the budget is smaller than the number of cases.
    budget : int, optional
        The number of cases to try; by default all.
    progress : callable, optional
        Called with the number of cases tried, and the total.
    only : Fault, optional
        Only this one, to reproduce it.
    max_size : int, optional
        As for `pmstore.open`.

    Raises
    ------
    CrashFailure
        Something is lost, mixed or silently wrong.
    CrashTestError
        Without any fault, the workload raises, is not deterministic, or leaves a store that the check refuses; or an
        argument makes no sense.
    """
    functions = tuple(workload) if isinstance(workload, Sequence) else (workload,)
    require_check(check)
    require_runs(functions)
    if medium not in MEDIA:
        raise CrashTestError(f'medium is "memory" or "file", not {medium!r}')
    if budget is not None and budget < 1:
        raise CrashTestError(f"a budget of {budget} tries nothing: give 1 or more, or none for all that there are")
    if not 0 <= seed < 1 << 64:
        raise CrashTestError(f"seed is a number from 0 to 2**64 - 1, not {seed}")
    if only is not None and not isinstance(only, Fault):
        raise CrashTestError(f'only is a fault such as pmstore.testing.Fault("write", 7, "ENOSPC"), not {only!r:.80}')
    if directory is not None and not os.path.isdir(directory):
        raise CrashTestError(f"{os.fspath(directory)} is no directory")
    begun = time.perf_counter()
    with Sandbox() as sandbox, Scratch(directory or sandbox.directory) as place:
        runner = None if check is None else CheckRunner(check, medium, sandbox)
        runs = Runs(functions, medium, Path(place), seed, max_size, runner)
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
