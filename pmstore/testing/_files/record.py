"""Records the changes that a program or a function makes in the files below a directory.

A separate process, a fork of this one, traces the program: waiting for the traced threads must not reap the children of
a test session. csrc/explore/tracer.h explains the choice of ptrace, calls.py the meaning of the calls.

Calls on the recorded files run one at a time, so that their order is known. If two threads are about to make calls at
the same time, that is an error: the order was chance, and another run would have another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.fork import fork, signal_name
from pmstore.testing._base.scratch import Scratch
from pmstore.testing._files.apart import die_with_parent
from pmstore.testing._files.calls import Calls, Finish
from pmstore.testing._files.recording import Recording, load, save
from pmstore.testing._files.tree import traced_by
from pmstore.testing._pmexplorer import ffi, lib

__all__ = ["record", "tracing_refused"]

Program = Sequence[str] | Callable[[Path], Any]
"""A command, or a function that is called with the directory."""

NOT_ALLOWED = (
    "tracing (ptrace) is not allowed here. In a container: docker run --cap-add=SYS_PTRACE (podman: the same); where "
    "/proc/sys/kernel/yama/ptrace_scope is 3, only an administrator can change that. What is traced already (strace, a "
    "debugger) can't be traced again"
)
MOST_TEXT = 2000  # characters of the program's error output, in an error
PATIENCE = 5.0  # seconds before a message names the process that is waited for


class Call(NamedTuple):
    """A call that a thread is about to make."""

    pid: int
    name: str
    arguments: list[int]


def record(
    program: Program,
    directory: Path,
    *,
    allow_threads: bool = False,
    environment: Mapping[str, str] | None = None,
    echo: bool = False,
) -> Recording:
    """Runs a program and returns the recording of its changes below a directory.

    echo: copy the program's output to the output of this process.

    Raises
    ------
    CrashTestError
        The program could not be run or traced, failed, or made a call that can't be recorded.
    """
    if not directory.is_dir():
        raise CrashTestError(f"{directory} is no directory: make it before the program runs, it may be empty")
    if not callable(program) and not program:
        raise CrashTestError("there is no program to record: the command is empty")
    if not callable(program) and shutil.which(program[0]) is None:
        hint = ": each word of the command is one of its own, without quotes around all" if " " in program[0] else ""
        raise CrashTestError(f"there is no program {program[0]!r}{hint}")
    directory = Path(os.path.realpath(directory))
    with Scratch() as temporary:
        work = Path(temporary)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        tracer = fork()
        if tracer == 0:
            _trace_and_leave(program, directory, work, allow_threads, environment, parent)
        try:
            _, status = os.waitpid(tracer, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(tracer, signal.SIGKILL)  # its traced processes end with it
            with contextlib.suppress(ChildProcessError):  # it had ended just before
                os.waitpid(tracer, 0)
            raise
        complaint = work / "complaint"
        if echo:
            for name, stream in (("said", sys.stdout), ("stderr", sys.stderr)):
                if (work / name).exists():
                    print((work / name).read_text(errors="replace"), end="", file=stream, flush=True)
        if complaint.exists():
            raise CrashTestError(complaint.read_text(errors="replace"))
        if status != 0:
            raise CrashTestError(f"the recorder ended with status {os.waitstatus_to_exitcode(status)}")
        return load(work / "recording")[0]


def tracing_refused() -> str | None:
    """The reason why programs can't be traced here, or None."""
    with Scratch() as directory:
        try:
            record(["true"], Path(directory))
        except CrashTestError as error:
            return str(error)
    return None


# ---- the tracing process


def _trace_and_leave(
    program: Program,
    directory: Path,
    work: Path,
    allow_threads: bool,
    environment: Mapping[str, str] | None,
    parent: int,
) -> NoReturn:
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # ^C also reaches the parent, which ends this process
        recording = _trace(program, directory, work, allow_threads, environment)
        save(work / "recording", recording)
        status = 0
    except CrashTestError as error:
        (work / "complaint").write_text(str(error), errors="replace")
    except BaseException:
        (work / "complaint").write_text("the recorder failed:\n" + traceback.format_exc(), errors="replace")
    finally:
        os._exit(status)  # no code of the copied process may run after this


def _trace(
    program: Program, directory: Path, work: Path, allow_threads: bool, environment: Mapping[str, str] | None
) -> Recording:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    said = os.open(work / "said", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    errors = os.open(work / "stderr", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    calls = Calls(directory, said)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # for a traced function
    pid = fork()
    if pid == 0:
        _run_and_leave(program, directory, work, said, errors, environment)
    signal.signal(signal.SIGINT, interrupt)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every recorded file stays open here
    refused = lib.pm_tracer_seize(pid)
    if refused:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if refused in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise CrashTestError(NOT_ALLOWED)
        raise CrashTestError(f"the program could not be traced: {os.strerror(refused)}")
    status = Loop(calls, allow_threads, pid).run()
    if (work / "unable").exists():
        raise CrashTestError((work / "unable").read_text())
    if status != 0:
        how = f"ended with status {status}" if status > 0 else f"was killed by {signal_name(-status)}"
        what = "the function" if callable(program) else program[0]
        text = (work / "stderr").read_text(errors="replace").strip()[-MOST_TEXT:]
        raise CrashTestError(f"{what} {how}; a crash test needs a run that succeeds" + (f":\n{text}" if text else ""))
    name = [getattr(program, "__qualname__", "function")] if callable(program) else list(program)
    calls.finish()
    return calls.recording(name)


def _run_and_leave(
    program: Program, directory: Path, work: Path, said: int, errors: int, environment: Mapping[str, str] | None
) -> NoReturn:
    """The traced process."""
    try:
        os.dup2(said, 1)
        os.dup2(errors, 2)
        os.kill(os.getpid(), signal.SIGSTOP)  # until it is traced
        refused = lib.pm_tracer_filter()
        if refused:
            (work / "unable").write_text(f"{NOT_ALLOWED} (seccomp: {os.strerror(refused)})")
            os._exit(1)
        if not callable(program):
            # Otherwise Python would buffer its output until it ends, and no line would be an acknowledgement before.
            values = {**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"}
            try:
                os.execvpe(program[0], list(program), values)
            except OSError as error:
                (work / "unable").write_text(f"{program[0]} can't be run: {error.strerror}")
                os._exit(1)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, encoding="utf-8", closefd=False) for fd in (1, 2))
        program(directory)
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as leaving:
        os._exit(leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1)
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(1)


class Loop:
    """Lets the traced threads run, one recorded call at a time."""

    def __init__(self, calls: Calls, allow_threads: bool, first: int) -> None:
        self.calls = calls
        self.allow_threads = allow_threads
        self.first = first
        self.status = 1
        self.ended = False
        self.busy: tuple[Call, Finish] | None = None
        self.waiting: deque[Call] = deque()
        self.event = ffi.new("pm_traced *")

    def run(self) -> int:
        """Runs until no process is left. Returns the first one's exit status, or minus the number of the signal that
        killed it."""
        signal.signal(signal.SIGALRM, lambda number, frame: self._say_what_lasts())
        self._wait_patiently()
        while True:
            lib.pm_tracer_next(self.event, 1)
            if self.event.kind == lib.PM_TRACED_NOBODY:
                signal.setitimer(signal.ITIMER_REAL, 0)
                return self.status
            self._dispatch()

    def _wait_patiently(self) -> None:
        # Repeat the signal: one that comes just before the tracer waits does not wake it.
        signal.setitimer(signal.ITIMER_REAL, PATIENCE, PATIENCE)

    def _say_what_lasts(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        text = "recording: still running"
        if self.ended:
            others = ", ".join(f"process {pid} ({command})" for pid, command in traced_by(os.getpid()))
            text = f"the program ended; still waiting for {others}"
        os.write(2, f"pmstore: {text}\n".encode("utf-8", "replace"))

    def _dispatch(self) -> None:
        event = self.event
        kind = event.kind
        if kind == lib.PM_TRACED_ENTER:
            self._enter(self._call())
        elif kind == lib.PM_TRACED_LEAVE:
            self._leave(event.pid, event.result)
        elif kind == lib.PM_TRACED_EXIT:
            self.calls.died()
            if event.pid == self.first:
                self.status = event.result
                self.ended = True
                self._wait_patiently()
            if self.busy is not None and self.busy[0].pid == event.pid:  # it was killed during the call
                self.busy = None
                self._next()
        elif kind == lib.PM_TRACED_FOREIGN:
            raise CrashTestError("the program is of another architecture (32 bits?): it can't be recorded")
        elif kind == lib.PM_TRACED_FAILED:
            raise CrashTestError(
                f"waiting for the program failed: {os.strerror(event.result)} (recording needs Linux 5.3 or newer)"
            )

    def _call(self) -> Call:
        event = self.event
        return Call(event.pid, ffi.string(event.name).decode(), list(event.arguments))

    def _enter(self, call: Call) -> None:
        finish = self.calls.enter(*call)
        if finish is None:
            lib.pm_tracer_resume(call.pid, 0)
        elif self.busy is not None:
            self._overlap(self.busy[0], call)
            self.waiting.append(call)
        else:
            self._start(call, finish)

    def _start(self, call: Call, finish: Finish) -> None:
        self.calls.catch_up()
        self.busy = call, finish
        lib.pm_tracer_resume(call.pid, 1)

    def _leave(self, pid: int, result: int) -> None:
        if self.busy is None or self.busy[0].pid != pid:
            lib.pm_tracer_resume(pid, 0)
            return
        self.busy[1](result)
        # Calls that other threads began meanwhile overlap with this call.
        while True:
            lib.pm_tracer_next(self.event, 0)
            if self.event.kind in (lib.PM_TRACED_NOTHING, lib.PM_TRACED_INTERRUPTED):
                break
            self._dispatch()
        self.busy = None
        lib.pm_tracer_resume(pid, 0)
        self._next()

    def _next(self) -> None:
        while self.waiting and self.busy is None:
            call = self.waiting.popleft()
            finish = self.calls.enter(*call)  # once more, because its paths may have changed
            if finish is None:
                lib.pm_tracer_resume(call.pid, 0)
            else:
                self._start(call, finish)

    def _overlap(self, one: Call, other: Call) -> None:
        if not self.allow_threads:
            raise CrashTestError(
                f"two threads or processes ({one.pid}: {one.name}, {other.pid}: {other.name}) changed the files, or "
                "wrote to standard output, at the same time: in another run the order may be another. Have one thread "
                "write, or say --allow-threads (allow_threads=True) to explore the order that this run had"
            )
