"""A module and its optimizer in a store: their tensors lie in the store's memory, and a change of them in place is a
change of the store.

                 persist                        close
    module ─────────────────▶ in the store ──────────────▶ closed: a step raises ClosedStoreError
                                │   ▲  │
         rollback of persist    │   │  │ module.to(), another module inside, a tensor deleted in the store, …
         itself, another        │   │  ▼
         persist in its group   │   │ detached: the next step, or commit, raises DetachedError
                                ▼   │
                              ended: a step raises DetachedError

The store calls a `Persisted` at its commits and rollbacks:

    store ── commits ──▶ Persisted ◀── an attribute of each module inside, a hook of the optimizer
                 │           └───────▶ optimizer, `also`, tensors, modules with an extra state; others only weakly
                 └─────▶ module

All of them may go before a commit, as at the end of a function that trains them. So the store keeps them. After each
commit it lets go of them for a moment, and keeps on with what the program still holds.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from pmstore._errors import (
    ClosedStoreError,
    DetachedError,
    Error,
    FingerprintMismatchError,
    NameConflictError,
    ReadOnlyStoreError,
    TransactionError,
)
from pmstore._store.mapping import Group, NameMapping
from pmstore._store.store import Store
from pmstore._values.values import encode
from pmstore.torch._checks import is_divided
from pmstore.torch._extra import extra_states
from pmstore.torch._modules import ANOTHER, ModuleTensors
from pmstore.torch._optimizers import OptimizerTensors, given_state, stored_state
from pmstore.torch._processes import members
from pmstore.torch._ranks import Ranks
from pmstore.torch._sampler import BatchSampler

__all__ = ["Persisted", "persist"]

MODULE, OPTIMIZER, TRAINING = "module", "optimizer", "training"
OWNER = "_pmstore"  # an attribute of modules
_all: weakref.WeakSet[Persisted] = weakref.WeakSet()
_hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of each optimizer, to be removed


class Persisted:
    """A module, and perhaps its optimizer, in the memory of a store. `persist` returns it.

    Attributes
    ----------
    store : Store
    resumed : bool
        Whether the store had the values already, so that the module and the optimizer have taken them.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: Any, mapping: Store | Group, also: Mapping[str, Any] | None
    ) -> None:
        """Only `persist` calls this."""
        self.store = mapping.store
        self.resumed = False
        self._mapping = mapping
        self._module, self._kind = weakref.ref(module), type(module).__name__
        self._in = {name: mapping.group(name) for name in (MODULE, OPTIMIZER, TRAINING)}
        self._tensors = ModuleTensors(module)
        self._optimizer = (
            None
            if optimizer is None
            else OptimizerTensors(
                optimizer, self._tensors.key_of, self._in[OPTIMIZER], mapping.group(f"{TRAINING}/{OPTIMIZER}")
            )
        )
        self._also = {**extra_states(module), **(also or {})}
        self._encoded: dict[str, bytes] = {}  # of what the store has of `also`
        self._ended = ""  # why nothing is in the store any more
        self._commits = 0
        self._rollbacks = self.store._catalog.rollbacks

    @property
    def module(self) -> torch.nn.Module | None:
        """The module; None if it is gone."""
        return self._module()

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if there is none."""
        return None if self._optimizer is None else self._optimizer.optimizer

    def __repr__(self) -> str:
        return f"<{self._kind} in {self._mapping!r}{', detached' if self._ended else ''}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Persisted:
        return self

    # ---- begin

    def _before(self) -> list[Persisted]:
        """Those in whose place this one comes: they have its group, or their module is gone and had a part of it."""
        mine = set(self._tensors.memory().values())

        def meets(one: Any) -> bool:
            return (
                isinstance(one, Persisted)
                and not one._ended
                and (one._mapping == self._mapping or not mine.isdisjoint(one._tensors.memory().values()))
            )

        commits = self.store._commits
        commits.settle(of=meets, strict=False)
        found: list[Any] = [one for one in commits.followed() if meets(one)]
        return [one for one in found if one._mapping == self._mapping or one.module is None]

    def _refuse_shared(self, before: Collection[Persisted]) -> None:
        """Raise ValueError for a tensor that lies in a store already, as a part of another module than `before`."""
        for other in members(_all):
            if other._ended or other.store.closed or other in before:
                continue
            if other.module is self.module:
                raise ValueError(
                    f"the module lies in {other._mapping!r} already: persist copy.deepcopy(module) here; a second "
                    "optimizer of one module goes into also={name: optimizer}"
                )
            theirs = set(other._tensors.memory().values())
            for key, memory in self._tensors.memory().items():
                if memory in theirs:
                    raise ValueError(
                        f"{key!r} of the module lies in {other._mapping!r} already, as a part of another module: "
                        "persist one module that has both"
                    )

    def _begin(self) -> None:
        record = self._in[TRAINING].get(MODULE)
        if record is None:
            self._store_all()
        else:
            self._tensors.compare(record, self._in[MODULE])
            self.resumed = True
            if self._optimizer is not None:
                if self._optimizer.held():
                    self._optimizer.compare()
                for name in self._in[TRAINING].group("also"):
                    if name not in self._also:
                        raise FingerprintMismatchError(
                            f"the store keeps the state of {name!r}: pass also={{{name!r}: …}}{ANOTHER}"
                        )
            self._tensors.bind(self._in[MODULE])
            self._give()

    def _store_all(self) -> None:
        for group in self._in.values():
            for name in group:
                raise NameConflictError(f"persist needs the group {group.name!r}, which already has {name!r}{ANOTHER}")
        try:
            self._tensors.put(self._in[MODULE])
            self._in[TRAINING][MODULE] = self._tensors.record()
            if self._optimizer is not None:
                self._optimizer.take()
            self._take_also()
        except BaseException:
            for group in self._in.values():
                with contextlib.suppress(Error):
                    group.clear()
            raise
        self._tensors.bind(self._in[MODULE])

    def _take_also(self) -> None:
        for name, one in self._also.items():
            state = stored_state(one.state_dict())
            try:
                encoded = encode(state)
            except TypeError as error:
                raise TypeError(f"persist can't keep the state of {name!r}: {error}") from error
            if self._encoded.get(name) != encoded:
                self._in[TRAINING][f"also/{name}"] = state
                self._encoded[name] = encoded

    def _give(self, rolled_back: bool = False) -> None:
        """Give the store's state to the optimizer and to the other kept objects.

        rolled_back: whether the program's loop goes on, and does not resume.
        """
        if self._optimizer is not None and self._optimizer.held():
            self._optimizer.give()
        for name, one in self._also.items():
            stored = self._in[TRAINING].get(f"also/{name}")
            if stored is not None:
                load = one._go_back if rolled_back and isinstance(one, BatchSampler) else one.load_state_dict
                load(given_state(stored, one.state_dict()))
                self._encoded[name] = encode(stored_state(one.state_dict()))

    # ---- what the store and the optimizer call

    def before_commit(self) -> None:
        """Store all changes that are not in the store yet. Raises DetachedError, after all that can be stored is."""
        self.after_rollback()
        if self._ended:
            return
        if self._optimizer is not None and self._commits % 8 == 7:
            self._optimizer.look()
        else:
            self._tensors.look(self._in[MODULE], self._commits - self._commits // 8)
        self._commits += 1
        differs = self._tensors.take_buffers()
        try:
            self._take_rest()
        except Exception as error:
            if differs:
                raise DetachedError(differs) from error
            raise
        if differs:
            raise DetachedError(differs)

    def keeps_alive(self) -> Iterable[object]:
        """The module; if it is gone, the modules that were inside."""
        module = self.module
        return self._tensors.modules() if module is None else [module]

    def farewell(self, failure: str) -> str:
        """A warning for a module that nobody has any more."""
        if not self._tensors.are_in(self._in[MODULE]):  # the program has deleted or replaced it
            return ""
        return (
            f"the {self._kind} of {self._mapping!r} is gone, and not all of its last state could be stored ({failure})"
        )

    def _take_rest(self) -> None:
        if self._optimizer is not None:
            self._optimizer.take()
        self._take_also()

    def before_step(self, *_: Any) -> None:
        """Raises ClosedStoreError or DetachedError if the step would change memory that is not in the store."""
        if self.store.closed:
            raise ClosedStoreError(
                f"the store {self.store.path!r} was closed, and changes would not be stored: open it and call persist "
                "again, or train copy.deepcopy(module) with an optimizer of its own"
            )
        self.store._catalog.writable()
        self.after_rollback()
        if self._ended:
            raise DetachedError(self._ended)
        self._tensors.check()
        assert self._optimizer is not None
        self._optimizer.begin_step(sys._getframe(1))

    def after_rollback(self) -> None:
        """Take the values of the store, if there was a rollback, also of an abandoned transaction: names created since
        the last commit are gone."""
        count = self.store._catalog.rollbacks
        if self._rollbacks == count or self._ended:
            return
        if MODULE not in self._in[TRAINING]:
            self.end(
                "the transaction in which persist stored the module was rolled back, so that the store does not have "
                "it: call persist again"
            )
            return
        self._tensors.rebind()
        self._encoded = {}
        self._give(rolled_back=True)
        self._rollbacks = count

    def after_close(self) -> None:
        """Modules no longer hold this, and so the store."""
        for part in self._tensors.modules():
            if vars(part).get(OWNER) == _Owner(self):
                del vars(part)[OWNER]

    def end(self, why: str) -> None:
        """A step raises DetachedError from now on."""
        self._ended = self._ended or why
        self.after_close()
        self.store._commits.leave_alone(self)

    def own(self) -> None:
        """Begin: from now on, the modules, the optimizer and the store hold this."""
        for part in self._tensors.modules():
            vars(part)[OWNER] = _Owner(self)
        optimizer = self.optimizer
        if optimizer is not None:
            if optimizer in _hooks:
                _hooks[optimizer].remove()
            _hooks[optimizer] = optimizer.register_step_pre_hook(self.before_step)
        _all.add(self)
        self.store._commits.accompany(self)


class _Owner(NamedTuple):
    """What modules hold of a `Persisted`; copies of the modules don't."""

    persisted: Persisted

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def persist(
    module: torch.nn.Module,
    optimizer: Any,
    store: Store | Group | None,
    *,
    also: Mapping[str, Any] | None = None,
    alone: bool = False,
) -> Persisted | PersistedElsewhere:
    """Keep a module and its optimizer in a store, so that each commit is a checkpoint::

        persist(module, optimizer, store)
        for x, y in batches:
            with store.transaction():
                optimizer.zero_grad()
                loss(module(x), y).backward()
                optimizer.step()
                store["position"] += 1

    Parameters, persistent buffers and the optimizer's state are then in the memory of the store. A change in place
    changes the store, each commit makes it durable, and a rollback restores the last commit. If the store has them
    already, the module and the optimizer take the stored values, so that a killed program continues at its last commit.
    Otherwise they are stored and, outside of a transaction, committed.

    Names in the store: ``module/…`` has the arrays with the keys of ``module.state_dict()``, ``optimizer/…`` the
    optimizer's tensors by parameter, and ``training/…`` hyperparameters and other settings. Parameters and buffers
    become contiguous. The program itself stores random states and the position in the data (docs/training.md).

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU. The parameters stay the same objects, with other memory.
    optimizer : torch.optim.Optimizer or None
        Its parameters are those of the module, or some of them.
    store : Store, Group or None
        Open for writing. Several modules need a group each. With a process group of `torch.distributed`, all ranks call
        this: each with a store of its own, or rank 0 with the one store and the others with None. Those take the
        values of rank 0.
    also : dict of str to objects, optional
        Other objects with state_dict() and load_state_dict(), such as learning rate schedulers and gradient scalers.
        Each commit includes their states.
    alone : bool, default=False
        Whether only this process calls `persist`. By default, a call in a process group waits for all ranks.

    Returns
    -------
    Persisted
        Its `resumed` says whether the store had the values. On a rank without a store, an object with the same
        `resumed`, and no other attribute.

    Raises
    ------
    FingerprintMismatchError
        The store, or rank 0, has another module or optimizer. The message has the first key, shape or dtype that
        differs.
    ValueError
        A tensor is not on the CPU, the module or a part of it lies in a store or group already, tensors overlap in
        memory, or a parameter of the optimizer is not the module's. Some ranks have a store, and rank 0 has none, or is
        not the only one.
    TypeError
        Something has a state that a store can't keep: a sparse parameter, LBFGS, an optimizer that has another one's
        state, as ZeroRedundancyOptimizer. Ranks that have parts of the parameters (FSDP) can't share a store.
    TransactionError
        The arguments of another rank are wrong, or rank 0 failed.
    InvalidNameError, NameConflictError
        The group has other names. Or keys of the module, in which a ``/`` makes a group, are no names of a store: "a"
        and "a/b" can't be in it both.
    ReadOnlyStoreError, OutOfSpaceError, ClosedStoreError

    A step raises ClosedStoreError after the store was closed, and DetachedError after the module has got other memory,
    as by ``module.half()``. Such a commit raises DetachedError, too.
    """
    ranks = Ranks()
    if ranks.count > 1 and not alone:
        return _on_ranks(ranks, module, optimizer, store, also)
    if not isinstance(store, NameMapping):
        raise TypeError(f"store is a Store or a Group, not a {type(store).__name__}: persist(module, None, store)")
    _check(module, optimizer)
    return _persist(module, optimizer, store, also)


def _check(module: Any, optimizer: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a torch.nn.Module, not a {type(module).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer or None, not a {type(optimizer).__name__}")


def _persist(
    module: torch.nn.Module, optimizer: Any, store: Store | Group, also: Mapping[str, Any] | None
) -> Persisted:
    whole: Store = store.store
    try:
        whole._catalog.writable()
    except ReadOnlyStoreError as error:
        raise ReadOnlyStoreError(
            f"{error}. module.load_state_dict(pmstore.torch.state_dict(store.group('module'))) copies a stored module"
        ) from error
    made = Persisted(module, optimizer, store, also)
    others = made._before()
    made._refuse_shared(others)
    for other in others:  # what its optimizer created since the last commit belongs to the stored values
        with contextlib.suppress(DetachedError):
            other.before_commit()
    made._begin()
    for other in others:
        other.end("persist has put another module or optimizer in its place")
    made.own()
    if not made.resumed and not whole.in_transaction:
        whole.commit()
    return made


# ---- many processes


class PersistedElsewhere(NamedTuple):
    """What `persist` returns on a rank without a store: the store of rank 0 has the values.

    resumed : bool
        Whether it had them already.
    """

    resumed: bool


class _Rank(NamedTuple):
    """What a rank tells the others before it begins."""

    error: str | None  # why it can't
    has_store: bool
    is_divided: bool
    form: list[str]  # what all ranks have to have, in words


def _on_ranks(
    ranks: Ranks, module: torch.nn.Module, optimizer: Any, store: Store | Group | None, also: Mapping[str, Any] | None
) -> Persisted | PersistedElsewhere:
    """See `persist`, with a process group."""
    failure = None
    mine = _Rank(None, store is not None, False, [])
    try:
        _check(module, optimizer)
        if store is not None and not isinstance(store, NameMapping):
            raise TypeError(f"store is a Store, a Group or None, not a {type(store).__name__}")
        objects = {**extra_states(module), **(also or {})}
        mine = mine._replace(is_divided=is_divided(module), form=_form(module, optimizer, objects))
        if not mine.is_divided:
            ModuleTensors(module)  # which refuses what no store can have
    except BaseException as error:
        failure = error
        mine = mine._replace(error=f"{type(error).__name__}: {error}")
    found: list[_Rank] = ranks.tell(ranks.gather(mine))
    if failure is not None:
        raise failure
    if not _share_one(found):
        assert store is not None
        return _persist(module, optimizer, store, also)
    return _share(ranks, module, optimizer, store, objects)


def _share_one(found: list[_Rank]) -> bool:
    """Whether the ranks share the store of rank 0; otherwise each has its own. Raises the same error on all ranks."""
    for rank, one in enumerate(found):
        if one.error is not None:
            raise TransactionError(f"persist failed on rank {rank}: {one.error}")
    having = [rank for rank, one in enumerate(found) if one.has_store]
    if len(having) == len(found):
        return False
    if having != [0]:
        raise ValueError(
            f"persist gets a store on rank 0 alone, or on each rank: here it has one on {having or 'none'}"
        )
    if any(one.is_divided for one in found):
        raise TypeError(
            "the ranks have different parts of the module's parameters: use DistributedDataParallel, which gives each "
            "rank all of them, or torch.distributed.checkpoint"
        )
    for rank, one in enumerate(found):
        for mine, theirs in zip_longest(found[0].form, one.form, fillvalue="no more"):
            if mine != theirs:
                raise FingerprintMismatchError(f"rank {rank} has {theirs}, where rank 0 has {mine}")
    return True


def _form(module: torch.nn.Module, optimizer: Any, objects: Mapping[str, Any]) -> list[str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    form = [f"{name!r} of shape {tuple(one.shape)} and dtype {one.dtype} on {one.device}" for name, one in tensors]
    names = {id(one): name for name, one in tensors}
    if optimizer is not None:
        groups = [[names.get(id(one), "") for one in group["params"]] for group in optimizer.param_groups]
        form.append(f"an optimizer {type(optimizer).__name__} of {groups}")
    return [*form, *(f"also={name!r}" for name in objects)]


def _share(
    ranks: Ranks,
    module: torch.nn.Module,
    optimizer: Any,
    store: Store | Group | None,
    objects: Mapping[str, Any],
) -> Persisted | PersistedElsewhere:
    """Persist on rank 0, and give its values to the other ranks. objects: `also`, and the extra states."""
    made = failure = told = None
    if store is not None:
        try:
            made = _persist(module, optimizer, store, objects)
            told = made.resumed, {name: stored_state(one.state_dict()) for name, one in objects.items()}
        except BaseException as error:
            failure = error
    told, text = ranks.tell((told, failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    if text is not None:
        raise TransactionError(f"persist failed on rank 0: {text}")
    resumed, states = told
    ranks.share_tensors([*module.parameters(), *module.buffers()])
    if optimizer is not None:
        ranks.share_state(optimizer)
        ranks.share_settings(optimizer)
    if made is not None:
        return made
    for name, one in objects.items():
        one.load_state_dict(given_state(states[name], one.state_dict()))
    return PersistedElsewhere(resumed)
