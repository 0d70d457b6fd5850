"""What was asked of commits, recovery and opening, beside what was measured: medians of ratios of one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from _common import percentile, ratio, seconds

Raw = dict[str, Any]

WHOLE, ONLY, ROWS = "pmstore", "pmstore, with only=", "pmstore, with"


class Target(NamedTuple):
    """One line of the comparison. measured is None if that was not measured."""

    medium: str
    what: str
    wanted: str
    measured: str | None
    met: bool


def find(raw: Raw, medium: str, workload: str, who: str) -> Raw | None:
    """The cell of bench_commit."""
    cells = raw.get("commit", {}).get("cells", ())
    return next((c for c in cells if (c["medium"], c["workload"], c["who"]) == (medium, workload, who)), None)


def cost(cell: Raw) -> float:
    """Median ratio to the floor."""
    return ratio(cell["times"], cell["floors"])


def at_most(medium: str, what: str, value: float | None, limit: float) -> Target:
    wanted = f"≤ {limit:g}"
    if value is None:
        return Target(medium, what, wanted, None, False)
    return Target(medium, what, wanted, f"{value:.3g}" if value < 1000 else f"{value:,.0f}", value <= limit)


def ahead(raw: Raw, medium: str, workload: str, who: str, neighbour: str) -> Target:
    """Cheaper than a neighbour, each by its ratio to the floor it was paired with."""
    mine, other = find(raw, medium, workload, who), find(raw, medium, workload, neighbour)
    what = f"{workload}, {who}: ahead of {neighbour}"
    if not mine or not other:
        return Target(medium, what, "less", None, False)
    measured = f"{cost(mine):.3g} against {cost(other):.3g}"
    return Target(medium, what, "less", measured, cost(mine) < cost(other))


# medium, workload, who, limit
RATIOS = [
    ("memory", "62,720 B", WHOLE, 1.8),
    ("memory", "1 MiB", WHOLE, 1.3),
    ("memory", "49 MB", WHOLE, 1.15),
    ("memory", "1 row", ONLY, 15),
    ("memory", "1 row", ROWS, 80),
    ("memory", "1% of rows", ONLY, 14),
    ("memory", "1% of rows", ROWS, 14),
    ("memory", "10% of rows", ONLY, 10),
    ("memory", "10% of rows", ROWS, 10),
    ("disk", "8 B", WHOLE, 1.25),
    ("disk", "62,720 B", WHOLE, 1.2),
    ("disk", "1 MiB", WHOLE, 1.25),
    ("disk", "49 MB", WHOLE, 1.15),
    ("disk", "1 row", ONLY, 1.5),
    ("disk", "1 row", ROWS, 1.7),
    ("disk", "1% of rows", ONLY, 2.2),
    ("disk", "1% of rows", ROWS, 2.2),
    ("disk", "10% of rows", ONLY, 2.2),
    ("disk", "10% of rows", ROWS, 2.2),
]


def of_commits(raw: Raw, medium: str) -> Iterator[Target]:
    if medium == "memory":
        cell = find(raw, medium, "8 B", ROWS)
        what = "8 B, through `with`: time"
        taken = statistics.median(cell["times"]) if cell else None
        yield Target(medium, what, "≤ 1.5 µs", seconds(taken) if taken else None, bool(taken and taken <= 1.5e-6))
        yield ahead(raw, medium, "8 B", ROWS, "LMDB, writemap")
    for where, workload, who, limit in RATIOS:
        if where == medium:
            cell = find(raw, medium, workload, who)
            yield at_most(medium, f"{workload}, {who}: × floor", cost(cell) if cell else None, limit)
            if (medium, workload, who) == ("memory", "1 row", ONLY):
                yield ahead(raw, medium, workload, who, "LMDB, one key per row")


def written(cell: Raw) -> float:
    """Bytes that went to the medium for each byte committed; on disks in the second half, when growth is over."""
    if "sent" in cell:
        return float(cell["sent"] / cell["sent for"])
    return float((cell["bytes_logged"] + cell["bytes_home"] + cell["bytes_direct"]) / cell["committed"])


def of_latency(raw: Raw, medium: str) -> Iterator[Target]:
    cells = [cell for cell in raw.get("latency", {}).get("cells", ()) if cell["medium"] == medium]
    for cell in cells:
        if cell["workload"] in ("62,720 B", "1 MiB", "49 MB"):
            yield at_most(medium, f"{cell['workload']}: bytes written per byte", written(cell), 1.05)
    for cell in cells:
        if cell["kind"] == "latency":
            value = percentile(cell["times"], 0.999) / percentile(cell["floors"], 0.999)
            what = f"{cell['workload']}: p99.9 of {len(cell['times']):,} commits ÷ that of as many floors"
            yield at_most(medium, what, value, 2)


def of_opening(raw: Raw, medium: str) -> Iterator[Target]:
    known = raw.get("recovery", {})
    cells = [c for c in known.get("recoveries", ()) if c["medium"] == medium and c["varied"] == "log"]
    if cells:
        largest = max(cells, key=lambda cell: int(cell["log bytes"]))
        what = f"recovery of {largest['log bytes'] / 2**20:.0f} MiB of log"
        if medium == "memory":
            yield at_most(medium, f"{what} ÷ a copy of them, mapped and touched", cost(largest["cached"]), 2)
            anew = ratio(largest["cached"]["times"], largest["cached"]["mapped anew"])
            yield at_most(medium, f"{what} ÷ a copy that maps its files", anew, 2)
        else:
            for state in ("cached", "cold"):
                yield at_most(medium, f"{what}, {state} ÷ read, write and fdatasync", cost(largest[state]), 2)
    for cell in known.get("openings", ()):
        if cell["medium"] == medium:
            middle = {name: statistics.median(kept) for name, kept in cell["times"].items()}
            value = middle["many"] / middle["few"]
            yield at_most(medium, f"clean open, {cell['names']:,} names ÷ ten", value, 2)
            value = middle["large"] / middle["small"]
            yield at_most(medium, f"clean open, {cell['bytes'] >> 20:,} MiB ÷ 1 MiB", value, 2)


def targets(raw: Raw) -> list[Target]:
    """All of them. raw: name of a benchmark -> what it kept."""
    found = []
    for medium in ("memory", "disk"):
        found += [*of_commits(raw, medium), *of_latency(raw, medium), *of_opening(raw, medium)]
    return found
