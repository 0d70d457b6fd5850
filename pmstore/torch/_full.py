"""The full state of training, as arrays of a group: parameters, and the optimizer's state of each::

full/model/<parameter>              and below buffers/<buffer>, which every batch brings up to date
full/optimizer/<parameter>/<key>    the optimizer's tensors
full/numbers                        its other values
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from pmstore._store.mapping import Group
from pmstore._values.tensors import array_of_tensor
from pmstore.torch._rest import plain, restore
from pmstore.torch._tensors import tensor_of

__all__ = ["BUFFERS", "FULL", "Names", "put", "read_buffers", "read_full", "write_buffers", "write_full"]

FULL, BUFFERS = "full", "buffers"


class Names:
    """The names of a model's and an optimizer's tensors.

    Attributes
    ----------
    parameters : dict
        Each parameter of the model or the optimizer once, by its name.
    stepped : list of (str, torch.nn.Parameter)
        Those of the optimizer, in its order.
    buffers : dict
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {_safe(name): one for name, one in model.named_parameters()}
        known = {id(one): name for name, one in self.parameters.items()}
        self.stepped: list[tuple[str, torch.nn.Parameter]] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, one in enumerate(group["params"]):
                name = known.setdefault(id(one), f"group {number}, parameter {place}")
                self.parameters.setdefault(name, one)
                self.stepped.append((name, one))
        self.buffers = {_safe(name): one for name, one in model.named_buffers()}


def _safe(name: str) -> str:
    return quote(name, safe=" .,-_+=()[]<>:~!@#$&'*;") or "parameter"


def write_full(group: Group, names: Names, optimizer: torch.optim.Optimizer) -> int:
    """Write the full state, as part of the caller's transaction. Returns its size in bytes."""
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


def read_full(group: Group, names: Names, optimizer: torch.optim.Optimizer) -> None:
    """Give the model and the optimizer the full state."""
    numbers = group[f"{FULL}/numbers"]
    states: dict[str, dict[str, Any]] = {
        name: {key: restore(value) for key, value in some.items()} for name, some in numbers.items()
    }
    settings = {id(one): settings for settings in optimizer.param_groups for one in settings["params"]}
    parameters = dict(names.stepped)
    with torch.no_grad():
        for name, parameter in names.parameters.items():
            parameter.copy_(tensor_of(group[f"{FULL}/model/{name}"]))
        for name in group.store.group(f"{group.name}/{FULL}/optimizer"):
            owner, _, key = name.rpartition("/")
            parameter, stored = parameters[owner], tensor_of(group[f"{FULL}/optimizer/{name}"])
            states.setdefault(owner, {})[key] = _like(parameter, stored, key, settings[id(parameter)])
    optimizer.state.clear()
    for name, parameter in names.stepped:
        if name in states:
            optimizer.state[parameter] = states[name]


def write_buffers(group: Group, names: Names, prefix: str) -> None:
    """Write the buffers below a prefix, as part of the caller's transaction."""
    for name, tensor in names.buffers.items():
        put(group, f"{prefix}/{name}", tensor)


def read_buffers(group: Group, names: Names, prefix: str) -> None:
    """Give the model the buffers below a prefix."""
    with torch.no_grad():
        for name, tensor in names.buffers.items():
            tensor.copy_(tensor_of(group[f"{prefix}/{name}"]))


def put(group: Group, name: str, tensor: torch.Tensor) -> int:
    """Make this the array under a name, in place where it can be. Returns its size in bytes."""
    own = array_of_tensor(tensor)
    array = group.get(name)
    if isinstance(array, np.ndarray) and array.shape == own.shape and array.dtype == own.dtype:
        array[...] = own
    else:
        group[name] = own
    return own.nbytes


def _like(parameter: torch.Tensor, stored: torch.Tensor, key: str, settings: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of the optimizer's state, on the device and in the memory order that torch gives it."""
    counts = key == "step" and not (settings.get("capturable") or settings.get("fused"))
    device = torch.device("cpu") if counts else parameter.device
    if stored.shape == parameter.shape and stored.dim():
        return torch.empty_like(parameter, dtype=stored.dtype, device=device, requires_grad=False).copy_(stored)
    return stored.to(device, copy=True)
