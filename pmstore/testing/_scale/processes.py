"""Many schedules on several processors: forked processes run every n-th of them each."""

from __future__ import annotations

import mmap
import os
import pickle
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.fork import fork

Tally = tuple[Counter[str], ...]

EVERY = 0.1  # seconds between two reports of progress


class Shared:
    """Numbers that all processes see: how many schedules each has run, and the first one that failed in it."""

    def __init__(self, jobs: int, none: int) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 16 * jobs)).cast("q")
        self.done, self.failed = self._numbers[:jobs], self._numbers[jobs:]
        for job in range(jobs):
            self.failed[job] = none


def first_failure(
    count: int,
    jobs: int,
    run: Callable[[int], bool],
    tally: Callable[[], Tally],
    progress: Callable[[int, int], None],
) -> tuple[int | None, int, float, list[Tally]]:
    """The smallest number of a schedule that fails, whichever process is the quickest.

    Parameters
    ----------
    count : int
        Schedules 0 … count - 1.
    jobs : int
        Processes.
    run : callable
        Runs a schedule; whether it passed.
    tally : callable
        Returns what a process has counted.
    progress : callable
        Called with the number of schedules that are done, and their number.

    Returns
    -------
    int, or None
        The number; None if all passed.
    int
        How many were run.
    float
        Processor time, in seconds.
    list of Tally
        Of each process.
    """
    shared = Shared(jobs, count)
    children: dict[Connection, int] = {}
    try:
        for job in range(jobs):
            ours, theirs = Pipe(duplex=False)
            pid = fork()
            if pid == 0:
                _child(theirs, range(job, count, jobs), shared, job, run, tally)
            theirs.close()
            children[ours] = pid
        told = []
        while children:
            for connection in wait(list(children), EVERY):
                told.append(_told(connection))  # type: ignore[arg-type]
                os.waitpid(children.pop(connection), 0)  # type: ignore[call-overload]
            progress(sum(shared.done), count)
    finally:
        for pid in children.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    first = min(shared.failed)
    seconds = sum(seconds for seconds, _ in told)
    return first if first < count else None, sum(shared.done), seconds, [one for _, one in told]


def _child(
    connection: Connection, numbers: range, shared: Shared, job: int, run: Callable[[int], bool], tally: Any
) -> None:
    """Run schedules until one fails here, or a smaller one elsewhere. Does not return."""
    try:
        began = time.process_time()
        for number in numbers:
            if number > min(shared.failed):
                break
            passed = run(number)
            shared.done[job] += 1
            if not passed:
                shared.failed[job] = number
                break
        connection.send_bytes(pickle.dumps((time.process_time() - began, tally())))
    except BaseException:
        connection.send_bytes(pickle.dumps(traceback.format_exc()))
    finally:
        os._exit(0)


def _told(connection: Connection) -> tuple[float, Tally]:
    told: Any
    try:
        told = pickle.loads(connection.recv_bytes())
    except EOFError:
        told = "it ended without a message"
    if isinstance(told, str):
        raise CrashTestError(f"a process that runs schedules failed: {told}")
    seconds, tally = told
    return seconds, tally
