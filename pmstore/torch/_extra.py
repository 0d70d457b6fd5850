"""Objects that a store follows as long as they exist, and what modules keep beside parameters and buffers: torch's
``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["ExtraState", "Outlived", "extra_states"]


class Outlived:
    """An object that may go: what it was at last is still there, for a last commit."""

    def __init__(self, one: Any) -> None:
        self._object, self._type, self._attributes = weakref.ref(one), type(one), vars(one)

    @property
    def gone(self) -> bool:
        return self._object() is None

    def __call__(self) -> Any:
        """The object, or another one with its attributes."""
        found = self._object()
        if found is None:
            found = object.__new__(self._type)
            object.__setattr__(found, "__dict__", self._attributes)
        return found


class ExtraState:
    """The extra state of a module, as an object with `state_dict` and `load_state_dict`. The module may go."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = Outlived(module)

    def state_dict(self) -> dict[str, Any]:
        return {"extra": self._module().get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "extra" in state:
            self._module().set_extra_state(state["extra"])


def extra_states(module: torch.nn.Module) -> dict[str, ExtraState]:
    """The extra states inside a module, by their keys in its ``state_dict()``."""
    return {
        f"{name}._extra_state" if name else "_extra_state": ExtraState(part)
        for name, part in module.named_modules()
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }
