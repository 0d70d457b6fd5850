"""``python -m pmstore crash run|replay|open``: crash tests of what is no test, and a look at the crashes found.

Light to import: the explorer is loaded by the commands.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_parser"]

FINE, FOUND, FAILED = 0, 1, 2

EXIT_STATUS = """\
exit status:
  0  no crash was found that loses or mixes data, or that the check refuses
  1  one was found; for replay: the state is still wrong
  2  the workload, the check or the arguments are wrong: nothing is said about crashes
"""

RUN_EXAMPLES = """\
examples:
  pmstore crash run --check bank:conserved bank.py:transfer
  pmstore crash run --check 'python check.py {store}' --budget 5000 bank.py:transfer
  pmstore crash run --store fit.pm --check checks:sound -- python fit.py

Files that have nothing to do with a store: pmstore crash run --files DIR --help

"""


def add_parser(commands: Any, words: Sequence[str]) -> None:
    """The ``crash`` command and its own, for the parser of ``_cli``.

    words: the arguments; ``run`` is two commands, and with ``--files`` among its options that for any program's files.
    """
    text = "find the crashes that a program does not survive"
    crash = commands.add_parser(
        "crash",
        help=text,
        description=text[0].upper() + text[1:] + ". docs/crash-testing.md is the tutorial.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = crash.add_subparsers(title="commands", required=True, metavar="COMMAND")
    own = words[: words.index("--")] if "--" in words else words
    if any(word.partition("=")[0] == "--files" for word in own) and _has_files():
        files: Any = importlib.import_module("pmstore.testing._files_command")
        run = _add(inner, "run", files.run_files, "record what a program does to files, and explore its crashes", "")
        files.add_arguments(run)
    else:
        _add_run(inner)
    replay = _add(inner, "replay", _replay, "judge a crash that was found before, again", "")
    replay.add_argument("file", metavar="FILE", help="a failure file, such as .pmstore-crash/test_transfer.crash")
    replay.add_argument("--check", metavar="CHECK", help="instead of the check that the file names")
    look = _add(inner, "open", _open, "show the store as a crash at some moment would leave it", "")
    look.add_argument("file", metavar="FILE", help="a failure file")
    look.add_argument(
        "--event", type=int, metavar="N", help="crash when N events have happened; unless given, the crash of the file"
    )
    look.add_argument("--commit", type=int, metavar="N", help="crash when commit N was acknowledged, with nothing lost")
    look.add_argument("--events", action="store_true", help="list the moments between which the run can be crashed")
    look.add_argument("--export", metavar="OUT", help="write the store there too")


def _add(commands: Any, name: str, command: Callable[..., int], text: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples + EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_guarded(command), path="crash")
    return parser


def _add_run(commands: Any) -> None:
    run = _add(commands, "run", _run, "record a workload, and explore its crashes", RUN_EXAMPLES)
    run.add_argument(
        "workload",
        metavar="SCRIPT.py:FUNCTION",
        nargs="?",
        help="a function that gets the open store (module:function works too)",
    )
    run.add_argument(
        "--check",
        metavar="CHECK",
        help="module:function or script.py:function that gets the recovered store; or a command with {store} in it, "
        "which ends with status 0 if all is well",
    )
    run.add_argument("--store", metavar="PATH", help="record what the command after -- does to the store at PATH")
    run.add_argument("--budget", type=int, metavar="N", help="crash states to judge on each medium (2000)")
    run.add_argument("--seed", type=int, metavar="N", help="of the random choices (1)")
    run.add_argument(
        "--media", metavar="MEDIA", help="memory, file, or both with a comma (both; with --store, the store's)"
    )
    run.add_argument("--depth", type=int, default=1, metavar="N", help="crashes in or after a recovery (1)")
    run.add_argument("--sector", type=int, default=512, metavar="BYTES", help="of a disk: 512 or 4096 (512)")
    run.add_argument("--eadr", action="store_true", help="the memory's caches survive a power cut")
    run.add_argument("--kinds", metavar="KINDS", help="only these kinds of states, with commas between them")
    run.add_argument("program", metavar="-- COMMAND …", nargs=argparse.REMAINDER, help="with --store: what to run")


def _has_files() -> bool:
    return (Path(__file__).parent / "_files_command.py").is_file()


def _guarded(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What is told to the user in a few lines, instead of a traceback."""

    def guarded(chosen: argparse.Namespace) -> int:
        from pmstore.testing._errors import CrashFailure, CrashTestError

        try:
            return command(chosen)
        except CrashFailure as failure:
            print(failure)
            return FOUND
        except CrashTestError as error:
            print(f"pmstore: {error}", file=sys.stderr)
            return FAILED

    return guarded


# ---- run


def _run(chosen: argparse.Namespace) -> int:
    from pmstore.testing._errors import CrashTestError

    program = _program(chosen)
    if chosen.store is not None:
        if not program:
            raise CrashTestError("--store takes the command that uses the store, after --: -- python fit.py")
        return _run_program(chosen, program)
    if chosen.workload is None or program:
        raise CrashTestError(
            "give SCRIPT.py:FUNCTION, a function that gets the open store; or --store PATH -- COMMAND, for a program "
            "that opens it itself"
        )
    return _run_workload(chosen)


def _program(chosen: argparse.Namespace) -> list[str]:
    """The command after --, of which argparse takes the first word for the workload."""
    words = list(chosen.program)
    if chosen.store is not None and chosen.workload is not None:
        words.insert(0, chosen.workload)
    return words[1:] if words[:1] == ["--"] else words


def _run_workload(chosen: argparse.Namespace) -> int:
    from pmstore.testing._explorer import CrashExplorer

    workload = _function(chosen.workload, "the workload")
    name = getattr(workload, "__name__", "workload")
    with CrashExplorer(name) as explorer:
        report = explorer.run(workload, check=_check(chosen.check), **_options(chosen))
    print(report)
    return FINE


def _run_program(chosen: argparse.Namespace, program: list[str]) -> int:
    from pmstore.testing._errors import CrashTestError
    from pmstore.testing._explorer import CrashExplorer, plan
    from pmstore.testing._recording import Recording

    check = _check(chosen.check)
    options = _options(chosen)
    if len(options.get("media", [])) > 1:
        raise CrashTestError("with --store the command runs once, on one medium: --media memory or --media file")
    (media,) = options.pop("media", None) or [_medium(chosen.store)]
    with tempfile.TemporaryDirectory(prefix="pmstore-crash-") as directory:
        output = os.path.join(directory, "recording")
        path = os.path.abspath(chosen.store)
        environment = dict(os.environ, PMSTORE_CRASH_RECORD=f"{media}:{output}:{path}")
        try:
            status = subprocess.run(program, env=environment).returncode
        except OSError as error:
            raise CrashTestError(f"{program[0]} can't be run: {error.strerror}") from error
        if status:
            raise CrashTestError(
                f"the command ended with status {status}, without any crash: mend it first, or let it end with 0"
            )
        if not os.path.exists(output):
            raise CrashTestError(
                f"the command did not open the store {chosen.store} for writing: --store takes the path that it opens"
            )
        recording = Recording.load(output)
    chosen_plan = plan(check=check, media=media, **{"budget": None, "seed": None, **options})
    with CrashExplorer(Path(chosen.store).stem) as explorer:
        report = explorer.explore(recording, chosen_plan)
    print(report)
    return FINE


def _medium(store: str) -> str:
    from pmstore.testing._describe import MEMORY

    return "memory" if Path(os.path.realpath(store)).is_relative_to(MEMORY) else "file"


def _options(chosen: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "budget": chosen.budget,
        "seed": chosen.seed,
        "depth": chosen.depth,
        "sector": chosen.sector,
        "eadr": chosen.eadr,
        "kinds": None if chosen.kinds is None else chosen.kinds.split(","),
    }
    if chosen.media is not None:
        options["media"] = chosen.media.split(",")
    return options


def _function(text: str, what: str) -> Any:
    """What ``script.py:function`` or ``module:function`` names."""
    from pmstore.testing._errors import CrashTestError
    from pmstore.testing._failure import load_script

    place, _, name = text.rpartition(":")
    if not place or not name:
        raise CrashTestError(f"{what} is SCRIPT.py:FUNCTION or module:function, not {text!r}")
    try:
        if place.endswith(".py"):
            if not os.path.isfile(place):
                raise CrashTestError(f"{what}: there is no file {place}")
            found = load_script(place)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            found = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except CrashTestError:
        raise
    except AttributeError as error:
        raise CrashTestError(f"{what}: {error}") from error
    except Exception as error:  # a script's own code runs
        raise CrashTestError(f"{what} {text} can't be loaded: {type(error).__name__}: {error}") from error
    return found


def _check(text: str | None) -> Any:
    from pmstore.testing._failure import CheckPlace, command_check

    if text is None:
        return None
    if "{store}" in text or " " in text:
        return command_check(text)
    check = _function(text, "the check")
    place, _, name = text.rpartition(":")
    if place.endswith(".py") and hasattr(check, "__dict__"):  # found again by the file, not by a made-up module
        check.crash_check_place = CheckPlace("", name, os.path.abspath(place))
    return check


# ---- replay


def _replay(chosen: argparse.Namespace) -> int:
    from pmstore.testing._check import CheckRunner
    from pmstore.testing._describe import Workshop
    from pmstore.testing._engine import Found
    from pmstore.testing._errors import CrashTestError
    from pmstore.testing._failure import load_failure
    from pmstore.testing._message import describe

    if _has_files():
        files: Any = importlib.import_module("pmstore.testing._files_run")
        if files.is_files_replay(Path(chosen.file)):
            files = importlib.import_module("pmstore.testing._files_command")
            return int(files.replay_files(Path(chosen.file), chosen.check))
    failure = load_failure(chosen.file)
    check, note = None, ""
    if chosen.check is not None:
        check = _check(chosen.check)
    elif failure.check is not None:
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            check = failure.check.load()
        except CrashTestError as error:
            note = f"{error}; judged by recovery alone"
    elif failure.checked:
        note = "its check is no function that can be imported; judged by recovery alone. --check names another one"
    with Workshop() as workshop:
        runner = None if check is None else CheckRunner(check, failure.recording.medium, workshop)
        verdict = failure.judge(runner)
        if verdict is not None:
            found = Found(failure.schedule, verdict)
            print("\n".join(describe(failure.recording, found, failure.options, workshop, runner)))
    if note:
        print(f"note: {note}", file=sys.stderr)
    if verdict is not None:
        return FOUND
    if note:
        print("it was found by the check, and said:", failure.message, sep="\n")
        return FAILED
    print("nothing is wrong with this state any more. It is of the run that failed: if the workload was changed since,")
    print("run the test again")
    return FINE


# ---- open


def _open(chosen: argparse.Namespace) -> int:
    import pmstore
    from pmstore.testing import _describe, _engine
    from pmstore.testing._engine import Schedule
    from pmstore.testing._errors import CrashTestError
    from pmstore.testing._failure import load_failure

    failure = load_failure(chosen.file)
    recording, schedule = failure.recording, failure.schedule
    if chosen.events:
        for line in _describe.timeline(recording):
            print(line)
        return FINE
    event = chosen.event
    if chosen.commit is not None:
        event = recording.ends().get(chosen.commit)
        if event is None:
            made = ", ".join(map(str, sorted(recording.ends())))
            raise CrashTestError(f"the recording has the commits {made}, and no {chosen.commit}")
    if event is not None:
        _describe.require_event(recording, event)
        schedule = Schedule(event, "all")
    image = _engine.image(recording, schedule, failure.options)
    if chosen.export is not None:
        try:
            Path(chosen.export).write_bytes(image)
        except OSError as error:
            raise CrashTestError(f"{chosen.export} can't be written: {error.strerror}") from error
    print(f"{_describe.when_text(recording, schedule, None)} (event {schedule.event} of {len(recording)})")
    with _describe.Workshop() as workshop:
        try:
            with workshop.store(image, recording.medium) as store:
                print(f"  the store is at commit {store.sequence}")
                for name, value in _describe.contents(store).items():
                    print(f"  {_describe.name_text(name)} = {_describe.shortened(value)}")
        except pmstore.Error as error:
            print(f"  the store does not open: {error}")
            return FOUND
    return FINE
