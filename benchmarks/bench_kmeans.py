"""The cost of a store for a KMeans: the share of a fit that commits take, and the time to resume after a kill.

The data are synthetic: random mixtures of twenty random images, in MNIST's shape unless told otherwise. Both fits,
scikit-learn's and the one in a store, do the same iterations and are compared bit for bit.

    python benchmarks/bench_kmeans.py                     70,000 × 784, k = 10, on /dev/shm
    python benchmarks/bench_kmeans.py --rows 7000 --dir . smaller, and on the disk
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/bench_kmeans.py --rows 2000 --pairs 40
                                                          a small fit beside scikit-learn's, commits apart
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import sklearn.cluster
import sklearn.cluster._kmeans
from threadpoolctl import threadpool_info

import pmstore
from pmstore._core import Core
from pmstore.cluster import KMeans, _sklearn


class Clock:
    """Start and length of every call of the kernel and of every commit inside its block, in seconds from its start."""

    def __init__(self, die_after: int = -1) -> None:
        self.kernel: list[tuple[float, float]] = []
        self.commits: list[tuple[float, float]] = []
        self.seconds = 0.0
        self._die_after = die_after  # commits

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure what happens inside."""
        kernel, commit = _sklearn.lloyd_iter_chunked_dense, Core.commit
        started = time.perf_counter()

        def timed(calls: list[tuple[float, float]], function: Any, *arguments: Any, **options: Any) -> None:
            begun = time.perf_counter()
            function(*arguments, **options)
            calls.append((begun - started, time.perf_counter() - begun))

        def timed_kernel(*arguments: Any, **options: Any) -> None:
            timed(self.kernel, kernel, *arguments, **options)

        def timed_commit(core: Core) -> None:
            timed(self.commits, commit, core)
            if len(self.commits) == self._die_after:
                raise KeyboardInterrupt

        with (
            mock.patch.object(_sklearn, "lloyd_iter_chunked_dense", timed_kernel),
            mock.patch.object(sklearn.cluster._kmeans, "lloyd_iter_chunked_dense", timed_kernel),
            mock.patch.object(Core, "commit", timed_commit),
        ):
            try:
                yield
            finally:
                self.seconds = time.perf_counter() - started


def images(rows: int, columns: int, seed: int) -> Any:
    """Synthetic images: mixtures of 20 images. The clusters are not clear, so that a fit takes many iterations."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 20)) @ rng.normal(0, 40, (20, columns))
    return np.clip(X, 0, 255, out=X)


def measure(X: Any, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures, in seconds."""
    parameters = {
        "n_clusters": options.clusters,
        "init": "random",
        "n_init": 1,
        "max_iter": options.iterations,
        "tol": 0.0,
        "random_state": options.seed,
    }
    plain, stored = Clock(), Clock()
    with plain.running():
        reference = sklearn.cluster.KMeans(**parameters).fit(X)
    with pmstore.open(directory / "fit.pm") as store:
        media = store.media
        with stored.running():
            fit = KMeans(**parameters, store=store).fit(X)
    check_same(fit, reference)

    killed = directory / "killed.pm"
    with contextlib.suppress(KeyboardInterrupt), Clock(die_after=1 + reference.n_iter_ // 2).running():
        KMeans(**parameters, store=killed).fit(X)
    # In turns, as other programs take their share of the machine.
    starts, resumes, assignments, loads, iterations = [], [], [], [], []
    for _ in range(options.repeats):
        start, resume, load = Clock(), Clock(), Clock()
        with start.running():
            sklearn.cluster.KMeans(**{**parameters, "max_iter": 1}).fit(X)
        again = shutil.copy(killed, directory / "again.pm")
        with resume.running():
            resumed = KMeans(**parameters, store=again).fit(X)
        with load.running():
            KMeans(**parameters, store=again).fit(X)
        check_same(resumed, reference)
        starts.append(start.kernel[0][0])
        assignments.append(resume.kernel[0][1])  # of all data to the older centres
        resumes.append(resume.kernel[1][0])
        loads.append(load.seconds)
        iterations.append(statistics.median(seconds for _, seconds in resume.kernel[1:-1]))

    commits = [seconds for _, seconds in stored.commits]
    until_start, until_resumed = statistics.median(starts), statistics.median(resumes)
    return {
        "media": media,
        "iterations": reference.n_iter_,
        "scikit-learn: fit": plain.seconds,
        "scikit-learn: iteration, median": statistics.median(seconds for _, seconds in plain.kernel),
        "store: fit": stored.seconds,
        "store: iteration, median": statistics.median(seconds for _, seconds in stored.kernel),
        "store: commits": len(commits),
        "store: commit, median": statistics.median(commits),
        "store: commit, longest": max(commits),
        "store: all commits": sum(commits),
        "store: share of commits": sum(commits) / stored.seconds,
        "resume: iterations done before": resumed.resumed_from_iter_,
        "resume: iteration, median": statistics.median(iterations),
        "resume: scikit-learn's start, median": until_start,
        "resume: until it iterates again, median": until_resumed,
        "resume: of that, assignment to older centres": statistics.median(assignments),
        "resume: beyond scikit-learn's start": until_resumed - until_start,
        "load: whole fit, median": statistics.median(loads),
        "raw: commits": commits,
        "raw: iterations": [seconds for _, seconds in stored.kernel],
        "raw: scikit-learn's starts": starts,
        "raw: resumes": resumes,
    }


def paired(X: Any, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Processor time of fits in turns, in seconds: scikit-learn's, and in an open store without its commits."""
    parameters: dict[str, Any] = {"n_clusters": options.clusters, "n_init": 1, "max_iter": options.iterations}
    rows = np.random.default_rng(options.seed).choice(len(X), options.clusters, replace=False)
    parameters |= {"init": X[rows], "tol": 0.0, "random_state": options.seed}
    commit, commits = Core.commit, [0.0]

    def timed_commit(core: Core) -> None:
        begun = time.process_time()
        commit(core)
        commits[0] += time.process_time() - begun

    def timed(model: Any) -> tuple[float, Any]:
        commits[0] = 0.0
        begun = time.process_time()
        model.fit(X)
        return time.process_time() - begun - commits[0], model

    seconds = []
    with pmstore.open(directory / "pairs.pm") as store, mock.patch.object(Core, "commit", timed_commit):
        for number in range(options.pairs + 2):
            plain, reference = timed(sklearn.cluster.KMeans(**parameters))
            without, _ = timed(KMeans(**parameters))
            stored, fit = timed(KMeans(**parameters, store=store, name=str(number)))
            check_same(fit, reference)
            seconds.append((plain, without, stored, commits[0]))
    warm = np.array(seconds[2:])
    plain, without, stored, committed = np.median(warm, axis=0)
    ratios = warm[:, 1:3] / warm[:, :1]
    return {
        "iterations": reference.n_iter_,
        "scikit-learn: fit": plain,
        "store=None: fit": without,
        "open store: fit without its commits": stored,
        "open store: all commits": committed,
        "store=None: median of the ratios": f"{np.median(ratios[:, 0]):.3f}",
        "open store: median of the ratios": f"{np.median(ratios[:, 1]):.3f}",
        "open store: quartiles of the ratios": " ".join(
            f"{ratio:.3f}" for ratio in np.quantile(ratios[:, 1], [0.25, 0.75])
        ),
        "open store: ratio of the quickest": f"{warm[:, 2].min() / warm[:, 0].min():.3f}",
    }


def check_same(fit: Any, reference: Any) -> None:
    """Stop if a fit isn't scikit-learn's, bit for bit."""
    for name in ("cluster_centers_", "labels_", "inertia_", "n_iter_"):
        if np.asarray(getattr(fit, name)).tobytes() != np.asarray(getattr(reference, name)).tobytes():
            raise SystemExit(f"{name} differs from scikit-learn's")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=70_000)
    parser.add_argument("--columns", type=int, default=784)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20, help="at most")
    parser.add_argument("--repeats", type=int, default=5, help="resumes")
    parser.add_argument("--pairs", type=int, default=0, help="compare only so many pairs of fits, by processor time")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the store is made")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, the raw ones included")
    options = parser.parse_args()

    X = images(options.rows, options.columns, options.seed).astype(options.dtype)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        figures = (paired if options.pairs else measure)(X, options, Path(directory))
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    threads = {library["internal_api"]: library["num_threads"] for library in threadpool_info()}
    print(
        f"KMeans, synthetic {options.rows:,} × {options.columns} {options.dtype}, k = {options.clusters}, "
        f"{options.dir}, {os.cpu_count()} CPUs, threads {threads}, scikit-learn {sklearn.__version__}"
    )
    for name, value in figures.items():
        if name.startswith("raw"):
            print(f"{name + ' (ms)':<48}", " ".join(f"{seconds * 1e3:.3g}" for seconds in value))
        elif name.endswith("share of commits"):
            print(f"{name:<48}{value:>12.3%}")
        elif isinstance(value, float):
            print(f"{name:<48}{value * 1e3:>12.3f} ms")
        else:
            print(f"{name:<48}{value:>12}")


if __name__ == "__main__":
    main()
