"""The checks of a gradient log's arguments, and the fingerprint of a training."""

from __future__ import annotations

import cmath
import logging
import numbers
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pmstore.torch._extra import refuse_others
from pmstore.torch._full import Names
from pmstore.torch._layout import Layout, Setting, order_of, settings_of
from pmstore.torch._memory import firsts

__all__ = [
    "all_finite",
    "check_groups",
    "check_copied",
    "check_gradient",
    "check_numbers",
    "count",
    "fingerprint_of",
    "inner",
    "is_divided",
    "kept",
    "refuse_compiled",
    "skips",
    "supported",
    "unscale",
]

logger = logging.getLogger("pmstore")

_SUPPORTED = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, in DistributedDataParallel or torch.compile().

    Warns of ranks whose gradients torch adds in an order that a resume changes. Raises TypeError for what is no module,
    or divided among the ranks, or has a state that no log keeps, and ValueError for parameters or buffers without
    values.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model is to be a torch.nn.Module, not {type(model).__name__}")
    *wrappers, model = _unwrapped(model)
    for wrapper in wrappers:
        if isinstance(wrapper, DistributedDataParallel):
            _compare_order(wrapper)
    if is_divided(model):
        raise TypeError(
            "the ranks have different parts of the model's parameters, and GradLog logs those of rank 0: use "
            "DistributedDataParallel, which gives each rank all of them, or torch.distributed.checkpoint"
        )
    for name, one in chain(model.named_parameters(), model.named_buffers()):
        if torch.nn.parameter.is_lazy(one):
            raise ValueError(f"{name} has no shape yet: call the model once before the log is made")
        if one.is_meta:
            raise ValueError(f"{name} is on the meta device, and has no values: load the weights first")
    refuse_others(model, "GradLog")
    return model


def is_divided(model: torch.nn.Module) -> bool:
    """Whether each rank has a part of the model's parameters (FSDP)."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    divided = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(part, sharded) for part in model.modules()) or any(
        isinstance(one, divided) for one in model.parameters()
    )


def _unwrapped(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model, and what is in each of its wrappers, from outside."""
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    yield model
    while isinstance(model, (DataParallel, DistributedDataParallel, compiled)):
        model = model._orig_mod if isinstance(model, compiled) else model.module
        yield model


def _compare_order(wrapper: DistributedDataParallel) -> None:
    """Warn, on rank 0, if torch arranges its buckets of gradients anew after the first iteration of a process.

    The place in a bucket decides in which order the ranks' gradients are added. The sum of two is the same in both.
    """
    ranks = torch.distributed.get_world_size(wrapper.process_group)
    rebuilds = wrapper.static_graph or not wrapper.find_unused_parameters
    if rebuilds and ranks > 2 and torch.distributed.get_rank() == 0:
        logger.warning(
            "GradLog: a resumed training may end with other bits: DistributedDataParallel adds the gradients of %d "
            "ranks in another order in the first iteration of each process: give it find_unused_parameters=True, and "
            "no static_graph=True",
            ranks,
        )


def check_numbers(ratio: float, mtbf: float) -> None:
    """Raise ValueError unless a share and a number of seconds are what GradLog takes."""
    if not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise ValueError(f"ratio must be greater than 0 and at most 1, not {ratio!r}")
    if not isinstance(mtbf, numbers.Real) or not mtbf > 0:
        raise ValueError(f"mtbf is a number of seconds, more than 0, not {mtbf!r}")


def supported(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer. Raises TypeError for one whose step can't be replayed from gradients."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch" or kind.__name__ not in _SUPPORTED:
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is not an optimizer whose step GradLog can replay from gradients: "
            f"use one of torch.optim's {', '.join(_SUPPORTED)}, or pmstore.torch.persist, which takes most others, "
            "but not LBFGS"
        )
    return optimizer


def check_copied(names: Names, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless parameters and the optimizer's state are in main memory, or if parameters overlap."""
    tensors: dict[str, torch.Tensor] = dict(names.parameters)
    for name, parameter in names.stepped:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}, {key}"] = value
    for name, one in tensors.items():
        if one.device.type != "cpu":
            raise ValueError(
                f"{name} is on {one.device}, and a replica is stepped by the CPU, which computes other bits there: "
                "use mode='dense', or move the model with model.cpu() before the optimizer is made"
            )
    firsts(names.parameters)


def check_groups(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Raise ValueError if the optimizer has other parameters or kinds of settings than a layout was made for."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if len(parameters) != len(layout.parameters) or any(map(operator.is_not, parameters, layout.parameters)):
        raise ValueError(
            f"the optimizer has {len(parameters)} parameters, which are not the {len(layout.parameters)} that it had "
            "when the log was made: make the GradLog after add_param_group()"
        )
    if not layout.is_fulfilled():
        raise ValueError(
            "a parameter has another memory order than when the log was made: call model.to(memory_format=…) before "
            "the GradLog is made"
        )
    if layout.settings == (settings := settings_of(optimizer)):
        return
    for one in set(layout.settings).symmetric_difference(settings):
        if one.key in optimizer.defaults:  # others are those of schedulers
            raise ValueError(
                f"the setting {one.key!r} of the optimizer's group {one.group} was of another type when the log "
                f"was made, and is {optimizer.param_groups[one.group].get(one.key)!r} now: make the GradLog after that"
            )


_compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def refuse_compiled() -> None:
    """Raise TypeError if torch.compile runs the calling function, or traces it.

    A compiled step rounds in another way: it computes the corrections of Adam's moments as float32.
    """
    if torch.compiler.is_compiling() or _compiler() is not None:
        raise TypeError(
            "the optimizer's step is compiled, and a replay of it would give other bits: compile the model, and call "
            "optimizer.step() outside of torch.compile, or through torch.compiler.disable"
        )


def check_gradient(name: str, gradient: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError for a gradient that can't be in a row. dtype: of the parameter when the log was made."""
    if gradient.layout is not torch.strided:
        raise TypeError(f"the gradient of {name} is sparse: use sparse=False")
    if gradient.is_inference():
        raise TypeError(
            f"the gradient of {name} was made in torch.inference_mode(), which hides later changes: use torch.no_grad()"
        )
    if gradient.dtype != dtype:
        raise TypeError(
            f"the gradient of {name} is of {gradient.dtype}, and the parameter was of {dtype} when the log was made: "
            "convert the model before"
        )


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler has told a fused optimizer to skip this step."""
    found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscale(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> None:
    """Unscale gradients, which a gradient scaler leaves to a fused optimizer. They are then those of its step."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        for gradient in gradients:
            gradient.div_(scale.to(gradient.device))
        optimizer.grad_scale = None


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no gradient has NaN or an infinity. It waits for each GPU once, and not for each gradient."""
    figures = [one.sum().item() for one in gradients if not one.is_cuda]
    for device in dict.fromkeys(one.device for one in gradients if one.is_cuda):
        norms = torch._foreach_norm([one for one in gradients if one.device == device])
        figures += torch.stack(norms).tolist()
    # A sum or a norm may overflow where all elements are finite.
    return all(map(cmath.isfinite, figures)) or all(bool(one.isfinite().all()) for one in gradients)


def kept(own: Mapping[str, Any], keep: Mapping[str, Any]) -> dict[str, Any]:
    """All objects whose state is kept. Raises TypeError or ValueError for objects that can't be kept."""
    if not isinstance(keep, Mapping):
        raise TypeError(f"keep is a dict of objects by name, not a {type(keep).__name__}")
    taken = [key for key in keep if key in own]
    if taken:
        raise ValueError(f"keep has {taken[0]!r}, which is a parameter of GradLog: give the object another name")
    found = {key: one for key, one in {**own, **keep}.items() if one is not None}
    for key, one in found.items():
        if key == "scheduler" and isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError("a ReduceLROnPlateau is stepped by the loop, with a metric: it belongs into keep={…}")
        if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(f"{key!r} is to have state_dict() and load_state_dict(), and is a {type(one).__name__}")
        if key == "data" and not callable(getattr(one, "advance", None)):
            raise TypeError(f"'data' is to have advance(), as a BatchSampler has, and is a {type(one).__name__}")
    return found


def count(value: int | str, name: str) -> int | None:
    """A number of iterations; None for "auto"."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a number of iterations from 1, or 'auto', not {value!r}")
    return value


def fingerprint_of(
    names: Names,
    optimizer: torch.optim.Optimizer,
    settings: Sequence[Setting],
    objects: Mapping[str, Any],
    mode: str,
    ratio: float,
) -> dict[str, Any]:
    """The parameters, optimizer, settings and kept objects of a log, as plain values."""
    numbers = {(one.group, one.key) for one in settings}
    tensors: dict[str, torch.Tensor] = {f"parameter {name}": one for name, one in names.parameters.items()}
    tensors |= {f"buffer {name}": one for name, one in names.buffers.items()}
    in_rows = {id(one) for _, one in names.stepped} if mode != "replica" else set()
    return {
        "training": "gradient log, version 1",
        "mode": f"{mode}, ratio {ratio:g}" if mode == "topk" else mode,
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        **{key: _form(one, id(one) in in_rows) for key, one in tensors.items()},
        "stepped": [name for name, _ in names.stepped],
        **{
            f"group {number}": {
                "parameters": len(group["params"]),
                "numbers": sorted(key for at, key in numbers if at == number),
                **{
                    key: repr(value)
                    for key, value in group.items()
                    if key != "params" and (number, key) not in numbers and value is not None
                },
            }
            for number, group in enumerate(optimizer.param_groups)
        },
        "kept": sorted(objects),
    }


def _form(tensor: torch.Tensor, is_in_rows: bool) -> str:
    """The dtype and the shape. Rows have gradients in the memory order of their parameters, which is named unless it is
    C."""
    form = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not is_in_rows or not tensor.numel():
        return form
    shape, strides = tensor.shape, torch.empty_like(tensor, device="meta").stride()
    is_c = order_of(shape, strides) == order_of(shape, torch.empty(shape, device="meta").stride())
    return form if is_c else f"{form}, strides {strides}"
