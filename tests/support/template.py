"""Python processes that start in milliseconds: forks of a process that has imported what they need.

A new process needs half a second to import numpy and pmstore, and two with scikit-learn. The tests start hundreds of
them. So a template imports the modules once, and waits for requests; each is served by a fork of it, which sees its
arguments, its environment and its working directory as a new process would, and ends as one.

A `Process` is a child of the template, which says how it ended. An `Own` process is a child of the one that asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = ("numpy", "pmstore", "pmstore._cli", "pmstore.testing")
WITH_ESTIMATORS = (*MODULES, "pmstore.cluster", "pmstore.decomposition", "pmstore.mixture", "sklearn.linear_model")
LARGEST = 1 << 17  # bytes of a request
SUBREAPER = 36  # of prctl: orphans become children of this process


class Process:
    """A fork of a template, with what tests use of subprocess.Popen."""

    def __init__(self, stdin: int, stdout: int, stderr: Any, status: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "w", encoding="utf-8"), os.fdopen(stdout, encoding="utf-8")
        self._stderr, self._status = stderr, os.fdopen(status, "rb", buffering=0)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        return int(struct.unpack("i", self._status.read(4))[0])

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        end = threading.Timer(seconds, self.kill)
        end.start()
        try:
            yield
        finally:
            end.cancel()
            end.join()

    def wait(self, timeout: float = 60) -> int:
        """Its exit status, as of subprocess.Popen. It is killed after `timeout` seconds."""
        if self.returncode is None:
            with self._killed_after(timeout):
                self.returncode = os.waitstatus_to_exitcode(self._number())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """The rest of its output, and its errors. It is killed after `timeout` seconds."""
        with self._killed_after(timeout):
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
            out = "" if self.stdout.closed else self.stdout.read()
            self.stdout.close()
        self.wait(timeout)
        self._stderr.seek(0)
        return out, self._stderr.read().decode("utf-8", "replace")


class Own:
    """A fork of a template that is a child of this process, with what pmstore uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Template:
    """A process with some modules. Its forks have the environment that this process has when they start; fixed: what
    differs, also for the template itself. directory: where the template starts, and looks for modules first.
    """

    def __init__(
        self, modules: Sequence[str], fixed: dict[str, str], directory: str | os.PathLike[str] | None = None
    ) -> None:
        self.fixed = fixed
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.template", str(theirs.fileno()), *modules]
        with theirs:  # it ends when this process does: nobody has the other end then
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # as Python looks at its streams when it starts; each fork gets its own
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd=directory,
                env={**os.environ, **fixed},
            )

    @classmethod
    def here(cls) -> Template:
        """A fork of this process as a template. It ends with this process."""
        self = cls.__new__(cls)
        self.fixed = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            self._control.close()
            become(serve(theirs))
            os._exit(0)
        theirs.close()
        return self

    def start(self, *arguments: Any, directory: str | os.PathLike[str] = ".") -> Process:
        """Start Python with these arguments: -c CODE …, -m MODULE … or SCRIPT …, in this working directory."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the process has it)
        stdin, stdout, status = os.pipe(), os.pipe(), os.pipe()
        self._request(arguments, directory, {0: stdin[0], 1: stdout[1], 2: stderr.fileno()}, status[1])
        for fd in (stdin[0], stdout[1], status[1]):
            os.close(fd)
        return Process(stdin[1], stdout[0], stderr, status[0])

    def own(self, *arguments: Any, pass_fds: Sequence[int] = ()) -> Own:
        """The same as a child of this process, with its output and these descriptors, and without input."""
        status, libc = os.pipe(), ctypes.CDLL(None)
        assert not libc.prctl(SUBREAPER, 1)
        try:
            with open(os.devnull, "rb") as nothing:
                given = {0: nothing.fileno(), **{fd: fd for fd in (1, 2, *pass_fds)}}
                self._request(arguments, ".", given, status[1], own=True)
            os.close(status[1])
            with os.fdopen(status[0], "rb") as told:
                return Own(*struct.unpack("i", told.read(4)))
        finally:
            libc.prctl(SUBREAPER, 0)

    def _request(
        self,
        arguments: Sequence[Any],
        directory: str | os.PathLike[str],
        given: dict[int, int],
        status: int,
        own: bool = False,
    ) -> None:
        """given: the descriptors of the fork, and what they are here. status: where it says what became of it."""
        request = {
            "arguments": [str(argument) for argument in arguments],
            "directory": os.path.abspath(directory),
            "environment": {**os.environ, **self.fixed},
            "own": own,
            "numbers": list(given),
        }
        socket.send_fds(self._control, [json.dumps(request).encode()], [*given.values(), status])

    def run(
        self, *arguments: Any, directory: str | os.PathLike[str] = ".", text: str = "", timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """The same as subprocess.run of Python with these arguments. text: its input."""
        process = self.start(*arguments, directory=directory)
        process.stdin.write(text)
        out, error = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.wait(), out, error)

    def close(self) -> None:
        """Wait for its end, so that this process is charged for what its forks used."""
        self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it, too
        self._control.close()
        self.process.communicate()


_templates: dict[str, Template] = {}


def template(modules: Sequence[str], **fixed: str) -> Template:
    """The template of this process with these modules, this pmstore and the tests. It ends with the tests."""
    fixed["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    key = json.dumps([os.getpid(), modules, fixed], sort_keys=True)
    if key not in _templates:
        _templates[key] = Template(modules, fixed, ROOT)
    return _templates[key]


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python as `Template.run` does, with this pmstore."""
    what = str(arguments[1] if arguments[0] == "-c" else arguments[0])
    code = Path(what).read_text(encoding="utf-8") if what.endswith(".py") else what
    return template(modules_for(code)).run(*arguments, **options)


def close_templates() -> None:
    for key, one in _templates.items():
        if json.loads(key)[0] == os.getpid():
            one.close()
    _templates.clear()


def modules_for(code: str) -> tuple[str, ...]:
    """The modules of a template for this program. One with exit handlers imports itself: they run in the order of
    imports."""
    if "atexit" in code:
        return ()
    return WITH_ESTIMATORS if re.search(r"sklearn|pmstore\.(cluster|decomposition|mixture)", code) else MODULES


# ---- inside the template


def serve(control: socket.socket) -> list[str]:
    """Fork for each request. Returns in the forks, with their arguments."""
    signal.signal(signal.SIGCHLD, reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, fds, _, _ = socket.recv_fds(control, LARGEST, 8)
        if not request:
            os._exit(0)
        if not os.fork():
            found = json.loads(request)
            control.close()
            if (disowned if found["own"] else supervise)(fds[-1]):
                break
            os._exit(0)
        for fd in fds:
            os.close(fd)
    fds = [moved_above(max(found["numbers"]), fd) for fd in fds]
    for number, fd in zip(found["numbers"], fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(found["directory"])
    os.environ.clear()
    os.environ.update(found["environment"])
    return list(found["arguments"])


def reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def supervise(status: int) -> bool:
    """Fork the process itself, in which this returns True, and tell its number and then how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        return True
    os.write(status, struct.pack("i", pid))
    os.closerange(0, status)
    os.closerange(status + 1, 64)
    os.write(status, struct.pack("i", os.waitpid(pid, 0)[1]))
    return False


def disowned(status: int) -> bool:
    """Fork the process itself, in which this returns True once it is a child of the process that asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    between = os.getpid()
    if os.fork():
        return False
    while os.getppid() == between:
        os.sched_yield()
    os.write(status, struct.pack("i", os.getpid()))
    return True


def moved_above(number: int, fd: int) -> int:
    """The same file under a higher number."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD, number + 1)
    os.close(fd)
    return moved


def become(arguments: list[str]) -> None:
    """Run what Python would run with these arguments."""
    how, *rest = arguments
    if how == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv, sys.path[0] = [how, *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(how))
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
