"""The golden archive: every release reads archives of format 1, and continues them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("numcodecs")

import pmstore
from tests.golden import contents
from tests.golden.files import registered
from tests.golden.make import HERE

FIRST = 4  # the number of the first version


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    registered(monkeypatch)
    with zipfile.ZipFile(HERE / "archive1.zip") as file:
        file.extractall(tmp_path)
    return str(tmp_path / "archive")


def test_every_version_reads_as_it_did(archive: str, tmp_path: Path) -> None:
    found = pmstore.archive.open(archive)
    assert list(found) == list(range(FIRST, FIRST + contents.STEPS))
    assert found.verify().ok and found.tags == {"chosen": FIRST + 3}
    for step in range(contents.STEPS):
        contents.assert_version(found[FIRST + step], step)
        path = tmp_path / f"{step}.pm"
        found.restore(path, FIRST + step)
        with pmstore.open(path, "r", verify=True) as store:
            assert store.sequence == FIRST + step
            assert store.commit_note() == (f"step {step}", {"loss": 1 / (step + 1)})
            contents.assert_version(store, step)
            contents.assert_entries(store)


def test_it_is_continued(archive: str, tmp_path: Path) -> None:
    pmstore.archive.open(archive).restore(tmp_path / "again.pm")
    with pmstore.open(tmp_path / "again.pm") as store, store.drain(archive) as drain:
        store["weights"][contents.STEPS] = contents.STEPS + 1
        store["step"] = contents.STEPS
        store.commit()
        drain.wait()
    found = pmstore.archive.open(archive)
    assert found.verify().ok and len(list(found)) == contents.STEPS + 1
    contents.assert_version(found[FIRST + contents.STEPS], contents.STEPS)
