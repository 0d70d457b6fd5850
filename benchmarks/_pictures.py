"""The pictures of the report."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from _common import SIZES, ratio, seconds
from _targets import Raw, cost, find
from bench_parts import parts

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

OURS, OTHERS, FAINT, BASELINE = "#c0392b", "#2c3e50", "#95a5a6", "#7f8c8d"
MEDIA_TITLES = {"memory": "memory (tmpfs)", "disk": "disk"}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "savefig.facecolor": "white",
}

# What a picture calls it, and the measured names that stand for it: the first that a workload has.
PICTURED: list[tuple[str, tuple[str, ...]]] = [
    ("pmstore", ("pmstore", "pmstore, with")),
    ("pmstore, only=", ("pmstore, with only=",)),
    ("libpmemobj, in place", ("libpmemobj, tx_add_range",)),
    ("libpmemobj, publish", ("libpmemobj, reserve and publish",)),
    ("LMDB", ("LMDB",)),
    ("LMDB, writemap", ("LMDB, writemap",)),
    ("LMDB, key per row", ("LMDB, one key per row",)),
    ("sqlite3, WAL", ("sqlite3, WAL, FULL",)),
    ("ZODB", ("ZODB, FileStorage",)),
    ("np.save, fsync, rename", ("np.save, fsync, rename",)),
    ("safetensors, fsync, rename", ("safetensors, fsync, rename",)),
    ("np.save", ("np.save",)),
    ("joblib", ("joblib.dump",)),
    ("zarr", ("zarr",)),
    ("h5py, flush", ("h5py, flush",)),
    ("h5py, flush, fsync", ("h5py, flush, fsync",)),
    ("np.memmap, flush", ("np.memmap, flush",)),
]
SHOWN = ["8 B", "62,720 B", "1 MiB", "49 MB", "1 row", "1% of rows"]


def short(value: float) -> str:
    """A ratio in few characters."""
    if value < 9.95:
        return f"{value:.1f}"
    if value < 999.5:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 9950 else f"{value / 1000:.0f}k"


def costs(raw: Raw) -> Any:
    """One panel per workload and medium: the cost of each subject as a multiple of the baseline."""
    media = [medium for medium in MEDIA_TITLES if any(c["medium"] == medium for c in raw["commit"]["cells"])]
    rows = {}
    for medium in media:
        rows[medium] = [
            row for row in PICTURED if any(find(raw, medium, workload, who) for workload in SHOWN for who in row[1])
        ]
    heights = [len(rows[medium]) for medium in media]
    figure, axes = plt.subplots(
        len(media),
        len(SHOWN),
        figsize=(14, 1.9 + 0.235 * sum(heights)),
        sharey="row",
        sharex="row",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for medium, line in zip(media, axes):
        for workload, axis in zip(SHOWN, line):
            costs_panel(raw, medium, workload, rows[medium], axis)
            title = f"{workload} of 51 MB" if "row" in workload else f"{workload}, whole"
            axis.set_title(title if medium == media[0] else "")
        line[0].set_ylabel(MEDIA_TITLES[medium], fontsize=12, fontweight="bold", labelpad=8)
    figure.supxlabel(
        "cost of making a change durable ÷ baseline (log scale; median of paired repetitions).\n"
        "Baseline: memory: streaming copy of the changed bytes and a fence; disk: one pwrite of them and fdatasync.\n"
        "○: not atomic, or not durable when the call returns",
        fontsize=9,
    )
    figure.tight_layout(w_pad=0.4)
    return figure


def costs_panel(raw: Raw, medium: str, workload: str, rows: list[tuple[str, tuple[str, ...]]], axis: Any) -> None:
    axis.axvline(1, color=BASELINE, linewidth=1, zorder=0)
    for y, (name, whose) in enumerate(rows):
        cell = next(filter(None, (find(raw, medium, workload, who) for who in whose)), None)
        axis.axhline(y, color="#ecf0f1", linewidth=0.7, zorder=-1)
        if not cell:
            continue
        value, ours = cost(cell), name.startswith("pmstore")
        color = OURS if ours else OTHERS if cell["safe"] else FAINT
        axis.plot(
            value, y, "o", color=color, markersize=7 if ours else 5, markerfacecolor=color if cell["safe"] else "white"
        )
        bold = "bold" if ours else "normal"
        axis.annotate(
            short(value),
            (value, y),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=color,
            weight=bold,
        )
    axis.set_xscale("log")
    axis.set_xlim(0.3, 2e6 if medium == "memory" else 5e3)
    axis.xaxis.set_major_locator(FixedLocator([1, 10, 100, 1000] if medium == "disk" else [1, 100, 1e4, 1e6]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value < 1e3 else f"{value / 1e3:g}k" if value < 1e6 else "1M")
    )
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    for label, (name, _) in zip(axis.get_yticklabels(), rows):
        if name.startswith("pmstore"):
            label.set_color(OURS)
            label.set_fontweight("bold")
    axis.tick_params(axis="y", length=0)


def latency(raw: Raw) -> Any:
    """Latency over the share of commits that are faster, the scale stretched towards the slowest."""
    cells = [cell for cell in raw["latency"]["cells"] if cell["kind"] == "latency"]
    media = [medium for medium in MEDIA_TITLES if any(cell["medium"] == medium for cell in cells)]
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    figure, axes = plt.subplots(
        len(media), len(workloads), figsize=(3.2 * len(workloads) + 1, 2.8 * len(media) + 0.6), squeeze=False
    )
    for medium, line in zip(media, axes):
        for workload, axis in zip(workloads, line):
            cell = next((c for c in cells if (c["medium"], c["workload"]) == (medium, workload)), None)
            axis.set_title(f"{workload}, {MEDIA_TITLES[medium]}")
            if not cell:
                axis.axis("off")
                continue
            for who, values, color in (("pmstore", cell["times"], OURS), ("baseline", cell["baselines"], BASELINE)):
                ordered = np.sort(values)
                rest = 1 - np.arange(len(ordered)) / len(ordered)  # the share that is as slow or slower
                axis.step(1 / rest, ordered, where="post", color=color, label=who, linewidth=1.6)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlim(1, None)
            marks = [(2, "p50"), (10, "p90"), (100, "p99"), (1000, "p99.9"), (10_000, "p99.99")]
            count = len(cell["times"])
            marks = [*(mark for mark in marks if 2 * mark[0] <= count), (count, "max")]
            axis.xaxis.set_major_locator(FixedLocator([at for at, _ in marks]))
            axis.set_xticks([at for at, _ in marks], [text for _, text in marks])
            axis.xaxis.set_minor_locator(NullLocator())
            time_axis(axis)
            axis.grid(axis="y", color="#ecf0f1")
            axis.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    return figure


def time_axis(axis: Any) -> None:
    axis.yaxis.set_major_locator(LogLocator(numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())


PARTS = {
    "find": "#f4d03f",
    "hash and copy": "#5dade2",
    "write": "#48c9b0",
    "fence": "#1f618d",
    "image": "#af7ac5",
    "Python": "#e59866",
}


def split(raw: Raw) -> Any:
    """Bars: the baseline; the parts, each measured by itself, stacked; and the commit as a whole, as a line."""
    cells = raw["parts"]["cells"]
    media = [medium for medium in MEDIA_TITLES if any(cell["medium"] == medium for cell in cells)]
    figure, axes = plt.subplots(len(media), len(SIZES), figsize=(13, 3.0 * len(media) + 1.5), squeeze=False)
    for medium, line in zip(media, axes):
        for workload, axis in zip(SIZES, line):
            cell = next((c for c in cells if (c["medium"], c["workload"]) == (medium, workload)), None)
            if not cell:
                axis.axis("off")
                continue
            known = parts(cell)
            axis.bar(0, known["baseline"], 0.7, color="#bdc3c7")
            below = 0.0
            for name, color in PARTS.items():
                axis.bar(1, known.get(name, 0), 0.7, bottom=below, color=color)
                below += known.get(name, 0)
            whole = known["call"] + known["Python"]
            axis.plot([0.58, 1.42], [whole, whole], color="black", linewidth=2)
            axis.set_xticks([0, 1], ["baseline", "pmstore"])
            axis.set_xlim(-0.6, 1.6)
            axis.set_title(f"{workload}, {medium}")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))
            axis.set_ylim(0, 1.15 * max(below, whole, known["baseline"]))
            axis.tick_params(axis="y", labelsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    handles.append(plt.Line2D([], [], color="black", linewidth=2))
    figure.legend(handles, [*PARTS, "the commit as a whole"], ncol=7, loc="upper center", frameon=False)
    figure.supxlabel(
        "Each part by itself, medians of one run. Find: a commit that finds no change (of 8 B, for arrays that are "
        "taken whole, unsearched).\n"
        "Hash and copy: page by page through the cache into a mapped file (disk: hash only). "
        "Write and fence: those of a baseline of as many bytes as the commit writes.\n"
        "Image: a copy of the bytes that the store wrote to the committed image. "
        "Python: an empty with statement minus the C call. "
        "Gaps to the line: what overlaps or isn't listed.",
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.01, 1, 0.95))
    return figure


def recovery(raw: Raw) -> Any:
    """Draw recovery over the size of the log and over that of the store, and opening."""
    known = raw["recovery"]
    media = [medium for medium in MEDIA_TITLES if any(cell["medium"] == medium for cell in known["recoveries"])]
    figure, axes = plt.subplots(len(media), 3, figsize=(13, 3.2 * len(media) + 0.4), squeeze=False)
    for medium, line in zip(media, axes):
        for varied, axis in zip(("log", "store"), line):
            cells = [c for c in known["recoveries"] if (c["medium"], c["varied"]) == (medium, varied)]
            recovery_panel(sorted(cells, key=lambda cell: float(cell[f"{varied} bytes"])), varied, axis)
            logs = sorted({round(cell["log bytes"] / 2**20) for cell in cells})
            about = "" if varied == "log" else f" (log: {'–'.join(str(n) for n in logs)} MiB)"
            axis.set_title(f"recovery over size of {varied}, {medium}{about}", fontsize=9)
        opening_panel(next(cell for cell in known["openings"] if cell["medium"] == medium), line[2])
        line[2].set_title(f"opening, {MEDIA_TITLES[medium]}", fontsize=9)
    figure.tight_layout()
    return figure


def recovery_panel(cells: list[Raw], varied: str, axis: Any) -> None:
    sizes = [cell[f"{varied} bytes"] / 2**20 for cell in cells]
    for state, dashes in (("cached", "-"), ("cold", "--")):
        if state not in cells[0]:
            continue
        several = "cold" in cells[0]
        about = f", {state}" if several else ""
        plain = "plain read and write" if several else "plain copy"
        lines = [("times", f"recovery{about}", OURS, "o"), ("baselines", f"{plain}{about}", BASELINE, "s")]
        if cells[0][state]["mapped anew"]:
            lines.append(("mapped anew", "copy that maps its files", OTHERS, "^"))
        for what, label, color, marker in lines:
            middle = [statistics.median(cell[state][what]) for cell in cells]
            axis.plot(sizes, middle, dashes, marker=marker, color=color, label=label, markersize=5)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(x=0.12, y=0.18)
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.set_xticks(sizes, [f"{size:.0f} MiB\n{ratios(cell)}" for size, cell in zip(sizes, cells)], fontsize=8)
    axis.xaxis.set_minor_locator(NullLocator())
    time_axis(axis)
    axis.grid(axis="y", color="#ecf0f1")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend
    axis.legend(frameon=False, fontsize=7.5, loc="upper left", handlelength=3.5)


def ratios(cell: Raw) -> str:
    """Recovery ÷ plain copy."""
    found = {
        state: short(ratio(cell[state]["times"], cell[state]["baselines"]))
        for state in ("cached", "cold")
        if state in cell
    }
    if "cold" in found:
        return f"×{found['cached']}\ncold ×{found['cold']}"
    return f"×{found['cached']}\nmaps: ×{short(ratio(cell['cached']['times'], cell['cached']['mapped anew']))}"


def opening_panel(cell: Raw, axis: Any) -> None:
    names = {
        "few": "ten names",
        "many": f"{cell['names']:,} names",
        "small": "1 MiB",
        "large": f"{cell['bytes'] >> 20:,} MiB",
        "after a crash": "ten names,\nafter a crash",
    }
    for y, name in enumerate(names):
        values = cell["times"][name]
        middle = statistics.median(values)
        axis.barh(y, middle, 0.6, color=OURS if name == "after a crash" else OTHERS)
        axis.annotate(seconds(middle), (middle, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), list(names.values()))
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value else "0"))


def draw(raw: Raw, folder: Path) -> list[str]:
    """Draw the pictures for which there are results. Returns their names."""
    drawn = []
    for name, needs, make in (
        ("costs", "commit", costs),
        ("latency", "latency", latency),
        ("parts", "parts", split),
        ("recovery", "recovery", recovery),
    ):
        if needs in raw:
            with plt.rc_context(STYLE):
                figure = make(raw)
                figure.savefig(folder / f"{name}.png")
                plt.close(figure)
            drawn.append(name)
    return drawn
