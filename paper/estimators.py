"""What a store costs pmstore's own estimators: the share of commits in a fit, and what going on after a kill takes.

Each fit in a store stands beside scikit-learn's: the same parameters, the same iterations, and the same result bit for
bit. On a disk the baseline is taken right after every commit, inside the fit, whose time doesn't count it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import sklearn.cluster
import sklearn.mixture
from _common import Array, baseline_of, machine, padded, parent, parser, save, scratch
from sklearn.exceptions import ConvergenceWarning

import pmstore
import pmstore.cluster
from pmstore._core import Core
from pmstore._resume.fingerprint import describe_data

from . import data
from .loops import REGULARIZATION

Kept = dict[str, Any]


class Killed(KeyboardInterrupt):
    """The end of a fit that is cut off; what is in the store is what a kill would leave."""


@dataclass(frozen=True)
class Model:
    """scikit-learn's estimator and pmstore's.

    step : owner and name of what scikit-learn calls first in an iteration.
    state : fitted attributes that a commit has to hold.
    """

    plain: Any
    stored: Any
    step: tuple[Any, str]
    state: tuple[str, ...]
    options: Kept

    def parameters(self, clusters: int, iterations: int) -> Kept:
        """The parameters of a fit of exactly so many iterations."""
        number = "n_clusters" if "init" in self.options else "n_components"
        return {**self.options, number: clusters, "max_iter": iterations, "tol": 0.0, "n_init": 1, "random_state": 0}


def models() -> tuple[dict[str, Model], list[Kept]]:
    """Those that there are, and what is left out."""
    found = {
        "KMeans": Model(
            sklearn.cluster.KMeans,
            pmstore.cluster.KMeans,
            (sklearn.cluster._kmeans, "lloyd_iter_chunked_dense"),
            ("cluster_centers_",),
            {"init": "random"},
        )
    }
    try:
        from pmstore.mixture import GaussianMixture
    except ImportError as error:
        return found, [{"who": "pmstore.mixture.GaussianMixture", "where": "everywhere", "why": str(error)}]
    found["GaussianMixture"] = Model(
        sklearn.mixture.GaussianMixture,
        GaussianMixture,
        (sklearn.mixture.GaussianMixture, "_e_step"),
        ("weights_", "means_", "covariances_"),
        {"init_params": "random_from_data", "reg_covar": REGULARIZATION},
    )
    return found, []


class Commits:
    """Start and length of every commit inside its block, in seconds from the block's start, and the baseline beside it.
    The baseline comes before and after the commit by turns, because the second of two writes finds the disk awake.
    """

    def __init__(self, baseline: Callable[[], float] | None = None, stop_after: int = -1) -> None:
        self.commits: list[tuple[float, float]] = []
        self.baselines: list[float] = []
        self._baseline, self._stop_after = baseline, stop_after

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure what happens inside."""
        commit, started = Core.commit, perf_counter()

        def timed_commit(core: Core) -> None:
            baseline, first = self._baseline, len(self.commits) % 2 == 0
            if baseline and first:
                self.baselines.append(baseline())
            begun = perf_counter()
            commit(core)
            self.commits.append((begun - started, perf_counter() - begun))
            if baseline and not first:
                self.baselines.append(baseline())
            if len(self.commits) == self._stop_after:
                raise Killed

        with mock.patch.object(Core, "commit", timed_commit):
            yield

    @property
    def seconds(self) -> list[float]:
        """The seconds of each commit."""
        return [seconds for _, seconds in self.commits]

    @property
    def apart(self) -> list[float]:
        """The seconds from the end of one commit to the start of the next: an iteration each, but for the baselines."""
        ends = [start + seconds for start, seconds in self.commits]
        baselines = self.baselines or [0.0] * len(ends)
        between = [baselines[i] + baselines[i + 1] if i % 2 else 0.0 for i in range(len(ends) - 1)]
        return [start - end - baseline for (start, _), end, baseline in zip(self.commits[1:], ends, between)]


def until_first_step(model: Model, X: Array, parameters: Kept) -> float:
    """Seconds until scikit-learn begins its first iteration."""

    def stop(*_: Any, **__: Any) -> None:
        raise Killed

    started = perf_counter()
    with mock.patch.object(*model.step, stop), contextlib.suppress(Killed):
        model.plain(**parameters).fit(X)
    return perf_counter() - started


def fits(model: Model, X: Array, parameters: Kept, directories: dict[str, Path]) -> Kept:
    """One fit by scikit-learn, and one in a store on each medium."""
    started = perf_counter()
    plain = model.plain(**parameters).fit(X)
    kept: Kept = {"plain": perf_counter() - started, "stored": []}
    state = sum(np.asarray(getattr(plain, name)).nbytes for name in model.state)
    for medium, directory in directories.items():
        baseline, source = baseline_of(medium, directory, state), padded(state // 8)
        commits = Commits(functools.partial(baseline, source) if medium == "disk" else None)
        started = perf_counter()
        with commits.timed():
            fitted = model.stored(**parameters, store=directory / "fit.pm").fit(X)
        taken = perf_counter() - started - sum(commits.baselines)
        same = all(np.array_equal(getattr(fitted, name), getattr(plain, name)) for name in model.state)
        kept["stored"].append(
            {
                "medium": medium,
                "fit": taken,
                "commits": commits.seconds,
                "baselines": commits.baselines,
                "apart": commits.apart,
                "bytes": state,
                "same": same,
                "iterations": int(fitted.n_iter_),
            }
        )
    return kept


def resumes(model: Model, X: Array, parameters: Kept, directory: Path, repeats: int) -> Kept:
    """What it takes to go on with a fit that was cut off in its middle."""
    killed = directory / "killed.pm"
    cut = Commits(stop_after=1 + max(1, parameters["max_iter"] // 2))
    with contextlib.suppress(Killed), cut.timed():
        model.stored(**parameters, store=killed).fit(X)
    kept: Kept = {"iterations": cut.apart, "starts": [], "until first commit": [], "open": [], "fingerprint": []}
    kept["data bytes"] = X.nbytes
    for _ in range(repeats):
        kept["starts"].append(until_first_step(model, X, parameters))
        again = shutil.copy(killed, directory / "again.pm")
        started = perf_counter()
        store = pmstore.open(again)
        opened = perf_counter()
        describe_data(X)
        kept["fingerprint"].append(perf_counter() - opened)
        kept["open"].append(opened - started)
        store.close()
        again = shutil.copy(killed, directory / "again.pm")
        resumed = Commits(stop_after=1)
        with contextlib.suppress(Killed), resumed.timed():
            model.stored(**parameters, store=again).fit(X)
        kept["until first commit"].append(resumed.commits[0][0])
    return kept


def iterations_of(name: str, clusters: int) -> int:
    """Few for large mixtures, where each takes 25 s; the small one has more than a store needs to learn."""
    if name == "KMeans":
        return 20
    return 8 if clusters == 2 else 2


def sizes(quick: bool) -> Kept:
    """How much of everything."""
    return {
        "rows": 2_000 if quick else 70_000,
        "clusters": {
            "KMeans": [2, 10] if quick else list(range(2, 11)),
            "GaussianMixture": [2, 5] if quick else [2, 10],
        },
        "resumed": {"KMeans": 10, "GaussianMixture": 2},  # clusters
        "repeats": 3,
    }


def measure(model: Model, name: str, X: Array, known: Kept, options: argparse.Namespace) -> tuple[list[Kept], Kept]:
    """Fits and resumes of one estimator."""
    model.plain(**model.parameters(2, 1)).fit(X[:100])  # threads start, libraries are loaded
    kept = []
    for clusters in known["clusters"][name]:
        print(f"{name}, k = {clusters}", flush=True)
        with contextlib.ExitStack() as until_done:
            directories = {
                medium: until_done.enter_context(scratch(parent(options, medium))) for medium in options.media
            }
            parameters = model.parameters(clusters, iterations_of(name, clusters))
            kept.append({"model": name, "clusters": clusters, **fits(model, X, parameters, directories)})
    print(f"{name}, resuming", flush=True)
    clusters = known["resumed"][name]
    with scratch(parent(options, options.media[0])) as directory:
        parameters = model.parameters(clusters, iterations_of(name, clusters))
        resumed = resumes(model, X, parameters, directory, known["repeats"])
    return kept, {"model": name, "clusters": clusters, "medium": options.media[0], **resumed}


def main() -> None:
    """Measure."""
    command = parser(__doc__)
    data.add_options(command)
    options = command.parse_args()
    known = sizes(options.quick)
    try:
        X = data.mnist(options, known["rows"])
    except data.NoImages as problem:
        raise SystemExit(f"paper: {problem}") from None
    found, skipped = models()
    warnings.simplefilter("ignore", ConvergenceWarning)
    kept, resumed = [], []
    for name, model in found.items():
        more, one = measure(model, name, X.X, known, options)
        kept += more
        resumed.append(one)
    for left in skipped:
        print(f"not measured: {left['who']}: {left['why']}")
    described = [{"name": X.name, "what": X.what, "shape": list(X.X.shape)}]
    raw = {
        "quick": options.quick,
        "priority": "normal priority",
        "data": described,
        "fits": kept,
        "resumes": resumed,
        "skipped": skipped,
    }
    save(options.raw, "paper-estimators", raw)
    print(machine())


if __name__ == "__main__":
    main()
