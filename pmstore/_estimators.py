"""How an estimator keeps a fit in a store.

A fit has a *slot*: a group of the store with a ``fingerprint`` (what the fit depends on), ``finished``, and whatever
arrays the estimator needs to go on.

::

            begin()                  finish()
    absent ────────▶ unfinished ───────────────▶ finished
       ▲                 │                          │
       └─────────────────┴── forget(), prune() ─────┘

A store that is given by its path is open for as long as somebody works on it. The threads of a process share one
opening; processes take turns.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt

from pmstore import _opening
from pmstore._errors import (
    CorruptStoreError,
    Error,
    FingerprintMismatchError,
    ReadOnlyStoreError,
    StoreLockedError,
    TransactionError,
)
from pmstore._fingerprint import Fingerprint, differences, digest
from pmstore._store import Store
from pmstore._store import open as open_store

logger = logging.getLogger("pmstore")

StoreOrPath = Store | str | os.PathLike[str]

_registry = threading.Lock()
_locks: weakref.WeakKeyDictionary[Store, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()


class Slot:
    """The group of a store that holds one fit.

    Parameters
    ----------
    store : Store
    name : str
        The group.

    Attributes
    ----------
    group : Group
        The fit's arrays and values.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.group = store.group(name)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the fit in the slot depends on; None if there is no fit."""
        stored = self.group.get("fingerprint")
        return stored if isinstance(stored, dict) and isinstance(self.group.get("finished"), bool) else None

    @property
    def finished(self) -> bool:
        """Whether the fit in the slot came to its end."""
        return self.group.get("finished") is True

    @property
    def unnamed(self) -> bool:
        """Whether the slot has the name that its fit gets when it is given none."""
        fingerprint = self.fingerprint
        return fingerprint is not None and self.name.rpartition("/")[2] == digest(fingerprint)

    @contextmanager
    def worked_on(self) -> Iterator[None]:
        """One thread at a time: the others wait, and then find what it left."""
        with _registry:
            lock = _locks.setdefault(self.store, {}).setdefault(self.name, threading.Lock())
        with lock:
            yield

    def check_writable(self) -> None:
        """Raise ReadOnlyStoreError if the store was opened for reading."""
        if self.store.mode == "r":
            state = "not finished" if self.fingerprint else "not there"
            raise ReadOnlyStoreError(
                f"{self.store.path} is open for reading, and the fit {self.name!r} is {state}: open it for writing"
            )

    def begin(self, fingerprint: Fingerprint) -> None:
        """Make the slot an unfinished fit's, as part of the caller's transaction."""
        self.group["fingerprint"] = fingerprint
        self.group["finished"] = False

    def finish(self) -> None:
        """Mark the fit as finished, as part of the caller's transaction."""
        self.group["finished"] = True

    def forget(self) -> None:
        """Delete the fit, if there is one; FingerprintMismatchError if the group holds something else."""
        if self.fingerprint is None:
            self._refuse_what_is_no_fit()
            return
        with self.store.transaction():
            self.group.clear()

    def admit(self, fingerprint: Fingerprint) -> bool:
        """Whether there is a fit to go on with; FingerprintMismatchError if the slot holds anything but this fit."""
        stored = self.fingerprint
        if stored is None:
            self._refuse_what_is_no_fit()
            self._refuse_to_be_inside()
            return False
        if stored != fingerprint:
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds another fit; stored ≠ asked for: "
                f"{'; '.join(differences(stored, fingerprint))}. "
                f"Choose another name. {self._how_to_forget}"
            )
        return True

    def require(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Raise FingerprintMismatchError unless such an array, in C order, is in the slot, which holds a fit."""
        value = self.group.get(name)
        found = ""
        if isinstance(value, np.ndarray) and value.shape == shape and value.dtype == dtype:
            if value.flags.c_contiguous:
                return
            found = "one in F order"
        raise self.changed(name, f"an array of shape {shape} and dtype {np.dtype(dtype)}", found)

    def changed(self, name: str, wanted: str, found: str = "") -> FingerprintMismatchError:
        """The error that says that somebody changed what a fit left, and how."""
        value = self.group.get(name)
        if not found and isinstance(value, np.ndarray):
            found = f"an array of shape {value.shape} and dtype {value.dtype}"
        elif not found:
            found = "nothing" if name not in self.group else f"a value of type {type(value).__name__}"
        return FingerprintMismatchError(
            f"the fit {self.name!r} in {self.store.path} is not as it was left: {name!r} is to be {wanted}, "
            f"and there is {found}. {self._how_to_forget}"
        )

    def check_sound(self) -> None:
        """Raise CorruptStoreError if the medium damaged what is in the slot."""
        damaged = [one for one in self.store.check() if one.name is None or one.name.startswith(f"{self.name}/")]
        if damaged:
            raise CorruptStoreError(
                f"the fit {self.name!r} in {self.store.path} is damaged, and can't be gone on with: "
                f"{'; '.join(map(str, damaged))}. {self._how_to_forget}"
            )

    @property
    def _how_to_forget(self) -> str:
        return f"reset() of an estimator, or store.group({self.name!r}).clear(), forgets that fit."

    def _refuse_what_is_no_fit(self) -> None:
        if self.name in self.store or len(self.group):
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds something that no estimator put there, or not as it left "
                f"it. Choose another name, or delete it with store.group({self.name!r}).clear()."
            )

    def _refuse_to_be_inside(self) -> None:
        """In another fit's group, which goes as a whole when that fit is forgotten."""
        above = self.name
        while above := above.rpartition("/")[0]:
            if Slot(self.store, above).fingerprint is not None:
                raise FingerprintMismatchError(
                    f"{self.name!r} would be inside of {above!r} in {self.store.path}, which is another fit, and would "
                    "be forgotten with it. Choose another name."
                )


def slot_name(kind: str, fingerprint: Fingerprint) -> str:
    """The slot of a fit that was given no name."""
    return f"{kind}/{digest(fingerprint)}"


# ---- stores that are given by their path


_LOOKS, _BETWEEN_LOOKS = 8, 0.25  # seconds


class _Shared:
    """A store that the threads of this process share.

    users : threads that are in `opened`, or about to be; under `_registry`.
    lock : held while the store is opened and closed, by which the others wait for that.
    """

    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.Lock()
        self.store: Store | None = None
        self.lease = -1  # descriptor

    def open(self, path: str, mode: Literal["a", "r+"]) -> Store:
        """The store, which the first one opens."""
        with self.lock:
            if self.store is None:
                self.store = _open_in_turn(path, mode)
                self.lease = _opening.take_lease(path)
            return self.store

    def leave(self, path: str) -> None:
        """Close the store, if nobody else uses it."""
        with self.lock:
            with _registry:
                self.users -= 1
                last = not self.users
            if last and self.store is not None:
                store, self.store = self.store, None
                lease, self.lease = self.lease, -1
                _opening.drop_lease(lease)
                with contextlib.suppress(Error), store:  # nothing is pending: whoever changed something committed it
                    pass
            with _registry:
                if not self.users and _shared.get(path) is self:
                    del _shared[path]


_shared: dict[str, _Shared] = {}  # by real path


@contextmanager
def opened(store: StoreOrPath, what: str, mode: Literal["a", "r+"] = "a") -> Iterator[Store]:
    """An open store as it is, outside any transaction; a path as a store that is open for as long as the block.

    Whoever else in this process is in such a block with the same path gets the same store. If another process has it
    open, this waits for as long as that takes. What may wait for the block itself can't be waited for: an opening
    elsewhere in this process, or by a process that started this one, is a StoreLockedError.

    Parameters
    ----------
    store : Store or path
    what : str
        For the message of a TransactionError: what can't be done inside a transaction, and why.
    mode : {"a", "r+"}
        Of opening a path.
    """
    if isinstance(store, Store):
        if store.in_transaction:
            raise TransactionError(f"{what} and can't do so inside a transaction")
        yield store
        return
    path = os.path.realpath(_opening.path_of(store))
    with _registry:
        shared = _shared.setdefault(path, _Shared())
        shared.users += 1
    try:
        own = shared.open(path, mode)
        try:
            yield own
        except BaseException:
            with contextlib.suppress(Error):  # of a commit for which there was no space, all is still pending
                own.rollback()
            raise
    finally:
        shared.leave(path)


def _open_in_turn(path: str, mode: Literal["a", "r+"]) -> Store:
    """Open a store when all other processes have let go of it."""
    told: set[object] = set()
    looks = 0  # in a row that found it open for longer than a fit
    while True:
        try:
            return open_store(path, mode, timeout=_BETWEEN_LOOKS if told else 0.0)
        except StoreLockedError as error:
            holder = error.pid
            if holder == os.getpid():
                raise StoreLockedError(
                    errno.EAGAIN, f"{error}. Pass that open store to the estimator instead of its path."
                ) from None
            name = "another process" if holder is None else f"process {holder}"
            looks = 0 if _opening.is_leased(path) else looks + 1
            if looks >= _LOOKS and holder is not None and _started_this_process(holder):
                raise StoreLockedError(
                    errno.EAGAIN,
                    f"{error}, and that process started this one, and may be waiting for it. If it gave an open store "
                    "to an estimator, pass the path instead of the open store, or use n_jobs=1 or threads.",
                ) from None
            if holder not in told:
                logger.info("waiting for %s, which has the store %s open", name, path)
            elif looks == _LOOKS:
                logger.warning("still waiting for %s, which has the store %s open, and not for a fit", name, path)
            told.add(holder)


def _started_this_process(pid: int) -> bool:
    """Whether the process is the parent of this one, or its parent's, and so on."""
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
    _registry = threading.Lock()  # another thread of the parent's may hold the old one for good
    _locks.clear()
    for shared in _shared.values():
        if shared.lease >= 0:
            with contextlib.suppress(OSError):
                os.close(shared.lease)
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)


# ---- what callers may do with the slots


def forget(store: StoreOrPath, name: str) -> None:
    """Forget the fit in a slot, if there is one. A path that doesn't exist stays so."""
    if isinstance(store, Store) or os.path.exists(store):
        with opened(store, "reset() commits") as own:
            slot = Slot(own, name)
            with slot.worked_on():
                slot.forget()


def prune(store: StoreOrPath) -> list[str]:
    """Forget the finished fits that were given no name.

    An estimator with ``name=None`` keeps every fit, finished ones too, so that the same fit again costs nothing.
    This frees the space of the finished ones. Unfinished fits and those that have a name stay.

    Parameters
    ----------
    store : Store or path
        A path must name an existing store. One that another process has open is waited for.

    Raises
    ------
    TransactionError
        If a transaction of the open store is open in this thread.

    Returns
    -------
    list of str
        Names of the groups that were deleted.
    """
    with opened(store, "prune() commits", "r+") as own:
        found = (re.fullmatch(r"([^/]+/[0-9a-f]{16})/finished", name) for name in own)
        slots = [slot for slot in (Slot(own, match[1]) for match in found if match) if slot.finished and slot.unnamed]
        with contextlib.ExitStack() as until_forgotten:
            for slot in slots:
                until_forgotten.enter_context(slot.worked_on())  # not while another thread loads it
            slots = [slot for slot in slots if slot.fingerprint is not None and slot.finished]
            with own.transaction():
                for slot in slots:
                    slot.forget()
    return [slot.name for slot in slots]
