"""`crash_test`: a function of an open store becomes a test of its crashes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import pmstore
from pmstore.testing import _session
from pmstore.testing._check import Check, callable_text, require_check
from pmstore.testing._errors import CrashTestError
from pmstore.testing._explorer import MEDIA, CrashExplorer, plan

__all__ = ["crash_test"]

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def crash_test(function: Function, /) -> Callable[..., None]: ...
@overload
def crash_test(
    *,
    check: Check | None = None,
    budget: int | None = None,
    seed: int | None = None,
    media: Sequence[str] | str = MEDIA,
    depth: int = 1,
    sector: int = 512,
    eadr: bool = False,
    kinds: Iterable[str] | None = None,
) -> Callable[[Function], Callable[..., None]]: ...
def crash_test(
    function: Any = None,
    /,
    *,
    check: Check | None = None,
    budget: int | None = None,
    seed: int | None = None,
    media: Sequence[str] | str = MEDIA,
    depth: int = 1,
    sector: int = 512,
    eadr: bool = False,
    kinds: Iterable[str] | None = None,
) -> Any:
    """A decorator for a function whose first parameter is `store`: calling it, without that parameter, explores the
    crashes of what it does::

        def conserved(store):
            assert store.get("a", 100) + store.get("b", 0) == 100

        @pmstore.testing.crash_test(check=conserved)
        def test_transfer(store):
            with store.transaction():
                store["a"] = 70
                store["b"] = 30

    Further parameters stay what they were: fixtures of pytest, arguments of hypothesis (whose ``@given`` stands above
    ``@crash_test``, and then shrinks the workload). Methods of test classes work too. The function runs several times,
    on a new store each time, and has to do the same each time.

    The parameters are those of `CrashExplorer.run`, and so are the errors: CrashFailure for a crash that loses data,
    CrashTestError for a test that can't be run as it stands.
    """

    def decorate(function: Any) -> Any:
        method = _require_workload(function)
        require_check(check)

        def explore(*arguments: Any, **named: Any) -> None:
            __tracebackhide__ = True
            before, after = (arguments[:1], arguments[1:]) if method else ((), arguments)

            def workload(store: pmstore.Store) -> None:
                function(*before, store, *after, **named)

            workload.__qualname__ = callable_text(function)
            identity = _session.test_id()
            name = _session.test_name(identity) if identity else _session.function_name(function)
            with CrashExplorer(name) as explorer:
                explorer.run(
                    workload,
                    check=check,
                    budget=budget,
                    seed=seed,
                    media=media,
                    depth=depth,
                    sector=sector,
                    eadr=eadr,
                    kinds=kinds,
                )

        explored: Any = functools.wraps(function)(_in_place_of(function, explore))
        # pytest and hypothesis ask for the parameters, and unwrap what has __wrapped__.
        signature = inspect.signature(function)
        left = [p for p in signature.parameters.values() if p.name != "store"]
        explored.__signature__ = signature.replace(parameters=left, return_annotation=None)
        explored.__annotations__ = {k: v for k, v in function.__annotations__.items() if k not in ("store", "return")}
        del explored.__wrapped__
        return explored

    if function is not None:
        if not callable(function):
            raise CrashTestError(f"crash_test takes its arguments by name, as check=…, not {function!r:.60}")
        return decorate(function)
    plan(check, budget, seed, media, depth, sector, eadr, kinds)  # what is wrong is said where it stands
    return decorate


def _in_place_of(function: Any, call: Callable[..., None]) -> Any:
    """A function that makes a call, where another one stands: tracebacks show that one's lines."""
    code, names = function.__code__, {"call": call}
    lines = "\n" * (code.co_firstlineno - 1) + "def explored(*arguments, **named): return call(*arguments, **named)"
    exec(compile(lines, code.co_filename, "exec"), names)
    return names["explored"]


def _require_workload(function: Any) -> bool:
    """Whether the function is a method. CrashTestError if it can't be a workload."""
    if not inspect.isfunction(function):
        raise CrashTestError(f"crash_test is for functions, not for {function!r:.80}")
    name = callable_text(function)
    if hasattr(function, "hypothesis") or hasattr(function, "is_hypothesis_test"):
        raise CrashTestError(
            f"{name}: put @given above @crash_test, so that each of its examples is explored (and @settings above both)"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise CrashTestError(f"{name} is async or has a yield: nothing of it would run. Make it a plain function")
    names = list(inspect.signature(function).parameters)
    method = names[:1] == ["self"]
    if names[method : method + 1] != ["store"]:
        raise CrashTestError(
            f"{name}{inspect.signature(function)}: the first parameter of a crash test is `store`, the open store that "
            "it is called with"
        )
    return method
