"""repr, str and _repr_html_ of stores and groups: what they show, that it is bounded, that nothing breaks out of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _display
from pmstore._cli import main


class Fake:
    """A mapping with rows of our choice, as the two functions see a store."""

    path = "run.pm"
    media = "memory"
    mode = "a"
    closed = False
    openings = 1

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.asked = 0

    def __len__(self) -> int:
        return len(self.rows)

    def _rows(self) -> Iterator[Any]:
        for row in self.rows:
            self.asked += 1
            yield row


def array_row(name: str, shape: tuple[int, ...] = (3,), dtype: Any = "f8", nbytes: int = 24) -> Any:
    return (name, "array", shape, np.dtype(dtype), nbytes, "ndarray", "")


def test_a_tree_with_groups_shapes_dtypes_and_sizes() -> None:
    text = _display.tree_text(
        Fake(
            [
                ("epoch", "value", None, None, 1, "int", "12"),
                array_row("model/centers", (10, 784), np.dtype("f8"), 62720),
                array_row("model/deep/labels", (), np.dtype("i4"), 4),
                ("name", "value", None, None, 1536, "str", ""),
                ("notes", "list", (12,), None, 0, "list of 12", ""),
            ]
        )
    )
    assert text == (
        "<pmstore.Fake 'run.pm' (memory, mode a): 5 names>\n"
        "├─ epoch         int = 12           1 B\n"
        "├─ model/\n"
        "│  ├─ centers    (10, 784) float64  61.2 KiB\n"
        "│  └─ deep/\n"
        "│     └─ labels  () int32           4 B\n"
        "├─ name          str                1.5 KiB\n"
        "└─ notes         list of 12"
    )


@pytest.mark.parametrize("render", [_display.tree_text, _display.tree_html])
def test_it_is_bounded_and_says_how_many_more(render: Any) -> None:
    mapping = Fake([array_row(f"a{i:05}") for i in range(1294)])
    shown = render(mapping)
    assert "… and 1,234 more" in shown
    assert shown.count("a00") == 60
    assert mapping.asked == 60


def test_groups_count_against_the_bound_too() -> None:
    text = _display.tree_text(Fake([array_row(f"g{i:03}/x") for i in range(100)]))
    assert len(text.splitlines()) == 62
    assert text.endswith("… and 70 more")


def test_a_very_deep_name() -> None:
    text = _display.tree_text(Fake([array_row("/".join("x" * 380))]))
    assert len(text.splitlines()) == 62
    assert text.endswith("… and 1 more")


def test_names_can_neither_break_lines_nor_colour_terminals() -> None:
    text = _display.tree_text(Fake([array_row("two\nlines"), array_row("\x1b[31mred"), array_row("ünïcode-名前")]))
    assert len(text.splitlines()) == 4
    assert "\x1b" not in text
    assert "two\\nlines" in text
    assert "ünïcode-名前" in text


def test_long_names_and_dtypes_are_cut() -> None:
    dtype = np.dtype([(f"field{i}", "f8") for i in range(100)])
    line = _display.tree_text(Fake([array_row("n" * 700, dtype=dtype)])).splitlines()[1]
    assert len(line) < 130
    assert line.count("…") == 2


def test_html_is_escaped() -> None:
    mapping = Fake([array_row("<script>alert(1)</script>"), array_row("a&b", dtype=np.dtype([("<i>", "f8")]))])
    mapping.path = "<b>.pm"
    text = _display.tree_html(mapping)
    assert not re.search(r"<script|<i>|<b>\.pm", text)
    assert "&lt;script&gt;" in text
    assert "a&amp;b" in text


def test_an_empty_store() -> None:
    assert _display.tree_text(Fake([])) == "<pmstore.Fake 'run.pm' (memory, mode a): 0 names>"
    assert "<table" not in _display.tree_html(Fake([]))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (62720, "61.2 KiB"),
        (49 << 20, "49.0 MiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert _display.size_text(nbytes) == text


def test_a_store_that_cannot_be_read_still_has_a_repr() -> None:
    class Damaged(Fake):
        def _rows(self) -> Iterator[Any]:
            raise pmstore.CorruptStoreError("page 7 is <damaged>")

    assert _display.tree_text(Damaged([])) == "<pmstore.Damaged 'run.pm' (memory, mode a): page 7 is <damaged>>"
    assert "&lt;damaged&gt;" in _display.tree_html(Damaged([]))


def test_small_values_are_shown_and_long_ones_abbreviated(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store.update(
            {
                "a": 3,
                "b": "text\x1b\n",
                "c": np.float64(0.5),
                "d": {"tol": 1e-4, "k": [1, 2]},
                "e": "x" * 200,
                "f": 10**500,
                "g": b"large" * 1000,  # not read
                "h": np.str_("y"),
                "i": None,
                "j": [np.zeros((2, 2))],
            }
        )
        text, html = str(store), store._repr_html_()
        assert pmstore.open(store.path) is store and "mode a, open 2 times): 10 names" in repr(store)
        store.close()
        assert "times" not in repr(store)
    shown = [re.split(r"  +", line.partition(" = ")[2])[0] for line in text.splitlines()[1:]]
    assert shown[:4] == ["3", repr("text\x1b\n"), "0.5", "{'tol': 0.0001, 'k': [1, 2]}"]
    assert shown[4:6] == ["'" + "x" * 38 + "…", "1" + "0" * 38 + "…"] and shown[6:9] == ["", "'y'", "None"]
    assert shown[9].startswith("[array([[0., 0.],") and "&#x27;k&#x27;: [1, 2]" in html and "\x1b" not in text


def test_times_without_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """numpy gives no text of them."""
    path = tmp_path / "s.pm"
    with pmstore.open(path) as store:
        store.create_array("array", (2,), "M8")
        store["scalar"], store["dict"] = np.zeros(1, "M8")[0], {"t": np.zeros(1, "M8")}
        store.create_list("list").append(np.zeros(1, "M8")[0])
        store["other"] = 7
        assert "datetime64 with a time without a unit" in str(store) and "dict with a time without" in str(store)
    for command in (["ls", "-l"], ["dump"], ["dump", "--json"], ["watch", "--once", "--json"]):
        assert main([*command, str(path)]) == 0
        out, err = capsys.readouterr()
        assert "7" in out and not err and (command[0] == "ls" or "time without a unit" in out)


def test_values_that_another_thread_assigns_meanwhile(tmp_path: Path) -> None:
    """A row is of the value that there is when it is made. The old one's parts may be gone by then."""
    with pmstore.open(tmp_path / "a.pm") as store:
        for name in ("a", "b", "c"):
            store[name] = np.ma.masked_array([1.0, 2.0], [True, False])
        store.commit()
        rows = store._rows()
        found = [next(rows)]
        store["b"] = np.ma.masked_array([1.0, 2.0, 3.0], [True, False, False])
        del store["c"]
        store.commit()
        found += rows
    assert [row[:2] for row in found] == [("a", "object"), ("b", "object")]
    assert "(3,)" in found[1][-1]


def test_names_are_completed(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "run.pm") as store:
        store.update({"epoch": 1, "model/centers": np.zeros(3), "model/k": 3})
        assert store._ipython_key_completions_() == ["epoch", "model/centers", "model/k"]
        assert store.group("model")._ipython_key_completions_() == ["centers", "k"]
    assert store._ipython_key_completions_() == []


def test_real_stores_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "run.pm"
    with pmstore.open(path) as store:
        store["model/centers"] = np.zeros((10, 784))
        store["epoch"] = 3
        store.create_list("history").append(1.5)
        text, group = str(store), str(store.group("model"))
        assert repr(store) == text.splitlines()[0]
        assert repr(store.group("model")) == group.splitlines()[0]
        assert store._repr_html_().startswith("<div>")
        assert store.group("model")._repr_html_().count("<tr>") == 2
    assert text.splitlines()[0] == f"<pmstore.Store {str(path)!r} ({store.media}, mode a): 3 names>"
    assert "(10, 784) float64  61.2 KiB" in text
    assert "epoch" in text
    assert group.splitlines()[0].startswith("<pmstore.Group 'model' of ")
    assert len(group.splitlines()) == 2
    assert repr(store) == str(store) == f"<closed pmstore.Store {str(path)!r}>"
    assert "closed pmstore.Store" in store._repr_html_()


def test_a_generator_is_shown_without_its_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    says = "it's Generator(PCG64) at 0x7F"
    with pmstore.open(tmp_path / "store.pm") as store:
        store["rng"] = np.random.default_rng(0)
        store["all"] = [np.random.default_rng(1), says]
        store.attrs["rng"] = np.random.default_rng(2)
        assert "Generator = Generator(PCG64)  " in str(store)
        assert repr(store.attrs).endswith("{'rng': Generator(PCG64)}>")
    assert main(["dump", str(tmp_path / "store.pm")]) == 0
    assert capsys.readouterr().out == f"all = [Generator(PCG64), {says!r}]\nrng = Generator(PCG64)\n"
