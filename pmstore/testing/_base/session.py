"""The settings of the pytest session, if there is one: budget, seed, the current test, the place for failure files."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "DIRECTORY",
    "budget",
    "directory",
    "function_name",
    "keep_report",
    "path_name",
    "reports",
    "seed",
    "start",
    "test_id",
    "test_line",
    "test_name",
]

DIRECTORY = ".pmstore-crash"
BUDGET = 2000
SEED = 1

reports: list[str] = []  # of the explorations since the plugin's last query, which shows them with the test


def _config() -> Any:
    # The plugin has the answer if it is loaded. pytest itself is not imported here.
    plugin = sys.modules.get("pytest_pmstore")
    configs = getattr(plugin, "configs", None)
    return configs[-1] if configs else None


def budget() -> int:
    """The number of crash states to evaluate on each medium, unless a call sets it."""
    config = _config()
    given = None if config is None else config.getoption("crash_budget")
    return BUDGET if given is None else int(given)


def seed() -> int:
    """The seed of all random choices, unless a call sets it."""
    config = _config()
    return SEED if config is None else int(config.getoption("crash_seed"))


def directory() -> Path:
    """The place for failure files: below pytest's root directory, otherwise below the current one."""
    config = _config()
    return Path(DIRECTORY) if config is None else Path(config.rootpath) / DIRECTORY


def test_id() -> str | None:
    """pytest's id of the current test."""
    if _config() is None:
        return None
    text = os.environ.get("PYTEST_CURRENT_TEST", "")
    return text.rpartition(" (")[0] or None


def start() -> Path:
    """The directory where pytest was started, otherwise the current directory."""
    config = _config()
    return Path.cwd() if config is None else Path(config.invocation_params.dir)


# Ids that are file names without ambiguity; the file name of any other id contains a hash too.
PLAIN = re.compile(r"[\w/]+(\.py(::\w+)+(\[\w([\w.-]*\w)?\])?|\.pm|(\.\w+)+)")


def test_name(identity: str, shown: str | None = None) -> str:
    """An id, such as pytest's id of a test, as a file name that no other id has. shown: its readable part."""
    text = identity if shown is None else shown
    name = re.sub(r"\.py::", ".", text)
    name = re.sub(r"[^\w.]+", "-", name).strip("-.")
    if shown is not None or len(name) > 100 or not PLAIN.fullmatch(identity):
        name = f"{name[:90]}-{hashlib.blake2b(identity.encode(errors='replace'), digest_size=4).hexdigest()}"
    return name


def path_name(path: str | os.PathLike[str], name: str = "") -> str:
    """A function of a Python file, or another file, as a file name, made from its path from the current directory."""
    whole = os.path.realpath(path)
    inside = os.path.relpath(whole, os.path.realpath(os.curdir))
    if not inside.startswith(os.pardir):
        return test_name(inside + name)
    return test_name(whole + name, os.path.basename(whole) + name)


def function_name(function: Any) -> str:
    """A function as a file name."""
    name = str(getattr(function, "__qualname__", "workload"))
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return path_name(file, f"::{name}") if file else test_name(f"{getattr(function, '__module__', '')}.{name}")


def test_line(budget: int, seed: int) -> str | None:
    """The command that runs the test again, from where pytest was started."""
    identity = test_id()
    if identity is None:
        return None
    file, separator, rest = identity.partition("::")
    file = os.path.relpath(_config().rootpath / file, start())
    return f"pytest {shlex.quote(file + separator + rest)} --crash-seed={seed} --crash-budget={budget}"


def keep_report(text: str) -> None:
    """Keep a report for the plugin, which shows it with the test, if a test is running."""
    if _config() is not None:
        reports.append(text)
