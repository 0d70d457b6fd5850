"""How an estimator keeps a fit in a store.

A fit has a *slot*: a group of the store with a ``fingerprint`` (what the fit depends on), ``finished``, and whatever
arrays the estimator needs to go on.

::

            begin()                  finish()
    absent ────────▶ unfinished ───────────────▶ finished
       ▲                 │                          │
       └─────────────────┴── forget(), prune() ─────┘
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pmstore._errors import FingerprintMismatchError, ReadOnlyStoreError, TransactionError
from pmstore._fingerprint import Fingerprint, differences, digest
from pmstore._store import Store
from pmstore._store import open as open_store

StoreOrPath = Store | str | os.PathLike[str]

KINDS = ("kmeans",)
"""Groups under which estimators keep the slots that are named by a fingerprint."""

_registry = threading.Lock()
_locks: weakref.WeakKeyDictionary[Store, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()

_RANDOM_STATE = np.dtype(
    [("key", "<u4", (624,)), ("pos", "<i8"), ("has_gauss", "<i8"), ("gauss", "<f8")],
)


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
            raise ReadOnlyStoreError(f"{self.store.path} is open for reading, and the fit {self.name!r} is {state}")

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
            return False
        if stored != fingerprint:
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds another fit; stored ≠ asked for: "
                f"{'; '.join(differences(stored, fingerprint))}. "
                "Choose another name, or forget that fit with reset()."
            )
        return True

    def _refuse_what_is_no_fit(self) -> None:
        if self.name in self.store or len(self.group):
            raise FingerprintMismatchError(
                f"{self.name!r} in {self.store.path} holds something that no estimator put there. Choose another name."
            )


def slot_name(kind: str, fingerprint: Fingerprint) -> str:
    """The slot of a fit that was given no name."""
    return f"{kind}/{digest(fingerprint)}"


@contextmanager
def opened(store: StoreOrPath) -> Iterator[Store]:
    """An open store as it is, outside any transaction; a path as a store that is open for as long as the block."""
    if not isinstance(store, Store):
        with open_store(store) as own:
            yield own
        return
    if store.in_transaction:
        raise TransactionError("an estimator commits after every iteration and can't do so inside a transaction")
    yield store


def prune(store: StoreOrPath) -> list[str]:
    """Forget the finished fits that were given no name.

    An estimator with ``name=None`` keeps every fit, finished ones too, so that the same fit again costs nothing.
    This frees the space of the finished ones. Unfinished fits and those that have a name stay.

    Parameters
    ----------
    store : Store or path
        A path must name an existing store.

    Returns
    -------
    list of str
        Names of the groups that were deleted.
    """
    if not isinstance(store, Store):
        with open_store(store, mode="r+") as own:
            return prune(own)
    names = [
        f"{kind}/{name.partition('/')[0]}"
        for kind in KINDS
        for name in store.group(kind)
        if re.fullmatch(r"[0-9a-f]{16}/finished", name)
    ]
    slots = [slot for slot in (Slot(store, name) for name in names) if slot.fingerprint is not None and slot.finished]
    with store.transaction():
        for slot in slots:
            slot.forget()
    return [slot.name for slot in slots]


def check_random_state_kind(random_state: np.random.RandomState) -> None:
    """Raise ValueError unless the generator is the one whose state can be kept, which is that of every RandomState
    made from a seed."""
    kind = _state_of(random_state)["bit_generator"]
    if kind != "MT19937":
        raise ValueError(f"random_state must be a RandomState over MT19937 to be kept in a store, not over {kind}")


def keep_random_state(slot: Slot, random_state: np.random.RandomState) -> None:
    """Put the state of a generator into the slot, as part of the caller's transaction."""
    state = _state_of(random_state)
    record = np.zeros((), _RANDOM_STATE)
    record["key"], record["pos"] = state["state"]["key"], state["state"]["pos"]
    record["has_gauss"], record["gauss"] = state["has_gauss"], state["gauss"]
    slot.group["random_state"] = record


def restore_random_state(slot: Slot, random_state: np.random.RandomState) -> None:
    """Take a generator back to the state that the slot holds."""
    record = slot.group["random_state"]
    random_state.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": record["key"].copy(), "pos": int(record["pos"])},
            "has_gauss": int(record["has_gauss"]),
            "gauss": float(record["gauss"]),
        }
    )


def _state_of(random_state: np.random.RandomState) -> dict[str, Any]:
    state: Any = random_state.get_state(legacy=False)
    return dict(state)
