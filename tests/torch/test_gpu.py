"""Trainings on a GPU: the same bits, the same errors. `make test-torch TORCH=torch` installs a build for CUDA."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import GradLog, _topk
from tests.torch.test_gradlog import ADAM, ITERATIONS, OPTIM, OPTIMIZERS
from tests.torch.test_kill import trained
from tests.torch.test_topk import check_compression, parameters
from tests.torch.training import Killed, equal, killed_and_resumed, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")

ON_GPUS: dict[str, Any] = {
    **OPTIMIZERS,
    "fused": lambda net: OPTIM.AdamW(net.parameters(), 0.01, fused=True),
    "capturable": lambda net: OPTIM.NAdam(net.parameters(), 0.01, capturable=True),
    "rates on the GPU": lambda net: OPTIM.Adam(
        net.parameters(), torch.tensor(0.01, device="cuda"), capturable=True, foreach=True
    ),
    "one by one": lambda net: OPTIM.Adam(net.parameters(), 0.01, foreach=False),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that have the same bits in every run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(_topk, "_SINGLE", 3)  # a graph is a part of all trainings
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ON_GPUS)
def test_I30_a_training_on_a_gpu_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = {"batch": 3, "full_every": 6, "device": "cuda"}
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ON_GPUS[kind], ITERATIONS, **options)
    resumed = killed_and_resumed(tmp_path / "killed.pm", ON_GPUS[kind], ITERATIONS, [2, 5, 13], **options)
    assert equal(whole, resumed)
    with pmstore.open(tmp_path / "other.pm") as store:
        assert not equal(whole, train(store, ON_GPUS[kind], ITERATIONS - 1, **options))


def test_topk_on_a_gpu_without_replay_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = {"mode": "topk", "ratio": 0.1, "batch": 3, "full_every": 6, "device": "cuda"}
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, ADAM, ITERATIONS, **options)
    resumed = killed_and_resumed(tmp_path / "killed.pm", ADAM, ITERATIONS, [8, 17], replay=False, **options)
    whole.pop("history"), resumed.pop("history")  # the iterations done twice have two rows
    assert equal(whole, resumed)


def test_topk_on_a_gpu_has_the_same_parameters_after_a_replay(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compare(log: GradLog, net: nn.Module) -> None:
        assert equal(seen[log.iteration], [one.detach() for one in net.parameters()])
        raise Killed

    def remember(log: GradLog, net: nn.Module) -> None:
        seen.append([one.detach().clone() for one in net.parameters()])

    options = {"mode": "topk", "ratio": 0.1, "batch": 3, "full_every": 90, "device": "cuda"}
    with pytest.raises(Killed), pmstore.open(tmp_path / "topk.pm") as store:
        train(store, ADAM, ITERATIONS, stop=16, reached=remember, **options)
    with pytest.raises(Killed), pmstore.open(tmp_path / "topk.pm") as store:
        train(store, ADAM, ITERATIONS, reached=compare, **options)


@pytest.mark.parametrize("together", [10, 1 << 17])
@given(parameters())
def test_topk_on_a_gpu_loses_nothing(together: int, drawn: tuple[list[nn.Parameter], float, int]) -> None:
    """The second time makes a CUDA graph. There are parameters that a GPU handles together, and others."""
    them, ratio, seed = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_topk, "_SINGLE", 2)
        patch.setattr(_topk, "_SORTED", together)
        check_compression([nn.Parameter(one.detach().cuda()) for one in them], ratio, seed)


def test_gradients_that_are_large_arrive_before_their_commit(tmp_path: Path) -> None:
    """The copies of a step go on after it. Each row is compared with the gradient that the step used."""
    torch.manual_seed(0)
    net = nn.Linear(2000, 1000, device="cuda")
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    used = []
    with pmstore.open(tmp_path / "large.pm") as store:
        with GradLog(net, optimizer, store, batch=2, full_every=1000) as log:
            log.resume()
            for number in range(12):
                optimizer.zero_grad()
                net(torch.randn(64, 2000, device="cuda")).square().sum().backward()
                used.append(net.weight.grad.cpu().numpy().tobytes())
                if number % 2:
                    torch.cuda._sleep(20_000_000)  # the GPU is busy while the host goes on
                log.step()
        for number, expected in enumerate(used):
            batch = store[f"training/log/{number // 2}"]
            assert expected in batch[number % 2].tobytes()


def test_a_gradient_scaler_on_a_gpu(tmp_path: Path) -> None:
    """float16 with a scaler, whose first steps overflow; fused, so that the optimizer unscales."""

    def run(path: Path, stop: int, fused: bool) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(64, 32, device="cuda")
        optimizer = OPTIM.AdamW(net.parameters(), 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=3)
        x = torch.randn(16, 64, device="cuda")
        with pmstore.open(path) as store, GradLog(net, optimizer, store, batch=2, scaler=scaler) as log:
            for iteration in range(log.resume(), 24):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = net(x).float().square().mean()
                scaler.scale(loss).backward()
                log.step(loss.item())
                if iteration == stop:
                    break
        return net.state_dict(), optimizer.state_dict(), scaler.state_dict()

    for fused in (False, True):
        whole = run(tmp_path / f"whole-{fused}.pm", -1, fused)
        assert whole[2]["scale"] < 2.0**24
        for stop in (1, 9, 16):
            run(tmp_path / f"parts-{fused}.pm", stop, fused)
        assert equal(whole, run(tmp_path / f"parts-{fused}.pm", -1, fused))


def test_nan_on_a_gpu_names_the_parameter(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).cuda()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    before = [one.detach().clone() for one in net.parameters()]
    with pmstore.open(tmp_path / "nan.pm") as store, GradLog(net, optimizer, store) as log:
        log.resume()
        for one in net.parameters():
            one.grad = torch.ones_like(one)
        net[1].weight.grad[0, 0] = np.nan
        with pytest.raises(ValueError, match=r"1\.weight has NaN"):
            log.step()
        assert equal(before, [one.detach() for one in net.parameters()])
        for one in net.parameters():
            one.grad = torch.full_like(one, 3e38)  # finite, although its norm is not
        log.step()


def test_a_replica_and_persist_refuse_a_gpu(tmp_path: Path) -> None:
    net = nn.Linear(3, 2).cuda()
    optimizer = OPTIM.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store:
        with pytest.raises(ValueError, match="weight is on cuda:0.*mode='dense'"):
            GradLog(net, optimizer, store, "replica")
        with pytest.raises(ValueError, match="cuda:0.*module.cpu"):
            pmstore.torch.persist(net, optimizer, store)
        store["w"] = net.weight
        assert equal(pmstore.torch.tensor(store, "w"), net.weight.detach().cpu())
        store.group("best").update(net.state_dict())
        assert equal(dict(pmstore.torch.state_dict(store.group("best"))), dict(net.cpu().state_dict()))


@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_a_training_goes_on_elsewhere_and_says_so(there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log does not depend on the device. Bits do."""
    here = "cuda" if there == "cpu" else "cpu"
    options = {"batch": 3, "full_every": 6}
    seen: list[Any] = []

    def remember(log: GradLog, net: nn.Module) -> None:
        seen.append([one.detach().cpu().clone() for one in net.parameters()])

    with pytest.raises(Killed), pmstore.open(tmp_path / "moved.pm") as store:
        train(store, ADAM, ITERATIONS, stop=10, device=here, reached=remember, **options)
    before = seen[9]
    seen.clear()
    with pmstore.open(tmp_path / "moved.pm") as store, caplog.at_level(logging.WARNING, "pmstore"):
        train(store, ADAM, ITERATIONS, device=there, reached=remember, **options)
    assert len(seen) == ITERATIONS - 9 + 1
    assert all(map(torch.allclose, before, seen[0]))
    names = {"cpu": "cpu", "cuda": torch.cuda.get_device_name()}
    assert f"device: {names[here]} ≠ {names[there]}" in caplog.text


def test_a_killed_training_on_a_gpu_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole.pm", -1, "dense", device="cuda")
    assert whole
    draws = random.Random(3)
    ended, durable = "", 0
    for _ in range(3):
        ended, durable = trained(tmp_path / "killed.pm", draws.randrange(4, 20), "dense", durable, "cuda")
        assert not ended
    assert trained(tmp_path / "killed.pm", -1, "dense", durable, "cuda")[0] == whole
