"""A simulation of fits over shards on up to 100,000 workers: what an epoch costs, and what deaths cost.

    python benchmarks/scale_model.py            # prints the tables
    python benchmarks/scale_model.py --docs     # and puts them, and the picture, into docs/
    python benchmarks/scale_model.py --quick    # fewer samples
    python benchmarks/scale_model.py --measure  # measures the cost of a message here

The costs of messages are parameters, measured on a small machine. Everything else here is simulated. In particular,
pmstore's workers add only what they computed; that they pass on the sums of other workers is simulated only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = "scale-model.md", "scale-model.png"
RAW = "scale-model.json"

WORKERS = (100, 1_000, 10_000, 100_000)
FAILURES = 419 / (54 * 86400 * 16384)
"""Failures of a worker in a second: 419 interruptions in 54 days on 16,384 GPUs (the report on Llama 3)."""

DETECTIONS = (0.3, 30.0, 300.0)  # seconds: a connection that closes, a short heartbeat, dask's worker-ttl


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--state", type=float, default=62_800, help="bytes of the shared state, and of a shard's result")
    add("--message", type=float, default=1.5e-3, help="seconds of Python for a message (docs/scale-model.md)")
    add("--latency", type=float, default=50e-6, help="seconds that a message is on its way")
    add("--bandwidth", type=float, default=1.25e9, help="bytes a second of a link: 10 Gb/s")
    add("--median", type=float, default=1.0, help="seconds of a map")
    add("--sigma", type=float, default=0.1, help="of the logarithm of a map's time")
    add("--slow", type=float, default=1e-3, help="the share of maps that are slow")
    add("--slower", type=float, default=5.0, help="how much slower they are")
    add("--late", type=float, default=1.35, help="a reply is late after so many times the median")
    add("--flat", type=int, default=200, help="with more workers, these pass on the sums of others")
    add("--reload", type=float, default=5.0, help="seconds to load a shard again")
    add("--restart", type=float, default=300.0, help="seconds to start a whole job again")
    add("--checkpoint", type=float, default=600.0, help="seconds between the checkpoints of such a job")
    add("--epochs", type=int, default=200, help="simulated epochs for each number of workers")
    add("--days", type=float, default=3000.0, help="simulated days at 1,000 workers; less for more workers")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a hundredth of the samples")
    add("--measure", action="store_true", help="measure a message of pmstore on two processes, and stop")
    add("--json", type=Path, help="write the numbers to this file")
    add("--docs", action="store_true", help="update docs/, and the numbers in benchmarks/raw")
    return parser.parse_args(arguments)


# ---- messages


def one_message(given: argparse.Namespace) -> float:
    """Seconds that a process spends on receiving a result and adding it."""
    return float(given.message + given.state / given.bandwidth)


def flat(given: argparse.Namespace, workers: int) -> float:
    """Seconds to send the state to all workers, and to receive all results, one after the other."""
    return float(2 * given.latency + 2 * workers * one_message(given))


def tree(given: argparse.Namespace, workers: int) -> tuple[float, int]:
    """The same over a tree of workers, and the best number of children: 2, 4, …, 32.

    The tree of the shards' numbers keeps its shape: a worker combines a run of neighbouring shards, whose result is a
    node of that tree if the number of children is a power of two.
    """

    def seconds(children: int) -> float:
        levels = math.ceil(math.log(workers, children) - 1e-9)
        return float(2 * levels * (given.latency + children * one_message(given)))

    return min((seconds(children), children) for children in (2, 4, 8, 16, 32))


# ---- stragglers


def maps(given: argparse.Namespace, rng: np.random.Generator, count: int) -> Any:
    """Seconds of maps."""
    slow = np.where(rng.random(count) < given.slow, given.slower, 1.0)
    return given.median * np.exp(rng.normal(0.0, given.sigma, count)) * slow


def straggling(given: argparse.Namespace, rng: np.random.Generator, workers: int) -> dict[str, float]:
    """The slowest map of an epoch, without and with asking again for late ones, and the share of duplicated work."""
    epochs = max(5, given.epochs * 1000 // max(workers, 1000))
    plain, again, asked, wasted = [], [], [], []
    limit = given.late * given.median
    for _ in range(epochs):
        first = maps(given, rng, workers)
        late = np.flatnonzero(first > limit)
        second = maps(given, rng, len(late))
        done = first.copy()
        done[late] = np.minimum(first[late], limit + second)
        plain.append(float(first.max()))
        again.append(float(done.max()))
        asked.append(len(late) / workers)
        wasted.append(float((done[late] - limit).sum() / first.sum()))  # both work until the first of them is done
    return {
        "epochs": epochs,
        "plain": float(np.mean(plain)),
        "asked again": float(np.mean(again)),
        "late": float(np.mean(asked)),
        "duplicated": float(np.mean(wasted)),
    }


# ---- failures


def failing(given: argparse.Namespace, rng: np.random.Generator, workers: int, epoch: float) -> dict[str, Any]:
    """The share of time that failures cost, simulated over many of them."""
    rate = FAILURES * workers
    span = given.days * 86400 * 1000 / workers
    count = max(20, int(rng.poisson(rate * span)))
    gaps = rng.exponential(1 / rate, count)
    total = float(gaps.sum())
    # A worker dies somewhere in its map. The epoch waits until that is noticed, and until another worker has loaded the
    # shard and computed it from the beginning.
    into = rng.uniform(0, given.median, count)
    waits = {f"{seconds:g}": into + seconds + given.reload for seconds in DETECTIONS}
    waits["late"] = np.full(count, given.late * given.median + given.reload)  # nobody notices, but its reply is late
    shares = {name: float(wait.sum() / (total + wait.sum())) for name, wait in waits.items()}
    # A job that starts again loses what it did since its checkpoint; failures during a restart begin another one.
    back = rng.uniform(0, given.checkpoint, count)
    again = 1 + rng.poisson(rate * given.restart, count)
    lost_job = back + given.restart * again
    coordinator = rng.uniform(0, epoch, count) + given.reload
    return {
        "failures": count,
        "hours between": 1 / rate / 3600,
        "shard again": shares,
        "job again": float(lost_job.sum() / (total + lost_job.sum())),
        "coordinator": float(coordinator.mean()),
    }


def simulated(given: argparse.Namespace) -> dict[str, Any]:
    """All numbers, with the parameters that they follow from."""
    if given.quick:
        given.epochs, given.days = max(5, given.epochs // 100), given.days / 100
    rows = []
    for number, workers in enumerate(WORKERS):
        rng = np.random.default_rng(np.random.SeedSequence(given.seed, spawn_key=(number,)))
        tree_seconds, children = tree(given, workers)
        one = {
            "workers": workers,
            "flat": flat(given, workers),
            "tree": tree_seconds,
            "children": children,
            "stragglers": straggling(given, rng, workers),
        }
        messages = one["flat"] if workers <= given.flat else one["tree"]
        one["epoch"] = messages + one["stragglers"]["asked again"]
        one["failures"] = failing(given, rng, workers, one["epoch"])
        rows.append(one)
    parameters = {name: value for name, value in vars(given).items() if name not in ("json", "docs", "measure")}
    return {"parameters": parameters, "failures of a worker in a second": FAILURES, "rows": rows}


# ---- tables and picture


def seconds_text(seconds: float) -> str:
    """Seconds in three digits, with a unit."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def share_text(share: float) -> str:
    return f"{100 * share:.2g} %"


def tables(numbers: dict[str, Any]) -> dict[str, list[str]]:
    """Markdown tables by their names."""
    rows = numbers["rows"]
    epoch = [
        "| workers | flat | tree, children | slowest map | late ones asked twice | work done twice | an epoch |",
        "|---|---|---|---|---|---|---|",
    ]
    recovery = [
        "| workers | a failure every | shard again: noticed after 0.3 s | 30 s | 300 s | when it is late | job again |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lag, failures = row["stragglers"], row["failures"]
        epoch.append(
            f"| {row['workers']:,} | {seconds_text(row['flat'])} | {seconds_text(row['tree'])}, {row['children']} | "
            f"{seconds_text(lag['plain'])} | {seconds_text(lag['asked again'])} | {share_text(lag['duplicated'])} | "
            f"{seconds_text(row['epoch'])} |"
        )
        again = failures["shard again"]
        hours = failures["hours between"]
        every = f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.3g} days"
        shares = " | ".join(share_text(again[key]) for key in ("0.3", "30", "300", "late"))
        recovery.append(f"| {row['workers']:,} | {every} | {shares} | {share_text(failures['job again'])} |")
    return {"epoch": epoch, "recovery": recovery}


def with_tables(text: str, named: dict[str, list[str]]) -> str:
    """The page with its tables replaced, which stand between markers."""
    for name, lines in named.items():
        begin, end = f"<!-- model:{name} -->", f"<!-- /model:{name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        if not rest or not after:
            raise SystemExit(f"{PAGE} has no {begin} … {end}")
        text = "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])
    return text


def draw(numbers: dict[str, Any], path: Path) -> None:
    """The picture: the cost of an epoch, and what failures cost, over the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = numbers["rows"]
    workers = [row["workers"] for row in rows]
    style = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
        lines = [
            ("messages, flat", [row["flat"] for row in rows], "#2c3e50", "o-"),
            ("messages, tree", [row["tree"] for row in rows], "#c0392b", "o-"),
            ("slowest map", [row["stragglers"]["plain"] for row in rows], "#95a5a6", "s--"),
            ("late ones asked twice", [row["stragglers"]["asked again"] for row in rows], "#2980b9", "s-"),
        ]
        for label, values, colour, shape in lines:
            left.plot(workers, values, shape, color=colour, label=label)
        left.set(xscale="log", yscale="log", xlabel="workers", ylabel="seconds of an epoch", title="An epoch")
        ways = [
            ("job again, from a checkpoint", lambda f: f["job again"], "#95a5a6", "s--"),
            ("shard again, noticed after 300 s", lambda f: f["shard again"]["300"], "#2c3e50", "o-"),
            ("after 30 s", lambda f: f["shard again"]["30"], "#2980b9", "o-"),
            ("when it is late", lambda f: f["shard again"]["late"], "#c0392b", "o-"),
        ]
        for label, value, colour, shape in ways:
            right.plot(workers, [100 * value(row["failures"]) for row in rows], shape, color=colour, label=label)
        right.set(xscale="log", yscale="log", xlabel="workers", ylabel="% of the time lost", title="Failures")
        for axes in (left, right):
            axes.legend(frameon=False, fontsize=12)
            axes.grid(True, which="major", alpha=0.3)
        figure.savefig(path, dpi=100, facecolor="white")
        plt.close(figure)


# ---- a measurement


def measured(shards: int = 8, epochs: int = 300) -> float:
    """Seconds for one question and its reply, of a fit on two processes whose maps do next to nothing."""
    import pmstore

    class Nothing(pmstore.MapReduce):
        max_iter = epochs

        def __init__(self) -> None:
            self.shards = [np.full((1, 1), float(i)) for i in range(shards)]

        def fields(self) -> list[pmstore.Field]:
            return [pmstore.Field("centers", (10, 784))]

        def fingerprint(self) -> dict[str, Any]:
            return {}

        def start(self) -> None:
            pass

        def map(self, shard: Any, shared: dict[str, Any], rng: Any) -> dict[str, Any]:
            return {"sums": shared["centers"] + shard, "counts": np.zeros(10, int)}

        def update(self, total: dict[str, Any]) -> None:
            self.state.centers = total["sums"] / shards

    fit = Nothing()
    fit.run(engine=2)
    return float(np.quantile(fit.history_["seconds"][10:], 0.1)) / shards


def main(arguments: list[str] | None = None) -> None:
    given = parsed(arguments)
    if given.measure:
        print(f"{measured() * 1000:.2f} ms for a question and its reply (a tenth of the epochs took less)")
        return
    numbers = simulated(given)
    named = tables(numbers)
    for name, lines in named.items():
        print(f"{name}\n", *lines, "", sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if given.docs:
        if given.quick:
            sys.exit("--docs needs all samples: leave out --quick")
        (ROOT / "benchmarks" / "raw" / RAW).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        page = ROOT / "docs" / PAGE
        page.write_text(with_tables(page.read_text(encoding="utf-8"), named), encoding="utf-8")
        draw(numbers, ROOT / "docs" / PICTURE)


if __name__ == "__main__":
    main()
