"""Trainings that are killed, or whose machine crashes, go on with the same bits."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.testing
from pmstore.torch import persist
from tests.conftest import LONGER
from tests.support.resuming import in_memory
from tests.torch.nets import contents

STEPS = 12


def train(store: pmstore.Store, until: int, told: int | None = None) -> Any:
    """Train as in docs/training.md: the store has all that a step depends on. told: gets a byte for each commit."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.from_numpy(np.random.default_rng(0).normal(size=(32, 6)).astype("f4"))
    with store.transaction():
        if not persist(module, optimizer, store, also={"scheduler": scheduler}).resumed:
            store["rng"] = torch.get_rng_state()
            store["order"] = torch.randperm(len(data))
            store["step"] = 0
    torch.set_rng_state(pmstore.torch.tensor(store, "rng").clone())
    while store["step"] < until:
        with store.transaction():
            rows = pmstore.torch.tensor(store, "order")[8 * (store["step"] % 4) :][:8]
            optimizer.zero_grad()
            module(data[rows]).square().mean().backward()
            optimizer.step()
            scheduler.step()
            store["step"] += 1
            if store["step"] % 4 == 0:
                store["order"] = torch.randperm(len(data))
            store["rng"] = torch.get_rng_state()
        if told is not None:
            os.write(told, b".")
    return contents(module, optimizer), scheduler.state_dict(), store["order"].tolist(), store["rng"].tolist()


def whole(folder: Path, until: int) -> Any:
    with pmstore.open(folder / f"whole-{until}.pm", media="memory") as store:
        return train(store, until)


def killed(path: Path, after: int) -> None:
    """A forked process trains, and is killed after so many commits."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            train(pmstore.open(path), STEPS, writing)
        finally:
            os._exit(1)
    os.close(writing)
    for _ in range(after):
        if not os.read(reading, 1):
            break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)


@pytest.mark.parametrize("seed", range(3 * LONGER))
def test_a_training_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with in_memory(tmp_path) as folder:
        wanted = whole(folder, STEPS)
        for _ in range(6):
            killed(folder / "killed.pm", int(rng.integers(0, 5)))
        with pmstore.open(folder / "killed.pm") as store:
            assert store.check().ok
            assert train(store, STEPS) == wanted


@pytest.mark.parametrize("media", ["memory", "file"])
def test_a_crash_at_any_moment(tmp_path: Path, media: str) -> None:
    steps = 3
    with in_memory(tmp_path) as folder:
        wanted = [whole(folder, number) for number in range(steps + 1)]

        def goes_on(store: pmstore.Store) -> None:
            """Each crash leaves the state of one step, and the rest of the training has the bits."""
            number = store.get("step")
            if number is not None:
                assert train(store, number) == wanted[number]
            assert train(store, steps) == wanted[steps]

        @pmstore.testing.crash_test(check=goes_on, budget=100 * LONGER, media=media)
        def test_training(store: pmstore.Store) -> None:
            train(store, steps)

        test_training()
