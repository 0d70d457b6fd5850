"""pmstore doctor: it says what a machine and a directory offer, and makes a store to know."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import _doctor
from pmstore._cli import main
from tests.conftest import MEMORY, Medium
from tests.core.test_file_systems import KINDS, image_of, mounted


def test_a_directory_that_works(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(medium.directory)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["pmstore"] == pmstore.__version__
    assert found["versions"]["numpy"] == np.__version__
    with pmstore.open(medium.directory / "store.pm") as store:
        store.create_array("a", 1 << 20, "u1")
        store.commit()
        stats = store.stats()
    place = found["directory"]
    assert (place["medium"], place["domain"], place["tracker"]) == (stats.medium, stats.domain, stats.tracker)
    assert place["error"] is None and place["type"] != "unknown"
    assert [path.name for path in medium.directory.iterdir()] == ["store.pm"]  # it leaves nothing


def test_in_words(medium: Medium, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMSTORE_TRACKER", "compare")
    assert main(["doctor", str(medium.directory)]) == 0
    said = capsys.readouterr().out
    assert f"pmstore {pmstore.__version__}, python" in said
    assert "a store was made here, opened again and checked" in said
    assert "PMSTORE_TRACKER=compare" in said and "- a commit survives" in said


@pytest.mark.parametrize(
    ("path", "why"), [("missing", "there is no such directory"), ("file", "it is a file, not a directory")]
)
def test_a_directory_that_does_not(path: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["doctor", str(tmp_path / path)]) == 2
    said = capsys.readouterr().out
    assert f"- no store can be made in {tmp_path / path}: {why}\n" in said
    assert "unknown" not in said
    assert f"pmstore {pmstore.__version__}" in said


def test_limits_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    try:
        assert main(["doctor", str(tmp_path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    said = capsys.readouterr().out
    assert "files are limited to 1.0 MiB (ulimit -f)" in said and "no store can be made" in said


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """A directory on tmpfs."""
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="pmstore-test-", dir=MEMORY) as directory:
        yield Path(directory)


def notes_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["doctor", "--json", str(directory)]) == 0
    return list(json.loads(capsys.readouterr().out)["notes"])


def shown_as(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    read = _doctor._read
    monkeypatch.setattr(_doctor, "_read", lambda path: table if path == "/proc/self/mountinfo" else read(path))


def pretended(monkeypatch: pytest.MonkeyPatch, mounts: dict[Path, str]) -> None:
    """Directories are mount points, as mountinfo would show them: "type source options"."""
    table = ""
    for directory, shown in mounts.items():
        device = os.stat(directory).st_dev
        table += f"36 35 {os.major(device)}:{os.minor(device)} / {directory} rw,relatime shared:1 - {shown}\n"
    shown_as(monkeypatch, table)


@pytest.mark.parametrize("domain", ["", "memory"])
def test_memory_does_not_outlive_the_machine(
    domain: str, memory_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMSTORE_DOMAIN", domain)
    note = notes_of(memory_directory, capsys)[0]
    assert note.startswith("a commit survives the end of the process, not that of the machine: the bytes of tmpfs are")
    assert ("domain memory: an emulation of persistent memory" in note) == (domain == "memory")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("ramfs none rw", "not that of the machine: the bytes of ramfs are in its memory only"),
        ("ext4 /dev/sda1 rw,nobarrier", "a power cut may take commits (it is mounted with 'nobarrier')"),
        ("nfs4 server:/home rw,vers=4.2", "server takes depends on the server; use a store there from one machine"),
        ("fuse.sshfs server:/home rw", "honours syncs; use a store there from one machine, and by one mount"),
        ("ext4 /dev/sda1 rw,data=ordered", "a commit survives a power cut, if the disk honours flushes"),
        (
            "overlay overlay rw,lowerdir=/x,upperdir=/none",
            "flushes, and if the upper layer of this overlay, which is hidden",
        ),
        (
            "overlay overlay rw,lowerdir=/x,upperdir=/none,volatile",
            "a power cut may take any commit (it is mounted with",
        ),
    ],
)
def test_what_a_file_system_keeps(
    shown: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended(monkeypatch, {tmp_path: shown})
    notes = notes_of(tmp_path, capsys)
    assert expected in notes[0]
    assert not [note for note in notes[1:] if "power cut" in note]


def test_a_mount_of_btrfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The devices of its files are not those that mountinfo shows."""
    with mounted(image_of(KINDS["btrfs"], tmp_path / "image"), "nobarrier") as directory:
        assert "a power cut may take commits (it is mounted with 'nobarrier')" in notes_of(directory, capsys)[0]
        hiding = tmp_path / "hiding"
        hiding.mkdir()
        with mounted(image_of(KINDS["ext2"], hiding / "image"), "") as other:
            subprocess.run(["mount", "--bind", other, directory], check=True)
            try:
                assert "a commit survives a power cut" in notes_of(directory, capsys)[0]
            finally:
                subprocess.run(["umount", directory], check=True)


@pytest.mark.parametrize("name", ["a b", "a\tb", "a\nb", "a\\040b", "a#b", "a\r\u2028b", "\udcff"])
def test_mounts_with_odd_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    device, point = os.stat(folder).st_dev, os.fspath(folder)
    for character in "\\ \t\n#":
        point = point.replace(character, f"\\{ord(character):03o}")
    table = f"36 35 {os.major(device)}:{os.minor(device)} / {point} rw,relatime shared:1 - 9p share rw\n"
    shown_as(monkeypatch, table)
    assert main(["doctor", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["directory"]["type"] == "9p"


def test_an_overlay_keeps_what_its_upper_layer_keeps(
    tmp_path: Path, memory_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.stat(tmp_path).st_dev == os.stat(memory_directory).st_dev:
        pytest.skip("the temporary directory is on the same tmpfs")
    shown = f"overlay overlay rw,lowerdir=/x,upperdir={memory_directory},workdir=/y"
    pretended(monkeypatch, {tmp_path: shown, memory_directory: "tmpfs none rw"})
    assert "the bytes of an overlay whose changes are on tmpfs are in its memory only" in notes_of(tmp_path, capsys)[0]
    assert main(["doctor", str(tmp_path)]) == 0
    assert "whose upper layer is on tmpfs" in capsys.readouterr().out


def test_a_volatile_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real mount: the kernel shows its options as they are expected."""
    if os.geteuid():
        pytest.skip("only root may mount overlayfs")
    parts = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir()
    options = "lowerdir={},upperdir={},workdir={},volatile".format(*parts)
    mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(parts[-1])]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"overlayfs can't be mounted: {done.stderr.strip()}")
    try:
        assert "the kernel ignores syncs of files on this overlay" in notes_of(parts[-1], capsys)[0]
    finally:
        subprocess.run(["umount", "-l", parts[-1]], check=False)
