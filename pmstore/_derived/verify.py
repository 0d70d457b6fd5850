"""Whether a recomputed array equals the earlier one, which isn't stored: its hash, or a summary of 40 numbers.

The summary holds the number of elements and of finite elements, the sum of the finite ones and of their absolute
values, the smallest, the largest, and 32 elements at evenly spaced places. It catches a drift of all elements, another
scale, rows in another order (by the samples), and single elements that become the largest or aren't finite. It does not
catch changes of single elements between the samples that leave the sums unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pmstore._catalog.declaration import Tolerance, Verify
from pmstore._values.array import Array

__all__ = ["differs", "summary_of", "verify_of"]

_SAMPLES = 32


def verify_of(verify: Any) -> Verify:
    """The parameter `verify` of `Store.derive`, checked."""
    if verify is None or verify == "hash":
        return None if verify is None else "hash"
    parts = verify if isinstance(verify, tuple) else (verify, 0.0)
    try:
        tolerance = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        tolerance = ()
    if len(tolerance) != 2 or isinstance(verify, str | bool) or not all(0 <= t < math.inf for t in tolerance):
        raise ValueError(
            f'verify is None, "hash", a relative tolerance or a tuple (relative, absolute), not {verify!r:.80}'
        )
    return tolerance[0], tolerance[1]


def summary_of(array: Array) -> tuple[float, ...]:
    """The summary of an array. Raises TypeError if the elements aren't numbers."""
    if array.dtype.kind not in "biufc":
        raise TypeError(f'a tolerance needs numbers, and its dtype is {array.dtype}: verify="hash" compares it whole')
    flat = array.ravel(order="K")
    if array.dtype.kind == "c":
        flat = np.stack((flat.real, flat.imag), axis=-1).reshape(-1)
    finite = np.isfinite(flat)
    numbers = flat if finite.all() else flat[finite]
    with np.errstate(all="ignore"):
        sums = [float(part.sum(dtype=np.float64)) for part in (numbers, np.abs(numbers))]
    ends = [float(numbers.min()), float(numbers.max())] if numbers.size else [0.0, 0.0]
    places = np.linspace(0, max(0, flat.size - 1), min(flat.size, _SAMPLES)).astype(np.intp)
    return (float(flat.size), float(numbers.size), *sums, *ends, *map(float, flat[places]))


def differs(was: tuple[float, ...], now: tuple[float, ...], tolerance: Tolerance) -> str:
    """The difference of two summaries that exceeds the tolerance, as text; "" if none does."""
    relative, absolute = tolerance
    if len(was) != len(now) or was[:2] != now[:2]:
        return f"{now[0]:.0f} numbers, {now[1]:.0f} of them finite, and not {was[0]:.0f} and {was[1]:.0f}"
    sums = absolute * was[0] + relative * abs(was[3])
    bounds = [sums, sums] + [absolute + relative * abs(value) for value in was[4:]]
    what = ["the sum", "the sum of absolute values", "the smallest", "the largest"]
    for i, (old, new, bound) in enumerate(zip(was[2:], now[2:], bounds)):
        same = old == new or (math.isnan(old) and math.isnan(new)) or abs(old - new) <= bound
        if not same:
            return f"{what[i] if i < len(what) else 'a sampled element'} is {new!r} and not {old!r}"
    return ""
