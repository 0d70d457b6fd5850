"""The ways in which a system call can fail, and the report on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pmstore._core import lib
from pmstore._display import count_text
from pmstore.testing._store.coverage import tallied

__all__ = ["MANNERS", "OPERATIONS", "SHORT", "Fault", "FaultReport"]

SHORT = "short"
OPERATIONS: dict[str, int] = {
    "write": lib.PM_OPERATION_WRITE,
    "sync": lib.PM_OPERATION_SYNC,
    "grow": lib.PM_OPERATION_GROW,
    "map": lib.PM_OPERATION_MAP,
}
# For each operation, the ways to fail: the error, and whether all later calls fail too.
MANNERS: dict[str, tuple[tuple[str, bool], ...]] = {
    "write": (("EIO", False), ("ENOSPC", False), ("ENOSPC", True), (SHORT, False), ("EINTR", False)),
    "sync": (("EIO", False), ("EIO", True), ("ENOSPC", False), ("EINTR", False)),
    "grow": (("ENOSPC", False), ("ENOSPC", True), ("EINTR", False), ("EOPNOTSUPP", False)),
    "map": (("ENOMEM", False),),
}
VERBS = {"write": "write", "sync": "sync", "grow": "growth of the file", "map": "mapping of the file"}


class Fault(NamedTuple):
    """One failing call. operation: "write", "sync", "grow" or "map"; number: its position among the calls of that
    operation since the store was first opened, from 1; error: a name of an errno, or "short" for a write that does
    half of its work; lasting: all later calls fail too.
    """

    operation: str
    number: int
    error: str
    lasting: bool = False

    def __str__(self) -> str:
        which = f"the {_ordinal(self.number)} {VERBS[self.operation]}"
        if self.error == SHORT:
            return f"{which} fell short"
        if self.error == "EINTR":
            return f"{which} was interrupted (EINTR)"
        return f"{which}{' and all after it' if self.lasting else ''} failed with {self.error}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True)
class FaultReport:
    """The coverage of `explore_faults`, printed in a few lines.

    Attributes
    ----------
    medium : str
        "memory" or "file".
    evaluated, possible : int
        The number of failing calls that were tried, and the number of all.
    by_operation : dict of str to int
        The number of each operation among those tried.
    outcomes : dict of str to int
        The number of each outcome: "unnoticed" (the store did not need the call), "went on" (the store raised an error
        and continued), "refused" (the store refused to continue), "not opened", "closed" (the workload closed the store
        at its end).
    crashes : int
        The number of crash states of the failed runs that were evaluated.
    commits : int
        The number of commits that the workload makes without faults.
    seed : int
        The seed of the choice, if not all were tried.
    seconds : float
    """

    medium: str
    evaluated: int
    possible: int
    by_operation: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    crashes: int = 0
    commits: int = 0
    seed: int = 1
    seconds: float = 0.0

    @property
    def exhaustive(self) -> bool:
        """Whether every call failed in every way."""
        return self.evaluated == self.possible

    def __str__(self) -> str:
        how = "these are all" if self.exhaustive else f"chosen by seed {self.seed}"
        return (
            f"failing calls of {count_text(self.commits, 'commit')} on {self.medium}: {self.evaluated:,} of "
            f"{self.possible:,}, {how}\n"
            f"  of the operations {tallied(self.by_operation)}\n  what became of them: {tallied(self.outcomes)}\n"
            f"  and {count_text(self.crashes, 'crash state')} after them"
        )
