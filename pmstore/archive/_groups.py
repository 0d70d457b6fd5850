"""The processes that work together: how they exchange messages.

Processes of one machine meet in a folder, and wait at a barrier: one of the caller, or one of FIFOs in the folder. An
MPI communicator of mpi4py does both by itself. Nothing sleeps or polls.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from pmstore._errors import ArchiveError
from pmstore._store.held import open_file

__all__ = ["Group", "LocalGroup", "group_of"]

_TOKEN = struct.Struct("<II")  # rank, round: written at once, and therefore never torn


class Group(ABC):
    """The processes of one call, and the messages between them. Rank 0 is the leader.

    Attributes
    ----------
    rank, size : int
        This process, counted from 0, and the number of processes.
    node : str
        The machine of this process: all that return the same share `spool`.
    spool : str
        A folder for what goes through the machine's leader.
    """

    rank: int
    size: int
    node: str
    spool: str

    @abstractmethod
    def allgather(self, message: bytes) -> list[bytes]:
        """The messages of all, by rank, in each of them."""

    @abstractmethod
    def gather(self, message: bytes) -> list[bytes] | None:
        """The messages of all, by rank, in the leader; None in the others."""

    @abstractmethod
    def broadcast(self, message: bytes) -> bytes:
        """The leader's message in each of them."""


class Alone(Group):
    """One process."""

    rank, size, node = 0, 1, ""

    def __init__(self) -> None:
        self.spool = tempfile.gettempdir()

    def allgather(self, message: bytes) -> list[bytes]:
        return [message]

    def gather(self, message: bytes) -> list[bytes]:
        return [message]

    def broadcast(self, message: bytes) -> bytes:
        return message


class LocalGroup(Group):
    """Processes, or threads, of one machine.

    Parameters
    ----------
    folder : path
        A folder for this group alone, new for each run, for example of tempfile.mkdtemp(). Best on tmpfs.
    rank, size : int
        This process, from 0 to size - 1, and the number of processes.
    barrier : multiprocessing.Barrier or threading.Barrier, optional
        An object with `wait(timeout)`, at which the processes wait for each other. By default, they use FIFOs in the
        folder.
    timeout : float, default=600
        The seconds that a process waits for the others. If one of them died, the others raise ArchiveError then.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, size: int, barrier: Any = None, *, timeout: float = 600.0
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank, self.size, self.node = rank, size, ""
        self.spool = os.path.abspath(folder)
        os.makedirs(self.spool, exist_ok=True)
        self._timeout = timeout
        self._round = 0
        self._barrier = _Fifos(self.spool, rank, size) if barrier is None else barrier
        self._own: list[str] = []  # the messages of this process that others may still read

    def allgather(self, message: bytes) -> list[bytes]:
        self._leave(message)
        self._wait()
        return [self._read(rank) if rank != self.rank else message for rank in range(self.size)]

    def gather(self, message: bytes) -> list[bytes] | None:
        self._leave(message)
        self._wait()
        return None if self.rank else [message, *(self._read(rank) for rank in range(1, self.size))]

    def broadcast(self, message: bytes) -> bytes:
        if self.rank == 0:
            self._leave(message)
        else:
            self._round += 1
        self._wait()
        return self._read(0) if self.rank else message

    def close(self) -> None:
        """Close the FIFOs. Other processes may still read the last message, so only the program that made the folder
        removes it, at the end."""
        if isinstance(self._barrier, _Fifos):
            self._barrier.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _path(self, rank: int) -> str:
        return os.path.join(self.spool, f"message-{self._round:08d}-{rank}")

    def _leave(self, message: bytes) -> None:
        self._round += 1
        path = self._path(self.rank)
        with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "wb") as file:
            file.write(message)
        self._own.append(path)

    def _read(self, rank: int) -> bytes:
        with open(self._path(rank), "rb") as file:
            return file.read()

    def _wait(self) -> None:
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise ArchiveError(f"a process of the group did not come within {self._timeout:g} s") from error
        # A process that waits here has read all messages of earlier rounds.
        self._forget(1 if self._own and self._own[-1] == self._path(self.rank) else 0)

    def _forget(self, kept: int) -> None:
        while len(self._own) > kept:
            with contextlib.suppress(OSError):
                os.unlink(self._own.pop(0))


class _Fifos:
    """A barrier of processes that know only a folder. The leader counts them, and then tells all of them."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._round = 0
        # Open for reading and writing, which never blocks, and keeps what is written until it is read.
        self._up = self._open("up", os.O_RDWR)
        self._down = self._open(f"down-{rank}", os.O_RDWR) if rank else -1

    def _open(self, name: str, flags: int) -> int:
        path = os.path.join(self._folder, name)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        return open_file(path, flags)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._round += 1
        if self._rank:
            os.write(self._up, _TOKEN.pack(self._rank, self._round))
            self._read(self._down, deadline)
            return
        missing = set(range(1, self._size))
        while missing:
            missing.discard(self._read(self._up, deadline))
        for rank in range(1, self._size):
            fd = self._open(f"down-{rank}", os.O_RDWR)
            try:
                os.write(fd, _TOKEN.pack(0, self._round))
            finally:
                os.close(fd)

    def _read(self, fd: int, deadline: float) -> int:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        left = max(0.0, deadline - time.monotonic())
        if not poll.poll(min(left * 1000, 2**31 - 1)):
            raise threading.BrokenBarrierError
        rank, number = _TOKEN.unpack(os.read(fd, _TOKEN.size))
        if number != self._round:
            raise ArchiveError(f"the folder {self._folder!r} belongs to another group, or to an earlier run")
        return int(rank)

    def close(self) -> None:
        for fd in (self._up, self._down):
            if fd >= 0:
                os.close(fd)
        self._up = self._down = -1

    def __del__(self) -> None:
        if hasattr(self, "_down"):
            self.close()


class _Communicator(Group):
    """A communicator with the lower-case methods of mpi4py."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.node = socket.gethostname()
        self.spool = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()

    def allgather(self, message: bytes) -> list[bytes]:
        return list(self._communicator.allgather(message))

    def gather(self, message: bytes) -> list[bytes] | None:
        found = self._communicator.gather(message, 0)
        return None if found is None else list(found)

    def broadcast(self, message: bytes) -> bytes:
        return bytes(self._communicator.bcast(message, 0))


def group_of(group: Any) -> Group:
    """The Group for a caller's argument: None, a Group, or a communicator of mpi4py."""
    if group is None:
        return Alone()
    if isinstance(group, Group):
        return group
    if all(hasattr(group, name) for name in ("allgather", "gather", "bcast", "Get_rank", "Get_size")):
        return _Communicator(group)
    raise TypeError(f"group is a LocalGroup or a communicator of mpi4py, not {type(group).__name__}")
