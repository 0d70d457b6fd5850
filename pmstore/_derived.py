"""Derived arrays: functions of other arrays, which are recomputed rather than logged (D12).

The value is in ordinary memory. The store has the declaration; with verify=, what the value was; with policy "store",
the value itself. What holds, whatever crashes, rolls back or fails:

- **I15** A value is given only for what its inputs hold at that moment: their digest, taken on every look, is compared
  with the one that the value was computed from, or that stands in its stamp.
- **I16** A stored value counts only with a stamp whose digest is that of the inputs. The stamp is deleted before the
  value is written and written after it. So whichever commit, or rollback, they and the inputs end up in, a mixture of
  them costs a recomputation, and never gives a wrong value.
- **I17** Value, stamp and decision change after the function has returned, its value passed all checks, and the inputs
  were found to be still what they were. If anything fails before, all of them are as before.

::

              look: digest differs                         look: digest is the same
    ABSENT ─────────────────────────▶ compute ─▶ KEPT ◀──────────────────────────────┐
      ▲  │                               ▲        │ └────────────────────────────────┘
      │  └── stored, and its stamp fits: loaded ──┤
      │                                  └────────┘ look: an input has changed, or a rollback took it back
      └── reopening, recovery: ordinary memory is gone

Looking takes the lock `Catalog.deriving`, and the store's own only for moments: while a function runs, others use the
store. If they change the inputs meanwhile, that is noticed (I17).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._array import Array, layout, order_of, read_layout
from pmstore._core import Entry
from pmstore._decision import Decision, decide, seconds_per_byte
from pmstore._declaration import POLICIES, Declaration, Stamp, path_of_function
from pmstore._errors import (
    UNSOUND,
    CorruptStoreError,
    DerivedArrayError,
    DerivedMismatchError,
    NameConflictError,
    NonDeterministicError,
    OutOfSpaceError,
    UnknownNameError,
)
from pmstore._inputs import Input, Looked, Named, combine, given, hash_array, read_only
from pmstore._kinds import DERIVED
from pmstore._names import derived_prefix, key_of, stamp_key, value_key
from pmstore._verify import differs, summary_of, verify_of

if TYPE_CHECKING:
    from pmstore._catalog import Catalog
    from pmstore._mapping import NameMapping

__all__ = ["Derived", "declare"]

logger = logging.getLogger("pmstore")

_DEPTH = 50  # derived arrays that need one another, one after the other
_CALLS = 5  # whose times are remembered


class Derived:
    """A derived array: made by `Store.derive`.

    It has the value that its function gives for what its inputs hold when it is read, computed if there is none for
    that. ``derived.value``, ``derived[...]`` and ``np.asarray(derived)`` give it, and so does ``store[name]``.

    Reading raises DerivedArrayError if there is no value, with the function's exception as its ``__cause__``;
    NonDeterministicError as `verify` says; UnknownNameError if the name was deleted or its declaration rolled back;
    ClosedStoreError, ForkedStoreError.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_calls",
        "_catalog",
        "_computing",
        "_decision",
        "_declared",
        "_directory",
        "_entry",
        "_function",
        "_inputs",
        "_kept",
        "_key",
        "_name",
    )

    def __init__(
        self,
        catalog: Catalog,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[Input],
        arguments: dict[str, Input],
        declared: Declaration,
        directory: str,
    ) -> None:
        """For `declare` only."""
        self._catalog = catalog
        self._name = name
        self._key = key_of(name)
        self._function = function
        self._inputs = inputs
        self._arguments = arguments
        self._declared = declared
        self._directory = directory
        self._kept: tuple[int, Array] | None = None  # digest of the inputs, value
        self._calls: deque[float] = deque(maxlen=_CALLS)
        self._computing = False
        self._decision = _decision_of(declared)
        self._entry: Entry | None = None  # of the declaration, when it was last found to be this one

    @property
    def name(self) -> str:
        """The full name in the store."""
        return self._name

    @property
    def decision(self) -> Decision:
        """How the value is kept, and why."""
        return self._decision

    @property
    def value(self) -> Array:
        """The array, which can't be written.

        It stays as it is when the inputs change, and reading again gives another one.
        """
        with self._catalog.deriving:
            return self.at_depth({}, 0)

    @property
    def valid(self) -> bool:
        """Whether there is a value for what the inputs hold now, so that reading computes nothing."""
        with self._catalog.deriving:
            try:
                digest = self.look({}, 0)
            except DerivedArrayError:
                return False
            return (self._kept is not None and self._kept[0] == digest) or self._stored(digest) is not None

    def set(self, value: Any) -> None:
        """Declare an array to be the value for what the inputs hold now: for who has it already.

        Parameters
        ----------
        value : ndarray
            What the function would give. It is copied, unless it owns its memory and is not writeable.

        Raises
        ------
        DerivedArrayError
            It is no array that a store could keep, or an input is missing.
        """
        array = self._checked(value, "was given")
        if array is value and value.flags.writeable:
            array = value.copy(order="K")
        with self._catalog.deriving:
            self._keep(array, self._stamp_of(self.look({}, 0), array))

    def __getitem__(self, index: Any) -> Any:
        """Of the value."""
        return self.value[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The value."""
        array = self.value
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"a copy is needed to make {dtype} of {array.dtype}")
        if dtype is None and not copy:
            return array
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __len__(self) -> int:
        """Of the value."""
        return len(self.value)

    def __repr__(self) -> str:
        """Nothing is computed for it."""
        inputs = ", ".join("(given)" if name is None else repr(name) for name in self._declared.inputs)
        return f"<Derived {self._name!r}: {self._declared} of {inputs}; {self._decision.policy}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Derived of an open store can't be pickled or copied; pass its value")

    # ---- looking

    def look(self, looked: Looked, depth: int) -> int:
        """The digest of function, version and what the inputs hold now. For the holder of `deriving`."""
        self._require_declared()
        if self._computing:
            raise DerivedArrayError(self._name, f"needs itself: {self._declared.function} reads it")
        if depth > _DEPTH:
            raise DerivedArrayError(self._name, f"has more than {_DEPTH} derived arrays below it: store one of them")
        catalog = self._catalog
        positional = [source.digest(self._name, catalog, looked, depth) for source in self._inputs]
        keyword = {name: source.digest(self._name, catalog, looked, depth) for name, source in self._arguments.items()}
        digest = looked[self._name] = combine([self._declared.function, self._declared.version, positional, keyword])
        return digest

    def at_depth(self, looked: Looked, depth: int) -> Array:
        """The value, for the holder of `deriving`."""
        digest = self.look(looked, depth)
        if self._kept is not None and self._kept[0] == digest:
            array = self._kept[1]
            if self._decision.policy == "store" and self._stored(digest) is None:  # it was rolled back, say
                self._put(array, self._stamp_of(digest, array))
            return array
        loaded = self._load(digest)
        if loaded is None:
            return self._compute(digest, looked, depth)
        self._kept = digest, read_only(loaded)
        return self._kept[1]

    def _require_declared(self) -> None:
        with self._catalog.lock:
            entry = self._catalog.core.get(self._key)
            if entry is not None and entry == self._entry:
                return
            if entry is None or entry.kind != DERIVED:
                raise UnknownNameError(
                    self._name,
                    lambda: (
                        ": this derived array was deleted, replaced or its declaration rolled back; declare it again"
                    ),
                )
            different = self._catalog.declaration(self._name, entry).differences(self._declared)
        if different:
            raise _mismatch(self._name, different)
        self._entry = entry

    # ---- computing

    def _compute(self, digest: int, looked: Looked, depth: int) -> Array:
        catalog = self._catalog
        inputs = [source.value(self._name, catalog, looked, depth) for source in self._inputs]
        arguments = {name: source.value(self._name, catalog, looked, depth) for name, source in self._arguments.items()}
        self._computing = True
        start = time.perf_counter()
        try:
            value = self._function(*inputs, **arguments)
        except Exception as error:
            raise DerivedArrayError(
                self._name, f"has no value: {self._declared.function} raised {type(error).__name__}: {error}"
            ) from error
        finally:
            self._computing = False
        took = time.perf_counter() - start
        array = self._checked(value, f"has no value: {self._declared.function} gave")
        if self.look({}, depth) != digest:
            raise DerivedArrayError(
                self._name,
                f"has no value: an input changed while {self._declared.function} ran. Either it writes to its inputs, "
                "or another thread does",
            )
        stamp = self._stamp_of(digest, array)
        self._verify(stamp)
        if self._declared.policy == "auto":
            self._calls.append(took)
            self._decide(array.nbytes)
        return self._keep(array, stamp)

    def _checked(self, value: Any, what: str) -> Array:
        """An array that nobody else will write to, unless it is the value itself."""
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if type(value) is not np.ndarray:
            raise DerivedArrayError(self._name, f"{what} a {type(value).__name__}, not a numpy array")
        try:
            layout(value.shape, value.dtype, "C", False)
        except (TypeError, ValueError) as error:
            raise DerivedArrayError(self._name, f"{what} an array that can't be kept: {error}") from error
        if not value.flags.owndata or not (value.flags.c_contiguous or value.flags.f_contiguous):
            order: Any = order_of(value)
            return np.array(value, order=order)
        return value

    def _keep(self, array: Array, stamp: Stamp) -> Array:
        """The value from now on."""
        array.flags.writeable = False
        self._kept = stamp.inputs, read_only(array)
        self._put(array, stamp)
        return self._kept[1]

    def _stamp_of(self, digest: int, array: Array) -> Stamp:
        verify = self._declared.verify
        if verify is None:
            return Stamp(digest, None, None)
        if verify == "hash":
            return Stamp(digest, hash_array(array), None)
        try:
            return Stamp(digest, None, summary_of(array))
        except TypeError as error:
            raise DerivedArrayError(self._name, f"can't be verified: {error}") from error

    def _verify(self, now: Stamp) -> None:
        was = self._stamp_for(now.inputs)
        if was is None:
            return
        how = ""
        verify = self._declared.verify
        if was.contents is not None and now.contents is not None and was.contents != now.contents:
            how = "another hash"
        elif was.summary is not None and now.summary is not None and isinstance(verify, tuple):
            how = differs(was.summary, now.summary, verify)
        if how:
            raise NonDeterministicError(
                self._name,
                f"was another one for the same inputs: now there is {how}. {self._declared.function} is not "
                "deterministic, or is another one than it was: give that another version=, and replace=True",
            )

    # ---- what is in the store

    def _stamp_for(self, digest: int) -> Stamp | None:
        """The stamp in the store if it is for that digest. A damaged one is none."""
        with self._catalog.lock:
            entry = self._catalog.core.get(stamp_key(self._key))
        if entry is None:
            return None
        try:
            stamp = Stamp.decode(entry.meta)
        except CorruptStoreError as error:
            logger.warning("derived array %r: %s", self._name, error)
            return None
        return stamp if stamp.inputs == digest else None

    def _stored(self, digest: int) -> Entry | None:
        """The entry of the value in the store, if it counts (I16)."""
        with self._catalog.lock:
            return None if self._stamp_for(digest) is None else self._catalog.core.get(value_key(self._key))

    def _load(self, digest: int) -> Array | None:
        """The value in the store, if it counts, verified against its hashes at rest."""
        catalog = self._catalog
        with catalog.lock:
            entry = self._stored(digest)
            if entry is None:
                return None
            try:
                described = read_layout(catalog.core, entry)
                buffer = np.empty(described.length, np.uint8)
                if described.length:
                    catalog.core.read_into(entry.offset, entry.length, buffer.data)
            except UNSOUND as error:
                logger.warning("derived array %r: the stored value is damaged, and recomputed: %s", self._name, error)
                return None
        order: Any = described.order
        array: Array = np.ndarray(described.shape, described.dtype, buffer=buffer, order=order)
        array.flags.writeable = False
        buffer.flags.writeable = False
        return array

    def _put(self, array: Array, stamp: Stamp) -> None:
        """Into the store what policy and `verify` want there, for the next commit."""
        catalog = self._catalog
        if catalog.read_only:
            return
        store = self._decision.policy == "store"
        value = value_key(self._key)
        with catalog.lock:
            try:
                catalog.core.delete(stamp_key(self._key))
                if store:
                    catalog.put_array(value, layout(array.shape, array.dtype, order_of(array), False), array)
                else:
                    catalog.core.delete(value)
                if store or self._declared.verify is not None:
                    catalog.put_encoded(stamp_key(self._key), stamp.encode(), "")
            except OutOfSpaceError as error:
                logger.warning("derived array %r is not stored, and will be recomputed: %s", self._name, error)

    def _decide(self, nbytes: int) -> None:
        """With policy "auto", after the function was called."""
        catalog = self._catalog
        if catalog.core.trace is not None or catalog.read_only:  # a recorded run has to be the same every time
            return
        before = None if self._decision.recompute_seconds is None else self._decision.policy
        recompute = statistics.median(self._calls)
        try:
            found = decide(before, recompute, nbytes, self._per_byte)
        except OSError as error:
            logger.info("derived array %r: writing can't be measured: %s", self._name, error)
            return
        if found.policy != before:
            logger.info("derived array %r: policy %s: %s", self._name, found.policy, found.reason)
            declared = self._declared._replace(decision=(found.policy, recompute, found.write_seconds))
            with catalog.lock:
                catalog.put_declaration(self._key, declared)
            self._declared = declared
        self._decision = found

    def _per_byte(self) -> float:
        catalog = self._catalog
        if catalog.seconds_per_byte is None:
            catalog.seconds_per_byte = seconds_per_byte(self._directory, catalog.core.media)
        return catalog.seconds_per_byte


def declare(
    mapping: NameMapping,
    name: str,
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    version: int | str,
    policy: str,
    verify: Any,
    replace: bool,
) -> Derived:
    """See `Store.derive`."""
    catalog = mapping._catalog
    full = mapping._full(name)
    key = key_of(full)
    if type(version) not in (int, str):
        raise TypeError(f"version is an int or a str, not {type(version).__name__}")
    if policy not in POLICIES:
        raise ValueError(f"policy is one of {', '.join(map(repr, POLICIES))}, not {policy!r:.80}")
    if not all(isinstance(what, str) for what in kwargs or {}):
        raise TypeError("kwargs are keyword arguments: their names are str")
    sources = [Named(mapping._full(source)) if isinstance(source, str) else given(source) for source in inputs]
    arguments: dict[str, Input] = {what: given(value) for what, value in sorted((kwargs or {}).items())}
    wanted = Declaration(
        path_of_function(function),
        version,
        tuple(source.name for source in sources),
        tuple(arguments),
        policy,
        verify_of(verify),
        None,
    )
    with catalog.deriving, catalog.lock:
        catalog.core.require_open()
        entry = catalog.core.get(key)
        if entry is None:
            catalog.writable()
            catalog.refuse_conflict(full, key)
        elif entry.kind != DERIVED:
            raise NameConflictError(f"the name {full!r} is taken by what is not derived: delete it first")
        stored = None if entry is None else catalog.declaration(full, entry)
        different = [] if stored is None else stored.differences(wanted)
        if different and not replace:
            raise _mismatch(full, different)
        if stored is not None and not different and stored.policy == policy == "auto":
            wanted = wanted._replace(decision=stored.decision)
        if stored is None or different:
            _refuse_cycle(catalog, full, wanted)
        if stored != wanted and not (catalog.read_only and not different):
            catalog.writable()
            if _decision_of(wanted).policy == "recompute":
                catalog.core.delete(value_key(key))
            catalog.put_declaration(key, wanted, derived_prefix(key) if different else b"")
        made = Derived(catalog, full, function, sources, arguments, wanted, os.path.dirname(mapping.store.path))
        before = catalog.derived.get(full)
        if before is not None:
            made._kept = before._kept  # if its digest is that of the inputs, it counts
        catalog.derived[full] = made
        return made


def _decision_of(declared: Declaration) -> Decision:
    if declared.policy != "auto":
        return Decision(declared.policy, f"policy={declared.policy!r} was asked for")
    if declared.decision is None:
        return Decision("recompute", "nothing was measured yet")
    policy, recompute, write = declared.decision
    return Decision(policy, "decided earlier, from these measurements", recompute, write)


def _mismatch(name: str, different: list[str]) -> DerivedMismatchError:
    return DerivedMismatchError(
        name,
        "is declared otherwise in the store than by the program: "
        f"{'; '.join(different)}. replace=True declares it anew",
    )


def _refuse_cycle(catalog: Catalog, name: str, wanted: Declaration) -> None:
    """DerivedArrayError if the array would need itself, by what the store says of those that it needs."""
    came_from = dict.fromkeys((source for source in wanted.inputs if source is not None), name)
    open_ = list(came_from)
    while open_:
        at = open_.pop()
        if at == name:
            path = [name]
            while (at := came_from[at]) != name:
                path.append(at)
            raise DerivedArrayError(name, f"would need itself: {' needs '.join(map(repr, [name, *reversed(path)]))}")
        entry = catalog.core.get(key_of(at))
        if entry is not None and entry.kind == DERIVED:
            for source in catalog.declaration(at, entry).inputs:
                if source is not None and source not in came_from:
                    came_from[source] = at
                    open_.append(source)
