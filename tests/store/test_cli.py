"""The command line: what it prints, its exit status, and that no expected error gives a traceback."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._display import size_text
from tests.store.test_values import CONTAINERS, NUMPY, SIMPLE
from tests.support.template import python

CENTERS = np.arange(6.0).reshape(2, 3)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run.pm"
    with pmstore.open(path) as store:
        store["epoch"] = 3
        store["config"] = {"k": 10, "tol": 1e-4, "name": "ünïcode"}
        store["model/centers"] = CENTERS
        store["model/labels"] = np.arange(4, dtype=">i2")
        store.create_list("history").append(1.5)
    return path


@pytest.fixture
def path(example: Path, tmp_path: Path) -> Path:
    """A copy of its own, for tests that damage it."""
    return Path(shutil.copy(example, tmp_path / "copy.pm"))


def run(*arguments: Any, directory: Path | str = ".", **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    if not options:
        return python("-m", "pmstore", *arguments, directory=directory)
    command = [sys.executable, "-m", "pmstore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=directory, **options)


def in_process(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = _cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


# ---- what they print


def test_info(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = in_process(capsys, "info", example)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == str(example)
    for label in ("format", "medium", "commits", "names", "contents", "file", "region", "log", "state"):
        assert f"\n  {label} " in out
    assert "2 arrays, 2 values, 1 list\n" in out
    assert "state     clean" in out


def test_info_counts_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        store["x"] = np.arange(3.0)
        store["masked"] = np.ma.masked_array([1, 2], [True, False])
        store.derive("sum", np.cumsum, "x", version=np.__version__)
    status, out, err = in_process(capsys, "info", tmp_path / "s.pm")
    assert (status, err) == (0, "")
    assert "1 array, 0 values, 0 lists, 1 object, 1 derived array\n" in out
    about = json.loads(in_process(capsys, "info", "--json", tmp_path / "s.pm")[1])
    assert (about["names"], about["arrays"], about["objects"], about["derived_arrays"]) == (3, 1, 1, 1)


def test_info_json(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = in_process(capsys, "info", "--json", example)
    about = json.loads(out)
    assert status == 0
    assert (about["names"], about["arrays"], about["values"], about["lists"]) == (5, 2, 2, 1)
    assert about["format_version"] == 1
    assert about["sequence"] == 1
    assert about["media"] in ("memory", "file")
    assert about["file_bytes"] == example.stat().st_size
    assert 0 < about["region_used_bytes"] <= about["region_bytes"]
    assert 0 <= about["log_used_bytes"] <= about["log_bytes"]


def test_ls(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = in_process(capsys, "ls", example)
    assert (status, err) == (0, "")
    assert sorted(out.split()) == ["config", "epoch", "history", "model/centers", "model/labels"]


def test_ls_long_of_a_group(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = in_process(capsys, "ls", "-l", example, "model")
    assert status == 0
    assert out.splitlines() == ["model/centers  (2, 3) float64  48 B", "model/labels   (4,) >i2        8 B"]


def test_ls_of_one_name(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "ls", example, "model/labels")[:2] == (0, "model/labels\n")


def test_ls_tree(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = in_process(capsys, "ls", "--tree", example)
    assert "model/\n" in out
    assert "float64" not in out
    _, out, _ = in_process(capsys, "ls", "-lt", example)
    assert "float64" in out


def test_ls_json(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = in_process(capsys, "ls", "--json", example, "model")
    assert json.loads(out)[0] == {
        "name": "model/centers",
        "kind": "array",
        "type": "numpy.ndarray",
        "nbytes": 48,
        "shape": [2, 3],
        "dtype": "float64",
    }


def test_ls_of_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pmstore.open(tmp_path / "empty.pm").close()
    for option in ("-l", "-t", "-lt"):
        assert in_process(capsys, "ls", option, tmp_path / "empty.pm") == (0, "", "")
    assert in_process(capsys, "ls", "--json", tmp_path / "empty.pm")[:2] == (0, "[]\n")


def test_dump(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "dump", example, "epoch")[:2] == (0, "3\n")
    assert in_process(capsys, "dump", example, "model/centers")[:2] == (0, f"{CENTERS}\n")
    _, out, _ = in_process(capsys, "dump", example, "epoch", "model/centers", "history")
    assert out == f"epoch = 3\nmodel/centers =\n{CENTERS}\nhistory = [1.5]\n"


def test_dump_json(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = in_process(capsys, "dump", "--json", example)
    assert json.loads(out) == {
        "config": {"k": 10, "tol": 1e-4, "name": "ünïcode"},
        "epoch": 3,
        "history": [1.5],
        "model/centers": CENTERS.tolist(),
        "model/labels": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_options_may_stand_anywhere(at: int, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(example), "epoch", "history"]
    words.insert(at, "--json")
    assert json.loads(in_process(capsys, "dump", *words)[1]) == {"epoch": 3, "history": [1.5]}
    with pytest.raises(SystemExit):
        in_process(capsys, "dump", *words, "--jsn")
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (10**40, 10**40),
        (b"\x00\xff", {"bytes": "AP8="}),
        (1 - 2j, {"complex": [1.0, -2.0]}),
        (float("nan"), "nan"),
        ((1, (2.5, "x")), [1, [2.5, "x"]]),
        ({1: "a", (2, 3): "b"}, {"items": [[1, "a"], [[2, 3], "b"]]}),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1.0, np.inf, -np.inf]), [1.0, "inf", "-inf"]),
        (np.array(7), 7),
        (np.zeros((0, 3)), []),
        (np.array([["ab", "c"]]), [["ab", "c"]]),
        (np.array([2**64 - 1], dtype="u8"), [2**64 - 1]),
        (np.array([0.5], dtype=np.longdouble), [0.5]),
        (np.array([b"ab"]), [{"bytes": "YWI="}]),
        (np.array(["2024-05-06"], dtype="M8[D]"), ["2024-05-06"]),
        (np.array([90, -3, "NaT"], dtype="m8[m]"), ["PT90M", "-PT3M", "NaT"]),
        (np.array([1500, -1, 2000], dtype="m8[ms]"), ["PT1.5S", "-PT0.001S", "PT2S"]),
        (np.array([3], dtype="m8[7D]"), ["P21D"]),
        ([np.timedelta64(2, "Y"), np.timedelta64(1, "as"), np.timedelta64(4)], ["P2Y", f"PT0.{1:018}S", 4]),
        (np.array([(1, 2.5)], dtype=[("n", "i4"), ("x", "f8")]), [{"n": 1, "x": 2.5}]),
        (np.array([1 + 1j], dtype="c8"), [{"complex": [1.0, 1.0]}]),
        (np.array([b"abc"], dtype="V3"), [{"bytes": "YWJj"}]),
    ],
)
def test_values_as_json(value: Any, expected: Any) -> None:
    got = _cli.to_json(value)
    assert got == expected
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize("value", [*SIMPLE, *NUMPY, *CONTAINERS], ids=repr)
def test_every_value_has_a_form_in_json(value: Any) -> None:
    json.dumps(_cli.to_json(value), allow_nan=False)


def test_nothing_is_changed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    os.chmod(path, 0o444)
    for command in ("info", "ls", "check", "dump"):
        assert in_process(capsys, command, path)[0] == 0
    assert path.read_bytes() == before


def test_a_store_whose_writer_was_killed_is_read_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed.pm"
    code = "import os, sys, pmstore; s = pmstore.open(sys.argv[1]); s['x'] = 1; s.commit(); os.kill(os.getpid(), 9)"
    assert python("-c", code, path).returncode == -9
    before = path.read_bytes()
    assert "1 commit to recover" in in_process(capsys, "info", path)[1]
    assert in_process(capsys, "dump", path, "x")[:2] == (0, "1\n")
    assert in_process(capsys, "check", path)[0] == 0
    assert path.read_bytes() == before


# ---- check


def test_check_of_a_sound_store(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "check", example) == (0, f"{example}: sound, 5 names\n", "")
    _, out, _ = in_process(capsys, "check", "--json", example)
    assert json.loads(out) == {"path": str(example), "sound": True, "problems": []}


def test_check_names_the_damaged_array(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path)
    status, out, err = in_process(capsys, "check", path)
    assert status == 1
    assert "model/centers" in out
    assert "1 problem\n" in err
    status, out, _ = in_process(capsys, "check", "--json", path)
    report = json.loads(out)
    assert status == 1
    assert not report["sound"]
    assert "model/centers" in report["problems"][0]


def test_check_of_a_store_without_a_valid_header(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    for at in (40, 4096 + 40):
        damaged[at] ^= 0xFF
    path.write_bytes(damaged)
    done = run("check", path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def damage(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[damaged.find(CENTERS.tobytes()) + 9] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("options", [[], ["--json"], ["--npy", "x.npy"]])
def test_a_damaged_array_is_not_dumped(options: list[str], path: Path) -> None:
    damage(path)
    done = run("dump", *options, path, "model/centers", directory=path.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "damaged: 'model/centers'" in done.stderr
    assert not (path.parent / "x.npy").exists()
    assert run("dump", path).returncode == 1
    done = run("dump", path, "model/labels", "epoch")
    assert (done.returncode, done.stdout) == (0, "model/labels = [0 1 2 3]\nepoch = 3\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["check a.pm", "dump --json a.pm", "backup a.pm b.pm", "compact a.pm"])
def test_without_standard_streams(command: str, closed: str, tmp_path: Path) -> None:
    pmstore.open(tmp_path / "a.pm").close()
    shell = f"{sys.executable} -m pmstore {command} {closed}"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("b.pm" in os.listdir(tmp_path)) == command.startswith("backup")


@pytest.mark.parametrize("command", [["dump"], ["dump", "--json"], ["dump", "--npy", "x.npy"], ["export"]])
@pytest.mark.parametrize("writeable", [False, True])
def test_a_damaged_array_that_is_mapped(command: list[str], writeable: bool, tmp_path: Path) -> None:
    path = tmp_path / "constant.pm"
    with pmstore.open(path) as store:
        store.create_array("model/centers", (1000, 2, 3), fill_value=CENTERS, writeable=writeable)
    damage(path)
    last = ["x.npz"] if command == ["export"] else ["model/centers"]
    done = run(*command, path, *last, directory=tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and "damaged: 'model/centers'" in done.stderr
    assert os.listdir(tmp_path) == ["constant.pm"]


# ---- backup, compact and salvage


def test_backup(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "backup.pm"
    with pmstore.open(path) as store:  # being written
        status, out, _ = in_process(capsys, "backup", path, target)
        assert status == 0 and out.startswith(f"{target}: commit {store.sequence} of {path}, ")
    status, out, err = in_process(capsys, "backup", path, target)
    assert (status, out) == (2, "") and "exists: a backup is a new file" in err
    target.unlink()
    status, out, _ = in_process(capsys, "backup", "--json", path, target)
    assert json.loads(out)["bytes"] == target.stat().st_size
    assert in_process(capsys, "check", target)[0] == 0
    path.write_bytes(b"")
    assert in_process(capsys, "backup", path, tmp_path / "none")[0] == 2 and not (tmp_path / "none").exists()


def test_compact(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unchanged = f"{path}: {size_text(path.stat().st_size)}, and can't be smaller\n"
    assert in_process(capsys, "compact", path)[:2] == (0, unchanged)
    with pmstore.open(path) as store:
        store["gone"] = np.ones(200_000)
        store.commit()
        del store["gone"]
    before = path.stat().st_size
    status, out, _ = in_process(capsys, "compact", "--json", path)
    assert (status, json.loads(out)["bytes_before"]) == (0, before)
    assert json.loads(out)["bytes_after"] == path.stat().st_size < before
    assert in_process(capsys, "check", path)[1].endswith("sound, 5 names\n")
    with pmstore.open(path):
        status, out, err = in_process(capsys, "compact", path)
        assert (status, out) == (2, "") and "is in use" in err


def test_salvage(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rescued.pm"
    assert in_process(capsys, "salvage", path, target)[:2] == (0, f"{target}: 5 names, 0 problems in {path}\n")
    status, out, err = in_process(capsys, "salvage", path, target)
    assert (status, out) == (2, "") and "exists: salvage writes a new store" in err
    damage(path)
    status, out, err = in_process(capsys, "compact", path)
    assert (status, out) == (1, "") and "salvage copies what is sound" in err
    target.unlink()
    status, out, _ = in_process(capsys, "salvage", path, target)
    assert status == 1 and out.startswith("'model/centers': its contents are damaged")
    assert out.endswith(f"{target}: 4 names, 1 problem in {path}\n")
    target.unlink()
    status, out, _ = in_process(capsys, "salvage", "--json", path, target)
    about = json.loads(out)
    assert (status, about["names"], about["problems"][0]["name"]) == (1, 4, "model/centers")
    target.unlink()
    path.write_bytes(b"no store at all" * 1000)
    assert in_process(capsys, "salvage", path, target)[0] == 2
    assert in_process(capsys, "salvage", path, tmp_path / "none" / "x")[0] == 2 and not target.exists()


# ---- errors: one line on stderr, status 2, no traceback


def failing(tmp_path: Path) -> dict[str, list[Any]]:
    (tmp_path / "text.pm").write_text("not a store\n" * 2000)
    (tmp_path / "empty.pm").write_bytes(b"")
    return {
        "missing": ["ls", tmp_path / "missing.pm"],
        "not a store": ["info", tmp_path / "text.pm"],
        "empty": ["check", tmp_path / "empty.pm"],
        "directory": ["ls", tmp_path],
    }


@pytest.mark.parametrize("case", ["missing", "not a store", "empty", "directory"])
def test_what_cannot_be_opened(case: str, tmp_path: Path) -> None:
    arguments = failing(tmp_path)[case]
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pmstore: ")
    assert str(arguments[1]) in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["dump", "PATH", "epoch", "unknown"],
        ["ls", "PATH", "unknown"],
        ["ls", "PATH", "mod"],
        ["dump", "--npy", "x.npy", "PATH", "epoch"],
        ["dump", "--npy", "x.npy", "PATH"],
        ["dump", "--npy", "no/such/folder/x.npy", "PATH", "model/centers"],
        ["dump", "PATH", "/a//b"],
        ["info", ""],
        ["ls", "\udcff"],
    ],
)
def test_wrong_names(arguments: list[str], example: Path, tmp_path: Path) -> None:
    done = run(*[str(example) if argument == "PATH" else argument for argument in arguments], directory=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x.npy").exists()


def test_a_group_is_called_one(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model", "model/"):
        status, out, err = in_process(capsys, "dump", example, name)
        assert (status, out) == (2, "") and "'model' is a group" in err


def test_a_missing_store_is_not_offered_a_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.pm"
    assert in_process(capsys, "ls", path) == (2, "", f"pmstore: {path}: there is no such file\n")
    link = tmp_path / "link.pm"
    link.symlink_to(path)
    assert in_process(capsys, "ls", link) == (2, "", f"pmstore: {link}: it is a link to a file that is not there\n")


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["ls"], ["ls", "--no-such-option", "x"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: pmstore" in done.stderr
    assert "Traceback" not in done.stderr


def commands() -> set[str]:
    """Those whose options are in `_cli.py` itself."""
    (found,) = (one for one in _cli._parser([])._actions if isinstance(one, argparse._SubParsersAction))
    return set(found.choices) - {"archive", "crash"}


def test_all_commands_work_beside_a_writer(tmp_path: Path) -> None:
    """Except the four that stores.md names."""
    path = tmp_path / "busy.pm"
    words: dict[str, list[Any]] = {command: [path] for command in ("ls", "info", "check", "dump")}
    words |= {"backup": [path, tmp_path / "copy.pm"], "export": [path, tmp_path / "busy.npz"]}
    words |= {"watch": [path, "--once"], "top": [tmp_path, "--once"], "doctor": [tmp_path]}
    assert set(words) == commands() - {"compact", "import", "upgrade", "salvage"}
    with pmstore.open(path) as store:
        store["x"] = 1
        store.commit()
        store["x"] = 2
        done = {command: run(command, *arguments) for command, arguments in words.items()}
    assert {(one.returncode, one.stderr) for one in done.values()} == {(0, "")}
    assert "being written" in done["info"].stdout and done["dump"].stdout == "1\n"


@pytest.mark.parametrize("command", sorted(commands()))
def test_help_tells_the_exit_status_and_gives_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    status = done.stdout.split("exit status:\n")[1]
    assert status.startswith("  0  ") and "for " not in status
    assert ("the store is sound" in status) == (command == "check")
    assert ("was left out" in status) == (command == "salvage")
    assert f"pmstore {command}" in done.stdout.split("examples:")[1]


def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "many.pm") as store:
        for i in range(5000):
            store[f"some/quite/long/name/of/a/value/{i:06}"] = i
    command = f"'{sys.executable}' -m pmstore ls '{tmp_path / 'many.pm'}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "some/quite/long/name/of/a/value/000000\n"
    assert done.stderr == ""


def test_output_that_cannot_show_a_name(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "names.pm") as store:
        store["名前"] = "値"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run("ls", tmp_path / "names.pm", env=environment)
    assert (done.returncode, done.stdout) == (0, "\\u540d\\u524d\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    value = {"名前": "ü ÿ 😀 \x7f"}
    with pmstore.open(tmp_path / "names.pm") as store:
        store["値"] = value
    command = [sys.executable, "-m", "pmstore", "dump", "--json", tmp_path / "names.pm"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, timeout=60)
    assert json.loads(done.stdout.decode(encoding)) == {"値": value}


def test_derived_arrays_are_shown_without_their_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.pm"
    with pmstore.open(path) as store:
        store["x"] = np.ones(2)
        store.derive("kept", np.negative, "x", policy="store").value  # noqa: B018
        store.derive("lost", np.negative, "x", version="b", policy="recompute").value  # noqa: B018
    kept, lost = "derived by numpy:negative version 1, stored", "derived by numpy:negative version b, not stored"
    rows = [line.split(maxsplit=1)[1] for line in in_process(capsys, "ls", "-l", path)[1].splitlines()]
    assert [row.rpartition("  ")[0].strip() for row in rows] == [f"(2,) float64 {kept}", lost, "(2,) float64"]
    about = json.loads(in_process(capsys, "ls", "--json", path)[1])
    assert [row["kind"] for row in about] == ["derived", "derived", "array"] and about[0]["shape"] == [2]
    assert in_process(capsys, "dump", path)[1] == f"[1. 1.]\nkept: {kept}\nlost: {lost}\n"
    assert json.loads(in_process(capsys, "dump", "--json", path)[1])["lost"] == {"derived": lost}
    assert in_process(capsys, "dump", path, "kept")[2].endswith("only a program that declares it can read it\n")
    assert in_process(capsys, "check", path)[1].endswith("sound, 3 names\n")


def test_options_between_path_and_names(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "ls", example, "-l", "model") == in_process(capsys, "ls", "-l", example, "model")
    status, out, _ = in_process(capsys, "ls", example, "model", "epoch")
    assert (status, out.split()) == (0, ["model/centers", "model/labels", "epoch"])
    assert in_process(capsys, "ls", example, "model", "model/labels", "model")[1] == "model/centers\nmodel/labels\n"
    status, out, err = in_process(capsys, "ls", example, "model", "nothing")
    assert (status, out) == (2, "") and "no group 'nothing'" in err


def test_a_full_output_is_not_the_stores_fault(example: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pmstore", "ls", str(example)]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert found.returncode == 2 and found.stderr.startswith("pmstore: standard output: No space left")


def test_a_status_is_told_if_a_message_can_not_be(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pmstore", "ls", str(tmp_path / "none.pm")]
        assert subprocess.run(command, stderr=full, timeout=60, check=False).returncode == 2


def test_a_path_can_not_affect_a_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = shutil.copy(path, path.with_name("\x1b[31mrun.pm"))
    for words in (
        ("check", odd),
        ("backup", odd, f"{odd}.backup"),
        ("salvage", odd, f"{odd}.salvaged"),
        ("export", odd, f"{odd}.npz"),
        ("import", f"{odd}.npz", f"{odd}.imported"),
        ("compact", odd),
        ("upgrade", odd),
        ("ls", odd, "nothing"),
        ("check", f"{odd}.none"),
    ):
        _cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "\\x1b[31mrun.pm" in out + err and "\x1b" not in out + err, words


def test_commands_beside_commits_without_a_pause(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(path) as store:
        store["w"] = np.zeros(1 << 12)
        store.commit()
        done = threading.Event()

        def writes() -> None:
            while not done.is_set():
                with store.transaction():
                    store["w"][...] += 1
                    store["epoch"] += 1

        writing = threading.Thread(target=writes)
        writing.start()
        try:
            for _ in range(3):
                assert in_process(capsys, "check", path)[::2] == (0, "")
                status, out, err = in_process(capsys, "dump", "--json", path, "w", "epoch")
                found = json.loads(out)
                assert (status, err) == (0, "") and {value + 3 for value in found["w"]} == {found["epoch"]}
            status, _, err = in_process(capsys, "salvage", path, path.with_name("rescued.pm"))
            assert status == 2 and "salvage is for one that nobody writes" in err
        finally:
            done.set()
            writing.join()


def test_little_memory_is_no_damage(path: Path, tmp_path: Path) -> None:
    with pmstore.open(path) as store:
        store["large"] = [{"n": i} for i in range(400_000)]
    limited = (
        "import resource, sys, pmstore; from pmstore import _cli; store = pmstore.open(sys.argv[2], 'r')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2); sys.exit(_cli.main(sys.argv[1:]))"
    )
    for command in (("check", path), ("salvage", path, tmp_path / "rescued.pm")):
        found = python("-c", limited, *command)
        assert found.returncode == 2 and "no memory" in found.stderr, found.stderr
    assert not (tmp_path / "rescued.pm").exists()
