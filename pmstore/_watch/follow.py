"""Follows a store that another process writes, and reads it after each commit, without slowing the commits."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pmstore._display import Row, type_text, value_text
from pmstore._errors import (
    UNSOUND,
    DecodeError,
    FingerprintMismatchError,
    StaleSnapshotError,
    StoreNotFoundError,
    UnknownNameError,
)
from pmstore._resume.history import History, fits_of, read_history
from pmstore._store.entrance import open as open_store
from pmstore._store.opening import path_of
from pmstore._store.reading import consistently
from pmstore._store.store import Store
from pmstore._watch.state import Curve, Fit, fit_of, sampled, unreadable

__all__ = ["EVERY", "Follower", "View", "Value", "views"]

EVERY = 0.25  # seconds from one view to the next, at least
IDLE = 0.5  # seconds without a commit until the ages are told anew
MOST = 40  # fits, and values
LAST = 100  # elements of a list
TEXT = 60  # characters of a value
READ = 4096  # bytes of a value, at most; of a larger one only the type is told
NEVER = (1 << 63) - 1  # the number of a commit that no store reaches

T = TypeVar("T")


class Value(NamedTuple):
    """A value or an array that is no part of a fit. curve: of a list of numbers."""

    name: str
    text: str
    curve: Curve | None


class View(NamedTuple):
    """A store's fits and values at one moment.

    time: Unix time. writer: "alive"; "closed", no process has the store open for writing; "died", and the last one has
    not closed it; "missing", there is no file at the path now, and this is the last commit of the one that was there.
    age: seconds since the last commit. more: the number of fits and values that are left out; more_fits: of the fits.
    """

    path: str
    time: float
    sequence: int
    writer: str
    age: float
    fits: list[Fit]
    values: list[Value]
    more: int
    more_fits: int

    def as_json(self, *, curves: bool) -> dict[str, Any]:
        """The fields in types of JSON, with the curves or without."""
        fits = [fit._asdict() for fit in self.fits]
        for fit in fits:
            for name in ("curve", "ends"):
                fit[name] = fit[name]._asdict()
                if not curves:
                    del fit[name]
        values = [value._asdict() | {"curve": value.curve and value.curve._asdict()} for value in self.values]
        if not curves:
            values = [{"name": value["name"], "text": value["text"]} for value in values]
        return self._asdict() | {"fits": fits, "values": values}


class _Commit(NamedTuple):
    """The fits and values of a commit that are shown. A history is None if it can't be read."""

    sequence: int
    fits: list[tuple[str, History | None]]
    values: list[Value]
    more: int
    more_fits: int


class _Quiet(NamedTuple):
    """The pauses of a fit since it was started or resumed last. rows: that it has, since a time; longest: the longest
    pause that was seen, in seconds; counts: whether the present one is a pause of a fit that runs."""

    rows: int
    starts: int
    since: float
    longest: float
    counts: bool


class Follower:
    """An open store, in mode "r", that goes to the newest commit at each view. Several threads may use it.

    Parameters
    ----------
    path : str or path-like
    names : sequence of str
        The fits, values and groups to look at; empty: all fits, and the values beside them that fit in a line.

    Raises what `pmstore.open` raises; UnknownNameError if there is no such name.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str] = ()) -> None:
        self._place = path_of(path)
        self.path = os.fsdecode(path)  # as it was given: for what is shown
        self._names = [name.strip("/") for name in names]
        self._lock = threading.RLock()
        self._quiet: dict[str, _Quiet] = {}
        self._newest: _Commit | None = None
        self._since = 0.0  # the time of the newest commit
        self.store = open_store(self._place, "r")
        try:
            if self._names:
                self.consistently(self._check_names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def consistently(self, read: Callable[[Store], T]) -> T:
        """The result of a function that reads one commit. It is called again if a commit comes between."""
        with self._lock:
            return self._of_the_newest(lambda: consistently(lambda: read(self.store), self.store.refresh))

    def writer(self) -> str:
        """ "alive", "closed", "died" or "missing"."""
        if not os.path.exists(self._place):
            return "missing"
        try:
            event = self.store.wait(NEVER, 0).event
        except StaleSnapshotError:  # another store has just taken its place: the next view shows that one
            return "closed"
        return "alive" if event == "timeout" else event

    def wait(self, timeout: float) -> None:
        """Sleep until there is a newer commit, or no process writes the store any more."""
        with contextlib.suppress(StaleSnapshotError):
            self.store.wait(timeout=timeout)

    def view(self, now: Callable[[], float] = time.time) -> View:
        """Go to the newest commit, and read its fits and values."""
        with self._lock:
            return self._of_the_newest(lambda: self._look(now))

    def _look(self, now: Callable[[], float]) -> View:
        writer = self.writer()  # before the refresh, which then shows the last commit of one that has ended
        before, newest = self._newest, self.store.refresh()
        if before is None or before.sequence != newest:
            self._since = os.fstat(self.store._file_lock.fd).st_mtime if before is None else now()
            self._newest = before = consistently(lambda: self._commit(self.store), self.store.refresh)
        return self._view(before, writer, now())

    def _of_the_newest(self, look: Callable[[], T]) -> T:
        """The result of a look at the store that is at the path now, or was there last."""
        while True:
            self._open_again_if_replaced()
            try:
                return look()
            except StaleSnapshotError:
                if not self.store._is_replaced():
                    raise

    def _open_again_if_replaced(self) -> None:
        if self.store._is_replaced():  # not if there is no file: a program that starts again may make one in a moment
            try:
                another = open_store(self._place, "r")
            except StoreNotFoundError:  # it has gone again
                return
            replaced, self.store = self.store, another
            replaced.close()
            self._newest = None
            self._quiet.clear()

    def _commit(self, store: Store) -> _Commit:
        """The fits and values of the commit that the store shows."""
        every = fits_of(store)
        fits = [name for name in every if self._wanted(name)]
        at_work = {name for name in fits if store.get(f"{name}/finished") is False}
        shown = {*sorted(fits, key=lambda name: name not in at_work)[:MOST]}
        inside = set(every)
        rows = [row for row in store._rows() if self._is_value(row, inside)]
        return _Commit(
            store.sequence,
            [(name, _history(store, name)) for name in fits if name in shown],
            [_value(store, row) for row in rows[:MOST]],
            len(fits) - len(shown) + max(0, len(rows) - MOST),
            len(fits) - len(shown),
        )

    def _view(self, commit: _Commit, writer: str, now: float) -> View:
        fits = [self._fit(name, told, now, writer) for name, told in commit.fits]
        newest = max((now - fit.age for fit in fits if fit.age is not None), default=0.0)
        age = max(0.0, now - max(self._since, newest))
        return View(self.path, now, commit.sequence, writer, age, fits, commit.values, commit.more, commit.more_fits)

    def _fit(self, name: str, told: History | None, now: float, writer: str) -> Fit:
        if told is None:
            return unreadable(name)
        rows = len(told["run"])
        starts = int(told["attempt"][-1]) if rows else 0
        quiet = self._quiet.get(name)
        if quiet is None or quiet.starts != starts:
            quiet = _Quiet(rows, starts, now, 0.0, True)
        elif quiet.rows != rows:
            longest = max(quiet.longest, now - quiet.since) if quiet.counts else quiet.longest
            quiet = _Quiet(rows, starts, now, longest, True)
        fit = fit_of(name, told, now, writer, quiet.longest, quiet.since)
        self._quiet[name] = quiet._replace(counts=quiet.counts and fit.state == "running")
        return fit

    def _wanted(self, name: str) -> bool:
        return not self._names or any(name == one or name.startswith(one + "/") for one in self._names)

    def _is_value(self, row: Row, fits: set[str]) -> bool:
        """Whether a row is shown as a value. Values of a fit's own are not, and arrays only if they are named."""
        name, kind = row[:2]
        if name in self._names:
            return True
        if _in_a_fit(name, fits):
            return False
        return self._wanted(name) and (bool(self._names) or kind in ("value", "list"))

    def _check_names(self, store: Store) -> None:
        for name in self._names:
            if name not in store and not any(True for _ in store.group(name)):
                raise _unknown(store, name)


def views(follower: Follower, stopped: threading.Event) -> Iterator[View]:
    """A view after each commit, at most one in EVERY seconds, and without commits from time to time, as ages change.

    Looking takes at most a quarter of the time of one processor.
    """
    while not stopped.is_set():
        begun = time.monotonic()
        view = follower.view()
        yield view
        took = time.monotonic() - begun
        if stopped.wait(max(EVERY - took, 3 * took)):
            return
        if view.writer == "alive":
            follower.wait(IDLE)
        else:
            stopped.wait(IDLE)  # nobody writes, and the wait for a commit would end at once


def _history(store: Store, name: str) -> History | None:
    try:
        return read_history(store, name)
    except (*UNSOUND, FingerprintMismatchError):
        return None


def _value(store: Store, row: Row) -> Value:
    try:
        return Value(row[0], *_told(store, row))
    except UNSOUND as error:
        return Value(row[0], f"damaged: {error}", None)
    except DecodeError as error:
        return Value(row[0], str(error), None)


def _told(store: Store, row: Row) -> tuple[str, Curve | None]:
    name, kind = row[:2]
    if kind == "list":
        items = store[name]
        last = items[-1:] if len(items) else []
        numbers = items[-LAST:] if last and _is_number(last[0]) else []
        curve = None
        if numbers:
            curve = sampled(
                np.arange(len(items) - len(numbers), len(items)),
                np.array([item if _is_number(item) else np.nan for item in numbers]),
            )
        return f"{len(items):,} items" + (f", the last one {value_text(last[0], TEXT)}" if last else ""), curve
    if kind == "value" and row[4] <= READ:
        return value_text(store._catalog.parts(name), TEXT), None
    return type_text(row), None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _unknown(store: Store, name: str) -> UnknownNameError:
    there = _what_there_is(store)  # now, while the store is open
    return UnknownNameError(name, lambda: there)


def _what_there_is(store: Store) -> str:
    """A part of a sentence: the fits of a store, and the names beside them."""
    fits = fits_of(store)
    inside = set(fits)
    others = [repr(name) for name in store if not _in_a_fit(name, inside)]
    text = f"; there are the fits {', '.join(map(repr, fits[:MOST]))}" if fits else "; there are no fits"
    if others:
        text += f", and the names {', '.join(others[:MOST])}{', …' if len(others) > MOST else ''}"
    return text


def _in_a_fit(name: str, fits: set[str]) -> bool:
    """Whether a name is in the group of a fit."""
    return any(name[: match.start()] in fits for match in re.finditer("/", name))
