"""Fixtures for tests of fits over shards."""

from __future__ import annotations

import pytest

from pmstore.scale import Serial
from tests.resume.conftest import one_thread, path
from tests.support.sharded import Walk, result, several

__all__ = ["one_thread", "path", "undisturbed"]


@pytest.fixture(scope="session")
def undisturbed() -> bytes:
    """The result of Walk over `several` shards, in one process."""
    return result(Walk(several()).run(engine=Serial()))
