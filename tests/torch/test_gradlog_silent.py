"""GradLog: what would make a resumed training another one without a word (I30)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pmstore
from pmstore.torch import BatchSampler, GradLog, persist
from tests.torch.training import equal

MODES = ("dense", "topk", "replica")
Hook = Callable[[nn.Module, torch.optim.Optimizer], None]


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))


def iterate(log: GradLog, net: nn.Module, optimizer: torch.optim.Optimizer, until: int, *shape: int) -> None:
    """Call resume() before."""
    for _ in range(log.iteration, until):
        optimizer.zero_grad()
        net(torch.randn(*shape)).square().mean().backward()
        log.step()


def fit(path: Path, until: int, mode: Any, change: Callable[[nn.Module], object], when: str, **options: Any) -> Any:
    """Train with images. change: what the program does with the net before the log is made, or after."""
    torch.manual_seed(0)
    net = convolution()
    if when == "before":
        change(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.1, **options)
    with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, batch=2) as log:
        if when == "after":
            change(net)
        log.resume()
        iterate(log, net, optimizer, until, 2, 3, 5, 5)
    return net.state_dict()


def last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_of_one_memory_order(mode: Any, tmp_path: Path) -> None:
    """The replica is a copy by places, and goes on in any order."""
    first = fit(tmp_path / "s.pm", 4, mode, lambda net: net, "before")
    if mode == "replica":
        assert equal(first, fit(tmp_path / "s.pm", 4, mode, last, "before"))
        return
    with pytest.raises(pmstore.FingerprintMismatchError, match=r"0\.weight.*strides \(27, 1, 9, 3\)"):
        fit(tmp_path / "s.pm", 4, mode, last, "before")
    whole = fit(tmp_path / "whole.pm", 4, mode, last, "before")
    assert equal(whole, fit(tmp_path / "whole.pm", 4, mode, last, "before"))


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_order_stays_after_the_log_was_made(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another memory order"):
        fit(tmp_path / "s.pm", 4, mode, last, "after")


ORDERS: dict[str, Any] = {
    "transposed": lambda: torch.randn(37, 53).t(),
    "gaps": lambda: torch.randn(53, 40)[:, :37],
    "expanded": lambda: torch.randn(53, 1).expand(53, 37),
}
SENSITIVE: dict[str, Any] = {  # to the order
    "fused": (lambda p: torch.optim.Adam(p, 0.1, fused=True), torch.float32),  # it reads them as they lie in memory
    "fused momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True), torch.float32),
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.bfloat16),
    "ASGD": (lambda p: torch.optim.ASGD(p, 0.1), torch.float16),
}


@pytest.mark.parametrize("mode", ["dense", "replica"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", SENSITIVE)
def test_gradients_in_another_memory_order(kind: str, order: str, mode: Any, tmp_path: Path) -> None:
    """`torch.autograd.grad` gives such gradients, for example."""
    make, dtype = SENSITIVE[kind]

    def train(path: Path, until: int) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(37, 53, bias=False).to(dtype)
        optimizer = make(net.parameters())
        with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, batch=3) as log:
            for _ in range(log.resume(), until):
                net.weight.grad = ORDERS[order]().to(dtype)
                log.step()
        return net.state_dict()

    whole = train(tmp_path / "whole.pm", 8)
    train(tmp_path / "parts.pm", 5)
    assert equal(whole, train(tmp_path / "parts.pm", 8))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_views_of_a_buffer_stay_there(mode: Any, tmp_path: Path) -> None:
    """A program zeroes and averages the buffer. The model is channels_last, so that the views have another order."""

    def train(path: Path | None) -> tuple[list[float], bool]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        buffer, at = torch.zeros(sum(one.numel() for one in net.parameters())), 0
        for one in net.parameters():
            one.grad = buffer[at : at + one.numel()].view(one.shape)
            at += one.numel()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        x, y, losses = torch.randn(8, 3, 8, 8), torch.arange(8) % 2, []

        def run(step: Any) -> None:
            for _ in range(5):
                buffer.zero_()
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                losses.append(loss.item())
                step()

        if path is None:
            run(optimizer.step)
        else:
            options = {"ratio": 1.0} if mode == "topk" else {}
            with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, **options) as log:
                run(log.step)
        first = net[0].weight.grad
        return losses, first is not None and first.data_ptr() == buffer.data_ptr()

    alone, logged = train(None), train(tmp_path / "s.pm")
    assert logged[1] and np.allclose(alone[0], logged[0])


# ---- hooks


def noise(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for one in net.parameters():
            one.add_(torch.rand_like(one) / 10)


def slow(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def double(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for one in net.parameters():
        if one.grad is not None:
            one.grad = one.grad * 2


def halve(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for one in net.parameters():
        if one.grad is not None:
            one.grad.mul_(0.5)


def shrink(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for one in net.parameters():
            one.mul_(0.9)


@contextmanager
def hooked(net: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook, place: str) -> Iterator[None]:
    if place == "global":
        handle = register_optimizer_step_pre_hook(lambda *_: hook(net, optimizer))
    elif place == "pre":
        handle = optimizer.register_step_pre_hook(lambda *_: hook(net, optimizer))
    else:
        handle = optimizer.register_step_post_hook(lambda *_: hook(net, optimizer))
    try:
        yield
    finally:
        handle.remove()


PLACES = [
    ("pre", "before the log"),
    ("pre", "before resume"),
    ("pre", "later"),
    ("post", "before the log"),
    ("post", "later"),
    ("global", "before the log"),
]


@pytest.mark.parametrize(("place", "when"), PLACES)
@pytest.mark.parametrize("hook", [noise, slow, double, halve, shrink])
@pytest.mark.parametrize("mode", ["dense", "replica"])
def test_hooks_of_the_optimizer(mode: Any, hook: Hook, place: str, when: str, tmp_path: Path) -> None:
    """What hooks do is in the rows, or a commit has a full state; a replay calls none."""

    def train(path: Path, until: int) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)

        def with_hook() -> Any:
            return hooked(net, optimizer, hook, place)

        with pmstore.open(path) as store:
            if when == "before the log":
                with with_hook(), GradLog(net, optimizer, store, mode, batch=3) as log:
                    log.resume()
                    iterate(log, net, optimizer, until, 5, 4)
            elif when == "before resume":
                with GradLog(net, optimizer, store, mode, batch=3) as log, with_hook():
                    log.resume()
                    iterate(log, net, optimizer, until, 5, 4)
            else:
                with GradLog(net, optimizer, store, mode, batch=3) as log:
                    if log.resume() < 1:
                        iterate(log, net, optimizer, 1, 5, 4)
                    with with_hook():
                        iterate(log, net, optimizer, until, 5, 4)
        return net.state_dict(), optimizer.state_dict()

    whole = train(tmp_path / "whole.pm", 9)
    train(tmp_path / "parts.pm", 5)
    assert equal(whole, train(tmp_path / "parts.pm", 9))


# ---- what is kept


@pytest.mark.parametrize("end", ["with", "flush", "finish"])
@pytest.mark.parametrize("batch", [1, 4, 5, 7])
@pytest.mark.parametrize("mode", ["dense", "replica"])
def test_code_at_the_end_of_an_epoch_runs_once_in_effect(mode: Any, batch: int, end: str, tmp_path: Path) -> None:
    """It runs again after a resume, so the log has what was before it."""

    def train(path: Path, epochs: int) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        sampler = BatchSampler(10, 2)
        options = {"batch": batch, "data": sampler, "keep": {"epochs": scheduler}}
        with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, **options) as log:
            log.resume()
            for _ in range(sampler.epoch, epochs):
                for _ in sampler:
                    optimizer.zero_grad()
                    net(torch.randn(5, 4)).square().mean().backward()
                    log.step()
                scheduler.step()
            if end == "flush":
                log.flush()
            elif end == "finish":
                log.finish()
        return net.state_dict(), optimizer.state_dict(), scheduler.state_dict()

    whole = train(tmp_path / "whole.pm", 4)
    train(tmp_path / "parts.pm", 2)
    assert equal(whole, train(tmp_path / "parts.pm", 4))


class Counting(nn.Module):
    """A module that has a state beside its tensors, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("how", [*MODES, "persist"])
def test_the_extra_state_of_a_module_is_kept(how: Any, tmp_path: Path) -> None:
    def train(path: Path, until: int) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(Counting(), nn.Tanh(), Counting())
        net[2].linear = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        with pmstore.open(path) as store:
            if how == "persist":
                persist(net, optimizer, store)
                for number in range(store.get("done", 0), until):
                    with store.transaction():
                        optimizer.zero_grad()
                        net(torch.ones(5, 4) * number).square().mean().backward()
                        optimizer.step()
                        store["done"] = number + 1
            else:
                with GradLog(net, optimizer, store, how, batch=2) as log:
                    log.resume(replay=how != "topk")
                    iterate(log, net, optimizer, until, 5, 4)
            return copies(net.state_dict())

    whole = train(tmp_path / "whole.pm", 8)
    assert whole["0._extra_state"] == {"calls": 8}
    train(tmp_path / "parts.pm", 4)
    assert equal(whole, train(tmp_path / "parts.pm", 8))


def copies(state: dict[str, Any]) -> dict[str, Any]:
    return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in state.items()}


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: torch.ones(1).expand(3), r"'ones'.* overlap .*ones\.clone"),
        (of_inference, r"'ones' was made in torch\.inference_mode.*ones\.clone"),
        (lambda: torch.eye(3).to_sparse(), r"'ones' has the layout torch\.sparse_coo.*ones\.to_dense"),
    ],
    ids=["expanded", "inference", "sparse"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_can_not_be_written_is_refused_at_once(mode: Any, made: Any, text: str, tmp_path: Path) -> None:
    """It could be logged, and never be read again."""
    net = nn.Linear(4, 2)
    net.register_buffer("ones", made())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "s.pm") as store, pytest.raises((TypeError, ValueError), match=text):
        GradLog(net, optimizer, store, mode)


# ---- in the middle of an iteration


class Ends(torch.optim.lr_scheduler.ConstantLR):
    """A schedule that raises an error in its step, as OneCycleLR does at its end."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch >= 3:
            raise ValueError("no more steps")


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_whose_scheduler_raised_is_done(mode: Any, tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "s.pm") as store:
        with GradLog(net, optimizer, store, mode, scheduler=Ends(optimizer), batch=9) as log:
            log.resume()
            with pytest.raises(ValueError, match="no more steps"):
                iterate(log, net, optimizer, 9, 5, 4)
        assert log.iteration == log.durable == 3
        other = nn.Linear(4, 2)
        again = torch.optim.SGD(other.parameters(), 0.1)
        with GradLog(other, again, store, mode, scheduler=Ends(again)) as log:
            assert log.resume() == 3
    assert equal(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_iterations_are_not_lost_while_an_object_can_not_give_its_state(mode: Any, tmp_path: Path) -> None:
    kept = Kept(1)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "s.pm") as store:
        with GradLog(net, optimizer, store, mode, batch=2, keep={"kept": kept}) as log:
            log.resume()
            for number in range(8):
                kept.value = object() if number in (3, 4, 5) else number
                try:
                    iterate(log, net, optimizer, number + 1, 5, 4)
                except TypeError as error:
                    assert "the state of 'kept'" in str(error)
                assert log.iteration == number + 1
        again, other = Kept(1), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        with GradLog(other, optimizer, store, mode, keep={"kept": again}) as log:
            assert log.resume() == 8
    assert again.value == 7 and equal(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_committed_between_a_step_and_its_record(
    mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The parameters are ahead of the number of iterations."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "s.pm") as store:
        with GradLog(net, optimizer, store, mode, batch=9) as log:
            log.resume()
            iterate(log, net, optimizer, 2, 5, 4)
            log.flush()
            net(torch.ones(5, 4)).sum().backward()
            optimizer.step()
            for call in (log.flush, log.finish, log.step):
                with pytest.raises(pmstore.TransactionError, match=r"its iteration is not done.* or record\(\)"):
                    call()
            assert log.durable == 2
        assert "before record(): the store has 2 iterations" in caplog.text
        assert GradLog(net, optimizer, store, mode).resume() == 2


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", None], object),
        np.array(["a", "b"], np.dtypes.StringDType()),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.array([(1, "a")], [("n", "i4"), ("o", object)]),
    ],
    ids=["objects", "strings", "masked", "objects in fields"],
)
def test_arrays_whose_elements_lie_elsewhere_are_not_kept(value: Any, tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "s.pm") as store, GradLog(net, optimizer, store, keep={"one": Kept(value)}) as log:
        with pytest.raises(TypeError, match="the state of 'one'"):
            log.resume()


class Wrapped(nn.Module):
    """A submodule has the name that DistributedDataParallel gives to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.module(x))
        return out


class Answering(Wrapped):
    """Asks its submodule for what it has not itself."""

    def __getattr__(self, name: str) -> Any:
        found = self._modules.get(name)
        return found if found is not None else getattr(self._modules["module"], name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["compiled", "of this name", "answering"])
def test_a_submodule_is_not_the_model(kind: str, mode: Any, tmp_path: Path) -> None:
    nets = []
    for until in (3, 3):  # the second one only resumes
        net = {"of this name": type("DataParallel", (Wrapped,), {}), "answering": Answering}.get(kind, Wrapped)()
        model = torch.compile(net, backend="eager") if kind == "compiled" else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with pmstore.open(tmp_path / "s.pm") as store, GradLog(model, optimizer, store, mode, batch=2) as log:
            log.resume()
            iterate(log, model, optimizer, until, 5, 4)
        nets.append(net)
    assert equal(nets[0].state_dict(), nets[1].state_dict())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["the step", "the iteration"])
def test_a_compiled_step_is_refused(what: str, mode: Any, tmp_path: Path) -> None:
    """Adam rounds in another way, compiled."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")

    def whole() -> None:
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()

    with pmstore.open(tmp_path / "s.pm") as store, GradLog(net, optimizer, store, mode, batch=2) as log:
        log.resume()
        iterate(log, net, optimizer, 2, 5, 4)
        before = [one.clone() for one in net.parameters()]
        net(torch.randn(5, 4)).square().mean().backward()
        with pytest.raises(TypeError, match="the optimizer's step is compiled.*compile the model"):
            step() if what == "the step" else torch.compile(whole, backend="eager")()
        assert all(map(torch.equal, before, net.parameters())) and log.iteration == 2
        iterate(log, net, optimizer, 4, 5, 4)
        optimizer.zero_grad()
        torch.compile(lambda: torch.compiler.disable(whole)(), backend="eager")()
        log.record()
    assert log.iteration == 5


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_views_are_the_programs_after_a_replay(mode: Any, tmp_path: Path) -> None:
    """The program clips all of them through one buffer."""

    def trained(path: Path, *until: int) -> dict[str, Any]:
        for last in until:
            torch.manual_seed(0)
            net = nn.Linear(4, 2)
            flat = torch.zeros(10)
            net.weight.grad, net.bias.grad = flat[:8].view(4, 2).t(), flat[8:]
            optimizer = torch.optim.Adam(net.parameters(), 0.1)
            with pmstore.open(path) as store, GradLog(net, optimizer, store, mode, batch=1, **options) as log:
                log.resume()
                for _ in range(log.iteration, last):
                    flat.zero_()
                    net(torch.randn(5, 4)).square().mean().backward()
                    flat.clamp_(-0.01, 0.01)
                    log.step()
        return net.state_dict()

    options: dict[str, Any] = {} if mode == "replica" else {"full_every": 100}
    if mode == "topk":
        options["ratio"] = 1.0
    assert equal(trained(tmp_path / "s.pm", 3, 6), trained(tmp_path / "whole.pm", 6))


def test_an_interrupted_step_leaves_the_programs_gradients(tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    own = torch.ones(4, 2).t()
    net.weight.grad, net.bias.grad = own, torch.ones(2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    with pmstore.open(tmp_path / "s.pm") as store:
        log = GradLog(net, optimizer, store)
        log.resume()
        optimizer.register_step_pre_hook(interrupt)  # called after the log's
        optimizer._optimizer_step_pre_hooks.move_to_end(log._hooks[0].id, last=False)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        log.__exit__(KeyboardInterrupt, None, None)
    assert net.weight.grad is own


def test_gradients_that_can_not_be_written(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "gradients.pm") as store:
        store["weight"] = torch.ones(4, 2)
    with torch.inference_mode():
        hidden = torch.ones(2, 4)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "gradients.pm", "r") as read, pmstore.open(tmp_path / "s.pm") as store:
        with GradLog(net, optimizer, store) as log:
            net.weight.grad = hidden
            with pytest.raises(TypeError, match=r"the gradient of weight was made in torch\.inference_mode"):
                log.step()
            net.weight.grad = own = pmstore.torch.tensor(read, "weight").t()
            assert log.step() == 1
            assert net.weight.grad is own


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": [1]}, TypeError, r"a torch\.nn\.Module, not list"),
        ({"model": nn.LazyLinear(3)}, ValueError, "weight has no shape yet: call the model once"),
        ({"model": nn.LazyBatchNorm1d(affine=False)}, ValueError, "running_mean has no shape yet: call the model once"),
        ({"model": nn.Linear(2, 3, device="meta")}, ValueError, "weight is on the meta device"),
        ({"model": nn.BatchNorm1d(3, affine=False, device="meta")}, ValueError, "running_mean is on the meta device"),
        ({"ratio": "x"}, ValueError, "ratio must be greater than 0 and at most 1, not 'x'"),
        ({"mtbf": None}, ValueError, "mtbf is a number of seconds, more than 0, not None"),
    ],
)
def test_arguments_of_other_kinds(change: dict[str, Any], error: Any, message: str, tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    with pmstore.open(tmp_path / "s.pm") as store, pytest.raises(error, match=message):
        GradLog(**{"model": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1), "store": store, **change})
