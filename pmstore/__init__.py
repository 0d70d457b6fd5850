"""pmstore keeps numpy arrays, and the Python values around them, in a file of persistent memory or on an ordinary disk.

Programs change the arrays in place, with any code. A transaction makes all changes since the last commit durable
together, or none of them.

>>> import pmstore
>>> with pmstore.open("run.pm") as store:  # doctest: +SKIP
...     w = store.require_array("w", shape=(10, 784), dtype="f8")
...     with store.transaction():
...         w += 1.0
...         store["epoch"] = store.get("epoch", 0) + 1
"""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pmstore._catalog.lists import PersistentList
from pmstore._derived.decision import Decision
from pmstore._derived.derived import Derived
from pmstore._errors import (
    AbandonedTransactionWarning,
    ArchiveConflictError,
    ArchiveDamagedError,
    ArchiveError,
    ArchiveUnavailableError,
    ArchiveWarning,
    ClosedStoreError,
    CorruptStoreError,
    DecodeError,
    DerivedArrayError,
    DerivedMismatchError,
    DetachedError,
    Error,
    FailedStoreError,
    FingerprintMismatchError,
    ForkedStoreError,
    FormatVersionError,
    InterchangeError,
    InternalError,
    InvalidNameError,
    LostUpdateWarning,
    MapReduceError,
    NameConflictError,
    NondeterminismError,
    NonDeterministicError,
    NotAStoreError,
    OutOfMemoryError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    ShardError,
    ShardTimeoutError,
    StaleSnapshotError,
    StoreExistsError,
    StoreIOError,
    StoreLockedError,
    StoreNotFoundError,
    TooLargeError,
    TransactionError,
    UncommittedChangesWarning,
    UnknownNameError,
    UnknownVersionError,
    WorkersLostError,
)
from pmstore._shelf import Shelf, shelf
from pmstore._store import following as _following
from pmstore._store import mapping as _mapping
from pmstore._store.compacting import compact
from pmstore._store.entrance import open
from pmstore._store.file_format import upgrade
from pmstore._store.mapping import Group
from pmstore._store.notes import CommitNote
from pmstore._store.report import CheckReport, Problem, Stats
from pmstore._store.salvaging import salvage
from pmstore._store.store import Store
from pmstore._values.registry import Parts, register

if _TYPE_CHECKING:  # the others are imported when they are used: see _LATER
    from pmstore._interchange.exporting import export
    from pmstore._interchange.importing import load_into
    from pmstore._resume.fit_group import prune
    from pmstore._resume.history import History, history
    from pmstore._resume.loop import Resumable
    from pmstore._resume.partial_fit import partial_fit
    from pmstore._resume.state import Field, State
    from pmstore.scale import MapReduce, Shard

__version__ = "0.1.0"

__all__ = [
    "open",
    "Store",
    "Group",
    "PersistentList",
    "register",
    "Parts",
    "Derived",
    "Decision",
    "Stats",
    "CommitNote",
    "CheckReport",
    "Problem",
    "Error",
    "StoreLockedError",
    "StoreNotFoundError",
    "StoreExistsError",
    "StoreIOError",
    "FailedStoreError",
    "OutOfSpaceError",
    "OutOfMemoryError",
    "ReadOnlyStoreError",
    "StaleSnapshotError",
    "CorruptStoreError",
    "DecodeError",
    "NotAStoreError",
    "FormatVersionError",
    "TooLargeError",
    "InvalidNameError",
    "NameConflictError",
    "UnknownNameError",
    "TransactionError",
    "ClosedStoreError",
    "ForkedStoreError",
    "DetachedError",
    "InternalError",
    "InterchangeError",
    "FingerprintMismatchError",
    "DerivedArrayError",
    "DerivedMismatchError",
    "NonDeterministicError",
    "LostUpdateWarning",
    "UncommittedChangesWarning",
    "AbandonedTransactionWarning",
    "Resumable",
    "Field",
    "State",
    "History",
    "history",
    "partial_fit",
    "prune",
    "shelf",
    "Shelf",
    "compact",
    "upgrade",
    "salvage",
    "export",
    "load_into",
    "__version__",
    "MapReduce",
    "Shard",
    "MapReduceError",
    "ShardError",
    "ShardTimeoutError",
    "NondeterminismError",
    "WorkersLostError",
    "ArchiveError",
    "ArchiveDamagedError",
    "ArchiveConflictError",
    "ArchiveUnavailableError",
    "UnknownVersionError",
    "ArchiveWarning",
]


_LATER = {
    "_interchange.exporting": ["export"],
    "_interchange.importing": ["load_into"],
    "_resume.fit_group": ["prune"],
    "_resume.history": ["History", "history"],
    "_resume.loop": ["Resumable"],
    "_resume.partial_fit": ["partial_fit"],
    "_resume.state": ["Field", "State"],
    "scale": ["MapReduce", "Shard"],
}
"""Modules that are imported when one of their names is used: programs that keep arrays do not need them."""

_MODULES = frozenset({"archive", "codecs", "scale", "torch"})
"""The same for modules that are used by their own name."""


def __getattr__(name: str) -> _Any:
    import importlib

    if name in _MODULES:
        try:
            return importlib.import_module(f"pmstore.{name}")
        except ModuleNotFoundError as error:  # hasattr and help ask for all names
            raise AttributeError(str(error)) from error
    for module, names in _LATER.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"pmstore.{module}"), name)
            return found
    raise AttributeError(f"module 'pmstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _drained(*arguments: _Any, **options: _Any) -> _Any:
    from pmstore.archive._begin import begin

    return begin(*arguments, **options)


_following.drainer = _drained


def _plotted(store: Store, name: str, ax: _Any) -> _Any:
    from pmstore._watch.plot import plot

    return plot(store, name, ax)


_mapping.plotter = _plotted

if "PMSTORE_CRASH_RECORD" in _os.environ:  # `python -m pmstore crash run` sets it for the programs that it runs
    from pmstore.testing._store.recording import from_environment as _from_environment

    _from_environment()
