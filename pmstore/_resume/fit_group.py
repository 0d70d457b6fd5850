"""The fit groups in which estimators keep their fits in a store.

A fit has a *fit group*: a group of the store that holds a ``fingerprint`` (all that the fit depends on), ``finished``,
and the arrays that the estimator needs to continue.

::

            begin()                  finish()
    absent ────────▶ unfinished ───────────────▶ finished
       ▲                 │                          │
       └─────────────────┴── forget(), prune() ─────┘

A store that is given by its path is open while a call uses it. If the process has it open anyway, the call uses that
store. Processes open it one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt

from pmstore._errors import (
    CorruptStoreError,
    Error,
    FingerprintMismatchError,
    ReadOnlyStoreError,
    StoreLockedError,
    TransactionError,
)
from pmstore._resume.fingerprint import Fingerprint, changed_entries, differences, digest, is_same
from pmstore._store import held, opening
from pmstore._store.entrance import open_for_fit
from pmstore._store.mapping import Group
from pmstore._store.store import Store

logger = logging.getLogger("pmstore")

StoreOrPath = Store | str | os.PathLike[str]

_SHOWN = 10  # differences in an error message

_registry = threading.Lock()
_locks: weakref.WeakKeyDictionary[Store, dict[str, threading.RLock]] = weakref.WeakKeyDictionary()


class FitGroup:
    """The group of a store that holds one fit.

    Parameters
    ----------
    store : Store
    name : str
        The group.
    of_estimator : bool
        Whether errors tell of `name=None` and `reset`, which a `GradLog` lacks.

    Attributes
    ----------
    group : Group
        The fit's arrays and values.
    """

    def __init__(self, store: Store, name: str, *, of_estimator: bool = True) -> None:
        self.store = store
        self.name = name
        self._of_estimator = of_estimator
        self.group = store.group(name)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the fit in this group; None if there is no fit."""
        stored = self.group.get("fingerprint")
        return stored if isinstance(stored, dict) and isinstance(self.group.get("finished"), bool) else None

    @property
    def finished(self) -> bool:
        """Whether the fit in this group has ended."""
        return self.group.get("finished") is True

    @property
    def unnamed(self) -> bool:
        """Whether the group's name was made for a fit without a name."""
        fingerprint = self.fingerprint
        return fingerprint is not None and self.name.rpartition("/")[2] == digest(fingerprint)

    def worked_on(self) -> threading.RLock:
        """A lock for one thread at a time. The other threads wait, and then find the state that it left. Raises
        TransactionError if this thread has it: it would wait for itself.

        The lock itself, and no generator around it: the traceback of an interrupt would keep the generator, and the
        generator the lock.
        """
        with _registry:
            lock = _locks.setdefault(self.store, {}).setdefault(self.name, threading.RLock())
        if _has(lock):
            raise TransactionError(
                f"the fit {self.name!r} in {self.store.path} is at work: it can't be run or reset inside of itself"
            )
        return lock

    def check_writable(self) -> None:
        """Raise ReadOnlyStoreError if the store is open for reading, ForkedStoreError in a fork of its process."""
        if self.store.mode != "r":
            return
        try:
            self.store._catalog.writable()
        except ReadOnlyStoreError as error:
            state = "not finished" if self.fingerprint else "not there"
            raise type(error)(f"the fit {self.name!r} in {self.store.path} is {state}: {error}") from None

    def commit_pending(self) -> None:
        """Commit what the caller has pending: an exception in a transaction of the fit would take it back."""
        if self.store._has_pending():
            self.store.commit()

    def begin(self, fingerprint: Fingerprint) -> None:
        """Make the group that of an unfinished fit, as part of the caller's transaction."""
        self.group["fingerprint"] = fingerprint
        self.group["finished"] = False

    def finish(self) -> None:
        """Mark the fit as finished, as part of the caller's transaction."""
        self.group["finished"] = True

    def forget(self) -> None:
        """Delete the fit, if there is one. Raises FingerprintMismatchError if the group holds something else."""
        if self.fingerprint is None:
            self._refuse_what_is_no_fit()
            return
        with self.store.transaction():
            self.group.clear()

    def admit(self, fingerprint: Fingerprint) -> bool:
        """Whether there is a fit to continue. Raises FingerprintMismatchError if the group holds something else."""
        stored = self.fingerprint
        if stored is None:
            self._refuse_what_is_no_fit()
            self._refuse_to_be_inside()
            return False
        if not is_same(stored, fingerprint):
            found = differences(stored, fingerprint)
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            entry = next(changed_entries(stored, fingerprint), None)
            hint = (
                f"The entry {entry} differs, and a fingerprint includes entries of classes: keep a counter or a cache, "
                "which changes while the program runs, outside of the class. "
            )
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds another fit; stored ≠ asked for: "
                f"{'; '.join(found[:_SHOWN])}{more}. {hint if entry else ''}"
                f"Choose another name{', or name=None in a search over parameters or folds' * self._of_estimator}. "
                f"{self._how_to_forget}"
            )
        return True

    def require(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Raise FingerprintMismatchError unless the group, which holds a fit, holds such an array in C order."""
        value = self.group.get(name)
        found = ""
        if isinstance(value, np.ndarray) and value.shape == shape and value.dtype == dtype:
            if value.flags.c_contiguous:
                return
            found = "one in F order"
        raise self.changed(name, f"an array of shape {shape} and dtype {np.dtype(dtype)}", found)

    def changed(self, name: str, wanted: str, found: str = "") -> FingerprintMismatchError:
        """The error for a fit whose state was changed by other code; it describes the change."""
        value = self.group.get(name)
        if not found and isinstance(value, np.ndarray):
            found = f"an array of shape {value.shape} and dtype {value.dtype}"
        elif not found:
            found = "missing" if name not in self.group else f"a value of type {type(value).__name__}"
        return FingerprintMismatchError(
            f"the fit {self.name!r} in {self.store.path} was changed by other code: its entry {name!r} "
            f"must be {wanted}, and is {found}. {self._how_to_forget}"
        )

    def check_sound(self) -> None:
        """Raise CorruptStoreError if anything in the group is damaged on the medium."""
        damaged = [one for one in self.store.check() if one.name is None or one.name.startswith(f"{self.name}/")]
        if damaged:
            raise CorruptStoreError(
                f"the fit {self.name!r} in {self.store.path} is damaged, and can't be continued: "
                f"{'; '.join(map(str, damaged))}. {self._how_to_forget}"
            )

    @property
    def _how_to_forget(self) -> str:
        if not self._of_estimator:
            return f"store.group({self.name!r}).clear() forgets that training."
        return f"reset() of an estimator, or store.group({self.name!r}).clear(), forgets that fit."

    def _refuse_what_is_no_fit(self) -> None:
        if any(re.fullmatch("[0-9a-f]{16}/finished", name) for name in self.group):
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} is the group of the fits without a name. Choose another name."
            )
        if self.name in self.store:
            way = f"store.group({self.name!r}).clear()" if len(self.group) else f"del store[{self.name!r}]"
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds something that is not the fit of an estimator, or that was "
                f"changed since. Choose another name; or, if nothing else needs it, {way} deletes it."
            )

    def _refuse_to_be_inside(self) -> None:
        """Refuse a group inside another fit's group, which is deleted as a whole when that fit is forgotten."""
        above = self.name
        while above := above.rpartition("/")[0]:
            if FitGroup(self.store, above).fingerprint is not None:
                raise FingerprintMismatchError(
                    f"{self.name!r} would be inside of {above!r} in {self.store.path}, which is another fit, and would "
                    "be forgotten with it. Choose another name for one of the two."
                )


def _has(lock: threading.RLock) -> bool:
    """Whether this thread has the lock."""
    try:
        threading.Condition(lock).notify(0)  # which wakes nobody
    except RuntimeError:
        return False
    return True


def group_name(kind: str, fingerprint: Fingerprint) -> str:
    """The name of the group of a fit without a name."""
    return f"{kind}/{digest(fingerprint)}"


# ---- stores that are given by their paths


_LOOKS, _BETWEEN_LOOKS = 8, 0.25  # seconds


def group_advice(store: object) -> str:
    """The sentence of an error that says what to give in place of a group; empty if it is none."""
    if not isinstance(store, Group):
        return ""
    return f" Give the store itself, which is group.store, and name={store.name!r}, or a name in that group."


def path_of(store: StoreOrPath) -> str:
    """The absolute path of a store. Raises TypeError, ValueError and IsADirectoryError as `opening.path_of` does, and
    ValueError for ":memory:", which would lose the fit at the end of the call.
    """
    if isinstance(store, Store):
        return store.path
    if isinstance(store, Group):
        raise TypeError(f"store is a Store or a path, not a Group.{group_advice(store)}")
    if opening.is_memory(store):
        raise ValueError(
            '":memory:" would be gone when this call ends, and the fit with it: use store=None for a fit that is not '
            'kept, or pass the open store that pmstore.open(":memory:") returns'
        )
    return opening.path_of(store)


@contextmanager
def opened(store: StoreOrPath, what: str, mode: Literal["a", "r+"] = "a") -> Iterator[Store]:
    """An open store as it is, outside any transaction; for a path, a store that is open until the end of the block.

    If this process has the store open at the path, for example in another thread that uses this block, the block uses
    that store. Leaving the block commits. If an exception is passing, changes that are pending stay so for those who
    have the store open, too, and are lost if nobody has: transactions of the block have taken back theirs.

    If another process has the store open, this waits until it closes the store. It does not wait for a process that
    started this one and may itself be waiting for it: that raises StoreLockedError.

    Parameters
    ----------
    store : Store or path
    what : str
        For the message of a TransactionError: the action that is impossible inside a transaction, and why.
    mode : {"a", "r+"}
        The mode to open a path with.
    """
    own = store if isinstance(store, Store) else _open_in_turn(os.path.realpath(path_of(store)), mode)
    if own.in_transaction:
        if own is not store:
            own.close()
        raise TransactionError(f"{what} and can't do so inside a transaction")
    if own is store:
        yield own
        return
    with own._leased():  # until it is closed: a process that waits gives up where there is no lease
        try:
            yield own
        except BaseException:
            with contextlib.suppress(Error):
                own._leave(sys.exc_info()[1])
            raise
        with contextlib.suppress(Error):  # nothing of the fit is pending
            own._leave_for_good()


def _open_in_turn(path: str, mode: Literal["a", "r+"]) -> Store:
    """Open a store after all other processes have closed it."""
    told: set[object] = set()
    looks = 0  # successive checks that found it open for something else than a fit
    while True:
        try:
            return open_for_fit(path, mode, _BETWEEN_LOOKS if told else 0.0)
        except StoreLockedError as error:
            holder = error.pid
            if holder == os.getpid():
                raise StoreLockedError(
                    errno.EAGAIN, f"{error}, or pass that open store to the estimator instead of its path."
                ) from None
            name = "another process" if holder is None else f"process {holder}"
            looks = 0 if held.is_leased(path) else looks + 1
            if looks >= _LOOKS and holder is not None and _started_this_process(holder):
                raise StoreLockedError(
                    errno.EAGAIN,
                    f"{error}, and that process started this one, and may be waiting for it. Close it there, and "
                    "pass the path instead of the open store to estimators, or use n_jobs=1 or threads.",
                ) from None
            if holder not in told:
                logger.info("waiting for %s, which has the store %s open", name, path)
            elif looks == _LOOKS:
                logger.warning("still waiting for %s, which has the store %s open, and not for a fit", name, path)
            told.add(holder)


def _started_this_process(pid: int) -> bool:
    """Whether the process is the parent of this one, or the parent's parent, and so on."""
    above = os.getppid()
    while above:
        if above == pid:
            return True
        try:
            with open(f"/proc/{above}/stat", encoding="utf-8", errors="replace") as file:
                above = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def _after_fork() -> None:
    global _registry
    _registry = threading.Lock()  # another thread of the parent may hold the old one forever
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


# ---- fit groups, for callers


def forget(store: StoreOrPath, name: str) -> None:
    """Forget the fit in a group, if there is one. If the path doesn't exist, nothing is created."""
    if isinstance(store, Store) or os.path.exists(path_of(store)):
        with opened(store, "reset() commits") as own:
            fit_group = FitGroup(own, name)
            with fit_group.worked_on():
                fit_group.forget()


def prune(store: StoreOrPath) -> list[str]:
    """Forget the finished fits that have no name.

    An estimator with ``name=None`` keeps every fit, finished ones too, so that repeating a fit costs nothing. This call
    frees the space of the finished ones. Unfinished fits and those that have a name stay.

    Parameters
    ----------
    store : Store or path
        A path must name an existing store. If another process has it open, this waits.

    Raises
    ------
    TransactionError
        If a transaction of the open store is open in this thread.

    Returns
    -------
    list of str
        The names of the deleted groups.
    """
    with opened(store, "prune() commits", "r+") as own:
        found = (re.fullmatch(r"([^/]+/[0-9a-f]{16})/finished", name) for name in own)
        groups = [
            fit_group
            for fit_group in (FitGroup(own, match[1]) for match in found if match)
            if fit_group.finished and fit_group.unnamed
        ]
        with contextlib.ExitStack() as until_forgotten:
            for fit_group in groups:
                until_forgotten.enter_context(fit_group.worked_on())  # not while another thread loads the fit
            groups = [fit_group for fit_group in groups if fit_group.fingerprint is not None and fit_group.finished]
            with own.transaction():
                for fit_group in groups:
                    fit_group.forget()
    return [fit_group.name for fit_group in groups]
