"""DistributedDataParallel: many processes, one log."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import BatchSampler, GradLog
from tests.torch.ranks import RANKS, ended
from tests.torch.training import CLASSES, FEATURES, SAMPLES, Tied, X, Y, equal

ITERATIONS = 14


class Noise:
    """A generator that each rank has its own of."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(100 + rank)

    def draw(self) -> torch.Tensor:
        return torch.rand((), generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"])


class Unkept(Noise):
    def state_dict(self) -> dict[str, Any]:
        return {"state": object()}


def refused(rank: int, bad: int) -> None:
    model = Tied()
    kind = Unkept if rank == bad else Noise
    store = pmstore.open(":memory:") if rank == 0 else None
    log = GradLog(model, torch.optim.Adam(model.parameters()), store, keep={"noise": kind(rank)})
    text = (
        "the state of 'noise'.* is of type object" if bad == 0 else "rank 1 can't give its state: TypeError: the state"
    )
    with pytest.raises((TypeError, pmstore.TransactionError), match=text):
        log.resume()


def lacked_space(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(300, 300))
    store = pmstore.open(":memory:", max_size=2 << 20) if rank == 0 else None
    log = GradLog(model, torch.optim.SGD(model.parameters(), 0.001), store, batch=2, full_every=100)
    log.resume()
    failures = 0
    for iteration in range(1, 21):
        model(torch.full((300,), float(rank))).square().mean().backward()
        try:
            assert log.step() == iteration
        except (pmstore.OutOfSpaceError, pmstore.TransactionError) as error:  # the next commit frees the rows
            assert rank == 0 or "rank 0 could not use the log: OutOfSpaceError" in str(error)
            failures += 1
        assert log.iteration == iteration
    assert failures
    log.close()


def sharded(rank: int, way: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: nn.Module = nn.Sequential(nn.Linear(8, 8))
    if way == "module":
        model = nn.Sequential(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    store = pmstore.open(":memory:") if rank == 0 else None
    with pytest.raises(TypeError, match="different parts of the model's parameters.* use DistributedDataParallel"):
        GradLog(model, torch.optim.SGD(model.parameters(), 0.1), store)


def exchange(rank: int, path: str) -> None:
    with pmstore.open(path, "r") as store:
        for name in ("mapped", "copied"):
            exchanged(rank, pmstore.torch.tensor(store, name))


def exchanged(rank: int, x: torch.Tensor) -> None:
    dist: Any = torch.distributed
    parts = [torch.zeros(1024), torch.zeros(1024)]
    for write in (
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_reduce(x),
        lambda: dist.reduce(x, 0),
        lambda: dist.scatter(x, parts if rank == 0 else None),
        lambda: dist.all_gather_into_tensor(x, torch.zeros(512)),
        lambda: dist.all_to_all_single(x, parts[0]),
        lambda: dist.recv(x, 1 - rank),
    ):
        with pytest.raises(pmstore.ReadOnlyStoreError, match="clone"):
            write()
    whole = torch.zeros(2048)
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather(parts, x)
    assert torch.equal(whole, torch.cat(parts)) and torch.equal(parts[1], x) and (x == 1).all()


def order(rank: int, ranks: int) -> None:
    """Each way to make a DistributedDataParallel."""
    for options in ({}, {"find_unused_parameters": True}, {"find_unused_parameters": True, "static_graph": True}):
        ordered(rank, options, ranks > 2 and options != {"find_unused_parameters": True})


def ordered(rank: int, options: dict[str, Any], warns: bool) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pmstore").addHandler(handler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), **options)
    GradLog(model, torch.optim.SGD(model.parameters(), 0.1), pmstore.open(":memory:") if rank == 0 else None)
    logging.getLogger("pmstore").removeHandler(handler)
    assert ["find_unused_parameters=True" in one for one in told] == [True] * (warns and rank == 0)


def added(rank: int, path: str, out: str, until: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    store = pmstore.open(path) if rank == 0 else None
    log = GradLog(model, optimizer, store)
    for iteration in range(log.resume(), until):
        optimizer.zero_grad()
        batch = torch.arange(10) + (3 * iteration + rank) * 10 % SAMPLES
        nn.functional.cross_entropy(model(X[batch]), Y[batch]).backward()
        log.step()
    log.close()
    torch.save(net.state_dict(), f"{out}.{rank}")
    if store is not None:
        store.close()


class Centred(Tied):
    """A buffer that differs on each rank, and that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.mul_(0.8).add_(x.detach().mean(0), alpha=0.2)
        return super().forward(x - self.centre)


def train(rank: int, path: str, out: str, stop: int, dies: int, mode: str) -> None:
    """Rank `dies` ends without a word after iteration `stop`."""
    torch.manual_seed(rank)
    buffers, _, mode = mode.rpartition(", ")
    model = nn.parallel.DistributedDataParallel(
        Centred() if buffers else Tied(), find_unused_parameters=True, broadcast_buffers=buffers != "own buffers"
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = BatchSampler(SAMPLES, 8, rank=rank, world_size=RANKS)
    store = pmstore.open(path) if rank == 0 else None
    options: dict[str, Any] = {} if mode == "replica" else {"full_every": 6}
    noise = Noise(rank)
    log = GradLog(model, optimizer, store, mode, ratio=0.2, batch=3, data=data, keep={"noise": noise}, **options)
    done = log.resume(replay=mode != "topk")
    assert log.durable == done
    while done < ITERATIONS:
        for batch in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[batch] + noise.draw()), Y[batch])
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
    return ended(train, str(path), str(out), stop, dies, mode)


def results(out: Path, ranks: int = RANKS) -> list[Any]:
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(ranks)]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
@pytest.mark.parametrize(
    ("mode", "deaths"),
    [
        ("dense", [(5, 0), (11, 1)]),
        ("topk", [(8, 1)]),
        ("replica", [(5, 0), (11, 1)]),
        ("own buffers, dense", [(5, 0), (11, 1)]),
        ("own buffers, replica", [(8, 0)]),
    ],
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
    if mode.startswith("own buffers"):
        assert not equal(whole[0]["model"]["centre"], whole[1]["model"]["centre"])


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
def test_a_resume_at_the_end_gives_each_rank_its_own_buffers(tmp_path: Path) -> None:
    """DistributedDataParallel gives rank 0's to all before a forward, not after one: code at the end of an epoch sees
    those of each rank."""
    for out in ("whole", "resumed"):
        assert run(tmp_path / "store.pm", tmp_path / out, mode="buffers, dense") == [0, 0]
    whole = results(tmp_path / "whole")
    assert equal(whole, results(tmp_path / "resumed"))
    assert not equal(whole[0]["model"]["centre"], whole[1]["model"]["centre"])


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_can_not_keep_ends_all(bad: int) -> None:
    assert ended(refused, bad) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
@pytest.mark.parametrize("way", ["module", "parameters"])
def test_a_model_that_is_divided_among_the_ranks_is_refused(way: str) -> None:
    assert ended(sharded, way) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
def test_collectives_write_to_no_tensor_that_can_not_be_written(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "x.pm") as store:
        store.create_array("mapped", 1024, "f4", fill_value=1.0, writeable=False)
        store["copied"] = torch.ones(1024)
    assert ended(exchange, str(tmp_path / "x.pm")) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
def test_all_ranks_go_on_after_a_commit_that_lacked_space() -> None:
    assert ended(lacked_space) == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
def test_three_ranks_that_look_for_unused_parameters_end_with_the_same_bits(tmp_path: Path) -> None:
    """Otherwise the first iteration of each process adds the ranks' gradients in another order than the others."""
    for path, out, until in (("whole.pm", "whole", 9), ("again.pm", "part", 5), ("again.pm", "again", 9)):
        assert ended(added, str(tmp_path / path), str(tmp_path / out), until, ranks=3) == [0, 0, 0]
    assert equal(results(tmp_path / "whole", 3), results(tmp_path / "again", 3))


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback")
@pytest.mark.parametrize("ranks", [2, 3])
def test_three_ranks_that_add_in_another_order_are_told(ranks: int) -> None:
    assert ended(order, ranks, ranks=ranks) == [0] * ranks
