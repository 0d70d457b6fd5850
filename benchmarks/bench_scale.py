"""KMeans over shards: two workers beside one, what an epoch costs beside the maps, and dask-ml beside it.

The data are synthetic images as those of bench_kmeans.py, in 16 shards. All fits that are compared start at the same
centres and run in turns, as other programs take their share of the machine: figures are medians, and ratios are medians
of the ratios of neighbours.

    python benchmarks/bench_scale.py                     70,000 × 784, k = 10; two to four minutes
    python benchmarks/bench_scale.py --quick             smaller, to see that it runs
    python benchmarks/bench_scale.py --raw scale.json    also writes every single measurement

dask, distributed and dask-ml are measured if they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import machine, scratch
from bench_kmeans import images

import pmstore
from pmstore.cluster import KMeans
from pmstore.scale import Processes, shards_of

STATE = 62_720  # bytes: 10 × 784 float64


class Empty(pmstore.MapReduce):
    """An epoch with nothing in it but its messages and its commit: the state of 62.7 KB goes out, and its like comes
    back from each shard."""

    def __init__(self, shards: Any, epochs: int) -> None:
        self.shards, self.max_iter = shards, epochs

    def fields(self) -> Any:
        return [pmstore.Field("centers", STATE // 8)]

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self.state.centers = 1.0

    def map(self, shard: Any, shared: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {"sums": shared["centers"] * 0.5}

    def update(self, total: dict[str, Any]) -> None:
        self.state.centers = total["sums"] / len(self.described) * 2


@contextlib.contextmanager
def dask_client(workers: int) -> Iterator[Any]:
    """A client of a cluster of processes with one thread each."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        yield client


def engines() -> dict[str, Callable[[], Any]]:
    """Contexts that give an engine of two workers, by name."""
    found: dict[str, Callable[[], Any]] = {"processes": lambda: contextlib.nullcontext(Processes(2))}
    if importlib.util.find_spec("distributed") is not None and hasattr(pmstore.scale, "Dask"):
        found["dask"] = lambda: dask_client(2)
    return found


def per_epoch(history: Any, which: Any) -> float:
    """The median time from the end of an epoch to that of the next one: with commits."""
    return float(statistics.median(np.diff(history["time"])[which]))


# ---- (a) two workers beside one


def speedup(X: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an iteration with one and with two workers, in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    results = set()
    with scratch(options.dir) as directory:
        for turn in range(options.repeats):
            for workers in (1, 2):
                fit = KMeans(
                    options.clusters,
                    init=X[: options.clusters],
                    n_init=1,
                    max_iter=options.iterations,
                    tol=0.0,
                    store=directory / f"{turn}-{workers}.pm",
                    engine=Processes(workers),
                ).fit(shards_of(X))
                history = fit.history_
                seconds[workers].append(per_epoch(history, slice(3, -1)))  # without mean, variance and the loading
                results.add(fit.cluster_centers_.tobytes())
    assert len(results) == 1, "the number of workers changed the result"
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "one worker: seconds per iteration": statistics.median(seconds[1]),
        "two workers: seconds per iteration": statistics.median(seconds[2]),
        "two workers: times the speed of one": statistics.median(ratios),
        "raw: one worker": seconds[1],
        "raw: two workers": seconds[2],
    }


# ---- (b) what an epoch costs beside the maps


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an epoch whose map does nothing, by engine and number of shards."""
    figures: dict[str, Any] = {}
    for name, engine in engines().items():
        for count in (2, 16):
            with engine() as two, scratch(options.dir) as directory:
                medians = []
                for turn in range(options.repeats):
                    done = Empty([np.zeros((1, 1)) + i for i in range(count)], options.epochs)
                    done.run(store=directory / f"{turn}.pm", name="empty", engine=two)
                    medians.append(per_epoch(done.history_, slice(None)))
            figures[f"{name}, {count} shards: seconds per empty epoch"] = min(medians)
            figures[f"raw: {name}, {count} shards"] = medians
    return figures


# ---- (c) dask-ml


def beside_dask_ml(X: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an iteration here and in dask-ml, each with two processes, from the same centres, in turns."""
    if importlib.util.find_spec("dask_ml") is None:
        return {"dask-ml": "not installed"}
    import dask.array
    import dask_ml.cluster

    few, many = max(2, options.iterations // 4), options.iterations
    seconds: dict[str, list[float]] = {"dask-ml": [], "processes": []}
    with dask_client(2) as client, scratch(options.dir) as directory:
        data = client.persist(dask.array.from_array(X, chunks=(-(-len(X) // 16), X.shape[1])))
        start = X[: options.clusters].copy()

        def theirs(iterations: int) -> float:
            began = time.perf_counter()
            # tol=-1: as many iterations as are asked for
            dask_ml.cluster.KMeans(options.clusters, init=start, max_iter=iterations, tol=-1.0).fit(data)
            return time.perf_counter() - began

        theirs(2)
        for turn in range(options.repeats):
            seconds["dask-ml"].append((theirs(many) - theirs(few)) / (many - few))
            fit = KMeans(
                options.clusters,
                init=start,
                n_init=1,
                max_iter=many,
                tol=0.0,
                store=directory / f"{turn}.pm",
                engine=Processes(2),
            ).fit(shards_of(X))
            seconds["processes"].append(per_epoch(fit.history_, slice(3, -1)))
    ratios = [ours / other for ours, other in zip(seconds["processes"], seconds["dask-ml"], strict=True)]
    return {
        "dask-ml: seconds per iteration": statistics.median(seconds["dask-ml"]),
        "beside it, two processes: seconds per iteration": statistics.median(seconds["processes"]),
        "two processes: times dask-ml's time": statistics.median(ratios),
        "raw: dask-ml": seconds["dask-ml"],
        "raw: beside dask-ml": seconds["processes"],
    }


def show(figures: Mapping[str, Any]) -> None:
    """One figure a line."""
    for name, value in figures.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            print(f"{name + ' (ms)':<56}", " ".join(f"{seconds * 1e3:.3g}" for seconds in value))
        elif isinstance(value, float) and "seconds" in name:
            print(f"{name.replace('seconds', 'ms'):<56}{value * 1e3:>12.2f}")
        else:
            print(f"{name:<56}{value:>12.3f}" if isinstance(value, float) else f"{name:<56}{value}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=70_000)
    parser.add_argument("--columns", type=int, default=784)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=200, help="empty ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=("speedup", "overhead", "dask-ml"), help="default: all")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the stores are made")
    parser.add_argument("--raw", type=Path, help="write every single measurement to this JSON file")
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.iterations, options.epochs, options.repeats = 4000, 8, 20, 2
    only = options.only or ("speedup", "overhead", "dask-ml")
    where = f"{options.rows:,} × {options.columns} float64, k = {options.clusters}, {machine()}"
    print(where, flush=True)
    X = images(options.rows, options.columns, seed=0)
    measured: dict[str, Any] = {}
    for name, measure in {
        "overhead": lambda: overhead(options),
        "speedup": lambda: speedup(X, options),
        "dask-ml": lambda: beside_dask_ml(X, options),
    }.items():
        if name in only:
            measured[name] = measure()
            show(measured[name])
    if options.raw:
        options.raw.write_text(json.dumps({"where": where, **measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
