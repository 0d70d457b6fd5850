"""A process of the engine on processes. It answers questions until its coordinator is gone."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from pmstore.scale._frames import Incoming, send
from pmstore.scale._gather import Gathering
from pmstore.scale._holder import Holder, environment
from pmstore.scale._memory import SHARE, available
from pmstore.scale._messages import Failure, Reply, in_words
from pmstore.scale._shards import Shard

HOLD = 0.005
"""Seconds that a result waits for its neighbours at most. A message of its own takes a twentieth of that.

It only waits for shards whose last map took no longer: a map that ends the process, or never ends, takes no results
along."""


def main() -> None:
    """Serve the coordinator that the command line tells of."""
    told = json.loads(sys.argv[1])
    if os.getppid() != told["parent"]:
        return  # it ended before that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator gets it, too, and ends its workers
    connection = socket.socket(fileno=told["socket"])
    _keep_to_itself(connection, told["shards"])
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    name = f"{told['name']} (pid {os.getpid()})"
    holder = Holder(name, told["memory"] or int(SHARE * available()) // told["workers"], told["threads"])
    shards = _read(_shards, told["shards"])
    function: Any = None
    shared: Any = None  # the newest ones; a question is about those that came before it
    gathering = Gathering(1 if isinstance(shards, Failure) else len(shards))
    began = 0.0  # when the oldest reply of them was there
    quick: set[tuple[int, bool]] = set()  # questions whose last answer took no longer than HOLD

    def reply_now() -> None:
        for reply in gathering.take():
            send(connection, reply)

    with contextlib.suppress(OSError):  # there is no coordinator any more
        send(connection, None)  # from here on, a process that ends is lost to a question
        while (message := inbox.get()) is not None:
            new_function, new_shared, questions = message
            function = function if new_function is None else _read(pickle.loads, new_function)
            shared = shared if new_shared is None else _read(pickle.loads, new_shared)
            unreadable = next((one for one in (shards, function, shared) if isinstance(one, Failure)), None)
            for i, tag in questions:
                kind = i, tag.epoch < 0
                if kind not in quick:
                    reply_now()
                asked = time.monotonic()
                if unreadable is None:
                    reply = holder.answer(i, shards[i], function, shared, tag)
                else:
                    reply = Reply(i, tag, name, environment=environment(told["threads"]), failure=unreadable)
                now = time.monotonic()
                (quick.add if now - asked <= HOLD else quick.discard)(kind)
                began = began if gathering else now
                gathering.put(reply, function, shared)
                if time.monotonic() - began > HOLD:
                    reply_now()
            reply_now()


def _keep_to_itself(connection: socket.socket, shards: int) -> None:
    """Processes that a map starts do not get the descriptors: with the connection, one that outlives the worker would
    hide its death from the coordinator."""
    for file in (connection.fileno(), shards):
        os.set_inheritable(file, False)
    os.register_at_fork(after_in_child=connection.close)


def _read(read: Callable[[Any], Any], given: Any) -> Any:
    """The object that the coordinator sent, or why it can't be read here."""
    try:
        return read(given)
    except Exception as error:
        return Failure("map", f"what was sent can't be read: {in_words(error)}\n{traceback.format_exc()}")


def _receive(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """Read messages as soon as they arrive: they may be larger than the socket's buffer."""
    incoming = Incoming(connection)
    while incoming.read():
        for message in incoming.messages():
            inbox.put(message)
    inbox.put(None)


def _shards(file: int) -> tuple[Shard, ...]:
    """The shards, whose arrays are in memory that all processes share."""
    memory = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    place = 8 + int.from_bytes(memory[:8], "little")
    pieces = []
    for length in json.loads(bytes(memory[8:place])):
        place = -(-place // 64) * 64
        pieces.append(memory[place : place + length])
        place += length
    shards: tuple[Shard, ...] = pickle.loads(pieces[0], buffers=pieces[1:])
    return shards
