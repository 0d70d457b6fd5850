"""Training with a checkpoint after each step: a store that has the module and its optimizer, beside torch.save.

A multilayer perceptron (784-512-256-10, 535,818 parameters) learns with Adam from batches of 64, in one thread of
torch. Each way has a module of its own. They take turns step by step in one run, so that the drift of the machine
cancels; a figure is the median of its way.

    build/torch/bin/python benchmarks/bench_torch.py      # after make test-torch
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _common import file_system, machine, no_collection, parent, parser, save, scratch

import pmstore
import pmstore.torch

LAYERS = 784, 512, 256, 10
BATCH = 64

Cell = dict[str, Any]


class Training:
    """A module, its optimizer, and steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(LAYERS):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        self.module = torch.nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.module.parameters())
        self.x, self.y = torch.randn(BATCH, LAYERS[0]), torch.randint(LAYERS[-1], (BATCH,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.module(self.x), self.y).backward()
        self.optimizer.step()

    def state(self) -> Any:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}


# Each way: a folder and a training; returns what makes a checkpoint, and what ends it.
Way = Callable[[Path, Training], tuple[Callable[[], object], Callable[[], object]]]


def without(folder: Path, training: Training) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: None, lambda: None


def persisted(folder: Path, training: Training) -> tuple[Callable[[], object], Callable[[], object]]:
    store = pmstore.open(folder / "training.pm")
    pmstore.torch.persist(training.module, training.optimizer, store)
    return store.commit, store.close


def saved(durable: bool) -> Way:
    """A new file takes the place of the old one. durable: it is on the disk then."""

    def begin(folder: Path, training: Training) -> tuple[Callable[[], object], Callable[[], object]]:
        target = folder / f"training-{durable}.pt"
        directory = os.open(folder, os.O_RDONLY)

        def checkpoint() -> None:
            with open(f"{target}.new", "wb") as file:
                torch.save(training.state(), file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(f"{target}.new", target)
            if durable:
                os.fsync(directory)

        return checkpoint, lambda: os.close(directory)

    return begin


WAYS: dict[str, Way] = {
    "no checkpoint": without,
    "persist, commit": persisted,
    "torch.save": saved(False),
    "torch.save, fsync": saved(True),
}


def steps(folder: Path, quick: bool) -> Cell:
    """Seconds of each step and of each checkpoint, by way."""
    rounds, warm = (3, 2) if quick else (100, 10)
    trainings = {name: Training() for name in WAYS}
    begun = {name: way(folder, trainings[name]) for name, way in WAYS.items()}
    cell: Cell = {name: {"step": [], "checkpoint": []} for name in WAYS}
    names = list(WAYS)
    for turn in range(warm + rounds):
        for name in names if turn % 2 else reversed(names):
            checkpoint, _ = begun[name]
            with no_collection():
                start = perf_counter()
                trainings[name].step()
                middle = perf_counter()
                checkpoint()
                end = perf_counter()
            if turn >= warm:
                cell[name]["step"].append(middle - start)
                cell[name]["checkpoint"].append(end - middle)
    for _, end_it in begun.values():
        end_it()
    return cell


def single(folder: Path, quick: bool) -> Cell:
    """Seconds of single calls."""
    times = 20 if quick else 5000
    cell: Cell = {}
    with pmstore.open(folder / "single.pm") as store:
        store["w"] = weight = torch.randn(512, 784)
        store["b"] = torch.randn(512, dtype=torch.bfloat16)
        look = pmstore.torch.tensor(store, "w")
        calls = {
            '`pmstore.torch.tensor(store, "w")`': lambda: pmstore.torch.tensor(store, "w"),
            "the same, of bfloat16": lambda: pmstore.torch.tensor(store, "b"),
            '`store["w"]`, an array': lambda: store["w"],
            '`store["w"] = tensor`, 1.6 MB': lambda: store.__setitem__("w", weight),
            "`copy_` of that tensor": lambda: look.copy_(weight),
        }
        for what, call in calls.items():
            cell[what] = []
            for _ in range(times):
                start = perf_counter()
                call()
                cell[what].append(perf_counter() - start)
    return cell


def table(cell: Cell) -> str:
    """The figures of a medium, in a table of Markdown."""
    own = statistics.median(cell["steps"]["persist, commit"]["checkpoint"])
    step = statistics.median(cell["steps"]["no checkpoint"]["step"])
    lines = [f"| {cell['medium']} | checkpoint | ÷ a step | ÷ persist | step |", "| --- | --- | --- | --- | --- |"]
    for name, times in cell["steps"].items():
        took, its = statistics.median(times["checkpoint"]), statistics.median(times["step"])
        figures = (
            ("–", "–", "–") if name == "no checkpoint" else (_text(took), f"{took / step:.3f}", f"{took / own:.2f}")
        )
        lines.append(f"| {name} | {' | '.join(figures)} | {_text(its)} |")
    lines += ["", "| single calls | |", "| --- | --- |"]
    lines += [f"| {what} | {_text(statistics.median(times))} |" for what, times in cell["single"].items()]
    return "\n".join(lines)


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    results: Cell = {"quick": options.quick, "priority": "normal priority", "cells": []}
    print(f"{machine()}, torch {torch.__version__}")
    for medium in options.media:
        with scratch(parent(options, medium)) as folder:
            cell: Cell = {"medium": medium, "file system": file_system(folder)}
            cell["steps"], cell["single"] = steps(folder, options.quick), single(folder, options.quick)
        results["cells"].append(cell)
        print(f"\n{table(cell)}", flush=True)
    save(options.raw, "torch", results)


if __name__ == "__main__":
    main()
