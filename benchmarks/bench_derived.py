"""The cost and the gain of deriving an array instead of storing it: the state of a full-covariance mixture.

Means, covariances and precisions_cholesky of 10 components in 784 dimensions, all changed in each iteration. The last
is computed from the covariances by scikit-learn's function, and is as large as they are. Stores take turns:

    stored          all of them are arrays of the store
    derived         precisions_cholesky is derived; the loop has it in ordinary memory and asks the store nothing
    derived, set    the loop tells the store each value: `set`, which hashes the covariances
    kept            the same with policy="store": the value is written, too

Then each store is left as a kill leaves it. The time of a recovery ends when both large arrays were read once.

    python benchmarks/bench_derived.py            on /dev/shm and in build/
    python benchmarks/bench_derived.py --quick    128 dimensions
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import sklearn
from _common import (
    MEDIA,
    Array,
    file_system,
    machine,
    no_collection,
    parent,
    parser,
    real_time,
    save,
    scratch,
    seconds,
)
from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky

import pmstore

COMPONENTS, FEATURES = 10, 784
WARM_UP = 12
KINDS = ("stored", "derived", "derived, set", "kept")
STATE = ("means", "covariances")


def state(features: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(COMPONENTS, features, features + 8))
    covariances = parts @ parts.transpose(0, 2, 1) / features
    return {"means": rng.normal(size=(COMPONENTS, features)), "covariances": covariances}


def declared(store: pmstore.Store, policy: str) -> pmstore.Derived:
    return store.derive(
        "precisions_cholesky",
        _compute_precision_cholesky,
        "covariances",
        kwargs={"covariance_type": "full"},
        version=sklearn.__version__,
        policy=policy,
    )


class Subject:
    """One store, and what an iteration does to it."""

    def __init__(self, path: Path, medium: str, kind: str, first: dict[str, Array], precisions: Array) -> None:
        self.path, self.medium, self.kind = path, medium, kind
        self.store = pmstore.open(path, media=MEDIA[medium])  # type: ignore[arg-type]
        for name, array in first.items():
            self.store[name] = array
        self.mine = precisions
        self.times: dict[str, list[float]] = {"commit": [], "set": [], "read": []}
        if kind == "stored":
            self.store["precisions_cholesky"] = precisions
        else:
            self.derived = declared(self.store, "store" if kind == "kept" else "recompute")
        self.live = list(self.store.values()) if kind == "stored" else [self.store[name] for name in STATE]

    def iterate(self) -> None:
        for array in self.live:
            array *= 1 + 1e-9
        start = perf_counter()
        if self.kind in ("derived, set", "kept"):
            self.derived.set(self.mine)
        told = perf_counter()
        self.store.commit()
        committed = perf_counter()
        if self.kind == "derived, set":
            self.derived.value  # noqa: B018
        self.times["set"].append(told - start)
        self.times["commit"].append(committed - told)
        self.times["read"].append(perf_counter() - committed)

    def recover(self) -> float:
        """Seconds to open what a kill left and to have read the large arrays."""
        self.live.clear()
        self.store._drop(discard=True)
        start = perf_counter()
        with pmstore.open(self.path, media=MEDIA[self.medium]) as store:  # type: ignore[arg-type]
            found = (
                store["precisions_cholesky"] if self.kind == "stored" else declared(store, self.derived_policy).value
            )
            total = np.add.reduce(found, axis=None) + np.add.reduce(store["covariances"], axis=None)
            taken = perf_counter() - start
            assert np.isfinite(total)
            del found
        return taken

    @property
    def derived_policy(self) -> str:
        return self.derived.decision.policy


def measure(directory: Path, medium: str, features: int, repetitions: int) -> dict[str, Any]:
    first = state(features)
    start = perf_counter()
    precisions = _compute_precision_cholesky(first["covariances"], "full")
    compute = perf_counter() - start
    precisions = np.array(precisions)
    precisions.flags.writeable = False
    raw: dict[str, Any] = {"compute": compute, "nbytes": precisions.nbytes}
    with scratch(directory) as inside, no_collection():
        subjects = [Subject(inside / f"{n}.pm", medium, kind, first, precisions) for n, kind in enumerate(KINDS)]
        before: list[pmstore.Stats] = []
        for iteration in range(WARM_UP + repetitions):
            if iteration == WARM_UP:
                before = [subject.store.stats() for subject in subjects]
            for subject in subjects:
                subject.iterate()
        for subject, stats in zip(subjects, before):
            times = {what: values[WARM_UP:] for what, values in subject.times.items()}
            now = subject.store.stats()
            raw[subject.kind] = {
                **times,
                "bytes per commit": (now.bytes_written - stats.bytes_written) / repetitions,
                "file": now.file_size,
                "recovery": subject.recover(),
            }
        with pmstore.open(inside / "auto.pm", media=MEDIA[medium]) as store:  # type: ignore[arg-type]
            store["covariances"] = first["covariances"]
            derived = declared(store, "auto")
            derived.value  # noqa: B018
            raw["auto"] = f"{derived.decision.policy}: {derived.decision.reason}"
    return raw


def report(medium: str, kind: str, raw: dict[str, Any]) -> None:
    print(f"{medium} ({kind}), {raw['nbytes'] / 1e6:.0f} MB derived, computed in {seconds(raw['compute'])}")
    print(f"  {'':14}{'set':>9}{'commit':>9}{'both':>9}   of stored   MB/commit  file, MB  recovery")
    median: Callable[[list[float]], float] = statistics.median
    stored = raw["stored"]["commit"]
    for name in KINDS:
        found = raw[name]
        both = [a + b for a, b in zip(found["set"], found["commit"])]
        share = median([a / b for a, b in zip(both, stored)])
        told = seconds(median(found["set"])) if name in ("derived, set", "kept") else "–"
        print(
            f"  {name:14}{told:>9}{seconds(median(found['commit'])):>9}{seconds(median(both)):>9}{share:>11.2f}"
            f"{found['bytes per commit'] / 1e6:>13.1f}{found['file'] / 1e6:>10.0f}{seconds(found['recovery']):>10}"
        )
    print(f"  reading a valid one: {seconds(median(raw['derived, set']['read']))}")
    print(f"  auto: {raw['auto']}\n")


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    features, repetitions = (128, 5) if options.quick else (FEATURES, max(3, int(20 * options.scale)))
    print(f"{machine()}; {real_time()}\n")
    raw = {}
    for medium in options.media:
        directory = parent(options, medium)
        raw[medium] = measure(directory, medium, features, repetitions)
        report(medium, file_system(directory), raw[medium])
    save(options.raw, "derived", raw)


if __name__ == "__main__":
    main()
