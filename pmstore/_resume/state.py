"""The state of an iterative algorithm: a table of fields, and where each of them is kept.

The group of a fit holds::

    progress      one record: run, iteration, best_run, best_iterations, and every field without axes
    <field>       an array for every other field that is stored, under the field's name
    <generator>   the state of a random generator: a record for a RandomState, a dict for numpy's Generator
    <kept>/       the group of a field with a Keeper
    history/      the history of the fit (history.py)

Derived fields are in the process's own memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pmstore._errors import ClosedStoreError
from pmstore._resume.fingerprint import state_of
from pmstore._resume.fit_group import FitGroup
from pmstore._resume.history import HISTORY, check_history
from pmstore._store.mapping import Group
from pmstore._values.array import axes_of, is_solid, order_of, root_of
from pmstore._values.generators import (
    SPAWNED,
    check_generator_state,
    counts_children,
    generator_state,
    set_generator_state,
)
from pmstore._values.sharing import sharing
from pmstore._values.tensors import is_tensor
from pmstore._values.types import is_text
from pmstore._values.values import changeable_inside, contents_of, copied, encode

__all__ = ["Field", "State", "check_generator_state"]

Array = npt.NDArray[Any]

PROGRESS = "progress"
_COUNTERS = [("run", "<i8"), ("iteration", "<i8"), ("best_run", "<i8"), ("best_iterations", "<i8")]

TAKEN = (PROGRESS, HISTORY, "fingerprint", "finished", *(name for name, _ in _COUNTERS))
"""Names that no field can have."""

_OF_THE_ALGORITHM = ("history_", "slot_name_", "resumed_from_run_", "resumed_from_iter_")

SMALL = 64 << 10  # bytes

RANDOM_STATE = np.dtype([("key", "<u4", (624,)), ("pos", "<i8"), ("has_gauss", "<i8"), ("gauss", "<f8")])


class Keeper(Protocol):
    """Keeps state that no table known from the start can describe, in a group of its own."""

    def capture(self, group: Group) -> None:
        """Put everything into the store that isn't there, as part of the caller's transaction."""

    def resume(self, group: Group) -> None:
        """Take up the state of an unfinished fit from the store."""

    def load(self, group: Group) -> None:
        """Take copies of the results of a finished fit from the store."""

    def check(self, fit_group: FitGroup, name: str) -> None:
        """Raise FingerprintMismatchError unless the fit group holds in `name` the contents that `capture` puts
        there."""


@dataclass(frozen=True)
class Field:
    """A row of the table of an algorithm's state.

    Parameters
    ----------
    name : str
        ``state.name`` is the field. It may have a "/", which makes groups in the store: ``state["centers/0"]``.
    shape : int or tuple of int, default=()
        Fields without axes are together in one small record. Reading them returns Python's int, float, bool or bytes.
        If the algorithm continues to compute with a numpy scalar, use ``dtype=object``: it comes back with its own
        type. A Python float would make float32 arithmetic round differently.
    dtype : dtype, default=float
        Any dtype that a store can keep. ``object``: a Python value that a store can keep (None, str, a list, …). It is
        None at first. Each commit stores it if it was assigned, or changed in place. Such a value can also be an array
        whose dtype isn't known before, or that each iteration makes anew. Then `shape` is its required shape, unless
        the value is None. Each commit compares all of it with what is stored, so that a large array which changes in
        place is better a field with axes.
    role : {"result", "working", "best", "derived"}, default="result"
        Where the field is kept, and for how long.

        "result"
            Stored, and kept when the fit is finished.
        "working"
            Stored until the fit is finished.
        "best"
            Stored, and kept when the fit is finished: the state of the best run so far. `Resumable.step` does not
            change it, and commits between the ends of runs don't scan it.
        "derived"
            In plain memory, not stored. `Resumable.start` or the first step fills it; when a fit is resumed,
            `Resumable.derive` does. It must have axes.
    generator : RandomState or Generator, optional
        A random generator. Its state is stored with every commit, and restored when a fit is resumed or loaded.
        `shape`, `dtype` and `role` are then ignored. A RandomState must be over MT19937, as it is if it was made from a
        seed.
    keeper : Keeper, optional
        An object that keeps the state itself; all other arguments except the name are then ignored.
    """

    name: str
    shape: int | tuple[int, ...] = ()
    dtype: npt.DTypeLike = float
    role: Literal["result", "working", "best", "derived"] = "result"
    generator: np.random.RandomState | np.random.Generator | None = None
    keeper: Keeper | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a field is a str, not {type(self.name).__name__}: {self.name!r:.80}")
        shape = axes_of(self.shape)
        dtype = np.dtype(self.dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype)
        if self.role not in ("result", "working", "best", "derived"):
            raise ValueError(f"the field {self.name!r} is a result, working, best or derived, not {self.role!r}")
        if self.role == "derived" and not shape:
            raise ValueError(f"the derived field {self.name!r} needs axes: without any, it is an attribute of yours")
        if dtype.subdtype is not None:
            inner, axes = dtype.subdtype
            raise ValueError(f"the axes {axes} of the dtype of {self.name!r} belong into its shape, with dtype={inner}")
        if not isinstance(self.generator, np.random.RandomState | np.random.Generator | None):
            raise TypeError(
                f"the generator of {self.name!r} is a RandomState or a Generator of numpy, no "
                f"{type(self.generator).__name__}: np.random.default_rng(seed) makes one"
            )
        if isinstance(self.generator, np.random.RandomState):
            check_random_state_kind(self.generator)

    @property
    def is_value(self) -> bool:
        """Whether the field is a Python value."""
        return self._is_plain and self.dtype == object

    @property
    def is_array(self) -> bool:
        """Whether the field has axes."""
        return self._is_plain and self.dtype != object and self.shape != ()

    @property
    def is_scalar(self) -> bool:
        """Whether the field is a part of the record."""
        return self._is_plain and self.dtype != object and self.shape == ()

    @property
    def _is_plain(self) -> bool:
        return self.generator is None and self.keeper is None


def check_random_state_kind(random_state: np.random.RandomState) -> None:
    """Raise ValueError unless the state of the generator can be kept, as that of every RandomState made from a seed."""
    kind = state_of(random_state)["bit_generator"]
    if kind != "MT19937":
        raise ValueError(f"random_state must be a RandomState over MT19937 to be kept in a store, not over {kind}")


def random_state_record(random_state: np.random.RandomState) -> tuple[Any, ...]:
    """The state of a generator over MT19937, for an array of dtype RANDOM_STATE."""
    now = state_of(random_state)
    return now["state"]["key"], now["state"]["pos"], now["has_gauss"], now["gauss"]


def set_random_state(random_state: np.random.RandomState, record: Array) -> None:
    """Set a generator to a state of `random_state_record`. Raises ValueError if it is no such state."""
    check_generator_state("MT19937", {"state": {"pos": int(record["pos"])}})
    random_state.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": record["key"].copy(), "pos": int(record["pos"])},
            "has_gauss": int(record["has_gauss"]),
            "gauss": float(record["gauss"]),
        }
    )


class State:
    """The fields of an algorithm, as attributes and by name, and the progress of the algorithm.

    Assigning to a field copies into it. Fields with axes are arrays; while the algorithm runs in a store, they are live
    arrays of the store. Change them in place.

    Parameters
    ----------
    fields : iterable of Field

    Attributes
    ----------
    run : int
        The number of the current run, from 0.
    iteration : int
        The number of iterations done in it.
    best_run, best_iterations : int
        The best of the runs that have ended, and the number of its iterations; -1 and 0 before the first run ends.
    """

    __slots__ = (
        "_arrays",
        "_assigned",
        "_fields",
        "_generators",
        "_group",
        "_hashes",
        "_keepers",
        "_kept",
        "_live",
        "_record",
        "_values",
    )

    _arrays: dict[str, Array]  # live arrays: all except those of the best run
    _assigned: set[str]  # values that the next commit stores
    _fields: tuple[Field, ...]
    _generators: dict[str, Any]
    _hashes: dict[str, Any]  # of values that can be changed in place, as the store has them; None: not known
    _group: Group | None  # a group of the store; None in plain memory
    _keepers: dict[str, Keeper]
    _kept: dict[str, bytes]  # encoded states of generators, as they are in the store
    _live: dict[str, Array]  # where small array values are stored
    _record: Array
    _values: dict[str, Any]

    def __init__(self, fields: Iterable[Field]) -> None:
        """The fields in plain memory, all zeros."""
        fields = tuple(fields)
        names = [field.name for field in fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two fields have the same name: {', '.join(twice)}")
        if taken := sorted(filter(_is_taken, names)):
            raise ValueError(f"names that the fit itself uses, so that no field can have them: {', '.join(taken)}")
        set_slot = super().__setattr__
        set_slot("_fields", fields)
        set_slot("_group", None)
        set_slot("_kept", {})
        set_slot("_hashes", {})
        set_slot("_live", {})
        set_slot("_assigned", set())
        set_slot("_record", np.zeros((), record_dtype(fields)))
        set_slot("_values", {field.name: None for field in fields if field.is_value})
        set_slot("_generators", {field.name: field.generator for field in fields if field.generator is not None})
        set_slot("_keepers", {field.name: field.keeper for field in fields if field.keeper is not None})
        set_slot("_arrays", {field.name: np.zeros(field.shape, field.dtype) for field in fields if field.is_array})
        self.best_run = -1

    # ---- fields

    def __getitem__(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is not None:
            return array
        if name in self._record.dtype.fields:  # type: ignore[operator]
            return self._record[name].item()
        for others in (self._values, self._generators):
            if name in others:
                return others[name]
        if self._group is not None and any(field.name == name for field in self._fields):
            return self._group[name]
        raise KeyError(f"{name!r} is none of the fields {', '.join(field.name for field in self._fields)}")

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._record.dtype.fields:  # type: ignore[operator]
            self._record[name] = value
        elif name in self._values:
            self._values[name] = self._own(name, value)
            self._assigned.add(name)
        elif name in self._generators:
            raise TypeError(f"{name!r} is a generator, which the table of fields names once and for all")
        else:
            self[name][...] = value

    def _own(self, name: str, value: Any) -> Any:
        """The value; or a copy without gaps, if it would change with another field, or the store would lose gaps."""
        if is_tensor(value):
            raise TypeError(
                f"{name!r} can't be a tensor: a resumed fit would have an array instead. Give the field a shape and a "
                f"dtype, and use torch.from_numpy(self.state.{name}) where a tensor is needed; or keep tensor.numpy()"
            )
        others, arrays = changeable_inside(value)
        return copied(value) if (others or arrays) and self._is_shared(name, others, arrays) else value

    def _is_shared(self, name: str, others: dict[int, Any], arrays: dict[int, Array]) -> bool:
        roots = {id(root): root for root in map(root_of, arrays.values())}
        is_own = all(root.flags.owndata for root in roots.values())
        # The best run's arrays are not among those below. To read them would make commits scan them.
        if not is_own or not all(map(is_solid, arrays.values())):
            return True
        live = [*self._arrays.values()]
        for key, one in self._values.items():
            if key != name:
                changeable, inside = changeable_inside(one, arrays=bool(arrays))
                if not others.keys().isdisjoint(changeable) or any(root in inside for root in roots):
                    return True
                live += (array for array in inside.values() if array.base is not None)  # others share no memory
        return any(np.may_share_memory(array, one) for array in arrays.values() for one in live)

    def __getattr__(self, name: str) -> Any:
        if name in State.__slots__:
            raise AttributeError(f"this State has no {name}: it was never initialized")
        try:
            return self[name]
        except KeyError as error:
            there = "; the object whose run() was called has it" if name in _OF_THE_ALGORITHM else ""
            raise AttributeError(f"{error.args[0]}{there}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            self[name] = value
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __getstate__(self) -> dict[str, Any]:
        """The state of copies and pickles. They are in plain memory and need no store. Keepers' values are left out,
        and so are the best run's arrays if their store is closed."""
        arrays = dict(self._arrays)
        if self._group is not None:
            with contextlib.suppress(ClosedStoreError):
                for field in self._fields:
                    if field.is_array and field.role == "best":
                        arrays[field.name] = self._group[field.name]
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "_arrays": {name: np.array(array) for name, array in arrays.items()},
            "_record": np.array(self._record),
            "_fields": tuple(field for field in self._fields if field.keeper is None),
            "_keepers": {},
            "_kept": {},
            "_live": {},
            "_hashes": {},
            "_group": None,
        }

    def __setstate__(self, kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name, _ in _COUNTERS), *(field.name for field in self._fields)]

    def settle(self) -> None:
        """Make values their own after a step, which may have changed them in place: a value that shares something is
        copied then, as a resume would copy it. Otherwise what follows would depend on whether there was one."""
        if self._values:
            for name in sharing(self._values, [*self._arrays.values(), *self._generators.values()]):
                self._values[name] = copied(self._values[name])

    # ---- the store; all of this is part of the caller's transaction

    def move_to(self, group: Group) -> None:
        """Move everything into the store, and work there from now on."""
        set_slot = super().__setattr__
        group[PROGRESS] = self._record
        set_slot("_record", group[PROGRESS])
        for field in self._fields:
            if field.is_array and field.role != "derived":
                group[field.name] = self._arrays.pop(field.name)
                if field.role != "best":
                    self._arrays[field.name] = group[field.name]
        for name, generator in self._generators.items():
            if isinstance(generator, np.random.RandomState):
                self._arrays[_kept_as(name)] = group.create_array(name, (), RANDOM_STATE)
        set_slot("_group", group)
        self._assigned.update(self._values)
        self.capture()

    def resume(self, group: Group) -> None:
        """Take up the state of an unfinished fit from the store."""
        set_slot = super().__setattr__
        set_slot("_record", group[PROGRESS])
        set_slot("_group", group)
        for field in self._fields:
            if field.is_array and field.role != "derived":
                del self._arrays[field.name]
                if field.role != "best":
                    self._arrays[field.name] = group[field.name]
            elif field.is_value:
                value = self._values[field.name] = group._own_value(field.name)
                self._hashes[field.name] = contents_of(value)
        for name in self._generators:
            self._restore(name, group)
            if isinstance(self._generators[name], np.random.RandomState):
                self._arrays[_kept_as(name)] = group[name]
        for name, keeper in self._keepers.items():
            keeper.resume(group.group(name))

    def load(self, group: Group) -> None:
        """Take copies of the results of a finished fit from the store."""
        super().__setattr__("_record", np.array(group[PROGRESS]))
        for field in self._fields:
            if field.is_value:
                self._values[field.name] = group._own_value(field.name)
            elif field.is_array and field.role in ("result", "best"):
                self._arrays[field.name] = np.array(group[field.name])
        self.drop_working()
        for name in self._generators:
            self._restore(name, group)
        for name, keeper in self._keepers.items():
            keeper.load(group.group(name))

    def capture(self, generators: bool = True) -> None:
        """Put everything into the store that isn't there already: generators, values, and the state of Keepers.

        generators: whether generators may have drawn since the last call. Reading the state of one takes long.
        """
        group = self._group
        if group is None:
            return
        for name, value in self._values.items():
            if name in self._assigned:
                self._put_value(group, name, value)
                # Most values are assigned again before the next commit. Others than arrays are hashed only there.
                self._hashes[name] = contents_of(value) if isinstance(value, np.ndarray) else None
            elif (now := contents_of(value)) != self._hashes[name]:
                self._put_value(group, name, value)
                self._hashes[name] = now
        self._assigned.clear()
        for name, generator in self._generators.items() if generators else ():
            if isinstance(generator, np.random.RandomState):
                self._arrays[_kept_as(name)][...] = random_state_record(generator)
            else:
                state = generator_state(generator)
                encoded = encode(state)
                if self._kept.get(name) != encoded:
                    group[name] = state
                    self._kept[name] = encoded
        for name, keeper in self._keepers.items():
            keeper.capture(group.group(name))

    def drop_working(self) -> None:
        """Delete the fields that a finished fit doesn't need."""
        for field in self._fields:
            if field.role in ("working", "derived") and (field.is_array or field.is_value):
                self._arrays.pop(field.name, None)
                self._values.pop(field.name, None)
                self._hashes.pop(field.name, None)
                self._live.pop(field.name, None)
                if self._group is not None and field.role == "working":
                    del self._group[field.name]

    def _put_value(self, group: Group, name: str, value: Any) -> None:
        """Copy a value into the store. A small array, which each iteration may make anew, goes into its existing
        place."""
        is_live = type(value) is np.ndarray and not is_text(value.dtype)
        live, small = self._live.get(name), is_live and value.nbytes <= SMALL
        if small and live is not None and _layout(live) == _layout(value):
            live[...] = value
            return
        group[name] = value
        self._live.pop(name, None)
        if small:  # a large array is written only once if no reference to it is kept
            self._live[name] = group[name]

    def _restore(self, name: str, group: Group) -> None:
        generator, kept = self._generators[name], group[name]
        if isinstance(generator, np.random.RandomState):
            set_random_state(generator, kept)
        else:
            set_generator_state(generator, kept)
            self._kept[name] = encode(kept)


def _is_taken(name: str) -> bool:
    """Whether no field can have a name: it is one of TAKEN, in the group of the history, or an attribute of State."""
    return name in TAKEN or name.startswith(f"{HISTORY}/") or hasattr(State, name)


def record_dtype(fields: Iterable[Field]) -> np.dtype[Any]:
    """The dtype of the record that holds the counters and all fields without axes."""
    members: list[tuple[str, Any]] = [*_COUNTERS]  # Any: otherwise mypy takes minutes to find these tuples
    members += [(field.name, np.dtype(field.dtype)) for field in fields if field.is_scalar]
    return np.dtype(members)


def check_fit_group(fit_group: FitGroup, fields: Iterable[Field], runs: int, max_iter: int | None) -> None:
    """Raise FingerprintMismatchError unless the group holds all fields of such a fit, with possible values."""
    fields = tuple(fields)
    fit_group.require(PROGRESS, (), record_dtype(fields))
    _check_counters(fit_group, runs, max_iter)
    check_history(fit_group)
    for field in fields:
        if field.role == "derived" or (field.role == "working" and fit_group.finished):
            continue
        if isinstance(field.generator, np.random.RandomState):
            fit_group.require(field.name, (), RANDOM_STATE)
            _check_generator(fit_group, field.name, np.random.RandomState(0))
        elif field.is_array:
            fit_group.require(field.name, field.shape, field.dtype)  # type: ignore[arg-type]
        elif field.generator is not None:
            like = np.random.Generator(type(field.generator.bit_generator)(0))
            _check_generator(fit_group, field.name, like, counts_children(field.generator))
        elif field.keeper is not None:
            field.keeper.check(fit_group, field.name)
        elif field.is_value:
            value = fit_group.group.get(field.name, field)
            if value is field:
                raise fit_group.changed(field.name, "a value")
            if field.shape and value is not None and getattr(value, "shape", None) != field.shape:
                raise fit_group.changed(field.name, f"an array of shape {field.shape}")


def _check_counters(fit_group: FitGroup, runs: int, max_iter: int | None) -> None:
    """Check the counters: with impossible ones, a loop might never end, or use a best run that does not exist."""
    progress = fit_group.group[PROGRESS]
    run, iteration, best, best_iterations = (int(progress[name]) for name, _ in _COUNTERS)
    ended = run + 1 if fit_group.finished else run  # runs that have ended; one of them is the best
    if (
        not (run == runs - 1 if fit_group.finished else 0 <= run < runs)
        or not (0 <= best < ended or best == ended - 1 == -1)
        or not all(n >= 0 and (max_iter is None or n <= max_iter) for n in (iteration, best_iterations))
    ):
        found = f"run {run}, iteration {iteration}, and as the best run {best}, {best_iterations} iterations"
        most = "" if max_iter is None else f" of {max_iter} iterations"
        raise fit_group.changed(PROGRESS, f"the progress of a fit of {runs} runs{most}", found)


def _check_generator(
    fit_group: FitGroup, name: str, like: np.random.RandomState | np.random.Generator, counts: bool = True
) -> None:
    """Try the state on another generator of the same kind. counts: whether the fit's own one counts its children."""
    kept = fit_group.group.get(name)
    try:
        if isinstance(like, np.random.RandomState):
            set_random_state(like, kept)
        else:
            set_generator_state(like, kept)
            if SPAWNED in kept and not counts:
                raise ValueError("it is that of a generator with a SeedSequence")
    except ValueError as error:
        raise fit_group.changed(name, "the state of a generator", f"something else ({error})") from error


def _layout(array: Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, order_of(array)


def _kept_as(name: str) -> str:
    """The name of a generator's record among the arrays, which no field can have."""
    return f"{name}/"
