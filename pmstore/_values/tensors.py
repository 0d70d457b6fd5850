"""Tensors of torch as arrays. torch is never imported here: a caller that has a tensor has imported torch.

numpy has no bfloat16 and no 8-bit floats. Such a tensor is an array of a structured dtype with one field, whose name is
that of torch's dtype and whose elements are the bits: ``np.dtype([("bfloat16", "<u2")])``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pmstore._values.array import Array

__all__ = ["BITS", "array_of_tensor", "is_tensor", "named"]

BITS = {
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",
}
"""torch's dtypes that numpy lacks, and the integers that hold their bits."""

_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32"}  # torch's integers, to look at the bits


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    torch: Any = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)  # torch may be in the middle of its import
    return kind is not None and isinstance(value, kind)


def named(dtype: np.dtype[Any]) -> str:
    """The name of the dtype of torch that a dtype of an array stands for; "" for dtypes that numpy has."""
    if dtype.names is None or len(dtype.names) != 1:
        return ""
    name, field = dtype.names[0], dtype[0]
    return name if field.str == BITS.get(name) and field.itemsize == dtype.itemsize else ""


def array_of_tensor(tensor: Any) -> Array:
    """The elements of a tensor as an array, without a copy if they are in this machine's main memory as they stand.

    The array can be written, and then the tensor changes. Raises TypeError with a hint for tensors that aren't plain
    elements in memory.
    """
    torch: Any = sys.modules["torch"]
    _refuse(tensor, torch)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in BITS:
        array: Array = tensor.view(getattr(torch, _SAME_SIZE[tensor.dtype.itemsize])).numpy()
        return array.view([(name, BITS[name])])
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"a store can't keep a tensor of the dtype {tensor.dtype}: {error}") from error
    return array


def _refuse(tensor: Any, torch: Any) -> None:
    text = "a store can't keep a"
    if tensor.is_nested:
        raise TypeError(f"{text} nested tensor: store the tensors of tensor.unbind(), or tensor.to_padded_tensor(…)")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{text} tensor of the layout {tensor.layout}: store tensor.to_dense(), or the tensors that it is made of, "
            "as of tensor.coalesce(): indices(), values() and its shape"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{text} quantized tensor: store tensor.int_repr() with its scale and zero point, or tensor.dequantize()"
        )
    if tensor.device.type == "meta":
        raise TypeError(f"{text} tensor of the device meta, which has no elements")
