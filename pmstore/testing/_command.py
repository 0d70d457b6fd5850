"""``python -m pmstore crash run|replay|open``: crash tests of code outside a test suite, and access to the crashes
found.

The module is quick to import: the commands load the explorer.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["add_parser"]

FINE, FOUND, FAILED = 0, 1, 2

RUN_STATUS = """\
exit status:
  0  no crash was found that loses or mixes data, or that the check refuses
  1  one was found
  2  the workload, the check or the arguments are wrong: nothing is said about crashes
"""

REPLAY_STATUS = """\
exit status:
  0  nothing is wrong with this state any more
  1  it is still wrong
  2  it can't be evaluated
"""

OPEN_STATUS = """\
exit status:
  0  the store opens
  1  it does not, as the crash left it
  2  there is no such crash, or the arguments are wrong
"""

RUN_EXAMPLES = """\
examples:
  pmstore crash run --check bank:conserved bank.py:transfer
  pmstore crash run --check 'python check.py {store}' --budget 5000 bank.py:transfer
  pmstore crash run --store fit.pm --check checks:sound -- python fit.py

"""


def add_parser(commands: Any, words: Sequence[str]) -> None:
    """The ``crash`` command and its subcommands, for the parser of ``_cli``.

    words: the arguments; they decide which of the two forms of ``run`` is added. With ``--files`` among its options, it
    is the form for any program's files.
    """
    text = "find the crashes that a program does not survive"
    crash = commands.add_parser(
        "crash",
        help=text,
        description=text[0].upper() + text[1:] + ". docs/crash-testing.md is the tutorial.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    crash.set_defaults(parser=crash)
    inner = crash.add_subparsers(title="commands", required=True, metavar="COMMAND")
    own = words[: words.index("--")] if "--" in words else words
    given = {word.partition("=")[0] for word in own}
    if "--files" in given:
        from pmstore.testing._files import command as files

        text = "record what a program does to files, and explore its crashes"
        run = _add(inner, "run", files.run_files, text, RUN_STATUS)
        files.add_arguments(run)
    else:
        _add_run(inner)
    replay = _add(inner, "replay", _replay, "evaluate a crash that was found before, again", REPLAY_STATUS)
    replay.add_argument("file", metavar="FILE", help="a failure file, such as .pmstore-crash/test_bank.test_it.crash")
    replay.add_argument("--check", metavar="CHECK", help="instead of the check that the file names")
    look = _add(inner, "open", _open, "show the store as a crash at some moment would leave it", OPEN_STATUS)
    look.add_argument("file", metavar="FILE", help="a failure file")
    moment = look.add_mutually_exclusive_group()
    moment.add_argument(
        "--event", type=int, metavar="N", help="crash when N events have happened; unless given, the crash of the file"
    )
    moment.add_argument(
        "--commit", type=int, metavar="N", help="crash when commit N was acknowledged, with nothing lost"
    )
    moment.add_argument("--events", action="store_true", help="list the moments between which the run can be crashed")
    look.add_argument("--export", metavar="OUT", help="write the store there too, over one that no process writes")


def _add(commands: Any, name: str, command: Callable[..., int], text: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_guarded(command), path="crash", parser=parser)
    return parser


def _add_run(commands: Any) -> None:
    run = _add(commands, "run", _run, "record a workload, and explore its crashes", RUN_EXAMPLES + RUN_STATUS)
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
    run.add_argument(
        "--store",
        metavar="PATH",
        help="record what the command after -- does to the store at PATH ({store} in it): it runs once, for real",
    )
    run.add_argument(
        "--files",
        metavar="DIR",
        help="of any program's files, without a store: the options are others, which --files DIR --help shows",
    )
    run.add_argument("--budget", type=int, metavar="N", help="crash states to evaluate on each medium (2000)")
    run.add_argument("--seed", type=int, metavar="N", help="of the random choices (1)")
    run.add_argument(
        "--media", metavar="MEDIA", help="memory, file, or both with a comma (both; with --store, the store's)"
    )
    run.add_argument("--depth", type=int, default=1, metavar="N", help="crashes in or after a recovery (1)")
    run.add_argument("--sector", type=int, default=512, metavar="BYTES", help="of a disk: 512 or 4096 (512)")
    run.add_argument("--eadr", action="store_true", help="the memory's caches survive a power cut")
    run.add_argument("--kinds", metavar="KINDS", help="only these kinds of states, with commas between them")
    run.add_argument("--quiet", action="store_true", help="show no progress")
    run.add_argument("program", metavar="-- COMMAND …", nargs=argparse.REMAINDER, help="with --store: what to run")


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception, so that everything is undone and removed before the process ends."""


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
    raise _Terminated


def _guarded(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Prints errors in a few lines, instead of a traceback."""

    def guarded(chosen: argparse.Namespace) -> int:
        from pmstore.testing._base.errors import CrashFailure, CrashTestError

        before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _terminate)
        try:
            return command(chosen)
        except CrashFailure as failure:
            print(failure)
            return FOUND
        except CrashTestError as error:
            print(f"pmstore: {error}", file=sys.stderr)
            return FAILED
        except _Terminated:
            return 128 + signal.SIGTERM
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    return guarded


# ---- run


def _run(chosen: argparse.Namespace) -> int:
    from pmstore.testing._base.errors import CrashTestError
    from pmstore.testing._base.progress import in_command

    program = _program(chosen)
    if chosen.store is not None:
        if not program:
            raise CrashTestError("--store takes the command that uses the store, after --: -- python fit.py")
        with in_command(chosen.quiet):
            return _run_program(chosen, program)
    if chosen.workload is None or program:
        raise CrashTestError(
            "give SCRIPT.py:FUNCTION, a function that gets the open store; or --store PATH -- COMMAND, for a program "
            "that opens it itself"
        )
    with in_command(chosen.quiet):
        return _run_workload(chosen)


def _program(chosen: argparse.Namespace) -> list[str]:
    """The command after --. argparse takes its first word for the workload."""
    words = list(chosen.program)
    if chosen.store is not None and chosen.workload is not None:
        words.insert(0, chosen.workload)
    return words[1:] if words[:1] == ["--"] else words


def _run_workload(chosen: argparse.Namespace) -> int:
    from pmstore.testing._base import session
    from pmstore.testing._explorer import CrashExplorer

    workload = _function(chosen.workload, "the workload")
    place, _, function = chosen.workload.rpartition(":")
    scripted = place.endswith(".py")
    name = session.path_name(place, f"::{function}") if scripted else session.test_name(f"{place}.{function}")
    with CrashExplorer(name) as explorer:
        report = explorer.run(workload, check=_check(chosen.check), **_options(chosen))
    print(report)
    return FINE


def _run_program(chosen: argparse.Namespace, program: list[str]) -> int:
    from pmstore.testing._base import session
    from pmstore.testing._base.errors import CrashFailure, CrashTestError
    from pmstore.testing._base.scratch import Scratch
    from pmstore.testing._explorer import CrashExplorer, plan
    from pmstore.testing._store.recording import Recording

    check = _check(chosen.check)
    options = _options(chosen)
    if len(options.get("media", [])) > 1:
        raise CrashTestError("with --store the command runs once, on one medium: --media memory or --media file")
    (media,) = options.pop("media", None) or [_medium(chosen.store)]
    path = os.path.abspath(chosen.store)
    earlier = _sequence(path)
    with Scratch() as directory:
        output = os.path.join(directory, "recording")
        environment = dict(os.environ, PMSTORE_CRASH_RECORD=f"{media}:{output}:{path}")
        try:
            words = [word.replace("{store}", chosen.store) for word in program]
            status = subprocess.run(words, env=environment).returncode
        except OSError as error:
            raise CrashTestError(f"{program[0]} can't be run: {error.strerror}") from error
        opened = os.path.exists(output)
        if status:
            other = "" if opened else f"; until then it did not open {chosen.store}, which --store names: another path?"
            raise CrashTestError(
                f"the command ended with status {status}, without any crash: fix it first, or let it end with 0{other}"
            )
        if not opened:
            raise CrashTestError(
                f"the command did not open the store {chosen.store} for writing: --store takes the path that it opens"
            )
        recording = Recording.load(output)
    chosen_plan = plan("plan", check=check, media=media, **options)
    with CrashExplorer(session.path_name(chosen.store).removesuffix(".pm")) as explorer:
        try:
            report = explorer.explore(recording, chosen_plan)
        except (CrashFailure, CrashTestError) as error:
            if earlier is None:
                raise
            note = f"{chosen.store} was there already, at commit {earlier}: delete it to begin anew"
            if isinstance(error, CrashTestError):
                raise CrashTestError(f"{error}. {note}") from error
            raise CrashFailure(f"{error}\n  note:   {note}", path=error.path, report=error.report) from error
    print(report)
    return FINE


def _sequence(path: str) -> int | None:
    """The sequence number of a store's last commit; None if there is no store to read."""
    import pmstore

    try:
        with pmstore.open(path, "r") as store:
            return store.sequence
    except (pmstore.Error, OSError):
        return None


def _medium(store: str) -> str:
    from pmstore.testing._store.describe import MEMORY

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
    """The function with the name ``script.py:function`` or ``module:function``."""
    from pmstore.testing._base.errors import CrashTestError
    from pmstore.testing._store.failure import load_script

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
        try:
            return functools.reduce(getattr, name.split("."), found)
        except AttributeError as error:
            has = _functions(found)
            there = f"; its functions are {', '.join(has)}" if has else ", and no functions"
            raise CrashTestError(f"{what}: {place} has no {name}{there}") from error
    except CrashTestError:
        raise
    except (Exception, SystemExit) as error:  # code of a script runs
        raise CrashTestError(f"{what} {text} can't be loaded: {type(error).__name__}: {error}") from error


def _functions(module: ModuleType) -> list[str]:
    """The public names of what the module itself defines and can be called: decorated functions too."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


def _check(text: str | None) -> Any:
    from pmstore.testing._store.failure import CheckPlace, command_check

    if text is None:
        return None
    if "{store}" in text or " " in text:
        return command_check(text)
    check = _function(text, "the check")
    place, _, name = text.rpartition(":")
    if place.endswith(".py") and hasattr(check, "__dict__"):  # a replay finds it by the file, not by an invented module
        check.crash_check_place = CheckPlace("", name, os.path.abspath(place))
    return check


# ---- replay


def _replay(chosen: argparse.Namespace) -> int:
    from pmstore.testing._base.errors import CrashTestError
    from pmstore.testing._files.keep import is_files_replay
    from pmstore.testing._store.check import CheckRunner
    from pmstore.testing._store.describe import Sandbox
    from pmstore.testing._store.engine import Found
    from pmstore.testing._store.failure import load_failure
    from pmstore.testing._store.message import AGAIN, describe

    if is_files_replay(Path(chosen.file)):
        from pmstore.testing._files.command import replay_files

        return replay_files(Path(chosen.file), chosen.check)
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
            note = f"{error}; evaluated by recovery alone"
    elif failure.checked:
        note = "its check is no function that can be imported; evaluated by recovery alone. --check names another one"
    with Sandbox() as sandbox:
        runner = None if check is None else CheckRunner(check, failure.recording.medium, sandbox)
        verdict = failure.evaluate(runner)
        if verdict is not None:
            found = Found(failure.schedule, verdict)
            print("\n".join(describe(failure.recording, found, failure.options, sandbox, runner)))
    if note:
        print(f"note: {note}", file=sys.stderr)
    if verdict is not None:
        again = [line for line in failure.message.splitlines() if line.startswith(AGAIN)]
        print("  the recorded run was evaluated: only a new run shows what a changed workload does")
        print(*again, sep="\n", end="\n" if again else "")
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
    from pmstore.testing._base.errors import CrashTestError
    from pmstore.testing._files.keep import is_files_replay
    from pmstore.testing._store import describe as _describe
    from pmstore.testing._store import engine
    from pmstore.testing._store.engine import Schedule
    from pmstore.testing._store.failure import load_failure

    if is_files_replay(Path(chosen.file)):
        from pmstore.testing._files.command import refuse_open

        refuse_open(Path(chosen.file))
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
    image = engine.image(recording, schedule, failure.options)
    if chosen.export is not None:
        _export(image, Path(chosen.export))
    print(f"{_describe.when_text(recording, schedule, None)} (event {schedule.event} of {len(recording)})")
    with _describe.Sandbox() as sandbox:
        try:
            with sandbox.store(image, recording.medium) as store:
                print(f"  the store is at commit {store.sequence}")
                for name, value in _describe.contents(store).items():
                    print(f"  {_describe.name_text(name)} = {_describe.shortened(value)}")
        except pmstore.Error as error:
            print(f"  the store does not open: {error}")
            return FOUND
        finally:
            if chosen.export is not None:
                print(f"written to {chosen.export}")
    return FINE


def _export(image: bytes, out: Path) -> None:
    import pmstore
    from pmstore._store.opening import locked
    from pmstore.testing._base.errors import CrashTestError
    from pmstore.testing._store.failure import replace

    try:
        if not out.exists():
            return replace(out, image)
        with out.open("rb") as file:
            head = file.read(4096 + 7) if out.is_file() else b""
        if b"PMSTORE" not in (head[:7], head[4096:]):
            raise CrashTestError(f"{out} is there already, and is no store: --export does not write over it")
        locked(os.fspath(out), lambda _: replace(out, image))
    except pmstore.Error:
        raise
    except OSError as error:
        raise CrashTestError(f"{out} can't be written: {error.strerror}") from error
