"""``pmstore dump --npy``: one array in a new file for numpy.load."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pmstore
from tests.store.test_cli import CENTERS, in_process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.pm"
    with pmstore.open(path) as store:
        store["centers"] = CENTERS
        store["labels"] = np.arange(4, dtype=">i2")
    return path


def test_dump_npy(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "labels.npy"
    assert in_process(capsys, "dump", "--npy", file, path, "labels") == (0, "", "")
    labels = np.load(file)
    assert labels.dtype == np.dtype(">i2")
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["the store", "link", "hard link", "another store", "file", "directory"])
def test_npy_replaces_nothing(kind: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another store may have a writer, whose next commit would go to a file without a name."""
    target = path if kind == "the store" else tmp_path / "target"
    if kind == "link":
        target.symlink_to(path)
    elif kind == "hard link":
        target.hardlink_to(path)
    elif kind == "another store":
        pmstore.open(target).close()
    elif kind == "file":
        target.write_bytes(b"old")
    elif kind == "directory":
        target.mkdir()
    before = None if kind == "directory" else target.read_bytes()
    names = sorted(os.listdir(tmp_path))
    status, out, err = in_process(capsys, "dump", "--npy", target, path, "centers")
    assert (status, out, err) == (2, "", f"pmstore: {path}: {str(target)!r} exists: --npy writes a new file\n")
    assert sorted(os.listdir(tmp_path)) == names and (before is None or target.read_bytes() == before)


def test_npy_does_not_replace_a_file_that_came_meanwhile(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, save = tmp_path / "x.npy", np.save

    def saved(*arguments: object, **options: object) -> None:
        save(*arguments, **options)  # type: ignore[arg-type]
        target.write_bytes(b"another program's")

    monkeypatch.setattr(np, "save", saved)
    status, _, err = in_process(capsys, "dump", "--npy", target, path, "centers")
    assert status == 2 and "exists: --npy writes a new file" in err
    assert target.read_bytes() == b"another program's" and sorted(os.listdir(tmp_path)) == ["run.pm", "x.npy"]


def test_npy_is_written_whole_or_not_at_all(path: Path, tmp_path: Path) -> None:
    """A limit on the size of files is a full disk for a writer."""
    with pmstore.open(path) as store:
        store["big"] = np.arange(100_000.0)
    limited = (
        "import resource, sys; from pmstore import _cli, _dump; save = _dump._save\n"
        "def full(*arguments): resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); save(*arguments)\n"
        "_dump._save = full; sys.exit(_cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "dump", "--npy", "big.npy", str(path), "big"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("pmstore: big.npy: ") and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["run.pm"]


def test_npy_through_a_link_and_to_a_device(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link.npy").symlink_to(tmp_path / "real.npy")
    assert in_process(capsys, "dump", "--npy", tmp_path / "link.npy", path, "centers") == (0, "", "")
    assert (tmp_path / "link.npy").is_symlink()
    assert (np.load(tmp_path / "real.npy") == CENTERS).all()
    (tmp_path / "null").symlink_to("/dev/null")
    for _ in range(2):
        assert in_process(capsys, "dump", "--npy", tmp_path / "null", path, "centers") == (0, "", "")
    assert Path("/dev/null").is_char_device()


def test_npy_of_text(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy has no StringDType")
    with pmstore.open(path) as store:
        store["words"] = np.array(["a", "bb"], np.dtypes.StringDType())
    status, out, err = in_process(capsys, "dump", "--npy", tmp_path / "x.npy", path, "words")
    message = "'words' is of StringDType, which an .npy file can't hold: use --json, or export"
    assert (status, out, err) == (2, "", f"pmstore: {path}: {message}\n")
    assert os.listdir(tmp_path) == ["run.pm"]


@pytest.mark.parametrize("command", [["ls"], ["dump"], ["watch"], ["archive", "forget"]])
def test_names_that_may_be_left_out_are_not_required(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if command[0] == "archive":
        pytest.importorskip("numcodecs")
    with pytest.raises(SystemExit):
        in_process(capsys, *command)
    wanted = "URL" if command[0] == "archive" else "PATH"
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {wanted}\n")


def test_npy_on_a_full_disk(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = in_process(capsys, "dump", "--npy", "/dev/full", path, "centers")
    assert (status, out) == (2, "") and "/dev/full" in err and os.strerror(errno.ENOSPC) in err
