"""A thread that does jobs one after the other, for one other thread that gives them and waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pmstore._interrupts import later

__all__ = ["Inline", "Worker"]


class Worker:
    """A thread of its own. It begins with the first job, and ends with `end`, or when nothing refers to it any more.

    Jobs that wait when Python ends are still done. There is never a second thread, and `end` waits for the one that
    began, whatever a signal handler raises in the calls of this class. The locks of Python's executor may stay held
    after an interrupt. Therefore no handler runs in its calls, and the wait for a job is one call of C code.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "pmstore-replica")
        self._has_begun = False
        self._news: list[threading.Lock] = []  # one for each `wait`: released after each job, acquired before each look

    def do(self, job: Callable[[], None]) -> None:
        """Do a job after all others. A job raises nothing."""
        self._submit(job)

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a condition holds after a job, or until all jobs are done."""
        done, news = list[bool](), threading.Lock()
        self._news.append(news)
        try:
            self._submit(lambda: done.append(True))  # behind all others
            while not (until() or done):
                news.acquire()
        finally:
            self._news.remove(news)

    def end(self, wait: bool = True) -> None:
        """Take no more jobs. wait: until all are done, and the thread is gone."""
        self._executor.shutdown(wait)

    def _submit(self, job: Callable[[], None]) -> None:
        with later():
            if not self._has_begun:
                self._executor.submit(int)  # it stays in the queue if there is no memory for a thread
                self._has_begun = True
            self._executor.submit(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            for news in tuple(self._news):
                with contextlib.suppress(RuntimeError):  # nobody has looked since the job before
                    news.release()


class Inline(Worker):
    """Does each job at once. A store that a crash test records must see the same in every run."""

    def do(self, job: Callable[[], None]) -> None:
        """Do a job."""
        job()

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """All jobs are done."""
