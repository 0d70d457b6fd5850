"""Tensors in stores."""

from __future__ import annotations

import pytest
import torch

import pmstore
import pmstore.torch

NUMBERS = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_dtype_comes_back(store: pmstore.Store, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 1]]).to(dtype)
    store["w"] = tensor
    store.commit()
    found = pmstore.torch.tensor(store, "w")
    assert found.dtype is dtype and found.shape == (2, 3) and bits(found) == bits(tensor)
    assert found.data_ptr() == store["w"].ctypes.data
