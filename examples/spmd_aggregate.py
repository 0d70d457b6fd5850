"""Many processes, few files: a computation of four processes is killed, and three go on from its last whole version.

python examples/spmd_aggregate.py FOLDER                with multiprocessing: is killed, goes on, and compares the bits
mpirun -n 4 python examples/spmd_aggregate.py FOLDER    with mpi4py: run it again, with any -n, and it goes on

Each process has some rows of an array and advances them. Every ten steps, all of them write one version together: one
part and one manifest, however many they are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pmstore.archive import LocalGroup, aggregate, latest_common, open_aggregate

ROWS, COLUMNS = 1000, 64
STEPS, EVERY = 60, 10


def start(begin: int, end: int) -> np.ndarray[Any, Any]:
    return np.linspace(0.1, 0.9, ROWS * COLUMNS).reshape(ROWS, COLUMNS)[begin:end].copy()


def compute(rank: int, ranks: int, group: Any, folder: Path, dies_at: int | None = None) -> None:
    """What every process does: begin anew or go on, advance, and write versions."""
    version = latest_common([folder])
    if version is None:
        version, x = 0, start(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
    else:
        x = open_aggregate(folder, version).share(rank, ranks)["x"]
    group.allgather(b"")  # all have looked before one of them writes
    for step in range(version + 1, STEPS + 1):
        x *= 3.9 * (1.0 - x)
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % EVERY == 0:
            made = aggregate(folder, step, {"x": x}, group, rows=["x"], keep=2)
            if rank == 0:
                print(f"step {step}: {made.shards} shards, {made.nbytes:,} bytes in {made.parts + 1} files", flush=True)


def member(rank: int, ranks: int, meeting: str, folder: Path, dies_at: int | None) -> None:
    with LocalGroup(meeting, rank, ranks) as group:
        compute(rank, ranks, group, folder, dies_at if rank == 1 else None)


def run(ranks: int, folder: Path, dies_at: int | None = None) -> None:
    """A job: its processes, which all end when one of them is killed."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        processes = [spawn.Process(target=member, args=(k, ranks, meeting, folder, dies_at)) for k in range(ranks)]
        for process in processes:
            process.start()
        if dies_at is not None:
            processes[1].join()
            for process in processes:
                process.kill()
        for process in processes:
            process.join()


def main() -> None:
    """Run it with mpi4py if there are several processes, and else with multiprocessing."""
    folder = Path(sys.argv[1]) / "versions"
    try:
        from mpi4py import MPI
    except ImportError:
        pass
    else:
        world = MPI.COMM_WORLD
        if world.Get_size() > 1:
            compute(world.Get_rank(), world.Get_size(), world, folder)
            return
    print("four processes, one of which is killed at step 37")
    run(4, folder, dies_at=37)
    print(f"the newest whole version is that of step {latest_common([folder], verify=True)}; three processes go on")
    run(3, folder)
    found = open_aggregate(folder, STEPS).rows("x")
    expected = start(0, ROWS)
    for _ in range(STEPS):
        expected *= 3.9 * (1.0 - expected)
    print("the same bits as without a kill" if np.array_equal(found, expected) else "other bits!")


if __name__ == "__main__":
    main()
