"""Failure files: a crash that was found, with everything needed to evaluate it again; and the crash image beside it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import secrets
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pmstore
from pmstore.testing._base.commandline import split_command
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store import engine
from pmstore.testing._store.engine import Options, Schedule, Verdict
from pmstore.testing._store.recording import Recording

__all__ = ["CheckPlace", "Failure", "load_failure", "place_of", "replace", "save"]

VERSION = 1
SUFFIX = ".crash"


class CheckPlace(NamedTuple):
    """The place of a check: a function of a module or of a file, or a command that contains ``{store}``."""

    module: str = ""
    name: str = ""
    file: str = ""
    command: str = ""

    def __str__(self) -> str:
        return self.command or f"{self.module or self.file}:{self.name}"

    def load(self) -> Callable[..., Any]:
        """The check. Raises CrashTestError if it can't be loaded."""
        if self.command:
            return command_check(self.command)
        if not self.module and not os.path.isfile(self.file):
            raise CrashTestError(f"the check {self} can't be imported: there is no file {self.file}")
        problem: BaseException | None = None
        for load in (self._by_module, self._by_file):
            try:
                found: Any = load()
                for part in self.name.split("."):
                    found = getattr(found, part)
            except (Exception, SystemExit) as error:  # code of a module runs, and may raise anything
                problem = problem or error
            else:
                if callable(found):
                    return found  # type: ignore[no-any-return]
        gone = f"; there is no file {self.file}" if self.file and not os.path.isfile(self.file) else ""
        raise CrashTestError(f"the check {self} can't be imported: {type(problem).__name__}: {problem}{gone}")

    def _by_module(self) -> Any:
        if not self.module or self.module == "__main__":
            raise ImportError("no module is named")
        return importlib.import_module(self.module)

    def _by_file(self) -> Any:
        if not self.file or not os.path.isfile(self.file):
            raise ImportError(f"no file {self.file!r}")
        return load_script(self.file)


def load_script(file: str) -> Any:
    """A Python file as a module. Its directory comes first on the path, as if the file were run."""
    path = os.path.abspath(file)
    name = f"pmstore_crash_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CrashTestError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    directory = os.path.dirname(path)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def place_of(check: Any) -> CheckPlace | None:
    """The place that a check can be imported from. None if only the running process has it, such as a lambda or a
    closure."""
    place = getattr(check, "crash_check_place", None)
    if isinstance(place, CheckPlace):
        return place
    module, name = getattr(check, "__module__", None), getattr(check, "__qualname__", None)
    if not module or not name or "<" in name:
        return None
    try:
        file = os.path.abspath(inspect.getsourcefile(check) or "")
    except TypeError:
        file = ""
    return CheckPlace(module, name, file)


def command_check(command: str) -> Callable[..., Any]:
    """A check that runs a command, with ``{store}`` replaced by the path of the recovered store. It passes if the
    exit status is 0.
    """
    if "{store}" not in command:
        raise CrashTestError(f"the check {command!r} is neither module:function nor a command with {{store}} in it")
    parts = split_command(command, "--check", ("store",))

    def check(store: pmstore.Store) -> None:
        path = store.path
        store.close()  # only one process can open it; recovered and closed, it has the same contents
        words = [part.replace("{store}", path) for part in parts]
        # If the command is Python, it must not leave out its asserts.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment)
        except OSError as error:
            raise CrashTestError(f"--check {command!r}: {words[0]} can't be run: {error.strerror}") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise AssertionError(
                f"the check's command ended with {done.returncode}" + (f": {said[-1]}" if said else "")
            )

    check.crash_check_place = CheckPlace(command=command)  # type: ignore[attr-defined]
    return check


class Failure(NamedTuple):
    """A crash that was found.

    Attributes
    ----------
    name : str
        The name of the test or workload.
    message : str
        The message of the failure when it was found.
    recording : Recording
        The workload's operations on the durable bytes.
    schedule : Schedule
        The moment of the crash, and the losses.
    options : Options
        The options of the model of the media.
    check : CheckPlace or None
        The user's check, if it can be imported.
    checked : bool
        Whether a check refused the state, rather than the explorer itself.
    pmstore_version : str
        The version that wrote the file.
    """

    name: str
    message: str
    recording: Recording
    schedule: Schedule
    options: Options
    check: CheckPlace | None
    checked: bool
    pmstore_version: str

    def image(self) -> bytes:
        """The bytes of the store's file after the crash."""
        return engine.image(self.recording, self.schedule, self.options)

    def evaluate(self, check: Callable[[bytes, int, int], str | None] | None = None) -> Verdict | None:
        """The problem of the state, evaluated anew; None if there is none any more."""
        return engine.evaluate(self.recording, self.schedule, self.options, check)


def save(failure: Failure, file: Path) -> Path:
    """Write the failure file, completely or not at all, and the crash image beside it. Returns the image's path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ignore = file.parent / ".gitignore"
    if not ignore.exists() and file.parent.name == ".pmstore-crash":
        ignore.write_text("# made by pmstore.testing\n*\n")
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("schedule.json", json.dumps(_described(failure), indent=1, ensure_ascii=False))
        failure.recording.add_to(archive)
    image = file.with_suffix(".pm")
    replace(image, failure.image())
    replace(file, archived.getvalue())
    return image


def replace(path: Path, data: bytes) -> None:
    """Write a file, completely or not at all."""
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _described(failure: Failure) -> dict[str, Any]:
    options = failure.options._asdict()
    options["kinds"] = sorted(failure.options.kinds) if failure.options.kinds is not None else None
    return {
        "what": "a crash found by pmstore.testing",
        "version": VERSION,
        "pmstore": failure.pmstore_version,
        "name": failure.name,
        "message": failure.message,
        "schedule": failure.schedule.to_json(),
        "options": options,
        "check": None if failure.check is None else failure.check._asdict(),
        "checked": failure.checked,
    }


def load_failure(path: str | os.PathLike[str]) -> Failure:
    """Read a failure file.

    Raises
    ------
    CrashTestError
        There is no such file, or it is no failure file, or it is damaged or has another version.
    """
    shown = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # the end of a pipe or a device never comes
            raise CrashTestError(f"{shown} is no failure file of pmstore.testing: it is not a regular file")
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("schedule.json"))
            _require_version(about, shown)
            recording = Recording.take_from(archive)
        options = dict(about["options"])
        options["kinds"] = None if options["kinds"] is None else frozenset(options["kinds"])
        return Failure(
            name=str(about["name"]),
            message=str(about["message"]),
            recording=recording,
            schedule=Schedule.from_json(about["schedule"]),
            options=Options(**options),
            check=None if about["check"] is None else CheckPlace(**about["check"]),
            checked=bool(about["checked"]),
            pmstore_version=str(about["pmstore"]),
        )
    except CrashTestError:
        raise
    except FileNotFoundError:
        raise CrashTestError(f"{shown}: there is no such file") from None
    except OSError as error:
        raise CrashTestError(f"{shown}: {error.strerror}") from error
    except Exception as error:  # a damaged file can make its reader raise anything
        hint = ""
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                if file.read(7) == b"PMSTORE":
                    hint = f" (it is a store: look at it with `python -m pmstore ls {shown}`)"
        raise CrashTestError(f"{shown} is no failure file of pmstore.testing, or it is damaged{hint}") from error


def _require_version(about: Any, shown: str) -> None:
    if not isinstance(about, dict) or not isinstance(about.get("version"), int):
        raise ValueError("no version")
    if about["version"] != VERSION:
        raise CrashTestError(
            f"{shown} has version {about['version']} of failure files, written by pmstore {about.get('pmstore')}; this "
            f"is pmstore {pmstore.__version__}, which reads version {VERSION}: run the test again, or use that pmstore"
        )
