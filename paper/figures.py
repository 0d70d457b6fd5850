"""What tables, targets and pictures ask of the raw results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from _targets import Raw

from .strategies import Pmstore, Renamed, Savez, with_derived

CHECKPOINTS, ESTIMATORS, KILLS = "paper-checkpoints", "paper-estimators", "paper-kills"
OURS, SAVEZ, SAFE = Pmstore.name, Savez.name, Renamed.name
OURS_ALL, SAFE_ALL = with_derived(Pmstore).name, with_derived(Renamed).name

# What is compared in "speed-ups": title, strategy and medium of what is slower, medium of pmstore.
COMPARISONS = [
    ("np.savez ÷ pmstore, both on tmpfs", SAVEZ, "memory", "memory"),
    ("savez, fsync, rename ÷ pmstore, both on the disk", SAFE, "disk", "disk"),
    ("np.savez on the disk ÷ pmstore in memory that persists", SAVEZ, "disk", "memory"),
]


def sets(raw: Raw) -> list[str]:
    """Names of the data, the paper's first one first."""
    return [one["name"] for one in raw[CHECKPOINTS]["data"]]


def fits(raw: Raw, name: str, model: str) -> list[Raw]:
    """The fits of the loops, by number of clusters."""
    found = [fit for fit in raw.get(CHECKPOINTS, {}).get("fits", ()) if (fit["data"], fit["model"]) == (name, model)]
    return sorted(found, key=lambda fit: int(fit["clusters"]))


def checkpoint(fit: Raw, who: str, medium: str) -> Raw | None:
    """A strategy's times in a fit."""
    return next((c for c in fit["checkpoints"] if (c["who"], c["medium"]) == (who, medium)), None)


def cost(fit: Raw, who: str, medium: str, copying: bool = False, back_to_back: bool = False) -> float | None:
    """Median seconds of a checkpoint. copying: with the copy into the strategy's memory."""
    found = checkpoint(fit, who, medium)
    if not found:
        return None
    both = found["back to back"] if back_to_back else list(zip(found["placing"], found["times"]))
    return statistics.median(placing * copying + saving for placing, saving in both) if both else None


def share(fit: Raw, seconds: float) -> float:
    """The share of a fit that takes so much time after every iteration."""
    return seconds / (seconds + statistics.median(fit["iterations"]))


def speed_up(
    fit: Raw, comparison: tuple[str, str, str, str], copying: bool = False, back_to_back: bool = False
) -> float | None:
    """How many times pmstore's checkpoint goes into the other's."""
    _, who, medium, ours = comparison
    slow = cost(fit, who, medium, back_to_back=back_to_back)
    fast = cost(fit, OURS, ours, copying, back_to_back)
    return slow / fast if slow and fast else None


def stored(raw: Raw, model: str, medium: str) -> Iterator[tuple[Raw, Raw]]:
    """The fits of pmstore's estimator, each with the whole record that it is in."""
    for fit in raw.get(ESTIMATORS, {}).get("fits", ()):
        if fit["model"] == model:
            yield from ((fit, one) for one in fit["stored"] if one["medium"] == medium)


def times_baseline(one: dict[str, Any]) -> float | None:
    """Median of an iteration's commit ÷ the baseline beside it, where that came after and where it came before: the
    geometric mean of both. The first and the last commit of a fit hold more.

    None for fits of a few iterations, in which the store is still learning how the arrays change.
    """
    if len(one["baselines"]) < 7:
        return None
    ratios = [c / f for c, f in zip(one["commits"], one["baselines"])]
    return statistics.geometric_mean([statistics.median(ratios[2:-1:2]), statistics.median(ratios[1:-1:2])])


def beyond(fit: Raw, one: Raw) -> float:
    """The rest of a fit in a store ÷ scikit-learn's fit."""
    return float((one["fit"] - sum(one["commits"])) / fit["plain"])


def resuming(kept: Raw) -> tuple[float, float, float]:
    """Seconds of an iteration; of going on, until its first iteration begins; of that, beyond scikit-learn's start."""
    iteration = statistics.median(kept["iterations"])
    start = statistics.median(kept["until first commit"]) - iteration
    return iteration, start, start - statistics.median(kept["starts"])
