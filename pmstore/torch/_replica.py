"""A copy of a model's parameters and of their optimizer, whose tensors lie in the arrays of a full state (_full.py).

The copy has its own optimizer of the same class, which steps the copied parameters with logged gradients. It runs the
same loops over the same memory order as the training does, so that the bits are the same. A store keeps arrays in C or
F order. A tensor in another order, such as channels_last, has memory of its own, and is copied at each commit.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from pmstore._store.mapping import Group
from pmstore.torch._full import FULL, Names, write_full
from pmstore.torch._layout import Layout, Rows, give
from pmstore.torch._memory import firsts
from pmstore.torch._tensors import tensor_of

__all__ = ["Replica", "same_bits", "step_alone"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replica:
    """The parameters and the optimizer of a full state that was just written, or read.

    Parameters
    ----------
    group : Group
        It has the full state.
    names : Names
        Of the training. All parameters are in main memory.
    optimizer : torch.optim.Optimizer
        That of the training.

    Attributes
    ----------
    parameters : dict
        By the names of the training's.
    stepped : list of (str, torch.Tensor)
        Those of the optimizer, in its order.
    """

    def __init__(self, group: Group, names: Names, optimizer: torch.optim.Optimizer) -> None:
        self._group = group
        self.parameters = self._own_parameters(names)
        self.stepped = [(name, self.parameters[name]) for name, _ in names.stepped]
        mine = {id(theirs): one for (_, one), (_, theirs) in zip(self.stepped, names.stepped, strict=True)}
        self._optimizer = _made_like(optimizer, mine)
        for name, theirs in names.stepped:
            for key, value in optimizer.state.get(theirs, {}).items():
                own = self._own(_place(name, key), value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                self._optimizer.state[mine[id(theirs)]][key] = own
        self._known: list[int] = []  # the ids of the state's tensors that lie in the store, if they can

    def step(self, layout: Layout, rows: Rows, row: int) -> None:
        """Step the copied parameters with the gradients and the settings of a row."""
        if not rows.stepped[row]:
            return
        parameters = [one for _, one in self.stepped]
        give(self._optimizer, layout.settings, parameters, rows, row)
        step_alone(self._optimizer)
        for one in parameters:
            one.grad = None

    def write(self) -> int:
        """Let the group have all of it, as part of the caller's transaction. Returns its size in bytes."""
        written = write_full(self._group, self, self._optimizer)
        state = self._optimizer.state
        known = [id(value) for one in state.values() for value in one.values()]
        if known != self._known:  # the optimizer has made new tensors
            for name, parameter in self.stepped:
                self._move(name, state.get(parameter, {}))
            self._known = [id(value) for one in state.values() for value in one.values()]
        return written

    def _move(self, name: str, state: dict[str, Any]) -> None:
        """Let the state of a parameter lie in the store, which has its values."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                there = self._there(_place(name, key), value)
                state[key] = value if there is None else there

    def _own_parameters(self, names: Names) -> dict[str, torch.Tensor]:
        """Copies of the parameters. Those over one memory are several tensors over one copy, as all of them change."""
        made: dict[str, torch.Tensor] = {}
        for name, first in firsts(names.parameters).items():
            mine = made.get(first)
            made[name] = self._own(f"{FULL}/model/{name}", names.parameters[name]) if mine is None else mine.detach()
        return made

    def _own(self, name: str, theirs: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that the group has under a name."""
        there = self._there(name, theirs)
        if there is not None:
            return there
        made = torch.empty_strided(theirs.shape, theirs.stride(), dtype=theirs.dtype)
        return made.copy_(theirs.detach())

    def _there(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor over the group's array, if that has the memory order of another tensor."""
        found = tensor_of(self._group[name])
        return found if found.stride() == like.stride() else None


def _place(parameter: str, key: str) -> str:
    return f"{FULL}/optimizer/{parameter}/{key}"


def _made_like(optimizer: torch.optim.Optimizer, mine: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer with the same settings for other parameters, without state and hooks: as a pickle would make it."""
    groups = [
        {
            "params": [mine[id(one)] for one in group["params"]],
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    kind: Any = type(optimizer)
    made: torch.optim.Optimizer = kind.__new__(kind)
    made.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    return made


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Step without hooks, those of all optimizers included. They belong to the training, whose step calls them."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits. Those of large elements count as different."""
    integers = _INTEGERS.get(one.element_size())
    if integers is None:
        return False
    one, other = (it.resolve_conj().resolve_neg() for it in (one, other))  # views, which autograd may leave
    return torch.equal(one.view(integers), other.view(integers))
