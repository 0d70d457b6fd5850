"""The plan of an exploration: the arguments that every way to explore takes, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.check import Check, require_check
from pmstore.testing._store.engine import KINDS, Options
from pmstore.testing._store.recording import MEDIA

__all__ = ["MEDIA", "Plan", "one_medium", "plan"]

SECTORS = (512, 4096)


class Plan(NamedTuple):
    """The plan of an exploration, checked."""

    check: Check | None
    media: tuple[str, ...]
    options: Options


def plan(
    check: Check | None,
    budget: int | None,
    seed: int | None,
    media: Sequence[str] | str,
    depth: int,
    sector: int,
    eadr: bool,
    kinds: Iterable[str] | None,
) -> Plan:
    """The plan for the arguments of `CrashExplorer.run`. Raises CrashTestError for a wrong argument."""
    __tracebackhide__ = True
    require_check(check)
    budget = session.budget() if budget is None else _whole("budget", budget)
    if budget < 1:
        raise CrashTestError(f"budget is how many crash states to evaluate on each medium, at least 1, not {budget}")
    seed = session.seed() if seed is None else _whole("seed", seed)
    if not 0 <= seed < 1 << 64:
        raise CrashTestError(f"seed is a number from 0 to 2**64 - 1, not {seed}")
    if _whole("depth", depth) < 0:
        raise CrashTestError(f"depth is how many crashes may follow one another, 0 or more, not {depth}")
    if sector not in SECTORS:
        raise CrashTestError(f"sector is 512 or 4096 bytes, not {sector!r}")
    chosen = (media,) if isinstance(media, str) else tuple(media)
    if not chosen or any(medium not in MEDIA for medium in chosen):
        raise CrashTestError(f'media is any of "memory" and "file", not {media!r}')
    wanted = None
    if kinds is not None:
        wanted = frozenset((kinds,) if isinstance(kinds, str) else kinds)
        unknown = sorted(str(kind) for kind in wanted if kind not in KINDS)
        if unknown or not wanted:
            raise CrashTestError(f"kinds is any of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
    return Plan(check, chosen, Options(budget, seed, int(depth), sector, bool(eadr), wanted))


def one_medium(media: Sequence[str] | str | None, medium: str | None) -> str:
    """The medium of an exploration on one medium, which may be given under either name; by default "file"."""
    __tracebackhide__ = True
    if media is None or medium is not None:
        if media is not None:
            raise CrashTestError("media and medium are two names for the same: give one of them")
        return "file" if medium is None else medium
    chosen = (media,) if isinstance(media, str) else tuple(media)
    if len(chosen) != 1:
        raise CrashTestError(f'here the code runs once, on one medium: media="memory" or media="file", not {media!r}')
    return chosen[0]


def _whole(what: str, value: Any) -> int:
    __tracebackhide__ = True
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise CrashTestError(f"{what} is a whole number, not {value!r:.60}")
    return int(value.__index__())
