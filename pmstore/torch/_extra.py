"""What modules keep beside parameters and buffers: torch's ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ExtraState", "extra_states"]


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
