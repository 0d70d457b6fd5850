"""`open`: a store from its path."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from pmstore import _core
from pmstore._errors import CorruptStoreError, FailedStoreError, OutOfSpaceError, StoreNotFoundError, refused
from pmstore._interrupts import later
from pmstore._store.callers import outside
from pmstore._store.cores import opened_core, opened_reader
from pmstore._store.elsewhere import explains
from pmstore._store.held import FileLock, OpenedHere, Options
from pmstore._store.opening import MODES, is_memory, lock_file, open_source, path_of, seconds
from pmstore._store.store import Store
from pmstore._trace import Trace

__all__ = ["open", "open_for_fit", "open_to_read"]

Mode = Literal["r", "r+", "a", "w", "x", "w-"]
Media = Literal["auto", "memory", "file", "dax", "trace", "trace:memory", "trace:file"]

_MEDIA = ("auto", "memory", "file", "dax", "trace", "trace:memory", "trace:file")

_MEMORY = "/dev/shm"
_LEAST = 794_624  # bytes of a new store on memory; one on disks is smaller (csrc/store/new_file.c)

# Variables of the environment that force what is found out otherwise.
_VARIABLES = {
    "PMSTORE_TRACKER": ("uffd", "pagemap", "compare"),
    "PMSTORE_DOMAIN": ("process", "cpu_cache", "memory"),
    "PMSTORE_FLUSH": ("clwb", "clflushopt", "clflush", "stream", "cvap", "cvac"),
}

# Set by pmstore.testing. Every opening calls it with path, mode and media. It returns the medium and the trace to
# record with.
recorder: Callable[[str, str, str], tuple[str, Trace | None]] | None = None


@explains
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
    exclusive: bool = False,
) -> Store:
    """Open a store, or create it. A store whose last process died is recovered to its last commit.

    One process writes a store. Any number of others may read it meanwhile, with mode "r": each sees one commit, until
    it goes to a newer one with `Store.refresh`. The writer never waits for them.

    If this process has the store open for writing, modes "a" and "r+" return that very `Store`, open once more: it is
    closed when each opening has been closed. Each opening with mode "r" has a snapshot of its own.

    A snapshot needs few options: with mode "r", `media` has an effect only if it is "trace" or with `exclusive`, and
    `timeout` only with `exclusive`; `durability`, `sync_interval` and `max_size` have none. ":memory:" ignores
    `timeout`, `exclusive` and `verify`.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        The file, also with ``~`` for the home directory, or as a ``file://`` URL. A symbolic link is followed; mode "w"
        replaces its target. ``":memory:"``, also as bytes or Path, is a new store without a file that others see: it is
        gone when it is closed, or the process ends.
    mode : {"a", "r", "r+", "w", "x", "w-"}
        "r" reads a snapshot of the newest durable commit, "r+" reads and writes an existing store, "a" also creates it
        if there is none, "w" replaces whatever exists by a new store, "x" and "w-" create a store and fail if the path
        exists.
    media : {"auto", "memory", "file", "dax", "trace", "trace:memory", "trace:file"}
        How bytes become durable: "memory" for tmpfs, "file" for disks, "dax" for persistent memory with a file system
        that is mounted with DAX. "auto" chooses what the file allows: "dax" where the kernel grants MAP_SYNC. "trace"
        records every operation on the durable bytes, for crash tests.
    durability : {"sync", "async"}
        "sync": a commit is durable when it returns. "async": it survives the process when it returns, and becomes
        durable soon after: a power cut or a crash of the system may lose the newest commits, but never an earlier
        commit without the later ones, and never a part of one. `Store.sync` and `close` wait until all commits are
        durable. Readers, forked children and pickled stores see durable commits only: call `Store.sync` before they
        open the store. On memory and DAX, "async" is the same as "sync".
    sync_interval : float
        With durability "async": seconds after a commit by which a background sync begins.
    timeout : float
        Seconds to wait for another writer (or for readers) to close the store.
    max_size : int, optional
        The size in bytes that the file may grow to, at least 794,624, which an empty store on tmpfs has. A file that is
        larger already opens, and does not grow. None: no limit, or that of a store that this process has open.
    verify : bool
        Check everything (see `Store.check`) before returning. Raises CorruptStoreError if anything is wrong.
    exclusive : bool
        With mode "r": keep writers out, and map all arrays instead of copying those that can change. Raises
        StoreLockedError if the store is being written. Other modes are exclusive anyway.

    Returns
    -------
    Store

    Raises
    ------
    StoreLockedError
        Another process, which the message names, has the store open. Or this one has, at the place that the message
        names, with other options, or mode "w" is to replace it. Mode "r" raises it only with exclusive.
    FailedStoreError
        This process has the store open, and a write or a sync of it failed: close it, then open it.
    StoreNotFoundError, StoreExistsError
        The mode does not fit the path. StoreNotFoundError also if the directory is missing.
    NotAStoreError, FormatVersionError, CorruptStoreError
        The file isn't a store, has a newer format version, or is damaged. It is not changed.
    ReadOnlyStoreError
        The file can't be written.
    StoreIOError
        Any other error of the system. It is also an IsADirectoryError, NotADirectoryError or PermissionError if that
        fits.
    OutOfSpaceError, TypeError, ValueError
    """
    mode = "x" if mode == "w-" else mode
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(map(repr, MODES))} and 'w-', which is 'x', not {mode!r}")
    if media not in _MEDIA:
        raise ValueError(f"media is one of {', '.join(map(repr, _MEDIA))}, not {media!r}")
    if durability not in ("sync", "async"):
        raise ValueError(f"durability is 'sync' or 'async', not {durability!r}")
    interval = seconds(sync_interval, "sync_interval")
    options = Options(media, durability, interval, _size(max_size))
    if is_memory(path):
        if mode in ("r", "r+"):
            raise ValueError(f'":memory:" is a new store: open it with mode "a", not {mode!r}')
        return _open_in_memory(options)
    try:
        return _open(path_of(path), mode, options, seconds(timeout), exclusive=exclusive, verify=verify)
    except StoreNotFoundError as error:
        if mode not in ("r", "r+"):
            raise
        raise StoreNotFoundError(error.errno, f'{error}; mode "a" creates one', error.filename) from None


def open_to_read(path: Any, *, salvage: bool = False) -> Store:
    """`open` with mode "r", for a call that has no mode: its errors advise no other one. salvage: no other process may
    write the store, and damaged metadata hide nothing that can be found without them.
    """
    if is_memory(path):
        raise ValueError('":memory:" is always a new store, and has nothing to read')
    return _open(path_of(path), "r", Options(), 0.0, exclusive=salvage, salvage=salvage)


def _open_in_memory(options: Options) -> Store:
    """A new store whose file has no name. Where /dev/shm takes no files, it is in the temporary directory."""
    import tempfile

    with contextlib.ExitStack() as entered:
        for place in (_MEMORY, None):
            try:
                directory = entered.enter_context(tempfile.TemporaryDirectory(prefix="pmstore-", dir=place))
                break
            except OSError as error:
                refusal = refused(error, ":memory:")
        else:
            raise refusal
        return _open(os.path.join(directory, "memory.pm"), "x", options, 0.0)


def open_for_fit(path: str, mode: Literal["a", "r+"], timeout: float) -> Store:
    """`open` for a fit that is given a path. A store that this process has open is joined with any options."""
    return _open(path, mode, Options(), timeout, any_options=True)


def _open(
    name: str,
    mode: str,
    options: Options,
    timeout: float,
    *,
    exclusive: bool = False,
    verify: bool = False,
    any_options: bool = False,
    salvage: bool = False,
) -> Store:
    _check_environment()
    kind, trace, where = options.media, None, outside()[1]
    if kind.startswith("trace"):
        kind, trace = kind.partition(":")[2] or "auto", Trace()
    elif recorder is not None:
        kind, trace = recorder(name, mode, kind)
    if mode == "r" and not exclusive and trace is None:
        source = open_source(name, where)
        reader, core = opened_reader(name, source)
        with later():
            snapshot = Store(name, mode, core, source, reader)
        return _verified(snapshot, verify)
    while True:
        try:
            with later():
                held = lock_file(name, mode, kind, timeout, where, trace, opens=True, joins=mode in ("a", "r+"))
                store = _new(name, mode, held, kind, options, trace, salvage)
        except OpenedHere as here:
            joined = _joined(here.held, name, None if any_options else options, trace)
            if joined is not None:
                return _verified(_not_failed(joined, here.held), verify)
            continue
        try:
            _verified(store, verify)
            with later():
                held.opened(store, options._replace(media=store.media), trace)
        finally:
            held.stay()  # for an interrupt
        return store


def _joined(held: FileLock, name: str, options: Options | None, trace: Trace | None) -> Store | None:
    """The store that this process has open, once more; None if it was closed meanwhile."""
    store: Store | None = None
    try:
        with later():
            store = held.join(name, options, trace)
    except BaseException:
        if store is not None:
            store._give_back()
        raise
    return store


def _new(
    name: str, mode: str, held: FileLock, kind: str, options: Options, trace: Trace | None, salvage: bool
) -> Store:
    core = opened_core(name, held, kind, read_only=mode == "r", trace=trace, max_size=options.max_size, salvage=salvage)
    try:
        store = Store(name, mode, core, held, None)
    except BaseException:  # without memory, or at the recursion limit
        try:
            core.close()
        finally:
            held.unlock()
        raise
    if options.durability == "async" and mode != "r":
        with _given_back_on_failure(store):
            core.commit_async(options.sync_interval)
    return store


def _verified(store: Store, verify: bool) -> Store:
    """The store. If it is damaged, or can't be verified, this opening of it is given back."""
    if verify:
        with _given_back_on_failure(store):
            report = store.check()
            if not report.ok:
                raise CorruptStoreError(f"{store.path!r} is damaged: {report}")
    return store


def _not_failed(store: Store, held: FileLock) -> Store:
    with _given_back_on_failure(store):
        try:
            with contextlib.suppress(OutOfSpaceError):
                store.stats()
        except FailedStoreError as error:
            raise FailedStoreError(
                error.errno, f"{store.path!r}, which this process opened at {held.where}: {error}"
            ) from None
    return store


@contextlib.contextmanager
def _given_back_on_failure(store: Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store._give_back()
        raise


def _size(max_size: Any) -> int:
    if max_size is None:
        return 0
    if isinstance(max_size, bool) or not hasattr(max_size, "__index__"):
        raise TypeError(f"max_size is a number of bytes or None, not {type(max_size).__name__}")
    size = int(max_size.__index__())
    if not _LEAST <= size < 1 << 63:
        raise ValueError(f"max_size is at least {_LEAST}, the bytes of an empty store, and below 2**63, not {size}")
    return size


def _check_environment() -> None:
    for name, values in _VARIABLES.items():
        value = os.environ.get(name)
        if value and value not in values:
            raise ValueError(f"{name} is one of {', '.join(values)}, not {value!r}")
    if flush := os.environ.get("PMSTORE_FLUSH"):
        _require_flush(flush)


@functools.cache
def _require_flush(name: str) -> None:
    """ValueError if this processor lacks an instruction. Readers need it, too: their snapshots are in memory."""
    with contextlib.suppress(OSError):  # the store itself will meet it
        fd = os.memfd_create("pmstore-flush", os.MFD_CLOEXEC)
        try:
            _core.format_file(fd, "memory")
        finally:
            os.close(fd)
