"""Handlers of signals that commit, at any moment of a step or of another commit."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import persist
from tests.support.interrupting import signalled_at
from tests.torch.training import equal


class Momentum(torch.optim.SGD):
    """Something else may happen in the middle of its step."""

    between: Any = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        states = [self.state[parameter] for parameter in group["params"]]
        for state, parameter in zip(states, group["params"]):
            if state.get("momentum") is None:
                state["momentum"] = torch.zeros_like(parameter)
        momenta = [state["momentum"] for state in states]
        self.between()
        for momentum, parameter in zip(momenta, group["params"]):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(group["lr"] * momentum)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    net(torch.full((4,), float(number))).pow(2).sum().backward()
    optimizer.step()


def made() -> tuple[nn.Module, Momentum]:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return net, Momentum(net.parameters(), 0.01)


def test_a_commit_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The step goes on with tensors that it had before."""
    plain, optimizer = made()
    for number in range(5):
        train(plain, optimizer, number)
    net, optimizer = made()
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, optimizer, store)
        optimizer.between = store.commit
        for number in range(5):
            train(net, optimizer, number)
        momentum = optimizer.state[net.weight]["momentum"]
        store.commit()
        assert (store["optimizer/weight/momentum"] == momentum.numpy()).all()
        assert equal(net.state_dict(), plain.state_dict())


def test_a_commit_in_a_step_that_fails(tmp_path: Path) -> None:
    net, optimizer = made()
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, optimizer, store)

        def fail() -> None:
            store.commit()
            raise ZeroDivisionError

        optimizer.between = fail
        with pytest.raises(ZeroDivisionError):
            train(net, optimizer, 1)
        assert (store["optimizer/weight/momentum"] == 0).all()
        optimizer.state[net.weight]["momentum"].fill_(5)
        optimizer.state[net.bias]["momentum"] = None
        store.commit()
        assert list(store.group("optimizer")) == ["weight/momentum"]
        assert (store["optimizer/weight/momentum"] == 5).all()
        optimizer.between = lambda: None
        train(net, optimizer, 1)
        store.commit()
        momentum = optimizer.state[net.weight]["momentum"]
        momentum.fill_(6)
        assert (store["optimizer/weight/momentum"] == 6).all()  # it lies in the store


class Twice(torch.optim.SGD):
    """It keeps the momentum before, and its step calls another one."""

    between: Any = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        states = [self.state[parameter] for parameter in group["params"]]
        before = [state.get("now", torch.zeros(1)) for state in states]
        for state, parameter in zip(states, group["params"]):
            if "now" in state:
                state["before"] = state["now"]
            state["now"] = parameter.grad.clone()
        super().step()
        self.between()
        for state, parameter, last in zip(states, group["params"], before):
            parameter.data.sub_(0.01 * last + 0.01 * state.get("before", last))


def test_tensors_that_change_their_names(tmp_path: Path) -> None:
    """A step in which a commit comes still has those of the names before."""
    states = []
    for persisted in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = Twice(net.parameters(), 0.01)
        with pmstore.open(tmp_path / "a.pm") as store:
            if persisted:
                persist(net, optimizer, store)
            for number in range(6):
                optimizer.between = store.commit if number % 2 else lambda: None
                train(net, optimizer, number)
                if number % 3 == 2:
                    store.commit()
            if persisted:
                store.commit()
                state = optimizer.state[net.weight]
                assert (store["optimizer/weight/before"] == state["before"].numpy()).all()
        states.append(net.state_dict())
    assert equal(*states)


class Scaled(nn.Linear):
    """It replaces a buffer that the backward pass needs."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.scale
        self.scale = 0.5 * self.scale + 0.1 * x
        return y


def test_a_backward_pass_does_not_use_other_elements(tmp_path: Path) -> None:
    net = Scaled()
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, None, store)
        loss = net(torch.ones(4)).sum()
        store.commit()
        assert (store["module/scale"] == net.scale.numpy()).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_buffers_that_change_places(tmp_path: Path) -> None:
    net = nn.Module()
    for name in ("one", "other"):
        net.register_buffer(name, torch.zeros(3))
    first = net.one
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, None, store)
        for number in range(1, 8):
            net.one, net.other = net.other, net.one
            if number == 5:
                net.one = first
            net.one += number
            store.commit()
            assert (store["module/one"] == net.one.numpy()).all() and (store["module/other"] == net.other.numpy()).all()


@pytest.fixture
def committing() -> Iterator[list[pmstore.Store]]:
    """The handler of SIGUSR1 commits these stores."""
    stores: list[pmstore.Store] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: [store.commit() for store in stores if not store.closed] and None)
    yield stores
    signal.signal(signal.SIGUSR1, before)


def test_a_commit_in_a_commit(committing: list[pmstore.Store], tmp_path: Path) -> None:
    """The outer one stores a state and deletes another one."""
    moment, reached = 0, True
    while reached:
        moment += 7
        path = tmp_path / f"{moment}.pm"
        net, optimizer = made()
        with pmstore.open(path) as store:
            persist(net, optimizer, store)
            train(net, optimizer, 1)
            store.commit()
            state = optimizer.state[net.weight]
            state["other"] = state.pop("momentum").clone()
            del optimizer.state[net.bias]  # type: ignore[arg-type]
            committing[:] = [store]
            reached = signalled_at(moment, store.commit, signal.SIGUSR1)
        with pmstore.open(path, "r") as store:
            assert list(store.group("optimizer")) == ["weight/other"]
            assert (store["optimizer/weight/other"] == state["other"].numpy()).all()
        path.unlink()


def test_a_commit_in_a_commit_that_moves_a_tensor_of_the_state(tmp_path: Path) -> None:
    """Whenever it comes, the state is in the store afterwards, and goes on being."""
    committing: list[pmstore.Store] = []

    def told(*_: Any) -> None:
        while committing:
            committing.pop().commit()

    before, moment, reached = signal.signal(signal.SIGUSR1, told), 0, True
    try:
        while reached:
            moment += 3
            net, optimizer = made()
            with pmstore.open(tmp_path / f"{moment}.pm") as store:
                persist(net, optimizer, store)
                train(net, optimizer, 1)
                store.commit()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                committing[:] = [store]
                reached = signalled_at(moment, store.commit, signal.SIGUSR1)
                train(net, optimizer, 2)
                store.commit()
                for name, parameter in net.named_parameters():
                    momentum = optimizer.state[parameter]["momentum"]
                    assert store[f"optimizer/{name}/momentum"].tolist() == momentum.tolist()
        assert moment > 100
    finally:
        signal.signal(signal.SIGUSR1, before)


class Replaced(nn.Module):
    """Buffers that programs replace, as running statistics: some are views of others."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_buffer(f"b{i}", torch.zeros(4))

    def replace(self, number: int) -> None:
        self.b0, self.b1 = torch.arange(4.0) + number, torch.full((4,), float(number))
        self.b2 = self._buffers["b0"].flip(0)


def test_an_interrupt_while_a_commit_takes_replaced_buffers(tmp_path: Path) -> None:
    """The program commits again, and the store has the elements that were there."""

    def told(*_: Any) -> None:
        raise KeyboardInterrupt

    net, before = Replaced(), signal.signal(signal.SIGUSR1, told)
    try:
        with pmstore.open(tmp_path / "a.pm") as store:
            persist(net, None, store)
            moment, reached = 0, True
            while reached:
                moment += 1
                net.replace(moment)
                reached = signalled_at(moment, store.commit, signal.SIGUSR1)
                store.commit()
                for name, elements in (("b0", range(moment, moment + 4)), ("b1", [moment] * 4)):
                    assert store[f"module/{name}"].tolist() == net.get_buffer(name).tolist() == list(elements)
            assert moment > 50
    finally:
        signal.signal(signal.SIGUSR1, before)


class Late:
    """Something else with a state, during whose reading a signal comes."""

    comes = False

    def state_dict(self) -> dict[str, int]:
        if self.comes:
            self.comes = False
            signal.raise_signal(signal.SIGUSR1)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


def test_an_exception_of_a_handler_while_a_commit_asks_for_a_state(tmp_path: Path) -> None:
    """It is not lost: nothing is committed, as if it had come a moment before."""

    class TimeUp(Exception):
        pass

    def told(*_: Any) -> None:
        raise TimeUp

    net, late, before = nn.Linear(2, 1), Late(), signal.signal(signal.SIGUSR1, told)
    try:
        with pmstore.open(tmp_path / "a.pm") as store:
            persist(net, None, store, also={"late": late})
            sequence, late.comes = store.sequence, True
            store["x"] = 1
            with pytest.raises(TimeUp):
                store.commit()
            assert store.sequence == sequence
            store.commit()
            assert store.sequence > sequence
    finally:
        signal.signal(signal.SIGUSR1, before)
