"""Top-k compression of gradients with error feedback: elements that are left out are added to the next gradient.

The optimizer gets the kept elements only, so that the log, which holds no others, leads to the same parameters. This
changes training, as it does where gradients are compressed for communication.
"""

from __future__ import annotations

import torch

from pmstore.torch._layout import Layout, Rows

__all__ = ["Compression"]

_SAMPLED = 64  # one of so many elements is looked at to guess the threshold
_SAFE = 1.3  # more candidates than are kept, so that the guess is seldom too high
_SMALL = 8192  # elements; below, all are candidates


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
        self.residuals = [
            torch.zeros_like(one, memory_format=torch.preserve_format, requires_grad=False) for one in layout.parameters
        ]

    def compress(self, rows: Rows, row: int) -> None:
        """Write the kept elements of the parameters' gradients into a row, and leave only them in the gradients."""
        for number, parameter in enumerate(self._layout.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            residual = self.residuals[number].add_(gradient)
            flat = in_memory_order(residual)
            chosen = largest(flat, self._layout.parts[number].kept)
            values, indices = rows.kept(row, number)
            kept = flat[chosen]
            values.copy_(kept)
            indices.copy_(chosen)
            flat[chosen] = 0
            self._put(number, gradient, chosen, kept)

    def replay(self, number: int, gradient: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Turn a gradient into the result of `compress`. The residuals of these elements are 0."""
        self._put(number, gradient, chosen, kept)
        in_memory_order(self.residuals[number])[chosen] = 0

    def _put(self, number: int, gradient: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Make a gradient zero but for the kept elements; chosen: their indices in the memory order of the residual."""
        residual = self.residuals[number]
        if gradient.stride() == residual.stride():
            in_memory_order(gradient.zero_())[chosen] = kept
        else:
            sparse = torch.zeros_like(residual)
            in_memory_order(sparse)[chosen] = kept
            gradient.copy_(sparse)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor without gaps, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The indices (int64) of the elements with the largest magnitude; which of equal ones is chosen is not defined."""
    size = flat.abs()
    if count >= len(flat):
        return torch.arange(len(flat), device=flat.device)
    if len(flat) > _SMALL:
        sample = size[::_SAMPLED]
        place = int(len(sample) * (1 - _SAFE * count / len(flat)))
        threshold = sample.kthvalue(max(1, place)).values
        candidates = torch.nonzero(size > threshold).squeeze(1)
        if len(candidates) >= count:
            return candidates[_topk(size[candidates], count)]
    return _topk(size, count)


def _topk(size: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(size, count, sorted=False).indices
