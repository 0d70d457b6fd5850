"""A module with all that is special in one, its optimizers, and trainings of it that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Tied weights, a frozen layer, BatchNorm, a buffer that each call replaces, a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x).mean(1))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.out(self.frozen(hidden) + self.mean)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, foreach=False),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "a tensor as rate": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "tensors as betas": lambda p: torch.optim.Adam(
        p, torch.tensor(0.01), (torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def build(name: str = "Adam", seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = Net()
    return module, OPTIMIZERS[name](module.parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step, on the batch with this number."""
    x = torch.from_numpy(np.random.default_rng(number).integers(0, 7, (8, 3)))
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), x[:, 0]).backward()
    optimizer.step()


def contents(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """All state, as bytes and numbers that can be compared."""
    state = [module.state_dict(), {} if optimizer is None else optimizer.state_dict()]
    return torch.utils._pytree.tree_map(
        lambda x: (str(x.dtype), x.tolist(), bytes(x.numpy())) if isinstance(x, torch.Tensor) else x, state
    )


def trained(name: str, steps: int) -> Any:
    """The contents after steps without a store."""
    module, optimizer = build(name)
    for number in range(steps):
        step(module, optimizer, number)
    return contents(module, optimizer)
