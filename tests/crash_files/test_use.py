"""How crash tests of files behave when they are used otherwise than meant, interrupted, or can't write."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import _cli
from pmstore.testing._base.commandline import split_command
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._files import record as _files_record
from pmstore.testing._files.command import refuse_open, replay_files
from pmstore.testing._files.fixture import CrashFiles
from pmstore.testing._files.keep import is_files_replay, require_free
from pmstore.testing._files.record import record

ROOT = Path(pmstore.__file__).parent.parent
SAVE = (
    "import os, sys; d = sys.argv[1]; open(d + '/new', 'w').write('x'); os.rename(d + '/new', d + '/run'); print('ok')"
)
REFUSES = "import os, sys; d = sys.argv[1]; sys.exit(os.path.exists(d + '/run') and not os.path.getsize(d + '/run'))"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture
def files(tmp_path: Path, tracing: None, kept: Path) -> CrashFiles:
    return CrashFiles(tmp_path / "files", budget=50)


def saves(directory: Path) -> None:
    (directory / "new").write_text("x")
    os.rename(directory / "new", directory / "run")
    print("saved")


def whole(directory: Path, said: str) -> None:
    if (directory / "run").exists():
        assert (directory / "run").read_text() == "x", f"{directory}/run is torn"


def words(*program: str) -> list[str]:
    return [sys.executable, "-S", "-c", *program]


def command(tmp_path: Path, *options: str, check: str = REFUSES) -> list[str]:
    (tmp_path / "files").mkdir(exist_ok=True)
    checks = ["--check", shlex.join([*words(check), "{dir}"]), "--budget", "40"]
    return ["crash", "run", "--files", str(tmp_path / "files"), *checks, *options, "--", *words(SAVE, "{dir}")]


# ---- commands given as a text


@pytest.mark.parametrize(
    "text, message",
    [
        ("check {dir} || true", r"no shell is used, and \|\| would be"),
        ("check {dir}; true", "no shell is used"),
        ("check {dir} 2>&1", "no shell is used"),
        ("check 'a {dir}", "--check: no closing quotation"),
        ("check {dri}", "nothing is put in for {dri}, only for {dir} and {said}"),
        (" ", "--check: the command is empty"),
    ],
)
def test_commands_that_need_a_shell(text: str, message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        split_command(text, "--check", ("dir", "said"))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("sh -c 'cat {x} | wc; true' {dir}", ["sh", "-c", "cat {x} | wc; true", "{dir}"]),
        (r"a\|b '{dir}'", ["a|b", "{dir}"]),
        ('grep "a|b" {dir} {}', ["grep", "a|b", "{dir}", "{}"]),
    ],
)
def test_commands_that_need_none(text: str, expected: list[str]) -> None:
    assert split_command(text, "--check", ("dir", "said")) == expected


# ---- misuse


@pytest.mark.parametrize("name, value", [("budget", "many"), ("seed", 1.5), ("seed", -1), ("stale", True)])
def test_options_of_other_types(files: CrashFiles, name: str, value: Any) -> None:
    with pytest.raises(CrashTestError, match=name):
        files.run(saves, whole, **{name: value})


def test_a_program_as_one_text(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match=r"give a list.*\['python', 'save.py'\]"):
        files.run("python save.py", whole)


def test_a_command_as_one_word(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match="there is no program 'python save.py': each word"):
        files.run(["python save.py"], whole)


def test_a_function_that_changes_nothing(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match="its function gets the directory"):
        files.run(lambda directory: None, whole)


def test_a_check_that_refuses_what_was_there_before(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match="refuses the directory as it was before the program ran.*: 'run'.*accept"):
        files.run(saves, lambda directory, said: (directory / "run").read_text() and None)


def test_only_the_lines_of_the_user_are_shown(files: CrashFiles) -> None:
    with pytest.raises(CrashFailure, match="AssertionError: run is torn") as caught:
        files.run(saves, whole)
    assert [entry.name for entry in caught.traceback] == ["test_only_the_lines_of_the_user_are_shown", "run"]
    assert "lost: of run: " in str(caught.value) and "{dir}" not in str(caught.value)


def test_what_was_created_is_called_so(files: CrashFiles) -> None:
    def check(directory: Path, said: str) -> bool:
        return not said or (directory / "made" / "run").exists()

    def program(directory: Path) -> None:
        (directory / "made").mkdir()
        (directory / "made" / "run").write_text("x")
        print("saved")

    with pytest.raises(CrashFailure, match="lost: creation of (the directory made|made/run)"):
        files.run(program, check)


@pytest.mark.parametrize("option", ["--depth=2", "--store=x.pm", "--eadr"])
def test_options_for_stores(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _cli.main(command(tmp_path, option))
    assert f"{option.partition('=')[0]} is only for stores" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_timeouts_that_no_check_keeps(tmp_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(command(tmp_path, f"--timeout={seconds}")) == 2
    assert "--timeout" in capsys.readouterr().err


def test_without_asserts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = "from pmstore.testing import CrashFiles; CrashFiles(__import__('pathlib').Path('files')).run(print, print)"
    done = subprocess.run(
        [sys.executable, "-O", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "CrashTestError: Python runs without asserts here (-O)" in done.stderr
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert _cli.main(command(tmp_path)) == 2
    assert "PYTHONOPTIMIZE is set" in capsys.readouterr().err


# ---- checks that end their process


@pytest.mark.parametrize(
    "ends, message",
    [
        (lambda: os.kill(os.getpid(), signal.SIGUSR2), "the check's process was killed by SIGUSR2"),
        (lambda: os._exit(0), "the check ended its process, with status 0"),
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: pytest.fail("on purpose"), "Failed: on purpose"),
    ],
)
def test_checks_that_end_their_process(files: CrashFiles, ends: Callable[[], None], message: str) -> None:
    def check(directory: Path, said: str) -> None:
        if (directory / "run").exists() and not (directory / "run").read_text():
            ends()

    with pytest.raises(CrashFailure, match=message):
        files.run(saves, check)


def test_system_exit_without_a_fork(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match="fails on the finished files.*SystemExit: 3"):
        files.run(saves, lambda directory, said: sys.exit(3), fork=False)


# ---- what is kept


def test_only_failures_are_replaced(
    tmp_path: Path, tracing: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "image").mkdir(parents=True)
    (tmp_path / "mine" / "image" / "precious").touch()
    (tmp_path / "file").touch()
    for name, message in (("mine", "holds something else"), ("file", "no directory")):
        assert _cli.main(command(tmp_path, "--keep", str(tmp_path / name))) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "mine" / "image" / "precious").exists()
    for _ in range(2):
        assert _cli.main(command(tmp_path, "--keep", str(tmp_path / "new"))) == 1
        for left in (tmp_path / "files").iterdir():
            left.unlink()
        (tmp_path / "new" / "notes").touch()
    assert sorted(os.listdir(tmp_path / "new")) == ["image", "notes", "replay", "said"]
    assert sorted(os.listdir(tmp_path)) == ["file", "files", "mine", "new"]


def test_a_failure_that_cannot_be_kept_is_told(files: CrashFiles, kept: Path) -> None:
    kept.write_text("in the way")
    with pytest.raises(CrashFailure, match=r"(?s)is torn.*missing: fsync.*not kept: .*kept") as caught:
        files.run(saves, whole)
    assert caught.value.path is None and "image:" not in str(caught.value)


def test_a_failure_that_is_there_already(files: CrashFiles, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another worker puts it there just before."""
    paths: set[str | None] = set()
    rename = os.rename

    def slow(source: Any, target: Any) -> None:
        if Path(target).parent == kept and Path(target).name[0] != "." and not paths and not Path(target).exists():
            shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", slow)
    for _ in range(3):
        with pytest.raises(CrashFailure) as caught:
            files.run(saves, whole)
        paths.add(caught.value.path)
        (files.dir / "run").unlink()
    assert len(paths) == 1
    assert sorted(os.listdir(kept)) == [".gitignore", Path(paths.pop() or "").parent.name]
    assert "test_a_failure_that_is_there_already" in "".join(os.listdir(kept))


def test_replays(files: CrashFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashFailure, match=r"replay: python -m pmstore crash replay (.*)") as caught:
        files.run(saves, whole)
    folder = Path(caught.value.path or "").parent
    assert "again:  pytest " in str(caught.value)
    assert is_files_replay(folder) and is_files_replay(folder / "replay")
    assert replay_files(folder) == 1  # the check is found by its module
    assert "it still fails: AssertionError: run is torn" in capsys.readouterr().out
    with pytest.raises(CrashFailure, match="is torn"):
        files.replay(folder, whole)
    with pytest.raises(CrashTestError, match="a recording of files, and no store"):
        refuse_open(folder)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "image").mkdir(parents=True)
    (elsewhere / "image" / "precious").touch()
    (elsewhere / "replay").write_bytes((folder / "replay").read_bytes())
    assert replay_files(elsewhere / "replay") == 1
    assert (elsewhere / "image" / "precious").exists()
    (elsewhere / "replay").write_bytes((folder / "replay").read_bytes()[:200])
    with pytest.raises(CrashTestError, match="is damaged: it ends too early"):
        replay_files(elsewhere)


def test_a_replay_without_a_check_evaluates_nothing(files: CrashFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashFailure, match=r"replay: crash_files.replay\('") as caught:
        files.run(saves, lambda directory, said: whole(directory, said))
    assert replay_files(Path(caught.value.path or "")) == 2
    assert "nothing was evaluated" in capsys.readouterr().err


def test_free_places(tmp_path: Path) -> None:
    require_free(tmp_path / "new")
    require_free(tmp_path)  # empty


# ---- interrupted


class Run:
    """``pmstore crash run --files`` in a session of its own, and the pipe that tells when its program is under way."""

    def __init__(self, tmp_path: Path, script: str, *options: str, check: str = "pass") -> None:
        self.fifo = tmp_path / "fifo"
        os.mkfifo(self.fifo)
        self.scratch = tmp_path / "tmp"
        for name in ("files", "tmp"):
            (tmp_path / name).mkdir()
        fifo = f"import os, signal; pipe = {str(self.fifo)!r}\n"
        arguments = [
            "--files",
            str(tmp_path / "files"),
            "--check",
            shlex.join([*words(fifo + check), "{dir}"]),
            *options,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pmstore", "crash", "run", *arguments, "--", *words(fifo + script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.scratch)},
            cwd=tmp_path,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pipe = self.fifo.open()  # until the program opens it too
        assert self.pipe.readline() == "here\n"

    def end(self) -> tuple[int, str]:
        """The exit status and standard error, once all that held the pipe has ended."""
        with self.pipe:
            self.pipe.read()
        _, errors = self.process.communicate()
        return self.process.returncode, errors


PAUSES = "file = open(pipe, 'w'); print('here', file=file, flush=True); signal.pause()"


def test_interrupted_while_recording(tmp_path: Path, tracing: None) -> None:
    run = Run(tmp_path, f"signal.signal(signal.SIGINT, signal.SIG_DFL); {PAUSES}")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == (130, "")
    assert not os.listdir(run.scratch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_recording(
    tmp_path: Path, tracing: None, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that ran is gone; what a kill leaves is removed by the next run."""
    run = Run(tmp_path, PAUSES)
    run.process.send_signal(number)
    status, _ = run.end()
    assert status == (128 + number if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(run.scratch))
        record(["true"], tmp_path / "files")
    assert not os.listdir(run.scratch)


@pytest.mark.parametrize("number, jobs", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)])
def test_interrupted_while_evaluating(tmp_path: Path, tracing: None, number: signal.Signals, jobs: int) -> None:
    """The check that runs is ended too, and what was done is told."""
    fifth = f"open('count', 'a').write('x') and os.path.getsize('count') > 4 and exec({PAUSES!r})"
    run = Run(tmp_path, "open('files/run', 'w').write('x' * 9999)", "--jobs", str(jobs), check=fifth)
    run.process.send_signal(number)
    status, errors = run.end()
    assert status == 128 + number
    assert re.search(r"interrupted after [0-2] states?; none failed so far", errors)
    assert jobs > 1 or "after 2 states" in errors


def test_what_is_waited_for_is_said(
    tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_files_record, "PATIENCE", 0.02)
    record(["sh", "-c", "sleep 0.5 & "], tmp_path)
    assert "the program ended; still waiting for process " in capfd.readouterr().err
    record(["sleep", "0.3"], tmp_path)
    assert capfd.readouterr().err == "pmstore: recording: still running\n"
