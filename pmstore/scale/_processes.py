"""The engine on processes of this machine.

Each place has one process at a time, a socket to it, and a thread that sends, so that a process which is stopped blocks
nobody. A process that ended is replaced. The processes end with the thread that started them, whatever happens to it
(PR_SET_PDEATHSIG), and read shards of arrays from one piece of shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from numbers import Integral
from typing import Any

from pmstore._errors import WorkersLostError
from pmstore._interrupts import later
from pmstore._store.held import off_streams
from pmstore.scale._engine import Engine
from pmstore.scale._frames import Incoming, send
from pmstore.scale._holder import Function
from pmstore.scale._messages import Array, Lost, Reply, Tag
from pmstore.scale._routes import Question, Routes
from pmstore.scale._shards import Shard
from pmstore.scale._travel import packed, packed_apart

AHEAD = 2  # questions that a process has at a time, so that it needs not wait for the next one
MOST = 64  # the same, for a process whose maps are so short that it adds results: twice as many as one reply adds
DEATHS = 5  # processes of a place that end, one after the other, before they can take a question
STUCK = 10.0  # seconds of sleep after which the only process that could answer is replaced

# Python -c looks for modules in the working directory first, until the path is set. A worker may be stopped in its
# imports, which take long, while the program is killed.
_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
    "from pmstore.scale._worker import main; main()"
)

_Asked = tuple[Question, tuple[int, bytes], tuple[int, bytes]]
"""A question, with the numbers and pickles of its function and of its state."""


class Processes(Engine):
    """An engine of processes on this machine.

    Parameters
    ----------
    workers : int
        The number of processes. The result does not depend on it.
    threads : int, default=1
        The number of threads of BLAS and OpenMP in each process. The result may depend on it.
    memory : int, optional
        The bytes that the shards of one process may take. What has no room is loaded again for each epoch. None: a
        share of 60 % of the memory that is available when a process starts, within the limit of its cgroup. Memory
        maps and arrays that were given as arrays don't count.
    """

    def __init__(self, workers: int, *, threads: int = 1, memory: int | None = None) -> None:
        for name, value in {"workers": workers, "threads": threads, "memory": 1 if memory is None else memory}.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} is a whole number from 1, not {value!r}")
        self._workers, self._threads = int(workers), int(threads)
        self._memory = None if memory is None else int(memory)
        self._places: list[_Place] = []
        self._opened = contextlib.ExitStack()  # ends what `start` began, as far as it came

    def start(self, shards: Sequence[Shard]) -> None:
        self.close()
        self._lost: list[Lost] = []  # by processes that were replaced because they did not answer
        self._pickled = _Pickled()
        pieces = packed_apart(tuple(shards), "the shards")
        with later():
            self._shared_file = off_streams(lambda: os.memfd_create("pmstore-shards"))
            self._opened.callback(os.close, self._shared_file)
        _write_pieces(self._shared_file, pieces)
        self._count = min(self._workers, len(shards))
        for number in range(self._count):
            self._places.append(_Place(number, self._process))
            self._opened.callback(self._places[-1].end)
            self._places[-1].begin()  # after an interrupt in there, close() finds the place
        self._routes = Routes(self._places, len(shards), _Place.load)

    def has_begun(self) -> bool:
        return any(place.has_begun for place in self._places)

    def submit(self, i: int, function: Function, shared: Mapping[str, Array], tag: Tag) -> None:
        question = i, tag
        place, times = self._routes.choose(question)
        if times:  # it has the question, and there is no other place that could take it
            if not place.is_stuck():
                return
            self._lost += [lost for lost in place.replace() if (lost.shard, lost.tag) != question]
            self._routes.on_time(place)
            place.forget(question)
        place.ask(question, self._pickled.number(0, function), self._pickled.number(1, shared))

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        for place in self._places:
            place.send()
        messages: list[Reply | Lost] = [*self._lost]
        self._lost.clear()
        for connection in wait([place.connection for place in self._places], 0 if messages else timeout):
            place = next(place for place in self._places if place.connection is connection)
            messages += place.received()
            self._routes.on_time(place)
        for message in messages:
            for i in message.shards:
                for place in self._routes.answered((i, message.tag)):
                    place.forget((i, message.tag))
        return messages

    def cancel(self, tag: Tag) -> None:
        self._routes.drop(tag)
        for place in self._places:
            place.cancel(tag)

    def close(self) -> None:
        try:
            self._opened.close()  # all of it, also after an interrupt in a part
        finally:
            self._places = []

    def _process(self, name: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
        threads = {f"{library}_NUM_THREADS": str(self._threads) for library in ("OMP", "OPENBLAS", "MKL", "BLIS")}
        told = {
            "name": name,
            "socket": theirs.fileno(),
            "shards": self._shared_file,
            "parent": os.getpid(),
            "memory": self._memory,
            "threads": self._threads,
            "workers": self._count,
        }
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(told), *path],
            pass_fds=(theirs.fileno(), self._shared_file),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads},
        )


class _Pickled:
    """Pickles the function and the state that all questions of an epoch share, once, and gives each a number."""

    def __init__(self) -> None:
        self._last: list[tuple[Any, int, bytes]] = [(None, -1, b""), (None, -1, b"")]

    def number(self, place: int, given: Any) -> tuple[int, bytes]:
        """The number of the function (place 0) or of the state (place 1), and its pickle."""
        known, number, data = self._last[place]
        if known is not given:
            number, data = number + 1, packed(given, "the algorithm") if place == 0 else pickle.dumps(given, 5)
            self._last[place] = given, number, data
        return number, data


class _Place:
    """The place of a worker: one process after the other."""

    def __init__(self, number: int, start: Callable[[str, socket.socket], subprocess.Popen[bytes]]) -> None:
        self._number, self._start = number, start
        self._generation = -1
        self._deaths = 0
        self.has_begun = False  # whether a process of this place ever took questions
        self._waiting: OrderedDict[Question, _Asked] = OrderedDict()  # the oldest first
        self._has: dict[Question, _Asked] = {}  # what the process was asked, the oldest first
        self._opened = contextlib.ExitStack()  # ends what `begin` began, as far as it came

    def begin(self) -> None:
        """Start a process."""
        self._generation += 1
        self.name = f"worker {self._number}" + (f", process {self._generation + 1}" if self._generation else "")
        with later():  # an interrupt in Popen would leave a process that nobody waits for
            self.connection, theirs = off_streams(socket.socketpair)
            self._opened.enter_context(self.connection)
            with theirs:
                self._process = self._start(self.name, theirs)
                self._opened.callback(_kill, self._process)
        self.name += f" (pid {self._process.pid})"
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._opened.callback(self._outbox.put, None)
        self._is_there = False  # whether the process has said that it takes questions
        self._ahead = AHEAD
        self._worked: tuple[list[str], float] = [], 0.0  # the time of the processor, and when it was seen first
        self._incoming = Incoming(self.connection)
        self._knows: tuple[int | None, int | None] = None, None  # the numbers of the function and state that it has
        threading.Thread(target=_send_all, args=(self.connection, self._outbox), daemon=True).start()

    def load(self) -> int:
        """The number of questions that the place has."""
        return len(self._has) + len(self._waiting)

    def is_stuck(self) -> bool:
        """Whether the process was stopped, or has been asleep for long, as far as the calls of this method tell."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            state, *figures = file.read().rpartition(")")[2].split()
        worked, now = figures[10:12], time.monotonic()  # in the user's and in the system's code
        if state == "D" or worked != self._worked[0]:  # it waits for a disk, or has computed something
            self._worked = worked, now
        return state == "T" or now - self._worked[1] >= STUCK

    def ask(self, question: Question, function: tuple[int, bytes], shared: tuple[int, bytes]) -> None:
        """Ask the process with the next `send`, or when it has answered others."""
        self._waiting[question] = question, function, shared

    def send(self) -> None:
        """Send questions, as many as the process may have. A message has those about the same state."""
        while self._waiting and len(self._has) < self._ahead:
            _, function, shared = self._first()
            numbers = function[0], shared[0]
            news = [data if number != known else None for (number, data), known in zip((function, shared), self._knows)]
            self._knows = numbers
            asked: list[_Asked] = []
            while self._waiting and len(self._has) < self._ahead:
                one = self._first()
                if (one[1][0], one[2][0]) != numbers:
                    break
                self._has[one[0]] = self._waiting.pop(one[0])
                asked.append(one)
            self._outbox.put((*news, [question for question, _, _ in asked]))

    def _first(self) -> _Asked:
        return next(iter(self._waiting.values()))

    def received(self) -> Sequence[Reply | Lost]:
        """The replies that have arrived as a whole, or the questions that are lost because the process ended."""
        if not self._incoming.read():
            return self.replace()
        replies = []
        for reply in self._incoming.messages():
            if reply is None:
                self._is_there, self._deaths, self.has_begun = True, 0, True
                continue
            replies.append(reply)
            self._ahead = max(AHEAD, self._ahead - 1, min(2 * len(reply.shards), MOST))
            for i in reply.shards:
                self._has.pop((i, reply.tag), None)
        return replies

    def forget(self, question: Question) -> None:
        """Another place has answered."""
        self._waiting.pop(question, None)

    def cancel(self, tag: Tag) -> None:
        """Nobody waits for the answers to the other questions of an epoch."""
        self._waiting = OrderedDict(item for item in self._waiting.items() if item[0][1] != tag)

    def replace(self) -> list[Lost]:
        """Start another process; returns the questions that the last one had. If the last one never took a question,
        the next one gets its questions."""
        had, self._has = self._has, {}
        self.end()
        name, status = self.name, _status(self._process)
        if not self._is_there:
            self._deaths += 1
            if self._deaths >= DEATHS:
                raise WorkersLostError(
                    f"{DEATHS} processes of worker {self._number} ended one after the other as soon as they began, the "
                    f"last one ({name}) with {status}: what they wrote to stderr may tell why",
                    worker=name,
                )
            self._waiting = OrderedDict(had | self._waiting)
            had = {}
        self.begin()
        return [Lost(*question, name, f"the process ended with {status}") for question in had]

    def end(self) -> None:
        """Kill the process, if there is one."""
        self._opened.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # which does nothing if it ended by itself
    process.wait()


def _status(process: subprocess.Popen[bytes]) -> str:
    """The exit status of a process that ended, in words."""
    status = process.returncode
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _send_all(connection: socket.socket, outbox: queue.SimpleQueue[Any]) -> None:
    """Send until there is nothing more, or nobody to send to."""
    with contextlib.suppress(OSError):  # the process ended, which the reading side notices
        while (message := outbox.get()) is not None:
            send(connection, message)


def _write_pieces(file: int, data: Sequence[Any]) -> None:
    """Write pieces of data: their number, their lengths, and the pieces, each at a multiple of 64."""
    header = json.dumps([len(piece) for piece in data]).encode()
    place = _write(file, 0, len(header).to_bytes(8, "little") + header)
    for piece in data:
        place = _write(file, -(-place // 64) * 64, piece)
    os.truncate(file, place)


def _write(file: int, place: int, data: Any) -> int:
    """Write everything; returns the end."""
    view = memoryview(data).cast("B")
    while len(view):
        done = os.pwrite(file, view[: 1 << 30], place)
        place, view = place + done, view[done:]
    return place
