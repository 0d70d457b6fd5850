"""Fixtures for tests of fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmstore._core import Core
from tests.support.resuming import in_memory


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The path of a store that does not exist yet."""
    with in_memory(tmp_path) as directory:
        yield directory / "fit.pm"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for a fit, unless the test says otherwise: tests run side by side."""
    import sklearn.cluster  # noqa: F401 (a limit does not hold for libraries that are loaded later)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What `action`, the first element, gave after every commit."""
    commit = Core.commit
    seen: list[Any] = [lambda: None]

    def commit_and_act(core: Core) -> None:
        commit(core)
        seen.append(seen[0]())

    monkeypatch.setattr(Core, "commit", commit_and_act)
    yield seen
