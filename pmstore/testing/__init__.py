"""Crash tests: record a program's operations on a store, build the states that a crash could leave, recover and
evaluate them.

>>> import pmstore.testing
>>> def conserved(store):
...     assert store.get("a", 100) + store.get("b", 0) == 100
>>> @pmstore.testing.crash_test(check=conserved, budget=50)
... def test_transfer(store):
...     with store.transaction():
...         store["a"] = 70
...         store["b"] = 30
>>> test_transfer()

docs/crash-testing.md is the tutorial. In pytest there are the fixtures ``crash_explorer`` and ``crash_files``, and the
options ``--crash-budget`` and ``--crash-seed``; on the command line ``python -m pmstore crash run|replay|open``.
"""

from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._decorator import crash_test
from pmstore.testing._explorer import CrashExplorer
from pmstore.testing._faults.damage import Damage, DamageReport, explore_damage
from pmstore.testing._faults.explore import explore_faults
from pmstore.testing._faults.fault import Fault, FaultReport
from pmstore.testing._files.fixture import CrashFiles
from pmstore.testing._scale.explore import explore_mapreduce
from pmstore.testing._scale.report import MapReduceReport
from pmstore.testing._store.check import Crash
from pmstore.testing._store.coverage import CrashReport
from pmstore.testing._store.failure import Failure, load_failure

__all__ = [
    "crash_test",
    "CrashExplorer",
    "CrashFiles",
    "CrashReport",
    "Crash",
    "CrashFailure",
    "CrashTestError",
    "Failure",
    "load_failure",
    "explore_faults",
    "Fault",
    "FaultReport",
    "explore_damage",
    "Damage",
    "DamageReport",
    "explore_mapreduce",
    "MapReduceReport",
]
