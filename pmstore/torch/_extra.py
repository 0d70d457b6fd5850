"""What modules keep beside parameters and buffers: ``get_extra_state``, and what their ``state_dict()`` adds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
    memory = {_address(one) for one in tensors.values()} - {None}
    has_extra = bool(extra_states(module))
    state: Any = None
    with contextlib.suppress(Exception):  # it may want another rank, or the end of the training
        state = module.state_dict()
    for key, value in _entries(state):
        if key not in tensors and not (has_extra and _is_extra(key)) and _address(value) not in memory:
            raise TypeError(
                f"{reader} can't keep {key!r}, which state_dict() has and which is no parameter or buffer: make it a "
                "buffer, or return it from get_extra_state"
            )


def _is_extra(key: Any) -> bool:
    return str(key).rpartition(".")[2] == "_extra_state"


def _entries(state: Any) -> Iterator[tuple[str, Any]]:
    """What a state_dict has, and dicts in it, without tensors that have no elements."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Mapping) and not _is_extra(key):
            yield from _entries(value)
        elif not isinstance(value, torch.Tensor) or value.numel():
            yield key, value


def _address(value: Any) -> int | None:
    """The address of the memory of a tensor; None for what has none, such as a sparse tensor or a number."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except RuntimeError:  # a tensor that consists of others
        return None
