"""`open` and `Store`: a file of arrays and values that change together or not at all."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from pmstore._catalog import Catalog
from pmstore._core import Core, Trace, all_ranges
from pmstore._errors import (
    CorruptStoreError,
    Error,
    FormatVersionError,
    LostUpdateWarning,
    OutOfMemoryError,
    OutOfSpaceError,
    StoreIOError,
    TransactionError,
    of,
)
from pmstore._lost import Undo, warn_of_drop
from pmstore._mapping import NameMapping
from pmstore._only import broken, spans
from pmstore._opening import MODES, Claim, claim, outside, path_of, seconds
from pmstore._report import CheckReport, Stats, check
from pmstore._turn import Lock, Transaction, Turn

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Store", "open"]

Mode = Literal["r", "r+", "a", "w", "x"]
Media = Literal["auto", "memory", "file", "trace", "trace:memory", "trace:file"]

_MEDIA = ("auto", "memory", "file", "trace", "trace:memory", "trace:file")

_TRACKERS = ("uffd", "pagemap", "compare")

_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()

# Set by pmstore.testing: asked at every opening, with path, mode and media, for the medium to take and what records it.
recorder: Callable[[str, str, str], tuple[str, Trace | None]] | None = None


def open(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    mode: Mode = "a",
    *,
    media: Media = "auto",
    durability: Literal["sync", "async"] = "sync",
    sync_interval: float = 0.1,
    timeout: float = 0.0,
    max_size: int | None = None,
    verify: bool = False,
) -> Store:
    """Open a store, or create it. A store whose last process died is recovered to its last commit.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file. What a symbolic link points to is opened, and replaced by mode "w".
    mode : {"a", "r", "r+", "w", "x"}
        "r" reads, "r+" reads and writes an existing store, "a" creates it if there is none, "w" creates it anew
        whatever is there, "x" creates it and fails if there is anything.
    media : {"auto", "memory", "file", "trace", "trace:memory", "trace:file"}
        How bytes become durable: "memory" for tmpfs, "file" for disks; "auto" finds out. "trace" records all that
        happens to the durable bytes, for crash tests.
    durability : {"sync", "async"}
        "sync": a commit is durable when it returns. "async": it survives the process when it returns, and becomes
        durable soon after: a power cut or a crash of the system may take the newest commits, but never an earlier one
        without the later ones, nor a part of one. `Store.sync` waits until all are durable, `close` too. On memory it
        is the same as "sync".
    sync_interval : float
        Seconds after a commit by which a sync in the background begins, with durability "async".
    timeout : float
        Seconds to wait for another writer (or for readers) to close the store.
    max_size : int, optional
        Bytes that the file may grow to.
    verify : bool
        Check everything (see `Store.check`) before returning: CorruptStoreError if anything is wrong.

    Returns
    -------
    Store

    Raises
    ------
    StoreLockedError
        Another process, which it names, or another place in this one has the store open. Mode "r" beside a writer too.
    StoreNotFoundError, StoreExistsError
        As the mode says; the first also if the directory is missing.
    NotAStoreError, FormatVersionError, CorruptStoreError
        The file isn't a store, is of a newer version, is damaged. It is left as it is.
    ReadOnlyStoreError
        The file can't be written.
    StoreIOError
        Whatever else the system says against it, as IsADirectoryError, NotADirectoryError or PermissionError too if it
        is one.
    OutOfSpaceError, TypeError, ValueError
    """
    name = path_of(path)
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(map(repr, MODES))}, not {mode!r}")
    if media not in _MEDIA:
        raise ValueError(f"media is one of {', '.join(map(repr, _MEDIA))}, not {media!r}")
    if durability not in ("sync", "async"):
        raise ValueError(f"durability is 'sync' or 'async', not {durability!r}")
    interval = seconds(sync_interval, "sync_interval")
    tracker = os.environ.get("PMSTORE_TRACKER")
    if tracker and tracker not in _TRACKERS:
        raise ValueError(f"PMSTORE_TRACKER is one of {', '.join(_TRACKERS)}, not {tracker!r}")
    limit = _size(max_size)
    kind: str = media
    trace = None
    if media.startswith("trace"):
        kind, trace = media.partition(":")[2] or "auto", Trace()
    elif recorder is not None:
        kind, trace = recorder(name, mode, media)
    held = claim(name, mode, kind, seconds(timeout), outside()[1], trace)
    try:
        empty = not os.fstat(held.fd).st_size
        core = Core(held.fd, kind, read_only=mode == "r", trace=trace, max_size=limit)
    except (CorruptStoreError, FormatVersionError) as error:
        held.unlock()
        hint = ' (it is empty: delete it, or let mode "w" replace it)' if empty else ""
        raise type(error)(f"{name!r}: {error}{hint}") from None
    except StoreIOError as error:
        held.unlock()
        raise of(name, error) from None
    except BaseException:
        held.unlock()
        raise
    store = Store(name, mode, core, held)
    if durability == "async" and mode != "r":
        try:
            core.commit_async(interval)
        except BaseException:
            store._drop()
            raise
    if verify:
        try:
            report = store.check()
        except BaseException:
            store._drop()
            raise
        if not report.ok:
            store._drop()
            raise CorruptStoreError(f"{name!r} is damaged: {report}")
    return store


def _size(max_size: Any) -> int:
    if max_size is None:
        return 0
    try:
        size = int(max_size.__index__())
    except AttributeError:
        raise TypeError(f"max_size is a number of bytes or None, not {type(max_size).__name__}") from None
    if not 0 < size < 1 << 63:
        raise ValueError(f"max_size is a positive number of bytes, not {size}")
    return size


class Store(NameMapping):
    """An open store: a mapping from names to arrays and values, made by `open`. A context manager.

    Leaving a with statement commits and closes, or rolls back and closes if an exception is passing. What is pending
    when the program ends, or when nobody refers to the store any more, is lost, with an UncommittedChangesWarning.
    Stores compare by identity and are hashable; a copy of one is the store itself. Everything but `close`, `closed`,
    `path`, `mode` and `media` raises ClosedStoreError on a closed store, and ForkedStoreError in a process that was
    forked while the store was open.

    May be used from several threads. See `transaction` for which changes become durable together.
    """

    __slots__ = ("_claim", "_debug", "_forked", "_media", "_mode", "_path", "_turn")

    def __init__(self, path: str, mode: str, core: Core, held: Claim) -> None:
        """For `open` only."""
        self._path = path
        self._mode = mode
        self._claim = held
        self._media = core.media
        self._catalog = Catalog(core, read_only=mode == "r")
        self._prefix = ""
        self._turn = Turn(usable=mode != "r", operations=self._catalog.lock)
        self._catalog.lock.undo = Undo(self._catalog, self._described())
        self._forked = False
        self._debug = os.environ.get("PMSTORE_DEBUG", "0") not in ("", "0")  # promises are checked
        _open_stores.add(self)

    def _described(self) -> str:
        return f"the store {self._path!r}, opened at {self._claim.where}"

    # ---- about the store

    @property
    def store(self) -> Store:
        """The store itself; of a group, the store that it is of."""
        return self

    @property
    def path(self) -> str:
        """The absolute path that the store was opened by."""
        return self._path

    @property
    def mode(self) -> str:
        """As it was given to `open`."""
        return self._mode

    @property
    def media(self) -> str:
        """ "memory" or "file": how bytes become durable."""
        return self._media

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._catalog.core.gone is not None and not self._forked

    @property
    def in_transaction(self) -> bool:
        """Whether the calling thread is inside a transaction of this store."""
        return self._turn.mine()

    @property
    def sequence(self) -> int:
        """Commits since the store was created."""
        with self._catalog.lock:
            return self._catalog.core.sequence

    def stats(self) -> Stats:
        """Figures: sizes, bytes written, ordering points."""
        with self._catalog.lock:
            return Stats(medium=self._media, tracker=self._catalog.core.tracker, **self._catalog.core.stats())

    def check(self) -> CheckReport:
        """Verify every structure and every checksum of the committed state.

        Returns
        -------
        CheckReport
            A sequence of all that is wrong, with the names concerned; its `ok` says whether it is empty.
        """
        return check(self._catalog)

    # ---- transactions

    def transaction(self, *, only: Iterable[np.ndarray[Any, Any]] | None = None) -> Transaction:
        """A transaction, for one with statement, which gets the store::

            with store.transaction():
                array += 1
                store["epoch"] = epoch

        Leaving it commits; leaving it by an exception, KeyboardInterrupt included, takes every array, in place, and
        every name back to the last commit. A transaction is the time since the last commit: changes made before it
        began belong to it.

        No await or yield inside: what else runs meanwhile would be part of it. If transactions are then left out of
        order, all of them are rolled back and raise TransactionError; what ends in order is not noticed. One that
        nobody leaves is rolled back when the garbage collector finds it: before the next operation of the store, with
        an AbandonedTransactionWarning.

        It belongs to one thread; others that ask for one wait. A transaction inside another joins it; an exception that
        leaves an inner one dooms the outer, which rolls back and raises TransactionError if it ends without an
        exception.

        If the commit fails (OutOfSpaceError), what is pending stays pending: make space and `commit`, or `rollback`.

        Parameters
        ----------
        only : iterable of arrays, optional
            A promise that saves looking for changes: of arrays, nothing was changed since the last commit but these,
            which are live arrays of this store or views of them; of a view with gaps, what lies between is looked at
            too. Names, values, new arrays and what is assigned to a name are always committed. ``[]``: arrays haven't
            changed at all. Inside another transaction both promises hold together, and one without a promise lifts it.

            What was changed elsewhere all the same is not in this commit; it is in the next one that looks, or
            rolled back. With PMSTORE_DEBUG=1 in the environment when the store is opened, every commit checks it,
            and raises TransactionError, which names the array and its elements, before anything is committed; what is
            pending stays pending.
        """
        return self._turn.transaction(self, None if only is None else spans(self._catalog, only))

    def commit(self) -> None:
        """Make every change since the last commit durable, by arrays and by names, together.

        TransactionError inside a transaction; waits for one of another thread. OutOfSpaceError: what is pending stays
        pending. FailedStoreError: a write or a sync failed, and only reopening the store tells what is durable.
        """
        turn, catalog = self._turn, self._catalog
        if not turn.idle:  # by whomever; what is called there costs as much as all the rest
            self._refuse_inside("commit")
        outer: Any = turn.lock
        lock: Any = catalog.lock
        watch = catalog.watch
        try:  # acquire and release take half as long as a with statement, and an 8-byte commit 0.3 µs
            outer.acquire()
            try:
                lock.acquire()
                done = not (watch.seen or watch.changed)
                if done:
                    catalog.core.commit()
                lock.release()
            except BaseException:
                if lock._is_owned():
                    lock.release()
                raise
            if not done:
                self._commit_now()
            outer.release()
        except BaseException:
            if outer._is_owned():
                outer.release()
            raise

    def sync(self) -> None:
        """Wait until all that was committed is durable: with durability "async" it may not be yet.

        FailedStoreError, or StoreIOError, if a sync failed: only reopening the store tells what is durable then.
        """
        with self._catalog.lock:
            self._catalog.core.sync()

    def rollback(self) -> None:
        """Take all arrays, in place, and names back to the last commit.

        An array created since is detached; one deleted since is back, and live. TransactionError as for `commit`.
        OutOfSpaceError only where a copy shares the file's blocks (docs/guarantees.md): nothing is committed before
        a rollback has succeeded.
        """
        self._refuse_inside("rollback")
        with self._turn.lock:
            self._rollback_now()

    def _refuse_inside(self, what: str) -> None:
        self._writable()
        if self._turn.mine():
            raise TransactionError(f"{what}() inside a transaction: leave the with statement instead")

    def _writable(self) -> None:
        self._catalog.writable()

    def _commit_now(self, only: Any = None, *, closing: bool = False) -> None:
        catalog = self._catalog
        lock: Any = catalog.lock
        watch = catalog.watch
        lost: list[tuple[str, str]] | None = None
        try:  # as in `commit`
            lock.acquire()
            if only is not None and self._debug and (error := broken(catalog, only)) is not None:
                raise error
            if watch.seen or watch.changed:
                lost = watch.lost(all_of_them=closing)
            if only is None:
                catalog.core.commit()
            else:
                catalog.core.commit_only(only)
            lock.release()
        except BaseException:
            if lock._is_owned():
                lock.release()
            raise
        if lost is None:
            return
        for what, place in lost:
            warnings.warn(
                f"{what!r} was read from the store and changed, but not assigned back: the change is not in the store. "
                f"{place} = value stores it",
                LostUpdateWarning,
                stacklevel=outside()[0],
            )

    _both_promises = staticmethod(all_ranges)  # for Transaction, as are the four methods above and below

    def _rollback_now(self) -> None:
        self._catalog.rollback()

    # ---- arrays

    def release(self, *names: str) -> None:
        """Give back the private memory of arrays, by default of all: what equals the last commit is read from the
        file again.

        No other thread may be writing to them meanwhile. UnknownNameError; TypeError for what isn't an array.
        """
        self._catalog.release(names)

    # ---- the end

    def close(self) -> None:
        """Commit, and let the file go. Closing twice is fine.

        Arrays that were handed out become read-only and keep their bytes, apart from the file. TransactionError
        inside a transaction; waits for one of another thread. After OutOfSpaceError the store is still open, with
        what is pending: make space, or `rollback` first. It is open after OutOfMemoryError, too: a commit lacked
        memory, and all is pending, or it was made, and there is none for the arrays that are alive: let go of some.
        """
        if self._forked or self.closed:
            return
        if self._turn.mine():
            raise TransactionError("close() inside a transaction: leave the with statement first")
        with self._turn.lock:
            if self._catalog.core.gone is not None:  # by another thread, while this one waited
                return
            try:
                if self._turn.usable:
                    self._commit_now(closing=True)
            except (OutOfSpaceError, OutOfMemoryError):
                raise
            except BaseException:
                with contextlib.suppress(Error):
                    self._drop()
                raise
            self._drop()

    def _drop(self, *, discard: bool = False, exiting: bool = False) -> None:
        """Close without a commit. After OutOfMemoryError the store is still open."""
        usable, self._turn.usable = self._turn.usable, False
        undo = self._catalog.lock.undo
        undo.closing = True
        try:
            with self._catalog.lock:  # which may tell of a transaction that was abandoned, as an error perhaps
                pass
        finally:
            try:
                self._catalog.close(discard=discard, exiting=exiting)
            finally:
                if self._catalog.core.gone is None:
                    undo.closing = False
                    self._turn.usable = usable
                else:
                    _open_stores.discard(self)
                    self._claim.unlock()

    def __enter__(self) -> Store:
        self._catalog.core.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._forked or self.closed:
            return
        if kind is None:
            try:
                self.close()
            except OutOfSpaceError:
                self._drop()
                raise
            return
        with self._turn.lock:  # its own transaction, if the store is closed inside one, can't go on
            if self._catalog.core.gone is None:
                self._drop()

    def __del__(self) -> None:
        # Not open: it failed to open, was closed, or belongs to the parent process.
        if getattr(self, "_claim", None) is None or self._forked or self.closed:
            return
        _drop_with_warning(self)

    # ---- identity

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) >> 4

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an open Store can't be pickled: pass its path and open it there, or copy what it holds with dict(store)"
        )

    def __sklearn_clone__(self) -> Store:
        """The store itself: clones of an estimator keep their fits in the same store."""
        return self


def _drop_with_warning(store: Store, *, exiting: bool = False) -> None:
    try:
        if store._turn.usable:
            warn_of_drop(store, store._described(), store._claim.where)
    finally:
        # OutOfMemoryError: the core stays open, and the file locked, as long as the process lives.
        with contextlib.suppress(Error):
            store._drop(exiting=exiting)


@atexit.register
def close_all() -> None:
    """Close what is open as the interpreter does when it exits: what is pending is dropped, with a warning."""
    told: Warning | None = None
    for store in list(_open_stores):
        try:
            _drop_with_warning(store, exiting=True)
        except ResourceWarning:  # made an error: the others are to be closed too
            pass
        except Warning as warning:
            told = told or warning
    if told is not None:
        raise told  # which Python prints, and goes on


def _after_fork() -> None:
    global _open_stores
    for store in list(_open_stores):
        core = store._catalog.core
        lock = Lock()  # another thread of the parent's may hold the old one for good
        lock.undo = store._catalog.lock.undo
        core.lock = store._catalog.lock = lock
        store._catalog.deriving = threading.RLock()
        store._turn.usable = False  # for transactions that are open; its lock, too, may be held for good
        store._turn = Turn(usable=False, operations=lock)
        store._forked = True
        core.leave()
    _open_stores = weakref.WeakSet()


os.register_at_fork(after_in_child=_after_fork)
