"""What can be wrong with a workload, said before anything is explored."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from pmstore.testing import _describe
from pmstore.testing._check import callable_text
from pmstore.testing._errors import CrashTestError
from pmstore.testing._recording import Recording

__all__ = ["passes", "raised", "require_commits", "require_lives"]


def require_lives(lives: Sequence[Any]) -> None:
    if not lives:
        raise CrashTestError("nothing to run: give a function of the open store")
    for life in lives:
        if not callable(life):
            raise CrashTestError(f"a life is a function of the open store, not {life!r:.80}")
        if inspect.iscoroutinefunction(life) or inspect.isgeneratorfunction(life) or inspect.isasyncgenfunction(life):
            raise CrashTestError(
                f"{callable_text(life)} is async or has a yield: nothing of it would run. Make it a plain function"
            )
        try:
            inspect.signature(life).bind("store")
        except TypeError:
            raise CrashTestError(
                f"{callable_text(life)}{inspect.signature(life)} can't be called with the open store alone: give it "
                "one parameter; code that opens the store itself goes into `with explorer.recording(check) as path:`"
            ) from None
        except ValueError:  # a builtin
            pass


def require_commits(recording: Recording) -> None:
    if all(commit.acknowledged is None for commit in _describe.commits(recording)):
        raise CrashTestError(
            "the workload made no commit, so that there is nothing a crash could break: change something inside `with "
            "store.transaction():`, or call store.commit()"
        )


def passes(error: Exception) -> bool:
    """What is not about the workload: errors of this package, and what hypothesis uses to steer."""
    return isinstance(error, CrashTestError) or type(error).__module__.startswith("hypothesis.")


def raised(error: Exception, lives: Sequence[Any]) -> Exception:
    if passes(error):
        return error
    return CrashTestError(
        f"the workload {', '.join(map(callable_text, lives))} raised {type(error).__name__}, without any crash: {error}"
    )
