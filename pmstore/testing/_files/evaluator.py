"""Crash images as directories, and the results of the user's check on them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pmstore.testing._base.commandline import need_asserts, split_command
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._base.fork import signal_name
from pmstore.testing._base.scratch import Scratch
from pmstore.testing._files.apart import ApartCheck
from pmstore.testing._files.model import Image
from pmstore.testing._files.recording import INSIDE
from pmstore.testing._files.serving import Servers, python_script

__all__ = ["Check", "CommandCheck", "FunctionCheck", "Evaluator", "write_image"]

MEMORY = "/dev/shm"
MOST_TEXT = 300
MOST_WAIT = 2**31 - 1  # milliseconds


def memory() -> str | None:
    """The file system in memory, if there is one."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


def write_image(image: Image, directory: Path) -> None:
    """Writes an image into a directory, which must exist and be empty."""
    first: dict[int, Path] = {}
    for name, file in image.items():
        path = directory / name
        if file.kind == "directory":
            path.mkdir()
        elif file.kind == "link":
            os.symlink(file.content.replace(INSIDE, os.fsencode(directory.absolute())), os.fsencode(path))
        elif file.inode in first:
            os.link(first[file.inode], path)
        else:
            first[file.inode] = path
            with path.open("wb", buffering=0) as out:
                out.write(file.content)
                if file.mode != 0o644:
                    os.fchmod(out.fileno(), file.mode | 0o600)


def empty(directory: Path) -> None:
    """Removes the contents of a directory."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


class FunctionCheck:
    """A check that is a Python function of the directory and of the program's output, as str."""

    def __init__(self, function: Callable[[Path, str], Any]) -> None:
        need_asserts()
        if not callable(function):
            raise CrashTestError(f"check is a function of (directory, said), not {function!r}")
        self.function = function

    def __call__(self, directory: Path, said: bytes) -> str | None:
        try:
            answer = self.function(directory, said.decode("utf-8", "replace"))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # also sys.exit() and pytest.fail()
            text = next((line for line in str(error).splitlines() if line.strip()), "")  # pytest explains at length
            return f"{type(error).__name__}: {text[:MOST_TEXT]}" if text else type(error).__name__
        if isinstance(answer, np.bool_):
            answer = bool(answer)
        if answer is None or answer is True:
            return None
        if answer is not False and not isinstance(answer, str):
            raise CrashTestError(
                f"the check returned {answer!r:.80}: it returns None or True if it accepts the files, and otherwise it "
                "raises, or returns False or a sentence"
            )
        return answer or "the check returned False"


class CommandCheck:
    """A check that is a command: exit status 0 means that it passes. ``{dir}`` and ``{said}`` stand for the two
    paths. A Python script runs in a fork of a server that has imported its libraries, other commands are started.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self.words = split_command(command, "--check", ("dir", "said"))
        self.timeout = timeout
        self.running: set[int] = set()
        self.stopped = False
        if not timeout > 0:
            raise CrashTestError(f"--timeout: a check can't end within {timeout:g} s: give seconds, more than 0")
        if os.environ.get("PYTHONOPTIMIZE"):
            raise CrashTestError("PYTHONOPTIMIZE is set: a Python check would run without its asserts, and see nothing")
        if "{dir}" not in command:
            raise CrashTestError("--check must say where the crash image comes in: --check 'python check.py {dir}'")
        if shutil.which(self.words[0]) is None:
            raise CrashTestError(f"--check: there is no program {self.words[0]!r}")
        script = python_script(self.words)
        self.servers = Servers(self.words, script, timeout, memory()) if script else None
        self.doubted = self.servers is not None
        """Whether a failure may be due to the servers: no process without them has failed so far."""

    def first(self, directory: Path, said: bytes) -> tuple[str | None, bool]:
        """Runs the check, in a server if there is one. Returns the problem, and whether no `confirm` is needed: a
        server that was lost may have left a check half done, and the files changed.
        """
        if self.servers is None or not self.servers.usable:
            return self.alone(directory, said), True
        ended = self.servers.run(self._filled(directory), said)
        text = None if ended is None else self._text(*ended)
        return text, ended is not None and (text is None or not self.doubted)

    def alone(self, directory: Path, said: bytes) -> str | None:
        """Runs the check in a process that is started for it."""
        with tempfile.NamedTemporaryFile(prefix="pmstore-said-") as file, tempfile.TemporaryFile() as output:
            file.write(said)
            file.flush()
            process = subprocess.Popen(
                [word.replace("{said}", file.name) for word in self._filled(directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PMSTORE_CRASH_SAID": file.name},
                start_new_session=True,
            )
            self.running.add(process.pid)
            if self.stopped:
                self.stop()
            try:
                ended = _has_ended(process.pid, self.timeout)
            finally:
                _kill_group(process.pid)
                self.running.discard(process.pid)
                process.wait()
            output.seek(0)
            return self._text(process.returncode if ended else None, output.read())

    def confirm(self, directory: Path, said: bytes) -> str | None:
        """Repeats a check that failed or was lost, without a server. If it passes, no server is used from now on."""
        text = self.alone(directory, said)
        if text is None:
            self.close()
        else:
            self.doubted = False
        return text

    def stop(self) -> None:
        """Kills the checks that run in other threads: they are in sessions of their own, which ^C does not reach."""
        self.stopped = True
        self.close()
        for pid in list(self.running):
            _kill_group(pid)

    def close(self) -> None:
        """Ends the servers."""
        if self.servers is not None:
            self.servers.close()

    def _filled(self, directory: Path) -> list[str]:
        return [word.replace("{dir}", str(directory)) for word in self.words]

    def _text(self, status: int | None, output: bytes) -> str | None:
        """The problem that an exit status tells of; None: the check took too long."""
        if status == 0:
            return None
        if status is None:
            return f"the check took longer than {self.timeout:g} s"
        lines = output.decode("utf-8", "replace").strip().splitlines()
        how = f"status {status}" if status > 0 else signal_name(-status)
        return f"{lines[-1]} ({how})" if lines else f"the check ended with {how}"


Check = Callable[[Path, bytes], str | None] | CommandCheck
"""Called with a crash image as a directory, which it may change, and the program's output. Returns the problem."""


def _has_ended(pid: int, seconds: float) -> bool:
    """Waits until a child ends, at most so many seconds."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(min(seconds * 1000, MOST_WAIT)))
    finally:
        os.close(handle)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Evaluator:
    """Calls the check for images. A context manager: it owns the directories that the images are written to."""

    def __init__(self, check: Check, keep_name: str = "files") -> None:
        self.check = check
        self.name = keep_name
        self.owned = Scratch(memory())
        self.scratch = Path(self.owned.path)
        self.threads = threading.local()
        self.count = 0

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.owned.close()
        if isinstance(self.check, (ApartCheck, CommandCheck)):
            self.check.close()

    def stop(self) -> None:
        """Ends the checks that are running: their results are no longer needed."""
        if isinstance(self.check, CommandCheck):
            self.check.stop()

    def _directory(self) -> Path:
        """This thread's directory, empty. Its name is the same for all images, because a check may store names
        derived from it.
        """
        directory: Path | None = getattr(self.threads, "directory", None)
        if directory is None:
            directory = Path(tempfile.mkdtemp(dir=self.scratch)) / self.name
            self.threads.directory = directory
        if directory.is_dir():
            empty(directory)
        else:
            directory.mkdir()
        return directory

    def __call__(self, image: Image, said: bytes) -> str | None:
        """The problem of an image, or None."""
        directory = self._directory()
        write_image(image, directory)
        self.count += 1
        if isinstance(self.check, CommandCheck):
            text, certain = self.check.first(directory, said)
            if not certain:
                empty(directory)  # the check may have changed it
                write_image(image, directory)
                text = self.check.confirm(directory, said)
        else:
            text = self.check(directory, said)
        return None if text is None else text.replace(f"{directory}/", "").replace(str(directory), "the directory")
