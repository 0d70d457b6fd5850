"""The report of `explore_mapreduce`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pmstore._display import count_text
from pmstore.testing._store.coverage import tallied

__all__ = ["MapReduceReport"]


@dataclass(frozen=True)
class MapReduceReport:
    """The coverage of `explore_mapreduce`, printed in a few lines.

    Attributes
    ----------
    schedules : int
        The number of schedules that were run.
    shards, workers, epochs : int
        The size of the fit.
    accidents : dict of str to int
        The number of each kind of accident that happened.
    outcomes : dict of str to int
        The number of each end of a coordinator: "same bits" at the end of a schedule, "killed", and the errors that
        the accidents justify.
    late, lost : int
        How often coordinators asked again, in all schedules.
    seed : int
    seconds : float
        Processor time.
    """

    schedules: int
    shards: int
    workers: int
    epochs: int
    accidents: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    lost: int = 0
    seed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.schedules / self.seconds if self.seconds else 0.0
        return (
            f"explored {count_text(self.schedules, 'schedule')} of {count_text(self.epochs, 'epoch')} over "
            f"{count_text(self.shards, 'shard')} on {count_text(self.workers, 'worker')}, seed {self.seed}: "
            f"{rate:,.0f} a second and processor\n"
            f"  accidents: {tallied(self.accidents)}\n"
            f"  coordinators ended with {tallied(self.outcomes)}\n"
            f"  asked again: {self.late:,} late, {self.lost:,} lost"
        )
