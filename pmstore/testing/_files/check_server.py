"""Runs a Python check for many crash states, each in a fork of this process.

This is a script: ``python check_server.py CHECK.py SECONDS``. The Python of the check runs it, which may be another one
than that of pmstore. It needs the standard library alone. Standard input is a socket. A request is the environment
variable PMSTORE_CRASH_SAID, a file for the check's output, and the words of its command, with zero bytes in between.
There are two answers: the number of the fork at once; then the exit status, negative for a signal, or "timeout".
First of all it says "ready", and in which namespace its numbers of processes are.

Each state runs the whole check from its first line, in a process of its own. Only the libraries that the check of the
first state has imported are imported already.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import importlib.util
import os
import select
import signal
import sys
import threading
import types
import warnings

INTERRUPTED = -signal.SIGINT
MOST = 1 << 18  # bytes of a request
SURROUNDINGS = ("os.putenv", "os.unsetenv", "os.chdir")
"""Audit events of changes that the import of a library may depend on."""


class Server:
    """The check's command, and the modules that its forks share."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.socket = os.dup(0)
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        self.own = set(sys.modules)
        self.told = False
        """Whether the libraries are known, and imported."""
        self.before: set[str] | None = None
        """The modules that the first check had imported before it changed its environment or directory."""

    def serve(self) -> list[str]:
        """Forks for each request. Returns in the forks only: the words of the check."""
        while True:
            request = os.read(self.socket, MOST)
            if not request:
                os._exit(1)  # pmstore has ended, or needs no more answers; a check that starts this fails
            said, output, *words = map(os.fsdecode, request.split(b"\0"))
            names = os.memfd_create("modules")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that of Python 3.12 about native threads
                child = os.fork()
            if child == 0:
                self._become(said, output, names)
                return words
            os.write(self.socket, str(child).encode())
            answer = self._wait(child)
            os.write(self.socket, answer.encode())
            if not self.told:
                self._share(names)
            os.close(names)

    def _become(self, said: str, output: str, names: int) -> None:
        """Turns the fork into a process as the shell would have started it."""
        os.setsid()
        os.close(self.socket)
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        os.environ["PMSTORE_CRASH_SAID"] = said
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()  # Python's own generator has a new seed in a fork, numpy's has not
        if self.told:
            os.close(names)
        else:
            atexit.register(self._tell, os.getpid(), names)  # the first one registered is called last
            sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Notes the modules when the check, not the import of a library, changes its surroundings."""
        if self.before is not None or event not in SURROUNDINGS:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        place = os.path.dirname(str(frame.f_globals.get("__file__")))
        if frame.f_globals.get("__name__") == "__main__" or self.folder in (place, os.path.dirname(place)):
            self.before = set(sys.modules)

    def _wait(self, child: int) -> str:
        """The result of a fork. Whatever it has left running is killed."""
        process = os.pidfd_open(child)
        ready = select.select([process, self.socket], [], [], self.seconds)[0]
        os.close(process)
        # It is not waited for yet: its number is its own until then.
        try:
            os.killpg(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if process not in ready:
            return "timeout"
        return str(os.waitstatus_to_exitcode(status))

    # ---- modules

    def _tell(self, owner: int, names: int) -> None:
        """Lists the modules that a fork has imported, and their origins, when it ends."""
        if os.getpid() != owner:
            return
        lines = []
        for name, module in list(sys.modules.items()):
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            early = self.before is None or name in self.before
            if early and name not in self.own and isinstance(origin, str):
                lines.append(f"{name}\0{origin}")
        with open(names, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
            file.write("\n".join(lines))

    def _share(self, names: int) -> None:
        """Imports the libraries' modules that a fork has imported."""
        os.lseek(names, 0, os.SEEK_SET)
        with open(names, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
            lines = file.read().split("\n")
        if lines == [""]:
            return  # it did not end by itself
        self.told = True
        for line in lines:
            name, _, origin = line.partition("\0")
            try:
                if self._is_library(name, origin):
                    importlib.import_module(name)
            except BaseException:
                continue  # the check imports it, and sees the error
        if threading.active_count() > 1:
            os._exit(1)  # a fork would not have these threads

    def _is_library(self, name: str, origin: str) -> bool:
        """Whether a module does not lie in the script's directory, and is found here in the same place."""
        top = name.partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is None or not isinstance(spec.origin, str):
            return False
        place = os.path.dirname(spec.origin)
        if spec.submodule_search_locations is not None:
            place = os.path.dirname(place)
        if spec.origin not in ("built-in", "frozen") and place == self.folder:
            return False
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin == origin


def numbers_in() -> str:
    """The namespace of the numbers of processes; "" if that is unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def run(code: types.CodeType, words: list[str]) -> int:
    """Runs the check as the main module. Returns the exit status that Python would end with."""
    sys.argv = words
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[-3:] = words  # a check may start itself again with these
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=words[0], __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as left:
        status = _status(left.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    module.__dict__.clear()
    return status


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    print(code, file=sys.stderr)
    return 1


def main() -> None:
    """Serves, and runs the check in the forks."""
    script, seconds = sys.argv[1:]
    folder = os.path.dirname(os.path.realpath(script))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = folder  # it was the directory of this file
    sys.argv = [script]
    server = Server(folder, float(seconds))
    os.write(server.socket, f"ready {numbers_in()}".encode())
    words = server.serve()
    # What remains belongs to a fork. Python's own end would free each object of each library, which takes longer than
    # most checks.
    status = 1
    try:
        status = run(code, words)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        if status == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


if __name__ == "__main__":
    main()
