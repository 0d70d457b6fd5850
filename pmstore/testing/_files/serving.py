"""Checks that are Python scripts, run by servers that have imported their libraries already."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from pmstore.testing._base.scratch import Scratch
from pmstore.testing._files.check_server import numbers_in

__all__ = ["Ended", "Servers", "python_script"]

SERVER = Path(__file__).with_name("check_server.py")
START = 60.0  # seconds until a server must be ready, or must answer after a check's own time
MOST_SECONDS = 2e6  # that `select` is asked to wait
END = 10.0  # and until it must have ended

Ended = tuple[int | None, bytes]
"""The exit status of a check, negative for a signal, None if it took too long; and its output."""


class Lost(Exception):
    """The server has ended, or never began."""


def python_script(words: Sequence[str]) -> int:
    """The place of the script in a command that runs one by Python; 0 if it does something else."""
    if not re.fullmatch(r"python[\d.]*", os.path.basename(words[0])):
        return 0
    at = 1
    while at < len(words) and re.fullmatch(r"-[BEIPSbqsu]+", words[at]):
        at += 1
    return at if at < len(words) and os.path.isfile(words[at]) else 0


class Servers:
    """Servers for one check, as many as there are threads that use them at the same time."""

    def __init__(self, words: Sequence[str], script: int, timeout: float, memory: str | None) -> None:
        self.script = script
        self.memory, self.timeout = memory, min(timeout, MOST_SECONDS)
        self.command = [*words[:script], os.fspath(SERVER), words[script], str(self.timeout)]
        self.lock = threading.Lock()
        self.all: list[_Server] = []
        self.idle: list[_Server] = []
        self.usable = True

    def run(self, words: Sequence[str], said: bytes) -> Ended | None:
        """Runs the check for a state. None if that is not possible, now and later.

        words: the command, in which the text {said} is still to be replaced.
        """
        server: _Server | None = None
        try:
            server = self._take()
            if server is None:
                return None
            ended = server.run(words[self.script :], said)
        except (OSError, Lost):
            self.usable = False
            if server is not None:
                server.close()
            return None
        with self.lock:
            self.idle.append(server)
        return ended

    def close(self) -> None:
        """Ends the servers, and the checks that they run."""
        self.usable = False
        with self.lock:
            servers, self.all, self.idle = self.all, [], []
        for server in servers:
            server.close()

    def _take(self) -> _Server | None:
        with self.lock:
            if not self.usable:
                return None
            if self.idle:
                return self.idle.pop()
            server = _Server(self.command, self.memory, self.timeout)
            self.all.append(server)
        server.wait_until_ready()
        return server


class _Server:
    """A process of check_server.py."""

    def __init__(self, command: Sequence[str], memory: str | None, timeout: float) -> None:
        self.most = timeout + START
        self.known = False
        """Whether its numbers of processes are those of this process."""
        self.scratch = Scratch(memory)
        self.said = os.path.join(self.scratch.path, "said")
        self.output = os.path.join(self.scratch.path, "output")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = here
        with there:
            self.process = subprocess.Popen(
                command,
                stdin=there.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        self.socket.settimeout(START)
        word, _, namespace = self.socket.recv(64).decode().partition(" ")
        if word != "ready":
            raise Lost
        # A command named python may be a script that starts Python in a container.
        self.known = bool(namespace) and namespace == numbers_in()
        self.socket.settimeout(self.most)  # the import of a library may never end there

    def run(self, words: Sequence[str], said: bytes) -> Ended:
        Path(self.said).write_bytes(said)
        Path(self.output).write_bytes(b"")
        filled = [word.replace("{said}", self.said) for word in words]
        self.socket.sendall(b"\0".join(map(os.fsencode, [self.said, self.output, *filled])))
        fork = int(self._answer())
        try:
            answer = self._answer()
        except (OSError, Lost):
            if self.known:
                _kill(fork)  # a server that was killed could not do it
            raise
        output = Path(self.output).read_bytes()
        return (None if answer == b"timeout" else int(answer)), output

    def _answer(self) -> bytes:
        answer = self.socket.recv(64)
        if not answer:
            raise Lost
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # the server ends, and kills its check; also if a thread waits here
        try:
            self.process.wait(timeout=END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        self.scratch.close()


def _kill(fork: int) -> None:
    """Kills a fork of a server, with all that it started. It leads a session unless it has just begun."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(fork, signal.SIGKILL)
            return
