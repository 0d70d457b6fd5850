"""The pytest plugin of pmstore: fixtures and options for crash tests.

A module of its own beside the package: pytest imports it in every session, and importing the package would load numpy
and the extension. They are loaded when a test needs them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

configs: list[pytest.Config] = []  # of the current sessions, which may be nested; for pmstore.testing._base.session


def pytest_addoption(parser: pytest.Parser) -> None:
    """--crash-budget and --crash-seed."""
    group = parser.getgroup("pmstore", "crash tests of pmstore")
    group.addoption(
        "--crash-budget",
        type=int,
        default=None,
        metavar="N",
        help="crash states that a crash test evaluates on each medium (2000; of files 1000)",
    )
    group.addoption(
        "--crash-seed", type=int, default=1, metavar="N", help="seed of the random choices of crash tests (1)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Checks the options."""
    budget = config.getoption("crash_budget")
    if budget is not None and budget < 1:
        raise pytest.UsageError("--crash-budget is how many crash states a test evaluates on each medium, at least 1")
    if config.getoption("crash_seed") < 0:
        raise pytest.UsageError("--crash-seed is a number from 0")
    configs.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Forgets the session."""
    if config in configs:
        configs.remove(config)


@pytest.hookimpl(hookwrapper=True)  # older pytest, which imports this module too, lacks wrapper=True
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Shows the explorations of a test with it: if it fails, and with -rA."""
    outcome = yield
    session = sys.modules.get("pmstore.testing._base.session")
    if session is not None and session.reports:
        report = outcome.get_result()
        if report.when == "call":
            report.sections += [("Captured crash exploration", text) for text in session.reports]
        session.reports.clear()


@pytest.fixture
def crash_explorer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A pmstore.testing.CrashExplorer: run(*runs, check=...) explores the crashes of code that uses a store."""
    from pmstore.testing import CrashExplorer
    from pmstore.testing._base import session as _session

    with CrashExplorer(_session.test_name(request.node.nodeid)) as explorer:
        yield explorer


@pytest.fixture
def crash_files(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A pmstore.testing.CrashFiles: run(program, check) explores the crashes of code that saves files."""
    from pmstore.testing._base import session as _session

    files = importlib.import_module("pmstore.testing._files.fixture")
    budget = request.config.getoption("crash_budget")
    given = {} if budget is None else {"budget": budget}
    return files.CrashFiles(tmp_path / "crash_files", seed=_session.seed(), **given)
