"""pmstore archive: the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore._cli import main

pytest.importorskip("numcodecs")


@pytest.fixture
def place(tmp_path: Path) -> str:
    """An archive of five versions, whose messages are "epoch 0" and so on."""
    with pmstore.open(tmp_path / "run.pm") as store, store.drain(tmp_path / "archive") as drain:
        store["w"] = np.zeros((10, 784))
        for epoch in range(5):
            with store.transaction(message=f"epoch {epoch}", attributes={"loss": 1 / (epoch + 1)}):
                store["w"][epoch] += 1
            drain.wait()
    return str(tmp_path / "archive")


def test_list(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "list", place, "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["4", "5"] and "epoch 4 loss=0.2" in lines[1]
    assert main(["archive", "list", place, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5] and rows[1]["attributes"] == {"loss": 0.5}


def test_a_time_that_is_no_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pmstore.open(tmp_path / "run.pm") as store:
        patched.setattr("time.time", lambda: 1e300)
        with store.drain(tmp_path / "archive") as drain:
            store["w"] = 1
            store.commit()
            drain.wait()
    assert main(["archive", "list", str(tmp_path / "archive")]) == 0
    assert "1e+300 s" in capsys.readouterr().out


def test_attributes_of_any_type_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attributes = {"loss": np.float32(0.5), "nan": np.nan, "raw": b"ab", "day": date(2026, 1, 2), "v": np.arange(2)}
    with pmstore.open(tmp_path / "run.pm") as store, store.drain(tmp_path / "archive"):
        with store.transaction(attributes=attributes):
            store["w"] = 1
    assert main(["archive", "list", str(tmp_path / "archive"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    expected = {"loss": 0.5, "nan": "nan", "raw": {"bytes": "YWI="}, "day": "2026-01-02", "v": [0, 1]}
    assert row["attributes"] == expected


def test_diff(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "diff", place, "1", "3"]) == 0
    assert capsys.readouterr().out.split() == ["w", "changed", "1,568", "elements"]
    assert main(["archive", "diff", place, "1", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"w": {"kind": "changed", "elements": 1568}}


def test_restore_and_fork(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again, fork = str(tmp_path / "again.pm"), str(tmp_path / "fork.pm")
    assert main(["archive", "restore", place, again, "--version", "3"]) == 0
    assert main(["archive", "restore", place, fork, "--fork", "--version", "2", "--source", place]) == 0
    assert capsys.readouterr().out == f"{again}: version 3\n{fork}: version 2\n"
    for path, sequence in ((again, 3), (fork, 2)):
        with pmstore.open(path, "r") as store:
            assert store.sequence == sequence and store["w"].sum() == 784 * sequence
    assert main(["archive", "restore", place, again]) == 2
    assert "exists" in capsys.readouterr().err


def test_tags_and_forgetting(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "tag", place, "best", "--version", "2"]) == 0
    assert main(["archive", "tag", place]) == 0
    assert capsys.readouterr().out.split() == ["best", "2"]
    assert main(["archive", "forget", place, "--keep-last", "1"]) == 0
    assert capsys.readouterr().out == "removed 3 versions; 2 versions left\n"
    assert main(["archive", "tag", place, "best", "--delete"]) == 0
    assert main(["archive", "tag", place, "best", "--delete"]) == 2
    assert "there is no tag 'best'" in capsys.readouterr().err
    assert main(["archive", "tag", place, "--delete"]) == 2
    assert "--delete takes the NAME of a tag" in capsys.readouterr().err
    assert main(["archive", "forget", place, "2"]) == 0
    assert main(["archive", "diff", place, "2", "5"]) == 2
    assert "no version 2; the newest is 5" in capsys.readouterr().err


def test_a_damaged_tag_is_taken_away(place: str) -> None:
    assert main(["archive", "tag", place, "best"]) == 0
    Path(place, "tags", "best").write_bytes(b"damaged")
    with pytest.warns(pmstore.ArchiveWarning, match="take it away with untag"):
        assert main(["archive", "tag", place, "best", "--delete"]) == 0
    assert main(["archive", "forget", place, "--keep-last", "1"]) == 0


def test_a_warning_is_shown_without_sources(place: str) -> None:
    main(["archive", "tag", place, "best"])
    (Path(place) / "tags" / "best").write_bytes(b"xx")
    shown = subprocess.run([sys.executable, "-m", "pmstore", "archive", "list", place], capture_output=True, text=True)
    (line,) = shown.stderr.splitlines()
    assert line.startswith("pmstore: ") and "best" in line and ".py" not in line and "epoch 4" in shown.stdout


def test_verify(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "verify", place]) == 0
    assert capsys.readouterr().out.startswith("sound: 5 versions")
    part = sorted(Path(place, "parts").iterdir())[0]
    part.write_bytes(b"x" + part.read_bytes()[1:])
    assert main(["archive", "verify", place, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["problems"][0]["versions"]


def test_drain_from_outside(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "drain", str(tmp_path / "copy"), str(tmp_path / "run.pm")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'copy'}: version 5\n"


@pytest.mark.parametrize("removed", [False, True])
def test_a_drain_that_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Another one begins, or the folder is emptied. The command ends while the store is still written."""
    begin, url = pmstore.Store.drain, tmp_path / "to"

    def drain(store: pmstore.Store, *arguments: Any, **options: Any) -> Any:
        made = begin(store, *arguments, **options)
        if removed:
            made.wait()
            shutil.rmtree(url / "writers")
        else:
            begin(writer, url).wait()
        writer["x"] = 2
        writer.commit()
        return made

    monkeypatch.setattr(pmstore.Store, "drain", drain)
    with ThreadPoolExecutor(1) as pool, pmstore.open(tmp_path / "store.pm") as writer:
        writer["x"] = 1
        writer.commit()
        with pytest.warns(
            pmstore.ArchiveWarning, match="the drain ended" if removed else "the drain stops: a later drain"
        ):
            ended = pool.submit(main, ["archive", "drain", str(url), str(tmp_path / "store.pm")])
            assert ended.result(timeout=60) == (1 if removed else 2)
    found = capsys.readouterr()
    assert (
        not found.out
        and ("was emptied or taken away" if removed else "a later drain or change by this process") in found.err
    )


def test_drain_with_codecs(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codecs are chosen by patterns, as in Store.drain."""
    given: list[Any] = []
    drain = pmstore.Store.drain

    def spy(store: pmstore.Store, *arguments: Any, **options: Any) -> Any:
        given.append(options["codec"])
        return drain(store, *arguments, **options)

    monkeypatch.setattr(pmstore.Store, "drain", spy)
    run = str(tmp_path / "run.pm")
    options = ["--codec", "zstd", "--codec", "w/*=lcdelta:bits=4,dtype=float64", "--codec", "b=zlib:level=1"]
    assert main(["archive", "drain", str(tmp_path / "copy"), run, *options]) == 0
    assert list(given.pop().items()) == [
        ("w/*", {"id": "pmstore.lcdelta", "bits": 4, "dtype": "float64"}),
        ("b", {"id": "zlib", "level": 1}),
        ("*", "zstd"),  # last, wherever it was given
    ]
    assert pmstore.archive.open(tmp_path / "copy").latest == 5
    capsys.readouterr()
    assert main(["archive", "drain", str(tmp_path / "no"), run, "--codec=none-such"]) == 2
    assert "the codec 'none-such' can't be used" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["archive", "drain", str(tmp_path / "no"), run, "--codec=zstd:level"])
    assert "a setting of a codec is KEY=VALUE, not 'level'" in capsys.readouterr().err


def test_export(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "export", place, str(tmp_path / "w.npz"), "--version", "3"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'w.npz'}: version 3, 1 name\n"
    assert np.load(tmp_path / "w.npz")["w"].sum() == 3 * 784


def test_there_is_no_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "list", str(tmp_path / "none")]) == 2
    assert "there is no archive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["archive"])
