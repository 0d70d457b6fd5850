"""Settings: whole numbers in the groups of an optimizer, which a log keeps as float64, and those of the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
from pmstore.torch import GradLog
from tests.torch.test_gradlog import backward, linear


@pytest.mark.parametrize("mode", ["dense", "topk", "replica"])
@pytest.mark.parametrize("value", [2**53 + 1, -(2**60) - 1, 10**400, torch.tensor(2**60 + 1), (1, 2**60 + 1)], ids=str)
def test_whole_numbers_that_would_be_rounded_are_refused(mode: str, value: Any, tmp_path: Path) -> None:
    net, optimizer = linear()
    optimizer.param_groups[0]["seed"] = value
    with pmstore.open(tmp_path / "log.pm") as store, pytest.raises(TypeError, match="'seed' .*group 0 .*2\\*\\*53"):
        GradLog(net, optimizer, store, mode)


@pytest.mark.parametrize("value", [2**53, -(2**53), torch.tensor(2**53)], ids=str)
def test_other_whole_numbers_come_back(value: Any, tmp_path: Path) -> None:
    for _ in range(2):
        net, optimizer = linear()
        optimizer.param_groups[0]["seed"] = value
        with pmstore.open(tmp_path / "log.pm") as store, GradLog(net, optimizer, store) as log:
            log.resume()
            assert optimizer.param_groups[0]["seed"] == value
            backward(net)
            log.step()


def test_a_resume_that_computes_denormals_otherwise_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The replay runs before the program's set_flush_denormal."""

    def trained(until: int) -> None:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with pmstore.open(tmp_path / "s.pm") as store, GradLog(net, optimizer, store) as log:
            log.resume()
            assert torch.set_flush_denormal(True)
            try:
                for _ in range(log.iteration, until):
                    optimizer.zero_grad()
                    net(torch.ones(3, 2)).sum().backward()
                    log.step()
                log.flush()
            finally:
                torch.set_flush_denormal(False)

    trained(2)
    assert not caplog.text
    trained(4)
    assert "may end with other bits; stored ≠ now: flushes denormals" in caplog.text
