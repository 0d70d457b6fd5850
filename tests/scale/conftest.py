"""Fixtures for tests of fits over shards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from pmstore.scale import Serial, _processes
from tests.resume.conftest import one_thread, path
from tests.support.sharded import Walk, result, several
from tests.support.template import WITH_ESTIMATORS, Own, template

__all__ = ["one_thread", "path", "undisturbed"]


class Forking:
    """What `_processes` uses of subprocess. Its processes are forks of a template, which has imported what they need.

    A template belongs to the process of the tests; in its forks, which tests kill, the processes are new ones.
    """

    DEVNULL, main = subprocess.DEVNULL, os.getpid()

    def Popen(self, command: list[str], pass_fds: Sequence[int], stdin: int, env: dict[str, str]) -> Any:
        if os.getpid() != self.main:
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, env=env)
        threads = {name: env[name] for name in env if name.endswith("_NUM_THREADS")}
        started: Own = template((*WITH_ESTIMATORS, "pmstore.scale._worker"), **threads).own(
            *command[1:], pass_fds=pass_fds
        )
        return started


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of engines are forks, but for tests that ask for `new_workers`."""
    if "new_workers" not in request.fixturenames:
        monkeypatch.setattr(_processes, "subprocess", Forking())


@pytest.fixture
def new_workers() -> None:
    """The workers of engines are started as users' are."""


@pytest.fixture(scope="session")
def undisturbed() -> bytes:
    """The result of Walk over `several` shards, in one process."""
    return result(Walk(several()).run(engine=Serial()))
