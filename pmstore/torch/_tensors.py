"""Tensors over the memory of a store, and tensors that can't be written to.

`ReadOnlyTensor` stands for the contents of a snapshot, and for arrays with writeable=False, which are mapped from the
file without the permission to write. torch knows no such tensors: it would write to the snapshot's copy, or end with a
signal. So each operation of torch on a `ReadOnlyTensor` is looked at first, below autograd, where the schema of an
operation says what it writes to.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from pmstore._errors import ReadOnlyStoreError
from pmstore._store.mapping import NameMapping
from pmstore._values.array import Array
from pmstore._values.tensors import array_of_tensor, named

__all__ = ["ReadOnlyTensor", "state_dict", "tensor", "tensor_of"]

_SAME_SIZE = {1: "u1", 2: "i2", 4: "i4"}
_WRITES = (
    "would write to a tensor of a store that is open for reading only, or of an array with writeable=False; "
    "tensor.clone() can be written"
)


class ReadOnlyTensor(torch.Tensor):
    """A tensor that can't be written to: the contents of a store that was opened with "r", or of an array with
    writeable=False.

    Slices, transposes and other views of it are read-only, too. Results that torch computes from it are ordinary
    tensors. Operations that write to it raise ReadOnlyStoreError, and `clone` gives a tensor that can be written.
    `numpy` gives an array that can't be written. A pickle and a copy hold the elements, as ordinary tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written, view, switch = _effects(func)
        if written and (switch is None or _value(switch, args, kwargs)):
            _refuse_writing(func, written, args, kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        return _guarded(result) if view else result

    def apply_(self, callable: Any) -> torch.Tensor:
        """Raises ReadOnlyStoreError. torch calls the function without looking at what the tensor is."""
        raise ReadOnlyStoreError(f"apply_ {_WRITES}")

    def map_(self, tensor: torch.Tensor, callable: Any) -> torch.Tensor:
        """Raises ReadOnlyStoreError, as `apply_`."""
        raise ReadOnlyStoreError(f"map_ {_WRITES}")

    def map2_(self, x: torch.Tensor, y: torch.Tensor, callable: Any) -> torch.Tensor:
        """Raises ReadOnlyStoreError, as `apply_`."""
        raise ReadOnlyStoreError(f"map2_ {_WRITES}")

    def numpy(self, *, force: bool = False) -> Array:
        """The elements as an array that can't be written, without a copy."""
        contents: Any = array_of_tensor(_plain(self))
        return np.asarray(memoryview(contents).toreadonly())  # whose flag nobody can set

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def __dlpack__(self, *arguments: Any, **options: Any) -> Any:
        """Raises BufferError, because the consumer of the capsule could write to the tensor."""
        raise BufferError("a tensor that can't be written is not shared by DLPack: share tensor.clone()")

    def tolist(self) -> Any:
        """The elements as numbers in lists."""
        return _plain(self).tolist()

    def __format__(self, format_spec: str) -> str:
        return format(_plain(self), format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ReadOnlyTensor{repr(_plain(self)).removeprefix('tensor')}"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor with the same elements."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor with the same elements."""
        return self.clone().__reduce_ex__(protocol)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as an ordinary tensor."""
    with torch._C._DisableTorchDispatch():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


def _guarded(result: Any) -> Any:
    """A tensor, or several, that can't be written."""
    if type(result) is torch.Tensor:
        return torch.Tensor._make_subclass(ReadOnlyTensor, result)
    return type(result)(map(_guarded, result)) if type(result) in (list, tuple) else result


def _refuse_writing(
    func: Any, written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for argument in written:
        if any(isinstance(one, ReadOnlyTensor) for one in tree_leaves(_value(argument, args, kwargs))):
            raise ReadOnlyStoreError(f"{func} {_WRITES}")


def _value(argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    number, name = argument
    return kwargs.get(name, args[number] if number < len(args) else None)


@functools.cache
def _effects(func: Any) -> tuple[tuple[tuple[int, str], ...], bool, tuple[int, str] | None]:
    """Number and name of the arguments that an operation writes to, whether its results may share memory with
    arguments, and the argument that says whether it writes at all, if there is one.

    A batch normalization writes to its running statistics while it trains, and its schema does not say so. Neither do
    those of collectives, which write to their first argument if their name ends in "_".
    """
    schema = func._schema
    places = {argument.name: (number, argument.name) for number, argument in enumerate(schema.arguments)}
    switch = next((places[name] for name in ("training", "train", "use_input_stats") if name in places), None)
    statistics = tuple(places[name] for name in ("running_mean", "running_var") if name in places)
    written = tuple(
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if func.namespace == "c10d" and schema.name.endswith("_") and schema.arguments:
        written = ((0, schema.arguments[0].name),)
    hidden = "unsafe_split" in schema.name or "unsafe_view" in schema.name  # they share memory, and do not say so
    view = hidden or any(result.alias_info is not None for result in schema.returns)
    return (statistics, view, switch) if statistics and switch and not written else (written, view, None)


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor over the memory of an array, with the dtype that the array stands for; a `ReadOnlyTensor` if the array
    can't be written. Raises TypeError if torch has no such tensors."""
    bits, dtype = array, None
    name = named(array.dtype)
    if name:
        dtype = getattr(torch, name, None)
        if dtype is None:
            raise TypeError(f"this version of torch has no {name}")
        bits = array.view(_SAME_SIZE[array.dtype.itemsize])
    try:
        made = torch.from_numpy(bits) if array.flags.writeable else _guarded(_without_warning(bits))
    except (TypeError, ValueError) as error:
        raise TypeError(f"torch has no tensors like an array of dtype {array.dtype}: {error}") from error
    return made if dtype is None else made.view(dtype)


def _without_warning(array: Array) -> torch.Tensor:
    """torch warns of arrays that can't be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def tensor(mapping: NameMapping, name: str) -> torch.Tensor:
    """A tensor over the memory of an array of a store. An operation that changes it in place changes the store, and the
    next commit makes the change durable.

    Nothing is copied. The address stays valid while the store grows. After `Store.close`, or after the array was
    replaced, deleted or rolled back to nothing, the tensor keeps its memory, but its changes are not stored.

    Parameters
    ----------
    mapping : Store or Group
    name : str
        The name of an array.

    Returns
    -------
    torch.Tensor
        On the CPU, without gradient. Arrays that were stored from tensors come back with the dtype, bfloat16 and 8-bit
        floats included. If the store is open for reading, or the array has writeable=False, a `ReadOnlyTensor`.

    Raises
    ------
    TypeError
        The value is not an array, or torch has no such dtype.
    UnknownNameError, CorruptStoreError, StaleSnapshotError, ClosedStoreError
    """
    value = mapping[name]
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name!r} is not an array but a {type(value).__name__}: mapping[name] has it")
    return tensor_of(value)


def state_dict(mapping: NameMapping) -> dict[str, Any]:
    """All values of a group, with arrays as tensors, for ``module.load_state_dict``.

    ``store.group("best").update(module.state_dict())`` stores such a dict, and
    ``module.load_state_dict(pmstore.torch.state_dict(store.group("best")))`` reads it. Nothing is copied: the tensors
    are those of `tensor`, and a `PersistentList` stays one.

    Parameters
    ----------
    mapping : Group or Store

    Returns
    -------
    dict
        By name in the group. A plain dict, which is empty if there is no such group.
    """
    found = {name: mapping[name] for name in mapping}
    return {name: tensor_of(value) if isinstance(value, np.ndarray) else value for name, value in found.items()}
