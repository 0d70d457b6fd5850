"""The pictures of the report."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from _common import seconds
from _pictures import BASELINE, FAINT, MEDIA_TITLES, OTHERS, STYLE, plt
from _pictures import OURS as RED
from _targets import Raw
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from .figures import CHECKPOINTS, COMPARISONS, OURS, cost, fits, sets, speed_up
from .strategies import CHECKPOINTS as STRATEGIES
from .strategies import Baseline
from .targets import MODELS

PAPER_SAYS = {"KMeans": (10, 75), "GaussianMixture": (3, 3.3)}
STYLES = {
    "baseline": (BASELINE, ":"),
    "np.savez": (OTHERS, "-"),
    "np.savez_compressed": (FAINT, "-"),
    "np.savez, fsync, rename": (OTHERS, "--"),
    "PyMM, copy and persist": ("#2980b9", "-"),
    "PyMM, in place": ("#2980b9", "--"),
    OURS: (RED, "-"),
}
SHADES = (RED, "#2980b9", OTHERS)


def costs(raw: Raw) -> Any:
    """A panel for each model and medium, on the first of the data."""
    name = sets(raw)[0]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey="row")
    for line, model in zip(axes, MODELS):
        known = fits(raw, name, model)
        across = [fit["clusters"] for fit in known]
        for axis, medium in zip(line, MEDIA_TITLES):
            for who in (Baseline.name, *(kind.name for kind in STRATEGIES)):
                color, style = STYLES[who]
                values = [cost(fit, who, medium) for fit in known]
                wide = 2.5 if who == OURS else 1.2
                axis.plot(across, values, style, color=color, linewidth=wide, marker="o", markersize=3, label=who)
            one = [0.01 * median(fit["iterations"]) for fit in known]
            axis.plot(across, one, color="#27ae60", linewidth=1, label="1% of an iteration")
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_title(f"{model}, {MEDIA_TITLES[medium]}")
    for axis in axes[-1]:
        axis.set_xlabel("k")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False)
    figure.suptitle(f"A checkpoint after every iteration; data: {name}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def speed_ups(raw: Raw) -> Any:
    """A panel for each model; the paper's own figures shaded."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8))
    for axis, model in zip(axes, MODELS):
        low, high = PAPER_SAYS[model]
        axis.axhspan(low, high, color="#f4d03f", alpha=0.35, linewidth=0, label="the paper, with PyMM")
        for name, style in zip(sets(raw), ("-", "--", ":")):
            for comparison, color in zip(COMPARISONS, SHADES):
                known = fits(raw, name, model)
                values = [speed_up(fit, comparison) for fit in known]
                label = comparison[0] if style == "-" else None
                across = [fit["clusters"] for fit in known]
                axis.plot(across, values, style, color=color, marker="o", markersize=3, label=label)
        axis.set_yscale("log")
        axis.set_ylim(1, 1000)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(model)
        axis.set_xlabel("k")
    names = ", ".join(f"{name} ({style})" for name, style in zip(sets(raw), ("solid", "dashed", "dotted")))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=2, frameon=False)
    figure.suptitle(f"How many times cheaper a checkpoint is; data: {names}")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    return figure


def draw(raw: Raw, folder: Path) -> list[str]:
    """Draws what was measured. Gives the names of the pictures."""
    drawn = []
    if CHECKPOINTS in raw:
        for name, make in (("paper-costs", costs), ("paper-speedups", speed_ups)):
            with plt.rc_context(STYLE):
                figure = make(raw)
                figure.savefig(folder / f"{name}.png")
                plt.close(figure)
            drawn.append(name)
    return drawn
