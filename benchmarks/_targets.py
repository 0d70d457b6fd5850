"""The targets of commits, recovery, opening and readers, and the measured values: medians of the ratios of one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from _common import percentile, ratio, seconds

Raw = dict[str, Any]

MEMORY = ("new", "reused")  # a reading goes to pages from the kernel, or to memory that an array has left
RECENCY = ("again", "after a commit")  # it is of the same commit as the one before, or not
PREAD = "pread alone"  # in place of a reading: the call that every reading of a file needs that may become shorter
WHOLE, ONLY, ROWS = "pmstore", "pmstore, with only=", "pmstore, with"
PROCESS = ", domain process"  # the same on tmpfs as it is, where a commit has to survive a kill only
PMEMOBJ = "libpmemobj, tx_add_range, no flush"


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
    """Median ratio to the baseline."""
    return ratio(cell["times"], cell["baselines"])


def at_most(medium: str, what: str, value: float | None, limit: float) -> Target:
    wanted = f"≤ {limit:g}"
    if value is None:
        return Target(medium, what, wanted, None, False)
    return Target(medium, what, wanted, f"{value:.3g}" if value < 1000 else f"{value:,.0f}", value <= limit)


def ahead(raw: Raw, medium: str, workload: str, who: str, competitor: str) -> Target:
    """The target that pmstore is cheaper than a competitor, each as a multiple of the baseline it was paired with."""
    mine, other = find(raw, medium, workload, who), find(raw, medium, workload, competitor)
    what = f"{workload}, {who}: ahead of {competitor}"
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


def of_tmpfs(raw: Raw) -> Iterator[Target]:
    """The targets on tmpfs, where no program flushes anything."""
    for workload in ("62,720 B", "1 MiB", "49 MB"):
        yield ahead(raw, "memory", workload, WHOLE + PROCESS, "LMDB, writemap")
    yield ahead(raw, "memory", "8 B", ROWS + PROCESS, "LMDB, writemap")
    for workload, limit in (("1 row", 1.5), ("1% of rows", 1), ("10% of rows", 1)):
        for mine, other, most in (ONLY + PROCESS, PMEMOBJ, limit), (ROWS + PROCESS, ONLY + PROCESS, 1.5):
            cells = [find(raw, "memory", workload, who) for who in (mine, other)]
            value = cost(cells[0]) / cost(cells[1]) if cells[0] and cells[1] else None
            yield at_most("memory", f"{workload}, {mine} ÷ {other}", value, most)


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
            yield at_most(medium, f"{workload}, {who}: × baseline", cost(cell) if cell else None, limit)
            if (medium, workload, who) == ("memory", "1 row", ONLY):
                yield ahead(raw, medium, workload, who, "LMDB, one key per row")
    if medium == "memory":
        yield from of_tmpfs(raw)


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
            value = percentile(cell["times"], 0.999) / percentile(cell["baselines"], 0.999)
            what = f"{cell['workload']}: p99.9 of {len(cell['times']):,} commits ÷ that of as many baselines"
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


def beside(cell: Raw, state: str, other: str = "") -> Raw:
    """What the commits of bench_readers.py took in the blocks of a state, paired with those of another one (by default
    that without readers).

    Returns
    -------
    dict
        median: seconds, the median of the blocks' medians; ratio, mean ratio: medians of the paired ratios of the
        blocks' medians and means; share: processors that the readers used; rate: readings a second, of one reader;
        mixed, older, failed: so many readings in all; error: the first one.
    """
    blocks, without = cell["blocks"][state], cell["blocks"][other]
    readers = [reader for block in blocks for reader in block["readers"]]
    spent = sum(reader["seconds"] for reader in readers)
    found = {what: sum(reader[what] for reader in readers) for what in ("mixed", "older", "failed")}
    return found | {
        "median": statistics.median(block["median"] for block in blocks),
        "ratio": ratio([block["median"] for block in blocks], [block["median"] for block in without]),
        "mean ratio": ratio([block["mean"] for block in blocks], [block["mean"] for block in without]),
        "share": sum(reader["used"] for reader in readers) / (spent / len(blocks[0]["readers"])) if spent else 0.0,
        "rate": sum(reader["count"] for reader in readers) / spent if spent else 0.0,
        "error": next((reader["error"] for reader in readers if reader["error"]), ""),
    }


def copied(cell: Raw, *also: str) -> list[tuple[str, Raw]]:
    """What was measured of copies in bench_readers.py, by memory and recency. also: PREAD, to have it, too."""
    names = [f"{memory}, {what}" for memory in MEMORY for what in (*RECENCY, *also)]
    return [(name, cell[name]) for name in names if name in cell]


def of_readers(raw: Raw, medium: str) -> Iterator[Target]:
    known = {
        part: [cell for cell in cells if cell["medium"] == medium and cell.get("who", "pmstore") == "pmstore"]
        for part, cells in raw.get("readers", {}).items()
        if part in ("commits", "copies", "openings", "starving", "wakes")
    }
    for cell in known.get("commits", ()):
        for state, what in (("refresh", "refresh"), ("read", "refresh, and read all of it")):
            what = f"{cell['workload']} while three readers {what} at 100 Hz ÷ without readers"
            yield at_most(medium, what, beside(cell, state)["ratio"], 1.05)
    for cell in known.get("openings", ()):
        middle = {name: statistics.median(kept) for name, kept in cell["times"].items()}
        for name, what in (("large", "one array"), ("many", f"{cell['arrays']:,} arrays")):
            what = f"snapshot of {cell['bytes'] >> 20:,} MiB in {what} ÷ of 1 MiB"
            yield at_most(medium, what, middle[name] / middle["small"], 2)
    for cell in known.get("copies", ()):
        for state, one in copied(cell):
            yield at_most(medium, f"`read` of {cell['workload']}, {state} ÷ a copy", cost(one), 1.5)
    for cell in known.get("wakes", ()):
        taken = max(0.0, percentile(cell["returned"], 0.5))
        what = "the return of `commit` to that of `wait`: median"
        yield Target(medium, what, "≤ 100 µs", seconds(taken), taken <= 1e-4)
        what = f"processor time of {cell['idle']:.0f} s of `wait`"
        yield Target(medium, what, "≤ 5 ms", seconds(cell["used"]), cell["used"] <= 5e-3)
    for cell in known.get("starving", ()):
        readers = cell["readers"]
        least, failed = min(r["count"] for r in readers), sum(r["failed"] for r in readers)
        longest = seconds(max(r["longest"] for r in readers))
        what = f"{cell['number']} reading 49 MB beside commits back to back: starved"
        measured = f"{failed} failed, longest wait {longest}"
        yield Target(medium, what, "none", measured, least > 0 and not failed)


def targets(raw: Raw) -> list[Target]:
    """All targets of commits, latency and recovery. raw: name of a benchmark -> its raw results."""
    found = []
    for medium in ("memory", "disk"):
        found += [*of_commits(raw, medium), *of_latency(raw, medium), *of_opening(raw, medium)]
    return found


AGGREGATE_WAYS = ("plain files", "whole files", "aggregate", "one file")


def aggregate_targets(raw: Raw) -> list[Target]:
    """The targets of bench_aggregate.py."""
    found = []
    for cell in raw["aggregate"]["cells"]:
        number, medium = cell["shards"], cell["medium"]
        parts = -(-number * cell["bytes"] // (128 << 20))
        files = cell["aggregate"]["files"]
        found.append(Target(medium, f"files of {number:,} shards", f"≤ {parts + 1}", str(files), files <= parts + 1))
        if medium == "disk" and number >= 256:
            least = 30 if number == 1024 else 3
            for way in AGGREGATE_WAYS[:2]:
                gain = ratio(cell[way]["write"], cell["aggregate"]["write"])
                what = f"{number:,} shards of {cell['bytes'] >> 10:,} KiB: {way} ÷ aggregate"
                found.append(Target(medium, what, f"≥ {least}", f"{gain:.1f}", gain >= least))
    return found


def archive_targets(raw: Raw) -> list[Target]:
    """The targets of bench_archive.py."""
    found = []
    for cell in raw["archive"]["cells"]:
        medium, fits, commits, read = cell["medium"], cell["fits"], cell["commits"], cell["reading"]
        versions, mixtures = cell["versions"], cell["mixtures"]
        for what, most, value in (
            ("a fit of KMeans with a drain ÷ without", 1.031, ratio(fits["with"], fits["without"])),
            ("a fit of a mixture with a drain ÷ without", 1.031, ratio(mixtures["with"], mixtures["without"])),
            ("a commit of 62,720 B with a drain ÷ without", 1.2, ratio(commits["with"], commits["without"])),
            ("restoring ÷ copying the bytes", 2, ratio(read["restore"], read["copy"])),
            ("62,720 B of one version ÷ reading what it needs", 2, ratio(read["array"], read["needed"])),
            ("64 MB of one version ÷ reading what it needs", 2, ratio(read["large"], read["large needed"])),
        ):
            found.append(Target(medium, what, f"≤ {most}", f"{value:.3f}", value <= most))
        seconds = statistics.median(read["list"])
        if read["listed"] == 100_000:
            found.append(Target(medium, "listing 100,000 versions", "≤ 1 s", f"{seconds:.2f} s", seconds <= 1))
        if "icechunk" in versions:
            for way, what in (("captured", "each one captured"), ("waited", "each one waited for")):
                gain = ratio(versions["icechunk"], versions[way])
                text = f"versions a second ÷ Icechunk's, {what}"
                found.append(Target(medium, text, "≥ 100", f"{gain:.1f}", gain >= 100))
    return found


def reader_targets(raw: Raw) -> list[Target]:
    """The targets of bench_readers.py."""
    return [target for medium in ("memory", "disk") for target in of_readers(raw, medium)]
