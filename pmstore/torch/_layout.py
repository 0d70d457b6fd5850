"""The row of bytes that a gradient log has for one iteration, and the places of the iteration's parts in it.

A row has four parts::

    stepped      int64         0: the optimizer was not stepped (a gradient scaler found an infinity)
    present      uint8 each    for each parameter whether it had a gradient
    settings     float64 each  the numbers in the optimizer's groups: learning rates, betas, weight decay, …
    gradients    all of them ("dense"), or the kept values and their indices ("topk"), parameter by parameter

A gradient has the strides of its parameter, so that replay runs the same loops over the same memory order. If the
parameter's memory has gaps, the gradient has the strides that torch gives it, which has none.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pmstore._errors import ReadOnlyStoreError

__all__ = ["Layout", "Rows", "Setting", "give", "numbers_of", "order_of", "set_numbers", "settings_of"]

Gradients = list[tuple[int, torch.Tensor]]  # with the numbers of their parameters

_ALIGNED = 16  # bytes; no dtype has larger elements
_MOST_INT32 = 2**31 - 1
_MOST_EXACT = 2**53  # a float64 has each whole number up to this one


class Setting(NamedTuple):
    """One number of an optimizer's group. place: its index in a tuple or list, or -1. kind: "number", "bool" or
    "tensor"."""

    group: int
    key: str
    place: int
    kind: str


def settings_of(optimizer: torch.optim.Optimizer) -> list[Setting]:
    """The numbers in the optimizer's groups, in a fixed order. Raises TypeError for numbers that a row can't have."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group):
            value = group[key]
            if key == "params":
                continue
            for place, one in enumerate(value) if isinstance(value, (tuple, list)) else [(-1, value)]:
                is_tensor = isinstance(one, torch.Tensor) and one.numel() == 1
                # A tensor of another kind has no whole number, and may be on a GPU, which `item` waits for.
                whole = one.item() if is_tensor and not one.is_floating_point() else one
                if isinstance(whole, int) and abs(whole) > _MOST_EXACT:
                    raise TypeError(
                        f"the setting {key!r} of the optimizer's group {number} is {whole}, and a log keeps whole "
                        "numbers up to 2**53: keep larger ones elsewhere, or as text"
                    )
                if is_tensor:
                    found.append(Setting(number, key, place, "tensor"))
                elif isinstance(one, (bool, int, float)):
                    found.append(Setting(number, key, place, "bool" if isinstance(one, bool) else "number"))
                elif isinstance(one, (numbers.Number, np.bool_, np.ndarray)):
                    raise TypeError(
                        f"the setting {key!r} of the optimizer's group {number} is a {type(one).__name__}, and a log "
                        "keeps bool, int, float, and tensors of one element: set it to float(value) each time"
                    )
    return found


def numbers_of(optimizer: torch.optim.Optimizer, settings: Sequence[Setting]) -> list[float]:
    """The values of the settings."""
    groups = optimizer.param_groups
    values = ((groups[one.group][one.key], one.place) for one in settings)
    return [float(value if place < 0 else value[place]) for value, place in values]


def set_numbers(optimizer: torch.optim.Optimizer, settings: Sequence[Setting], values: Sequence[float]) -> None:
    """Give the settings these values."""
    for one, number in zip(settings, values, strict=True):
        group = optimizer.param_groups[one.group]
        old = group[one.key] if one.place < 0 else group[one.key][one.place]
        # A number that is 0 or 1 when the log is made may be a fraction later.
        new = bool(number) if one.kind == "bool" else int(number) if type(old) is int and number % 1 == 0 else number
        if one.kind == "tensor":
            old.fill_(number)
        elif one.place < 0:
            group[one.key] = new
        else:
            several = list(group[one.key])
            several[one.place] = new
            group[one.key] = type(group[one.key])(several)


def give(
    optimizer: torch.optim.Optimizer,
    settings: Sequence[Setting],
    parameters: Sequence[torch.Tensor],
    rows: Rows,
    row: int,
) -> None:
    """Give an optimizer the settings of a row, and its parameters the dense gradients of the row."""
    set_numbers(optimizer, settings, rows.numbers[row].tolist())
    for number, parameter in enumerate(parameters):
        present = rows.present[row, number]
        parameter.grad = rows.gradient(row, number).to(parameter.device) if present else None


def order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of the axes along which the elements' places differ: they tell the memory order."""
    return tuple(stride for length, stride in zip(shape, strides, strict=True) if length > 1)


class Part(NamedTuple):
    """The place of a parameter's gradient in a row. kept: the number of its elements that are kept."""

    values: int
    indices: int
    kept: int


class Layout:
    """The layout of the rows for some parameters.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
    settings : sequence of Setting
    ratio : float or None
        The share of each gradient's elements that is kept, at least one; None: all ("dense").

    Attributes
    ----------
    row_bytes : int
    gpus : list of torch.device
        CUDA's devices that have parameters.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], settings: Sequence[Setting], ratio: float | None
    ) -> None:
        self.parameters, self.settings, self.ratio = list(parameters), list(settings), ratio
        self.dtypes = [one.dtype for one in self.parameters]
        self.gpus = [one for one in dict.fromkeys(one.device for one in self.parameters) if one.type == "cuda"]
        # A parameter that is a slice of a larger tensor has gaps in its memory. Gradients have none.
        self.strides = [torch.empty_like(one, device="meta").stride() for one in self.parameters]
        self._replaced: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameters, and two gradients each
        self._given = [one.stride() for one in self.parameters]
        self._present = 8
        self._numbers = _up(self._present + len(self.parameters), 8)
        at = self._numbers + 8 * len(self.settings)
        self.parts = []
        for parameter in self.parameters:
            count = parameter.numel() if ratio is None else kept(parameter.numel(), ratio)
            values = _up(at, _ALIGNED)
            indices = _up(values + count * parameter.element_size(), _ALIGNED)
            at = indices if ratio is None else indices + count * index_dtype(parameter.numel()).itemsize
            self.parts.append(Part(values, indices, count))
        self.row_bytes = _up(at, _ALIGNED)

    def is_fulfilled(self) -> bool:
        """Whether the parameters still have the memory order that rows were made for."""
        return all(one.stride() == strides for one, strides in zip(self.parameters, self._given, strict=True))

    def gradients(self) -> Gradients:
        """The gradients of parameters that have one, with the parameters' numbers."""
        return [(number, one.grad) for number, one in enumerate(self.parameters) if one.grad is not None]

    def in_order(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it lies in memory in a row. Optimizers round in another way if it doesn't lie like this, and
        a replay can only have the row."""
        shape, strides = gradient.shape, self.strides[number]
        if gradient.stride() == strides or order_of(shape, gradient.stride()) == order_of(shape, strides):
            return gradient
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    def replaced(self, found: Gradients, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Gradients:
        """Gradients after a change. The optimizer uses other tensors, until `put_back`."""
        changed = []
        for number, before in found:
            gradient = change(number, before)
            if gradient is not before:
                one = self.parameters[number]
                self._replaced.append((one, before, gradient))
                one.grad = gradient
            changed.append((number, gradient))
        return changed

    def put_back(self) -> None:
        """Let the program have its own tensors again, with the gradients that the optimizer used: it may write to them
        through other views."""
        replaced, self._replaced = self._replaced, []
        with torch.no_grad():
            for one, before, gradient in reversed(replaced):
                if one.grad is gradient:
                    # Tensors with overlaps (1), and those of a store that is only read, can't be written.
                    with contextlib.suppress(ReadOnlyStoreError):
                        if torch._debug_has_internal_overlap(before) != 1:
                            before.copy_(gradient)
                    one.grad = before

    @contextlib.contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Let no parameter have a gradient of the program. Afterwards, those that are views of other tensors, which
        the program may write to, are there again as they were. Others are left out, as they may be those of an
        iteration that is not part of the log.
        """
        views = [one.grad if one.grad is not None and one.grad._is_view() else None for one in self.parameters]
        for one in self.parameters:
            one.grad = None
        try:
            yield
        finally:
            for one, view in zip(self.parameters, views, strict=True):
                one.grad = view

    def rows(self, content: torch.Tensor) -> Rows:
        """Views of a tensor of uint8 in main memory, of shape (iterations, row_bytes)."""
        return Rows(self, content)

    def empty(self, count: int) -> Rows:
        """Rows of zeros for so many iterations, in memory that a GPU can copy to while the program goes on."""
        return Rows(self, torch.zeros((count, self.row_bytes), dtype=torch.uint8, pin_memory=bool(self.gpus)))

    def arrived(self) -> None:
        """Wait until all that was copied from GPUs into rows is there."""
        for device in self.gpus:
            torch.cuda.synchronize(device)


class Rows:
    """Views of the rows in a tensor: `Layout.rows`.

    Attributes
    ----------
    content : torch.Tensor
        uint8, of shape (iterations, row_bytes).
    array : numpy.ndarray
        The same, in numpy.
    stepped : numpy.ndarray
        int64, of shape (iterations,).
    present : numpy.ndarray
        uint8, of shape (iterations, parameters).
    numbers : numpy.ndarray
        float64, of shape (iterations, settings).
    """

    def __init__(self, layout: Layout, content: torch.Tensor) -> None:
        self.content, self.array, self._layout = content, content.numpy(), layout
        here = layout._present
        self.stepped = self.array[:, :8].view(np.int64)[:, 0]
        self.present = self.array[:, here : here + len(layout.parameters)]
        self.numbers = self.array[:, layout._numbers : layout._numbers + 8 * len(layout.settings)].view(np.float64)
        self._values = [
            content[:, part.values : part.values + part.kept * parameter.element_size()].view(parameter.dtype)
            for part, parameter in zip(layout.parts, layout.parameters, strict=True)
        ]
        self._indices = (
            [
                content[:, part.indices : part.indices + part.kept * dtype.itemsize].view(dtype)
                for part, parameter in zip(layout.parts, layout.parameters, strict=True)
                for dtype in [index_dtype(parameter.numel())]
            ]
            if layout.ratio is not None
            else []
        )

    def gradient(self, row: int, number: int) -> torch.Tensor:
        """A view of a dense gradient, with the shape and the strides of its parameter, but without gaps."""
        values = self._values[number][row]
        return values.as_strided(
            self._layout.parameters[number].shape, self._layout.strides[number], values.storage_offset()
        )

    def kept(self, row: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the kept values and of their indices in the memory order of the parameter."""
        return self._values[number][row], self._indices[number][row]


def kept(numel: int, ratio: float) -> int:
    """The number of elements that are kept of a gradient."""
    return min(numel, max(1, round(numel * ratio)))


def index_dtype(numel: int) -> torch.dtype:
    """The dtype of indices of so many elements."""
    return torch.int32 if numel <= _MOST_INT32 else torch.int64


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
