"""pmstore keeps numpy arrays, and the Python values around them, in a file of persistent memory or on an ordinary disk.

Programs change the arrays in place with any code they like; a transaction makes all changes since the last commit
durable together, or none of them.

>>> import pmstore
>>> with pmstore.open("run.pm") as store:  # doctest: +SKIP
...     w = store.require_array("w", shape=(10, 784), dtype="f8")
...     with store.transaction():
...         w += 1.0
...         store["epoch"] = store.get("epoch", 0) + 1
"""

import os as _os

from pmstore._decision import Decision
from pmstore._derived import Derived
from pmstore._errors import (
    AbandonedTransactionWarning,
    ClosedStoreError,
    CorruptStoreError,
    DerivedArrayError,
    DerivedMismatchError,
    Error,
    FailedStoreError,
    FingerprintMismatchError,
    ForkedStoreError,
    FormatVersionError,
    InternalError,
    InvalidNameError,
    LostUpdateWarning,
    NameConflictError,
    NonDeterministicError,
    NotAStoreError,
    OutOfMemoryError,
    OutOfSpaceError,
    ReadOnlyStoreError,
    StoreExistsError,
    StoreIOError,
    StoreLockedError,
    StoreNotFoundError,
    TooLargeError,
    TransactionError,
    UncommittedChangesWarning,
    UnknownNameError,
)
from pmstore._estimators import prune
from pmstore._list import PersistentList
from pmstore._mapping import Group
from pmstore._partial_fit import partial_fit
from pmstore._report import CheckReport, Problem, Stats
from pmstore._resumable import Resumable
from pmstore._state import Field, State
from pmstore._store import Store, open

__version__ = "0.1.0"

__all__ = [
    "open",
    "Store",
    "Group",
    "PersistentList",
    "Derived",
    "Decision",
    "Stats",
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
    "CorruptStoreError",
    "NotAStoreError",
    "FormatVersionError",
    "TooLargeError",
    "InvalidNameError",
    "NameConflictError",
    "UnknownNameError",
    "TransactionError",
    "ClosedStoreError",
    "ForkedStoreError",
    "InternalError",
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
    "partial_fit",
    "prune",
    "__version__",
]

if "PMSTORE_CRASH_RECORD" in _os.environ:  # set by `python -m pmstore crash run`, for the programs that it runs
    from pmstore.testing._recording import from_environment as _record

    _record()
