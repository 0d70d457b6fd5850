"""Failure files, and ``pmstore crash run|replay|open``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import _cli
from pmstore.testing import CrashExplorer, CrashFailure, CrashTestError, load_failure
from pmstore.testing._base import session
from pmstore.testing._store.failure import VERSION, CheckPlace, command_check, place_of
from tests.support.template import python

BANK = """\
import pmstore

def conserved(store):
    assert store.get("a", 100) + store.get("b", 0) == 100, "money is lost"

def good(store):
    with store.transaction():
        store["a"] = 70
        store["b"] = 30

def bad(store):
    store["a"] = 70
    store.commit()
    store["b"] = 30
    store.commit()

def raises(store):
    raise LookupError("nothing there")

def exits(store):
    raise SystemExit(3)

number = 5

if __name__ == "__main__":
    with pmstore.open("bank.pm") as store:
        bad(store)
"""

DEFINES = """\
import functools
from os.path import join

@functools.lru_cache
def cached(store): pass

def plain(store): pass

def _hidden(store): pass
"""

LAZY = """\
def __getattr__(name):
    if name == "needs":
        raise ImportError("foo is needed")
    if name == "leaves":
        raise SystemExit(4)
    raise AttributeError(name)

class Holder:
    @property
    def value(self):
        raise ValueError("no value")

holder = Holder()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a script in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_config", lambda: None)
    (tmp_path / "bank.py").write_text(BANK)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.endswith("bank"):
            del sys.modules[name]


def crash(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = _cli.main(["crash", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


# ---- run


def test_run_a_sound_workload(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = crash(capsys, "run", "--check", "bank.py:conserved", "--budget", 100, "bank.py:good")
    assert (status, err) == (0, "")
    assert out.startswith("explored the crashes of 1 commit, evaluated by recovery and the check, seed 1\n  memory: ")


@pytest.mark.parametrize("check", ["bank.py:conserved", "bank:conserved"])
def test_run_and_replay(here: Path, capsys: pytest.CaptureFixture[str], check: str) -> None:
    status, out, _ = crash(capsys, "run", "--check", check, "--media", "file", "bank.py:bad")
    assert status == 1
    assert out.startswith("crash after commit 1 was acknowledged, before commit 2 began: money is lost  (bank.py:4)\n")
    line = next(line for line in out.splitlines() if "replay:" in line)
    command = line.split("pmstore ", 1)[1].split()
    assert command == ["crash", "replay", ".pmstore-crash/bank.bad.crash"]
    status, again, err = crash(capsys, *command[1:])
    assert (status, err) == (1, "")
    *told, note = again.splitlines()
    assert told == out.splitlines()[: len(told)]
    assert note == "  the recorded run was evaluated: only a new run shows what a changed workload does"


@pytest.mark.long
def test_a_command_as_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "check.py").write_text(
        "import pmstore, sys\nfrom bank import conserved\n"
        "with pmstore.open(sys.argv[1], 'r') as store:\n    conserved(store)\n"
    )
    root = Path(pmstore.__file__).parent.parent
    check = f"env PYTHONPATH={root}:{here} {sys.executable} check.py {{store}}"
    options = ("--kinds", "prefix", "--media", "file", "--depth", 0)
    status, out, _ = crash(capsys, "run", "--check", check, *options, "bank.py:bad")
    assert status == 1
    assert "the check's command ended with 1: AssertionError: money is lost" in out.splitlines()[0]
    assert crash(capsys, "replay", ".pmstore-crash/bank.bad.crash")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "give SCRIPT.py:FUNCTION"),
        (("run", "bank.py"), "the workload is SCRIPT.py:FUNCTION or module:function, not 'bank.py'"),
        (("run", "missing.py:x"), "the workload: there is no file missing.py"),
        (
            ("run", "bank.py:missing"),
            "the workload: bank.py has no missing; its functions are conserved, good, bad, raises, exits$",
        ),
        (("run", "bank:missing"), "the workload: bank has no missing; its functions are conserved, good, bad"),
        (("run", "bank.py:good.missing"), "the workload: bank.py has no good.missing; its functions are conserved"),
        (("run", "--check", "empty.py:x", "bank.py:good"), "the check: empty.py has no x, and no functions$"),
        (("run", "defines.py:x"), "the workload: defines.py has no x; its functions are cached, plain$"),
        (("run", "lazy.py:needs"), "the workload lazy.py:needs can't be loaded: ImportError: foo is needed$"),
        (("run", "lazy.py:holder.value"), "the workload lazy.py:holder.value can't be loaded: ValueError: no value$"),
        (("run", "lazy.py:leaves"), "the workload lazy.py:leaves can't be loaded: SystemExit: 4$"),
        (("run", "lazy.py:x"), "the workload: lazy.py has no x"),
        (("run", "no_such_module:x"), "the workload no_such_module:x can't be loaded: ModuleNotFoundError"),
        (("run", "bank.py:number"), "a run is a function of the open store, not 5"),
        (("run", "bank.py:raises"), "the workload raises raised LookupError, without any crash: nothing there"),
        (("run", "bank.py:exits"), "the workload exits raised SystemExit, without any crash: 3"),
        (("run", "exits.py:x"), "the workload exits.py:x can't be loaded: SystemExit: 4"),
        (("run", "--check", "bank.py:number", "bank.py:good"), "check is a function"),
        (("run", "--check", "bank.py:exits", "bank.py:good"), r"the check exits called sys.exit\(3\): it has to raise"),
        (
            ("run", "--check", "cmp {store} x || true", "bank.py:good"),
            "--check: no shell is used, and || would be a word like any other",
        ),
        (("run", "--check", "cmp {store} x; true", "bank.py:good"), "no shell is used, and ; would be"),
        (("run", "--check", "cmp '{store} x", "bank.py:good"), "--check: no closing quotation"),
        (
            ("run", "--check", "cmp {store} {dir}", "bank.py:good"),
            "--check: nothing is put in for {dir}, only for {store}",
        ),
        (("run", "--check", "no-such-command {store}", "bank.py:good"), "no-such-command can't be run: No such file"),
        (
            ("run", "--kinds", "torn", "--budget", "3", "bank.py:good"),
            "no crash was evaluated: kinds=torn has none here within a budget of 3",
        ),
        (
            ("run", "--check", "python check.py", "bank.py:good"),
            "is neither module:function nor a command with {store}",
        ),
        (("run", "--budget", "0", "bank.py:good"), "at least 1, not 0"),
        (("run", "--media", "disk", "bank.py:good"), 'media is any of "memory" and "file"'),
        (("run", "--kinds", "some", "bank.py:good"), "kinds is any of"),
        (("run", "--store", "bank.pm"), "--store takes the command that uses the store"),
        (("run", "--store", "bank.pm", "--media", "memory,file", "--", "true"), "runs once, on one medium"),
        (("run", "--store", "bank.pm", "--", "no-such-command"), "no-such-command can't be run: No such file"),
        (
            ("run", "--store", "bank.pm", "--", "false"),
            "the command ended with status 1, without any crash: .* until then it did not open bank.pm, which --store",
        ),
        (("run", "--store", "bank.pm", "--", "true"), "the command did not open the store bank.pm for writing"),
        (("replay", "missing.crash"), "missing.crash: there is no such file"),
        (("open", "bank.py"), "bank.py is no failure file"),
    ],
)
def test_wrong_arguments(here: Path, capsys: pytest.CaptureFixture[str], arguments: Any, message: str) -> None:
    import re

    (here / "exits.py").write_text("raise SystemExit(4)\n")
    (here / "empty.py").write_text("number = 5\n")
    (here / "defines.py").write_text(DEFINES)
    (here / "lazy.py").write_text(LAZY)
    status, out, err = crash(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("pmstore: ")
    assert re.search(message.replace("||", r"\|\|"), err), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--bogus", "bank.py:good"), "pmstore crash run: error: unrecognized arguments: --bogus"),
        (("run", "--files", "d", "--depth=2", "--", "true"), "--depth is only for stores, not for --files"),
        (("run", "--files", "d", "--store", "x", "--", "true"), "--store and --files exclude each other"),
        (("open", "--commit", 2, "--event", 3, "x.crash"), "--event: not allowed with argument --commit"),
    ],
)
def test_words_that_are_no_arguments(capsys: pytest.CaptureFixture[str], arguments: Any, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        crash(capsys, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_command_that_runs_in_a_shell_is_a_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = "sh -c 'test -s {store} && ! test -e {store}.none || exit 1'"
    assert crash(capsys, "run", "--check", check, "--budget", 5, "--media", "file", "bank.py:good")[0] == 0


def test_functions_of_one_name_fail_apart(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("a", "b"):
        (here / place).mkdir()
        (here / place / "job.py").write_text(BANK)
        arguments = ("run", "--check", "bank.py:conserved", "--media", "file", f"{place}/job.py:bad")
        assert crash(capsys, *arguments)[0] == 1
    assert {path.name for path in Path(".pmstore-crash").glob("*.crash")} == {"a-job.bad.crash", "b-job.bad.crash"}


@pytest.mark.long
def test_a_whole_program(here: Path) -> None:
    """The child opens the store itself, and is recorded."""
    command = ["-m", "pmstore", "crash", "run", "--store", "bank.pm", "--check", "bank:conserved"]
    done = python(*command, "--", sys.executable, "bank.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("crash after commit 1 was acknowledged, before commit 2 began: money is lost")
    with pmstore.open("bank.pm", "r") as store:  # it ran for real
        assert dict(store) == {"a": 70, "b": 30}

    def again(store: str, status: int = 2) -> str:
        done = python(*command[:4], "--store", store, *command[6:], "--", sys.executable, "bank.py", "{store}")
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr + done.stdout

    assert "status 1, without any crash" in again("other.pm")
    Path("bank.py").write_text(BANK.replace('open("bank.pm")', "open(__import__('sys').argv[1])"))
    said = again("bank.pm")
    assert "made no commit" in said
    assert "bank.pm was there already, at commit 2: delete it to begin anew" in said
    with pmstore.open("bank.pm") as store:
        store["a"] = 5
    assert "note:   bank.pm was there already, at commit 3: delete it to begin anew" in again("bank.pm", 1)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["crash", "--help"], ["crash", "run", "--help"]):
        with pytest.raises(SystemExit) as caught:
            _cli.main(arguments)
        assert caught.value.code == 0
        assert "crash" in capsys.readouterr().out


ENDLESS = """
import signal, sys
from pathlib import Path
from pmstore import _cli

def check(store, crash, calls=[]):
    calls.append(1)
    if len(calls) == 20:
        Path("directory").write_text(str(Path(store.path).parent))
        signal.raise_signal(int(sys.argv[1]))

def work(store):
    store["x"] = 1
    store.commit()

if __name__ == "__main__":
    sys.exit(_cli.main(["crash", "run", "--check", "__main__:check", "__main__:work"]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_says_how_far_it_was(here: Path, number: int, status: int) -> None:
    (here / "endless.py").write_text(ENDLESS)
    done = python("endless.py", int(number))
    assert (done.returncode, done.stdout) == (status, "")
    assert "interrupted after " in done.stderr
    assert "none failed so far" in done.stderr
    assert not Path(Path("directory").read_text()).exists()


def test_asserts_that_are_left_out(here: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pmstore.__file__).parent.parent)}
    command = [sys.executable, "-O", "-m", "pmstore", "crash", "run", "--check", "bank.py:conserved", "bank.py:bad"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "Python runs without asserts here (-O" in done.stderr


# ---- failure files


@pytest.fixture
def failure(here: Path) -> Path:
    """A failure file, of a check that replay can import."""
    from pmstore.testing._store.failure import load_script

    script = load_script("bank.py")
    with CrashExplorer("bad") as explorer, pytest.raises(CrashFailure) as caught:
        explorer.run(script.bad, check=script.conserved, media="file")
    assert caught.value.path is not None
    return Path(caught.value.path)


def test_a_failure_file_holds_what_is_needed(failure: Path) -> None:
    loaded = load_failure(failure)
    assert loaded.name == "bad"
    assert loaded.checked
    assert loaded.pmstore_version == pmstore.__version__
    assert loaded.message.startswith("crash after commit 1 was acknowledged")
    assert loaded.schedule.cells == ()
    assert loaded.options.budget == 2000
    assert loaded.check is not None
    assert loaded.check.load()
    assert loaded.evaluate() is None  # the core finds nothing wrong
    assert loaded.image() == failure.with_suffix(".pm").read_bytes()
    with pmstore.open(failure.with_suffix(".pm"), "r") as store:
        assert dict(store) == {"a": 70}


def rewritten(path: Path, **changes: Any) -> None:
    """The same file with other fields in its schedule.json."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["schedule.json"] = json.dumps({**json.loads(parts["schedule.json"]), **changes}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def test_a_failure_file_of_another_version(failure: Path) -> None:
    rewritten(failure, version=VERSION + 1, pmstore="9.9")
    with pytest.raises(CrashTestError, match=rf"has version {VERSION + 1} of failure files, written by pmstore 9.9"):
        load_failure(failure)


@pytest.mark.parametrize(
    "changes", [{"version": None}, {"schedule": 5}, {"options": {"budgets": 1}}, {"check": {"a": 1}}, {"schedule": {}}]
)
def test_a_failure_file_with_nonsense_in_it(failure: Path, changes: Any) -> None:
    rewritten(failure, **changes)
    with pytest.raises(CrashTestError, match="is no failure file of pmstore.testing, or it is damaged"):
        load_failure(failure)


def test_what_is_no_failure_file(failure: Path, tmp_path: Path) -> None:
    whole = failure.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        failure.write_bytes(whole[:length])
        with pytest.raises(CrashTestError, match="is no failure file"):
            load_failure(failure)
    with pytest.raises(CrashTestError, match="it is a store: look at it with `python -m pmstore ls"):
        load_failure(failure.with_suffix(".pm"))
    with pytest.raises(CrashTestError, match="there is no such file"):
        load_failure("missing")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CrashTestError, match="it is not a regular file"):
            load_failure(path)


def test_a_flipped_byte_is_noticed(failure: Path) -> None:
    """The zip's checksums show it. Bytes that they don't cover change nothing."""
    whole = failure.read_bytes()
    want = load_failure(failure)
    for at in range(0, len(whole), max(1, len(whole) // 97)):
        failure.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            assert load_failure(failure) == want
        except CrashTestError:
            pass


def test_replay_without_its_check(failure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(failure, check=None)
    status, out, err = crash(capsys, "replay", failure)
    assert status == 2
    assert "it was found by the check, and said:" in out
    assert "its check is no function that can be imported; evaluated by recovery alone" in err
    status, out, _ = crash(capsys, "replay", "--check", "bank.py:conserved", failure)
    assert status == 1
    assert "money is lost" in out


def test_replay_with_a_check_that_is_gone(failure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(failure, check=CheckPlace("gone", "check", "gone.py")._asdict())
    status, _, err = crash(capsys, "replay", failure)
    assert status == 2
    assert "the check gone:check can't be imported: ModuleNotFoundError" in err
    assert "there is no file gone.py" in err


def test_replay_of_what_is_right(failure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bank.py").write_text("def conserved(store):\n    pass\n")
    status, out, _ = crash(capsys, "replay", "--check", "bank.py:conserved", failure)
    assert status == 0
    assert "nothing is wrong with this state any more" in out


# ---- open


def test_open_shows_the_crash(failure: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = crash(capsys, "open", failure)
    assert status == 0
    assert out.splitlines()[0].startswith("crash after commit 1 was acknowledged, before commit 2 began (event ")
    assert "  the store is at commit 1\n  a = 70\n" in out


def test_open_travels_in_time(failure: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = crash(capsys, "open", "--events", failure)
    assert status == 0
    events = [line.split()[0].partition("–")[0] for line in out.splitlines()[1:]]
    shown = [crash(capsys, "open", "--event", event, failure)[1] for event in events]
    assert "the store is at commit 0" in shown[0]
    assert "  a = 70\n  b = 30\n" in shown[-1]
    status, _, _ = crash(capsys, "open", "--event", events[-1], "--export", tmp_path / "end.pm", failure)
    assert status == 0
    with pmstore.open(tmp_path / "end.pm", "r") as store:
        assert dict(store) == {"a": 70, "b": 30}
    assert "  the store is at commit 1\n  a = 70\n" in crash(capsys, "open", "--commit", 1, failure)[1]
    assert f"written to {tmp_path / 'end.pm'}\n" in crash(capsys, "open", "--export", tmp_path / "end.pm", failure)[1]
    with pmstore.open(tmp_path / "end.pm") as store:
        status, _, err = crash(capsys, "open", "--export", tmp_path / "end.pm", failure)
        assert status == 2
        assert "has it open for writing. Close it there first" in err
        store["more"] = 1
    with pmstore.open(tmp_path / "end.pm", "r") as store:
        assert store["more"] == 1
    status, _, err = crash(capsys, "open", "--export", "bank.py", failure)
    assert status == 2
    assert "bank.py is there already, and is no store" in err
    assert Path("bank.py").read_text() == BANK
    status, _, err = crash(capsys, "open", "--commit", 9, failure)
    assert status == 2
    assert "the recording has the commits 0, 1, 2, and no 9" in err
    status, _, err = crash(capsys, "open", "--event", 99999, failure)
    assert status == 2
    assert "the recording has events 0 to " in err
    status, _, err = crash(capsys, "open", "--export", tmp_path / "no" / "where", failure)
    assert status == 2
    assert "can't be written: No such file or directory" in err


# ---- checks and their places


def test_places_of_checks() -> None:
    assert place_of(lambda store: None) is None
    assert place_of(test_places_of_checks.__get__(1)) is not None
    place = place_of(test_places_of_checks)
    assert place is not None
    assert place.load() is test_places_of_checks
    assert str(place) == f"{__name__}:test_places_of_checks"
    assert str(place_of(command_check("cat {store}"))) == "cat {store}"
    with pytest.raises(CrashTestError, match="neither module:function nor a command"):
        command_check("cat")
