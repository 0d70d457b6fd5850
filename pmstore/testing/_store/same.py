"""Whether two recordings are of the same run: a workload must do the same each time."""

from __future__ import annotations

import numpy as np

from pmstore._display import count_text
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.describe import Contents, Sandbox, States, changed_rows, equal, rows_text, shortened
from pmstore.testing._store.engine import Options
from pmstore.testing._store.recording import Recording

__all__ = ["require_same"]

ADVICE = (
    "A workload has to do the same each time: seed its random generators, let no threads race, and take no times, ids, "
    "addresses or orders of sets from outside"
)


def require_same(first: Recording, second: Recording, options: Options, sandbox: Sandbox) -> None:
    """Raises CrashTestError, with the first difference in the user's terms, if the second run differs."""
    if first == second or first.states == second.states:
        return
    one, other = States(first, options, sandbox), States(second, options, sandbox)
    raise CrashTestError(f"the workload is not deterministic: {_first_difference(one, other)}. {ADVICE}")


def _first_difference(first: States, second: States) -> str:
    ends = [count_text(max(states, default=0), "commit") for states in (first, second)]
    for sequence in sorted({*first, *second}):
        if sequence not in list(second) or sequence not in list(first):
            return f"its first run made {ends[0]}, its second run {ends[1]}"
        old, new = first[sequence], second[sequence]
        text = None if old is None or new is None else _difference(old, new)
        if text:
            return f"commit {sequence} {text}"
    return "its second run wrote the same values, but other bytes (an order of a dict or of a set?)"


def _difference(old: Contents, new: Contents) -> str | None:
    for name in sorted({*old, *new}):
        if name not in new:
            return f"stored {name!r} in the first run only"
        if name not in old:
            return f"stored {name!r} in the second run only"
        if equal(old[name], new[name]):
            continue
        one, other = old[name], new[name]
        arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        if arrays and one.dtype == other.dtype and one.shape == other.shape:
            rows = changed_rows(one, other)
            was, now = (one[rows[0]], other[rows[0]]) if one.ndim else (one, other)
            return (
                f"wrote other bytes to array {name!r} {rows_text(one, rows)} in the second run: {shortened(now)} "
                f"instead of {shortened(was)}"
            )
        return f"wrote {shortened(other)} to {name!r} in the second run, and {shortened(one)} in the first"
    return None
