"""Turns the raw results of the benchmarks into tables, a comparison with the targets, and pictures.

    python benchmarks/report.py                  report.md and the pictures, beside the raw results
    python benchmarks/report.py --docs           and fills the marked places of the documents, and keeps pictures
                                                 and raw results in benchmarks/

A marked place is the text between <!-- bench:NAME --> and <!-- /bench:NAME -->.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import re
import shutil
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from _common import BUILD, CHANGED, HERE, SIZES, percentile, ratio, seconds
from _lcdelta import lcdelta_choices, lcdelta_sets, lcdelta_speed, lcdelta_targets
from _results import load, load_kept
from _targets import (
    AGGREGATE_WAYS,
    ONLY,
    PREAD,
    PROCESS,
    WHOLE,
    Raw,
    Target,
    aggregate_targets,
    archive_targets,
    beside,
    copied,
    cost,
    find,
    reader_targets,
    targets,
    written,
)

DOCUMENTS = [
    HERE / "README.md",
    HERE / "readers.md",
    HERE / "aggregate.md",
    HERE / "archive.md",
    HERE / "lcdelta.md",
    HERE.parent / "README.md",
]
RESULTS = ("commit", "latency", "parts", "recovery", "readers", "aggregate", "archive", "lcdelta")
SHOWN = ("targets", "readers-targets", "aggregate-targets", "archive-targets", "lcdelta-targets")
PICTURES = {
    "costs": "The cost of making a change durable, as a multiple of the baseline",
    "latency": "Latency percentiles of commits and of the baseline",
    "parts": "What a commit's time goes to",
    "recovery": "Recovery and opening",
}


class Report(NamedTuple):
    """One set of benchmarks, and the tables and pictures that are made of it.

    made_by : what makes its results. drawing : module that draws its pictures. shown : sections that are printed.
    """

    title: str
    made_by: str
    results: tuple[str, ...]
    sections: dict[str, tuple[str, str, Callable[[Raw], str]]]
    pictures: dict[str, str]
    drawing: str
    shown: tuple[str, ...]
    documents: list[Path]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def times_baseline(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def subjects(raw: Raw, medium: str) -> list[str]:
    """The subjects in the order in which they were measured, pmstore and then libpmemobj first."""
    names = dict.fromkeys(cell["who"] for cell in raw["commit"]["cells"] if cell["medium"] == medium)
    return sorted(names, key=lambda name: (not name.startswith("pmstore"), not name.startswith("libpmemobj")))


# ---- sections


def machine(raw: Raw) -> str:
    lines = []
    for name, kept in raw.items():
        form = "quick form: not to be quoted" if kept.get("quick") else "full form"
        lines.append(f"- `bench_{name}.py`, {form}: {kept['machine']}, {kept['priority']}")
    if "commit" in raw:
        versions = ", ".join(f"{name} {version}" for name, version in raw["commit"]["versions"].items())
        systems = ", ".join(f"{medium}: {kind}" for medium, kind in raw["commit"]["file systems"].items())
        lines.append(f"- {versions}; file systems: {systems}")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def costs(raw: Raw, medium: str) -> str:
    """Medians, and the median ratio to the baseline in brackets."""
    head, rows = ["", *SIZES, *CHANGED], []
    for who in subjects(raw, medium):
        cells = [find(raw, medium, workload, who) for workload in (*SIZES, *CHANGED)]
        safe = next(cell for cell in cells if cell)["safe"]
        figures = [f"{seconds(statistics.median(c['times']))} ({times_baseline(cost(c))})" if c else "" for c in cells]
        rows.append([who if safe else f"*{who}* †", *figures])
    baselines = []
    for workload in (*SIZES, *CHANGED):
        cell = find(raw, medium, workload, "pmstore" if workload in SIZES else "pmstore, with")
        baselines.append(seconds(statistics.median(cell["baselines"])) if cell else "")
    rows.append(["the baseline beside pmstore", *baselines])
    note = "\n\n† Not atomic, or not durable when the call returns."
    return table(head, rows) + note


def guarantees(raw: Raw) -> str:
    rows = [
        [name, known["atomic"], known["torn"], known["killed"], known["cut"]]
        for name, known in raw["commit"]["guarantees"].items()
        if not name.startswith("pmstore,")
    ]
    return table(["", "atomic", "torn write possible", "after a kill", "after a power cut"], rows)


def skipped(raw: Raw) -> str:
    lines = [
        f"- {known['who']} ({known['where']}): {known['why']}"
        for kept in raw.values()
        for known in kept.get("skipped", ())
    ]
    return "\n".join(["Not measured:", "", *lines]) if lines else "Everything was measured."


def comparison(found: list[Target]) -> str:
    rows = [
        [
            t.medium,
            t.what,
            t.wanted,
            t.measured or "not measured",
            "—" if t.measured is None else "yes" if t.met else "no",
        ]
        for t in found
    ]
    return table(["", "", "wanted", "measured", "met"], rows)


def latency(raw: Raw) -> str:
    rows = []
    for cell in raw["latency"]["cells"]:
        name = f"{cell['medium']}, {cell['workload']}" + (" in a row" if cell["kind"] == "sustained" else "")
        for who, values in (("pmstore", cell["times"]), ("baseline", cell["baselines"])):
            figures = [seconds(percentile(values, share)) for share in (0.5, 0.99, 0.999, 1)]
            mine = who == "pmstore"
            rows.append(
                [
                    name if mine else "",
                    who,
                    *figures,
                    seconds(sum(values)),
                    f"{len(values):,}",
                    f"{written(cell):.3g}" if mine else "",
                    f"{cell['checkpoints']:,}" if mine else "",
                ]
            )
    head = ["", "", "p50", "p99", "p99.9", "longest", "together", "commits", "written per byte", "checkpoints"]
    return table(head, rows)


def parts(raw: Raw) -> str:
    from bench_parts import parts as of_cell

    names = ["find", "hash and copy", "write", "fence", "image", "Python"]
    rows = []
    for cell in raw["parts"]["cells"]:
        known = of_cell(cell)
        figures = [seconds(known[name]) if known.get(name) else "" for name in names]
        rest = known["call"] - sum(known.get(name, 0) for name in names if name != "Python")
        left = f"{'−' if rest < 0 else ''}{seconds(abs(rest))}"
        rows.append(
            [
                f"{cell['medium']}, {cell['workload']}",
                seconds(known["baseline"]),
                seconds(known["call"]),
                *figures,
                left,
            ]
        )
    return table(["", "baseline", "pm_commit", *names, "left over"], rows)


def recovery(raw: Raw) -> str:
    rows = []
    for cell in raw["recovery"]["recoveries"]:
        for state in ("cached", "cold"):
            if state in cell:
                times, baselines = cell[state]["times"], cell[state]["baselines"]
                mapped = cell[state]["mapped anew"]
                rows.append(
                    [
                        cell["medium"] + (f", {state}" if cell["medium"] == "disk" else ""),
                        f"{cell['log bytes'] / 2**20:.1f} MiB",
                        f"{cell['store bytes'] / 2**20:,.0f} MiB",
                        seconds(statistics.median(times)),
                        seconds(statistics.median(baselines)),
                        times_baseline(cost(cell[state])),
                        times_baseline(statistics.median(t / m for t, m in zip(times, mapped))) if mapped else "",
                    ]
                )
    head = ["", "log", "store", "recovery", "plain", "×", "× one that maps its files"]
    return table(head, rows)


def opening(raw: Raw) -> str:
    rows = []
    for cell in raw["recovery"]["openings"]:
        names = {
            "few": "ten names",
            "many": f"{cell['names']:,} names",
            "small": "1 MiB",
            "large": f"{cell['bytes'] >> 20:,} MiB",
            "after a crash": "ten names, after a crash",
        }
        middle = {name: statistics.median(cell["times"][name]) for name in names}
        rows += [[cell["medium"], text, seconds(middle[name])] for name, text in names.items()]
    return table(["", "", "open"], rows)


def readers_commits(raw: Raw) -> str:
    """A line for each thing that the readers do."""
    rows = []
    for cell in raw["readers"]["commits"]:
        for state, what in (("refresh", "refresh, one element"), ("read", "refresh, all of it")):
            if state not in cell["blocks"]:
                continue
            known, control = beside(cell, state), beside(cell, f"{state} elsewhere")
            against = beside(cell, state, f"{state} elsewhere")
            rows.append(
                [
                    f"{cell['medium']}, {cell['workload']}",
                    cell["who"],
                    what,
                    seconds(beside(cell, "")["median"]),
                    seconds(known["median"]),
                    *(f"{one['ratio']:.2f} ({one['mean ratio']:.2f})" for one in (known, control, against)),
                    f"{known['share']:.2f}",
                    f"{known['rate']:.0f}",
                    f"{known['mixed']:,}",
                ]
            )
    head = [
        "",
        "",
        "three readers",
        "without",
        "with",
        "×",
        "control ×",
        "÷ control",
        "processors",
        "a second",
        "mixed",
    ]
    return table(head, rows)


def readers_copies(raw: Raw) -> str:
    rows = [
        [
            f"{cell['medium']}, {cell['workload']}",
            cell["who"],
            state,
            seconds(statistics.median(known["times"])),
            seconds(statistics.median(known["baselines"])),
            times_baseline(cost(known)),
        ]
        for cell in raw["readers"]["copies"]
        for state, known in copied(cell, PREAD)
    ]
    return table(["", "", "memory, newest commit", "read", "copy", "×"], rows)


def readers_opening(raw: Raw) -> str:
    rows = []
    for cell in raw["readers"]["openings"]:
        size = f"{cell['bytes'] >> 20:,} MiB"
        names = {"small": "1 MiB", "large": f"{size}, one array", "many": f"{cell['arrays']:,} arrays of 1 MiB"}
        for name, text in names.items():
            figures = []
            for what in ("times", "refreshes"):
                kept, small = cell[what][name], cell[what]["small"]
                figures += [seconds(statistics.median(kept)), f"{ratio(kept, small):.2f}"]
            rows.append([cell["medium"], text, *figures])
    return table(["", "", "open", "×", "refresh", "×"], rows)


def readers_starving(raw: Raw) -> str:
    rows = []
    for cell in raw["readers"]["starving"]:
        readers, writer = cell["readers"], cell["writer"]
        sums = {what: sum(reader[what] for reader in readers) for what in ("count", "mixed", "failed", "seconds")}
        rows.append(
            [
                cell["medium"],
                cell["who"],
                str(cell["number"]),
                f"{writer['count'] / writer['seconds']:.0f}",
                f"{sums['count'] / sums['seconds']:.0f}",
                seconds(max(reader["longest"] for reader in readers)),
                f"{sums['count']:,}",
                f"{sums['mixed']:,}",
                f"{sums['failed']:,}",
            ]
        )
    head = ["", "", "readers", "commits a second", "readings a second, each", "the longest", "readings", "mixed"]
    return table([*head, "failed"], rows)


def readers_waiting(raw: Raw) -> str:
    rows = [
        [
            cell["medium"],
            f"{len(cell[since]):,}",
            text,
            *(seconds(max(0.0, percentile(cell[since], share))) for share in (0.5, 0.99, 1)),
            f"{seconds(cell['used'])} in {cell['idle']:.1f} s",
        ]
        for cell in raw["readers"]["wakes"]
        for since, text in (("called", "call"), ("returned", "return"))
    ]
    return table(["", "commits", "since its", "p50", "p99", "longest", "processor time of waiting"], rows)


def aggregates(raw: Raw, what: str) -> str:
    """MB/s of each way, and how many times as fast the aggregate is; what: "write" or "read"."""
    rows, others = [], [way for way in AGGREGATE_WAYS if way != "aggregate"]
    for cell in raw["aggregate"]["cells"]:
        size = cell["shards"] * cell["bytes"]
        rates = [size / statistics.median(cell[way][what]) / 1e6 for way in AGGREGATE_WAYS]
        gains = [ratio(cell[way][what], cell["aggregate"][what]) for way in others]
        files = f"{cell[AGGREGATE_WAYS[0]]['files']:,} → {cell['aggregate']['files']}"
        rows.append(
            [
                f"{cell['medium']}, {cell['shards']:,} × {cell['bytes'] >> 10:,} KiB",
                *(f"{rate:,.0f}" for rate in rates),
                *(f"{gain:.1f}" if what == "write" else f"{gain:.2f}" for gain in gains),
                *([files] if what == "write" else []),
            ]
        )
    head = ["MB/s", *AGGREGATE_WAYS, *(f"× {way}" for way in others)]
    return table([*head, "files"] if what == "write" else head, rows)


def archive_drains(raw: Raw) -> str:
    """Fits and commits, with a drain and without."""
    rows = []
    for cell in raw["archive"]["cells"]:
        commits = cell["commits"]
        fits = [
            (what, one["with"], one["without"], statistics.median(one["versions"]), one["commits"])
            for what, one in (("a fit of KMeans", cell["fits"]), ("a fit of a Gaussian mixture", cell["mixtures"]))
        ]
        for what, with_, without, archived, count in (
            *fits,
            ("a commit of 62,720 B", commits["with"], commits["without"], commits["versions"], commits["commits"]),
            (
                "500 of them, with the changes",
                commits["rounds with"],
                commits["rounds without"],
                commits["versions"],
                commits["commits"],
            ),
        ):
            median = statistics.median
            rows.append(
                [
                    f"{cell['medium']}, {what}",
                    seconds(median(without)),
                    seconds(median(with_)),
                    f"{ratio(with_, without):.3f}",
                    f"{archived:,.0f} of {count:,}",
                ]
            )
    return table(["", "without", "with a drain", "with ÷ without", "commits that became versions"], rows)


def archive_reading(raw: Raw) -> str:
    """Restoring, one array, listing; and versions beside Icechunk."""
    rows = []
    for cell in raw["archive"]["cells"]:
        read, made, medium = cell["reading"], cell["versions"], cell["medium"]
        beside = [
            ("restoring", read["restore"], "copying and syncing the objects' bytes", read["copy"]),
            ("62,720 B of one version", read["array"], "reading the bytes that it needs", read["needed"]),
            ("the same version again", read["again"], "reading the bytes that it needs", read["needed"]),
            ("64 MB of one version", read["large"], "reading the bytes that it needs", read["large needed"]),
            (f"listing {read['listed']:,} versions", read["list"], "", []),
            ("a version that is waited for", made["waited"], "Icechunk", made.get("icechunk", [])),
            ("a version that is captured", made["captured"], "Icechunk", made.get("icechunk", [])),
        ]
        for what, own, other_what, other in beside:
            compared = [other_what, seconds(statistics.median(other)), f"{ratio(own, other):.2f}"] if other else []
            rows.append([f"{medium}, {what}", seconds(statistics.median(own)), *(compared or ["", "", ""])])
    return table(["", "pmstore", "beside it", "", "÷"], rows)


def summary(raw: Raw) -> str:
    """The table of the README: pmstore, on tmpfs as users have it there, and the cheapest competitor with the same
    guarantees."""
    rows = []
    for workload in ("8 B", "62,720 B", "1 MiB", "49 MB", "1 row"):
        who = WHOLE if workload in SIZES else ONLY
        cells = [find(raw, "memory", workload, who + PROCESS), find(raw, "disk", workload, who)]
        figures = []
        for cell in cells:
            if cell:
                rivals = [
                    (cost(c), c["who"])
                    for c in raw["commit"]["cells"]
                    if c["safe"]
                    and c["medium"] == cell["medium"]
                    and c["workload"] == workload
                    and "pmstore" not in c["who"]
                ]
                best = f"{min(rivals)[1]}: {times_baseline(min(rivals)[0])}" if rivals else ""
                figures += [seconds(statistics.median(cell["times"])), times_baseline(cost(cell)), best]
            else:
                figures += ["", "", ""]
        rows.append([f"{workload} of 51 MB" if workload == "1 row" else workload, *figures])
    return table(
        [
            "",
            "tmpfs",
            "× baseline",
            "cheapest competitor, × baseline",
            "disk",
            "× baseline",
            "cheapest competitor, × baseline",
        ],
        rows,
    )


# ---- all of it

SECTIONS: dict[str, tuple[str, str, Callable[[Raw], str]]] = {
    "machine": ("", "Machine and versions", machine),
    "targets": ("", "What was asked for", lambda raw: comparison(targets(raw))),
    "memory": ("commit", "Costs on memory: median (× baseline)", lambda raw: costs(raw, "memory")),
    "disk": ("commit", "Costs on a disk: median (× baseline)", lambda raw: costs(raw, "disk")),
    "guarantees": ("commit", "What each of them keeps", guarantees),
    "latency": ("latency", "The longest commits, and what they write", latency),
    "parts": ("parts", "The parts of a commit", parts),
    "recovery": ("recovery", "Recovery", recovery),
    "opening": ("recovery", "Opening", opening),
    "readers-machine": ("readers", "Machine of the readers", lambda raw: machine({"readers": raw["readers"]})),
    "readers-targets": ("readers", "What was asked for of readers", lambda raw: comparison(reader_targets(raw))),
    "readers-commits": ("readers", "Commits beside readers", readers_commits),
    "readers-copies": ("readers", "Reading", readers_copies),
    "readers-opening": ("readers", "Opening a snapshot", readers_opening),
    "readers-starving": ("readers", "Reading beside commits back to back", readers_starving),
    "readers-waiting": ("readers", "From a commit to the end of a wait", readers_waiting),
    "aggregate-machine": (
        "aggregate",
        "Machine of the aggregates",
        lambda raw: machine({"aggregate": raw["aggregate"]}),
    ),
    "aggregate-targets": (
        "aggregate",
        "What was asked for of aggregates",
        lambda raw: comparison(aggregate_targets(raw)),
    ),
    "aggregate-write": ("aggregate", "Writing the shards of many processes", lambda raw: aggregates(raw, "write")),
    "aggregate-read": ("aggregate", "Reading them", lambda raw: aggregates(raw, "read")),
    "archive-machine": ("archive", "Machine of the archive", lambda raw: machine({"archive": raw["archive"]})),
    "archive-targets": (
        "archive",
        "What was asked for of the archive",
        lambda raw: comparison(archive_targets(raw)),
    ),
    "archive-drains": ("archive", "Draining", archive_drains),
    "archive-reading": ("archive", "Reading an archive", archive_reading),
    "lcdelta-machine": ("lcdelta", "Machine of lossy histories", lambda raw: machine({"lcdelta": raw["lcdelta"]})),
    "lcdelta-targets": (
        "lcdelta",
        "What was asked for of lossy histories",
        lambda raw: comparison(lcdelta_targets(raw)),
    ),
    "lcdelta-sets": ("lcdelta", "Bytes and accuracy of lossy histories", lcdelta_sets),
    "lcdelta-choices": ("lcdelta", "Other choices of a lossy codec", lcdelta_choices),
    "lcdelta-speed": ("lcdelta", "Throughput of a lossy codec", lcdelta_speed),
    "skipped": ("", "Skipped", skipped),
    "summary": ("commit", "In short", summary),
}


BENCHMARKS = Report("Benchmarks", "make bench", RESULTS, SECTIONS, PICTURES, "_pictures", SHOWN, DOCUMENTS)


def sections(raw: Raw, report: Report = BENCHMARKS) -> dict[str, str]:
    """Name of a marked place -> its text, for all places whose results were measured."""
    return {name: make(raw) for name, (needs, _, make) in report.sections.items() if not needs or needs in raw}


def fill(text: str, parts_of_it: dict[str, str]) -> str:
    """A document with its marked places filled. Places without results stay as they are."""

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        return (
            f"<!-- bench:{name} -->\n{parts_of_it[name]}\n<!-- /bench:{name} -->" if name in parts_of_it else match[0]
        )

    return re.sub(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench:\1 -->", filled, text, flags=re.DOTALL)


def keep(report: Report, results: Path, raw: Raw, drawn: list[str]) -> None:
    """Pictures, raw results and tables go into the repository."""
    pictures, kept = HERE / "pictures", HERE / "raw"
    pictures.mkdir(exist_ok=True)
    kept.mkdir(exist_ok=True)
    for name in drawn:
        shutil.copy(results / f"{name}.png", pictures / f"{name}.png")
    for name, known in raw.items():
        data = json.dumps(known, separators=(",", ":")).encode()
        (kept / f"{name}.json.gz").write_bytes(gzip.compress(data, mtime=0))
    for document in report.documents:
        folder = os.path.relpath(pictures, document.parent)
        known = sections(raw, report)
        known |= {f"picture-{name}": f"![{report.pictures[name]}]({folder}/{name}.png)" for name in drawn}
        document.write_text(fill(document.read_text(), known))


def publish(report: Report, results: Path, docs: bool) -> None:
    """Write report.md and the pictures beside the results; docs: and fill the documents, unless it was a quick run. A
    benchmark that was not run again has its kept results there."""
    raw = load(results, report.results)
    if not raw:
        raise SystemExit(f"no results in {results}: {report.made_by}")
    if docs:
        both = load_kept(HERE / "raw", report.results) | raw
        raw = {name: both[name] for name in report.results if name in both}
    known = sections(raw, report)
    drawn: list[str] = []
    try:
        drawn = importlib.import_module(report.drawing).draw(raw, results)
    except ImportError as error:
        print(f"no pictures: {error}. Install it: pip install 'pmstore[bench]'")
    lines = [f"# {report.title}", ""]
    for name, text in known.items():
        lines += [f"## {report.sections[name][1]}", "", text, ""]
    lines += [f"![{report.pictures[name]}]({name}.png)\n" for name in drawn]
    (results / "report.md").write_text("\n".join(lines))
    print("\n\n".join(known[name] for name in report.shown if name in known))
    print(f"\n{results / 'report.md'}" + "".join(f"\n{results / name}.png" for name in drawn))
    if docs:
        if any(kept.get("quick") for kept in raw.values()):
            print("these are figures of the quick form: not for the documents")
            raise SystemExit(1)
        keep(report, results, raw, drawn)


def command_line(description: str | None, results: Path) -> argparse.Namespace:
    """The options of a program that writes a report."""
    command = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--results", type=Path, default=results, help="default: %(default)s")
    command.add_argument("--docs", action="store_true", help="fill the documents, keep pictures and raw results")
    return command.parse_args()


def main() -> None:
    """Write the report."""
    options = command_line(__doc__, BUILD / "results")
    publish(BENCHMARKS, options.results, options.docs)


if __name__ == "__main__":
    main()
