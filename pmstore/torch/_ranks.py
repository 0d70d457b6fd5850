"""The processes of torch.distributed that train one model: rank 0 has the log, and the others follow it."""

from __future__ import annotations

from collections.abc import Mapping
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
        if self.count == 1:
            return
        states = self.tell([_described(optimizer.state.get(one, {})) for _, one in names.stepped])
        if self.rank:
            optimizer.state.clear()
            for (_, parameter), described in zip(names.stepped, states, strict=True):
                if described:
                    optimizer.state[parameter] = _made(described, parameter)
        tensors = [*names.parameters.values(), *names.buffers.values()]
        for _, parameter in names.stepped:
            state = optimizer.state.get(parameter, {})
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
        for tensor in [*tensors, *(compression.residuals if compression else [])]:
            content = tensor.detach().contiguous()
            torch.distributed.broadcast(content, 0)
            tensor.detach().copy_(content)


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
