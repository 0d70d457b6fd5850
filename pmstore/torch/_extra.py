"""What modules keep beside parameters and buffers: ``get_extra_state``, and what their ``state_dict()`` adds."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

__all__ = ["ExtraState", "extra_states", "refuse_others"]


class ExtraState:
    """The extra state of a module, as an object with `state_dict` and `load_state_dict`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {"extra": self._module.get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "extra" in state:
            self._module.set_extra_state(state["extra"])


def extra_states(module: torch.nn.Module) -> dict[str, ExtraState]:
    """The extra states inside a module, by their keys in its ``state_dict()``."""
    return {
        f"{name}._extra_state" if name else "_extra_state": ExtraState(part)
        for name, part in module.named_modules()
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }


def refuse_others(module: torch.nn.Module, reader: str) -> None:
    """Raise TypeError for what only a module's ``state_dict()`` has, and would be lost: metrics, quantized layers and
    hooks add such values.

    reader: the name of what does not keep it.
    """
    tensors = dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    memory = {address for one in tensors.values() if (address := _address(one))}
    for key, value in module.state_dict().items():
        if key not in tensors and _address(value) not in memory and key.rpartition(".")[2] != "_extra_state":
            raise TypeError(
                f"{reader} can't keep {key!r}, which state_dict() has and which is no parameter or buffer: make it a "
                "buffer, or return it from get_extra_state"
            )


def _address(value: Any) -> int:
    """The address of the memory of a tensor; 0 for what has none, such as a sparse tensor."""
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_plain else 0
