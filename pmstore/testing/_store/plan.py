"""The plan of an exploration: the arguments that every way to explore takes, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.check import Check, require_check
from pmstore.testing._store.engine import KINDS, Options
from pmstore.testing._store.recording import MEDIA

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MEDIA", "CrashOptions", "Plan", "StateOptions", "one_medium", "plan", "shows_options"]

SECTORS = (512, 4096)

Function = TypeVar("Function", bound=Callable[..., Any])


class StateOptions(TypedDict, total=False):
    """The options that choose crash states; `CrashExplorer.run` explains them."""

    budget: int | None
    seed: int | None
    depth: int
    sector: int
    eadr: bool
    kinds: Iterable[str] | None


class CrashOptions(StateOptions, total=False):
    """All options of an exploration; `CrashExplorer.run` explains them."""

    check: Check | None
    media: Sequence[str] | str


DEFAULTS: CrashOptions = {
    "check": None,
    "budget": None,
    "seed": None,
    "media": MEDIA,
    "depth": 1,
    "sector": 512,
    "eadr": False,
    "kinds": None,
}


class Plan(NamedTuple):
    """The plan of an exploration, checked."""

    check: Check | None
    media: tuple[str, ...]
    options: Options


def shows_options(function: Function) -> Function:
    """Make `help` and `inspect.signature` list the options that a function takes as ``**options``, with defaults."""
    types = {**StateOptions.__annotations__, **CrashOptions.__annotations__}
    own = inspect.signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=getattr(types[name], "__forward_arg__", types[name]),
        )
        for name, default in DEFAULTS.items()
        if name not in own.parameters
    ]
    at = sum(p.kind is not p.KEYWORD_ONLY for p in kept)
    function.__signature__ = own.replace(parameters=[*kept[:at], *options, *kept[at:]])  # type: ignore[attr-defined]
    return function


def plan(caller: str, **options: Unpack[CrashOptions]) -> Plan:
    """The plan for the options of a function for users. Raises CrashTestError for a wrong value, and TypeError, which
    names the caller, for an unknown option."""
    __tracebackhide__ = True
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")
    given: CrashOptions = {**DEFAULTS, **options}
    check, media, kinds = given["check"], given["media"], given["kinds"]
    depth, sector = given["depth"], given["sector"]
    require_check(check)
    budget = session.budget() if given["budget"] is None else _whole("budget", given["budget"])
    if budget < 1:
        raise CrashTestError(f"budget is how many crash states to evaluate on each medium, at least 1, not {budget}")
    seed = session.seed() if given["seed"] is None else _whole("seed", given["seed"])
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
    return Plan(check, chosen, Options(budget, seed, int(depth), sector, bool(given["eadr"]), wanted))


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
