"""The core over a file that was opened and locked, and the first snapshot of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from pmstore._core import Core
from pmstore._errors import CorruptStoreError, FormatVersionError, NotAStoreError, OutOfSpaceError, StoreIOError, of
from pmstore._snapshot import Reader, Snapshot
from pmstore._store.held import FileLock, Held, tell_pid
from pmstore._trace import Trace

__all__ = ["opened_core", "opened_reader", "opened_snapshot"]


_FIRST_BYTES = {  # of other formats
    b"\x89HDF\r\n\x1a\n": "it is an HDF5 file: `pmstore import` makes a store of it",
    b"\x93NUMPY": "it is an array of numpy.save: store[name] = numpy.load(path) keeps it in a store",
    b"SQLite format 3\0": "it is a database of SQLite, which a store does not read",
    b"PK\x03\x04": "it is a zip file, such as npz or torch.save write: `pmstore import` makes a store of an npz file",
}


def _format_of(held: Held) -> str:
    """What to do with a file of another format; an empty string if that is not known."""
    try:
        first = os.pread(held.fd, max(map(len, _FIRST_BYTES)), 0)
    except OSError:
        return ""
    return next((f" ({hint})" for start, hint in _FIRST_BYTES.items() if first.startswith(start)), "")


@contextlib.contextmanager
def _naming(name: str, held: Held) -> Iterator[None]:
    """A context for opening a file. If that fails, the file is let go, and the error names it."""
    try:
        empty = not os.fstat(held.fd).st_size
        other = _format_of(held)  # now: the core closes the file if it can't open it
        yield
    except (CorruptStoreError, FormatVersionError) as error:
        held.unlock()
        hint = other if isinstance(error, NotAStoreError) else ""
        if empty:
            hint = ' (it is empty: delete it, or let mode "w" replace it)'
        raise type(error)(f"{name!r}: {error}{hint}") from None
    except StoreIOError as error:
        held.unlock()
        raise of(name, error) from None
    except OutOfSpaceError as error:
        held.unlock()
        raise OutOfSpaceError(error.errno, f"{name!r}: {error}") from None
    except BaseException:
        held.unlock()
        raise


def opened_core(
    name: str, held: FileLock, media: str, *, read_only: bool, trace: Trace | None = None, max_size: int = 0
) -> Core:
    """Open the core over a locked file. If that fails, the file lock is given back."""
    with _naming(name, held):
        return Core(held.fd, media, read_only=read_only, trace=trace, max_size=max_size)
    raise AssertionError


def opened_snapshot(name: str, held: Held) -> tuple[Reader, Snapshot]:
    """The newest commit of a file, and the reader that takes later ones. If that fails, the file is let go."""
    with _naming(name, held):
        reader = Reader(held.fd, tell_pid)
        return reader, reader.take()
    raise AssertionError


def opened_reader(name: str, held: Held) -> tuple[Reader, Core]:
    """The same, with a core that shows the commit."""
    with _naming(name, held):
        reader = Reader(held.fd, tell_pid)
        return reader, Core.of_snapshot(reader.take())
    raise AssertionError
