"""Tensors over stores that torch.multiprocessing sends to other processes: through queues, or to spawned workers.

torch does not send the elements of a tensor in main memory. It moves its storage, in place, into memory that both
processes share. A tensor over a store would leave the store without a word, and what changes it later would not be
stored. Therefore a storage that lies in a store is sent as a copy of its bytes. So are read-only tensors: a clone of
one would lie in shared memory, and nothing would keep that until a spawned process has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
import torch.multiprocessing.reductions as reductions

from pmstore._store import store as stores  # whose set of open ones is another object after a fork
from pmstore._values.array import Array
from pmstore._values.tensors import array_of_tensor
from pmstore.torch._tensors import ReadOnlyTensor, tensor_of

__all__ = ["members", "register"]

T = TypeVar("T")


def register() -> None:
    """Let the pickler of multiprocessing copy tensors over stores."""
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    ForkingPickler.register(ReadOnlyTensor, _reduce_read_only)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if not _is_stored(storage):
        return reductions.reduce_storage(storage)
    return _storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _storage(contents: Array) -> torch.UntypedStorage:
    return torch.from_numpy(contents).untyped_storage()


def _is_stored(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is memory of a store that this process writes. A forked one may move it: it only reads."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return False
    memory = storage.data_ptr(), storage.nbytes()
    return any(store._holds(memory) for store in members(stores.open_stores))


def members(all_of_them: Iterable[T]) -> list[T]:
    """The members of a set that other threads change."""
    while True:
        try:
            return list(all_of_them)
        except RuntimeError:  # another thread has changed it meanwhile
            continue


def _reduce_read_only(tensor: ReadOnlyTensor) -> Any:
    return _copied, (array_of_tensor(tensor.clone()), tensor.requires_grad, getattr(tensor, "_is_param", False))


def _copied(array: Array, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    copy = tensor_of(array)
    return torch.nn.Parameter(copy, requires_grad) if is_parameter else copy.requires_grad_(requires_grad)
