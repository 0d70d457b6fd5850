"""What the pytest session says, if there is one: budget, seed, the test that runs, where failure files go."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = ["DIRECTORY", "budget", "directory", "keep_report", "reports", "seed", "test_id", "test_line", "test_name"]

DIRECTORY = ".pmstore-crash"
BUDGET = 2000
SEED = 1

reports: list[str] = []  # of explorations since the plugin last looked, for it to show with the test


def _config() -> Any:
    # Asked of the plugin, which is loaded or not; pytest itself is not imported here.
    plugin = sys.modules.get("pytest_pmstore")
    configs = getattr(plugin, "configs", None)
    return configs[-1] if configs else None


def budget() -> int:
    """Crash states to judge on each medium, unless a call says otherwise."""
    config = _config()
    given = None if config is None else config.getoption("crash_budget")
    return BUDGET if given is None else int(given)


def seed() -> int:
    """Of all random choices, unless a call says otherwise."""
    config = _config()
    return SEED if config is None else int(config.getoption("crash_seed"))


def directory() -> Path:
    """Where failure files go: below pytest's root directory, otherwise below the current one."""
    config = _config()
    return Path(DIRECTORY) if config is None else Path(config.rootpath) / DIRECTORY


def test_id() -> str | None:
    """pytest's id of the test that runs."""
    if _config() is None:
        return None
    text = os.environ.get("PYTEST_CURRENT_TEST", "")
    return text.rpartition(" (")[0] or None


def test_name(identity: str) -> str:
    """The id as the name of a file."""
    name = re.sub(r"\.py::", ".", identity)
    name = re.sub(r"[^\w.]+", "-", name).strip("-.")
    if len(name) > 100:
        name = f"{name[:90]}-{hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()}"
    return name


def test_line(budget: int, seed: int) -> str | None:
    """The command that runs the test again."""
    identity = test_id()
    if identity is None:
        return None
    return f"pytest {shlex.quote(identity)} --crash-seed={seed} --crash-budget={budget}"


def keep_report(text: str) -> None:
    """For the plugin to show with the test, if one runs."""
    if _config() is not None:
        reports.append(text)
