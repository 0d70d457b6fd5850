"""A thread that does jobs one after the other, for one other thread that gives them and waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Inline", "Worker"]


class Worker:
    """A thread of its own. It begins with the first job, and ends with `end`, or when nothing refers to it any more.

    Jobs that wait when Python ends are still done. There is never a second thread, and `end` waits for the one that
    began, whatever a signal handler raises in the calls of this class.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "pmstore-replica")
        self._has_begun = False
        self._failure: BaseException | None = None  # of the beginning
        self._changed = threading.Condition()  # notified after each job

    def do(self, job: Callable[[], None]) -> None:
        """Do a job after all others. A job raises nothing."""
        self._submit(job)

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a condition holds after a job, or until all jobs are done."""
        last = self._submit(lambda: None)  # behind all others
        with self._changed:
            self._changed.wait_for(lambda: until() or last.done())

    def end(self, wait: bool = True) -> None:
        """Take no more jobs. wait: until all are done, and the thread is gone."""
        self._executor.shutdown(wait)

    def _begin(self) -> None:
        """Let another thread give the first job. The executor starts its thread there, where no signal handler raises
        between the start and the note of it. After an interrupt in here, the next call does the same again."""
        starter = threading.Thread(target=self._start)
        starter.start()
        starter.join()
        if not self._has_begun:
            assert self._failure is not None
            raise self._failure

    def _start(self) -> None:
        try:
            self._executor.submit(int)
            self._has_begun = True
        except BaseException as error:  # such as no memory for a thread
            self._failure = error

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        if not self._has_begun:
            self._begin()
        future = self._executor.submit(job)
        future.add_done_callback(self._notify)
        return future

    def _notify(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()


class Inline(Worker):
    """Does each job at once. A store that a crash test records must see the same in every run."""

    def do(self, job: Callable[[], None]) -> None:
        """Do a job."""
        job()

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """All jobs are done."""
