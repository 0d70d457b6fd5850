"""A program whose standard streams are closed, as a supervisor may start it: the descriptors of an engine do not take
their numbers, so that nothing is printed into shards or messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import sys
import numpy as np
import pmstore

class Sum(pmstore.MapReduce):
    max_iter = 3
    def __init__(self, X): self.shards = X
    def fields(self): return [pmstore.Field("sum", 4)]
    def fingerprint(self): return {}
    def start(self): pass
    def map(self, shard, shared, rng):
        print("progress " * 1000, flush=True)
        print("progress " * 1000, flush=True, file=sys.stderr)
        return {"sum": shard.sum(axis=0)}
    def update(self, total): self.state.sum += total["sum"]

X = np.arange(40_000.0).reshape(-1, 4)
np.save(sys.argv[1], Sum([X[:5000], X[5000:]]).run(engine=2).sum - 3 * X.sum(axis=0))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_maps_print_where_a_stream_is_closed(closed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shell = f"{sys.executable} {program} {tmp_path}/result.npy {closed}"
    subprocess.run(shell, shell=True, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    assert np.load(tmp_path / "result.npy").tolist() == [0, 0, 0, 0]
