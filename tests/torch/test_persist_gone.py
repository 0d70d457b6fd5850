"""A module and an optimizer that are gone before the commit: it has what they were at last."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import persist
from tests.torch.training import equal


class Net(nn.Linear):
    """A layer with a buffer that a forward pass replaces, and an extra state."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Counter:
    """An object without a reference to itself."""

    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def train(store: pmstore.Store, until: int, every: int, kept: list[Any], scheduled: bool = False) -> dict[str, Any]:
    """The state at the end. Nothing outlives the call but what has one of the types in `kept`, which then holds it."""
    torch.manual_seed(0)
    net, counter = Net(), Counter()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    also: dict[str, Any] = {"counter": counter}
    if scheduled:
        also["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kept[:] = [one for one in (net, optimizer) if type(one) in kept]
    persist(net, optimizer, store, also=also)
    while net.calls < until:
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 12).view(3, 4) + net.calls).pow(2).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        counter.number += 1
        if scheduled:
            also["scheduler"].step()
        if every and net.calls % every == 0:
            store.commit()
    assert counter.number == until
    return {name: one.state_dict() for name, one in {"net": net, "optimizer": optimizer, **also}.items()}


@pytest.mark.parametrize("kept", [[], [Net], [torch.optim.AdamW], [Net, torch.optim.AdamW]])
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_commit_after_they_are_gone(kept: list[Any], every: int, scheduled: bool, tmp_path: Path) -> None:
    """A with statement makes one when it is left, around the call of a function that trains."""
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, 9, every, [], scheduled)
    for until in (4, 4, 9):
        held = list(kept)
        with pmstore.open(tmp_path / "parts.pm") as store:
            parts = train(store, until, every, held, scheduled)
    assert equal(parts, whole)


def test_a_rollback_after_they_are_gone(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        train(store, 4, 3, [])
        store.rollback()
        store["x"] = 1
    with pmstore.open(tmp_path / "b.pm") as store:
        train(store, 3, 3, [])
    with pmstore.open(tmp_path / "a.pm") as one, pmstore.open(tmp_path / "b.pm") as other:
        assert equal(train(one, 3, 0, []), train(other, 3, 0, []))


def test_a_container_that_is_gone(tmp_path: Path) -> None:
    """The parts and the optimizer are not."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(nn.ModuleDict({"net": net}), optimizer, store)
        for calls in range(1, 4):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 / calls
            store.commit()
            assert store["module/net.mean"][0] == net.mean[0] == 2 - 0.5 ** (calls - 1)
            assert store["training/optimizer/hyperparameters"][0]["lr"] == 0.1 / calls
        with pytest.raises(ValueError, match="lies in .* already"):
            persist(net, optimizer, store.group("g"))


def test_a_store_that_nobody_closes(tmp_path: Path) -> None:
    store = pmstore.open(tmp_path / "a.pm")
    train(store, 4, 3, [])
    with pytest.warns(pmstore.UncommittedChangesWarning):
        del store
        gc.collect()
    with pmstore.open(tmp_path / "a.pm") as store:
        train(store, 4, 3, [])
