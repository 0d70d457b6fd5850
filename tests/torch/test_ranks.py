"""DistributedDataParallel: many processes, one log."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import BatchSampler, GradLog
from tests.support.template import template
from tests.torch.training import OPTIMIZING, SAMPLES, Tied, X, Y, equal

RANKS, ITERATIONS = 2, 14


def work(rank: int, port: int, path: str, out: str, stop: int, dies: int, mode: str) -> None:
    """One process. Rank `dies` ends without a word after iteration `stop`."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    train(rank, path, out, stop, dies, mode)
    torch.distributed.destroy_process_group()


def train(rank: int, path: str, out: str, stop: int, dies: int, mode: str) -> None:
    """A function of its own, so that the model is gone before the process group.

    Where a DistributedDataParallel is the last that refers to gloo's group, torch waits for the group's threads with
    Python's lock held, and a thread that lets go of a tensor waits for the lock (pytorch issue 56297).
    """
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(Tied(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = BatchSampler(SAMPLES, 8, rank=rank, world_size=RANKS)
    store = pmstore.open(path) if rank == 0 else None
    options = {} if mode == "replica" else {"full_every": 6}
    log = GradLog(model, optimizer, store, mode, ratio=0.2, batch=3, data=data, **options)
    done = log.resume(replay=mode != "topk")
    assert log.durable == done
    while done < ITERATIONS:
        for batch in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[batch]), Y[batch])
            loss.backward()
            done = log.step(loss.item())
            assert 0 <= done - log.durable <= 3
            if done == stop and rank == dies:
                os._exit(7)
            if done == ITERATIONS:
                break
    log.close()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save({**state, "data": data.state_dict()}, f"{out}.{rank}")
    if store is not None:
        store.close()


def run(path: Path, out: Path, stop: int = -1, dies: int = -1, mode: str = "dense") -> list[int]:
    """The exit statuses of all processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (port, str(path), str(out), stop, dies, mode)
    start = template([*OPTIMIZING, "tests.torch.test_ranks"]).start
    code = "from tests.torch.test_ranks import work; work"
    processes = [start("-c", f"{code}{(rank, *arguments)}") for rank in range(RANKS)]
    for process in processes:
        process.communicate(timeout=300)
    return [process.wait() for process in processes]


def results(out: Path) -> list[Any]:
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(RANKS)]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
@pytest.mark.parametrize(
    ("mode", "deaths"), [("dense", [(5, 0), (11, 1)]), ("topk", [(8, 1)]), ("replica", [(5, 0), (11, 1)])]
)
def test_whichever_rank_dies_training_ends_with_the_same_bits(
    mode: str, deaths: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert run(tmp_path / "whole.pm", tmp_path / "whole", mode=mode) == [0, 0]
    for stop, dies in deaths:
        statuses = run(tmp_path / "killed.pm", tmp_path / "killed", stop, dies, mode)
        assert statuses[dies] == 7
        assert all(statuses)  # the other rank could not go on alone, and said so
    assert run(tmp_path / "killed.pm", tmp_path / "killed", mode=mode) == [0, 0]
    whole, killed = results(tmp_path / "whole"), results(tmp_path / "killed")
    assert equal(whole, killed)
    assert equal(whole[0]["model"]["first.weight"], whole[1]["model"]["first.weight"])
    assert not equal(whole[0]["rng"], whole[1]["rng"])
