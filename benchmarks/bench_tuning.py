"""The batch and the base interval that an archive chooses, beside the best fixed ones, in simulated runs with failures.

python benchmarks/bench_tuning.py [--seed N] [--runs N] [--failures N]

It needs no store and no quiet machine: all times are simulated. The simulation knows nothing of the formulas. A run
computes, writes an object after each batch, and a base with the last one of an interval. Failures come at random, also
in the middle of a write or of a restore.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from pmstore.archive._tuning import Choice, Costs, tuned

KINDS = {  # bandwidth, differential, base, merge_seconds, mtbf, iteration_seconds, write_seconds
    "KMeans, disk": Costs(400e6, 62_720, 440e6, 0.004, 0, 0.25, 0.007),
    "KMeans, S3": Costs(80e6, 62_720, 440e6, 0.06, 0, 0.25, 0.05),
    "all changes, disk": Costs(400e6, 100e6, 400e6, 0.3, 0, 2.0, 0.007),
    "training, S3": Costs(200e6, 2e6, 6e9, 0.08, 0, 0.1, 0.05),
    "a merge takes long": Costs(1e9, 1e6, 1e9, 20.0, 0, 1.0, 0.0),
}
MTBF = (20, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400)
GRID = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024]


def simulated(costs: Costs, choice: Choice, until_failure: np.ndarray) -> float:
    """The lost plus spent time as a share of the time that computed. until_failure: in seconds, from each start to its
    failure: one row for each failure, one column for each run."""
    batch, batches = choice.batch, choice.base_interval // choice.batch
    each = np.full(batches, batch * (costs.iteration_seconds + costs.differential / costs.bandwidth))
    each += costs.write_seconds
    each[-1] += (costs.base - costs.differential) / costs.bandwidth
    ends = np.concatenate([[0.0], np.cumsum(each)])
    since_base = np.zeros(until_failure.shape[1], np.int64)  # batches
    computed = 0.0
    for left in until_failure:
        restore = costs.base / costs.bandwidth + costs.write_seconds + costs.merge_seconds * since_base
        place = ends[since_base] + left - restore
        rounds, rest = np.divmod(place, ends[-1])
        here = np.searchsorted(ends, rest, "right") - 1
        done = np.where(left > restore, rounds.astype(np.int64) * batches + here - since_base, 0)
        since_base = (since_base + done) % batches
        computed += float(done.sum()) * batch * costs.iteration_seconds
    return (float(until_failure.sum()) - computed) / computed if computed else np.inf


def fixed_choices(most: int) -> Iterator[Choice]:
    """Fixed choices to compare with."""
    for batch in GRID:
        for batches in [*GRID, 1536, 2048, 3072, 4096, 8192]:
            if batch * batches <= most:
                yield Choice(batch, batch * batches)


def compared(costs: Costs, seed: int, runs: int, failures: int) -> tuple[Choice, float, Choice, float]:
    """The tuned choice and the best fixed one, each with its lost plus spent time, of the same failures."""
    drawn = np.random.default_rng(seed).exponential(costs.mtbf, (failures, runs))
    *known, first = costs
    chosen = tuned(*known, write_seconds=first)
    found = {choice: simulated(costs, choice, drawn) for choice in fixed_choices(1 << 16)}
    best = min(found, key=lambda choice: found[choice])
    return chosen, simulated(costs, chosen, drawn), best, found[best]


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--runs", type=int, default=400)
    options.add_argument("--failures", type=int, default=25)
    given = options.parse_args()
    print(f"{'':20}{'mtbf':>9}{'tuned':>15}{'lost + spent':>14}{'best fixed':>15}{'lost + spent':>14}{'ratio':>8}")
    for name, kind in KINDS.items():
        for mtbf in MTBF:
            costs = kind._replace(mtbf=mtbf)
            chosen, mine, best, least = compared(costs, given.seed, given.runs, given.failures)
            row = f"{name:20}{mtbf / 3600:7.3f} h{chosen.batch:7} {chosen.base_interval:7}{mine:14.3%}"
            print(f"{row}{best.batch:7} {best.base_interval:7}{least:14.3%}{mine / least:8.3f}", flush=True)


if __name__ == "__main__":
    main()
