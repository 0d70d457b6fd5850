"""The history of a fit: one row for every iteration, committed with the iteration.

The group of a fit holds::

    history/limits      a dict: max_iter (None: no limit) and runs
    history/newest      room for PAGE rows; those that are not used yet are zero
    history/0, 1, …     the rows before, in blocks; all blocks but the last one have BLOCK rows

A row is written into the page of the newest rows, in place. The fit refers to no other array of its history, so that a
commit scans this page only. A full page is copied into the last block. A block that is full is replaced by one of four
times the size, up to BLOCK rows; then the next block begins. All of this is part of the next iteration's transaction.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pmstore._errors import UnknownNameError
from pmstore._locks import RowPage
from pmstore._resume.fit_group import FitGroup, StoreOrPath
from pmstore._store.entrance import open_to_read
from pmstore._store.reading import consistently
from pmstore._store.store import Store
from pmstore._values.array import address_of

__all__ = ["History", "fits_of", "history"]

Array = npt.NDArray[Any]

HISTORY = "history"
LIMITS, NEWEST = f"{HISTORY}/limits", f"{HISTORY}/newest"
PAGE = 256  # rows
BLOCK = 64 * PAGE  # rows

_ALWAYS = [("run", "i4"), ("attempt", "i4"), ("iteration", "i8"), ("time", "f8"), ("seconds", "f8")]
_FIRST = "objective"
_MOST = 3  # figures beside the objective, so that a row has at most 64 bytes

_at_work: weakref.WeakKeyDictionary[Store, dict[str, Rows]] = weakref.WeakKeyDictionary()


class History(dict[str, Array]):
    """The history of a fit: its columns by name, as arrays of shape (rows,). One row is one iteration that was done.

    Attributes
    ----------
    max_iter : int or None
        The maximum number of iterations of a run; None: it is not known.
    runs : int
        The number of runs.
    finished : bool
        Whether the fit has ended.
    """

    max_iter: int | None = None
    runs: int = 1
    finished: bool = False

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"<History of a fit ({state}), {len(self['iteration'])} iterations: {', '.join(self)}>"


class Source(NamedTuple):
    """The method of an algorithm that returns the figures of an iteration, for errors.

    call: its name. own: the names of figures that the loop adds.
    """

    call: str = "step()"
    own: tuple[str, ...] = ()

    def figures(self, returned: Any) -> Mapping[str, float]:
        """The figures that the method returned. Raises TypeError or ValueError."""
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise TypeError(f"{self.call} returns a dict of figures, or None, not {returned!r:.80}")
        if not self.own or returned.keys().isdisjoint(self.own):
            return returned
        raise self.refusal(returned)

    def refusal(self, figures: Iterable[str]) -> ValueError:
        """The error for names of figures that can't be in a row."""
        most = _MOST - len(self.own)
        taken = sorted([*self.own, *(name for name, _ in _ALWAYS)])
        others = "1 other, whose name is" if most == 1 else f"{most} others, whose names are"
        return ValueError(
            f"{self.call} may return the figure 'objective' and at most {others} not {', '.join(taken)}; it returned "
            f"{', '.join(map(repr, figures))}"
        )


STEP = Source()


class Rows:
    """Writes the rows of a fit.

    Parameters
    ----------
    group : MutableMapping
        The group of the fit, or a dict for a fit in plain memory.
    max_iter, runs
        The limits of the fit.
    clock : callable, default=time.time
        Returns the time of a row. If it returns 0, the duration is 0, too.
    source : Source
        The method that the figures come from.

    Attributes
    ----------
    committed : int
        The number of rows that commits have made durable. The caller sets it.
    """

    __slots__ = (
        "_attempt",
        "_before",
        "_blocks",
        "_clock",
        "_group",
        "_limits",
        "_moving",
        "_names",
        "_newest",
        "_page",
        "_source",
        "_used",
        "committed",
    )

    def __init__(
        self,
        group: MutableMapping[str, Any],
        max_iter: int | None,
        runs: int,
        clock: Callable[[], float] = time.time,
        source: Source = STEP,
    ) -> None:
        self._group, self._clock, self._source = group, clock, source
        self._limits = {"max_iter": None if max_iter is None else int(max_iter), "runs": int(runs)}
        self._moving = threading.Lock()  # held while rows are moved to a block, and while another thread reads
        self._attempt = 1
        self._blocks = 0
        self._used = BLOCK  # rows in the last block
        self._names: tuple[str, ...] = ()
        self._page: Array = np.zeros(0, _dtype(()))
        self._newest: RowPage | None = None
        self._before = 0  # rows that are not on the page
        if NEWEST in group:
            self._go_on()
        self.committed = self.count

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._before + (0 if self._newest is None else self._newest.place // self._page.itemsize)

    def add(self, run: int, iteration: int, seconds: float, figures: Mapping[str, float] | None) -> None:
        """Write a row, as part of the caller's transaction.

        Raises TypeError or ValueError for figures that can't be in a row.
        """
        newest = self._newest
        if newest is not None and newest.add(run, iteration, seconds, figures):
            return
        if not isinstance(figures, Mapping):
            figures = self._source.figures(figures)
        figures = self._with_all(figures)
        newest = self._newest
        assert newest is not None
        if newest.place == self._page.nbytes:
            newest = self._turn_page()
        if not newest.add(run, iteration, seconds, figures):
            theirs = {name: figure for name, figure in figures.items() if name not in self._source.own}
            raise TypeError(f"the figures that {self._source.call} returns must be numbers, not {theirs!r}")

    def read(self) -> Array:
        """A copy of the committed rows, for another thread."""
        with self._moving:
            return _rows(self._group)[: self.committed]

    def _go_on(self) -> None:
        """Continue after the rows that are there."""
        rows = _rows(self._group)
        if len(rows):
            self._attempt = int(rows["attempt"][-1]) + 1
        *blocks, _ = _arrays(self._group)
        if blocks:
            self._blocks, self._used = len(blocks), _count(self._group[blocks[-1]])
        newest = _count(self._group[NEWEST])
        self._take_page(newest)
        self._before = len(rows) - newest

    def _take_page(self, rows: int) -> None:
        """Continue on the page of the group, behind so many rows."""
        self._page = self._group[NEWEST]
        self._names = (self._page.dtype.names or ())[len(_ALWAYS) :]
        self._go_to(rows)

    def _go_to(self, rows: int) -> RowPage:
        """Continue behind so many rows of the page."""
        page, row = self._page, self._page.itemsize
        address = address_of(page)
        self._newest = RowPage(page, address, rows * row, page.nbytes, row, self._names, self._attempt, self._clock)
        return self._newest

    def _with_all(self, figures: Mapping[str, float]) -> dict[str, float]:
        """A figure for every column. Makes the table at the first row, and columns for new figures."""
        new = [name for name in figures if name not in self._names]
        if not self._names:
            page = np.zeros(PAGE, self._dtype_for(figures))
            self._group[LIMITS], self._group[NEWEST] = self._limits, page
            self._take_page(0)
        elif new:
            self._widen(self._dtype_for([*self._names, *new]))
        return {name: figures.get(name, math.nan) for name in self._names}

    def _dtype_for(self, figures: Iterable[str]) -> np.dtype[Any]:
        """The dtype of rows with these figures and the objective. Raises ValueError if there can't be such rows."""
        others = [name for name in figures if name != _FIRST]
        taken = {name for name, _ in _ALWAYS}
        if len(others) > _MOST or not all(type(name) is str and name and name not in taken for name in others):
            raise self._source.refusal(name for name in figures if name not in self._source.own)
        return _dtype((_FIRST, *others))

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Add columns, which are NaN in earlier rows."""
        rows = self.count - self._before
        with self._moving:
            for name in _arrays(self._group):
                old = self._group[name]
                wider = np.zeros(len(old), dtype)
                for column in dtype.names or ():
                    wider[column] = old[column] if column in old.dtype.names else np.nan
                self._group[name] = wider
            self._take_page(rows)

    def _turn_page(self) -> RowPage:
        """Move the rows of the full page into the last block, and clear the page."""
        with self._moving:
            group, page, used = self._group, self._page.view(np.uint8), self._used
            if self._used == BLOCK:
                group[f"{HISTORY}/{self._blocks}"] = np.array(group[NEWEST])
                self._blocks, self._used = self._blocks + 1, 0
            else:
                name = f"{HISTORY}/{self._blocks - 1}"
                block = group[name]
                if used == len(block):
                    group[name] = np.concatenate([block, np.zeros(3 * len(block), block.dtype)])
                    block = group[name]
                at = used * block.itemsize
                block.view(np.uint8)[at : at + page.nbytes] = page
            self._used += PAGE
            page[:] = 0
        self._before += PAGE
        return self._go_to(0)


@contextmanager
def at_work(store: Store, name: str, rows: Rows) -> Iterator[None]:
    """A context for the work on a fit of an open store. In it, other threads see the committed rows only."""
    here = _at_work.setdefault(store, {})
    here[name] = rows
    try:
        yield
    finally:
        if here.get(name) is rows:
            del here[name]


def history(store: StoreOrPath, name: str) -> History:
    """The history of a fit: one row for every iteration that was committed, also while the fit runs or after a kill.

    Parameters
    ----------
    store : Store, str or path-like
        An open store, in any mode; or the path of a store, which is open for reading during the call. If a commit has
        changed the rows that a snapshot (mode "r") shows, it goes to the newest commit, as with `Store.refresh`.
    name : str
        The group of the fit: the `name` of the estimator or of `pmstore.Resumable.run`. Without a name, it is the
        attribute `slot_name_` of a `Resumable`; ``pmstore ls`` shows the groups of a store.

    Returns
    -------
    History
        A dict of arrays of shape (rows,), all of them copies. A fit without committed iterations, or one of a version
        of pmstore without histories, has empty arrays.

        iteration, run : int64
            The number of the iteration in its run, from 1; the number of the run, from 0.
        objective : float64
            The figure that the algorithm minimizes or maximizes; NaN if it gives none.
        seconds : float64
            The duration of the iteration, without its commit.
        time : float64
            The time at its end, in seconds since 1970 (Unix time).
        attempt : int64
            The number of the call that did the iteration, from 1. Calls that committed nothing do not count.

        The other columns, float64, are figures of the algorithm. `History.max_iter`, `runs` and `finished` tell how far
        the fit is.

    Raises
    ------
    UnknownNameError
        There is no fit under this name (a KeyError).
    FingerprintMismatchError
        Other code changed the rows.
    StoreLockedError, CorruptStoreError
        As for `pmstore.open`.

    Examples
    --------
    >>> import pmstore
    >>> from pmstore.cluster import KMeans
    >>> from sklearn.datasets import load_digits
    >>> model = KMeans(10, random_state=0, store="curve.pm", name="digits").fit(load_digits().data)
    >>> curve = pmstore.history("curve.pm", "digits")
    >>> len(curve["iteration"]) == model.n_iter_, bool(curve["objective"][-1] < curve["objective"][0])
    (True, True)
    """
    if not isinstance(store, Store):
        with open_to_read(store) as own:
            return history(own, name)
    return consistently(lambda: read_history(store, name), store.refresh)


def read_history(store: Store, name: str) -> History:
    """`history`, of the commit that a store shows. Also raises StaleSnapshotError."""
    fit_group = FitGroup(store, name)
    if fit_group.fingerprint is None:
        raise UnknownNameError(name, lambda: f"; {_fits_text(store)}", what="fit")
    rows = _at_work.get(store, {}).get(name)
    if rows is not None:
        return history_of(fit_group.group, rows.read())
    with store._catalog.lock:  # another thread may refresh the store, between one look-up and the next
        check_history(fit_group)
        return history_of(fit_group.group)


def history_of(group: Mapping[str, Any], rows: Array | None = None) -> History:
    """The history in the group of a fit, or in a dict."""
    rows = _rows(group) if rows is None else rows
    result = History()
    for name in ("iteration", "run", *rows.dtype.names[len(_ALWAYS) :], "seconds", "time", "attempt"):  # type: ignore[index]
        column = rows[name]
        result[name] = column.astype(np.int64 if column.dtype.kind == "i" else np.float64)
    limits = group.get(LIMITS, {})
    result.max_iter, result.runs = limits.get("max_iter"), limits.get("runs", 1)
    result.finished = group.get("finished", True)
    return result


def check_history(fit_group: FitGroup) -> None:
    """Raise FingerprintMismatchError unless the history in a fit group is one that `Rows` wrote, or there is none."""
    group = fit_group.group
    if NEWEST not in group:
        return
    page, limits = group[NEWEST], group.get(LIMITS)
    names = getattr(getattr(page, "dtype", None), "names", None) or ()
    fit_group.require(NEWEST, (PAGE,), _dtype(names[len(_ALWAYS) :]))
    if not isinstance(limits, dict) or not all(
        type(limits.get(name)) in (int, type(None)) for name in ("max_iter", "runs")
    ):
        raise fit_group.changed(LIMITS, "the limits of the fit")
    *blocks, _ = _arrays(group)
    for name in blocks:
        block = group[name]
        rows = len(block) if isinstance(block, np.ndarray) and block.shape else PAGE
        fit_group.require(name, (rows,), page.dtype)
        used = _count(block)
        if used % PAGE or not 0 < used <= rows <= BLOCK or (used < BLOCK and name != blocks[-1]):
            raise fit_group.changed(name, "rows of the history", "others")


def _rows(group: Mapping[str, Any]) -> Array:
    """A copy of all rows that are not empty."""
    if NEWEST not in group:
        return np.zeros(0, _dtype((_FIRST,)))
    rows = np.concatenate([group[name] for name in _arrays(group)])
    kept: Array = rows[rows["iteration"] > 0]
    return kept


def _arrays(group: Mapping[str, Any]) -> list[str]:
    """The names of the arrays with rows, the oldest first."""
    blocks = (f"{HISTORY}/{number}" for number in itertools.count())
    return [*itertools.takewhile(group.__contains__, blocks), NEWEST]


def _count(rows: Array) -> int:
    """The number of rows that are not empty."""
    return int(np.count_nonzero(rows["iteration"]))


def _dtype(figures: Iterable[str]) -> np.dtype[Any]:
    return np.dtype([*_ALWAYS, *((name, "f8") for name in figures)])


def fits_of(store: Store) -> list[str]:
    """The names of the fits in a store."""
    names = [name.removesuffix("/finished") for name in store if name.endswith("/finished")]
    return [name for name in names if FitGroup(store, name).fingerprint is not None]


def _fits_text(store: Store) -> str:
    """A part of a sentence: the fits of a store."""
    fits = fits_of(store)
    return f"the store has the fits {', '.join(map(repr, fits))}" if fits else "the store has no fits"
