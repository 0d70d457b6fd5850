"""Fits and derived arrays in a process that multiprocessing has spawned: its program is the module __mp_main__."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing
import sys

import numpy as np

import pmstore


class Sum(pmstore.MapReduce):
    max_iter = 2
    shards = [np.ones((4, 3))] * 2

    def fields(self):
        return [pmstore.Field("sum", 3)]

    def fingerprint(self):
        return {"scale": scale}

    def start(self):
        pass

    def map(self, shard, shared, rng):
        return {"sum": scale(shard.sum(axis=0))}

    def update(self, total):
        self.state.sum = total["sum"]


def scale(x):
    return 2 * x


def fit(path):
    with pmstore.open(path) as store:
        store["x"] = np.ones(2)
        assert store.derive("scaled", scale, "x").value.tolist() == [2, 2]
    return Sum().run(path, "sum", engine=2).sum.tolist()


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(fit, [sys.argv[1]]))
    print(fit(sys.argv[1]))  # the fit of the other process is loaded
"""


def test_the_program_is_the_same_in_a_spawned_process(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "s.pm")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[[16.0, 16.0, 16.0]]\n[16.0, 16.0, 16.0]\n"), done.stderr
