"""The compression of gradients keeps the largest elements, and loses none of the others."""

from __future__ import annotations

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
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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
    them, ratio, seed = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_topk, "in_one_launch", lambda device: as_on_a_gpu)
        generator = torch.Generator().manual_seed(seed)
        layout = Layout(them, [], ratio)
        compression, rows = Compression(layout), layout.empty(1)
        owed = [torch.zeros_like(one, requires_grad=False) for one in them]
        for turn in range(3):
            for number, one in enumerate(them):
                there = turn != 1 or number % 2
                one.grad = torch.randn(one.shape, generator=generator).to(one.dtype) if there else None
                owed[number] += one.grad if there else 0
            compression.compress(rows, 0)
            for number, one in enumerate(them):
                if one.grad is None:
                    continue
                before = owed[number].clone()
                owed[number] -= one.grad
                kept, chosen = rows.kept(0, number)
                flat = before.as_strided((one.numel(),), (1,))
                assert torch.equal(flat[chosen.long()], kept)
                assert torch.equal(before[one.grad != 0], one.grad[one.grad != 0])
                sizes = flat.abs().sort(descending=True).values[: len(kept)]
                assert torch.equal(kept.abs().sort(descending=True).values.float(), sizes.float())
        assert all(map(torch.equal, owed, compression.residuals))
