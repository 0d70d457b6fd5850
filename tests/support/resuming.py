"""The support of tests of fits that resume: every commit is a place where the process could have been killed."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._core import Core
from tests.conftest import LONGER

FAMILIES = sorted(path.parent.name for path in Path(pmstore.__file__).parent.glob("*/_sklearn.py"))
"""The folders of estimators."""


def estimators() -> set[type]:
    """The public classes of all families."""
    modules = [importlib.import_module(f"pmstore.{family}") for family in FAMILIES]
    return {getattr(module, name) for module in modules for name in module.__all__}


@contextlib.contextmanager
def in_memory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory, if there is such a file system: hundreds of fits with syncs of a disk take minutes."""
    if not os.access("/dev/shm", os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="pmstore-test-", dir="/dev/shm") as directory:
        yield Path(directory)


def sampled(copies: list[Path]) -> list[Path]:
    """The first and the last copy and every sixth one; all of them in `make torture`."""
    return copies if LONGER > 1 else [*copies[:-1:6], copies[-1]]


@contextlib.contextmanager
def copied(store: Path) -> Iterator[list[Path]]:
    """Copies of the store's file after every commit, as a kill there would leave it."""
    commit = Core.commit
    copies: list[Path] = []

    def commit_and_copy(core: Core) -> None:
        commit(core)
        copies.append(store.with_name(f"{len(copies)}-{store.name}"))
        shutil.copy(store, copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Core, "commit", commit_and_copy)
        yield copies


@contextlib.contextmanager
def interrupted(algorithm: Any, after: int) -> Iterator[None]:
    """SIGINT comes at the end of a step of this class of algorithms, after so many steps; it ends the block."""
    step, left = algorithm.step, after

    def step_to_the_interrupt(self: Any) -> Any:
        nonlocal left
        figures = step(self)
        if not left:
            signal.raise_signal(signal.SIGINT)
        left -= 1
        return figures

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(algorithm, "step", step_to_the_interrupt)
        yield


def assert_same(ours: Any, theirs: Any, path: str = "it", seen: set[tuple[int, int]] | None = None) -> None:
    """Equal bit for bit, and of the same types, also in attributes of attributes."""
    seen = set() if seen is None else seen
    if (id(ours), id(theirs)) in seen:
        return
    seen.add((id(ours), id(theirs)))
    assert type(ours) is type(theirs), path
    if isinstance(ours, np.ndarray | np.generic) and not ours.dtype.hasobject:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), path
        assert ours.tobytes() == theirs.tobytes(), path
    elif isinstance(ours, np.ndarray):
        assert ours.shape == theirs.shape, path
        assert_same(ours.ravel().tolist(), theirs.ravel().tolist(), path, seen)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (one, other) in enumerate(zip(ours, theirs)):
            assert_same(one, other, f"{path}[{i}]", seen)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}.{key}", seen)
    elif isinstance(ours, np.random.RandomState):
        assert_same(ours.get_state(), theirs.get_state(), path, seen)
    elif isinstance(ours, np.random.Generator):
        assert_same(ours.bit_generator.state, theirs.bit_generator.state, path, seen)
    elif hasattr(ours, "__dict__"):
        assert_same(vars(ours), vars(theirs), path, seen)
    elif type(ours).__reduce__ is not object.__reduce__:  # a compiled class that can be pickled
        assert ours.__reduce__() == theirs.__reduce__(), path
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), path
