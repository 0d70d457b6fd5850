"""pmstore doctor: it says what a machine and a directory offer, and makes a store to know."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._cli import main
from tests.conftest import Medium


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


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_directory_that_does_not(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["doctor", str(tmp_path / path)]) == 2
    said = capsys.readouterr().out
    assert f"- no store can be made in {tmp_path / path}: " in said
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
