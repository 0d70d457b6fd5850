"""Logging every iteration's gradients: what a step of training costs with it, and how quick the replay is.

Three models learn on one processor each way: a multilayer perceptron (535,818 parameters), a small convolutional
network, a small transformer, with Adam, and steps of at least 50 ms. The ways take turns, one run of some tens of steps
each, so that the drift of the machine cancels. A run ends with a commit, so that all of its iterations are durable.

    none       no checkpoint
    dense      GradLog, all gradients, batches that the tuner chooses
    topk       GradLog, the largest hundredth of each gradient
    replica    GradLog, a copy of model and optimizer that a thread steps and commits
    compress   the same compression of gradients, without a log
    save       torch.save of model and optimizer after each iteration, synced
    async      torch.distributed.checkpoint.async_save after each iteration, waited for at the next one

    build/torch/bin/python benchmarks/bench_gradlog.py    # after make test-torch

With ``--device cuda`` the models learn on a GPU, from batches so large that a step takes 50 ms again, and without the
replica, which is for CPUs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from _common import file_system, machine, no_collection, parent, parser, save, scratch
from torch import nn
from torch.distributed.checkpoint import async_save

import pmstore
from pmstore.torch import GradLog
from pmstore.torch._full import Names
from pmstore.torch._layout import Layout, settings_of
from pmstore.torch._topk import Compression

Cell = dict[str, Any]

WAYS = ("none", "dense", "topk", "replica", "compress", "save", "async")
ON_CPUS = ("replica",)
STEP = 0.05  # seconds, at least
LOGS = ("dense", "topk", "replica")
SLOW = ("save", "async")  # a few steps show what they cost


Training = tuple[nn.Module, torch.Tensor, torch.Tensor]


class Transformer(nn.Module):
    """Two layers of an encoder over tokens, and the next token from each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(x))).flatten(0, 1)


def mlp(times: int) -> Training:
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    return net, torch.randn(2048 * times, 784), torch.randint(10, (2048 * times,))


def cnn(times: int) -> Training:
    body = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
    net = nn.Sequential(*body, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.randn(256 * times, 1, 28, 28), torch.randint(10, (256 * times,))


def transformer(times: int) -> Training:
    return Transformer(), torch.randint(256, (32 * times, 64)), torch.randint(256, (32 * times * 64,))


# From how many times a batch is as large as on a CPU, to a model, its input and its targets.
MODELS: dict[str, Callable[[int], Training]] = {
    "MLP": mlp,
    "CNN": cnn,
    "transformer": transformer,
}


class Task(NamedTuple):
    """What is learned, on which device, and how many times its batch is as large as on a CPU."""

    model: str
    device: str
    times: int

    def begin(self) -> Training:
        torch.manual_seed(0)
        with torch.device(self.device):
            return MODELS[self.model](self.times)

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def task(model: str, device: str) -> Task:
    """The task whose steps take long enough."""
    times = 1
    while device == "cuda":
        found = Task(model, device, times)
        net, x, y = found.begin()
        for _ in range(4):
            found.sync()
            begun = perf_counter()
            nn.functional.cross_entropy(net(x), y).backward()
            found.sync()
        took = perf_counter() - begun
        if took >= STEP:
            break
        times = max(times + 1, int(times * min(8.0, 1.1 * STEP / took)))
    return Task(model, device, times)


class Way:
    """A training of its own, and what happens at each iteration."""

    def __init__(self, name: str, task: Task, folder: Path, work: ExitStack) -> None:
        self.task = task
        self.net, self.x, self.y = task.begin()
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.name, self.path, self.pending = name, folder / name, None
        self.log: Any = None
        if name in LOGS:
            store = work.enter_context(pmstore.open(folder / f"{name}.pm"))
            self.log = work.enter_context(GradLog(self.net, self.optimizer, store, name))
            self.log.resume()
        elif name == "compress":
            names = Names(self.net, self.optimizer)
            layout = Layout([one for _, one in names.stepped], settings_of(self.optimizer), 0.01)
            self.rows = layout.empty(1)
            self.compression = Compression(layout)

    def state(self) -> Any:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def run(self, steps: int) -> float:
        """Seconds for so many iterations, all of them durable at the end."""
        begun = perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(self.x), self.y)
            loss.backward()
            self.step(loss)
        if self.log is not None:
            self.log.flush()
        self.wait()
        self.task.sync()
        return perf_counter() - begun

    def step(self, loss: torch.Tensor) -> None:
        if self.log is not None:
            self.log.step(loss.item())
            return
        loss.item()
        if self.name == "compress":
            self.compression.compress(self.rows, 0)
        self.optimizer.step()
        if self.name == "save":
            with open(self.path, "wb") as file:
                torch.save(self.state(), file)
                file.flush()
                os.fsync(file.fileno())
        elif self.name == "async":
            self.wait()
            shutil.rmtree(self.path, ignore_errors=True)
            self.pending = async_save(self.state(), checkpoint_id=str(self.path))

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def overhead(folder: Path, task: Task, steps: int, rounds: int) -> Cell:
    """Seconds a step of each way, run by run."""
    names = [name for name in WAYS if task.device == "cpu" or name not in ON_CPUS]
    cell: Cell = {**task._asdict(), "steps": steps, "seconds": {name: [] for name in names}}
    with ExitStack() as work:
        ways = [Way(name, task, folder, work) for name in names]
        for way in ways:
            way.run(3)
        for turn in range(rounds):
            for way in ways if turn % 2 else ways[::-1]:
                few = max(2, steps // 10) if way.name in SLOW else steps
                cell["seconds"][way.name].append(way.run(few) / few)
        for way in ways:
            if way.name in ("dense", "topk"):
                cell[f"{way.name} bytes"] = way.log._layout.row_bytes
                cell[f"{way.name} batch"] = len(way.log._side._rows.array)
            if way.name == "replica":
                cell["replica commits"] = way.log._fit.store.sequence
        states = way.optimizer.state.values()
        tensors = [*way.net.state_dict().values(), *(one for state in states for one in state.values())]
        cell["state bytes"] = sum(one.nbytes for one in tensors)
    return cell


def replay(folder: Path, task: Task, mode: str, iterations: int, rounds: int) -> Cell:
    """Seconds to train and to replay an iteration, and whether the bits are the same."""
    cell: Cell = {"mode": mode, "train": [], "replay": []}
    for turn in range(rounds):
        path = folder / f"replay-{turn}.pm"
        net, x, y = task.begin()
        optimizer = torch.optim.Adam(net.parameters())
        with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, batch=10, full_every=1000) as log:
            log.resume()
            begun = perf_counter()
            for _ in range(iterations):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                log.step(loss.item())
            cell["train"].append((perf_counter() - begun) / iterations)
        other, *_ = task.begin()
        again = torch.optim.Adam(other.parameters())
        with pmstore.open(path) as store:
            log = GradLog(other, again, store, mode)
            begun = perf_counter()
            assert log.resume() == iterations
            task.sync()
            cell["replay"].append((perf_counter() - begun) / iterations)
            log.close()
        pairs = zip(net.state_dict().values(), other.state_dict().values())
        assert all(torch.equal(one, two) for one, two in pairs)
        path.unlink()
    return cell


def main() -> None:
    options = parser("what logging gradients costs")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = options.parse_args()
    steps, rounds = (8, 2) if arguments.quick else (max(10, int(40 * arguments.scale)), 5)
    iterations, again = (8, 1) if arguments.quick else (max(10, int(60 * arguments.scale)), 3)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tasks = [task(model, arguments.device) for model in MODELS]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    print(f"{machine()}, torch {torch.__version__}, {device}", flush=True)
    cells = []
    for medium in arguments.media:
        for one in tasks:
            with scratch(parent(arguments, medium)) as folder, no_collection():
                cell = overhead(folder, one, steps, rounds)
                cell["replays"] = [replay(folder, one, mode, iterations, again) for mode in ("dense", "topk")]
                cells.append({**cell, "medium": medium, "file system": file_system(folder)})
                print(row(cells[-1]), flush=True)
    save(arguments.raw, "gradlog", {"torch": torch.__version__, "device": device, "cells": cells})


def row(cell: Cell) -> str:
    """One line of what was measured: ratios to "none" of the same turn, their medians."""
    none = cell["seconds"]["none"]
    ratios = {
        name: statistics.median(one / base for one, base in zip(seconds, none))
        for name, seconds in cell["seconds"].items()
        if name != "none"
    }
    quick = {
        one["mode"]: statistics.median(cell["seconds"]["none"]) / statistics.median(one["replay"])
        for one in cell["replays"]
    }
    return (
        f"{cell['medium']} {cell['model']} (batch × {cell['times']}): {statistics.median(none) * 1e3:.1f} ms a step; × "
        + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        + f"; state {cell['state bytes']:,} B, dense {cell['dense bytes']:,} B (batch {cell['dense batch']}), topk "
        f"{cell['topk bytes']:,} B (batch {cell['topk batch']}); replay {quick['dense']:.0f} × and "
        f"{quick['topk']:.0f} × as quick as training"
    )


if __name__ == "__main__":
    main()
