"""The compression of gradients keeps the largest elements, and loses none of the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pmstore.torch import _topk
from pmstore.torch._layout import Layout
from pmstore.torch._topk import Compression

SHAPES = [(0,), (), (1,), (7,), (3, 5), (40, 30), (100, 120)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@st.composite
def parameters(draw: Any) -> tuple[list[nn.Parameter], float, int]:
    """Some parameters, which may be transposed, the ratio, and a seed."""
    drawn = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans()), min_size=1))
    made = [torch.zeros(shape, dtype=dtype) for shape, dtype, _ in drawn]
    made = [one.T if turned and one.dim() == 2 else one for one, (*_, turned) in zip(made, drawn)]
    return [nn.Parameter(one) for one in made], draw(st.sampled_from([0.01, 0.2, 1.0])), draw(st.integers(0, 2**31))


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@given(parameters())
def test_the_largest_are_kept_and_the_others_come_later(
    as_on_a_gpu: bool, drawn: tuple[list[nn.Parameter], float, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_topk, "in_one_launch", lambda device: as_on_a_gpu)
        check_compression(*drawn)


def check_compression(them: list[nn.Parameter], ratio: float, seed: int) -> None:
    """Compress gradients six times, those of every other parameter in the second and in the fifth time."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(them, [], ratio)
    compression, rows = Compression(layout), layout.empty(1)
    owed = [torch.zeros_like(one, requires_grad=False) for one in them]
    for turn in range(6):
        for number, one in enumerate(them):
            there = turn % 3 != 1 or number % 2
            one.grad = torch.randn(one.shape, generator=generator).to(one) if there else None
            owed[number] += one.grad if there else 0
        compression.compress(rows, 0)
        layout.arrived()
        for number, one in enumerate(them):
            if one.grad is None:
                continue
            before = owed[number].clone()
            owed[number] -= one.grad
            kept, chosen = (part.to(one.device) for part in rows.kept(0, number))
            flat = before.as_strided((one.numel(),), (1,))
            assert torch.equal(flat[chosen.long()], kept)
            assert torch.equal(before[one.grad != 0], one.grad[one.grad != 0])
            sizes = flat.abs().sort(descending=True).values[: len(kept)]
            assert torch.equal(kept.abs().sort(descending=True).values.float(), sizes.float())
    assert all(map(torch.equal, owed, compression.residuals))


def test_without_a_graph_the_operations_go_on_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA may refuse to capture a graph at any moment. Nothing was executed then."""

    def refuse(self: _topk.Step) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(_topk.Step, "_capture", refuse)
    monkeypatch.setattr(_topk, "_SINGLE", 2)
    made = _topk.Step.__init__

    def on_a_gpu(self: _topk.Step, *args: Any) -> None:
        made(self, *args)
        self._device = torch.device("cuda")

    monkeypatch.setattr(_topk.Step, "__init__", on_a_gpu)
    with caplog.at_level(logging.INFO, "pmstore"):
        check_compression([nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(7))], 0.2, 1)
    assert caplog.text.count("no CUDA graph") == 2  # one for each combination of gradients
