"""The user's check: its arguments, and its result."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pmstore.testing._base.commandline import need_asserts
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store.describe import Sandbox

__all__ = ["Check", "Crash", "CheckRunner", "callable_text", "refused_already", "require_check"]

Check = Callable[..., Any]

MOST_LINES = 12
MOST_WIDTH = 200  # characters of a line
PACKAGE = os.path.dirname(__file__) + os.sep


class Crash(NamedTuple):
    """The crash, as described to a check.

    Attributes
    ----------
    acknowledged : int
        The last commit that had to survive. The store must be at this commit or a later one. It is the last one that
        had returned; with ``durability="async"``, for a crash that loses something, the last one that was durable.
    started : int
        The last commit that had begun. The store can't be at a later one.
    sequence : int
        The commit that the store was recovered to.
    when : str
        The moment of the crash in words.
    """

    acknowledged: int
    started: int
    sequence: int
    when: str


def callable_text(function: Any) -> str:
    """The name of a function in a message."""
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function))


def require_check(check: Any) -> None:
    """Raises CrashTestError if the argument can't be a check."""
    __tracebackhide__ = True
    if check is None:
        return
    if not callable(check):
        raise CrashTestError(
            f"check is a function that gets the recovered store, not {check!r:.80}"
            + (": pass the function itself, without calling it" if not isinstance(check, str) else "")
        )
    if inspect.iscoroutinefunction(check) or inspect.isgeneratorfunction(check):
        raise CrashTestError(
            f"the check {callable_text(check)} is async or has a yield: nothing of it would run, so make "
            "it a plain function"
        )
    wants_crash(check)
    command = getattr(getattr(check, "crash_check_place", None), "command", "")
    if not command:
        need_asserts()


def wants_crash(check: Check) -> bool:
    """Whether a check takes the crash as its second argument. Raises CrashTestError if it takes no store."""
    __tracebackhide__ = True
    try:
        signature = inspect.signature(check)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind("store")
    except TypeError:
        try:
            signature.bind("store", "crash")
        except TypeError:
            raise CrashTestError(
                f"the check {callable_text(check)}{signature} can't be called as check(store) or as check(store, crash)"
            ) from None
        return True
    second = list(signature.parameters.values())[1:2]
    return bool(second) and second[0].name == "crash" and second[0].kind is not inspect.Parameter.KEYWORD_ONLY


class CheckRunner:
    """Calls a check with the store in an image, and returns its complaint: None, or a sentence.

    error: the exception of the last call. Raises CrashTestError if the returned value shows that the function is no
    check.
    """

    def __init__(self, check: Check, medium: str, sandbox: Sandbox) -> None:
        require_check(check)
        self._check = check
        self._crash = wants_crash(check)
        self._medium = medium
        self._sandbox = sandbox
        self.error: BaseException | None = None

    def __call__(self, image: bytes, acknowledged: int, started: int) -> str | None:
        __tracebackhide__ = True
        self.error = None
        try:
            with self._sandbox.store(image, self._medium, "r+") as store:
                arguments: tuple[Any, ...] = (store,)
                if self._crash:
                    arguments += (Crash(acknowledged, started, store.sequence, when(acknowledged, started)),)
                answer = self._check(*arguments)
        except CrashTestError:
            raise
        except Exception as error:
            self.error = error
            return self._said(error)
        except SystemExit as error:
            status = "" if error.code is None else f"{error.code!r:.60}"
            raise CrashTestError(
                f"the check {callable_text(self._check)} called sys.exit({status}): it has to raise if something is "
                "wrong, and to return if not"
            ) from error
        except BaseException as error:  # pytest.fail raises no Exception
            if type(error).__name__ != "Failed":
                raise
            self.error = error
            return self._said(error)
        if answer is None or answer is True or (isinstance(answer, np.bool_) and answer):
            return None
        if isinstance(answer, bool | np.bool_):
            hint = "it has to raise: write `assert condition, what_is_wrong` rather than `return condition`"
        else:
            hint = "it has to raise if something is wrong, and to return None if not"
        raise CrashTestError(f"the check {callable_text(self._check)} returned {answer!r:.60}: {hint}")

    def _said(self, error: BaseException) -> str:
        frame = self._frame(error)
        text = str(error).strip()
        # The traceback shows pytest's explanation of an assertion.
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("+  ")]
        if not lines:
            source = linecache.getline(frame.filename, frame.lineno).strip() if frame and frame.lineno else ""
            lines = [source or type(error).__name__]
        if not isinstance(error, AssertionError) and type(error).__name__ != "Failed":
            lines[0] = f"{type(error).__name__}: {lines[0]}"
        lines = [_cut(line) for line in lines[:MOST_LINES]]
        if frame is not None and not frame.filename.startswith(PACKAGE):
            where = f"({_file(frame.filename)}:{frame.lineno})"
            if len(lines) == 1 or lines[1].startswith("assert "):  # pytest added it to a message
                lines[0] += f"  {where}"
            else:
                lines.append(where)
        return "\n".join(lines)

    def _frame(self, error: BaseException) -> traceback.FrameSummary | None:
        """The place in the check's own file where the exception was raised, directly or in a called function."""
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(inspect.unwrap(self._check), "__code__", None)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        return own[-1] if own else (frames[-1] if frames else None)


def _cut(line: str) -> str:
    return line if len(line) <= MOST_WIDTH else line[: MOST_WIDTH - 1] + "…"


def _file(path: str) -> str:
    return path.rpartition("/")[2]


def when(acknowledged: int, started: int) -> str:
    """The moment of a crash, in terms of commits."""
    if started > acknowledged:
        return f"after commit {started} began, before it was acknowledged"
    return f"after commit {acknowledged} was acknowledged" if acknowledged else "before the first commit began"


def refused_already(said: str, accident: str, what: str, origin: str, teller: str = "It said: ") -> CrashTestError:
    """The error if a check refuses a store before any accident. what: the store; origin: of a store, if it is wrong;
    teller: the words before `said`.
    """
    return CrashTestError(
        f"the check fails without any {accident}, on {what}: so the check is wrong, or the {origin}, and no {accident} "
        f"was tried. {teller}{said}"
    )


def hint(sequence: int | None, first: int) -> str:
    """A hint at a common mistake, or ""."""
    if sequence != first:
        return ""
    return (
        "the workload's first commit is not there: a check has to accept the store as it was before, as with "
        '`store.get("name", 0)` or `if "name" not in store: return`'
    )
