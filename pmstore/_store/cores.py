"""The core over a file that was opened and locked, and the first snapshot of one."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator

from pmstore._core import Core
from pmstore._errors import CorruptStoreError, FormatVersionError, NotAStoreError, OutOfSpaceError, StoreIOError, of
from pmstore._snapshot import Reader, Snapshot
from pmstore._store.header import PLACES, SIZE, newest_header
from pmstore._store.held import FileLock, Held, tell_pid
from pmstore._trace import Trace

__all__ = ["opened_core", "opened_reader", "opened_snapshot"]


_FIRST_BYTES = {  # of other formats
    b"\x89HDF\r\n\x1a\n": "it is an HDF5 file: `pmstore import` makes a store of it",
    b"\x93NUMPY": "it is an array of numpy.save: store[name] = numpy.load(path) keeps it in a store",
    b"SQLite format 3\0": "it is a database of SQLite, which a store does not read",
    b"PK\x03\x04": "it is a zip file, such as npz or torch.save write: `pmstore import` makes a store of an npz file",
}


def _begin_of(held: Held) -> bytes:
    """The first bytes of a file, with both copies of a header."""
    try:
        return os.pread(held.fd, PLACES[-1] + SIZE, 0)
    except OSError:
        return b""


def _way_out(name: str, error: Exception, begin: bytes, size: int, salvage: bool) -> str:
    """Advice for a file that does not open; an empty string if there is none."""
    if not size:
        return ' (delete it, or let mode "w" replace it)'
    if isinstance(error, NotAStoreError):
        return next((f" ({hint})" for start, hint in _FIRST_BYTES.items() if begin.startswith(start)), "")
    header = newest_header(begin[place : place + SIZE] for place in PLACES)
    if not isinstance(error, CorruptStoreError) or header is None:
        return ""
    end = header.log_offset + header.log_size
    if header.clean and header.log_offset <= size < end:
        command = f"truncate -s {end} {shlex.quote(name)}"
        return f" (what is missing is a part of its log, which was empty: `{command}` mends the file)"
    if size >= end and not salvage:
        return f" (`pmstore salvage {shlex.quote(name)} NEW` copies what is sound, unless the log is damaged)"
    return ""


@contextlib.contextmanager
def _naming(name: str, held: Held, *, salvage: bool = False) -> Iterator[None]:
    """A context for opening a file. If that fails, the file is let go, and the error names it."""
    try:
        size, begin = os.fstat(held.fd).st_size, _begin_of(held)  # now: the core closes a file that it can't open
        yield
    except (CorruptStoreError, FormatVersionError) as error:
        held.unlock()
        raise type(error)(f"{name!r}: {error}{_way_out(name, error, begin, size, salvage)}") from None
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
    name: str,
    held: FileLock,
    media: str,
    *,
    read_only: bool,
    trace: Trace | None = None,
    max_size: int = 0,
    salvage: bool = False,
) -> Core:
    """Open the core over a locked file. If that fails, the file lock is given back."""
    with _naming(name, held, salvage=salvage):
        return Core(held.fd, media, read_only=read_only, trace=trace, max_size=max_size, salvage=salvage)
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
