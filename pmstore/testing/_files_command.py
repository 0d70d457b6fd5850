"""``pmstore crash run --files``, and the replay of what it found."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from pmstore.testing._errors import CrashFailure, CrashTestError
from pmstore.testing._files_describe import describe_event, describe_failure
from pmstore.testing._files_explore import FILESYSTEMS, SECTORS, Options
from pmstore.testing._files_judge import CommandCheck, Judge
from pmstore.testing._files_record import record
from pmstore.testing._files_run import judge_recording, load_kept, show_progress

__all__ = ["add_arguments", "main", "replay_files", "run_files"]

PASSED, FAILED, UNUSABLE = 0, 1, 2
TIMEOUT = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pmstore crash run --files``. The program itself is ``chosen.program``, a list."""
    add = parser.add_argument
    add("--files", metavar="DIR", required=True, help="the directory whose files are recorded")
    add(
        "--check", metavar="COMMAND", help="exits with 0 if the crash image in {dir} is sound; {said}: what was printed"
    )
    add("--filesystem", choices=FILESYSTEMS, default="posix", help="what to rely on: POSIX alone (default), or ext4")
    add("--sector", type=int, choices=SECTORS, default=512, help="bytes that a disk writes whole (default 512)")
    add("--stale", metavar="SEED", type=int, default=0, help="space never written holds anything, instead of zeros")
    add("--budget", metavar="N", type=int, default=1000, help="distinct crash states to judge (default 1000)")
    add("--seed", metavar="N", type=int, default=1, help="of the sampling (default 1)")
    add(
        "--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="checks at once (default: one per processor)"
    )
    add("--timeout", metavar="SECONDS", type=float, default=TIMEOUT, help="of one check (default 60)")
    add("--allow-threads", action="store_true", help="explore the order that threads had in this run")
    add("--keep", metavar="PATH", help="where a failure is kept (default .pmstore-crash/…)")
    add("--list", action="store_true", help="print what was recorded, and judge nothing")
    add("program", nargs=argparse.REMAINDER, help="-- and the command that saves; {dir} stands for DIR")


def run_files(chosen: argparse.Namespace) -> int:
    """Runs the command. Returns 0 if no crash state failed, 1 if one did; raises CrashTestError on misuse."""
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
    check = None if chosen.list else CommandCheck(chosen.check, chosen.timeout)
    recording = record(program, Path(chosen.files), allow_threads=chosen.allow_threads, echo=True)
    if check is None:
        for number, event in enumerate(recording.events, 1):
            print(f"{number:5} {describe_event(event)}")
        return PASSED
    try:
        report = judge_recording(
            recording,
            check,
            options,
            replay=lambda path: f"python -m pmstore crash replay {shlex.quote(os.fspath(path))}",
            target=Path(chosen.keep) if chosen.keep else None,
            check_text=chosen.check,
            progress=show_progress,
        )
    except CrashFailure as failure:
        print(f"FAILED: {failure}")
        return FAILED
    print(report)
    return PASSED


def replay_files(path: Path, check: str | None = None, timeout: float = TIMEOUT) -> int:
    """Writes the image of a kept failure again and runs its check, or another. Returns 1 if it still fails."""
    kept = load_kept(path)
    command = check or kept.check
    print(describe_failure(kept.model, kept.found))
    print(f"  image: {path.parent / 'image'}")
    if not command:
        print("  its check was a Python function: crash_files.replay(path, check) runs it, --check COMMAND another one")
        return PASSED
    state = kept.found.state
    with Judge(CommandCheck(command, timeout)) as judge:
        text = judge(kept.model.image(state.point, state.lost), kept.model.said(state.point))
    print(f"the check accepts it: {command}" if text is None else f"it still fails: {text}")
    return PASSED if text is None else FAILED


def main(words: list[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(prog="pmstore crash run", description="What crashes leave of a program's files.")
    add_arguments(parser)
    try:
        return run_files(parser.parse_args(words))
    except CrashTestError as error:
        print(f"pmstore: {error}", file=sys.stderr)
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
