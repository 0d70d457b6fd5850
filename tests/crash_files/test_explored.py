"""Crash tests of any program's files: the fixture, the command, and programs of which it is known what crashes
leave.
"""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore.testing._base import progress
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._files.command import replay_files
from pmstore.testing._files.fixture import CrashFiles
from pmstore.testing._files.recording import load, save
from tests.support.template import python

Command = Callable[..., int]


@pytest.fixture
def files(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> CrashFiles:
    """What the fixture crash_files gives; failures are kept in the test's own directory."""
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    return CrashFiles(tmp_path / "files")


# ---- a file that is replaced


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def replaces(*syncs: str) -> Callable[[Path], None]:
    """np.savez under another name and a rename, twice, with these syncs."""

    def program(directory: Path) -> None:
        for k in (1, 2):
            np.savez(directory / "new.npz", a=np.full(1000, k))
            if "file" in syncs:
                sync(directory / "new.npz")
            os.replace(directory / "new.npz", directory / "run.npz")
            if "directory" in syncs:
                sync(directory)
            print("saved", k)

    return program


def whole(directory: Path, said: str) -> None:
    """There is a whole version, if any."""
    if (directory / "run.npz").exists():
        assert len(set(np.load(directory / "run.npz")["a"])) == 1


def acknowledged(directory: Path, said: str) -> None:
    """There is the last version that was said to be saved, or the next."""
    if said:
        assert np.load(directory / "run.npz")["a"][0] >= int(said.split()[-1]), "an older version is there"
    whole(directory, said)


def test_a_directory_has_the_name_of_that_moment(files: CrashFiles) -> None:
    def program(directory: Path) -> None:
        (directory / "new").mkdir()
        (directory / "new" / "a").write_bytes(b"a" * 600)
        sync(directory / "new" / "a")
        os.rename(directory / "new", directory / "done")

    def check(directory: Path, said: str) -> None:
        if (directory / "done").exists():
            assert (directory / "done" / "a").read_bytes() == b"a" * 600

    with pytest.raises(CrashFailure, match="missing: fsync of the directory new before new is renamed to done"):
        files.run(program, check)


def test_an_undo_journal_without_fsync(files: CrashFiles) -> None:
    """The call that is cut short is recovered, if what it needs is durable."""
    (files.dir / "data").write_bytes(b"A" * 1500)

    def program(directory: Path) -> None:
        (directory / "journal").write_bytes(b"A" * 1500)
        sync(directory)
        with open(directory / "data", "r+b") as data:
            data.write(b"B" * 1500)

    def check(directory: Path, said: str) -> None:
        journal = directory / "journal"
        if not journal.exists() or journal.read_bytes() != b"A" * 1500:
            assert len(set((directory / "data").read_bytes())) == 1, "mixed"

    with pytest.raises(CrashFailure, match="missing: fsync of journal before data is written at 0"):
        files.run(program, check)


def test_a_rename_without_fsync(files: CrashFiles) -> None:
    with pytest.raises(CrashFailure) as caught:
        files.run(replaces(), whole)
    text = str(caught.value)
    assert "missing: fsync of new.npz before new.npz is renamed to run.npz" in text
    assert "rename of new.npz to run.npz" in text
    assert "image: " in text
    image = Path(caught.value.path or "").parent / "image"
    with pytest.raises(Exception):  # noqa: B017  whatever numpy says of it
        whole(image, "")


def test_a_rename_with_fsync_of_the_file(files: CrashFiles) -> None:
    report = files.run(replaces("file"), whole, budget=300, fork=False)
    assert report.tally.evaluated == 300 and not report.tally.exhaustive
    with pytest.raises(CrashFailure, match=r"missing: fsync of the directory before the program says 'saved \d'"):
        files.run(replaces("file"), acknowledged)


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_rename_with_both(files: CrashFiles, filesystem: str) -> None:
    files.run(replaces("file", "directory"), acknowledged, filesystem=filesystem, budget=400, fork=False)


def test_a_rename_over_a_file_on_ext4(files: CrashFiles) -> None:
    """auto_da_alloc replaces the fsync, where there is a file to replace; where there is none, it doesn't."""
    with pytest.raises(CrashFailure, match="of run.npz: its growth"):
        files.run(replaces(), whole, filesystem="ext4")
    files.run(replaces(), whole, filesystem="ext4")  # run.npz is there now


def test_overwriting_in_place(files: CrashFiles) -> None:
    def program(directory: Path) -> None:
        np.save(directory / "a.npy", np.ones(1000))
        sync(directory / "a.npy")

    np.save(files.dir / "a.npy", np.zeros(1000))
    with pytest.raises(CrashFailure) as caught:
        files.run(program, lambda directory, said: len(set(np.load(directory / "a.npy"))) == 1)
    assert "no sync would help: a program that is killed at this moment leaves this" in str(caught.value)


def test_two_files_that_are_replaced_one_after_the_other(files: CrashFiles) -> None:
    """Each is written, synced and renamed, but a kill between the two renames leaves them of different versions."""

    def put(directory: Path, name: str, version: int) -> None:
        (directory / "new").write_text(str(version))
        sync(directory / "new")
        os.replace(directory / "new", directory / name)
        sync(directory)

    def program(directory: Path) -> None:
        for version in (1, 2):
            put(directory, "weights", version)
            put(directory, "epoch", version)

    def check(directory: Path, said: str) -> None:
        weights, epoch = directory / "weights", directory / "epoch"
        assert weights.exists() == epoch.exists()
        assert not epoch.exists() or weights.read_text() == epoch.read_text()

    with pytest.raises(CrashFailure) as caught:
        files.run(program, check)
    text = str(caught.value)
    assert "rename of new to weights" in text
    assert "Write what belongs together into one new file, fsync it, and rename it over the old one" in text


def test_everything_is_evaluated_where_it_is_little(files: CrashFiles) -> None:
    def program(directory: Path) -> None:
        (directory / "f").write_bytes(b"new" * 400)
        sync(directory / "f")
        sync(directory)

    seen: set[bytes] = set()

    def check(directory: Path, said: str) -> None:
        seen.add(b",".join((directory / name).read_bytes() for name in os.listdir(directory)))

    report = files.run(program, check, fork=False)  # in this process, as it gathers
    assert report.tally.exhaustive and "all that the model allows" in str(report)
    # Nothing, the empty file, and the file with any of its three sectors.
    assert len(seen) == 1 + 2**3
    assert report.tally.evaluated == 1 + 1 + 2**3  # "no file" and "an empty file" look alike to the check


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_budget_that_is_too_small_for_all_is_spread_over_the_run(seed: int, files: CrashFiles) -> None:
    """One of the last versions is not synced."""

    def program(directory: Path) -> None:
        for version in range(60):
            (directory / "new").write_bytes(bytes([version]) * 150)
            if version != 57:
                sync(directory / "new")
            os.replace(directory / "new", directory / "run")
            sync(directory)
            print(version)

    def check(directory: Path, said: str) -> None:
        assert not (directory / "run").exists() or len(set((directory / "run").read_bytes())) == 1

    with pytest.raises(CrashFailure, match="rename of new to run"):
        files.run(program, check, fork=False, budget=200, seed=seed)


def test_a_sample_tells_its_size(files: CrashFiles) -> None:
    report = files.run(replaces("file", "directory"), lambda directory, said: None, budget=5)
    assert not report.tally.exhaustive and report.tally.evaluated == 5
    expected = r"5 distinct crash states tried, a sample of at most about 10\^\d+ that the model allows at \d+ points"
    assert re.search(expected, str(report))


def test_the_same_seed_finds_the_same(files: CrashFiles) -> None:
    texts = []
    for seed in (5, 5):
        for left in files.dir.iterdir():
            left.unlink()
        with pytest.raises(CrashFailure) as caught:
            files.run(replaces("file"), acknowledged, seed=seed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_replay(files: CrashFiles) -> None:
    with pytest.raises(CrashFailure) as caught:
        files.run(replaces(), whole)
    path = caught.value.path or ""
    with pytest.raises(AssertionError, match="missing: fsync of new.npz"):
        files.replay(path, whole)
    files.replay(path, lambda directory, said: None)
    recording, more = load(Path(path))
    save(Path(path), recording, **{**more, "state": [99, [], ""]})
    with pytest.raises(CrashTestError, match="damaged"):
        files.replay(path, whole)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 0}, "a budget of 0 evaluates no state"),
        ({"filesystem": "fat"}, "filesystem is one of posix, ext4"),
        ({"sector": 100}, "sector is 512 or 4096"),
    ],
)
def test_options_that_make_no_sense(files: CrashFiles, options: dict[str, int], message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        files.run(replaces(), whole, **options)  # type: ignore[arg-type]


def test_a_check_that_is_wrong(files: CrashFiles) -> None:
    def check(directory: Path, said: str) -> None:
        raise NameError("on purpose")

    with pytest.raises(CrashTestError, match="fails on the finished files.*on purpose"):
        files.run(replaces("file", "directory"), check)


def test_a_check_that_looks_at_nothing(files: CrashFiles) -> None:
    report = files.run(replaces("file"), lambda directory, said: None, budget=5)
    assert "even if everything that was printed as saved is gone" in str(report)


def test_a_program_that_writes_nothing_there(files: CrashFiles) -> None:
    with pytest.raises(CrashTestError, match="changed nothing below the directory"):
        files.run([sys.executable, "-S", "-c", "print('saved')"], whole)


# ---- sqlite3, whose documentation says what is to be expected


def sqlite(journal: str, synchronous: str) -> Callable[[Path], None]:
    def program(directory: Path) -> None:
        with closing(sqlite3.connect(directory / "db")) as connection:
            connection.execute(f"pragma synchronous = {synchronous}")
            connection.execute("pragma wal_autocheckpoint = 8")
            for k in (1, 2, 3):
                connection.execute("update t set k = ?", (k,))
                connection.executemany("insert into pad values (?, ?)", [(k, "p" * 500)] * 10)
                connection.commit()
                print(k)

    return program


def sound(directory: Path, said: str) -> int:
    with closing(sqlite3.connect(directory / "db")) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        (k,) = connection.execute("select k from t").fetchone()
        assert connection.execute("select count(*) from pad").fetchone() == (10 * k,), "a mixture"
        return int(k)


def is_sound(directory: Path, said: str) -> None:
    sound(directory, said)


def keeps(directory: Path, said: str) -> None:
    k = sound(directory, said)
    assert k >= int(said.split()[-1] if said else 0), "an acknowledged commit is lost"


def prepared(files: CrashFiles, journal: str) -> None:
    with closing(sqlite3.connect(files.dir / "db")) as connection:
        connection.execute(f"pragma journal_mode = {journal}")
        connection.execute("create table t (k int)")
        connection.execute("create table pad (k int, text text)")
        connection.execute("insert into t values (0)")
        connection.commit()


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
@pytest.mark.parametrize(
    "journal, synchronous, check",
    [
        ("delete", "full", is_sound),
        ("delete", "extra", keeps),
        ("wal", "normal", is_sound),
        ("wal", "full", keeps),
    ],
)
def test_sqlite_passes(
    files: CrashFiles, journal: str, synchronous: str, check: Callable[[Path, str], None], filesystem: str
) -> None:
    prepared(files, journal)
    files.run(sqlite(journal, synchronous), check, filesystem=filesystem, budget=100, fork=False)


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
@pytest.mark.parametrize(
    "journal, synchronous, check, message",
    [
        ("delete", "off", is_sound, "missing: fsync of db before db-journal is removed"),
        ("delete", "full", keeps, "lost: unlink of db-journal"),
        ("wal", "normal", keeps, "missing: fsync of db-wal before the program says '1'"),
    ],
)
def test_sqlite_fails(
    files: CrashFiles,
    journal: str,
    synchronous: str,
    check: Callable[[Path, str], None],
    message: str,
    filesystem: str,
) -> None:
    prepared(files, journal)
    with pytest.raises(CrashFailure, match=message):
        files.run(sqlite(journal, synchronous), check, filesystem=filesystem)


# ---- pmstore itself


def makes_a_store(directory: Path) -> None:
    pmstore.open(directory / "new.pm", media="file")
    print("made")


def commits(directory: Path) -> None:
    store = pmstore.open(directory / "run.pm", media="file")
    array = store.require_array("a", (3000,), "f8")
    for k in (1, 2, 3):
        with store.transaction():
            array[:] = k
            store["k"] = k
            store[f"new {k}"] = np.full(500, k)
        print(k)
    store.close()


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_store_is_made_whole_or_not_at_all(files: CrashFiles, filesystem: str) -> None:
    def check(directory: Path, said: str) -> None:
        assert (directory / "new.pm").exists() or not said, "the store is missing"
        if (directory / "new.pm").exists():
            with pmstore.open(directory / "new.pm", "r+", media="file") as store:
                assert not store.check() and not len(store)

    files.run(makes_a_store, check, filesystem=filesystem, budget=80)


@pytest.mark.parametrize("filesystem, sector", [("posix", 512), ("posix", 4096), ("ext4", 512)])
def test_commits_survive(files: CrashFiles, filesystem: str, sector: int) -> None:
    def check(directory: Path, said: str) -> None:
        with pmstore.open(directory / "run.pm", media="file") as store:
            k = store.get("k", 0)
            assert k >= int(said.split()[-1] if said else 0), "an acknowledged commit is lost"
            assert not store.check()
            assert (store["a"] == k).all()
            assert all((store[f"new {n}"] == n).all() for n in range(1, k + 1))

    with pmstore.open(files.dir / "run.pm", media="file") as store:
        store.create_array("a", (3000,), "f8")
    files.run(commits, check, filesystem=filesystem, sector=sector, budget=120)


# ---- the examples

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "crashes"
DOCUMENT = EXAMPLES.parent.parent / "docs" / "what-crashes-leave.md"


def run_survey(*words: str) -> subprocess.CompletedProcess[str]:
    return python(EXAMPLES / "survey.py", *words)


@pytest.mark.long
def test_the_survey(tracing: None) -> None:
    done = run_survey("--budget", "20", "savez-rename", "pmstore")
    assert done.returncode == 0, done.stderr
    assert "missing: fsync of new.npz before new.npz is renamed to run.npz" in done.stdout
    assert "| `pmstore` | yes | yes | yes | yes | 20 + 20 |" in done.stdout
    assert run_survey("no-such-saver").returncode == 2


def test_the_document_has_every_saver() -> None:
    source = (EXAMPLES / "save.py").read_text(encoding="utf-8")
    names = re.findall(r'^    "([\w.-]+)": Saver', source, flags=re.MULTILINE)
    assert len(names) > 10
    text = DOCUMENT.read_text(encoding="utf-8")
    assert not [name for name in names if f"| `{name}` |" not in text]


# ---- the command

SAVE = """
    import os, sys
    new, path = sys.argv[1] + "/new", sys.argv[1] + "/run"
    with open(new, "w") as file:
        file.write("saved " * 1000)
        {sync}
    os.rename(new, path)
    print("saved")
    """
CHECK = """
    import os, sys
    path = sys.argv[1] + "/run"
    if os.path.exists(path):
        assert open(path).read() == "saved " * 1000, "not what was saved"
    assert open(sys.argv[2]).read() == open(os.environ["PMSTORE_CRASH_SAID"]).read()
    """


@pytest.fixture
def command(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> Command:
    """command(sync, *options): evaluates save.py with check.py, in the test's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: Path(".pmstore-crash"))
    (tmp_path / "files").mkdir()
    (tmp_path / "check.py").write_text(textwrap.dedent(CHECK))
    program = shlex.quote(sys.executable)

    def run(sync: str = "pass", *options: str, check: str | None = f"{program} -S check.py {{dir}} {{said}}") -> int:
        (tmp_path / "save.py").write_text(textwrap.dedent(SAVE).format(sync=sync))
        checks = [] if check is None else ["--check", check]
        words = ["--files", "files", *checks, "--budget", "60", *options]
        return _cli.main(["crash", "run", *words, "--", sys.executable, "-S", "save.py", "{dir}"])

    return run


def test_the_command_finds_a_missing_fsync(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 1
    text = capsys.readouterr().out
    assert "AssertionError: not what was saved (status 1)" in text
    assert "missing: fsync of new before new is renamed to run" in text
    line = next(line for line in text.splitlines() if "replay: " in line)
    path = Path(line.rpartition(" ")[2]) / "replay"
    assert (
        "python -m pmstore crash replay .pmstore-crash/tests-crash_files-test_explored.test_the_command_finds" in line
        and path.is_file()
    )
    assert (path.parent / "image" / "run").exists()
    assert replay_files(path) == 1
    assert "it still fails: AssertionError" in capsys.readouterr().out
    assert replay_files(path, "true {dir}") == 0


def test_the_command_passes(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("file.flush(); os.fsync(file.fileno())") == 0
    assert "no failure: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "sync, status", [("pass", 1), pytest.param("file.flush(); os.fsync(file.fileno())", 0, marks=pytest.mark.long)]
)
def test_the_server_of_a_python_check_changes_no_result(
    command: Command, capsys: pytest.CaptureFixture[str], sync: str, status: int
) -> None:
    texts = set()
    for start, jobs in (("", "1"), ("env ", "1"), ("", "3")):
        check = f"{start}{shlex.quote(sys.executable)} -S check.py {{dir}} {{said}}"
        assert command(sync, "--seed", "3", "--jobs", jobs, check=check) == status
        texts.add(capsys.readouterr().out)
        Path("files/run").unlink()
    assert len(texts) == 1, "".join(texts)


def test_the_command_shows_progress(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINES_EVERY", 0)
    command()
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"pmstore: crash states: 1 of \d+, [\d,]+ a second, .* left", lines[0])
    assert re.match(r"pmstore: fewer losses with the same failure: \d+ of 500, ", lines[-1])
    command("pass", "--quiet")
    assert not capsys.readouterr().err


def test_the_command_lists(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("pass", "--list", check=None) == 0
    assert "rename of new to run" in capsys.readouterr().out


def test_failures_are_kept_where_asked(command: Command) -> None:
    assert command("pass", "--keep", "here") == 1
    assert Path("here/replay").is_file() and Path("here/image").is_dir()


@pytest.mark.parametrize(
    "check, options, message",
    [
        (None, [], "--check is missing"),
        ("python check.py", [], "where the crash image comes in"),
        ("no-such-program {dir}", [], "there is no program 'no-such-program'"),
        ("false {dir}", [], "fails on the finished files"),
        (
            f"{sys.executable} -S -c 'import time; time.sleep(60)' {{dir}}",
            ["--timeout", "0.01"],
            "took longer than 0.01 s",
        ),
        ("true {dir}", ["--budget", "0"], "a budget of 0"),
        ("true {dir}", ["--files", "missing"], "missing is no directory"),
    ],
)
def test_the_command_on_misuse(
    command: Command, check: str | None, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("pass", *options, check=check) == 2
    assert message in capsys.readouterr().err


def test_a_command_without_program(tracing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["crash", "run", "--files", str(tmp_path), "--check", "true {dir}"]) == 2
    assert "there is no program to record" in capsys.readouterr().err
