"""The derived arrays that this process has declared in one store, and their shared state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from pmstore._catalog.catalog import Catalog
from pmstore._catalog.declaration import POLICIES, Declaration, path_of_function
from pmstore._catalog.kinds import DERIVED
from pmstore._catalog.names import derived_prefix, key_of, value_key
from pmstore._core import Entry
from pmstore._derived.decision import seconds_per_byte
from pmstore._derived.derived import Derived, decision_of, mismatch
from pmstore._derived.inputs import Input, Named, given
from pmstore._derived.verify import verify_of
from pmstore._errors import DerivedArrayError, NameConflictError
from pmstore._interrupts import later
from pmstore._locks import Lock
from pmstore._values.array import Array

__all__ = ["Asked", "DerivedArrays", "asked"]


class Asked(NamedTuple):
    """The checked arguments of `derive`. name: the full name. declared: the declaration that the store is to hold."""

    name: str
    function: Callable[..., Any]
    inputs: Sequence[Input]
    arguments: Mapping[str, Input]
    declared: Declaration


def asked(
    full: Callable[[Any], str],
    name: str,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    version: int | str,
    policy: str,
    verify: Any,
) -> Asked:
    """Checks the arguments of `NameMapping.derive`. full: returns the full name of a name. Raises TypeError,
    ValueError."""
    if type(version) not in (int, str):
        raise TypeError(f"version is an int or a str, not {type(version).__name__}")
    if policy not in POLICIES:
        raise ValueError(f"policy is one of {', '.join(map(repr, POLICIES))}, not {policy!r:.80}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a dict of keyword arguments, not {kwargs!r:.80}")
    if not all(isinstance(what, str) for what in kwargs):
        raise TypeError("kwargs are keyword arguments: their names are str")
    sources = [Named(full(source)) if isinstance(source, str) else given(source) for source in inputs]
    arguments: dict[str, Input] = {str.__str__(what): given(value) for what, value in sorted(kwargs.items())}
    names = tuple(source.name for source in sources)
    path = path_of_function(function)
    declared = Declaration(path, version, names, tuple(arguments), policy, verify_of(verify), None)
    return Asked(full(name), function, sources, arguments, declared)


class DerivedArrays:
    """The derived arrays of an open store.

    lock: held while an array is checked and computed, so that the store's own lock is free while a function runs. A
    thread takes it before the catalog's lock, never after. declared: by full name, the newest last. Arrays before it,
    and those of deleted names, are there as long as a rollback may bring their declarations back. pins: entry, array
    and hash of inputs that can't change, by full name.
    """

    __slots__ = ("_changed", "_directory", "_seconds_per_byte", "catalog", "declared", "lock", "pins")

    def __init__(self, catalog: Catalog, path: str) -> None:
        self.catalog = catalog
        self.lock = Lock(catalog.lock)
        self.declared: dict[str, list[Derived]] = {}
        self._changed: dict[str, int] = {}  # the last commit before a declaration changed, by full name, in this order
        self.pins: dict[str, tuple[Entry, Array, int]] = {}
        self._directory = os.path.dirname(path)
        self._seconds_per_byte: float | None = None

    def by_name(self, name: str) -> Derived:
        """The array that this process declared under a name that has a declaration in the store: as the store has it,
        or else the newest."""
        found = self.declared.get(name)
        if found is None:
            raise DerivedArrayError(name, f"is {self._what(name)}; declare it with store.derive before it is read")
        return next(filter(Derived.is_current, reversed(found)), found[-1])

    def _what(self, name: str) -> str:
        with self.catalog.lock:
            entry = self.catalog.core.get(key_of(name))
            return "gone" if entry is None else str(self.catalog.declaration(name, entry))

    def seconds_per_byte(self) -> float:
        """The time to write a byte in the store's directory. It is measured once. Raises OSError."""
        if self._seconds_per_byte is None:
            self._seconds_per_byte = seconds_per_byte(self._directory, self.catalog.core.media)
        return self._seconds_per_byte

    def forget(self, name: str) -> None:
        """A name is about to be deleted, or was renamed. Its space can be used again once no array lies over it."""
        self.pins.pop(name, None)
        if found := self.declared.get(name):
            self._has_changed(name)
            for derived in found:
                derived._let_go()

    def _has_changed(self, name: str) -> None:
        """The declaration changes; a rollback brings it back until the next commit."""
        self._changed.pop(name, None)
        self._changed[name] = self.catalog.core.sequence

    def _forget_gone(self) -> None:
        """Forget the arrays whose declarations have left the store, if that is committed."""
        now = self.catalog.core.sequence
        for name, _ in list(takewhile(lambda change: change[1] < now, self._changed.items())):
            del self._changed[name]
            found = [derived for derived in self.declared.get(name, ()) if derived.is_current()]
            if found:
                self.declared[name] = found
            else:
                self.declared.pop(name, None)

    def leave(self) -> None:
        """A forked process calls this: another thread of the parent may hold the lock and compute an array."""
        self.lock = Lock(self.catalog.lock)
        self.pins = {}
        for derived in chain.from_iterable(list(self.declared.values())):
            derived._leave()

    def clear(self) -> None:
        """Forget all arrays: the store is closed."""
        self.declared.clear()
        self._changed.clear()
        self.pins.clear()

    def declare(self, what: Asked, replace: bool) -> Derived:
        """See `NameMapping.derive`."""
        with self.lock, self.catalog.lock, later():
            self._forget_gone()
            declared = self._resolve(what, replace)
            made = Derived(self, what._replace(declared=declared))
            before = self.declared.get(what.name, [])
            if before:
                made._take_over(before[-1])
            replaced = [derived for derived in before if not derived.is_current()]
            for derived in replaced:
                derived._let_go()
            self.declared[what.name] = [*replaced, made]
            self._has_changed(what.name)
            return made

    def _resolve(self, what: Asked, replace: bool) -> Declaration:
        """Compare the store's declaration with the requested one, and store the latter if they differ."""
        catalog, name, wanted, key = self.catalog, what.name, what.declared, key_of(what.name)
        catalog.core.require_open()
        entry = catalog.core.get(key)
        if entry is None:
            catalog.writable()
            catalog.refuse_conflict(name, key)
        elif entry.kind != DERIVED:
            raise NameConflictError(f"the name {name!r} is taken by a value that is not derived: delete it first")
        stored = None if entry is None else catalog.declaration(name, entry)
        different = [] if stored is None else stored.differences(wanted)
        if different and not replace:
            raise mismatch(name, different)
        if stored is None or different:
            self.refuse_cycle(name, wanted)
        elif stored.policy == wanted.policy == "auto":
            wanted = wanted._replace(decision=stored.decision)
        if stored != wanted and not (catalog.read_only and not different):
            catalog.writable()
            if decision_of(wanted).policy == "recompute":
                catalog.core.delete(value_key(key))
            catalog.put_declaration(key, wanted, derived_prefix(key) if different else b"")
        return wanted

    def refuse_cycle(self, name: str, wanted: Declaration) -> None:
        """Raises DerivedArrayError if an array of this name would depend on itself, according to the store's
        declarations of its inputs."""
        came_from = dict.fromkeys((source for source in wanted.inputs if source is not None), name)
        open_ = list(came_from)
        while open_:
            at = open_.pop()
            if at == name:
                path = [name]
                while (at := came_from[at]) != name:
                    path.append(at)
                text = " needs ".join(map(repr, [name, *reversed(path)]))
                raise DerivedArrayError(name, f"would need itself: {text}")
            entry = self.catalog.core.get(key_of(at))
            if entry is not None and entry.kind == DERIVED:
                for source in self.catalog.declaration(at, entry).inputs:
                    if source is not None and source not in came_from:
                        came_from[source] = at
                        open_.append(source)
