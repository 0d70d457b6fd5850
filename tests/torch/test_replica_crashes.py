"""GradLog with a replica: crashes at every moment, with every order of the thread's steps (I39)."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
import pmstore.testing
from pmstore.torch import GradLog, _replica_log
from tests.conftest import LONGER
from tests.torch.training import Killed, equal
from tests.torch.turns import Turns, in_turns

ITERATIONS = 4


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))


def state(module: nn.Module, optimizer: torch.optim.Optimizer, log: GradLog) -> Any:
    return copy.deepcopy([module.state_dict(), optimizer.state_dict(), torch.get_rng_state(), log.iteration])


def train(
    store: pmstore.Store,
    seed: int,
    turns: Callable[[], Turns | None] = lambda: None,
    reached: Callable[[Any], None] = lambda state: None,
) -> None:
    """Train, with commits of other values at moments that a seed chooses. turns: of the thread of the replica."""
    module, draws = net(), random.Random(seed)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with GradLog(module, optimizer, store, "replica", batch=2, scheduler=scheduler) as log:
        log.resume()
        reached(state(module, optimizer, log))

        def turn(*_: Any) -> None:
            now = turns()
            if now is not None:
                now.turn()
            if draws.random() < 0.4:
                if now is not None:
                    now.outside(store)
                store["mine"] = store.get("mine", 0) + 1
                store.commit()

        for one in module.parameters():
            one.register_post_accumulate_grad_hook(turn)
        while log.iteration < ITERATIONS:
            optimizer.zero_grad()
            module(torch.randn(8, 5)).square().mean().backward()
            if log.iteration % 2:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            turn()
            log.step()
            turn()
            reached(state(module, optimizer, log))


def explore(patch: pytest.MonkeyPatch, folder: Path, seed: int, budget: int, plant: Any = None) -> None:
    """Explore crashes of a training whose thread takes its steps in the order of a seed."""
    wanted: list[Any] = []
    with pmstore.open(folder / "reference.pm", "w") as store:
        train(store, seed, reached=wanted.append)

    def check(store: pmstore.Store) -> None:
        """Each crash leaves a whole iteration, and the training goes on with its bits."""
        begun = store.get("training/head", {"full": 0})["full"]

        def compare(found: Any) -> None:
            assert equal(found, wanted[found[-1]])
            if found[-1] == begun + 1:
                raise Killed

        with contextlib.suppress(Killed):
            train(store, seed, reached=compare)

    def workload(store: pmstore.Store) -> None:
        with patch.context() as inside:
            made = in_turns(inside, seed)
            if plant is not None:
                plant(inside)
            train(store, seed, lambda: made[-1])

    pmstore.testing.crash_test(check=check, budget=budget)(workload)()


@pytest.mark.longer
@pytest.mark.parametrize("seed", range(2 * LONGER))
def test_I39_every_crash_leaves_a_whole_iteration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int) -> None:
    explore(monkeypatch, tmp_path, seed, 40 * LONGER)


# ---- mistakes, which the explorer has to find


def steps_outside(patch: pytest.MonkeyPatch) -> None:
    """The thread steps the replica before its transaction begins: other commits take a layer that is ahead."""
    commit = _replica_log.ReplicaLog._commit

    def hasty(self: Any, taken: Any) -> None:
        for one in taken:
            self._step(one)
        commit(self, taken)

    patch.setattr(_replica_log.ReplicaLog, "_commit", hasty)


def trusts_backward(patch: pytest.MonkeyPatch) -> None:
    """The copy that backward made of a gradient counts, although clipping has changed the gradient since."""
    patch.setattr(_replica_log, "same_bits", lambda one, other: True)


FOUND = {
    steps_outside: pmstore.testing.CrashFailure,
    trusts_backward: pmstore.testing.CrashTestError,  # found even in what the training leaves at its end
}


@pytest.mark.parametrize("plant", FOUND)
def test_I39_the_explorer_finds_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plant: Any) -> None:
    with pytest.raises(FOUND[plant]):
        explore(monkeypatch, tmp_path, 0, 40, plant)
