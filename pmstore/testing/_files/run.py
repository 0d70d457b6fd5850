"""Explore, shrink, keep, report: the common part of the command and the fixture for files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pmstore._display import count_text
from pmstore.testing._base import progress as _progress
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._files.describe import describe_failure, describe_tally
from pmstore.testing._files.evaluator import Check, Evaluator
from pmstore.testing._files.explore import Found, Options, Tally, explore, prove_check, shrink
from pmstore.testing._files.keep import REPLAY, keep, load_kept
from pmstore.testing._files.model import Model
from pmstore.testing._files.recording import Recording

__all__ = ["FilesReport", "evaluate_again", "evaluate_recording"]


class FilesReport(NamedTuple):
    """The result of an exploration that found no failure.

    Attributes
    ----------
    recording : Recording
        The operations of the program.
    tally : Tally
        The number of crash states that were evaluated, and whether these were all.
    remark : str or None
        A doubt about the check.
    """

    recording: Recording
    tally: Tally
    remark: str | None

    def __str__(self) -> str:
        text = f"no failure: {describe_tally(self.tally)}"
        return f"{text}\nremark: {self.remark}" if self.remark else text


def evaluate_recording(
    recording: Recording,
    check: Check,
    options: Options,
    *,
    lines: Callable[[Path], list[str]],
    nothing: str,
    target: Path | None = None,
    check_text: str = "",
    place: list[str] | None = None,
) -> FilesReport:
    """Explores the crash states of a recording.

    lines: returns the next steps after a failure, for the directory that it is kept in. nothing: advice if the program
    changed nothing. target: the directory for a failure. check_text, place: the check, as a command or a function's
    place.

    Raises
    ------
    CrashFailure
        The check did not accept a state; the text describes it.
    CrashTestError
        The check does not even accept the finished files, or nothing was recorded.
    """
    options = options.verified()
    if all(event.kind in ("said", "sync") for event in recording.events):
        raise CrashTestError(f"the program changed nothing below the directory: {nothing}")
    model = Model(recording, options.filesystem, options.sector, options.stale)
    found: Found | None = None
    shown = _progress.terminal("crash states")
    progress = _progress.Counted(shown)
    with contextlib.ExitStack() as cleanup:
        evaluate = cleanup.enter_context(Evaluator(check))
        if shown is not None:
            cleanup.callback(shown.close)
        remark = prove_check(model, evaluate)
        try:
            tally, found = explore(model, evaluate, options, progress)
            if found is None:
                return FilesReport(recording, tally, remark)
            if shown is not None:
                shown.close()
            shrinking = _progress.terminal("fewer losses with the same failure")
            if shrinking is not None:
                cleanup.callback(shrinking.close)
            found = shrink(model, evaluate, found, shrinking)
        except (KeyboardInterrupt, SystemExit):
            state = "none failed so far" if found is None else f"the last one failed: {found.text}"
            if shown is not None:
                shown.close()
            print(f"interrupted after {count_text(progress.done, 'state')}; {state}", file=sys.stderr)
            raise
    text = (
        f"{describe_failure(model, found)}\n"
        f"  found: state {tally.evaluated}, of kind {found.state.kind!r}, in the {options.filesystem} model"
    )
    try:
        folder = keep(model, found, options, target, check_text, place)
    except OSError as error:
        where = f" in {target}" if target is not None else ""
        raise CrashFailure(f"{text}\n  not kept{where}: {error}", report=tally) from None
    near = Path(os.path.relpath(folder)) if folder.absolute().is_relative_to(Path.cwd()) else folder
    told = [f"image: {near / 'image'}", *lines(near)]
    raise CrashFailure(
        "\n".join([text, *(f"  {line}" for line in told)]), path=os.fspath(folder / REPLAY), report=tally
    )


def evaluate_again(path: Path, check: Check) -> CrashFailure | None:
    """Calls a check for a failure that was kept, and returns its complaint, or None."""
    kept = load_kept(path)
    state = kept.found.state
    with Evaluator(check) as evaluate:
        text = evaluate(kept.model.image(state.point, state.lost), kept.model.said(state.point))
    if text is None:
        return None
    folder = path if path.is_dir() else path.parent
    return CrashFailure(
        f"{describe_failure(kept.model, kept.found._replace(text=text))}\n  image: {folder / 'image'}",
        path=os.fspath(folder / REPLAY),
    )
