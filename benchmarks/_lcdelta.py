"""The tables of bench_lcdelta.py."""

from __future__ import annotations

import statistics
from typing import Any

from _targets import Raw, Target

WAY = "LCDelta, 3 bits"
MOST_LOST = 0.5  # points
LEAST_RATIO = 28
LEAST_SPEED = 500  # MB/s

Seeds = list[dict[str, Any]]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def points(seeds: Seeds, way: str, group: str = "ways") -> list[float]:
    """The points of accuracy that were lost, of each seed."""
    return [100 * (seed["committed"] - seed[group][way]["accuracy"]) for seed in seeds]


def median(seeds: Seeds, way: str, what: str, group: str = "ways") -> float:
    return statistics.median(seed[group][way][what] for seed in seeds)


def speed(cell: dict[str, Any], what: str) -> str:
    """MB of elements in a second of processor time: median, and the quickest tenth."""
    times = sorted(cell[what])
    if not times:
        return ""
    middle, quick = (cell["bytes"] / one / 1e6 for one in (statistics.median(times), times[len(times) // 10]))
    return f"{middle:,.0f} ({quick:,.0f})"


def lcdelta_targets(raw: Raw) -> list[Target]:
    """What was asked for."""
    found = []
    for name, one in raw["lcdelta"]["sets"].items():
        least = min(seed["ways"][WAY]["ratio"] for seed in one["seeds"])
        lost = points(one["seeds"], WAY)
        mean = statistics.mean(lost)
        found += [
            Target(
                name, "bytes at 3 bits, the worst seed", f"≥ {LEAST_RATIO} ×", f"{least:.1f} ×", least >= LEAST_RATIO
            ),
            Target(
                name,
                "points of accuracy lost, mean of the seeds",
                f"≤ {MOST_LOST}",
                f"{mean:.2f}",
                mean <= MOST_LOST,
            ),
            Target(
                name,
                "points of accuracy lost, the worst seed",
                f"≤ {MOST_LOST}",
                f"{max(lost):.2f}",
                max(lost) <= MOST_LOST,
            ),
        ]
    for name, cell in raw["lcdelta"]["throughput"].items():
        if "numpy" not in name:
            value = cell["bytes"] / statistics.median(cell["encode"]) / 1e6
            found.append(
                Target(name, "encoding, one core", f"≥ {LEAST_SPEED} MB/s", f"{value:,.0f} MB/s", value >= LEAST_SPEED)
            )
    return found


def lcdelta_sets(raw: Raw) -> str:
    """Each data set and way."""
    rows = []
    for name, one in raw["lcdelta"]["sets"].items():
        seeds = one["seeds"]
        about = f"{name}: {one['rows']:,} × {one['features']}, {one['bytes']:,} B of weights"
        true = [100 * seed["committed"] for seed in seeds]
        rows.append([about, "as committed", "1", "1", f"{statistics.mean(true):.2f} %", "0", "0", "0"])
        for way in seeds[0]["ways"]:
            lost = points(seeds, way)
            rows.append(
                [
                    "",
                    way,
                    f"{median(seeds, way, 'ratio'):.1f}",
                    f"{median(seeds, way, 'with the first'):.1f}",
                    f"{statistics.mean(100 * seed['ways'][way]['accuracy'] for seed in seeds):.2f} %",
                    f"{statistics.mean(lost):.2f}",
                    f"{max(lost):.2f}",
                    f"{median(seeds, way, 'relative error'):.2g}",
                ]
            )
    head = ["data set", "kept as", "bytes: ÷", "with the first: ÷", "accuracy", "points lost", "the most", "error"]
    return table(head, rows)


def lcdelta_choices(raw: Raw) -> str:
    """Bytes and errors of other choices."""
    sets = raw["lcdelta"]["sets"]
    rows = []
    for way in next(iter(sets.values()))["seeds"][0]["choices"]:
        cells = []
        for one in sets.values():
            ratio, error = (median(one["seeds"], way, what, "choices") for what in ("ratio", "relative error"))
            cells.append(f"{ratio:.1f} × ({error:.2g})")
        rows.append([way, *cells])
    return table(["buckets, value, code", *sets], rows)


def lcdelta_speed(raw: Raw) -> str:
    """Throughput."""
    cells = raw["lcdelta"]["throughput"]
    rows = [[name, speed(cell, "encode"), speed(cell, "decode")] for name, cell in cells.items()]
    return table(["elements", "encode, MB/s", "decode, MB/s"], rows)
