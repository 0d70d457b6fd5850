"""GradLog and what a program changes while it trains: settings, groups, gradients, parameters (I30)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import BatchSampler, GradLog
from tests.support.interrupting import interrupted_at
from tests.torch.training import equal

OPTIM = torch.optim
Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def iterate(
    made: Any, numbers: range, step: Callable[[float], Any], before: Change | None, after: Change | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train what make() made. step: takes the loss. before, after: what the loop does then to the step."""
    net, optimizer, objects = made
    scaler = objects.get("scaler")
    for done in numbers:
        optimizer.zero_grad()
        loss = net(torch.randn(5, 4)).abs().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if before is not None:
            before(net, optimizer, done)
        step(loss.item())
        if after is not None:
            after(net, optimizer, done)
    return net.state_dict(), optimizer.state_dict()["state"]


def run(path: Path, make: Any, until: int, before: Change | None, after: Change | None, **options: Any) -> Any:
    """Train, and commit each third iteration only."""
    torch.manual_seed(0)
    made = net, optimizer, objects = make()
    with pmstore.open(path) as store:
        log = GradLog(net, optimizer, store, batch=3, full_every=99, **objects, **options)
        return iterate(made, range(log.resume(), until), log.step, before, after)


def same_bits(
    folder: Path, make: Any, *, before: Change | None = None, after: Change | None = None, **options: Any
) -> bool:
    whole = run(folder / "whole.pm", make, 12, before, after, **options)
    run(folder / "parts.pm", make, 8, before, after, **options)
    return equal(whole, run(folder / "parts.pm", make, 12, before, after, **options))


def plain(optimizer: Any, net: Callable[[], nn.Module] = small) -> Any:
    def make() -> Any:
        made = net()
        return made, optimizer(made.parameters()), {}

    return make


@pytest.mark.parametrize("key", ["weight_decay", "momentum", "dampening"])
def test_I30_a_setting_that_was_a_whole_number_becomes_a_fraction(key: str, tmp_path: Path) -> None:
    def change(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        optimizer.param_groups[0][key] = 0.25 if done >= 4 else 0
        optimizer.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"] or 0.5

    assert same_bits(tmp_path, plain(lambda some: OPTIM.SGD(some, lr=1)), before=change)


def test_I30_settings_in_a_list(tmp_path: Path) -> None:
    def change(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        optimizer.param_groups[0]["betas"] = [0.5 + done / 100, 0.9]

    def make() -> Any:
        net = small()
        optimizer = OPTIM.Adam(net.parameters(), 0.1)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return net, optimizer, {}

    assert same_bits(tmp_path, make, before=change)


class Gaps(nn.Module):
    """Parameters that are slices of larger tensors, without dimensions, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 8)[:, :4])
        self.b = nn.Parameter(torch.randn(4, 3).t()[:, :2])
        self.c, self.d, self.e = (nn.Parameter(torch.ones(shape)) for shape in ((9,), (), (0, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a)[:, :3] @ self.b + self.c.sum() * self.d + self.e.sum()


@pytest.mark.parametrize("options", [{}, {"mode": "topk", "ratio": 1.0}])
def test_I30_parameters_with_gaps_in_their_memory(options: dict[str, Any], tmp_path: Path) -> None:
    assert same_bits(tmp_path, plain(lambda some: OPTIM.Adam(some, 0.1), Gaps), **options)


def test_I30_complex_parameters(tmp_path: Path) -> None:
    def make() -> Any:
        net = nn.Linear(4, 2, dtype=torch.complex64)
        net.register_forward_pre_hook(lambda _, given: given[0].to(torch.complex64))
        return net, OPTIM.Adam(net.parameters(), 0.1), {}

    assert same_bits(tmp_path, make)


@pytest.mark.parametrize("kind", [OPTIM.AdamW, OPTIM.SGD])
def test_I30_a_fused_optimizer_that_unscales_gradients_itself(kind: Any, tmp_path: Path) -> None:
    def make() -> Any:
        net = small()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return net, kind(net.parameters(), lr=0.01, fused=True), {"scaler": scaler}

    def overflow(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        if done in (3, 6):
            next(net.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]

    assert same_bits(tmp_path, make, before=overflow)


def test_other_groups_and_types_are_refused(tmp_path: Path) -> None:
    net = small()
    optimizer = OPTIM.Adam(net[0].parameters(), 0.1)  # type: ignore[index]
    group = optimizer.param_groups[0]
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store) as log:
        log.resume()
        OPTIM.lr_scheduler.ConstantLR(optimizer)  # gives the groups further settings
        before = {key: one.clone() for key, one in net.state_dict().items()}
        net(torch.ones(1, 4)).sum().backward()
        for key, value in {"lr": torch.tensor(0.1), "foreach": True, "betas": None}.items():
            old, group[key] = group[key], value
            with pytest.raises(ValueError, match=f"'{key}' of the optimizer's group 0"):
                log.step()
            group[key] = old
        for key, value in {"lr": np.float32(0.1), "betas": (0.9, np.float16(0.5)), "amsgrad": np.True_}.items():
            old, group[key] = group[key], value
            with pytest.raises(TypeError, match=f"'{key}' of the optimizer's group 0 is a .*float\\(value\\)"):
                log.step()
            with pytest.raises(TypeError, match="a log keeps bool, int, float"):
                GradLog(net, optimizer, store, name="b")
            group[key] = old
        with pytest.raises(ValueError, match="converted"):
            log.step(torch.ones(3))  # type: ignore[arg-type]
        optimizer.add_param_group({"params": net[2].parameters()})  # type: ignore[index]
        with pytest.raises(ValueError, match="add_param_group"):
            log.step()
        assert equal(before, net.state_dict())
        del optimizer.param_groups[1]
        assert log.step() == 1
        with pytest.raises(TypeError, match="ReduceLROnPlateau.*keep"):
            GradLog(net, optimizer, store, name="b", scheduler=OPTIM.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_gradients_of_another_dtype_are_refused(tmp_path: Path) -> None:
    net = small()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store) as log:
        log.resume()
        net.double()
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(TypeError, match="float64.*float32.*convert the model before"):
            log.step()


def test_a_step_is_refused_before_the_optimizer_if_the_epoch_is_over(tmp_path: Path) -> None:
    net = small()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store:
        log = GradLog(net, optimizer, store, data=BatchSampler(8, 4), batch=1)
        log.resume()
        before = {key: one.clone() for key, one in net.state_dict().items()}
        net(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="3 batches are done"):
            log.step(batches=3)
        assert equal(before, net.state_dict())
        assert log.step(batches=2) == log.durable == 1


def test_I30_nothing_follows_a_step_that_was_interrupted(tmp_path: Path) -> None:
    net = small()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pmstore.open(tmp_path / "a.pm") as store:
        with GradLog(net, optimizer, store, batch=2) as log:
            log.resume()
            net(torch.ones(1, 4)).sum().backward()
            log.step()
            hook = optimizer.register_step_pre_hook(interrupt)
            net(torch.ones(1, 4)).sum().backward()
            with pytest.raises(KeyboardInterrupt):
                log.step()
            hook.remove()
            for call in (log.step, log.record, log.flush, log.finish, optimizer.step):
                with pytest.raises(pmstore.TransactionError, match="interrupted.*new GradLog"):
                    call()
        assert GradLog(net, optimizer, store).resume() == 0


@pytest.mark.parametrize("options", [{"full_every": 1000}, {"full_every": 3}, {"mode": "replica"}])
def test_I30_an_interrupt_in_a_commit_takes_nothing_from_the_log(options: dict[str, Any], tmp_path: Path) -> None:
    """It may come behind the commit, where the log has the iterations and the program has the exception."""
    torch.manual_seed(0)
    net = small()
    optimizer = OPTIM.SGD(net.parameters(), 0.001, momentum=0.9)
    moment, reached = 1, True
    with pmstore.open(tmp_path / "a.pm") as store:
        log = GradLog(net, optimizer, store, batch=100, **options)
        log.resume()
        while reached:
            for _ in range(2):
                optimizer.zero_grad()
                net(torch.rand(1, 4)).sum().backward()
                done = log.step(1.0)
            reached = interrupted_at(moment, log.flush)
            moment += 1
            assert log.flush() is None and log.durable == done
        assert moment > 100
        history = pmstore.history(store, "training")
        assert history["iteration"].tolist() == list(range(1, done + 1))
        log.close()
        again = small()
        other = GradLog(again, OPTIM.SGD(again.parameters(), 0.001, momentum=0.9), store, **options)
        assert other.resume() == done
        assert equal(net.state_dict(), again.state_dict())


# ---- other code changes parameters and buffers


def clamp(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    with torch.no_grad():
        next(net.parameters()).clamp_(-0.1, 0.1)


def load(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    if done == 4:
        state = optimizer.state_dict()
        state["state"] = {
            number: {key: value * 0.5 if value.dim() else value for key, value in one.items()}
            for number, one in state["state"].items()
        }
        optimizer.load_state_dict(state)


def forget(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    if done == 4:
        optimizer.state[next(net.parameters())]["exp_avg"].zero_()
    elif done == 7:
        optimizer.state.clear()


@pytest.mark.parametrize("change", [clamp, load, forget])
def test_I30_what_other_code_does_before_a_step_is_not_lost(change: Change, tmp_path: Path) -> None:
    assert same_bits(tmp_path, plain(lambda some: OPTIM.Adam(some, 0.1)), before=change)


class Averaged(nn.Module):
    """A moving average of its parameters, and buffers that are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x) - self.mean(x) + 1
        self.seen = self.seen * 0.9 + y.detach().mean(0) * 0.1
        self.steps = self.steps + 1
        return y - self.seen + self.steps

    def average(self, how: str) -> None:
        for new, old in zip(self.net.parameters(), self.mean.parameters(), strict=True):
            if how == "assign":
                old.data = old.data * 0.9 + new.data * 0.1
            elif how == "data":
                old.data.mul_(0.9).add_(new.data * 0.1)
            elif how == "lerp":
                with torch.no_grad():
                    old.lerp_(new, 0.1)


@pytest.mark.parametrize("how", ["none", "lerp", "data", "assign"])
def test_I30_moving_averages_and_assigned_buffers(how: str, tmp_path: Path) -> None:
    def make() -> Any:
        net = Averaged()
        return net, OPTIM.Adam(net.net.parameters(), 0.1), {}

    assert same_bits(tmp_path, make, before=lambda net, *_: net.average(how))  # type: ignore[operator]


def test_a_model_with_other_parts_is_not_committed(tmp_path: Path) -> None:
    net = Averaged()
    optimizer = OPTIM.SGD(net.net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=1) as log:
        log.resume()
        net(torch.ones(1, 4)).sum().backward()
        net.seen = torch.zeros(3)
        with pytest.raises(ValueError, match="seen is not what it was"):
            log.step()
        net.seen = torch.zeros(2)
        net.further = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="further.weight is not"):
            log.flush()
        del net.further
        log.flush()
        assert log.durable == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head", {"full": 0, "logged": 5, "batches": [2, 2]}),
        ("head", {"full": 0, "logged": -1, "batches": []}),
        ("head", 3),
        ("log/1", torch.zeros(1, 16, dtype=torch.uint8)),
        ("log/0", "text"),
        ("rest", {}),
        ("rest", 7),
        ("rest", {"generators": [], "kept": {}}),
        ("rest", {"generators": [{"torch": b"1", "numpy": [], "random": []}], "kept": {}}),
        ("rest", {"kept": {}}),
        ("rest", {"kept": {"data": ["array", True, "|O", [1], bytes(8)]}}),
        ("rest", {"kept": {"data": []}}),
        ("buffers/seen", torch.zeros(1)),
        ("full/model/net.weight", torch.zeros(())),
        ("full/model/net.bias", torch.zeros(2, dtype=torch.float64)),
        ("full/optimizer/net.weight/exp_avg", torch.zeros(3)),
        ("full/optimizer/other/exp_avg", torch.zeros(3)),
        ("full/numbers", []),
        ("log/0", None),
    ],
)
def test_a_log_that_was_edited_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    def make() -> Any:
        net = Averaged()
        return net, OPTIM.Adam(net.net.parameters(), 0.1)

    with pmstore.open(tmp_path / "a.pm") as store:
        net, optimizer = make()
        with GradLog(net, optimizer, store, batch=2, full_every=99, data=BatchSampler(8, 1)) as log:
            log.resume()
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.ones(1, 4)).sum().backward()
                log.step()
        group = store.group("training")
        group[name] = {**group["rest"], **value} if name == "rest" and value and value != 7 else value
        store.commit()
        net, optimizer = make()
        with pytest.raises(pmstore.FingerprintMismatchError, match="was changed by other code: "):
            GradLog(net, optimizer, store, data=BatchSampler(8, 1)).resume()


def test_a_log_whose_beginning_failed_can_be_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = small()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=1) as log:

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            write = type(log._side).write
            patch.setattr(type(log._side), "write", lambda *given, **named: (write(*given, **named), fail()))
            log.resume()
        assert "training/head" not in store
        assert log.resume() == 0
        net(torch.ones(1, 4)).sum().backward()
        assert log.step() == log.durable == 1


def test_a_batch_has_at_most_256_mebibytes(tmp_path: Path) -> None:
    net = nn.Linear(1000, 1000)
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=10**12) as log:
        log.resume()
        net(torch.ones(1, 1000)).sum().backward()
        assert log.step() == 1
        assert log._side.left in range(1, 70)


def test_I30_another_hook_changes_gradients_after_they_were_logged(tmp_path: Path) -> None:
    hooked: list[Any] = []

    def scale(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        if optimizer not in hooked:
            hooked.append(optimizer)
            optimizer.register_step_pre_hook(lambda *_: [one.grad.mul_(0.1) for one in net.parameters()] and None)

    assert same_bits(tmp_path, plain(lambda some: OPTIM.SGD(some, 0.5, momentum=0.9)), before=scale)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"maximize": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", ["Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_optimizers_do_not_change_gradients(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    net = small()
    optimizer = getattr(OPTIM, kind)(net.parameters(), lr=0.1, **options)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=2, full_every=99) as log:
        log.resume()
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            log.step()
        assert len(store.group("training/log")) == 2


def test_I30_a_replay_does_not_call_hooks_that_change_gradients(tmp_path: Path) -> None:
    def make() -> Any:
        net = small()
        optimizer = OPTIM.SGD(net.parameters(), 0.5, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: [one.grad.mul_(0.1) for one in net.parameters()] and None)
        return net, optimizer, {}

    assert same_bits(tmp_path, make)
