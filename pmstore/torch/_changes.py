"""Whether other code than the optimizer has changed parameters, or its state: a replay of gradients would not do that
again."""

from __future__ import annotations

from typing import Any

import torch

from pmstore._values.tensors import array_of_tensor
from pmstore.torch._full import Names

__all__ = ["Changes"]

_PROBED = 64  # elements of a parameter without an optimizer


class Changes:
    """Looks for changes of the parameters of a model, and of its optimizer's state.

    Torch counts what is written to a parameter, but not what is written to ``parameter.data``. Of parameters that no
    optimizer steps, such as those of a moving average, some elements are compared: to compare all takes too long.

    Parameters
    ----------
    names : Names
    optimizer : torch.optim.Optimizer
        Its state must not change between two steps either.
    """

    def __init__(self, names: Names, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = list(names.parameters.values())
        stepped = {id(one) for _, one in names.stepped}
        self._others = [one for one in self._parameters if id(one) not in stepped]
        self._marks: Any = None
        self._probes: Any = None

    def remember(self, *, durable: bool = False) -> None:
        """The optimizer has stepped, or, if durable, all is in the log as it is now."""
        self._marks = self._look()
        if durable:
            self._probes = self._probe()

    def found(self) -> bool:
        """Whether parameters have changed since the last `remember`."""
        return bool(self._marks != self._look())

    def found_of_others(self) -> bool:
        """Whether parameters without an optimizer have changed since all was in the log."""
        return bool(self._probes != self._probe())

    def _look(self) -> list[Any]:
        seen: list[Any] = [(one._version, one.data_ptr()) for one in self._parameters]
        for state in self._optimizer.state.values():
            seen += [(id(one), one._version) if isinstance(one, torch.Tensor) else one for one in state.values()]
        return seen

    def _probe(self) -> list[bytes]:
        with torch.no_grad():
            flat = [one.reshape(-1) for one in self._others]
            return [array_of_tensor(one[:: max(1, len(one) // _PROBED)]).tobytes() for one in flat]
