"""The report of the paper's experiment: tables, what was asked for, pictures, and docs/paper.md.

python -m paper.report          report.md and the pictures, beside the raw results
python -m paper.report --docs   and fills docs/paper.md, keeps pictures and raw results in benchmarks/: make paper-docs
"""

from __future__ import annotations

import textwrap
from collections import Counter
from statistics import median

from _common import BUILD, HERE, seconds
from _targets import Raw
from report import Report, command_line, comparison, publish, skipped, table

from .figures import (
    CHECKPOINTS,
    COMPARISONS,
    ESTIMATORS,
    KILLS,
    OURS,
    beyond,
    cost,
    fits,
    resuming,
    sets,
    share,
    speed_up,
    times_baseline,
)
from .kills import VERDICTS
from .targets import MEDIA, MODELS, targets

RESULTS = BUILD / "results" / "paper"


def machine(raw: Raw) -> str:
    """The machine, and how it was measured."""
    lines = []
    for name, kept in raw.items():
        form = "quick form: not to be quoted" if kept.get("quick") else "full form"
        lines.append(f"- `{name.replace('-', '.')}`, {form}: {kept['machine']}, {kept['priority']}")
    for kept in raw.values():
        systems = ", ".join(f"{MEDIA[medium]}: {kind}" for medium, kind in kept.get("file systems", {}).items())
        if systems:
            lines.append(f"- scikit-learn {kept['versions']['scikit-learn']}; file systems: {systems}")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def described(raw: Raw) -> str:
    """What the data are."""
    rows = [[one["name"], " × ".join(f"{n:,}" for n in one["shape"]), one["what"]] for one in raw[CHECKPOINTS]["data"]]
    return table(["", "rows × columns, float64", "where they are from"], rows)


def costs(raw: Raw) -> str:
    """Time in a checkpoint, and its share, at the smallest and the largest k."""
    parts = []
    for name in sets(raw):
        for model in MODELS:
            known = fits(raw, name, model)
            ends = [known[0], known[-1]]
            head = [f"{model}, {name}", *(f"{MEDIA[m]}, k = {fit['clusters']}" for m in MEDIA for fit in ends)]
            timed = f"*an iteration, of {len(ends[0]['iterations'])} timed*"
            rows = [[timed, *(seconds(median(fit["iterations"])) for fit in ends * 2)]]
            rows += [line(ends, who) for who in dict.fromkeys(c["who"] for c in ends[0]["checkpoints"])]
            if model != "KMeans":
                rows.append(line(ends, OURS, f"{OURS}, with the copy into it", copying=True))
            parts.append(table(head, rows))
    return "\n\n".join(parts)


def line(ends: list[Raw], who: str, name: str = "", copying: bool = False) -> list[str]:
    """A row of the costs."""
    cells = []
    for medium in MEDIA:
        for fit in ends:
            value = cost(fit, who, medium, copying)
            cells.append("" if value is None else f"{seconds(value)} ({share(fit, value):.2%})")
    return [name or who, *cells]


def speed_ups(raw: Raw) -> str:
    """The speed-ups for every k, as in the paper's figures."""
    parts = []
    for model in MODELS:
        rows = []
        for name in sets(raw):
            for fit in fits(raw, name, model):
                values = [speed_up(fit, one) for one in COMPARISONS]
                rows.append([name, str(fit["clusters"]), *map(many_times, values)])
        parts.append(table([model, "k", *(one[0] for one in COMPARISONS)], rows))
    return "\n\n".join(parts)


def many_times(value: float | None) -> str:
    """A ratio in few characters."""
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def estimators(raw: Raw) -> str:
    """Whole fits."""
    rows = []
    for fit in raw[ESTIMATORS]["fits"]:
        for one in fit["stored"]:
            of_baseline = times_baseline(one)
            rows.append(
                [
                    f"{fit['model']}, {one['iterations']} iterations",
                    str(fit["clusters"]),
                    MEDIA[one["medium"]],
                    seconds(fit["plain"]),
                    seconds(one["fit"]),
                    seconds(median(one["commits"])),
                    f"{sum(one['commits']) / one['fit']:.2%}",
                    "" if of_baseline is None else f"{of_baseline:.2f}",
                    f"{beyond(fit, one):.2f}",
                    "yes" if one["same"] else "no",
                ]
            )
    head = ["", "k", "", "scikit-learn's fit", "fit in a store", "commit", "share of commits", "commit ÷ baseline"]
    return table([*head, "rest ÷ scikit-learn's", "same result"], rows)


def resumed(raw: Raw) -> str:
    """Going on after a kill."""
    rows = []
    for kept in raw[ESTIMATORS]["resumes"]:
        iteration, start, extra = resuming(kept)
        opening, fingerprint = median(kept["open"]), median(kept["fingerprint"])
        more = f"{'−' if extra < 0 else ''}{seconds(abs(extra))}"
        times = [seconds(iteration), seconds(start), more, seconds(opening), seconds(fingerprint)]
        rows.append([kept["model"], str(kept["clusters"]), *times])
    head = ["", "k", "an iteration", "until it iterates again", "beyond scikit-learn's own start", "opening"]
    return table([*head, "fingerprint of the data"], rows)


def killed(raw: Raw) -> str:
    """What was found after the kills inside a checkpoint."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for cell in raw[KILLS]["cells"]:
        found.setdefault((cell["who"], cell["model"]), Counter()).update(cell["inside"])
    others = sorted({verdict for counts in found.values() for verdict in counts} - set(VERDICTS))
    verdicts = [*VERDICTS, *others]
    rows = [
        [
            who,
            model,
            f"{counts.total():,}",
            *(f"{counts[verdict]:,}" if counts[verdict] else "" for verdict in verdicts),
        ]
        for (who, model), counts in found.items()
    ]
    return table(["", "", "kills inside", *verdicts], rows)


PAPER = Report(
    title="The paper's experiment",
    made_by="make paper",
    results=(CHECKPOINTS, ESTIMATORS, KILLS),
    sections={
        "paper-machine": ("", "Machine and versions", machine),
        "paper-data": (CHECKPOINTS, "Data", described),
        "paper-targets": ("", "What was asked for", lambda raw: comparison(targets(raw))),
        "paper-costs": (CHECKPOINTS, "A checkpoint after every iteration (share of the fit)", costs),
        "paper-speedups": (CHECKPOINTS, "Speed-ups", speed_ups),
        "paper-kills": (KILLS, "What is left after a kill", killed),
        "paper-estimators": (ESTIMATORS, "The estimators", estimators),
        "paper-resuming": (ESTIMATORS, "Resuming", resumed),
        "paper-skipped": ("", "Skipped", skipped),
    },
    pictures={
        "paper-costs": "What a checkpoint costs, by strategy and number of clusters",
        "paper-speedups": "How many times cheaper than np.savez, by number of clusters",
    },
    drawing="paper.pictures",
    shown=("paper-targets",),
    documents=[HERE.parent / "docs" / "paper.md"],
)


def main() -> None:
    """Write the report."""
    options = command_line(__doc__, RESULTS)
    publish(PAPER, options.results, options.docs)


if __name__ == "__main__":
    main()
