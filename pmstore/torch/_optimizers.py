"""The state of an optimizer that lies in a store.

Optimizers create their state in their first step, and may replace tensors of it later, as load_state_dict does. Each
commit looks at what there is, and moves into the store what is not in it.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from pmstore._errors import CorruptStoreError, FingerprintMismatchError
from pmstore._interrupts import later
from pmstore._store.mapping import NameMapping
from pmstore._values.values import encode
from pmstore.torch._modules import ANOTHER, in_memory, ordered, require_there
from pmstore.torch._rest import like_mapping, plain, restore
from pmstore.torch._tensors import tensor_of

__all__ = ["OptimizerTensors", "given_state", "stored_state"]

_CONSTANT = frozenset({int, float, bool, str, type(None)})
CLASS, GROUPS, HYPERPARAMETERS, VALUES = "class", "parameters", "hyperparameters", "values"
OWN = "state"  # that of no parameter, such as a count of steps
_COPIED = torch.empty(0)  # stands for a tensor that was copied in the middle of a step
_TENSOR = "torch.Tensor"  # the one key of the dict that stands for a tensor inside of a state


class OptimizerTensors:
    """The state and the hyperparameters of an optimizer, in a store.

    key_of: the key of each parameter, by its id. tensors: the mapping for tensors of the state. settings: the one for
    all else.
    """

    def __init__(self, optimizer: Any, key_of: dict[int, str], tensors: NameMapping, settings: NameMapping) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("persist can't keep an LBFGS, whose state has lists of tensors that grow")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"persist can't keep a {type(optimizer).__qualname__}, whose steps can't be followed: its __init__ has "
                "to call that of torch.optim.Optimizer"
            )
        for name, one in vars(optimizer).items():
            if isinstance(one, torch.optim.Optimizer) and one.state is not optimizer.state and _shared(one, optimizer):
                kind = type(optimizer)
                raise TypeError(
                    f"persist can't keep a {kind.__module__}.{kind.__qualname__}: the state is that of another "
                    f"optimizer, its attribute {name!r}. Use an optimizer that has its state itself"
                )
        _refuse_others(optimizer)
        self.optimizer = optimizer
        self._key_of = key_of
        self._tensors = tensors
        self._settings = settings
        self._kept: dict[str, dict[str, tuple[torch.Tensor, int]]] = {}  # by key and name: the tensor and its address
        self._looked: Iterator[tuple[str, str, torch.Tensor]] = iter(())  # what `_kept` has, or had
        self._steps: list[_Step] = []  # that may not have ended
        self._in_step = False
        self._encoded: dict[str, bytes] = {}  # of the settings that the store has
        self._seen: list[Any] = []  # names and values of the hyperparameters that the store has
        self._groups: list[list[int]] = []  # the ids of the parameters whose keys the store has
        self._parameters: dict[str, torch.Tensor] = {}  # by key, all that have been in a group
        self._keys()

    def _keys(self) -> list[list[str]]:
        """The keys of the parameters of each group. Raises ValueError for one that is not the module's."""
        keys: list[list[str]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            keys.append([])
            for parameter in group["params"]:
                key = self._key_of.get(id(parameter))
                if key is None:
                    raise ValueError(
                        f"the optimizer's group {number} has a parameter of shape {tuple(parameter.shape)} that is not "
                        "one of the module's: pass a module that has all of them"
                    )
                keys[-1].append(key)
                self._parameters[key] = parameter
        return keys

    # ---- steps

    def begin_step(self, frame: FrameType) -> None:
        """Note a step, which goes on as long as the frame runs. It has the tensors of the state in its hands."""
        self._steps = [*filter(_is_running, self._steps), _Step(threading.get_ident(), id(frame), frame.f_code)]

    # ---- to the store

    def look(self) -> None:
        """Raises DetachedError if a tensor is not the store's any more: each call looks at another one."""
        key, name, tensor = next(self._looked, ("", "", _COPIED))
        if not key:
            kept = [(key, name, one) for key, some in self._kept.items() for name, (one, _) in some.items()]
            self._looked = iter(kept)
        now = self._kept.get(key, {}).get(name)
        if now is not None and now[0] is tensor is not _COPIED:
            address = tensor.data_ptr() if tensor.numel() else None
            require_there(self._tensors, f"{key}/{name}", address, "optimizer's state")

    def take(self) -> None:
        """Store the state that the store does not have yet. Raises TypeError for a state that a store can't keep."""
        optimizer = self.optimizer
        self._steps = [*filter(_is_running, self._steps)]
        self._in_step = bool(self._steps)
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if groups != self._groups:
            self._put(CLASS, _class_of(optimizer))
            self._put(GROUPS, self._keys())
            self._groups = groups
        values: dict[str, dict[str, Any]] = {}
        gone = dict(self._kept)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = self._key_of[id(parameter)]
                gone.pop(key, None)
                state = optimizer.state.get(parameter)
                if state or key in self._kept:
                    self._take_state(key, state or {}, values)
        for key, kept in gone.items():
            self._forget(key, list(kept))
            self._kept.pop(key, None)
        self._put(VALUES, values)
        own = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._put(OWN, {key: _stored(value, key) for key, value in own.items()})
        self._take_hyperparameters(optimizer)

    def _take_hyperparameters(self, optimizer: Any) -> None:
        items = [item for group in optimizer.param_groups for item in group.items() if item[0] != "params"]
        seen = [part for item in items for part in item]
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same or not all(map(_is_constant, seen)):
            self._put(HYPERPARAMETERS, [_hyperparameters(group) for group in optimizer.param_groups])
            self._seen = seen

    def _take_state(self, key: str, state: dict[str, Any], values: dict[str, dict[str, Any]]) -> None:
        kept = self._kept.setdefault(key, {})
        plain = 0
        for name, value in state.items():
            known = kept.get(name)
            if known is not None and known[0] is value and known[1] == value.data_ptr():
                continue
            if isinstance(value, torch.Tensor):
                self._take_tensor(key, name, value, state)
            else:
                values.setdefault(key, {})[name] = value
                plain += 1
        if len(kept) + plain == len(state) and not (plain and kept.keys() & values[key].keys()):
            return
        self._forget(key, [name for name in kept if not isinstance(state.get(name), torch.Tensor)])

    def _take_tensor(self, key: str, name: str, value: torch.Tensor, state: dict[str, Any]) -> None:
        if not isinstance(name, str) or "/" in name:
            what = "is no str" if not isinstance(name, str) else "has a '/'"
            raise TypeError(f"persist can't keep the optimizer's state of {key!r}: its name {name!r} {what}")
        where, kept = f"{key}/{name}", self._kept.setdefault(key, {})
        elements = ordered(in_memory(value, f"{name!r} of the optimizer's state of {key!r}"))
        with later():  # so that no handler commits between the store's array and the state that has it
            if kept.get(name, (_COPIED, 0))[0] is not _COPIED:
                self._tensors.pop(where, None)  # a step, or another name of the state, may have the tensor before
            self._tensors[where] = elements
            if self._in_step:
                kept[name] = _COPIED, 0
            else:
                state[name] = self._keep(key, name, where)

    def _keep(self, key: str, name: str, where: str) -> torch.Tensor:
        array = self._tensors[where]
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise CorruptStoreError(f"the optimizer's {where!r} is no array that can be written")
        tensor = tensor_of(array)
        self._kept.setdefault(key, {})[name] = tensor, tensor.data_ptr()
        return tensor

    def _forget(self, key: str, names: Iterable[str]) -> None:
        """Delete tensors of a state. The handler of a signal may commit at any moment, and so delete them, too."""
        kept = self._kept.get(key, {})
        for name in names:
            self._tensors.pop(f"{key}/{name}", None)
            kept.pop(name, None)

    def _put(self, name: str, value: Any) -> None:
        try:
            encoded = encode(value)
        except TypeError as error:
            raise TypeError(f"persist can't keep the optimizer's {name}: {error}") from error
        if self._encoded.get(name) != encoded:
            self._settings[name] = value
            self._encoded[name] = encoded

    # ---- from the store

    def compare(self) -> None:
        """Raises FingerprintMismatchError if the store has another optimizer, with the first difference."""
        theirs, mine = self._settings[CLASS], _class_of(self.optimizer)
        if theirs != mine:
            raise _differs(f"a {theirs}, and not a {mine}")
        stored, groups = self._settings[GROUPS], self._keys()
        if not isinstance(stored, list) or len(stored) != len(groups):
            raise _differs(f"it has {len(stored)} groups of parameters, and the one that is given has {len(groups)}")
        for number, (one, other) in enumerate(zip(groups, stored)):
            for a, b in zip([*one, None], [*other, None]):
                if a != b:
                    raise _differs(f"its group {number} has {_of(b)} where the one that is given has {_of(a)}")

    def give(self) -> None:
        """Let the optimizer have the store's groups of parameters, state and hyperparameters."""
        optimizer = self.optimizer
        for parameter in self._give_groups(optimizer):
            optimizer.state.pop(parameter, None)
        for group, values in zip(optimizer.param_groups, self._settings[HYPERPARAMETERS]):
            for name, value in values.items():
                now = group.get(name)
                if isinstance(now, torch.Tensor) and isinstance(value, np.ndarray):
                    now.copy_(tensor_of(value))
                else:
                    group[name] = _given(value)
        parameters = {
            self._key_of[id(parameter)]: parameter for group in optimizer.param_groups for parameter in group["params"]
        }
        self._kept, self._seen = {}, []
        states: dict[str, dict[str, Any]] = {}
        for where in self._tensors:
            key, _, name = where.rpartition("/")
            states.setdefault(key, {})[name] = self._keep(key, name, where)
        for key, values in self._settings[VALUES].items():
            states.setdefault(key, {}).update(values)
        for key, parameter in parameters.items():
            if key in states:
                state = optimizer.state[parameter]
                state.clear()
                state.update(states[key])
            else:
                optimizer.state.pop(parameter, None)
        if OWN in self._settings:  # which older stores lack
            for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
                del optimizer.state[key]
            optimizer.state.update({key: _given(value) for key, value in self._settings[OWN].items()})
        self._groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        self._encoded = {name: encode(value) for name, value in self._settings.items()}

    def _give_groups(self, optimizer: Any) -> list[torch.Tensor]:
        """Undo what a transaction that was rolled back has done to the groups. Returns the parameters that are in none
        any more."""
        groups = optimizer.param_groups
        before = [parameter for group in groups for parameter in group["params"]]
        for number, keys in enumerate(self._settings[GROUPS]):
            wanted = [self._parameters[key] for key in keys]
            if number == len(groups):
                groups.append({"params": wanted})
            elif list(map(id, groups[number]["params"])) != list(map(id, wanted)):
                groups[number]["params"][:] = wanted
        del groups[len(self._settings[GROUPS]) :]
        now = {id(parameter) for group in groups for parameter in group["params"]}
        return [parameter for parameter in before if id(parameter) not in now]

    def held(self) -> bool:
        """Whether the store has an optimizer."""
        return CLASS in self._settings


class _Step(NamedTuple):
    """A step: its thread, and the id and the code of its frame. A reference to the frame would keep the variables of
    all callers; another frame may get the id, but hardly one of a step."""

    thread: int
    frame: int
    code: CodeType


def _is_running(step: _Step) -> bool:
    frame = sys._current_frames().get(step.thread)
    while frame is not None and (id(frame) != step.frame or frame.f_code is not step.code):
        frame = frame.f_back
    return frame is not None


def _shared(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether two optimizers step a parameter both."""
    first, second = ({id(p) for group in o.param_groups for p in group["params"]} for o in (one, other))
    return not first.isdisjoint(second)


def _is_constant(value: Any) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in _CONSTANT or (type(value) is tuple and _CONSTANT.issuperset(map(type, value)))


def _class_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _stored(value, name) for name, value in group.items() if name != "params"}


def _stored(value: Any, name: Any) -> Any:
    """A setting as a value of the store: a tensor as an array. Several, as of betas, are marked."""
    if isinstance(value, torch.Tensor):
        return np.array(ordered(in_memory(value, repr(name))))
    return stored_state(value) if type(value) in (list, tuple) else value


def _given(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_of(value).clone()
    return given_state(value, None) if type(value) in (list, tuple) else value


def _of(key: str | None) -> str:
    return "no more parameters" if key is None else repr(key)


def _refuse_others(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for what only an optimizer's ``state_dict()`` has, and would be lost."""
    state: Any = {}
    with contextlib.suppress(Exception):  # ZeroRedundancyOptimizer has none before its parts are brought together
        state = optimizer.state_dict()
    for key in state or ():
        if key not in ("state", "param_groups"):
            raise TypeError(
                f"persist can't keep {key!r}, which the state_dict() of {type(optimizer).__qualname__} has beside the "
                "state of its parameters: use an optimizer that has all of it in its attribute state"
            )


def _differs(text: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(f"the store holds another optimizer: {text}{ANOTHER}")


# ---- learning rate schedulers, gradient scalers, and their like


def stored_state(state: Any) -> Any:
    """A state_dict as a value that a store can keep: subclasses of dict become dicts, and tensors their bytes."""
    if isinstance(state, torch.Tensor):
        return {_TENSOR: plain(state, "a tensor")}
    if isinstance(state, dict):
        return {name: stored_state(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(stored_state(value) for value in state)
    return state


def given_state(stored: Any, now: Any) -> Any:
    """The opposite of it. now: the state_dict that the object has, for the types. A new object's may have less in it
    than the stored one."""
    if isinstance(stored, dict) and stored.keys() == {_TENSOR}:
        return restore(stored[_TENSOR], now)
    if isinstance(stored, dict):
        own = now if isinstance(now, Mapping) else {}
        return like_mapping({name: given_state(value, own.get(name)) for name, value in stored.items()}, now)
    if type(stored) in (list, tuple):
        others = now if isinstance(now, (list, tuple)) else ()
        return type(stored)(given_state(value, one) for value, one in zip(stored, chain(others, repeat(None))))
    return stored
