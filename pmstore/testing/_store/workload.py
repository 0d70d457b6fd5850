"""Errors of a workload, which are reported before anything is explored."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pmstore
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._store import describe
from pmstore.testing._store.check import callable_text
from pmstore.testing._store.recording import Recording

__all__ = ["passes", "raised", "require_change", "require_commits", "require_runs"]


def require_runs(runs: Sequence[Any]) -> None:
    __tracebackhide__ = True
    if not runs:
        raise CrashTestError("nothing to run: give a function of the open store")
    for run in runs:
        if not callable(run):
            raise CrashTestError(f"a run is a function of the open store, not {run!r:.80}")
        if inspect.iscoroutinefunction(run) or inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run):
            raise CrashTestError(
                f"{callable_text(run)} is async or has a yield: nothing of it would run. Make it a plain function"
            )
        try:
            inspect.signature(run).bind("store")
        except TypeError:
            raise CrashTestError(
                f"{callable_text(run)}{inspect.signature(run)} can't be called with the open store alone: give it "
                "one parameter; code that opens the store itself goes into `with explorer.recording(check) as path:`"
            ) from None
        except ValueError:  # a builtin has no signature
            pass


def require_change(run: Any, store: pmstore.Store, sequence: int) -> None:
    """Raises CrashTestError if a run that began at a commit left the store unchanged: its function may be meant as
    the check."""
    if store.closed or store.in_transaction or store.sequence != sequence:
        return
    pending = describe.contents(store)
    store.rollback()
    committed = describe.contents(store)
    if pending.keys() == committed.keys() and all(describe.equal(pending[name], committed[name]) for name in pending):
        name = callable_text(run)
        raise CrashTestError(
            f"{name} changed nothing, and each function here is a run of its own, after the one before: if it "
            f"is the check, write check={name}; otherwise leave it out"
        )


def require_commits(recording: Recording) -> None:
    __tracebackhide__ = True
    if all(commit.acknowledged is None for commit in describe.commits(recording)):
        raise CrashTestError(
            "the workload made no commit, so that there is nothing a crash could break: change something inside `with "
            "store.transaction():`, or call store.commit()"
        )


def passes(error: BaseException) -> bool:
    """Exceptions that are not the workload's fault: errors of this package, and hypothesis' own control flow."""
    return isinstance(error, CrashTestError) or type(error).__module__.startswith("hypothesis.")


def raised(error: BaseException, runs: Sequence[Any]) -> BaseException:
    if passes(error):
        return error
    names = " ".join(["the workload", ", ".join(map(callable_text, runs))]).strip()
    return CrashTestError(f"{names} raised {type(error).__name__}, without any crash: {error}")
