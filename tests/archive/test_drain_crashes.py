"""Drains of a folder, crashed at every moment: files, names and bytes as a file system may leave them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import archive
from pmstore.archive import _index as index
from pmstore.archive._local import LocalPlace
from pmstore.testing._files.fixture import CrashFiles
from tests.archive.stepping import archived, stepping

pytest.importorskip("numcodecs")


def drains(directory: Path) -> None:
    """Drains to two folders, with retention, a tag and a merged index. It says which version both folders have."""
    index._FAN = 3
    places = [LocalPlace(str(directory / name)) for name in ("first", "second")]
    with pmstore.open("/dev/shm/pmstore-drain-crash.pm", "w") as store, stepping(store, *places, keep=2) as steps:
        x = store.create_array("x", 700)
        for value in range(1, 6):
            x[:] = store["value"] = value
            store.commit()
            archived(steps)
            print(store.sequence)
            if value == 2:
                archive.open(directory / "first").tag("two")
    Path("/dev/shm/pmstore-drain-crash.pm").unlink()


def checks(directory: Path, said: str) -> None:
    """Each version that a folder lists is a commit, and what was said to be there is."""
    done = int(said.split()[-1]) if said else 0
    for name in ("first", "second"):
        try:
            found = archive.open(directory / name)
        except pmstore.ArchiveError:
            assert not done, f"{name} is gone"
            continue
        assert found.latest >= (done or -1) and found.verify().ok
        for version in found:
            assert (found[version]["x"] == version).all() and found[version]["value"] == version
        if done >= 3 and name == "first":
            assert found[found.tags["two"]]["value"] == 2
    if done:
        again = directory / "again.pm"
        assert archive.restore(again, sources=[directory / "first", directory / "second"]) >= done
        with pmstore.open(again) as store:  # which goes on with the archive
            store["x"] = np.full(700, store.sequence + 1.0)
            store["value"] = store.sequence + 1
            store.commit()
            with store.drain(directory / "first") as drain:
                assert drain.wait() == store.sequence
        found = archive.open(directory / "first")
        assert found.verify().ok
        named = {part for row in found._index.rows() for part in row.parts}
        assert {f"parts/{path.name}" for path in (directory / "first" / "parts").glob("[!.]*")} == named


def lossy(directory: Path) -> None:
    """Drains to a folder with a lossy codec for y, and retention. It says which version the folder has."""
    codec = {"y": {"id": "pmstore.lcdelta", "bits": 1, "rebase_every": 3}}
    path = "/dev/shm/pmstore-lossy-drain-crash.pm"
    with (
        pmstore.open(path, "w") as store,
        stepping(store, LocalPlace(str(directory / "first")), codec=codec, keep=4) as steps,
    ):
        x, y = store.create_array("x", 700), store.create_array("y", 700)
        for value in range(1, 8):
            x[:] = store["value"] = value
            y[:] = noise(value)
            store.commit()
            archived(steps)
            print(store.sequence)
    Path(path).unlink()


def noise(value: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(value).normal(size=700)


def checks_lossy(directory: Path, said: str) -> None:
    """Each version has its commit, but for the error that it tells; and a drain goes on."""
    done = int(said.split()[-1]) if said else 0
    try:
        found = archive.open(directory / "first")
    except pmstore.ArchiveError:
        assert not done
        return
    assert found.latest >= (done or -1) and found.verify().ok
    for info in found.log():
        version = found[info.version]
        assert (version["x"] == info.version).all() and version["value"] == info.version
        error = np.abs(version["y"] - noise(info.version)).max()
        assert error == (version.losses["y"].absolute if info.lossy else 0)
        assert bool(info.lossy) == (info.version % 4 != 1)
    if done:
        again = directory / "again.pm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pmstore.ArchiveWarning)
            archive.restore(again, sources=[directory / "first"])
        with pmstore.open(again) as store, store.drain(directory / "first", codec={"y": "zstd"}) as drain:
            store["value"] = 0
            store.commit()
            assert drain.wait() == store.sequence
            assert archive.open(directory / "first").log()[-1].lossy == 0


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_crash_with_a_lossy_codec(
    tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    report = CrashFiles(tmp_path / "files").run(lossy, checks_lossy, filesystem=filesystem, budget=60)
    assert report.tally.evaluated > 30


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_crash_at_any_moment(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, filesystem: str) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    report = CrashFiles(tmp_path / "files").run(drains, checks, filesystem=filesystem, budget=120)
    assert report.tally.evaluated > 60
