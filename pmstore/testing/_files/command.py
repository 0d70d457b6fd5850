"""``pmstore crash run --files``, and the replay of its failures."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._base.progress import in_command
from pmstore.testing._files.apart import ApartCheck
from pmstore.testing._files.describe import describe_event, describe_failure
from pmstore.testing._files.evaluator import Check, CommandCheck, FunctionCheck
from pmstore.testing._files.explore import FILESYSTEMS, SECTORS, Options
from pmstore.testing._files.keep import Kept, load_kept, require_free
from pmstore.testing._files.record import record
from pmstore.testing._files.run import evaluate_again, evaluate_recording
from pmstore.testing._store.failure import CheckPlace

__all__ = ["add_arguments", "refuse_open", "replay_files", "run_files"]

PASSED, FAILED, UNUSABLE = 0, 1, 2
TIMEOUT = 60.0
ONLY_STORES = ("--depth", "--store", "--media", "--kinds", "--eadr")


class OnlyStores(argparse.Action):
    """An option that `crash run` accepts only without --files."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> NoReturn:
        option = rest[-1]
        more = " (--store and --files exclude each other)" if option == "--store" else ""
        parser.error(f"{option} is only for stores, not for --files{more}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pmstore crash run --files``. The program itself is ``chosen.program``, a list."""
    add = parser.add_argument
    add("--files", metavar="DIR", required=True, help="the directory whose files are recorded")
    add(
        "--check",
        metavar="COMMAND",
        help="exits with 0 if the crash image in {dir} is sound; {said}: a file with what the program had printed by "
        "then",
    )
    add("--filesystem", choices=FILESYSTEMS, default="posix", help="what to rely on: POSIX alone (default), or ext4")
    add("--sector", type=int, choices=SECTORS, default=512, help="bytes that a disk writes whole (default 512)")
    add("--stale", metavar="SEED", type=int, default=0, help="space never written holds anything, instead of zeros")
    add("--budget", metavar="N", type=int, default=1000, help="distinct crash states to evaluate (default 1000)")
    add("--seed", metavar="N", type=int, default=1, help="of the sampling (default 1)")
    add(
        "--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="checks at once (default: one per processor)"
    )
    add("--timeout", metavar="SECONDS", type=float, default=TIMEOUT, help="of one check (default 60)")
    add("--allow-threads", action="store_true", help="explore the order that threads had in this run")
    add("--keep", metavar="PATH", help="where a failure is kept (default .pmstore-crash/…)")
    add("--quiet", action="store_true", help="show no progress")
    add("--list", action="store_true", help="print what was recorded, and evaluate nothing")
    for option in ONLY_STORES:
        add(option, action=OnlyStores, nargs="?", help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help="-- and the command that saves; {dir} stands for DIR")


def run_files(chosen: argparse.Namespace) -> int:
    """Runs the command. Returns 0 if no crash state failed, 1 if one did. Raises CrashTestError on misuse."""
    words = chosen.program[1:] if chosen.program[:1] == ["--"] else chosen.program
    program = [word.replace("{dir}", chosen.files) for word in words]
    if not program:
        raise CrashTestError(
            "there is no program to record: pmstore crash run --files DIR --check 'python check.py {dir}' -- "
            "python save.py {dir}"
        )
    options = Options(
        filesystem=chosen.filesystem,
        sector=chosen.sector,
        stale=chosen.stale,
        budget=chosen.budget,
        seed=chosen.seed,
        jobs=chosen.jobs,
    ).verified()
    if not chosen.list and not chosen.check:
        raise CrashTestError("--check is missing: a command that exits with 0 if what is in {dir} is sound")
    target = Path(chosen.keep) if chosen.keep else None
    if target is not None:
        require_free(target)
    check = None if chosen.list else CommandCheck(chosen.check, chosen.timeout)
    with _terminated():
        recording = record(program, Path(chosen.files), allow_threads=chosen.allow_threads, echo=True)
        if check is None:
            for number, event in enumerate(recording.events, 1):
                print(f"{number:5} {describe_event(event)}")
            return PASSED
        try:
            with in_command(chosen.quiet):
                report = evaluate_recording(
                    recording,
                    check,
                    options,
                    lines=lambda folder: [f"replay: python -m pmstore crash replay {shlex.quote(os.fspath(folder))}"],
                    nothing="does its command name it? {dir} stands for it",
                    target=target,
                    check_text=chosen.check,
                )
        except CrashFailure as failure:
            print(f"FAILED: {failure}")
            return FAILED
    print(report)
    return PASSED


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM raises, as ^C does, so that children end and temporary directories are removed."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def replay_files(path: Path, check: str | None = None, timeout: float = TIMEOUT) -> int:
    """Writes the image of a kept failure again and runs its check, or another.

    Returns 0 if the check accepts it now, 1 if it still fails, 2 if no check could be run.
    """
    kept = load_kept(path)
    folder = path if path.is_dir() else path.parent
    try:
        evaluating, name = _check_of(kept, check, timeout)
    except CrashTestError as error:
        print(describe_failure(kept.model, kept.found))
        print(f"  image: {folder / 'image'}")
        print(f"pmstore: nothing was evaluated: {error}", file=sys.stderr)
        return UNUSABLE
    with _terminated():
        failure = evaluate_again(path, evaluating)
    if failure is not None:
        print(f"it still fails: {failure}")
        return FAILED
    print(f"the check accepts it now: {name}")
    print("It is of the run that failed: if the program was changed since, run the crash test again")
    return PASSED


def _check_of(kept: Kept, check: str | None, timeout: float) -> tuple[Check, str]:
    command = check or kept.check
    if command:
        return CommandCheck(command, timeout), command
    if not kept.place:
        raise CrashTestError(
            "its check is a Python function that can't be imported: crash_files.replay(path, check) runs it, "
            "--check COMMAND another one"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    place = CheckPlace(*kept.place)
    function: Callable[..., Any] = place.load()
    return ApartCheck(FunctionCheck(function)), str(place)


def refuse_open(path: Path) -> NoReturn:
    """The error of ``crash open`` for a failure of files."""
    folder = path if path.is_dir() else path.parent
    raise CrashTestError(
        f"{path} is a recording of files, and no store: what the crash left is in {folder / 'image'}, and "
        "`pmstore crash run --files … --list` prints the events"
    )
