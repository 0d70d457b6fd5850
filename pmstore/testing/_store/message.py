"""The message for a crash that was found: the events, the losses, and the command that replays it."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

from pmstore.testing._base import session
from pmstore.testing._store import describe as _describe
from pmstore.testing._store import engine
from pmstore.testing._store.check import CheckRunner, hint
from pmstore.testing._store.describe import Sandbox, States
from pmstore.testing._store.engine import Found, Options
from pmstore.testing._store.places import file_map, lost_text
from pmstore.testing._store.recording import Recording

__all__ = ["AGAIN", "commands", "describe", "shown_path"]

MOST_PIECES = 8
AGAIN = "  again:  "


def describe(
    recording: Recording, found: Found, options: Options, sandbox: Sandbox, runner: CheckRunner | None
) -> list[str]:
    """The failure, in lines."""
    schedule, verdict = found
    states = States(recording, options, sandbox)
    image = engine.image(recording, schedule, options)
    state = _describe.read(image, recording.medium, sandbox) if verdict.problem != "open" else None
    # Commits made between two crashes are in no recording that could be compared with.
    until = max((n for n, end in recording.ends().items() if end <= schedule.event), default=0)
    known_here = schedule.then is None or (verdict.sequence is not None and verdict.sequence <= until)
    said = _describe.verdict_text(verdict, state if known_here else None, states)
    lines = [f"{_describe.when_text(recording, schedule, verdict)}: {said[0]}"]
    lines += [f"    {line}" for line in said[1:]]
    advice = ""
    if runner is not None and verdict.problem == "check":
        advice = hint(verdict.sequence, min(recording.states))
        if advice:
            lines.append(f"  hint: {advice}")
    if state is not None and verdict.sequence is not None:
        others = [states[n] for n in states if known_here and n in (verdict.sequence - 1, verdict.sequence + 1)]
        lines.append(
            f"  the store recovered to commit {verdict.sequence} (acknowledged {verdict.acknowledged}, begun "
            f"{verdict.started}): {_describe.contents_text(state, others)}"
        )
    known = [states.image(n) for n in dict.fromkeys((verdict.acknowledged, verdict.started)) if n is not None]
    places = file_map([recording.base, *(i for i in known if i is not None)], recording.medium, sandbox)
    losses = [lost_text(level, recording.medium, options.sector, places) for level in schedule.levels()]
    if not any(losses):
        lines.append(f"  on {recording.medium}, nothing that was written is lost: the moment alone does it")
        between = verdict.sequence == verdict.started == verdict.acknowledged
        if verdict.problem == "check" and not advice and between:
            lines.append(
                f"  hint: commit {verdict.sequence} alone leaves this; what belongs together has to change in one "
                "`with store.transaction():`"
            )
    for number, lost in enumerate(losses, 1):
        if lost:
            which = "" if len(losses) == 1 else f" by crash {number}"
            lines += _indented(f"  on {recording.medium}, lost{which}: ", lost)
    if any(level.stale for level in schedule.levels()):
        lines.append("  space that was never written holds other bytes than zeros there")
    return lines


def _indented(first: str, lost: list[str]) -> list[str]:
    shown = lost[:MOST_PIECES]
    if len(lost) > len(shown):
        shown.append(f"and {len(lost) - len(shown)} more pieces")
    return [f"{' ' * len(first) if i else first}{line}" for i, line in enumerate(shown)]


def commands(file: Path | None, options: Options) -> list[str]:
    """The next steps. file: the failure file, if it could be written."""
    lines = []
    if file is not None:
        lines += [
            f"  replay: python -m pmstore crash replay {shown_path(file)}",
            f"  look:   python -m pmstore ls -l {shown_path(file.with_suffix('.pm'))}",
        ]
    again = session.test_line(options.budget, options.seed)
    return [*lines, f"{AGAIN}{again}"] if again else lines


def shown_path(path: Path) -> str:
    """The path in shell notation; relative to the user's directory if it is below that."""
    whole = path.resolve()
    with contextlib.suppress(ValueError):
        whole = whole.relative_to(session.start().resolve())
    return shlex.quote(os.fspath(whole))
