"""Drains of a folder, crashed at every moment: files, names and bytes as a file system may leave them."""

from __future__ import annotations

from pathlib import Path

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
        assert archive.open(directory / "first").verify().ok


@pytest.mark.parametrize("filesystem", ["posix", "ext4"])
def test_a_crash_at_any_moment(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch, filesystem: str) -> None:
    monkeypatch.setattr("pmstore.testing._base.session.directory", lambda: tmp_path / "kept")
    report = CrashFiles(tmp_path / "files").run(drains, checks, filesystem=filesystem, budget=120)
    assert report.tally.judged > 60
