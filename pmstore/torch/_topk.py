"""Top-k compression of gradients with error feedback: elements that are left out are added to the next gradient.

The optimizer gets the kept elements only, so that the log, which holds no others, leads to the same parameters. This
changes training, as it does where gradients are compressed for communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pmstore.torch._layout import Layout, Rows, index_dtype

__all__ = ["Compression"]

_SAMPLED = 64  # one of so many elements is looked at to guess the threshold
_SAFE = 1.3  # more candidates than are kept, so that the guess is seldom too high
_SMALL = 8192  # elements; below, all are candidates
_SORTED = 1 << 17  # elements; a GPU sorts all parameters with no more of them together, as each launch costs


class Compression:
    """The residuals: the sums of the elements that were left out of the gradients of some parameters so far.

    Parameters
    ----------
    layout : Layout
        That of the rows, which says how many elements are kept.

    Attributes
    ----------
    residuals : list of torch.Tensor
        For each parameter what was not given to the optimizer yet.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        alike: dict[Any, list[int]] = {}
        for number, one in enumerate(layout.parameters):
            alike.setdefault((one.device, one.dtype, index_dtype(one.numel())), []).append(number)
        self._pools = [Pool(layout, numbers) for numbers in alike.values()]
        flat = {number: one for pool in self._pools for number, one in zip(pool.numbers, pool.parts)}
        self.residuals = [
            flat[number].as_strided(one.shape, layout.strides[number]) for number, one in enumerate(layout.parameters)
        ]

    def resolve(self) -> None:
        """Let no gradient be a conjugated or negated view, as autograd may leave it: `compress` writes to them."""
        for one in self._layout.parameters:
            if one.grad is not None and (one.grad.is_conj() or one.grad.is_neg()):
                one.grad = one.grad.resolve_conj().resolve_neg()

    def compress(self, rows: Rows, row: int) -> None:
        """Write the kept elements of the parameters' gradients into a row, and leave only them in the gradients."""
        for pool in self._pools:
            found = {
                number: one for number in pool.numbers if (one := self._layout.parameters[number].grad) is not None
            }
            if found:
                torch._foreach_add_([self.residuals[number] for number in found], list(found.values()))
                chosen, kept = pool.take(list(found))
                values, indices = zip(*(rows.kept(row, number) for number in found))
                counts = list(map(len, values))
                torch._foreach_copy_(values, kept.split(counts), non_blocking=True)  # until `Layout.arrived`
                torch._foreach_copy_(indices, chosen.to(indices[0].dtype).split(counts), non_blocking=True)
                torch._foreach_zero_(list(found.values()))
                for number, *sparse in zip(found, found.values(), chosen.split(counts), kept.split(counts)):
                    self._put(number, *sparse)

    def replay(self, number: int, gradient: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Turn a gradient into the result of `compress`. The residuals of these elements are 0."""
        self._put(number, gradient.zero_(), chosen, kept)
        in_memory_order(self.residuals[number])[chosen] = 0

    def _put(self, number: int, gradient: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Put the kept elements into a gradient of zeros; chosen: their indices in the memory order of the residual."""
        residual = self.residuals[number]
        if gradient.stride() == residual.stride():
            in_memory_order(gradient).scatter_(0, chosen, kept)
        else:
            sparse = torch.zeros_like(residual)
            in_memory_order(sparse).scatter_(0, chosen, kept)
            gradient.copy_(sparse)


class Pool:
    """The residuals of parameters on one device and of one dtype, in one tensor, each in the order of its memory.

    Attributes
    ----------
    numbers : list of int
        The parameters.
    parts : list of torch.Tensor
        The residual of each.
    """

    def __init__(self, layout: Layout, numbers: Sequence[int]) -> None:
        first = layout.parameters[numbers[0]]
        sizes = {number: layout.parameters[number].numel() for number in numbers}
        together = [number for number in numbers if in_one_launch(first.device) and sizes[number] <= _SORTED]
        self.numbers = [*together, *(number for number in numbers if number not in together)]
        self._flat = torch.zeros(sum(sizes.values()), dtype=first.dtype, device=first.device)
        self.parts = list(self._flat.split([sizes[number] for number in self.numbers]))
        self._part = dict(zip(self.numbers, self.parts))
        self._count = {number: layout.parts[number].kept for number in numbers}
        starts = {number: part.storage_offset() for number, part in self._part.items()}
        self._start = {
            number: torch.full((count,), starts[number], device=first.device) for number, count in self._count.items()
        }
        self._together = together
        if together:
            places = torch.arange(1, len(together) + 1, device=first.device) << 32
            self._keys = places.repeat_interleave(torch.tensor([sizes[number] for number in together]).to(first.device))
            picked = [torch.arange(self._count[number]) + starts[number] for number in together]
            self._picked = torch.cat(picked).to(first.device)
            self._begins = torch.cat([self._start[number] for number in together])

    def take(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the largest elements of the residuals of these parameters, which become 0.

        Returns their indices (int64) in the memory of each, and their values, parameter by parameter. Which of equal
        elements is taken is not defined.
        """
        found = self._largest_together()
        found |= {one: largest(self._part[one], self._count[one]) for one in numbers if one not in found}
        chosen = torch.cat([found[one] for one in numbers])
        there = chosen + torch.cat([self._start[one] for one in numbers])
        kept = self._flat[there]
        self._flat.index_fill_(0, there, 0)
        return chosen, kept

    def _largest_together(self) -> dict[int, torch.Tensor]:
        """The indices of the largest elements of each small parameter: by one sort, on a GPU."""
        if not self._together:
            return {}
        size = self._flat[: len(self._keys)].abs().float().view(torch.int32)  # as integers they have the same order
        order = torch.sort(self._keys - size).indices[self._picked] - self._begins
        return dict(zip(self._together, order.split([self._count[one] for one in self._together])))


def in_one_launch(device: torch.device) -> bool:
    """Whether the number of operations costs more than their size."""
    return device.type == "cuda"


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor without gaps, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The indices (int64) of the elements with the largest magnitude; which of equal ones is chosen is not defined."""
    size = flat.abs()
    if count >= len(flat):
        return torch.arange(len(flat), device=flat.device)
    if len(flat) > _SMALL and not in_one_launch(flat.device):  # a GPU would be waited for
        sample = size[::_SAMPLED]
        place = int(len(sample) * (1 - _SAFE * count / len(flat)))
        threshold = sample.kthvalue(max(1, place)).values
        over = size.float().numpy() > float(threshold)  # torch takes some six times as long for this
        candidates = torch.from_numpy(np.flatnonzero(over))
        if len(candidates) >= count:
            return candidates[_topk(size[candidates], count)]
    return _topk(size, count)


def _topk(size: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(size, count, sorted=False).indices
