"""GradLog: training that resumes from logged gradients (I29, I30)."""

from __future__ import annotations

import copy
import errno
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.testing
import pmstore.torch
from pmstore._resume.history import PAGE
from pmstore._store.commits import Commits
from pmstore.torch import BatchSampler, GradLog
from tests.torch.training import Killed, Tied, equal, killed_and_resumed, train

OPTIM = torch.optim

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda net: OPTIM.SGD(net.parameters(), 0.1),
    "momentum": lambda net: OPTIM.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda net: OPTIM.Adam(net.parameters(), 0.01),
    "AMSGrad": lambda net: OPTIM.Adam(net.parameters(), torch.tensor(0.01), amsgrad=True),
    "AdamW": lambda net: OPTIM.AdamW(
        [
            {"params": [*net.first.parameters(), *net.last.parameters()], "weight_decay": 0.1},
            {"params": [*net.norm.parameters(), net.second.bias, net.unused], "lr": 0.02, "betas": (0.8, 0.99)},
        ],
        0.01,
    ),
    "foreach": lambda net: OPTIM.AdamW(net.parameters(), 0.01, foreach=True),
    "RMSprop": lambda net: OPTIM.RMSprop(net.parameters(), 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda net: OPTIM.Adagrad(net.parameters(), 0.05),
    "NAdam": lambda net: OPTIM.NAdam(net.parameters(), 0.01),
    "RAdam": lambda net: OPTIM.RAdam(net.parameters(), 0.01),
    "Adamax": lambda net: OPTIM.Adamax(net.parameters(), 0.01),
    "Adadelta": lambda net: OPTIM.Adadelta(net.parameters(), 0.5),
    "ASGD": lambda net: OPTIM.ASGD(net.parameters(), 0.05),
    "Rprop": lambda net: OPTIM.Rprop(net.parameters(), 0.01),
}
ADAM = OPTIMIZERS["Adam"]
ITERATIONS = 20


def linear(optimizer: Any = OPTIM.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, optimizer(net.parameters(), lr=0.1, **options)


def backward(net: nn.Module, scale: float = 1.0) -> None:
    net.zero_grad()
    (net(torch.ones(1, 3)).square().sum() * scale).backward()


# ---- the same bits


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_I30_a_training_that_was_interrupted_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = {"batch": 3, "full_every": 6}
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, OPTIMIZERS[kind], ITERATIONS, **options)
    resumed = killed_and_resumed(tmp_path / "killed.pm", OPTIMIZERS[kind], ITERATIONS, [2, 5, 13], **options)
    assert equal(whole, resumed)


@pytest.mark.parametrize("options", [{}, {"batch": 1}, {"batch": 4, "full_every": 1}, {"batch": 5}, {"full_every": 7}])
def test_the_choice_of_batch_and_full_states_does_not_change_the_bits(options: dict[str, Any], tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ADAM, ITERATIONS, batch=ITERATIONS)
    assert equal(whole, killed_and_resumed(tmp_path / "killed.pm", ADAM, ITERATIONS, [7, 12], **options))


@pytest.mark.parametrize("mode", ["dense", "replica", "topk"])
def test_I30_a_training_whose_history_fills_pages(mode: str, tmp_path: Path) -> None:
    options = {"batch": 4, "mode": mode} | ({"full_every": 24} if mode == "dense" else {})
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ADAM, 2 * PAGE + 9, **options)
        history = pmstore.history(store, "training")
    assert (history["iteration"] == np.arange(1, 2 * PAGE + 10)).all() and (np.diff(history["time"]) >= 0).all()
    if mode != "topk":  # whose replay has other bits
        stops = [PAGE, PAGE + 1]
        assert equal(whole, killed_and_resumed(tmp_path / "killed.pm", ADAM, 2 * PAGE + 9, stops, **options))


def test_a_crash_loses_fewer_iterations_than_a_batch_has(tmp_path: Path) -> None:
    for stop in range(1, 9):
        path = tmp_path / f"{stop}.pm"
        with pytest.raises(Killed), pmstore.open(path) as store:
            train(store, ADAM, ITERATIONS, stop=stop, batch=4, full_every=12)
        net = Tied()
        with pmstore.open(path) as store:
            data = BatchSampler(90, 16, seed=7)
            optimizer = ADAM(net)
            kept = {"epochs": torch.optim.lr_scheduler.ConstantLR(OPTIM.SGD([nn.Parameter(torch.ones(1))]))}
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
            log = GradLog(net, optimizer, store, scheduler=schedule, data=data, keep=kept)
            assert log.resume() == (len(data) if stop >= len(data) else stop // 4 * 4), "an epoch ends with a commit"
            assert data.position == log.iteration % len(data) or log.iteration == len(data)


def test_topk_has_the_same_parameters_after_a_replay(tmp_path: Path) -> None:
    seen: dict[int, Any] = {}

    def remember(log: GradLog, net: nn.Module) -> None:
        state = copy.deepcopy(net.state_dict())
        assert log.iteration not in seen or equal(seen[log.iteration], state)
        seen[log.iteration] = state

    def compare(log: GradLog, net: nn.Module) -> None:
        assert equal(seen[log.iteration], net.state_dict())
        raise Killed

    path, options = tmp_path / "topk.pm", {"mode": "topk", "ratio": 0.1, "batch": 3, "full_every": 9}
    with pytest.raises(Killed), pmstore.open(path) as store:
        train(store, ADAM, ITERATIONS, stop=16, reached=remember, **options)
    with pytest.raises(Killed), pmstore.open(path) as store:
        train(store, ADAM, ITERATIONS, reached=compare, **options)


def test_topk_without_replay_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = {"mode": "topk", "ratio": 0.1, "batch": 3, "full_every": 6}
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ADAM, ITERATIONS, **options)
    resumed = killed_and_resumed(tmp_path / "killed.pm", ADAM, ITERATIONS, [8, 17], replay=False, **options)
    whole.pop("history"), resumed.pop("history")  # the iterations done twice have two rows
    assert equal(whole, resumed)


def test_topk_lets_nothing_be_lost_but_by_delay(tmp_path: Path) -> None:
    """Error feedback has given plain SGD each of the constant gradients, or has it left."""
    with pmstore.open(tmp_path / "topk.pm") as store:
        parameter = nn.Parameter(torch.zeros(100))
        optimizer = OPTIM.SGD([parameter], lr=1.0)
        gradient = torch.arange(1.0, 101.0)
        module = nn.Module()
        module.register_parameter("w", parameter)
        log = GradLog(module, optimizer, store, "topk", ratio=0.05, batch=1)
        log.resume()
        for _ in range(40):
            parameter.grad = gradient.clone()
            log.step()
            assert int((parameter.grad != 0).sum()) == 5
        log.finish()
        left = store["training/full/residual/w"]
        assert torch.allclose(-parameter.detach() + torch.from_numpy(left), 40 * gradient)


def test_bfloat16_and_channels_last(tmp_path: Path) -> None:
    def net() -> nn.Module:
        body = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 4))
        return body.to(torch.bfloat16).to(memory_format=torch.channels_last)

    def casting() -> nn.Module:
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x.to(torch.bfloat16)).float()

        return Cast()

    options: dict[str, Any] = {"batch": 3, "full_every": 9, "model": casting}
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ADAM, 12, **options)
    assert equal(whole, killed_and_resumed(tmp_path / "killed.pm", ADAM, 12, [5, 8], **options))
    with pmstore.open(tmp_path / "killed.pm", "r") as store:
        assert pmstore.torch.tensor(store, "training/full/model/inner.1.weight").dtype == torch.bfloat16


# ---- crashes


def workload(store: pmstore.Store, reached: Any = None) -> None:
    train(store, ADAM, 7, batch=2, full_every=4, reached=reached, max_iter=7)


def test_I29_every_crash_leaves_a_state_of_an_iteration(tmp_path: Path) -> None:
    states: dict[int, Any] = {}
    with pmstore.open(tmp_path / "reference.pm") as store:
        workload(store, lambda log, net: states.update({log.iteration: copy.deepcopy(net.state_dict())}))

    def check(store: pmstore.Store) -> None:
        def resumed(log: GradLog, net: nn.Module) -> None:
            assert equal(states[log.iteration], net.state_dict())
            raise Killed

        with pytest.raises(Killed):
            workload(store, resumed)

    pmstore.testing.crash_test(check=check, budget=150)(workload)()


# ---- what goes wrong


def test_a_full_store_loses_no_iteration(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(300, 100)
        return net, OPTIM.SGD(net.parameters(), 0.01, momentum=0.9)

    def step(net: nn.Module, log: GradLog) -> None:
        net.zero_grad()
        net(torch.ones(1, 300)).square().sum().backward()
        log.step()

    net, optimizer = make()
    path, failures = tmp_path / "small.pm", 0
    with pmstore.open(path, max_size=4 << 20) as store, GradLog(net, optimizer, store, batch=2, full_every=1000) as log:
        log.resume()
        store["ballast"] = np.zeros(1_000_000, np.uint8)
        store.commit()
        while log.iteration < 30:
            done, before = log.iteration, copy.deepcopy(net.state_dict())
            try:
                step(net, log)
            except pmstore.OutOfSpaceError:
                failures += 1
                assert log.iteration > done or equal(before, net.state_dict())
                if "ballast" not in store:
                    break
                del store["ballast"]
                store.commit()
        assert failures
        assert log.durable == log.iteration == 30
    other, again = make()
    with pmstore.open(path) as store, GradLog(other, again, store) as log:
        assert log.resume() == 30
    reference, steps = make()
    with pmstore.open(tmp_path / "reference.pm") as store, GradLog(reference, steps, store) as log:
        for _ in range(30):
            step(reference, log)
    assert equal(reference.state_dict(), other.state_dict())


def lacks_space(*_: Any, **__: Any) -> None:
    """A commit on a full disk."""
    raise pmstore.OutOfSpaceError(errno.ENOSPC, "no space")


def test_I29_nothing_of_a_commit_that_lacked_space_stays_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = linear(OPTIM.Adam)
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=1) as log:
        for number in range(4):
            backward(net)
            with monkeypatch.context() as patch:
                if number == 1:
                    log.flush()
                    patch.setattr(Commits, "commit_now", lacks_space)
                    with pytest.raises(pmstore.OutOfSpaceError):
                        log.step()
                else:
                    log.step()
        assert log.durable == log.iteration == 4
        assert pmstore.history(store, "training")["iteration"].tolist() == [1, 2, 3, 4]


def test_a_rollback_takes_nothing_back(tmp_path: Path) -> None:
    net, optimizer = linear(OPTIM.SGD, momentum=0.9)
    path = tmp_path / "rolled.pm"
    with pmstore.open(path) as store, GradLog(net, optimizer, store, batch=3, full_every=300) as log:
        log.resume()
        for iteration in range(6):
            backward(net)
            log.step(1.0)
            if iteration == 3:
                store.rollback()
                with store.transaction(), pytest.raises(pmstore.TransactionError, match="outside"):
                    log.step()
        assert (log.iteration, log.durable) == (6, 6)
    other, again = linear(OPTIM.SGD, momentum=0.9)
    with pmstore.open(path) as store, GradLog(other, again, store) as log:
        assert log.resume() == 6
        assert equal(net.state_dict(), other.state_dict())
        assert equal(optimizer.state_dict(), again.state_dict())


def test_commits_of_other_code_change_nothing(tmp_path: Path) -> None:
    net, optimizer = linear()
    path = tmp_path / "others.pm"
    with pmstore.open(path) as store:
        log = GradLog(net, optimizer, store, batch=4)
        log.resume()
        for iteration in range(6):
            backward(net)
            log.step(float(iteration))
            store["mine"] = iteration
            store.commit()
    other, again = linear()
    with pmstore.open(path) as store, GradLog(other, again, store, batch=4) as log:
        assert (store["mine"], log.resume()) == (5, 4)
        backward(other)
        log.step(4.0)
        log.flush()
        assert pmstore.history(store, "training")["objective"].tolist() == [0, 1, 2, 3, 4]
    with pmstore.open(path) as store, GradLog(*linear(), store) as log:
        assert log.resume() == 5


def test_flush_makes_every_iteration_durable(tmp_path: Path) -> None:
    net, optimizer = linear()
    path = tmp_path / "flushed.pm"
    with pmstore.open(path) as store:
        log = GradLog(net, optimizer, store, batch=4, full_every=99)
        log.resume()
        for iteration in range(1, 11):
            backward(net)
            log.step()
            log.flush()
            log.flush()
            assert log.durable == iteration
        assert len(store.group("training/log")) == 10
    other, again = linear()
    with pmstore.open(path) as store, GradLog(other, again, store) as log:
        assert log.resume() == 10
        assert equal(net.state_dict(), other.state_dict())


def test_finished_trainings_can_go_on(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "finished.pm") as store:
        log = GradLog(net, optimizer, store, max_iter=1)
        log.resume()
        backward(net)
        log.step(2.5)
        log.finish()
        history = pmstore.history(store, "training")
        assert (history.finished, history.max_iter, history["lr"].tolist()) == (True, 1, [0.1])
        assert len(store.group("training/log")) == 0
        with GradLog(net, optimizer, store) as log:
            assert log.resume() == 1
            backward(net)
            log.step()
        assert not pmstore.history(store, "training").finished


def test_the_optimizer_is_not_stepped_by_others(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store, GradLog(net, optimizer, store, batch=2) as log:
        log.resume()
        backward(net)
        optimizer.step()
        with pytest.raises(pmstore.TransactionError, match="its iteration is not done"):
            log.step()
        backward(net)
        with pytest.raises(pmstore.TransactionError, match="stepped again"):
            optimizer.step()
        assert log.record() == 1
        with pytest.raises(ValueError, match="after optimizer.step"):
            log.record()
        assert log.step() == 2
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(ValueError, match="those of the last step"):
            log.step()
        net.zero_grad()
        with pytest.raises(ValueError, match="loss.backward"):
            log.step()
        backward(net, math.nan)
        with pytest.raises(ValueError, match="weight has NaN"):
            log.step()
        assert equal(before, net.state_dict())
        assert (log.iteration, log.durable) == (2, 2)
        backward(net)
        log.step()
    optimizer.step()  # the log is closed


def test_a_step_with_a_closure_is_logged(tmp_path: Path) -> None:
    net, optimizer = linear(OPTIM.SGD, momentum=0.9)
    calls = []

    def closure() -> float:
        backward(net)
        calls.append(1)
        return 2.5

    with pmstore.open(tmp_path / "closure.pm") as store, GradLog(net, optimizer, store, batch=1) as log:
        log.resume()
        for _ in range(3):
            assert optimizer.step(closure) == 2.5
            log.record()
    assert len(calls) == 3
    other, again = linear(OPTIM.SGD, momentum=0.9)
    with pmstore.open(tmp_path / "closure.pm") as store, GradLog(other, again, store) as log:
        assert log.resume() == 3
        assert equal(net.state_dict(), other.state_dict())


def test_gradients_that_are_not_finite_if_asked_for(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "nan.pm") as store, GradLog(net, optimizer, store, batch=1, finite=False) as log:
        backward(net, math.nan)
        log.step()
    other, again = linear()
    with pmstore.open(tmp_path / "nan.pm") as store, GradLog(other, again, store, finite=False) as log:
        assert log.resume() == 1
        assert equal(net.state_dict(), other.state_dict())


def test_a_closed_store_stops_training(tmp_path: Path) -> None:
    net, optimizer = linear()
    store = pmstore.open(tmp_path / "closed.pm")
    log = GradLog(net, optimizer, store)
    log.resume()
    store.close()
    before = copy.deepcopy(net.state_dict())
    backward(net)
    with pytest.raises(pmstore.ClosedStoreError, match="open it again"):
        log.step()
    with pytest.raises(pmstore.ClosedStoreError):
        optimizer.step()
    assert equal(before, net.state_dict())
    log.close()
    with pytest.raises(pmstore.ClosedStoreError, match="new GradLog"):
        log.step()
    optimizer.step()


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pm"
    with pmstore.open(path) as store, GradLog(*linear(), store) as log:
        log.resume()
    wider = nn.Linear(3, 5)
    changed = {
        r"parameter weight: float32 \(2, 3\) ≠ float32 \(5, 3\)": lambda: (wider, OPTIM.SGD(wider.parameters(), 0.1)),
        "torch.optim.sgd.SGD ≠ torch.optim.adam.Adam": lambda: linear(OPTIM.Adam),
    }
    with pmstore.open(path) as store:
        for text, make in changed.items():
            with pytest.raises(pmstore.FingerprintMismatchError, match=text):
                GradLog(*make(), store).resume()
        with pytest.raises(pmstore.FingerprintMismatchError, match=r"dense ≠ topk, .*\. Choose another name\. store"):
            GradLog(*linear(), store, "topk").resume()
        net, optimizer = linear()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(pmstore.FingerprintMismatchError, match="kept"):
            GradLog(net, optimizer, store, scheduler=schedule).resume()
        net, optimizer = linear()
        log = GradLog(net, optimizer, store)
        backward(net)
        with pytest.raises(pmstore.TransactionError, match=r"call resume\(\)"):
            log.step()
        log.resume()
        with pytest.raises(pmstore.TransactionError, match="once"):
            log.resume()


def test_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        GradLog(*linear(), store, data=BatchSampler(10, 4)).resume()
        with pytest.raises(ValueError, match="batch_size: 4 ≠ 5"):
            GradLog(*linear(), store, data=BatchSampler(10, 5)).resume()


def test_a_log_that_is_dropped_is_gone(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "dropped.pm") as store:
        log = GradLog(net, optimizer, store)
        log.resume()
        backward(net)
        log.step()
        gone = weakref.ref(net), weakref.ref(log)
        del net, optimizer, log
        gc.collect()
        assert [one() for one in gone] == [None, None]


def test_two_logs_of_one_group_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "two.pm"
    (net, optimizer), (other, again) = linear(), linear()
    with pmstore.open(path) as store:
        first, second = GradLog(net, optimizer, store, batch=1), GradLog(other, again, store, batch=1)
        first.resume()
        second.resume()
        backward(net)
        first.step()
        backward(other)
        with pytest.raises(pmstore.TransactionError, match="perhaps another GradLog"):
            second.step()
        backward(net)
        first.step()
    with pmstore.open(path) as store, GradLog(other, again, store) as log:
        assert log.resume() == 2
        assert equal(net.state_dict(), other.state_dict())


def test_bad_arguments(tmp_path: Path) -> None:
    net, optimizer = linear()
    with pmstore.open(tmp_path / "a.pm") as store:
        for options, text in {
            ("mode", "sparse"): "mode is one of",
            ("ratio", 0): "ratio must be greater than 0",
            ("batch", 0): "batch is a number",
            ("full_every", True): "full_every is a number",
            ("mtbf", -1.0): "mtbf is",
            ("keep", (("data", optimizer),)): "another name",
        }.items():
            key, value = options
            with pytest.raises(ValueError, match=text):
                GradLog(net, optimizer, store, **{key: dict(value) if key == "keep" else value})
        with pytest.raises(TypeError, match="load_state_dict"):
            GradLog(net, optimizer, store, scheduler=3)
        with pytest.raises(
            TypeError, match=r"LBFGS is not .* use one of .*SGD, or pmstore.torch.persist.* but not LBFGS"
        ):
            GradLog(net, OPTIM.LBFGS(net.parameters()), store)
        with pytest.raises(TypeError, match="pmstore.open"):
            GradLog(net, optimizer, None)
        embedding = nn.Embedding(5, 3, sparse=True)
        sparse = OPTIM.SGD(embedding.parameters(), 0.1)
        embedding(torch.tensor([1])).sum().backward()
        for mode in ("dense", "topk"):
            with pytest.raises(TypeError, match="sparse=False"):
                GradLog(embedding, sparse, store, mode, name=mode).step()
        with pytest.raises(TypeError, match="a dict of objects by name"):
            GradLog(net, optimizer, store, keep=[optimizer])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'data' is to have advance\(\)"):
            GradLog(net, optimizer, store, data=optimizer)
        with pytest.raises(TypeError, match="odd.*object"):
            odd = type("Odd", (), {"state_dict": lambda _: {"odd": object()}, "load_state_dict": lambda _, state: None})
            GradLog(net, optimizer, store, name="c", keep={"odd": odd()}).resume()
    with pmstore.open(tmp_path / "a.pm", "r") as store, pytest.raises(pmstore.ReadOnlyStoreError):
        GradLog(net, optimizer, store)


def test_a_gradient_scaler_that_skips_steps(tmp_path: Path) -> None:
    def run(path: Path, stop: int) -> Any:
        net, optimizer = linear(OPTIM.Adam)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        with pmstore.open(path) as store, GradLog(net, optimizer, store, batch=2, scaler=scaler) as log:
            for iteration in range(log.resume(), 9):
                net.zero_grad()
                scale = math.inf if iteration in (2, 5) else 1.0
                scaler.scale((net(torch.ones(1, 3)) * scale).square().sum()).backward()
                log.step()
                if iteration == stop:
                    break
        return net.state_dict(), optimizer.state_dict(), scaler.state_dict()

    whole = run(tmp_path / "whole.pm", -1)
    for stop in (1, 3, 6):
        run(tmp_path / "parts.pm", stop)
    assert equal(whole, run(tmp_path / "parts.pm", -1))
    assert not equal(whole, run(tmp_path / "parts2.pm", 3))


def test_damaged_rows_are_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "damaged.pm"
    torch.manual_seed(0)
    net = nn.Linear(300, 100)
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(path) as store, GradLog(net, optimizer, store, batch=2, full_every=100) as log:
        log.resume()
        for _ in range(2):
            net.zero_grad()
            net(torch.full((1, 300), 3.14159)).square().sum().backward()
            log.step()
        gradient = net.weight.grad.numpy().tobytes()[:64]
    content = path.read_bytes()
    assert content.count(gradient) >= 1
    at = content.index(gradient)
    path.write_bytes(content[:at] + bytes(64) + content[at + 64 :])
    with pmstore.open(path) as store, pytest.raises(pmstore.CorruptStoreError, match="damaged"):
        GradLog(net, optimizer, store).resume()
