"""The examples of fits over shards, with the packages that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # make test-scale runs them

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(name: str, *arguments: str, before: tuple[str, ...] = (), status: int = 0) -> str:
    """The output of an example."""
    command = [*before, sys.executable, str(EXAMPLES / name), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def epochs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a logistic regression that nothing disturbed tells first: epochs and loss."""
    told = run("logistic_regression.py", "--store", str(tmp_path_factory.mktemp("logistic") / "a.pm"))
    assert " in 1 attempts, loss " in told
    return told


def test_a_logistic_regression_that_is_killed(path: Path, epochs: str) -> None:
    run("logistic_regression.py", "--store", str(path), "--kill", status=-9)
    again = run("logistic_regression.py", "--store", str(path), "--engine", "1")
    assert again == epochs.replace(" in 1 attempts", " in 2 attempts")


def test_a_factorization_that_is_killed_and_whose_states_are_deleted() -> None:
    told = run("nmf_shards.py")
    assert told.count("the same bits") == 4
    assert "started 3 times" in told


def test_an_engine_on_mpi(path: Path, epochs: str) -> None:
    pytest.importorskip("mpi4py", reason="no mpi4py")
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("no mpirun")
    before = (mpirun, *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-n", "3")
    assert run("engine_mpi.py", str(path), before=before).split(",")[0] == epochs.split(",")[0]


def test_an_engine_on_ray(path: Path, epochs: str) -> None:
    pytest.importorskip("ray", reason="no ray")
    assert run("engine_ray.py", str(path)).split(",")[0] == epochs.split(",")[0]
