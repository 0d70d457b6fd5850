"""The benchmarks' machinery, on tiny sizes and made figures: no time is asserted."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ isn't here")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Their modules can be imported, and compile into a directory of the test's own."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PMSTORE_DOMAIN", "memory")  # as _common does, for good
    import _common

    monkeypatch.setattr(_common, "BUILD", tmp_path / "build")
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def commit_cell(medium: str, workload: str, who: str, times: list[float], safe: bool = True) -> dict[str, Any]:
    baselines = [1e-6] * len(times)
    return {"medium": medium, "workload": workload, "who": who, "safe": safe, "times": times, "baselines": baselines}


def made_results() -> dict[str, Any]:
    known = {"machine": "a machine", "priority": "normal priority", "versions": {"numpy": "2"}, "quick": False}
    guarantee = {"atomic": "yes", "torn": "no", "killed": "the last commit", "cut": "the last commit", "safe": True}
    commit = {
        **known,
        "file systems": {"memory": "tmpfs"},
        "guarantees": {"pmstore": guarantee, "LMDB, writemap": guarantee},
        "cells": [
            commit_cell("memory", "62,720 B", "pmstore", [1.5e-6, 1.7e-6, 1.6e-6]),
            commit_cell("memory", "8 B", "pmstore, with", [1e-6]),
            commit_cell("memory", "8 B", "LMDB, writemap", [2e-6]),
            commit_cell("memory", "8 B", "np.memmap, flush", [0.5e-6], safe=False),
        ],
        "skipped": [{"who": "ZODB, FileStorage", "where": "everywhere", "why": "No module named 'ZODB'"}],
    }
    slow = {"bytes_logged": 900, "bytes_home": 900, "bytes_direct": 0, "checkpoints": 1, "committed": 900}
    latency = {
        **known,
        "cells": [
            {
                "medium": "memory",
                "workload": "62,720 B",
                "kind": "latency",
                "times": [1e-6] * 999 + [5e-6],
                "baselines": [1e-6] * 1000,
                **slow,
            }
        ],
    }
    return {"commit": commit, "latency": latency}


def test_the_report_compares_what_was_measured_with_what_was_asked_for(benchmarks: None) -> None:
    import report

    text = report.sections(made_results())["targets"]
    assert "| memory | 62,720 B, pmstore: × baseline | ≤ 1.8 | 1.6 | yes |" in text
    assert "| memory | 8 B, through `with`: time | ≤ 1.5 µs | 1 µs | yes |" in text
    assert "| memory | 8 B, pmstore, with: ahead of LMDB, writemap | less | 1 against 2 | yes |" in text
    assert "| memory | 62,720 B: bytes written per byte | ≤ 1.05 | 2 | no |" in text
    assert "| memory | 62,720 B: p99.9 of 1,000 commits ÷ that of as many baselines | ≤ 2 | 1 | yes |" in text
    assert "| disk | 49 MB, pmstore: × baseline | ≤ 1.15 | not measured | — |" in text


def block(median: float, mean: float, readings: int) -> dict[str, Any]:
    reader = {"count": readings, "mixed": 1, "older": 0, "failed": 0, "seconds": 0.5, "used": 0.1, "error": ""}
    return {"median": median, "mean": mean, "readers": [reader] * 3 if readings else []}


def test_commits_beside_readers_are_compared_with_those_without_and_with_the_control(benchmarks: None) -> None:
    import report

    blocks = {
        "": [block(1e-3, 2e-3, 0), block(3e-3, 4e-3, 0)],
        "read": [block(1.1e-3, 3e-3, 40), block(3.3e-3, 6e-3, 60)],
        "read elsewhere": [block(1e-3, 3e-3, 50), block(3e-3, 6e-3, 50)],
    }
    blocks |= {"refresh": blocks["read"], "refresh elsewhere": blocks["read elsewhere"]}
    cell = {"medium": "memory", "workload": "1 MiB", "who": "pmstore", "blocks": blocks}
    competitor = {**cell, "who": "LMDB", "blocks": {name: blocks[name] for name in ("", "read", "read elsewhere")}}
    parts: dict[str, Any] = {part: [] for part in ("copies", "openings", "starving", "wakes")}
    known = {
        "machine": "a machine",
        "priority": "normal priority",
        "skipped": [],
        "commits": [cell, competitor],
        **parts,
    }
    told = report.sections({"readers": known})
    row = "2 ms | 2.2 ms | 1.10 (1.50) | 1.00 (1.50) | 1.10 (1.00) | 0.60 | 100 | 6 |"
    assert f"| memory, 1 MiB | LMDB | refresh, all of it | {row}" in told["readers-commits"]
    assert told["readers-commits"].count("| pmstore |") == 2 and told["readers-commits"].count("| LMDB |") == 1
    what = "1 MiB while three readers refresh, and read all of it at 100 Hz ÷ without readers"
    assert f"| memory | {what} | ≤ 1.05 | 1.1 | no |" in told["readers-targets"]


def test_documents_keep_the_figures_of_what_was_not_run_again(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import report

    monkeypatch.setattr(report, "HERE", tmp_path)
    document, results = tmp_path / "page.md", tmp_path / "results"
    document.write_text("<!-- bench:machine -->\n<!-- /bench:machine -->\n")
    results.mkdir()
    known = made_results()
    here = report.BENCHMARKS._replace(documents=[document], drawing="json.nothing")
    for name, machine in (("commit", "one machine"), ("latency", "another")):
        (results / f"{name}.json").write_text(json.dumps({**known[name], "machine": machine}))
        report.publish(here, results, docs=True)
        (results / f"{name}.json").unlink()
    assert "`bench_commit.py`, full form: one machine" in document.read_text()
    assert "`bench_latency.py`, full form: another" in document.read_text()


def test_the_report_says_what_was_skipped_and_what_is_not_durable(benchmarks: None) -> None:
    import report

    known = report.sections(made_results())
    assert "ZODB, FileStorage (everywhere): No module named 'ZODB'" in known["skipped"]
    assert "*np.memmap, flush* †" in known["memory"]
    assert "recovery" not in known  # it was not measured


def test_marked_places_are_filled_again_and_again(benchmarks: None) -> None:
    import report

    text = "a\n<!-- bench:one -->\nold\nlines\n<!-- /bench:one -->\nb <!-- bench:two -->\n<!-- /bench:two -->\n"
    once = report.fill(text, {"one": "new \\1"})
    assert once == "a\n<!-- bench:one -->\nnew \\1\n<!-- /bench:one -->\nb <!-- bench:two -->\n<!-- /bench:two -->\n"
    assert report.fill(once, {"one": "new \\1"}) == once


def test_every_marked_place_of_the_documents_has_a_section(benchmarks: None) -> None:
    import re

    import file_systems
    import report

    known = {*report.SECTIONS, *(f"picture-{name}" for name in report.PICTURES), file_systems.KEPT}
    for document in report.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        marked = re.findall(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench:\1 -->", text, flags=re.DOTALL)
        assert len(marked) == text.count("<!-- bench:") == text.count("<!-- /bench:")
        assert set(marked) <= known


@pytest.mark.long
@pytest.mark.no_sanitizer
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_cells_measure_and_read_back(
    benchmarks: None, tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_commit
    from _competitors import Memmap, NumpySave, renamed
    from _subjects import PmstoreWith

    monkeypatch.setattr(bench_commit, "ROWS", 16)
    limits = {"seconds": 0.0, "least": 2, "warm_up": 1}
    for number, kind in enumerate((PmstoreWith, NumpySave, renamed(NumpySave), Memmap)):
        for medium, parent in (("memory", tmpfs), ("disk", tmp_path)):
            directory = parent / f"{number}{medium}"
            for name in ("whole", "rows"):
                (directory / name).mkdir(parents=True)
            whole = bench_commit.whole(kind, directory / "whole", medium, 4096, limits)
            rows = bench_commit.some_rows(kind, directory / "rows", medium, 2, limits)
            for cell in (whole, rows):
                assert cell["verified"] and len(cell["times"]) == len(cell["baselines"]) == 2


@pytest.mark.long
@pytest.mark.no_sanitizer
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_as_many_baselines_as_commits(
    benchmarks: None, tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_latency

    monkeypatch.setattr(bench_latency, "ROWS", 16)
    monkeypatch.setattr(bench_latency, "BLOCK", 3)
    for medium, directory in (("memory", tmpfs), ("disk", tmp_path)):
        for cell, size in (
            (bench_latency.series(directory, medium, 4096, 12), 4096),
            (bench_latency.row_series(directory, medium, 12), bench_latency.ROW_BYTES),
        ):
            assert len(cell["times"]) == len(cell["baselines"]) == 12
            assert cell["committed"] == 12 * size
            assert cell.get("sent for", 6 * size) == 6 * size  # the first half has growth


@pytest.mark.long
@pytest.mark.no_sanitizer
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_does_not_store_is_noticed(benchmarks: None, tmp_path: Path) -> None:
    import bench_commit
    from _competitors import NumpySave

    class Forgets(NumpySave):
        puts = 0

        def put(self) -> None:
            self.puts += 1
            if self.puts < 3:
                super().put()

    with pytest.raises(bench_commit.Different):
        bench_commit.whole(Forgets, tmp_path, "disk", 4096, {"seconds": 0.0, "least": 2, "warm_up": 1})


@pytest.mark.long
@pytest.mark.no_sanitizer
def test_readers_read_what_the_blocks_commit(benchmarks: None, tmpfs: Path) -> None:
    import bench_readers
    from _readers import PmstoreBeside, made

    one, other = (made(PmstoreBeside, tmpfs / name, "memory", 4096) for name in "ab")
    reader = PmstoreBeside.reader(one.path)
    known = bench_readers.turns(one, other, 0.0, 2)
    reader.refresh()
    assert known["count"] == reader.first_element() == 2 and (reader.read() == 2).all()
    assert known["median"] == known["mean"] <= known["longest"]
    for opened in (reader, one, other):
        opened.close()


@pytest.mark.long
@pytest.mark.no_sanitizer
def test_aggregates_take_turns_with_files(benchmarks: None, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_aggregate
    import report

    monkeypatch.setattr(bench_aggregate, "SHARDS", {8: 2048})
    monkeypatch.setattr(bench_aggregate, "real_time", lambda: "normal priority")
    cell = bench_aggregate.cell(tmpfs, "disk", 8, 3)
    assert [cell[way]["files"] for way in bench_aggregate.WAYS] == [8, 8, 2, 1]
    assert all(len(cell[way][what]) == 3 for way in bench_aggregate.WAYS for what in ("write", "read"))
    cell |= {"shards": 1024} | {
        way: cell[way] | {"write": [time] * 3} for way, time in zip(bench_aggregate.WAYS, (4, 60, 2, 1))
    }
    told = report.sections({"aggregate": {"cells": [cell], "machine": "", "priority": ""}})
    assert "| disk, 1,024 × 2 KiB | 1 | 0 | 1 | 2 | 2.0 | 30.0 | 0.5 | 8 → 2 |" in told["aggregate-write"]
    what = "1,024 shards of 2 KiB"
    assert f"| disk | {what}: plain files ÷ aggregate | ≥ 30 | 2.0 | no |" in told["aggregate-targets"]
    assert f"| disk | {what}: whole files ÷ aggregate | ≥ 30 | 30.0 | yes |" in told["aggregate-targets"]


@pytest.mark.long
def test_the_archive_takes_turns_with_none(benchmarks: None, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_archive
    import report

    pytest.importorskip("numcodecs")
    monkeypatch.setattr(bench_archive, "icechunk", lambda *_: 2.0)
    cell: dict[str, Any] = {"medium": "memory"}
    for name in bench_archive.MEASURES:
        (tmpfs / name).mkdir()
        cell[name] = getattr(bench_archive, name)(tmpfs / name, True)
    assert len(cell["fits"]["with"]) == len(cell["mixtures"]["without"]) == len(cell["versions"]["captured"]) == 1
    told = report.sections({"archive": {"cells": [cell], "machine": "", "priority": ""}})
    assert "Icechunk" in told["archive-reading"] and "a fit of KMeans" in told["archive-drains"]
    assert "restoring ÷ copying the bytes" in told["archive-targets"]


def test_lossy_histories(benchmarks: None, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_lcdelta
    import report

    pytest.importorskip("numcodecs")
    monkeypatch.setattr(bench_lcdelta, "VERSIONS", 3)
    monkeypatch.setattr(bench_lcdelta, "STEPS", 2)
    monkeypatch.setattr(bench_lcdelta, "HIDDEN", (40, 30))
    X, y = bench_lcdelta.loaded("cancer")
    assert X.shape == (569, 30) and (X.std(0) > 0.9).all()
    model = bench_lcdelta.Perceptron(X, y, 0)
    versions = bench_lcdelta.history(model)
    found = bench_lcdelta.measured(tmpfs, model, versions)
    ways = found["ways"]
    exact = [way for way, told in ways.items() if not told["relative error"]]
    assert exact == ["shuffle and zstd", "the archive's default, lossless differences"]
    assert all(ways[way]["accuracy"] == found["committed"] for way in exact)
    assert ways["LCDelta, 2 bits"]["relative error"] > ways["LCDelta, 4 bits"]["relative error"] > 0
    codec, numpy = ways["LCDelta, 3 bits"], found["choices"]["one table, mean, zstd, with the zeros before it"]
    assert codec["relative error"] == pytest.approx(numpy["relative error"], rel=1e-4), "the codec is another one"
    raw = {
        "sets": {"cancer": {"rows": 569, "features": 30, "bytes": 1, "seeds": [found]}},
        "throughput": bench_lcdelta.throughput(True),
        "machine": "",
        "priority": "",
    }
    told = report.sections({"lcdelta": raw})
    assert "| cancer | bytes at 3 bits, the worst seed | ≥ 28 × |" in told["lcdelta-targets"]
    assert "one table, mean, Huffman" in told["lcdelta-choices"] and "bfloat16" in told["lcdelta-speed"]
    assert "without feedback" in told["lcdelta-sets"]
