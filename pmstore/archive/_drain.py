"""`Store.drain`: versions go from a store to its archive while the program goes on.

    commits ──▶ the store's file ──1 capture──▶ encoded versions ──2──▶ the first place ──3──▶ the next place …
                                     in memory, at most queue_size

1, 2 and 3 are threads. Each does its steps again and again, and sleeps when there is nothing to do. None of them holds
a lock that a commit takes. A capture that comes late takes the newest commit, so that what can't keep up has fewer
versions. `_steps.py` has the steps.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import operator
import os
import sys
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, NamedTuple

from pmstore._display import size_text
from pmstore._errors import (
    ArchiveDamagedError,
    ArchiveError,
    ArchiveUnavailableError,
    ArchiveWarning,
    ClosedStoreError,
    ForkedStoreError,
    OutOfMemoryError,
    StaleSnapshotError,
)
from pmstore._interrupts import later
from pmstore._snapshot import newest
from pmstore._store.opening import seconds
from pmstore.archive._fsspec import go_on_at_exit
from pmstore.archive._index import SupersededError
from pmstore.archive._objects import RecoveredError
from pmstore.archive._steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from pmstore._store.store import Store

__all__ = ["Drain", "Progress", "Trouble"]

_SHARE = 0.1  # of a processor that captures take, at most, so that the program keeps its own
_LINGER = 0.5  # seconds that a version waits for others to share its part, at most
_SOON, _LATER = 0.01, 0.05  # seconds between two looks for a commit: soon after one, and later
_TURN = 0.25  # seconds between two looks for anything else
_PATIENCE = 30.0  # seconds that captures may fail for lack of something, until `wait` and `capture` raise that
_PAUSE = 1.0  # seconds until what failed for lack of something is tried again
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _is_shortage(error: Exception) -> bool:
    """Whether the process lacks memory, descriptors or space, of which there may be enough later."""
    if isinstance(error, ArchiveError):
        return False
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORT)


class Progress(NamedTuple):
    """The progress of a drain. All versions are sequence numbers of commits; -1: none yet.

    Attributes
    ----------
    committed : int
        The newest commit of the store.
    captured : int
        The newest version that was taken from the store.
    archived : dict of str to int
        The newest version that each place has, durable.
    queued : int
        Bytes of versions that wait in memory.
    error : str or None
        Why the drain waits or has ended, if it does.
    ended : bool
        Whether the drain has ended: it was closed, or an error has ended it, at least for one of its places.
    """

    committed: int
    captured: int
    archived: dict[str, int]
    queued: int
    error: str | None
    ended: bool


class Trouble:
    """The outages that `Retrying` reported. stop: no retries any more. raises: no warnings of what a call raises."""

    def __init__(self, raises: bool) -> None:
        self.stop = threading.Event()
        self.now: str | None = None
        self._raises = raises

    def tell(self, error: Exception) -> None:
        """An outage begins, or is over."""
        over = isinstance(error, RecoveredError)
        self.now = None if over else str(error)
        if not over:
            self.warn(f"{error}; the drain tries again, and the program goes on")

    def warn(self, text: str) -> None:
        """Warn from a thread, unless a call raises an error of it."""
        if not self._raises:
            self.note(text)

    def note(self, text: str) -> None:
        """Warn from a thread. A warning that a filter turns into an error would reach no caller there."""
        if not self.stop.is_set():
            with contextlib.suppress(ArchiveWarning):
                warnings.warn(text, ArchiveWarning, stacklevel=3)


class _Shown:
    """The last versions on their way, on a terminal."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._begun = time.monotonic()
        self._width = 0

    def update(self) -> None:
        """Shown from the first second on."""
        if sys.stderr is None or not sys.stderr.isatty() or time.monotonic() - self._begun < 1:
            return
        last = self._steps.captured
        places = ", ".join(f"{target.place.url} has {target.last}" for target in self._steps.targets)
        text = f"pmstore: archiving version {last}, {size_text(self._steps.queued)} in memory; {places}"
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def end(self) -> None:
        """The line is gone."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


class Drain:
    """The writing of a store's versions to its archive, made by `Store.drain`. It is a context manager that closes it.

    It runs in threads of this process. They end with `close`, which closing the store and leaving Python call. In a
    forked child it does nothing.
    """

    def __init__(self, store: Store, steps: Steps, trouble: Trouble) -> None:
        """Only `Store.drain` calls this."""
        self._store = weakref.ref(store)
        self._pid = os.getpid()
        self._steps = steps
        self._trouble = trouble
        self._options = steps.options
        self._capturing = threading.Lock()  # around the capture and the flush
        self._guard = threading.RLock()  # of what follows; entered itself, as a handler can interrupt a Condition
        self._changed = threading.Condition(self._guard)  # notified when any of it changes
        self._closing = self._captured_all = False
        self._wanted = -1  # a version that somebody waits for,
        self._asked = -1  # and one that somebody waits for in memory only
        self._committed = -1  # the newest commit, when the file was left
        self._errors: list[BaseException | None] = [None] * (1 + len(steps.targets))  # that ended a thread
        self._ended = [False] * (1 + len(steps.targets))  # the threads that have nothing more to do
        self._short: dict[int, tuple[float, Exception]] = {}  # threads that lack something, since when, and what
        steps.attach(self._room, trouble.note)

    def begin(self) -> None:
        """Start the threads. `Store.drain` calls it, where no interrupt comes in between; `close` is called later."""
        _drains.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # is called before what ends the connections that the places have made
        for number in range(len(self._ended)):
            thread = threading.Thread(target=self._thread, args=(number,), name=f"pmstore-drain-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                self._closing = True
                for other in range(number, len(self._ended)):
                    self._errors[other] = error
                    self._end(other)
                raise

    def __repr__(self) -> str:
        places = ", ".join(target.place.url for target in self._steps.targets)
        return f"<Drain to {places}, {'closed' if self._closing else f'at version {self._steps.captured}'}>"

    def __enter__(self) -> Drain:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- about it

    def progress(self) -> Progress:
        """The progress of the drain. Raises ForkedStoreError."""
        self._refuse_fork()
        steps = self._steps
        lost = [target.lost for target in steps.targets]
        errors = [*self._errors, *(one[1] for one in lost if one is not None)]
        error = next((one for one in errors if one is not None), None)
        return Progress(
            committed=self._newest(),
            captured=steps.captured,
            archived={target.place.url: target.last for target in steps.targets},
            queued=steps.queued,
            error=str(error) if error is not None else self._trouble.now,
            ended=any(self._ended),
        )

    def wait(self, sequence: int | None = None, timeout: float = float("inf")) -> int:
        """Sleep until a commit, or a newer one, is durable in all places.

        Parameters
        ----------
        sequence : int, optional
            Of the commit; by default the newest one.
        timeout : float
            Seconds.

        Returns
        -------
        int
            The newest version that all places have.

        Raises
        ------
        ArchiveUnavailableError
            The time was not enough; the message says what is missing. The drain continues.
        ArchiveDamagedError
            A further place can't have the version, as the place before it is damaged. The drain continues.
        ArchiveError
            The drain has ended with an error.
        StaleSnapshotError
            The store is open for reading, and another one has taken its place, as after `compact`.
        OutOfMemoryError, OutOfSpaceError, StoreIOError
            The process has lacked memory, space or descriptors for 30 s. The drain tries again.
        """
        self._refuse_fork()
        limit = time.monotonic() + seconds(timeout)
        with self._guard:
            if sequence is None:
                self._raise()
                self._refuse_replaced()
            wanted = self._newest() if sequence is None else operator.index(sequence)
            while (done := min(target.last for target in self._steps.targets)) < wanted:
                self._raise()
                self._raise_lost(wanted)
                left = limit - time.monotonic()
                if left <= 0:
                    raise ArchiveUnavailableError(f"version {wanted} is not archived yet: {self._lacking(wanted)}")
                if all(self._ended):
                    raise ArchiveUnavailableError(f"the drain is closed: {self._lacking(wanted)}")
                self._ask(wanted)
                self._sleep(min(left, _TURN))
        return done

    def capture(self, timeout: float = float("inf")) -> int:
        """Make a version of the newest commit. When this returns, it is in memory, and later commits do not change it.

        A program that calls it after each commit has a version of each, however quickly they come, and need not wait
        for the places: versions share an object. If the process is killed before `wait` returns, versions that are not
        durable yet are missing, but for the newest commit, which the next drain takes. If the queue is full, it waits.

        Parameters
        ----------
        timeout : float
            Seconds.

        Returns
        -------
        int
            The newest version in memory.

        Raises
        ------
        ArchiveUnavailableError
            The time was not enough, or the drain is closed.
        ArchiveError
            The drain has ended with an error.
        OutOfMemoryError, OutOfSpaceError, StoreIOError
            The process has lacked memory, space or descriptors for 30 s. The drain tries again.
        """
        self._refuse_fork()
        limit = time.monotonic() + seconds(timeout)
        with self._guard:
            wanted = self._newest()
            while self._captured_all or self._steps.captured < wanted:
                self._raise()
                left = limit - time.monotonic()
                if self._captured_all:
                    raise ArchiveUnavailableError("the drain is closed")
                if left <= 0:
                    raise ArchiveUnavailableError(f"there was not enough time to make a version of commit {wanted}")
                if self._asked < wanted:
                    self._asked = wanted
                    self._changed.notify_all()
                self._sleep(min(left, _TURN))
            return self._steps.captured

    def _sleep(self, seconds: float) -> None:
        """Wait for a change, with the guard, which an exception of a signal handler leaves held, too."""
        try:
            self._changed.wait(seconds)
        except BaseException:
            try:
                self._changed.notify(0)
            except RuntimeError:  # the exception came between the release of the guard and what takes it again
                self._guard.acquire()
            raise

    def _ask(self, wanted: int) -> None:
        """A version is wanted now."""
        if (self._steps.captured < wanted or self._steps.encoded) and self._wanted < wanted:
            self._wanted = wanted
            self._changed.notify_all()

    def close(self, timeout: float = 60.0) -> None:
        """Archive the newest commit, and end the drain. Closing it again does nothing.

        After `timeout` seconds it ends even if a place can't be reached. An ArchiveWarning then says what is missing
        there, or, with ``on_error="raise"``, an ArchiveUnavailableError. The store has lost nothing, and a later drain
        continues. If another store has taken the place of one that is open for reading, that is a warning or a
        StaleSnapshotError, too.
        """
        if os.getpid() != self._pid:
            return
        limit = time.monotonic() + seconds(timeout)
        if self._trouble.stop.is_set():  # an interrupt has ended it
            limit = 0.0
        try:
            with self._guard:
                self._closing = True
                self._changed.notify_all()
                shown = _Shown(self._steps)
                try:
                    while not all(self._ended) and (left := limit - time.monotonic()) > 0:
                        self._sleep(min(left, _TURN))
                        shown.update()
                finally:
                    shown.end()
        finally:  # at an interrupt, too: nobody waits for the places any more, neither the store nor the end of Python
            with later():  # an interrupt inside of an Event leaves its lock held
                self._trouble.stop.set()
            _drains.discard(self)
            store = self._store()
            if store is not None and self in store._drains:
                store._drains.remove(self)
        last = self._newest() if any(self._errors) or not self._ended[0] else self._steps.captured
        if any(target.last < last for target in self._steps.targets):
            error = next((one for one in self._errors if one is not None), None)
            if isinstance(error, SupersededError):
                if all(target.has_now(last) for target in self._steps.targets):
                    return
                text = f"the drain ended: {error}"
            else:
                text = f"the drain ended, and {self._lacking(last)}{f' ({error})' if error is not None else ''}"
            if self._options.raises:
                raise ArchiveUnavailableError(text) from error
            warnings.warn(text, ArchiveWarning, stacklevel=2)
        elif self._options.raises and isinstance(self._errors[0], StaleSnapshotError):
            raise StaleSnapshotError(*self._errors[0].args) from self._errors[0]  # the other file has later commits

    def _newest(self) -> int:
        """The newest commit; of an ended drain and a store that is gone, as far as it knows."""
        with self._guard:
            steps, store = self._steps, self._store()
            if steps.fd >= 0:
                return max(steps.captured, newest(steps.fd))
            return max(steps.captured, self._committed, -1 if store is None or store.closed else store.sequence)

    def _lacking(self, wanted: int) -> str:
        lacking = [
            f"{target.place.url} has {f'version {target.last}' if target.last >= 0 else 'none'}"
            for target in self._steps.targets
            if target.last < wanted
        ]
        return "; ".join(lacking) + (f": {self._trouble.now}" if self._trouble.now else "")

    def _raise(self) -> None:
        for error in self._errors:
            if error is not None:
                raise type(error)(*error.args) from error
        for since, lacking in list(self._short.values()):
            if time.monotonic() > since + _PATIENCE:
                if isinstance(lacking, MemoryError):
                    raise OutOfMemoryError(str(lacking) or "no memory") from lacking
                raise type(lacking)(*lacking.args) from lacking

    def _raise_lost(self, wanted: int) -> None:
        """Raise ArchiveDamagedError if a place can't have a version, nor a newer one: the place before has damage."""
        for target in self._steps.targets:
            lost = target.lost  # a thread may change it
            if lost is not None and target.last < wanted <= lost[0]:
                raise ArchiveDamagedError(*lost[1].args) from lost[1]

    def _refuse_replaced(self) -> None:
        """Raise StaleSnapshotError if commits come to another file, which has taken the place of this one."""
        store = self._store()
        if store is not None:
            with contextlib.suppress(ClosedStoreError):
                store._refuse_replaced()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedStoreError("the drain belongs to the process that began it")

    # ---- threads

    def _thread(self, number: int) -> None:
        """The first captures; the others bring a place up to date each."""
        try:
            if number == 0:
                self._capture_on()
            else:
                self._bring_on(number)
        except BaseException as error:
            self._errors[number] = error
            self._trouble.warn(f"the drain stops: {error}")
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        """A thread has nothing more to do."""
        with self._guard:
            try:
                if number == 0:
                    self._captured_all = True
                    self._committed = self._newest()
                    self._steps.close()
            finally:
                self._ended[number] = True
                self._changed.notify_all()

    def _capture_on(self) -> None:
        """Only this thread captures, so that no interrupt comes in between, and no caller waits for room."""
        try:
            self._capture_each()
            while not self._ended[1] and self._capture() is None:
                self._pause()
            self._refuse_replaced()
        finally:
            self._flush()  # versions in memory are archived, also if a later capture fails

    def _capture_each(self) -> None:
        """Captures until the drain is to end."""
        encoded = 0.0  # when the first of the versions that wait was encoded
        rest = found = 0.0  # until when captures pause; when the last one was
        looked = 0.0  # when the file's name was looked at
        steps = self._steps
        while not self._closing and not self._ended[1] and self._store() is not None:
            now = time.monotonic()
            if now > looked + _TURN:
                looked = now
                try:
                    self._refuse_replaced()
                except StaleSnapshotError:  # the last commit of this file is still captured
                    return
            asked, self._wanted = self._wanted, -1  # a thread that still waits asks again
            urgent, self._asked = max(asked, self._asked), -1
            due = steps.captured + 1 if urgent > steps.captured else max(1, steps.captured + self._options.every)
            short = 0 in self._short  # the last capture is tried again, whoever waits
            jobs = len(steps.jobs)
            # While the queue is full, no capture begins; the next one takes the commits together.
            ready = now >= rest or (urgent >= 0 and not short)
            if ready and not steps.crowded and (short or newest(steps.fd) >= due):
                encoded = encoded if steps.encoded else now
                used = time.thread_time()
                with contextlib.suppress(StaleSnapshotError):  # this commit has no version (I23)
                    self._capture()
                if urgent >= 0:
                    self._tell()
                found = time.monotonic()
                rest = found + max((time.thread_time() - used) * (1 / _SHARE - 1), _PAUSE if 0 in self._short else 0)
            lingers = asked < 0 and (self._options.mtbf is not None or time.monotonic() < encoded + _LINGER)
            if steps.jobs:  # while a flush is being written, versions join the next
                if len(steps.jobs) > jobs:
                    self._tell()
            elif steps.crowded or (steps.encoded and not lingers):
                self._flush()
            with self._guard:
                if not self._closing and self._wanted < 0 and self._asked < 0:
                    self._sleep(_SOON if now < found + 1 else _LATER)

    def _capture(self) -> bool | None:
        """Captures the newest commit. See `_tried`."""
        with self._capturing:
            return self._tried(0, self._steps.capture)

    def _tried(self, number: int, call: Callable[[], bool]) -> bool | None:
        """The result of a call by a thread; None: the process lacks something for it, and it is to be tried again."""
        try:
            result = call()
        except Exception as error:
            if not _is_shortage(error) or self._trouble.stop.is_set():
                raise
            if number not in self._short:
                error.__context__ = None
                self._short[number] = time.monotonic(), error.with_traceback(None)  # which keeps what was copied
                self._trouble.tell(error if str(error) else OutOfMemoryError("no memory"))
            return None
        begun = self._short.pop(number, None)
        if begun is not None:
            self._trouble.tell(RecoveredError("the drain", time.monotonic() - begun[0]))
        return result

    def _pause(self) -> None:
        self._trouble.stop.wait(_PAUSE)

    def _flush(self) -> None:
        while not self._ended[1]:
            with self._capturing:
                flushed = self._tried(-1, self._steps.flush)
            if flushed is not None:
                break
            self._pause()
        self._tell()

    def _tell(self) -> None:
        with self._guard:
            self._changed.notify_all()

    def _room(self) -> None:
        """A version that is larger than the queue waits for its place. Raises ArchiveUnavailableError."""
        with self._guard:
            self._changed.notify_all()
            while self._steps.crowded:
                if self._ended[1] or self._trouble.stop.is_set():
                    raise ArchiveUnavailableError("a version is larger than the queue, and its place does not take it")
                self._sleep(_TURN)

    def _bring_on(self, number: int) -> None:
        step = self._steps.write if number == 1 else functools.partial(self._steps.copy, number - 1)
        while True:
            before = self._captured_all if number == 1 else self._ended[number - 1]
            stepped = self._tried(number, step)
            if stepped is None:
                self._pause()
            elif stepped:
                self._tell()
            elif before:
                if self._tried(number, functools.partial(self._finish, number)):
                    return
                self._pause()
            else:
                with self._guard:
                    self._sleep(_TURN)

    def _finish(self, number: int) -> bool:
        """The last steps of a place that is up to date."""
        if number > 1:
            self._steps.copy_tags(number - 1)
        self._steps.end(number - 1)
        lost = self._steps.targets[number - 1].lost
        self._errors[number] = None if lost is None else lost[1]
        return True


_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _close_all() -> None:
    """Close all drains when Python exits."""
    if _drains:
        go_on_at_exit()
    with contextlib.ExitStack() as rest:  # each of them, whatever another one raises
        for drain in list(_drains):
            rest.callback(drain.close)


def _after_fork() -> None:
    for drain in list(_drains):
        drain._steps.leave()
    _drains.clear()


os.register_at_fork(after_in_child=_after_fork)
