"""Derived arrays: functions of other arrays, which are recomputed rather than logged (D12).

The value is in ordinary memory. The store has the declaration; with verify=, a hash or summary of the value; with
policy "store", the value itself. These invariants hold through crashes, rollbacks and failures:

- **I15** A value is returned only if it belongs to the current contents of its inputs. Every access computes the digest
  of the inputs, and compares it with the digest that the value was computed from, or with the one in its stamp.
- **I16** A stored value is valid only with a stamp whose digest is that of the inputs. The stamp is deleted before the
  value is written, and written after it. If commits or rollbacks separate value, stamp and inputs, the value is
  recomputed, and never wrong.
- **I17** Value, stamp and decision change only after the function has returned, its value has passed all checks, and
  the inputs were found unchanged. If anything fails earlier, all three stay as they were.

::

              access: digest differs                       access: digest is the same
    ABSENT ─────────────────────────▶ compute ─▶ KEPT ◀──────────────────────────────┐
      ▲  │                               ▲        │ └────────────────────────────────┘
      │  └── stored, and its stamp fits: loaded ──┤
      │                                  └────────┘ access: an input has changed, or a rollback took it back
      └── reopening, recovery: ordinary memory is gone

An access holds the lock of `DerivedArrays`, and the store's own only for moments: other threads use the store while a
function runs. If they change the inputs meanwhile, the check after the function notices (I17).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from pmstore._catalog.declaration import Declaration, Stamp
from pmstore._catalog.kinds import DERIVED
from pmstore._catalog.names import key_of, stamp_key, value_key
from pmstore._core import Entry
from pmstore._derived.decision import Decision, decide
from pmstore._derived.inputs import Digests, combine, hash_array, read_only
from pmstore._derived.verify import differs, summary_of
from pmstore._errors import (
    UNSOUND,
    CorruptStoreError,
    DerivedArrayError,
    DerivedMismatchError,
    NonDeterministicError,
    OutOfSpaceError,
    UnknownNameError,
)
from pmstore._interrupts import later
from pmstore._values.array import Array, layout, order_of, read_layout

if TYPE_CHECKING:
    from pmstore._derived.arrays import Asked, DerivedArrays

__all__ = ["Derived", "decision_of", "mismatch"]


def _log(level: str, text: str, *arguments: Any) -> None:
    import logging  # it takes as long as a tenth of pmstore

    logging.getLogger("pmstore").log(getattr(logging, level), text, *arguments)


_DEPTH = 50  # derived arrays in a chain of inputs
_CALLS = 5  # calls whose times are kept


class Derived:
    """A derived array: made by `Store.derive`.

    Its value is that of its function for the current contents of its inputs. Reading computes it if there is none for
    them. ``derived.value``, ``derived[...]``, ``np.asarray(derived)`` and ``store[name]`` read it.

    Reading raises DerivedArrayError if there is no value, with the function's exception as its ``__cause__``;
    NonDeterministicError if `verify` finds another value; UnknownNameError if the name was deleted or its declaration
    rolled back; ClosedStoreError.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_arrays",
        "_calls",
        "_catalog",
        "_computing",
        "_decision",
        "_declared",
        "_entry",
        "_function",
        "_inputs",
        "_kept",
        "_key",
        "_name",
    )

    def __init__(self, arrays: DerivedArrays, asked: Asked) -> None:
        """Only `DerivedArrays.declare` calls this."""
        self._arrays = arrays
        self._catalog = arrays.catalog
        self._name = asked.name
        self._key = key_of(asked.name)
        self._function = asked.function
        self._inputs = asked.inputs
        self._arguments = asked.arguments
        self._declared = asked.declared
        self._kept: tuple[int, Array] | None = None  # digest of the inputs, value
        self._calls: deque[float] = deque(maxlen=_CALLS)
        self._computing = False
        self._decision = decision_of(asked.declared)
        self._entry: Entry | None = None  # of the declaration, when it last equalled this one

    def _take_over(self, before: Derived) -> None:
        """Take the value of another declaration of the name. It is valid if its digest is that of the inputs."""
        self._kept = before._kept

    def _let_go(self) -> None:
        """Forget the value: its declaration leaves the store. Another thread may be computing one."""
        self._kept = None

    def _leave(self) -> None:
        """A forked process calls this: it does not have the thread that computes the value."""
        self._computing = False

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

        It stays as it is when the inputs change. The next read returns another array.
        """
        with self._arrays.lock:
            return self._at_depth({}, 0)

    @property
    def valid(self) -> bool:
        """Whether there is a value for the current contents of the inputs, so that reading computes nothing."""
        with self._arrays.lock:
            try:
                digest = self._current_digest({}, 0)
            except DerivedArrayError:
                return False
            kept = self._kept
            return (kept is not None and kept[0] == digest) or self._stored(digest) is not None

    def set(self, value: Any) -> None:
        """Set the value for the current contents of the inputs, if the program has computed it already.

        Parameters
        ----------
        value : ndarray
            The array that the function would return. It is copied, unless it owns its memory and is not writeable.

        Raises
        ------
        DerivedArrayError
            The value is no array that a store could keep, or an input is missing.
        """
        array = self._checked(value, "was given")
        if array is value and value.flags.writeable:
            array = value.copy(order="K")
        with self._arrays.lock:
            self._keep(array, self._stamp_of(self._current_digest({}, 0), array))

    def __getitem__(self, index: Any) -> Any:
        """Elements of the value."""
        return self.value[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The value as a plain array."""
        array = self.value
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"a copy is needed to make {dtype} of {array.dtype}")
        if dtype is None and not copy:
            return array
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __len__(self) -> int:
        """The length of the value."""
        return len(self.value)

    def __repr__(self) -> str:
        """The name and the state. Nothing is computed."""
        inputs = ", ".join("(given)" if name is None else repr(name) for name in self._declared.inputs)
        return f"<Derived {self._name!r}: {self._declared} of {inputs}; {self._decision.policy}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Derived of an open store can't be pickled or copied; pass its value")

    # ---- reading inputs and value

    def _current_digest(self, digests: Digests, depth: int) -> int:
        """The digest of function, version and the current inputs. The caller holds `deriving`."""
        self._require_declared()
        if self._computing:
            raise DerivedArrayError(self._name, f"needs itself: {self._declared.function} reads it")
        if depth > _DEPTH:
            raise DerivedArrayError(self._name, f"has more than {_DEPTH} derived arrays below it: store one of them")
        arrays = self._arrays
        positional = [source.digest(self._name, arrays, digests, depth) for source in self._inputs]
        keyword = {name: source.digest(self._name, arrays, digests, depth) for name, source in self._arguments.items()}
        digest = digests[self._name] = combine([self._declared.function, self._declared.version, positional, keyword])
        return digest

    def _at_depth(self, digests: Digests, depth: int) -> Array:
        """The value. The caller holds `deriving`."""
        digest = self._current_digest(digests, depth)
        kept = self._kept
        if kept is not None and kept[0] == digest:
            array = kept[1]
            if self._decision.policy == "store" and self._stored(digest) is None:  # for example after a rollback
                self._put(array, self._stamp_of(digest, array))
            return array
        loaded = self._load(digest)
        if loaded is None:
            return self._compute(digest, digests, depth)
        array = read_only(loaded)
        self._kept = digest, array
        return array

    def is_current(self) -> bool:
        """Whether the store has this declaration, as far as it can be read."""
        try:
            self._require_declared()
        except (UnknownNameError, DerivedMismatchError):
            return False
        except UNSOUND:
            pass
        return True

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
            raise mismatch(self._name, different)
        self._entry = entry

    # ---- computing

    def _compute(self, digest: int, digests: Digests, depth: int) -> Array:
        arrays = self._arrays
        inputs = [source.value(self._name, arrays, digests, depth) for source in self._inputs]
        arguments = {name: source.value(self._name, arrays, digests, depth) for name, source in self._arguments.items()}
        start = time.perf_counter()
        try:
            self._computing = True
            value = self._function(*inputs, **arguments)
        except Exception as error:
            raise DerivedArrayError(
                self._name, f"has no value: {self._declared.function} raised {type(error).__name__}: {error}"
            ) from error
        finally:
            self._computing = False
        took = time.perf_counter() - start
        array = self._checked(value, f"has no value: {self._declared.function} gave")
        if self._current_digest({}, depth) != digest:
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
        """An array that no other code writes to: the value itself or a copy."""
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if type(value) is not np.ndarray:
            raise DerivedArrayError(self._name, f"{what} a {type(value).__name__}, not a numpy array")
        try:
            layout(value.shape, value.dtype, "C", False)
        except (TypeError, ValueError) as error:
            raise DerivedArrayError(self._name, f"{what} an array that can't be kept: {error}") from error
        if not value.flags.owndata or not (value.flags.c_contiguous or value.flags.f_contiguous):
            return np.array(value, order=order_of(value))
        return value

    def _keep(self, array: Array, stamp: Stamp) -> Array:
        """Make this the current value."""
        array.flags.writeable = False
        value = read_only(array)
        self._kept = stamp.inputs, value
        self._put(array, stamp)
        return value

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
                f"had another value for the same inputs: now there is {how}. {self._declared.function} is not "
                "deterministic, or it has changed: then declare it with another version= and replace=True",
            )

    # ---- the store's copy

    def _stamp_for(self, digest: int) -> Stamp | None:
        """The store's stamp, if it has that digest. A damaged stamp counts as none."""
        with self._catalog.lock:
            entry = self._catalog.core.get(stamp_key(self._key))
        if entry is None:
            return None
        try:
            stamp = Stamp.decode(entry.meta)
        except CorruptStoreError as error:
            _log("WARNING", "derived array %r: %s", self._name, error)
            return None
        return stamp if stamp.inputs == digest else None

    def _stored(self, digest: int) -> Entry | None:
        """The entry of the stored value, if it is valid (I16)."""
        with self._catalog.lock:
            return None if self._stamp_for(digest) is None else self._catalog.core.get(value_key(self._key))

    def _load(self, digest: int) -> Array | None:
        """The stored value, if it is valid, verified against its hashes at rest."""
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
                _log("WARNING", "derived array %r: the stored value is damaged, and recomputed: %s", self._name, error)
                return None
        order: Any = described.order
        array: Array = np.ndarray(described.shape, described.dtype, buffer=buffer, order=order)
        array.flags.writeable = False
        buffer.flags.writeable = False
        return array

    def _put(self, array: Array, stamp: Stamp) -> None:
        """Store the value and the stamp, as policy and `verify` require, for the next commit."""
        catalog = self._catalog
        if catalog.read_only:
            return
        store = self._decision.policy == "store"
        value = value_key(self._key)
        with catalog.lock, later():
            if not self.is_current():  # another thread has deleted or replaced the name while the function ran
                return
            try:
                catalog.core.delete(stamp_key(self._key))
                if store:
                    catalog.put_array(value, layout(array.shape, array.dtype, order_of(array), False), array)
                else:
                    catalog.core.delete(value)
                if store or self._declared.verify is not None:
                    catalog.put_encoded(stamp_key(self._key), stamp.encode(), "")
            except OutOfSpaceError as error:
                _log("WARNING", "derived array %r is not stored, and will be recomputed: %s", self._name, error)

    def _decide(self, nbytes: int) -> None:
        """Decide with policy "auto", after the function was called."""
        catalog = self._catalog
        if catalog.core.trace is not None or catalog.read_only:  # a recorded run must be the same every time
            return
        before = None if self._decision.recompute_seconds is None else self._decision.policy
        import statistics  # with decimal and fractions

        recompute = statistics.median(self._calls)
        try:
            found = decide(before, recompute, nbytes, self._arrays.seconds_per_byte)
        except OSError as error:
            _log("INFO", "derived array %r: writing can't be measured: %s", self._name, error)
            return
        if found.policy != before:
            _log("INFO", "derived array %r: policy %s: %s", self._name, found.policy, found.reason)
            declared = self._declared._replace(decision=(found.policy, recompute, found.write_seconds))
            with catalog.lock, later():
                if not self.is_current():  # as in _put
                    return
                catalog.put_declaration(self._key, declared)
            self._declared = declared
        self._decision = found


def decision_of(declared: Declaration) -> Decision:
    if declared.policy != "auto":
        return Decision(declared.policy, f"policy={declared.policy!r} was asked for")
    if declared.decision is None:
        return Decision("recompute", "nothing was measured yet")
    policy, recompute, write = declared.decision
    return Decision(policy, "decided earlier, from these measurements", recompute, write)


def mismatch(name: str, different: list[str]) -> DerivedMismatchError:
    return DerivedMismatchError(
        name,
        "is declared otherwise in the store than by the program: "
        f"{'; '.join(different)}. replace=True declares it anew",
    )
