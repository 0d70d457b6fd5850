"""Record, explore, shrink, keep: what the command and the fixture for files share."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgpack

from pmstore.testing import _session
from pmstore.testing._errors import CrashFailure, CrashTestError
from pmstore.testing._files_describe import describe_failure, describe_tally
from pmstore.testing._files_explore import Found, Options, State, Tally, explore, prove_check, shrink
from pmstore.testing._files_judge import Check, Judge, write_image
from pmstore.testing._files_model import Model
from pmstore.testing._files_recording import MAGIC, Recording, load, save

__all__ = ["FilesReport", "is_files_replay", "judge_recording", "keep", "load_kept", "show_progress"]

REPLAY = "replay"


class FilesReport(NamedTuple):
    """How an exploration went that found nothing.

    Attributes
    ----------
    recording : Recording
        What the program did.
    tally : Tally
        How many crash states were judged, and whether these were all.
    remark : str or None
        What is odd about the check.
    """

    recording: Recording
    tally: Tally
    remark: str | None

    def __str__(self) -> str:
        text = f"no failure: {describe_tally(self.tally)}"
        return f"{text}\nremark: {self.remark}" if self.remark else text


def judge_recording(
    recording: Recording,
    check: Check,
    options: Options,
    *,
    replay: Callable[[Path], str],
    target: Path | None = None,
    check_text: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> FilesReport:
    """Explores the crash states of a recording.

    replay: the line that replays a failure, of the file that it is kept in. target: the directory for it.

    Raises
    ------
    CrashFailure
        The check did not accept a state; the text describes it.
    CrashTestError
        The check does not even accept the finished files, or nothing was recorded.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    options = options.verified()
    if all(event.kind in ("said", "sync") for event in recording.events):
        raise CrashTestError(
            "the program changed nothing below the directory: does its command name it? {dir} stands for it"
        )
    model = Model(recording, options.filesystem, options.sector, options.stale)
    with Judge(check) as judge:
        remark = prove_check(model, judge)
        tally, found = explore(model, judge, options, progress)
        if found is None:
            return FilesReport(recording, tally, remark)
        found = shrink(model, judge, found)
    folder = keep(model, found, options, target, check_text)
    text = (
        f"{describe_failure(model, found)}\n"
        f"  found: state {tally.judged}, of kind {found.state.kind!r}, in the {options.filesystem} model\n"
        f"  image: {folder / 'image'}\n"
        f"  replay: {replay(folder / REPLAY)}"
    )
    raise CrashFailure(text, path=os.fspath(folder / REPLAY), report=tally)


def keep(model: Model, found: Found, options: Options, target: Path | None, check_text: str) -> Path:
    """Writes a failure: the image as a directory, what was said, and the file that replays it."""
    state = found.state
    name = hashlib.blake2b(msgpack.packb([sorted(state.lost), state.point, found.text]), digest_size=4).hexdigest()
    folder = target if target is not None else _session.directory() / f"files-{name}"
    _fill(model, state, folder)
    save(
        folder / REPLAY,
        model.recording,
        state=[state.point, sorted(state.lost), state.kind],
        options=list(options),
        text=found.text,
        check=check_text,
    )
    return folder


def _fill(model: Model, state: State, folder: Path) -> None:
    shutil.rmtree(folder / "image", ignore_errors=True)
    (folder / "image").mkdir(parents=True)
    write_image(model.image(state.point, state.lost), folder / "image")
    (folder / "said").write_bytes(model.said(state.point))


def is_files_replay(path: Path) -> bool:
    """Whether a file is one that `keep` wrote."""
    try:
        with path.open("rb") as file:
            return MAGIC.encode() in file.read(64)
    except OSError:
        return False


class Kept(NamedTuple):
    """A failure that was kept."""

    model: Model
    found: Found
    check: str
    """The command, or empty if it was a function."""


def load_kept(path: Path) -> Kept:
    """Reads what `keep` wrote, and writes the image again."""
    recording, more = load(path)
    try:
        point, lost, kind = more["state"]
        options = Options(*more["options"]).verified()
        found = Found(State(point, frozenset(lost), kind), more["text"])
        check = more["check"]
    except (KeyError, TypeError, ValueError) as error:
        raise CrashTestError(f"{path} holds no failure to replay: {error!r}") from None
    model = Model(recording, options.filesystem, options.sector, options.stale)
    if point >= model.points or any(n >= len(model.pieces) for n in lost):
        raise CrashTestError(f"{path} is damaged: its crash is not one of its recording")
    _fill(model, found.state, path.parent)
    return Kept(model, found, check)


def show_progress(judged: int, budget: int) -> None:
    """One line on a terminal, written over again."""
    if sys.stderr.isatty() and (judged % 10 == 0 or judged == budget):
        print(f"\r{judged} of at most {budget} crash states", end="\r", file=sys.stderr, flush=True)
