"""Runs a check in a process of its own, because a crash image may kill its reader."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from pmstore.testing._base.fork import fork

__all__ = ["ApartCheck", "die_with_parent"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Called in a child: from now on it is killed when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


class ApartCheck:
    """A check in a child process, which is forked for the first image and then called for each one. If it dies, that
    is the problem of the image.
    """

    def __init__(self, check: Callable[[Path, bytes], str | None]) -> None:
        self.check = check
        self.pid = 0
        self.pipe: Connection | None = None
        self.lock = threading.Lock()

    def __call__(self, directory: Path, said: bytes) -> str | None:
        with self.lock:
            if self.pipe is None:
                self._start()
            assert self.pipe is not None
            try:
                self.pipe.send_bytes(os.fsencode(directory) + b"\0" + said)
                answer = self.pipe.recv_bytes()
            except (EOFError, ConnectionError):
                return self._died()
            return answer[1:].decode("utf-8", "replace") if answer[:1] == b"-" else None

    def close(self) -> None:
        """Ends the child."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _start(self) -> None:
        here, there = Pipe()
        _flush()
        parent = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            here.close()
            self._serve(there, parent)
        there.close()
        self.pipe = here

    def _serve(self, pipe: Connection, parent: int) -> NoReturn:
        try:
            die_with_parent(parent)
            faulthandler.disable()  # it would print a long report for each state that kills the check
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The terminal's ^C is for the parent, which ends this process. A handler is set, because programs that the
            # check starts would inherit an ignored signal.
            signal.signal(signal.SIGINT, lambda number, frame: None)
            while True:
                name, _, said = pipe.recv_bytes().partition(b"\0")
                text = self.check(Path(os.fsdecode(name)), said)
                _flush()
                pipe.send_bytes(b"+" if text is None else b"-" + text.encode("utf-8", "replace"))
        finally:
            os._exit(0)

    def _died(self) -> str:
        assert self.pipe is not None
        self.pipe.close()
        self.pipe = None
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"the check's process was killed by {signal.Signals(-code).name}"
        return f"the check ended its process, with status {code}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
