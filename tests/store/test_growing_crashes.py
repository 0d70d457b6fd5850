"""Crashes of arrays that grow, and a model of them: appends, moves, rollbacks, crashes, arrays that programs keep."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import pmstore
import pmstore.testing
from tests.conftest import LONGER, Medium
from tests.core.test_readers import assert_snapshots_are_commits
from tests.support.crashes import BUDGET, SEED, Workload, again, assert_survives, record
from tests.support.crashes_async import ASYNC
from tests.support.crashes_growing import GROWING, moves, rows, slotted, stale


def limits(workload: Workload, budget: int, depth: int = 2) -> dict[str, int]:
    costly = workload in (slotted,) and BUDGET <= 1000
    return {"budget": budget // 4, "depth": min(depth, 1)} if costly else {"budget": budget, "depth": depth}


@pytest.mark.long_on("memory")
@pytest.mark.parametrize("workload", GROWING, ids=lambda workload: workload.__name__)
def test_I36_every_crash_leaves_a_whole_commit(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, again)
    assert max(recording.states) >= 4
    depth = 2 if medium.name == "file" or BUDGET > 1000 else 1
    assert_survives(recording, **limits(workload, BUDGET, depth))


@pytest.mark.parametrize("workload", [rows, moves, stale], ids=lambda workload: workload.__name__)
def test_I36_commits_that_are_durable_later(tmp_path: Path, workload: Workload) -> None:
    assert_survives(record(tmp_path / "store.pm", "file", workload, again, **ASYNC), **limits(workload, BUDGET, 1))


@pytest.mark.longer
@pytest.mark.parametrize("workload", GROWING, ids=lambda workload: workload.__name__)
def test_I19_readers_of_arrays_that_grow(medium: Medium, workload: Workload) -> None:
    recording = record(medium.directory / "store.pm", medium.name, workload, readers=False)
    compared = 0
    for seed in range(SEED, SEED + 2 * LONGER):
        for most in (2, 60):
            compared += assert_snapshots_are_commits(recording, medium.directory / "played.pm", seed, most)[1]
    assert compared >= 4


def counted(store: pmstore.Store) -> None:
    """What a crash leaves: as many rows as the counter says, each with its number."""
    log = store.get("log", np.zeros((0, 9)))
    assert len(log) == store.get("count", 0)
    assert np.array_equal(log, np.repeat(np.arange(float(len(log)))[:, np.newaxis], 9, 1))


@pmstore.testing.crash_test(check=counted)
def test_rows_and_their_counter_change_together(store: pmstore.Store) -> None:
    store.require_array("log", (0, 9), maxshape=(None, 9))
    for i in (1, 2, 5, 90, 2):
        with store.transaction():
            count = store.get("count", 0)
            store.append("log", np.repeat(np.arange(float(count), count + i)[:, np.newaxis], 9, 1))
            store["count"] = count + i


# ---- a model


WIDTHS = st.sampled_from([1, 3, 200, 784])
COUNTS = st.sampled_from([0, 1, 2, 7, 40, 300])
MOST = st.sampled_from([None, None, 60, 5000])
NAMES = st.sampled_from(["a", "g/b"])


class Model(RuleBasedStateMachine):
    """names: the rows and the maxshape that each array should have now; committed: at the last commit."""

    media: str
    parent: Path | None = None

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pmstore-test-", dir=self.parent))
        self.store = self.open()
        self.names: dict[str, Any] = {}
        self.committed: dict[str, Any] = {}
        self.fill = 1.0

    def open(self) -> pmstore.Store:
        return pmstore.open(self.directory / "s", media=self.media)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store._drop()
            shutil.rmtree(self.directory)

    def numbers(self, count: int, width: int) -> Any:
        self.fill += 1
        return np.full((count, width), self.fill) + np.arange(width) / 1000

    @rule(name=NAMES, count=COUNTS, width=WIDTHS, most=MOST)
    def create(self, name: str, count: int, width: int, most: int | None) -> None:
        if name in self.names or (most is not None and count > most):
            with pytest.raises(ValueError, match="taken|smaller"):
                self.store.create_array(name, (count, width), maxshape=(most, width))
            return
        data = self.numbers(count, width)
        self.store.create_array(name, data=data, maxshape=(most, width))
        self.names[name] = data, most

    @rule(name=NAMES, count=COUNTS)
    def append(self, name: str, count: int) -> None:
        if name not in self.names:
            return
        model, most = self.names[name]
        new = self.numbers(count, model.shape[1])
        if most is not None and len(model) + count > most:
            with pytest.raises(ValueError, match="maxshape"):
                self.store.append(name, new)
            return
        array = self.store.append(name, new[0] if count == 1 else new)
        assert array is self.store[name]
        self.names[name] = np.concatenate([model, new]), most

    @rule(name=NAMES, count=COUNTS, shorter=st.booleans())
    def resize(self, name: str, count: int, shorter: bool) -> None:
        if name not in self.names:
            return
        model, most = self.names[name]
        length = max(0, len(model) - count) if shorter else len(model) + count
        if most is not None and length > most:
            return
        array = self.store.resize(name, length)
        assert array is self.store[name] and array.shape == (length, model.shape[1])
        rest = np.zeros((max(0, length - len(model)), model.shape[1]))
        self.names[name] = np.concatenate([model[:length], rest]), most

    @rule(name=NAMES, at=st.integers(0, 500), count=st.integers(1, 300))
    def write(self, name: str, at: int, count: int) -> None:
        if name in self.names:
            self.store[name][at : at + count] += 1
            self.names[name][0][at : at + count] += 1

    @rule(name=NAMES, count=COUNTS)
    def scribble(self, name: str, count: int) -> None:
        """An array that was longer once is written to behind the rows that there are now."""
        if name in self.names and len(self.names[name][0]) > count:
            long, rows = self.store[name], len(self.names[name][0])
            self.store.resize(name, count)
            long[count:rows] = -5
            self.names[name] = self.names[name][0][:count].copy(), self.names[name][1]

    @rule(name=NAMES, count=COUNTS)
    def assign(self, name: str, count: int) -> None:
        if name in self.names:
            model, most = self.names[name]
            new = self.numbers(count, model.shape[1])
            if most is None or count <= most:
                self.store[name] = new
                self.names[name] = new, most

    @rule(name=NAMES, only=st.booleans())
    def transact(self, name: str, only: bool) -> None:
        if name in self.names and len(self.names[name][0]):
            self.commit()
            with self.store.transaction(only=[self.store[name][:1]] if only else None):
                self.store[name][0] += 1
                self.names[name][0][0] += 1
                self.append(name, 2)
            self.was_committed()

    @rule(old=NAMES, copy=st.booleans())
    def rename(self, old: str, copy: bool) -> None:
        new = {"a": "g/b", "g/b": "a"}[old]
        if old in self.names and new not in self.names:
            (self.store.copy if copy else self.store.rename)(old, new)
            rows, most = self.names[old]
            self.names[new] = rows.copy(), most
            if not copy:
                del self.names[old]

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if self.names.pop(name, None) is not None:
            del self.store[name]

    def was_committed(self) -> None:
        self.committed = {name: (rows.copy(), most) for name, (rows, most) in self.names.items()}

    def was_rolled_back(self) -> None:
        self.names = {name: (rows.copy(), most) for name, (rows, most) in self.committed.items()}

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.was_committed()

    @rule()
    def roll_back(self) -> None:
        self.store.rollback()
        self.was_rolled_back()

    @rule()
    def release(self) -> None:
        self.store.release()

    @rule(crash=st.booleans(), compact=st.booleans())
    def reopen(self, crash: bool, compact: bool) -> None:
        if crash:
            self.store._drop(discard=True)
            self.was_rolled_back()
        else:
            self.store.close()
            self.was_committed()
        if compact:
            pmstore.compact(self.directory / "s")
        self.store = self.open()

    @rule()
    def read(self) -> None:
        with pmstore.open(self.directory / "s", "r") as reader:
            assert sorted(reader) == sorted(self.committed)
            for name, (rows_, _) in self.committed.items():
                assert np.array_equal(reader[name], rows_)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        assert sorted(self.store) == sorted(self.names)
        for name, (model, most) in self.names.items():
            array = self.store[name]
            assert array.flags.writeable and array is self.store[name]
            assert array.shape == model.shape and np.array_equal(array, model), name
            assert self.store.require_array(name, (0, model.shape[1]), maxshape=(most, model.shape[1])) is array

    @rule()
    def check(self) -> None:
        assert self.store.check().ok, self.store.check()


class Keeping(Model):
    """The same, while the user keeps every array that it got: none may ever show memory that is not its own."""

    def open(self) -> pmstore.Store:
        self.kept: list[Any] = []
        return super().open()

    @invariant()
    def keep(self) -> None:
        if hasattr(self, "store"):
            self.kept += [self.store[name] for name in self.names]
            for array in self.kept[-20:]:
                assert array.size == 0 or np.isfinite(array).all()


class OnMemory(Model):
    media = "memory"
    parent = Path("/dev/shm")


class OnFile(Keeping):
    media = "file"


LIMITS = settings(max_examples=30 * LONGER, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestMemory = pytest.mark.longer(
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")(OnMemory.TestCase)
)
TestFile = pytest.mark.longer(OnFile.TestCase)
TestMemory.settings = TestFile.settings = LIMITS
