"""The coverage of an exploration, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pmstore._display import count_text
from pmstore.testing._store.engine import Tally

__all__ = ["CrashReport", "tallied"]


@dataclass(frozen=True)
class CrashReport:
    """The coverage of `CrashExplorer.run`, printed in two or three lines.

    Attributes
    ----------
    media : dict of str to Tally
        For each medium: points (moments to crash at), evaluated and distinct states, nested (crashes inside recovery,
        and after it), possible (log10 of the number of all states), exhaustive, seconds, by_kind.
    commits : int
        The number of commits that the workload made on each medium.
    checked : bool
        Whether the user gave a check.
    seed : int
        The seed of the random choices.
    failed : str
        The medium on which a crash failed and exploration stopped; empty if none failed.
    untried : tuple of str
        The media that were not explored after that.
    """

    media: Mapping[str, Tally] = field(default_factory=dict)
    commits: int = 0
    checked: bool = False
    seed: int = 1
    failed: str = ""
    untried: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """The number of moments at which a crash was tried, over all media."""
        return sum(tally.points for tally in self.media.values())

    @property
    def evaluated(self) -> int:
        """The number of states that were recovered and evaluated, over all media."""
        return sum(tally.evaluated for tally in self.media.values())

    @property
    def distinct(self) -> int:
        """The number of distinct images of a first crash among them."""
        return sum(tally.distinct for tally in self.media.values())

    @property
    def nested(self) -> int:
        """The number of states of a second crash, inside recovery or after it, among those evaluated."""
        return sum(tally.nested for tally in self.media.values())

    @property
    def exhaustive(self) -> bool:
        """Whether every state of the model was evaluated, on every medium."""
        return bool(self.media) and all(tally.exhaustive for tally in self.media.values())

    @property
    def seconds(self) -> float:
        """The seconds spent in exploring."""
        return sum(tally.seconds for tally in self.media.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The number of states of each kind: nothing, all, lost-one, …"""
        kinds: dict[str, int] = {}
        for tally in self.media.values():
            for kind, count in tally.by_kind.items():
                kinds[kind] = kinds.get(kind, 0) + count
        return kinds

    def __str__(self) -> str:
        evaluates = "recovery and the check" if self.checked else "recovery (no check was given)"
        lines = [
            f"explored the crashes of {count_text(self.commits, 'commit')}, evaluated by {evaluates}, seed {self.seed}"
        ]
        lines += [
            f"  {medium + ':':<8}{_tally_text(tally, medium == self.failed)}" for medium, tally in self.media.items()
        ]
        lines += [f"  {medium + ':':<8}not tried" for medium in self.untried]
        kinds = sorted(self.by_kind.items(), key=lambda item: -item[1])
        if kinds:
            lines.append(f"  of the kinds {tallied(dict(kinds))}")
        return "\n".join(lines)


def tallied(counts: Mapping[str, int]) -> str:
    """ "one 3, another 1"; "none" if there are none."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


MOST_DIGITS = 100


def _tally_text(tally: Tally, failed: bool) -> str:
    if failed:
        how = "stopped at the first failure"
    elif tally.exhaustive:
        how = "exhaustive: these are all"
    elif tally.possible < 4:
        how = f"a sample of about {round(10**tally.possible):,} possible states"
    elif tally.possible < MOST_DIGITS:
        how = f"a sample of about 10^{tally.possible:.0f} possible states"
    else:
        how = f"a sample of more than 10^{MOST_DIGITS} possible states"
    rate = tally.evaluated / tally.seconds if tally.seconds > 0 else 0.0
    nested = f", and {tally.nested:,} more in or after recovery" if tally.nested else ""
    # After a stop, the number of states that the budget would have left out is unknown.
    left = 0 if failed else tally.left_out
    omitted = f"; the budget left out {left:,} of {count_text(tally.points, 'moment')}" if left else ""
    return (
        f"{count_text(tally.evaluated, 'state')} at {count_text(tally.points - left, 'moment')}, {tally.distinct:,} "
        f"distinct{nested}; {how}{omitted}; {rate:,.0f} a second"
    )
