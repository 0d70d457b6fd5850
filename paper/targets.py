"""What was asked of estimators in a store, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from _common import seconds
from _targets import Raw, Target, at_most

from .figures import (
    CHECKPOINTS,
    COMPARISONS,
    ESTIMATORS,
    KILLS,
    OURS,
    OURS_ALL,
    SAFE_ALL,
    beyond,
    checkpoint,
    cost,
    fits,
    resuming,
    sets,
    share,
    speed_up,
    stored,
    times_baseline,
)
from .kills import LAST, PREVIOUS

MODELS = ("KMeans", "GaussianMixture")
MEDIA = {"memory": "tmpfs", "disk": "disk"}
WANTED = {"KMeans": (15, 5, 200), "GaussianMixture": (10, 2.3, 20)}  # in the order of COMPARISONS


def at_least(medium: str, what: str, value: float | None, limit: float) -> Target:
    measured = None if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return Target(medium, what, f"≥ {limit:g}", measured, value is not None and value >= limit)


def share_at_most(medium: str, what: str, value: float | None, limit: float) -> Target:
    measured = None if value is None else f"{value:.2%}"
    return Target(medium, what, f"≤ {limit:.0%}", measured, value is not None and value <= limit)


def clusters(found: list[Raw]) -> str:
    """The numbers of clusters for which something was measured."""
    known = sorted(int(fit["clusters"]) for fit in found)
    if known == list(range(known[0], known[-1] + 1)) and len(known) > 2:
        return f"k = {known[0]}…{known[-1]}"
    return f"k = {', '.join(map(str, known))}"


def of_fits(raw: Raw, model: str) -> Iterator[Target]:
    """What the estimators' own fits cost."""
    for medium, where in MEDIA.items():
        known = list(stored(raw, model, medium))
        of = f"{model}, {clusters([fit for fit, _ in known])}" if known else model
        if medium == "memory" or model != "KMeans":
            worst = max((sum(one["commits"]) / one["fit"] for _, one in known), default=None)
            yield share_at_most(where, f"{of}: commits in a fit, the largest share", worst, 0.01)
        if medium == "disk":
            ratios = [value for _, one in known if (value := times_baseline(one)) is not None]
            yield at_most(where, f"{of}: commit ÷ baseline in the same fit, the worst", max(ratios, default=None), 1.5)
        rest = statistics.median(beyond(fit, one) for fit, one in known) if known else None
        yield at_most(where, f"{of}: the fit without commits ÷ scikit-learn's (2% are noise)", rest, 1.02)
        same = f"{sum(one['same'] for _, one in known)} of {len(known)}" if known else None
        all_same = all(one["same"] for _, one in known)
        yield Target(where, f"{of}: scikit-learn's result, bit for bit", "all", same, bool(known) and all_same)


def of_loops(raw: Raw, model: str, known: list[Raw]) -> Iterator[Target]:
    """Shares in the loops that this benchmark runs itself, for all k."""
    for medium, where in MEDIA.items():
        if medium == "disk" and model == "KMeans":
            continue
        copying = model != "KMeans"
        costs = [(fit, cost(fit, OURS, medium, copying)) for fit in known]
        worst = max((share(fit, value) for fit, value in costs if value is not None), default=None)
        of = f"{model}, {clusters(known)}" if known else model
        with_copy = ", the copy into the store included" if copying else ""
        yield share_at_most(where, f"{of}, in this benchmark's loop: the largest share{with_copy}", worst, 0.01)


def of_checkpoints(model: str, fit: Raw | None) -> Iterator[Target]:
    """Speed-ups at the largest k."""
    of = f"{model}, k = {fit['clusters']}" if fit else model
    for comparison, wanted in zip(COMPARISONS, WANTED[model]):
        where = MEDIA[comparison[3]]
        yield at_least(where, f"{of}: {comparison[0]}", speed_up(fit, comparison) if fit else None, wanted)
        value = speed_up(fit, comparison, back_to_back=True) if fit else None
        yield at_least(where, f"{of}: the same, back to back instead of in a fit", value, wanted)
        if model != "KMeans":
            value = speed_up(fit, comparison, copying=True) if fit else None
            yield at_least(where, f"{of}: the same, the copy into the store included", value, wanted)
    if model != "KMeans":
        slow, fast = (cost(fit, SAFE_ALL, "disk"), cost(fit, OURS, "disk")) if fit else (None, None)
        what = "savez of all attributes, fsync, rename ÷ pmstore without what is derived"
        yield at_least("disk", f"{of}: {what}", slow / fast if slow and fast else None, 3)


def of_derived(fit: Raw | None) -> Iterator[Target]:
    """What leaving out precisions_cholesky_ saves."""
    for medium, where in MEDIA.items():
        whole, ours = (checkpoint(fit, OURS_ALL, medium), checkpoint(fit, OURS, medium)) if fit else (None, None)
        of = f"GaussianMixture, k = {fit['clusters']}, without what is derived" if fit else "GaussianMixture"
        fewer = 1 - ours["bytes"] / whole["bytes"] if whole and ours else None
        what = "fewer bytes"
        for value, limit in ((fewer, 0.5), (less_time(fit, medium), 0.12)):
            measured = None if value is None else f"{value:.1%}"
            # The rest of the state is stored either way, so that a half is never quite reached.
            met = value is not None and value >= limit - 0.005
            yield Target(where, f"{of}: {what}", f"≥ {limit:.0%}", measured, met)
            what = "less time in commits"


def less_time(fit: Raw | None, medium: str) -> float | None:
    whole, ours = (cost(fit, OURS_ALL, medium), cost(fit, OURS, medium)) if fit else (None, None)
    return 1 - ours / whole if whole and ours else None


def of_resuming(raw: Raw) -> Iterator[Target]:
    """Going on after a kill."""
    known = {kept["model"]: kept for kept in raw.get(ESTIMATORS, {}).get("resumes", ())}
    for model in MODELS:
        kept = known.get(model)
        value = None
        if kept:
            iteration, _, extra = resuming(kept)
            value = extra / iteration
        yield at_most("tmpfs", f"{model}: resuming, beyond scikit-learn's own start ÷ an iteration", value, 1)
    for kept in list(known.values())[:1]:
        taken = statistics.median(map(sum, zip(kept["open"], kept["fingerprint"])))
        what = f"opening and fingerprint, {kept['data bytes'] / 1e6:.0f} MB"
        yield Target("tmpfs", what, "≤ 100 ms", seconds(taken), taken <= 0.1)


def of_kills(raw: Raw) -> Iterator[Target]:
    """Whether pmstore kept the state of a whole iteration."""
    for medium, where in MEDIA.items():
        cells = [c for c in raw.get(KILLS, {}).get("cells", ()) if c["who"] == OURS and c["medium"] == medium]
        found = [(verdict, count) for cell in cells for verdict, count in cell["inside"].items()]
        found += [(verdict, count) for cell in cells for verdict, count in cell["after"].items()]
        whole, every = sum(n for verdict, n in found if verdict in (LAST, PREVIOUS)), sum(n for _, n in found)
        measured = f"{whole} of {every}" if every else None
        what = "kills after which pmstore has a whole state, at most one iteration old"
        yield Target(where, what, "all", measured, bool(every) and whole == every)


def targets(raw: Raw) -> list[Target]:
    """All of them, on the first of the data."""
    found: list[Target] = []
    for model in MODELS:
        known = fits(raw, sets(raw)[0], model) if CHECKPOINTS in raw else []
        largest = known[-1] if known else None
        found += [*of_fits(raw, model), *of_loops(raw, model, known), *of_checkpoints(model, largest)]
        if model != "KMeans":
            found += of_derived(largest)
    return [*found, *of_resuming(raw), *of_kills(raw)]
