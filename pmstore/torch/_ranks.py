"""The processes of torch.distributed that train one model: rank 0 has the log, and the others follow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed

from pmstore.torch._full import Names, empty_state
from pmstore.torch._layout import Layout, Rows
from pmstore.torch._topk import Compression

__all__ = ["Follower", "Ranks"]


class Ranks:
    """The ranks of the default process group; one rank without a process group.

    Attributes
    ----------
    rank, count : int
    """

    def __init__(self) -> None:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if there else 0
        self.count = torch.distributed.get_world_size() if there else 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; on the others nothing."""
        if self.count == 1:
            return [value]
        found: list[Any] | None = [None] * self.count if self.rank == 0 else None
        torch.distributed.gather_object(value, found)
        return found or []

    def tell(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.count == 1:
            return value
        told = [value]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def share(self, names: Names, optimizer: torch.optim.Optimizer, compression: Compression | None) -> None:
        """Give the parameters, the buffers and the optimizer's state of rank 0 to all ranks."""
        self.share_tensors([*names.parameters.values(), *names.buffers.values()])
        self.share_state(optimizer)
        self.share_tensors(compression.residuals if compression else [])

    def share_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the contents of rank 0's tensors to the same ones of all ranks."""
        if self.count == 1:
            return
        for tensor in tensors:
            content = tensor.detach().resolve_conj().resolve_neg().contiguous()
            torch.distributed.broadcast(content.reshape(-1).view(torch.uint8), 0)  # gloo takes few dtypes
            if self.rank:
                tensor.detach().copy_(content)

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer's state of the parameters on rank 0 to all ranks."""
        if self.count == 1:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = self.tell([_described(optimizer.state.get(one, {})) for one in parameters])
        if self.rank:
            optimizer.state.clear()
            for parameter, described in zip(parameters, states, strict=True):
                if described:
                    optimizer.state[parameter] = _made(described, parameter)
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            self.share_tensors([state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)])

    def share_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer's hyperparameters, and its state of no parameter, of rank 0 to all ranks."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        own = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        settings, own = self.tell((settings, own))
        if not self.rank:
            return
        for group, values in zip(groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        optimizer.state.update(own)


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, without the contents of tensors: for those shape, dtype, and whether on the CPU."""
    return {
        key: ("tensor", one.shape, one.dtype, one.device.type == "cpu")
        if isinstance(one, torch.Tensor)
        else ("value", one)
        for key, one in state.items()
    }


def _made(described: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, (kind, *parts) in described.items():
        if kind == "value":
            made[key] = parts[0]
            continue
        shape, dtype, on_cpu = parts
        made[key] = empty_state(parameter, shape, dtype, torch.device("cpu") if on_cpu else parameter.device)
    return made


class Follower:
    """The substitute of a `Log` in a rank that has none: the count of iterations, and a row that is not stored."""

    def __init__(self, layout: Layout) -> None:
        self._rows = layout.empty(1)
        self._until = 0  # the iteration at the end of the batch
        self.iteration = self.durable = 0

    def begin_at(self, iteration: int, durable: int, capacity: int) -> None:
        """That many iterations are done and durable, and so many go into the next batch."""
        self.iteration, self.durable = iteration, durable
        self._until = iteration + capacity

    def lose(self) -> None:
        """Rank 0 writes a full state."""

    def row(self) -> tuple[Rows, int]:
        """The rows and the index that the next iteration is written to."""
        return self._rows, 0

    def add(self, figures: Mapping[str, float], seconds: float, stepping: float) -> bool:
        """An iteration is done. Returns whether the batch is full."""
        self.iteration += 1
        return self.iteration >= self._until
