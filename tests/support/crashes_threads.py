"""Workloads whose commits other threads make, to crash."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from pmstore._core import Core


@contextlib.contextmanager
def commits_by_other_threads() -> Iterator[None]:
    """Two threads commit by turns, and neither makes the changes: each relies on its own fences (M3)."""
    commit = Core.commit
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        turns = itertools.cycle((one, other))
        with mock.patch.object(Core, "commit", lambda core: next(turns).submit(commit, core).result()):
            yield
