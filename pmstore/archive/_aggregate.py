"""Aggregates: the shards of many processes in few objects.

Every process calls `aggregate` with its shards. Small shards lie one after the other, by rank, in parts of one size; a
process finds its place by the exclusive prefix sum of the sizes before it. In a folder, all of them write into the same
files; on other targets, one leader for each machine collects the bytes and sends parts. A shard of a part's size or
more is an object of its own. The manifest is created last, by rank 0, and makes the version exist.

The idea is VELOC's (arXiv 2112.02289).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np

from pmstore._core import hash64
from pmstore._errors import ArchiveConflictError, ArchiveDamagedError, ArchiveError, ArchiveUnavailableError
from pmstore._store.held import flock_now, sweep
from pmstore._values.array import order_of
from pmstore._values.dtypes import descriptor_of, storable_dtype
from pmstore.archive._groups import Group, group_of
from pmstore.archive._local import LocalPlace
from pmstore.archive._manifest import (
    Written,
    byte_count,
    checked_sequence,
    column,
    decode,
    join,
    manifest_name,
    sequence_of,
    sequences,
)
from pmstore.archive._objects import MissingObjectError, ObjectExistsError, Place, Retrying, place_of
from pmstore.archive._shared import SharedFile

__all__ = ["Aggregation", "aggregate"]

_SPOOL = "pmstore-aggregate-"  # the names of spools begin with it

_swept: set[tuple[int, str]] = set()  # (process, url) whose leftovers were deleted


class Aggregation(NamedTuple):
    """The result of `aggregate`: its version, and how many objects hold how many shards and bytes.

    Attributes
    ----------
    sequence : int
        The version.
    shards, parts : int
        The shards of all processes, and the objects that hold them; the manifest is one more.
    nbytes : int
        The bytes of all shards.
    """

    sequence: int
    shards: int
    parts: int
    nbytes: int


def aggregate(
    url: str | os.PathLike[str],
    sequence: int,
    shards: Mapping[str, Any],
    group: Any = None,
    *,
    rows: Collection[str] = (),
    part_size: int | str = "128MiB",
    keep: int | None = None,
    replace: bool = False,
    patience: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Aggregation:
    """Write the shards of all processes of a group as one version. The version exists as a whole or not at all.

    All processes of the group call it, with the same arguments except `shards` and `group`. No shard may change until
    the call returns. When it has returned in any process, the version is durable.

    Parameters
    ----------
    url : str or path
        A folder, or any URL that fsspec knows, which has nothing but these aggregates. All processes must see the same
        folder, also on other machines. Only one group at a time may write there.
    sequence : int
        The number of the version, for example that of the store at its last commit.
    shards : mapping of str to array or bytes
        The values of this process. Arrays have any shape, any dtype but object, and no mask. Names may be the same in
        several processes.
    group : LocalGroup or mpi4py communicator, optional
        The processes; None: this one alone.
    rows : collection of str
        Names of arrays that are split by their first axis: each process that has the name has the next rows, in the
        order of the ranks, with the same dtype and the same other axes. Another number of processes can read them.
    part_size : int or str, default="128MiB"
        The bytes of a part. A shard of this size or more is a part of its own.
    keep : int, optional
        The number of versions that stay; older ones are deleted when this one is durable. By default, all stay.
    replace : bool, default=False
        Replace the version if it exists already, as when a run that went back to an older version comes to this one
        again. Versions above it stay, and are still newer for `open_aggregate` and `latest_common`: a run that is to
        go on from its own newest version after a crash gets another url when it goes back.
    patience : float, default=60.0
        The seconds for which transient failures of a target that is no folder are tried again.
    storage_options : mapping, optional
        For fsspec.

    Returns
    -------
    Aggregation
        The same in each process.

    Raises
    ------
    ArchiveConflictError
        The version exists already, or another group works there.
    ArchiveUnavailableError
        The target can't be reached, is full or refuses. It is raised in every process, and nothing of the version is
        listed. So is every other error of one process.
    ArchiveError
        A process of the group is gone.
    TypeError, ValueError
        An argument breaks the rules, or differs between the processes.
    """
    work = _Work(group_of(group))
    try:
        return work.run(
            lambda: work.begin(url, sequence, shards, rows, byte_count(part_size, "part_size"), keep, replace),
            lambda: place_of(url, **dict(storage_options or {})),
            patience,
        )
    finally:
        work.close()


class _Failed(NamedTuple):
    """The failure of a process, as the other processes learn it."""

    rank: int
    kind: str
    text: str
    errno: int
    transient: bool

    @classmethod
    def of(cls, rank: int, error: Exception) -> _Failed:
        code = getattr(error, "errno", None)
        text = str(error)
        if not isinstance(error, ArchiveError | TypeError | ValueError):
            text = f"{type(error).__name__}: {error}"
        transient = bool(getattr(error, "transient", False))
        return cls(rank, type(error).__name__, text, code if isinstance(code, int) else errno.EIO, transient)

    def error(self) -> Exception:
        """The same error in another process."""
        kinds: tuple[type[Exception], ...] = (TypeError, ValueError, ArchiveConflictError, ArchiveDamagedError)
        text = f"rank {self.rank}: {self.text}"
        if self.kind == ArchiveUnavailableError.__name__:
            unavailable = ArchiveUnavailableError(self.errno, text)
            unavailable.transient = self.transient
            return unavailable
        return next((kind for kind in kinds if kind.__name__ == self.kind), ArchiveError)(text)


class _Work:
    """One call in one process.

    What the processes do, and where each of them waits for the others:

        begin         check the arguments; the leader looks at the target and makes a token
        ── all tell all their number of bytes, and the leader its token
        write         each at its offset in shared files, or into a spool; large shards are objects of their own
        (stream       on targets without offsets: ── all tell all that they have written;
                      the leader of each machine reads the spools and sends parts)
        ── all tell the leader which bytes are where
        finish        the leader syncs and names the parts, creates the manifest and deletes old versions
        ── the leader tells all that the version exists

    An error of one process travels with these messages, so that all raise it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._leads = group.rank == 0
        self._files: list[SharedFile] = []
        self._spool: str | None = None
        self._error: Exception | None = None
        self._uncertain = False  # the manifest may exist

    def run(self, begin: Callable[[], list[Any]], place: Callable[[], Place], patience: float) -> Aggregation:
        def first() -> list[Any]:
            made = place()
            self._local = made if isinstance(made, LocalPlace) else None
            self._place = made if self._local else Retrying(made, threading.Event(), _ignore, patience=patience)
            return begin()

        self._divide(self._all(first))
        done = self._tried(self._write)
        if self._local is None:
            failed = any(failure for failure, _ in self._exchanged([done[0], None]))
            if not failed and self._leads_node:
                streamed = self._tried(self._stream)
                done = [streamed[0], done[1]]
        found = self._group.gather(_pack(done))
        verdict = None if found is None else self._concluded([_unpack(one) for one in found])
        failure, result = _unpack(self._group.broadcast(_pack(verdict)))
        self._raise(failure)
        return Aggregation(*result)

    def close(self) -> None:
        """Close files and remove the spool."""
        while self._files:
            self._files.pop().close()
        if self._spool is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._spool)

    # ---- messages

    def _tried(self, work: Callable[[], Any]) -> list[Any]:
        """[failure or None, result] of a piece of work; the error itself is kept."""
        try:
            return [None, work()]
        except Exception as error:
            self._error = self._error or error
            return [list(_Failed.of(self._group.rank, error)), None]

    def _exchanged(self, message: list[Any]) -> list[Any]:
        return [_unpack(one) for one in self._group.allgather(_pack(message))]

    def _all(self, work: Callable[[], Any]) -> list[Any]:
        """The results of all processes. If one process raises an error, all raise it."""
        known = self._exchanged(self._tried(work))
        for failure, _ in known:
            self._raise(failure)
        return [result for _, result in known]

    def _raise(self, failure: list[Any] | None) -> None:
        """Raise a failure, as this process's own error if there is one."""
        if failure is not None:
            raise self._error if self._error is not None else _Failed(*failure).error()

    # ---- the steps

    def begin(
        self,
        url: str | os.PathLike[str],
        sequence: int,
        shards: Mapping[str, Any],
        rows: Collection[str],
        part_size: int,
        keep: int | None,
        replace: bool,
    ) -> list[Any]:
        """Check all that one process can check. Returns the data that the others need to find their places."""
        self._sequence = checked_sequence(sequence)
        self._part_size = part_size
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep is the number of versions that stay, at least 1, not {keep!r}")
        if isinstance(rows, str) or not all(isinstance(name, str) for name in rows):
            raise TypeError("rows is a collection of names")
        self._keep, self._replace = keep, replace
        self._own = [_described(name, shards[name], name in rows) for name in shards]
        token = ""
        if self._leads:
            self._check_new()
            token = secrets.token_hex(6)
        small = sum(data.nbytes for _, _, data in self._own if data.nbytes < part_size)
        return [[self._sequence, part_size, sorted(rows)], self._group.node, small, token]

    def _check_new(self) -> None:
        """Check that the version is new, and delete the leftovers of groups that died. Only the leader calls this."""
        with contextlib.suppress(MissingObjectError):
            self._place.size("archive")
            raise ArchiveConflictError(
                f"{self._place.url} is the archive of a drain: give aggregates a place of their own"
            )
        there = set(sequences(self._place))
        if self._sequence in there and not self._replace:
            raise ArchiveConflictError(f"{self._place.url} has version {self._sequence} already")
        if self._local is not None:
            self._local.prepare("parts")
        key = os.getpid(), self._place.url
        if key not in _swept:
            self._sweep(there)
            _swept.add(key)

    def _sweep(self, there: set[int]) -> None:
        """Delete the parts of groups that died: no manifest names them. there: the versions that have a manifest."""
        found: dict[int, list[str]] = {}
        for name in self._place.list("parts"):
            version = sequence_of(name)
            if version is not None:
                found.setdefault(version, []).append(f"parts/{name}")
        for version, names in found.items():
            if version not in there:
                try:  # a list that lacks it may be an old one, or that of a target that is not there at the moment
                    self._place.size(manifest_name(version))
                except MissingObjectError:
                    self._place.delete(names)
            elif len({name.split("-")[1] for name in names}) > 1:  # of two groups: one was to replace it
                with contextlib.suppress(ArchiveDamagedError, MissingObjectError):
                    manifest = decode(self._place.get(manifest_name(version)), version, self._place.url)
                    self._place.delete(set(names).difference(part.name for part in manifest.parts))

    def _divide(self, said: list[Any]) -> None:
        """Find the place of each process: the exclusive prefix sum of the sizes before it."""
        for rank, other in enumerate(said):
            if other[0] != said[0][0]:
                raise ValueError(f"sequence, part_size and rows differ: {said[0][0]} in rank 0, {other[0]} in {rank}")
        self._prefix = f"parts/{self._sequence:016d}-{said[0][3]}-"
        self._token = said[0][3]
        nodes = [other[1] if self._local is None else "" for other in said]
        here = nodes[self._group.rank]
        number = {node: k for k, node in enumerate(sorted(set(nodes)))}
        self._nodes = [number[node] for node in nodes]
        self._members = [(rank, said[rank][2]) for rank in range(len(said)) if nodes[rank] == here]
        self._leads_node = self._members[0][0] == self._group.rank
        self._begin = sum(size for rank, size in self._members if rank < self._group.rank)

    def _part(self, rank: int, number: int) -> str:
        """The name of a part, by its number in `Written`."""
        k, alone = divmod(number, 2)
        return f"{self._prefix}r{rank:06d}-{k:06d}" if alone else f"{self._prefix}n{self._nodes[rank]:04d}-{k:06d}"

    def _write(self) -> list[Any]:
        """Write the bytes of this process. Gives a `Written`."""
        at = self._begin
        names, kinds, kind, hashes, table = [], {}, [], [], []  # type: ignore[var-annotated]
        pieces: list[tuple[int, int, memoryview]] = []
        for number, (name, its, data) in enumerate(self._own):
            whole = hash64(data)
            if data.nbytes >= self._part_size:
                self._place.put(self._part(self._group.rank, 2 * number + 1), [data])
                table += (number, 2 * number + 1, 0, data.nbytes, whole)
            else:
                cut = list(_cut(data, at, self._part_size))
                for k, begin, piece in cut:
                    table += (number, 2 * k, begin, piece.nbytes, whole if len(cut) == 1 else hash64(piece))
                pieces += cut
                at += data.nbytes
            names.append(name)
            kind.append(kinds.setdefault(its, len(kinds)))
            hashes.append(whole)
        self._write_small(pieces)
        known = [[None if its[0] is None else descriptor_of(its[0]), *its[1:]] for its in kinds]
        return list(Written(names, known, column(kind), column(hashes), column(table)))

    def _write_small(self, pieces: list[tuple[int, int, memoryview]]) -> None:
        if self._local is None:
            if self._leads_node:
                sweep(self._group.spool, _SPOOL, os.O_RDONLY, flock_now, os.unlink)
            self._spool = self._spooled(self._group.rank)
            self._files.append(SharedFile(self._spool, 0o600))
            self._files[-1].write(0, [piece for _, _, piece in pieces])
            return
        for k, together in itertools.groupby(pieces, key=lambda piece: piece[0]):
            some = list(together)
            name = self._part(self._group.rank, 2 * k)
            self._files.append(self._local.open_shared(name, self._token))
            self._local.write_shared(self._files[-1], name, some[0][1], [piece for _, _, piece in some])

    def _spooled(self, rank: int) -> str:
        return os.path.join(self._group.spool, f"{_SPOOL}{self._token}-{rank}")

    def _stream(self) -> None:
        """Send the contents that the machine's processes have spooled, part by part. Only the machine's leader calls
        this."""
        with contextlib.ExitStack() as opened:
            at, parts = 0, {}  # type: ignore[var-annotated]
            for rank, size in self._members:
                if not size:
                    continue
                file = opened.enter_context(open(self._spooled(rank), "rb"))
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
                for k, _, piece in _cut(memoryview(mapped), at, self._part_size):
                    parts.setdefault(k, []).append(piece)
                at += size
            for k in sorted(parts):
                self._place.put(self._part(self._group.rank, 2 * k), parts.pop(k))

    def _concluded(self, found: list[Any]) -> list[Any]:
        """[failure or None, result] of the whole group. Only the leader calls this."""
        failures = [one for one in found if one[0] is not None]
        verdict = failures[0] if failures else self._tried(lambda: self._finish(found))
        if verdict[0] is not None and not self._uncertain:
            with contextlib.suppress(Exception):  # what stays is deleted by the next group
                self._place.delete(f"parts/{name}" for name in self._place.list("parts") if self._is_own(name))
                if self._local is not None:
                    self._local.discard("parts", self._token)
        return verdict

    def _finish(self, found: list[Any]) -> list[int]:
        """Make the version exist. Only the leader calls this."""
        manifest, parts, count = join(self._sequence, [Written(*said) for _, said in found], self._part)
        if self._local is not None:
            shared = [part.name for part in parts if part.name.startswith(f"{self._prefix}n")]
            self._local.publish(shared, self._token)
        there = {f"parts/{name}" for name in self._place.list("parts")}
        for part in parts:
            if part.name not in there:
                raise ArchiveUnavailableError(
                    errno.ENOENT,
                    f"{self._place.url} lacks {part.name}, which a rank has written: ranks write to other folders",
                )
        self._retire(self._create(manifest))
        return [self._sequence, count, len(parts), sum(part.size for part in parts)]

    def _is_own(self, name: str) -> bool:
        return f"parts/{name}".startswith(self._prefix)

    def _create(self, data: bytes) -> list[str]:
        """Create the manifest, after all parts are durable. Gives the parts of a version that it replaces."""
        name = manifest_name(self._sequence)
        # durable: all parts → then: the manifest. Otherwise a crash leaves a version without its bytes.
        if self._replace:
            old = [f"parts/{one}" for one in self._place.list("parts") if sequence_of(one) == self._sequence]
            self._uncertain = True
            self._place.put(name, [data])
            return [one for one in old if not one.startswith(self._prefix)]
        try:
            self._uncertain = True
            self._place.create(name, [data])
        except ObjectExistsError:
            self._uncertain = False
            raise ArchiveConflictError(
                f"{self._place.url}: another group has made version {self._sequence} at the same time"
            ) from None
        return []

    def _retire(self, parts: list[str]) -> None:
        """Delete parts that were replaced, and versions that need not be kept: the manifests first."""
        with contextlib.suppress(ArchiveUnavailableError):  # the version exists; what stays is deleted another time
            older = sequences(self._place) if self._keep else []
            dropped = set(older[: -self._keep]) - {self._sequence} if self._keep else set()
            if dropped:
                self._place.delete(map(manifest_name, sorted(dropped)))
                parts += [f"parts/{name}" for name in self._place.list("parts") if sequence_of(name) in dropped]
            if parts:
                self._place.delete(parts)


def _ignore(error: Exception) -> None:
    """An outage is not told: it ends, or is raised."""


def _pack(message: Any) -> bytes:
    return bytes(msgpack.packb(message))


def _unpack(message: bytes) -> Any:
    return msgpack.unpackb(message)


def _cut(data: memoryview, at: int, part_size: int) -> Iterator[tuple[int, int, memoryview]]:
    """The pieces of bytes that begin at an offset of the stream: number of the part, offset in it, bytes."""
    done = 0
    while done < data.nbytes:
        k, begin = divmod(at + done, part_size)
        count = min(data.nbytes - done, part_size - begin)
        yield k, begin, data[done : done + count]
        done += count


def _described(name: Any, value: Any, rows: bool) -> tuple[str, tuple[Any, ...], memoryview]:
    """A shard: its name, its kind (dtype, shape, order, whether it is split by rows), its bytes.

    Raises TypeError or ValueError if it can't be kept.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a shard is a str, not {type(name).__name__}")
    name.encode()  # no lone surrogates
    if isinstance(value, bytes | bytearray | memoryview):
        if rows:
            raise TypeError(f"the shard {name!r} is no array, and therefore has no rows")
        data = memoryview(value)
        if not data.c_contiguous:
            raise TypeError(f"the shard {name!r} is a buffer that is not contiguous")
        return name, (None, (data.nbytes,), "C", False), data.cast("B") if data.nbytes else memoryview(b"")
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"the shard {name!r} is an array or bytes, not {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"the shard {name!r} is a masked array: give its data and its mask, each under a name")
    array = np.asarray(value)
    try:
        dtype = storable_dtype(array.dtype)
    except TypeError as error:
        raise TypeError(f"the shard {name!r}: {error}") from None
    if rows and not array.ndim:
        raise ValueError(f"the shard {name!r} has no axis, and therefore no rows")
    order = "C" if rows else order_of(array)
    flat: Any = np.ascontiguousarray(array.T if order == "F" else array)
    data = memoryview(flat.reshape(-1).view(np.uint8)) if flat.nbytes else memoryview(b"")
    return name, (dtype, array.shape, order, rows), data
