"""The archive of a store: every version, on every level, in few files (docs/archive.md).

`Store.drain` fills it while a program goes on; `open` looks into it, restores and forks versions. `aggregate` writes
the shards of many processes as one version.
"""

from pmstore.archive._aggregate import Aggregation, aggregate
from pmstore.archive._aggregated import Aggregate, open_aggregate
from pmstore.archive._archive import Archive, Info, open, restore
from pmstore.archive._differences import Difference
from pmstore.archive._drain import Drain, Progress
from pmstore.archive._export import export
from pmstore.archive._format import Loss
from pmstore.archive._groups import LocalGroup
from pmstore.archive._latest import latest_common
from pmstore.archive._retention import Keep
from pmstore.archive._verifying import VerifyReport
from pmstore.archive._versions import Version

__all__ = [
    "open",
    "restore",
    "Archive",
    "Info",
    "Loss",
    "Version",
    "Difference",
    "VerifyReport",
    "Drain",
    "Progress",
    "Keep",
    "export",
    "aggregate",
    "Aggregation",
    "open_aggregate",
    "Aggregate",
    "latest_common",
    "LocalGroup",
]
