"""A place whose calls survive outages: calls that fail for a while are tried again, ever more rarely."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pmstore._errors import ArchiveUnavailableError
from pmstore.archive._place import Buffer, MissingObjectError, ObjectExistsError, Place, ShortObjectError

__all__ = ["RecoveredError", "Retrying"]

FIRST, MOST = 0.1, 30.0  # seconds between two tries
_PIECE = 1 << 24

T = TypeVar("T")


class RecoveredError(Exception):
    """No failure: the target answers again. `Retrying` reports it.

    Attributes
    ----------
    url : str
        The place.
    seconds : float
        The time since the first failure.
    """

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, seconds)
        self.url = url
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.url} answers again, after {self.seconds:.1f} s"


class Retrying(Place):
    """The same place, whose transient failures are tried again until they end.

    The waits double from 0.1 s to 30 s, and each is shortened by a random part of up to one half, so that many writers
    do not come back at once. A failure that is not transient is raised at once. The threads that use the place share
    one outage: its first failure is told, and its end.

    A creation that failed may have succeeded on the target. If a later try finds an object with the same bytes, it
    counts as created. Two writers must therefore not create the same bytes under one name, or it must not matter.

    Parameters
    ----------
    place : Place
        The place itself; what it would try again by itself, it tries once.
    stop : threading.Event
        Ends the waits: the failure that is waited for is raised. A call made afterwards is tried once.
    tell : function of one exception
        It is called with the first failure of an outage, and with RecoveredError at its end. It may be called from
        several threads, but not at once.
    patience : float, default=inf
        The seconds after which a call gives up.
    clock, wait, jitter : functions
        The monotonic time; wait(seconds) -> whether to stop; a random number from 0 to 1. For tests.
    """

    def __init__(
        self,
        place: Place,
        stop: threading.Event,
        tell: Callable[[Exception], None],
        *,
        patience: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.place = place.once
        self.url, self.near = place.url, place.near
        self._stop = stop
        self._tell = tell
        self.patience = patience
        self._clock = clock
        self._wait = stop.wait if wait is None else wait
        self._jitter = jitter
        self._lock = threading.Lock()
        self._since: float | None = None  # the first failure of the outage

    @property
    def once(self) -> Place:
        return self.place

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        self._tried(lambda again: self.place.put(name, data))

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        def create(again: bool) -> None:
            try:
                self.place.create(name, data)
            except ObjectExistsError:
                if not again or not self._has(name, data):
                    raise

        self._tried(create)

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        return self._tried(lambda again: self.place.get(name, at, count))

    def read_into(self, name: str, at: int, buffers: Sequence[memoryview]) -> None:
        self._tried(lambda again: self.place.read_into(name, at, buffers))

    def size(self, name: str) -> int:
        return self._tried(lambda again: self.place.size(name))

    def list(self, folder: str) -> list[str]:
        return self._tried(lambda again: self.place.list(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        return self._tried(lambda again: self.place.sizes(folder))

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self._tried(lambda again: self.place.delete(names))

    def _tried(self, call: Callable[[bool], T]) -> T:
        """The result of a call, which is told whether it was tried before."""
        start, pause, again = self._clock(), FIRST, False
        while True:
            try:
                result = call(again)
            except ArchiveUnavailableError as error:
                if not error.transient:
                    raise
                self._failed(error)
                left = start + self.patience - self._clock()
                if left <= 0 or self._stop.is_set() or self._wait(min(left, pause * (1 - self._jitter() / 2))):
                    raise
                pause, again = min(2 * pause, MOST), True
            except (MissingObjectError, ObjectExistsError, ShortObjectError):
                self._answered()
                raise
            else:
                self._answered()
                return result

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._since is None:
                self._since = self._clock()
                self._tell(error)

    def _answered(self) -> None:
        if self._since is None:
            return
        with self._lock:
            if self._since is not None:
                since, self._since = self._since, None
                self._tell(RecoveredError(self.url, self._clock() - since))

    def _has(self, name: str, data: Sequence[Buffer]) -> bool:
        """Whether an object has just these bytes."""
        views = [memoryview(buffer).cast("B") for buffer in data if memoryview(buffer).nbytes]
        try:
            if self.place.size(name) != sum(map(len, views)):
                return False
            at = 0
            for view in views:
                for begin in range(0, len(view), _PIECE):
                    piece = view[begin : begin + _PIECE]
                    if self.place.get(name, at, len(piece)) != piece:
                        return False
                    at += len(piece)
        except (MissingObjectError, ShortObjectError):
            return False
        return True
