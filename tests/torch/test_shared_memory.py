"""Parameters that share their memory: persist, and gradient logs in each mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import GradLog, persist
from tests.torch.training import equal

Train = Callable[[Path, int], Any]


class Columns(nn.Module):
    """Two parameters over one memory, and two that take turns in the columns of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight.data = self.encode.weight.data
        memory = torch.randn(4, 8)
        self.even, self.odd = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, 1::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode((self.encode(x) @ self.even).tanh()) @ self.odd


def made() -> tuple[Columns, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Columns()
    return net, torch.optim.Adam(net.parameters(), 0.01)


def step(net: Columns, optimizer: torch.optim.Optimizer, number: int, take: Callable[[], object]) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    (net(x) - x).square().mean().backward()
    take()


def persisted(path: Path, until: int) -> Any:
    net, optimizer = made()
    with pmstore.open(path) as store:
        persist(net, optimizer, store)
        for number in range(store.setdefault("done", 0), until):
            with store.transaction():
                step(net, optimizer, number, optimizer.step)
                store["done"] = number + 1
        assert net.encode.weight.data_ptr() == net.decode.weight.data_ptr()
        return contents(net, optimizer)


def logged(mode: Any) -> Train:
    def train(path: Path, until: int) -> Any:
        net, optimizer = made()
        with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, batch=2) as log:
            for number in range(log.resume(), until):
                step(net, optimizer, number, log.step)
        return contents(net, optimizer)

    return train


def contents(net: Columns, optimizer: torch.optim.Optimizer) -> Any:
    state = [net.state_dict(), optimizer.state_dict()["state"]]
    return torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, state)


@pytest.mark.parametrize("train", [persisted, logged("dense"), logged("replica")], ids=["persist", "dense", "replica"])
def test_parameters_over_one_memory_have_states_of_their_own(train: Train, tmp_path: Path) -> None:
    net, optimizer = made()
    for number in range(6):
        step(net, optimizer, number, optimizer.step)
    whole = train(tmp_path / "whole.pm", 6)
    # persist leaves no gaps in parameters: on some processors, torch multiplies them by kernels that round otherwise.
    torch.testing.assert_close(whole, contents(net, optimizer))
    assert equal(whole, contents(net, optimizer)) or train is persisted
    train(tmp_path / "s.pm", 3)
    assert equal(train(tmp_path / "s.pm", 6), whole)
    assert equal(train(tmp_path / "s.pm", 6), whole)


def test_a_replica_of_parameters_that_overlap_is_refused(tmp_path: Path) -> None:
    net, memory = nn.Module(), torch.zeros(10)
    net.a, net.b = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    optimizer = torch.optim.SGD(net.parameters())
    with pmstore.open(tmp_path / "s.pm") as store:
        with pytest.raises(ValueError, match="'b' shares a part of its memory with 'a'.*clone"):
            GradLog(net, optimizer, store, "replica")


def test_memory_that_lies_in_another_group_is_refused(tmp_path: Path) -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pmstore.open(tmp_path / "s.pm") as store:
        persist(one, None, store.group("one"))
        other.weight.data = one.weight.data
        with pytest.raises(ValueError, match="'weight' of the module lies in .* already, as a part of another module"):
            persist(other, None, store.group("other"))
        assert "other/weight" not in store
