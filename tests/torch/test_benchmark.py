"""benchmarks/bench_torch.py on few steps: no time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_every_way_takes_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PMSTORE_DOMAIN", "memory")  # as benchmarks/_common.py does, for good
    import bench_torch

    cell = {"medium": "disk", "steps": bench_torch.steps(tmp_path, True), "single": bench_torch.single(tmp_path, True)}
    assert all(len(times["checkpoint"]) == 3 for times in cell["steps"].values())
    told = bench_torch.table(cell)
    assert all(f"| {way} | " in told for way in bench_torch.WAYS) and "bfloat16" in told
