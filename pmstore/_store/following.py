"""The methods of a store that another process may be writing: newer commits, copies of the newest one, waits and
backups."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from pmstore._core import Core
from pmstore._errors import StaleSnapshotError
from pmstore._interrupts import later
from pmstore._snapshot import Reader, Waiter, newest
from pmstore._store.backup import backup
from pmstore._store.commits import Commits
from pmstore._store.held import Held, SourceFile, tell_pid
from pmstore._store.mapping import NameMapping
from pmstore._store.new_store import Progress
from pmstore._store.opening import seconds
from pmstore._store.reading import read, selections
from pmstore._store.report import Waited

__all__ = ["Following"]

_SLICE = 0.5  # seconds

# Set by pmstore itself, which imports the archive when it is asked for: pmstore.archive._begin.begin.
drainer: Callable[..., Any] | None = None


class Following(NameMapping):
    """The part of `Store` that follows the commits of a process that writes, which may be this one."""

    __slots__ = ("_commits", "_drains", "_file_lock", "_path", "_reader", "_waiter")

    _commits: Commits
    _drains: list[Any]
    _file_lock: Held
    _path: str
    _reader: Reader | None
    _waiter: Waiter | None

    @property
    @abstractmethod
    def sequence(self) -> int:
        """See `Store`."""

    def refresh(self) -> int:
        """Go to the newest commit that is durable, and return its sequence number.

        For a store that was opened with mode "r". Arrays that were handed out keep the bytes of their commit;
        ``store[name]`` gives new ones. Any other store shows the newest commit anyway, with its pending changes. While
        another thread computes a derived array, this waits.
        """
        with self._derived.lock, self._catalog.lock:  # all inputs of a derived array are of one commit (I15)
            self._catalog.core.require_open()
            snapshot = self._catalog.core.snapshot
            if snapshot is not None and not self._is_newest():
                self._refuse_replaced()
                core = Core.of_snapshot(self._following().take(snapshot.asked))
                if core.sequence > self._catalog.core.sequence:
                    self._catalog.show(core)
                    self._derived.pins.clear()
                else:
                    core.close()
        return self.sequence

    def read(self, *names: str | tuple[str, Any]) -> Any:
        """Copies of the newest durable commit, even if this store shows an older one.

        Parameters
        ----------
        *names : str, or tuple of str and index
            Names of arrays and values. A pair takes a part of an array, and reads no more than its rows, or all of an
            array in Fortran order::

                w, epoch = store.read("w", "epoch")
                rows = store.read(("w", np.s_[100:200]))

        Returns
        -------
        The value of the name; for several names, a list of their values, all of one commit.

        Raises UnknownNameError, CorruptStoreError, ClosedStoreError; DerivedArrayError for a derived array;
        StaleSnapshotError if commits write large arrays whole, as quickly as these can be copied, for five seconds
        and a hundred attempts, or if another store has taken the place of this one.
        """
        asked = selections(names, self._full)
        with self._catalog.lock:
            self._catalog.core.require_open()
            core = self._catalog.core
            newest = core if core.snapshot is not None and self._is_newest() else None
            if newest is None and not self.written:
                self._refuse_replaced()
            copies = read(self._following(), asked, newest)
        return copies[0] if len(copies) == 1 else copies

    @property
    def written(self) -> bool:
        """Whether a process has the store open for writing now."""
        self._catalog.core.require_open()
        return self._commits.lock.usable or (isinstance(self._file_lock, SourceFile) and self._file_lock.written())

    def wait(self, after: int | None = None, timeout: float = float("inf")) -> Waited:
        """Sleep until there is a durable commit newer than `after`, by default than the one that this store shows.

        It costs no processor time. Call `refresh` then: `wait` changes nothing that the store shows. Handlers of
        signals run meanwhile, and may end the wait by an exception, as Ctrl-C does.

        Parameters
        ----------
        after : int, optional
            A sequence number.
        timeout : float
            Seconds.

        Returns
        -------
        Waited
            The newest sequence number, and the event that ended the wait: "commit", "timeout", "closed" or "died".
            After "closed" and "died" no newer commit will come. Both are noticed within a quarter of a second.

        Raises ClosedStoreError; StaleSnapshotError if no process writes this store, and another has taken its place.
        """
        limit = seconds(timeout)
        if after is not None and not isinstance(after, SupportsIndex):
            raise TypeError(f"after is a sequence number, not {after!r}: wait(timeout={after!r}) waits for seconds")
        known = self.sequence if after is None else operator.index(after)
        waiter = self._waiting()  # another thread may close the store meanwhile
        begun = time.monotonic()
        while True:  # a signal ends a wait; in slices, for one that comes just before it, or to another thread
            left = limit - (time.monotonic() - begun)
            waited = Waited(*waiter.wait(known, max(0.0, min(left, _SLICE))))
            if waited.event in ("closed", "died"):
                self._refuse_replaced()
            if waited.event != "signal" and (waited.event != "timeout" or left <= _SLICE):
                return waited
            self._catalog.core.require_open()

    def backup(self, path: str | bytes | os.PathLike[Any], *, progress: Progress | None = None) -> int:
        """Copy the newest durable commit to a new store, also while commits go on, in any process.

        The copy has the names, the contents and the sequence number of one commit. It is checked before it gets its
        name, durable: a kill or a crash leaves no file under that name, or the whole backup. The process that writes
        the store does not wait, except as for `read`. While no process writes the store, the copy shares the file's
        blocks where the file system can (xfs, btrfs); the store gets its own again when it is next opened for writing.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The new store, which must not exist.
        progress : callable, optional
            Called repeatedly with the number of copied bytes and the total number. An exception ends the backup.

        Returns
        -------
        int
            The sequence number of the commit.

        Raises StoreExistsError, also if path is the store itself; CorruptStoreError if the store is damaged: `salvage`
        copies what is sound; StaleSnapshotError if commits write large arrays whole, as quickly as these can be copied,
        or if another store has taken the place of this one; OutOfSpaceError, StoreNotFoundError, ReadOnlyStoreError,
        StoreIOError, ClosedStoreError.
        """
        self._refuse_replaced()
        with self._opened_again() as fd:  # other threads may commit meanwhile, or close the store
            return backup(fd, self._path, path, progress)

    def drain(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        every: int = 1,
        keep: Any = None,
        codec: Any = "zstd",
        part_size: int | str = "128MiB",
        queue_size: int | str = "256MiB",
        on_error: str = "warn",
        mtbf: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keep commits as versions of an archive from now on, while the program continues.

        A thread takes each version from the store's file, as a reader does, and no commit waits for it. If the thread
        or a place is too slow, there are fewer versions; a version is always one whole commit. Closing the store
        archives its last commit. After a restart of the program, the same call continues the archive. A later drain to
        the same place ends this one.

        Parameters
        ----------
        url : str, path-like, or several
            A folder, or the URL of any target of fsspec such as ``s3://bucket/run``. With several, each one gets all
            versions from the one before. Only the first must be fast enough.
        every : int
            The least number of commits between two versions.
        keep : int, dict or Keep, optional
            Which versions stay: the number of the newest ones, or a dict with ``last``, ``every`` and ``age``
            (seconds). By default, all stay. Tagged versions always stay, and so do versions that others need.
        codec : str, None, a codec of numcodecs, or a dict of these
            "zstd", the default, sorts the bytes of differences to the version before by their place in the element, and
            compresses them with zstd. ``{"id": "zstd"}`` is zstd alone. None stores contents as they are. A dict has
            codecs by patterns of names: ``{"weights/*": pmstore.codecs.LCDelta()}``. The first pattern that matches an
            array decides. Arrays that match none have the default. LCDelta is lossy (docs/lossy.md), other codecs are
            not.
        part_size, queue_size : int or str
            The largest size of an object, and the most bytes that wait in memory for the first place. The second is
            also the limit of memory for the contents of the last version, from which differences are taken.
        on_error : {"warn", "raise"}
            "warn": an error becomes an ArchiveWarning. "raise": `Drain.wait` and `Drain.close` raise it. The program
            can commit in both cases.
        mtbf : float, optional
            The mean time in seconds between failures that destroy the store itself. The drain then measures its costs,
            and chooses the number of versions in an object and the distance of bases so that lost plus spent time is
            least (LowDiff, arXiv 2509.04084; docs/archive-tuning.md). Such a failure may lose the versions of one
            object.
        storage_options : dict, optional
            For fsspec, such as ``key`` and ``secret``.

        Returns
        -------
        pmstore.archive.Drain

        Raises
        ------
        ArchiveConflictError
            The place has the archive of another store or of another copy of this one: a newer version than this store
            has, or the version of its newest commit with other contents. Or it has aggregates.
        ArchiveError
            An extra is not installed: ``pip install 'pmstore[archive]'``.
        ArchiveUnavailableError, ArchiveDamagedError, ClosedStoreError, TypeError, ValueError
        """
        assert drainer is not None
        with self._catalog.lock:
            self._catalog.core.require_open()
            fd = self._file_lock.again(self._path)
        owned = True
        try:
            drain = drainer(
                self.store,
                fd,
                url,
                every=every,
                keep=keep,
                codec=codec,
                part_size=part_size,
                queue_size=queue_size,
                on_error=on_error,
                mtbf=mtbf,
                storage_options=storage_options,
            )
            with later():  # from now on the descriptor is the drain's, which closing the store ends
                owned = False
                self._drains.append(drain)
                drain.begin()
        except BaseException:
            if owned:
                os.close(fd)
                tell_pid()
            raise
        return drain

    def _end_drains(self) -> None:
        """Close the drains, after the store was closed. Raises the first error."""
        first: Exception | None = None
        while self._drains:
            try:
                self._drains.pop().close()
            except Exception as error:  # the others are still to be closed
                first = first or error
        if first is not None:
            raise first

    def _is_newest(self) -> bool:
        """Whether a snapshot is of the newest commit. If nobody writes, there may be commits that only the next process
        to write will vouch for."""
        return newest(self._file_lock.fd) == self._catalog.core.sequence and self.written

    def _refuse_replaced(self) -> None:
        """Raise StaleSnapshotError if another store has taken the place of a snapshot, which no process writes."""
        if self._is_replaced() and not self.written:
            raise self._replaced()

    def _is_replaced(self) -> bool:
        """Whether the path of a snapshot names another file now."""
        return isinstance(self._file_lock, SourceFile) and self._file_lock.replaced(self._path)

    def _replaced(self) -> StaleSnapshotError:
        return StaleSnapshotError(f"another store has taken the place of {self._path!r}: close this one, and open it")

    def _following(self) -> Reader:
        if self._reader is None:
            with self._opened_again() as fd:
                self._reader = Reader(fd, tell_pid)
        return self._reader

    def _waiting(self) -> Waiter:
        with self._catalog.lock:
            self._catalog.core.require_open()
            if self._waiter is None:
                with self._opened_again() as fd:
                    self._waiter = Waiter(fd, tell_pid)
            return self._waiter

    @contextlib.contextmanager
    def _opened_again(self) -> Iterator[int]:
        """A descriptor of the file that stays when another thread closes the store."""
        fd = -1
        try:
            with self._catalog.lock:
                self._catalog.core.require_open()
                with later():
                    fd = self._file_lock.again(self._path)
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)
                tell_pid()
