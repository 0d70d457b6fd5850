"""Fixtures for tests of fits over shards."""

from __future__ import annotations

import pytest

from pmstore.scale import Serial, _processes
from tests.resume.conftest import one_thread, path
from tests.support.sharded import Walk, result, several
from tests.support.workers import forking

__all__ = ["one_thread", "path", "undisturbed"]


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of engines are forks, but for tests that ask for `new_workers`."""
    if "new_workers" not in request.fixturenames:
        monkeypatch.setattr(_processes, "subprocess", forking())


@pytest.fixture
def new_workers() -> None:
    """The workers of engines are started as users' are."""


@pytest.fixture(scope="session")
def undisturbed() -> bytes:
    """The result of Walk over `several` shards, in one process."""
    return result(Walk(several()).run(engine=Serial()))
