"""Each image stands alone: its links lead into it, and its check starts anew. What a check returns, and how it ends."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmstore.testing import CrashFailure, CrashTestError
from pmstore.testing._files import apart
from pmstore.testing._files.fixture import CrashFiles


@pytest.fixture
def files(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> CrashFiles:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    return CrashFiles(tmp_path / "files", budget=60)


# ---- links


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_links_lead_into_the_image(files: CrashFiles, absolute: bool, synced: bool) -> None:
    """A link to an absolute path would lead to the finished files, and no failure would be found."""
    (files.dir / "v0").write_text("old")
    os.symlink(files.dir / "v0" if absolute else "v0", files.dir / "current")

    def program(directory: Path) -> None:
        with (directory / "v1").open("w") as out:
            out.write("new")
            out.flush()
            if synced:
                os.fsync(out.fileno())
        os.symlink(directory / "v1" if absolute else "v1", directory / "next")
        os.rename(directory / "next", directory / "current")

    def check(directory: Path, said: str) -> None:
        assert (directory / "current").read_text() in ("old", "new")
        if absolute:
            assert Path(os.readlink(directory / "current")).parent == directory

    if synced:
        files.run(program, check, filesystem="ext4")
        return
    with pytest.raises(CrashFailure, match="of v1: its growth") as caught:
        files.run(program, check, filesystem="ext4")
    with pytest.raises(CrashFailure):
        files.replay(caught.value.path or "", check)


# ---- checks


def test_a_check_keeps_nothing_from_image_to_image(files: CrashFiles) -> None:
    @functools.cache
    def loaded(path: Path) -> str:
        return path.read_text()

    first: list[str] = []

    def cached(directory: Path, said: str) -> None:
        assert loaded(directory / "run") in ("old", "new")

    def once(directory: Path, said: str) -> None:
        first[:] = first or [(directory / "run").read_text()]
        assert first[0] in ("old", "new")

    (files.dir / "run").write_text("old")

    def program(directory: Path) -> None:
        (directory / "next").write_text("new")
        os.rename(directory / "next", directory / "run")

    for check in (cached, once):
        with pytest.raises(CrashFailure, match="of run|of next"):
            files.run(program, check)
        (files.dir / "run").write_text("old")


def test_modules_of_the_program_are_imported_by_checks_only(files: CrashFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only installed packages are imported for all checks at once."""
    module = files.dir.parent / "reads_its_surroundings.py"
    module.write_text("import os, sys\nif 'SET' not in os.environ: sys.exit('too early')")
    monkeypatch.syspath_prepend(files.dir.parent)

    def check(directory: Path, said: str) -> None:
        os.environ["SET"] = "1"
        import reads_its_surroundings  # noqa: F401

    report = files.run(lambda directory: (directory / "f").write_text("x" * 5000), check)
    assert report.tally.evaluated > 5


def test_what_the_first_check_imports_is_there_for_others(files: CrashFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_INSTALLED", (os.fspath(files.dir.parent),))
    module = files.dir.parent / "slow_to_import.py"
    module.write_text(f"open({os.fspath(files.dir.parent / 'imported')!r}, 'a').write('x')")
    monkeypatch.syspath_prepend(files.dir.parent)

    def check(directory: Path, said: str) -> None:
        import slow_to_import  # noqa: F401

    report = files.run(lambda directory: (directory / "f").write_text("x" * 5000), check)
    assert report.tally.evaluated > 5
    assert (files.dir.parent / "imported").read_text() == "xx"  # by the fork of the first image, and by its parent


def test_a_check_that_does_not_end(files: CrashFiles) -> None:
    def check(directory: Path, said: str) -> None:
        while (directory / "f").exists() and not (directory / "f").read_text():
            time.sleep(0.01)

    with pytest.raises(CrashFailure, match="the check took longer than 0.5 s"):
        files.run(lambda directory: (directory / "f").write_text("x"), check, timeout=0.5)
    files.run(lambda directory: (directory / "f").write_text("x"), lambda directory, said: None, timeout=float("inf"))
    for wrong in (0, -1, float("nan"), None, "1"):
        with pytest.raises(CrashTestError, match="timeout"):
            files.run(lambda directory: (directory / "f").write_text("x"), check, timeout=wrong)


@pytest.mark.parametrize("number", [signal.SIGKILL, 35])
def test_a_check_that_is_killed(files: CrashFiles, number: int) -> None:
    def check(directory: Path, said: str) -> None:
        if (directory / "f").exists() and not (directory / "f").read_text():
            os.kill(os.getpid(), number)

    name = "SIGKILL" if number == signal.SIGKILL else "signal 35"
    with pytest.raises(CrashFailure, match=f"the check's process was killed by {name}"):
        files.run(lambda directory: (directory / "f").write_text("x"), check)


def test_what_a_check_leaves_behind(files: CrashFiles) -> None:
    """It keeps nobody waiting, and ends with the run."""
    started = files.dir.parent / "started"

    def check(directory: Path, said: str) -> None:
        if (directory / "f").exists():
            started.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CrashTestError, match="killed by SIGKILL"):  # of the finished files
        files.run(lambda directory: (directory / "f").write_text("x"), check)
    pid = int(started.read_text())
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)


@pytest.mark.parametrize("fork", [True, False])
def test_what_a_check_returns(files: CrashFiles, fork: bool) -> None:
    def writes(directory: Path) -> None:
        (directory / "f").write_text("x")

    def run(answer: Callable[[Path], Any]) -> None:
        files.run(writes, lambda directory, said: answer(directory), fork=fork)

    def is_whole(directory: Path) -> bool:
        return not (directory / "f").exists() or (directory / "f").read_text() == "x"

    for fine in (None, True, np.True_):
        run(lambda directory, fine=fine: fine)
    for kind in (bool, np.bool_):
        with pytest.raises(CrashFailure, match="the check returned False"):
            run(lambda directory, kind=kind: kind(is_whole(directory)))
    with pytest.raises(CrashFailure, match="f is torn"):
        run(lambda directory: None if is_whole(directory) else "f is torn")
    for wrong in ([], 1, np.array([True])):
        with pytest.raises(CrashTestError, match="it returns None or True if it accepts the files"):
            run(lambda directory, wrong=wrong: wrong)


# ---- auto_da_alloc of ext4: a file that was emptied is written out when its last descriptor is closed


def by_a_dup(directory: Path) -> None:
    first = os.open(directory / "a", os.O_WRONLY | os.O_TRUNC)
    other = os.dup(first)
    os.close(first)
    os.write(other, b"new")
    os.close(other)


def by_a_dup_over_it(directory: Path) -> None:
    other = os.open(directory / "a", os.O_WRONLY | os.O_TRUNC)
    os.write(other, b"new")
    os.dup2(2, other)


def by_a_range(directory: Path) -> None:
    first = os.open(directory / "a", os.O_WRONLY | os.O_TRUNC)
    os.write(first, b"new")
    os.closerange(first, first + 1)


def by_an_exit(directory: Path) -> None:
    pid = os.fork()
    if not pid:
        os.write(os.open(directory / "a", os.O_WRONLY | os.O_TRUNC), b"new")
        os._exit(0)
    os.waitpid(pid, 0)


def beside_another(directory: Path) -> None:
    other = os.open(directory / "a", os.O_RDONLY)
    by_a_dup(directory)
    assert other


def by_another(directory: Path) -> None:
    """The first one that is closed is not the one that writes last."""
    first, other = os.open(directory / "a", os.O_WRONLY | os.O_TRUNC), os.open(directory / "a", os.O_WRONLY)
    os.write(first, b"n")
    os.close(other)
    os.write(first, b"ew")
    os.close(first)


def by_a_kill(directory: Path) -> None:
    pid = os.fork()
    if not pid:
        os.write(os.open(directory / "a", os.O_WRONLY | os.O_TRUNC), b"new")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def by_nothing(directory: Path) -> None:
    first = os.open(directory / "a", os.O_WRONLY | os.O_TRUNC)
    os.dup(first)
    os.write(first, b"new")
    os.close(first)


NOT_CLOSED = (by_nothing, by_another)
CLOSED = (by_a_dup, by_a_dup_over_it, by_a_range, by_an_exit, by_a_kill, beside_another, *NOT_CLOSED)


@pytest.mark.parametrize("closed", CLOSED)
def test_the_last_descriptor_of_an_open_file_is_closed(files: CrashFiles, closed: Callable[[Path], None]) -> None:
    (files.dir / "a").write_text("old")
    (files.dir / "b").write_text("1")

    def program(directory: Path) -> None:
        closed(directory)
        os.rename(directory / "b", directory / "c")

    def check(directory: Path, said: str) -> None:
        assert not (directory / "c").exists() or (directory / "a").read_text() == "new"

    if closed in NOT_CLOSED:
        with pytest.raises(CrashFailure, match="of a: "):
            files.run(program, check, filesystem="ext4")
    else:
        files.run(program, check, filesystem="ext4")


def test_a_redirection_of_a_shell(files: CrashFiles) -> None:
    (files.dir / "a").write_text("old")
    (files.dir / "b").write_text("1")

    def check(directory: Path, said: str) -> None:
        assert not (directory / "c").exists() or (directory / "a").read_text() == "new"

    files.run(["sh", "-c", "cd {dir}; printf new > a; mv b c"], check, filesystem="ext4")
