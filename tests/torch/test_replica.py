"""GradLog with a replica: a thread steps a copy of model and optimizer, and commits it (I39, I40)."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pmstore
import pmstore.torch
from pmstore._store.commits import Commits
from pmstore.torch import GradLog, _replica, _replica_log
from tests.torch.test_gradlog import ADAM, OPTIMIZERS, backward, lacks_space, linear
from tests.torch.test_gradlog_changes import Averaged, Change, Gaps, clamp, iterate, load, small
from tests.torch.training import equal, killed_and_resumed, train
from tests.torch.turns import in_turns

OPTIM = torch.optim
ITERATIONS = 14


def stored(store: pmstore.Store) -> Any:
    """What the replica has, by name."""
    group = store.group("training/full")
    return {name: one.clone() for name, one in pmstore.torch.state_dict(group).items() if isinstance(one, torch.Tensor)}


def of_training(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What it must have."""
    found = {f"model/{name}": one.detach() for name, one in net.named_parameters()}
    found |= {f"buffers/{name}": one for name, one in net.named_buffers()}
    for name, one in net.named_parameters():
        state = optimizer.state.get(one, {}).items()
        found |= {f"optimizer/{name}/{key}": value for key, value in state if isinstance(value, torch.Tensor)}
    return found


def check_bits(log: GradLog, net: nn.Module) -> None:
    """The replica has the bits of the training, once it has the last iteration."""
    log.flush()
    assert log._fit is not None
    assert log.durable == log.iteration
    assert equal(dict(sorted(stored(log._fit.store).items())), dict(sorted(of_training(net, log._optimizer).items())))


# ---- the same bits


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_I40_a_replica_has_the_bits_of_the_training(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "replica", "batch": 3}
    with pmstore.open(tmp_path / "dense.pm") as store:
        whole = train(store, OPTIMIZERS[kind], ITERATIONS, batch=5)
    with pmstore.open(tmp_path / "whole.pm") as store:
        assert equal(whole, train(store, OPTIMIZERS[kind], ITERATIONS, reached=check_bits, **options))
    resumed = killed_and_resumed(tmp_path / "killed.pm", OPTIMIZERS[kind], ITERATIONS, [2, 9], **options)
    assert equal(whole, resumed)


def run(path: Path, make: Any, until: int, before: Change | None, after: Change | None, **options: Any) -> Any:
    """Train, and compare the replica with the training: after each second iteration, or as `after` does."""
    torch.manual_seed(0)
    made = net, optimizer, objects = make()
    with pmstore.open(path) as store, GradLog(net, optimizer, store, "replica", **objects, **options) as log:

        def compare(_: nn.Module, __: torch.optim.Optimizer, done: int) -> None:
            if done % 2:
                check_bits(log, net)

        return iterate(made, range(log.resume(), until), log.step, before, after or compare)


def alone(make: Any, until: int, before: Change | None, after: Change | None) -> Any:
    """The same training without a log."""
    torch.manual_seed(0)
    made = _, optimizer, objects = make()

    def step(_: float) -> None:
        if "scaler" not in objects:
            optimizer.step()
        else:
            objects["scaler"].step(optimizer)
            objects["scaler"].update()

    return iterate(made, range(until), step, before, after)


def same_bits(folder: Path, make: Any, before: Change | None = None, after: Change | None = None) -> bool:
    run(folder / "parts.pm", make, 5, before, after, batch=2)
    parts = run(folder / "parts.pm", make, 8, before, after, batch=2)
    return equal(alone(make, 8, before, after), parts)


def plain(optimizer: Any, net: Callable[[], nn.Module] = small) -> Any:
    def make() -> Any:
        made = net()
        return made, optimizer(made.parameters()), {}

    return make


def clip(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_unseen(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    for one in net.parameters():
        one.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr] # torch does not count this as a change


def write_by_numpy(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    for one in net.parameters():
        one.grad.numpy()[..., 0] = -0.0  # type: ignore[union-attr] # which equals 0.0, and has other bits


def replace(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    for one in net.parameters():
        one.grad = one.grad * 0.5  # type: ignore[operator]


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    for _ in range(done % 3):
        net(torch.randn(5, 4)).square().mean().backward()


def leave_out(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    for number, one in enumerate(net.parameters()):
        if (number + done) % 3 == 0:
            one.grad = None
        elif (number + done) % 3 == 1:
            one.grad.zero_()  # type: ignore[union-attr]


def hook(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """A hook that torch calls after the log's has other gradients for the optimizer."""
    if not optimizer._optimizer_step_pre_hooks.get(-1):
        optimizer._optimizer_step_pre_hooks[-1] = lambda *_: [one.grad.mul_(0.1) for one in net.parameters()] and None  # type: ignore[assignment, union-attr]


GRADIENTS = [clip, clip_unseen, write_by_numpy, replace, accumulate, leave_out, hook]


@pytest.mark.parametrize("before", GRADIENTS)
def test_I40_the_replica_gets_the_gradients_that_the_optimizer_got(before: Change, tmp_path: Path) -> None:
    assert same_bits(tmp_path, plain(lambda some: OPTIM.Adam(some, 0.1)), before)


class Branches(nn.Module):
    """Parameters without a gradient in some iterations, and some that are frozen later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.cat([one(x) for one in (self.a, self.b)][self.calls % 2 :], 1)


def freeze(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    net.a.bias.requires_grad_(done < 2 or done > 5)  # type: ignore[operator, union-attr]


def test_I40_parameters_without_gradients(tmp_path: Path) -> None:
    def make() -> Any:
        net = Branches()
        net.b.bias.requires_grad_(False)
        return net, OPTIM.SGD(net.parameters(), 0.1, momentum=0.9), {}

    def before(net: Any, optimizer: torch.optim.Optimizer, done: int) -> None:
        net.calls = done
        freeze(net, optimizer, done)

    assert same_bits(tmp_path, make, before)


@pytest.mark.parametrize("fused", [False, True])
def test_I40_gradient_scalers(fused: bool, tmp_path: Path) -> None:
    def make() -> Any:
        net = small()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        return net, OPTIM.AdamW(net.parameters(), lr=0.01, fused=fused), {"scaler": scaler}

    def overflow(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        if done in (3, 6):
            next(net.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]

    assert same_bits(tmp_path, make, overflow)


def cast() -> nn.Module:
    """A network of bfloat16 whose kernels are in channels_last."""
    body = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 3))
    made = body.to(torch.bfloat16).to(memory_format=torch.channels_last)
    made.register_forward_pre_hook(lambda _, given: given[0].to(torch.bfloat16))
    return made


def kernels() -> nn.Module:
    body = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 6, 3, padding=1), nn.Flatten())
    return body.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("net", [cast, kernels, Gaps])
def test_I40_other_orders_of_memory(net: Any, tmp_path: Path) -> None:
    assert same_bits(tmp_path, plain(lambda some: OPTIM.Adam(some, 0.1), net))


def test_I40_complex_parameters(tmp_path: Path) -> None:
    def make(dtype: torch.dtype) -> Any:
        net = nn.Linear(4, 2, dtype=dtype)
        net.register_forward_pre_hook(lambda _, given: given[0].to(dtype))
        return net, OPTIM.Adam(net.parameters(), 0.1), {}

    for dtype in (torch.complex64, torch.complex128):
        (tmp_path / str(dtype)).mkdir()
        assert same_bits(tmp_path / str(dtype), lambda dtype=dtype: make(dtype))


def test_I40_numbers_that_are_flushed_to_zero(tmp_path: Path) -> None:
    def shrink(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
        torch.set_flush_denormal(done % 2 == 0)
        for one in net.parameters():
            one.grad.mul_(1e-36)  # type: ignore[union-attr]

    try:
        assert same_bits(tmp_path, plain(lambda some: OPTIM.SGD(some, 1e-3, momentum=0.9)), shrink)
    finally:
        torch.set_flush_denormal(False)


def test_I40_backward_between_the_optimizer_and_record(tmp_path: Path) -> None:
    """The row has the gradients of the step, and a later backward does not change it."""
    net, optimizer = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica") as log:
        log.resume()
        for number in range(4):
            backward(net, 1.0 + number)
            optimizer.step()
            backward(net, 7.0)
            log.record()
            check_bits(log, net)


# ---- other code


def lerp(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    net.average("lerp")  # type: ignore[operator]


def assign(net: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    net.average("data")  # type: ignore[operator]


@pytest.mark.parametrize("change", [clamp, load])
def test_I40_parameters_that_other_code_changes(change: Change, tmp_path: Path) -> None:
    assert same_bits(tmp_path, plain(lambda some: OPTIM.Adam(some, 0.1)), change)


@pytest.mark.parametrize("change", [lerp, assign])
def test_I40_moving_averages_and_assigned_buffers(change: Change, tmp_path: Path) -> None:
    def make() -> Any:
        net = Averaged()
        return net, OPTIM.Adam(net.net.parameters(), 0.1), {}

    assert same_bits(tmp_path, make, change)


def test_I40_other_code_changes_the_state_of_the_optimizer(tmp_path: Path) -> None:
    net, optimizer = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica", batch=4) as log:
        log.resume()
        for number in range(7):
            backward(net)
            if number == 2:
                optimizer.state[net.weight]["exp_avg"].zero_()
            if number == 5:
                optimizer.state.clear()
            log.step()
    other, again = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(other, again, store, "replica") as log:
        assert log.resume() == 7
    assert equal([net.state_dict(), optimizer.state_dict()], [other.state_dict(), again.state_dict()])


def test_hooks_of_all_optimizers_are_called_for_the_training_only(tmp_path: Path) -> None:
    seen = []
    hook = register_optimizer_step_pre_hook(lambda one, *_: seen.append(one))
    net, optimizer = linear(OPTIM.Adam)
    try:
        with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica") as log:
            for _ in range(3):
                backward(net)
                log.step()
            check_bits(log, net)
    finally:
        hook.remove()
    assert seen == [optimizer] * 3


# ---- the queue


def test_the_training_waits_only_if_all_rows_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = in_turns(monkeypatch, None)
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica", batch=3) as log:
        log.resume()
        for _ in range(3):
            backward(net)
            log.step()
        assert (log.iteration, log.durable, made[0].waits) == (3, 0, 0)
        sequence = store.sequence
        backward(net)  # its first copy needs a row
        assert (log.durable, made[0].waits) == (3, 1)
        assert store.sequence == sequence + 1  # one commit of all that waited
        log.step()
        assert (log.iteration, log.durable) == (4, 3)
        check_bits(log, net)


def test_a_crash_loses_at_most_a_batch(tmp_path: Path) -> None:
    def reached(log: GradLog, net: nn.Module) -> None:
        assert 0 <= log.iteration - log.durable <= 2

    with pmstore.open(tmp_path / "a.pm") as store:
        train(store, ADAM, ITERATIONS, mode="replica", batch=2, reached=reached)


def test_backward_in_a_transaction_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turns(monkeypatch, None)
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica", batch=1) as log:
        log.resume()
        backward(net)
        log.step()
        with store.transaction():
            store["mine"] = 1
            backward(net)
            with pytest.raises(pmstore.TransactionError, match="outside"):
                log.step()
        log.step()
        check_bits(log, net)


# ---- what goes wrong


def test_an_error_of_the_thread_is_raised_by_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = in_turns(monkeypatch, None)
    net, optimizer = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica", batch=3) as log:
        log.resume()
        with monkeypatch.context() as patch:
            patch.setattr(_replica, "step_alone", lambda optimizer: 1 / 0)
            for _ in range(2):
                backward(net)
                log.step()
            made[0].wait()
        backward(net)
        with pytest.raises(pmstore.TransactionError, match="thread of the replica failed: ZeroDivisionError.*No iter"):
            log.step()
        assert (log.iteration, log.durable) == (3, 0)
        backward(net)
        log.step()
        assert (log.iteration, log.durable) == (4, 4)
        for _ in range(2):
            backward(net)
            log.step()
            check_bits(log, net)
        assert pmstore.history(store, "training")["iteration"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_full_store_loses_no_iteration(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(300, 100)
        return net, OPTIM.SGD(net.parameters(), 0.01, momentum=0.9)

    net, optimizer = make()
    path, failures = tmp_path / "small.pm", 0
    with pmstore.open(path, max_size=3 << 20) as store, GradLog(net, optimizer, store, "replica", batch=1) as log:
        log.resume()
        with pytest.raises(pmstore.OutOfSpaceError):
            for number in range(1000):
                store[f"ballast/{number}"] = np.zeros(10_000, np.uint8)
        store.commit()
        while log.iteration < 8:
            net.zero_grad()
            net(torch.ones(1, 300)).square().sum().backward()
            try:
                log.step()
            except pmstore.OutOfSpaceError:
                failures += 1
                store.group("ballast").clear()
                store.commit()
        log.flush()
        assert failures and log.durable == log.iteration == 8
    other, again = make()
    with pmstore.open(path) as store, GradLog(other, again, store, "replica") as log:
        assert log.resume() == 8
    assert equal([net.state_dict(), optimizer.state_dict()], [other.state_dict(), again.state_dict()])


def test_I39_nothing_of_a_commit_that_lacked_space_stays_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, "replica") as log:
        for number in range(4):
            backward(net)
            with monkeypatch.context() as patch:
                if number == 1:
                    log.flush()
                    patch.setattr(Commits, "commit_now", lacks_space)
                log.step()
                if number == 1:
                    with pytest.raises(pmstore.OutOfSpaceError):
                        log.flush()
        check_bits(log, net)
        assert pmstore.history(store, "training")["iteration"].tolist() == [1, 2, 3, 4]


def test_a_closed_store_stops_training(tmp_path: Path) -> None:
    net, optimizer = linear()
    store = pmstore.open(tmp_path / "closed.pm")
    log = GradLog(net, optimizer, store, "replica")
    log.resume()
    backward(net)
    log.step()
    store.close()
    backward(net)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(pmstore.ClosedStoreError, match="open it again"):
        log.step()
    assert equal(before, net.state_dict())
    log.close()
    optimizer.step()


def test_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt anywhere in the calls of an iteration loses nothing, or says that a new log is needed."""
    place, calls, inside = 0, 0, True

    def interrupt(function: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == place and inside:
                raise KeyboardInterrupt
            result = function(*given, **named)
            calls += 1
            if calls == place and inside:
                raise KeyboardInterrupt
            return result

        return called

    for name in ("_wait_for_row", "take", "add", "write", "_give", "_copy_early"):
        monkeypatch.setattr(_replica_log.ReplicaLog, name, interrupt(getattr(_replica_log.ReplicaLog, name)))
    monkeypatch.setattr(_replica_log.Worker, "do", interrupt(_replica_log.Worker.do))
    for place in range(1, 200):
        path, calls, inside, done = tmp_path / f"{place}.pm", 0, True, 0
        net, optimizer = linear(OPTIM.Adam)
        with pmstore.open(path) as store:
            log = GradLog(net, optimizer, store, "replica", batch=2)
            while done < 3:
                try:
                    backward(net)
                    done = log.step()
                except KeyboardInterrupt:
                    inside = False
                    done = log.iteration
                except pmstore.TransactionError as error:
                    if "or record()" in str(error):  # the interrupt came after the optimizer's step
                        done = log.record()
                        continue
                    assert "interrupted in the middle" in str(error)
                    log.close()
                    log = GradLog(net, optimizer, store, "replica", batch=2)
                    assert 0 <= done - log.resume() <= 2
            none, inside = inside, False  # place is behind all calls
            check_bits(log, net)
            log.close()
        if none:
            break
    assert place > 30 and none


def test_refused(tmp_path: Path) -> None:
    net, optimizer = linear()
    path = tmp_path / "a.pm"
    with pmstore.open(path) as store:
        with pytest.raises(ValueError, match="full_every is for logs of gradients"):
            GradLog(net, optimizer, store, "replica", full_every=3)
        optimizer.state[net.weight]["kept"] = torch.empty(2, 3, device="meta")
        message = r"weight, kept is on meta.*mode='dense', or move the model with model.cpu\(\)"
        with pytest.raises(ValueError, match=message):
            GradLog(net, optimizer, store, "replica")
        optimizer.state.clear()
        with pytest.raises(TypeError, match="LBFGS"):
            GradLog(net, OPTIM.LBFGS(net.parameters()), store, "replica")
        with GradLog(net, optimizer, store, "replica", batch=1) as log:
            log.resume()
            backward(net, math.nan)
            with pytest.raises(ValueError, match="weight has NaN"):
                log.step()
            backward(net)
            log.step()
            net.further = nn.Linear(1, 1)
            backward(net)
            with pytest.raises(ValueError, match="further.weight is not what it was"):
                log.step()
            del net.further
            check_bits(log, net)
            store["training/head"] = {"full": 0, "logged": 0, "batches": []}
            backward(net)
            with pytest.raises(pmstore.TransactionError, match="other code has changed the log"):
                log.step() and log.flush()
            log._begun = False
        with pytest.raises(pmstore.FingerprintMismatchError, match="replica ≠ dense"):
            GradLog(net, optimizer, store).resume()


def test_gradients_that_are_not_finite_if_asked_for(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store:
        with GradLog(net, optimizer, store, "replica", finite=False) as log:
            backward(net, math.nan)
            log.step()
            check_bits(log, net)


@pytest.mark.parametrize("closes", [True, False])
def test_nothing_is_left_behind(closes: bool, tmp_path: Path) -> None:
    others = set(threading.enumerate())
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store:
        log = GradLog(net, optimizer, store, "replica")
        log.resume()
        backward(net)
        log.step()
        running = set(threading.enumerate()) - others
        assert len(running) == 1
        if closes:
            log.close()
            assert log.durable == 1 and others.issuperset(threading.enumerate())
            backward(net)
            optimizer.step()
        else:
            log.flush()  # an iteration that waits keeps all of it, and is committed
        gone = [weakref.ref(net), weakref.ref(log), weakref.ref(log._side)]
        del net, optimizer, log
        gc.collect()
        for one in running:  # the thread ends by itself
            one.join(60)
        gc.collect()
        assert [one() for one in gone] == [None, None, None] and others.issuperset(threading.enumerate())
