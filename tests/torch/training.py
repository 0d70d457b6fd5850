"""Small trainings of torch that a test can interrupt, and what they end with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import pmstore
from pmstore.torch import BatchSampler, GradLog

# What torch imports when it makes the first optimizer, which takes two seconds: for templates of processes.
OPTIMIZING = ("torch._dynamo", "torch.distributed")

FEATURES, CLASSES, SAMPLES = 12, 4, 90

_made = np.random.RandomState(5)
X = torch.tensor(_made.randn(SAMPLES, FEATURES), dtype=torch.float32)
Y = torch.tensor(_made.randint(0, CLASSES, SAMPLES))


class Killed(Exception):
    """Ends a training in the middle."""


class Tied(nn.Module):
    """A weight under two names, a frozen layer, a parameter that never has a gradient, BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(FEATURES), nn.Dropout(0.3)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.second(torch.relu(self.first(x)))))
        return self.last(self.frozen(x))


Make = Callable[[nn.Module], torch.optim.Optimizer]


def train(
    store: pmstore.Store,
    optimizer: Make,
    iterations: int,
    *,
    stop: int = -1,
    model: Callable[[], nn.Module] = Tied,
    replay: bool = True,
    device: str = "cpu",
    reached: Callable[[GradLog, nn.Module], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train up to an iteration, and raise Killed after `stop` iterations. Returns everything that the bits are in.

    reached: called when training has begun or resumed, and after each iteration.
    """
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    net, x, y = model().to(device), X.to(device), Y.to(device)
    steps = optimizer(net)
    schedule = torch.optim.lr_scheduler.MultiStepLR(steps, [4, 9], 0.5)
    data = BatchSampler(SAMPLES, 16, seed=7)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    epochs = torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 0.9**epoch)
    with GradLog(net, steps, store, scheduler=schedule, data=data, keep={"epochs": epochs}, **options) as log:
        done = log.resume(replay=replay)
        if reached is not None:
            reached(log, net)
        while done < iterations:
            for batch in data:
                steps.zero_grad()
                noise = random.random() * np.random.rand()  # the generators of numpy and random count, too
                loss = nn.functional.cross_entropy(net(x[batch] + noise), y[batch])
                loss.backward()
                done = log.step(loss.item())
                if reached is not None:
                    reached(log, net)
                if done == stop:
                    raise Killed
                if done == iterations:
                    break
            other.step()  # torch warns of a scheduler whose optimizer was never stepped
            epochs.step()
        log.flush()
        history = pmstore.history(store, "training")["objective"]
    return {
        "model": {name: one.detach().clone() for name, one in net.state_dict().items()},
        "optimizer": steps.state_dict(),
        "schedule": schedule.state_dict(),
        "epochs": epochs.state_dict(),
        "data": data.state_dict(),
        "generators": [
            torch.get_rng_state(),
            torch.rand(1, device=device),
            torch.tensor(np.random.rand()),
            torch.tensor(random.random()),
        ],
        "history": torch.tensor(np.array(history)),
    }


def equal(a: Any, b: Any) -> bool:
    """Whether two results have the same bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def killed_and_resumed(path: Any, optimizer: Make, iterations: int, stops: list[int], **options: Any) -> dict[str, Any]:
    """`train`, in runs that end at these iterations."""
    for stop in stops:
        try:
            with pmstore.open(path) as store:
                train(store, optimizer, iterations, stop=stop, **options)
        except Killed:
            pass
        else:
            raise AssertionError(f"the training did not come to iteration {stop}")
    with pmstore.open(path) as store:
        return train(store, optimizer, iterations, **options)


class Holder:
    """An object of the program's own that has a state, as `also=` and `keep=` take it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
