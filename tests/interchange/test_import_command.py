"""The commands `pmstore export` and `pmstore import`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._interchange import command

pytestmark = pytest.mark.filterwarnings("ignore:.*Zarr V3.*", "ignore:.*does not have a Zarr.*")


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = _cli.main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_the_command(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        store.update({"x": np.arange(5.0), "g/y": (1, 2)})
        store.attrs("x")["units"] = "K"
    out = tmp_path / f"out.{form}"
    assert run(capsys, "export", store.path, out, "--name", "x", "--name", "g")[0] == 0
    status, text, _ = run(capsys, "import", out, tmp_path / "b.pm", "--group", "from/a", "--name", "g", "--name", "x=z")
    assert (status, text) == (0, f"group 'from/a' of {tmp_path / 'b.pm'}: 2 names of {out}\n")
    with pmstore.open(tmp_path / "b.pm", "r") as store:
        assert list(store) == ["from/a/g/y", "from/a/z"] and store["from/a/g/y"] == (1, 2) and store.sequence == 1
        assert store.attrs("from/a/z")["units"] == "K" and store["from/a/z"].tolist() == [0, 1, 2, 3, 4]
    status, text, error = run(capsys, "import", out, tmp_path / "b.pm", "--group", "from/a", "--name", "x=z")
    assert (status, text) == (2, "") and "is taken" in error and error.count("\n") == 1
    status, text, _ = run(capsys, "import", "--json", out, tmp_path / "c.pm")
    assert (status, json.loads(text)["names"]) == (0, 2)


@pytest.mark.parametrize("rich", [True, False])
def test_progress_on_a_terminal(
    tmp_path: Path, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    np.savez(tmp_path / "x.npz", x=np.arange(10**6))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words in (["import", "x.npz", "x.pm"], ["export", "x.pm", "y.npz"]):
        status, _, error = run(capsys, words[0], *(tmp_path / name for name in words[1:]))
        assert status == 0 and (rich or error.endswith("MiB of 7.6 MiB\r\033[K")), error
    status, _, error = run(capsys, "import", "--json", tmp_path / "x.npz", tmp_path / "z.pm")
    assert (status, error) == (0, "")


def test_a_failed_import_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK")
    for path, text in (("bad.npz", "can't be read"), ("none.npz", "no such file"), ("bad", "no such file")):
        status, out, error = run(capsys, "import", tmp_path / path, tmp_path / "new.pm")
        assert (status, out) == (2, "") and text in error and error.count("\n") == 1, error
    assert os.listdir(tmp_path) == ["bad.npz"]


def test_the_command_takes_the_paths_of_load_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    for path in (f"file://{tmp_path}/x.npz", "~/x.npz"):
        assert run(capsys, "import", path, tmp_path / f"{len(path)}.pm")[::2] == (0, ""), path
    assert "is not on this machine" in run(capsys, "import", "s3://bucket/x.npz", tmp_path / "new.pm")[2]
    (tmp_path / "loop").symlink_to("loop")  # root, too, can't look into it
    status, out, error = run(capsys, "import", tmp_path / "loop" / "x.npz", tmp_path / "new.pm")
    assert (status, out) == (2, "") and os.strerror(errno.ELOOP) in error and error.count("\n") == 1, error
    assert not (tmp_path / "new.pm").exists()


HOLDS = """
import sys, pmstore
with pmstore.open(sys.argv[1]) as store:
    store["precious"] = 1
    store.commit()
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_an_import_does_not_delete_the_store_of_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process makes it in the moment before this one opens it."""
    np.savez(tmp_path / "x.npz", a=np.arange(3))
    path, opened, others = tmp_path / "new.pm", command.open_store, []

    def late(*arguments: Any) -> pmstore.Store:
        if not others:
            code = [sys.executable, "-c", HOLDS, path]
            others.append(subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert others[0].stdout is not None and others[0].stdout.readline() == "held\n"
        return opened(*arguments)

    monkeypatch.setattr(command, "open_store", late)
    status, _, error = run(capsys, "import", tmp_path / "x.npz", path)
    others[0].communicate("\n")
    assert status == 2 and "has it open for writing" in error, error
    with pmstore.open(path, "r", verify=True) as store:
        assert dict(store) == {"precious": 1}


def test_the_command_gives_each_name_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", y=np.arange(3))
    words = ["import", str(tmp_path / "x.npz"), str(tmp_path / "run.pm"), "--name", "y=z", "--name"]
    assert _cli.main([*words, "y=w"]) == 2
    assert capsys.readouterr().err.endswith("--name gives 'y' two names, 'z' and 'w'\n")
    assert not (tmp_path / "run.pm").exists() and _cli.main([*words, "y=z"]) == 0


@pytest.mark.parametrize("name", ["y=", "=z", "="])
def test_a_name_of_the_command_that_is_empty(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", y=np.arange(3))
    assert _cli.main(["import", str(tmp_path / "x.npz"), str(tmp_path / "run.pm"), "--name", name]) == 2
    assert capsys.readouterr().err.endswith(f"--name takes NAME or NAME=NEW, not {name!r}\n")
    assert not (tmp_path / "run.pm").exists()
