"""The full state of training, as arrays of a group: parameters, and the optimizer's state of each::

full/model/<parameter>              and below buffers/<buffer>, which every batch brings up to date
full/optimizer/<parameter>/<key>    the optimizer's tensors
full/numbers                        its other values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import torch

from pmstore._resume.fit_group import FitGroup
from pmstore._store.mapping import Group
from pmstore._values.tensors import array_of_tensor
from pmstore.torch._rest import plain, restore
from pmstore.torch._tensors import tensor_of

__all__ = [
    "BUFFERS",
    "FULL",
    "Names",
    "Tensors",
    "empty_state",
    "put",
    "put_buffers",
    "read_buffers",
    "read_full",
    "stored",
    "write_buffers",
    "write_full",
]

FULL, BUFFERS = "full", "buffers"
_ON_CPU = ("step", "mu_product")  # numbers of an optimizer's state that Python computes with


class Tensors(Protocol):
    """The tensors of a full state: those of the training itself (`Names`), or of a replica."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """All parameters, by name."""

    @property
    def stepped(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Those that the optimizer steps."""


class Names:
    """The names of a model's and an optimizer's tensors.

    Attributes
    ----------
    parameters : dict
        Each parameter of the model or the optimizer once, by its name.
    stepped : list of (str, torch.nn.Parameter)
        Those of the optimizer, in its order.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {_safe(name): one for name, one in model.named_parameters()}
        known = {id(one): name for name, one in self.parameters.items()}
        self.stepped: list[tuple[str, torch.nn.Parameter]] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, one in enumerate(group["params"]):
                name = f"group {number}, parameter {place}"
                while id(one) not in known and name in self.parameters:  # the model has one of that name
                    name += "'"
                name = known.setdefault(id(one), name)
                self.parameters[name] = one
                self.stepped.append((name, one))
        self._model = model
        for name, one in {**self.parameters, **self.buffers}.items():
            _refuse_unwritable(name, one)
        self._buffers = {name: _form(one) for name, one in self.buffers.items()}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Those that the model has now, as a program may assign one."""
        return {_safe(name): one for name, one in self._model.named_buffers()}

    @property
    def frozen(self) -> list[bool]:
        """Whether each parameter is frozen now: it has ``requires_grad=False``."""
        return [not one.requires_grad for one in self.parameters.values()]

    def check(self) -> None:
        """Raise ValueError if the model has other parameters or buffers than it had."""
        now = {_safe(name): one for name, one in self._model.named_parameters()}
        odd = [name for name, one in now.items() if self.parameters.get(name) is not one]
        forms = {name: _form(one) for name, one in self.buffers.items()}
        odd += [name for name in {**self._buffers, **forms} if self._buffers.get(name) != forms.get(name)]
        if odd:
            raise ValueError(
                f"the model's {odd[0]} is not what it was when the log was made, and would be lost: make the GradLog "
                "when the model has all parameters and buffers, with their final shapes and dtypes"
            )


def _refuse_unwritable(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError for a tensor that could be logged, and that `read_full` could not write to."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name!r} has the layout {tensor.layout}, which a log can't keep: make it {name}.to_dense(), or keep it "
            "outside of the model's parameters and buffers"
        )
    if tensor.is_inference():
        raise ValueError(f"{name!r} was made in torch.inference_mode(), and can't be written: make it {name}.clone()")
    if tensor.numel() > 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(f"elements of {name!r} overlap in memory, as after expand(): make it {name}.clone()")


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _safe(name: str) -> str:
    return quote(name, safe=" .,-_+=()[]<>:~!@#$&'*;") or "parameter"


def write_full(group: Group, names: Tensors, optimizer: torch.optim.Optimizer) -> int:
    """Write the full state, as part of the caller's transaction. Returns its size in bytes.

    What lies in the memory of the group's arrays already is not copied.
    """
    numbers: dict[str, Any] = {}
    wanted: dict[str, torch.Tensor] = {f"{FULL}/model/{name}": one for name, one in names.parameters.items()}
    for name, parameter in names.stepped:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                wanted[f"{FULL}/optimizer/{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = plain(value, f"the optimizer's {key!r} of {name}")
    for name in [name for name in group if name.startswith(f"{FULL}/optimizer/") and name not in wanted]:
        del group[name]
    group[f"{FULL}/numbers"] = numbers
    return sum(put(group, name, tensor) for name, tensor in wanted.items())


def stored(fit: FitGroup, name: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the log. Raises FingerprintMismatchError if it has another shape or dtype than `like`."""
    value, form = fit.group.get(name), array_of_tensor(like)
    if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != (form.shape, form.dtype):
        raise fit.changed(name, f"an array of shape {form.shape} and dtype {form.dtype}")
    return tensor_of(value)


def read_full(fit: FitGroup, names: Names, optimizer: torch.optim.Optimizer) -> None:
    """Give the model and the optimizer the full state. Raises FingerprintMismatchError if it is another one's."""
    group = fit.group
    numbers = group.get(f"{FULL}/numbers")
    if not isinstance(numbers, dict) or not all(isinstance(some, dict) for some in numbers.values()):
        raise fit.changed(f"{FULL}/numbers", "numbers of the optimizer")
    states: dict[str, dict[str, Any]] = {
        name: {key: restore(value) for key, value in some.items()} for name, some in numbers.items()
    }
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    parameters = dict(names.stepped)
    with torch.no_grad():
        for name, parameter in names.parameters.items():
            parameter.copy_(stored(fit, f"{FULL}/model/{name}", parameter))
        for name in group.store.group(f"{group.name}/{FULL}/optimizer"):
            owner, _, key = name.rpartition("/")
            parameter, value = parameters.get(owner), group[f"{FULL}/optimizer/{name}"]
            if parameter is None or not isinstance(value, np.ndarray) or value.shape not in ((), parameter.shape):
                raise fit.changed(f"{FULL}/optimizer/{name}", "a state of the optimizer")
            device = _device_of(key, parameter, optimizer, groups[id(parameter)])
            tensor = tensor_of(value)
            made = empty_state(parameter, tensor.shape, tensor.dtype, device)
            states.setdefault(owner, {})[key] = made.copy_(tensor)
    optimizer.state.clear()
    for name, parameter in names.stepped:
        if name in states:
            optimizer.state[parameter] = states[name]


def write_buffers(group: Group, names: Names, prefix: str) -> None:
    """Write the buffers below a prefix, as part of the caller's transaction."""
    put_buffers(group, names.buffers, prefix)


def put_buffers(group: Group, buffers: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Write these buffers below a prefix, as part of the caller's transaction."""
    for name, tensor in buffers.items():
        put(group, f"{prefix}/{name}", tensor)


def read_buffers(fit: FitGroup, names: Names, prefix: str) -> None:
    """Give the model the buffers below a prefix."""
    with torch.no_grad():
        for name, tensor in names.buffers.items():
            tensor.copy_(stored(fit, f"{prefix}/{name}", tensor))


def put(group: Group, name: str, tensor: torch.Tensor) -> int:
    """Make this the array under a name, in place where it can be. Returns its size in bytes."""
    own = array_of_tensor(tensor)
    array = group.get(name)
    if isinstance(array, np.ndarray) and array.shape == own.shape and array.dtype == own.dtype:
        if array.ctypes.data != own.ctypes.data or array.strides != own.strides:
            array[...] = own
    else:
        group[name] = own
    return own.nbytes


def _device_of(
    key: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> torch.device:
    """The device where torch keeps a tensor of an optimizer's state: mostly that of the parameter."""
    on_gpu = isinstance(optimizer, torch.optim.ASGD) or group.get("capturable") or group.get("fused")
    return parameter.device if on_gpu or key not in _ON_CPU else torch.device("cpu")


def empty_state(parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor for an optimizer's state. With the parameter's shape, it has its memory order, as torch does."""
    if shape == parameter.shape and len(shape):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)
