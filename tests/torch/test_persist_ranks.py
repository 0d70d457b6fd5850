"""`persist` on the ranks of a process group: rank 0 has the store, or each rank has one."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import persist
from tests.torch.ranks import RANKS, ended
from tests.torch.training import CLASSES, FEATURES, SAMPLES, X, Y, equal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")

ITERATIONS = 6


class Counting(nn.Module):
    """Buffers, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.norm(self.layer(x))

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, torch.tensor(0.01), amsgrad=True),
    "bfloat16": lambda p: torch.optim.Adam(p, 0.01),
}


def train(rank: int, path: str, out: str, kind: str, stop: int, dies: int) -> None:
    """Rank `dies` ends without a word after iteration `stop`."""
    torch.manual_seed(rank)
    net = Counting()
    if kind == "bfloat16":
        net = net.to(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    store = pmstore.open(path) if rank == 0 else None
    persisted = persist(net, optimizer, store, also={"scheduler": scheduler})
    model = nn.parallel.DistributedDataParallel(net)
    assert persisted.resumed == (scheduler.last_epoch > 0)
    while scheduler.last_epoch < ITERATIONS:
        with store.transaction() if store is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            batch = torch.arange(10) + (RANKS * scheduler.last_epoch + rank) * 10 % (SAMPLES - 10)
            loss = nn.functional.cross_entropy(model(X[batch].to(net.layer.weight.dtype)), Y[batch])
            loss.backward()
            optimizer.step()
            scheduler.step()
        if scheduler.last_epoch == stop and rank == dies:
            os._exit(7)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}.{rank}")
    if store is not None:
        store.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_whichever_rank_dies_all_ranks_end_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    def run(path: str, out: str, stop: int = -1, dies: int = -1) -> list[int]:
        return ended(train, str(tmp_path / path), str(tmp_path / out), kind, stop, dies)

    assert run("whole.pm", "whole") == [0, 0]
    for stop, dies in ((2, 0), (4, 1)):
        assert run("killed.pm", "killed", stop, dies)[dies] == 7
    assert run("killed.pm", "killed") == [0, 0]
    for rank in range(RANKS):
        whole, killed = (torch.load(tmp_path / f"{out}.{rank}", weights_only=True) for out in ("whole", "killed"))
        assert equal(whole, killed)


def differ(rank: int, path: str) -> None:
    """What not all ranks do in the same way is an error on all of them, and the group can go on."""

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def refused(error: type[Exception], text: str, net: Any, has: bool, optimizer: Any = None) -> None:
        with pytest.raises(error, match=text):
            persist(net, optimizer, pmstore.open(":memory:") if has else None)

    net = nn.Linear(2, 2)
    refused(ValueError, r"has one on \[1\]", net, rank == 1)
    refused(ValueError, "has one on none", net, False)
    refused(
        pmstore.FingerprintMismatchError,
        r"rank 1 has 'weight' of shape \(2, 3\) .*, where rank 0 has 'weight' of shape \(2, 2\)",
        nn.Linear(2 + rank, 2),
        rank == 0,
    )
    refused(
        pmstore.FingerprintMismatchError,
        "rank 1 has an optimizer SGD .*, where rank 0 has no more",
        net,
        rank == 0,
        torch.optim.SGD(net.parameters(), 0.1) if rank else None,
    )
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    order = [layers[rank].parameters(), layers[1 - rank].parameters()]
    groups = torch.optim.SGD([{"params": [*one]} for one in order], 0.1)
    refused(pmstore.FingerprintMismatchError, "rank 1 has an optimizer SGD", layers, rank == 0, groups)
    error, text = (TypeError, "torch.nn.Module") if rank else (pmstore.TransactionError, "failed on rank 1: TypeError")
    refused(error, text, "no module" if rank else net, rank == 0)
    whole = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    parts = nn.Sequential(nn.Linear(4, 4))
    fully_shard(parts, mesh=init_device_mesh("cpu", (RANKS,)))
    for divided in (whole, parts):
        refused(TypeError, "different parts of the module's parameters", divided, rank == 0)
    meta = nn.Linear(2, 2, device="meta" if rank else "cpu")
    error, text = (ValueError, "") if rank else (pmstore.TransactionError, "persist failed on rank 1: ValueError")
    refused(error, text, meta, rank == 0)
    lbfgs = torch.optim.LBFGS(net.parameters())
    error, text = (TypeError, "an LBFGS") if rank == 0 else (pmstore.TransactionError, "failed on rank 0: TypeError")
    refused(error, text, net, rank == 0, lbfgs)
    net.register_buffer("calls", torch.tensor(rank, dtype=torch.int16))  # gloo takes no int16
    assert not persist(net, None, pmstore.open(":memory:") if rank == 0 else None).resumed
    assert net.calls == 0
    if rank == 0:
        persist(nn.Linear(2, 2), None, pmstore.open(":memory:"), alone=True)


def each_its_own(rank: int, path: str) -> None:
    torch.manual_seed(rank)
    for resumed in (False, True):
        net = nn.Linear(3, 3)
        with pmstore.open(f"{path}.{rank}") as store:
            assert persist(net, None, store).resumed is resumed
            assert equal(net.weight, pmstore.torch.tensor(store, "module/weight"))
            if not resumed:
                before = net.weight.detach().clone()
            assert equal(net.weight, before)


@pytest.mark.parametrize("function", [differ, each_its_own])
def test_ranks(function: Any, tmp_path: Path) -> None:
    assert ended(function, str(tmp_path / "store.pm")) == [0, 0]
