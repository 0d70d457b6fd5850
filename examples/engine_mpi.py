"""An engine on MPI, for clusters that have it: rank 0 is the coordinator, the others hold shards.

    mpirun -n 3 python examples/engine_mpi.py STORE

MPI ends all ranks when one of them dies. Run the command again, with any number of ranks: it goes on after the last
epoch, and ends with the same bits.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from logistic_regression import LogisticRegression, data
from mpi4py import MPI

from pmstore.scale import Engine, Holder, Lost, Reply, Shard, Tag


class Ranks(Engine):
    """The ranks of a communicator from 1 on, which are in `serve`."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.sending: list[Any] = []

    def send(self, rank: int, message: Any) -> None:
        """Send without waiting; a rank receives when it has answered."""
        self.sending = [request for request in self.sending if not request.Test()]
        self.sending.append(self.comm.isend(message, rank))

    def start(self, shards: Sequence[Shard]) -> None:
        self.shards, self.function = shards, (None, b"")
        for rank in range(1, self.comm.size):
            self.send(rank, tuple(shards))

    def submit(self, i: int, function: Any, shared: Mapping[str, Any], tag: Tag) -> None:
        if self.function[0] is not function:
            self.function = function, pickle.dumps(function)
        self.send(1 + i * (self.comm.size - 1) // len(self.shards), (i, self.function[1], dict(shared), tag))

    def completed(self, timeout: float | None) -> Sequence[Reply | Lost]:
        until = time.monotonic() + (np.inf if timeout is None else timeout)
        while not self.comm.Iprobe():
            if time.monotonic() >= until:
                return []
            time.sleep(1e-4)
        return [self.comm.recv()]

    def cancel(self, tag: Tag) -> None:
        """Each question is asked once, unless a rank is late: nothing to drop."""

    def close(self) -> None:
        for rank in range(1, self.comm.size):
            self.send(rank, None)


def serve(comm: Any) -> None:
    """What the ranks from 1 on do until rank 0 closes the engine."""
    holder, shards = Holder(f"rank {comm.rank}"), comm.recv(source=0)
    while (question := comm.recv(source=0)) is not None:
        i, function, shared, tag = question
        comm.send(holder.answer(i, shards[i], pickle.loads(function), shared, tag), 0)


if __name__ == "__main__":
    if MPI.COMM_WORLD.rank:
        serve(MPI.COMM_WORLD)
    else:
        algorithm = LogisticRegression(np.column_stack(data()))
        state = algorithm.run(store=sys.argv[1], name="cancer", engine=Ranks(MPI.COMM_WORLD))
        print(f"{state.epoch} epochs in {state.attempt} attempts, loss {state.loss!r}")
