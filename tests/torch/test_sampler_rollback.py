"""A BatchSampler in also= of persist: after a rollback, the loop that goes on gets each batch of each epoch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pmstore
from pmstore.torch import BatchSampler, persist

Open = Callable[..., pmstore.Store]
EPOCHS, BATCHES = 3, 4
LAST = BATCHES - 1


class Failed(Exception):
    """It leaves a transaction, which is rolled back."""


class Training:
    """A loop over epochs that keeps the position in the data with `persist`."""

    def __init__(self, store: pmstore.Store) -> None:
        self.store = store
        self.module = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.01)
        self.sampler = BatchSampler(2 * BATCHES, 2)
        self.done: list[tuple[int, list[float]]] = []  # the epoch of the loop, and the samples
        self.ends: list[int] = []  # epochs
        self.persist()

    def persist(self) -> None:
        persist(self.module, self.optimizer, self.store, also={"data": self.sampler})

    def epoch(self, epoch: int, at: Callable[[str], None] = lambda place: None, again: str = "") -> None:
        """The rest of an epoch. at: is called with the places that the loop passes. again: the step whose first
        transaction fails, so that the loop tries it again."""
        samples = TensorDataset(torch.arange(2.0 * BATCHES)[:, None])
        loader = DataLoader(samples, batch_sampler=self.sampler, generator=self.sampler.generator)
        at(f"before {epoch}")
        for number, (x,) in enumerate(loader):
            at(f"drawn {epoch}, {number}")
            if again == f"{epoch}, {number}":
                with suppress(Failed):
                    self.step(x, fails=True)
            self.step(x)
            self.done.append((epoch, x.flatten().tolist()))
            at(f"done {epoch}, {number}")
        self.ends.append(epoch)
        at(f"end {epoch}")

    def step(self, x: torch.Tensor, fails: bool = False) -> None:
        with self.store.transaction():
            self.module(x).sum().backward()
            self.optimizer.step()
            self.sampler.advance()
            if fails:
                raise Failed

    def roll_back(self) -> None:
        """A transaction of other code fails."""
        with suppress(Failed), self.store.transaction():
            self.store["other"] = 1
            raise Failed


def every() -> list[tuple[int, list[float]]]:
    sampler = BatchSampler(2 * BATCHES, 2)
    found = []
    for epoch in range(EPOCHS):
        for batch in sampler:
            found.append((epoch, [float(index) for index in batch]))
            sampler.advance()
    return found


@pytest.mark.parametrize(
    "place",
    ["before 0", "drawn 0, 0", "drawn 1, 2", "done 1, 1", f"done 1, {LAST}", "end 1", "before 2", "drawn 2, 0"],
)
def test_a_rollback_of_other_code(store: pmstore.Store, place: str) -> None:
    training = Training(store)
    for epoch in range(EPOCHS):
        training.epoch(epoch, lambda here: training.roll_back() if here == place else None)
    assert training.done == every()


@pytest.mark.parametrize("again", ["0, 0", "1, 0", "1, 1", f"1, {LAST}", f"{EPOCHS - 1}, {LAST}"])
def test_a_step_that_is_tried_again(store: pmstore.Store, again: str) -> None:
    """The first one of an epoch goes back to the end of the epoch before, which the loop has seen."""
    training = Training(store)
    for epoch in range(EPOCHS):
        training.epoch(epoch, again=again)
    assert training.done == every()


@pytest.mark.parametrize("failed", ["drawn 0, 0", "drawn 1, 0", "drawn 1, 2", f"drawn 1, {LAST}"])
def test_an_iteration_that_an_error_leaves_is_begun_again(store: pmstore.Store, failed: str) -> None:
    training = Training(store)

    def fail(here: str) -> None:
        if here == failed:
            training.step(torch.ones(2, 1), fails=True)

    for epoch in range(EPOCHS):
        try:
            training.epoch(epoch, fail)
        except Failed:
            training.epoch(epoch)
    assert training.done == every()


def test_a_transaction_of_more_than_an_epoch(store: pmstore.Store) -> None:
    training = Training(store)
    training.epoch(0)
    with suppress(Failed), store.transaction():
        for _ in range(2):
            for _ in training.sampler:
                training.sampler.advance()
        raise Failed
    for epoch in range(1, EPOCHS):
        training.epoch(epoch)
    assert training.done == every()


@pytest.mark.parametrize("place", ["", "before 1", "end 1", "drawn 2, 0"])
def test_a_resume_sees_the_end_of_an_epoch_once(open_store: Open, place: str) -> None:
    """Also if there is a rollback before or after it."""
    with open_store() as store:
        first = Training(store)
        first.epoch(0)
        first.epoch(1)
    second = Training(open_store())
    assert second.sampler.epoch == 1
    for epoch in range(second.sampler.epoch, EPOCHS):
        second.epoch(epoch, lambda here: second.roll_back() if here == place else None)
    assert second.ends == [1, 2] and first.done + second.done == every()


def test_persist_after_a_rollback_resumes(store: pmstore.Store) -> None:
    """The rollback took back what the code at the end of epoch 1 changed, and a loop that begins again runs it."""
    training = Training(store)
    training.epoch(0)
    training.epoch(1)
    with pytest.raises(Failed):
        training.epoch(2, lambda here: training.step(torch.ones(2, 1), fails=True) if here == "drawn 2, 0" else None)
    training.persist()
    for epoch in range(training.sampler.epoch, EPOCHS):
        training.epoch(epoch)
    assert training.ends == [0, 1, 1, 2] and training.done == every()


def test_a_loop_that_loads_a_position_itself() -> None:
    """The batches that it does after that end the epoch."""
    sampler, done = BatchSampler(8, 2), []
    for epoch in range(2):
        for batch in sampler:
            sampler.load_state_dict(sampler.state_dict())
            sampler.advance(0)
            done.append((epoch, len(batch)))
            sampler.advance()
    assert done == [(epoch, 2) for epoch in range(2) for _ in range(4)]
