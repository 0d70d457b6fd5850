"""States that a log keeps beside tensors come back with their types."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import GradLog, persist
from pmstore.torch._full import Names
from pmstore.torch._layout import Layout
from pmstore.torch._rest import restore
from pmstore.torch._states import States
from tests.torch.training import Holder, equal

PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
VALUES: dict[str, Any] = {
    "float32": np.float32(0.1),
    "int64": np.int64(3),
    "empty": np.zeros((0, 3)),
    "text": np.str_("ab"),
    "no text": np.str_(""),
    "date": np.datetime64("2026-01-02"),
    "padded": np.array([(1, 2.5)] * 3, PADDED),
    "of a structure": np.zeros(3, "i4,f8")[0],
    "no axes": np.array(7, "f4"),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "conjugated": torch.ones(2, dtype=torch.complex64).conj() * 1j,
    "lists by default": defaultdict(list, {"x": [np.float16(1)]}),
    "ordered": OrderedDict(b=1, a=(2, None)),
    "counted": Counter("aab"),
}


class Point(NamedTuple):
    x: int
    y: int


def test_each_value_comes_back_with_its_type(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    for number in range(2):
        holder = Holder(VALUES if number == 0 else {**VALUES, "float32": np.float32(7)})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pmstore.open(tmp_path / "log.pm") as store:
            with GradLog(model, optimizer, store, batch=1, keep={"holder": holder}) as log:
                assert log.resume() == number
                found = holder.state
                model(torch.ones(1, 2)).sum().backward()
                log.step(0.0)
    assert found is not VALUES and list(found) == list(VALUES)
    for name, value in VALUES.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        elif isinstance(value, (np.ndarray, np.generic)):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].tobytes() == value.tobytes()
        else:
            assert found[name] == value
    assert found["lists by default"]["new"] == [] and type(found["lists by default"]["x"][0]) is np.float16
    found["padded"]["b"] = 7  # it can be written


class Grows:
    """An average that takes its tensors at the first update: the state of a new one has none."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"history": [], "average": {}}

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.state["history"]), "average": dict(self.state["average"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_that_a_new_object_has_not_yet(tmp_path: Path) -> None:
    def train(path: Path, *, steps: int, has_failed: bool = False) -> Any:
        torch.manual_seed(0)
        net, grows = nn.Linear(2, 2), Grows()
        optimizer, other = torch.optim.Adam([net.weight]), torch.optim.SGD([net.bias], 0.1, momentum=0.9)

        def step() -> None:
            net(torch.ones(2)).square().sum().backward()
            optimizer.step()
            other.step()
            grows.state["history"].append(net.bias.detach().clone())
            grows.state["average"]["w"] = [{"x": (net.weight.detach() * 2, 1)}]

        with pmstore.open(path) as store:
            persist(net, optimizer, store, also={"other": other, "grows": grows})
            for _ in range(steps):
                with store.transaction():
                    step()
                if has_failed:
                    with pytest.raises(KeyError), store.transaction():
                        step()
                        raise KeyError
                net.zero_grad()
            return [net.state_dict(), other.state_dict(), grows.state]

    whole = repr(train(tmp_path / "whole.pm", steps=4))
    train(tmp_path / "cut.pm", steps=2)
    assert repr(train(tmp_path / "cut.pm", steps=2)) == whole
    assert repr(train(tmp_path / "failed.pm", steps=4, has_failed=True)) == whole


def test_arrays_and_tensors_in_a_setting_stay_what_they_are(tmp_path: Path) -> None:
    for _ in range(2):
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        optimizer.param_groups[0]["given"] = (torch.arange(2), [np.arange(3), np.array(["a"])], None)
        with pmstore.open(tmp_path / "store.pm") as store:
            persist(net, optimizer, store)
            with pytest.raises(KeyError), store.transaction():
                optimizer.param_groups[0]["given"] = 0
                raise KeyError
            tensor, (numbers, names), nothing = optimizer.param_groups[0]["given"]
        assert torch.equal(tensor, torch.arange(2)) and numbers.tolist() == [0, 1, 2] and names.tolist() == ["a"]
        assert nothing is None and type(numbers) is type(names) is np.ndarray


@pytest.mark.parametrize("value", [Point(1, 2), torch.Size([3])])
def test_types_that_would_come_back_as_others_are_refused(value: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pmstore.open(tmp_path / "log.pm") as store:
        with GradLog(model, optimizer, store, keep={"holder": Holder({"a": value})}) as log:
            with pytest.raises(TypeError, match="the state of 'holder'.*'a'.* is of type (Point|Size).*tuples"):
                log.resume()


@pytest.mark.parametrize("descr", ["<f4", [["a", "<i2"], ["b", "<u2"]]])
def test_arrays_of_older_logs(descr: Any) -> None:
    made = restore(["array", False, descr, [2], bytes(range(8))])
    assert made.shape == (2,) and made.tobytes() == bytes(range(8))


@pytest.mark.parametrize("mode", ["dense", "topk", "replica"])
def test_conjugated_gradients(mode: str, tmp_path: Path) -> None:
    """Autograd leaves them as views."""

    def train(path: Path, *ends: int) -> torch.Tensor:
        for end in ends:
            torch.manual_seed(0)
            model = torch.nn.Module()
            model.w = torch.nn.Parameter(torch.randn(6, dtype=torch.complex64))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with pmstore.open(path) as store, GradLog(model, optimizer, store, mode, batch=2, ratio=0.5) as log:
                for _ in range(log.resume(replay=mode != "topk"), end):
                    optimizer.zero_grad()
                    (model.w.conj() * torch.randn(6, dtype=torch.complex64)).real.sum().backward()
                    assert model.w.grad is not None and model.w.grad.is_conj()
                    log.step(0.0)
        return model.w.detach()

    assert torch.equal(train(tmp_path / "cut.pm", 3, 7), train(tmp_path / "whole.pm", 7))


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (0.5, 0.25)])
def test_the_other_ranks_get_their_own_bits_and_types(one: Any, other: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names, layout = Names(model, optimizer), Layout([*model.parameters()], [], None)
    holders = [Holder({"value": value}) for value in (one, other)]
    states = [States(optimizer, [], names, layout, {"h": two}, rank, 2) for rank, two in enumerate(holders)]
    rest = states[0].together([state.own({}, {}) for state in states])
    for state, holder, value in zip(states, holders, (one, other)):
        state.take(rest)
        assert repr(holder.state) == repr({"value": value})


def test_parameters_beside_the_model_that_have_the_name_of_one_of_it(tmp_path: Path) -> None:
    def train(path: Path, until: int) -> Any:
        net = nn.Module()
        net.register_parameter("group 0, parameter 1", nn.Parameter(torch.ones(2)))
        others = [nn.Parameter(torch.full((3,), float(number))) for number in range(2)]
        optimizer = torch.optim.Adam([*others, *net.parameters()], 0.1)
        with pmstore.open(path) as store, GradLog(net, optimizer, store, batch=2) as log:
            for step in range(log.resume(), until):
                for one in [*others, *net.parameters()]:
                    one.grad = torch.full_like(one, step + 1.0)
                log.step()
        return [*others, *net.parameters()]

    whole = train(tmp_path / "whole.pm", 8)
    train(tmp_path / "parts.pm", 4)
    assert equal([one.detach() for one in whole], [one.detach() for one in train(tmp_path / "parts.pm", 8)])


def test_frozen_parameters_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loop thaws one after the first iteration, and a resume does not do that again."""
    for is_first in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net.bias.requires_grad_(False)
        with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store) as log:
            log.resume()
            assert ("requires_grad of bias (True then, False now)" in caplog.text) == (not is_first)
            net.bias.requires_grad_(True)
            net(torch.ones(1, 3)).square().sum().backward()
            log.step()


def test_fewer_ranks_than_before_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = States.together
    for ranks in (2, 1, 1):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monkeypatch.setattr(States, "together", lambda self, states, n=ranks: together(self, [*states] * n))
        caplog.clear()
        with pmstore.open(tmp_path / "log.pm") as store, GradLog(model, optimizer, store, batch=1) as log:
            is_second = log.resume() == 1
            assert ("it had 2 ranks, and has 1 now" in caplog.text) == is_second
            model(torch.ones(1, 2)).sum().backward()
            log.step()
