"""Top-k with gradients whose elements share memory, as `expand` makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pmstore
from pmstore.torch import GradLog
from tests.torch.test_gradlog import linear

OVERLAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda one: torch.full((1,), 0.5).expand(one.shape),
    "rows": lambda one: torch.arange(1.0, 1 + one.shape[-1]).expand(one.shape),
    "windows": lambda one: torch.arange(1.0, 9.0).as_strided(one.shape, (1,) * one.dim()),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_gradients_that_share_memory_are_compressed_as_their_copies(kind: str, tmp_path: Path) -> None:
    found = []
    for name, make in {"overlapping": OVERLAPS[kind], "copies": lambda one: OVERLAPS[kind](one).clone()}.items():
        net, optimizer = linear()
        with (
            pmstore.open(tmp_path / f"{name}.pm") as store,
            GradLog(net, optimizer, store, "topk", ratio=0.4, batch=2) as log,
        ):
            log.resume()
            for _ in range(3):
                for parameter in net.parameters():
                    parameter.grad = make(parameter)
                log.step()
            assert log.iteration == 3
        found.append([one.detach().clone() for one in net.parameters()])
        again, optimizer = linear()
        with (
            pmstore.open(tmp_path / f"{name}.pm") as store,
            GradLog(again, optimizer, store, "topk", ratio=0.4, batch=2) as log,
        ):
            assert log.resume() == 3
        assert all(map(torch.equal, found[-1], again.parameters()))
    assert all(map(torch.equal, *found))
