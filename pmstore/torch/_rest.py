"""The state of training besides parameters, buffers and the optimizer's, as values that a store takes: generators, and
all objects that have state_dict() and load_state_dict(), such as schedulers, gradient scalers and samplers."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pmstore._errors import FingerprintMismatchError
from pmstore._values.dtypes import descriptor_of, dtype_of
from pmstore._values.tensors import array_of_tensor
from pmstore.torch._tensors import tensor_of

__all__ = ["edited", "generators", "like_mapping", "plain", "restore", "set_generators"]

logger = logging.getLogger("pmstore")

_ARRAY, _SCALAR, _MAPPING, _TUPLE = "array", "scalar", "mapping", "tuple"


@contextlib.contextmanager
def edited(what: str) -> Iterator[None]:
    """A context in which values of a log are restored; others raise FingerprintMismatchError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        text = f"the log was changed by other code: {what} can't be restored: {error!r}"
        raise FingerprintMismatchError(text) from error


def generators() -> dict[str, Any]:
    """The states of the generators of torch, numpy and the module random."""
    name, keys, *others = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": [
            str(name),
            np.asarray(keys, "<u4").tobytes(),
            *(one.item() if hasattr(one, "item") else one for one in others),
        ],
        "random": [version, np.array(words, "<u4").tobytes(), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = [one.numpy().tobytes() for one in torch.cuda.get_rng_state_all()]
    return found


def set_generators(states: Mapping[str, Any]) -> None:
    """Put the generators back into these states."""
    torch.set_rng_state(_bytes(states["torch"]))
    name, keys, *others = states["numpy"]
    np.random.set_state((name, np.frombuffer(keys, "<u4"), *others))
    version, words, gauss = states["random"]
    random.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), gauss))
    kept, here = states.get("cuda", []), torch.cuda.device_count()
    if here and len(kept) == here:
        torch.cuda.set_rng_state_all([_bytes(one) for one in kept])
    elif kept:
        logger.warning(
            "GradLog: the training had the generators of %d GPUs, and there are %d: they draw anew", len(kept), here
        )


def _bytes(state: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(state, np.uint8).copy())


def plain(value: Any, where: str) -> Any:
    """The same as values that a store takes. `restore` makes it again.

    Raises TypeError for what can't be kept; `where` names it.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray) and (
        value.dtype.hasobject or value.dtype.kind == "T" or isinstance(value, np.ma.MaskedArray)
    ):
        raise TypeError(
            f"{where} is a {type(value).__name__} of {value.dtype!r}, which a log can't keep: give the objects that "
            "have it a state_dict() of plain arrays, lists and strings"
        )
    if isinstance(value, (torch.Tensor, np.ndarray)):
        is_tensor = isinstance(value, torch.Tensor)
        array = np.ascontiguousarray(array_of_tensor(value) if is_tensor else value)
        return [_ARRAY, is_tensor, descriptor_of(array.dtype), list(np.shape(value)), array.tobytes()]
    if isinstance(value, np.generic):
        return [_SCALAR, descriptor_of(value.dtype), value.tobytes()]
    if isinstance(value, Mapping):
        return [_MAPPING, [[plain(key, where), plain(one, f"{where}[{key!r}]")] for key, one in value.items()]]
    if type(value) in (list, tuple):
        kind = _TUPLE if type(value) is tuple else "list"
        return [kind, [plain(one, f"{where}[{place}]") for place, one in enumerate(value)]]
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which a store can't keep: give the objects that have it a "
        "state_dict() of numbers, strings, arrays, tensors, lists, tuples and dicts"
    )


def restore(value: Any, like: Any = None) -> Any:
    """The inverse of `plain`. Mappings get the type of those at the same place in `like`, and tensors the device."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == _ARRAY:
        is_tensor, descr, shape, content = parts
        # Older logs have numpy's own description of structures.
        dtype = np.dtype([tuple(one) for one in descr]) if isinstance(descr, list) else dtype_of(descr)
        array = np.ndarray(shape, dtype, bytearray(content))
        return tensor_of(array).to(like.device if isinstance(like, torch.Tensor) else "cpu") if is_tensor else array
    if kind == _SCALAR:
        return np.ndarray((), dtype_of(parts[0]), bytearray(parts[1]))[()]
    if kind == _MAPPING:
        own = like if isinstance(like, Mapping) else {}
        pairs = {restore(key): restore(one, own.get(restore(key))) for key, one in parts[0]}
        return like_mapping(pairs, like)
    others = like if isinstance(like, (list, tuple)) else ()
    found = [restore(one, other) for one, other in zip(parts[0], [*others, *[None] * len(parts[0])])]
    return tuple(found) if kind == _TUPLE else found


def like_mapping(pairs: dict[Any, Any], like: Any) -> dict[Any, Any]:
    """The pairs in a dict of the type of another one, with what else that has, such as a default."""
    if not isinstance(like, dict) or type(like) is dict:
        return pairs
    made = copy.copy(like)
    made.clear()
    made.update(pairs)
    return made
