"""Errors and warnings: each derives from `Error` and from the built-in that a caller would catch."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Callable, Iterator

__all__ = [
    "AbandonedTransactionWarning",
    "ArchiveConflictError",
    "ArchiveDamagedError",
    "ArchiveError",
    "ArchiveUnavailableError",
    "ArchiveWarning",
    "ClosedStoreError",
    "CorruptStoreError",
    "DerivedArrayError",
    "DerivedMismatchError",
    "DetachedError",
    "Error",
    "FailedStoreError",
    "FingerprintMismatchError",
    "ForkedStoreError",
    "FormatVersionError",
    "InternalError",
    "InvalidNameError",
    "LostUpdateWarning",
    "MapReduceError",
    "NameConflictError",
    "NonDeterministicError",
    "NondeterminismError",
    "NotAStoreError",
    "OutOfMemoryError",
    "OutOfSpaceError",
    "ReadOnlyStoreError",
    "ShardError",
    "ShardTimeoutError",
    "StaleSnapshotError",
    "StoreExistsError",
    "StoreIOError",
    "StoreLockedError",
    "StoreNotFoundError",
    "TooLargeError",
    "TransactionError",
    "UncommittedChangesWarning",
    "UnknownNameError",
    "UnknownVersionError",
    "WorkersLostError",
]


class Error(Exception):
    """Base class of all errors that pmstore raises itself."""


class _SystemError(Error, OSError):
    """An `Error` with an errno; its text is the message alone, without the number."""

    code = errno.EIO

    def __init__(self, *args: object) -> None:
        # OSError sets errno, strerror and filename in __new__, from two or more arguments.
        super().__init__(*args)

    def __new__(cls, *args: object) -> _SystemError:
        return super().__new__(cls, *(args if len(args) > 1 else (cls.code, *args)))

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.errno, self.strerror) if self.filename is None else (self.errno, self.strerror, self.filename)
        return type(self), known, self.__dict__

    def __str__(self) -> str:
        return str(self.strerror)


class StoreIOError(_SystemError):
    """The system refused to open, read, write or sync the file; `errno` has the reason.

    If the disk can't read a block, the text names it, and everything else in the store can still be used.

    If Python has its own exception for the error, it is also that exception: PermissionError, NotADirectoryError,
    IsADirectoryError.
    """


class StorePermissionError(StoreIOError, PermissionError):
    """The file can't be read, or its directory can't be entered."""

    code = errno.EACCES


class StoreNotADirectoryError(StoreIOError, NotADirectoryError):
    """A part of the path isn't a directory."""

    code = errno.ENOTDIR


class StoreIsADirectoryError(StoreIOError, IsADirectoryError):
    """The path is that of a directory."""

    code = errno.EISDIR


class StoreLockedError(_SystemError, BlockingIOError):
    """Another process, or another place in this one, has the store open.

    Attributes
    ----------
    pid : int or None
        The process that has it open; None if the system doesn't report it.
    """

    code = errno.EAGAIN
    pid: int | None = None


class OutOfSpaceError(_SystemError):
    """The disk, or `max_size`, is full. Pending changes stay pending; the committed state is intact."""

    code = errno.ENOSPC


class ReadOnlyStoreError(_SystemError, PermissionError):
    """The store is open for reading, or its file can't be written, and the program tried to change it."""

    code = errno.EACCES


class FailedStoreError(_SystemError):
    """An earlier write or sync failed, so only reopening the store shows which commits are durable."""


class StoreNotFoundError(_SystemError, FileNotFoundError):
    """There is no file at the path, and the mode does not create one."""

    code = errno.ENOENT


class StoreExistsError(_SystemError, FileExistsError):
    """Mode "x" found a file at the path."""

    code = errno.EEXIST


class OutOfMemoryError(Error, MemoryError):
    """The system has no memory, or no address range, for the store."""


class CorruptStoreError(Error, ValueError):
    """The file violates its own format: it is damaged, cut short, or manipulated.

    Store.check tells what is damaged, and pmstore.salvage copies the rest to a new store.
    """


class NotAStoreError(CorruptStoreError):
    """The file was not written by pmstore. It is not changed."""


class FormatVersionError(Error, ValueError):
    """The file was written by a version of pmstore that this version does not know."""


class DecodeError(Error, ValueError):
    """The `decode` of a registered type raised an exception: see `pmstore.register`. Store.parts(name) gives the parts
    of the value, which are as they were stored. Or a time has a time zone that this machine does not know: the package
    tzdata has them all."""


class TooLargeError(Error, ValueError):
    """A name, a shape or a value exceeds a limit of the format."""


class InterchangeError(Error, ValueError):
    """A file of another format is damaged, or is none of that format."""


class InvalidNameError(Error, ValueError):
    """A name breaks the rules: not empty, parts between single "/", no NUL, no lone surrogates, 764 bytes at most."""


class NameConflictError(Error, ValueError):
    """The name is taken, or it is a group where a value is needed, or a value where a group is needed."""


class UnknownNameError(Error, KeyError):
    """There is no such name.

    Parameters
    ----------
    name : str
        The requested name.
    hint : callable, optional
        Returns a sentence to append. It is called when the text is first needed: a search for similar names costs too
        much for a `try: ... except KeyError`.
    group : str
        The full name of the group that the name was looked up in; "" is the store.
    what : str
        The kind of thing that was looked up.
    where : str, optional
        The thing that it was looked up in, such as "the file". By default the group or the store.
    """

    def __init__(
        self,
        name: str,
        hint: Callable[[], str] | None = None,
        group: str = "",
        *,
        what: str = "name",
        where: str = "",
    ) -> None:
        super().__init__(name)
        self.name = name
        self.group = group
        self._what = what
        self._where = where or (f"the group {group!r}" if group else "the store")
        self._hint = hint
        self._text: str | None = None

    def __str__(self) -> str:
        if self._text is None:
            text = f"no {self._what} {self.name!r} in {self._where}"
            if self._hint is not None:
                with contextlib.suppress(Error):  # the store may have been closed in the meantime
                    text += self._hint()
            self._text, self._hint = text, None
        return self._text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, None, self.group)


class TransactionError(Error, RuntimeError):
    """Misuse of transactions: commit() or close() inside one, or an outer transaction that was doomed by an inner
    one."""


class ClosedStoreError(Error, ValueError):
    """The store was closed."""


class StaleSnapshotError(Error, RuntimeError):
    """A later commit has changed an array before it was first asked for, so that this snapshot can't show it any more.

    `Store.refresh` goes to the newest commit; `Store.read` copies several arrays of one commit.
    """


class ForkedStoreError(ReadOnlyStoreError, RuntimeError):
    """This process is a fork of the one that opened the store, and tried to change it.

    The first use of the store in this process opens a snapshot, as mode "r" does.
    """


UNSOUND = (CorruptStoreError, StoreIOError)
"""The errors of reading a part of the file that is damaged, or that the disk can't read."""

MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error, SystemError)
"""The errors that decoding raises for invalid bytes. Other errors come from elsewhere, as from a signal handler."""

UNRELATED = (MemoryError, RecursionError, TimeoutError)
"""Errors that do not mean damage. The decoder of a user may raise any other exception for damaged bytes."""


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Internal. A RuntimeError of a codec that lacked memory leaves the block as a MemoryError: zstd raises no other
    one."""
    try:
        yield
    except RuntimeError as error:
        if "not enough memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def of(what: str, error: Error) -> Error:
    """One of UNSOUND, with the name of the value that could not be read."""
    text = f"{what!r}: {error}"
    return StoreIOError(error.errno, text) if isinstance(error, StoreIOError) else CorruptStoreError(text)


def in_part(what: str, error: TypeError | ValueError) -> TypeError | ValueError:
    """The error of storing a part of a value, with the part's name. An `encode` may raise a class whose constructor
    takes more than a text: it becomes a TypeError or a ValueError."""
    kind = type(error)
    if kind not in (TypeError, ValueError, TooLargeError):
        kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{what}: {error}")


def refused(error: OSError, path: str) -> Error:
    """The error for a path that the system refused to open."""
    kinds = (OutOfSpaceError, StorePermissionError, StoreNotADirectoryError, StoreIsADirectoryError)
    builtin = {errno.EDQUOT: errno.ENOSPC, errno.EPERM: errno.EACCES}.get(error.errno or 0, error.errno)
    kind = next((kind for kind in kinds if kind.code == builtin), StoreIOError)
    return kind(error.errno or kind.code, f"{path!r} can't be opened: {error.strerror or error}", path)


def refuse_without(package: str, error: ModuleNotFoundError, text: str) -> None:
    """Raise ModuleNotFoundError with a text that names the extra, if this package or a module of it is missing."""
    if error.name is not None and error.name.partition(".")[0] == package:
        raise ModuleNotFoundError(text, name=error.name) from error


def class_of_write(number: int) -> type[OutOfSpaceError] | type[StoreIOError]:
    """The class of the error for a write of which the system gave this errno."""
    return OutOfSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else StoreIOError


class DetachedError(Error, RuntimeError):
    """A module or an optimizer that `pmstore.torch.persist` keeps in a store is not there any more: a tensor of it has
    other memory now, or its values were deleted, rolled back or taken over by another module."""


class InternalError(Error, RuntimeError):
    """pmstore broke a contract of its own: please report it."""


class FingerprintMismatchError(Error, ValueError):
    """The saved state of an estimator belongs to other data, parameters or versions."""


class DerivedArrayError(Error, RuntimeError):
    """A derived array has no value: its function raised an exception (`__cause__`) or returned an impossible value, the
    array was not declared in this process, or an input is missing.

    Parameters
    ----------
    name : str
        The name of the derived array.
    text : str, default="has no value"
        The problem, as the rest of the sentence.
    """

    def __init__(self, name: str, text: str = "has no value") -> None:
        super().__init__(name, text)
        self.name = name
        self._text = text

    def __str__(self) -> str:
        return f"the derived array {self.name!r} {self._text}"


class DerivedMismatchError(DerivedArrayError, ValueError):
    """The store's declaration of a derived array has another function, version or inputs than the program's."""


class NonDeterministicError(DerivedArrayError):
    """The function of a derived array returned another value for the same inputs; see ``verify`` of `Store.derive`."""


class MapReduceError(Error, RuntimeError):
    """Base class of the errors of a `MapReduce` that is not complete on its workers. The store keeps the last epoch.

    Attributes
    ----------
    shard : int or None
        The number of the shard.
    worker : str or None
        The name of the worker.
    """

    def __init__(self, text: str, shard: int | None = None, worker: str | None = None) -> None:
        super().__init__(text, shard, worker)
        self.shard, self.worker = shard, worker

    def __str__(self) -> str:
        return str(self.args[0])


class ShardError(MapReduceError):
    """A shard can't be loaded or computed, or has other contents than when the fit began."""


class ShardTimeoutError(ShardError, TimeoutError):
    """A shard has no result after the time that the caller allows."""

    def __init__(self, text: str, shard: int | None = None, worker: str | None = None) -> None:
        super().__init__(text, shard, worker)
        self.errno = errno.ETIMEDOUT


class NondeterminismError(MapReduceError):
    """A map gave two results for the same shard, state and random numbers."""


class WorkersLostError(MapReduceError):
    """There are no workers that could go on: they end as soon as they begin, or compute with other libraries."""


class ArchiveError(Error, RuntimeError):
    """Base class of the errors of `pmstore.archive`."""


class ArchiveDamagedError(ArchiveError, ValueError):
    """An object of the archive is missing, cut short or altered, and no other place has it whole."""


class ArchiveConflictError(ArchiveError):
    """Another writer works in the same place, or has taken it over since this one began."""


class ArchiveUnavailableError(_SystemError, ArchiveError):
    """The place can't be reached, is full or refuses; `errno` has the reason.

    Attributes
    ----------
    transient : bool
        Trying again may help, as after a lost connection or on a full disk. It is False for missing permissions.
    """

    transient = True


class UnknownVersionError(ArchiveError, KeyError):
    """An archive does not have the version."""

    def __str__(self) -> str:
        return str(self.args[0])


class ArchiveWarning(UserWarning):
    """A drain waits for its target or has ended, or an archive is not whole in all its places. Nothing was lost that
    the message does not name."""


class AbandonedTransactionWarning(RuntimeWarning):
    """A transaction was abandoned: everything since the last commit was rolled back.

    It was never left, or it was left at a time when no rollback is possible: by the garbage collector, which destroyed
    a suspended generator or coroutine inside it; by another thread than its own; or by a signal handler in the middle
    of an operation of the store. The next operation of the store rolls back before it begins, and gives this warning.
    """


class UncommittedChangesWarning(RuntimeWarning):
    """A store was not closed, and the changes since its last commit are lost: the program ended, or the last
    reference to the store is gone. The warning has the number of names concerned, and points to the line that opened
    the store.
    """


class LostUpdateWarning(UserWarning):
    """A copy of a list, a dict, an array or a structured scalar, read from a store or a persistent list, was changed
    and not assigned back: the change is not in the store.

    The next commit gives the warning for a copy without other references, and for small copies. For larger copies with
    references, one of the next commits does, at the latest `Store.close`. Values that take more than 64 MiB are not
    checked.

    The same warning tells of a view of rows that have moved (`Store.append`) and that were changed between the move and
    the next commit.
    """
