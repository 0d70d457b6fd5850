"""Runs a check in a process of its own, because a crash image may kill its reader."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.fork import fork, signal_name

__all__ = ["ApartCheck", "die_with_parent"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Called in a child: from now on it is killed when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


class ApartCheck:
    """A check in a process of its own for each image: nothing that it keeps in memory is there for the next image.

    A child, which is forked for the first image, forks again for each one. It imports the installed packages that the
    check of the first one has imported, as that takes long. If the fork of an image dies, that is the image's problem.
    """

    def __init__(self, check: Callable[[Path, bytes], str | None], timeout: float = 60.0) -> None:
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise CrashTestError(f"timeout: a check can't end within {timeout!r} s: give seconds, more than 0")
        self.check = check
        self.timeout = timeout
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
                if not self.pipe.poll(min(self.timeout, _MOST_WAIT)):
                    self.close()
                    return f"the check took longer than {self.timeout:g} s"
                answer = self.pipe.recv_bytes()
            except (EOFError, ConnectionError):
                self.close()
                raise CrashTestError("the process that forks the check was killed") from None
            text = answer[1:].decode("utf-8", "replace")
            if answer[:1] == _WRONG:
                raise CrashTestError(text)
            return text if answer[:1] == _FAILED else None

    def close(self) -> None:
        """Ends the child, the check that is running, and what checks have started."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
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
            os.setpgid(0, 0)
            faulthandler.disable()  # it would print a long report for each state that kills the check
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The terminal's ^C is for the parent, which ends this process. A handler is set, because programs that the
            # check starts would inherit an ignored signal.
            signal.signal(signal.SIGINT, lambda number, frame: None)
            known = set(sys.modules)
            while True:
                answer, modules = self._in_a_fork(pipe.recv_bytes(), known)
                pipe.send_bytes(answer)
                for name in modules:
                    with contextlib.suppress(BaseException):  # it is the check that needs it
                        importlib.import_module(name)
                known |= set(modules)
        finally:
            os._exit(0)

    def _in_a_fork(self, image: bytes, known: set[str]) -> tuple[bytes, list[str]]:
        """The answer to an image, and the names of the modules that the check imported."""
        here, there = Pipe(duplex=False)
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                answer = self._answer(image)
                there.send((answer, [name for name in sys.modules if name not in known and _is_installed(name)]))
            finally:
                os._exit(0)
        there.close()
        handle = os.pidfd_open(pid)
        found: tuple[bytes, list[str]] = b"", []
        with here:
            wait([here, handle])  # what the check has started may keep the pipe open when the check is dead
            with contextlib.suppress(EOFError, ConnectionError):
                if here.poll():
                    found = here.recv()
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        return found if found[0] else (_FAILED + _how(os.waitstatus_to_exitcode(status)).encode(), [])

    def _answer(self, image: bytes) -> bytes:
        name, _, said = image.partition(b"\0")
        try:
            text = self.check(Path(os.fsdecode(name)), said)
        except CrashTestError as error:
            return _WRONG + str(error).encode("utf-8", "replace")
        finally:
            _flush()
        return _PASSED if text is None else _FAILED + text.encode("utf-8", "replace")


_PASSED, _FAILED, _WRONG = b"+", b"-", b"!"  # _WRONG: the check itself


_MOST_WAIT = 1e6  # seconds; poll takes no more than a few weeks
_INSTALLED = tuple({sysconfig.get_path(place) for place in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_installed(name: str) -> bool:
    """Whether a module is an installed one: the program's own may read what the check has set before."""
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


def _how(code: int) -> str:
    if code < 0:
        return f"the check's process was killed by {signal_name(-code)}"
    return f"the check ended its process, with status {code}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
