"""Tensors over one memory, such as two parameters after ``decoder.weight.data = encoder.weight.data``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pmstore._values.array import Array
from pmstore._values.tensors import array_of_tensor

__all__ = ["firsts"]


def firsts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first name of a tensor over the same memory, for each name: with its elements, in its order, of its dtype.

    The tensors are in main memory. Raises ValueError if two of them share only a part of their memory.
    """
    found: dict[Any, str] = {}
    first = {name: found.setdefault(_identity(tensor), name) for name, tensor in tensors.items()}
    _refuse_overlaps({name: tensors[name] for name in found.values()})
    return first


def _identity(tensor: torch.Tensor) -> Any:
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    open_spans: list[tuple[int, str, Array]] = []  # each with its end
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].data_ptr()):
        if not tensor.numel():
            continue
        start, array = tensor.data_ptr(), array_of_tensor(tensor)
        open_spans = [span for span in open_spans if span[0] > start]
        for _, other, theirs in open_spans:
            if np.shares_memory(theirs, array):
                raise ValueError(
                    f"{name!r} shares a part of its memory with {other!r}: give one of them a clone() of its own"
                )
        span = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride())) + 1
        open_spans.append((start + span * tensor.element_size(), name, array))
