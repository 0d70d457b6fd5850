"""Errors and warnings: each derives from `Error` and from the built-in that a caller would catch."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

__all__ = [
    "AbandonedTransactionWarning",
    "ClosedStoreError",
    "CorruptStoreError",
    "DerivedArrayError",
    "DerivedMismatchError",
    "Error",
    "FailedStoreError",
    "FingerprintMismatchError",
    "ForkedStoreError",
    "FormatVersionError",
    "InternalError",
    "InvalidNameError",
    "LostUpdateWarning",
    "NameConflictError",
    "NonDeterministicError",
    "NotAStoreError",
    "OutOfMemoryError",
    "OutOfSpaceError",
    "ReadOnlyStoreError",
    "StoreExistsError",
    "StoreIOError",
    "StoreLockedError",
    "StoreNotFoundError",
    "TooLargeError",
    "TransactionError",
    "UncommittedChangesWarning",
    "UnknownNameError",
]


class Error(Exception):
    """Base of every error that pmstore raises on its own account."""


class _SystemError(Error, OSError):
    """An `Error` with an errno; its text is the message alone, without the number."""

    code = errno.EIO

    def __init__(self, *args: object) -> None:
        # OSError sets errno, strerror and filename in __new__, from two or more arguments.
        super().__init__(*args)

    def __new__(cls, *args: object) -> _SystemError:
        return super().__new__(cls, *(args if len(args) > 1 else (cls.code, *args)))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror)

    def __str__(self) -> str:
        return str(self.strerror)


class StoreIOError(_SystemError):
    """The system refused to open, read, write or sync the file; `errno` says why.

    After a block that the disk can't read, which the text names, everything else in the store can still be used.

    One that Python has an exception of its own for is that exception too: PermissionError, NotADirectoryError,
    IsADirectoryError.
    """


class StorePermissionError(StoreIOError, PermissionError):
    """The file can't be read, or its directory can't be entered."""

    code = errno.EACCES


class StoreNotADirectoryError(StoreIOError, NotADirectoryError):
    """The path leads through something that isn't a directory."""

    code = errno.ENOTDIR


class StoreIsADirectoryError(StoreIOError, IsADirectoryError):
    """There is a directory at the path."""

    code = errno.EISDIR


class StoreLockedError(_SystemError, BlockingIOError):
    """Another process, or another place in this one, has the store open.

    Attributes
    ----------
    pid : int or None
        The process that has it open; None if the system doesn't tell.
    """

    code = errno.EAGAIN
    pid: int | None = None


class OutOfSpaceError(_SystemError):
    """The disk, or `max_size`, is full. What is pending stays pending; the committed state is intact."""

    code = errno.ENOSPC


class ReadOnlyStoreError(_SystemError, PermissionError):
    """A change was asked of a store that is open for reading, or whose file can't be written."""

    code = errno.EACCES


class FailedStoreError(_SystemError):
    """An earlier write or sync failed, so that nothing more can be promised until the store is reopened."""


class StoreNotFoundError(_SystemError, FileNotFoundError):
    """There is no file at the path, and the mode does not create one."""

    code = errno.ENOENT


class StoreExistsError(_SystemError, FileExistsError):
    """Mode "x" found a file at the path."""

    code = errno.EEXIST


class OutOfMemoryError(Error, MemoryError):
    """The system has no memory, or no address range, for the store."""


class CorruptStoreError(Error, ValueError):
    """The file breaks its own format: damaged, cut short, or made by someone with a purpose."""


class NotAStoreError(CorruptStoreError):
    """The file was not written by pmstore. It is left as it is."""


class FormatVersionError(Error, ValueError):
    """The file was written by a version of pmstore that this one does not know."""


class TooLargeError(Error, ValueError):
    """A name, a shape or a value is over a limit of the format."""


class InvalidNameError(Error, ValueError):
    """A name breaks the rules: not empty, parts between single "/", no NUL, no lone surrogates, 764 bytes at most."""


class NameConflictError(Error, ValueError):
    """The name is taken, or is a group where a value is wanted, or the other way round."""


class UnknownNameError(Error, KeyError):
    """There is no such name.

    Parameters
    ----------
    name : str
        The name that was asked for.
    hint : callable, optional
        Gives a sentence to append. It is called when the text is first asked for: looking for names that are
        near is too dear for a `try: ... except KeyError`.
    group : str
        The full name of the group that was asked; "" is the store.
    """

    def __init__(self, name: str, hint: Callable[[], str] | None = None, group: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.group = group
        self._hint = hint
        self._text: str | None = None

    def __str__(self) -> str:
        if self._text is None:
            text = f"no name {self.name!r} in the {f'group {self.group!r}' if self.group else 'store'}"
            if self._hint is not None:
                with contextlib.suppress(Error):  # the store may have been closed in the meantime
                    text += self._hint()
            self._text, self._hint = text, None
        return self._text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, None, self.group)


class TransactionError(Error, RuntimeError):
    """Transactions were mixed up: by-hand commit inside one, closing inside one, or an outer one that was doomed."""


class ClosedStoreError(Error, ValueError):
    """The store was closed."""


class ForkedStoreError(Error, RuntimeError):
    """This process is a fork of the one that opened the store."""


UNSOUND = (CorruptStoreError, StoreIOError)
"""What reading a part of the file raises that is damaged, or that the disk can't read."""


def of(what: str, error: Error) -> Error:
    """One of UNSOUND, with the name of what could not be read."""
    text = f"{what!r}: {error}"
    return StoreIOError(error.errno, text) if isinstance(error, StoreIOError) else CorruptStoreError(text)


def refused(error: OSError, path: str) -> Error:
    """The error for a path that the system refused to open."""
    kinds = (OutOfSpaceError, StorePermissionError, StoreNotADirectoryError, StoreIsADirectoryError)
    builtin = {errno.EDQUOT: errno.ENOSPC, errno.EPERM: errno.EACCES}.get(error.errno or 0, error.errno)
    kind = next((kind for kind in kinds if kind.code == builtin), StoreIOError)
    return kind(error.errno or kind.code, f"{path!r} can't be opened: {error.strerror or error}", path)


class InternalError(Error, RuntimeError):
    """pmstore broke a contract of its own: please report it."""


class FingerprintMismatchError(Error, ValueError):
    """The saved state of an estimator belongs to other data, parameters or versions."""


class DerivedArrayError(Error, RuntimeError):
    """A derived array has no value: its function raised (`__cause__` is what), gave what can't be one, was not declared
    in this process, or an input is missing.

    Parameters
    ----------
    name : str
        The name of the derived array.
    text : str, default="has no value"
        What is wrong with it.
    """

    def __init__(self, name: str, text: str = "has no value") -> None:
        super().__init__(name, text)
        self.name = name
        self._text = text

    def __str__(self) -> str:
        return f"the derived array {self.name!r} {self._text}"


class DerivedMismatchError(DerivedArrayError, ValueError):
    """A derived array is declared in the store with another function, version or inputs than by the program."""


class NonDeterministicError(DerivedArrayError):
    """The function of a derived array gave another value for the same inputs; see ``verify`` of `Store.derive`."""


class AbandonedTransactionWarning(RuntimeWarning):
    """A transaction was abandoned: everything since the last commit was rolled back.

    Nobody left it, or it was left where there is no moment for a rollback: by the garbage collector, which destroyed a
    suspended generator or coroutine that was inside; by another thread than its own; or by a signal handler in the
    middle of an operation of the store. Given by the next operation of the store, which rolls back before it begins.
    """


class UncommittedChangesWarning(RuntimeWarning):
    """A store was not closed, and changes since its last commit are lost: the program ended, or nobody refers to the
    store any more. It says how many names are concerned, and is shown where the store was opened.
    """


class LostUpdateWarning(UserWarning):
    """A copy of a list, a dict, an array or a structured scalar, read from a store or an element of a persistent list,
    was changed and not assigned back: the change is not in the store.

    Given by the next commit for a copy that nobody holds any more, and for small ones; for larger ones that are still
    held by one of the next commits, at the latest by `Store.close`. Values that take over 64 MiB are not looked at.
    """
