"""`open` and `Store`: a file of arrays and values that change together or not at all."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pmstore._catalog.catalog import Catalog
from pmstore._core import Core
from pmstore._derived.arrays import DerivedArrays
from pmstore._errors import (
    ClosedStoreError,
    Error,
    FailedStoreError,
    OutOfMemoryError,
    OutOfSpaceError,
    StoreNotFoundError,
    TransactionError,
    UnknownNameError,
)
from pmstore._interrupts import later
from pmstore._locks import Lock, Transaction
from pmstore._snapshot import Reader, Snapshot
from pmstore._store import notes
from pmstore._store.commits import Commits
from pmstore._store.cores import opened_snapshot
from pmstore._store.following import Following
from pmstore._store.held import FileLock, Held
from pmstore._store.lost_work import Undo, warn_of_drop
from pmstore._store.only import holds, mark, spans
from pmstore._store.opening import open_source
from pmstore._store.report import CheckReport, Stats, check

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Store", "close_all", "open_stores"]

open_stores: weakref.WeakSet[Store] = weakref.WeakSet()


class Store(Following):
    """An open store: a mapping from names to arrays and values, made by `open`. A context manager.

    Leaving a with statement commits and closes, or rolls back and closes if an exception is passing. Changes that are
    pending when the program ends, or when the last reference to the store is gone, are lost, with an
    UncommittedChangesWarning. Stores compare by identity and are hashable; a copy of one is the store itself.
    Everything but `close`, `closed`, `path`, `mode` and `media` raises ClosedStoreError on a closed store.

    A store travels to other processes as a reader of the same path. A pickle holds the path, and is loaded by
    ``pmstore.open(path, "r")``. In a process that was forked while the store was open, the first use opens such a
    snapshot, and changes raise ForkedStoreError. Either shows the newest durable commit, without pending changes: with
    durability "async", call `sync` before.

    Several threads may use a store. `transaction` explains which changes become durable together.
    """

    __slots__ = ("_media", "_mode")

    def __init__(self, path: str, mode: str, core: Core, held: Held, reader: Reader | None) -> None:
        """Only `open` calls this, where no signal handler runs."""
        self._reader = reader  # for snapshots; a store that is written makes one for its first read()
        self._drains = []
        self._waiter = None  # for the first wait()
        self._path = path
        self._mode = mode
        self._file_lock = held
        self._media = core.media if core.snapshot is None else core.snapshot.media
        self._catalog = Catalog(core, read_only=mode == "r")
        self._catalog.keeper = weakref.ref(self)
        self._derived = DerivedArrays(self._catalog, path)
        self._prefix = ""
        self._catalog.lock.undo = Undo(self._catalog, self._described())
        self._commits = Commits(self._catalog, mode != "r", self._derived.lock)
        open_stores.add(self)

    def _described(self) -> str:
        return f"the store {self._path!r}, opened at {self._file_lock.where}"

    # ---- about the store

    @property
    def store(self) -> Store:
        """The store itself; for a group, its store."""
        return self

    @property
    def path(self) -> str:
        """The absolute path under which the store was first opened."""
        return self._path

    @property
    def mode(self) -> str:
        """The mode, as it was first given to `open`; "r" in a process that was forked since."""
        return self._mode

    @property
    def media(self) -> str:
        """ "memory", "file" or "dax": how bytes become durable."""
        return self._media

    @property
    def recorded(self) -> bool:
        """Whether a crash test records the operations on the durable bytes. A program must then do the same in every
        run."""
        return self._catalog.core.trace is not None

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""
        return self._catalog.core.gone

    @property
    def openings(self) -> int:
        """How often `open` returned this store, less the openings that were given back by `close`."""
        return 0 if self.closed else self._file_lock.openings

    @property
    def in_transaction(self) -> bool:
        """Whether the calling thread is inside a transaction of this store."""
        return self._commits.lock.mine()

    @property
    def sequence(self) -> int:
        """The number of commits since the store was created. One without changes and without a note does not count."""
        with self._catalog.lock:
            return self._catalog.core.sequence

    def stats(self) -> Stats:
        """Figures: sizes, bytes written, ordering points."""
        with self._catalog.lock:
            core = self._catalog.core
            domain = core.domain if core.snapshot is None else core.snapshot.domain
            return Stats(medium=self._media, domain=domain, tracker=core.tracker, **core.stats())

    def check(self) -> CheckReport:
        """Verify every structure and every checksum of the committed state.

        Returns
        -------
        CheckReport
            A sequence of all problems, with the names concerned; its `ok` is true if there are none.
        """
        return check(self._catalog)

    # ---- transactions

    def transaction(
        self,
        *,
        only: Iterable[np.ndarray[Any, Any]] | None = None,
        message: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Transaction[Store]:
        """A transaction, for one with statement, which gets the store::

            with store.transaction():
                array += 1
                store["epoch"] = epoch

        Leaving it commits. Leaving it by an exception, KeyboardInterrupt included, takes every array, in place, and
        every name back to the last commit. A transaction covers everything since the last commit, also changes made
        before it began.

        Don't use await or yield inside: the transaction would include the changes of other code that runs meanwhile. If
        transactions are then left out of order, all of them are rolled back and raise TransactionError. If they are
        left in order, the store does not notice. A transaction that is never left is rolled back after the garbage
        collector has found it, before the next operation of the store, with an AbandonedTransactionWarning.

        A transaction belongs to one thread; other threads wait for their own. A transaction inside another one joins
        it. If an exception leaves the inner one, the outer one is doomed: it rolls back, and raises TransactionError if
        it ends without an exception.

        If the commit fails with OutOfSpaceError or OutOfMemoryError, the changes stay pending: make space and `commit`,
        or `rollback`. The write set that ``only`` declared stays part of the next commit.

        Parameters
        ----------
        only : iterable of arrays, optional
            The declared write set: of all arrays, only these have changed since the last commit. The commit then scans
            only these. They are live arrays of this store or views of them. The gaps of a view with gaps are scanned
            too. Names, values, new arrays and assignments to names are always committed. ``[]`` declares that no array
            has changed. Inside another transaction, the arrays of both declarations may change; a transaction without a
            declaration ends the restriction.

            The commit scans whole pages of 4 KiB, so that another change in a page that a declared part touches is in
            it, too. A change elsewhere is not. The next commit that scans the array takes it, or a rollback takes it
            back. With PMSTORE_DEBUG=1 in the environment when the store is opened, every commit looks for such
            changes first, and raises a TransactionError that names the array and its elements. Then nothing is
            committed, and everything stays pending.
        message : str, optional
            A description of the commit, for `commit_note` and for an archive.
        attributes : dict of str to values, optional
            Further descriptions: values as a store keeps them, as they are when `transaction` is called. Large ones
            make the commit slower. If transactions are nested, the commit gets the message and the attributes of the
            last transaction that began with any. A TypeError names the attribute that can't be stored.
        """
        commits = self._commits
        if only is None and message is None and attributes is None:
            return commits.lock.transaction(self, commits, None)
        note = None if message is None and attributes is None else notes.encoded(message, attributes)
        only = None if only is None else spans(self._catalog, only)
        return commits.lock.transaction(self, commits, only, note)

    def commit_note(self) -> notes.CommitNote | None:
        """Message and attributes of the commit that the store shows, as `transaction` was given them.

        The result has the fields message (a str or None) and attributes (a dict). It is None if the commit was made
        without both. Pending changes make no difference. Raises CorruptStoreError if they are damaged, and
        StaleSnapshotError in a snapshot if they are large and later commits have replaced them.
        """
        note = self._commits.note()
        return None if note is None else notes.decoded(note)

    def commit(self) -> None:
        """Make every change of arrays and names since the last commit durable, all together.

        Raises TransactionError inside a transaction; waits for a transaction of another thread. After OutOfSpaceError
        or OutOfMemoryError the changes stay pending. FailedStoreError: a write or a sync failed, and only reopening the
        store shows which commits are durable.
        """
        self._commits.commit()

    def _has_pending(self) -> bool:
        """Whether a commit would change anything."""
        with self._catalog.lock:
            return bool(self._catalog.core.pending())

    def sync(self) -> None:
        """Wait until all commits are durable; with durability "async" some may not be yet.

        Raises FailedStoreError or StoreIOError if a sync failed: only reopening the store shows which commits are
        durable.
        """
        with self._catalog.lock:
            self._catalog.core.sync()

    def rollback(self) -> None:
        """Take all arrays, in place, and names back to the last commit.

        An array created since then is detached; one deleted since then is back, and live. Raises TransactionError like
        `commit`. OutOfSpaceError is possible only where a copy of the file shares its blocks (docs/guarantees.md); then
        nothing is committed before a rollback has succeeded.
        """
        self._commits.rollback()

    # ---- arrays

    def release(self, *names: str) -> None:
        """Give back the private memory of the given arrays, by default of all. Pages that equal the last commit are
        read from the file again.

        No other thread may write to the arrays meanwhile. Raises UnknownNameError; TypeError for a value that isn't an
        array.
        """
        self._catalog.release(names)

    def mark_dirty(self, array: np.ndarray[Any, Any]) -> None:
        """Say that an array, or the part of it that a view shows, may have changed unseen by the kernel.

        That is memory that a device, io_uring or another direct read wrote through pages that it had pinned before the
        last commit. The next commit compares all pages of the view with the last commit, gaps included, and a rollback
        restores them. A transaction with ``only=`` does not: mark_dirty declares nothing, and the pages stay marked for
        the commit after it that has no declared write set.

        Parameters
        ----------
        array : numpy.ndarray
            A live array of this store or a view of one, of any shape and dtype; one without elements does nothing.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            For an array that is detached or not of this store, or that was stored with ``writeable=False``.
        ReadOnlyStoreError
            In mode "r".
        StoreIOError
            The disk can't read the pages.
        """
        self._catalog.writable()
        self._catalog.lock.call(mark, self._catalog.core, array)

    def _holds(self, memory: tuple[int, int]) -> bool:
        """Whether a live array that this process may change has all of some memory, an address and a length."""
        return self._mode != "r" and self._catalog.lock.call(holds, self._catalog.core, memory)

    # ---- the end

    def close(self) -> None:
        """Commit, and close the file, unless `open` returned this store more than once: then this gives one opening
        back. Closing a closed store is allowed.

        Live arrays become read-only and keep their bytes, apart from the file. Raises TransactionError inside a
        transaction, unless there are more openings: then the changes are part of that transaction. Waits for a
        transaction of another thread. After OutOfSpaceError the store is still open, with its pending changes: make
        space, or `rollback` first. After OutOfMemoryError it is open, too. Either the commit lacked memory, and all
        changes are pending, or it succeeded, and there is no memory for the live arrays: drop some of them.
        A store that failed is closed at once.
        """
        try:
            if not self.closed:
                self._close()
        finally:
            if self.closed:
                self._end_drains()

    def _close(self) -> None:
        if self._commits.lock.mine():
            if self._file_lock.openings == 1:
                raise TransactionError("close() inside a transaction: leave its with statement first, or call tx_end()")
            self._give_back()
            return
        self._catalog.refuse_in_import()
        self._leave_by(self._commit_and_give_back)

    def _leave_by(self, leave: Callable[[], None]) -> None:
        """Call it with the transaction lock, unless another thread closes the store before. An interrupt of the wait
        gives back one of several openings, and pending changes stay with the others."""
        waits = True
        try:
            with self._commits.lock.inner:  # in C, so that no handler runs between lock and block: no ExitStack
                waits = False
                if not self.closed:
                    leave()
        except BaseException:
            if waits and self._file_lock.openings > 1:
                self._give_back()
            raise

    def _commit_and_give_back(self) -> None:
        try:
            if self._commits.lock.usable:
                self._commits.commit_now(closing=self._file_lock.openings == 1)
        except (OutOfSpaceError, OutOfMemoryError):
            raise
        except BaseException as error:
            with contextlib.suppress(Error):
                self._drop() if isinstance(error, FailedStoreError) else self._give_back()
            raise
        self._give_back()

    def _leave_for_good(self) -> None:
        """Give one opening back, and commit before, unless there can't be a commit: the opening is gone in any case."""
        try:
            self._catalog.refuse_in_import()
            may_commit = not self._commits.lock.mine()
        except TransactionError:
            may_commit = False
        self._leave(None, self._commit_if_there_is_space if may_commit else None)

    def _commit_if_there_is_space(self) -> None:
        try:
            self._commit_and_give_back()
        except (OutOfSpaceError, OutOfMemoryError):
            self._give_back()
            raise

    def _roll_back_and_give_back(self, *passing: Any) -> None:
        try:
            if self._commits.lock.usable and self._file_lock.openings > 1:  # the others go on from the last commit
                transaction = self._commits.lock.transaction(self, self._commits, None)
                transaction.__enter__()
                transaction.__exit__(*passing)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Give one opening back without a commit. The last one closes the store."""
        with later():
            if self._file_lock.leave():
                self._drop()

    def _drop(self, *, discard: bool = False, exiting: bool = False) -> None:
        """Close without a commit. After OutOfMemoryError the store is still open."""
        with later():
            self._drop_now(discard, exiting)

    def _drop_now(self, discard: bool, exiting: bool) -> None:
        self._file_lock.closing()
        usable, self._commits.lock.usable = self._commits.lock.usable, False
        undo = self._catalog.lock.undo
        undo.closing = True
        try:
            with self._catalog.lock:  # taking the lock may report an abandoned transaction, perhaps as an error
                pass
        finally:
            try:
                self._catalog.close(discard=discard, exiting=exiting)
            finally:
                if not self.closed:
                    undo.closing = False
                    self._commits.lock.usable = usable
                    self._file_lock.stay()
                else:
                    self._reader = self._waiter = None
                    self._derived.clear()
                    self._commits.close()
                    open_stores.discard(self)
                    self._file_lock.unlock()

    def _leased(self) -> contextlib.AbstractContextManager[None]:
        """A context in which other processes are told that this one will close the store itself."""
        return self._file_lock.lease() if isinstance(self._file_lock, FileLock) else contextlib.nullcontext()

    def __enter__(self) -> Store:
        self._catalog.core.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.closed:
            return
        if kind is None:
            try:
                self.close()
            except OutOfSpaceError:
                self._give_back()
                if self.closed:
                    self._end_drains()
                raise
            return
        self._leave(error, lambda: self._roll_back_and_give_back(kind, error, traceback))

    def _leave(self, error: BaseException | None, leave: Callable[[], None] | None = None) -> None:
        """Give one opening back while an error is passing. By default nothing is committed or rolled back: what is
        pending stays with the other openings."""
        if self.closed:
            return
        try:
            if isinstance(error, UnknownNameError):
                str(error)  # now: its hint asks the store
        finally:
            try:  # if the store is closed inside its own transaction, that transaction can't continue
                self._leave_by(leave or self._give_back)
            finally:
                if self.closed:
                    self._end_drains()

    def __del__(self) -> None:
        # The store is not open: opening failed before the last attribute was set, or it was closed.
        if not hasattr(self, "_commits") or self.closed:
            return
        _drop_with_warning(self)

    def _leave_parent(self) -> None:
        """Become a reader, in a forked process. It opens its snapshot when it is first used."""
        lock = Lock()  # another thread of the parent may hold the old one forever
        lock.undo = self._catalog.lock.undo
        this = weakref.ref(self)
        self._catalog.leave(lock, lambda: _snapshot_for(this()))
        self._derived.leave()
        self._commits.leave(self._derived.lock)
        for kept in (self._reader, self._waiter):
            if kept is not None:
                kept.leave()
        self._reader = self._waiter = None
        self._mode = "r"

    def _snapshot_of_path(self) -> Snapshot:
        try:
            held = open_source(self._path, self._file_lock.where)
        except StoreNotFoundError:
            raise self._nameless() from None
        if held.inode != self._file_lock.inode:
            held.unlock()
            raise self._replaced()
        reader, snapshot = opened_snapshot(self._path, held)
        held.openings = self._file_lock.openings
        self._file_lock.unlock()
        self._file_lock, self._reader = held, reader
        return snapshot

    # ---- identity

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) >> 4

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the path. The store is a snapshot in another process."""
        if self.closed:
            raise ClosedStoreError("the store is closed: open it before it is sent to another process")
        if not os.path.exists(self._path):
            raise self._nameless()
        return _arrived, (self._path,)

    def _nameless(self) -> StoreNotFoundError:
        text = f"no other process can open {self._path!r}: it is in memory, or was deleted or moved"
        return StoreNotFoundError(errno.ENOENT, text, self._path)

    def __sklearn_clone__(self) -> Store:
        """The store itself: clones of an estimator keep their fits in the same store."""
        return self


def _snapshot_for(store: Store | None) -> Snapshot:
    if store is None:
        raise ClosedStoreError("the store is closed")
    return store._snapshot_of_path()


def _arrived(path: str) -> Store:
    """A store from a pickle."""
    from pmstore._store.entrance import open

    return open(path, "r")


def _drop_with_warning(store: Store, *, exiting: bool = False) -> None:
    store._catalog.lock.dropping = True  # also in the middle of an operation, of a list that outlives the store
    try:
        if store._commits.lock.usable:
            warn_of_drop(store, store._described(), store._file_lock.where)
    finally:
        # After OutOfMemoryError the core stays open, and the file locked, until the process ends.
        with contextlib.suppress(Error):
            store._drop(exiting=exiting)


@atexit.register
def close_all() -> None:
    """Close all open stores as the interpreter does when it exits: pending changes are dropped, with a warning."""
    told: Warning | None = None
    for store in list(open_stores):
        try:
            _drop_with_warning(store, exiting=True)
        except ResourceWarning:  # a filter made the warning an error; the other stores are still to be closed
            pass
        except Warning as warning:
            told = told or warning
    if told is not None:
        raise told  # Python prints it and continues


def _after_fork() -> None:
    global open_stores
    open_stores = weakref.WeakSet(list(open_stores))  # another thread of the parent may have been changing it
    for store in list(open_stores):
        store._leave_parent()


os.register_at_fork(after_in_child=_after_fork)
