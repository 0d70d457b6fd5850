"""benchmarks/scale_model.py, and the page that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks/ isn't here")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale_model

    yield scale_model
    del sys.modules["scale_model"]


def test_it_runs_and_the_same_seed_gives_the_same_numbers(model: ModuleType, tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        model.main(["--quick", "--json", str(tmp_path / name)])
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    numbers = json.loads(texts[0])
    assert [row["workers"] for row in numbers["rows"]] == list(model.WORKERS)
    for row in numbers["rows"]:
        lag, failures = row["stragglers"], row["failures"]
        assert row["tree"] < row["flat"]
        assert lag["asked again"] <= lag["plain"]
        assert 0 <= lag["duplicated"] < 0.01
        assert failures["shard again"]["0.3"] < failures["shard again"]["300"] < failures["job again"]


def test_a_tree_costs_its_levels(model: ModuleType) -> None:
    given = model.parsed(["--state", "0", "--message", "1", "--latency", "0"])
    assert model.flat(given, 100) == 200
    assert model.tree(given, 16) == (16, 2)  # four levels of two children, down and up
    assert model.tree(given, 1 << 16) == (64, 2)


def test_the_page_has_the_tables_of_the_kept_numbers(model: ModuleType) -> None:
    numbers = json.loads((BENCHMARKS / "raw" / model.RAW).read_text(encoding="utf-8"))
    page = (ROOT / "docs" / model.PAGE).read_text(encoding="utf-8")
    assert model.with_tables(page, model.tables(numbers)) == page
    assert (ROOT / "docs" / model.PICTURE).stat().st_size > 10_000
    with pytest.raises(SystemExit, match="has no"):
        model.with_tables("", model.tables(numbers))
