"""Tensors in the state and in the fingerprint of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pmstore


class Walk(pmstore.Resumable):
    max_iter = 2

    def __init__(self, about: Any = None, made: Any = np.ones) -> None:
        self.about, self.made = about, made

    def fields(self) -> list[pmstore.Field]:
        return [pmstore.Field("x", dtype=object), pmstore.Field("y", 3)]

    def fingerprint(self) -> dict[str, Any]:
        return {"about": self.about}

    def start(self) -> None:
        self.state.x = self.made(3)

    def step(self) -> None:
        self.state.y += torch.from_numpy(self.state.x).std().item() + 1


@pytest.mark.parametrize("stored", [True, False])
def test_a_field_is_no_tensor(stored: bool, tmp_path: Path) -> None:
    """A resumed fit would get an array, whose std() is another number."""
    store = tmp_path / "s.pm" if stored else None
    with pytest.raises(TypeError, match=r"'x' can't be a tensor: .* use torch.from_numpy\(self.state.x\)"):
        Walk(made=torch.ones).run(store)
    assert Walk().run(store).y.tolist() == [2, 2, 2]


def test_tensors_in_a_fingerprint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    for name, one in (
        ("parameter", module.weight),
        ("bfloat16", torch.ones(3, dtype=torch.bfloat16)),
        ("module", module),
        ("inside", {"w": [module.weight]}),
        ("conjugate", torch.ones(2, dtype=torch.complex64).conj()),
    ):
        assert Walk(one).run(tmp_path / "s.pm", name).iteration == 2
    for name, other in (
        ("parameter", module.weight + 1),
        ("bfloat16", torch.zeros(3, dtype=torch.bfloat16)),
        ("module", torch.nn.Linear(3, 2)),
        ("inside", {"w": [module.weight + 1]}),
    ):
        with pytest.raises(pmstore.FingerprintMismatchError):
            Walk(other).run(tmp_path / "s.pm", name)


def test_a_tensor_is_no_array_in_a_fingerprint(tmp_path: Path) -> None:
    """The same program may get another result from it: std() has another default."""
    Walk(np.ones(3)).run(tmp_path / "s.pm", "f")
    with pytest.raises(pmstore.FingerprintMismatchError, match="Tensor"):
        Walk(torch.ones(3, dtype=torch.float64)).run(tmp_path / "s.pm", "f")
