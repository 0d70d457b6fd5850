"""Errors and warnings: each derives from `Error` and from the built-in that a caller would catch."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

__all__ = [
    "ClosedStoreError",
    "CorruptStoreError",
    "Error",
    "FailedStoreError",
    "FingerprintMismatchError",
    "ForkedStoreError",
    "FormatVersionError",
    "InternalError",
    "InvalidNameError",
    "LostUpdateWarning",
    "NameConflictError",
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
    """The system refused a read, a write or a sync; `errno` says which way."""


class StoreLockedError(_SystemError, BlockingIOError):
    """Another process, or another place in this one, has the store open."""

    code = errno.EAGAIN


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
    """

    def __init__(self, name: str, hint: Callable[[], str] | None = None) -> None:
        super().__init__(name)
        self.name = name
        self._hint = hint
        self._text: str | None = None

    def __str__(self) -> str:
        if self._text is None:
            text = f"no name {self.name!r} in the store"
            if self._hint is not None:
                with contextlib.suppress(Error):  # the store may have been closed in the meantime
                    text += self._hint()
            self._text, self._hint = text, None
        return self._text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)


class TransactionError(Error, RuntimeError):
    """Transactions were mixed up: by-hand commit inside one, closing inside one, or an outer one that was doomed."""


class ClosedStoreError(Error, ValueError):
    """The store was closed."""


class ForkedStoreError(Error, RuntimeError):
    """This process is a fork of the one that opened the store."""


class InternalError(Error, RuntimeError):
    """pmstore broke a contract of its own: please report it."""


class FingerprintMismatchError(Error, ValueError):
    """The saved state of an estimator belongs to other data, parameters or versions."""


class LostUpdateWarning(UserWarning):
    """A list or dict read from a store was changed and not assigned back: the change is not in the store."""
