"""The state of a training beside the tensors of its model and its optimizer: the `rest` of a log, for all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pmstore._core import hash64
from pmstore._resume.fingerprint import differences
from pmstore._values.tensors import array_of_tensor
from pmstore._values.values import encode
from pmstore.torch._full import Names
from pmstore.torch._layout import Layout, Setting, numbers_of, set_numbers
from pmstore.torch._rest import edited, generators, plain, restore, set_generators

__all__ = ["States"]

logger = logging.getLogger("pmstore")


class States:
    """The settings of the optimizer, the generators, and all objects with a state_dict().

    Parameters
    ----------
    optimizer, settings
        The settings are the same on all ranks.
    names : Names
        Of the parameters, which may be frozen, and of buffers.
    layout : Layout
        Its GPUs compute the steps.
    objects : dict
        By name. A log keeps the state of rank 0, and of other ranks what differs from it.
    rank, ranks : int
        That of this process, and their number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: Sequence[Setting],
        names: Names,
        layout: Layout,
        objects: Mapping[str, Any],
        rank: int,
        ranks: int,
    ) -> None:
        self._optimizer, self._settings, self._names, self._layout = optimizer, settings, names, layout
        self._objects, self._rank, self._ranks = objects, rank, ranks
        self._error = Exception()

    def hashes(self) -> dict[str, int]:
        """Hashes of the buffers that can be kept; none if there is one rank."""
        found = {}
        for key, one in self._names.buffers.items() if self._ranks > 1 else ():
            with contextlib.suppress(Exception):  # `own` tells of it
                found[key] = hash64(np.ascontiguousarray(array_of_tensor(one)).reshape(-1).view(np.uint8).data)
        return found

    def own(self, hashes: Mapping[str, int], first: Mapping[str, int]) -> dict[str, Any]:
        """The state of this rank. It has an error instead if there was one: the other ranks wait for it.

        hashes: of this rank. first: those of rank 0, whose buffers are in the full state. DistributedDataParallel gives
        them to all ranks before a forward, and each rank may have other ones behind it.
        """
        found: dict[str, Any] = {"generators": generators()}
        try:
            found["kept"] = {
                key: plain(one.state_dict(), f"the state of {key!r}") for key, one in self._objects.items()
            }
            buffers = self._names.buffers if self._rank else {}
            other = [key for key in buffers if key not in hashes or hashes[key] != first.get(key)]
            found["buffers"] = {key: plain(buffers[key], key) for key in other}
        except Exception as error:
            self._error, found["error"] = error, f"{type(error).__name__}: {error}"
        return found

    def together(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The rest of a log, on rank 0. states: of all ranks. Raises TypeError for what can't be kept, and the errors
        of objects."""
        for rank, state in enumerate(states):
            if "error" in state:
                raise self._error if rank == 0 else TypeError(f"rank {rank} can't give its state: {state['error']}")
        others, buffers = _of_others([state["kept"] for state in states]), [state["buffers"] for state in states]
        return {
            "generators": [state["generators"] for state in states],
            "settings": numbers_of(self._optimizer, self._settings),
            "kept": states[0]["kept"],
            "frozen": np.packbits(self._names.frozen).tobytes(),
            **({"ranks": others} if any(others) else {}),
            **({"buffers": buffers} if any(buffers) else {}),
            **self._computing(),
        }

    def take(self, rest: Mapping[str, Any]) -> None:
        """Take everything that `together` has described."""
        now = self._computing()
        other = differences({key: rest.get(key, now[key]) for key in now}, now)  # older logs lack some
        if other:
            logger.warning("GradLog: training may end with other bits; stored ≠ now: %s", "; ".join(other))
        self._compare_frozen(rest.get("frozen"))
        made, states = {}, rest["generators"]
        with edited("the states of what is kept"):
            kept = {**rest["kept"], **self._of_this_rank(rest.get("ranks", []))}
            for key, one in self._objects.items():
                made[key] = restore(kept[key], one.state_dict())
        for key, one in self._objects.items():
            one.load_state_dict(made[key])
        with edited("the buffers of a rank"), torch.no_grad():
            for key, value in self._of_this_rank(rest.get("buffers", [])).items():
                self._names.buffers[key].copy_(restore(value))
        set_numbers(self._optimizer, self._settings, rest["settings"])
        if self._rank < len(states):
            with edited("the generators"):
                set_generators(states[self._rank])
        else:
            logger.warning("GradLog: the training had %d ranks: rank %d draws anew", len(states), self._rank)
        if len(states) > self._ranks and self._rank == 0:
            logger.warning(
                "GradLog: training may end with other bits: it had %d ranks, and has %d now", len(states), self._ranks
            )

    def _of_this_rank(self, ranks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What this rank has of its own; nothing if the training did not have the rank."""
        return ranks[self._rank] if self._rank < len(ranks) else {}

    def _compare_frozen(self, packed: bytes | None) -> None:
        """Warn of a parameter that was frozen then, or is now: the loop of an earlier process may have thawed it."""
        now = self._names.frozen
        if packed is None or packed == np.packbits(now).tobytes():
            return
        with edited("which parameters are frozen"):
            before = np.unpackbits(np.frombuffer(packed, np.uint8))[: len(now)]
            pairs = zip(self._names.parameters, before.tolist(), now, strict=True)
        odd = [f"{name} ({not was} then, {not frozen} now)" for name, was, frozen in pairs if bool(was) != frozen]
        logger.warning("GradLog: training may end with other bits: requires_grad of %s", ", ".join(odd[:5]))

    def _computing(self) -> dict[str, Any]:
        """What computes the steps: others may compute other bits."""
        gpus = sorted({torch.cuda.get_device_name(one) for one in self._layout.gpus})
        return {
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "device": ", ".join(gpus) or "cpu",
            "flushes denormals": not torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").add(0).item(),
        }


def _of_others(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The states of all ranks, by key, without those that are as rank 0's."""
    first = {key: encode(one) for key, one in states[0].items()}
    return [{key: one for key, one in state.items() if encode(one) != first.get(key)} for state in states]
