"""How many commits go into one object of an archive, and how often a whole version does: the choices with the least
lost plus spent time. docs/archive-tuning.md derives the formulas.

An object holds a *batch* of versions: the differentials of that many commits. A failure loses the commits of the batch
that was not written yet, and a restore merges each batch since the last *base*, a version with everything.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

__all__ = ["BATCH_MOST", "INTERVAL_MOST", "Choice", "Costs", "Tuner", "tuned", "waste"]

BATCH_MOST = 1 << 10
INTERVAL_MOST = 1 << 16

_UNKNOWN_INTERVAL = 64
_WORTH_IT = 1.02  # a running choice changes for more than 2 %
_ROUNDS = 60


class Choice(NamedTuple):
    """batch: commits in an object, the most that a failure loses. base_interval: commits from a base to the next one,
    a multiple of batch.
    """

    batch: int
    base_interval: int


class Costs(NamedTuple):
    """Times in seconds, sizes in bytes.

    bandwidth: bytes per second, to the target and back. differential, base: the size of one commit's changes, and of a
    whole version. merge_seconds: to read and apply one batch in a restore. mtbf: the mean time between failures, which
    may be infinite. iteration_seconds: from one commit to the next. write_seconds: of an object, beyond its bytes.
    """

    bandwidth: float
    differential: float
    base: float
    merge_seconds: float
    mtbf: float
    iteration_seconds: float
    write_seconds: float = 0.0

    def checked(self) -> Costs:
        """The same, as floats. Raises ValueError for numbers that can't be costs."""
        found = Costs(*map(float, self))
        for name, value in found._asdict().items():
            least = name in ("bandwidth", "mtbf", "iteration_seconds")
            if not value >= 0 or (least and not value) or (value == math.inf and name != "mtbf"):
                raise ValueError(f"{name} is a {'positive' if least else 'finite'} number, not {value!r}")
        return found

    @property
    def beyond(self) -> float:
        """Seconds to write the bytes that a base has beyond a differential."""
        return max(self.base - self.differential, 0.0) / self.bandwidth


def waste(costs: Costs, batch: int, base_interval: int) -> float:
    """The expected lost plus spent time, as a share of the time that computes.

    Lost: half a batch of iterations for each failure, and the restore. Spent: writing the objects.
    """
    each = costs.iteration_seconds
    read = costs.base / costs.bandwidth + costs.write_seconds
    lost = batch * each / 2 + read + costs.merge_seconds * (base_interval / batch - 1) / 2
    spent = costs.differential / costs.bandwidth + costs.beyond / base_interval + costs.write_seconds / batch
    return lost / costs.mtbf + spent / each


def tuned(
    bandwidth: float,
    differential: float,
    base: float,
    merge_seconds: float,
    mtbf: float,
    iteration_seconds: float,
    *,
    write_seconds: float = 0.0,
    batch_most: int = BATCH_MOST,
    interval_most: int = INTERVAL_MOST,
) -> Choice:
    """The batch and the base interval with the least lost plus spent time.

    Parameters
    ----------
    bandwidth, differential, base, merge_seconds, mtbf, iteration_seconds, write_seconds : float
        See `Costs`.
    batch_most, interval_most : int
        The choice has at most so many commits in a batch, and between two bases.

    Returns
    -------
    Choice

    Raises ValueError for a cost that is negative or not a number, or for limits below 1.
    """
    costs = Costs(bandwidth, differential, base, merge_seconds, mtbf, iteration_seconds, write_seconds).checked()
    if batch_most < 1 or interval_most < 1:
        raise ValueError(f"a batch has at least one commit, not {min(batch_most, interval_most)}")
    batch_most = min(batch_most, interval_most)
    least = _least_interval(costs, interval_most)
    found = {
        _whole(batch + more, interval, further, least, batch_most, interval_most)
        for batch, interval in (_inside(costs, least, batch_most, interval_most), _only_bases(costs, batch_most))
        for more, further in itertools.product((0, 1), repeat=2)
    }
    return min(found, key=lambda choice: (waste(costs, *choice), choice))


def _least_interval(costs: Costs, most: int) -> int:
    """The shortest interval at which the bandwidth is enough for differentials and bases."""
    left = costs.iteration_seconds - costs.differential / costs.bandwidth  # for a base, in each iteration
    return most if left <= 0 else min(most, math.ceil(costs.beyond / left) or 1)


def _root(value: float) -> float:
    return math.sqrt(value) if value < math.inf else math.inf


def _inside(costs: Costs, least: int, batch_most: int, interval_most: int) -> tuple[float, float]:
    """The point within the limits where both derivatives are 0. If an object costs only its bytes, it is that of the
    two closed formulas."""
    each, merge, mtbf = costs.iteration_seconds, costs.merge_seconds, costs.mtbf
    batch = 1.0
    for _ in range(_ROUNDS):  # each halves the error twice
        before = batch
        best = _root(2 * costs.beyond * mtbf * batch / (each * merge)) if merge and costs.beyond else math.inf
        interval = min(max(best if costs.beyond else 1.0, batch, least), interval_most)
        best = _root((merge * interval + (2 * mtbf * costs.write_seconds / each if costs.write_seconds else 0)) / each)
        batch = min(max(best, 1.0), batch_most, interval)
        if math.isclose(batch, before, rel_tol=1e-9):  # and the interval follows from it
            break
    return batch, interval


def _only_bases(costs: Costs, batch_most: int) -> tuple[float, float]:
    """The best batch if each batch ends in a base (Young's formula for checkpoints)."""
    written = costs.beyond + costs.write_seconds
    batch = min(max(1.0, _root(2 * costs.mtbf * written) / costs.iteration_seconds if written else 1.0), batch_most)
    return batch, batch


def _whole(batch: float, interval: float, further: int, least: int, batch_most: int, interval_most: int) -> Choice:
    """Whole numbers. further: batches beyond those that fit into the interval."""
    number = min(max(1, math.floor(batch)), batch_most)
    batches = max(1, math.floor(interval / number) + further, math.ceil(least / number))
    return Choice(number, number * max(1, min(batches, interval_most // number)))


class _Mean:
    """An exponentially weighted mean; the first values count alike."""

    __slots__ = ("_count", "_weight", "value")

    def __init__(self, weight: float) -> None:
        self.value: float | None = None
        self._count = 0
        self._weight = weight

    def add(self, value: float) -> None:
        self._count += 1
        before = value if self.value is None else self.value
        self.value = before + (value - before) * max(self._weight, 1 / self._count)


class _Line:
    """seconds = first + bytes / bandwidth, of exponentially weighted measurements."""

    __slots__ = ("_means",)

    def __init__(self, weight: float) -> None:
        self._means = [_Mean(weight) for _ in range(4)]

    def add(self, nbytes: float, seconds: float) -> None:
        for mean, value in zip(self._means, (nbytes, seconds, nbytes * nbytes, nbytes * seconds), strict=True):
            mean.add(value)

    def fitted(self) -> tuple[float, float] | None:
        """Bandwidth, and the seconds of an object without bytes; None if nothing was measured."""
        x, y, xx, xy = (mean.value for mean in self._means)
        if x is None or y is None or xx is None or xy is None or x <= 0 or y <= 0:
            return None
        spread = xx - x * x
        slope = (xy - x * y) / spread if spread > 0.01 * xx else 0.0  # sizes that hardly differ tell nothing
        if slope <= 0 or slope * x > y:
            return x / y, 0.0
        return 1 / slope, y - slope * x


class Tuner:
    """Learns the costs of a drain while it runs, and chooses by them. It is for one thread at a time.

    Parameters
    ----------
    mtbf : float
        The mean time between failures, in seconds. Only the user knows it.
    weight : float
        The weight of each new measurement, from 0 to 1: the last 1 / weight measurements count most.
    batch_most, interval_most : int
        See `tuned`.
    """

    def __init__(
        self, mtbf: float, *, weight: float = 0.1, batch_most: int = BATCH_MOST, interval_most: int = INTERVAL_MOST
    ) -> None:
        if not mtbf > 0:
            raise ValueError(f"mtbf is a positive number of seconds, not {mtbf!r}")
        if not 0 < weight <= 1:
            raise ValueError(f"weight is a number from 0 to 1, and not 0: {weight!r}")
        self.mtbf = mtbf
        self.batch_most, self.interval_most = batch_most, interval_most
        self._iteration, self._differential = _Mean(weight), _Mean(weight)
        self._base, self._merge = _Mean(weight), _Mean(weight)
        self._objects = _Line(weight)
        self._choice: Choice | None = None

    def committed(self, seconds: float, differential: float) -> None:
        """A commit: seconds since the one before, and the bytes of its changes."""
        self._iteration.add(seconds)
        self._differential.add(differential)

    def based(self, nbytes: float) -> None:
        """The bytes of a whole version."""
        self._base.add(nbytes)

    def wrote(self, nbytes: float, seconds: float) -> None:
        """An object of so many bytes was written in this time."""
        self._objects.add(nbytes, seconds)

    def merged(self, seconds: float, batches: int = 1) -> None:
        """So many batches were read and applied in this time."""
        if batches > 0:
            self._merge.add(seconds / batches)

    def costs(self) -> Costs | None:
        """The measured costs; None before the first commit, base and object. Before the first merge, a batch is taken
        to be merged in the time in which an object with one differential is written.
        """
        line = self._objects.fitted()
        each, differential, base = self._iteration.value, self._differential.value, self._base.value
        if line is None or not each or differential is None or base is None:
            return None
        bandwidth, first = line
        merge = self._merge.value
        if merge is None:
            merge = first + differential / bandwidth
        return Costs(bandwidth, differential, base, merge, self.mtbf, each, first)

    def choice(self) -> Choice:
        """The batch and the base interval from now on. It changes only if that saves more than 2 %."""
        costs = self.costs()
        if costs is None:
            return self._choice or Choice(1, min(_UNKNOWN_INTERVAL, self.interval_most))
        *known, first = costs
        best = tuned(*known, write_seconds=first, batch_most=self.batch_most, interval_most=self.interval_most)
        if self._choice is None or waste(costs, *self._choice) > _WORTH_IT * waste(costs, *best):
            self._choice = best
        return self._choice
