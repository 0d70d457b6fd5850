"""The tensors of a module that lie in a store: its parameters, and the buffers of its state_dict.

The array of a tensor has the key that the tensor has in the module's state_dict. A tensor with several keys, as of tied
weights, is one array, under the first of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from pmstore._errors import CorruptStoreError, DetachedError, FingerprintMismatchError, ReadOnlyStoreError
from pmstore._interrupts import later
from pmstore._store.mapping import NameMapping
from pmstore._values.array import Array, address_of
from pmstore._values.tensors import array_of_tensor
from pmstore.torch._extra import refuse_others
from pmstore.torch._memory import firsts
from pmstore.torch._tensors import tensor_of

__all__ = ["ModuleTensors", "in_memory", "ordered", "require_there"]

FORMAT = 1
ANOTHER = "; another training needs a group of its own: persist(module, optimizer, store.group(name))"


class _Place(NamedTuple):
    """The place of a tensor in a module: owner[name], a dict of parameters or of buffers of one of its modules."""

    owner: dict[str, Any]
    name: str
    key: str
    tensor: torch.Tensor
    is_parameter: bool


def in_memory(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor without gradient. Raises TypeError or ValueError unless it is an ordinary one in main memory."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{what} has no shape yet: call the module once before persist")
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_quantized:
        raise TypeError(f"{what} is a {type(plain).__name__} of the layout {plain.layout}, which persist can't keep")
    if plain.device.type != "cpu":
        raise ValueError(
            f"{what} is on {plain.device}, and persist keeps tensors in the CPU's memory: move it with module.cpu(), "
            "or store copies of its state with store.group(name).update(module.state_dict())"
        )
    return plain


def require_there(mapping: NameMapping, key: str, address: int | None, what: str) -> None:
    """Raise DetachedError unless there is an array under the key, with its elements at this address."""
    found = mapping.get(key)
    if not isinstance(found, np.ndarray) or (address is not None and address_of(found) != address):
        raise DetachedError(
            f"{key!r} of the {what} was deleted, replaced or renamed in the store: persist stores or reads it again"
        )


def ordered(tensor: torch.Tensor) -> Array:
    """Its elements, with the last axis contiguous."""
    return np.asarray(array_of_tensor(tensor), order="C")


class _Owner(NamedTuple):
    """A dict of parameters or of buffers of a module, and the names in it that a store does not keep."""

    tensors: dict[str, Any]
    left_out: Collection[str]

    def names(self) -> list[str]:
        return [name for name, one in self.tensors.items() if one is not None and name not in self.left_out]


def _owners(part: torch.nn.Module) -> tuple[_Owner, _Owner]:
    return _Owner(part._parameters, ()), _Owner(part._buffers, part._non_persistent_buffers_set)


def _places(module: torch.nn.Module) -> Iterator[_Place]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        for owner in _owners(part):
            for name in owner.names():
                key = f"{prefix}.{name}" if prefix else name
                tensor = owner.tensors[name]
                yield _Place(owner.tensors, name, key, tensor, owner.tensors is part._parameters)


def _refuse_script(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"the module {name!r}" if name else "a module"
            raise TypeError(
                f"persist can't keep {what} of TorchScript, which has tensors of its own: persist the module that "
                "torch.jit.script gets, and call torch.jit.script after that"
            )


def _reference(part: torch.nn.Module | None) -> Callable[[], torch.nn.Module | None]:
    return (lambda: None) if part is None else weakref.ref(part)


class ModuleTensors:
    """The tensors of a module. It does not refer to the module, which may go."""

    def __init__(self, module: torch.nn.Module) -> None:
        _refuse_script(module)
        self._places = list(_places(module))
        self._parts = [(weakref.ref(part), tuple(map(_reference, part._modules.values()))) for part in module.modules()]
        self._counts = [(owner, len(owner.names())) for part in module.modules() for owner in _owners(part)]
        plain = {place.key: in_memory(place.tensor, repr(place.key)) for place in self._places}
        self.arrays = firsts({place.key: place.tensor for place in self._places})  # by key, the key of the array
        self._tied = {key for key, count in Counter(self.arrays.values()).items() if count > 1}
        self._tensors = {key: plain[key] for key in dict.fromkeys(self.arrays.values())}  # by the key of an array
        # Several parameters may be one array, and each has a key of its own: that of its first place
        self.key_of = {id(place.tensor): place.key for place in reversed(self._places)}
        self._where: list[Any] = []
        self._stored: dict[str, Array] = {}
        refuse_others(module, "persist")

    # ---- to and from the store

    def record(self) -> Any:
        """The value that the store keeps beside the arrays."""
        return {"format": FORMAT, "arrays": self.arrays}

    def put(self, mapping: NameMapping) -> None:
        """Store copies of all tensors."""
        for key, tensor in self._tensors.items():
            mapping[key] = ordered(tensor)

    def compare(self, record: Any, mapping: NameMapping) -> None:
        """Raises FingerprintMismatchError if the store has another module, with the first difference."""
        if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("arrays"), dict):
            raise CorruptStoreError("the store's record of a module is damaged, or of another version of pmstore")
        theirs = record["arrays"]
        for key, first in self.arrays.items():
            if key not in theirs:
                raise _differs(f"the store has no {key!r}")
            if theirs[key] != first:
                one, where = (first, "module") if first != key else (theirs[key], "store")
                raise _differs(f"{key!r} and {one!r} are one tensor only in the {where}")
            if first == key:
                stored, mine = tensor_of(_array(mapping, key)), self._tensors[key]
                if (stored.shape, stored.dtype) != (mine.shape, mine.dtype):
                    raise _differs(f"{key!r} is {_text(mine)} in the module and {_text(stored)} in the store")
        for key in theirs:
            if key not in self.arrays:
                raise _differs(f"the module has no {key!r}, which is in the store")

    def modules(self) -> list[torch.nn.Module]:
        """The module and those inside, as far as they are there."""
        return [part for one, _ in self._parts if (part := one()) is not None]

    def memory(self) -> dict[str, int]:
        """The address of the memory that an array lies in, by its key."""
        if self._stored:
            return {key: address_of(array) for key, array in self._stored.items() if array.size}
        return {key: one.untyped_storage().data_ptr() for key, one in self._tensors.items() if one.numel()}

    def bind(self, mapping: NameMapping) -> None:
        """Let the tensors lie in the store, and have its values."""
        stored = {key: _array(mapping, key) for key in self._tensors}
        views = {key: tensor_of(array) for key, array in stored.items()}
        for key, view in views.items():
            if type(view) is not torch.Tensor:
                raise ReadOnlyStoreError(f"the array of {key!r} was stored with writeable=False")
        self._stored = stored
        self._tensors = {}
        for place in self._places:
            place.tensor.data = views[self.arrays[place.key]]
        self._where = [_where(place.tensor) for place in self._places]
        self._keys = list(views)

    # ---- later

    def take_buffers(self) -> str:
        """Copy the elements of buffers that were replaced into the store. Returns what a DetachedError says of the
        first thing that is another one now and can't be taken, or ""."""
        replaced, differs = [], ""
        for place, where, kept, now, error in self._others():
            differs = differs or error
            if not error:
                replaced.append((place, where, kept, now.clone()))  # it may be a view of this buffer or of another one
        parted = self._parted({self.arrays[place.key] for place, *_ in replaced} & self._tied)
        if replaced and not parted:
            with later():  # so that no buffer is put back without its elements
                for place, where, kept, now in replaced:
                    self._put_back(place, where)
                    # Through the tensor itself, so that a backward pass that needs its elements before is an error.
                    (kept if place.tensor.is_inference() else place.tensor.detach()).copy_(now)
        return differs or parted or self._inside_differs()

    def check(self) -> None:
        """Raises DetachedError if the module has other tensors now than the store, other than buffers that can be
        taken."""
        for *_, error in self._others():
            if error:
                raise DetachedError(error)
        if error := self._inside_differs():
            raise DetachedError(error)

    def _inside_differs(self) -> str:
        """What a DetachedError says if a module has more or fewer tensors now, or other modules inside."""
        if any(len(owner.names()) != count for owner, count in self._counts):
            return f"the module has other tensors than at persist, which the store lacks{_WHEN}"
        for one, children in self._parts:
            part = one()
            if part is None:
                continue
            now = part._modules.values()
            if len(now) != len(children) or any(child is not known() for child, known in zip(now, children)):
                return f"the module has other modules inside than at persist{_WHEN}"
        return ""

    def _others(self) -> Iterator[tuple[_Place, Any, torch.Tensor, Any, str]]:
        """The places whose tensor is another one now, or elsewhere: the place, where its tensor was, the store's
        elements, what is there now, and what a DetachedError says, or "" for a buffer whose elements can be taken."""
        for place, where in zip(self._places, self._where):
            now = place.owner.get(place.name)
            if now is place.tensor and _is_at(now, where):
                continue
            kept = self._view(place)
            taken = not place.is_parameter and now is not None and _like(now, kept)
            yield place, where, kept, now, "" if taken else _moved(place, now, kept)

    def _parted(self, keys: set[str]) -> str:
        """What a DetachedError says if buffers that are one array have different elements now."""
        found: dict[str, tuple[str, bytes]] = {}
        for place in self._places:
            key = self.arrays[place.key]
            if key in keys:
                elements = ordered(place.owner[place.name].detach()).tobytes()
                one, others = found.setdefault(key, (place.key, elements))
                if elements != others:
                    return (
                        f"{one!r} and {place.key!r} of the module were one tensor at persist, and are different "
                        "now: give each a tensor of its own before persist"
                    )
        return ""

    def look(self, mapping: NameMapping, turn: int) -> None:
        """Raises DetachedError if an array is not the store's any more: each turn looks at another one."""
        if self._keys:
            key = self._keys[turn % len(self._keys)]
            kept = self._stored[key]
            require_there(mapping, key, address_of(kept) if kept.size else None, "module")

    def are_in(self, mapping: NameMapping) -> bool:
        """Whether all arrays are still the store's."""
        try:
            for turn in range(len(self._keys)):
                self.look(mapping, turn)
        except DetachedError:
            return False
        return True

    def rebind(self) -> None:
        """Put tensors that were given other memory, and buffers that were replaced, back after a rollback."""
        for place, where in zip(self._places, self._where):
            self._put_back(place, where)

    def _view(self, place: _Place) -> torch.Tensor:
        """A new tensor over the array of a place: torch may give the storage of another one other memory."""
        return tensor_of(self._stored[self.arrays[place.key]])

    def _put_back(self, place: _Place, where: Any) -> None:
        if not _is_at(place.tensor, where):
            place.tensor.data = self._view(place)
        place.owner[place.name] = place.tensor


_WHEN = ". Change a module before persist; a changed one needs a group of its own"


def _where(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, and how its elements lie in it."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _is_at(tensor: torch.Tensor, where: Any) -> bool:
    """Whether its memory and its elements are there. Strides of axes that are not walked mean nothing."""
    now = _where(tensor)
    if now == where:
        return True
    *mine, strides = now
    *theirs, others = where
    walked = zip(tensor.shape, strides, others)
    return mine == theirs and (not tensor.numel() or all(one == other or n < 2 for n, one, other in walked))


def _like(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    mine, theirs = ((one.shape, one.dtype, one.device, one.layout) for one in (tensor, kept))
    return mine == theirs


def _moved(place: _Place, now: Any, kept: torch.Tensor) -> str:
    text = f"{place.key!r} of the module is not in the store any more, and would be trained without it: it "
    if now is None:
        text += "was deleted"
    elif now.device != kept.device:
        text += f"is on {now.device}"
    elif now.dtype != kept.dtype or now.shape != kept.shape:
        text += f"is {_text(now)} now, and {_text(kept)} in the store"
    elif now is not place.tensor:
        text += "was replaced by another parameter"
    else:
        text += "has other strides now" if now.data_ptr() == kept.data_ptr() else "has other memory now"
    return (
        f"{text}. Call module.to(), half() and the like before persist. copy_() and load_state_dict() change the "
        "values in the store"
    )


def _text(tensor: torch.Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _differs(text: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(f"the store holds another module: {text}{ANOTHER}")


def _array(mapping: NameMapping, key: str) -> Array:
    array = mapping.get(key)
    if not isinstance(array, np.ndarray):
        raise CorruptStoreError(f"the store has a record of a module, but not its array {key!r}")
    return array
