"""`crash_test`: turns a function of an open store into a test of its crashes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pmstore
from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._explorer import CrashExplorer, CrashOptions, plan, shows_options
from pmstore.testing._store.check import callable_text, require_check

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["crash_test"]

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def crash_test(function: Function, /) -> Callable[..., None]: ...
@overload
def crash_test(**options: Unpack[CrashOptions]) -> Callable[[Function], Callable[..., None]]: ...
@shows_options
def crash_test(function: Any = None, /, **options: Unpack[CrashOptions]) -> Any:
    """A decorator for a function whose first parameter is `store`. The decorated function is called without that
    parameter, and explores the crashes of the function::

        def conserved(store):
            assert store.get("a", 100) + store.get("b", 0) == 100

        @pmstore.testing.crash_test(check=conserved)
        def test_transfer(store):
            with store.transaction():
                store["a"] = 70
                store["b"] = 30

    Other parameters keep their meaning: fixtures of pytest, arguments of hypothesis. ``@given`` must be above
    ``@crash_test``, and then shrinks the workload. Methods of test classes work too. The function runs several times,
    each time on a new store, and must do the same each time.

    The parameters are those of `CrashExplorer.run`, and so are the errors: CrashFailure for a crash that loses data,
    CrashTestError for a test that is impossible in this form.
    """

    def decorate(function: Any) -> Any:
        method = _require_workload(function)
        require_check(options.get("check"))

        def explore(*arguments: Any, **named: Any) -> None:
            __tracebackhide__ = True
            before, after = (arguments[:1], arguments[1:]) if method else ((), arguments)

            def workload(store: pmstore.Store) -> None:
                function(*before, store, *after, **named)

            workload.__qualname__ = callable_text(function)
            identity = session.test_id()
            name = session.test_name(identity) if identity else session.function_name(function)
            with CrashExplorer(name) as explorer:
                explorer.run(workload, **options)

        explored: Any = functools.wraps(function)(_in_place_of(function, explore))
        # pytest and hypothesis read the parameters of the function in __wrapped__, if there is one.
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
    plan("crash_test", **options)  # reports wrong arguments at the decorator's line
    return decorate


def _in_place_of(function: Any, call: Callable[..., None]) -> Any:
    """A function that makes a call in place of another function: tracebacks show the other function's lines."""
    code, names = function.__code__, {"call": call}
    lines = "\n" * (code.co_firstlineno - 1) + "def explored(*arguments, **named): return call(*arguments, **named)"
    exec(compile(lines, code.co_filename, "exec"), names)
    return names["explored"]


def _require_workload(function: Any) -> bool:
    """Whether the function is a method. Raises CrashTestError if it can't be a workload."""
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
