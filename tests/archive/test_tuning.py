"""The batch and the base interval: by the closed formulas, by trying all, and in simulated runs with failures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmstore.archive._tuning import BATCH_MOST, INTERVAL_MOST, Choice, Costs, Tuner, tuned, waste

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
DISK = Costs(400e6, 62_720, 440e6, 0.004, 6 * 3600.0, 0.25)


def chosen(costs: Costs, **limits: int) -> Choice:
    *known, first = costs
    return tuned(*known, write_seconds=first, **limits)


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 86_400.0])
@pytest.mark.parametrize("merge", [0.05, 0.5, 3.0])
def test_the_closed_formulas(mtbf: float, merge: float) -> None:
    """The unit of time is the iteration: f* = cbrt(R W^2 / (4 S^2 M^2)), b* = cbrt(2 S R M / W)."""
    costs = Costs(200e6, 1e6, 4e9, merge, mtbf, 1.0)
    batch = (2 * (4e9 - 1e6) / 200e6 * merge * mtbf) ** (1 / 3)
    interval = (4 * (4e9 - 1e6) ** 2 * mtbf**2 / (merge * 200e6**2)) ** (1 / 3)
    found = chosen(costs)
    if batch < 1:
        assert found.batch == 1
    else:
        assert abs(found.batch - batch) <= 1
        assert abs(found.base_interval - interval) <= found.batch + interval / found.batch + 1
    # In seconds, another iteration time is another unit.
    scaled = chosen(costs._replace(merge_seconds=merge * 3, mtbf=mtbf * 3, iteration_seconds=3.0, bandwidth=200e6 / 3))
    assert scaled == found


@pytest.mark.parametrize("first", [0.0, 0.01, 2.0])
@pytest.mark.parametrize("merge", [0.0, 0.003, 0.2, 30.0])
@pytest.mark.parametrize("mtbf", [100.0, 5000.0, 2e5])
@pytest.mark.parametrize("size", [1e3, 3e7])
def test_no_other_choice_is_better(first: float, merge: float, mtbf: float, size: float) -> None:
    costs = Costs(1e8, size, 1e9, merge, mtbf, 0.7, first)
    limits = {"batch_most": 60, "interval_most": 3000}
    found = chosen(costs, **limits)
    least = math.ceil(costs.beyond / (0.7 - size / 1e8))  # otherwise the bandwidth is not enough
    assert 1 <= found.batch <= 60 and least <= found.base_interval <= 3000
    assert found.base_interval % found.batch == 0
    others = (
        waste(costs, batch, interval)
        for batch in range(1, 61)
        for interval in range(batch, 3001, batch)
        if interval >= least
    )
    assert waste(costs, *found) <= 1.005 * min(others)


def test_the_limits() -> None:
    assert chosen(DISK._replace(merge_seconds=0.0)) == (1, INTERVAL_MOST)  # a base would save nothing
    assert chosen(DISK._replace(mtbf=math.inf)).base_interval == INTERVAL_MOST  # nothing is ever restored
    assert chosen(DISK._replace(mtbf=math.inf, write_seconds=0.01)).batch == BATCH_MOST
    assert chosen(DISK._replace(base=62_720.0)).base_interval == chosen(DISK._replace(base=0.0)).base_interval
    assert chosen(DISK._replace(base=62_720.0)).batch == 1 == chosen(DISK._replace(base=62_720.0)).base_interval
    assert chosen(DISK, batch_most=1).batch == 1
    assert chosen(DISK, interval_most=1) == (1, 1)
    assert chosen(DISK, batch_most=1000, interval_most=7).base_interval <= 7
    # What a commit changes is more than can be written in an iteration: as few bases as possible.
    assert chosen(DISK._replace(differential=200e6)).base_interval == pytest.approx(INTERVAL_MOST, rel=0.01)
    slow = chosen(DISK._replace(base=4e12, mtbf=10.0))
    assert slow.base_interval * (0.25 - 62_720 / 400e6) >= 4e12 / 400e6 * 0.99


@pytest.mark.parametrize("mtbf", [0.5, 2.0, 20.0])
def test_restores_that_take_longer_than_the_time_between_failures(mtbf: float) -> None:
    """Each batch ends in a base, and is no longer than it need be."""
    costs = Costs(750e3, 0.0, 6.4e6, 585.0, mtbf, 0.7)
    limits = {"batch_most": 57, "interval_most": 147}
    found, least = chosen(costs, **limits), math.ceil(costs.beyond / 0.7)
    others = ((batch, batch * n) for batch in range(1, 58) for n in range(1, 147 // batch + 1) if batch * n >= least)
    assert waste(costs, *found) == pytest.approx(min(waste(costs, *one) for one in others))


@pytest.mark.parametrize("name", Costs._fields)
@pytest.mark.parametrize("value", [-1.0, math.nan, 0.0, math.inf])
def test_what_can_be_no_cost(name: str, value: float) -> None:
    costs = DISK._replace(**{name: value})
    positive = name in ("bandwidth", "mtbf", "iteration_seconds")
    if (value == 0 and not positive) or (value == math.inf and name == "mtbf"):
        assert chosen(costs).batch >= 1
        return
    with pytest.raises(ValueError, match=name):
        chosen(costs)


def test_limits_below_one() -> None:
    with pytest.raises(ValueError, match="at least one commit"):
        chosen(DISK, batch_most=0)


# ---- while running


def feed(tuner: Tuner, costs: Costs, count: int, dice: np.random.Generator) -> None:
    """Measurements with noise, as a drain makes them."""

    def noisy(value: float) -> float:
        return value * float(dice.lognormal(0, 0.2))

    for _ in range(count):
        choice = tuner.choice()
        tuner.committed(noisy(costs.iteration_seconds), noisy(costs.differential))
        nbytes = choice.batch * costs.differential
        tuner.wrote(nbytes, noisy(costs.write_seconds + nbytes / costs.bandwidth))
        tuner.merged(3 * noisy(costs.merge_seconds), 3)
        if dice.random() < 0.2:
            tuner.based(noisy(costs.base))
            tuner.wrote(costs.base, noisy(costs.write_seconds + costs.base / costs.bandwidth))


@pytest.mark.parametrize("seed", range(5))
def test_it_learns_the_costs_and_follows_them(seed: int) -> None:
    dice = np.random.default_rng(seed)
    costs = Costs(200e6, 2e6, 1e9, 0.1, 7200.0, 0.5, 0.02)
    tuner = Tuner(7200.0)
    assert tuner.costs() is None and tuner.choice() == (1, 64)
    for changed in (costs, costs._replace(bandwidth=20e6, merge_seconds=1.0), costs._replace(iteration_seconds=5.0)):
        feed(tuner, changed, 200, dice)
        best = chosen(changed)
        assert waste(changed, *tuner.choice()) <= 1.05 * waste(changed, *best)


def test_it_does_not_change_its_mind_for_little() -> None:
    dice = np.random.default_rng(1)
    tuner = Tuner(7200.0)
    costs = Costs(200e6, 2e6, 1e9, 0.1, 7200.0, 0.5, 0.02)
    feed(tuner, costs, 200, dice)
    choices = []
    for _ in range(100):
        feed(tuner, costs, 1, dice)
        choices.append(tuner.choice())
    assert sum(a != b for a, b in itertools.pairwise(choices)) <= 10


def test_before_all_is_known() -> None:
    tuner = Tuner(3600.0, interval_most=16)
    assert tuner.choice() == (1, 16)
    tuner.committed(1.0, 1000)
    tuner.based(1e6)
    assert tuner.costs() is None
    tuner.wrote(1000, 0.01)
    tuner.wrote(1000, 0.03)  # sizes that do not differ: all of it is bandwidth
    assert tuner.costs() == pytest.approx((50_000, 1000, 1e6, 0.02, 3600.0, 1.0, 0.0))
    tuner.wrote(1e6, 0.02)  # a larger object took less time than one of these
    known = tuner.costs()
    assert known is not None and known.bandwidth > 0 and known.write_seconds >= 0
    tuner.merged(9.0, 0)
    assert tuner.choice().base_interval <= 16


def test_a_drain_that_wrote_nothing_knows_nothing() -> None:
    tuner = Tuner(3600.0)
    tuner.committed(0.0, 0)
    tuner.based(0)
    tuner.wrote(0, 0.0)
    assert tuner.costs() is None


@pytest.mark.parametrize("given", [{"mtbf": 0.0}, {"mtbf": -1.0}, {"mtbf": math.nan}, {"weight": 0.0}, {"weight": 2.0}])
def test_bad_input(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Tuner(**{"mtbf": 3600.0, **given})


# ---- in simulated runs


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ isn't here")
@pytest.mark.parametrize("mtbf", [3600, *(pytest.param(mtbf, marks=pytest.mark.long) for mtbf in (60, 7 * 86_400))])
def test_simulated_runs_lose_and_spend_at_most_5_percent_more_than_with_the_best_fixed_choice(
    monkeypatch: pytest.MonkeyPatch, mtbf: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_tuning

    for kind in bench_tuning.KINDS.values():
        _, mine, _, least = bench_tuning.compared(kind._replace(mtbf=mtbf), seed=2, runs=100, failures=12)
        assert mine <= 1.05 * least


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ isn't here")
def test_the_simulation_and_the_formula_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula gives lost plus spent time, if failures are rare compared with cycles."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_tuning

    costs = Costs(100e6, 1e6, 1e9, 0.5, 50_000.0, 1.0, 0.01)
    drawn = np.random.default_rng(3).exponential(costs.mtbf, (60, 400))
    for choice in (Choice(1, 100), Choice(10, 200), Choice(40, 40), Choice(50, 1000)):
        assert bench_tuning.simulated(costs, choice, drawn) == pytest.approx(waste(costs, *choice), rel=0.06)
